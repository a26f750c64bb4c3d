//! `switch-overall`: the switch's throughput, compared with Open vSwitch on the same processors (Triton, figure 8).
//!
//! Two containers on two hosts. Each host shares one processor with its guest, so the cost of a switch reduces what
//! the guests achieve: bytes of one flow, requests over persistent connections, and new connections.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::daemon::Settings;
use crate::frame::Experiment;
use crate::lab::{Lab, Network};
use crate::options::{Mode, Op};
use crate::plot::{self, Panel};
use crate::processor::{self, LEGEND, Reading, Shares};
use crate::programs::iperf3;
use crate::programs::redis_benchmark::{self, Load};
use crate::programs::redis_server::RedisServer;
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, cell, distinct, middle, paired_ratio};
use crate::turns;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct SwitchOverall;

/// The result of one network.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// Whether guests had security groups (Open vSwitch: connection tracking) that accept the load.
    pub security_groups: bool,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Approximate duration of each measurement, s.
    pub duration_s: f64,
    /// Goodput of one TCP flow, Gbit/s.
    pub throughput_gbit_per_s: f64,
    /// Redis requests answered over persistent connections, 1/s.
    pub requests_per_s: f64,
    /// 99th percentile of their latencies, ms.
    pub latency_ms_p99: f64,
    /// Connections opened, used for one request and closed, 1/s.
    pub connections_per_s: f64,
    /// Use of all processors during the requests over persistent connections, percent; empty if it was not recorded.
    #[serde(default)]
    pub requests_processor_percent: Shares,
    /// The same during the new connections.
    #[serde(default)]
    pub connections_processor_percent: Shares,
}

/// A metric: its column, and how to get it from a row.
type Measure = (&'static str, fn(&Row) -> f64);

const MEASURES: [Measure; 4] = [
    ("Gbit/s, one flow", |r| r.throughput_gbit_per_s),
    ("requests/s", |r| r.requests_per_s),
    ("their P99, ms", |r| r.latency_ms_p99),
    ("new connections/s", |r| r.connections_per_s),
];

/// A network, with or without security groups.
#[derive(Debug, Clone, Copy)]
struct Judged {
    mode: Mode,
    security_groups: bool,
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<12} {:<15}", self.mode, if self.security_groups { "security groups" } else { "" })
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, security_groups, throughput_gbit_per_s, requests_per_s, connections_per_s, .. } = self;
        let network = Judged { mode: *mode, security_groups: *security_groups };
        write!(
            f,
            "{network} {throughput_gbit_per_s:.2} Gbit/s, {requests_per_s:.0} requests/s, {connections_per_s:.0} \
             connections/s"
        )
    }
}

impl Experiment for SwitchOverall {
    fn name(&self) -> &'static str {
        "switch-overall"
    }

    fn summary(&self) -> &'static str {
        "Bytes, requests and new connections through the switch, compared with Open vSwitch (SIGCOMM'24 figure 8)"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::with_af_xdp(&Mode::SWITCHES)
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        vec![Mode::OpenVswitch, Mode::Off, Mode::Bifrost, Mode::BifrostXdp]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        // The kernel's VXLAN has no security groups.
        let measured = |network: &Judged| !(network.security_groups && network.mode == Mode::KernelVxlan);
        let of = |security_groups| lab.options.modes.iter().map(move |&mode| Judged { mode, security_groups });
        let networks: Vec<Judged> = [false, true].into_iter().flat_map(of).filter(measured).collect();
        turns::each(lab.repetitions(3), &networks, |network, repetition| {
            let Judged { mode, security_groups } = *network;
            let groups = if security_groups { "-groups" } else { "" };
            measure(lab, mode, security_groups, repetition, &format!("{mode}{groups}-{repetition}"))
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = String::from(
            "Containers on two hosts; each host, its switch and its guest share one processor. One TCP flow of \
             `iperf3`; `redis-benchmark`, `GET`, over persistent connections, and with one connection for each \
             request. No loss. Medians, with the minimum and maximum of the repetitions in brackets, and ratios of the \
             medians to Open vSwitch's.\n",
        );
        for security_groups in [false, true] {
            if !rows.iter().any(|row| row.security_groups == security_groups) {
                continue;
            }
            text +=
                if security_groups { "\n### With security groups\n\n" } else { "\n### Without security groups\n\n" };
            let titles: Vec<&str> = ["mode"].into_iter().chain(MEASURES.map(|(title, _)| title)).collect();
            let mut table = Table::new(&titles);
            for mode in Mode::ALL {
                let of = |mode, field| spread(&rows, mode, security_groups, field);
                if of(mode, |r| r.requests_per_s).is_none() {
                    continue;
                }
                let against = |(_, field): Measure| {
                    let (own, peer) = (of(mode, field), of(Mode::OpenVswitch, field));
                    format!("{}, {}", cell(own), factor(middle(own), middle(peer)))
                };
                table.row([mode.name().to_owned()].into_iter().chain(MEASURES.map(against)).collect());
            }
            text += &table.render();
        }
        text += &profile(&rows);
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let modes = Mode::ALL.map(|mode| (mode.into(), mode));
        let panel = |(title, field): Measure| {
            let x = ("security groups", &["without", "with"][..]);
            Panel::over(title, x, (title, false), &modes, |mode, groups| spread(&rows, mode, *groups == "with", field))
        };
        let panels = [MEASURES[0], MEASURES[1], MEASURES[3]].map(panel);
        Ok(vec![plot::draw(&directory.join("overall.svg"), &panels, 3)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let over = |mode, groups, field: fn(&Row) -> f64| {
            let is = |mode| move |r: &Row| r.mode == mode && r.security_groups == groups;
            paired_ratio(&rows, |r| r.repetition, (is(mode), is(Mode::OpenVswitch)), field)
        };
        let mut bars = Vec::new();
        for (mode, name) in [(Mode::Bifrost, "BIFROST"), (Mode::BifrostXdp, "BIFROST over AF_XDP")] {
            let mut bar = |what: &str, measured, bound| {
                bars.push(Bar::new(format!("{what}, {name} over Open vSwitch"), measured, Sense::AtLeast, bound, "x"));
            };
            bar("one TCP flow", over(mode, false, |r| r.throughput_gbit_per_s), 1.5);
            bar("Redis requests/s", over(mode, false, |r| r.requests_per_s), 1.5);
            // Most of a new connection's time is spent in the TCP and the programs of its two guests, on the same
            // processors, whatever the switch costs. `vectors` and `route-refresh` measure the switch alone.
            bar("new connections/s with security groups", over(mode, true, |r| r.connections_per_s), 1.5);
        }
        Ok(bars)
    }
}

fn measure(lab: &Lab, mode: Mode, security_groups: bool, repetition: u32, label: &str) -> Result<Row> {
    let settings = Settings { security_groups, ..lab.settings() };
    let mut network = lab.network_with(mode, label, settings)?;
    for host in &network.topology.hosts {
        host.guest.allow_many_connections()?;
    }
    let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
    let mut server = RedisServer::start(guests[1], &lab.logs(label))?;
    let duration_s = lab.seconds(4.0, 1.5);
    let seconds = duration_s.ceil();
    let flow =
        iperf3::Running::start((guests[0], guests[1]), iperf3::Load::one_flow(seconds), &lab.logs(label), "iperf3")?
            .finish()?;
    let (kept, kept_processor) = requests(lab, &network, true, duration_s, label)?;
    let (new, new_processor) = requests(lab, &network, false, duration_s, label)?;
    server.check_alive()?;
    network.overlay.check_alive()?;
    Ok(Row {
        mode,
        security_groups,
        repetition,
        duration_s,
        throughput_gbit_per_s: flow.gbit_per_s,
        requests_per_s: kept.rps,
        latency_ms_p99: kept.latency_ms.p99,
        connections_per_s: new.rps,
        requests_processor_percent: kept_processor,
        connections_processor_percent: new_processor,
    })
}

/// Runs as many requests as fill the time, according to a short trial; also returns the use of the processors.
fn requests(
    lab: &Lab,
    network: &Network,
    keep_alive: bool,
    duration_s: f64,
    label: &str,
) -> Result<(redis_benchmark::Measurement, Shares)> {
    let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
    let name = if keep_alive { "persistent" } else { "new" };
    let timeout = Duration::from_secs_f64(60.0 + 10.0 * duration_s);
    let run = |requests, name: &str| {
        let load = Load { op: Op::Get, clients: lab.options.clients, requests, keep_alive, pipeline: 1 };
        let log = lab.logs(label).join(format!("redis-benchmark-{name}.txt"));
        redis_benchmark::run(guests[0], guests[1], load, timeout, &log)
    };
    let trial = run(redis_benchmark::TRIAL_REQUESTS, &format!("{name}-trial"))?;
    let before = Reading::take()?;
    let measured = run(trial.requests_in(duration_s), name)?;
    Ok((measured, Reading::take()?.since(&before)))
}

/// Explains requests and connections per second: the use of the processors.
fn profile(rows: &[Row]) -> String {
    type Load = (&'static str, fn(&Row) -> &Shares);
    let loads: [Load; 2] = [
        ("requests", |row| &row.requests_processor_percent),
        ("new connections", |row| &row.connections_processor_percent),
    ];
    if rows.iter().all(|row| loads.iter().all(|(_, of)| of(row).is_empty())) {
        return String::new();
    }
    let networks = distinct(rows, |row| (row.security_groups, row.mode));
    let points = loads.into_iter().flat_map(|load| networks.iter().map(move |&network| (load, network)));
    let shares = |((name, of), (groups, mode)): (Load, (bool, Mode))| {
        let here = rows.iter().filter(|row| (row.security_groups, row.mode) == (groups, mode));
        let security = if groups { "with" } else { "without" };
        ([name, security, mode.name()].map(str::to_owned), here.map(of).collect())
    };
    format!(
        "\n### Use of the processors\n\nUse of both processors, percent, medians; {LEGEND}:\n\n{}",
        processor::table(["load", "security groups", "mode"], points.map(shares))
    )
}

/// The median over repetitions; `None` if it was not measured.
fn spread(rows: &[Row], mode: Mode, security_groups: bool, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|r| r.mode == mode && r.security_groups == security_groups).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn row(mode: Mode, security_groups: bool, rate: f64) -> Row {
        Row {
            mode,
            security_groups,
            repetition: 0,
            duration_s: 4.0,
            throughput_gbit_per_s: rate,
            requests_per_s: rate,
            latency_ms_p99: 1.0,
            connections_per_s: rate,
            requests_processor_percent: Shares::from([("switch".to_owned(), 43.0)]),
            connections_processor_percent: Shares::new(),
        }
    }

    #[test]
    fn bars_compare_with_open_vswitch_in_the_same_run() {
        let passed = |rows: &[Row]| -> Vec<bool> {
            SwitchOverall.bars(&to_values(rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        for (mode, other, first) in [(Mode::Bifrost, Mode::BifrostXdp, 0), (Mode::BifrostXdp, Mode::Bifrost, 3)] {
            let run = |plain, groups| {
                [(Mode::OpenVswitch, 1.0, 1.0), (mode, plain, groups), (other, 1.0, 1.0)]
                    .map(|(mode, plain, groups)| [row(mode, false, plain), row(mode, true, groups)])
                    .concat()
            };
            let expect = |rows: &[Row], expected| assert_eq!(passed(rows)[first..first + 3], expected, "{mode}");
            expect(&run(1.6, 1.6), [true, true, true]);
            expect(&run(1.4, 1.6), [false, false, true]);
            expect(&run(1.6, 1.4), [true, true, false]);
            expect(&run(1.6, 1.6)[2..], [false; 3]);
        }
    }

    #[test]
    fn the_report_has_a_table_for_each_measured_kind_of_network() {
        let rows = [row(Mode::OpenVswitch, false, 1.0), row(Mode::Bifrost, false, 2.0)];
        let report = SwitchOverall.report(&to_values(&rows).unwrap()).unwrap();
        assert!(report.contains("2.000, 2.00x"), "{report}");
        assert!(!report.contains("With security groups"));
        let profile = report.lines().find(|line| line.starts_with("| requests ")).unwrap();
        assert!(profile.contains("without | open_vswitch |  43.00 |"), "{profile}");
    }
}
