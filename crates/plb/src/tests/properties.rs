//! Random calls against the oracle; random pods, whose flows must stay in order.

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::cases::Out;
use super::oracle::Oracle;
use crate::*;

/// One call, or a delay.
#[derive(Clone, Copy, Debug)]
pub(super) enum Call {
    /// Dispatches a packet of the flow with that hash.
    Dispatch(u32),
    /// Returns the nth of the packets dispatched last, with its trailer changed.
    Return(u8, Change),
    Wait(u32),
    Release,
    Mode(bool),
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    None,
    Drop,
    /// To the PSN.
    Add(i32),
    Queue(u8),
    Pod(u16),
    Payload(u32),
    Unordered,
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        12 => Just(Change::None),
        3 => Just(Change::Drop),
        1 => (-40i32..40).prop_map(Change::Add),
        1 => prop_oneof![Just(16), Just(-16), Just(1 << 30)].prop_map(Change::Add),
        1 => any::<u8>().prop_map(Change::Queue),
        1 => any::<u16>().prop_map(Change::Pod),
        1 => any::<u32>().prop_map(Change::Payload),
        1 => Just(Change::Unordered),
    ]
}

pub(super) fn calls() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![
        12 => (0u32..8).prop_map(|flow| Call::Dispatch(flow.wrapping_mul(0x2345_6789))),
        10 => (0u8..40, change()).prop_map(|(n, change)| Call::Return(n, change)),
        2 => prop_oneof![0u32..40_000, Just(100_000), Just(100_001)].prop_map(Call::Wait),
        5 => Just(Call::Release),
        1 => any::<bool>().prop_map(Call::Mode),
    ];
    prop::collection::vec(call, 1..400)
}

pub(super) fn configs() -> impl Strategy<Value = Config> {
    let first_psn = prop_oneof![Just(0u32), Just(u32::MAX - 20), any::<u32>()];
    (1u16..5, prop_oneof![Just(0u16), 1u16..4], 1u8..4, first_psn, any::<bool>()).prop_map(
        |(cores, affinity, order_queues, first_psn, low)| Config {
            pod: 3,
            cores,
            affinity,
            order_queues,
            queue_entries: 16,
            first_psn,
            legal_check: if low { LegalCheck::LowBits } else { LegalCheck::Full },
            ..Config::default()
        },
    )
}

fn changed(mut t: Trailer, change: Change) -> Trailer {
    match change {
        Change::None => {}
        Change::Drop => t.drop = true,
        Change::Add(n) => t.psn = t.psn.wrapping_add_signed(n),
        Change::Queue(queue) if !t.unordered => t.queue = queue,
        Change::Queue(_) => {}
        Change::Pod(pod) => t.pod = pod,
        Change::Payload(slot) => t.payload = (slot != NO_PAYLOAD).then_some(slot),
        Change::Unordered => (t.unordered, t.queue) = (true, 0),
    }
    t
}

/// Panics if balancer and oracle differ.
pub(super) fn against_the_oracle(config: Config, calls: &[Call]) {
    let mut balancer = Balancer::<u32>::new(config).unwrap();
    let mut oracle = Oracle::new(config);
    let (mut now, mut next) = (1_000_000u64, 0u32);
    let mut dispatched: VecDeque<Trailer> = VecDeque::new();
    let mut alive: HashMap<u32, ()> = HashMap::new();
    let leave = |out: &Out, alive: &mut HashMap<u32, ()>| {
        let (Egress::Send { packet, .. } | Egress::Drop { packet, .. }) = *out;
        assert!(alive.remove(&packet).is_some(), "handle {packet} returned twice, or was never dispatched");
    };
    for &call in calls {
        match call {
            Call::Dispatch(hash) => {
                let queue = usize::from(balancer.order_queue(hash));
                let flow_core = ((u64::from(hash) * u64::from(config.cores)) >> 32) as u16;
                let expected = oracle.dispatch(now, queue, flow_core);
                let got = balancer.dispatch(now, hash, false).ok();
                if let Some(d) = got {
                    dispatched.push_front(d.trailer);
                }
                let got = got.map(|d| (d.core, (!d.trailer.unordered).then_some(d.trailer.psn)));
                assert_eq!(got, expected, "{call:?}");
            }
            Call::Return(n, change) => {
                let Some(&trailer) = dispatched.get(usize::from(n)) else { continue };
                let trailer = changed(trailer, change);
                alive.insert(next, ());
                let got = balancer.returned(trailer.emit(), next);
                assert_eq!(got, oracle.returned(&trailer, next), "{trailer:?}");
                got.iter().for_each(|out| leave(out, &mut alive));
                next += 1;
            }
            Call::Wait(ns) => now += u64::from(ns),
            Call::Release => {
                let mut got = Vec::new();
                balancer.release(now, u32::MAX, |out| got.push(out));
                assert_eq!(got, oracle.release(now));
                got.iter().for_each(|out| leave(out, &mut alive));
            }
            Call::Mode(rss) => {
                let mode = if rss { Mode::Rss } else { Mode::Plb };
                balancer.set_mode(now, mode);
                oracle.set_mode(now, mode);
            }
        }
        assert_eq!(balancer.occupancy().0 as usize, oracle.len());
        assert_eq!(balancer.occupancy().1 as usize, alive.len(), "handles held");
    }
    // Nothing is held longer than the timeout.
    balancer.release(now + config.timeout_ns + 1, u32::MAX, |out| leave(&out, &mut alive));
    assert!(alive.is_empty() && balancer.occupancy() == (0, 0), "{alive:?} is still held");
}

/// One step of a pod's life.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// A packet of a flow arrives.
    Arrive {
        flow: u8,
        header_only: bool,
    },
    /// A core returns its oldest packet, or drops it, with the flag or silently.
    Serve {
        core: u8,
        how: u8,
    },
    Wait(u16),
    Mode(bool),
    /// A core does nothing for longer than the timeout.
    Stall,
}

pub(super) fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        10 => (0u8..6, any::<bool>()).prop_map(|(flow, header_only)| Step::Arrive { flow, header_only }),
        10 => (0u8..4, any::<u8>()).prop_map(|(core, how)| Step::Serve { core, how }),
        4 => (0u16..3000).prop_map(Step::Wait),
        1 => any::<bool>().prop_map(Step::Mode),
        1 => Just(Step::Stall),
    ];
    prop::collection::vec(step, 1..500)
}

/// A packet in the pod.
#[derive(Clone, Copy, Debug)]
struct Travelling {
    trailer: Trailer,
    id: u32,
    at: u64,
}

/// A pod whose cores are queues that serve in order, at any pace. Flows must leave in order, except for packets that
/// took longer than the timeout; only packets that the pod loses are lost; every packet has its own payload.
pub(super) fn flows_stay_in_order(config: Config, steps: &[Step]) {
    let config = Config { cores: 4, payload_slots: 64, queue_entries: 64, legal_check: LegalCheck::Full, ..config };
    let mut b = Balancer::<u32>::new(config).unwrap();
    let mut cores: [VecDeque<Travelling>; 4] = Default::default();
    let mut memory = vec![u32::MAX; config.payload_slots as usize];
    // For each packet: its flow, whether it is header only, and whether it may overtake.
    let mut packets: Vec<(u8, bool, bool)> = Vec::new();
    let mut last_out = [None::<u32>; 6];
    let (mut now, mut lost, mut gone) = (5_000u64, 0u32, 0u32);
    let mut leave = |out: Out, packets: &[(u8, bool, bool)], memory: &[u32]| {
        gone += 1;
        let (packet, payload, reason) = match out {
            Egress::Send { packet, payload, .. } => (packet, payload, None),
            Egress::Drop { packet, reason } => (packet, None, Some(reason)),
        };
        let (flow, header_only, may_overtake) = packets[packet as usize];
        match reason {
            Some(DropReason::ByPod) => return,
            Some(reason) => {
                assert!(may_overtake && reason == DropReason::PayloadGone, "packet {packet} is dropped: {reason:?}");
                return;
            }
            None => {}
        }
        assert_eq!(payload.is_some(), header_only, "packet {packet}");
        if let Some(slot) = payload {
            assert_eq!(memory[slot as usize], packet, "the payload of another packet");
        }
        let last = &mut last_out[usize::from(flow)];
        assert!(last.is_none_or(|last| last < packet) || may_overtake, "flow {flow}: {packet} after {last:?}");
        *last = (*last).max(Some(packet));
    };
    for &step in steps {
        match step {
            Step::Arrive { flow, header_only } => {
                let hash = u32::from(flow).wrapping_mul(0x2f00_0001);
                let Ok(d) = b.dispatch(now, hash, header_only) else {
                    assert!(
                        cores.iter().map(VecDeque::len).sum::<usize>() >= 10 || lost > 0,
                        "refused although there is room"
                    );
                    continue;
                };
                let id = packets.len() as u32;
                packets.push((flow, header_only, false));
                if let Some(slot) = d.trailer.payload {
                    memory[slot as usize] = id;
                }
                cores[usize::from(d.core)].push_back(Travelling { trailer: d.trailer, id, at: now });
            }
            Step::Serve { core, how } => {
                let Some(t) = cores[usize::from(core)].pop_front() else { continue };
                // A late packet may overtake, be overtaken, and find its payload gone.
                packets[t.id as usize].2 = now - t.at > config.timeout_ns;
                if how < 10 {
                    lost += 1;
                    continue;
                }
                let trailer = Trailer { drop: how < 40, ..t.trailer };
                if let Some(out) = b.returned(trailer.emit(), t.id) {
                    leave(out, &packets, &memory);
                }
            }
            Step::Wait(ns) => now += u64::from(ns),
            Step::Mode(rss) => b.set_mode(now, if rss { Mode::Rss } else { Mode::Plb }),
            Step::Stall => now += config.timeout_ns + 1,
        }
        b.release(now, 8, |out| leave(out, &packets, &memory));
    }
    for core in &mut cores {
        for t in core.drain(..) {
            packets[t.id as usize].2 = true;
            if let Some(out) = b.returned(t.trailer.emit(), t.id) {
                leave(out, &packets, &memory);
            }
        }
    }
    now += config.timeout_ns + 1;
    b.release(now, u32::MAX, |out| leave(out, &packets, &memory));
    assert_eq!(gone + lost, packets.len() as u32, "packets that did not leave");
    // All slots without an entry can be allocated again.
    for n in 0..config.payload_slots.min(config.queue_entries) {
        assert!(b.dispatch(now, 0, true).is_ok(), "payload slot {n} leaks");
    }
}

proptest! {
    #[test]
    fn agrees_with_the_oracle(config in configs(), calls in calls()) {
        against_the_oracle(config, &calls);
    }

    #[test]
    fn flows_leave_in_order(config in configs(), steps in steps()) {
        flows_stay_in_order(config, &steps);
    }

    #[test]
    fn trailers_survive_parsing_and_emitting(bytes: [u8; 16], magic: bool) {
        let mut bytes = bytes;
        if magic {
            bytes[12..].copy_from_slice(&[1, 16, 0xa1, 0xba]);
            bytes[11] &= 7;
        }
        if let Ok(trailer) = Trailer::parse(bytes) {
            prop_assert_eq!(trailer.emit(), bytes);
        }
    }
}
