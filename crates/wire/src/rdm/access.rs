//! The header of a message that accesses the peer's memory (RDM §3.8).

use super::{Class, Refusal, long, word};

/// An access to a region of the peer's memory: the bytes to read or write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Access {
    /// The region's key.
    pub key: u64,
    /// Offset in the region, bytes.
    pub offset: u64,
    /// Length, bytes.
    pub length: u32,
}

impl Access {
    /// Length of the header, bytes.
    pub const LEN: usize = 24;

    /// The header.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..8].copy_from_slice(&self.key.to_be_bytes());
        out[8..16].copy_from_slice(&self.offset.to_be_bytes());
        out[16..20].copy_from_slice(&self.length.to_be_bytes());
        out
    }

    /// Parses a message of class [`Class::Write`] or [`Class::Read`] into the access and the data to write.
    ///
    /// # Errors
    /// A [`Refusal`]: the message is shorter than the header, a reserved bit is set, the length of the data differs
    /// from the header's, or the class is another.
    pub fn parse(class: Class, message: &[u8]) -> Result<(Self, &[u8]), Refusal> {
        let (head, data) = message.split_first_chunk::<{ Self::LEN }>().ok_or(Refusal::Length)?;
        if word(head, 20) != 0 {
            return Err(Refusal::Value);
        }
        let access = Self { key: long(head, 0), offset: long(head, 8), length: word(head, 16) };
        let expected = match class {
            Class::Write => access.length as usize,
            Class::Read => 0,
            _ => return Err(Refusal::Class),
        };
        if data.len() == expected { Ok((access, data)) } else { Err(Refusal::Payload) }
    }
}
