//! The sender's part of publication by flow: the last PSN of each flow (PROTOCOL.md, flow distance).
//!
//! Flows are hashed into a fixed number of chains. Two flows in one chain wait for each other, which costs a little
//! time after a loss and nothing else. So no flow table can overflow, and the receiver needs no lookup.

use bifrost_wire::bifrost::Psn;

const CHAINS: usize = 256;

/// Last PSN per chain of one connection.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct FlowTable {
    /// For an unused chain: the PSN before the first.
    last: [u32; CHAINS],
    /// The last packet whose flow was unknown: it may belong to any flow.
    unknown: Option<Psn>,
}

impl FlowTable {
    /// A table without flows, for a connection whose first packet is `first`.
    pub(crate) fn new(first: Psn) -> Self {
        FlowTable { last: [first.sub(1).0; CHAINS], unknown: None }
    }

    /// Returns the distance for the packet `psn` of `flow`, and remembers the packet. Everything below `published`,
    /// which is not after `psn`, is known to be visible to the receiver's guest or given up.
    #[inline(always)]
    pub(crate) fn distance(&mut self, flow: u32, psn: Psn, published: Psn) -> u8 {
        let last = std::mem::replace(&mut self.last[flow as usize % CHAINS], psn.0);
        // A visible predecessor is as good as none. In both cases name the nearest visible packet, if it is near
        // enough.
        let visible = psn.0.wrapping_sub(published.0).wrapping_add(1);
        let mut distance = visible.min(psn.0.wrapping_sub(last));
        if self.unknown.is_some() {
            distance = distance.min(self.since_unknown(psn, published));
        }
        distance.min(255) as u8
    }

    /// Distance from the last packet whose flow was unknown, if that may not be visible yet.
    #[cold]
    fn since_unknown(&mut self, psn: Psn, published: Psn) -> u32 {
        self.unknown = self.unknown.filter(|unknown| !unknown.is_before(published));
        self.unknown.map_or(u32::MAX, |unknown| psn.0.wrapping_sub(unknown.0))
    }

    /// Remembers that `psn` may belong to any flow; it waits for everything before it (distance 0).
    pub(crate) fn note_unknown(&mut self, psn: Psn) {
        self.unknown = Some(psn);
    }

    /// Remembers that `psn` also belongs to `flow` (further segments of one buffer).
    pub(crate) fn note(&mut self, flow: u32, psn: Psn) {
        self.last[flow as usize % CHAINS] = psn.0;
    }

    /// Forgets all flows (PSNs restart, or everything is acknowledged); the next packet is `first`.
    pub(crate) fn reset(&mut self, first: Psn) {
        *self = FlowTable::new(first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let mut t = FlowTable::new(Psn(10));
        let una = Psn(10);
        assert_eq!(t.distance(1, Psn(10), una), 1, "no predecessor: the last acknowledged packet");
        assert_eq!(t.distance(2, Psn(11), una), 2);
        assert_eq!(t.distance(1, Psn(12), una), 2);
        assert_eq!(t.distance(1, Psn(400), una), 255, "too far to name");
        assert_eq!(t.distance(3, Psn(401), una), 255, "no acknowledged packet is near");
        assert_eq!(t.distance(2, Psn(402), Psn(402)), 1, "predecessor acknowledged");
    }

    #[test]
    fn a_packet_of_an_unknown_flow_may_be_the_predecessor() {
        let mut t = FlowTable::new(Psn(5));
        t.note_unknown(Psn(10));
        t.note_unknown(Psn(11));
        assert_eq!(t.distance(1, Psn(12), Psn(5)), 1);
        assert_eq!(t.distance(2, Psn(13), Psn(5)), 2);
        assert_eq!(t.distance(1, Psn(14), Psn(5)), 2, "its own is later");
        assert_eq!(t.distance(3, Psn(15), Psn(12)), 4, "visible by now");
    }

    #[test]
    fn a_stale_psn_that_wrapped_is_not_mistaken_for_a_near_one() {
        for later in [1 << 31, u32::MAX - 1000] {
            let mut t = FlowTable::new(Psn(5));
            t.distance(7, Psn(5), Psn(5));
            // It would compare as later than everything that is visible, and then as a little before that.
            let psn = Psn(5u32.wrapping_add(later));
            assert_eq!(t.distance(7, psn, psn), 1, "everything is visible");
            assert_eq!(t.distance(8, psn.add(300), psn), 255, "of a flow that was never used");
        }
    }

    #[test]
    fn flows_that_start_at_the_wrap_wait_for_nothing() {
        let mut t = FlowTable::new(Psn(u32::MAX - 1));
        for i in 0..4u8 {
            let psn = Psn(u32::MAX - 1).add(u32::from(i));
            assert_eq!(t.distance(u32::from(i), psn, Psn(u32::MAX - 1)), i + 1);
        }
        t.reset(Psn(9));
        assert_eq!(t.distance(1, Psn(12), Psn(9)), 4, "nothing is known any more");
    }
}
