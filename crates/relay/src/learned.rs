//! What one agent has learned of routes: which answers it is to be told when they change.

use std::collections::BTreeMap;

use ipnet::IpNet;

/// The most answers that are remembered of an agent: more than hosts keep.
const MOST: usize = 65_536;

/// The ranges of the answers that an agent was given, by VNI: disjoint, as the host has them.
#[derive(Debug, Default)]
pub(crate) struct Learned {
    ranges: BTreeMap<(u32, IpNet), u64>,
    /// In the order in which they were given.
    by_age: BTreeMap<u64, (u32, IpNet)>,
    given: u64,
}

impl Learned {
    /// An answer about a range is given, in place of earlier ones. Returns the ranges that are forgotten here because there are
    /// too many; the agent has to forget them, too.
    pub(crate) fn give(&mut self, vni: u32, range: IpNet) -> Vec<(u32, IpNet)> {
        self.take(vni, range);
        self.given += 1;
        self.ranges.insert((vni, range), self.given);
        self.by_age.insert(self.given, (vni, range));
        let mut forgotten = Vec::new();
        while self.ranges.len() > MOST
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.ranges.remove(&oldest);
            forgotten.push(oldest);
        }
        forgotten
    }

    /// Forgets the answers that say something of a prefix; returns their ranges.
    pub(crate) fn take(&mut self, vni: u32, prefix: IpNet) -> Vec<IpNet> {
        let known = |(key, _): (&(u32, IpNet), &u64)| (key.0 == vni).then_some(key.1);
        // In order of first address and length; ranges are disjoint, so only the one before may have all of the prefix.
        let before = self.ranges.range(..=(vni, prefix)).next_back().and_then(known);
        let before = before.filter(|range| range.contains(&prefix));
        let last = IpNet::from(prefix.broadcast());
        let within = self.ranges.range((vni, prefix)..=(vni, last)).filter_map(known);
        let mut taken: Vec<IpNet> = before.into_iter().chain(within.filter(|range| prefix.contains(range))).collect();
        taken.dedup();
        for range in &taken {
            if let Some(age) = self.ranges.remove(&(vni, *range)) {
                self.by_age.remove(&age);
            }
        }
        taken
    }

    /// How many answers there are.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    #[test]
    fn answers_about_a_prefix_are_found() {
        let mut learned = Learned::default();
        for range in ["10.0.0.0/24", "10.0.1.1/32", "10.0.2.0/23", "10.1.0.0/16", "fd00::/64"] {
            assert_eq!(learned.give(7, net(range)), []);
        }
        learned.give(8, net("10.0.0.0/8"));
        assert_eq!(learned.take(7, net("10.0.0.9/32")), [net("10.0.0.0/24")]);
        assert_eq!(learned.take(7, net("10.0.0.9/32")), []);
        assert_eq!(learned.take(7, net("10.0.0.0/22")), [net("10.0.1.1/32"), net("10.0.2.0/23")]);
        assert_eq!(learned.take(7, net("10.1.0.0/16")), [net("10.1.0.0/16")]);
        assert_eq!(learned.take(7, net("::/0")), [net("fd00::/64")]);
        assert_eq!(learned.take(8, net("10.2.3.4/32")), [net("10.0.0.0/8")]);
        assert_eq!((learned.len(), learned.by_age.len()), (0, 0));
        // A narrower answer takes the place of the wider one as a whole, as on the host.
        learned.give(7, net("10.0.0.0/8"));
        learned.give(7, net("10.0.0.1/32"));
        assert_eq!(learned.take(7, net("10.0.0.0/8")), [net("10.0.0.1/32")]);
    }

    #[test]
    fn what_is_too_much_is_forgotten_oldest_first() {
        let mut learned = Learned::default();
        let host = |n: u32| IpNet::from(IpAddr::from((0x0a00_0000 + n).to_be_bytes()));
        for n in 0..MOST as u32 {
            assert_eq!(learned.give(7, host(n)), []);
        }
        learned.give(7, host(0));
        assert_eq!(learned.give(7, host(1 << 20)), [(7, host(1))]);
        assert_eq!((learned.len(), learned.by_age.len()), (MOST, MOST));
    }
}
