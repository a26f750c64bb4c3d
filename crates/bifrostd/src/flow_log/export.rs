//! Exports the flow records of a running daemon.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;

use bifrost_control::api::VpcFlowLogStatus;
use bifrost_control::config::VpcFlowLog;
use bifrost_port::clock::monotonic_ns;
use bifrost_port::panics;

use super::configured::{HOST, ports, wanted};
use super::{AFTER_PANIC, PARTS, Records, TICK};
use crate::daemon::{Daemon, State};

/// Exports records until the daemon ends. Restarts after a panic.
pub(crate) fn run(daemon: &Daemon) {
    while let Err(panic) = panics::contain(|| run_loop(daemon)) {
        tracing::error!(%panic, "panic while exporting flow logs; retrying");
        thread::sleep(AFTER_PANIC);
    }
}

fn run_loop(daemon: &Daemon) {
    loop {
        thread::sleep(TICK);
        let state = daemon.state();
        if state.workers.is_empty() {
            return;
        }
        let config = Arc::clone(&state.config);
        let exports = Arc::clone(&state.flow_log);
        let mut writing = exports.writing();
        if wanted(&config).next().is_none() && writing.outputs.is_empty() {
            continue;
        }
        let now_ns = monotonic_ns();
        let take = move |worker: &mut bifrost_datapath::Worker<_>| {
            let switch = worker.core_mut().switch_mut();
            let mut records = Records::default();
            switch.take_flow_records(PARTS, now_ns, &mut records.flows);
            let are_rules_over = switch.take_rule_records(PARTS, now_ns, &mut records.rules);
            let left: Vec<Arc<str>> = switch.flow_logs().map(Arc::clone).collect();
            (records, left, are_rules_over)
        };
        let taken = match state.on_all(take) {
            Ok(taken) => taken,
            Err(error) => {
                tracing::error!(error = format!("{error:#}"), "cannot fetch flow records from a worker");
                continue;
            }
        };
        writing.name_ports(&state.config, &state.names);
        // Release the state's lock before writing to the disk or the network.
        drop(state);
        let (mut records, mut left, mut are_rules_over) = (Records::default(), BTreeSet::new(), true);
        for (of_worker, logs, is_over) in taken {
            records.add(of_worker);
            left.extend(logs);
            are_rules_over &= is_over;
        }
        writing.open(&config);
        let is_wanted = |name: &str| wanted(&config).any(|(log, _)| log == name);
        let is_left = |name: &str| left.contains(name) || (name == HOST && !are_rules_over);
        writing.export(&exports, records, now_ns);
        writing.outputs.retain(|name, _| is_wanted(name) || is_left(name));
        exports.forget(|name| !is_wanted(name) && !is_left(name));
    }
}

/// One of the logs beside the host's.
pub(crate) fn status(state: &State, log: &VpcFlowLog) -> VpcFlowLogStatus {
    let done = state.flow_log.counters_of(&log.name);
    VpcFlowLogStatus {
        name: log.name.clone(),
        ports: ports(&state.config, &log.log).map(str::to_owned).collect(),
        json: log.log.json.as_ref().map(|path| path.display().to_string()),
        collector: log.log.collector,
        one_in: log.log.one_in,
        json_records: done.json_records,
        json_lost_records: done.json_lost_records,
        ipfix_records: done.ipfix_records,
        ipfix_lost_records: done.ipfix_lost_records,
    }
}
