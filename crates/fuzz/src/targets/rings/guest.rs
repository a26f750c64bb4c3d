//! Memory with two rings, an inflight record and buffers of all kinds. Any thread can write anything at any time.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Once;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use fastrand::Rng;
use rustix::fs::{MemfdFlags, memfd_create};
use vm_memory::{FileOffset, MmapRegion, VolatileMemory};

/// Address of the memory for the guest and for the front-end, and its length: one huge page.
pub(super) const GUEST: u64 = 0x4000_0000;
pub(super) const USER: u64 = 0x7f00_0000_0000;
pub(super) const MEMORY: u64 = 0x20_0000;
/// Valid sizes of a ring.
pub(super) const SIZES: [u16; 3] = [16, 256, 1024];
/// Space for the tables of a ring; it contains the available ring and the used ring, or both event structures.
pub(super) const RING: u64 = 0x8000;
pub(super) const AVAILABLE: u64 = 0x4000;
const USED: u64 = 0x5000;
/// The records of both rings.
pub(super) const RECORD: u64 = 0x1_0000;
pub(super) const RECORD_BYTES: u64 = 0x2_0000;
/// Indirect tables: for each ring [`TABLES`], and one that changes.
pub(super) const TABLES_AT: u64 = 0x4_0000;
pub(super) const TABLES: usize = 6;
const TABLE: u64 = 0x4000;
const BUFFERS: u64 = 0x10_0000;
/// Length of a descriptor of a [`Kind::Chain`], bytes.
pub(super) const PIECE: u32 = 64;
/// The area before the memory in its file, if the pages are ordinary ones; nothing may write it.
const FRONT: u64 = 0x1_0000;
const NOBODYS: u8 = 0xa5;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
const F_AVAILABLE: u16 = 1 << 7;
const F_USED: u16 = 1 << 15;

/// Kind of a buffer.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Good,
    /// This many descriptors; the last one has the right direction, or not.
    Chain(u16, bool),
    /// As many descriptors as the ring has, of the wrong direction.
    Whole,
    /// An indirect table: valid or invalid, long, short or empty.
    Table(usize),
    /// A part of it overlaps the ring, where the driver writes next.
    OverRing,
    /// With the wrong direction.
    Bad,
    Empty,
}

pub(super) struct Guest {
    pub(super) file: File,
    /// Offset of the memory in the file.
    pub(super) offset: u64,
    pub(super) packed: bool,
    region: MmapRegion,
    sizes: [AtomicU16; 2],
    /// Descriptors (in a split ring, buffers) offered since the ring was new.
    offered: [AtomicU32; 2],
}

pub(super) fn ring_at(ring: usize) -> u64 {
    RING * ring as u64
}

fn table_at(ring: usize, table: usize) -> u64 {
    TABLES_AT + TABLE * ((TABLES + 1) * ring + table) as u64
}

/// Direction of a buffer of this ring.
fn direction(ring: usize) -> u16 {
    if ring == 0 { WRITE } else { 0 }
}

impl Guest {
    /// `huge`: in huge pages, if the machine has any.
    #[allow(clippy::expect_used)]
    pub(super) fn new(packed: bool, size: u16, huge: bool) -> Guest {
        let (file, offset, region) = huge.then(huge_page).flatten().unwrap_or_else(|| {
            let file = File::from(memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a file"));
            file.set_len(FRONT + MEMORY).expect("its size");
            file.write_all_at(&[NOBODYS; FRONT as usize], 0).expect("room");
            let region = map(&file, FRONT + MEMORY).expect("a mapping");
            (file, FRONT, region)
        });
        let sizes = [size, size].map(AtomicU16::new);
        let guest = Guest { file, offset, packed, region, sizes, offered: Default::default() };
        for ring in 0..2 {
            let (right, wrong) = (direction(ring), direction(ring) ^ WRITE);
            // Entries, bytes of each, flags of the last one.
            let tables: [(u16, u32, u16); TABLES] = [
                (256, 1, right),
                (256, 1, wrong),
                (1024, 0, wrong),
                (1024, 1, right),
                (100, 0, wrong),
                (3, 64, INDIRECT),
            ];
            for (table, (entries, len, last)) in tables.into_iter().enumerate() {
                for entry in 0..entries {
                    let is_last = entry + 1 == entries;
                    let flags = if is_last { last } else { right };
                    guest.entry(table_at(ring, table), entry, guest.buffer(ring, 0), len, flags, is_last);
                }
            }
        }
        guest
    }

    pub(super) fn size(&self, ring: usize) -> u16 {
        self.sizes[ring].load(Ordering::Relaxed)
    }

    pub(super) fn set_size(&self, ring: usize, size: u16) {
        self.sizes[ring].store(size, Ordering::Relaxed);
    }

    /// Addresses of a ring's descriptors, used ring and available ring, for the front-end.
    pub(super) fn tables(&self, ring: usize) -> [u64; 3] {
        [0, USED, AVAILABLE].map(|table| USER + ring_at(ring) + table)
    }

    /// Writes `at` bytes from the start of the memory; nothing is written beyond the end.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        if at.saturating_add(bytes.len() as u64) <= MEMORY
            && let Ok(slice) = self.region.get_slice((self.offset + at) as usize, bytes.len())
        {
            slice.copy_from(bytes);
        }
    }

    fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        if let Ok(slice) = self.region.get_slice((self.offset + at) as usize, N) {
            slice.copy_to(&mut bytes);
        }
        bytes
    }

    /// Initial content of a ring.
    pub(super) fn clear(&self, ring: usize) {
        self.write(ring_at(ring), &[0; RING as usize]);
        self.offered[ring].store(0, Ordering::Relaxed);
    }

    /// Makes a buffer available in the ring's next slot, whether or not the device has returned that slot.
    pub(super) fn offer(&self, ring: usize, kind: Kind) {
        let (size, right) = (self.size(ring), direction(ring));
        let wrong = right ^ WRITE;
        let n = self.offered[ring].load(Ordering::Relaxed);
        let buffer = self.buffer(ring, n);
        let (count, len, flags, last) = match kind {
            Kind::Good => (1, if ring == 0 { 2048 } else { 112 }, right, right),
            Kind::Chain(count, good) => (count, PIECE, right, if good { right } else { wrong }),
            Kind::Whole => (size, PIECE, wrong, wrong),
            Kind::Bad => (1, PIECE, wrong, wrong),
            Kind::Empty => (1, 0, right, right),
            Kind::OverRing => {
                let table = table_at(ring, TABLES);
                let there = GUEST + ring_at(ring) + 16 * u64::from(n % u32::from(size));
                for (entry, (guest, len)) in [(buffer, 66), (there, 16), (buffer, 2048)].into_iter().enumerate() {
                    self.entry(table, entry as u16, guest, len, right, entry == 2);
                }
                return self.add(ring, n, &[(GUEST + table, 48, INDIRECT)]);
            }
            Kind::Table(table) => {
                let entries = [256, 256, 1024, 1024, 100, 3][table % TABLES];
                return self.add(ring, n, &[(GUEST + table_at(ring, table % TABLES), 16 * entries, INDIRECT)]);
            }
        };
        let piece = |i: u16| {
            let at = buffer + u64::from(PIECE) * u64::from(i);
            (at, len, if i + 1 == count { last } else { flags })
        };
        self.add(ring, n, &(0..count).map(piece).collect::<Vec<_>>());
    }

    /// Writes `pieces` as descriptors from slot `n` on: the first one last.
    fn add(&self, ring: usize, n: u32, pieces: &[(u64, u32, u16)]) {
        let (size, count) = (u32::from(self.size(ring)), pieces.len() as u32);
        for (i, (guest, len, flags)) in pieces.iter().enumerate().rev() {
            let (i, more) = (i as u32, if i + 1 < pieces.len() { NEXT } else { 0 });
            let slot = (n + i) % size;
            let (third, fourth) = if self.packed {
                ((n % size) as u16, flags | more | self.available(n + i, size))
            } else {
                (flags | more, ((slot + 1) % size) as u16)
            };
            fence(Ordering::Release);
            self.descriptor(ring_at(ring) + 16 * u64::from(slot), *guest, *len, third, fourth);
        }
        if self.packed {
            self.offered[ring].store(n.wrapping_add(count), Ordering::Relaxed);
            return;
        }
        let available = ring_at(ring) + AVAILABLE;
        self.write(available + 4 + 2 * u64::from(n % size), &((n % size) as u16).to_le_bytes());
        fence(Ordering::Release);
        self.write(available + 2, &(n as u16).wrapping_add(1).to_le_bytes());
        self.offered[ring].store(n.wrapping_add(1), Ordering::Relaxed);
    }

    /// The flags that make a descriptor in slot `n` of a packed ring available.
    fn available(&self, n: u32, size: u32) -> u16 {
        if (n / size).is_multiple_of(2) { F_AVAILABLE } else { F_USED }
    }

    /// A descriptor as a valid driver would write it next.
    pub(super) fn next_descriptor(&self, ring: usize) -> [u8; 16] {
        let (size, n) = (u32::from(self.size(ring)), self.offered[ring].load(Ordering::Relaxed));
        let (id, flags) = ((n % size) as u16, direction(ring) | self.available(n, size));
        bits(self.buffer(ring, n), 2048, id, flags).to_le_bytes()
    }

    /// Whether the device has returned buffer `n` of those that a valid driver has offered, with two descriptors each.
    pub(super) fn is_used(&self, ring: usize, n: u32) -> bool {
        fence(Ordering::Acquire);
        if !self.packed {
            return u16::from_le_bytes(self.read(ring_at(ring) + USED + 2)) == (n as u16).wrapping_add(1);
        }
        let size = u32::from(self.size(ring));
        let flags = u16::from_le_bytes(self.read(ring_at(ring) + 16 * u64::from(2 * n % size) + 14));
        let wrap = (2 * n / size).is_multiple_of(2);
        (flags & F_AVAILABLE != 0) == wrap && (flags & F_USED != 0) == wrap
    }

    /// Changes a few bytes of a descriptor that was offered recently or will be next.
    pub(super) fn write_near(&self, ring: usize, bytes: &[u8], rng: &mut Rng) {
        let field = [0, 8, 8, 12, 12, 14][rng.usize(..6)];
        self.write(self.near(ring, rng) + field, bytes);
    }

    /// Makes such a descriptor available, or the whole ring.
    pub(super) fn make_available(&self, ring: usize, rng: &mut Rng) {
        let size = self.size(ring);
        if self.packed {
            let flags = [F_AVAILABLE, F_USED][rng.usize(..2)] | rng.u16(..8);
            let at = self.near(ring, rng);
            self.write(at + 12, &rng.u16(..size).to_le_bytes());
            return self.write(at + 14, &flags.to_le_bytes());
        }
        let n = self.offered[ring].load(Ordering::Relaxed) as u16;
        let index = n.wrapping_add(rng.u16(..=size));
        self.write(ring_at(ring) + AVAILABLE + 2, &index.to_le_bytes());
    }

    fn near(&self, ring: usize, rng: &mut Rng) -> u64 {
        let size = u32::from(self.size(ring));
        let n = self.offered[ring].load(Ordering::Relaxed).wrapping_add(rng.u32(..4)).wrapping_sub(rng.u32(..8));
        ring_at(ring) + 16 * u64::from(n % size)
    }

    /// Both records claim that everything is in flight, one descriptor each.
    pub(super) fn fill_record(&self) {
        for ring in 0..2 {
            let (at, size) = (self.record_at(ring), u64::from(self.size(ring)));
            if self.packed {
                self.write(at + 8, &(1 | size << 16 | 0xffff << 32 | 0xffff << 48).to_le_bytes());
                self.write(at + 16, &(1u64 << 32 | 1 << 40).to_le_bytes());
            } else {
                self.write(at + 8, &(1 | size << 16).to_le_bytes());
            }
            for i in 0..size {
                let entry = at + self.record_entry(i);
                let first = if self.packed { 1 | 1 << 48 | i << 32 } else { 1u64 };
                self.write(entry, &first.to_le_bytes());
                self.write(entry + 8, &i.to_le_bytes());
                if self.packed {
                    self.write(entry + 16, &i.to_le_bytes());
                }
            }
        }
    }

    /// Changes numbers in some entries of a record: buffers were taken in another order.
    pub(super) fn shuffle_record(&self, rng: &mut Rng) {
        let ring = rng.usize(..2);
        let size = u64::from(self.size(ring));
        let start = rng.u64(..size);
        for i in (start..size).take(64) {
            self.write(self.record_at(ring) + self.record_entry(i) + 8, &rng.u64(..).to_le_bytes());
        }
    }

    fn record_at(&self, ring: usize) -> u64 {
        let size = u64::from(self.size(0).max(self.size(1)));
        RECORD + ring as u64 * self.record_entry(size).next_multiple_of(64)
    }

    /// Header and entries have full length in a packed ring's record, and half of it in a split one's.
    fn record_entry(&self, i: u64) -> u64 {
        (if self.packed { 32 } else { 16 }) * (i + 1)
    }

    fn buffer(&self, ring: usize, n: u32) -> u64 {
        GUEST + BUFFERS + 0x8_0000 * ring as u64 + 0x1000 * u64::from(n % 64)
    }

    /// An entry of an indirect table.
    fn entry(&self, table: u64, entry: u16, guest: u64, len: u32, flags: u16, is_last: bool) {
        let more = if is_last { 0 } else { NEXT };
        let (third, fourth) = if self.packed { (0, flags) } else { (flags | more, entry + 1) };
        self.descriptor(table + 16 * u64::from(entry), guest, len, third, fourth);
    }

    fn descriptor(&self, at: u64, guest: u64, len: u32, third: u16, fourth: u16) {
        self.write(at, &bits(guest, len, third, fourth).to_le_bytes());
    }

    /// Whether nothing was written before the memory.
    pub(super) fn is_front_untouched(&self) -> bool {
        let mut bytes = vec![0; self.offset as usize];
        self.offset == 0 || self.file.read_exact_at(&mut bytes, 0).is_ok() && bytes.iter().all(|b| *b == NOBODYS)
    }
}

fn bits(guest: u64, len: u32, third: u16, fourth: u16) -> u128 {
    u128::from(guest) | u128::from(len) << 64 | u128::from(third) << 96 | u128::from(fourth) << 112
}

fn map(file: &File, bytes: u64) -> Option<MmapRegion> {
    MmapRegion::from_file(FileOffset::new(file.try_clone().ok()?, 0), bytes as usize).ok()
}

/// A file of one huge page.
fn huge_page() -> Option<(File, u64, MmapRegion)> {
    static SAY: Once = Once::new();
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
    let file = memfd_create("fuzz", flags).ok().map(File::from);
    let made = file.and_then(|file| {
        // A mapping alone reserves no page: without one, the first access would cause a SIGBUS.
        rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, MEMORY).ok()?;
        let region = map(&file, MEMORY)?;
        Some((file, 0, region))
    });
    if made.is_none() {
        SAY.call_once(|| eprintln!("rings: NOT in huge pages: none are free (/proc/sys/vm/nr_hugepages)"));
    }
    made
}
