//! Control messages, as the kernel lays them out.

use std::mem::size_of;

use socket2::SockAddr;

/// Space for the control messages (traffic class and segment size) of a message, words.
pub(crate) const SEND_CONTROL_WORDS: usize = 8;

/// Iterates over control messages as the kernel lays them out: length (a word, header included), level, type, value,
/// padding.
#[inline]
pub(crate) fn control_messages(mut rest: &[u8]) -> impl Iterator<Item = (i32, i32, &[u8])> {
    const HEADER: usize = size_of::<libc::cmsghdr>();
    std::iter::from_fn(move || {
        let len = usize::from_ne_bytes(*rest.first_chunk()?);
        let header = rest.get(..HEADER)?;
        let level = i32::from_ne_bytes(*header[HEADER - 8..].first_chunk()?);
        let kind = i32::from_ne_bytes(*header[HEADER - 4..].first_chunk()?);
        let value = rest.get(HEADER..len)?;
        rest = rest.get(len.next_multiple_of(size_of::<usize>())..).unwrap_or(&[]);
        Some((level, kind, value))
    })
}

/// Writes the control messages of a message to `to`; returns their length in bytes.
pub(crate) fn write_control(
    words: &mut [u64; SEND_CONTROL_WORDS],
    to: &SockAddr,
    segment: Option<u16>,
    traffic_class: u8,
) -> usize {
    let mut at = 0;
    let mut put = |level: i32, kind: i32, value: u64, len: u64| {
        words[at] = size_of::<libc::cmsghdr>() as u64 + len;
        words[at + 1] = pair(level, kind);
        words[at + 2] = value;
        at += 3;
    };
    if traffic_class != 0 {
        let (level, kind) =
            if to.is_ipv4() { (libc::IPPROTO_IP, libc::IP_TOS) } else { (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) };
        put(level, kind, pair(i32::from(traffic_class), 0), 4);
    }
    if let Some(segment) = segment {
        let [a, b] = segment.to_ne_bytes();
        put(libc::SOL_UDP, libc::UDP_SEGMENT, u64::from_ne_bytes([a, b, 0, 0, 0, 0, 0, 0]), 2);
    }
    at * size_of::<u64>()
}

/// Two ints next to each other in memory.
fn pair(first: i32, second: i32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

// The control messages above are laid out for machines whose words are 64 bits.
const _: () = assert!(size_of::<usize>() == 8 && size_of::<libc::cmsghdr>() == 16);

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn control_messages_survive_truncation() {
        let to = SockAddr::from(SocketAddr::from(([127, 0, 0, 1], 1)));
        let mut words = [0; SEND_CONTROL_WORDS];
        let len = write_control(&mut words, &to, Some(1400), 0xb9);
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let all: Vec<_> = control_messages(&bytes[..len]).collect();
        assert_eq!(all.len(), 2);
        assert_eq!(all[0], (libc::IPPROTO_IP, libc::IP_TOS, &0xb9i32.to_ne_bytes()[..]));
        assert_eq!(all[1], (libc::SOL_UDP, libc::UDP_SEGMENT, &1400u16.to_ne_bytes()[..]));
        for end in 0..len {
            assert!(control_messages(&bytes[..end]).count() <= 2);
        }
        assert_eq!(control_messages(&[0xff; 64]).count(), 0, "absurd length");
        assert_eq!(control_messages(&[0; 64]).count(), 0, "length below the header");
    }
}
