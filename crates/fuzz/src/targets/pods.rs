//! A gateway pod that returns packets with any trailer, at any time.

use std::collections::BTreeMap;

use bifrost_plb::{Balancer, Config, DropReason, Egress, LegalCheck, Mode, NO_PAYLOAD, Order, TRAILER_LEN, Trailer};

use crate::Input;

/// An entry of an order queue: queue and number.
type Place = (u8, u32);

/// The pipeline around a balancer: packets passed to the pod, and packets returned.
struct Pipeline {
    balancer: Balancer<u32>,
    now: u64,
    /// Handles that the balancer holds, with the entries that their trailers named.
    held: BTreeMap<u32, Place>,
    next: u32,
    /// Trailers as the pod received them.
    given: Vec<Trailer>,
    /// By entry: its number in its queue, and its payload.
    places: BTreeMap<Place, (u64, Option<u64>)>,
    /// Entries allocated, by queue, and the number after the last that left in order.
    counts: [u64; 8],
    out: [u64; 8],
    /// By slot: its payload, and whether that has left.
    memory: Vec<(u64, bool)>,
    payloads: u64,
}

impl Pipeline {
    fn new(input: &mut Input<'_>) -> Self {
        let config = Config {
            pod: 7,
            cores: 1 + input.below(4) as u16,
            affinity: input.pick(&[0, 1, 8]),
            order_queues: 1 + input.below(8) as u8,
            queue_entries: input.pick(&[16, 32, 128]),
            payload_slots: input.pick(&[0, 1, 16, 64]),
            legal_check: input.pick(&[LegalCheck::Full, LegalCheck::LowBits]),
            first_psn: input.pick(&[0, u32::MAX - 5, 1 << 31]),
            ..Config::default()
        };
        let balancer = Balancer::new(config).unwrap_or_else(|e| panic!("{config:?}: {e}"));
        Pipeline {
            balancer,
            now: 1 << 40,
            held: BTreeMap::new(),
            next: 0,
            given: Vec::new(),
            places: BTreeMap::new(),
            counts: [0; 8],
            out: [0; 8],
            memory: vec![(0, true); config.payload_slots as usize],
            payloads: 0,
        }
    }

    fn dispatch(&mut self, hash: u32, header_only: bool) -> bool {
        let Ok(dispatch) = self.balancer.dispatch(self.now, hash, header_only) else { return false };
        assert!(dispatch.core < self.balancer.config().cores);
        let trailer = dispatch.trailer;
        let payload = trailer.payload.map(|slot| {
            self.payloads += 1;
            self.memory[slot as usize] = (self.payloads, false);
            self.payloads
        });
        if !trailer.unordered {
            let count = &mut self.counts[usize::from(trailer.queue)];
            self.places.insert((trailer.queue, trailer.psn), (*count, payload));
            *count += 1;
        }
        self.given.push(trailer);
        true
    }

    fn returned(&mut self, bytes: [u8; TRAILER_LEN]) -> Option<Egress<u32>> {
        let handle = self.next;
        self.next += 1;
        let place = Trailer::parse(bytes).map_or((u8::MAX, 0), |t| (t.queue, t.psn));
        self.held.insert(handle, place);
        let out = self.balancer.returned(bytes, handle);
        if let Some(out) = out {
            self.leave(out);
        }
        out
    }

    fn leave(&mut self, out: Egress<u32>) {
        let (Egress::Send { packet, .. } | Egress::Drop { packet, .. }) = out;
        let place = self.held.remove(&packet);
        let place = place.unwrap_or_else(|| panic!("handle {packet} returns twice, or was never dispatched"));
        let Egress::Send { payload, order, .. } = out else { return };
        let payload = payload.map(|slot| {
            let (payload, left) = &mut self.memory[slot as usize];
            assert!(!std::mem::replace(left, true), "payload {payload} leaves twice");
            *payload
        });
        if matches!(order, Order::InOrder) {
            let Some(&(number, bound)) = self.places.get(&place) else { panic!("{place:?} was never allocated") };
            assert_eq!(payload, bound, "another payload than the one bound to {place:?}");
            let out = &mut self.out[usize::from(place.0)];
            assert!(number >= *out, "{place:?} leaves after number {out}");
            *out = number + 1;
        }
    }

    fn release(&mut self, limit: u32) {
        let mut out = Vec::new();
        self.balancer.release(self.now, limit, |egress| out.push(egress));
        out.into_iter().for_each(|egress| self.leave(egress));
        self.check();
    }

    fn check(&self) {
        let (places, held) = self.balancer.occupancy();
        let config = self.balancer.config();
        assert!(places <= config.queue_entries * u32::from(config.order_queues) && held <= places);
        assert_eq!(held as usize, self.held.len(), "handles that the balancer reports");
    }

    /// All packets with an entry are gone after the timeout.
    fn quiet_down(&mut self) {
        self.now += self.balancer.config().timeout_ns + 1;
        self.release(u32::MAX);
        assert_eq!(self.balancer.occupancy(), (0, 0), "packets are still held");
        assert!(self.held.is_empty() && self.balancer.deadline().is_none());
    }
}

/// A trailer from the pod, valid or not.
fn trailer(input: &mut Input<'_>, given: &[Trailer]) -> [u8; TRAILER_LEN] {
    let recent = given.len().saturating_sub(1 + input.below(64));
    let mut t = given.get(recent).copied().unwrap_or(Trailer {
        psn: 0,
        payload: None,
        pod: 7,
        queue: 0,
        drop: false,
        unordered: true,
    });
    match input.below(12) {
        0 => t.drop = true,
        1 => t.psn = input.around(t.psn),
        2 => t.psn = t.psn.wrapping_add(u32::from(input.u8()) * 16),
        3 => t.queue = input.u8() & 15,
        4 => t.payload = Some(u32::from(input.u8())),
        5 => t.payload = [None, Some(NO_PAYLOAD - 1)][input.below(2)],
        6 => t.unordered = !t.unordered,
        7 => t.pod = input.u16(),
        8 => {
            let mut bytes = t.emit();
            bytes[input.below(TRAILER_LEN)] = input.u8();
            return bytes;
        }
        9 => {
            let mut bytes = [0; TRAILER_LEN];
            let raw = input.bytes(TRAILER_LEN);
            bytes[..raw.len()].copy_from_slice(raw);
            return bytes;
        }
        _ => {}
    }
    t.emit()
}

pub(crate) fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut pipeline = Pipeline::new(&mut input);
    while !input.is_empty() {
        match input.below(16) {
            0..=5 => {
                let hash = u32::from(input.u8()).wrapping_mul(0x0101_0101);
                let header_only = input.chance(100);
                pipeline.dispatch(hash, header_only);
            }
            6..=11 => {
                let bytes = trailer(&mut input, &pipeline.given);
                pipeline.returned(bytes);
            }
            12 | 13 => {
                let limit = input.pick(&[u32::MAX, 1, 0, 7]);
                pipeline.release(limit);
            }
            14 => pipeline.now += input.pick(&[1, 10_000, 60_000, 100_000, 100_001, 1 << 40]),
            _ => match input.below(8) {
                0 => {
                    let mut out = Vec::new();
                    pipeline.balancer.clear(|egress| out.push(egress));
                    for egress in out {
                        assert!(matches!(egress, Egress::Drop { reason: DropReason::Cleared, .. }));
                        pipeline.leave(egress);
                    }
                    // Payloads of released entries may be overwritten, but not sent any more.
                    pipeline.memory.iter_mut().for_each(|(_, left)| *left = true);
                }
                n => {
                    let mode = if n % 2 == 0 { Mode::Rss } else { Mode::Plb };
                    pipeline.balancer.set_mode(pipeline.now, mode);
                }
            },
        }
        pipeline.check();
    }
    pipeline.quiet_down();
    // Then an honest pod, whose packets return in reverse order.
    pipeline.balancer.set_mode(pipeline.now, Mode::Plb);
    pipeline.quiet_down();
    let before = *pipeline.balancer.counters();
    let first = pipeline.given.len();
    for n in 0..8 {
        assert!(pipeline.dispatch(n << 29, false), "no room for an honest pod");
    }
    for trailer in pipeline.given.split_off(first).into_iter().rev() {
        assert_eq!(pipeline.returned(trailer.emit()), None);
    }
    pipeline.release(u32::MAX);
    assert_eq!(pipeline.balancer.counters().sent_in_order_packets, before.sent_in_order_packets + 8);
}
