//! `redis-loss`: latency and throughput of Redis with packet loss (NSDI'26 paper, figure 20).

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::inject;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::options::{Guests, Injector, Mode, Op};
use crate::plot::{self, Panel};
use crate::processor::{self, LEGEND, Reading, Shares};
use crate::programs::key_value_client;
use crate::programs::redis_benchmark::{self, Load, Measurement};
use crate::programs::redis_server::{self, PORT, RedisServer};
use crate::progress::Progress;
use crate::report::{Table, factor, number};
use crate::results::{from_values, to_values};
use crate::standstill::{self, Standstill};
use crate::stats::{Spread, cell, distinct, distinct_values, middle, paired_ratio};

/// The loss rates of figure 20, percent. Rates that bars compare are measured one after the other, because the
/// machine drifts.
const LOSSES: [f64; 6] = [0.0, 1.0, 0.5, 0.1, 0.05, 0.01];
/// The loss rates of a quick run, percent.
const QUICK_LOSSES: [f64; 3] = [0.0, 0.1, 1.0];
/// Request rate over all connections for latencies between virtual machines, 1/s: at most a third of their capacity.
/// A closed loop would fill their kernels' queues, and latencies would show the length of these queues.
const PACED_RPS: f64 = 1000.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct RedisLoss;

/// One measurement.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The kind of guests.
    pub guests: Guests,
    /// The network.
    pub mode: Mode,
    /// Where packets were dropped.
    pub injector: Injector,
    /// Probability that a packet was dropped there, in either direction, percent.
    pub loss_percent: f64,
    /// The Redis command.
    pub op: Op,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Requests whose latency is reported.
    pub requests: u64,
    /// Requests answered per second.
    pub rps: f64,
    /// Request rate of the open loop that latencies between virtual machines come from, 1/s, because their kernels
    /// take most of the time of a closed loop; `null` for a closed loop, whose latencies are those of the same
    /// requests.
    #[serde(default)]
    pub paced_rps: Option<f64>,
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
    /// Packets that nftables dropped, over both hosts; null if another injector dropped them.
    pub wire_drops_packets: Option<u64>,
    /// Number of attempts: up to three, while standstills of the machine disturbed the measurement. This row is the
    /// attempt with the shortest standstills.
    pub attempts: u32,
    /// Standstills of the machine, of at least 4 ms, during the measurement.
    pub standstills: u32,
    /// The longest of them, ms; 0 if there was none.
    pub standstill_ms_max: f64,
    /// Use of all processors during the measurement, percent.
    #[serde(default)]
    pub processor_percent: Shares,
}

impl Experiment for RedisLoss {
    fn name(&self) -> &'static str {
        "redis-loss"
    }

    fn summary(&self) -> &'static str {
        "Redis latency and throughput at packet loss from 0 to 1 % (NSDI'26 figure 20)"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::TRANSPORTS.to_vec()
    }

    fn default_modes(&self, quick: bool) -> Vec<Mode> {
        if quick { Mode::USUAL.to_vec() } else { self.modes() }
    }

    fn guests(&self) -> Vec<Guests> {
        vec![Guests::Container, Guests::Vm]
    }

    fn keeps_awake(&self) -> bool {
        true
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let options = &lab.options;
        let losses = lab.losses(&LOSSES, &QUICK_LOSSES);
        let repetitions = lab.repetitions(3);
        let points = options.modes.len() * options.injectors.len() * losses.len() * options.ops.len();
        let mut progress = Progress::new(points as u64 * u64::from(repetitions));
        let mut rows = Vec::new();
        // The networks of all modes exist side by side and are measured in turn at each point, so that drift of the
        // machine, even within a minute, affects all modes alike.
        for repetition in 0..repetitions {
            let mut benches = Vec::new();
            for &mode in &options.modes {
                progress.begin(&format!("building the network for {}", mode.name()));
                benches.push((mode, Bench::start(lab, mode, &format!("{}-{repetition}", mode.name()))?));
            }
            for &injector in &options.injectors {
                for &loss_percent in &losses {
                    for &op in &options.ops {
                        for (mode, bench) in &mut benches {
                            let mode = *mode;
                            let point = Point { mode, injector, loss_percent, op, repetition };
                            progress.begin(&format!(
                                "{} {} {loss_percent} % {}",
                                mode.name(),
                                injector.name(),
                                op.name()
                            ));
                            let row = bench.measure(lab, point)?;
                            progress.end(&line(&row));
                            rows.push(row);
                        }
                    }
                }
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let vanilla = Vanilla::of(&rows);
        let mut text = format!(
            "Closed-loop load of `redis-benchmark` over persistent connections{}. Medians, with the minimum and \
             maximum of the repetitions in brackets. Factors compare with {} at the same loss.\n",
            if vanilla.guests == Guests::Vm {
                " between virtual machines; latencies from an open loop of 1,000 requests per second, from when each \
                 was due"
            } else {
                ""
            },
            vanilla.name
        );
        for injector in distinct(&rows, |row| row.injector) {
            for op in distinct(&rows, |row| row.op) {
                text += &format!("\n### `{}`, loss on the {}\n\n", op.name(), location(injector));
                let titles = [
                    "loss",
                    "mode",
                    "rps",
                    "avg ms",
                    "P50 ms",
                    "P99 ms",
                    "P99.9 ms",
                    "max ms",
                    "P99.9 better",
                    "rps better",
                ];
                let mut table = Table::new(&titles);
                for loss_percent in losses(&rows) {
                    for mode in distinct(&rows, |row| row.mode) {
                        let of = |mode, field: fn(&Row) -> f64| spread(&rows, mode, injector, loss_percent, op, field);
                        let kernel = vanilla.mode;
                        table.row(vec![
                            format!("{loss_percent} %"),
                            mode.name().to_owned(),
                            cell(of(mode, |r| r.rps)),
                            cell(of(mode, |r| r.latency_ms_avg)),
                            cell(of(mode, |r| r.latency_ms_p50)),
                            cell(of(mode, |r| r.latency_ms_p99)),
                            cell(of(mode, |r| r.latency_ms_p99_9)),
                            cell(of(mode, |r| r.latency_ms_max)),
                            factor(
                                middle(of(kernel, |r| r.latency_ms_p99_9)),
                                middle(of(mode, |r| r.latency_ms_p99_9)),
                            ),
                            factor(middle(of(mode, |r| r.rps)), middle(of(kernel, |r| r.rps))),
                        ]);
                    }
                }
                text += &table.render();
            }
        }
        text += &profile(&rows);
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
        let rps = panels(&rows, "requests per second", false, |row| row.rps);
        let columns = distinct(&rows, |row| row.op).len();
        Ok(vec![
            plot::draw(&directory.join("latency-p99.9.svg"), &tail, columns)?,
            plot::draw(&directory.join("rps.svg"), &rps, columns)?,
        ])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut bars = Vec::new();
        let vanilla = Vanilla::of(&rows);
        let place = format!("1 % loss {}", vanilla.place);
        for op in [Op::Get, Op::Set] {
            let of = |mode, loss, field: fn(&Row) -> f64| {
                Some(spread(&rows, mode, vanilla.injector, loss, op, field)?.median)
            };
            let at = |(mode, loss)| {
                move |r: &Row| r.mode == mode && r.injector == vanilla.injector && r.loss_percent == loss && r.op == op
            };
            let ratio = |a, b, field| paired_ratio(&rows, |r| r.repetition, (at(a), at(b)), field);
            let (kernel, off, on) = (vanilla.mode, Mode::Off, Mode::Bifrost);
            // Without loss the injector does not matter.
            let lossless = |under| {
                let at = |mode| move |r: &Row| r.mode == mode && r.loss_percent == 0.0 && r.op == op;
                paired_ratio(&rows, |r| (r.injector, r.repetition), (at(on), at(under)), |r| r.rps)
            };
            let name = op.name();
            let tail: fn(&Row) -> f64 = |row| row.latency_ms_p99_9;
            let p99: fn(&Row) -> f64 = |row| row.latency_ms_p99;
            let rps: fn(&Row) -> f64 = |row| row.rps;
            bars.push(Bar::new(
                format!("{name}, {place}: {}'s P99.9 over BIFROST's", vanilla.name),
                ratio((kernel, 1.0), (on, 1.0), tail),
                Sense::AtLeast,
                vanilla.factor,
                "x",
            ));
            bars.push(Bar::new(
                format!("{name}, {place}: BIFROST's P99 over its own without loss"),
                ratio((on, 1.0), (on, 0.0), p99),
                Sense::AtMost,
                2.0,
                "x",
            ));
            bars.push(Bar::new(
                format!("{name}, {place}: BIFROST's rps over its own without loss"),
                ratio((on, 1.0), (on, 0.0), rps),
                Sense::AtLeast,
                0.9,
                "x",
            ));
            bars.push(Bar::new(
                format!("{name}, {place}: BIFROST's slowest request"),
                of(on, 1.0, |row| row.latency_ms_max),
                Sense::Below,
                20.0,
                "ms",
            ));
            bars.push(Bar::new(
                format!("{name}, no loss: rps with reliability on over off"),
                lossless(off),
                Sense::AtLeast,
                0.85,
                "x",
            ));
            if vanilla.guests == Guests::Container {
                bars.push(Bar::new(
                    format!("{name}, no loss: rps of BIFROST over kernel VXLAN"),
                    lossless(kernel),
                    Sense::AtLeast,
                    0.5,
                    "x",
                ));
            }
        }
        if rows.iter().any(|row| row.mode == Mode::Strict) {
            let bar = |what: &str, field, sense, bound| {
                let name = format!("at every loss: BIFROST's {what} over that in strict order, median of all points");
                Bar::new(name, over_strict(&rows, field), sense, bound, "x")
            };
            bars.push(bar("P99.9", |row| row.latency_ms_p99_9, Sense::AtMost, 1.15));
            bars.push(bar("rps", |row| row.rps, Sense::AtLeast, 0.95));
        }
        Ok(bars)
    }
}

/// Explains tails that are not caused by loss, and throughput: the tail without loss, and the use of the processors.
fn profile(rows: &[Row]) -> String {
    let mut text = String::from("\n### Use of the processors\n\n");
    for op in distinct(rows, |row| row.op) {
        let tail = |loss| middle(spread(rows, Mode::Bifrost, Injector::Wire, loss, op, |row| row.latency_ms_p99_9));
        let (without, with) = (tail(0.0), tail(1.0));
        if without.is_finite() && with.is_finite() {
            text += &format!(
                "`{}`: BIFROST's P99.9 is {} ms at 1 % loss on the wire, and {} ms without loss.\n",
                op.name(),
                number(with),
                number(without)
            );
        }
    }
    let measured =
        |row: &&Row| row.injector == Injector::Wire && row.op == Op::Get && !row.processor_percent.is_empty();
    let rows: Vec<Row> = rows.iter().filter(measured).cloned().collect();
    let modes = distinct(&rows, |row| row.mode);
    let points = [0.0, 1.0].into_iter().flat_map(|loss| modes.iter().map(move |&mode| (loss, mode)));
    let shares = |(loss, mode): (f64, Mode)| {
        let of = rows.iter().filter(|row| row.mode == mode && row.loss_percent == loss);
        ([format!("{loss} %"), mode.name().to_owned()], of.map(|row| &row.processor_percent).collect())
    };
    if !rows.is_empty() {
        text += &format!(
            "\nUse of both processors during `get` with loss on the wire, percent, medians; {LEGEND}:\n\n{}",
            processor::table(["loss", "mode"], points.map(shares))
        );
    }
    text
}

/// The median over all points and repetitions of the ratio of BIFROST to strict order. Two measurements of one point
/// differ by a fifth from run to run; the bar requires that BIFROST is not worse much more often than better.
fn over_strict(rows: &[Row], field: fn(&Row) -> f64) -> Option<f64> {
    let point = |row: &Row| (row.injector, row.loss_percent.to_bits(), row.op, row.repetition);
    let is = |mode| move |row: &Row| row.mode == mode;
    paired_ratio(rows, point, (is(Mode::Bifrost), is(Mode::Strict)), field)
}

/// The reference that BIFROST is judged against.
struct Vanilla {
    guests: Guests,
    mode: Mode,
    name: &'static str,
    injector: Injector,
    place: &'static str,
    /// Required ratio of the reference's tail to BIFROST's.
    factor: f64,
}

impl Vanilla {
    /// Virtual machines cannot be joined by a kernel VXLAN device.
    fn of(rows: &[Row]) -> Vanilla {
        match rows.first().map(|row| row.guests).unwrap_or_default() {
            Guests::Container => Vanilla {
                guests: Guests::Container,
                mode: Mode::KernelVxlan,
                name: "kernel VXLAN",
                injector: Injector::Wire,
                place: "on the wire",
                factor: 50.0,
            },
            Guests::Vm => Vanilla {
                guests: Guests::Vm,
                mode: Mode::Off,
                name: "bifrostd without reliability",
                injector: Injector::Vnic,
                place: "before the vNIC",
                factor: 30.0,
            },
        }
    }
}

/// A point of the experiment.
#[derive(Debug, Clone, Copy)]
struct Point {
    mode: Mode,
    injector: Injector,
    loss_percent: f64,
    op: Op,
    repetition: u32,
}

impl Point {
    fn name(self) -> String {
        format!("{}-{}-{}", self.injector.name(), self.loss_percent, self.op.name())
    }
}

/// A network with a Redis server.
struct Bench {
    // The order matters: the server ends before its network is removed. In a virtual machine it ends with the
    // machine.
    server: Option<RedisServer>,
    network: Network,
    label: String,
}

impl Bench {
    fn start(lab: &Lab, mode: Mode, label: &str) -> Result<Self> {
        let mut network = lab.network(mode, label)?;
        let server = match network.machines.get_mut(1) {
            Some(machine) => {
                redis_server::start_in_machine(machine)?;
                None
            }
            None => Some(RedisServer::start(&network.topology.hosts[1].guest, &lab.logs(label))?),
        };
        let mut bench = Self { server, network, label: label.to_owned() };
        // Sets the key that GET reads, and warms up everything that is set up on first use.
        bench.benchmark(lab, Op::Set, redis_benchmark::TRIAL_REQUESTS, "warm-up")?;
        Ok(bench)
    }

    /// Measures a point, again if standstills of the machine disturbed the measurement too much.
    fn measure(&mut self, lab: &Lab, point: Point) -> Result<Row> {
        self.inject(point, point.loss_percent)?;
        let trial =
            self.benchmark(lab, point.op, redis_benchmark::TRIAL_REQUESTS, &format!("{}-trial", point.name()))?;
        let requests = trial.requests_in(lab.seconds(2.0, 1.5));
        let (mut row, attempts) = standstill::least_disturbed(
            lab.options.clients,
            |row: &Row| row.requests,
            || self.attempt(lab, point, requests),
        )?;
        row.attempts = attempts;
        self.inject(point, 0.0)?;
        self.server.as_mut().map_or(Ok(()), RedisServer::check_alive)?;
        self.network.check()?;
        Ok(row)
    }

    fn attempt(&mut self, lab: &Lab, point: Point, requests: u64) -> Result<(Vec<Standstill>, Row)> {
        interrupt::check()?;
        // Resets the drop counters.
        self.inject(point, point.loss_percent)?;
        let watch = standstill::Watch::start()?;
        let before = Reading::take()?;
        let measured = self.benchmark(lab, point.op, requests, &point.name())?;
        let processor_percent = Reading::take()?.since(&before);
        let seen = watch.finish()?;
        let (seen, paced) = match self.network.machines.first_mut() {
            None => (seen, None),
            Some(machine) => {
                let watch = standstill::Watch::start()?;
                let server = (self.network.topology.hosts[1].guest.address, PORT).into();
                let (clients, seconds) = (lab.options.clients, lab.seconds(8.0, 3.0));
                let paced = key_value_client::run_in_machine(machine, server, point.op, clients, PACED_RPS, seconds)?;
                (watch.finish()?, Some(paced))
            }
        };
        let wire_drops_packets = match point.injector {
            Injector::Wire => Some(inject::wire_drops(&self.network.topology)?),
            Injector::Vnic => None,
        };
        let Point { mode, injector, loss_percent, op, repetition } = point;
        let latency_ms = paced.as_ref().map_or(measured.latency_ms, |p| p.latency_ms);
        let row = Row {
            guests: lab.options.guests.unwrap_or_default(),
            mode,
            injector,
            loss_percent,
            op,
            repetition,
            requests: paced.as_ref().map_or(measured.requests, |p| p.answered),
            rps: measured.rps,
            paced_rps: paced.as_ref().map(|_| PACED_RPS),
            latency_ms_avg: latency_ms.avg,
            latency_ms_p50: latency_ms.p50,
            latency_ms_p99: latency_ms.p99,
            latency_ms_p99_9: latency_ms.p99_9,
            latency_ms_max: latency_ms.max,
            wire_drops_packets,
            attempts: 1,
            standstills: seen.len() as u32,
            standstill_ms_max: seen.iter().map(|s| s.length).max().unwrap_or_default().as_secs_f64() * 1000.0,
            processor_percent,
        };
        Ok((seen, row))
    }

    fn inject(&self, point: Point, loss_percent: f64) -> Result<()> {
        match point.injector {
            Injector::Wire => inject::wire_loss(&self.network.topology, &[], loss_percent),
            Injector::Vnic => inject::vnic_loss(&self.network.topology, &self.network.overlay, loss_percent),
        }
    }

    fn benchmark(&mut self, lab: &Lab, op: Op, requests: u64, name: &str) -> Result<Measurement> {
        let hosts = &self.network.topology.hosts;
        let timeout = Duration::from_secs_f64(60.0 + 10.0 * lab.seconds(2.0, 1.5));
        let log = lab.logs(&self.label).join(format!("redis-benchmark-{name}.txt"));
        let load = Load { op, clients: lab.options.clients, requests, keep_alive: true, pipeline: 1 };
        if let Some(machine) = self.network.machines.first_mut() {
            let server = &hosts[1].guest;
            return redis_benchmark::run_in_machine(machine, server, load, timeout, &log);
        }
        redis_benchmark::run(&hosts[0].guest, &hosts[1].guest, load, timeout, &log)
    }
}

fn line(row: &Row) -> String {
    let text = format!(
        "{:<12} {} {:>5} % {}: {:>7.0} rps, P50 {:.3} ms, P99 {:.3} ms, P99.9 {:.3} ms, max {:.3} ms",
        row.mode.name(),
        row.injector.name(),
        row.loss_percent,
        row.op.name(),
        row.rps,
        row.latency_ms_p50,
        row.latency_ms_p99,
        row.latency_ms_p99_9,
        row.latency_ms_max
    );
    match (row.standstills, row.attempts) {
        (0, 1) => text,
        (n, attempts) => format!(
            "{text} ({attempts} attempts; {n} standstills of the machine, at most {:.0} ms)",
            row.standstill_ms_max
        ),
    }
}

fn location(injector: Injector) -> &'static str {
    match injector {
        Injector::Wire => "wire (nftables on every underlay link, both directions)",
        Injector::Vnic => "vNIC (between switch and guest, both directions)",
    }
}

fn losses(rows: &[Row]) -> Vec<f64> {
    distinct_values(rows.iter().map(|row| row.loss_percent))
}

/// The median over repetitions; `None` if the point was not measured.
fn spread(rows: &[Row], mode: Mode, injector: Injector, loss: f64, op: Op, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(
        rows.iter()
            .filter(|r| r.mode == mode && r.injector == injector && r.loss_percent == loss && r.op == op)
            .map(field),
    )
}

fn panels(rows: &[Row], y_title: &str, log_y: bool, field: fn(&Row) -> f64) -> Vec<Panel> {
    let losses = losses(rows);
    let panel = |(injector, op): (Injector, Op)| {
        let title = format!("{}, loss on the {}", op.name(), injector.name());
        Panel::over_losses(&title, (y_title, log_y), &losses, |mode, loss| {
            spread(rows, mode, injector, loss, op, field)
        })
    };
    let ops = distinct(rows, |row| row.op);
    let of = |injector| ops.iter().map(move |op| (injector, *op));
    distinct(rows, |row| row.injector).into_iter().flat_map(of).map(panel).collect()
}

#[cfg(test)]
mod tests;
