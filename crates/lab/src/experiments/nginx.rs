//! `nginx`: HTTP with a connection for each request, and over persistent ones, with packet loss (NSDI'26, figure 21;
//! APNET'25, figures 7a and 9a; Triton, figures 14 to 16).
//!
//! Short connections suffer most from loss: a lost SYN costs a second, and no connection lives long enough to
//! estimate the RTT.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::inject;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::options::{Injector, Mode};
use crate::patience::until_answered;
use crate::plot::{self, Panel};
use crate::programs::apache_bench::{self, Load};
use crate::programs::nginx::{Nginx, PORT};
use crate::progress::Progress;
use crate::report::{Table, factor};
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell, distinct_values, middle, paired_ratio};

/// Loss rates on the wire, percent. Rates that bars compare are measured one after the other, because the machine
/// drifts.
const LOSSES: [f64; 6] = [0.0, 2.0, 1.0, 0.5, 5.0, 8.0];
/// Loss rates of a quick run, percent.
const QUICK_LOSSES: [f64; 3] = [0.0, 1.0, 2.0];

/// Number of clients: enough to keep the server busy. More would only wait for its processor.
const CLIENTS: u32 = 16;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct NginxExperiment;

/// Whether connections are persistent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Connections {
    /// One for each request.
    Short,
    /// Kept for all requests of a client.
    Persistent,
}

impl Connections {
    /// Both kinds.
    pub(crate) const ALL: [Connections; 2] = [Connections::Short, Connections::Persistent];
}

impl fmt::Display for Connections {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Connections::Short => "short",
            Connections::Persistent => "persistent",
        })
    }
}

/// One run of `ab`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// Always `wire`.
    pub injector: Injector,
    /// Probability that a packet was dropped on the wire, in either direction, percent.
    pub loss_percent: f64,
    /// Whether connections are persistent.
    pub connections: Connections,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of clients, each with one request in flight.
    pub clients: u32,
    /// Requests answered.
    pub requests: u64,
    /// Requests answered per second.
    pub rps: f64,
    /// Mean time of a request, including its connection setup, ms.
    pub latency_ms_avg: f64,
    /// Median, ms.
    pub latency_ms_p50: f64,
    /// 99th percentile, ms.
    pub latency_ms_p99: f64,
    /// 99.9th percentile, whole ms.
    pub latency_ms_p99_9: f64,
    /// Maximum, whole ms.
    pub latency_ms_max: f64,
    /// Packets that nftables dropped, over both hosts.
    pub wire_drops_packets: u64,
}

impl Experiment for NginxExperiment {
    fn name(&self) -> &'static str {
        "nginx"
    }

    fn summary(&self) -> &'static str {
        "HTTP over short and over persistent connections at packet loss from 0 to 8 % (NSDI'26 figure 21, APNET'25 \
         figures 7a and 9a, SIGCOMM'24 figures 14 to 16)"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::ALL.to_vec()
    }

    fn default_modes(&self, quick: bool) -> Vec<Mode> {
        if quick { Mode::SWITCHES.to_vec() } else { self.modes() }
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let losses = lab.losses(&LOSSES, &QUICK_LOSSES);
        let repetitions = lab.repetitions(3);
        let can_lose = |mode: Mode, loss: &f64| *loss == 0.0 || mode.loses_on_the_wire();
        let points: usize = lab.options.modes.iter().map(|m| losses.iter().filter(|l| can_lose(*m, l)).count()).sum();
        let mut progress = Progress::new((points * Connections::ALL.len()) as u64 * u64::from(repetitions));
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            for &mode in &lab.options.modes {
                let label = format!("{}-{repetition}", mode.name());
                progress.begin(&format!("building the network for {}", mode.name()));
                let mut network = lab.network(mode, &label)?;
                let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
                guests[0].allow_many_connections()?;
                let mut server = Nginx::start(guests[1], &lab.logs(&label))?;
                for &loss_percent in losses.iter().filter(|loss| can_lose(mode, loss)) {
                    for connections in Connections::ALL {
                        interrupt::check()?;
                        progress.begin(&format!("{} {loss_percent} % {connections}", mode.name()));
                        inject::wire_loss(&network.topology, &[], loss_percent)?;
                        let row = measure(lab, &network, mode, loss_percent, connections, repetition)?;
                        progress.end(&format!(
                            "{:<12} {loss_percent} % {connections:<10}: {:.0} rps, P50 {:.3} ms, P99 {:.3} ms, max \
                             {:.0} ms",
                            mode.name(),
                            row.rps,
                            row.latency_ms_p50,
                            row.latency_ms_p99,
                            row.latency_ms_max
                        ));
                        rows.push(row);
                        server.check_alive()?;
                    }
                }
                network.check()?;
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = String::from(
            "`nginx` with one worker answers with 1 KB; `ab` includes connection setup in the time of a request. Loss \
             on the wire in both directions. Medians, with the minimum and maximum of the repetitions in brackets; \
             factors compare with Linux's VXLAN at the same loss.\n",
        );
        for connections in Connections::ALL {
            let what = match connections {
                Connections::Short => "A connection for each request",
                Connections::Persistent => "Persistent connections",
            };
            text += &format!("\n### {what}\n\n");
            let mut table = Table::new(&[
                "loss",
                "mode",
                "requests/s",
                "of lossless",
                "avg ms",
                "P50 ms",
                "P99 ms",
                "P99.9 ms",
                "max ms",
                "P99 better",
            ]);
            for loss in losses(&rows) {
                for mode in Mode::ALL {
                    let of = |mode, loss, field: fn(&Row) -> f64| spread(&rows, mode, connections, loss, field);
                    let rps = of(mode, loss, |r| r.rps);
                    let p99: fn(&Row) -> f64 = |r| r.latency_ms_p99;
                    if rps.is_none() {
                        continue;
                    }
                    table.row(vec![
                        format!("{loss} %"),
                        mode.name().to_owned(),
                        cell(rps),
                        factor(middle(rps), middle(of(mode, 0.0, |r| r.rps))),
                        cell(of(mode, loss, |r| r.latency_ms_avg)),
                        cell(of(mode, loss, |r| r.latency_ms_p50)),
                        cell(of(mode, loss, p99)),
                        cell(of(mode, loss, |r| r.latency_ms_p99_9)),
                        cell(of(mode, loss, |r| r.latency_ms_max)),
                        factor(middle(of(Mode::KernelVxlan, loss, p99)), middle(of(mode, loss, p99))),
                    ]);
                }
            }
            text += &table.render();
        }
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let losses = losses(&rows);
        let panel = |connections, y_title, log_y, field: fn(&Row) -> f64| {
            Panel::over_losses(&format!("nginx, {connections} connections"), (y_title, log_y), &losses, |mode, loss| {
                spread(&rows, mode, connections, loss, field)
            })
        };
        let panels: Vec<Panel> = Connections::ALL
            .into_iter()
            .flat_map(|connections| {
                [
                    panel(connections, "requests/s", false, |r| r.rps),
                    panel(connections, "P99 [ms]", true, |r| r.latency_ms_p99),
                ]
            })
            .collect();
        Ok(vec![plot::draw(&directory.join("nginx.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let of = |mode, loss, field| Some(spread(&rows, mode, Connections::Short, loss, field)?.median);
        let is =
            |mode, loss| move |r: &Row| r.mode == mode && r.connections == Connections::Short && r.loss_percent == loss;
        let ratio = |over, under, field| paired_ratio(&rows, |r| r.repetition, (over, under), field);
        let kept = ratio(is(Mode::Bifrost, 2.0), is(Mode::Bifrost, 0.0), |r| r.rps);
        let better = ratio(is(Mode::KernelVxlan, 1.0), is(Mode::Bifrost, 1.0), |r| r.latency_ms_p99_9);
        Ok(vec![
            Bar::new(
                "short connections at 2 % loss: BIFROST's requests/s over its own without loss",
                kept,
                Sense::AtLeast,
                0.85,
                "x",
            ),
            Bar::new(
                "short connections at 2 % loss: BIFROST's P99",
                of(Mode::Bifrost, 2.0, |r| r.latency_ms_p99),
                Sense::Below,
                10.0,
                "ms",
            ),
            Bar::new(
                "short connections at 1 % loss: the kernel's P99.9 over BIFROST's",
                better,
                Sense::AtLeast,
                20.0,
                "x",
            ),
        ])
    }
}

fn measure(
    lab: &Lab,
    network: &Network,
    mode: Mode,
    loss_percent: f64,
    connections: Connections,
    repetition: u32,
) -> Result<Row> {
    let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
    let load = |seconds: f64| Load {
        server: (guests[1].address, PORT).into(),
        clients: CLIENTS,
        seconds: seconds.ceil() as u32,
        keep_alive: connections == Connections::Persistent,
    };
    let logs = lab.logs(&format!("{}-{repetition}", mode.name()));
    let name = format!("{loss_percent}-{connections}");
    let measured = until_answered(mode, lab.seconds(2.0, 2.0), |seconds| {
        apache_bench::run(guests[0], load(seconds), &logs, &name)
    })?;
    Ok(Row {
        mode,
        injector: Injector::Wire,
        loss_percent,
        connections,
        repetition,
        clients: CLIENTS,
        requests: measured.requests,
        rps: measured.rps,
        latency_ms_avg: measured.latency_ms.avg,
        latency_ms_p50: measured.latency_ms.p50,
        latency_ms_p99: measured.latency_ms.p99,
        latency_ms_p99_9: measured.latency_ms.p99_9,
        latency_ms_max: measured.latency_ms.max,
        wire_drops_packets: inject::wire_drops(&network.topology)?,
    })
}

fn losses(rows: &[Row]) -> Vec<f64> {
    distinct_values(rows.iter().map(|row| row.loss_percent))
}

/// The median over repetitions; `None` if it was not measured.
fn spread(rows: &[Row], mode: Mode, connections: Connections, loss: f64, field: fn(&Row) -> f64) -> Option<Spread> {
    let point = |r: &&Row| r.mode == mode && r.connections == connections && r.loss_percent == loss;
    Spread::of(rows.iter().filter(point).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: Mode, loss_percent: f64, rps: f64, tail_ms: f64) -> Row {
        Row {
            mode,
            injector: Injector::Wire,
            loss_percent,
            connections: Connections::Short,
            repetition: 0,
            clients: 50,
            requests: 1000,
            rps,
            latency_ms_avg: 1.0,
            latency_ms_p50: 1.0,
            latency_ms_p99: tail_ms,
            latency_ms_p99_9: tail_ms,
            latency_ms_max: tail_ms,
            wire_drops_packets: 0,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |lossy_rps, tail_ms, kernel_ms| -> Vec<bool> {
            let rows = [
                row(Mode::Bifrost, 0.0, 1000.0, 2.0),
                row(Mode::Bifrost, 1.0, 950.0, 5.0),
                row(Mode::Bifrost, 2.0, lossy_rps, tail_ms),
                row(Mode::KernelVxlan, 1.0, 100.0, kernel_ms),
            ];
            NginxExperiment.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(900.0, 8.0, 1000.0), [true; 3]);
        assert_eq!(passed(800.0, 8.0, 1000.0), [false, true, true]);
        assert_eq!(passed(900.0, 12.0, 1000.0), [true, false, true]);
        assert_eq!(passed(900.0, 8.0, 90.0), [true, true, false]);
        assert!(NginxExperiment.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn the_report_names_modes_and_connections() {
        let rows = [row(Mode::KernelVxlan, 2.0, 10.0, 1000.0), row(Mode::Bifrost, 2.0, 900.0, 8.0)];
        let report = NginxExperiment.report(&to_values(&rows).unwrap()).unwrap();
        assert!(report.contains("125x") && !report.contains("open_vswitch"), "{report}");
    }
}
