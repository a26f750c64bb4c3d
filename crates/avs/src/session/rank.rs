//! Ports by the number of their sessions.

/// How many sessions each port has, and which one has most.
#[derive(Debug, Default)]
pub(crate) struct Ranking {
    /// By port.
    counts: Vec<u32>,
    /// All ports, those with most sessions first.
    order: Vec<u16>,
    /// Where a port is in `order`.
    places: Vec<u16>,
}

impl Ranking {
    /// Sessions of a port.
    pub(crate) fn count(&self, port: u16) -> u32 {
        self.counts.get(usize::from(port)).copied().unwrap_or(0)
    }

    /// The port with most sessions, if there are any ports.
    pub(crate) fn largest(&self) -> Option<u16> {
        self.order.first().copied()
    }

    /// A port has one session more.
    pub(crate) fn add(&mut self, port: u16) {
        for new in self.counts.len()..=usize::from(port) {
            self.counts.push(0);
            self.places.push(self.order.len() as u16);
            self.order.push(new as u16);
        }
        // Ahead of all others that have as many.
        let count = self.count(port);
        let first = self.order.partition_point(|&other| self.counts[usize::from(other)] > count);
        self.exchange(port, first);
        self.counts[usize::from(port)] += 1;
    }

    /// A port, which has some, has one less.
    pub(crate) fn take(&mut self, port: u16) {
        // Behind all others that have as many.
        let count = self.count(port);
        let behind = self.order.partition_point(|&other| self.counts[usize::from(other)] >= count);
        self.exchange(port, behind - 1);
        self.counts[usize::from(port)] -= 1;
    }

    /// Exchanges a port with the one at a place.
    fn exchange(&mut self, port: u16, place: usize) {
        let other = self.order[place];
        let from = std::mem::replace(&mut self.places[usize::from(port)], place as u16);
        self.places[usize::from(other)] = from;
        self.order.swap(usize::from(from), place);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_order_is_that_of_the_counts() {
        let mut rng = fastrand::Rng::with_seed(3);
        let mut ranking = Ranking::default();
        let mut counts = [0u32; 9];
        assert_eq!(ranking.largest(), None);
        for _ in 0..if cfg!(miri) { 100 } else { 5000 } {
            let port = rng.usize(0..9);
            if counts[port] > 0 && rng.bool() {
                counts[port] -= 1;
                ranking.take(port as u16);
            } else {
                counts[port] += 1;
                ranking.add(port as u16);
            }
            assert_eq!([0, 1, 2, 3, 4, 5, 6, 7, 8].map(|port| ranking.count(port)), counts);
            assert!(ranking.order.is_sorted_by_key(|&port| u32::MAX - ranking.count(port)));
            let places = ranking.places.iter().map(|&place| ranking.order[usize::from(place)]);
            assert!(places.eq(0..ranking.order.len() as u16));
        }
    }
}
