//! A guest's memory, shared by the front-end.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{AtomicInteger, VolatileMemory, VolatileSlice};

use super::mapping::{self, Mapping};
use super::mutation::access;
use crate::prefetch::{LINE, prefetch, prefetch_to_write};

/// One region of a guest's memory (vhost-user, "memory region description").
#[derive(Debug)]
pub struct RegionSpec {
    /// Guest address.
    pub guest: u64,
    /// Address in the front-end's process.
    pub user: u64,
    /// Size, bytes.
    pub size: u64,
    /// Offset in `file`, bytes.
    pub offset: u64,
    /// The memory: a memfd, or a file on tmpfs or hugetlbfs. With others, each access may wait for a disk.
    pub file: File,
}

/// A guest's memory. Every access is bounds-checked; nothing of it is ever borrowed, because the guest may write to it
/// at any time.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// Sorted by guest address.
    regions: Vec<Region>,
}

#[derive(Clone, Debug)]
struct Region {
    guest: u64,
    user: u64,
    size: u64,
    /// Offset in its file.
    offset: u64,
    /// Offset in the mapping.
    at: u64,
    /// Device and inode.
    file: (u64, u64),
    /// How often it was added.
    times: u32,
    mapping: Arc<Mapping>,
}

/// Where a region is: see [`RegionSpec`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) guest: u64,
    pub(super) user: u64,
    pub(super) size: u64,
    pub(super) offset: u64,
}

/// Why memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The values are inconsistent.
    #[error("memory region at guest address {guest:#x}, {size:#x} bytes: {problem}")]
    Region {
        /// The region's guest address.
        guest: u64,
        /// Its size, bytes.
        size: u64,
        /// What is wrong.
        problem: &'static str,
    },
    /// The file cannot be mapped.
    #[error("memory region at guest address {guest:#x}: cannot map it: {source}")]
    Map {
        /// The region's guest address.
        guest: u64,
        /// The kernel's error.
        source: io::Error,
    },
}

impl Memory {
    /// Maximum number of regions.
    pub const MAX_REGIONS: usize = 64;
    /// Maximum address space of all regions together, bytes.
    pub const MAX_BYTES: u64 = mapping::MAX_BYTES;

    /// Adds a region.
    ///
    /// # Errors
    /// It overlaps another region, cannot be mapped, or exceeds a limit; nothing has changed then.
    pub fn add(&mut self, spec: RegionSpec) -> Result<(), MemoryError> {
        let RegionSpec { guest, user, size, offset, file } = spec;
        let bad = |problem| MemoryError::Region { guest, size, problem };
        let map = |source| MemoryError::Map { guest, source };
        if size == 0 || guest.checked_add(size).is_none() || user.checked_add(size).is_none() {
            return Err(bad("its end is not a valid address"));
        }
        if self.regions.len() == Self::MAX_REGIONS {
            return Err(bad("the guest already has 64 regions"));
        }
        if self.regions.iter().any(|r| guest < r.guest + r.size && r.guest < guest + size) {
            return Err(bad("it overlaps another region"));
        }
        let end = offset.checked_add(size).ok_or_else(|| bad("its end in the file overflows"))?;
        if self.bytes().saturating_add(size) > Self::MAX_BYTES {
            return Err(bad("a guest can have at most 2 TiB of memory"));
        }
        let metadata = file.metadata().map_err(map)?;
        if metadata.len() < end {
            return Err(bad("the file is too short"));
        }
        let mapping = Mapping::new(file, offset, size).map_err(map)?;
        let index = self.regions.partition_point(|r| r.guest < guest);
        let (file, at, mapping) = ((metadata.dev(), metadata.ino()), mapping.at() as u64, Arc::new(mapping));
        self.regions.insert(index, Region { guest, user, size, offset, at, file, times: 1, mapping });
        Ok(())
    }

    /// Counts another addition of an existing region; returns whether it exists. QEMU 7.2 adds and removes each region
    /// once per queue pair.
    pub fn add_again(&mut self, spec: &RegionSpec) -> bool {
        let place = (spec.guest, spec.user, spec.size, spec.offset);
        let Some(there) = self.regions.iter_mut().find(|r| (r.guest, r.user, r.size, r.offset) == place) else {
            return false;
        };
        let is_same = spec.file.metadata().is_ok_and(|m| (m.dev(), m.ino()) == there.file);
        there.times = there.times.saturating_add(u32::from(is_same));
        is_same
    }

    /// Undoes one addition of the region at these addresses. Returns how many additions remain; `None` if it does not
    /// exist.
    pub fn remove(&mut self, guest: u64, user: u64, size: u64) -> Option<u32> {
        let at = self.regions.iter().position(|r| (r.guest, r.user, r.size) == (guest, user, size))?;
        self.regions[at].times -= 1;
        let left = self.regions[at].times;
        if left == 0 {
            self.regions.remove(at);
        }
        Some(left)
    }

    /// Number of regions.
    pub fn regions(&self) -> usize {
        self.regions.len()
    }

    /// Each region, how often it was added, and its file.
    pub(super) fn specs(&self) -> impl Iterator<Item = (Place, u32, &File)> {
        self.regions.iter().filter_map(|region| {
            let Region { guest, user, size, offset, times, .. } = *region;
            Some((Place { guest, user, size, offset }, times, region.mapping.region().file_offset()?.file()))
        })
    }

    /// The first guest address after all regions; 0 if there is none.
    pub(super) fn end(&self) -> u64 {
        self.regions.last().map_or(0, |r| r.guest + r.size)
    }

    /// The guest address for `user` in the front-end's process.
    pub(super) fn guest_address(&self, user: u64) -> Option<u64> {
        self.regions.iter().find_map(|r| user.checked_sub(r.user).filter(|at| *at < r.size).map(|at| r.guest + at))
    }

    /// Guest address and size of each region.
    pub(super) fn spans(&self) -> impl Iterator<Item = (u64, u64)> {
        self.regions.iter().map(|r| (r.guest, r.size))
    }

    /// Bytes mapped for its regions.
    fn bytes(&self) -> u64 {
        self.regions.iter().map(|r| r.mapping.len()).sum()
    }

    /// Prefetches the first lines of a buffer at `guest`, for writing if `to_write`.
    #[inline]
    pub(crate) fn prefetch(&self, guest: u64, to_write: bool) {
        let Some((region, _)) = self.find(guest) else { return };
        let start = region.at + (guest - region.guest);
        // Only the address is used.
        let at = region.mapping.region().as_ptr().wrapping_add(start as usize);
        for line in [at, at.wrapping_add(LINE)] {
            if to_write { prefetch_to_write(line) } else { prefetch(line) }
        }
    }

    /// Whether an access has found that some of it is lost, because its file was truncated.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.regions.iter().any(|r| r.mapping.is_lost())
    }

    /// Whether all of the `len` bytes at `guest` are memory.
    pub(crate) fn contains(&self, guest: u64, len: u64) -> bool {
        let (mut guest, mut left) = (guest, len);
        while left > 0 {
            let Some((_, here)) = self.find(guest) else { return false };
            if here >= left {
                return true;
            }
            guest += here;
            left -= here;
        }
        true
    }

    /// Reads at `guest`; returns whether all of it is memory. Otherwise the rest of `out` is unchanged.
    pub(crate) fn read(&self, guest: u64, out: &mut [u8]) -> bool {
        let mut done = 0;
        self.each(guest, out.len(), |slice| {
            slice.copy_to(&mut out[done..done + slice.len()]);
            done += slice.len();
        })
    }

    /// Appends `len` bytes from `guest` on; returns whether all of it is memory. Otherwise it appends the part that is.
    pub(crate) fn append(&self, guest: u64, len: usize, out: &mut Vec<u8>) -> bool {
        out.reserve(len);
        self.each(guest, len, |slice| {
            let (from, bytes) = (slice.ptr_guard(), slice.len());
            // `each` passes at most `len` bytes in total.
            let Some(to) = out.spare_capacity_mut().get_mut(..bytes) else { return };
            // SAFETY: `from` is valid for `bytes` bytes while the guard lives; `to` is as long and belongs to `out`
            // alone. The guest may write at the same time; then the bytes are an arbitrary mixture, which all readers
            // must expect anyway.
            unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), to.as_mut_ptr().cast(), bytes) };
            let len = out.len() + bytes;
            // SAFETY: these bytes were just written, within the capacity.
            unsafe { out.set_len(len) };
        })
    }

    /// Writes to `guest`; returns whether all of it is memory. Otherwise it writes the part that is.
    pub(crate) fn write(&self, guest: u64, bytes: &[u8]) -> bool {
        let mut done = 0;
        self.each(guest, bytes.len(), |slice| {
            slice.copy_from(&bytes[done..done + slice.len()]);
            done += slice.len();
        })
    }

    /// The area of `len` bytes at `user` in the front-end's process, if it is within one region and aligned to `align`.
    pub(crate) fn area(memory: &Arc<Memory>, user: u64, len: usize, align: u64) -> Option<Area> {
        let region = memory
            .regions
            .iter()
            .position(|r| user.checked_sub(r.user).is_some_and(|at| at < r.size && len as u64 <= r.size - at))?;
        let r = &memory.regions[region];
        let start = r.at + (user - r.user);
        // The region in a message may be larger than its mapping.
        let slice = r.mapping.region().get_slice(start as usize, len).ok()?;
        let base = slice.ptr_guard_mut().as_ptr();
        start.is_multiple_of(align).then(|| Area { _memory: Arc::clone(memory), base, len })
    }

    /// The region of an address, and its remaining bytes from there on.
    #[inline]
    fn find(&self, guest: u64) -> Option<(&Region, u64)> {
        self.regions.iter().find_map(|r| {
            let at = guest.wrapping_sub(r.guest);
            (at < r.size).then(|| (r, r.size - at))
        })
    }

    /// Calls `f` for each contiguous part of an area. Returns whether all of it is memory.
    #[inline]
    fn each(&self, guest: u64, len: usize, mut f: impl FnMut(VolatileSlice<'_>)) -> bool {
        access!();
        let (mut guest, mut left) = (guest, len as u64);
        while left > 0 {
            let Some((region, here)) = self.find(guest) else { return false };
            let take = here.min(left);
            let start = region.at + (guest - region.guest);
            let Ok(slice) = region.mapping.region().get_slice(start as usize, take as usize) else { return false };
            f(slice);
            guest += take;
            left -= take;
        }
        true
    }
}

/// A part of a guest's memory with a structure: a ring, or the inflight record.
#[derive(Clone, Debug)]
pub(crate) struct Area {
    /// Keeps the mapping alive.
    _memory: Arc<Memory>,
    base: *mut u8,
    len: usize,
}

// SAFETY: its target is not tied to a thread: it stays mapped while `_memory` lives, and is accessed only by atomics.
unsafe impl Send for Area {}
// SAFETY: as above.
unsafe impl Sync for Area {}

impl Area {
    /// An atomic load. Returns 0 outside of the area or if unaligned, which no caller does.
    #[inline]
    pub(crate) fn load<T: vm_memory::AtomicAccess + Default>(&self, at: usize, order: Ordering) -> T {
        self.atomic::<T>(at).map(|a| a.load(order).into()).unwrap_or_default()
    }

    /// An atomic store.
    #[inline]
    pub(crate) fn store<T: vm_memory::AtomicAccess>(&self, at: usize, value: T, order: Ordering) {
        if let Some(a) = self.atomic::<T>(at) {
            a.store(value.into(), order);
        }
    }

    /// Sets bits of a byte atomically, with release ordering.
    #[inline]
    pub(super) fn set_bits(&self, at: usize, bits: u8) {
        if let Some(byte) = self.atomic::<u8>(at) {
            byte.fetch_or(bits, Ordering::AcqRel);
        }
    }

    /// Prefetches the line at `at`.
    #[inline]
    pub(crate) fn prefetch(&self, at: usize) {
        prefetch(self.base.wrapping_add(at));
    }

    #[inline]
    fn atomic<T: vm_memory::AtomicAccess>(&self, at: usize) -> Option<&T::A> {
        access!();
        let inside = at.checked_add(size_of::<T::A>()).is_some_and(|end| end <= self.len);
        let pointer = self.base.wrapping_add(at).cast::<T::A>();
        // SAFETY: it is aligned and inside the area, which was found to be mapped when it was made and stays mapped
        // with `_memory`, longer than the reference. Every bit pattern is a valid integer. This process accesses it
        // only by atomics; concurrent guest writes act like those of another thread.
        (inside && pointer.is_aligned()).then(|| unsafe { &*pointer })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(bytes: u64) -> File {
        let file = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).expect("a file");
        let file = File::from(file);
        file.set_len(bytes).expect("its size");
        file
    }

    fn spec(guest: u64, user: u64, size: u64, offset: u64, file: File) -> RegionSpec {
        RegionSpec { guest, user, size, offset, file }
    }

    #[test]
    fn regions_are_checked() {
        let mut memory = Memory::default();
        memory.add(spec(0x1000, 0x10_1000, 0x1000, 0x800, file(0x1800))).expect("fits");
        let all = file(0x4000);
        for (name, guest, size, offset) in [
            ("empty", 0, 0, 0),
            ("overlaps at its end", 0x800, 0x801, 0),
            ("overlaps at its start", 0x1fff, 1, 0),
            ("inside", 0x1400, 1, 0),
            ("around", 0, 0x4000, 0),
            ("beyond the file", 0x8000, 0x4000, 1),
            ("end overflows", u64::MAX, 2, 0),
            ("offset overflows", 0x8000, 2, u64::MAX),
        ] {
            let spec = spec(guest, 0, size, offset, all.try_clone().expect("file"));
            assert!(memory.add(spec).is_err(), "{name}");
        }
        let huge = file(Memory::MAX_BYTES + 0x1000);
        let whole = spec(0x8000, 0, Memory::MAX_BYTES, 0, huge.try_clone().expect("file"));
        assert!(memory.add(whole).is_err(), "more than a guest can have, with the existing regions");
        // The part of the file before it is not mapped.
        for i in 1..40 {
            let offset = Memory::MAX_BYTES - 0x1000 * i;
            memory.add(spec(0x10_000 * i, 0, 0x1000, offset, huge.try_clone().expect("file"))).expect("a page");
        }
        assert!(memory.bytes() <= 41 * 0x1000, "{:#x} bytes are mapped", memory.bytes());
        for i in 1..40 {
            assert_eq!(memory.remove(0x10_000 * i, 0, 0x1000), Some(0));
        }
        assert_eq!(memory.regions(), 1);
        let places = [(0x1000, 0x10_1000, 0x800), (0x1000, 0x10_1000, 0x1000), (0x1000, 0x10_1000, 0x1000)];
        assert_eq!(places.map(|(guest, user, size)| memory.remove(guest, user, size)), [None, Some(0), None]);
        assert_eq!(memory.regions(), 0);
    }

    #[test]
    fn a_region_added_per_queue_pair_stays_until_removed_as_often() {
        let (mut memory, shared) = (Memory::default(), file(0x1000));
        let again = || spec(0x1000, 0x5000, 0x1000, 0, shared.try_clone().expect("file"));
        assert!(!memory.add_again(&again()), "does not exist yet");
        memory.add(again()).expect("fits");
        assert!(memory.add_again(&again()));
        assert!(!memory.add_again(&spec(0x1000, 0x5000, 0x1000, 0, file(0x1000))), "another file");
        assert!(!memory.add_again(&spec(0x1000, 0x6000, 0x1000, 0, shared.try_clone().expect("file"))), "elsewhere");
        assert_eq!(memory.regions(), 1);
        assert_eq!([0; 3].map(|_| memory.remove(0x1000, 0x5000, 0x1000)), [Some(1), Some(0), None]);
    }

    #[test]
    fn accesses_cross_adjacent_regions_and_stay_inside() {
        let mut memory = Memory::default();
        memory.add(spec(0x2000, 0x9000, 0x1000, 0, file(0x1000))).expect("second");
        memory.add(spec(0x1000, 0x5000, 0x1000, 0x800, file(0x1800))).expect("first");
        let bytes: Vec<u8> = (0..64).collect();
        assert!(memory.write(0x2000 - 20, &bytes));
        let (mut read, mut appended) = ([0; 64], vec![9]);
        assert!(memory.read(0x2000 - 20, &mut read) && memory.append(0x2000 - 20, 64, &mut appended));
        assert_eq!((&read[..], &appended[1..]), (&bytes[..], &bytes[..]));
        assert!(memory.contains(0x1000, 0x2000) && !memory.contains(0x1000, 0x2001) && !memory.contains(0xfff, 2));
        assert!(!memory.contains(u64::MAX, 2));
        appended.clear();
        assert!(!memory.append(0x3000 - 10, 64, &mut appended));
        assert_eq!(appended.len(), 10, "only the existing part");
        assert!(!memory.write(u64::MAX - 3, &bytes) && !memory.read(0x3000, &mut read));
    }

    #[test]
    fn areas_are_within_one_region() {
        let mut memory = Memory::default();
        memory.add(spec(0x1000, 0x5000, 0x1000, 0, file(0x1000))).expect("first");
        memory.add(spec(0x2000, 0x6000, 0x1000, 0, file(0x1000))).expect("second");
        let memory = Arc::new(memory);
        for (user, len, align, is_there) in [
            (0x5000, 0x1000, 16, true),
            (0x5ff0, 16, 16, true),
            (0x5ff0, 17, 16, false),
            (0x5ff8, 8, 16, false),
            (0x4fff, 1, 1, false),
            (u64::MAX, 1, 1, false),
            (0x7000, 1, 1, false),
        ] {
            assert_eq!(Memory::area(&memory, user, len, align).is_some(), is_there, "{user:#x} {len}");
        }
        let area = Memory::area(&memory, 0x6010, 16, 2).expect("area");
        area.store::<u16>(4, 0x1234, Ordering::Release);
        assert_eq!(area.load::<u16>(4, Ordering::Acquire), 0x1234);
        let mut bytes = [0; 2];
        assert!(memory.read(0x2014, &mut bytes));
        assert_eq!(u16::from_ne_bytes(bytes), 0x1234);
        area.store::<u16>(16, 1, Ordering::Release);
        assert_eq!(area.load::<u16>(16, Ordering::Acquire), 0, "outside");
        area.store::<u32>(14, !0, Ordering::Release);
        area.store::<u32>(2, !0, Ordering::Release);
        area.store::<u16>(usize::MAX, !0, Ordering::Release);
        assert!(memory.read(0x2010, &mut bytes) && bytes == [0; 2]);
        assert!(memory.read(0x201e, &mut bytes) && bytes == [0; 2], "half outside");
        assert_eq!(area.load::<u32>(2, Ordering::Acquire), 0, "not aligned");
        // Prefetches accept any address.
        for at in [0, 0x1000, 0x2fff, u64::MAX] {
            memory.prefetch(at, at % 2 == 0);
        }
        area.prefetch(usize::MAX);
    }
}
