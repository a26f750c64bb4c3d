//! Sessions of translation that a core has seen, by how their packets look on either side.
//!
//! Among hundreds of thousands of conversations, a packet's session is in no cache of the processor. What a packet needs is therefore in one place, of
//! two lines of memory, whose address is known as soon as its headers are read: the places of several packets can be [fetched
//! ahead](Cache::fetch_ahead), and their waits overlap. The session itself, which all cores share, is looked at only every [`NOTED_EVERY_S`].

use std::hash::BuildHasher as _;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use bifrost_tables::prefetch;
use bifrost_wire::tcp;
use foldhash::fast::FixedState;

use crate::rewrite::End;
use crate::session::{Flow, NOTED_EVERY_S, Session};

/// Places that are looked at for a flow, and the least that there are.
const PROBES: usize = 8;

/// What a core has seen. It forgets some of it when it gets full; the sessions are not lost by that.
#[derive(Debug)]
pub(crate) struct Cache {
    /// A power of two. All of them are there from the beginning: growing would hold up a core for long.
    places: Box<[Place]>,
    used: usize,
    hash: FixedState,
}

/// A flow and how its packets go on. The first half is what a search looks at.
#[derive(Clone, Debug)]
#[repr(C, align(64))]
struct Place {
    flow: Flow,
    /// Part of the flow's hash.
    tag: u32,
    /// When the session was told of a packet last, s.
    noted_s: u32,
    /// None: the place is free.
    session: Option<Arc<Session>>,
    to: Flow,
}

/// Two lines of memory.
const _: () = assert!(size_of::<Place>() == 128);

impl Cache {
    /// Empty, with room for `flows`, rounded up to a power of two.
    pub(crate) fn new(flows: usize, seed: u64) -> Self {
        let places = flows.clamp(PROBES, 1 << 32).next_power_of_two();
        Cache { places: vec![Place::free(); places].into(), used: 0, hash: FixedState::with_seed(seed) }
    }

    /// Flows that it knows.
    pub(crate) fn len(&self) -> usize {
        self.used
    }

    /// Has the place of a flow come into the processor's caches.
    #[inline]
    pub(crate) fn fetch_ahead(&self, flow: &Flow) {
        let place = &self.places[self.hash.hash_one(flow) as usize & (self.places.len() - 1)];
        prefetch(&place.flow);
        prefetch(&place.to);
    }

    /// How a packet of a flow goes on, if the flow is known and its session is not over. The session is told of the packet if that matters.
    #[inline]
    pub(crate) fn find(&mut self, flow: &Flow, now_s: u32, flags: tcp::Flags, from_inside: bool) -> Option<Flow> {
        let index = self.position(flow, self.hash.hash_one(flow))?;
        let place = &mut self.places[index];
        let is_noted = now_s.saturating_sub(place.noted_s) < NOTED_EVERY_S;
        if is_noted && !flags.intersects(tcp::Flags::FIN.with(tcp::Flags::RST)) {
            return Some(place.to);
        }
        let session = place.session.as_ref()?;
        if session.is_gone() {
            self.free(index);
            return None;
        }
        session.touch(now_s, flags, from_inside);
        place.noted_s = now_s;
        Some(place.to)
    }

    /// Packets of a flow that is not known go on like this. Their session has been told of one now.
    pub(crate) fn keep(&mut self, flow: Flow, to: Flow, session: &Arc<Session>, now_s: u32) {
        let hash = self.hash.hash_one(flow);
        let place = Place { flow, tag: tag(hash), noted_s: now_s, session: Some(Arc::clone(session)), to };
        self.put(hash, place);
    }

    /// Where a flow is.
    #[inline]
    fn position(&self, flow: &Flow, hash: u64) -> Option<usize> {
        let is_it = |index: &usize| {
            let place = &self.places[*index];
            place.tag == tag(hash) && place.flow == *flow && place.session.is_some()
        };
        self.probes(hash).find(is_it)
    }

    #[inline]
    fn probes(&self, hash: u64) -> impl Iterator<Item = usize> + use<> {
        let mask = self.places.len() - 1;
        (0..PROBES).map(move |n| (hash as usize).wrapping_add(n) & mask)
    }

    /// Puts a flow into a free place, or into that of the one without packets for longest.
    fn put(&mut self, hash: u64, place: Place) {
        let free = self.probes(hash).find(|index| self.places[*index].session.is_none());
        let index = free.or_else(|| self.probes(hash).min_by_key(|index| self.places[*index].noted_s));
        // There are probes.
        let Some(index) = index else { return };
        self.used += usize::from(free.is_some());
        self.places[index] = place;
    }

    fn free(&mut self, index: usize) {
        self.places[index] = Place::free();
        self.used -= 1;
    }
}

impl Place {
    fn free() -> Self {
        let end = End { address: IpAddr::V4(Ipv4Addr::UNSPECIFIED), port: 0 };
        let flow = Flow { network: 0, protocol: 0, source: end, destination: end };
        Place { flow, tag: 0, noted_s: 0, session: None, to: flow }
    }
}

fn tag(hash: u64) -> u32 {
    (hash >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flow(number: u32) -> Flow {
        let end = |address: u32, port| End { address: Ipv4Addr::from_bits(address).into(), port };
        Flow { network: 7, protocol: 17, source: end(number, number as u16), destination: end(!number, 443) }
    }

    fn kept(cache: &mut Cache, numbers: std::ops::Range<u32>, now_s: u32) {
        for number in numbers {
            let session = Arc::new(Session::new(flow(number), flow(!number), now_s));
            cache.keep(flow(number), flow(!number), &session, now_s);
        }
    }

    const NONE: tcp::Flags = tcp::Flags(0);

    #[test]
    fn what_is_full_forgets_what_has_no_packets() {
        let mut cache = Cache::new(10_000, 3);
        kept(&mut cache, 0..8000, 100);
        let found = |cache: &mut Cache, numbers: std::ops::Range<u32>| {
            numbers.filter(|n| cache.find(&flow(*n), 101, NONE, true) == Some(flow(!*n))).count()
        };
        // Eight probes each, half of the places: hardly any flow found all of its own taken.
        let known = found(&mut cache, 0..8000);
        assert!(known > 7800 && cache.len() == known, "{known} {}", cache.len());
        assert_eq!(found(&mut cache, 8000..9000), 0);
        kept(&mut cache, 8000..100_000, 102);
        assert_eq!(cache.places.len(), 16_384);
        assert!(cache.len() > 16_000 && found(&mut cache, 0..100_000) == cache.len());
        assert!(found(&mut cache, 0..8000) < 100, "others were seen later");
    }

    #[test]
    fn sessions_are_told_now_and_then_and_of_what_ends_them() {
        let mut cache = Cache::new(10, 3);
        let session = Arc::new(Session::new(flow(1), flow(2), 100));
        cache.keep(flow(1), flow(2), &session, 100);
        for (now_s, flags, seen_s) in [
            (100 + NOTED_EVERY_S - 1, NONE, 100),
            (100 + NOTED_EVERY_S, NONE, 100 + NOTED_EVERY_S),
            (101 + NOTED_EVERY_S, tcp::Flags::FIN, 101 + NOTED_EVERY_S),
        ] {
            assert_eq!(cache.find(&flow(1), now_s, flags, true), Some(flow(2)));
            assert_eq!(session.seen_s(), seen_s);
        }
        session.end();
        assert_eq!(cache.find(&flow(1), 200, NONE, true), None);
        assert_eq!(cache.len(), 0);
    }
}
