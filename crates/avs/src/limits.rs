//! Limits of a switch's state.

/// Maximum numbers of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Of all ports of a switch.
    pub total: u32,
    /// Of one port.
    pub per_port: u32,
}

impl Default for SessionLimits {
    /// 2^20 sessions, of which one port may have 100,000.
    fn default() -> Self {
        SessionLimits { total: 1 << 20, per_port: 100_000 }
    }
}

/// Settings of the flow cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowLimits {
    /// Maximum number of flow records for packets from guests, and as many again for packets from the underlay; 0:
    /// none. Rounded down to sets of four.
    pub records: u32,
    /// Whether packets of a turn are processed as vectors: records and sessions are prefetched for many packets
    /// together, and the verdict on a flow's first packet is reused for those that came with it.
    pub vectors: bool,
}

impl FlowLimits {
    /// Records per set.
    pub(crate) const SET: u32 = 4;
    /// Upper limit of `records`.
    pub const MAX_RECORDS: u32 = 1 << 20;

    /// The number of records that will fit.
    pub(crate) fn rounded(self) -> u32 {
        self.records.min(Self::MAX_RECORDS) / Self::SET * Self::SET
    }
}

impl Default for FlowLimits {
    /// 32,768 records per direction, up to 6 MiB each; vectors are on.
    fn default() -> Self {
        FlowLimits { records: 1 << 15, vectors: true }
    }
}
