//! Connection identifiers (PROTOCOL §2.4).

use core::fmt;

/// A connection identifier, chosen by the receiver of the packets that carry it. The top 8 bits are the index of the
/// worker that owns the connection, so steering needs no table; that worker chooses the other 24.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Cid(pub u32);

impl Cid {
    /// "None": no connection has this identifier, so worker 0 never assigns index 0.
    pub const NONE: Self = Self(0);
    /// The largest index (24 bits).
    pub const MAX_INDEX: u32 = 0x00ff_ffff;

    /// The identifier of connection `index` (low 24 bits) of `worker`.
    #[must_use]
    pub const fn new(worker: u8, index: u32) -> Self {
        Self((worker as u32) << 24 | index & Self::MAX_INDEX)
    }

    /// The worker that owns the connection.
    #[must_use]
    pub const fn worker(self) -> u8 {
        (self.0 >> 24) as u8
    }

    /// The connection's index within its worker (24 bits).
    #[must_use]
    pub const fn index(self) -> u32 {
        self.0 & Self::MAX_INDEX
    }

    /// Whether this is [`Cid::NONE`].
    #[must_use]
    pub const fn is_none(self) -> bool {
        self.0 == 0
    }
}

impl fmt::Display for Cid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#010x}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts() {
        let cid = Cid::new(3, 0x01_0203);
        assert_eq!(cid, Cid(0x0301_0203));
        assert_eq!((cid.worker(), cid.index()), (3, 0x01_0203));
        assert_eq!(Cid::new(255, u32::MAX), Cid(u32::MAX));
        assert!(Cid::new(0, 0).is_none() && !cid.is_none());
        assert!(Cid::default().is_none());
    }
}
