//! Messages between the two ends of a connection, which begin with 24 bytes (RDM §13).

/// Length of the header, bytes.
pub(crate) const HEADER: usize = 24;
/// Length of an announced receive, bytes.
const WANTED: usize = 16;
/// Maximum number of receives in a group.
pub(crate) const GROUP_MAX: usize = 8;
/// Maximum length of a send, bytes.
pub(crate) const SIZE_MAX: u64 = 1 << 40;
/// Maximum data of a message, bytes: longer sends are split.
pub(crate) const PIECE: usize = 1 << 20;

const VERSION: u8 = 1;
const HELLO: u8 = 1;
const RECEIVE: u8 = 2;
const DATA: u8 = 3;

/// A receive that is announced to the other end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    pub(crate) tag: i32,
    /// Length of its buffer, bytes.
    pub(crate) size: u64,
}

/// Receives that were posted together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) number: u32,
    pub(crate) count: u8,
    pub(crate) wanted: [Wanted; GROUP_MAX],
}

/// A part of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Data<'a> {
    pub(crate) group: u32,
    pub(crate) index: u8,
    pub(crate) offset: u64,
    /// Length of the whole send, bytes.
    pub(crate) total: u64,
    pub(crate) bytes: &'a [u8],
}

/// A message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    /// The first message, from the connecting end. The listening end chose the number.
    Hello { nonce: u64 },
    /// Announces receives.
    Receive(Group),
    /// A part of a send.
    Data(Data<'a>),
}

/// The first message of the connecting end.
pub(crate) fn hello(nonce: u64) -> [u8; HEADER] {
    header(HELLO, 0, 0, nonce, 0)
}

/// The header of a part; the data follows.
pub(crate) fn data(group: u32, index: u8, offset: u64, total: u64) -> [u8; HEADER] {
    header(DATA, index, group, offset, total)
}

/// Writes an announcement of receives.
pub(crate) fn receive(group: &Group, out: &mut [u8]) {
    out[..HEADER].copy_from_slice(&header(RECEIVE, group.count, group.number, 0, 0));
    for (wanted, out) in group.wanted.iter().zip(out[HEADER..].chunks_exact_mut(WANTED)) {
        out[..4].copy_from_slice(&wanted.tag.to_be_bytes());
        out[4..8].fill(0);
        out[8..].copy_from_slice(&wanted.size.to_be_bytes());
    }
}

/// Length of an announcement of `count` receives, bytes.
pub(crate) fn receive_len(count: u8) -> usize {
    HEADER + usize::from(count) * WANTED
}

fn header(kind: u8, count: u8, group: u32, first: u64, second: u64) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    out[..4].copy_from_slice(&[kind, VERSION, count, 0]);
    out[4..8].copy_from_slice(&group.to_be_bytes());
    out[8..16].copy_from_slice(&first.to_be_bytes());
    out[16..].copy_from_slice(&second.to_be_bytes());
    out
}

impl<'a> Frame<'a> {
    /// Parses a message; `None`: it is invalid.
    pub(crate) fn parse(message: &'a [u8]) -> Option<Self> {
        let (header, rest) = message.split_first_chunk::<HEADER>()?;
        let [kind, version, count, zero, ..] = *header;
        let number = |at: usize| Some(u64::from_be_bytes(*header[at..].first_chunk()?));
        let group = u32::from_be_bytes(*header[4..].first_chunk()?);
        let (first, second) = (number(8)?, number(16)?);
        if version != VERSION || zero != 0 {
            return None;
        }
        match kind {
            HELLO if rest.is_empty() => Some(Self::Hello { nonce: first }),
            RECEIVE => {
                let fits = (1..=GROUP_MAX).contains(&usize::from(count)) && message.len() == receive_len(count);
                let mut wanted = [Wanted::default(); GROUP_MAX];
                for (wanted, bytes) in wanted.iter_mut().zip(rest.chunks_exact(WANTED)) {
                    let size = u64::from_be_bytes(*bytes[8..].first_chunk()?);
                    *wanted = Wanted { tag: i32::from_be_bytes(*bytes.first_chunk()?), size: size.min(SIZE_MAX) };
                }
                fits.then_some(Self::Receive(Group { number: group, count, wanted }))
            }
            DATA => Some(Self::Data(Data { group, index: count, offset: first, total: second, bytes: rest })),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_bytes_are_as_specified() {
        let page = include_str!("../../../docs/RDM.md");
        let examples: Vec<&str> = page.split("\n13.6 ").nth(1).unwrap().lines().skip(2).map(str::trim).collect();
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(hex(&hello(0x1122_3344_5566_7788)), examples[0]);
        assert_eq!(hex(&data(7, 2, 1 << 20, 3 << 19)), examples[1]);
        let mut group = Group { number: 7, count: 2, ..Group::default() };
        group.wanted[0] = Wanted { tag: -1, size: 0 };
        group.wanted[1] = Wanted { tag: 5, size: 8 << 20 };
        let mut out = vec![0xee; receive_len(2)];
        receive(&group, &mut out);
        assert_eq!(hex(&out), examples[2]);
        assert_eq!(Frame::parse(&out), Some(Frame::Receive(group)));
    }

    #[test]
    fn invalid_messages_are_refused() {
        let mut out = vec![0; receive_len(1)];
        receive(&Group { count: 1, ..Group::default() }, &mut out);
        assert!(Frame::parse(&out).is_some());
        for (at, value) in [(0, 0), (0, 4), (1, 0), (1, 2), (2, 0), (2, 2), (2, 9), (3, 1)] {
            let mut wrong = out.clone();
            wrong[at] = value;
            assert_eq!(Frame::parse(&wrong), None, "{at} {value}");
        }
        assert_eq!(Frame::parse(&out[..out.len() - 1]), None);
        assert_eq!(Frame::parse(&[&hello(1)[..], &[0]].concat()), None);
        assert_eq!(Frame::parse(&[]), None);
    }

    proptest! {
        #[test]
        fn nothing_makes_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = Frame::parse(&bytes);
        }
    }
}
