//! `mirror`: the cost of a mirror for the mirrored traffic: new connections and requests per second, and the latency of
//! paced requests, without a mirror, and with a mirror of every tenth packet, of the first bytes of each packet, and of
//! whole packets. The copies of a known number of datagrams are checked one by one.
//!
//! Client and server are containers on the first host; copies go to the second one.

mod copies;

use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::copies::Arrivals;
use super::requests::networks::{container, port};
use super::requests::{self, CLIENTS, Setup};
use crate::bars::{Bar, Sense};
use crate::daemon::{Daemon, Settings};
use crate::frame::Experiment;
use crate::lab::{Lab, Network};
use crate::options::Mode;
use crate::plot;
use crate::programs::nginx::Nginx;
use crate::programs::ping_pong;
use crate::report::Table;
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell, paired_ratio};
use crate::topology::Guest;

pub use super::nginx::Connections;

/// The port of the echo server for paced requests, and their interval.
const ECHO_PORT: u16 = 5201;
const INTERVAL: Duration = Duration::from_millis(1);
/// Names and UDP ports of two mirrors: one of requests, whose copies the second host counts and drops, and one of
/// datagrams, whose copies are read.
const REQUESTS: (&str, u16) = ("requests", 4790);
const DATAGRAMS: (&str, u16) = ("datagrams", 4791);
/// Bound for the P99.9 of paced requests, relative to that without a mirror.
const MOST_LATENCY: f64 = 1.1;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct MirrorExperiment;

/// The mirror.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Mirroring {
    /// No mirror.
    Off,
    /// The first 128 bytes of every tenth packet.
    Sampled,
    /// The first 128 bytes of each packet.
    Truncated,
    /// Each packet as a whole.
    Whole,
}

impl Mirroring {
    /// One packet in this many is copied, and the maximum length of a copy, bytes.
    fn extent(self) -> Option<(u32, usize)> {
        match self {
            Mirroring::Off => None,
            Mirroring::Sampled => Some((10, 128)),
            Mirroring::Truncated => Some((1, 128)),
            Mirroring::Whole => Some((1, 1514)),
        }
    }
}

impl Setup for Mirroring {
    const ALL: &'static [Mirroring] = &[Mirroring::Off, Mirroring::Sampled, Mirroring::Truncated, Mirroring::Whole];
}

impl fmt::Display for Mirroring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Mirroring::Off => "off",
            Mirroring::Sampled => "sampled",
            Mirroring::Truncated => "truncated",
            Mirroring::Whole => "whole",
        })
    }
}

/// One run of `ab`, and further measurements with the same mirror.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The run.
    #[serde(flatten)]
    pub run: requests::Row<Mirroring>,
    /// Paced requests and copies; `None` for short connections, which are measured first.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mirrored: Option<Mirrored>,
}

/// Measurements after the runs of `ab`, with the same mirror.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Mirrored {
    /// 99.9th percentile of a thousand requests of 64 bytes per second, µs.
    pub paced_latency_us_p99_9: f64,
    /// Copies of requests that the daemon sent.
    pub sent_copies: u64,
    /// Copies lost because a worker's buffer was full.
    pub missed_copies: u64,
    /// Copies that could not be sent.
    pub unsent_copies: u64,
    /// Copies of requests that arrived at the second host.
    pub arrived_copies: u64,
    /// Copies of datagrams that should have arrived.
    pub expected_datagrams: u64,
    /// Copies of datagrams that arrived with the right VNI, length and content.
    pub correct_datagrams: u64,
    /// Copies of datagrams that arrived and were wrong.
    pub wrong_datagrams: u64,
}

impl Mirrored {
    /// Number of copies that neither arrived nor were counted as lost, or that were wrong.
    fn stray(&self) -> u64 {
        self.sent_copies.abs_diff(self.arrived_copies)
            + self.expected_datagrams.abs_diff(self.correct_datagrams)
            + self.wrong_datagrams
    }
}

impl Experiment for MirrorExperiment {
    fn name(&self) -> &'static str {
        "mirror"
    }

    fn summary(&self) -> &'static str {
        "New connections, requests per second and latency of mirrored traffic, compared with the same without a \
         mirror; every copy is counted"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let repetitions = lab.repetitions(3);
        let mut progress = requests::progress::<Mirroring>(repetitions);
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            let label = format!("mirror-{repetition}");
            progress.begin("building the network");
            let client = container(lab, (1, "client"), Ipv4Addr::new(10, 1, 0, 1), false)?;
            let server = container(lab, (2, "server"), Ipv4Addr::new(10, 1, 0, 2), true)?;
            let ports = [&client, &server].map(|guest| port(guest, 201, "")).concat();
            let settings = Settings {
                more: vec![format!("[[vpc]]\nvni = 201\nreliability = \"off\"\n{ports}")],
                ..lab.settings()
            };
            let mut network = lab.network_with(Mode::Off, &label, settings)?;
            let mut nginx = Nginx::start(&server, &lab.logs(&label))?;
            for &mirroring in Setup::ALL {
                mirror(&network, mirroring)?;
                let before = counted(&network.overlay.daemons[0])?;
                let arrivals = Arrivals::count(&network.topology.hosts[1], REQUESTS.1, before)?;
                let ends = (&client, server.address);
                let runs = requests::measure(lab, &mut progress, (&label, repetition), mirroring, ends)?;
                let mirrored = measure(lab, &network, mirroring, [&client, &server], &arrivals)?;
                rows.extend(runs.into_iter().map(|run| {
                    let mirrored = (run.connections == Connections::Persistent).then_some(mirrored);
                    Row { run, mirrored }
                }));
            }
            nginx.check_alive()?;
            network.check()?;
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let (runs, mirrored) = read(rows)?;
        let mut text = format!(
            "`ab` with {CLIENTS} clients in one container requests 1 KB from `nginx` in another on the same host, and \
             a mirror copies the client's packets in both directions. `sampled`: the first 128 bytes of every tenth \
             packet. `truncated`: of each packet. `whole`: each packet. Client, switch and the thread that sends \
             copies share one processor. Medians, with the minimum and maximum of the repetitions in brackets.\n{}",
            requests::tables(&runs, &[(Mirroring::Off, "of no mirror's")])
        );
        text += "\n### A thousand requests per second, and the copies\n\nCopies of all repetitions. `wrong`: of those \
                 read one by one, copies that were missing or not as they should be.\n\n";
        let mut table =
            Table::new(&["mirror", "P99.9 µs", "copies sent", "arrived", "missed", "unsent", "read", "wrong"]);
        for mirroring in Mirroring::ALL {
            let of: Vec<Mirrored> = mirrored.iter().filter(|(_, m, _)| m == mirroring).map(|(.., m)| *m).collect();
            let sum = |field: fn(&Mirrored) -> u64| of.iter().map(field).sum::<u64>().to_string();
            table.row(vec![
                mirroring.to_string(),
                cell(Spread::of(of.iter().map(|m| m.paced_latency_us_p99_9))),
                sum(|m| m.sent_copies),
                sum(|m| m.arrived_copies),
                sum(|m| m.missed_copies),
                sum(|m| m.unsent_copies),
                sum(|m| m.correct_datagrams),
                sum(|m| m.expected_datagrams.abs_diff(m.correct_datagrams) + m.wrong_datagrams),
            ]);
        }
        Ok(text + &table.render())
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let (runs, _) = read(rows)?;
        Ok(vec![plot::draw(&directory.join("mirror.svg"), &[requests::panel(&runs)], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let (runs, mirrored) = read(rows)?;
        let with = [Mirroring::Sampled, Mirroring::Truncated, Mirroring::Whole];
        let mut bars = with.map(|mirroring| requests::share(&runs, mirroring, Mirroring::Off)).to_vec();
        bars.extend(with.map(|mirroring| {
            let is = |wanted| move |(_, m, _): &(u32, Mirroring, Mirrored)| *m == wanted;
            let pair = (is(mirroring), is(Mirroring::Off));
            let ratio = paired_ratio(&mirrored, |of| of.0, pair, |of| of.2.paced_latency_us_p99_9);
            let name = format!("{mirroring}: P99.9 of a thousand requests per second, over that without a mirror");
            Bar::new(name, ratio, Sense::AtMost, MOST_LATENCY, "x")
        }));
        let is_tested = with.iter().all(|with| mirrored.iter().any(|(_, m, of)| m == with && of.sent_copies > 0));
        let strays = is_tested.then(|| mirrored.iter().map(|(.., m)| m.stray()).sum::<u64>() as f64);
        let name = "copies that are wrong, or neither arrived nor counted as lost";
        bars.push(Bar::new(name, strays, Sense::AtMost, 0.0, "copies").exact());
        Ok(bars)
    }
}

/// The runs, and the further measurements with each repetition and mirror.
type Read = (Vec<requests::Row<Mirroring>>, Vec<(u32, Mirroring, Mirrored)>);

fn read(rows: &[Value]) -> Result<Read> {
    let rows: Vec<Row> = from_values(rows)?;
    let mirrored = rows.iter().filter_map(|row| Some((row.run.repetition, row.run.through, row.mirrored?))).collect();
    Ok((rows.into_iter().map(|row| row.run).collect(), mirrored))
}

/// Replaces the mirrors.
fn mirror(network: &Network, mirroring: Mirroring) -> Result<()> {
    let target = network.topology.hosts[1].underlay[0];
    let mirror = |(name, port): (&str, u16), protocol: &str, direction: &str| {
        mirroring.extent().map_or_else(String::new, |(one_in, truncate)| {
            format!(
                "[[mirror]]\nname = \"{name}\"\nports = [\"client\"]\ndirection = \"{direction}\"\nprotocol = \
                 \"{protocol}\"\ntarget = \"{target}:{port}\"\ntarget_vni = {}\none_in = {one_in}\ntruncate = \
                 {truncate}\n",
                copies::VNI
            )
        })
    };
    let mirrors = mirror(REQUESTS, "tcp", "both") + &mirror(DATAGRAMS, "udp", "egress");
    network.overlay.daemons[0].reconfigure(|text| {
        // The mirrors are the last sections of the file.
        text.split("[[mirror]]").next().unwrap_or_default().to_owned() + &mirrors
    })
}

/// Makes the measurements that follow the runs of `ab`.
fn measure(
    lab: &Lab,
    network: &Network,
    mirroring: Mirroring,
    [client, server]: [&Guest; 2],
    arrivals: &Arrivals<'_>,
) -> Result<Mirrored> {
    let address = (server.address, ECHO_PORT).into();
    let duration = Duration::from_secs_f64(lab.seconds(5.0, 1.0));
    let latencies = ping_pong::run(&client.namespace, &server.namespace, address, Some(INTERVAL), duration)?;
    let daemon = &network.overlay.daemons[0];
    let (counted, arrived) = arrivals.settle(|| counted(daemon))?;
    let [sent_copies, missed_copies, unsent_copies] = counted;
    let target = (&network.topology.hosts[1], DATAGRAMS.1);
    let datagrams = copies::of_datagrams([client, server], target, mirroring.extent())?;
    Ok(Mirrored {
        paced_latency_us_p99_9: latencies.value_at_quantile(0.999) as f64 / 1000.0,
        sent_copies,
        missed_copies,
        unsent_copies,
        arrived_copies: arrived,
        expected_datagrams: datagrams.expected,
        correct_datagrams: datagrams.correct,
        wrong_datagrams: datagrams.wrong,
    })
}

/// Number of copies of requests that the daemon has sent, missed, and failed to send.
fn counted(daemon: &Daemon) -> Result<[u64; 3]> {
    let mirrors = daemon.control(&["mirrors"])?;
    let mirrors = mirrors.as_array().context("`bifrostctl mirrors` prints no list")?;
    let Some(mirror) = mirrors.iter().find(|mirror| mirror["name"] == REQUESTS.0) else { return Ok([0; 3]) };
    let count = |field: &str| mirror[field].as_u64().with_context(|| format!("`bifrostctl mirrors`: no {field}"));
    Ok([count("sent_packets")?, count("missed_packets")?, count("unsent_packets")?])
}

#[cfg(test)]
mod tests {
    use super::super::requests::tests::row;
    use super::*;

    const GOOD: Mirrored = Mirrored {
        paced_latency_us_p99_9: 100.0,
        sent_copies: 1000,
        missed_copies: 7,
        unsent_copies: 0,
        arrived_copies: 1000,
        expected_datagrams: 500,
        correct_datagrams: 500,
        wrong_datagrams: 0,
    };

    fn rows(rps: f64, sampled: Mirrored) -> Vec<Value> {
        let of = |mirroring, rps, mirrored| Row {
            run: row(mirroring, Connections::Persistent, rps),
            mirrored: Some(mirrored),
        };
        let rows = [
            of(Mirroring::Off, 100.0, Mirrored { sent_copies: 0, arrived_copies: 0, ..GOOD }),
            of(Mirroring::Sampled, rps, sampled),
            of(Mirroring::Truncated, 95.0, GOOD),
            of(Mirroring::Whole, 95.0, GOOD),
        ];
        to_values(&rows).unwrap()
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |rps, sampled| -> Vec<bool> {
            MirrorExperiment.bars(&rows(rps, sampled)).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(95.0, GOOD), [true; 7]);
        assert_eq!(passed(89.0, GOOD), [false, true, true, true, true, true, true]);
        let slow = Mirrored { paced_latency_us_p99_9: 111.0, ..GOOD };
        assert_eq!(passed(95.0, slow), [true, true, true, false, true, true, true]);
        for bad in [
            Mirrored { arrived_copies: 999, ..GOOD },
            Mirrored { correct_datagrams: 499, ..GOOD },
            Mirrored { wrong_datagrams: 1, ..GOOD },
            Mirrored { sent_copies: 0, arrived_copies: 0, ..GOOD },
        ] {
            assert_eq!(passed(95.0, bad)[6..], [false], "{bad:?}");
        }
        assert_eq!(MirrorExperiment.bars(&[]).unwrap().iter().filter(|bar| bar.passes()).count(), 0);
    }

    #[test]
    fn the_report_counts_copies() {
        let report = MirrorExperiment.report(&rows(50.0, Mirrored { wrong_datagrams: 4, ..GOOD })).unwrap();
        let line = report.lines().rfind(|line| line.starts_with("| sampled")).unwrap();
        assert!(report.contains("0.50x") && line.trim_end_matches(" |").ends_with(" 4"), "{report}");
    }
}
