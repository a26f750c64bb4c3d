//! `gw-hosts`: a guest's connection to an Internet server through a gateway, over plain VXLAN and over the transport,
//! with and without loss.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::gateway::site::Site;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::programs::iperf3::{self, Load, Running};
use crate::programs::ping_pong;
use crate::report::{Table, factor};
use crate::results::from_values;
use crate::stats::{Spread, cell, distinct_values, middle, paired_ratio};
use crate::turns;

/// Packet loss between host and gateway, percent in each direction.
const LOSSES: [f64; 2] = [0.0, 1.0];
/// Interval of the requests whose latency is measured.
const INTERVAL: Duration = Duration::from_millis(1);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct GwHosts;

/// The encapsulation between host and gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Over {
    /// Plain VXLAN.
    Plain,
    /// The reliable transport.
    Transport,
}

impl Over {
    const ALL: [Over; 2] = [Over::Plain, Over::Transport];
}

impl fmt::Display for Over {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Over::Plain => "plain",
            Over::Transport => "transport",
        })
    }
}

/// The result of one flow, followed by one connection with small requests.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The encapsulation between host and gateway.
    #[serde(rename = "mode")]
    pub over: Over,
    /// Probability that a packet between host and gateway was dropped, in either direction, percent.
    pub loss_percent: f64,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of each of the two loads, s.
    pub duration_s: f64,
    /// Goodput of the flow at the server, Gbit/s.
    pub throughput_gbit_per_s: f64,
    /// Segments of the flow that the guest's TCP retransmitted.
    pub guest_retransmits: u64,
    /// Requests answered.
    pub requests: u64,
    /// Median latency of a request, ms.
    pub latency_ms_p50: f64,
    /// 99th percentile, ms.
    pub latency_ms_p99: f64,
    /// 99.9th percentile, ms.
    pub latency_ms_p99_9: f64,
    /// Packets dropped between host and gateway.
    pub lost_packets: u64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { over, loss_percent, throughput_gbit_per_s: throughput, latency_ms_p50, latency_ms_p99_9, .. } = self;
        write!(
            f,
            "{over:<9} {loss_percent:>3} %: {throughput:.2} Gbit/s, P50 {latency_ms_p50:.3} ms, P99.9 \
             {latency_ms_p99_9:.3} ms"
        )
    }
}

/// A loss rate, percent.
struct Point(f64);

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} %", self.0)
    }
}

impl Experiment for GwHosts {
    fn name(&self) -> &'static str {
        "gw-hosts"
    }

    fn summary(&self) -> &'static str {
        "Goodput and latency through a gateway, over plain VXLAN and over the transport, with packet loss between host \
         and gateway"
    }

    /// None: it builds its own network.
    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let points: Vec<Point> = lab.losses(&LOSSES, &LOSSES).into_iter().map(Point).collect();
        let duration_s = lab.seconds(5.0, 2.0).ceil();
        // Each site gets all processors in turn, because its pipeline polls for a while before it sleeps.
        turns::alternate(lab.repetitions(3), &Over::ALL, &points, |over, point, repetition| {
            let Point(loss_percent) = *point;
            let label = format!("{over}-{loss_percent}-{repetition}");
            let mut site = Site::start(lab, &label, *over == Over::Transport)?;
            site.lose(loss_percent)?;
            let ends = (&site.guest, &site.server);
            let (address, logs) = (Site::address(iperf3::PORT), lab.logs(&label));
            let flow = Running::start_in(ends, address, Load::one_flow(duration_s), &[], &logs, "iperf3")?.finish()?;
            let address = Site::address(iperf3::PORT + 1);
            let duration = Duration::from_secs_f64(duration_s);
            let latencies = ping_pong::run(ends.0, ends.1, address.into(), Some(INTERVAL), duration)?;
            let ms = |quantile: f64| latencies.value_at_quantile(quantile) as f64 / 1e6;
            let lost_packets = site.lost_packets()?;
            let carried = site.carried_frames()?;
            ensure!(
                (carried > 100) == (*over == Over::Transport),
                "{over}: {carried} frames were carried over the transport"
            );
            site.check()?;
            Ok(Row {
                over: *over,
                loss_percent,
                repetition,
                duration_s,
                throughput_gbit_per_s: flow.gbit_per_s,
                guest_retransmits: flow.retransmits,
                requests: latencies.len(),
                latency_ms_p50: ms(0.5),
                latency_ms_p99: ms(0.99),
                latency_ms_p99_9: ms(0.999),
                lost_packets,
            })
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table =
            Table::new(&["loss", "over", "Gbit/s", "of lossless", "guest retransmits", "P50 ms", "P99 ms", "P99.9 ms"]);
        for loss in losses(&rows) {
            for over in Over::ALL {
                let of = |field: fn(&Row) -> f64| spread(&rows, over, loss, field);
                let Some(throughput) = of(|row| row.throughput_gbit_per_s) else { continue };
                let lossless = spread(&rows, over, 0.0, |row| row.throughput_gbit_per_s);
                table.row(vec![
                    format!("{loss} %"),
                    over.to_string(),
                    throughput.to_string(),
                    factor(throughput.median, middle(lossless)),
                    cell(of(|row| row.guest_retransmits as f64)),
                    cell(of(|row| row.latency_ms_p50)),
                    cell(of(|row| row.latency_ms_p99)),
                    cell(of(|row| row.latency_ms_p99_9)),
                ]);
            }
        }
        Ok(format!(
            "One TCP flow of `iperf3` from a guest to an Internet server, through `bifrostd`, `bifrost-nicd`, and \
             `bifrost-gw`, which translates its address; then a connection with a request of {} bytes each \
             millisecond. Packets are lost between host and gateway, in both directions. Medians, with the minimum and \
             maximum of the repetitions in brackets.\n\n{}",
            ping_pong::MESSAGE_LEN,
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [(Series::off("plain VXLAN"), Over::Plain), (Series::on("transport"), Over::Transport)];
        let panel = |title: &str, y: (&str, bool), field: fn(&Row) -> f64| {
            let losses = losses(&rows);
            Panel::over(title, ("packets lost [%]", &losses[..]), y, &series, |over, loss| {
                spread(&rows, over, *loss, field)
            })
        };
        let panels = [
            panel("one TCP flow", ("throughput [Gbit/s]", false), |row| row.throughput_gbit_per_s),
            panel("small requests", ("P99.9 [ms]", true), |row| row.latency_ms_p99_9),
        ];
        Ok(vec![plot::draw(&directory.join("hosts.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let is = |over, loss| move |row: &Row| row.over == over && row.loss_percent == loss;
        let ratio = |a: (Over, f64), b: (Over, f64), field: fn(&Row) -> f64| {
            paired_ratio(&rows, |row| row.repetition, (is(a.0, a.1), is(b.0, b.1)), field)
        };
        let (plain, transport) = (Over::Plain, Over::Transport);
        let throughput: fn(&Row) -> f64 = |row| row.throughput_gbit_per_s;
        let tail: fn(&Row) -> f64 = |row| row.latency_ms_p99_9;
        let tail_ms = spread(&rows, transport, 1.0, tail).map(|spread| spread.median);
        Ok(vec![
            Bar::new(
                "one TCP flow without loss, over the transport, of that over plain VXLAN",
                ratio((transport, 0.0), (plain, 0.0), throughput),
                Sense::AtLeast,
                0.7,
                "x",
            ),
            Bar::new(
                "one TCP flow at 1 % loss, over the transport, of that over plain VXLAN",
                ratio((transport, 1.0), (plain, 1.0), throughput),
                Sense::AtLeast,
                3.0,
                "x",
            ),
            Bar::new(
                "one TCP flow over the transport at 1 % loss, of that without loss",
                ratio((transport, 1.0), (transport, 0.0), throughput),
                Sense::AtLeast,
                0.85,
                "x",
            ),
            Bar::new(
                "median latency without loss, over the transport, of that over plain VXLAN",
                ratio((transport, 0.0), (plain, 0.0), |row| row.latency_ms_p50),
                Sense::AtMost,
                1.5,
                "x",
            ),
            Bar::new("P99.9 of requests at 1 % loss, over the transport", tail_ms, Sense::AtMost, 10.0, "ms"),
            Bar::new(
                "P99.9 of requests at 1 % loss, over plain VXLAN, of that over the transport",
                ratio((plain, 1.0), (transport, 1.0), tail),
                Sense::AtLeast,
                10.0,
                "x",
            ),
        ])
    }
}

fn losses(rows: &[Row]) -> Vec<f64> {
    distinct_values(rows.iter().map(|row| row.loss_percent))
}

fn spread(rows: &[Row], over: Over, loss: f64, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.over == over && row.loss_percent == loss).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    #[test]
    fn each_bar_can_fail() {
        let row = |over, loss_percent, throughput_gbit_per_s, latency_ms_p50, latency_ms_p99_9| Row {
            over,
            loss_percent,
            repetition: 0,
            duration_s: 5.0,
            throughput_gbit_per_s,
            guest_retransmits: 0,
            requests: 5000,
            latency_ms_p50,
            latency_ms_p99: latency_ms_p50,
            latency_ms_p99_9,
            lost_packets: 0,
        };
        let passed = |lossless, lossy, p50, p99_9| -> Vec<bool> {
            let rows = [
                row(Over::Plain, 0.0, 1.0, 0.1, 0.2),
                row(Over::Plain, 1.0, 0.1, 0.1, 200.0),
                row(Over::Transport, 0.0, lossless, p50, 0.2),
                row(Over::Transport, 1.0, lossy, p50, p99_9),
            ];
            GwHosts.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(0.8, 0.7, 0.14, 5.0), [true; 6]);
        assert_eq!(passed(0.6, 0.05, 0.16, 25.0), [false; 6]);
        assert_eq!(GwHosts.bars(&[]).unwrap().iter().filter(|bar| bar.passes()).count(), 0);
    }
}
