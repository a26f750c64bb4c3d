//! Wall times of what the instruction counts count: medians, of this machine and this moment.

use std::time::{Duration, Instant};

use bifrost_rte::{Ordering, US};

use crate::round::{Load, Round};
use crate::stages::{PACKETS, Prepared};

/// Packets of a timed round.
const ROUND_PACKETS: u32 = 8192;
const REPETITIONS: usize = 21;

/// Name, and nanoseconds a packet.
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
