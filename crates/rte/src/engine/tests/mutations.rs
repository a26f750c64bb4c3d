//! Tests of the tests: every mutation is detected by a scenario that the correct engine passes.

use std::panic::{AssertUnwindSafe, catch_unwind};

use super::pair::{VNI, World, data};
use super::*;
use crate::{Mutation, PathState};

/// A world in which both engines have the mutation.
fn world(seed: u64, mutation: Option<Mutation>) -> World {
    let config = Config { mutation, first_psn: u32::MAX - 700, max_pages: 512, ..Config::default() };
    World::new(seed, 4, [config.clone(), config])
}

fn stream(w: &mut World, count: u32) {
    for i in 0..count {
        w.offer(0, i % 10, 1);
        w.run_for(10 * US);
    }
}

/// Everything arrived reliably, and no state is left.
fn assert_drained(w: &mut World) {
    w.run_for(500 * MS);
    w.assert_complete(0);
    for side in &w.sides {
        assert_eq!(side.guest.plain, 0, "packets were sent as plain VXLAN");
        assert_eq!(side.engine.pages_used(), (0, 0), "pages are freed");
        assert!(side.engine.path_snapshots(w.now).all(|p| p.in_flight_packets == 0), "paths are empty");
    }
}

fn nothing_goes_wrong(mutation: Option<Mutation>) {
    let mut w = world(1, mutation);
    for i in 0..200 {
        w.offer(0, i % 10, 1 + (i % 3) as u8);
        w.run_for(400 * US);
    }
    assert_drained(&mut w);
    assert_eq!(w.sides[0].engine.counters().retransmitted_packets, 0, "nothing was lost");
}

fn losses(mutation: Option<Mutation>) {
    let mut w = world(2, mutation);
    w.all_links(|l| (l.loss, l.jitter_ns) = (0.02, 80 * US));
    stream(&mut w, 3_000);
    assert_drained(&mut w);
}

/// Enough that a packet and its flow predecessor are often lost together.
fn heavy_losses(mutation: Option<Mutation>) {
    let mut w = world(13, mutation);
    w.all_links(|l| (l.loss, l.jitter_ns) = (0.2, 80 * US));
    stream(&mut w, 3_000);
    assert_drained(&mut w);
}

fn duplicates(mutation: Option<Mutation>) {
    let mut w = world(3, mutation);
    w.all_links(|l| (l.duplicate, l.jitter_ns) = (0.2, 60 * US));
    stream(&mut w, 1_000);
    assert_drained(&mut w);
}

/// The peer's answers are lost for less than the give-up time.
fn silence(mutation: Option<Mutation>) {
    let mut w = world(4, mutation);
    stream(&mut w, 500);
    w.run_for(5 * MS);
    for both in [false, true] {
        for _ in 0..5 {
            w.links[1].iter_mut().for_each(|l| l.down = true);
            w.links[0].iter_mut().for_each(|l| l.down = both);
            stream(&mut w, 20);
            w.run_for(9 * MS);
            w.all_links(|l| l.down = false);
            w.run_for(150 * MS);
            w.assert_complete(0);
        }
    }
    assert_drained(&mut w);
}

/// A packet is lost so often that its tail probes are used up, but for less than the give-up time.
fn lost_again_and_again(mutation: Option<Mutation>) {
    let mut w = world(13, mutation);
    stream(&mut w, 200);
    w.run_for(5 * MS);
    w.doomed = Some(w.sides[0].engine.config.first_psn().add(200));
    w.offer(0, 1, 1);
    w.run_for(10 * MS);
    w.doomed = None;
    w.run_for(150 * MS);
    w.assert_complete(0);
}

fn guest_without_buffers(mutation: Option<Mutation>) {
    let mut w = world(5, mutation);
    stream(&mut w, 100);
    w.sides[1].has_buffers = false;
    stream(&mut w, 20);
    w.run_for(2 * MS);
    w.sides[1].has_buffers = true;
    assert_drained(&mut w);
}

/// A packet that no path delivers is given up; the receiver shows the packets held behind it, and continues.
fn giving_up(mutation: Option<Mutation>) {
    let mut w = world(6, mutation);
    stream(&mut w, 200);
    w.run_for(5 * MS);
    w.doomed = Some(w.sides[0].engine.config.first_psn().add(200));
    (0..10).for_each(|_| w.offer(0, 1, 1));
    w.run_for(300 * MS);
    assert_eq!(w.sides[0].engine.counters().given_up_packets, 1);
    assert_eq!(w.sides[0].engine.counters().best_effort_connections, 0);
    w.doomed = None;
    stream(&mut w, 200);
    w.run_for(500 * MS);
    assert_eq!(w.sides[1].guest.seen.len(), 200 + 9 + 200);
    assert_eq!(w.sides[0].guest.plain, 1);
    w.assert_empty();
}

fn blackout(mutation: Option<Mutation>) {
    let mut w = world(7, mutation);
    stream(&mut w, 500);
    w.links[0][1].down = true;
    stream(&mut w, 40);
    w.all_links(|l| l.down = true);
    stream(&mut w, 20);
    w.run_for(300 * MS);
    assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::BestEffort));
    w.assert_empty();
    w.all_links(|l| l.down = false);
    for _ in 0..200 {
        w.offer(0, 1, 1);
        w.run_for(MS);
    }
    assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Open));
    assert!(w.sides[0].engine.path_snapshots(w.now).all(|p| p.state == PathState::Usable));
    w.run_for(500 * MS);
    w.assert_empty();
}

fn nobody_answers(mutation: Option<Mutation>) {
    let mut w = world(8, mutation);
    w.all_links(|l| l.down = true);
    stream(&mut w, 20);
    w.run_for(300 * MS);
    assert_eq!(w.sides[0].guest.plain, 20);
    w.assert_empty();
}

/// The sender dies while the receiver holds packets behind a gap and others are still in flight.
fn sender_restarts(mutation: Option<Mutation>) {
    let mut w = world(9, mutation);
    w.sides[1].ordering = Ordering::Strict;
    w.sides[1].vnic = Some(LocalVnic { owner: 7, ordering: Ordering::Strict, reliable: true });
    stream(&mut w, 300);
    w.run_for(MS);
    let (slow, seen) = (2, w.sides[1].guest.seen.len());
    w.links[0][slow].delay_ns = 30 * MS;
    for i in 0..200 {
        w.offer(0, i % 10, 1);
    }
    // Shorter than retransmitting late packets takes.
    w.run_for(110 * US);
    assert!(w.sides[1].guest.seen.len() < seen + 200, "some are held");
    w.restart(0, 5_000, 4);
    w.links[0][slow].delay_ns = 50 * US;
    let old = w.sides[0].guest.next_seq(100);
    for _ in 0..400 {
        w.offer(0, 100, 1);
        w.run_for(100 * US);
    }
    w.run_for(100 * MS);
    let new: Vec<u32> = w.sides[1].guest.seen.iter().filter(|s| s.0 == 100).map(|s| s.1).collect();
    assert_eq!(new, (old..old + 400).collect::<Vec<_>>(), "the new life is complete and in order");
    assert!(w.sides[1].guest.holds_nothing(), "packets held for the guest were shown");
    assert_eq!(w.sides[1].engine.pages_used().1, 0);
}

fn receiver_restarts(mutation: Option<Mutation>) {
    let mut w = world(10, mutation);
    stream(&mut w, 300);
    w.run_for(10 * MS);
    w.restart(1, 5_000, 4);
    for i in 0..100 {
        w.offer(0, i % 10, 1);
    }
    assert_drained(&mut w);
}

fn small_window(mutation: Option<Mutation>) {
    let config = Config { mutation, initial_window: 64, max_window: 128, ..Config::default() };
    let mut w = World::new(11, 4, [config.clone(), config]);
    for i in 0..1_000 {
        w.offer(0, i % 10, 1);
        w.run_for(US / 2);
        let most = w.sides[0].engine.connection_snapshots(w.now).map(|c| c.in_flight_packets).max();
        assert!(most <= Some(128), "{most:?} packets in flight");
    }
    assert_drained(&mut w);
}

/// Packets that an honest peer never sends.
fn outside_the_window(mutation: Option<Mutation>) {
    let mut w = world(12, mutation);
    stream(&mut w, 10);
    w.run_for(MS);
    let now = w.now;
    let engine = &mut w.sides[1].engine;
    let base = engine.config.first_psn().add(10);
    let cid = engine.cid_of(World::pair(1)).expect("open");
    let arrival = Arrival { peer: PeerId(0), vni: VNI, nic_rx: now, hops: 0, marked: false };
    let mut out = Output::default();
    for psn in [base.add(4096), base.add(1 << 31), base.sub(4097)] {
        let header = data(psn, cid, now);
        assert_eq!(engine.on_data(now, &arrival, &header, &mut out), Verdict::Drop, "{psn:?}");
    }
}

type Scenario = fn(Option<Mutation>);

/// Which scenario detects which mutation.
const NOTICED: [(Mutation, Scenario); Mutation::ALL.len()] = [
    (Mutation::AckBeforePublication, losses),
    (Mutation::AckUnplaced, guest_without_buffers),
    (Mutation::AckHoles, losses),
    (Mutation::AckBitsShifted, losses),
    (Mutation::AckBaseIgnored, nothing_goes_wrong),
    (Mutation::AckTimerNotArmed, nothing_goes_wrong),
    (Mutation::ReceiveWindowUnchecked, outside_the_window),
    (Mutation::DuplicatesForgotten, duplicates),
    (Mutation::PublishEarly, losses),
    (Mutation::SkipForgetsHeld, giving_up),
    (Mutation::LeakHandle, nothing_goes_wrong),
    (Mutation::WrongOwner, nothing_goes_wrong),
    (Mutation::ReleaseBeforeAck, nothing_goes_wrong),
    (Mutation::PsnWrapForgotten, losses),
    (Mutation::TimeoutSendsNothing, lost_again_and_again),
    (Mutation::RetransmissionDistance, heavy_losses),
    (Mutation::LossTimerNotRearmed, silence),
    (Mutation::NeverGiveUp, blackout),
    (Mutation::GiveUpAtOnce, silence),
    (Mutation::GiveUpSilently, giving_up),
    (Mutation::RestartForgetsReceived, sender_restarts),
    (Mutation::RestartForgetsSent, receiver_restarts),
    (Mutation::StaleCidAccepted, sender_restarts),
    (Mutation::SendWindowIgnored, small_window),
    (Mutation::EndForgetsWaiting, nobody_answers),
    (Mutation::BestEffortForEver, blackout),
    (Mutation::InFlightLeaks, losses),
    (Mutation::RefusalsIgnored, adversary::damage_on_the_best_path),
];

#[test]
fn without_mistakes_every_scenario_passes() {
    for (_, scenario) in NOTICED {
        scenario(None);
    }
}

#[test]
fn every_mistake_is_noticed() {
    let unnoticed: Vec<Mutation> = NOTICED
        .into_iter()
        .filter(|(mutation, scenario)| catch_unwind(AssertUnwindSafe(|| scenario(Some(*mutation)))).is_ok())
        .map(|(mutation, _)| mutation)
        .collect();
    assert!(unnoticed.is_empty(), "not noticed: {unnoticed:?}");
    let all: Vec<Mutation> = NOTICED.map(|(mutation, _)| mutation).to_vec();
    assert_eq!(all, Mutation::ALL, "each has a scenario");
}
