//! Single rules, case by case.

use crate::*;

pub(super) type Out = Egress<u32>;

fn balancer(config: Config) -> Balancer<u32> {
    Balancer::new(config).unwrap()
}

fn small() -> Config {
    Config { queue_entries: 16, cores: 3, ..Config::default() }
}

fn released(b: &mut Balancer<u32>, now: u64) -> Vec<Out> {
    let mut out = Vec::new();
    b.release(now, u32::MAX, |e| out.push(e));
    out
}

fn sent(packet: u32, order: Order) -> Out {
    Egress::Send { packet, payload: None, order }
}

/// Dispatches `n` packets of one flow.
fn dispatch(b: &mut Balancer<u32>, now: u64, n: u32) -> Vec<Trailer> {
    (0..n).map(|_| b.dispatch(now, 7, false).unwrap().trailer).collect()
}

#[test]
fn settings_out_of_range_are_refused() {
    let base = Config::default();
    let cases = [
        (Config { cores: 0, ..base }, "a pod has 1 to 1,024 data cores, not 0"),
        (Config { cores: 1025, ..base }, "a pod has 1 to 1,024 data cores, not 1025"),
        (Config { affinity: 1025, ..base }, "a flow's core may be ahead by 0 to 1,024 packets, not 1025"),
        (Config { order_queues: 0, ..base }, "a pod has 1 to 8 order queues, not 0"),
        (Config { order_queues: 9, ..base }, "a pod has 1 to 8 order queues, not 9"),
        (Config { queue_entries: 100, ..base }, "an order queue has a power of two from 16 to 65,536 entries, not 100"),
        (Config { queue_entries: 8, ..base }, "an order queue has a power of two from 16 to 65,536 entries, not 8"),
        (Config { timeout_ns: 0, ..base }, "the timeout of an order queue is 1 ns to 1 s, not 0 ns"),
        (Config { payload_slots: 1 << 21, ..base }, "there are at most 1,048,576 payload slots, not 2097152"),
    ];
    for (config, expected) in cases {
        assert_eq!(Balancer::<u32>::new(config).err().unwrap().to_string(), expected);
    }
    assert!(base.check().is_ok());
}

#[test]
fn cores_take_turns() {
    let mut b = balancer(small());
    let cores: Vec<u16> = (0..7).map(|_| b.dispatch(0, 7, false).unwrap().core).collect();
    assert_eq!(cores, [0, 1, 2, 0, 1, 2, 0]);
}

#[test]
fn a_flow_keeps_its_core_until_it_is_ahead() {
    let config = Config { affinity: 2, ..small() };
    let [first, last] = [0, u32::MAX];
    let mut cores = Cores::new(&config);
    let mut choose = |hash| cores.choose(hash, &config, |_| true).unwrap();
    // The core in turn is 0, 1, 2, 0 and so on.
    assert_eq!([(); 4].map(|()| choose(first)), [0, 0, 2, 0], "the third time, core 0 is two packets ahead of core 2");
    assert_eq!([(); 2].map(|()| choose(last)), [2, 2]);
    assert_eq!([(); 4].map(|()| choose(first)), [0, 1, 0, 0]);
}

#[test]
fn one_flow_is_spread_evenly() {
    let config = Config { cores: 5, affinity: 8, ..small() };
    let mut cores = Cores::new(&config);
    let mut given = [0u32; 5];
    for n in 0..10_000 {
        given[usize::from(cores.choose(1 << 30, &config, |_| true).unwrap())] += 1;
        let (least, most) = (given.iter().min().unwrap(), given.iter().max().unwrap());
        assert!(most - least <= 9, "after {n}: {given:?}");
    }
}

#[test]
fn a_core_without_room_owes_nothing_when_it_has_room_again() {
    for affinity in [0, 4] {
        let config = Config { affinity, ..small() };
        let mut cores = Cores::new(&config);
        let mut random = 1u32;
        let mut run = |packets, stopped| {
            let mut given = [0u32; 3];
            for _ in 0..packets {
                random = random.wrapping_mul(0x915f_77f5).wrapping_add(1);
                let core = cores.choose(random, &config, |core| Some(core) != stopped).unwrap();
                given[usize::from(core)] += 1;
            }
            given
        };
        let [a, none, b] = run(20_000, Some(1));
        assert!(none == 0 && a.abs_diff(b) < 200, "{a} {b}");
        let given = run(3_000, None);
        assert!(given.iter().all(|n| n.abs_diff(1_000) < 30), "{affinity}: {given:?}");
        assert_eq!(cores.choose(0, &config, |_| false), None);
    }
}

#[test]
fn order_is_restored_across_the_wrap() {
    let mut b = balancer(Config { first_psn: u32::MAX - 1, ..small() });
    let trailers = dispatch(&mut b, 0, 4);
    assert_eq!(trailers.iter().map(|t| t.psn).collect::<Vec<_>>(), [u32::MAX - 1, u32::MAX, 0, 1]);
    for at in [3, 1, 2] {
        assert_eq!(b.returned(trailers[at].emit(), at as u32), None);
        assert_eq!(released(&mut b, 1), []);
    }
    assert_eq!(b.returned(trailers[0].emit(), 0), None);
    assert_eq!(released(&mut b, 1), [0, 1, 2, 3].map(|n| sent(n, Order::InOrder)));
    assert_eq!(b.occupancy(), (0, 0));
}

#[test]
fn a_full_queue_refuses_and_does_not_look_empty() {
    let mut b = balancer(small());
    let trailers = dispatch(&mut b, 0, 16);
    assert_eq!(b.dispatch(0, 7, false), Err(Refused::QueueFull));
    assert_eq!(b.counters().refused_queue_full_packets, 1);
    assert_eq!(b.returned(trailers[0].emit(), 0), None);
    assert_eq!(released(&mut b, 0), [sent(0, Order::InOrder)]);
    assert_eq!(b.dispatch(0, 7, false).unwrap().trailer.psn, 16);
}

#[test]
fn the_head_is_waited_for_until_the_timeout() {
    let mut b = balancer(small());
    let trailers = dispatch(&mut b, 1000, 2);
    assert_eq!(b.returned(trailers[1].emit(), 1), None);
    assert_eq!(b.deadline(), Some(101_001));
    assert_eq!(released(&mut b, 101_000), [], "exactly the timeout is not too long");
    assert_eq!(released(&mut b, 101_001), [sent(1, Order::InOrder)]);
    assert_eq!((b.counters().timed_out_packets, b.counters().timed_out_blocking_packets), (1, 1));
    assert_eq!(b.returned(trailers[0].emit(), 0), Some(sent(0, Order::Late)));
    assert_eq!(b.deadline(), None);
}

#[test]
fn a_packet_that_came_in_time_is_in_order_even_if_checked_late() {
    let mut b = balancer(small());
    let trailers = dispatch(&mut b, 0, 1);
    assert_eq!(b.returned(trailers[0].emit(), 5), None);
    assert_eq!(released(&mut b, 10_000_000), [sent(5, Order::InOrder)]);
}

#[test]
fn a_drop_flag_releases_the_entry_at_once() {
    let mut b = balancer(Config { payload_slots: 1, ..small() });
    let first = b.dispatch(0, 7, true).unwrap().trailer;
    let second = b.dispatch(0, 7, false).unwrap().trailer;
    assert_eq!(b.dispatch(0, 7, true), Err(Refused::NoPayloadSlot));
    assert_eq!(b.returned(second.emit(), 2), None);
    let dropped = Egress::Drop { packet: 1, reason: DropReason::ByPod };
    assert_eq!(b.returned(Trailer { drop: true, ..first }.emit(), 1), Some(dropped));
    assert_eq!(released(&mut b, 0), [sent(2, Order::InOrder)]);
    assert_eq!(b.counters().timed_out_packets, 0);
    assert!(b.dispatch(0, 7, true).is_ok(), "the payload slot is free");
}

#[test]
fn an_entry_accepts_one_packet() {
    let mut b = balancer(small());
    let t = dispatch(&mut b, 0, 2);
    let duplicate = |packet| Some(Egress::Drop { packet, reason: DropReason::Duplicate });
    let dropped = |t: Trailer| Trailer { drop: true, ..t }.emit();
    assert_eq!(b.returned(t[1].emit(), 1), None);
    assert_eq!(b.returned(t[1].emit(), 2), duplicate(2));
    assert_eq!(b.returned(dropped(t[1]), 3), duplicate(3));
    assert_eq!(b.returned(dropped(t[0]), 4), Some(Egress::Drop { packet: 4, reason: DropReason::ByPod }));
    assert_eq!(b.returned(dropped(t[0]), 5), duplicate(5));
    assert_eq!(b.returned(t[0].emit(), 6), duplicate(6));
    assert_eq!(released(&mut b, 0), [sent(1, Order::InOrder)]);
}

#[test]
fn hostile_trailers_are_dropped_with_a_reason() {
    let mut b = balancer(Config { pod: 5, order_queues: 2, ..small() });
    let t = dispatch(&mut b, 0, 1)[0];
    let cases = [
        ([0; 16], DropReason::Malformed(TrailerError::Magic([0, 0]))),
        (Trailer { pod: 6, ..t }.emit(), DropReason::WrongPod(6)),
        (Trailer { queue: 2, ..t }.emit(), DropReason::NoSuchQueue(2)),
        (Trailer { queue: 255, ..t }.emit(), DropReason::NoSuchQueue(255)),
    ];
    for (bytes, reason) in cases {
        assert_eq!(b.returned(bytes, 9), Some(Egress::Drop { packet: 9, reason }));
    }
    // In no queue's window: treated as late.
    for psn in [1, 15, 16, 1 << 31, u32::MAX] {
        assert_eq!(b.returned(Trailer { psn, ..t }.emit(), 9), Some(sent(9, Order::Late)), "{psn}");
    }
    assert_eq!(b.returned(t.emit(), 1), None);
    assert_eq!(released(&mut b, 0), [sent(1, Order::InOrder)]);
}

#[test]
fn a_stale_packet_cannot_take_an_entry_unless_only_low_bits_are_compared() {
    for (legal_check, first, second) in [
        (LegalCheck::Full, Some(sent(100, Order::Late)), vec![sent(116, Order::InOrder)]),
        (LegalCheck::LowBits, None, vec![sent(116, Order::InOrder)]),
    ] {
        let mut b = balancer(Config { legal_check, ..small() });
        let stale = dispatch(&mut b, 0, 16)[0];
        released(&mut b, 200_000);
        // PSN 16 has the low bits of PSN 0.
        let fresh = dispatch(&mut b, 200_000, 1)[0];
        assert_eq!(b.returned(stale.emit(), 100), first, "{legal_check:?}");
        if legal_check == LegalCheck::LowBits {
            // Case 3: detected at the head, and sent.
            assert_eq!(released(&mut b, 200_000), [sent(100, Order::Alias)]);
        }
        assert_eq!(b.counters().aliases_packets, 1, "{legal_check:?}");
        assert_eq!(b.returned(fresh.emit(), 116), None);
        assert_eq!(released(&mut b, 200_000), second, "{legal_check:?}");
    }
}

#[test]
fn with_low_bits_a_stale_packet_replaces_a_fresh_one() {
    let mut b = balancer(Config { legal_check: LegalCheck::LowBits, ..small() });
    let stale = dispatch(&mut b, 0, 16);
    released(&mut b, 200_000);
    let fresh = dispatch(&mut b, 200_000, 2);
    assert_eq!(b.returned(fresh[1].emit(), 1), None);
    let replaced = Some(Egress::Drop { packet: 1, reason: DropReason::Replaced });
    assert_eq!(b.returned(stale[1].emit(), 2), replaced);
    assert_eq!(b.returned(fresh[0].emit(), 0), None);
    assert_eq!(released(&mut b, 200_000), [sent(0, Order::InOrder), sent(2, Order::Alias)]);
}

#[test]
fn a_late_header_leaves_if_its_payload_still_exists() {
    let mut b = balancer(Config { payload_slots: 4, ..small() });
    let late: Vec<Trailer> = (0..4).map(|_| b.dispatch(0, 7, true).unwrap().trailer).collect();
    assert_eq!(late.iter().map(|t| t.payload.unwrap()).collect::<Vec<_>>(), [0, 1, 2, 3]);
    assert_eq!(b.dispatch(0, 7, true), Err(Refused::NoPayloadSlot), "all slots are bound");
    released(&mut b, 100_001);
    // Slot 0 goes to the next packet; the other payloads are kept.
    let fresh = b.dispatch(100_001, 7, true).unwrap().trailer;
    assert_eq!(fresh.payload, Some(0));
    let gone = |packet| Some(Egress::Drop { packet, reason: DropReason::PayloadGone });
    let send = |packet, payload, order| Egress::Send { packet, payload: Some(payload), order };
    assert_eq!(b.returned(late[0].emit(), 0), gone(0));
    assert_eq!(b.returned(late[1].emit(), 1), Some(send(1, 1, Order::Late)));
    assert_eq!(b.returned(late[1].emit(), 1), gone(1), "only once");
    assert_eq!(b.returned(Trailer { payload: Some(3), ..late[2] }.emit(), 2), gone(2), "another's payload");
    assert_eq!(b.returned(Trailer { payload: Some(1 << 30), ..late[2] }.emit(), 2), gone(2), "not a slot");
    let dropped = Some(Egress::Drop { packet: 2, reason: DropReason::ByPod });
    assert_eq!(b.returned(Trailer { drop: true, ..late[2] }.emit(), 2), dropped);
    assert_eq!(b.returned(late[2].emit(), 2), gone(2), "freed by the drop flag");
    // A claim for another slot changes nothing while the entry exists.
    assert_eq!(b.returned(Trailer { payload: Some(3), ..fresh }.emit(), 4), None);
    assert_eq!(b.counters().payload_mismatch_packets, 1);
    assert_eq!(released(&mut b, 100_001), [send(4, 0, Order::InOrder)]);
}

#[test]
fn packets_without_an_entry_leave_at_once() {
    let mut b = balancer(Config { payload_slots: 2, ..small() });
    let own = Trailer { psn: 0, payload: None, pod: 0, queue: 0, drop: false, unordered: true };
    assert_eq!(b.returned(own.emit(), 1), Some(sent(1, Order::Unordered)));
    let d = b.dispatch_by_flow(u32::MAX, true).unwrap();
    assert_eq!((d.core, d.trailer.unordered, d.trailer.payload), (2, true, Some(0)));
    let send = Egress::Send { packet: 2, payload: Some(0), order: Order::Unordered };
    assert_eq!(b.returned(d.trailer.emit(), 2), Some(send));
    let gone = Some(Egress::Drop { packet: 3, reason: DropReason::PayloadGone });
    assert_eq!(b.returned(d.trailer.emit(), 3), gone);
    // These do not return; their slots are reused in turn.
    for n in 0..5 {
        assert_eq!(b.dispatch_by_flow(0, true).unwrap().trailer.payload, Some((n + 1) % 2));
    }
}

#[test]
fn the_limit_bounds_a_call_and_nothing_is_lost() {
    let mut b = balancer(small());
    for (n, t) in dispatch(&mut b, 0, 10).into_iter().enumerate() {
        assert_eq!(b.returned(t.emit(), n as u32), None);
    }
    let mut out = Vec::new();
    assert_eq!(b.release(0, 4, |e| out.push(e)), 4);
    assert_eq!(b.release(0, 4, |e| out.push(e)), 4);
    assert_eq!(b.release(0, 4, |e| out.push(e)), 2);
    assert_eq!(out, (0..10).map(|n| sent(n, Order::InOrder)).collect::<Vec<_>>());
}

#[test]
fn the_fallback_drains_before_it_hashes() {
    let mut b = balancer(small());
    let sprayed = dispatch(&mut b, 0, 2);
    b.set_mode(10, Mode::Rss);
    assert!(b.mode() == Mode::Rss && !b.is_settled(10));
    let hashed = b.dispatch(10, 7, false).unwrap();
    assert!((hashed.core, hashed.trailer.unordered) == (0, false), "by flow, with an entry");
    assert_eq!(b.returned(hashed.trailer.emit(), 3), None, "it must not overtake");
    assert_eq!(b.returned(sprayed[1].emit(), 2), None);
    let waits = b.dispatch(20, 7, false).unwrap().trailer;
    // The first packet is lost. When it times out, the queue is emptied, and nothing gets an entry.
    assert_eq!(released(&mut b, 100_001), [sent(2, Order::InOrder), sent(3, Order::InOrder)]);
    assert!(b.is_settled(100_001));
    assert_eq!(b.counters().abandoned_packets, 1);
    assert_eq!(b.returned(waits.emit(), 4), Some(sent(4, Order::Late)));
    let next = b.dispatch(100_001, 7, false).unwrap();
    assert!(next.trailer.unordered);
    // And back: first with an entry, and then round robin, too.
    b.set_mode(200_000, Mode::Plb);
    let settling = b.dispatch(200_000, u32::MAX, false).unwrap();
    assert_eq!((settling.core, settling.trailer.unordered, b.is_settled(200_000)), (2, false, false));
    let cores: Vec<u16> = (0..3).map(|_| b.dispatch(300_001, u32::MAX, false).unwrap().core).collect();
    assert!(b.is_settled(300_001) && cores.len() == 3);
    assert_ne!(cores, [2, 2, 2]);
}

#[test]
fn clearing_returns_every_handle() {
    let mut b = balancer(Config { payload_slots: 16, ..small() });
    let t: Vec<Trailer> = (0..5).map(|_| b.dispatch(0, 7, true).unwrap().trailer).collect();
    for n in [1, 3] {
        assert_eq!(b.returned(t[n].emit(), n as u32), None);
    }
    let mut out = Vec::new();
    b.clear(|e| out.push(e));
    assert_eq!(out, [1, 3].map(|packet| Egress::Drop { packet, reason: DropReason::Cleared }));
    assert_eq!((b.occupancy(), b.deadline()), ((0, 0), None));
    assert_eq!(b.returned(t[0].emit(), 0), Some(Egress::Drop { packet: 0, reason: DropReason::PayloadGone }));
}

#[test]
fn cores_without_room_are_passed_over() {
    let mut b: Balancer<u32> = Balancer::new(Config { cores: 4, ..Config::default() }).unwrap();
    let stopped = |core| core != 2;
    let cores: Vec<u16> = (0..6).map(|_| b.dispatch_where(0, 7, false, stopped).unwrap().core).collect();
    assert_eq!(cores, [0, 1, 3, 0, 1, 3]);
    assert_eq!(b.occupancy(), (6, 0));
    assert_eq!(b.dispatch_where(0, 7, false, |_| false), Err(Refused::NoRoom));
    assert_eq!((b.occupancy(), b.counters().refused_no_room_packets), ((6, 0), 1), "no entry is used");
    // By flow there is one core, with an entry or without.
    b.set_mode(0, Mode::Rss);
    let mine = b.dispatch(0, u32::MAX, false).unwrap().core;
    assert_eq!(mine, 3);
    assert_eq!(b.dispatch_where(0, u32::MAX, false, |core| core != 3), Err(Refused::NoRoom));
    b.release(1_000_000, u32::MAX, drop);
    assert!(b.is_settled(1_000_000));
    assert_eq!(b.dispatch_where(0, u32::MAX, false, |core| core != 3), Err(Refused::NoRoom));
    assert!(b.dispatch(0, u32::MAX, false).unwrap().trailer.unordered);
}
