//! Longest-prefix match for one large IPv4 table: DIR-24-8 (Gupta, Lin, McKeown: *Routing Lookups in Hardware at Memory
//! Access Speeds*, INFOCOM'98).

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use thiserror::Error;

use crate::pages::on_huge_pages;
use crate::prefetch::prefetch;
use crate::{ExactMap, exact_map};

/// Lookups that [`Dir24::lookup_batch`] does at once.
pub const FIB_BATCH: usize = 16;

/// The largest value of a prefix.
pub const FIB_VALUE_MAX: u32 = (1 << 24) - 1;

const NONE: u32 = 0;
/// Flag: the other bits are the number of a group.
const GROUP: u32 = 1 << 31;
const GROUP_LEN: usize = 256;

/// Why a prefix cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum FibError {
    /// The value is too large.
    #[error("value {0} does not fit into 24 bits")]
    Value(u32),
    /// Prefixes longer than /24 need another group of 256 addresses.
    #[error("no room for {0}: {1} networks of length /24 have longer prefixes already")]
    Full(Ipv4Net, u32),
}

/// Values by IPv4 prefix: a lookup takes one memory access, or two below prefixes longer than /24. The table takes 64
/// MB, and 1 KB for each /24 that contains longer prefixes. Use it for the one table of the Internet;
/// [`Lpm`](crate::Lpm) suits a table per tenant.
///
/// Prefixes can be added and removed one by one. The time is proportional to the number of addresses: 16 million steps
/// for 0.0.0.0/0, at most 256 for /16 to /32.
#[derive(Clone, Debug)]
pub struct Dir24 {
    /// By the first 24 bits.
    top: Box<[u32]>,
    /// By group, and the last 8 bits.
    groups: Vec<[u32; GROUP_LEN]>,
    free: Vec<u32>,
    groups_max: u32,
    prefixes: ExactMap<(u32, u8), u32>,
}

/// A value, with the length of its prefix plus one: a shorter prefix that overlaps must not replace it.
fn entry(value: u32, len: u8) -> u32 {
    (u32::from(len) + 1) << 24 | value
}

/// The length of the prefix plus one; 0 if there is none.
fn rank(entry: u32) -> u32 {
    entry >> 24
}

impl Dir24 {
    /// An empty table. `groups_max`, at most 2^23, bounds the number of /24 networks that contain longer prefixes (1 KB
    /// each). `seed` seeds the hash table of prefixes, because BGP peers choose the prefixes.
    pub fn new(groups_max: u32, seed: u64) -> Self {
        Dir24 {
            top: on_huge_pages(vec![NONE; 1 << 24]).into(),
            groups: Vec::new(),
            free: Vec::new(),
            groups_max: groups_max.min(1 << 23),
            prefixes: exact_map(seed),
        }
    }

    /// Number of prefixes.
    pub fn len(&self) -> usize {
        self.prefixes.len()
    }

    /// Whether there are no prefixes.
    pub fn is_empty(&self) -> bool {
        self.prefixes.is_empty()
    }

    /// Bytes of the lookup tables.
    pub fn bytes(&self) -> usize {
        size_of_val::<[u32]>(&self.top) + self.groups.capacity() * size_of::<[u32; GROUP_LEN]>()
    }

    /// Adds a prefix, or changes its value. Host bits are ignored.
    ///
    /// # Errors
    /// The value or the prefix does not fit; the table is unchanged.
    pub fn insert(&mut self, net: Ipv4Net, value: u32) -> Result<(), FibError> {
        if value > FIB_VALUE_MAX {
            return Err(FibError::Value(value));
        }
        let (first, len) = (net.network().to_bits(), net.prefix_len());
        let new = entry(value, len);
        let replace = |old: &mut u32| {
            if rank(*old) <= rank(new) {
                *old = new;
            }
        };
        if len > 24 {
            let group = self.group(net)?;
            self.groups[group][within(first, len)].iter_mut().for_each(replace);
        } else {
            let groups = &mut self.groups;
            for old in &mut self.top[range(first, len)] {
                match *old & GROUP {
                    0 => replace(old),
                    _ => groups[(*old ^ GROUP) as usize].iter_mut().for_each(replace),
                }
            }
        }
        self.prefixes.insert((first, len), value);
        Ok(())
    }

    /// Removes a prefix. Returns false if it does not exist.
    pub fn remove(&mut self, net: Ipv4Net) -> bool {
        let (first, len) = (net.network().to_bits(), net.prefix_len());
        if self.prefixes.remove(&(first, len)).is_none() {
            return false;
        }
        // The prefix that covers its addresses afterwards.
        let shorter = (0..len).rev().find_map(|len| {
            let around = first & mask(len);
            self.prefixes.get(&(around, len)).map(|value| entry(*value, len))
        });
        let (new, gone) = (shorter.unwrap_or(NONE), u32::from(len) + 1);
        let replace = |old: &mut u32| {
            if rank(*old) == gone {
                *old = new;
            }
        };
        if len > 24 {
            let top = (first >> 8) as usize;
            let group = (self.top[top] ^ GROUP) as usize;
            self.groups[group][within(first, len)].iter_mut().for_each(replace);
            // Without longer prefixes, all entries are equal.
            if self.groups[group].iter().all(|e| rank(*e) <= 25) {
                self.top[top] = self.groups[group][0];
                self.free.push(group as u32);
            }
        } else {
            let groups = &mut self.groups;
            for old in &mut self.top[range(first, len)] {
                match *old & GROUP {
                    0 => replace(old),
                    _ => groups[(*old ^ GROUP) as usize].iter_mut().for_each(replace),
                }
            }
        }
        true
    }

    /// The group of a prefix longer than /24.
    fn group(&mut self, net: Ipv4Net) -> Result<usize, FibError> {
        let top = (net.network().to_bits() >> 8) as usize;
        let old = self.top[top];
        if old & GROUP != 0 {
            return Ok((old ^ GROUP) as usize);
        }
        let group = match self.free.pop() {
            Some(group) => group,
            None if self.groups.len() < self.groups_max as usize => {
                self.groups.push([NONE; GROUP_LEN]);
                self.groups.len() as u32 - 1
            }
            None => return Err(FibError::Full(net, self.groups_max)),
        };
        self.groups[group as usize] = [old; GROUP_LEN];
        self.top[top] = GROUP | group;
        Ok(group as usize)
    }

    /// The value of the longest prefix that contains `addr`.
    #[inline]
    pub fn lookup(&self, addr: Ipv4Addr) -> Option<u32> {
        let addr = addr.to_bits();
        self.second(self.top[(addr >> 8) as usize], addr)
    }

    /// Prefetches the entry of an address.
    #[inline]
    pub fn fetch_ahead(&self, addr: Ipv4Addr) {
        prefetch(&self.top[(addr.to_bits() >> 8) as usize]);
    }

    /// [`lookup`](Self::lookup) of several addresses, with overlapping memory accesses.
    #[inline]
    pub fn lookup_batch(&self, addrs: &[Ipv4Addr; FIB_BATCH]) -> [Option<u32>; FIB_BATCH] {
        let indexes = addrs.map(|addr| (addr.to_bits() >> 8) as usize);
        indexes.iter().for_each(|index| prefetch(&self.top[*index]));
        let tops = indexes.map(|index| self.top[index]);
        std::array::from_fn(|i| self.second(tops[i], addrs[i].to_bits()))
    }

    #[inline]
    fn second(&self, top: u32, addr: u32) -> Option<u32> {
        let found = match top & GROUP {
            0 => top,
            _ => self.groups[(top ^ GROUP) as usize][(addr & 0xff) as usize],
        };
        (found != NONE).then_some(found & FIB_VALUE_MAX)
    }
}

fn mask(len: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(len)).unwrap_or(0)
}

/// The entries of a prefix of at most 24 bits.
fn range(first: u32, len: u8) -> std::ops::Range<usize> {
    let start = (first >> 8) as usize;
    start..start + (1 << (24 - len))
}

/// The entries of a longer prefix in its group.
fn within(first: u32, len: u8) -> std::ops::Range<usize> {
    let start = (first & 0xff) as usize;
    start..start + (1 << (32 - len))
}
