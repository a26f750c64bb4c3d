//! The few tenants that are not limited, or have their own meter.

use std::hash::BuildHasher;

use foldhash::fast::FixedState;
use thiserror::Error;

use crate::TokenBucket;

/// Number of tenants: Albatross, 4.3.
const ENTRIES: usize = 128;
/// Slots of the index: twice as many as entries, so that a search visits about one.
const INDEX: usize = 256;
const EMPTY: u8 = u8::MAX;

/// All entries are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("all {ENTRIES} entries of pre_check are taken")]
pub struct PreCheckFull;

#[derive(Clone, Debug)]
enum Kind {
    Bypass,
    Meter(TokenBucket),
}

#[derive(Clone, Debug)]
struct Entry {
    vni: u32,
    /// When the tenant last exceeded its rate, or was added.
    exceeded_at: u64,
    kind: Kind,
}

/// A tenant's own meter.
#[derive(Debug)]
pub(super) struct Meter<'a> {
    bucket: &'a mut TokenBucket,
    exceeded_at: &'a mut u64,
}

impl Meter<'_> {
    pub(super) fn take(self, now: u64, tokens: u64) -> bool {
        let passes = self.bucket.take(now, tokens);
        if !passes {
            *self.exceeded_at = now;
        }
        passes
    }
}

#[derive(Debug)]
pub(super) enum Found<'a> {
    Bypass,
    Meter(Meter<'a>),
}

/// Up to 128 tenants, found with about one comparison.
#[derive(Clone, Debug)]
pub(super) struct PreCheck {
    entries: Vec<Entry>,
    /// By hash: an index into `entries`, or [`EMPTY`]; on a collision the next slot.
    index: Box<[u8; INDEX]>,
    hash: FixedState,
}

impl PreCheck {
    pub(super) fn new(seed: u64) -> Self {
        PreCheck {
            entries: Vec::with_capacity(ENTRIES),
            index: Box::new([EMPTY; INDEX]),
            hash: FixedState::with_seed(seed),
        }
    }

    fn slots(&self, vni: u32) -> impl Iterator<Item = usize> + use<> {
        let first = self.hash.hash_one(vni) as usize;
        (0..INDEX).map(move |n| first.wrapping_add(n) % INDEX)
    }

    /// Half of the index is empty, so this ends soon.
    fn position(&self, vni: u32) -> Option<usize> {
        if self.entries.is_empty() {
            return None;
        }
        let entries = self.slots(vni).map(|slot| self.index[slot]).take_while(|entry| *entry != EMPTY);
        entries.map(usize::from).find(|entry| self.entries[*entry].vni == vni)
    }

    #[inline]
    pub(super) fn find(&mut self, vni: u32) -> Option<Found<'_>> {
        let position = self.position(vni)?;
        let Entry { kind, exceeded_at, .. } = &mut self.entries[position];
        Some(match kind {
            Kind::Bypass => Found::Bypass,
            Kind::Meter(bucket) => Found::Meter(Meter { bucket, exceeded_at }),
        })
    }

    /// The entry of a tenant: the tokens of its own meter, or nothing if it is not limited.
    pub(super) fn foresee(&self, now: u64, vni: u32) -> Option<Option<u64>> {
        Some(match &self.entries[self.position(vni)?].kind {
            Kind::Bypass => None,
            Kind::Meter(bucket) => Some(bucket.clone().available(now)),
        })
    }

    /// Gives a tenant its own meter. If no entry is free, it replaces one that has not exceeded its rate for `keep_ns`.
    pub(super) fn promote(
        &mut self,
        now: u64,
        vni: u32,
        bucket: TokenBucket,
        keep_ns: u64,
    ) -> Result<(), PreCheckFull> {
        if self.position(vni).is_some() {
            return Ok(());
        }
        if self.entries.len() == ENTRIES {
            let metered = self.entries.iter().enumerate().filter(|(_, e)| matches!(e.kind, Kind::Meter(_)));
            let oldest =
                metered.min_by_key(|(_, e)| e.exceeded_at).filter(|(_, e)| now.saturating_sub(e.exceeded_at) > keep_ns);
            let (oldest, _) = oldest.ok_or(PreCheckFull)?;
            self.entries.swap_remove(oldest);
        }
        self.entries.push(Entry { vni, exceeded_at: now, kind: Kind::Meter(bucket) });
        self.rebuild();
        Ok(())
    }

    /// Exempts a tenant. If no entry is free, it replaces the metered tenant that exceeded its rate the longest time
    /// ago.
    pub(super) fn bypass(&mut self, vni: u32) -> Result<(), PreCheckFull> {
        if let Some(position) = self.position(vni) {
            self.entries[position].kind = Kind::Bypass;
            return Ok(());
        }
        if self.entries.len() == ENTRIES {
            let metered = self.entries.iter().enumerate().filter(|(_, e)| matches!(e.kind, Kind::Meter(_)));
            let (oldest, _) = metered.min_by_key(|(_, e)| e.exceeded_at).ok_or(PreCheckFull)?;
            self.entries.swap_remove(oldest);
        }
        self.entries.push(Entry { vni, exceeded_at: 0, kind: Kind::Bypass });
        self.rebuild();
        Ok(())
    }

    pub(super) fn remove(&mut self, vni: u32) -> bool {
        let Some(position) = self.position(vni) else { return false };
        self.entries.swap_remove(position);
        self.rebuild();
        true
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u32, bool)> {
        self.entries.iter().map(|e| (e.vni, matches!(e.kind, Kind::Bypass)))
    }

    pub(super) fn heap_bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>() + INDEX
    }

    fn rebuild(&mut self) {
        self.index.fill(EMPTY);
        for (entry, number) in self.entries.iter().zip(0u8..) {
            // There are more slots than entries.
            let free = self.slots(entry.vni).find(|slot| self.index[*slot] == EMPTY);
            if let Some(slot) = free {
                self.index[slot] = number;
            }
        }
    }
}
