//! Registered memory. The NIC accesses it at any time, so it must not move until it is deregistered.

use std::ffi::{c_int, c_void};

use bifrost_rnic::{Access, Domain, Key, Region, Slice, VerbsError};
use hashbrown::HashMap;

use super::library::{Functions, errno};
use super::sys::{ACCESS_LOCAL_WRITE, ACCESS_REMOTE_WRITE, Mr, Pd, Sge};

/// Operation in errors about registration; the error number does not tell the usual reason.
pub(super) const REGISTERING: &str = "registering memory (is the limit of locked memory, ulimit -l, too low?)";

/// Memory that is registered with the NIC, owned until it is released.
#[derive(Debug)]
pub(super) struct Registered {
    memory: Vec<u8>,
    /// Null: memory of zero bytes is not registered.
    mr: *mut Mr,
    lkey: u32,
    rkey: u32,
    /// Address of its first byte in work requests, local and remote.
    base: u64,
}

impl Registered {
    /// Registers memory with a protection domain. Its addresses consist of `tag` and the offset in a page.
    pub(super) fn new(
        functions: &Functions,
        pd: *mut Pd,
        access: Access,
        tag: u32,
        mut memory: Vec<u8>,
    ) -> Result<Self, (VerbsError, Vec<u8>)> {
        if memory.is_empty() {
            return Ok(Self { memory, mr: std::ptr::null_mut(), lkey: 0, rkey: 0, base: 0 });
        }
        if u32::try_from(memory.len()).is_err() {
            return Err((VerbsError::Value("length"), memory));
        }
        let at = memory.as_mut_ptr();
        // Peers learn nothing about this process's address space, except the offset in a large page, by which drivers
        // map.
        let base = (u64::from(tag) | 1) << 32 | (at as u64 & ((1 << 21) - 1));
        let flags = match access {
            Access::Local => ACCESS_LOCAL_WRITE,
            Access::RemoteWrite => ACCESS_LOCAL_WRITE | ACCESS_REMOTE_WRITE,
        };
        // SAFETY: the result owns the memory, and neither moves nor frees it before it is deregistered.
        let mr = unsafe { (functions.reg_mr)(pd, at.cast::<c_void>(), memory.len(), base, flags as c_int) };
        if mr.is_null() {
            return Err((VerbsError::System(REGISTERING, errno()), memory));
        }
        // SAFETY: the library has just created this region.
        let (lkey, rkey) = unsafe { ((*mr).lkey, (*mr).rkey) };
        Ok(Self { memory, mr, lkey, rkey, base })
    }

    /// Deregisters memory. If that fails, the NIC may still use it: then it is never freed, and the caller gets a copy.
    pub(super) fn release(self, functions: &Functions) -> Vec<u8> {
        // SAFETY: registered, and not released before: `self` is consumed.
        if !self.mr.is_null() && unsafe { (functions.dereg_mr)(self.mr) } != 0 {
            return self.memory.leak().to_vec();
        }
        self.memory
    }

    /// A scatter/gather element for a work request. The caller has checked that it is inside.
    pub(super) fn sge(&self, offset: usize, len: u32) -> Sge {
        Sge { addr: self.base + offset as u64, length: len, lkey: self.lkey }
    }

    /// The same for inline data, which the library reads itself.
    pub(super) fn inline_sge(&self, offset: usize, len: u32) -> Sge {
        Sge { addr: self.memory.as_ptr() as u64 + offset as u64, length: len, lkey: 0 }
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory
    }

    pub(super) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory
    }
}

#[derive(Debug)]
struct Entry {
    registered: Registered,
    domain: Domain,
    access: Access,
    /// Send requests with this region that are posted and not polled.
    posted: u32,
    /// Deregistered, but the NIC may still read it.
    retired: bool,
}

/// All regions, by the key that the caller knows: the remote key for memory that peers may write to.
#[derive(Debug)]
pub(super) struct Regions {
    entries: HashMap<u32, Entry>,
    max: usize,
    random: fastrand::Rng,
}

impl Regions {
    pub(super) fn new(max: u32, seed: u64) -> Self {
        Self { entries: HashMap::new(), max: max as usize, random: fastrand::Rng::with_seed(seed) }
    }

    pub(super) fn register(
        &mut self,
        functions: &Functions,
        pd: *mut Pd,
        domain: Domain,
        access: Access,
        memory: Vec<u8>,
    ) -> Result<Region, (VerbsError, Vec<u8>)> {
        if self.entries.len() >= self.max {
            return Err((VerbsError::Exhausted, memory));
        }
        let registered = Registered::new(functions, pd, access, self.random.u32(..1 << 30), memory)?;
        let key = match access {
            // For empty memory any number will do.
            _ if registered.mr.is_null() => loop {
                let key = self.random.u32(..);
                if !self.entries.contains_key(&key) {
                    break key;
                }
            },
            Access::Local => registered.lkey,
            Access::RemoteWrite => registered.rkey,
        };
        if self.entries.contains_key(&key) {
            // A driver whose local and remote keys overlap.
            return Err((VerbsError::Exhausted, registered.release(functions)));
        }
        let region = Region { key: Key(key), address: registered.base, len: registered.memory.len() as u32 };
        self.entries.insert(key, Entry { registered, domain, access, posted: 0, retired: false });
        Ok(region)
    }

    /// Deregisters memory; peers can no longer write to it. Memory that the NIC may still be sending stays registered
    /// until that is done, because deregistering it would put the queue pair into error. The caller gets a copy then.
    pub(super) fn deregister(&mut self, functions: &Functions, key: Key) -> Option<Vec<u8>> {
        let entry = self.entries.get_mut(&key.0).filter(|entry| !entry.retired)?;
        if entry.posted > 0 && entry.access == Access::Local {
            entry.retired = true;
            return Some(entry.registered.memory.clone());
        }
        let entry = self.entries.remove(&key.0)?;
        Some(entry.registered.release(functions))
    }

    pub(super) fn bytes(&self, slice: Slice) -> Option<&[u8]> {
        self.entry(slice.key)?.registered.memory.get(range(slice)?)
    }

    pub(super) fn bytes_mut(&mut self, slice: Slice) -> Option<&mut [u8]> {
        let entry = self.entries.get_mut(&slice.key.0).filter(|entry| !entry.retired)?;
        entry.registered.memory.get_mut(range(slice)?)
    }

    pub(super) fn copy(&mut self, from: Slice, to: Slice) -> bool {
        if from.key == to.key || from.len != to.len {
            return false;
        }
        let (Some(from_range), Some(to_range)) = (range(from), range(to)) else { return false };
        let [Some(source), Some(target)] = self.entries.get_disjoint_mut([&from.key.0, &to.key.0]) else {
            return false;
        };
        if source.retired || target.retired {
            return false;
        }
        match (source.registered.memory.get(from_range), target.registered.memory.get_mut(to_range)) {
            (Some(source), Some(target)) => {
                target.copy_from_slice(source);
                true
            }
            _ => false,
        }
    }

    /// A slice for a work request of a queue pair of `domain`: registered, and inline.
    pub(super) fn sge(&self, slice: Slice, domain: Domain) -> Option<(Sge, Sge)> {
        let entry = self.entry(slice.key).filter(|entry| entry.domain == domain)?;
        let range = range(slice).filter(|range| range.end <= entry.registered.memory.len())?;
        Some((entry.registered.sge(range.start, slice.len), entry.registered.inline_sge(range.start, slice.len)))
    }

    /// Counts a posted send request of a region.
    pub(super) fn hold(&mut self, key: Key) {
        if let Some(entry) = self.entries.get_mut(&key.0) {
            entry.posted += 1;
        }
    }

    /// The send request has completed.
    pub(super) fn let_go(&mut self, functions: &Functions, key: Key) {
        let Some(entry) = self.entries.get_mut(&key.0) else { return };
        entry.posted = entry.posted.saturating_sub(1);
        if entry.posted == 0
            && entry.retired
            && let Some(entry) = self.entries.remove(&key.0)
        {
            drop(entry.registered.release(functions));
        }
    }

    /// Deregisters everything.
    pub(super) fn clear(&mut self, functions: &Functions) {
        for (_, entry) in self.entries.drain() {
            drop(entry.registered.release(functions));
        }
    }

    fn entry(&self, key: Key) -> Option<&Entry> {
        self.entries.get(&key.0).filter(|entry| !entry.retired)
    }
}

fn range(slice: Slice) -> Option<std::ops::Range<usize>> {
    Some(slice.offset as usize..slice.offset.checked_add(slice.len)? as usize)
}
