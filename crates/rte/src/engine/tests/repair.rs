//! Duration of repairs: round trips of 100 us, with all kinds of losses.

use super::*;
use crate::engine::tests::pair::Misdeed;

/// Repairs of all packets that took longer than the one-way delay, ns.
fn repairs(loss: f64, gap_ns: u64, burst: u32, packets: u32) -> Vec<u64> {
    let mut all = Vec::new();
    for seed in 0..16 {
        let mut w = world(700 + seed, 4);
        // Measure the peer first.
        w.all_links(|l| l.delay_ns = 50 * US);
        for _ in 0..50 {
            w.offer(0, 0, 1);
            w.run_for(5 * MS);
        }
        w.all_links(|l| l.loss = loss);
        for i in 0..packets {
            w.offer(0, i % 8, 1);
            if i % burst == burst - 1 {
                w.run_for(gap_ns);
            }
        }
        w.run_for(500 * MS);
        w.assert_complete(0);
        all.extend(w.latencies(1).into_iter().filter(|l| *l > 90 * US && *l < 50 * MS));
    }
    all.sort_unstable();
    all
}

#[test]
fn a_lost_packet_arrives_within_three_round_trips() {
    for (what, gap, burst) in [("alone", MS, 1), ("a few", 70 * US, 1), ("bursts", MS, 20), ("many", 2 * US, 1)] {
        let all = repairs(0.01, gap, burst, 10_000);
        assert!(all.len() > 200, "{what}: {} repairs", all.len());
        let p99 = percentile(&all, 0.99);
        assert!(p99 <= 300 * US, "{what}: P99 {} us of {}", p99 / US, all.len());
    }
}

#[test]
fn a_path_that_dies_is_abandoned_at_once() {
    let mut w = world(710, 4);
    w.all_links(|l| l.delay_ns = 50 * US);
    for i in 0..20_000 {
        if i == 10_000 {
            w.links[0][2].down = true;
        }
        w.offer(0, i % 8, 1);
        w.run_for(2 * US);
    }
    w.run_for(100 * MS);
    w.assert_complete(0);
    let counters = w.sides[0].engine.counters();
    assert_eq!(counters.suspect_paths, 1);
    // Four groups of 50 in 400 us: one or two of them are lost.
    assert!(counters.retransmitted_packets <= 200, "{} repetitions", counters.retransmitted_packets);
}

#[test]
fn a_peer_that_holds_its_acks_back_is_not_probed_in_vain() {
    let slow = Config { ack_delay_ns: Some(MS), ..Config::default() };
    let mut w = World::new(711, 4, [Config::default(), slow]);
    w.all_links(|l| l.delay_ns = 50 * US);
    for _ in 0..500 {
        w.offer(0, 0, 1);
        w.run_for(3 * MS);
    }
    w.assert_complete(0);
    assert_eq!(w.sides[0].engine.counters().retransmitted_packets, 0);
}

#[test]
fn a_steady_stream_that_waits_for_the_ack_timer_is_not_probed_in_vain() {
    // The newest packet that an ACK covers has hardly waited; the oldest for the whole ACK delay.
    for (delay, gap) in [(2 * US, 9 * US), (4 * US, 3 * US), (50 * US, 20 * US)] {
        let mut w = world(712, 4);
        w.all_links(|l| l.delay_ns = delay);
        for i in 0..5_000 {
            w.offer(0, i % 8, 1);
            w.run_for(gap);
            let timers = w.sides[0].engine.timers_pending();
            assert!(timers <= 32, "{timers} timers for one connection");
        }
        w.run_for(100 * MS);
        w.assert_complete(0);
        let repeated = w.sides[0].engine.counters().retransmitted_packets;
        assert!(repeated <= 5, "{repeated} repetitions, every {} us over {} us", gap / US, delay / US);
    }
}

#[test]
fn a_peer_without_room_is_not_flooded() {
    let mut w = world(713, 4);
    w.all_links(|l| l.delay_ns = 50 * US);
    for i in 0..2_000 {
        w.sides[1].has_buffers = i < 500;
        w.offer(0, i % 8, 1);
        w.run_for(2 * US);
    }
    w.run_for(5 * MS);
    let wasted = w.sides[1].engine.counters().no_guest_buffer_packets;
    assert!((1..=3_000).contains(&wasted), "{wasted} unnecessary packets");
    w.sides[1].has_buffers = true;
    w.run_for(100 * MS);
    w.assert_complete(0);
    assert_eq!(w.sides[0].engine.counters().given_up_packets, 0);
}

#[test]
fn a_peer_that_takes_packets_now_and_then_is_given_time() {
    let mut w = world(714, 4);
    w.all_links(|l| l.delay_ns = 50 * US);
    w.rogue.misdeed = Some(|_, _, view| match view.now.0 % (100 * MS) < 20 * MS {
        true => Misdeed::None,
        false => Misdeed::Limit,
    });
    for _ in 0..2_000 {
        w.offer_rogue(2);
        w.run_for(MS);
    }
    let limited = w.sides[1].engine.counters().rate_limited_packets;
    assert!(limited > 300, "{limited}");
    assert_eq!(w.sides[0].engine.counters().given_up_packets, 0);
}

#[test]
fn a_peer_that_takes_nothing_is_given_up_in_bounded_time() {
    // With a long delay its RTO does not double three times before it ends; a set time longer than that doubles.
    for (delay_ns, give_up_after_ns) in [(50 * US, None), (10 * MS, None), (50 * US, Some(400 * MS))] {
        let config = Config { give_up_after_ns, ..Config::default() };
        let mut w = World::new(715, 4, [config.clone(), config]);
        w.all_links(|l| l.delay_ns = delay_ns);
        w.rogue.misdeed = Some(|_, _, _| Misdeed::NoBuffer);
        w.offer_rogue(8);
        w.run_for(28 * MS);
        assert_eq!(w.sides[0].engine.counters().given_up_packets, 0, "a guest that pauses loses nothing");
        w.run_for(1_200 * MS);
        assert_eq!((w.sides[0].engine.counters().given_up_packets, w.rogue.held()), (8, 0), "{delay_ns} ns one way");
    }
}

/// A bulk flow has lengthened round trips; requests follow it, one per millisecond, and from the `outage`-th on all
/// paths except `survivors` are dead. Returns the world, and how much data had been sent on each path of side 0 when
/// they died.
fn after_a_bulk_flow(survivors: &[usize], outage: u32) -> (World, Vec<u64>) {
    let mut w = world(716, 4);
    w.all_links(|l| (l.delay_ns, l.jitter_ns) = (300 * US, 500 * US));
    stream(&mut w, 0, 4_000, 8, 10 * US);
    w.all_links(|l| (l.delay_ns, l.jitter_ns) = (50 * US, 0));
    w.run_for(20 * MS);
    let mut sent = Vec::new();
    for i in 0..200 {
        if i == outage {
            let links = w.links.iter_mut().flat_map(|links| links.iter_mut().enumerate());
            links.filter(|(path, _)| !survivors.contains(path)).for_each(|(_, link)| link.down = true);
            sent = w.data_sent[0].clone();
        }
        w.offer(0, 0, 1);
        w.run_for(MS);
    }
    w.run_for(20 * MS);
    w.assert_complete(0);
    (w, sent)
}

#[test]
fn paths_that_die_together_hold_nothing_up() {
    for survivor in 0..4 {
        for outage in [3, 20, 47] {
            let (w, _) = after_a_bulk_flow(&[survivor], outage);
            // Of the requests: they follow the flow's 500 packets in the bulk flow.
            let sent = &w.sides[0].guest.sent_at;
            let requests = w.sides[1].guest.seen.iter().filter(|(flow, seq, _)| *flow == 0 && *seq >= 500);
            let longest = requests.map(|(flow, seq, at)| at.since(sent[&(*flow, *seq)])).max().unwrap_or_default();
            // The answer of the slowest path as it was in the bulk flow, then that of the fastest: 3.6 and 1.6 ms.
            assert!(longest < 6 * MS, "path {survivor} lives: {} us", longest / US);
        }
    }
}

#[test]
fn a_path_that_is_silent_while_another_delivers_loses_its_turn() {
    let mut all = 0;
    for dead in 0..4 {
        let survivors: Vec<usize> = (0..4).filter(|path| *path != dead).collect();
        let (w, before) = after_a_bulk_flow(&survivors, 1);
        // The requests before the first answer was overdue; none if a probe was lost before.
        let wasted = w.data_sent[0][dead] - before[dead];
        assert!(wasted <= 4, "path {dead} is dead: {wasted} packets");
        all += wasted;
    }
    assert!(all > 0);
}

#[test]
fn plain_vxlan_keeps_its_paths_observed() {
    // Both send; one alone, whose peer forgets the connection after a minute; and one that never sent reliable traffic.
    for (reliably, senders) in [(500, 2), (500, 1), (0, 1)] {
        let mut w = world(719, 4);
        stream(&mut w, 0, reliably, 5, 10 * US);
        for i in 0..120_000 {
            (0..senders).for_each(|side| w.send_plain(side));
            w.run_for(MS);
            if i == 100_000 {
                (0..2).for_each(|side| w.links[side][2].down = true);
            }
            let dead = PathId::masked(2);
            let is_used = w.sides[0].engine.selected_paths(PeerId(0)).contains(&dead);
            assert!(i < 100_150 && i != 99_999 || is_used == (i < 100_150), "{i} ms, {senders} senders");
        }
    }
}

#[test]
fn a_peer_that_refuses_is_not_asked_for_each_plain_packet() {
    let mut w = world(722, 4);
    w.sides[1].vnic = None;
    for _ in 0..60_000 {
        w.send_plain(0);
        w.run_for(MS);
    }
    let counters = w.sides[0].engine.counters();
    assert!((1..=4).contains(&counters.rejects_received_packets), "{} in a minute", counters.rejects_received_packets);
}

/// How long a packet that never arrives is kept, ms, while some of four paths deliver everything else.
fn kept_for_ms(living_paths: usize, give_up_after_ns: Option<u64>) -> u64 {
    let config = Config { give_up_after_ns, ..Config::default() };
    let mut w = World::new(720, 4, [config.clone(), config]);
    w.all_links(|l| l.delay_ns = 50 * US);
    stream(&mut w, 0, 200, 4, 10 * US);
    w.doomed = Some(w.sides[0].engine.config.first_psn().add(200));
    w.links.iter_mut().for_each(|links| links[living_paths..].iter_mut().for_each(|link| link.down = true));
    w.offer(0, 1, 1);
    let mut ms = 0;
    while w.sides[0].engine.counters().given_up_packets == 0 {
        assert!(ms < 2_000, "it is kept forever");
        w.run_for(MS);
        ms += 1;
    }
    ms
}

#[test]
fn the_more_paths_deliver_the_longer_a_packet_is_kept() {
    let kept = [0, 1, 2, 4].map(|living_paths| kept_for_ms(living_paths, None));
    // RTOs double: a deadline at 28, 56 or 112 ms is met within twice that.
    for (kept, at_least) in kept.into_iter().zip([28, 28, 56, 112]) {
        assert!((at_least..2 * at_least).contains(&kept), "{kept} ms, not {at_least}");
    }
}

#[test]
fn a_packet_is_kept_for_as_long_as_is_set() {
    for (living_paths, ms) in [(0, 10), (4, 10), (0, 300), (4, 300)] {
        let kept = kept_for_ms(living_paths, Some(ms * MS));
        assert!((ms..2 * ms + 1).contains(&kept), "{kept} ms, not {ms}");
    }
}
