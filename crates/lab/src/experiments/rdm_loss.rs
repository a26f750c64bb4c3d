//! `rdm-loss`: messages over RoCEv2 in software, compared with TCP, between two hosts with packet loss: bulk
//! transfer, and calls of 32 KiB.

use std::fmt;
use std::net::SocketAddrV4;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
pub use crate::experiments::rdm_hosts::Transport;
use crate::experiments::rdm_hosts::{self, Bench, MTU, OFTEN, finish, number};
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::process::cpu_seconds_of_group;
use crate::programs::iperf3::{self, Load};
use crate::report::Table;
use crate::results::from_values;
use crate::stats::{Spread, cell, distinct_values, paired_ratio};
use crate::{interrupt, turns};

/// Loss of one packet in 1024, percent.
const RARE: f64 = 100.0 / 1024.0;
/// Bytes of a bulk message, and of a request and of its response.
const MESSAGE: u32 = 1 << 20;
const CALL: u32 = 32 * 1024;
/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct RdmLoss;

/// The workload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Workload {
    /// One flow, or messages of 1 MiB, 16 of them outstanding, in one direction.
    Bulk,
    /// Sequential calls: a request of 32 KiB, a response of 32 KiB.
    Calls,
}

#[derive(Debug, Clone, Copy)]
struct Point {
    loss_percent: f64,
    workload: Workload,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let workload = if self.workload == Workload::Bulk { "bulk" } else { "calls" };
        write!(f, "{workload}, {:.3} % lost", self.loss_percent)
    }
}

/// The result of one workload over one transport.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The transport.
    pub mode: Transport,
    /// Packet loss in each direction, percent.
    pub loss_percent: f64,
    /// The workload.
    pub workload: Workload,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration, s.
    pub duration_s: f64,
    /// Payload received, both directions of calls together, Gbit/s.
    pub gbit_per_s: f64,
    /// Packets lost.
    pub dropped_packets: u64,
    /// Processor time of the sender per gigabyte, s; only for bulk.
    pub sender_cpu_s_per_gb: Option<f64>,
    /// Processor time of the receiver per gigabyte, s; only for bulk.
    pub receiver_cpu_s_per_gb: Option<f64>,
    /// Number of calls.
    pub calls: Option<u64>,
    /// Median time of a call, ms.
    pub latency_ms_p50: Option<f64>,
    /// 99th percentile, ms.
    pub latency_ms_p99: Option<f64>,
    /// 99.9th percentile, ms.
    pub latency_ms_p99_9: Option<f64>,
    /// Maximum, ms.
    pub latency_ms_max: Option<f64>,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let point = Point { loss_percent: self.loss_percent, workload: self.workload };
        write!(f, "{}, {point}: {:.2} Gbit/s", self.mode, self.gbit_per_s)?;
        match self.latency_ms_p99_9 {
            Some(ms) => write!(f, ", P99.9 {ms:.3} ms"),
            None => Ok(()),
        }
    }
}

impl Experiment for RdmLoss {
    fn name(&self) -> &'static str {
        "rdm-loss"
    }

    fn summary(&self) -> &'static str {
        "Messages over RoCEv2 in software with packet loss, compared with TCP (cubic and BBR)"
    }

    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let losses = lab.losses(&[0.0, RARE, OFTEN], &[0.0, OFTEN]);
        let points: Vec<Point> = [Workload::Bulk, Workload::Calls]
            .into_iter()
            .flat_map(|workload| losses.iter().map(move |loss_percent| Point { loss_percent: *loss_percent, workload }))
            .collect();
        turns::measure(
            lab.repetitions(3),
            &Transport::ALL,
            &points,
            |transport, repetition| begin(lab, *transport, repetition),
            |transport, bench, point, repetition| measure(lab, bench, *transport, *point, repetition),
        )
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut bulk =
            Table::new(&["lost, %", "over", "Gbit/s", "of its own without loss, %", "sender, s/GB", "receiver, s/GB"]);
        let mut calls = Table::new(&["lost, %", "over", "calls", "P50, ms", "P99, ms", "P99.9, ms", "max, ms"]);
        for loss in distinct_values(rows.iter().map(|row| row.loss_percent)) {
            for mode in Transport::ALL {
                let of = |workload, field: fn(&Row) -> Option<f64>| spread(&rows, mode, loss, workload, field);
                bulk.row(vec![
                    format!("{loss:.3}"),
                    mode.to_string(),
                    cell(of(Workload::Bulk, |r| Some(r.gbit_per_s))),
                    kept(&rows, mode, loss).map_or("-".to_owned(), |kept| format!("{kept:.1}")),
                    cell(of(Workload::Bulk, |r| r.sender_cpu_s_per_gb)),
                    cell(of(Workload::Bulk, |r| r.receiver_cpu_s_per_gb)),
                ]);
                calls.row(vec![
                    format!("{loss:.3}"),
                    mode.to_string(),
                    cell(of(Workload::Calls, |r| r.calls.map(|calls| calls as f64))),
                    cell(of(Workload::Calls, |r| r.latency_ms_p50)),
                    cell(of(Workload::Calls, |r| r.latency_ms_p99)),
                    cell(of(Workload::Calls, |r| r.latency_ms_p99_9)),
                    cell(of(Workload::Calls, |r| r.latency_ms_max)),
                ]);
            }
        }
        Ok(format!(
            "One connection between two hosts on a link with an MTU of {MTU} and without offloads; each host has a \
             processor. nftables drops packets at random in both directions. Messages are sent by `bifrost-perf`, \
             RoCEv2 over UDP. TCP's bulk traffic is sent by iperf3, its calls by `bifrost-perf`. Medians, with the \
             minimum and maximum of the repetitions in brackets.\n\n\
             ## Bulk\n\n{}\n## Calls of 32 KiB, answered with 32 KiB\n\n{}",
            bulk.render(),
            calls.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let losses = distinct_values(rows.iter().map(|row| row.loss_percent));
        let labels: Vec<String> = losses.iter().map(|loss| format!("{loss:.3}")).collect();
        let series = [
            (Series::on("messages"), Transport::Messages),
            (Series::off("TCP, cubic"), Transport::Cubic),
            (Series::other("TCP, BBR"), Transport::Bbr),
        ];
        let panel = |title, y: (&str, bool), workload, field: fn(&Row) -> Option<f64>| {
            Panel::over(title, ("packets lost [%]", &labels[..]), y, &series, |mode, label| {
                let at = labels.iter().position(|known| known == label)?;
                spread(&rows, mode, *losses.get(at)?, workload, field)
            })
        };
        let tail = panel("calls of 32 KiB", ("P99.9 [ms]", true), Workload::Calls, |r| r.latency_ms_p99_9);
        let bulk = panel("bulk", ("Gbit/s", false), Workload::Bulk, |r| Some(r.gbit_per_s));
        Ok(vec![plot::draw(&directory.join("loss.svg"), &[tail, bulk], 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let tail = spread(&rows, Transport::Messages, OFTEN, Workload::Calls, |r| r.latency_ms_p99_9);
        // Compared with the better of the two congestion controls of TCP.
        let tails = [Transport::Cubic, Transport::Bbr].map(|tcp| {
            let of = |mode| move |r: &Row| is(r, mode, OFTEN, Workload::Calls);
            let both = (of(Transport::Messages), of(tcp));
            paired_ratio(&rows, |r| r.repetition, both, |r| r.latency_ms_p99_9.unwrap_or(f64::NAN))
        });
        let rates = [Transport::Cubic, Transport::Bbr].map(|tcp| {
            let of = |mode| move |r: &Row| is(r, mode, 0.0, Workload::Bulk);
            paired_ratio(&rows, |r| r.repetition, (of(Transport::Messages), of(tcp)), |r| r.gbit_per_s)
        });
        let [Some(cubic_tail), Some(bbr_tail)] = tails else { return Ok(unknown()) };
        let [Some(cubic_rate), Some(bbr_rate)] = rates else { return Ok(unknown()) };
        Ok(bars([
            kept(&rows, Transport::Messages, OFTEN),
            tail.map(|tail| tail.median),
            Some(cubic_tail.max(bbr_tail)),
            Some(cubic_rate.min(bbr_rate)),
        ]))
    }
}

/// The bars, in this order: bulk, tail, tail relative to TCP's, bulk relative to TCP's.
fn bars([kept, tail, beside, rate]: [Option<f64>; 4]) -> Vec<Bar> {
    vec![
        Bar::new("bulk of messages at 1/256, of their own without loss", kept, Sense::AtLeast, 95.0, "%"),
        Bar::new("P99.9 of calls of 32 KiB at 1/256", tail, Sense::AtMost, 5.0, "ms"),
        Bar::new("that beside the better of cubic and BBR", beside, Sense::AtMost, 0.05, "x"),
        Bar::new("bulk without loss beside the better of cubic and BBR", rate, Sense::AtLeast, 0.5, "x"),
    ]
}

/// The bars without measured values.
fn unknown() -> Vec<Bar> {
    bars([None; 4])
}

fn is(row: &Row, mode: Transport, loss: f64, workload: Workload) -> bool {
    row.mode == mode && row.workload == workload && (row.loss_percent - loss).abs() < 1e-9
}

/// Bulk throughput at a loss, percent of the transport's lossless throughput in the same repetition.
fn kept(rows: &[Row], mode: Transport, loss: f64) -> Option<f64> {
    let at = |loss| move |r: &Row| is(r, mode, loss, Workload::Bulk);
    paired_ratio(rows, |r| r.repetition, (at(loss), at(0.0)), |r| r.gbit_per_s).map(|ratio| ratio * 100.0)
}

/// The spread over repetitions; `None` if it was not measured.
fn spread(
    rows: &[Row],
    mode: Transport,
    loss: f64,
    workload: Workload,
    field: fn(&Row) -> Option<f64>,
) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| is(row, mode, loss, workload)).filter_map(field))
}

fn begin(lab: &Lab, transport: Transport, repetition: u32) -> Result<Bench> {
    let hosts = rdm_hosts::create(lab, transport.congestion().as_deref())?;
    let log = lab.logs(&format!("{transport}-{repetition}")).join("server");
    Bench::start(lab, hosts, &[], &log)
}

fn measure(lab: &Lab, bench: &mut Bench, transport: Transport, point: Point, repetition: u32) -> Result<Row> {
    let Point { loss_percent, workload } = point;
    rdm_hosts::lose(&bench.hosts, loss_percent)?;
    let logs = lab.logs(&format!("{transport}-{repetition}"));
    let name = format!("{}-{loss_percent:.3}", if workload == Workload::Bulk { "bulk" } else { "calls" });
    let mut row = Row {
        mode: transport,
        loss_percent,
        workload,
        repetition,
        duration_s: 0.0,
        gbit_per_s: 0.0,
        dropped_packets: 0,
        sender_cpu_s_per_gb: None,
        receiver_cpu_s_per_gb: None,
        calls: None,
        latency_ms_p50: None,
        latency_ms_p99: None,
        latency_ms_p99_9: None,
        latency_ms_max: None,
    };
    match workload {
        Workload::Bulk => bulk(lab, bench, &mut row, &logs, &name)?,
        Workload::Calls => calls(lab, bench, &mut row, &logs, &name)?,
    }
    bench.server.check_alive()?;
    row.dropped_packets = rdm_hosts::dropped(&bench.hosts)?;
    Ok(row)
}

fn bulk(lab: &Lab, bench: &Bench, row: &mut Row, logs: &Path, name: &str) -> Result<()> {
    let seconds = lab.seconds(5.0, 3.0).ceil();
    let [a, b] = &bench.hosts;
    let cpu = if row.mode.is_tcp() {
        let at = SocketAddrV4::new(rdm_hosts::SERVER_V4, iperf3::PORT);
        let running = iperf3::Running::start_in((a, b), at, Load::one_flow(seconds), &[], logs, name)?;
        let cpu = processor_time(running.pids(), seconds)?;
        (row.gbit_per_s, row.duration_s) = (running.finish()?.gbit_per_s, seconds);
        cpu
    } else {
        let words = ["bw", rdm_hosts::SERVER, "-s", &MESSAGE.to_string(), "-D", &seconds.to_string()];
        let client = bench.client(lab, &words, logs, name)?;
        let cpu = processor_time([client.pid(), bench.server.pid()], seconds)?;
        let report = finish(client)?;
        (row.gbit_per_s, row.duration_s) = (number(&report, "/gbit_per_s")?, number(&report, "/seconds")?);
        cpu
    };
    let bytes_per_s = row.gbit_per_s / 8.0;
    [row.sender_cpu_s_per_gb, row.receiver_cpu_s_per_gb] = cpu.map(|share| Some(share / bytes_per_s));
    Ok(())
}

fn calls(lab: &Lab, bench: &Bench, row: &mut Row, logs: &Path, name: &str) -> Result<()> {
    // TCP waits for 200 ms and more after a loss: the number of calls used for messages would take half an hour.
    let count = match (row.mode.is_tcp(), lab.options.quick) {
        (false, false) => "20000",
        (false, true) => "10000",
        (true, false) => "3000",
        (true, true) => "1500",
    };
    let size = CALL.to_string();
    let mut words = vec!["lat", rdm_hosts::SERVER, "-s", &size, "-n", count];
    if row.mode.is_tcp() {
        words.push("--tcp");
    }
    let report = finish(bench.client(lab, &words, logs, name)?)?;
    let ms = |key: &str| number(&report, &format!("/latency_us/{key}")).map(|us| Some(us / 1e3));
    let calls = number(&report, "/messages")?;
    row.duration_s = number(&report, "/seconds")?;
    row.calls = Some(calls as u64);
    row.gbit_per_s = calls * f64::from(2 * CALL) * 8e-9 / row.duration_s;
    (row.latency_ms_p50, row.latency_ms_p99) = (ms("p50")?, ms("p99")?);
    (row.latency_ms_p99_9, row.latency_ms_max) = (ms("p99_9")?, ms("max")?);
    Ok(())
}

/// Processor time per second of each of two process groups, without a warm-up and without the end.
fn processor_time(groups: [u32; 2], seconds: f64) -> Result<[f64; 2]> {
    let edge = seconds / 5.0;
    let sample = || Ok::<_, anyhow::Error>([cpu_seconds_of_group(groups[0])?, cpu_seconds_of_group(groups[1])?]);
    interrupt::sleep(Duration::from_secs_f64(edge))?;
    let (before, began) = (sample()?, std::time::Instant::now());
    interrupt::sleep(Duration::from_secs_f64(seconds - 2.0 * edge))?;
    let (after, took) = (sample()?, began.elapsed().as_secs_f64());
    Ok([0, 1].map(|at| (after[at] - before[at]) / took))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn row(mode: Transport, loss_percent: f64, workload: Workload, value: f64) -> Row {
        let tail = (workload == Workload::Calls).then_some(value);
        Row {
            mode,
            loss_percent,
            workload,
            repetition: 0,
            duration_s: 5.0,
            gbit_per_s: value,
            dropped_packets: 0,
            sender_cpu_s_per_gb: None,
            receiver_cpu_s_per_gb: None,
            calls: None,
            latency_ms_p50: tail,
            latency_ms_p99: tail,
            latency_ms_p99_9: tail,
            latency_ms_max: tail,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let missed = |change: fn(&mut Vec<Row>)| {
            let mut rows = vec![
                row(Transport::Messages, 0.0, Workload::Bulk, 10.0),
                row(Transport::Cubic, 0.0, Workload::Bulk, 20.0),
                row(Transport::Bbr, 0.0, Workload::Bulk, 15.0),
                row(Transport::Messages, OFTEN, Workload::Bulk, 9.6),
                row(Transport::Messages, OFTEN, Workload::Calls, 4.0),
                row(Transport::Cubic, OFTEN, Workload::Calls, 200.0),
                row(Transport::Bbr, OFTEN, Workload::Calls, 80.0),
            ];
            change(&mut rows);
            let bars = RdmLoss.bars(&to_values(&rows).unwrap()).unwrap();
            bars.iter().enumerate().filter(|(_, bar)| !bar.passes()).map(|(at, _)| at).collect::<Vec<_>>()
        };
        assert_eq!(missed(|_| {}), [0; 0]);
        assert_eq!(missed(|rows| rows[3].gbit_per_s = 9.4), [0]);
        assert_eq!(missed(|rows| rows[6].latency_ms_p99_9 = Some(79.0)), [2], "relative to the better of the two");
        assert_eq!(missed(|rows| rows[4].latency_ms_p99_9 = Some(5.1)), [1, 2]);
        assert_eq!(missed(|rows| rows[1].gbit_per_s = 20.1), [3]);
        assert_eq!(missed(|rows| rows.retain(|r| r.mode == Transport::Messages)), [0, 1, 2, 3], "no reference");
    }
}
