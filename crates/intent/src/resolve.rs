//! Where addresses are, for hosts that learn routes when they need them: the largest range of addresses with one answer.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use bifrost_wire::Mac;
use ipnet::IpNet;

/// A vNIC on a host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hop {
    /// The host.
    pub host: Arc<str>,
    /// The vNIC's MAC address.
    pub mac: Mac,
}

/// An answer: it holds for all addresses of the range.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// The largest prefix around the address with one answer, within those in which routes are learned.
    pub range: IpNet,
    /// None: nobody has them.
    pub hop: Option<Hop>,
}

/// The routes of a VPC that hosts learn.
#[derive(Clone, Debug, Default)]
pub struct Routes {
    routes: BTreeMap<IpNet, Hop>,
    /// How many routes have each length: of IPv4, and of IPv6.
    lengths: [BTreeMap<u8, usize>; 2],
}

impl Routes {
    /// Sets or removes the route to a prefix.
    pub fn set(&mut self, prefix: IpNet, hop: Option<Hop>) {
        let is_set = hop.is_some();
        let before = match hop {
            Some(hop) => self.routes.insert(prefix, hop),
            None => self.routes.remove(&prefix),
        };
        let lengths = &mut self.lengths[usize::from(prefix.addr().is_ipv6())];
        let count = lengths.entry(prefix.prefix_len()).or_default();
        *count = *count + usize::from(is_set) - usize::from(before.is_some());
        lengths.retain(|_, count| *count > 0);
    }

    /// How many routes there are.
    pub fn len(&self) -> usize {
        self.routes.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.routes.is_empty()
    }

    /// The answer about an address. `within`: the prefix in which routes are learned and that has the address.
    pub fn resolve(&self, within: IpNet, address: IpAddr) -> Resolved {
        let hop = self.longest(IpNet::from(address));
        let mut range = IpNet::from(address);
        while let Some(wider) = range.supernet().filter(|wider| within.contains(wider)) {
            let Some(other) = sibling(range, wider) else { break };
            // A route to exactly the wider range covers what nothing narrower does, so only the sibling is in question.
            if !self.is_uniform(other, self.longest(other), hop) {
                break;
            }
            range = wider;
        }
        Resolved { range, hop: hop.cloned() }
    }

    /// Whether all addresses of a prefix have this answer. `inherited`: that of the longest prefix with a route that has all
    /// of it.
    fn is_uniform(&self, prefix: IpNet, inherited: Option<&Hop>, answer: Option<&Hop>) -> bool {
        if !self.has_narrower(prefix) {
            return inherited == answer;
        }
        // Either half ends the search if it differs; the routes that are looked at have this answer, but for the last.
        let Some(halves) = halves(prefix) else { return inherited == answer };
        halves.into_iter().all(|half| self.is_uniform(half, self.routes.get(&half).or(inherited), answer))
    }

    /// The hop of the longest prefix with a route that has all of a prefix.
    fn longest(&self, prefix: IpNet) -> Option<&Hop> {
        let lengths = &self.lengths[usize::from(prefix.addr().is_ipv6())];
        let lengths = lengths.range(..=prefix.prefix_len()).rev().map(|(length, _)| *length);
        let wider = lengths.filter_map(|length| IpNet::new(prefix.addr(), length).ok());
        wider.filter_map(|wider| self.routes.get(&wider.trunc())).next()
    }

    /// Whether there is a route to a part of a prefix.
    fn has_narrower(&self, prefix: IpNet) -> bool {
        // In order of first address and length: what begins where the prefix does and is wider comes before it.
        let (first, last) = (prefix.trunc(), IpNet::from(prefix.broadcast()));
        let mut routes = self.routes.range(first..=last).map(|(route, _)| route);
        routes.any(|route| *route != first)
    }
}

fn halves(prefix: IpNet) -> Option<[IpNet; 2]> {
    let mut halves = prefix.subnets(prefix.prefix_len().checked_add(1)?).ok()?;
    Some([halves.next()?, halves.next()?])
}

/// The other half of a prefix.
fn sibling(half: IpNet, whole: IpNet) -> Option<IpNet> {
    halves(whole)?.into_iter().find(|other| *other != half)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    fn hop(n: u8) -> Hop {
        Hop { host: format!("h{n}").into(), mac: Mac([2, 0, 0, 0, 0, n]) }
    }

    fn routes(all: &[(&str, u8)]) -> Routes {
        let mut routes = Routes::default();
        all.iter().for_each(|(prefix, n)| routes.set(net(prefix), Some(hop(*n))));
        routes
    }

    #[test]
    fn the_range_is_as_large_as_the_answer() {
        let routes = routes(&[
            ("10.0.0.2/32", 1),
            ("10.0.0.3/32", 2),
            ("10.1.0.0/24", 3),
            ("10.1.1.0/24", 3),
            ("10.2.0.0/16", 4),
            ("10.2.3.0/24", 5),
            ("10.2.3.0/25", 6),
            ("10.2.3.128/25", 6),
            ("fd00::1/128", 1),
        ]);
        let cases = [
            ("10.0.0.2", "10.0.0.2/32", Some(1)),
            ("10.0.0.1", "10.0.0.0/31", None),
            ("10.0.0.9", "10.0.0.8/29", None),
            ("10.1.0.7", "10.1.0.0/23", Some(3)),
            ("10.2.9.9", "10.2.8.0/21", Some(4)),
            ("10.2.3.200", "10.2.3.0/24", Some(6)),
            ("10.200.0.0", "10.128.0.0/9", None),
            ("fd00::1", "fd00::1/128", Some(1)),
            ("fd00::2", "fd00::2/127", None),
        ];
        for (address, range, to) in cases {
            let within = net(if address.contains(':') { "fd00::/8" } else { "10.0.0.0/8" });
            let expected = Resolved { range: net(range), hop: to.map(hop) };
            assert_eq!(routes.resolve(within, address.parse().unwrap()), expected, "{address}");
        }
        // Not beyond what is learned.
        let nothing = Routes::default();
        assert_eq!(nothing.resolve(net("10.0.0.0/8"), "10.1.2.3".parse().unwrap()).range, net("10.0.0.0/8"));
        assert_eq!(nothing.resolve(net("::/0"), "fd00::1".parse().unwrap()).range, net("::/0"));
    }

    #[test]
    fn lengths_are_counted() {
        let mut routes = routes(&[("10.0.0.0/24", 1), ("10.0.1.0/24", 1)]);
        routes.set(net("10.0.0.0/24"), Some(hop(2)));
        routes.set(net("10.0.0.0/24"), None);
        routes.set(net("10.0.0.0/24"), None);
        assert_eq!(routes.lengths[0], BTreeMap::from([(24, 1)]));
        routes.set(net("10.0.1.0/24"), None);
        assert!(routes.is_empty() && routes.lengths[0].is_empty());
    }

    /// The answer about one address, by looking at all routes.
    fn naive(routes: &[(IpNet, u8)], address: IpAddr) -> Option<u8> {
        let having = routes.iter().filter(|(prefix, _)| prefix.contains(&address));
        having.max_by_key(|(prefix, _)| prefix.prefix_len()).map(|(_, n)| *n)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]

        #[test]
        fn every_address_of_the_range_has_the_answer_and_it_cannot_be_doubled(
            changes in prop::collection::vec((0u8..64, 26u8..=32, prop::option::weighted(0.8, 0u8..3)), 0..24),
            is_v6 in any::<bool>(),
        ) {
            let address = |n: u8| match is_v6 {
                false => IpAddr::from([10, 0, 0, n]),
                true => "fd00::".parse::<std::net::Ipv6Addr>().map(|a| IpAddr::from((a.to_bits() + u128::from(n)).to_be_bytes())).unwrap(),
            };
            let shift = if is_v6 { 96 } else { 0 };
            let within = IpNet::new_assert(address(0), 26 + shift);
            let (mut routes, mut all) = (Routes::default(), Vec::new());
            for (n, len, to) in changes {
                let prefix = IpNet::new_assert(address(n), len + shift).trunc();
                routes.set(prefix, to.map(hop));
                all.retain(|(known, _)| *known != prefix);
                all.extend(to.map(|to| (prefix, to)));
            }
            prop_assert_eq!(routes.len(), all.len());
            for n in 0..64u8 {
                let resolved = routes.resolve(within, address(n));
                let answer = naive(&all, address(n));
                prop_assert_eq!(&resolved.hop, &answer.map(hop));
                prop_assert!(resolved.range.contains(&address(n)) && within.contains(&resolved.range));
                let is_one = |range: IpNet| {
                    (0..64u8).filter(|n| range.contains(&address(*n))).all(|n| naive(&all, address(n)) == answer)
                };
                prop_assert!(is_one(resolved.range));
                if resolved.range != within {
                    prop_assert!(!is_one(resolved.range.supernet().unwrap()), "{} can be doubled", resolved.range);
                }
            }
        }
    }
}
