//! Paths drained by the operator.

use super::pair::World;
use super::{stream, world};
use crate::conn::State;
use crate::{Config, MS, PathState, PeerId, US};

fn drain(w: &mut World, side: usize, paths: u8) {
    w.sides[side].engine.drain_paths(w.now, PeerId(0), paths);
}

/// Data packets that left on each path during `run`.
fn sent(w: &mut World, run: impl FnOnce(&mut World)) -> Vec<u64> {
    let before = w.data_sent[0].clone();
    run(w);
    w.data_sent[0].iter().zip(before).map(|(after, before)| after - before).collect()
}

#[test]
fn a_drained_path_carries_nothing_from_that_moment_on() {
    for path in 0..4 {
        let mut w = world(200 + path, 4);
        // With losses, so that retransmissions and their copies must choose paths as well.
        w.all_links(|l| l.loss = 0.02);
        stream(&mut w, 0, 2_000, 20, 10 * US);
        for i in 0..333 {
            w.offer(0, i % 20, 1);
            w.run_for(3 * US);
        }
        let in_flight = w.sides[0].engine.path_snapshots(w.now).any(|p| p.in_flight_packets > 0);
        drain(&mut w, 0, 1 << path);
        let carried = sent(&mut w, |w| stream(w, 0, 10_000, 20, 5 * US));
        assert!(in_flight && carried.iter().enumerate().all(|(i, n)| (*n == 0) == (i == path as usize)), "{carried:?}");
        w.assert_complete(0);
        assert_eq!(w.sides[0].guest.plain, 0);
        let snapshots: Vec<_> = w.sides[0].engine.path_snapshots(w.now).collect();
        let drained = &snapshots[path as usize];
        assert!(drained.drained && !drained.selected && drained.state == PathState::Usable);
        assert_eq!((drained.in_flight_packets, snapshots.iter().filter(|p| p.drained).count()), (0, 1));
        assert!(drained.probes_sent > drained.probes_lost, "it is still measured: {drained:?}");
        // After it is restored, it carries its share again.
        drain(&mut w, 0, 0);
        let carried = sent(&mut w, |w| stream(w, 0, 10_000, 20, 10 * US));
        assert!(carried[path as usize] > 1_000, "{carried:?}");
        w.assert_complete(0);
    }
}

#[test]
fn the_best_path_that_is_not_drained_takes_over() {
    let config = Config { spray_paths: 2, ..Config::default() };
    let mut w = World::new(210, 4, [config.clone(), config]);
    for (i, link) in w.links[0].iter_mut().enumerate() {
        link.delay_ns = (50 + 60 * i as u64) * US;
    }
    stream(&mut w, 0, 5_000, 20, 10 * US);
    let selected = |w: &World| {
        let mut paths: Vec<_> = w.sides[0].engine.selected_paths(PeerId(0)).iter().map(|p| p.get()).collect();
        paths.sort_unstable();
        paths
    };
    assert_eq!(selected(&w), [0, 1]);
    drain(&mut w, 0, 0b0001);
    assert_eq!(selected(&w), [1, 2], "at once, and without traffic");
    drain(&mut w, 0, 0b0111);
    assert_eq!(selected(&w), [3]);
    // The only remaining path loses packets: they are retransmitted there, and nowhere else.
    w.links[0][3].loss = 0.2;
    let carried = sent(&mut w, |w| stream(w, 0, 2_000, 20, 20 * US));
    assert!(carried[..3].iter().all(|n| *n == 0) && carried[3] > 2_000, "{carried:?}");
    w.assert_complete(0);
}

#[test]
fn draining_all_paths_has_no_effect() {
    let mut w = world(220, 4);
    drain(&mut w, 0, u8::MAX);
    let carried = sent(&mut w, |w| stream(w, 0, 4_000, 20, 10 * US));
    assert!(carried.iter().all(|n| *n > 500), "{carried:?}");
    w.assert_complete(0);
    assert!(w.sides[0].engine.path_snapshots(w.now).all(|p| p.drained && p.selected));
}

#[test]
fn set_up_and_refusal_use_the_remaining_paths() {
    // The other paths are unplugged, which is allowed once they are drained on both sides.
    for left in 0..4 {
        let mut w = world(230, 4);
        let others = 0b1111 & !(1 << left);
        for side in 0..2 {
            drain(&mut w, side, others);
            w.links[side].iter_mut().enumerate().for_each(|(path, link)| link.down = path != left);
        }
        w.offer(0, 1, 1);
        w.run_for(MS);
        assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Open), "no attempt is lost");
        stream(&mut w, 0, 1_000, 5, 10 * US);
        w.assert_complete(0);
        let mut w = world(231, 4);
        w.sides[1].vnic = None;
        for side in 0..2 {
            drain(&mut w, side, others);
            w.links[side].iter_mut().enumerate().for_each(|(path, link)| link.down = path != left);
        }
        w.offer(0, 1, 1);
        w.run_for(MS);
        assert!(matches!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Plain { .. })), "the refusal arrives");
    }
}
