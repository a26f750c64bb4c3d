//! Longest-prefix match.

use std::net::IpAddr;

use ipnet::{IpNet, Ipv4Net, Ipv6Net};
use prefix_trie::PrefixMap;

/// Values by IP prefix, both families. Look-up takes at most 7 (IPv4) or 26 (IPv6) steps, whatever the number of
/// prefixes.
///
/// Host bits of a prefix are ignored: `10.0.0.1/24` and `10.0.0.0/24` are the same.
#[derive(Clone, Debug)]
pub struct Lpm<T> {
    v4: PrefixMap<Ipv4Net, T>,
    v6: PrefixMap<Ipv6Net, T>,
}

impl<T> Default for Lpm<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Lpm<T> {
    /// Without prefixes.
    pub fn new() -> Self {
        Self { v4: PrefixMap::new(), v6: PrefixMap::new() }
    }

    /// Sets the value of `prefix`; returns the one that it had.
    pub fn insert(&mut self, prefix: IpNet, value: T) -> Option<T> {
        match prefix.trunc() {
            IpNet::V4(p) => self.v4.insert(p, value),
            IpNet::V6(p) => self.v6.insert(p, value),
        }
    }

    /// Removes exactly `prefix`; returns the value that it had.
    pub fn remove(&mut self, prefix: IpNet) -> Option<T> {
        match prefix.trunc() {
            IpNet::V4(p) => self.v4.remove(&p),
            IpNet::V6(p) => self.v6.remove(&p),
        }
    }

    /// The value of exactly `prefix`.
    pub fn exact(&self, prefix: IpNet) -> Option<&T> {
        match prefix.trunc() {
            IpNet::V4(p) => self.v4.get(&p),
            IpNet::V6(p) => self.v6.get(&p),
        }
    }

    /// The value of the longest prefix that holds `addr`.
    pub fn lookup(&self, addr: IpAddr) -> Option<&T> {
        match addr {
            IpAddr::V4(a) => self.v4.get_lpm(&Ipv4Net::from(a)).map(|(_, value)| value),
            IpAddr::V6(a) => self.v6.get_lpm(&Ipv6Net::from(a)).map(|(_, value)| value),
        }
    }

    /// Number of prefixes.
    pub fn len(&self) -> usize {
        self.v4.len() + self.v6.len()
    }

    /// Whether there is no prefix.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All prefixes with their values: IPv4 first, each family in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = (IpNet, &T)> {
        let v4 = self.v4.iter().map(|(p, value)| (IpNet::V4(p), value));
        v4.chain(self.v6.iter().map(|(p, value)| (IpNet::V6(p), value)))
    }
}
