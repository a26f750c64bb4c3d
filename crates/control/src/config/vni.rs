//! VXLAN network identifiers.

use std::fmt;

/// A VXLAN network identifier (RFC 7348), 1 to [`Vni::MAX`].
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Vni(u32);

impl Vni {
    /// The smallest.
    pub const MIN: Vni = Vni(1);
    /// The largest: 24 bits.
    pub const MAX: u32 = (1 << 24) - 1;

    /// Checks the range.
    pub const fn new(vni: u32) -> Option<Vni> {
        if vni >= 1 && vni <= Self::MAX { Some(Vni(vni)) } else { None }
    }

    /// The number.
    pub const fn value(self) -> u32 {
        self.0
    }
}

impl From<Vni> for u32 {
    fn from(vni: Vni) -> u32 {
        vni.0
    }
}

impl fmt::Display for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl fmt::Debug for Vni {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vni_range() {
        assert_eq!(Vni::new(0), None);
        assert_eq!(Vni::new(1).map(Vni::value), Some(1));
        assert_eq!(Vni::new(16_777_215).map(Vni::value), Some(16_777_215));
        assert_eq!(Vni::new(16_777_216), None);
    }
}
