//! The engine against itself, in virtual time.

mod adversary;
mod claims;
mod drain;
mod handshake;
mod hostile;
mod mend;
mod mutations;
mod pair;
mod repair;
mod resume;
mod set_aside;

use pair::{VNI, World, data};

use super::*;
use crate::conn::State;
use crate::{MS, S, US};
use bifrost_wire::bifrost::{DataHeader, RejectReason};

fn world(seed: u64, paths: usize) -> World {
    World::new(seed, paths, [Config::default(), Config::default()])
}

/// Offers `count` packets over `flows` flows, one each `gap_ns`, then lets everything settle.
fn stream(world: &mut World, from: usize, count: u32, flows: u32, gap_ns: u64) {
    for i in 0..count {
        world.offer(from, i % flows, 1);
        world.run_for(gap_ns);
    }
    world.run_for(500 * MS);
}

fn percentile(sorted: &[u64], p: f64) -> u64 {
    sorted[((sorted.len() - 1) as f64 * p) as usize]
}

#[test]
fn set_up_costs_one_round_trip_and_loses_nothing() {
    let mut w = world(1, 4);
    stream(&mut w, 0, 100, 3, 0);
    w.assert_complete(0);
    assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Open));
    assert_eq!(w.sides[1].engine.state_of(World::pair(1)), Some(State::Open));
    let latencies = w.latencies(1);
    assert_eq!(latencies[0], 150 * US, "REQUEST, RESPONSE, data");
    assert_eq!(w.sides[0].engine.counters().retransmitted_packets, 0);
}

#[test]
fn both_directions_share_one_connection() {
    let mut w = world(2, 4);
    for i in 0..200 {
        w.offer(0, i % 5, 1);
        w.offer(1, i % 7, 1);
        w.run_for(10 * US);
    }
    w.run_for(100 * MS);
    w.assert_complete(0);
    w.assert_complete(1);
    assert_eq!(w.sides[0].engine.connections(), 1, "simultaneous set-up converges");
    assert_eq!(w.sides[1].engine.connections(), 1);
}

#[test]
fn large_sends_keep_their_segments_together() {
    let mut w = world(3, 4);
    for _ in 0..50 {
        w.offer(0, 1, 45);
        w.run_for(20 * US);
    }
    w.run_for(100 * MS);
    w.assert_complete(0);
    assert_eq!(w.sides[0].engine.counters().retransmitted_packets, 0);
}

#[test]
fn one_percent_loss_is_repaired_within_a_few_round_trips() {
    for seed in 0..8 {
        let mut w = world(100 + seed, 4);
        w.all_links(|l| l.loss = 0.01);
        stream(&mut w, 0, 20_000, 50, 10 * US);
        w.assert_complete(0);
        let latencies = w.latencies(1);
        let (p999, max) = (percentile(&latencies, 0.999), latencies[latencies.len() - 1]);
        assert!(p999 <= 500 * US, "seed {seed}: P99.9 {} us", p999 / US);
        assert!(max <= 5 * MS, "seed {seed}: max {} us", max / US);
    }
}

#[test]
fn a_loss_stalls_its_own_flow_only() {
    let run = |ordering| {
        let mut w = world(42, 4);
        w.sides[1].vnic = Some(LocalVnic { owner: 7, ordering, reliable: true });
        w.sides[1].ordering = ordering;
        w.all_links(|l| l.loss = 0.01);
        stream(&mut w, 0, 20_000, 50, 10 * US);
        w.assert_complete(0);
        percentile(&w.latencies(1), 0.95)
    };
    let (flow, strict) = (run(Ordering::Flow), run(Ordering::Strict));
    assert!(flow <= 60 * US, "by flow: {} us", flow / US);
    assert!(strict >= 2 * flow, "strict {} us, by flow {} us", strict / US, flow / US);
}

#[test]
fn version_1_publishes_in_strict_order() {
    let v1 = Config { version_max: 1, ..Config::default() };
    let mut w = World::new(5, 4, [Config::default(), v1]);
    w.all_links(|l| (l.loss, l.jitter_ns) = (0.02, 100 * US));
    stream(&mut w, 0, 5_000, 10, 10 * US);
    w.assert_complete(0);
    let order: Vec<_> = w.sides[1].guest.seen.windows(2).map(|p| (p[0].2, p[1].2)).collect();
    assert!(order.iter().all(|(a, b)| a <= b));
    // With one PSN space and distance 0 everywhere the guest sees exactly the sending order.
    let seen: Vec<_> = w.sides[1].guest.seen.iter().map(|&(f, s, _)| s * 10 + f).collect();
    assert!(seen.windows(2).all(|p| p[0] < p[1]), "strict order");
}

#[test]
fn a_path_of_another_length_reorders_nothing_the_guest_can_see() {
    let mut w = world(6, 4);
    for (i, link) in w.links[0].iter_mut().enumerate() {
        link.delay_ns = (50 + 40 * i as u64) * US;
    }
    stream(&mut w, 0, 10_000, 4, 5 * US);
    w.assert_complete(0);
    let counters = *w.sides[0].engine.counters();
    assert_eq!(counters.retransmitted_packets, 0, "delay differences are not losses: {counters:?}");
}

#[test]
fn a_dead_path_costs_little_and_is_taken_back() {
    let mut w = world(7, 4);
    stream(&mut w, 0, 2_000, 20, 10 * US);
    w.links[0][2].down = true;
    w.links[1][2].down = true;
    let before = w.sides[1].guest.seen.len();
    stream(&mut w, 0, 20_000, 20, 10 * US);
    w.assert_complete(0);
    let worst =
        w.sides[1].guest.seen[before..].iter().map(|(f, s, at)| at.since(w.sides[0].guest.sent_at[&(*f, *s)])).max();
    assert!(worst <= Some(5 * MS), "worst {:?} ns", worst);
    let usable =
        |w: &World| w.sides[0].engine.path_snapshots(w.now).filter(|p| p.state == crate::PathState::Usable).count();
    assert_eq!(usable(&w), 3);
    let sent_before: Vec<_> = w.sides[0].engine.path_snapshots(w.now).map(|p| p.tx_packets).collect();
    w.all_links(|l| l.down = false);
    stream(&mut w, 0, 20_000, 20, 10 * US);
    w.assert_complete(0);
    assert_eq!(usable(&w), 4);
    let sent_after: Vec<_> = w.sides[0].engine.path_snapshots(w.now).map(|p| p.tx_packets).collect();
    assert!(sent_after[2] > sent_before[2] + 2_000, "the path carries its share again: {sent_before:?} {sent_after:?}");
}

#[test]
fn a_whole_group_lost_on_a_dying_path_is_repaired_at_once() {
    for path in 0..4 {
        let mut w = world(70 + path as u64, 4);
        stream(&mut w, 0, 2_000, 50, 10 * US);
        w.links[0][path].down = true;
        w.links[1][path].down = true;
        let before = w.sides[1].guest.seen.len();
        // One request from each of 200 clients, which then wait for their answers.
        for client in 0..200 {
            w.offer(0, client, 1);
        }
        w.run_for(500 * MS);
        w.assert_complete(0);
        let sent = &w.sides[0].guest.sent_at;
        let worst = w.sides[1].guest.seen[before..].iter().map(|(f, s, at)| at.since(sent[&(*f, *s)])).max();
        assert!(worst <= Some(3 * MS), "path {path}: {worst:?} ns");
    }
}

#[test]
fn a_lossy_path_is_no_longer_used() {
    let mut w = world(8, 4);
    stream(&mut w, 0, 2_000, 20, 10 * US);
    w.links[0][1].loss = 0.1;
    stream(&mut w, 0, 5_000, 20, 10 * US);
    let before: Vec<_> = w.sides[0].engine.path_snapshots(w.now).map(|p| p.tx_packets).collect();
    stream(&mut w, 0, 10_000, 20, 10 * US);
    w.assert_complete(0);
    let after: Vec<_> = w.sides[0].engine.path_snapshots(w.now).map(|p| p.tx_packets).collect();
    let share = (after[1] - before[1]) as f64 / 10_000.0;
    assert!(share < 0.10, "share of the lossy path {share}");
}

#[test]
fn all_paths_down_falls_back_and_comes_back() {
    let mut w = world(9, 4);
    stream(&mut w, 0, 1_000, 5, 10 * US);
    w.all_links(|l| l.down = true);
    for i in 0..100 {
        w.offer(0, i % 5, 1);
        w.run_for(MS);
    }
    assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::BestEffort));
    assert!(w.sides[0].guest.plain > 0, "traffic continues as plain VXLAN");
    w.all_links(|l| l.down = false);
    let plain = w.sides[0].guest.plain;
    for i in 0..200 {
        w.offer(0, i % 5, 1);
        w.run_for(MS);
    }
    assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Open));
    assert!(w.sides[0].guest.plain - plain < 50, "back within milliseconds");
    let seen = w.sides[1].guest.seen.len();
    w.offer(0, 1, 1);
    w.run_for(5 * MS);
    assert_eq!(w.sides[1].guest.seen.len(), seen + 1, "reliable delivery continues after the gap");
    w.assert_accounted();
}

/// Several packets are in flight when all paths fail; each is counted as given up, not only the expired one.
#[test]
fn packets_lost_in_an_outage_are_counted() {
    let mut w = world(91, 4);
    stream(&mut w, 0, 1_000, 5, 10 * US);
    w.all_links(|l| l.down = true);
    for i in 0..200 {
        w.offer(0, i % 5, 1);
    }
    w.run_for(S);
    assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::BestEffort));
    w.all_links(|l| l.down = false);
    w.run_for(S);
    let counters = w.sides[0].engine.counters();
    assert_eq!(counters.sent_packets, w.sides[1].engine.counters().received_packets + counters.given_up_packets);
    w.assert_accounted();
}

#[test]
fn after_all_paths_failed_the_first_that_answers_is_used_at_once() {
    for path in 0..4 {
        let mut w = world(90 + path as u64, 4);
        stream(&mut w, 0, 1_000, 5, 10 * US);
        w.all_links(|l| l.down = true);
        for i in 0..1_000 {
            w.offer(0, i % 5, 1);
            w.run_for(MS);
        }
        assert!(w.sides[0].engine.has_fallen(PeerId(0)));
        (w.links[0][path].down, w.links[1][path].down) = (false, false);
        let since = w.now;
        while w.sides[0].engine.has_fallen(PeerId(0)) {
            w.run_for(100 * US);
            assert!(w.now.since(since) < 45 * MS, "path {path} is silent");
        }
        assert_eq!(w.sides[0].engine.selected_paths(PeerId(0)), [PathId::masked(path as u8)]);
        let seen = w.sides[1].guest.seen.len();
        (0..20).for_each(|i| w.offer(0, i % 5, 1));
        w.run_for(2 * MS);
        assert_eq!(w.sides[1].guest.seen.len(), seen + 20, "path {path}");
    }
}

#[test]
fn a_silent_peer_gets_plain_vxlan_and_is_asked_again() {
    let mut w = world(10, 4);
    w.all_links(|l| l.down = true);
    w.offer(0, 1, 1);
    w.run_for(200 * MS);
    assert_eq!(w.sides[0].guest.plain, 1, "waiting packets are sent as plain VXLAN");
    assert!(matches!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Plain { .. })));
    assert_eq!(w.sides[0].engine.counters().requests_sent_packets, 7);
    w.all_links(|l| l.down = false);
    w.run_for(31 * S);
    w.offer(0, 1, 1);
    assert_eq!(w.sides[0].guest.plain, 2, "another attempt delays nothing");
    w.run_for(10 * MS);
    w.offer(0, 1, 1);
    w.run_for(10 * MS);
    assert_eq!(w.sides[0].guest.plain, 2);
    assert_eq!(w.sides[1].guest.seen.len(), 1);
}

#[test]
fn an_answer_after_the_last_try_still_opens_the_connection() {
    let impatient = Config { setup_tries: 1, ..Config::default() };
    let mut w = World::new(15, 2, [impatient.clone(), impatient]);
    w.all_links(|l| l.delay_ns = 3 * MS);
    w.offer(0, 1, 1);
    w.run_for(5 * MS);
    assert!(matches!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Plain { .. })));
    w.run_for(2 * MS);
    assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Open));
    w.offer(0, 1, 1);
    w.run_for(50 * MS);
    assert_eq!(w.sides[1].guest.seen.len(), 1);
}

#[test]
fn a_peer_that_alone_considers_a_connection_open_is_asked_again() {
    let mut w = world(16, 2);
    // No answer returns: the peer is open, this side is not.
    w.links[1].iter_mut().for_each(|l| l.down = true);
    w.offer(0, 1, 1);
    w.run_for(200 * MS);
    assert!(matches!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Plain { .. })));
    assert_eq!(w.sides[1].engine.state_of(World::pair(1)), Some(State::Open));
    w.links[1].iter_mut().for_each(|l| l.down = false);
    w.offer(1, 1, 1);
    w.run_for(MS);
    assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Open));
    w.run_for(20 * MS);
    assert_eq!(w.sides[0].guest.seen.len(), 1);
    assert_eq!(w.sides[1].guest.plain, 0);
    assert_eq!(w.sides[1].engine.counters().restarted_connections, 0);
    w.assert_complete(1);
}

#[test]
fn refusals_mean_plain_vxlan() {
    for (name, vnic) in
        [("unknown", None), ("policy", Some(LocalVnic { owner: 7, ordering: Ordering::Flow, reliable: false }))]
    {
        let mut w = world(11, 2);
        w.sides[1].vnic = vnic;
        w.offer(0, 1, 1);
        w.run_for(10 * MS);
        assert!(matches!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Plain { .. })), "{name}");
        assert_eq!(w.sides[0].guest.plain, 1, "{name}");
        assert_eq!(w.sides[0].engine.counters().rejects_received_packets, 1, "{name}");
    }
}

#[test]
fn a_peer_of_a_future_version_that_still_speaks_ours_is_understood_and_one_that_does_not_is_refused() {
    use bifrost_wire::bifrost::{Setup, SetupKind};
    let ask = |version, oldest| {
        let mut engine = Engine::new(Config::default(), 0, 1, 1);
        let peer = engine.add_peer(4);
        let mut out = Output::default();
        let setup = Setup {
            kind: SetupKind::Request { oldest },
            version,
            cc: 9,
            worker: 3,
            local: Cid(77),
            destination: Cid::NONE,
            to: pair::mac(0),
            from: pair::mac(1),
            instance: 5,
            generation: 6,
            window: 4096,
            ack_delay_us: 100,
        };
        let arrival = Arrival { peer, vni: VNI, nic_rx: Time(1), hops: 0, marked: false };
        let vnic = LocalVnic { owner: 1, ordering: Ordering::Flow, reliable: true };
        engine.on_setup(Time(1), &arrival, &setup, Some(vnic), &mut out);
        assert_eq!(out.control.len(), 1);
        match out.control[0].packet {
            crate::Control::Setup(answer) => (answer.kind, answer.version),
            ref other => panic!("{other:?}"),
        }
    };
    assert_eq!(ask(4, 1), (SetupKind::Response, 4));
    assert_eq!(ask(3, 1), (SetupKind::Response, 3));
    assert_eq!(ask(2, 1), (SetupKind::Response, 2));
    assert_eq!(ask(1, 1), (SetupKind::Response, 1));
    assert_eq!(ask(9, 4), (SetupKind::Response, 4));
    assert_eq!(ask(9, 5), (SetupKind::Reject(RejectReason::Version), 4));
    assert_eq!(ask(0, 0), (SetupKind::Reject(RejectReason::Version), 4));
}

#[test]
fn a_peer_that_restarts_is_recognised_and_nothing_held_is_lost() {
    for crash in [0usize, 1] {
        let mut w = world(12, 4);
        stream(&mut w, 0, 1_000, 5, 10 * US);
        if crash == 1 {
            // The receiver forgets everything: the sender's next packet triggers a RESET.
            w.restart(1, 5000, 4);
            let before = w.sides[1].guest.seen.len();
            for i in 0..100 {
                w.offer(0, i % 5, 1);
                w.run_for(10 * US);
            }
            w.run_for(100 * MS);
            assert_eq!(w.sides[1].guest.seen.len(), before + 100, "the sender's held packets arrived");
            assert!(w.sides[0].engine.counters().resets_received_packets >= 1);
        } else {
            // The sender restarts while the receiver still has its former life.
            w.restart(0, 5000, 4);
            let before = w.sides[1].guest.seen.len();
            for i in 0..100 {
                w.offer(0, i % 5, 1);
                w.run_for(10 * US);
            }
            w.run_for(100 * MS);
            assert_eq!(w.sides[1].guest.seen.len(), before + 100);
            assert_eq!(w.sides[1].engine.counters().restarted_connections, 1);
        }
        w.assert_complete(0);
    }
}

#[test]
fn a_guest_without_buffers_blocks_the_sender_and_nothing_is_acknowledged() {
    let mut w = world(13, 4);
    stream(&mut w, 0, 100, 2, 10 * US);
    w.sides[1].has_buffers = false;
    let released = 100;
    for i in 0..20 {
        w.offer(0, i % 2, 1);
        w.run_for(100 * US);
    }
    assert_eq!(w.sides[1].guest.seen.len(), released);
    w.sides[1].has_buffers = true;
    w.run_for(100 * MS);
    w.assert_complete(0);
}

#[test]
fn duplicates_and_reordering_within_a_path_are_harmless() {
    for seed in 0..8 {
        let mut w = world(200 + seed, 4);
        w.reorder_within_path = true;
        w.all_links(|l| (l.duplicate, l.jitter_ns, l.loss) = (0.05, 60 * US, 0.01));
        stream(&mut w, 0, 5_000, 10, 10 * US);
        w.assert_complete(0);
        assert!(w.sides[1].engine.counters().duplicate_packets > 0);
    }
}

#[test]
fn lost_acks_are_not_losses_of_data() {
    let mut w = world(14, 4);
    w.links[1].iter_mut().for_each(|l| l.loss = 0.3);
    stream(&mut w, 0, 5_000, 10, 10 * US);
    w.assert_complete(0);
}

#[test]
fn heavy_loss_still_makes_progress() {
    let mut w = world(15, 4);
    w.all_links(|l| l.loss = 0.2);
    stream(&mut w, 0, 3_000, 10, 100 * US);
    let given_up = w.sides[0].engine.counters().given_up_packets;
    if given_up == 0 {
        w.assert_complete(0);
    }
    assert!(given_up < 30, "{given_up} of 3000 given up");
}

#[test]
fn a_full_window_blocks_and_opens_again() {
    let config = Config { initial_window: 64, max_window: 64, ..Config::default() };
    let mut w = World::new(16, 2, [config.clone(), config]);
    for _ in 0..1_000 {
        w.offer(0, 1, 1);
    }
    assert!(!w.sides[0].guest.backlog.is_empty());
    w.run_for(200 * MS);
    w.assert_complete(0);
    assert!(w.sides[0].engine.counters().blocked_packets > 0);
}

#[test]
fn a_port_with_few_buffers_is_not_sent_more_than_it_can_take() {
    let mut w = world(18, 4);
    w.sides[1].vnic = Some(LocalVnic { owner: 7, ordering: Ordering::Flow, reliable: true });
    w.sides[1].engine.set_receive_window(7, 32);
    let mut most = 0;
    for i in 0..1_000 {
        w.offer(0, i % 10, 1);
        w.run_for(US / 2);
        let in_flight = w.sides[0].engine.connection_snapshots(w.now).map(|c| c.in_flight_packets).max();
        most = most.max(in_flight.unwrap_or(0));
    }
    assert_eq!(most, 32);
    w.run_for(200 * MS);
    w.assert_complete(0);
}

#[test]
fn idle_connections_shrink_and_are_reaped() {
    let mut w = world(17, 4);
    stream(&mut w, 0, 500, 5, 10 * US);
    w.run_for(3 * S);
    for side in &w.sides {
        assert_eq!(side.engine.pages_used(), (0, 0));
        assert!(side.engine.conn_slots().all(|c| c.active.is_none()), "shrunk");
    }
    stream(&mut w, 0, 500, 5, 10 * US);
    w.assert_complete(0);
    w.run_for(130 * S);
    for side in &w.sides {
        assert_eq!(side.engine.connections(), 0, "reaped");
        assert_eq!(side.engine.counters().reaped_connections, 1);
    }
    stream(&mut w, 0, 500, 5, 10 * US);
    w.assert_complete(0);
}

#[test]
fn a_peer_that_dies_leaves_no_state_behind() {
    let mut w = world(22, 4);
    w.sides[1].vnic = Some(LocalVnic { owner: 7, ordering: Ordering::Strict, reliable: true });
    stream(&mut w, 0, 500, 5, 10 * US);
    w.links[0][1].down = true;
    for i in 0..200 {
        w.offer(0, i % 5, 1);
    }
    w.run_for(60 * US);
    assert!(!w.sides[1].guest.holds_nothing(), "packets wait behind a gap");
    w.all_links(|l| l.down = true);
    w.run_for(150 * S);
    w.assert_empty();
    assert_eq!((w.sides[0].engine.connections(), w.sides[1].engine.connections()), (0, 0));
}

#[test]
fn a_closed_window_is_not_polled_constantly() {
    let config = Config { initial_window: 16, max_window: 16, ..Config::default() };
    let mut w = World::new(23, 8, [config.clone(), config]);
    stream(&mut w, 0, 10, 1, 10 * US);
    w.all_links(|l| l.delay_ns = 10 * MS);
    for _ in 0..100 {
        w.offer(0, 1, 1);
    }
    // Tail probes and timeouts fire meanwhile, and find the window still closed.
    w.run_for(5 * MS);
    let engine = &w.sides[0].engine;
    let wait = engine.next_timeout().map_or(0, |at| at.since(w.now));
    assert!(wait > 20 * US, "wakes up after {wait} ns without work");
    assert!(engine.timers_pending() < 32, "{} timers", engine.timers_pending());
    w.run_for(S);
    w.assert_complete(0);
}

#[test]
fn one_side_reaps_first_and_the_other_notices() {
    let quick = Config { idle_reap_ns: 2 * S, ..Config::default() };
    let mut w = World::new(18, 4, [Config::default(), quick]);
    stream(&mut w, 0, 100, 5, 10 * US);
    w.run_for(10 * S);
    assert_eq!((w.sides[0].engine.connections(), w.sides[1].engine.connections()), (1, 0));
    stream(&mut w, 0, 100, 5, 10 * US);
    w.assert_complete(0);
    assert!(w.sides[1].engine.counters().resets_sent_packets > 0);
}

#[test]
fn strangers_are_counted_and_change_nothing() {
    let mut w = world(19, 4);
    stream(&mut w, 0, 100, 5, 10 * US);
    let engine = &mut w.sides[1].engine;
    let other = engine.add_peer(4);
    let cid = engine.cid_of(World::pair(1)).expect("open");
    let mut out = Output::default();
    let header = data(Psn(100), cid, w.now);
    let good = Arrival { peer: PeerId(0), vni: VNI, nic_rx: w.now, hops: 0, marked: false };
    let now = w.now;
    let cases = [
        ("wrong_peer", Arrival { peer: other, ..good }, header),
        ("wrong_vni", Arrival { vni: VNI + 1, ..good }, header),
        ("wrong_version", good, DataHeader { version: Version::V1, ..header }),
        ("outside_window", good, DataHeader { psn: Psn(100 + 4096), ..header }),
        ("far_outside_window", good, DataHeader { psn: Psn(1 << 31), ..header }),
        ("unknown_cid", good, DataHeader { cid: Cid(cid.0 ^ 0x40), ..header }),
    ];
    for (name, arrival, header) in cases {
        assert_eq!(engine.on_data(now, &arrival, &header, &mut out), Verdict::Drop, "{name}");
    }
    let c = *engine.counters();
    assert_eq!((c.wrong_peer_packets, c.wrong_vni_packets, c.wrong_version_packets), (1, 1, 1));
    assert_eq!((c.outside_window_packets, c.unknown_cid_packets), (2, 1));
    assert_eq!(c.resets_sent_packets, 1, "only an unknown CID is answered");
    out.clear();
    stream(&mut w, 0, 100, 5, 10 * US);
    w.assert_complete(0);
}

#[test]
fn resets_are_rate_limited() {
    let mut engine = Engine::new(Config::default(), 0, 1, 1);
    let peer = engine.add_peer(1);
    let mut out = Output::default();
    let arrival = Arrival { peer, vni: VNI, nic_rx: Time(0), hops: 0, marked: false };
    for _ in 0..1000 {
        let header = data(Psn(0), Cid(12345), Time(0));
        engine.on_data(Time(5), &arrival, &header, &mut out);
    }
    assert_eq!(out.control.len(), 32);
    assert_eq!(engine.counters().resets_suppressed_packets, 1000 - 32);
}

#[test]
fn policy_drops_are_acknowledged_and_rate_limits_reported() {
    let mut w = world(20, 1);
    stream(&mut w, 0, 10, 1, 10 * US);
    let now = w.now;
    let engine = &mut w.sides[1].engine;
    let cid = engine.cid_of(World::pair(1)).expect("open");
    let arrival = Arrival { peer: PeerId(0), vni: VNI, nic_rx: now, hops: 0, marked: false };
    let header = |psn| DataHeader { ack_now: true, ..data(Psn(psn), cid, now) };
    let mut out = Output::default();
    let Verdict::Place { slot, .. } = engine.on_data(now, &arrival, &header(10), &mut out) else { panic!() };
    engine.policy_dropped(now, slot, &mut out);
    let Verdict::Place { slot, .. } = engine.on_data(now, &arrival, &header(11), &mut out) else { panic!() };
    engine.rate_limited(slot);
    engine.flush_acks(now, &mut out);
    assert!(out.publish.is_empty(), "nothing is shown");
    let acks: Vec<_> = out
        .control
        .iter()
        .map(|c| match c.packet {
            crate::Control::Ack(a) => (a.kind, a.base, a.bitmap.count_ones()),
            ref other => panic!("{other:?}"),
        })
        .collect();
    use bifrost_wire::bifrost::AckKind;
    assert_eq!(acks, [(AckKind::RateLimited, Psn(11), 1), (AckKind::Cumulative, Psn(11), 0)]);
}

#[test]
fn timers_do_not_pile_up() {
    let mut w = world(21, 4);
    for i in 0..20_000 {
        w.offer(0, i % 5, 1);
        w.run_for(777 * US);
    }
    for side in &w.sides {
        assert!(side.engine.timers_pending() < 64, "{} entries for one connection", side.engine.timers_pending());
    }
}

#[test]
fn memory_of_connections() {
    assert!(size_of::<Option<Conn>>() <= 320, "{} bytes idle", size_of::<Option<Conn>>());
    let active = size_of::<Active>() + size_of::<SendPage>() + size_of::<RecvPage>();
    assert!(active <= 4096, "{active} bytes with 16 packets in flight");
}

#[test]
fn packets_behind_a_given_up_one_are_not_overtaken_within_their_flow() {
    let mut w = world(24, 4);
    stream(&mut w, 0, 200, 5, 10 * US);
    // Two packets of flow 1, one of flow 2; the first never arrives, and the second waits for it.
    w.doomed = Some(Psn(200));
    w.offer(0, 1, 1);
    w.offer(0, 1, 1);
    w.offer(0, 2, 1);
    // Nor does the SKIP that would tell it to continue.
    w.lose_skips = true;
    w.run_for(300 * MS);
    assert_eq!(w.sides[0].engine.counters().given_up_packets, 1);
    let seen = w.sides[1].guest.seen.len();
    w.offer(0, 1, 1);
    w.run_for(5 * MS);
    assert_eq!(w.sides[1].guest.seen.len(), seen, "the third of flow 1 waits for the second");
    w.lose_skips = false;
    w.run_for(S);
    let flow: Vec<u32> = w.sides[1].guest.seen[seen..].iter().map(|s| s.1).collect();
    assert_eq!(flow, [41, 42], "in order");
}

#[test]
fn both_sides_that_restart_at_once_reconnect() {
    let mut w = world(25, 4);
    stream(&mut w, 0, 100, 5, 10 * US);
    stream(&mut w, 1, 100, 5, 10 * US);
    // Each is told that the other no longer knows it.
    let now = w.now;
    let cids = [0, 1].map(|side| w.sides[side].engine.cid_of(World::pair(side)).expect("open"));
    for side in [0, 1] {
        let unknown = cids[1 - side];
        let arrival = Arrival { peer: PeerId(0), vni: VNI, nic_rx: now, hops: 0, marked: false };
        let mut out = Output::default();
        w.sides[side].engine.on_reset(now, &arrival, &bifrost_wire::bifrost::Reset { unknown }, &mut out);
        w.send(side, out);
    }
    for i in 0..100 {
        w.offer(0, i % 5, 1);
        w.offer(1, i % 5, 1);
        w.run_for(10 * US);
    }
    w.run_for(100 * MS);
    w.assert_complete(0);
    w.assert_complete(1);
    for side in &w.sides {
        assert!(side.engine.counters().restarted_connections <= 2, "{:?}", side.engine.counters());
    }
}

#[test]
fn packets_resent_after_a_restart_are_not_overtaken_within_their_flow() {
    for seed in 0..20 {
        let mut w = world(260 + seed, 4);
        stream(&mut w, 0, 100, 5, 10 * US);
        let cid = w.sides[1].engine.cid_of(World::pair(1)).expect("open");
        let arrival = Arrival { peer: PeerId(0), vni: VNI, nic_rx: w.now, hops: 0, marked: false };
        let mut out = Output::default();
        w.all_links(|l| l.loss = 0.2);
        for i in 0..40 {
            w.offer(0, i % 5, 1);
        }
        w.run_for(10 * US);
        w.sides[0].engine.on_reset(w.now, &arrival, &bifrost_wire::bifrost::Reset { unknown: cid }, &mut out);
        w.send(0, out);
        for i in 0..100 {
            w.offer(0, i % 5, 1);
            w.run_for(10 * US);
        }
        w.run_for(S);
        let mut last = [None; 5];
        for (i, &(flow, seq, _)) in w.sides[1].guest.seen.iter().enumerate() {
            let before = last[flow as usize].replace(seq);
            // Once, after the restart, it may resume with the unacknowledged packets; there are 28 of each flow.
            let again = before == Some(27) || before.is_some_and(|b| b < 28 && seq <= b && seq >= 20);
            assert!(before < Some(seq) || again, "seed {seed}: {i}: flow {flow}: {seq} after {before:?}");
        }
        assert!(last.iter().all(|l| *l == Some(47)), "{last:?}");
    }
}

/// Anything repeated until it is answered rotates over all paths, even if only one is sprayed over.
#[test]
fn a_dead_path_does_not_keep_a_connection_from_being_set_up() {
    for dead in 0..4 {
        let config = Config { spray_paths: 1, ..Config::default() };
        let mut w = World::new(31, 4, [config.clone(), config]);
        w.links.iter_mut().for_each(|links| links[dead].down = true);
        w.offer(0, 1, 1);
        w.run_for(50 * MS);
        assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Open), "path {dead} is dead");
        w.run_for(100 * MS);
        w.assert_complete(0);
    }
}
