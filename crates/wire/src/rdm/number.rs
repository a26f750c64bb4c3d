//! Message numbers, and the immediate data of a WRITE (RDM §2.2, §3.2).

use super::UNIT;

/// The number of a message in its direction of a connection; wraps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct MessageId(pub u32);

impl MessageId {
    /// The number `count` later.
    #[must_use]
    pub const fn plus(self, count: u32) -> Self {
        Self(self.0.wrapping_add(count))
    }

    /// Messages from `earlier` to here; negative if `earlier` is later.
    #[must_use]
    pub const fn distance(self, earlier: Self) -> i32 {
        self.0.wrapping_sub(earlier.0) as i32
    }
}

/// The immediate data of a WRITE: which chunk of which message has arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Immediate {
    /// The last chunk that the sender's window allows: acknowledge at once.
    pub hint: bool,
    /// The low 15 bits of the message's number.
    message: u16,
    /// Offset of the chunk, units.
    pub unit: u16,
}

impl Immediate {
    const MESSAGE_MASK: u16 = 0x7fff;

    /// The immediate data of the chunk of `message` that starts at `offset` bytes, a multiple of [`UNIT`].
    #[must_use]
    pub const fn new(message: MessageId, offset: u32, hint: bool) -> Self {
        Self { hint, message: message.0 as u16 & Self::MESSAGE_MASK, unit: (offset / UNIT) as u16 }
    }

    /// The 32 bits: hint 1, message 15, unit 16.
    #[must_use]
    pub const fn bits(self) -> u32 {
        (self.hint as u32) << 31 | (self.message as u32) << 16 | self.unit as u32
    }

    /// Decodes 32 bits.
    #[must_use]
    pub const fn from_bits(bits: u32) -> Self {
        Self { hint: bits >> 31 != 0, message: (bits >> 16) as u16 & Self::MESSAGE_MASK, unit: bits as u16 }
    }

    /// Identifies the chunk in an ACK: the immediate data without the hint.
    #[must_use]
    pub const fn name(self) -> u32 {
        self.bits() & 0x7fff_ffff
    }

    /// The full message number: the candidate that is nearest to `base`.
    #[must_use]
    pub const fn message(self, base: MessageId) -> MessageId {
        // Sign-extended from 15 bits: half of the range is before `base`.
        let ahead = (self.message.wrapping_sub(base.0 as u16) << 1) as i16 >> 1;
        MessageId(base.0.wrapping_add(ahead as u32))
    }

    /// Offset of the chunk, bytes.
    #[must_use]
    pub const fn offset(self) -> u32 {
        self.unit as u32 * UNIT
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_numbers_are_resolved_around_the_base() {
        for base in [0u32, 5, 0x7fff, 0x8000, 0x1234_5678, u32::MAX] {
            for ahead in [0i32, 1, 1023, 0x3fff, -1, -0x4000] {
                let message = MessageId(base.wrapping_add(ahead as u32));
                let immediate = Immediate::new(message, 3 * UNIT, ahead % 2 == 0);
                let read = Immediate::from_bits(immediate.bits());
                assert_eq!(read, immediate);
                assert_eq!((read.message(MessageId(base)), read.offset()), (message, 3 * UNIT), "{base} {ahead}");
                assert_eq!(read.name(), Immediate::new(message, 3 * UNIT, false).bits());
            }
        }
    }
}
