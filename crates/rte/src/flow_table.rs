//! The sender's half of publication by flow: which PSN a flow used last (PROTOCOL.md, flow distance).
//!
//! Flows are hashed into a fixed number of chains. Two flows in one chain wait for each other, which costs a little
//! time after a loss and nothing else; so no flow table can overflow and nothing is looked up in the receiver.

use bifrost_wire::bifrost::Psn;

const CHAINS: usize = 256;

/// Last PSN per chain of one connection.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct FlowTable {
    last: [u32; CHAINS],
    used: [u64; CHAINS / 64],
    /// The last packet whose flow was not known: it may have been of any.
    unknown: Option<Psn>,
}

impl Default for FlowTable {
    fn default() -> Self {
        FlowTable { last: [0; CHAINS], used: [0; CHAINS / 64], unknown: None }
    }
}

impl FlowTable {
    /// The distance for a packet of `flow` that gets `psn`, and remembers it. Below `published` everything
    /// is known to be visible to the receiver's guest, or given up.
    #[inline(always)]
    pub(crate) fn distance(&mut self, flow: u32, psn: Psn, published: Psn) -> u8 {
        let chain = flow as usize % CHAINS;
        let known = self.used[chain / 64] >> (chain % 64) & 1 == 1;
        let last = Psn(self.last[chain]);
        self.last[chain] = psn.0;
        self.used[chain / 64] |= 1 << (chain % 64);
        self.unknown = self.unknown.filter(|unknown| !unknown.is_before(published));
        // No predecessor that may be waiting: name a packet that is visible, if one is near enough to be named.
        let mut before = self.unknown.unwrap_or(published.sub(1));
        if known && !last.is_before(published) && before.is_before(last) {
            before = last;
        }
        nameable(psn.distance_from(before))
    }

    /// Remembers that `psn` may belong to any flow; it waits for everything before it (distance 0).
    pub(crate) fn note_unknown(&mut self, psn: Psn) {
        self.unknown = Some(psn);
    }

    /// Remembers that `psn` also belongs to `flow` (further segments of one buffer).
    pub(crate) fn note(&mut self, flow: u32, psn: Psn) {
        let chain = flow as usize % CHAINS;
        self.last[chain] = psn.0;
        self.used[chain / 64] |= 1 << (chain % 64);
    }

    /// Forgets all flows (PSNs restart, or everything is acknowledged).
    pub(crate) fn reset(&mut self) {
        self.used = [0; CHAINS / 64];
        self.unknown = None;
    }
}

fn nameable(distance: i32) -> u8 {
    if (1..255).contains(&distance) { distance as u8 } else { 255 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        let mut t = FlowTable::default();
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
        let mut t = FlowTable::default();
        t.note_unknown(Psn(10));
        t.note_unknown(Psn(11));
        assert_eq!(t.distance(1, Psn(12), Psn(5)), 1);
        assert_eq!(t.distance(2, Psn(13), Psn(5)), 2);
        assert_eq!(t.distance(1, Psn(14), Psn(5)), 2, "its own is later");
        assert_eq!(t.distance(3, Psn(15), Psn(12)), 4, "visible by now");
    }

    #[test]
    fn a_known_but_acknowledged_psn_that_wrapped_is_not_taken_for_a_near_one() {
        let mut t = FlowTable::default();
        t.distance(7, Psn(5), Psn(5));
        // Half the number space later the stale entry would compare as "after" una.
        let psn = Psn(5u32.wrapping_add(1 << 31).wrapping_add(3));
        let d = t.distance(7, psn, psn);
        assert_eq!(d, 255, "stale entries only ever make a packet wait for more");
    }
}
