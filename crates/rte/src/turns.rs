//! Turns of connections that wait for room on a peer's paths: deficit round robin (Shreedhar and Varghese,
//! SIGCOMM'95), first of networks, then of the connections of each. So a network's share of a full path depends on its
//! weight, and not on how many of its vNICs send.

use std::collections::VecDeque;

use foldhash::fast::RandomState;
use hashbrown::HashMap;

/// Packets in a turn of a network or a connection of weight 1.
const QUANTUM: u32 = 16;
/// Empty queues that are kept for networks that begin to wait.
const SPARE_MAX: usize = 8;

/// The relative share of a network, or of a port in its network, 1..=255.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Weight(u8);

impl Weight {
    /// A weight; 0 counts as 1.
    #[must_use]
    pub const fn new(weight: u8) -> Self {
        Weight(if weight == 0 { 1 } else { weight })
    }

    /// Its value, 1..=255.
    pub const fn get(self) -> u8 {
        self.0
    }

    /// Packets in a turn.
    fn quantum(self) -> u32 {
        QUANTUM * u32::from(self.0)
    }
}

impl Default for Weight {
    fn default() -> Self {
        Weight(1)
    }
}

/// The weights of networks and of local ports; those that are not named have weight 1.
#[derive(Debug, Default)]
pub(crate) struct Weights {
    networks: HashMap<u32, Weight, RandomState>,
    ports: Vec<Weight>,
}

impl Weights {
    pub(crate) fn set_network(&mut self, vni: u32, weight: Weight) {
        match weight == Weight::default() {
            true => _ = self.networks.remove(&vni),
            false => _ = self.networks.insert(vni, weight),
        }
    }

    pub(crate) fn set_port(&mut self, owner: u32, weight: Weight) {
        let at = owner as usize;
        if self.ports.len() <= at {
            if weight == Weight::default() {
                return;
            }
            self.ports.resize(at + 1, Weight::default());
        }
        self.ports[at] = weight;
    }

    fn network(&self, vni: u32) -> Weight {
        self.networks.get(&vni).copied().unwrap_or_default()
    }

    fn port(&self, owner: u32) -> Weight {
        self.ports.get(owner as usize).copied().unwrap_or_default()
    }
}

/// Waiting connections, by their index, in the order of their turns.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    /// VNIs of networks with waiting connections; the first one has its turn.
    order: VecDeque<u32>,
    networks: HashMap<u32, Waiting, RandomState>,
    spare: Vec<VecDeque<Member>>,
}

/// What waits in one network.
#[derive(Debug)]
struct Waiting {
    /// Packets that are left of its turn; 0: the next one begins.
    left: u32,
    members: VecDeque<Member>,
}

#[derive(Clone, Copy, Debug)]
struct Member {
    index: u32,
    /// Packets that are left of its turn; 0: the next one begins.
    left: u32,
}

impl Turns {
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.order.is_empty()
    }

    /// A connection joins behind the others of its network, and its network behind other networks.
    pub(crate) fn join(&mut self, vni: u32, index: u32) {
        let waiting = self.networks.entry(vni).or_insert_with(|| {
            self.order.push_back(vni);
            Waiting { left: 0, members: self.spare.pop().unwrap_or_default() }
        });
        waiting.members.push_back(Member { index, left: 0 });
    }

    /// The connection that has its turn.
    pub(crate) fn current(&self) -> Option<u32> {
        Some(self.networks.get(self.order.front()?)?.members.front()?.index)
    }

    /// Packets that the current connection, of port `owner`, may send now, at least 1.
    pub(crate) fn allowed(&mut self, weights: &Weights, owner: u32) -> u32 {
        let Some((&vni, waiting)) = self.order.front().and_then(|vni| Some((vni, self.networks.get_mut(vni)?))) else {
            return 0;
        };
        let Some(member) = waiting.members.front_mut() else { return 0 };
        if waiting.left == 0 {
            waiting.left = weights.network(vni).quantum();
        }
        if member.left == 0 {
            member.left = weights.port(owner).quantum();
        }
        waiting.left.min(member.left)
    }

    /// Charges the current connection and its network for `packets`, at most what was [allowed](Self::allowed). When a
    /// turn is used up, the next connection or network gets its turn.
    pub(crate) fn sent(&mut self, packets: u32) {
        let Some(waiting) = self.order.front().and_then(|vni| self.networks.get_mut(vni)) else { return };
        waiting.left = waiting.left.saturating_sub(packets);
        if let Some(member) = waiting.members.front_mut() {
            member.left = member.left.saturating_sub(packets);
            if member.left == 0 {
                waiting.members.rotate_left(1);
            }
        }
        if waiting.left == 0 {
            self.order.rotate_left(1);
        }
    }

    /// Removes the current connection, which no longer waits, and charges its network for `packets`.
    pub(crate) fn leave(&mut self, packets: u32) {
        let Some(&vni) = self.order.front() else { return };
        let Some(waiting) = self.networks.get_mut(&vni) else { return };
        waiting.members.pop_front();
        waiting.left = waiting.left.saturating_sub(packets);
        if waiting.members.is_empty() {
            self.order.pop_front();
            self.end(vni);
        } else if packets > 0 && waiting.left == 0 {
            self.order.rotate_left(1);
        }
    }

    /// A connection is gone.
    pub(crate) fn forget(&mut self, vni: u32, index: u32) {
        let Some(waiting) = self.networks.get_mut(&vni) else { return };
        waiting.members.retain(|member| member.index != index);
        if waiting.members.is_empty() {
            self.order.retain(|waits| *waits != vni);
            self.end(vni);
        }
    }

    /// Nothing waits any longer.
    pub(crate) fn clear(&mut self) {
        *self = Turns::default();
    }

    fn end(&mut self, vni: u32) {
        if let Some(Waiting { members, .. }) = self.networks.remove(&vni)
            && self.spare.len() < SPARE_MAX
        {
            self.spare.push(members);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Who sends how much of `packets`, if each of these connections always has packets: VNI, port, index.
    fn shares(weights: &Weights, waiting: &[(u32, u32, u32)], packets: u32, room: &[u32]) -> Vec<u32> {
        let mut turns = Turns::default();
        for &(vni, _, index) in waiting {
            turns.join(vni, index);
        }
        let owner = |index: u32| waiting.iter().find(|w| w.2 == index).expect("one of these").1;
        let mut sent = vec![0; waiting.len()];
        let mut rooms = room.iter().cycle();
        let mut left = packets;
        while left > 0 {
            let index = turns.current().expect("some wait");
            let room = (*rooms.next().expect("endless")).min(left);
            let now = turns.allowed(weights, owner(index)).min(room);
            assert!(now > 0);
            turns.sent(now);
            sent[index as usize] += now;
            left -= now;
        }
        sent
    }

    #[test]
    fn networks_share_by_weight_however_many_connections_they_have() {
        let mut weights = Weights::default();
        weights.set_network(7, Weight::new(3));
        weights.set_port(2, Weight::new(4));
        // Room for whole turns, for parts of them, for single packets.
        for room in [&[1000][..], &[7, 1, 16, 3], &[1]] {
            let equal = shares(&weights, &[(1, 0, 0), (2, 1, 1), (2, 1, 2), (2, 1, 3)], 48_000, room);
            assert_eq!(equal, [24_000, 8_000, 8_000, 8_000], "{room:?}");
            let weighted = shares(&weights, &[(1, 0, 0), (7, 1, 1)], 64_000, room);
            assert_eq!(weighted, [16_000, 48_000], "{room:?}");
            let ports = shares(&weights, &[(5, 1, 0), (5, 2, 1)], 80_000, room);
            assert_eq!(ports, [16_000, 64_000], "{room:?}");
        }
    }

    #[test]
    fn connections_that_leave_do_not_delay_others() {
        let mut turns = Turns::default();
        let weights = Weights::default();
        for (vni, index) in [(1, 10), (2, 20), (1, 11), (3, 30)] {
            turns.join(vni, index);
        }
        assert_eq!((turns.current(), turns.allowed(&weights, 0)), (Some(10), 16));
        turns.forget(2, 20);
        turns.forget(9, 90);
        turns.leave(5);
        assert_eq!((turns.current(), turns.allowed(&weights, 0)), (Some(11), 11), "its network's turn goes on");
        turns.sent(11);
        assert_eq!(turns.current(), Some(30));
        turns.leave(0);
        assert_eq!(turns.current(), Some(11));
        turns.forget(1, 11);
        assert!(turns.is_empty() && turns.current().is_none() && turns.networks.is_empty());
        turns.leave(1);
        turns.sent(5);
        assert_eq!(turns.allowed(&weights, 0), 0);
    }

    #[test]
    fn a_network_is_charged_for_connections_that_come_and_go() {
        let (mut turns, weights) = (Turns::default(), Weights::default());
        let mut sent = [0; 2];
        turns.join(1, 0);
        turns.join(2, 100);
        // Connections of network 2 send 10 packets each, and leave before another one joins.
        for next in 101..5_000 {
            let index = turns.current().expect("some wait");
            let allowed = turns.allowed(&weights, 0);
            if index == 0 {
                sent[0] += allowed;
                turns.sent(allowed);
                continue;
            }
            let packets = allowed.min(10);
            sent[1] += packets;
            turns.join(2, next);
            turns.leave(packets);
        }
        assert!(sent[0].abs_diff(sent[1]) <= 32, "{sent:?}");
    }

    #[test]
    fn a_weight_is_at_least_one() {
        assert_eq!(Weight::new(0), Weight::default());
        let mut weights = Weights::default();
        weights.set_port(1 << 16, Weight::default());
        weights.set_network(1, Weight::new(9));
        weights.set_network(1, Weight::default());
        assert!(weights.ports.is_empty() && weights.networks.is_empty());
    }
}
