//! Routes that are learned while packets flow.

use std::net::IpAddr;

use bifrost_wire::Vni;

use super::Switch;
use crate::learned::LearnedChange;

impl Switch {
    /// Changes what is learned of a network's routes, in order. Later calls of [`take_over`](Self::take_over) keep it,
    /// as far as the network's routes are still learned. The caller bounds the number of routes. If packets may now go
    /// elsewhere, sessions and flow records are checked again with their next packets.
    pub fn learn(&mut self, vni: Vni, changes: &[LearnedChange]) {
        let Some(learned) = self.index.learned_mut(vni) else { return };
        let is_other = changes.iter().fold(false, |is_other, change| learned.change(change) | is_other);
        if is_other {
            self.recheck_learned();
        }
    }

    /// Makes the next packet of each flow use the tables again, so that the routes which it uses count as used.
    pub fn recheck_learned(&mut self) {
        self.epoch = self.epoch.wrapping_add(1);
        self.sessions.outdate_notes();
    }

    /// Appends the first addresses of learned routes that packets have used since the last call, of at most `most`
    /// routes from address `from` on (IPv4-mapped addresses count as IPv4). Returns where to go on.
    pub fn take_used(&self, vni: Vni, from: IpAddr, most: usize, out: &mut Vec<IpAddr>) -> Option<IpAddr> {
        self.index.vpc(vni)?.learned.as_ref()?.take_used(from, most, out)
    }
}
