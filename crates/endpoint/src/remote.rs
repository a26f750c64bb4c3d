//! Identifies a region of the peer.

/// What a peer needs to access a region of this end. Send it to the peer, for example in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRegion {
    /// Identifies the region, on the connection for which it was permitted.
    pub key: u64,
    /// Length of the region, bytes.
    pub len: u64,
}

impl RemoteRegion {
    /// Length of the encoding, bytes.
    pub const LEN: usize = 16;

    /// Key and length, big-endian.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        (u128::from(self.key) << 64 | u128::from(self.len)).to_be_bytes()
    }

    /// Decodes the output of [`RemoteRegion::to_bytes`].
    #[must_use]
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Self {
        let both = u128::from_be_bytes(*bytes);
        Self { key: (both >> 64) as u64, len: both as u64 }
    }

    /// Whether `len` bytes at `offset` are inside the region.
    pub(crate) fn has(&self, offset: u64, len: usize) -> bool {
        offset.checked_add(len as u64).is_some_and(|end| end <= self.len)
    }
}
