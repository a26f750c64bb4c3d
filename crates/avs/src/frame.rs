//! A frame as its sender made it.

use bifrost_nic::{Offload, Parsed};

/// A frame as its sender made it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame<'a> {
    /// Its first bytes: all that was parsed, or the whole frame.
    pub(crate) head: &'a [u8],
    /// Bytes of the whole frame.
    pub(crate) len: usize,
    pub(crate) offload: Offload,
    pub(crate) parsed: &'a Parsed,
}

impl<'a> Frame<'a> {
    /// One that is all there, and is not to be segmented.
    pub(crate) fn whole(head: &'a [u8], parsed: &'a Parsed) -> Self {
        Frame { head, len: head.len(), offload: Offload::default(), parsed }
    }

    /// Bytes of the largest IP packet that it becomes.
    #[inline(always)]
    pub(crate) fn largest_packet(&self) -> usize {
        self.offload.largest_packet(self.parsed, self.len)
    }

    /// Time to live, or hop limit, of an IP packet; 0 if it is not there to look at.
    #[inline(always)]
    pub(crate) fn time_to_live(&self) -> u8 {
        let at = if self.parsed.src_ip.is_ipv6() { 7 } else { 8 };
        self.head.get(usize::from(self.parsed.l3) + at).copied().unwrap_or(0)
    }
}
