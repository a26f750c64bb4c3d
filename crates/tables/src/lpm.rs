//! Longest-prefix match.

use std::net::IpAddr;

use ipnet::IpNet;

use crate::intervals::{Intervals, NO_SLOT};
use crate::pages::on_huge_pages;
use crate::prefetch::prefetch;

/// Keys of a node: one cache line (IPv4) or two (IPv6).
const V4_KEYS: usize = 16;
const V6_KEYS: usize = 8;

/// Lookups that [`Lpm::lookup_batch`] does at once. Fewer leave the memory idle, and more exceed its queue.
pub const BATCH: usize = 16;

/// Values by IP prefix, both families. Immutable; holds any number of prefixes.
///
/// n prefixes split the addresses into at most 2n + 1 intervals, each with the longest prefix that contains it. A
/// lookup searches for the interval: it visits log₁₆ (IPv4) or log₈ (IPv6) of the number of intervals nodes, of which
/// the last one or two may miss the cache. Memory is at most 17 bytes (IPv4) or 45 (IPv6) per prefix, plus its value.
///
/// `cargo bench -p bifrost-bench --bench tables` measures the cost.
#[derive(Clone, Debug)]
pub struct Lpm<T> {
    /// By slot, in the order of prefixes.
    values: Vec<T>,
    v4: Intervals<u32, V4_KEYS>,
    v6: Intervals<u128, V6_KEYS>,
}

impl<T> Default for Lpm<T> {
    /// An empty table.
    fn default() -> Self {
        Self { values: Vec::new(), v4: Intervals::new([]), v6: Intervals::new([]) }
    }
}

impl<T> Lpm<T> {
    /// Builds a table from prefixes in any order. Host bits are ignored: `10.0.0.1/24` and `10.0.0.0/24` are the same.
    ///
    /// # Errors
    /// The smallest prefix that occurs more than once.
    pub fn new(prefixes: impl IntoIterator<Item = (IpNet, T)>) -> Result<Self, IpNet> {
        let mut all: Vec<(IpNet, T)> = prefixes.into_iter().map(|(net, value)| (net.trunc(), value)).collect();
        // A prefix comes before those inside it.
        all.sort_unstable_by_key(|&(net, _)| net);
        if let Some(twice) = all.array_windows().find(|[a, b]| a.0 == b.0) {
            return Err(twice[0].0);
        }
        let nets = || all.iter().zip(0u32..).map(|(&(net, _), slot)| (net, slot));
        let v4 = nets().filter_map(|(net, slot)| match net {
            IpNet::V4(net) => Some((net.network().to_bits(), net.broadcast().to_bits(), slot)),
            IpNet::V6(_) => None,
        });
        let v6 = nets().filter_map(|(net, slot)| match net {
            IpNet::V6(net) => Some((net.network().to_bits(), net.broadcast().to_bits(), slot)),
            IpNet::V4(_) => None,
        });
        let (v4, v6) = (Intervals::new(v4), Intervals::new(v6));
        // Collected in place; otherwise the prefixes' memory would stay allocated.
        let mut values: Vec<T> = all.into_iter().map(|(_, value)| value).collect();
        values.shrink_to_fit();
        Ok(Self { values: on_huge_pages(values), v4, v6 })
    }

    /// The value of the longest prefix that contains `addr`.
    pub fn lookup(&self, addr: IpAddr) -> Option<&T> {
        self.value(self.slot(addr))
    }

    /// The number of the longest prefix that contains `addr`, counted in ascending order, IPv4 first. If there is none,
    /// a number that no prefix has.
    #[inline(always)]
    pub(crate) fn slot(&self, addr: IpAddr) -> u32 {
        match addr {
            IpAddr::V4(addr) => self.v4.slot(addr.to_bits()),
            IpAddr::V6(addr) => self.v6.slot(addr.to_bits()),
        }
    }

    /// The value of the prefix with this number.
    #[inline(always)]
    pub(crate) fn value(&self, slot: u32) -> Option<&T> {
        self.values.get(slot as usize)
    }

    /// [`lookup`](Self::lookup) of several addresses, with overlapping memory accesses: a fifth of the time if the
    /// table is not in a cache. The families may be mixed; each family that occurs costs a separate search.
    pub fn lookup_batch(&self, addrs: &[IpAddr; BATCH]) -> [Option<&T>; BATCH] {
        let (mut v4, mut v6) = ([0; BATCH], [0; BATCH]);
        let mut v6_count = 0;
        for ((v4, v6), addr) in v4.iter_mut().zip(&mut v6).zip(addrs) {
            match addr {
                IpAddr::V4(addr) => *v4 = addr.to_bits(),
                IpAddr::V6(addr) => (*v6, v6_count) = (addr.to_bits(), v6_count + 1),
            }
        }
        let mut slots = if v6_count < BATCH { self.v4.slots(&v4) } else { [NO_SLOT; BATCH] };
        if v6_count > 0 {
            let v6 = self.v6.slots(&v6);
            for ((slot, v6), addr) in slots.iter_mut().zip(v6).zip(addrs) {
                if addr.is_ipv6() {
                    *slot = v6;
                }
            }
        }
        let values = slots.map(|slot| self.values.get(slot as usize));
        values.into_iter().flatten().for_each(prefetch);
        values
    }

    /// [`lookup`](Self::lookup) of addresses in different tables, with overlapping memory accesses, for packets of
    /// different tenants. `None` costs little.
    pub fn lookup_several<'t>(asked: &[Option<(&'t Self, IpAddr)>; BATCH]) -> [Option<&'t T>; BATCH] {
        let v4 = asked.map(|asked| match asked? {
            (table, IpAddr::V4(addr)) => Some((&table.v4, addr.to_bits())),
            _ => None,
        });
        let v6 = asked.map(|asked| match asked? {
            (table, IpAddr::V6(addr)) => Some((&table.v6, addr.to_bits())),
            _ => None,
        });
        let mut slots = Intervals::slots_of(&v4);
        if v6.iter().any(Option::is_some) {
            // An address has one family, so one of the two is NO_SLOT, the largest number.
            slots.iter_mut().zip(Intervals::slots_of(&v6)).for_each(|(slot, v6)| *slot = v6.min(*slot));
        }
        let mut values = [None; BATCH];
        for ((value, slot), asked) in values.iter_mut().zip(slots).zip(asked) {
            *value = asked.and_then(|(table, _)| table.values.get(slot as usize));
        }
        values.into_iter().flatten().for_each(prefetch);
        values
    }

    /// Number of prefixes.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are no prefixes.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }
}
