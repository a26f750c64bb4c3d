//! Shrinks a failing scenario.

use std::time::{Duration, Instant};

use super::run::run_scenario;
use crate::link::LinkPatch;
use crate::scenario::{Scenario, Topology, TransportSettings, Workload};
use crate::violation::Kind;

/// The smallest scenario found within `time` that violates the same invariant with this seed.
pub fn shrink(scenario: &Scenario, seed: u64, kind: Kind, time: Duration) -> Scenario {
    let until = Instant::now() + time;
    let fails = |s: &Scenario| run_scenario(s, seed, |_| ()).violation.is_some_and(|v| v.kind == kind);
    let mut best = scenario.clone();
    loop {
        let before = best.clone();
        for candidate in candidates(&before) {
            if Instant::now() > until {
                return best;
            }
            if fails(&candidate) {
                best = candidate;
                break;
            }
        }
        if best == before {
            return best;
        }
    }
}

/// Smaller scenarios, the largest reductions first.
fn candidates(s: &Scenario) -> Vec<Scenario> {
    let mut all = Vec::new();
    let mut with = |change: &dyn Fn(&mut Scenario)| {
        let mut smaller = s.clone();
        change(&mut smaller);
        if smaller != *s {
            all.push(smaller);
        }
    };
    for i in 0..s.workloads.len() {
        with(&|s| drop(s.workloads.remove(i)));
    }
    for i in 0..s.faults.len() {
        with(&|s| drop(s.faults.remove(i)));
    }
    with(&|s| s.transport = TransportSettings { first_psn: s.transport.first_psn, ..TransportSettings::default() });
    with(&|s| s.host = Default::default());
    with(&|s| s.host_paths.clear());
    for i in 0..s.guests.len() {
        with(&|s| s.guests[i].tx_rate = None);
        with(&|s| s.guests[i].rx_rate = None);
        with(&|s| s.guests[i].weight = 1);
    }
    for i in 0..links(&mut s.clone()).len() {
        with(&|s| *links(s)[i] = LinkPatch::default());
        macro_rules! without {
            ($($field:ident)*) => { $(with(&|s| links(s)[i].$field = None);)* };
        }
        without!(rate delay jitter queue ecn_threshold priority_dscp loss corruption duplication reordering reorder_delay);
    }
    macro_rules! settings {
        ($($field:ident)*) => { $(with(&|s| s.transport.$field = None);)* };
    }
    settings!(stickiness initial_rto rto_ceiling plain_retry best_effort_after idle_shrink idle_reap probe_interval
        swift_noise rto_floor ack_delay version_max group_packets spray_paths ack_threshold initial_window max_window
        setup_queue_packets setup_tries heavy_loss_percent give_up_rtos give_up_after max_connections max_connections_per_peer max_pages
        first_psn congestion_control);
    for i in 0..s.workloads.len() {
        with(&|s| match &mut s.workloads[i] {
            Workload::Packets { packets, .. } => *packets = (*packets / 2).max(1),
            Workload::Request { count, .. } => *count = (*count / 2).max(1),
            Workload::Bulk { bytes, .. } => bytes.0 = (bytes.0 / 2).max(1),
        });
        with(&|s| {
            if let Workload::Packets { segments, flows, burst, .. } = &mut s.workloads[i] {
                (*segments, *flows, *burst) = (1, 1, 1);
            }
        });
    }
    all
}

/// All link properties of a scenario.
fn links(s: &mut Scenario) -> Vec<&mut LinkPatch> {
    let mut all = Vec::new();
    match &mut s.topology {
        Topology::Parallel { link, path, .. } => {
            all.push(link);
            all.extend(path);
        }
        Topology::Star { link, .. } => all.push(link),
        Topology::Clos2 { host_link, fabric_link, .. } | Topology::Clos3 { host_link, fabric_link, .. } => {
            all.extend([host_link, fabric_link]);
        }
    }
    all
}
