//! Ports ordered by their number of sessions.

use crate::ids::PortId;

/// The number of sessions of each port, and the port with the most.
#[derive(Debug, Default)]
pub(crate) struct Ranking {
    /// Number of sessions, indexed by port.
    counts: Vec<u32>,
    /// All ports, those with the most sessions first.
    order: Vec<PortId>,
    /// Position in `order`, indexed by port.
    places: Vec<u32>,
}

impl Ranking {
    /// Number of sessions of a port.
    pub(crate) fn count(&self, port: PortId) -> u32 {
        self.counts.get(port.place()).copied().unwrap_or(0)
    }

    /// The port with the most sessions, if there are any ports.
    pub(crate) fn largest(&self) -> Option<PortId> {
        self.order.first().copied()
    }

    /// Counts a new session of a port.
    pub(crate) fn add(&mut self, port: PortId) {
        for new in self.counts.len()..=port.place() {
            self.counts.push(0);
            self.places.push(self.order.len() as u32);
            self.order.push(PortId(new as u32));
        }
        // Move it ahead of all others with the same count.
        let count = self.count(port);
        let first = self.order.partition_point(|&other| self.counts[other.place()] > count);
        self.exchange(port, first);
        self.counts[port.place()] += 1;
    }

    /// Counts the end of a session of a port that has at least one.
    pub(crate) fn take(&mut self, port: PortId) {
        // Move it behind all others with the same count.
        let count = self.count(port);
        let behind = self.order.partition_point(|&other| self.counts[other.place()] >= count);
        self.exchange(port, behind - 1);
        self.counts[port.place()] -= 1;
    }

    /// Swaps a port with the one at position `place`.
    fn exchange(&mut self, port: PortId, place: usize) {
        let other = self.order[place];
        let from = std::mem::replace(&mut self.places[port.place()], place as u32);
        self.places[other.place()] = from;
        self.order.swap(from as usize, place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_ordered_by_their_counts() {
        let mut rng = fastrand::Rng::with_seed(3);
        let mut ranking = Ranking::default();
        let mut counts = [0u32; 9];
        assert_eq!(ranking.largest(), None);
        for _ in 0..if cfg!(miri) { 100 } else { 5000 } {
            let port = rng.usize(0..9);
            if counts[port] > 0 && rng.bool() {
                counts[port] -= 1;
                ranking.take(PortId(port as u32));
            } else {
                counts[port] += 1;
                ranking.add(PortId(port as u32));
            }
            assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 8].map(|port| ranking.count(PortId(port))), counts);
            assert!(ranking.order.is_sorted_by_key(|&port| u32::MAX - ranking.count(port)));
            let places = ranking.places.iter().map(|&place| ranking.order[place as usize]);
            assert!(places.eq((0..ranking.order.len() as u32).map(PortId)));
        }
    }
}
