//! `path-failure`: one of several paths loses packets, then all of them (NSDI'26 paper, figures 16 and F10).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::inject;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::options::{Injector, Mode};
use crate::plot::{self, Panel};
use crate::programs::iperf3;
use crate::programs::key_value_client::{self, BIN, Load};
use crate::programs::key_value_protocol::Protocol;
use crate::programs::redis_server::{PORT, RedisServer};
use crate::progress::Progress;
use crate::report::{Table, number};
use crate::results::{from_values, to_values};
use crate::standstill::{self, Standstill};
use crate::stats::{Spread, cell, mean};

/// Time before the first phase, in which loads start and the busiest path is determined, s.
const SETTLE_S: f64 = 1.0;
/// Rates of the flow and of all clients together: less than half of a processor's capacity, so that a dip shows the
/// network and not the processor, whose speed may change by half within seconds on a shared host. In the paper, too,
/// the links are the bottleneck.
const FLOW_GBIT_PER_S: f64 = 1.5;
const REQUESTS_PER_S: f64 = 15_000.0;
/// Timeout of a request: far longer than a user of Redis would wait.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(1);
/// The phases and the loss on the failing path, percent. The path heals before it fails completely, so that it
/// carries traffic when it fails.
const PHASES: [(&str, f64); 5] =
    [("before", 0.0), ("degraded", 10.0), ("healed", 0.0), ("failed", 100.0), ("restored", 0.0)];
/// A standstill of the machine also affects bins within this distance: clocks of programs start at slightly different
/// times, and the backlog takes time to process.
const STANDSTILL_SLACK: Duration = Duration::from_millis(20);
/// The share of the failure's bins that must be free of standstills for a judgement, over all attempts, relative to
/// the bins of one attempt. In addition its first bin must be free in at least one attempt.
const JUDGEABLE: f64 = 0.7;
/// Maximum number of attempts.
const ATTEMPTS: u32 = 5;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct PathFailure;

/// The load during the failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// One TCP flow (figure 16).
    Flow,
    /// Redis requests (figure F10).
    Requests,
}

/// The result of one run through all phases.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// Always `wire`.
    pub injector: Injector,
    /// The load.
    pub workload: Workload,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// The failing path: the one that carried most after the load had started.
    pub failed_path: u8,
    /// Length of a bin, ms.
    pub bin_ms: u32,
    /// Goodput of each bin, Gbit/s; for the flow.
    pub bins_gbit_per_s: Vec<f64>,
    /// Requests answered in each bin, per second; for requests.
    pub bins_rps: Vec<f64>,
    /// Standstill of the machine in each bin, or next to it, because a hypervisor took a processor away, ms.
    pub bins_standstill_ms: Vec<f64>,
    /// Summary of each phase.
    pub phases: Vec<Phase>,
    /// Share of requests that were answered, over all phases, percent; null for a flow.
    pub request_success_percent: Option<f64>,
    /// The longest request, over all phases, ms; null for a flow.
    pub longest_stall_ms: Option<f64>,
    /// Answers with a wrong value; null for a flow.
    pub wrong_answers: Option<u64>,
    /// Number of the attempt, from 1. Attempts are repeated if the machine stood still too much in the earlier ones.
    /// All of them count.
    pub attempt: u32,
}

/// One phase of a run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Phase {
    /// Its name.
    pub name: String,
    /// Loss on the failing path, in both directions, percent.
    pub loss_percent: f64,
    /// Start, s since the first bin.
    pub start_s: f64,
    /// End, s since the first bin.
    pub end_s: f64,
    /// Mean of the bins, Gbit/s or requests per second.
    pub mean: f64,
    /// The lowest bin relative to the mean of the phase `before`, percent.
    pub lowest_bin_percent_of_before: f64,
    /// Bins without a standstill of the machine.
    pub undisturbed_bins: usize,
    /// Whether the first bin is one of them.
    pub begins_undisturbed: bool,
    /// The lowest bin among those without a standstill, percent; null if there are none.
    pub lowest_undisturbed_bin_percent_of_before: Option<f64>,
    /// Share of requests that were answered, percent; null for a flow.
    pub request_success_percent: Option<f64>,
    /// The longest request, ms; null for a flow.
    pub longest_stall_ms: Option<f64>,
    /// The longest request in bins without a standstill, ms; null for a flow.
    pub longest_undisturbed_stall_ms: Option<f64>,
}

impl Experiment for PathFailure {
    fn name(&self) -> &'static str {
        "path-failure"
    }

    fn summary(&self) -> &'static str {
        "A TCP flow and Redis while one path loses 10 %, then 100 % (NSDI'26 figures 16 and F10)"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::TRANSPORTS.to_vec()
    }

    fn default_modes(&self, quick: bool) -> Vec<Mode> {
        if quick { Mode::USUAL.to_vec() } else { self.modes() }
    }

    fn keeps_awake(&self) -> bool {
        true
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let repetitions = lab.repetitions(3);
        let mut progress = Progress::new(lab.options.modes.len() as u64 * 2 * u64::from(repetitions));
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            for &mode in &lab.options.modes {
                let label = format!("{}-{repetition}", mode.name());
                progress.begin(&format!("building the network for {}", mode.name()));
                let mut network = lab.network_with_spread_flows(mode, &label)?;
                for workload in [Workload::Flow, Workload::Requests] {
                    progress.begin(&format!("{} {workload:?}", mode.name()));
                    let passages = judgeable_passages(lab, &network, workload, repetition, &label)?;
                    progress.end(&passages.iter().map(line).collect::<Vec<_>>().join("\n"));
                    rows.extend(passages);
                    network.check()?;
                }
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = String::from(
            "One underlay link, the one that carried most, loses packets in both directions. Medians, with the minimum \
             and maximum of the repetitions in brackets. The lowest bin and the longest stall are the worst of all \
             repetitions, among bins without a standstill of the machine (in brackets: among all bins). A request \
             without an answer after 1 s has failed.\n",
        );
        for workload in [Workload::Flow, Workload::Requests] {
            let (title, unit) = match workload {
                Workload::Flow => ("One TCP flow", "Gbit/s"),
                Workload::Requests => ("Redis requests", "rps"),
            };
            let mut table =
                Table::new(&["phase", "mode", "loss", unit, "lowest 100 ms bin", "success", "longest stall ms"]);
            for (name, loss_percent) in PHASES {
                for mode in Mode::ALL {
                    let phases = phases(&rows, mode, workload, name);
                    if phases.is_empty() {
                        continue;
                    }
                    let of = |field: fn(&Phase) -> f64| phases.iter().map(|phase| field(phase)).collect::<Vec<_>>();
                    let success = of(|phase| phase.request_success_percent.unwrap_or(f64::NAN));
                    table.row(vec![
                        name.to_owned(),
                        mode.name().to_owned(),
                        format!("{loss_percent} %"),
                        cell(Spread::of(phases.iter().map(|phase| phase.mean))),
                        format!(
                            "{:.0} % ({:.0} %)",
                            lowest(&of(|phase| phase.lowest_undisturbed_bin_percent_of_before.unwrap_or(f64::NAN))),
                            lowest(&of(|phase| phase.lowest_bin_percent_of_before))
                        ),
                        if workload == Workload::Flow { "-".to_owned() } else { format!("{:.3} %", lowest(&success)) },
                        if workload == Workload::Flow {
                            "-".to_owned()
                        } else {
                            format!(
                                "{} ({})",
                                number(highest(&of(|phase| phase.longest_undisturbed_stall_ms.unwrap_or(f64::NAN)))),
                                number(highest(&of(|phase| phase.longest_stall_ms.unwrap_or(f64::NAN))))
                            )
                        },
                    ]);
                }
            }
            text += &format!("\n### {title}\n\n{}", table.render());
        }
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut panels = Vec::new();
        for (workload, y_title) in
            [(Workload::Flow, "throughput [Gbit/s]"), (Workload::Requests, "requests per second")]
        {
            // Only one repetition: averaging several would blur details within a bin.
            let first: Vec<&Row> = rows.iter().filter(|r| r.workload == workload && r.repetition == 0).collect();
            let marks = first.first().map_or(Vec::new(), |row| {
                let text = |phase: &Phase| format!("{} ({} %)", phase.name, phase.loss_percent);
                row.phases.iter().map(|phase| (phase.start_s, text(phase))).collect()
            });
            panels.push(Panel {
                title: match workload {
                    Workload::Flow => "one TCP flow, 100 ms bins".to_owned(),
                    Workload::Requests => "Redis, 100 ms bins".to_owned(),
                },
                x_title: "time [s]".to_owned(),
                y_title: y_title.to_owned(),
                lines: first
                    .iter()
                    .map(|row| {
                        let bins = if workload == Workload::Flow { &row.bins_gbit_per_s } else { &row.bins_rps };
                        let bin_s = f64::from(row.bin_ms) / 1000.0;
                        (row.mode.into(), bins.iter().enumerate().map(|(i, y)| (i as f64 * bin_s, *y)).collect())
                    })
                    .collect(),
                marks,
                ..Panel::default()
            });
        }
        Ok(vec![plot::draw(&directory.join("throughput.svg"), &panels, 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let lowest_bin = |workload| {
            let phases = phases(&rows, Mode::Bifrost, workload, "failed");
            // No bin may be lower, in any attempt. Disturbed bins are ignored; if too many are disturbed, the bar
            // fails.
            let bins = phases.iter().filter_map(|phase| phase.lowest_undisturbed_bin_percent_of_before);
            bins.reduce(f64::min).filter(|_| can_be_judged(&of(&rows, Mode::Bifrost, workload)))
        };
        let stalls: Vec<f64> = rows
            .iter()
            .filter(|row| row.mode == Mode::Bifrost)
            .flat_map(|row| &row.phases)
            .filter_map(|phase| phase.longest_undisturbed_stall_ms)
            .collect();
        let requests = of(&rows, Mode::Bifrost, Workload::Requests);
        let over = |field: fn(&Row) -> Option<f64>, pick: fn(&[f64]) -> f64| {
            let values: Vec<f64> = requests.iter().filter_map(|row| field(row)).collect();
            if values.is_empty() { None } else { Some(pick(&values)) }
        };
        let bin = "the lowest 100 ms bin without a standstill of the machine, over the mean before";
        Ok(vec![
            Bar::new(
                format!("one path fails, TCP flow over BIFROST: {bin}"),
                lowest_bin(Workload::Flow),
                Sense::AtLeast,
                80.0,
                "%",
            ),
            Bar::new(
                format!("one path fails, Redis over BIFROST: {bin}"),
                lowest_bin(Workload::Requests),
                Sense::AtLeast,
                80.0,
                "%",
            ),
            Bar::new(
                "one path fails, Redis over BIFROST: requests answered",
                over(|row| row.request_success_percent, lowest),
                Sense::AtLeast,
                100.0,
                "%",
            )
            .exact(),
            Bar::new(
                "one path fails, Redis over BIFROST: the longest stall of any request, standstills of the machine \
                 aside",
                stalls.into_iter().reduce(f64::max),
                Sense::Below,
                20.0,
                "ms",
            ),
            Bar::new(
                "one path fails, Redis over BIFROST: wrong answers",
                over(|row| row.wrong_answers.map(|n| n as f64), highest),
                Sense::AtMost,
                0.0,
                "",
            )
            .exact(),
        ])
    }
}

/// A running load.
enum Running {
    Flow(iperf3::Running),
    Requests(std::thread::JoinHandle<Result<key_value_client::Report>>, Arc<AtomicBool>, RedisServer),
}

/// Runs [`passage`]; over BIFROST, which is judged, again while the machine stood still in too much of the failure.
/// Only the observed standstills decide, and every attempt counts.
fn judgeable_passages(
    lab: &Lab,
    network: &Network,
    workload: Workload,
    repetition: u32,
    label: &str,
) -> Result<Vec<Row>> {
    let attempts = if network.overlay.mode == Mode::Bifrost { ATTEMPTS } else { 1 };
    let mut rows = Vec::new();
    for attempt in 1..=attempts {
        rows.push(Row { attempt, ..passage(lab, network, workload, repetition, label)? });
        if can_be_judged(&rows.iter().collect::<Vec<_>>()) {
            break;
        }
    }
    Ok(rows)
}

/// Whether enough of the failure, and its first bin in some attempt, was free of standstills; with several
/// repetitions, on average.
fn can_be_judged(rows: &[&Row]) -> bool {
    let repetitions = rows.iter().filter(|row| row.attempt == 1).count();
    let failures = || rows.iter().flat_map(|row| &row.phases).filter(|phase| phase.name == "failed");
    let bins = failures().map(|phase| (phase.end_s - phase.start_s) / BIN.as_secs_f64()).fold(0.0, f64::max);
    let undisturbed: usize = failures().map(|phase| phase.undisturbed_bins).sum();
    failures().any(|phase| phase.begins_undisturbed) && undisturbed as f64 >= JUDGEABLE * bins * repetitions as f64
}

/// Runs one load through all phases.
fn passage(lab: &Lab, network: &Network, workload: Workload, repetition: u32, label: &str) -> Result<Row> {
    let phase_s = lab.seconds(2.5, 2.0);
    let total_s = SETTLE_S + phase_s * PHASES.len() as f64;
    let topology = &network.topology;
    let (client, server) = (&topology.hosts[0].guest, &topology.hosts[1].guest);
    let logs = lab.logs(label);
    inject::wire_loss(topology, &[], 0.0)?;
    let watch = standstill::Watch::start()?;
    let running = match workload {
        Workload::Flow => {
            // Longer than the phases, because the flow's last bin is incomplete.
            let seconds = total_s.ceil() + 1.0;
            let load = iperf3::Load { gbit_per_s: Some(FLOW_GBIT_PER_S), ..iperf3::Load::one_flow(seconds) };
            Running::Flow(iperf3::Running::start((client, server), load, &logs, "iperf3")?)
        }
        Workload::Requests => {
            let redis = RedisServer::start(server, &logs)?;
            let stop = Arc::new(AtomicBool::new(false));
            let load = Load {
                server: (server.address, PORT).into(),
                transport: client.namespace.stream_protocol(),
                protocol: Protocol::Redis,
                clients: lab.options.clients,
                keep_alive: true,
                duration: Duration::from_secs_f64(total_s),
                timeout: REQUEST_TIMEOUT,
                patience: Duration::ZERO,
                warm_up: Duration::ZERO,
                op: None,
                requests_per_s: Some(REQUESTS_PER_S),
                record: false,
                stop: Arc::clone(&stop),
            };
            Running::Requests(client.namespace.spawn(move || key_value_client::run(&load))?, stop, redis)
        }
    };
    let began = Instant::now();
    let failed_path = match drive(network, began, phase_s) {
        Ok(path) => path,
        Err(error) => {
            if let Running::Requests(thread, stop, _) = running {
                stop.store(true, std::sync::atomic::Ordering::Relaxed);
                let _ = thread.join();
            }
            return Err(error);
        }
    };
    let mut row = Row {
        mode: network.overlay.mode,
        injector: Injector::Wire,
        workload,
        repetition,
        failed_path,
        bin_ms: u32::try_from(BIN.as_millis()).unwrap_or(u32::MAX),
        bins_gbit_per_s: Vec::new(),
        bins_rps: Vec::new(),
        bins_standstill_ms: Vec::new(),
        phases: Vec::new(),
        request_success_percent: None,
        longest_stall_ms: None,
        wrong_answers: None,
        attempt: 1,
    };
    let seen = watch.finish()?;
    let standstills = |count: usize, start: Instant| by_bin(&seen, start, count);
    match running {
        Running::Flow(flow) => {
            row.bins_gbit_per_s = flow.finish()?.bins_gbit_per_s;
            // A stalled flow reports no bins at its end.
            row.bins_gbit_per_s.resize(((total_s / BIN.as_secs_f64()).round()) as usize, 0.0);
            row.bins_standstill_ms = standstills(row.bins_gbit_per_s.len(), began);
            row.phases = summarize(&row.bins_gbit_per_s, &[], &row.bins_standstill_ms, phase_s);
        }
        Running::Requests(thread, _, redis) => {
            let mut report = thread.join().map_err(|_| anyhow!("the Redis client panicked"))??;
            // The load may extend into a bin after the last phase, which is incomplete.
            report.bins.resize(phase_bins(PHASES.len() - 1, phase_s).1, key_value_client::Bin::default());
            drop(redis);
            row.bins_rps = report.bins.iter().map(|bin| bin.answered as f64 / BIN.as_secs_f64()).collect();
            row.bins_standstill_ms = standstills(row.bins_rps.len(), report.started);
            row.phases = summarize(&row.bins_rps, &report.bins, &row.bins_standstill_ms, phase_s);
            let measured = &report.bins[phase_bins(0, phase_s).0.min(report.bins.len())..];
            (row.request_success_percent, row.longest_stall_ms) = outcome(measured);
            row.wrong_answers = Some(report.wrong_answers);
        }
    }
    Ok(row)
}

/// Standstills of the machine, by bins of a load that began at `start`, ms.
fn by_bin(seen: &[Standstill], start: Instant, count: usize) -> Vec<f64> {
    standstill::by_bin(seen, start, BIN, count, STANDSTILL_SLACK)
}

/// Determines the busiest path, and sets its loss at the start of every phase. Returns the path.
fn drive(network: &Network, began: Instant, phase_s: f64) -> Result<u8> {
    let at = |seconds: f64| began + Duration::from_secs_f64(seconds);
    let host = &network.topology.hosts[0];
    let first = host.carried(network.topology.plan.paths)?;
    interrupt::sleep_until(at(SETTLE_S))?;
    let second = host.carried(network.topology.plan.paths)?;
    let carried =
        first.iter().zip(&second).map(|(a, b)| b.sent.saturating_sub(a.sent) + b.received.saturating_sub(a.received));
    let busiest = carried.enumerate().max_by_key(|(_, bytes)| *bytes).map_or(0, |(path, _)| path);
    let path = u8::try_from(busiest).unwrap_or(0);
    for (index, (_, loss_percent)) in PHASES.iter().enumerate() {
        interrupt::sleep_until(at(SETTLE_S + phase_s * index as f64))?;
        inject::wire_loss(&network.topology, &[path], *loss_percent)?;
    }
    interrupt::sleep_until(at(SETTLE_S + phase_s * PHASES.len() as f64))?;
    Ok(path)
}

/// First bin of a phase, and the one after its last. The bin in which a phase starts belongs to it.
fn phase_bins(index: usize, phase_s: f64) -> (usize, usize) {
    let bin = |seconds: f64| (seconds / BIN.as_secs_f64()).round() as usize;
    (bin(SETTLE_S + phase_s * index as f64), bin(SETTLE_S + phase_s * (index + 1) as f64))
}

fn summarize(bins: &[f64], outcomes: &[key_value_client::Bin], standstills_ms: &[f64], phase_s: f64) -> Vec<Phase> {
    let undisturbed = |bin: usize| standstills_ms.get(bin).is_none_or(|ms| *ms == 0.0);
    let part = |index: usize| {
        let (start, end) = phase_bins(index, phase_s);
        &bins[start.min(bins.len())..end.min(bins.len())]
    };
    let before = mean(part(0));
    let phase = |(index, (name, loss_percent)): (usize, &(&str, f64))| {
        let (start, end) = phase_bins(index, phase_s);
        let (request_success_percent, longest_stall_ms) =
            outcome(&outcomes[start.min(outcomes.len())..end.min(outcomes.len())]);
        let judged: Vec<usize> = (start..end.min(bins.len())).filter(|bin| undisturbed(*bin)).collect();
        let judged_bins: Vec<f64> = judged.iter().map(|bin| bins[*bin]).collect();
        let judged_outcomes: Vec<_> = judged.iter().filter_map(|bin| outcomes.get(*bin).copied()).collect();
        Phase {
            name: (*name).to_owned(),
            loss_percent: *loss_percent,
            start_s: start as f64 * BIN.as_secs_f64(),
            end_s: end as f64 * BIN.as_secs_f64(),
            mean: zero_if_nan(mean(part(index))),
            lowest_bin_percent_of_before: zero_if_nan(lowest(part(index)) / before * 100.0),
            undisturbed_bins: judged.len(),
            begins_undisturbed: judged.first() == Some(&start),
            lowest_undisturbed_bin_percent_of_before: (!judged.is_empty())
                .then(|| zero_if_nan(lowest(&judged_bins) / before * 100.0)),
            request_success_percent,
            longest_stall_ms,
            longest_undisturbed_stall_ms: outcome(&judged_outcomes).1,
        }
    };
    PHASES.iter().enumerate().map(phase).collect()
}

/// Success rate in percent and the longest stall in ms over some bins of requests.
fn outcome(bins: &[key_value_client::Bin]) -> (Option<f64>, Option<f64>) {
    if bins.is_empty() {
        return (None, None);
    }
    let answered: u64 = bins.iter().map(|bin| bin.answered).sum();
    let failed: u64 = bins.iter().map(|bin| bin.failed).sum();
    let stall_us = bins.iter().map(|bin| bin.longest_stall_us).max().unwrap_or(0);
    let success = if answered + failed == 0 { 0.0 } else { answered as f64 / (answered + failed) as f64 * 100.0 };
    (Some(success), Some(stall_us as f64 / 1000.0))
}

fn of(rows: &[Row], mode: Mode, workload: Workload) -> Vec<&Row> {
    rows.iter().filter(|row| row.mode == mode && row.workload == workload).collect()
}

fn phases<'a>(rows: &'a [Row], mode: Mode, workload: Workload, name: &str) -> Vec<&'a Phase> {
    of(rows, mode, workload).into_iter().flat_map(|row| &row.phases).filter(|phase| phase.name == name).collect()
}

fn lowest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NAN, f64::min)
}

fn highest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NAN, f64::max)
}

/// JSON has no NaN; a phase without bins carried nothing.
fn zero_if_nan(value: f64) -> f64 {
    if value.is_finite() { value } else { 0.0 }
}

fn line(row: &Row) -> String {
    let failed = row.phases.iter().find(|phase| phase.name == "failed");
    let disturbed = row.bins_standstill_ms.iter().filter(|ms| **ms > 0.0).count();
    let failed = failed.and_then(|phase| phase.lowest_undisturbed_bin_percent_of_before).unwrap_or(f64::NAN);
    let before = row.phases.first().map_or(f64::NAN, |phase| phase.mean);
    let again = if row.attempt > 1 { " again" } else { "" };
    let mut text = format!("{:<12} {:?}{again}: path {}, ", row.mode.name(), row.workload, row.failed_path);
    text += &match row.workload {
        Workload::Flow => format!("{before:.2} Gbit/s before"),
        Workload::Requests => format!("{before:.0} rps before"),
    };
    text += &format!(", lowest bin of the failure {failed:.0} %");
    if let (Some(success), Some(stall)) = (row.request_success_percent, row.longest_stall_ms) {
        text += &format!(", {success:.3} % answered, longest stall {stall:.1} ms");
    }
    if disturbed > 0 {
        text += &format!(" (standstills of the machine in or next to {disturbed} bins)");
    }
    text
}

#[cfg(test)]
mod tests;
