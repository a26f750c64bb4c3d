//! Mappings of a front-end's memory that survive losing the memory.
//!
//! A process that shares memory can truncate its file or punch holes in it at any time; the next access to the lost
//! part raises SIGBUS, which would end this process and with it the network of every other guest. While there are
//! mappings, a SIGBUS handler is installed: if the address is inside one of them, it replaces the whole mapping by
//! empty memory and marks it as lost. Any other SIGBUS goes to the previous handler.

use std::ffi::{c_int, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU64, AtomicUsize, Ordering};

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstatfs, ftruncate, memfd_create};
use vm_memory::mmap::MmapRegionError;
use vm_memory::{FileOffset, MmapRegion};

use super::mutation::mutated;

/// Maximum number of mappings at a time, of all guests together.
const SLOTS: usize = 32_768;
/// Maximum size of a mapping, bytes.
pub(super) const MAX_BYTES: u64 = 1 << 41;
/// Maximum total size of mappings at a time, bytes, of all guests together: a process has 128 TiB of address space.
const MAX_MAPPED: u64 = 96 << 40;
/// `statfs` type of hugetlbfs (`linux/magic.h`).
const HUGETLBFS: u32 = 0x9584_58f6;

/// Address range of a mapping. The signal handler reads it, so it consists of atomics only; free while `start` is 0.
struct Slot {
    start: AtomicUsize,
    len: AtomicUsize,
    lost: AtomicBool,
}

static TABLE: [Slot; SLOTS] =
    [const { Slot { start: AtomicUsize::new(0), len: AtomicUsize::new(0), lost: AtomicBool::new(false) } }; SLOTS];

/// `start` of a slot in transition: being filled or emptied.
const CLAIMED: usize = 1;

/// Bytes mapped.
static MAPPED: AtomicU64 = AtomicU64::new(0);

/// Replacement for lost memory: a file without pages, with a range per slot. Mapping it needs no memory, whatever the
/// mapping's size and the kernel's overcommit policy.
static EMPTY: AtomicI32 = AtomicI32::new(-1);

/// A mapped part of a file.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// Dropped (unmapped) before `place`: a free slot may be reused by another mapping.
    region: MmapRegion,
    place: Place,
    at: usize,
}

impl Mapping {
    /// Maps `bytes` of `file` from `offset` on, extended to whole pages.
    ///
    /// # Errors
    /// The kernel's error; or the mappings are too many or too large.
    pub(crate) fn new(file: File, offset: u64, bytes: u64) -> io::Result<Mapping> {
        install()?;
        let (start, len) = whole_pages(&file, offset, bytes)?;
        let place = Place::claim(len)?;
        let region =
            MmapRegion::from_file(FileOffset::new(file, start), len as usize).map_err(|error| match error {
                MmapRegionError::Mmap(error) => error,
                error => io::Error::other(error),
            })?;
        place.fill(region.as_ptr().addr());
        Ok(Mapping { region, place, at: (offset - start) as usize })
    }

    /// The whole mapping.
    pub(crate) fn region(&self) -> &MmapRegion {
        &self.region
    }

    /// Offset of the requested part in [`region`](Self::region).
    pub(crate) fn at(&self) -> usize {
        self.at
    }

    /// Length of the mapping, bytes.
    pub(super) fn len(&self) -> u64 {
        self.place.len
    }

    /// Whether an access has found that the file is too short. The memory's contents are lost.
    #[inline]
    pub(crate) fn is_lost(&self) -> bool {
        self.place.slot().lost.load(Ordering::Relaxed)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Before the addresses can be reused.
        self.place.slot().start.store(CLAIMED, Ordering::Release);
    }
}

/// The page-aligned range of a file that covers `bytes` bytes at `offset`. The kernel maps, replaces and unmaps huge
/// pages only as a whole.
fn whole_pages(file: &File, offset: u64, bytes: u64) -> io::Result<(u64, u64)> {
    let system = fstatfs(file)?;
    let page = if system.f_type as u32 == HUGETLBFS { system.f_bsize as u64 } else { page_bytes() };
    let page = if mutated!(HugePagesCut) { page_bytes() } else { page };
    let start = if mutated!(MappedFromStart) { 0 } else { offset - offset % page };
    let end = offset.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(page));
    let len = end.map_or(u64::MAX, |end| end - start);
    if len > MAX_BYTES && !mutated!(MappedFromStart) {
        return Err(io::Error::other("it is larger than 2 TiB"));
    }
    Ok((start, len))
}

fn page_bytes() -> u64 {
    // SAFETY: it only queries a number that every system defines.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) as u64 }
}

/// A claimed slot of the table, and its mapping's length.
#[derive(Debug)]
struct Place {
    index: usize,
    len: u64,
}

impl Place {
    fn claim(len: u64) -> io::Result<Place> {
        let fits = |mapped: u64| mapped.checked_add(len).filter(|sum| *sum <= MAX_MAPPED);
        if MAPPED.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_err() {
            return Err(io::Error::other("all guests together already map 96 TiB"));
        }
        let is_free = |slot: &Slot| {
            slot.start.load(Ordering::Relaxed) == 0
                && slot.start.compare_exchange(0, CLAIMED, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        };
        match TABLE.iter().position(is_free) {
            Some(index) => Ok(Place { index, len }),
            None => {
                MAPPED.fetch_sub(len, Ordering::Relaxed);
                Err(io::Error::other("all guests together already have 32768 mappings"))
            }
        }
    }

    fn fill(&self, start: usize) {
        let slot = self.slot();
        slot.lost.store(false, Ordering::Relaxed);
        slot.len.store(self.len as usize, Ordering::Relaxed);
        slot.start.store(start, Ordering::Release);
    }

    fn slot(&self) -> &'static Slot {
        &TABLE[self.index]
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.slot().lost.swap(false, Ordering::Relaxed)
            && let Some(empty) = empty()
        {
            // Free the pages written there, so that the next owner does not see them.
            let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            let _ = fallocate(empty, hole, offset_of(self.index) as u64, MAX_BYTES);
        }
        MAPPED.fetch_sub(self.len, Ordering::Relaxed);
        self.slot().start.store(0, Ordering::Release);
    }
}

/// A slot's range in the empty file.
fn offset_of(index: usize) -> i64 {
    index as i64 * MAX_BYTES as i64
}

/// The empty file; created once.
fn empty() -> Option<&'static OwnedFd> {
    static FILE: OnceLock<Option<OwnedFd>> = OnceLock::new();
    let make = || {
        let file = memfd_create("bifrost-lost", MemfdFlags::CLOEXEC).ok()?;
        ftruncate(&file, SLOTS as u64 * MAX_BYTES).ok()?;
        EMPTY.store(file.as_raw_fd(), Ordering::Release);
        Some(file)
    };
    FILE.get_or_init(make).as_ref()
}

/// The previously installed handler.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

fn install() -> io::Result<()> {
    static DONE: OnceLock<Option<i32>> = OnceLock::new();
    empty().ok_or_else(|| io::Error::other("no file that could replace memory"))?;
    let failed = DONE.get_or_init(|| {
        // SAFETY: both structures are plain data for which zeros are valid; the handler only does what a signal handler
        // may do. The previous handler is stored before ours can run.
        unsafe {
            let mut before: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(libc::SIGBUS, std::ptr::null(), &mut before) == 0 {
                let _ = PREVIOUS.set(before);
                let mut action: libc::sigaction = std::mem::zeroed();
                action.sa_sigaction = on_bus_error as *const () as libc::sighandler_t;
                action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
                if libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut()) == 0 {
                    return None;
                }
            }
        }
        io::Error::last_os_error().raw_os_error()
    });
    failed.map_or(Ok(()), |code| Err(io::Error::from_raw_os_error(code)))
}

extern "C" fn on_bus_error(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid structure, whose address is set for this signal.
    let at = unsafe { (*info).si_addr() }.addr();
    let hit = TABLE.iter().enumerate().find(|(_, slot)| {
        let start = slot.start.load(Ordering::Acquire);
        start > CLAIMED && at.wrapping_sub(start) < slot.len.load(Ordering::Relaxed)
    });
    if let Some((index, slot)) = hit {
        let (start, len) = (slot.start.load(Ordering::Relaxed), slot.len.load(Ordering::Relaxed));
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // A second loss: there was no memory for a page of the empty file either.
        let (flags, file) = if slot.lost.swap(true, Ordering::Relaxed) {
            (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
        } else {
            (libc::MAP_SHARED, EMPTY.load(Ordering::Acquire))
        };
        let (flags, offset) = (flags | libc::MAP_FIXED | libc::MAP_NORESERVE, offset_of(index));
        // SAFETY: the addresses are those of a mapping in use, because the failed access was to it. They are whole
        // pages, also for huge pages. `Mapping` alone owns it and gives out no references, only volatile and atomic
        // accesses; these continue on the empty memory.
        let mapped = unsafe { libc::mmap(start as *mut c_void, len, protection, flags, file, offset) };
        if mapped != libc::MAP_FAILED {
            return;
        }
    }
    pass_on(signal, info, context);
}

/// Passes the signal to the previous handler; without one, the signal ends the process as by default.
fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let previous = PREVIOUS.get();
    let handler = previous.map_or(libc::SIG_DFL, |action| action.sa_sigaction);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // SAFETY: back to the default action; on return the access is retried and raises the signal again.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    } else if previous.is_some_and(|action| action.sa_flags & libc::SA_SIGINFO != 0) {
        // SAFETY: with this flag the kernel was given a function with these arguments.
        let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) = unsafe { std::mem::transmute(handler) };
        handler(signal, info, context);
    } else {
        // SAFETY: without the flag, a function with this argument.
        let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
        handler(signal);
    }
}

#[cfg(test)]
mod tests {
    use vm_memory::{Bytes, VolatileMemory};

    use super::*;

    fn memory(bytes: u64) -> File {
        let file = File::from(memfd_create("test", MemfdFlags::CLOEXEC).expect("a file"));
        file.set_len(bytes).expect("its size");
        file
    }

    fn map(file: &File, offset: u64, bytes: u64) -> io::Result<Mapping> {
        Mapping::new(file.try_clone().expect("another descriptor"), offset, bytes)
    }

    fn word(m: &Mapping, at: usize) -> u64 {
        m.region().as_volatile_slice().read_obj(at).expect("inside")
    }

    fn write(m: &Mapping, at: usize, value: u64) {
        m.region().as_volatile_slice().write_obj(value, at).expect("inside");
    }

    #[test]
    fn a_truncated_file_becomes_empty_memory() {
        let (file, other) = (memory(1 << 20), memory(4096));
        let mapping = map(&file, 0, 1 << 20).expect("a mapping");
        let other = map(&other, 0, 4096).expect("a mapping");
        write(&mapping, 0, 7);
        write(&mapping, 1 << 19, 8);
        write(&other, 0, 9);
        file.set_len(4096).expect("shorter");
        assert_eq!((word(&mapping, 0), mapping.is_lost()), (7, false), "the remaining memory is intact");
        assert_eq!((word(&mapping, 1 << 19), mapping.is_lost()), (0, true));
        assert_eq!(word(&mapping, 0), 0, "the whole mapping is replaced");
        write(&mapping, 1 << 19, 5);
        assert_eq!(word(&mapping, 1 << 19), 5);
        assert_eq!((word(&other, 0), other.is_lost()), (9, false));
        let place = mapping.place.index;
        drop(mapping);
        // The next owner of the slot must not see it, if it loses its memory as well.
        file.set_len(1 << 20).expect("longer");
        let mut mappings = Vec::new();
        let again = loop {
            let mapping = map(&file, 0, 1 << 20).expect("a mapping");
            if mapping.place.index == place {
                break mapping;
            }
            mappings.push(mapping);
            assert!(mappings.len() < 100, "the slot is not free again");
        };
        file.set_len(0).expect("shorter");
        assert_eq!((word(&again, 1 << 19), again.is_lost()), (0, true));
    }

    #[test]
    fn only_used_pages_are_mapped() {
        let file = memory(1 << 46);
        let start = (1 << 45) + 0x1800;
        let mapping = map(&file, start, 0x1000).expect("a mapping");
        assert_eq!((mapping.at(), mapping.len()), (0x800, 0x2000));
        write(&mapping, mapping.at(), 7);
        let mut bytes = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, start).expect("there");
        assert_eq!(u64::from_ne_bytes(bytes), 7);
        for (offset, bytes) in
            [(0, MAX_BYTES + 1), (4095, MAX_BYTES), (0, u64::MAX), (u64::MAX, 1), (1 << 40, u64::MAX)]
        {
            assert!(map(&file, offset, bytes).is_err(), "{offset:#x} {bytes:#x}");
        }
    }

    #[test]
    fn slots_are_used_again() {
        for _ in 0..2 * SLOTS {
            drop(map(&memory(4096), 0, 4096).expect("a mapping"));
        }
        assert!(map(&memory(4096), 0, 0).is_err(), "nothing to map");
        let taken = TABLE.iter().filter(|slot| slot.start.load(Ordering::Relaxed) != 0).count();
        assert!(taken < 1000, "{taken} slots are taken by the other tests' mappings");
    }

    /// A file of huge pages; `None`: not supported by this kernel.
    fn huge(pages: u64) -> Option<(File, u64)> {
        let file = File::from(memfd_create("huge", MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB).ok()?);
        let page = fstatfs(&file).expect("its file system").f_bsize as u64;
        file.set_len(pages * page).expect("its size");
        Some((file, page))
    }

    #[test]
    fn unavailable_huge_pages_become_empty_memory() {
        let Some((file, page)) = huge(3) else {
            return eprintln!("SKIPPED: this kernel has no huge pages");
        };
        // None is reserved, so the first access fails unless the machine has a spare one.
        for (offset, bytes) in [(0, page + 4096), (4096, 4096), (page - 4096, 8192), (page, 2 * page)] {
            let mapping = map(&file, offset, bytes).expect("a mapping");
            assert!(mapping.len().is_multiple_of(page) && mapping.len() >= bytes, "{offset:#x} {bytes:#x}");
            write(&mapping, mapping.at(), 7);
            assert_eq!(word(&mapping, mapping.at()), 7);
            file.set_len(0).expect("shorter");
            for at in [mapping.at(), mapping.at() + bytes as usize - 8] {
                let _ = word(&mapping, at);
            }
            assert!(mapping.is_lost());
            write(&mapping, mapping.at() + bytes as usize - 8, 9);
            file.set_len(3 * page).expect("longer");
        }
    }

    #[test]
    fn truncated_huge_pages_become_empty_memory() {
        const RESERVED: &str = "/proc/sys/vm/nr_hugepages";
        let read = || std::fs::read_to_string(RESERVED).ok().and_then(|n| n.trim().parse::<u64>().ok());
        let Some(before) = read() else { return eprintln!("SKIPPED: this kernel has no huge pages") };
        let _ = std::fs::write(RESERVED, format!("{}", before + 2));
        let had = read().unwrap_or(before);
        if had == before {
            return eprintln!("SKIPPED: no huge pages can be reserved here (that needs root)");
        }
        let (file, page) = huge(2).expect("huge pages exist");
        let mapping = map(&file, 0, page + 4096).expect("a mapping");
        write(&mapping, page as usize, 7);
        let was_there = (word(&mapping, page as usize), mapping.is_lost());
        file.set_len(page).expect("shorter");
        let gone = (word(&mapping, page as usize), mapping.is_lost());
        drop((mapping, file));
        let _ = std::fs::write(RESERVED, format!("{before}"));
        assert_eq!((was_there, gone), ((7, false), (0, true)));
    }
}
