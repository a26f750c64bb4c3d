//! `rdm-upgrade`: two running processes switch from RC to UC and back, controlled by a file, with calls at a steady
//! rate and packet loss.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::experiments::rdm_hosts::{self, Bench, MTU, OFTEN, SERVER, Transport, finish, number};
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::report::Table;
use crate::results::from_values;
use crate::stats::{Spread, cell, distinct_values};
use crate::{interrupt, turns};

/// Bytes of a request, and of its response.
const CALL: u32 = 32 * 1024;
/// Calls per second: 0.52 Gbit/s with their responses.
const RATE: u32 = 1000;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct RdmUpgrade;

/// The result of one run: a third of the time with RC, a third with UC, and a third with RC again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The transport: messages.
    pub mode: Transport,
    /// Packet loss in each direction, percent.
    pub loss_percent: f64,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of calls.
    pub calls: u64,
    /// Calls without a response.
    pub lost_calls: u64,
    /// Calls that reached the server out of order, or twice.
    pub out_of_order_calls: u64,
    /// Packets lost.
    pub dropped_packets: u64,
    /// Times of this end's changes of service, s after the start.
    pub changes_s: Vec<f64>,
    /// Length of a window, s.
    pub window_s: f64,
    /// Throughput of requests and responses in each window, Gbit/s.
    pub windows_gbit_per_s: Vec<f64>,
    /// Median time of calls in each window, ms.
    pub windows_p50_ms: Vec<f64>,
    /// 99th percentile, ms.
    pub windows_p99_ms: Vec<f64>,
    /// Maximum, ms.
    pub windows_max_ms: Vec<f64>,
    /// The largest deviation of a window before the first change from the mean before that change, percent.
    pub jitter_before_percent: f64,
    /// The largest deviation of a later window from that mean, percent.
    pub jitter_percent: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (lost, disorder) = (self.lost_calls, self.out_of_order_calls);
        write!(f, "jitter {:.2} %, {lost} of {} calls lost, {disorder} out of order", self.jitter_percent, self.calls)
    }
}

#[derive(Debug, Clone, Copy)]
struct Point(f64);

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} % lost", self.0)
    }
}

impl Experiment for RdmUpgrade {
    fn name(&self) -> &'static str {
        "rdm-upgrade"
    }

    fn summary(&self) -> &'static str {
        "Running processes change the service of their messages, controlled by a file, with packet loss"
    }

    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let points: Vec<Point> = lab.losses(&[0.0, OFTEN], &[0.0, OFTEN]).into_iter().map(Point).collect();
        turns::each(lab.repetitions(3), &points, |point, repetition| measure(lab, point.0, repetition))
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "lost, %",
            "calls",
            "lost",
            "out of order",
            "jitter before, %",
            "jitter since, %",
            "P50 of RC, UC, RC, ms",
            "P99, ms",
            "max, ms",
        ]);
        for loss in distinct_values(rows.iter().map(|row| row.loss_percent)) {
            let own: Vec<&Row> = rows.iter().filter(|row| is(row, loss)).collect();
            let sum = |field: fn(&Row) -> u64| own.iter().map(|row| field(row)).sum::<u64>().to_string();
            let of = |field: fn(&Row) -> f64| cell(Spread::of(own.iter().map(|row| field(row))));
            let thirds = |field: fn(&Row) -> &[f64]| {
                let phase = |phase| cell(Spread::of(own.iter().filter_map(|row| typical(row, field(row), phase))));
                [0, 1, 2].map(phase).join("; ")
            };
            table.row(vec![
                format!("{loss:.3}"),
                sum(|row| row.calls),
                sum(|row| row.lost_calls),
                sum(|row| row.out_of_order_calls),
                of(|row| row.jitter_before_percent),
                of(|row| row.jitter_percent),
                thirds(|row| &row.windows_p50_ms),
                thirds(|row| &row.windows_p99_ms),
                thirds(|row| &row.windows_max_ms),
            ]);
        }
        Ok(format!(
            "Two hosts on a link with an MTU of {MTU} and without offloads; nftables drops packets at random in both \
             directions. {RATE} calls per second with requests and responses of {CALL} bytes, sent whether or not \
             earlier ones have been answered. A file makes both processes change from RC to UC after a third of the \
             time, and back after two thirds. *Jitter* is the largest deviation of a one-second window from the mean \
             before the first change. Latencies count from when a call was due: medians of a phase's windows, without \
             those that contain a change.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let Some(row) = rows.iter().rfind(|row| is(row, OFTEN)).or(rows.last()) else { return Ok(Vec::new()) };
        let line = |values: &[f64]| -> Vec<(f64, f64)> {
            values.iter().enumerate().map(|(at, value)| ((at + 1) as f64 * row.window_s, *value)).collect()
        };
        let panel = |y_title: &str, log_y, lines| Panel {
            title: format!("{:.3} % of packets lost", row.loss_percent),
            x_title: "time [s]".to_owned(),
            y_title: y_title.to_owned(),
            log_y,
            lines,
            marks: row.changes_s.iter().map(|at| (*at, "change".to_owned())).collect(),
            ..Panel::default()
        };
        let rate = vec![(Series::on("requests and responses"), line(&row.windows_gbit_per_s))];
        let latency = vec![
            (Series::on("P50"), line(&row.windows_p50_ms)),
            (Series::other("P99"), line(&row.windows_p99_ms)),
            (Series::off("max"), line(&row.windows_max_ms)),
        ];
        let panels = [panel("Gbit/s", false, rate), panel("latency [ms]", true, latency)];
        Ok(vec![plot::draw(&directory.join("upgrade.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let worst = |of: fn(&Row) -> f64| rows.iter().map(of).reduce(f64::max);
        // At a loss of one packet in 256.
        let lossy = || rows.iter().filter(|row| is(row, OFTEN));
        Ok(vec![
            Bar::new("calls without a response", worst(|row| row.lost_calls as f64), Sense::AtMost, 0.0, "").exact(),
            Bar::new(
                "calls repeated or out of order",
                worst(|row| row.out_of_order_calls as f64),
                Sense::AtMost,
                0.0,
                "",
            )
            .exact(),
            Bar::new(
                "changes by the file, in each run",
                rows.iter().map(|row| row.changes_s.len() as f64).reduce(f64::min),
                Sense::AtLeast,
                2.0,
                "",
            )
            .exact(),
            Bar::new(
                "jitter of throughput at 1/256, worst run",
                lossy().map(|row| row.jitter_percent).reduce(f64::max),
                Sense::AtMost,
                2.0,
                "%",
            ),
        ])
    }
}

fn is(row: &Row, loss: f64) -> bool {
    (row.loss_percent - loss).abs() < 1e-9
}

/// The median of a third's windows, 0 to 2, without those that contain a change.
fn typical(row: &Row, values: &[f64], phase: usize) -> Option<f64> {
    let edge = |at: usize| row.changes_s.get(at).map(|at| at / row.window_s);
    let (from, until) = match phase {
        0 => (1.0, edge(0)?.floor()),
        1 => (edge(0)?.ceil(), edge(1)?.floor()),
        _ => (edge(1)?.ceil(), values.len() as f64),
    };
    crate::stats::median_of(values.get(from as usize..until as usize)?.iter().copied())
}

fn measure(lab: &Lab, loss: f64, repetition: u32) -> Result<Row> {
    let logs = lab.logs(&format!("{loss:.3}-{repetition}"));
    fs::create_dir_all(&logs).with_context(|| format!("creating {}", logs.display()))?;
    let file = logs.join("service");
    write_service(&file, "rc")?;
    let followed = file.to_str().context("a path that is not UTF-8")?;
    let both = ["-c", "both", "--follow", followed];
    let bench =
        Bench::start(lab, rdm_hosts::create(lab, None)?, &[&both[..], &["--in-order"]].concat(), &logs.join("server"))?;
    rdm_hosts::lose(&bench.hosts, loss)?;
    let third = lab.seconds(20.0, 4.0).ceil() as u32;
    let words =
        ["upgrade", SERVER, "-s", &CALL.to_string(), "--rate", &RATE.to_string(), "-D", &(3 * third).to_string()];
    let client = bench.client(lab, &[&words[..], &both].concat(), &logs, "client")?;
    for service in ["uc", "rc"] {
        interrupt::sleep(Duration::from_secs(third.into()))?;
        write_service(&file, service)?;
    }
    let report = finish(client)?;
    let whole = |pointer: &str| number(&report, pointer).map(|value| value as u64);
    let list = |of: &str, field: &str, scale: f64| -> Result<Vec<f64>> {
        let all = report[of].as_array().with_context(|| format!("no {of} in a report of bifrost-perf"))?;
        all.iter().map(|one| number(one, field).map(|value| value * scale)).collect()
    };
    Ok(Row {
        mode: Transport::Messages,
        loss_percent: loss,
        repetition,
        calls: whole("/calls")?,
        lost_calls: whole("/lost")?,
        out_of_order_calls: whole("/out_of_order")?,
        dropped_packets: rdm_hosts::dropped(&bench.hosts)?,
        changes_s: list("changes", "/at_s", 1.0)?,
        window_s: number(&report, "/window_s")?,
        windows_gbit_per_s: list("windows", "/gbit_per_s", 1.0)?,
        windows_p50_ms: list("windows", "/p50_us", 1e-3)?,
        windows_p99_ms: list("windows", "/p99_us", 1e-3)?,
        windows_max_ms: list("windows", "/max_us", 1e-3)?,
        jitter_before_percent: number(&report, "/jitter_before_percent")?,
        jitter_percent: number(&report, "/jitter_percent")?,
    })
}

/// Replaces the file atomically.
fn write_service(file: &Path, service: &str) -> Result<()> {
    let new = file.with_extension("new");
    fs::write(&new, service)
        .and_then(|()| fs::rename(&new, file))
        .with_context(|| format!("writing {}", file.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    #[test]
    fn each_bar_can_fail() {
        let row = Row {
            mode: Transport::Messages,
            loss_percent: OFTEN,
            repetition: 0,
            calls: 24_000,
            lost_calls: 0,
            out_of_order_calls: 0,
            dropped_packets: 2000,
            changes_s: vec![3.5, 6.5],
            window_s: 1.0,
            windows_gbit_per_s: vec![1.0; 9],
            windows_p50_ms: vec![9.0, 1.0, 2.0, 9.0, 3.0, 4.0, 9.0, 5.0, 6.0],
            windows_p99_ms: vec![1.0; 9],
            windows_max_ms: vec![1.0; 9],
            jitter_before_percent: 0.1,
            jitter_percent: 1.9,
        };
        let missed = |change: fn(&mut Row)| {
            let mut rows = [Row { loss_percent: 0.0, jitter_percent: 9.0, ..row.clone() }, row.clone()];
            change(&mut rows[1]);
            let bars = RdmUpgrade.bars(&to_values(&rows).unwrap()).unwrap();
            bars.iter().enumerate().filter(|(_, bar)| !bar.passes()).map(|(at, _)| at).collect::<Vec<_>>()
        };
        assert_eq!(missed(|_| {}), [0; 0]);
        assert_eq!(missed(|row| row.lost_calls = 1), [0]);
        assert_eq!(missed(|row| row.out_of_order_calls = 1), [1]);
        assert_eq!(missed(|row| row.changes_s.truncate(1)), [2]);
        assert_eq!(missed(|row| row.jitter_percent = 2.1), [3]);
        assert_eq!(missed(|row| row.loss_percent = 1.0), [3], "no such loss rate");
        // The first window and windows with a change are excluded.
        let phases = [0, 1, 2].map(|phase| typical(&row, &row.windows_p50_ms, phase).unwrap());
        assert_eq!(phases, [1.5, 3.5, 5.5]);
        assert!(RdmUpgrade.report(&to_values(&[row]).unwrap()).unwrap().contains("1.50"));
    }
}
