//! An engine continues with what another one has measured.

use super::*;
use crate::PathEstimate;
use crate::output::PeerId;

const PEER: PeerId = PeerId(0);

/// Two hosts, 50 us apart.
fn near(seed: u64) -> World {
    let mut w = world(seed, 4);
    w.all_links(|l| l.delay_ns = 50 * US);
    w
}

/// What is known after some traffic.
fn measured() -> Vec<PathEstimate> {
    let mut w = near(900);
    stream(&mut w, 0, 2_000, 5, 2 * US);
    w.sides[0].engine.path_estimates(PEER)
}

#[test]
fn windows_begin_at_half_of_what_they_were() {
    let paths = measured();
    let mut w = near(930);
    let initial = w.sides[0].engine.path_estimates(PEER)[0].window;
    let now = w.now;
    w.sides[0].engine.resume_paths(now, PEER, &paths);
    for (before, after) in paths.iter().zip(w.sides[0].engine.path_estimates(PEER)) {
        assert_eq!((after.total, after.fabric, after.loss), (before.total, before.fabric, before.loss));
        assert!(before.window > 2.0 * initial, "{before:?}");
        assert_eq!(after.window, before.window / 2.0);
    }
}

#[test]
fn a_small_window_stays_small_and_a_suspect_path_carries_only_probes() {
    let mut w = near(940);
    let mut paths = measured();
    (paths[1].window, paths[2].is_suspect) = (0.5, true);
    let now = w.now;
    w.sides[0].engine.resume_paths(now, PEER, &paths);
    let engine = &w.sides[0].engine;
    assert_eq!(engine.path_estimates(PEER)[1].window, 0.5);
    assert!(engine.selected_paths(PEER).iter().all(|path| path.index() != 2), "{:?}", engine.selected_paths(PEER));
    stream(&mut w, 0, 200, 5, 2 * US);
    w.assert_complete(0);
    assert!(w.sides[0].engine.path_estimates(PEER).iter().all(|path| !path.is_suspect), "its probes returned");
}

#[test]
fn estimates_of_other_paths_and_impossible_ones_change_nothing() {
    let paths = measured();
    let mut w = near(950);
    let before = w.sides[0].engine.path_estimates(PEER);
    let now = w.now;
    let engine = &mut w.sides[0].engine;
    engine.resume_paths(now, PEER, &paths[..3]);
    engine.resume_paths(now, PeerId(7), &paths);
    assert_eq!(engine.path_estimates(PEER), before);
    let absurd = |mean_ns, variance_ns, min_ns, loss, window| {
        let times = crate::Estimate { mean_ns, variance_ns, min_ns };
        PathEstimate { total: times, fabric: times, loss, window, is_suspect: false }
    };
    for estimate in [
        absurd(u64::MAX, 1, 1, f32::NAN, f32::NAN),
        absurd(1, u64::MAX, 1, f32::INFINITY, f32::INFINITY),
        absurd(1, 1, u64::MAX, -1.0, f32::NEG_INFINITY),
        absurd(0, 0, 0, f32::NEG_INFINITY, -5.0),
    ] {
        engine.resume_paths(now, PEER, &[estimate; 4]);
        for path in engine.path_estimates(PEER) {
            assert_eq!((path.total, path.fabric), (Default::default(), Default::default()));
            assert!((0.0..=1.0).contains(&path.loss) && path.window > 0.0 && path.window.is_finite(), "{path:?}");
        }
    }
    stream(&mut w, 0, 200, 5, 2 * US);
    w.assert_complete(0);
}
