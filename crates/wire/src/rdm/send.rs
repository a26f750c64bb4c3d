//! The header at the beginning of each SEND (RDM §3.1).

use super::{MAX_EAGER, MAX_MESSAGE, MessageId, Refusal, UNIT, VERSION, first_byte, long, word};

/// Kind of a SEND.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SendKind {
    /// A unit of a short message.
    Eager = 1,
    /// A unit of a long message that was lost as part of a WRITE.
    Repair = 2,
    /// The request for a grant: length and class of a long message. No payload.
    Announce = 3,
}

/// Class of a message (RDM §5.4, §5.8).
#[repr(u8)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Class {
    /// A message.
    #[default]
    Message = 0,
    /// A request that wants a response with the same number.
    Request = 1,
    /// The response to a request.
    Response = 2,
    /// A response that reports a failure: UTF-8 text with the reason.
    Failure = 3,
    /// Bytes to write into a region of the receiver's memory, behind an [`Access`](super::Access).
    Write = 4,
    /// An [`Access`](super::Access) that reads from a region of the receiver's memory; the response carries the bytes.
    Read = 5,
}

/// The header of a SEND.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SendHeader {
    /// Kind of the SEND.
    pub kind: SendKind,
    /// The last SEND that the sender's window allows: acknowledge at once.
    pub hint: bool,
    /// Class of the message.
    pub class: Class,
    /// The message.
    pub message: MessageId,
    /// The number of this SEND, unique in its connection and direction.
    pub global: u64,
    /// Length of the whole message, bytes.
    pub length: u32,
    /// Offset of the payload in the message, bytes; a multiple of [`UNIT`].
    pub offset: u32,
    /// Number of the call; unused in plain messages.
    pub call: u32,
}

impl SendHeader {
    /// Length of the header, bytes.
    pub const LEN: usize = 28;

    /// The header.
    #[must_use]
    #[inline]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = first_byte(self.kind as u8);
        out[1] = u8::from(self.hint) << 7 | self.class as u8;
        out[4..8].copy_from_slice(&self.message.0.to_be_bytes());
        out[8..16].copy_from_slice(&self.global.to_be_bytes());
        out[16..20].copy_from_slice(&self.length.to_be_bytes());
        out[20..24].copy_from_slice(&self.offset.to_be_bytes());
        out[24..28].copy_from_slice(&self.call.to_be_bytes());
        out
    }

    /// Parses the header at the beginning of a SEND of `total` bytes, header included. A parsed header satisfies RDM
    /// §3.1: the offset is that of a unit of the message, and the payload is that unit.
    ///
    /// # Errors
    /// A [`Refusal`].
    #[inline]
    pub fn parse(bytes: &[u8], total: usize) -> Result<Self, Refusal> {
        let bytes = bytes.first_chunk::<{ Self::LEN }>().ok_or(Refusal::Length)?;
        let payload = total.checked_sub(Self::LEN).ok_or(Refusal::Length)?;
        if bytes[0] >> 4 != VERSION {
            return Err(Refusal::Version);
        }
        let (kind, lengths) = match bytes[0] & 0x0f {
            1 => (SendKind::Eager, 0..=MAX_EAGER),
            2 => (SendKind::Repair, 1..=MAX_MESSAGE),
            3 => (SendKind::Announce, 1..=MAX_MESSAGE),
            _ => return Err(Refusal::Kind),
        };
        let class = match bytes[1] & 0x0f {
            0 => Class::Message,
            1 => Class::Request,
            2 => Class::Response,
            3 => Class::Failure,
            4 => Class::Write,
            5 => Class::Read,
            _ => return Err(Refusal::Class),
        };
        let header = Self {
            kind,
            hint: bytes[1] & 0x80 != 0,
            class,
            message: MessageId(word(bytes, 4)),
            global: long(bytes, 8),
            length: word(bytes, 16),
            offset: word(bytes, 20),
            call: word(bytes, 24),
        };
        if !lengths.contains(&header.length) {
            return Err(Refusal::MessageLength);
        }
        let inside = header.offset < header.length || header.offset == 0;
        if !header.offset.is_multiple_of(UNIT) || !inside || kind == SendKind::Announce && header.offset != 0 {
            return Err(Refusal::Offset);
        }
        let expected = if kind == SendKind::Announce { 0 } else { header.payload_len() };
        if payload != expected as usize {
            return Err(Refusal::Payload);
        }
        Ok(header)
    }

    /// Length of the unit at `offset`, bytes.
    #[must_use]
    pub const fn payload_len(&self) -> u32 {
        let left = self.length - self.offset;
        if left < UNIT { left } else { UNIT }
    }
}
