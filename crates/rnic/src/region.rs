//! Registered memory (IBTA 10.6), owned by the NIC while it is registered.

use crate::verbs::{Domain, Key, Slice, VerbsError};

/// Who may write to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Only this end.
    Local,
    /// Also the peers of the domain's queue pairs.
    RemoteWrite,
}

/// A region, as seen by its owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region {
    /// Its key.
    pub key: Key,
    /// Remote address of its first byte.
    pub address: u64,
    /// Bytes.
    pub len: u32,
}

#[derive(Debug, Default)]
struct Entry {
    /// The current key, or the last one.
    key: u32,
    domain: Domain,
    access: Option<Access>,
    memory: Vec<u8>,
}

/// All regions.
#[derive(Debug)]
pub(crate) struct Regions {
    entries: Vec<Entry>,
    free: Vec<u32>,
    max: u32,
    random: fastrand::Rng,
}

/// Number of index bits in a key; the others are random.
const INDEX_BITS: u32 = 16;

impl Regions {
    /// Capacity for `max` regions, at most 65,536.
    pub(crate) fn new(max: u32, seed: u64) -> Self {
        Self {
            entries: Vec::new(),
            free: Vec::new(),
            max: max.min(1 << INDEX_BITS),
            random: fastrand::Rng::with_seed(seed),
        }
    }

    pub(crate) fn register(
        &mut self,
        domain: Domain,
        access: Access,
        memory: Vec<u8>,
    ) -> Result<Region, (VerbsError, Vec<u8>)> {
        let Ok(len) = u32::try_from(memory.len()) else { return Err((VerbsError::Value("length"), memory)) };
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.entries.len() < self.max as usize => {
                self.entries.push(Entry { key: self.random.u32(..), ..Entry::default() });
                self.entries.len() as u32 - 1
            }
            None => return Err((VerbsError::Exhausted, memory)),
        };
        let entry = &mut self.entries[index as usize];
        // A different tag than before; not the next number, which could be guessed.
        let tag = (entry.key >> INDEX_BITS).wrapping_add(self.random.u32(1..1 << (32 - INDEX_BITS)));
        let key = tag << INDEX_BITS | index;
        *entry = Entry { key, domain, access: Some(access), memory };
        Ok(Region { key: Key(key), address: address(key), len })
    }

    pub(crate) fn deregister(&mut self, key: Key) -> Option<Vec<u8>> {
        let entry = self.entry_mut(key)?;
        entry.access = None;
        let memory = std::mem::take(&mut entry.memory);
        self.free.push(key.0 & ((1 << INDEX_BITS) - 1));
        Some(memory)
    }

    /// Bytes of a slice, if it is inside a region.
    pub(crate) fn bytes(&self, slice: Slice) -> Option<&[u8]> {
        let entry = self.entries.get((slice.key.0 & ((1 << INDEX_BITS) - 1)) as usize)?;
        let entry = (entry.key == slice.key.0 && entry.access.is_some()).then_some(entry)?;
        entry.memory.get(range(slice)?)
    }

    pub(crate) fn bytes_mut(&mut self, slice: Slice) -> Option<&mut [u8]> {
        self.entry_mut(slice.key)?.memory.get_mut(range(slice)?)
    }

    pub(crate) fn copy(&mut self, from: Slice, to: Slice) -> bool {
        let (Some(range), true) = (range(from), from.len == to.len) else { return false };
        let Some(entry) = self.entry_mut(from.key) else { return false };
        if from.key == to.key || range.end > entry.memory.len() {
            return false;
        }
        // Removed from the list during the copy, so that both can be borrowed.
        let source = std::mem::take(&mut entry.memory);
        let copied = self.bytes_mut(to).map(|target| target.copy_from_slice(&source[range])).is_some();
        if let Some(entry) = self.entry_mut(from.key) {
            entry.memory = source;
        }
        copied
    }

    pub(crate) fn is_of(&self, slice: Slice, domain: Domain) -> bool {
        self.bytes(slice).is_some()
            && self.entries.get((slice.key.0 & ((1 << INDEX_BITS) - 1)) as usize).is_some_and(|e| e.domain == domain)
    }

    /// The region and offset where a peer of `domain` wants to write `len` bytes, if it may.
    pub(crate) fn remote(&self, domain: Domain, key: u32, at: u64, len: u32) -> Option<Slice> {
        let entry = self.entries.get((key & ((1 << INDEX_BITS) - 1)) as usize)?;
        if entry.key != key || entry.access != Some(Access::RemoteWrite) || entry.domain != domain {
            return None;
        }
        let offset = u32::try_from(at.checked_sub(address(key))?).ok()?;
        let end = offset.checked_add(len)?;
        (end as usize <= entry.memory.len()).then_some(Slice { key: Key(key), offset, len })
    }

    fn entry_mut(&mut self, key: Key) -> Option<&mut Entry> {
        let entry = self.entries.get_mut((key.0 & ((1 << INDEX_BITS) - 1)) as usize)?;
        (entry.key == key.0 && entry.access.is_some()).then_some(entry)
    }
}

/// Addresses are derived from the key, so that peers learn nothing about this process's address space.
fn address(key: u32) -> u64 {
    u64::from(key) << 32
}

fn range(slice: Slice) -> Option<std::ops::Range<usize>> {
    Some(slice.offset as usize..slice.offset.checked_add(slice.len)? as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_names_one_region_and_no_later_one() {
        let mut regions = Regions::new(1, 1);
        let mut last = None;
        for round in 0..200u8 {
            let region = regions.register(Domain(1), Access::RemoteWrite, vec![round; 8]).unwrap();
            assert!(regions.register(Domain(1), Access::Local, vec![]).is_err(), "capacity for one");
            assert_ne!(last.replace(region.key), Some(region.key));
            assert!(regions.remote(Domain(1), region.key.0, region.address, 8).is_some());
            assert_eq!(regions.deregister(region.key), Some(vec![round; 8]));
            assert_eq!(regions.deregister(region.key), None);
            assert_eq!(regions.remote(Domain(1), region.key.0, region.address, 8), None);
        }
    }

    #[test]
    fn peers_stay_inside() {
        let mut regions = Regions::new(4, 2);
        let Region { key, address, .. } = regions.register(Domain(1), Access::RemoteWrite, vec![0; 100]).unwrap();
        let local = regions.register(Domain(1), Access::Local, vec![0; 100]).unwrap();
        let cases = [
            (1, key.0, address, 100, true),
            (1, key.0, address + 100, 0, true),
            (1, key.0, address + 1, 100, false),
            (1, key.0, address - 1, 1, false),
            (1, key.0, address + 99, u32::MAX, false),
            (1, key.0, u64::MAX, 1, false),
            (2, key.0, address, 1, false),
            (1, key.0 ^ 1 << 16, address, 1, false),
            (1, key.0 ^ 2, address, 1, false),
            (1, local.key.0, local.address, 1, false),
        ];
        for (domain, key, at, len, may) in cases {
            assert_eq!(regions.remote(Domain(domain), key, at, len).is_some(), may, "{domain} {key} {at} {len}");
        }
    }
}
