//! An engine stops in the middle of traffic, for another process to continue, or to continue itself if that fails.

use std::collections::{BTreeMap, BTreeSet};

use super::*;

/// Both sides send; then side 0 sets everything aside.
fn interrupted(seed: u64) -> World {
    let mut w = world(seed, 4);
    stream(&mut w, 0, 50, 5, 10 * US);
    w.all_links(|l| l.loss = 0.05);
    for i in 0..200 {
        w.offer(0, i % 5, 1);
        w.offer(1, i % 7, 1 + (i % 3) as u8);
        w.run_for(3 * US);
    }
    w.sides[0].engine.acknowledge_all();
    w.send(0, Output::default());
    let mut out = Output::default();
    w.sides[0].engine.start_all_over(w.now, &mut out);
    let requests = std::mem::take(&mut out.control);
    assert!(out.data.is_empty() && out.plain.is_empty() && out.release.is_empty());
    w.send(0, out);
    w.sides[0].out.control = requests;
    w
}

#[test]
fn all_unacknowledged_packets_are_set_aside_and_held_ones_are_published() {
    for seed in 0..20 {
        let w = interrupted(400 + seed);
        let engine = &w.sides[0].engine;
        let buffers: Vec<u32> = engine.waiting_buffers().map(|(_, handle)| handle).collect();
        assert_eq!(engine.unfinished_packets(), buffers.len() as u64, "one segment each");
        assert!(w.sides[0].guest.holds_nothing(), "acknowledged packets must be seen");
        let distinct: BTreeSet<u32> = buffers.iter().copied().collect();
        assert_eq!(
            distinct.len(),
            w.sides[0].guest.unreleased(),
            "seed {seed}: every buffer that is not the guest's again"
        );
        assert!(buffers.is_sorted(), "in the order of sending");
        assert_eq!(engine.pages_used(), (0, 0));
    }
}

#[test]
fn an_engine_that_has_set_everything_aside_can_continue() {
    for seed in 0..20 {
        let mut w = interrupted(500 + seed);
        // The other process took some time to fail.
        w.run_for(3 * MS);
        for i in 0..100 {
            w.offer(0, i % 5, 1);
            w.offer(1, i % 7, 1);
            w.run_for(10 * US);
        }
        w.run_for(2 * S);
        for from in 0..2 {
            let mut seen: BTreeMap<u32, BTreeSet<u32>> = BTreeMap::new();
            for (flow, seq, _) in &w.sides[1 - from].guest.seen {
                seen.entry(*flow).or_default().insert(*seq);
            }
            for (flow, seqs) in seen {
                let sent = w.sides[from].guest.next_seq(flow);
                assert!(seqs.iter().copied().eq(0..sent), "seed {seed}: of flow {flow} {} of {sent}", seqs.len());
            }
            assert_eq!(w.sides[from].guest.unreleased(), 0);
        }
    }
}
