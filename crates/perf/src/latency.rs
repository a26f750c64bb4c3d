//! Latency: calls, each a request and a response of the same size.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bifrost_endpoint::{Endpoint, Worker};
use hdrhistogram::Histogram;

use crate::plan::{Plan, Progress};
use crate::report::{Engine, Latency, Report};

/// Calls before the measurement, to allocate memory and measure the round trip.
const WARM_UP: u64 = 100;

pub(crate) fn run(worker: &Worker, endpoint: &Endpoint, plan: &Plan) -> Result<Report> {
    for _ in 0..WARM_UP {
        endpoint.call(endpoint.buffer(plan.size), Duration::from_secs(10))?;
    }
    let mut histogram = Histogram::<u64>::new_with_bounds(100, 60_000_000_000, 3)?;
    let mut progress = Progress::begin(plan);
    let mut open: VecDeque<(u32, Instant)> = VecDeque::new();
    let (mut done, mut begun) = (0u64, 0u64);
    while progress.continues(done) {
        progress.switch(endpoint)?;
        while open.len() < plan.depth && begun < plan.iters {
            let call = endpoint.begin_call(endpoint.buffer(plan.size))?;
            open.push_back((call, Instant::now()));
            begun += 1;
        }
        let mut any = false;
        for _ in 0..open.len() {
            let Some((call, begin)) = open.pop_front() else { break };
            match endpoint.try_response(call)? {
                Some(response) => {
                    ensure!(response.len() == plan.size, "a response of {} bytes", response.len());
                    histogram.saturating_record(begin.elapsed().as_nanos() as u64);
                    done += 1;
                    any = true;
                }
                None => open.push_back((call, begin)),
            }
        }
        if !any {
            worker.wait(Duration::from_millis(10))?;
        }
    }
    let seconds = progress.elapsed();
    drop(progress);
    Ok(Report {
        test: "latency",
        transport: worker.provider(),
        size_bytes: plan.size,
        messages: done,
        seconds,
        gbit_per_s: done as f64 * plan.size as f64 * 8.0 / seconds / 1e9,
        messages_per_s: done as f64 / seconds,
        latency_us: Some(Latency::of(&histogram)),
        engine: Engine::of(worker, endpoint),
    })
}
