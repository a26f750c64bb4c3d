//! The sender's half of publication by flow: which PSN a flow used last (PROTOCOL.md, flow distance).
//!
//! Flows are hashed into a fixed number of chains. Two flows in one chain wait for each other, which costs a little
//! time after a loss and nothing else; so no flow table can overflow and nothing is looked up in the receiver.

use bifrost_wire::bifrost::Psn;

const CHAINS: usize = 256;

/// Last PSN per chain of one connection.
#[derive(Debug)]
pub(crate) struct FlowTable {
    last: [u32; CHAINS],
    used: [u64; CHAINS / 64],
}

impl Default for FlowTable {
    fn default() -> Self {
        FlowTable { last: [0; CHAINS], used: [0; CHAINS / 64] }
    }
}

impl FlowTable {
    /// The distance for a packet of `flow` that gets `psn`, and remembers it. `una` is the oldest PSN that is not
    /// acknowledged: whatever lies below is visible to the receiver's guest already.
    pub(crate) fn distance(&mut self, flow: u32, psn: Psn, una: Psn) -> u8 {
        let chain = flow as usize % CHAINS;
        let known = self.used[chain / 64] >> (chain % 64) & 1 == 1;
        let last = Psn(self.last[chain]);
        self.last[chain] = psn.0;
        self.used[chain / 64] |= 1 << (chain % 64);
        if known && !last.is_before(una) {
            return nameable(psn.distance_from(last));
        }
        // No predecessor in flight: name a packet that is acknowledged, if one is near enough to be named.
        nameable(psn.distance_from(una.sub(1)))
    }

    /// Remembers that `psn` also belongs to `flow` (further segments of one buffer).
    pub(crate) fn note(&mut self, flow: u32, psn: Psn) {
        let chain = flow as usize % CHAINS;
        self.last[chain] = psn.0;
        self.used[chain / 64] |= 1 << (chain % 64);
    }

    /// Forgets all flows (PSNs start anew, or everything is acknowledged).
    pub(crate) fn reset(&mut self) {
        self.used = [0; CHAINS / 64];
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
    fn a_known_but_acknowledged_psn_that_wrapped_is_not_taken_for_a_near_one() {
        let mut t = FlowTable::default();
        t.distance(7, Psn(5), Psn(5));
        // Half the number space later the stale entry would compare as "after" una.
        let psn = Psn(5u32.wrapping_add(1 << 31).wrapping_add(3));
        let d = t.distance(7, psn, psn);
        assert_eq!(d, 255, "stale entries only ever make a packet wait for more");
    }
}
