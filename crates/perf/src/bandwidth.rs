//! Bandwidth: messages in one direction.

use std::time::Duration;

use anyhow::Result;
use bifrost_endpoint::{Endpoint, Worker};

use crate::plan::{Plan, Progress};
use crate::report::{Engine, Report};

pub(crate) fn run(worker: &Worker, endpoint: &Endpoint, plan: &Plan) -> Result<Report> {
    let mut progress = Progress::begin(plan);
    let mut sent = 0u64;
    while progress.continues(sent) {
        progress.switch(endpoint)?;
        while endpoint.open_messages() < plan.depth && sent < plan.iters {
            endpoint.send(endpoint.buffer(plan.size))?;
            sent += 1;
        }
        endpoint.try_recv()?;
        if endpoint.open_messages() >= plan.depth {
            worker.wait(Duration::from_millis(10))?;
        }
    }
    // Count only messages that have arrived.
    endpoint.flush(Duration::from_secs(30))?;
    let seconds = progress.elapsed();
    drop(progress);
    let bits = sent as f64 * plan.size as f64 * 8.0;
    Ok(Report {
        test: "bandwidth",
        transport: worker.provider(),
        size_bytes: plan.size,
        messages: sent,
        seconds,
        gbit_per_s: bits / seconds / 1e9,
        messages_per_s: sent as f64 / seconds,
        latency_us: None,
        engine: Engine::of(worker, endpoint),
    })
}
