//! The table of sessions that all cores of a pod share. A core that looks up a flow takes no lock. It writes only the
//! time of the last packet, every [`NOTED_EVERY_S`].
//!
//! Write-heavy state shared by cores makes spraying slow (*Albatross*, SIGCOMM'25, section 7). Copies in each core are
//! slow, too: they evict data that all cores need from the shared cache. So there is one copy, which is almost only
//! read.
//!
//! **Layout.** Open addressing with linear probing, at most half full. A slot is one cache line, which is enough for an
//! IPv4 packet; the rest of IPv6 addresses is elsewhere. A slot counts the flows that are stored after it because their
//! own slot was taken: a search ends where that count is zero, and a removal leaves no tombstone.
//!
//! **Readers and writers.** Each slot is a sequence lock of atomics (H.-J. Boehm, *Can seqlocks get along with
//! programming language memory models?*, MSPC'12, figure 6): its version is odd during a write. A reader uses what it
//! read only if the version was even and has not changed. A flow that stays in the table is always found, whatever is
//! written around it. A writer takes a free slot by making its version odd; only the owner removes a flow. The caller
//! holds a lock so that the same flow is not inserted twice at the same time.

use std::hash::BuildHasher as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use bifrost_tables::prefetch;
use foldhash::fast::FixedState;

use crate::rewrite::End;
use crate::session::{Flow, NOTED_EVERY_S};

/// Maximum number of slots that a search visits. In a half full table, one flow in 200,000 would need more.
const PROBES: usize = 64;
/// Maximum number of sessions; slots have 32-bit numbers.
pub(crate) const SESSIONS_MAX: u32 = 1 << 24;
/// Slots whose memory for IPv6 addresses is allocated at once.
const CHUNK: usize = 512;

// The word `kind` of a slot.
const PROTOCOL: u64 = 0xff;
const OUTSIDE: u64 = 1 << 8;
const KEY_IS_V6: u64 = 1 << 9;
const TO_IS_V6: u64 = 1 << 10;
const USED: u64 = 1 << 11;

// The word `note` of a slot: seconds, marks, and a part of the version, so that a packet of one flow is not recorded in
// another flow.
const MARKS_SHIFT: u32 = 32;
const VERSION_SHIFT: u32 = 40;

/// Side from which packets of a flow come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Inside,
    Outside,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared {
    /// A power of two. All slots are allocated at the beginning: growing would stall cores for long.
    slots: Box<[Slot]>,
    /// The rest of IPv6 addresses, for each [`CHUNK`] of slots once it contains one.
    wide: Box<[OnceLock<Box<[Wide]>>]>,
    hash: FixedState,
}

/// A flow and its translation: one cache line.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Slot {
    version: AtomicU32,
    /// Flows stored after this slot that would be here or before if there had been room.
    passed: AtomicU32,
    kind: AtomicU64,
    /// Network and ports.
    key_ends: AtomicU64,
    /// Both addresses; the first half of the source in IPv6.
    key_first: AtomicU64,
    to_ends: AtomicU64,
    to_first: AtomicU64,
    /// Record of its packets.
    note: AtomicU64,
}

const _: () = assert!(size_of::<Slot>() == 64);

/// The rest of the addresses.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Wide {
    key: [AtomicU64; 3],
    to: [AtomicU64; 3],
}

/// A flow in words.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Words {
    protocol: u8,
    is_v6: bool,
    ends: u64,
    first: u64,
    rest: [u64; 3],
}

/// Record of the packets of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note(u64);

/// A flow that was found, read consistently.
#[derive(Clone, Copy, Debug)]
struct Found {
    index: usize,
    to: Flow,
    note: Note,
}

impl Shared {
    /// Creates an empty table for `sessions` sessions, with two flows each.
    pub(crate) fn new(sessions: u32, seed: u64) -> Self {
        let slots = (4 * sessions.clamp(1, SESSIONS_MAX) as usize).max(2 * PROBES).next_power_of_two();
        Shared {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            wide: (0..slots.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect(),
            hash: FixedState::with_seed(seed),
        }
    }

    /// Prefetches the slot of a flow.
    #[inline]
    pub(crate) fn fetch_ahead(&self, flow: &Flow) {
        prefetch(&self.slots[self.home(flow)]);
    }

    /// The translation of a packet of a flow. Records the packet if the last record is old, or lacks some of `marks`.
    #[inline]
    pub(crate) fn find(&self, side: Side, flow: &Flow, now_s: u32, marks: u8) -> Option<Flow> {
        let Found { index, to, note } = self.read(side, flow)?;
        if note.lacks(now_s, marks) {
            self.slots[index].see(note, now_s, marks);
        }
        Some(to)
    }

    /// The same without recording.
    pub(crate) fn look(&self, side: Side, flow: &Flow) -> Option<Flow> {
        self.read(side, flow).map(|found| found.to)
    }

    /// Inserts a flow, which must not exist, and records a packet of it. Returns its slot; `None` if no slot is free
    /// within the search distance.
    pub(crate) fn insert(&self, side: Side, flow: &Flow, to: &Flow, now_s: u32, marks: u8) -> Option<u32> {
        let (key, words) = (Words::of(flow), Words::of(to));
        let home = self.home(flow);
        let (distance, index, version) = (0..PROBES).find_map(|distance| {
            let index = (home + distance) & self.mask();
            Some((distance, index, self.slots[index].claim()?))
        })?;
        let slot = &self.slots[index];
        // A reader that sees a word written below sees the odd version, too.
        fence(Release);
        let is_wide = key.is_v6 || words.is_v6;
        if is_wide && let Some(wide) = self.wide_at(index, true) {
            wide.key.iter().zip(key.rest).for_each(|(to, word)| to.store(word, Relaxed));
            wide.to.iter().zip(words.rest).for_each(|(to, word)| to.store(word, Relaxed));
        }
        slot.key_ends.store(key.ends, Relaxed);
        slot.key_first.store(key.first, Relaxed);
        slot.to_ends.store(words.ends, Relaxed);
        slot.to_first.store(words.first, Relaxed);
        slot.note.store(Note::new(version.wrapping_add(2), now_s, marks).0, Relaxed);
        slot.kind.store(key.kind(side) | if words.is_v6 { TO_IS_V6 } else { 0 }, Relaxed);
        // Before the flow can be found, no search may end before it.
        self.between(home, distance).for_each(|slot| _ = slot.passed.fetch_add(1, Relaxed));
        slot.version.store(version.wrapping_add(2), Release);
        Some(index as u32)
    }

    /// Removes a flow from the slot that [`insert`](Self::insert) returned; the caller owns it.
    pub(crate) fn remove(&self, index: u32) {
        let flow = self.flow_at(index);
        let index = index as usize;
        let slot = &self.slots[index];
        let version = slot.version.load(Relaxed);
        slot.version.store(version.wrapping_add(1), Relaxed);
        fence(Release);
        slot.kind.store(0, Relaxed);
        slot.version.store(version.wrapping_add(2), Release);
        let home = self.home(&flow);
        let distance = index.wrapping_sub(home) & self.mask();
        self.between(home, distance).for_each(|slot| _ = slot.passed.fetch_sub(1, Relaxed));
    }

    /// The flow in a slot that the caller owns.
    pub(crate) fn flow_at(&self, index: u32) -> Flow {
        let index = index as usize;
        let slot = &self.slots[index];
        let kind = slot.kind.load(Relaxed);
        let rest = match self.wide_at(index, false) {
            Some(wide) if kind & KEY_IS_V6 != 0 => wide.key.each_ref().map(|word| word.load(Relaxed)),
            _ => [0; 3],
        };
        let (ends, first) = (slot.key_ends.load(Relaxed), slot.key_first.load(Relaxed));
        Words { protocol: kind as u8, is_v6: kind & KEY_IS_V6 != 0, ends, first, rest }.flow()
    }

    /// The record of the flow in a slot that the caller owns.
    pub(crate) fn note_at(&self, index: u32) -> Note {
        Note(self.slots[index as usize].note.load(Relaxed))
    }

    /// Whether it equals a new table, except for versions.
    #[cfg(test)]
    pub(crate) fn is_clean(&self) -> bool {
        let is_clean = |slot: &Slot| slot.kind.load(Relaxed) == 0 && slot.passed.load(Relaxed) == 0;
        self.slots.iter().all(is_clean)
    }

    /// Records a packet that was looked up when the record was `note`.
    #[cfg(test)]
    pub(crate) fn see_late(&self, index: u32, note: Note, now_s: u32, marks: u8) {
        self.slots[index as usize].see(note, now_s, marks);
    }

    #[inline]
    fn read(&self, side: Side, flow: &Flow) -> Option<Found> {
        let key = Words::of(flow);
        let kind = key.kind(side);
        let home = self.home(flow);
        for distance in 0..PROBES {
            let index = (home + distance) & self.mask();
            let slot = &self.slots[index];
            let version = slot.version.load(Acquire);
            if slot.key_ends.load(Relaxed) == key.ends
                && slot.key_first.load(Relaxed) == key.first
                && slot.kind.load(Relaxed) & !TO_IS_V6 == kind
                && let Some(found) = self.take(index, version, &key)
            {
                return Some(found);
            }
            if slot.passed.load(Relaxed) == 0 {
                return None;
            }
        }
        None
    }

    /// The rest of a slot whose first words match. `None`: it was written meanwhile, or the rest does not match.
    #[inline]
    fn take(&self, index: usize, version: u32, key: &Words) -> Option<Found> {
        let slot = &self.slots[index];
        let to_is_v6 = slot.kind.load(Relaxed) & TO_IS_V6 != 0;
        let mut to = Words {
            protocol: key.protocol,
            is_v6: to_is_v6,
            ends: slot.to_ends.load(Relaxed),
            first: slot.to_first.load(Relaxed),
            rest: [0; 3],
        };
        if key.is_v6 || to_is_v6 {
            let wide = self.wide_at(index, false)?;
            if key.is_v6 && wide.key.each_ref().map(|word| word.load(Relaxed)) != key.rest {
                return None;
            }
            to.rest = wide.to.each_ref().map(|word| word.load(Relaxed));
        }
        let note = Note(slot.note.load(Relaxed));
        fence(Acquire);
        let holds = version & 1 == 0 && slot.version.load(Relaxed) == version;
        holds.then(|| Found { index, to: to.flow(), note })
    }

    fn wide_at(&self, index: usize, fill: bool) -> Option<&Wide> {
        let chunk = &self.wide[index / CHUNK];
        let chunk =
            if fill { chunk.get_or_init(|| (0..CHUNK).map(|_| Wide::default()).collect()) } else { chunk.get()? };
        chunk.get(index % CHUNK)
    }

    fn between(&self, home: usize, distance: usize) -> impl Iterator<Item = &Slot> {
        (0..distance).map(move |n| &self.slots[(home + n) & self.mask()])
    }

    #[inline]
    fn home(&self, flow: &Flow) -> usize {
        self.hash.hash_one(flow) as usize & self.mask()
    }

    #[inline]
    fn mask(&self) -> usize {
        self.slots.len() - 1
    }
}

impl Slot {
    /// Makes the version odd if the slot is free; returns the previous version.
    fn claim(&self) -> Option<u32> {
        let version = self.version.load(Acquire);
        let is_free = version & 1 == 0 && self.kind.load(Relaxed) & USED == 0;
        // The kind changes with the version.
        (is_free && self.version.compare_exchange(version, version.wrapping_add(1), Acquire, Relaxed).is_ok())
            .then_some(version)
    }

    /// Records a packet of the flow with this record, unless another flow is here now.
    #[cold]
    fn see(&self, mut note: Note, now_s: u32, marks: u8) {
        let version = note.version();
        while note.version() == version && note.lacks(now_s, marks) {
            let new = Note::join(version, note.seconds().max(now_s), note.marks() | marks);
            match self.note.compare_exchange_weak(note.0, new.0, Relaxed, Relaxed) {
                Ok(_) => return,
                Err(other) => note = Note(other),
            }
        }
    }
}

impl Note {
    fn new(version: u32, seconds: u32, marks: u8) -> Self {
        Self::join(u64::from(version >> 1) & 0xff_ffff, seconds, marks)
    }

    fn join(version: u64, seconds: u32, marks: u8) -> Self {
        Note(version << VERSION_SHIFT | u64::from(marks) << MARKS_SHIFT | u64::from(seconds))
    }

    fn version(self) -> u64 {
        self.0 >> VERSION_SHIFT
    }

    /// When the last packet was recorded, s.
    pub(crate) fn seconds(self) -> u32 {
        self.0 as u32
    }

    /// Marks of all packets.
    pub(crate) fn marks(self) -> u8 {
        (self.0 >> MARKS_SHIFT) as u8
    }

    /// Whether a packet must be recorded.
    #[inline]
    fn lacks(self, now_s: u32, marks: u8) -> bool {
        now_s.saturating_sub(self.seconds()) >= NOTED_EVERY_S || self.marks() & marks != marks
    }
}

impl Words {
    #[inline]
    fn of(flow: &Flow) -> Self {
        let Flow { network, protocol, source, destination } = *flow;
        let ends = u64::from(network) << 32 | u64::from(source.port) << 16 | u64::from(destination.port);
        match (source.address, destination.address) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let first = u64::from(source.to_bits()) << 32 | u64::from(destination.to_bits());
                Words { protocol, is_v6: false, ends, first, rest: [0; 3] }
            }
            (source, destination) => {
                let [source, destination] = [source, destination].map(|address| match address {
                    IpAddr::V4(address) => address.to_ipv6_mapped().to_bits(),
                    IpAddr::V6(address) => address.to_bits(),
                });
                let rest = [source as u64, (destination >> 64) as u64, destination as u64];
                Words { protocol, is_v6: true, ends, first: (source >> 64) as u64, rest }
            }
        }
    }

    #[inline]
    fn flow(self) -> Flow {
        let Words { protocol, is_v6, ends, first, rest } = self;
        let [source, destination]: [IpAddr; 2] = if is_v6 {
            let join = |high: u64, low: u64| Ipv6Addr::from_bits(u128::from(high) << 64 | u128::from(low)).into();
            [join(first, rest[0]), join(rest[1], rest[2])]
        } else {
            [(first >> 32) as u32, first as u32].map(|address| Ipv4Addr::from_bits(address).into())
        };
        let end = |address, port: u64| End { address, port: port as u16 };
        let (source, destination) = (end(source, ends >> 16), end(destination, ends));
        Flow { network: (ends >> 32) as u32, protocol, source, destination }
    }

    #[inline]
    fn kind(&self, side: Side) -> u64 {
        let v6 = if self.is_v6 { KEY_IS_V6 } else { 0 };
        let outside = if side == Side::Outside { OUTSIDE } else { 0 };
        USED | v6 | outside | (u64::from(self.protocol) & PROTOCOL)
    }
}
