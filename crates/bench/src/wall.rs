//! Wall times of the benchmarks whose instructions are counted: medians, valid for this machine at this moment.

use std::time::{Duration, Instant};

use bifrost_rte::{Ordering, US};

use crate::decisions::{Case, Decisions, Kind};
use crate::round::{Load, Round};
use crate::stages::{PACKETS, Prepared};

/// Number of flows, used in turn, for the switch's decision. With 10,000 flows, memory latency dominates.
const FLOWS: [u32; 2] = [1, 10_000];
/// Decisions per measurement.
const DECISIONS: u32 = 10_000;
/// Packets of a timed round.
const ROUND_PACKETS: u32 = 8192;
const REPETITIONS: usize = 21;

/// Name, and nanoseconds per packet.
pub fn times() -> Vec<(&'static str, f64)> {
    let rounds = [
        ("round.strict_8_flows", Load { ordering: Ordering::Strict, ..Load::default() }),
        ("round.by_flow_8_flows", Load::default()),
        ("round.unequal_paths", Load { skew_ns: 10 * US, ..Load::default() }),
        ("round.batch_of_1", Load { batch: 1, every_ns: US, ..Load::default() }),
        ("round.connections_64", Load { conns: 64, ..Load::default() }),
        ("round.beside_100k_idle", Load { idle: 100_000, ..Load::default() }),
    ];
    let mut times = vec![
        ("send", stage(Prepared::to_send, Prepared::send)),
        ("receive.in_order", stage(|| Prepared::to_receive(false), Prepared::receive)),
        ("receive.reordered", stage(|| Prepared::to_receive(true), Prepared::receive)),
        ("process_ack", stage(|| Prepared::to_release(false), Prepared::release)),
    ];
    for (name, load) in rounds {
        let mut round = Round::steady(load);
        let ns = median(|| round.timed(ROUND_PACKETS)) / f64::from(ROUND_PACKETS);
        times.push((name, ns));
    }
    times
}

/// Name, and nanoseconds per packet, of the switch's decision, for flows with and without a record.
pub fn decisions() -> Vec<(String, f64)> {
    let kinds = [
        ("remote", Case::Remote, 0, false),
        ("remote_acl_10", Case::Remote, 10, false),
        ("remote_groups", Case::Remote, 0, true),
        ("local_groups", Case::Local, 0, true),
        ("routed_groups_acl_1000", Case::Routed, 1000, true),
        ("incoming_groups_acl_1000", Case::In, 1000, true),
    ];
    let each = kinds.into_iter().flat_map(|kind| FLOWS.map(|flows| (kind, flows)));
    let both = each.flat_map(|(kind, flows)| [(kind, flows, false), (kind, flows, true)]);
    let timed = both.map(|((name, case, acl, groups), flows, remembered)| {
        let mut decisions = Decisions::new(Kind { case, acl, groups, remembered }, flows);
        let ns = median(|| {
            let start = Instant::now();
            decisions.run(DECISIONS);
            start.elapsed()
        });
        let how = if remembered { "remembered" } else { "asked" };
        (format!("decide.{name}.{flows}_flows.{how}"), ns / f64::from(DECISIONS))
    });
    timed.collect()
}

fn stage(prepare: impl Fn() -> Prepared, step: impl Fn(&mut Prepared)) -> f64 {
    let ns = median(|| {
        let mut prepared = prepare();
        let start = Instant::now();
        step(&mut prepared);
        start.elapsed()
    });
    ns / f64::from(PACKETS)
}

/// Median, ns.
fn median(mut measure: impl FnMut() -> Duration) -> f64 {
    let mut all: Vec<Duration> = (0..REPETITIONS).map(|_| measure()).collect();
    all.sort_unstable();
    all[REPETITIONS / 2].as_nanos() as f64
}
