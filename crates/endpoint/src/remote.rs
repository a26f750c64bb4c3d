//! What names a region of the peer.

/// What a peer must know to read or write a region of this end. It is to be told to the peer, in a message for instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Names the region, on the connection for which it was allowed.
    pub key: u64,
    /// Its bytes.
    pub len: u64,
}

impl RemoteRegion {
    /// Bytes of the encoding.
    pub const LEN: usize = 16;

    /// Key and length, big-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        (u128::from(self.key) << 64 | u128::from(self.len)).to_be_bytes()
    }

    /// Reads what [`RemoteRegion::to_bytes`] wrote.
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let both = u128::from_be_bytes(*bytes);
        Self { key: (both >> 64) as u64, len: both as u64 }
    }

    /// Whether `len` bytes from `offset` on are inside.
    pub(crate) fn has(&self, offset: u64, len: usize) -> bool {
        offset.checked_add(len as u64).is_some_and(|end| end <= self.len)
    }
}
