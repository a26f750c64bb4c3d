//! Faults on demand: loss, delay, reordering, duplication, corruption, outage; per port or per path.
//!
//! The decision is pure: a seed and a sequence of packets result in a sequence of fates, which the worker carries out.
//! Without faults, the cost is one test of a flag per packet.

/// Where a fault acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Between the switch and a vNIC (NSDI'26, 6.1.3): `owner` is the port's number.
    Port {
        /// The port.
        owner: u32,
    },
    /// On the underlay, towards or from one peer; `path`: `None` means all.
    Path {
        /// The peer's number.
        peer: u32,
        /// The path, 0..=7.
        path: Option<u8>,
    },
}

/// Direction, as seen from this host (underlay) or from the guest (port).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Received packets.
    Rx,
    /// Sent packets.
    Tx,
}

/// One fault. Probabilities are parts in a million.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fault {
    /// The fault's number.
    pub id: u32,
    /// Where it acts.
    pub target: Target,
    /// In which direction it acts.
    pub direction: Direction,
    /// Everything is dropped.
    pub down: bool,
    /// Probability of a drop.
    pub loss_ppm: u32,
    /// Delay of every packet, ns.
    pub delay_ns: u64,
    /// Random additional delay, ns.
    pub jitter_ns: u64,
    /// Probability that a packet is delayed, so that later packets overtake it.
    pub reorder_ppm: u32,
    /// Probability of a duplicate.
    pub duplicate_ppm: u32,
    /// Probability that one bit is flipped.
    pub corrupt_ppm: u32,
}

impl Fault {
    /// Whether it acts at a port.
    pub(crate) fn is_at(&self, owner: u32, direction: Direction) -> bool {
        self.target == Target::Port { owner } && self.direction == direction
    }

    /// Whether it acts on any path of a peer.
    pub(crate) fn is_towards(&self, peer: u32, direction: Direction) -> bool {
        self.direction == direction && matches!(self.target, Target::Path { peer: p, .. } if p == peer)
    }
}

/// Delay of a reordered packet if the fault has no delay, ns.
const REORDER_NS: u64 = 500_000;

/// What happens to a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fate {
    /// It is dropped; nothing else applies.
    pub drop: bool,
    /// It is delayed by this time, ns.
    pub delay_ns: u64,
    /// It is duplicated.
    pub duplicate: bool,
    /// This bit is flipped, modulo its length.
    pub corrupt: Option<u32>,
}

/// The faults of one worker.
#[derive(Debug)]
pub struct Faults {
    active: Vec<(Fault, u64)>,
    state: u64,
}

impl Faults {
    /// No faults; the same `seed` results in the same fates.
    pub fn new(seed: u64) -> Self {
        Faults { active: Vec::new(), state: seed | 1 }
    }

    /// Adds a fault, or replaces the one with its number.
    pub fn set(&mut self, fault: Fault, seed: Option<u64>) {
        if let Some(seed) = seed {
            self.state = seed | 1;
        }
        self.clear(Some(fault.id));
        self.active.push((fault, 0));
    }

    /// Removes one fault or all.
    pub fn clear(&mut self, id: Option<u32>) {
        self.active.retain(|(f, _)| id.is_some_and(|id| f.id != id));
    }

    /// The faults and how many packets each has hit.
    pub fn iter(&self) -> impl Iterator<Item = &(Fault, u64)> {
        self.active.iter()
    }

    /// Whether there are no faults.
    pub fn is_empty(&self) -> bool {
        self.active.is_empty()
    }

    /// What happens to a packet at a port.
    pub fn at_port(&mut self, owner: u32, direction: Direction) -> Fate {
        self.fate(|f| f.is_at(owner, direction))
    }

    /// What happens to a packet on a path.
    pub fn on_path(&mut self, peer: u32, path: u8, direction: Direction) -> Fate {
        self.fate(|f| {
            f.is_towards(peer, direction)
                && matches!(f.target, Target::Path { path: on, .. } if on.is_none_or(|on| on == path))
        })
    }

    fn fate(&mut self, applies: impl Fn(&Fault) -> bool) -> Fate {
        let mut fate = Fate::default();
        for i in 0..self.active.len() {
            let fault = self.active[i].0;
            if !applies(&fault) {
                continue;
            }
            let before = fate;
            fate.drop |= fault.down || self.chance(fault.loss_ppm);
            fate.delay_ns += fault.delay_ns;
            if fault.jitter_ns > 0 {
                fate.delay_ns += self.random() % fault.jitter_ns;
            }
            if self.chance(fault.reorder_ppm) {
                fate.delay_ns += fault.delay_ns.max(REORDER_NS);
            }
            fate.duplicate |= self.chance(fault.duplicate_ppm);
            if self.chance(fault.corrupt_ppm) {
                fate.corrupt = Some(self.random() as u32);
            }
            if fate != before {
                self.active[i].1 += 1;
            }
        }
        fate
    }

    fn chance(&mut self, ppm: u32) -> bool {
        ppm > 0 && self.random() % 1_000_000 < u64::from(ppm)
    }

    /// xorshift64*: good enough for dropping packets.
    fn random(&mut self) -> u64 {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }
}

/// Flips the bit that a fate names.
pub fn corrupt(bytes: &mut [u8], bit: u32) {
    if !bytes.is_empty() {
        let bit = bit as usize % (bytes.len() * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fault(target: Target, direction: Direction) -> Fault {
        Fault {
            id: 1,
            target,
            direction,
            down: false,
            loss_ppm: 0,
            delay_ns: 0,
            jitter_ns: 0,
            reorder_ppm: 0,
            duplicate_ppm: 0,
            corrupt_ppm: 0,
        }
    }

    #[test]
    fn loss_has_the_rate_asked_for_and_hits_its_target_only() {
        let mut faults = Faults::new(7);
        let port = fault(Target::Port { owner: 3 }, Direction::Rx);
        faults.set(Fault { loss_ppm: 10_000, ..port }, None);
        let dropped = (0..100_000).filter(|_| faults.at_port(3, Direction::Rx).drop).count();
        assert!((900..1100).contains(&dropped), "{dropped} of 100000 at 1 %");
        assert_eq!(faults.iter().map(|f| f.1).sum::<u64>(), dropped as u64);
        assert!((0..10_000).all(|_| faults.at_port(4, Direction::Rx) == Fate::default()));
        assert!((0..10_000).all(|_| faults.at_port(3, Direction::Tx) == Fate::default()));
        assert!((0..10_000).all(|_| faults.on_path(3, 0, Direction::Rx) == Fate::default()));
    }

    #[test]
    fn paths_are_hit_one_or_all() {
        let mut faults = Faults::new(7);
        faults.set(Fault { down: true, ..fault(Target::Path { peer: 1, path: Some(2) }, Direction::Tx) }, None);
        assert!(faults.on_path(1, 2, Direction::Tx).drop);
        assert!(!faults.on_path(1, 3, Direction::Tx).drop);
        faults.set(Fault { down: true, ..fault(Target::Path { peer: 1, path: None }, Direction::Tx) }, None);
        assert!(faults.on_path(1, 3, Direction::Tx).drop);
        assert_eq!(faults.iter().count(), 1, "the same number replaces");
        faults.clear(Some(1));
        assert!(faults.is_empty());
    }

    #[test]
    fn a_seed_repeats_itself() {
        let fates = |seed| {
            let mut faults = Faults::new(seed);
            let f = Fault {
                loss_ppm: 100_000,
                jitter_ns: 1000,
                corrupt_ppm: 100_000,
                ..fault(Target::Port { owner: 0 }, Direction::Rx)
            };
            faults.set(f, None);
            (0..1000).map(|_| faults.at_port(0, Direction::Rx)).collect::<Vec<_>>()
        };
        assert_eq!(fates(5), fates(5));
        assert_ne!(fates(5), fates(6));
    }

    #[test]
    fn corruption_flips_one_bit() {
        let mut bytes = [0u8; 10];
        corrupt(&mut bytes, 85);
        assert_eq!(bytes.iter().map(|b| b.count_ones()).sum::<u32>(), 1);
        corrupt(&mut [], 3);
    }
}
