//! The table of sessions that all cores of a pod share. A core that looks up a flow takes no lock and writes nothing, except every [`NOTED_EVERY_S`] the
//! time of the last packet.
//!
//! Write-heavy state that cores share makes spraying slow (*Albatross*, SIGCOMM'25, section 7), and so do copies of it in each core: they displace from
//! the shared cache what all cores need. So there is one copy, which is only read.
//!
//! **Layout.** Open addressing with linear probing, at most half full. A place has one line of memory, which is all that an IPv4 packet needs; the rest of
//! IPv6 addresses is elsewhere. A place counts the flows that are behind it though they were to be before: a search ends where that is zero, and a
//! removal leaves nothing behind.
//!
//! **Readers and writers.** Each place is a sequence lock of atomics (H.-J. Boehm, *Can seqlocks get along with programming language memory models?*, MSPC'12,
//! figure 6): its version is odd while it is written. A reader takes what it read only if the version was even and is still the same. A flow that is in the table
//! all the time is found, whatever is written around it. Writers take a free place by making its version odd; the owner alone removes a flow. Nobody inserts the
//! same flow twice at the same time: the caller has a lock for that.

use std::hash::BuildHasher as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};

use bifrost_tables::prefetch;
use foldhash::fast::FixedState;

use crate::rewrite::End;
use crate::session::{Flow, NOTED_EVERY_S};

/// Places that are looked at for a flow. In a table that is half full, one flow in 200,000 would need more.
const PROBES: usize = 64;
/// Sessions at most; places have numbers of 32 bits.
pub(crate) const SESSIONS_MAX: u32 = 1 << 24;
/// Places that get room for IPv6 addresses at once.
const CHUNK: usize = 512;

// The word `kind` of a place.
const PROTOCOL: u64 = 0xff;
const OUTSIDE: u64 = 1 << 8;
const KEY_IS_V6: u64 = 1 << 9;
const TO_IS_V6: u64 = 1 << 10;
const USED: u64 = 1 << 11;

// The word `note` of a place: seconds, marks, and a part of the version, so that nobody notes a packet of one flow in another flow.
const MARKS_SHIFT: u32 = 32;
const VERSION_SHIFT: u32 = 40;

/// From where packets of a flow come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Inside,
    Outside,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Shared {
    /// A power of two. All of them are there from the beginning: growing would hold up cores for long.
    places: Box<[Place]>,
    /// The rest of IPv6 addresses, for each [`CHUNK`] of places once there are any.
    wide: Box<[OnceLock<Box<[Wide]>>]>,
    hash: FixedState,
}

/// A flow and how its packets go on: one line of memory.
#[derive(Debug, Default)]
#[repr(C, align(64))]
struct Place {
    version: AtomicU32,
    /// Flows that are behind this place, and would be here or before if there had been room.
    passed: AtomicU32,
    kind: AtomicU64,
    /// Network and ports.
    key_ends: AtomicU64,
    /// Both addresses; the first half of the source in IPv6.
    key_first: AtomicU64,
    to_ends: AtomicU64,
    to_first: AtomicU64,
    /// What was noted of its packets.
    note: AtomicU64,
}

const _: () = assert!(size_of::<Place>() == 64);

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

/// What was noted of the packets of a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Note(u64);

/// A flow that was found: all of it was there at the same time.
#[derive(Clone, Copy, Debug)]
struct Found {
    index: usize,
    to: Flow,
    note: Note,
}

impl Shared {
    /// Empty, for that many sessions, with two flows each.
    pub(crate) fn new(sessions: u32, seed: u64) -> Self {
        let places = (4 * sessions.clamp(1, SESSIONS_MAX) as usize).max(2 * PROBES).next_power_of_two();
        Shared {
            places: (0..places).map(|_| Place::default()).collect(),
            wide: (0..places.div_ceil(CHUNK)).map(|_| OnceLock::new()).collect(),
            hash: FixedState::with_seed(seed),
        }
    }

    /// Has the place of a flow come into the processor's caches.
    #[inline]
    pub(crate) fn fetch_ahead(&self, flow: &Flow) {
        prefetch(&self.places[self.home(flow)]);
    }

    /// How a packet of a flow goes on. That it was seen is noted if the last note is old, or lacks some of `marks`.
    #[inline]
    pub(crate) fn find(&self, side: Side, flow: &Flow, now_s: u32, marks: u8) -> Option<Flow> {
        let Found { index, to, note } = self.read(side, flow)?;
        if note.lacks(now_s, marks) {
            self.places[index].see(note, now_s, marks);
        }
        Some(to)
    }

    /// The same, and nothing is noted.
    pub(crate) fn look(&self, side: Side, flow: &Flow) -> Option<Flow> {
        self.read(side, flow).map(|found| found.to)
    }

    /// Enters a flow, which must not be there, and a packet of it; its place. `None`: there is no room near where it should be.
    pub(crate) fn insert(&self, side: Side, flow: &Flow, to: &Flow, now_s: u32, marks: u8) -> Option<u32> {
        let (key, words) = (Words::of(flow), Words::of(to));
        let home = self.home(flow);
        let (distance, index, version) = (0..PROBES).find_map(|distance| {
            let index = (home + distance) & self.mask();
            Some((distance, index, self.places[index].claim()?))
        })?;
        let place = &self.places[index];
        // Who sees a word that follows sees the odd version, too.
        fence(Release);
        let is_wide = key.is_v6 || words.is_v6;
        if is_wide && let Some(wide) = self.wide_at(index, true) {
            wide.key.iter().zip(key.rest).for_each(|(to, word)| to.store(word, Relaxed));
            wide.to.iter().zip(words.rest).for_each(|(to, word)| to.store(word, Relaxed));
        }
        place.key_ends.store(key.ends, Relaxed);
        place.key_first.store(key.first, Relaxed);
        place.to_ends.store(words.ends, Relaxed);
        place.to_first.store(words.first, Relaxed);
        place.note.store(Note::new(version.wrapping_add(2), now_s, marks).0, Relaxed);
        place.kind.store(key.kind(side) | if words.is_v6 { TO_IS_V6 } else { 0 }, Relaxed);
        // Before the flow is to be found, no search may end in front of it.
        self.between(home, distance).for_each(|place| _ = place.passed.fetch_add(1, Relaxed));
        place.version.store(version.wrapping_add(2), Release);
        Some(index as u32)
    }

    /// Removes a flow from the place that [`insert`](Self::insert) gave it; the caller owns it.
    pub(crate) fn remove(&self, index: u32) {
        let flow = self.flow_at(index);
        let index = index as usize;
        let place = &self.places[index];
        let version = place.version.load(Relaxed);
        place.version.store(version.wrapping_add(1), Relaxed);
        fence(Release);
        place.kind.store(0, Relaxed);
        place.version.store(version.wrapping_add(2), Release);
        let home = self.home(&flow);
        let distance = index.wrapping_sub(home) & self.mask();
        self.between(home, distance).for_each(|place| _ = place.passed.fetch_sub(1, Relaxed));
    }

    /// The flow in a place that the caller owns.
    pub(crate) fn flow_at(&self, index: u32) -> Flow {
        let index = index as usize;
        let place = &self.places[index];
        let kind = place.kind.load(Relaxed);
        let rest = match self.wide_at(index, false) {
            Some(wide) if kind & KEY_IS_V6 != 0 => wide.key.each_ref().map(|word| word.load(Relaxed)),
            _ => [0; 3],
        };
        let (ends, first) = (place.key_ends.load(Relaxed), place.key_first.load(Relaxed));
        Words { protocol: kind as u8, is_v6: kind & KEY_IS_V6 != 0, ends, first, rest }.flow()
    }

    /// What was noted of the flow in a place that the caller owns.
    pub(crate) fn note_at(&self, index: u32) -> Note {
        Note(self.places[index as usize].note.load(Relaxed))
    }

    /// Whether it is as it was at first, but for versions.
    #[cfg(test)]
    pub(crate) fn is_clean(&self) -> bool {
        let is_clean = |place: &Place| place.kind.load(Relaxed) == 0 && place.passed.load(Relaxed) == 0;
        self.places.iter().all(is_clean)
    }

    /// Notes a packet that was looked up when `note` was there.
    #[cfg(test)]
    pub(crate) fn see_late(&self, index: u32, note: Note, now_s: u32, marks: u8) {
        self.places[index as usize].see(note, now_s, marks);
    }

    #[inline]
    fn read(&self, side: Side, flow: &Flow) -> Option<Found> {
        let key = Words::of(flow);
        let kind = key.kind(side);
        let home = self.home(flow);
        for distance in 0..PROBES {
            let index = (home + distance) & self.mask();
            let place = &self.places[index];
            let version = place.version.load(Acquire);
            if place.key_ends.load(Relaxed) == key.ends
                && place.key_first.load(Relaxed) == key.first
                && place.kind.load(Relaxed) & !TO_IS_V6 == kind
                && let Some(found) = self.take(index, version, &key)
            {
                return Some(found);
            }
            if place.passed.load(Relaxed) == 0 {
                return None;
            }
        }
        None
    }

    /// The rest of a place whose first words are right. `None`: it was written meanwhile, or the rest is not right.
    #[inline]
    fn take(&self, index: usize, version: u32, key: &Words) -> Option<Found> {
        let place = &self.places[index];
        let to_is_v6 = place.kind.load(Relaxed) & TO_IS_V6 != 0;
        let mut to = Words {
            protocol: key.protocol,
            is_v6: to_is_v6,
            ends: place.to_ends.load(Relaxed),
            first: place.to_first.load(Relaxed),
            rest: [0; 3],
        };
        if key.is_v6 || to_is_v6 {
            let wide = self.wide_at(index, false)?;
            if key.is_v6 && wide.key.each_ref().map(|word| word.load(Relaxed)) != key.rest {
                return None;
            }
            to.rest = wide.to.each_ref().map(|word| word.load(Relaxed));
        }
        let note = Note(place.note.load(Relaxed));
        fence(Acquire);
        let holds = version & 1 == 0 && place.version.load(Relaxed) == version;
        holds.then(|| Found { index, to: to.flow(), note })
    }

    fn wide_at(&self, index: usize, fill: bool) -> Option<&Wide> {
        let chunk = &self.wide[index / CHUNK];
        let chunk =
            if fill { chunk.get_or_init(|| (0..CHUNK).map(|_| Wide::default()).collect()) } else { chunk.get()? };
        chunk.get(index % CHUNK)
    }

    fn between(&self, home: usize, distance: usize) -> impl Iterator<Item = &Place> {
        (0..distance).map(move |n| &self.places[(home + n) & self.mask()])
    }

    #[inline]
    fn home(&self, flow: &Flow) -> usize {
        self.hash.hash_one(flow) as usize & self.mask()
    }

    #[inline]
    fn mask(&self) -> usize {
        self.places.len() - 1
    }
}

impl Place {
    /// Makes its version odd if it is free; the version before.
    fn claim(&self) -> Option<u32> {
        let version = self.version.load(Acquire);
        let is_free = version & 1 == 0 && self.kind.load(Relaxed) & USED == 0;
        // Its kind changes with its version.
        (is_free && self.version.compare_exchange(version, version.wrapping_add(1), Acquire, Relaxed).is_ok())
            .then_some(version)
    }

    /// Notes a packet of the flow with this note, unless another flow is here now.
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

    /// When the last packet was noted, s.
    pub(crate) fn seconds(self) -> u32 {
        self.0 as u32
    }

    /// Marks of all packets.
    pub(crate) fn marks(self) -> u8 {
        (self.0 >> MARKS_SHIFT) as u8
    }

    /// Whether a packet is to be noted.
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
