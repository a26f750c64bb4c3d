//! Numbers that NCCL gets instead of pointers.

/// The kind of object that a number identifies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Listen = 1,
    Send = 2,
    Receive = 3,
    Request = 4,
    Memory = 5,
    Context = 6,
    Connecting = 7,
}

/// An object's identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token {
    pub(crate) kind: Kind,
    /// The worker, below 4096.
    pub(crate) hub: u16,
    /// Number of a listener or connection of the worker; 28 bits.
    pub(crate) id: u32,
    /// Of a request: its slot, and the slot's generation, 12 bits.
    pub(crate) slot: u8,
    pub(crate) generation: u16,
}

/// Masks of numbers that wrap.
pub(crate) const ID_MASK: u32 = (1 << 28) - 1;
pub(crate) const GENERATION_MASK: u16 = (1 << 12) - 1;

impl Token {
    pub(crate) fn new(kind: Kind, hub: u16, id: u32) -> Self {
        Self { kind, hub, id, slot: 0, generation: 0 }
    }

    /// Encodes as a number, which is never 0.
    pub(crate) fn number(self) -> u64 {
        (self.kind as u64) << 60
            | u64::from(self.hub & 0xfff) << 48
            | u64::from(self.id & ID_MASK) << 20
            | u64::from(self.generation & GENERATION_MASK) << 8
            | u64::from(self.slot)
    }

    /// Decodes a number, if it is of one of these kinds. The object need not exist.
    pub(crate) fn of(number: u64, kinds: &[Kind]) -> Option<Self> {
        let kind = *kinds.iter().find(|kind| **kind as u64 == number >> 60)?;
        Some(Self {
            kind,
            hub: (number >> 48 & 0xfff) as u16,
            id: (number >> 20) as u32 & ID_MASK,
            generation: (number >> 8) as u16 & GENERATION_MASK,
            slot: number as u8,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_encoding() {
        let token = Token { kind: Kind::Request, hub: 0xabc, id: 0x0765_4321, slot: 0xfe, generation: 0x123 };
        assert_eq!(Token::of(token.number(), &[Kind::Send, Kind::Request]), Some(token));
        assert_eq!(Token::of(token.number(), &[Kind::Send]), None);
        assert_eq!(Token::of(0, &[Kind::Listen, Kind::Send, Kind::Receive, Kind::Request]), None);
    }
}
