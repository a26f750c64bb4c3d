//! `congestion-control`: how Swift affects the latencies of many clients with packet loss (NSDI'26 paper, figure
//! F11).

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::daemon::Settings;
use crate::frame::Experiment;
use crate::inject;
use crate::lab::{Lab, Network};
use crate::options::{Injector, Mode, Op};
use crate::plot::{self, Panel, Series};
use crate::programs::redis_benchmark::{self, Load, TRIAL_REQUESTS};
use crate::programs::redis_server::RedisServer;
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{LatencyMs, Spread, paired_ratio};
use crate::turns;

/// Number of clients, as in the paper.
const CLIENTS: u32 = 200;
/// Packet loss between switch and guest, at the receiver of either direction, percent, as in the paper.
const LOSS_PERCENT: f64 = 0.1;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct CongestionControl;

/// The limit for packets in flight on a path: `transport.congestion_control`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Control {
    /// Swift, which controls delay.
    Swift,
    /// Only the connection's window.
    None,
}

impl Control {
    const ALL: [Control; 2] = [Control::Swift, Control::None];

    fn name(self) -> &'static str {
        match self {
            Control::Swift => "swift",
            Control::None => "none",
        }
    }
}

impl fmt::Display for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One run of `redis-benchmark`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Always `bifrost`.
    pub mode: Mode,
    /// The limit for packets in flight.
    pub congestion_control: Control,
    /// Always `vnic`.
    pub injector: Injector,
    /// Probability that a packet was dropped between switch and guest, in either direction, percent.
    pub loss_percent: f64,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of clients, each with one request in flight.
    pub clients: u32,
    /// Requests answered.
    pub requests: u64,
    /// Requests answered per second.
    pub rps: f64,
    /// Latencies of these requests.
    pub latency_ms: LatencyMs,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<5}: {:.0} rps, {}", self.congestion_control, self.rps, self.latency_ms)
    }
}

impl Experiment for CongestionControl {
    fn name(&self) -> &'static str {
        "congestion-control"
    }

    fn summary(&self) -> &'static str {
        "Redis latencies of 200 clients at 0.1 % loss, with and without congestion control (NSDI'26 figure F11)"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Bifrost]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let begin = |control: &Control, repetition| {
            let label = label(*control, repetition);
            let settings = Settings { congestion_control: Some(control.name()), ..lab.settings() };
            let network = lab.network_with(Mode::Bifrost, &label, settings)?;
            inject::vnic_loss(&network.topology, &network.overlay, LOSS_PERCENT)?;
            // The order matters: the server ends before its network is removed.
            Ok((RedisServer::start(&network.topology.hosts[1].guest, &lab.logs(&label))?, network))
        };
        let points = [format!("SET at {LOSS_PERCENT} % loss")];
        turns::measure(lab.repetitions(3), &Control::ALL, &points, begin, |control, bench, _, repetition| {
            let (server, network) = bench;
            let row = measure(lab, network, *control, repetition)?;
            server.check_alive()?;
            network.overlay.check_alive()?;
            Ok(row)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let names = LatencyMs::FIELDS.map(|(name, _)| name);
        let mut table = Table::new(&[&["congestion control", "rps"][..], &names].concat());
        for control in Control::ALL {
            let of = rows.iter().filter(|r| r.congestion_control == control);
            let Some(rps) = Spread::of(of.clone().map(|r| r.rps)) else { continue };
            let mut cells = vec![control.to_string(), rps.to_string()];
            cells.extend(LatencyMs::cells(of.map(|r| r.latency_ms)));
            table.row(cells);
        }
        if let (Some(swift), Some(none)) = (medians(&rows, Control::Swift), medians(&rows, Control::None)) {
            let mut cells = vec!["swift over none".to_owned(), String::new()];
            cells.extend(LatencyMs::FIELDS.map(|(_, field)| factor(field(&swift), field(&none))));
            table.row(cells);
        }
        Ok(format!(
            "`SET` by {CLIENTS} clients of `redis-benchmark` over persistent connections, closed loop, {LOSS_PERCENT} \
             % packet loss between switch and guest in both directions. Medians, ms, with the minimum and maximum of \
             the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [(Control::Swift, Series::on("Swift")), (Control::None, Series::off("no congestion control"))];
        let of = |(control, series)| Some((series, medians(&rows, control)?));
        let distributions: Vec<_> = series.into_iter().filter_map(of).collect();
        let title = format!("Redis SET, {CLIENTS} clients, {LOSS_PERCENT} % loss at the vNIC");
        let panel = Panel::of_latencies(&title, &distributions);
        Ok(vec![plot::draw(&directory.join("congestion-control.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let bar = |what: &str, field| {
            let is = |control| move |r: &Row| r.congestion_control == control;
            let ratio = paired_ratio(&rows, |r| r.repetition, (is(Control::Swift), is(Control::None)), field);
            Bar::new(format!("{what} with congestion control over without"), ratio, Sense::AtMost, 1.1, "x")
        };
        Ok(vec![bar("mean", |r: &Row| r.latency_ms.avg), bar("P99.9", |r: &Row| r.latency_ms.p99_9)])
    }
}

fn label(control: Control, repetition: u32) -> String {
    format!("{control}-{repetition}")
}

fn measure(lab: &Lab, network: &Network, control: Control, repetition: u32) -> Result<Row> {
    let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
    let seconds = lab.seconds(10.0, 3.0);
    let run = |requests, name: &str| {
        let load = Load { op: Op::Set, clients: CLIENTS, requests, keep_alive: true, pipeline: 1 };
        let log = lab.logs(&label(control, repetition)).join(format!("redis-benchmark-{name}.txt"));
        redis_benchmark::run(guests[0], guests[1], load, Duration::from_secs_f64(60.0 + 10.0 * seconds), &log)
    };
    let trial = run(TRIAL_REQUESTS, "trial")?;
    let measured = run(trial.requests_in(seconds), "run")?;
    Ok(Row {
        mode: Mode::Bifrost,
        congestion_control: control,
        injector: Injector::Vnic,
        loss_percent: LOSS_PERCENT,
        repetition,
        clients: CLIENTS,
        requests: measured.requests,
        rps: measured.rps,
        latency_ms: measured.latency_ms,
    })
}

/// The medians over repetitions; `None` if they were not measured.
fn medians(rows: &[Row], control: Control) -> Option<LatencyMs> {
    LatencyMs::median_of(rows.iter().filter(|r| r.congestion_control == control).map(|r| r.latency_ms))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn rows(avg: f64, p99_9: f64) -> Vec<Value> {
        let row = |congestion_control, avg, p99_9| Row {
            mode: Mode::Bifrost,
            congestion_control,
            injector: Injector::Vnic,
            loss_percent: LOSS_PERCENT,
            repetition: 0,
            clients: CLIENTS,
            requests: 100_000,
            rps: 30_000.0,
            latency_ms: LatencyMs { avg, p50: avg, p90: avg, p99: avg, p99_9, max: 20.0 },
        };
        to_values(&[row(Control::Swift, avg, p99_9), row(Control::None, 5.0, 10.0)]).unwrap()
    }

    #[test]
    fn each_bar_can_fail() {
        let passed =
            |rows: &[Value]| -> Vec<bool> { CongestionControl.bars(rows).unwrap().iter().map(Bar::passes).collect() };
        assert_eq!(passed(&rows(5.2, 7.0)), [true, true]);
        assert_eq!(passed(&rows(5.6, 7.0)), [false, true]);
        assert_eq!(passed(&rows(5.2, 11.5)), [true, false]);
        assert_eq!(passed(&[]), [false, false]);
    }

    #[test]
    fn the_report_compares() {
        let report = CongestionControl.report(&rows(5.0, 7.0)).unwrap();
        assert!(report.contains("| swift over none") && report.contains("0.70x"), "{report}");
    }
}
