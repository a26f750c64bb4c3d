//! `stable`: latencies of Redis without loss, over short and over persistent connections (NSDI'26 paper, figures E8
//! and E9).
//!
//! Requests are due at a fixed rate, far below the server's capacity: at saturation two hosts on two processors would
//! show the length of their queues.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::nginx::Connections;
use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::lab::{Lab, Network};
use crate::options::{Mode, Op};
use crate::plot::{self, Panel};
use crate::programs::key_value_client::{self, Latencies, Load, WARM_UP};
use crate::programs::key_value_protocol::Protocol;
use crate::programs::redis_server::{PORT, RedisServer};
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{LatencyMs, paired_ratio};
use crate::turns;

/// Timeout of a request; a timeout ends the run.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Stable;

/// The result of one load at a fixed rate.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// Whether connections are persistent.
    pub connections: Connections,
    /// The Redis command.
    pub op: Op,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of clients, each with one request in flight.
    pub clients: u32,
    /// Request rate over all clients, 1/s.
    pub offered_rps: f64,
    /// Requests answered whose latency is reported.
    pub requests: u64,
    /// Latencies from when a request was due to its answer; over a short connection, this includes connecting.
    pub latency_ms: LatencyMs,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let point = Point { connections: self.connections, op: self.op };
        write!(f, "{:<12} {point}: {}", self.mode, self.latency_ms)
    }
}

/// The points that are measured in each network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Point {
    connections: Connections,
    op: Op,
}

impl Point {
    const ALL: [Point; 4] = [
        Point { connections: Connections::Short, op: Op::Get },
        Point { connections: Connections::Short, op: Op::Set },
        Point { connections: Connections::Persistent, op: Op::Get },
        Point { connections: Connections::Persistent, op: Op::Set },
    ];

    /// Request rate, 1/s: at most a fifth of the capacity.
    fn offered_rps(self) -> f64 {
        match self.connections {
            Connections::Short => 1000.0,
            Connections::Persistent => 5000.0,
        }
    }

    fn is_of(self, row: &Row) -> bool {
        self == Point { connections: row.connections, op: row.op }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} over {} connections", self.op.name(), self.connections)
    }
}

impl Experiment for Stable {
    fn name(&self) -> &'static str {
        "stable"
    }

    fn summary(&self) -> &'static str {
        "Redis latencies without loss at a fixed rate, short and persistent connections (NSDI'26 figures E8 and E9)"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::with_af_xdp(&Mode::TRANSPORTS)
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        Mode::USUAL.to_vec()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let begin = |mode: &Mode, repetition| {
            let label = format!("{mode}-{repetition}");
            let network = lab.network(*mode, &label)?;
            let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
            guests[0].allow_many_connections()?;
            // The order matters: the server ends before its network is removed.
            Ok((RedisServer::start(guests[1], &lab.logs(&label))?, network))
        };
        let points: Vec<Point> = Point::ALL.into_iter().filter(|point| lab.options.ops.contains(&point.op)).collect();
        turns::measure(lab.repetitions(3), &lab.options.modes, &points, begin, |_, bench, point, repetition| {
            let (server, network) = bench;
            let row = measure(lab, network, *point, repetition)?;
            server.check_alive()?;
            network.check()?;
            Ok(row)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = format!(
            "Requests are due at a fixed rate, {} per second over persistent connections and {} with a connection for \
             each request, far below the server's capacity; a latency counts from when the request was due. Nothing is \
             lost. Medians, ms, with the minimum and maximum of the repetitions in brackets; the last column compares \
             means with `bifrostd` without reliability.\n",
            Point { connections: Connections::Persistent, op: Op::Get }.offered_rps(),
            Point { connections: Connections::Short, op: Op::Get }.offered_rps(),
        );
        for point in measured(&rows) {
            text += &format!("\n### `{}`, {} connections\n\n", point.op.name(), point.connections);
            let names = LatencyMs::FIELDS.map(|(name, _)| name);
            let mut table = Table::new(&[&["mode"][..], &names, &["over off"]].concat());
            for mode in Mode::ALL {
                let Some(latency) = medians(&rows, mode, point) else { continue };
                let off = medians(&rows, Mode::Off, point).map_or(f64::NAN, |off| off.avg);
                let mut cells = vec![mode.to_string()];
                cells.extend(LatencyMs::cells(latencies(&rows, mode, point)));
                cells.push(factor(latency.avg, off));
                table.row(cells);
            }
            text += &table.render();
        }
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let panel = |point| {
            let of = |mode: Mode| Some((mode.into(), medians(&rows, mode, point)?));
            let distributions: Vec<_> = Mode::ALL.into_iter().filter_map(of).collect();
            Panel::of_latencies(&point.to_string(), &distributions)
        };
        let panels: Vec<Panel> = measured(&rows).map(panel).collect();
        Ok(vec![plot::draw(&directory.join("stable.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let bar = |point: Point| {
            let is = |mode| move |r: &Row| r.mode == mode && point.is_of(r);
            let ratio = paired_ratio(&rows, |r| r.repetition, (is(Mode::Bifrost), is(Mode::Off)), |r| r.latency_ms.avg);
            Bar::new(format!("{point}: mean with reliability on over off"), ratio, Sense::AtMost, 1.15, "x")
        };
        Ok(Point::ALL.into_iter().map(bar).collect())
    }
}

fn measure(lab: &Lab, network: &Network, point: Point, repetition: u32) -> Result<Row> {
    let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
    let load = Load {
        server: (guests[1].address, PORT).into(),
        transport: guests[0].namespace.stream_protocol(),
        protocol: Protocol::Redis,
        clients: lab.options.clients,
        keep_alive: point.connections == Connections::Persistent,
        duration: WARM_UP + Duration::from_secs_f64(lab.seconds(6.0, 3.0)),
        patience: Duration::ZERO,
        warm_up: WARM_UP,
        timeout: TIMEOUT,
        op: Some(point.op),
        requests_per_s: Some(point.offered_rps()),
        record: false,
        stop: Arc::default(),
    };
    let measured = guests[0].namespace.enter(move || Latencies::of(&key_value_client::run(&load)?))?;
    Ok(Row {
        mode: network.overlay.mode,
        connections: point.connections,
        op: point.op,
        repetition,
        clients: lab.options.clients,
        offered_rps: point.offered_rps(),
        requests: measured.answered,
        latency_ms: measured.latency_ms,
    })
}

fn measured(rows: &[Row]) -> impl Iterator<Item = Point> {
    Point::ALL.into_iter().filter(|point| rows.iter().any(|row| point.is_of(row)))
}

/// The medians over repetitions; `None` if the point was not measured.
fn medians(rows: &[Row], mode: Mode, point: Point) -> Option<LatencyMs> {
    LatencyMs::median_of(latencies(rows, mode, point))
}

fn latencies(rows: &[Row], mode: Mode, point: Point) -> impl Iterator<Item = LatencyMs> + Clone {
    rows.iter().filter(move |r| r.mode == mode && point.is_of(r)).map(|r| r.latency_ms)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn rows(bifrost_ms: f64) -> Vec<Value> {
        let row = |mode, point: Point, avg| Row {
            mode,
            connections: point.connections,
            op: point.op,
            repetition: 0,
            clients: 50,
            offered_rps: point.offered_rps(),
            requests: 1000,
            latency_ms: LatencyMs { avg, p50: avg, p90: avg, p99: avg, p99_9: avg, max: 9.0 },
        };
        let both = |point| [row(Mode::Off, point, 0.2), row(Mode::Bifrost, point, bifrost_ms)];
        to_values(&Point::ALL.map(both).concat()).unwrap()
    }

    #[test]
    fn each_bar_can_fail() {
        assert!(Stable.bars(&rows(0.22)).unwrap().iter().all(Bar::passes));
        assert!(Stable.bars(&rows(0.24)).unwrap().iter().all(|bar| !bar.passes()));
        assert!(Stable.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn the_report_has_a_table_for_each_point() {
        let report = Stable.report(&rows(0.22)).unwrap();
        assert_eq!(report.matches("| bifrost ").count(), 4);
        assert!(report.contains("1.10x") && !report.contains("kernel_vxlan"), "{report}");
    }
}
