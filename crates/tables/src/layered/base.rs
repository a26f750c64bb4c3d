//! The lower layer of a [`LayeredLpm`](super::LayeredLpm): a table that also knows its prefixes.

use std::cmp::Ordering;
use std::net::{Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

use crate::Lpm;

/// No slot.
const NONE: u32 = u32::MAX;

/// Prefixes in ascending order, IPv4 first; a prefix comes before those inside it. The table's slots count them.
#[derive(Debug)]
pub(super) struct Base<T> {
    lpm: Lpm<T>,
    v4: Box<[u32]>,
    v6: Box<[u128]>,
    lens: Box<[u8]>,
    /// The narrowest other prefix around each one.
    parents: Box<[u32]>,
}

impl<T> Default for Base<T> {
    fn default() -> Self {
        Base { lpm: Lpm::default(), v4: [].into(), v6: [].into(), lens: [].into(), parents: [].into() }
    }
}

impl<T> Base<T> {
    /// Builds a table from prefixes in any order. Host bits are ignored.
    ///
    /// # Errors
    /// The smallest prefix that occurs more than once.
    pub(super) fn new(prefixes: impl IntoIterator<Item = (IpNet, T)>) -> Result<Self, IpNet> {
        let mut all: Vec<(IpNet, T)> = prefixes.into_iter().map(|(net, value)| (net.trunc(), value)).collect();
        all.sort_unstable_by_key(|&(net, _)| net);
        let v4 =
            all.iter().filter_map(|(net, _)| if let IpNet::V4(net) = net { Some(net.addr().to_bits()) } else { None });
        let v6 =
            all.iter().filter_map(|(net, _)| if let IpNet::V6(net) = net { Some(net.addr().to_bits()) } else { None });
        let (v4, v6) = (v4.collect(), v6.collect());
        let lens = all.iter().map(|(net, _)| net.prefix_len()).collect();
        let parents = parents(all.iter().map(|(net, _)| *net));
        Ok(Base { lpm: Lpm::new(all)?, v4, v6, lens, parents })
    }

    /// Number of prefixes.
    pub(super) fn len(&self) -> usize {
        self.lens.len()
    }

    /// The value of the longest prefix that contains an address.
    #[inline(always)]
    pub(super) fn lpm(&self) -> &Lpm<T> {
        &self.lpm
    }

    /// The length of the prefix of a slot, and its value.
    pub(super) fn entry(&self, slot: u32) -> Option<(u8, &T)> {
        Some((*self.lens.get(slot as usize)?, self.lpm.value(slot)?))
    }

    /// The slot of a prefix without host bits.
    pub(super) fn slot(&self, net: IpNet) -> Option<u32> {
        let len = net.prefix_len();
        let slot = match net {
            IpNet::V4(net) => {
                let bits = net.addr().to_bits();
                search(self.v4.len(), |at| (self.v4[at], self.lens[at]).cmp(&(bits, len)))?
            }
            IpNet::V6(net) => {
                let (bits, v4) = (net.addr().to_bits(), self.v4.len());
                v4 + search(self.v6.len(), |at| (self.v6[at], self.lens[v4 + at]).cmp(&(bits, len)))?
            }
        };
        u32::try_from(slot).ok()
    }

    /// The value of exactly this prefix.
    pub(super) fn get(&self, net: IpNet) -> Option<&T> {
        self.lpm.value(self.slot(net)?)
    }

    /// The slot of the narrowest other prefix around the one of a slot.
    pub(super) fn parent(&self, slot: u32) -> Option<u32> {
        self.parents.get(slot as usize).copied().filter(|parent| *parent != NONE)
    }

    /// All prefixes, ascending.
    pub(super) fn iter(&self) -> impl Iterator<Item = (IpNet, &T)> {
        let v4 = self
            .v4
            .iter()
            .zip(&self.lens)
            .filter_map(|(bits, len)| Some(IpNet::V4(Ipv4Net::new(Ipv4Addr::from_bits(*bits), *len).ok()?)));
        let v6 = self
            .v6
            .iter()
            .zip(self.lens.iter().skip(self.v4.len()))
            .filter_map(|(bits, len)| Some(IpNet::V6(Ipv6Net::new(Ipv6Addr::from_bits(*bits), *len).ok()?)));
        v4.chain(v6).zip(0..).filter_map(|(net, slot)| Some((net, self.lpm.value(slot)?)))
    }
}

/// Binary search; `order` compares the element at a place with the wanted one.
fn search(count: usize, order: impl Fn(usize) -> Ordering) -> Option<usize> {
    let (mut from, mut to) = (0, count);
    while from < to {
        let middle = from + (to - from) / 2;
        match order(middle) {
            Ordering::Less => from = middle + 1,
            Ordering::Equal => return Some(middle),
            Ordering::Greater => to = middle,
        }
    }
    None
}

fn parents(nets: impl Iterator<Item = IpNet>) -> Box<[u32]> {
    // Prefixes around the current one, the narrowest last.
    let mut around: Vec<(IpNet, u32)> = Vec::new();
    let parent = |(net, slot): (IpNet, u32)| {
        while around.pop_if(|(wide, _)| !wide.contains(&net)).is_some() {}
        let parent = around.last().map_or(NONE, |(_, slot)| *slot);
        around.push((net, slot));
        parent
    };
    nets.zip(0..).map(parent).collect()
}
