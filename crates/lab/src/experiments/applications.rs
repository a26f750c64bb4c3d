//! `applications`: common applications with packet loss: PostgreSQL, MariaDB, memcached, HTTP/2, QUIC and plain UDP.
//!
//! Applications over TCP should gain as Redis does; those over UDP, which is not carried reliably, must not be
//! harmed.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::inject;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::options::{App, Injector, Mode};
use crate::patience::until_answered;
use crate::plot::{self, Panel};
use crate::programs;
use crate::programs::application::{self, CONNECTIONS, Load, Server};
use crate::progress::Progress;
use crate::report::{Table, factor};
use crate::results::{from_values, to_values};
use crate::standstill::{self, Standstill};
use crate::stats::{Spread, cell, distinct, distinct_values, median_of, middle, paired_ratio};

/// Loss rates on the wire, percent. Rates that bars compare are measured one after the other, because the machine
/// drifts.
const LOSSES: [f64; 3] = [0.0, 1.0, 0.1];
/// Loss rates of a quick run, percent.
const QUICK_LOSSES: [f64; 2] = [0.0, 1.0];

/// Required ratio of the kernel's tail latency to BIFROST's, for each application over TCP at 1 % loss.
const TAIL_FACTOR: f64 = 20.0;
/// Required share of BIFROST's lossless throughput that remains at 1 % loss, and of the throughput of the same switch
/// without reliability.
const THROUGHPUT_KEPT: f64 = 0.85;
/// Required ratio of QUIC's throughput over BIFROST to that over the kernel's VXLAN, with and without loss. Each host
/// has one processor for guest and switch, and a user-space switch takes its share of it, for every application.
const QUIC_THROUGHPUT: f64 = 0.5;
/// Bound for QUIC's P99 at 1 % loss over BIFROST, relative to the kernel's VXLAN. QUIC's own loss recovery dominates
/// it, so the switch's share is small; the rest is chance, because a hundredth of the requests is a small sample.
const QUIC_TAIL: f64 = 1.5;
/// Required share of datagrams answered over BIFROST, relative to the kernel's VXLAN. Each loses, by chance, what the
/// wire loses.
const UDP_ANSWERED: f64 = 0.99;
/// Required share of datagrams answered over BIFROST without loss on the wire, percent. A full buffer on a busy
/// machine may lose one.
const UDP_LOSSLESS: f64 = 99.9;
/// Bound for P99 over UDP, at the same rate, with reliability on relative to off: the packets take the same path
/// through the same switch.
const SAME_SWITCH: f64 = 1.5;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Applications;

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The application.
    pub app: App,
    /// The network.
    pub mode: Mode,
    /// Always `wire`.
    pub injector: Injector,
    /// Probability that a packet was dropped on the wire, in either direction, percent.
    pub loss_percent: f64,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Requests answered per second in a closed loop; for `udp`, which sends at a fixed rate, at most that rate.
    pub requests_per_s: f64,
    /// Requests whose latency is reported.
    pub requests: u64,
    /// Request rate of the open loop that latencies come from, 1/s, each timed from when it was due; `null` for a
    /// closed loop, whose latencies are those of the same requests.
    pub paced_requests_per_s: Option<f64>,
    /// Mean latency, ms.
    pub latency_ms_avg: f64,
    /// Median latency, ms.
    pub latency_ms_p50: f64,
    /// 99th percentile, ms.
    pub latency_ms_p99: f64,
    /// 99.9th percentile, ms.
    pub latency_ms_p99_9: f64,
    /// Maximum latency, ms.
    pub latency_ms_max: f64,
    /// Requests without an answer: only with `udp`, 0 for all others.
    pub lost_requests: u64,
    /// Packets that nftables dropped, over both hosts.
    pub wire_drops_packets: u64,
    /// Number of attempts: up to three, while standstills of the machine disturbed the measurement. This row is the
    /// attempt with the shortest standstills.
    pub attempts: u32,
    /// Standstills of the machine, of at least 4 ms, during the measurement.
    pub standstills: u32,
    /// The longest of them, ms; 0 if there was none.
    pub standstill_ms_max: f64,
}

impl Row {
    /// The share of requests that were answered, percent.
    fn answered_percent(&self) -> f64 {
        100.0 * self.requests as f64 / (self.requests + self.lost_requests) as f64
    }
}

impl Experiment for Applications {
    fn name(&self) -> &'static str {
        "applications"
    }

    fn summary(&self) -> &'static str {
        "PostgreSQL, MariaDB, memcached, HTTP/2, QUIC and plain UDP at packet loss from 0 to 1 %"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::TRANSPORTS.to_vec()
    }

    fn default_modes(&self, quick: bool) -> Vec<Mode> {
        if quick { vec![Mode::KernelVxlan, Mode::Bifrost] } else { Mode::USUAL.to_vec() }
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let options = &lab.options;
        let losses = lab.losses(&LOSSES, &QUICK_LOSSES);
        let repetitions = lab.repetitions(3);
        let points = options.modes.len() * losses.len() * options.apps.len();
        let mut progress = Progress::new(points as u64 * u64::from(repetitions));
        let mut rows = Vec::new();
        // As in `redis-loss`, the networks of all modes exist side by side and are measured in turn at each point.
        // Only the servers of one application run at a time.
        for repetition in 0..repetitions {
            let mut benches = Vec::new();
            for &mode in &options.modes {
                progress.begin(&format!("building the network for {}", mode.name()));
                benches.push(Bench::new(lab, mode, repetition)?);
            }
            for &app in &options.apps {
                for bench in &mut benches {
                    progress.begin(&format!("{}: starting the server for {}", app.name(), bench.mode.name()));
                    bench.serve(app)?;
                }
                for &loss_percent in &losses {
                    for bench in &mut benches {
                        progress.begin(&format!("{} {} {loss_percent} %", app.name(), bench.mode.name()));
                        let row = bench.measure(lab, app, loss_percent)?;
                        progress.end(&line(&row));
                        rows.push(row);
                    }
                }
                benches.iter_mut().try_for_each(Bench::end)?;
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = String::from(
            "Loss on the wire, in both directions. Medians, with the minimum and maximum of the repetitions in \
             brackets; factors compare with Linux's VXLAN at the same loss. Percentiles are taken from histograms of \
             all answered requests, which are in `histograms/`.\n",
        );
        for app in distinct(&rows, |row| row.app) {
            text += &format!("\n### {}\n\n{}\n\n", title(app), load_of(app));
            let mut titles = vec![
                "loss",
                "mode",
                "requests/s",
                "of lossless",
                "avg ms",
                "P50 ms",
                "P99 ms",
                "P99.9 ms",
                "max ms",
                "P99.9 better",
            ];
            if app == App::Udp {
                titles.push("answered");
            }
            let mut table = Table::new(&titles);
            for loss in losses(&rows) {
                for mode in distinct(&rows, |row| row.mode) {
                    let of = |mode, loss, field: fn(&Row) -> f64| {
                        Spread::of(rows.iter().filter(|row| at(app, mode, loss)(row)).map(field))
                    };
                    let rate = of(mode, loss, |r| r.requests_per_s);
                    if rate.is_none() {
                        continue;
                    }
                    let mut cells = vec![
                        format!("{loss} %"),
                        mode.name().to_owned(),
                        cell(rate),
                        factor(middle(rate), middle(of(mode, 0.0, |r| r.requests_per_s))),
                        cell(of(mode, loss, |r| r.latency_ms_avg)),
                        cell(of(mode, loss, |r| r.latency_ms_p50)),
                        cell(of(mode, loss, |r| r.latency_ms_p99)),
                        cell(of(mode, loss, |r| r.latency_ms_p99_9)),
                        cell(of(mode, loss, |r| r.latency_ms_max)),
                        factor(
                            middle(of(Mode::KernelVxlan, loss, |r| r.latency_ms_p99_9)),
                            middle(of(mode, loss, |r| r.latency_ms_p99_9)),
                        ),
                    ];
                    if app == App::Udp {
                        cells.push(format!("{:.2} %", middle(of(mode, loss, Row::answered_percent))));
                    }
                    table.row(cells);
                }
            }
            text += &table.render();
        }
        let again = rows.iter().filter(|row| row.attempts > 1).count();
        if again > 0 {
            text += &format!(
                "\n{again} of {} measurements were repeated because of standstills of the machine (docs/LAB.md).\n",
                rows.len()
            );
        }
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let tail = panels(&rows, "P99.9 latency [ms]", true, |row| row.latency_ms_p99_9);
        let rate = panels(&rows, "requests per second", false, |row| row.requests_per_s);
        Ok(vec![
            plot::draw(&directory.join("latency-p99.9.svg"), &tail, 3)?,
            plot::draw(&directory.join("requests-per-s.svg"), &rate, 3)?,
        ])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        // A quick run leaves this mode out. All others are required.
        let with_off = rows.iter().any(|row| row.mode == Mode::Off);
        let apps = distinct(&rows, |row| row.app);
        Ok(apps
            .into_iter()
            .flat_map(|app| match app {
                App::Quic => bars_of_quic(&rows, with_off),
                App::Udp => bars_of_udp(&rows, with_off),
                _ => bars_of_tcp(&rows, app, with_off),
            })
            .collect())
    }
}

fn bars_of_tcp(rows: &[Row], app: App, with_off: bool) -> Vec<Bar> {
    let ratio = |over: (Mode, f64), under: (Mode, f64), field| ratio(rows, app, over, under, field);
    let name = app.name();
    let mut bars = vec![
        Bar::new(
            format!("{name}, 1 % loss: the kernel's P99.9 over BIFROST's"),
            ratio((Mode::KernelVxlan, 1.0), (Mode::Bifrost, 1.0), |r| r.latency_ms_p99_9),
            Sense::AtLeast,
            TAIL_FACTOR,
            "x",
        ),
        Bar::new(
            format!("{name}, 1 % loss: BIFROST's requests/s over its own without loss"),
            ratio((Mode::Bifrost, 1.0), (Mode::Bifrost, 0.0), |r| r.requests_per_s),
            Sense::AtLeast,
            THROUGHPUT_KEPT,
            "x",
        ),
    ];
    if with_off {
        bars.push(Bar::new(
            format!("{name}, no loss: requests/s with reliability on over off"),
            ratio((Mode::Bifrost, 0.0), (Mode::Off, 0.0), |r| r.requests_per_s),
            Sense::AtLeast,
            THROUGHPUT_KEPT,
            "x",
        ));
    }
    bars
}

fn bars_of_quic(rows: &[Row], with_off: bool) -> Vec<Bar> {
    let ratio = |over: (Mode, f64), under: (Mode, f64), field| ratio(rows, App::Quic, over, under, field);
    let (kernel, off, on) = (Mode::KernelVxlan, Mode::Off, Mode::Bifrost);
    let rate: fn(&Row) -> f64 = |row| row.requests_per_s;
    let p99: fn(&Row) -> f64 = |row| row.latency_ms_p99;
    let mut bars = Vec::new();
    for loss in [0.0, 1.0] {
        bars.push(Bar::new(
            format!("quic, {loss} % loss: requests/s of BIFROST over kernel VXLAN"),
            ratio((on, loss), (kernel, loss), rate),
            Sense::AtLeast,
            QUIC_THROUGHPUT,
            "x",
        ));
    }
    bars.push(Bar::new(
        "quic, 1 % loss: BIFROST's P99 over kernel VXLAN's",
        ratio((on, 1.0), (kernel, 1.0), p99),
        Sense::AtMost,
        QUIC_TAIL,
        "x",
    ));
    if with_off {
        for loss in [0.0, 1.0] {
            bars.push(Bar::new(
                format!("quic, {loss} % loss: requests/s with reliability on over off"),
                ratio((on, loss), (off, loss), rate),
                Sense::AtLeast,
                THROUGHPUT_KEPT,
                "x",
            ));
        }
        bars.push(Bar::new(
            "quic, no loss: P99 with reliability on over off",
            ratio((on, 0.0), (off, 0.0), p99),
            Sense::AtMost,
            SAME_SWITCH,
            "x",
        ));
    }
    bars
}

fn bars_of_udp(rows: &[Row], with_off: bool) -> Vec<Bar> {
    let lossless = median_of(rows.iter().filter(|r| at(App::Udp, Mode::Bifrost, 0.0)(r)).map(Row::answered_percent));
    let answered = ratio(rows, App::Udp, (Mode::Bifrost, 1.0), (Mode::KernelVxlan, 1.0), Row::answered_percent);
    let mut bars = vec![
        Bar::new("udp, no loss: requests answered over BIFROST", lossless, Sense::AtLeast, UDP_LOSSLESS, "%"),
        Bar::new(
            "udp, 1 % loss: requests answered over BIFROST, over kernel VXLAN's",
            answered,
            Sense::AtLeast,
            UDP_ANSWERED,
            "x",
        ),
    ];
    if with_off {
        bars.push(Bar::new(
            "udp, no loss: P99 with reliability on over off",
            ratio(rows, App::Udp, (Mode::Bifrost, 0.0), (Mode::Off, 0.0), |row| row.latency_ms_p99),
            Sense::AtMost,
            SAME_SWITCH,
            "x",
        ));
    }
    bars
}

fn ratio(rows: &[Row], app: App, over: (Mode, f64), under: (Mode, f64), field: fn(&Row) -> f64) -> Option<f64> {
    paired_ratio(rows, |row| row.repetition, (at(app, over.0, over.1), at(app, under.0, under.1)), field)
}

fn at(app: App, mode: Mode, loss: f64) -> impl Fn(&Row) -> bool {
    move |row| row.app == app && row.mode == mode && row.loss_percent == loss
}

/// A network, and a server in it.
struct Bench {
    // The order matters: the server ends before its network is removed.
    server: Option<Box<dyn Server>>,
    network: Network,
    mode: Mode,
    repetition: u32,
    logs: PathBuf,
}

impl Bench {
    fn new(lab: &Lab, mode: Mode, repetition: u32) -> Result<Self> {
        let label = format!("{}-{repetition}", mode.name());
        let network = lab.network(mode, &label)?;
        Ok(Self { server: None, network, mode, repetition, logs: lab.logs(&label) })
    }

    /// The directory of the server's files.
    fn files(&self) -> PathBuf {
        self.network.directory().join("files")
    }

    fn serve(&mut self, app: App) -> Result<()> {
        let files = self.files();
        for directory in [&files, &self.logs] {
            fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
        }
        let guest = &self.network.topology.hosts[1].guest;
        let server = programs::application(app).serve(guest, &files, &self.logs);
        self.server = Some(server.with_context(|| format!("starting the server for {}", app.name()))?);
        Ok(())
    }

    fn end(&mut self) -> Result<()> {
        self.server = None;
        let files = self.files();
        fs::remove_dir_all(&files).with_context(|| format!("removing {}", files.display()))
    }

    fn measure(&mut self, lab: &Lab, app: App, loss_percent: f64) -> Result<Row> {
        let attempt = || {
            until_answered(self.mode, lab.seconds(2.0, 1.5), |seconds| self.attempt(lab, app, loss_percent, seconds))
        };
        let (mut row, attempts) = standstill::least_disturbed(CONNECTIONS, |row: &Row| row.requests, attempt)?;
        row.attempts = attempts;
        inject::wire_loss(&self.network.topology, &[], 0.0)?;
        self.server.as_mut().map_or(Ok(()), |server| server.check_alive())?;
        self.network.check()?;
        Ok(row)
    }

    fn attempt(&self, lab: &Lab, app: App, loss_percent: f64, seconds: f64) -> Result<(Vec<Standstill>, Row)> {
        interrupt::check()?;
        // Resets the drop counters.
        inject::wire_loss(&self.network.topology, &[], loss_percent)?;
        let hosts = &self.network.topology.hosts;
        let name = format!("{}-{loss_percent}", app.name());
        let load = Load {
            client: &hosts[0].guest,
            server: &hosts[1].guest,
            duration: Duration::from_secs_f64(seconds),
            logs: &self.logs,
            name: &name,
        };
        let watch = standstill::Watch::start()?;
        let measured = programs::application(app).load(&load);
        let seen = watch.finish()?;
        let measured =
            measured.with_context(|| format!("{} over {} at {loss_percent} % loss", app.name(), self.mode.name()))?;
        let histogram = &measured.latency_us;
        let directory = lab.out.join("histograms");
        fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        let file = format!("{}-{}-{loss_percent}-{}.hgrm", app.name(), self.mode.name(), self.repetition);
        application::write_percentiles(histogram, &directory.join(file))?;
        let percentile = |quantile| histogram.value_at_quantile(quantile) as f64 / 1000.0;
        let row = Row {
            app,
            mode: self.mode,
            injector: Injector::Wire,
            loss_percent,
            repetition: self.repetition,
            requests_per_s: measured.requests_per_s,
            requests: histogram.len(),
            paced_requests_per_s: measured.paced_requests_per_s,
            latency_ms_avg: histogram.mean() / 1000.0,
            latency_ms_p50: percentile(0.5),
            latency_ms_p99: percentile(0.99),
            latency_ms_p99_9: percentile(0.999),
            latency_ms_max: histogram.max() as f64 / 1000.0,
            lost_requests: measured.lost_requests,
            wire_drops_packets: inject::wire_drops(&self.network.topology)?,
            attempts: 1,
            standstills: seen.len() as u32,
            standstill_ms_max: seen.iter().map(|s| s.length).max().unwrap_or_default().as_secs_f64() * 1000.0,
        };
        Ok((seen, row))
    }
}

fn line(row: &Row) -> String {
    let mut text = format!(
        "{:<10} {:<12} {:>3} %: {:>6.0} requests/s, P50 {:.3} ms, P99 {:.3} ms, P99.9 {:.3} ms, max {:.3} ms",
        row.app.name(),
        row.mode.name(),
        row.loss_percent,
        row.requests_per_s,
        row.latency_ms_p50,
        row.latency_ms_p99,
        row.latency_ms_p99_9,
        row.latency_ms_max
    );
    if row.app == App::Udp {
        text += &format!(", {:.2} % answered", row.answered_percent());
    }
    if row.standstills > 0 || row.attempts > 1 {
        text += &format!(
            " ({} attempts; {} standstills of the machine, at most {:.0} ms)",
            row.attempts, row.standstills, row.standstill_ms_max
        );
    }
    text
}

fn title(app: App) -> &'static str {
    match app {
        App::Postgresql => "PostgreSQL",
        App::Mariadb => "MariaDB",
        App::Memcached => "memcached",
        App::Http2 => "HTTP/2",
        App::Quic => "QUIC",
        App::Udp => "Plain UDP",
    }
}

/// The description of the load, for the report.
fn load_of(app: App) -> &'static str {
    match app {
        App::Postgresql => {
            "`pgbench -S` with prepared statements over 16 persistent connections, one transaction after the other (a \
             closed loop)."
        }
        App::Mariadb => {
            "`sysbench oltp_point_select` over 16 persistent connections, one query after the other (a closed loop); \
             buckets of its histogram are 1.8 % wide."
        }
        App::Memcached => {
            "Alternating `set` and `get` over 50 persistent connections: throughput of a closed loop; then latencies \
             at 2,000 requests per second, from when each was due."
        }
        App::Http2 => {
            "`h2load` with four streams on each of 16 connections (a closed loop); `nginx` with one worker answers \
             with 1 KB."
        }
        App::Quic => {
            "A stream for each request, answered with 1 KB, over 16 connections: throughput of a closed loop with four \
             streams on each; then latencies at 1,000 requests per second, from when each was due."
        }
        App::Udp => {
            "4,000 datagrams per second, which are echoed: latencies from when each was due. Lost datagrams are not \
             retransmitted."
        }
    }
}

fn losses(rows: &[Row]) -> Vec<f64> {
    distinct_values(rows.iter().map(|row| row.loss_percent))
}

/// A panel for each program.
fn panels(rows: &[Row], y_title: &str, log_y: bool, field: fn(&Row) -> f64) -> Vec<Panel> {
    let losses = losses(rows);
    let panel = |app| {
        Panel::over_losses(title(app), (y_title, log_y), &losses, |mode, loss| {
            Spread::of(rows.iter().filter(|row| at(app, mode, loss)(row)).map(field))
        })
    };
    distinct(rows, |row| row.app).into_iter().map(panel).collect()
}

#[cfg(test)]
mod tests;
