//! Messages of the control channel: 128 bytes each, in the machine's byte order.

use thiserror::Error;

/// Length of a message, bytes.
pub(super) const LEN: usize = 128;
/// Version 2.0.
pub(super) const VERSION: u16 = 2 << 8;
/// Packets are Ethernet frames.
const MODE_ETHERNET: u8 = 0;
/// In `AddRing`: the ring is a C2S one.
const C2S: u16 = 1;

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    Ack,
    Hello { name: String, min_version: u16, max_version: u16, limits: Limits },
    Init { version: u16, id: u32, name: String },
    AddRegion { index: u16, bytes: u64 },
    AddRing(AddRing),
    Connect { name: String },
    Connected { name: String },
    Disconnect { code: u32, text: String },
}

/// The limits that a server offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Limits {
    pub(super) region: u16,
    pub(super) s2c_ring: u16,
    pub(super) c2s_ring: u16,
    pub(super) log2_entries: u8,
}

/// A ring in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddRing {
    pub(super) c2s: bool,
    pub(super) index: u16,
    pub(super) region: u16,
    pub(super) offset: u32,
    pub(super) log2_entries: u8,
    /// Private bytes in front of each packet; only 0 is supported.
    pub(super) private: u16,
}

/// A message that cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ProtocolError {
    /// Not 128 bytes.
    #[error("a message of {0} bytes; memif messages have {LEN}")]
    Length(usize),
    /// Unknown type.
    #[error("a message of type {0}, which version 2.0 does not have")]
    Type(u16),
    /// An interface that does not carry Ethernet frames.
    #[error("an interface of mode {0}; only 0, Ethernet, is supported")]
    Mode(u8),
}

/// Reads consecutive fields.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let (first, rest) = self.0.split_first_chunk().map_or(([0; N], &[][..]), |(first, rest)| (*first, rest));
        self.0 = rest;
        first
    }

    fn u8(&mut self) -> u8 {
        u8::from_ne_bytes(self.take())
    }

    fn u16(&mut self) -> u16 {
        u16::from_ne_bytes(self.take())
    }

    fn u32(&mut self) -> u32 {
        u32::from_ne_bytes(self.take())
    }

    fn text<const N: usize>(&mut self) -> String {
        let bytes: [u8; N] = self.take();
        let end = bytes.iter().position(|b| *b == 0).unwrap_or(N);
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}

/// Writes consecutive fields.
struct Writer {
    bytes: [u8; LEN],
    at: usize,
}

impl Writer {
    fn new(kind: u16) -> Self {
        Writer { bytes: [0; LEN], at: 0 }.put(&kind.to_ne_bytes())
    }

    fn put(mut self, field: &[u8]) -> Self {
        if let Some(room) = self.bytes.get_mut(self.at..self.at + field.len()) {
            room.copy_from_slice(field);
            self.at += field.len();
        }
        self
    }

    fn text<const N: usize>(self, text: &str) -> Self {
        let mut field = [0; N];
        // The last byte terminates the text.
        let len = text.len().min(N - 1);
        field[..len].copy_from_slice(&text.as_bytes()[..len]);
        self.put(&field)
    }
}

impl Message {
    /// Parses a message.
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, ProtocolError> {
        if bytes.len() != LEN {
            return Err(ProtocolError::Length(bytes.len()));
        }
        let mut f = Fields(bytes);
        Ok(match f.u16() {
            1 => Message::Ack,
            2 => Message::Hello {
                name: f.text::<32>(),
                min_version: f.u16(),
                max_version: f.u16(),
                limits: Limits { region: f.u16(), s2c_ring: f.u16(), c2s_ring: f.u16(), log2_entries: f.u8() },
            },
            3 => {
                let (version, id, mode) = (f.u16(), f.u32(), f.u8());
                if mode != MODE_ETHERNET {
                    return Err(ProtocolError::Mode(mode));
                }
                let _secret: [u8; 24] = f.take();
                Message::Init { version, id, name: f.text::<32>() }
            }
            4 => Message::AddRegion { index: f.u16(), bytes: u64::from_ne_bytes(f.take()) },
            5 => Message::AddRing(AddRing {
                c2s: f.u16() & C2S != 0,
                index: f.u16(),
                region: f.u16(),
                offset: f.u32(),
                log2_entries: f.u8(),
                private: f.u16(),
            }),
            6 => Message::Connect { name: f.text::<32>() },
            7 => Message::Connected { name: f.text::<32>() },
            8 => Message::Disconnect { code: f.u32(), text: f.text::<96>() },
            kind => return Err(ProtocolError::Type(kind)),
        })
    }

    /// The bytes of a message.
    pub(super) fn emit(&self) -> [u8; LEN] {
        let writer = match self {
            Message::Ack => Writer::new(1),
            Message::Hello { name, min_version, max_version, limits } => Writer::new(2)
                .text::<32>(name)
                .put(&min_version.to_ne_bytes())
                .put(&max_version.to_ne_bytes())
                .put(&limits.region.to_ne_bytes())
                .put(&limits.s2c_ring.to_ne_bytes())
                .put(&limits.c2s_ring.to_ne_bytes())
                .put(&[limits.log2_entries]),
            Message::Init { version, id, name } => Writer::new(3)
                .put(&version.to_ne_bytes())
                .put(&id.to_ne_bytes())
                .put(&[MODE_ETHERNET])
                .put(&[0; 24])
                .text::<32>(name),
            Message::AddRegion { index, bytes } => Writer::new(4).put(&index.to_ne_bytes()).put(&bytes.to_ne_bytes()),
            Message::AddRing(ring) => Writer::new(5)
                .put(&(if ring.c2s { C2S } else { 0 }).to_ne_bytes())
                .put(&ring.index.to_ne_bytes())
                .put(&ring.region.to_ne_bytes())
                .put(&ring.offset.to_ne_bytes())
                .put(&[ring.log2_entries])
                .put(&ring.private.to_ne_bytes()),
            Message::Connect { name } => Writer::new(6).text::<32>(name),
            Message::Connected { name } => Writer::new(7).text::<32>(name),
            Message::Disconnect { code, text } => Writer::new(8).put(&code.to_ne_bytes()).text::<96>(text),
        };
        writer.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive() {
        let name = || "an interface".to_owned();
        let limits = Limits { region: 1, s2c_ring: 2, c2s_ring: 3, log2_entries: 14 };
        for message in [
            Message::Ack,
            Message::Hello { name: name(), min_version: VERSION, max_version: VERSION, limits },
            Message::Init { version: VERSION, id: 7, name: name() },
            Message::AddRegion { index: 1, bytes: 1 << 40 },
            Message::AddRing(AddRing { c2s: true, index: 1, region: 2, offset: 3, log2_entries: 4, private: 5 }),
            Message::AddRing(AddRing { c2s: false, index: 1, region: 2, offset: 3, log2_entries: 4, private: 5 }),
            Message::Connect { name: name() },
            Message::Connected { name: name() },
            Message::Disconnect { code: 3, text: name() },
        ] {
            assert_eq!(Message::parse(&message.emit()), Ok(message));
        }
    }

    #[test]
    fn layout() {
        // As libmemif encodes it: type, flags, index, region, offset, log2 of the size, private bytes; packed.
        let ring = AddRing { c2s: true, index: 2, region: 3, offset: 0x1020_3040, log2_entries: 10, private: 0 };
        let mut expected = vec![5, 0, 1, 0, 2, 0, 3, 0, 0x40, 0x30, 0x20, 0x10, 10, 0, 0];
        expected.resize(LEN, 0);
        if cfg!(target_endian = "little") {
            assert_eq!(Message::AddRing(ring).emit()[..], expected);
        }
    }

    #[test]
    fn refused() {
        assert_eq!(Message::parse(&[0; 5]), Err(ProtocolError::Length(5)));
        assert_eq!(Message::parse(&[0; LEN]), Err(ProtocolError::Type(0)));
        let mut init = Message::Init { version: VERSION, id: 0, name: String::new() }.emit();
        init[8] = 1;
        assert_eq!(Message::parse(&init), Err(ProtocolError::Mode(1)));
        // Text without a terminator, and not UTF-8.
        let mut name = [0xff; LEN];
        name[..2].copy_from_slice(&6u16.to_ne_bytes());
        assert!(matches!(Message::parse(&name), Ok(Message::Connect { .. })));
    }
}
