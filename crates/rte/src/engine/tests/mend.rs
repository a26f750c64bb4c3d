//! After a panic.

use super::*;
use crate::deadline::Timers;
use crate::output::Output;
use bifrost_transport::pool::Pool;

/// Simulates a panic while all state derived from connections was being changed.
fn forget_all_that_is_derived(engine: &mut Engine) {
    engine.ack_ready.clear();
    engine.by_pair.clear();
    engine.by_peer_cid.clear();
    engine.free.clear();
    engine.stack.push(7);
    engine.timers = Timers::default();
    engine.peers.iter_mut().flatten().for_each(|peer| (peer.connections, peer.probe_conn) = (77, Some(99)));
}

#[test]
fn state_derived_from_connections_is_rebuilt_during_repairs() {
    for seed in 0..10 {
        let mut w = world(900 + seed, 4);
        w.all_links(|l| (l.loss, l.jitter_ns) = (0.01, 50 * US));
        for i in 0..3000u32 {
            w.offer(0, i % 20, 1);
            w.offer(1, i % 3, 1);
            w.run_for(10 * US);
            if i % 100 == 57 {
                for side in 0..2 {
                    let engine = &mut w.sides[side].engine;
                    let before = engine.connections();
                    forget_all_that_is_derived(engine);
                    let mut out = Output::default();
                    assert_eq!(engine.mend(w.now, None, None, &mut out), None);
                    assert!(out.is_empty());
                    assert_eq!(engine.connections(), before);
                }
            }
        }
        w.run_for(500 * MS);
        w.assert_complete(0);
        w.assert_complete(1);
        assert!(w.sides.iter().all(|side| side.engine.counters().faulted_connections == 0));
        assert!(w.sides.iter().all(|side| side.engine.pages_used() == (0, 0)));
    }
}

#[test]
fn a_connection_that_cannot_even_be_removed_is_abandoned() {
    let mut w = world(77, 4);
    stream(&mut w, 0, 100, 3, 10 * US);
    (0..50).for_each(|_| w.offer(0, 1, 1));
    let engine = &mut w.sides[0].engine;
    let cid = engine.cid_of(World::pair(0));
    assert!(engine.peers[0].as_ref().is_some_and(|peer| peer.paths.iter().any(|path| path.in_flight > 0)));
    // The pages of its window are missing.
    engine.send_pool = Pool::new(engine.config.max_pages);
    let mut out = Output::default();
    assert!(engine.mend(w.now, None, cid, &mut out).is_some());
    assert_eq!((engine.connections(), engine.counters().faulted_connections), (0, 1));
    assert!(engine.peers[0].as_ref().is_some_and(|peer| peer.paths.iter().all(|path| path.in_flight == 0)));
    // The next packet finds no connection, and requests a new one.
    w.offer(0, 2, 1);
    w.run_for(100 * MS);
    assert_eq!(w.sides[0].engine.state_of(World::pair(0)), Some(State::Open));
    assert_eq!(w.sides[1].engine.state_of(World::pair(1)), Some(State::Open));
}

#[test]
fn actions_requested_for_a_faulty_port_are_dropped() {
    let mut w = world(78, 4);
    (0..200).for_each(|_| w.offer(0, 1, 1));
    let engine = &mut w.sides[0].engine;
    let owner = engine.conn_slots().next().map(|conn| conn.owner);
    let mut out = Output::default();
    engine.mend(w.now, owner, None, &mut out);
    assert!(out.plain.is_empty() && out.publish.is_empty() && out.data.is_empty() && out.release.is_empty());
    assert_eq!((engine.connections(), engine.pages_used()), (0, (0, 0)));
}
