//! The receive window: duplicates, reordering by metadata only, and the contents of ACKs (PROTOCOL.md, receive rules).
//!
//! A packet passes through two states: *present* (in guest memory, or in memory held for the guest) and *published*
//! (visible to the guest). `base` is the first PSN that is not published. Nothing is stored for packets that arrive in
//! order.

use bifrost_wire::bifrost::{Bitmap, Psn};

use crate::config::Ordering;
use bifrost_transport::pool::{PAGE, Page, Pages, Pool};

/// Packets beyond `base` that are accepted; the largest send window.
pub(crate) const RECEIVE_WINDOW: u32 = 4096;

/// No waiter.
const NONE: u16 = u16::MAX;

/// Metadata of one packet that waits: 12 bytes.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(test, derive(Hash))]
struct Slot {
    handle: u32,
    /// First packet that waits for this one, as PSN modulo the window.
    waiter: u16,
    /// Next packet that waits for the same one as this.
    next_waiter: u16,
    distance: u8,
    /// Nothing is published for it (policy drop).
    empty: bool,
}

const VACANT: Slot = Slot { handle: 0, waiter: NONE, next_waiter: NONE, distance: 0, empty: true };

/// 64 packets of a receive window.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone, Hash))]
pub(crate) struct RecvPage {
    present: u64,
    published: u64,
    slots: [Slot; PAGE as usize],
}

impl Default for RecvPage {
    fn default() -> Self {
        RecvPage { present: 0, published: 0, slots: [VACANT; PAGE as usize] }
    }
}

impl Page for RecvPage {
    fn reset(&mut self) {
        self.present = 0;
        self.published = 0;
        self.slots = [VACANT; PAGE as usize];
    }
}

/// How a PSN relates to the window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// New; place it.
    New,
    /// Already present or published.
    Duplicate,
    /// Beyond the window.
    Outside,
}

/// A packet that was placed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Placed {
    pub(crate) psn: Psn,
    pub(crate) distance: u8,
    /// `None`: acknowledged without being published (policy drop, NSDI'26 7.1).
    pub(crate) handle: Option<u32>,
}

/// One direction's receive window.
#[derive(Debug)]
#[cfg_attr(test, derive(Clone))]
pub(crate) struct RecvWindow {
    base: Psn,
    /// One past the highest PSN present.
    end: Psn,
    held: u16,
    pages: Pages,
}

impl RecvWindow {
    pub(crate) fn new(base: Psn) -> Self {
        RecvWindow { base, end: base, held: 0, pages: Pages::default() }
    }

    /// First PSN that is not published.
    pub(crate) fn base(&self) -> Psn {
        self.base
    }

    /// One past the highest PSN seen.
    pub(crate) fn end(&self) -> Psn {
        self.end
    }

    /// Packets that are present but not published.
    pub(crate) fn held(&self) -> u16 {
        self.held
    }

    /// Whether a packet is missing below one that is present.
    pub(crate) fn has_gap(&self) -> bool {
        self.base != self.end
    }

    /// Whether `psn` is the next one, and nothing waits.
    #[inline(always)]
    pub(crate) fn is_next(&self, psn: Psn) -> bool {
        psn == self.base && self.end == self.base
    }

    /// How `psn` relates to the window.
    #[inline]
    pub(crate) fn check(&self, pool: &Pool<RecvPage>, psn: Psn) -> Check {
        if self.is_next(psn) {
            return Check::New;
        }
        let ahead = psn.distance_from(self.base);
        if ahead < 0 {
            return if ahead >= -(RECEIVE_WINDOW as i32) { Check::Duplicate } else { Check::Outside };
        }
        if ahead >= RECEIVE_WINDOW as i32 {
            return Check::Outside;
        }
        // From `end` on, nothing is present.
        if !psn.is_before(self.end) {
            return Check::New;
        }
        match self.pages.find(psn.0) {
            Some((id, i)) if pool.page(id).present >> i & 1 == 1 => Check::Duplicate,
            _ => Check::New,
        }
    }

    /// If a new packet cannot be published as soon as it is present: how many packets it is ahead of the first missing
    /// one.
    pub(crate) fn must_wait(&self, pool: &Pool<RecvPage>, ordering: Ordering, psn: Psn, distance: u8) -> Option<u32> {
        let ahead = psn.distance_from(self.base).max(0) as u32;
        let waits = ahead > 0 && !matches!(self.waits_for(pool, ordering, psn, distance), Wait::Nothing);
        waits.then_some(ahead)
    }

    /// Takes the next packet in order, which the caller publishes; nothing is stored.
    #[inline(always)]
    pub(crate) fn take_next(&mut self) {
        self.base = self.base.next();
        self.end = self.base;
    }

    /// Takes a packet that [`check`](Self::check) found to be new; passes the handles that become visible to `out`, in
    /// order. Returns false, and takes nothing, if the pool has no page left.
    #[inline]
    pub(crate) fn place(
        &mut self,
        pool: &mut Pool<RecvPage>,
        ordering: Ordering,
        placed: Placed,
        stack: &mut Vec<u32>,
        out: &mut impl FnMut(u32),
    ) -> bool {
        // In order, and nothing waits: the continuity check of NSDI'26 4.2, in constant time and without state.
        if self.is_next(placed.psn) {
            if let Some(handle) = placed.handle {
                out(handle);
            }
            self.take_next();
            return true;
        }
        self.place_behind_gap(pool, ordering, placed, stack, out)
    }

    fn place_behind_gap(
        &mut self,
        pool: &mut Pool<RecvPage>,
        ordering: Ordering,
        placed: Placed,
        stack: &mut Vec<u32>,
        out: &mut impl FnMut(u32),
    ) -> bool {
        let Some((id, i)) = self.pages.find_or_make(pool, placed.psn.0, self.base.0) else {
            return false;
        };
        let page = pool.page_mut(id);
        page.present |= 1 << i;
        let slot = &mut page.slots[i];
        slot.handle = placed.handle.unwrap_or(0);
        slot.empty = placed.handle.is_none();
        slot.distance = if ordering == Ordering::Flow { placed.distance } else { 0 };
        self.held += 1;
        if !placed.psn.is_before(self.end) {
            self.end = placed.psn.next();
        }
        match self.waits_for(pool, ordering, placed.psn, placed.distance) {
            Wait::Nothing => self.publish(pool, placed.psn, stack, out),
            Wait::Base => {}
            Wait::Packet(before) => {
                let Some((pid, pi)) = self.pages.find_or_make(pool, before.0, self.base.0) else {
                    return true; // it waits for `base` instead: later, but never wrong
                };
                let first = pool.page(pid).slots[pi].waiter;
                pool.page_mut(id).slots[i].next_waiter = first;
                pool.page_mut(pid).slots[pi].waiter = (placed.psn.0 % RECEIVE_WINDOW) as u16;
            }
        }
        self.advance(pool, stack, out);
        true
    }

    /// The sender gave up everything below `to`: publishes what is held there and continues at `to`. False if `to` is
    /// outside the window.
    pub(crate) fn skip_to(
        &mut self,
        pool: &mut Pool<RecvPage>,
        to: Psn,
        stack: &mut Vec<u32>,
        out: &mut impl FnMut(u32),
    ) -> bool {
        let ahead = to.distance_from(self.base);
        if ahead > RECEIVE_WINDOW as i32 {
            return false;
        }
        for _ in 0..ahead.max(0) {
            let psn = self.base;
            if psn == self.end {
                // Nothing is present from here on.
                (self.base, self.end) = (to, to);
                break;
            }
            let state = self
                .pages
                .find(psn.0)
                .map(|(id, i)| (pool.page(id).present >> i & 1, pool.page(id).published >> i & 1));
            match state {
                Some((1, 0)) => self.publish(pool, psn, stack, out),
                Some((0, _)) => {
                    // Packets that wait for the given-up packet must not wait any longer.
                    if let Some((id, i)) = self.pages.find(psn.0) {
                        pool.page_mut(id).present |= 1 << i;
                        self.held += 1;
                        self.publish(pool, psn, stack, out);
                    }
                }
                _ => {}
            }
            self.step(pool, stack, out);
        }
        self.advance(pool, stack, out);
        true
    }

    /// The bitmap for an ACK from PSN `from` on: which of the next 256 packets, at most, are present.
    pub(crate) fn bitmap(&self, pool: &Pool<RecvPage>, from: Psn) -> Bitmap {
        let span = self.end.distance_from(from);
        if span <= 0 {
            return Bitmap::empty();
        }
        let words = (span as u32).div_ceil(32).min(8);
        let (mut map, mut used) = ([0u32; 8], 0);
        for (w, word) in map.iter_mut().enumerate().take(words as usize) {
            *word = self.pages.word(pool, from.0.wrapping_add(32 * w as u32), |p| p.present);
            if *word != 0 {
                used = w + 1;
            }
        }
        Bitmap::from_words(&map[..used]).unwrap_or_default()
    }

    /// Removes all held packets, oldest first (the connection restarts).
    pub(crate) fn drain(&mut self, pool: &mut Pool<RecvPage>, out: &mut impl FnMut(u32)) {
        let mut psn = self.base;
        while psn.is_before(self.end) && self.held > 0 {
            if let Some((id, i)) = self.pages.find(psn.0) {
                let page = pool.page(id);
                if page.present >> i & 1 == 1 && page.published >> i & 1 == 0 {
                    if !page.slots[i].empty {
                        out(page.slots[i].handle);
                    }
                    self.held -= 1;
                }
            }
            psn = psn.next();
        }
        self.pages.clear(pool);
        self.held = 0;
        self.end = self.base;
    }

    /// Hashes the window's state, independent of where in the pool its pages are.
    #[cfg(test)]
    pub(crate) fn hash_with(&self, pool: &Pool<RecvPage>, hasher: &mut impl std::hash::Hasher) {
        use std::hash::Hash;
        (self.base, self.end, self.held).hash(hasher);
        self.pages.content(pool).for_each(|page| page.hash(hasher));
    }

    fn waits_for(&self, pool: &Pool<RecvPage>, ordering: Ordering, psn: Psn, distance: u8) -> Wait {
        match (ordering, distance) {
            (Ordering::Off, _) => Wait::Nothing,
            (Ordering::Strict, _) | (Ordering::Flow, 0) => Wait::Base,
            (Ordering::Flow, 255) => {
                if psn.sub(254).distance_from(self.base) <= 0 {
                    Wait::Nothing
                } else {
                    Wait::Base
                }
            }
            (Ordering::Flow, d) => {
                let before = psn.sub(u32::from(d));
                if before.is_before(self.base) || self.is_published(pool, before) {
                    Wait::Nothing
                } else {
                    Wait::Packet(before)
                }
            }
        }
    }

    fn is_published(&self, pool: &Pool<RecvPage>, psn: Psn) -> bool {
        self.pages.find(psn.0).is_some_and(|(id, i)| pool.page(id).published >> i & 1 == 1)
    }

    /// Publishes `psn` and everything that waits for it, without recursion.
    fn publish(&mut self, pool: &mut Pool<RecvPage>, psn: Psn, stack: &mut Vec<u32>, out: &mut impl FnMut(u32)) {
        stack.clear();
        stack.push(psn.0);
        while let Some(psn) = stack.pop() {
            let Some((id, i)) = self.pages.find(psn) else { continue };
            let page = pool.page_mut(id);
            if page.published >> i & 1 == 1 {
                continue;
            }
            page.published |= 1 << i;
            let slot = page.slots[i];
            self.held -= 1;
            if !slot.empty {
                out(slot.handle);
            }
            let mut waiter = slot.waiter;
            while waiter != NONE {
                let ahead = u32::from(waiter).wrapping_sub(self.base.0) % RECEIVE_WINDOW;
                let at = self.base.0.wrapping_add(ahead);
                stack.push(at);
                waiter = self.pages.find(at).map_or(NONE, |(id, i)| pool.page(id).slots[i].next_waiter);
            }
        }
    }

    /// Moves `base` past everything that is present, and publishes what waited for `base`.
    fn advance(&mut self, pool: &mut Pool<RecvPage>, stack: &mut Vec<u32>, out: &mut impl FnMut(u32)) {
        while self.base != self.end {
            let Some((id, i)) = self.pages.find(self.base.0) else { break };
            let page = pool.page(id);
            if page.present >> i & 1 == 0 {
                break;
            }
            if page.published >> i & 1 == 0 {
                self.publish(pool, self.base, stack, out);
            }
            self.step(pool, stack, out);
        }
        if self.base == self.end {
            self.pages.clear(pool);
        } else {
            self.pages.release_below(pool, self.base.0);
        }
    }

    /// Moves `base` by one; a packet with distance 255 that waited for exactly this becomes visible.
    fn step(&mut self, pool: &mut Pool<RecvPage>, stack: &mut Vec<u32>, out: &mut impl FnMut(u32)) {
        self.base = self.base.next();
        if self.end.is_before(self.base) {
            self.end = self.base;
        }
        let far = self.base.add(254);
        if let Some((id, i)) = self.pages.find(far.0) {
            let page = pool.page(id);
            if page.present >> i & 1 == 1 && page.published >> i & 1 == 0 && page.slots[i].distance == 255 {
                self.publish(pool, far, stack, out);
            }
        }
    }
}

/// What a placed packet waits for.
enum Wait {
    Nothing,
    Base,
    Packet(Psn),
}

#[cfg(test)]
mod tests;
