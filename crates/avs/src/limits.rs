//! Bounds of what a switch remembers.

/// How many sessions there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Of all ports of a switch together.
    pub total: u32,
    /// Of one port.
    pub per_port: u32,
}

impl Default for SessionLimits {
    /// A million, of which one port may have a tenth.
    fn default() -> Self {
        SessionLimits { total: 1 << 20, per_port: 100_000 }
    }
}

/// How packets' flows are remembered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlowLimits {
    /// Of packets from guests; and as many of packets from the underlay. None are made with 0. Rounded down to sets of four.
    pub records: u32,
    /// Whether what packets of a turn have in common is looked up once: records and sessions are fetched for many packets together, and
    /// what becomes of a flow's first packet becomes of those that came with it.
    pub vectors: bool,
}

impl FlowLimits {
    /// Records of a set: those that one place can have.
    pub(crate) const SET: u32 = 4;
    /// Most records that a table has room for, whatever is asked for.
    pub const MAX_RECORDS: u32 = 1 << 20;

    /// For so many there will be room.
    pub(crate) fn rounded(self) -> u32 {
        self.records.min(Self::MAX_RECORDS) / Self::SET * Self::SET
    }
}

impl Default for FlowLimits {
    /// 32,768, 6 MiB in each direction once that many flows are alive; and vectors.
    fn default() -> Self {
        FlowLimits { records: 1 << 15, vectors: true }
    }
}
