//! A frame as its sender sent it.

use bifrost_nic::{Offload, Parsed};

/// A frame as its sender sent it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Frame<'a> {
    /// Its first bytes: at least everything that was parsed, at most the whole frame.
    pub(crate) head: &'a [u8],
    /// Length of the whole frame, bytes.
    pub(crate) len: usize,
    pub(crate) offload: Offload,
    pub(crate) parsed: &'a Parsed,
}

impl<'a> Frame<'a> {
    /// A complete frame without segmentation offload.
    pub(crate) fn whole(head: &'a [u8], parsed: &'a Parsed) -> Self {
        Frame { head, len: head.len(), offload: Offload::default(), parsed }
    }

    /// Largest IP packet that the frame becomes after segmentation, bytes.
    #[inline(always)]
    pub(crate) fn largest_packet(&self) -> usize {
        self.offload.largest_packet(self.parsed, self.len)
    }

    /// TTL or hop limit of an IP packet; 0 if it is not in `head`.
    #[inline(always)]
    pub(crate) fn time_to_live(&self) -> u8 {
        let at = if self.parsed.src_ip.is_ipv6() { 7 } else { 8 };
        self.head.get(usize::from(self.parsed.l3) + at).copied().unwrap_or(0)
    }
}
