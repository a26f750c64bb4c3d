//! `switch-latency`: latency of one small request at low load, and the part that the switch adds (Triton, figure 9).
//!
//! One TCP connection between two containers, one request of 64 bytes at a time: each immediately after the last
//! answer, or a thousand per second, where the server is asleep in between. The same without a switch, over a veth
//! pair between the containers.

use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Result;
use hdrhistogram::Histogram;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::programs::ping_pong;
use crate::progress::Progress;
use crate::report::{Table, factor, number};
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell, middle, paired_ratio};
use crate::topology::GUEST_MTU;

/// The address of the echo server.
const PORT: u16 = 5201;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct SwitchLatency;

/// The connection between the guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Between {
    /// A veth pair from guest to guest.
    Veth,
    /// A switch on each host.
    #[serde(untagged)]
    Switches(Mode),
}

impl fmt::Display for Between {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Between::Veth => "veth",
            Between::Switches(mode) => mode.name(),
        })
    }
}

/// When the next request is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// Immediately after the answer.
    BackToBack,
    /// A millisecond after the request.
    ThousandPerSecond,
}

impl Pace {
    const ALL: [Pace; 2] = [Pace::BackToBack, Pace::ThousandPerSecond];

    fn interval(self) -> Option<Duration> {
        match self {
            Pace::BackToBack => None,
            Pace::ThousandPerSecond => Some(Duration::from_millis(1)),
        }
    }
}

impl fmt::Display for Pace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Pace::BackToBack => "back to back",
            Pace::ThousandPerSecond => "1000 a second",
        })
    }
}

/// The latencies of one connection.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The connection between the guests.
    pub mode: Between,
    /// When the next request was sent.
    pub pace: Pace,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Requests answered.
    pub requests: u64,
    /// Mean latency, µs.
    pub latency_us_avg: f64,
    /// Median, µs.
    pub latency_us_p50: f64,
    /// 99th percentile, µs.
    pub latency_us_p99: f64,
    /// Maximum, µs.
    pub latency_us_max: f64,
}

impl Experiment for SwitchLatency {
    fn name(&self) -> &'static str {
        "switch-latency"
    }

    fn summary(&self) -> &'static str {
        "Latency of single small requests, and the part that a switch adds, compared with Open vSwitch (SIGCOMM'24 \
         figure 9)"
    }

    fn modes(&self) -> Vec<Mode> {
        Mode::ALL.to_vec()
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        Mode::with_af_xdp(&Mode::SWITCHES)
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let (repetitions, seconds) = (lab.repetitions(3), lab.seconds(3.0, 1.0));
        let switches = lab.options.modes.iter().map(|&mode| Between::Switches(mode));
        let all: Vec<Between> = [Between::Veth].into_iter().chain(switches).collect();
        let mut progress = Progress::new((all.len() * Pace::ALL.len()) as u64 * u64::from(repetitions));
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            for &mode in &all {
                let mut record = |client: &Namespace, server: &Namespace, address: SocketAddr| -> Result<()> {
                    for pace in Pace::ALL {
                        interrupt::check()?;
                        progress.begin(&format!("{mode}, {pace}, {repetition}"));
                        let duration = Duration::from_secs_f64(seconds);
                        let latencies = ping_pong::run(client, server, address, pace.interval(), duration)?;
                        let row = Row::new(mode, pace, repetition, &latencies);
                        progress.end(&format!(
                            "{:<12} {pace:<13}: P50 {:.1} µs, P99 {:.1} µs",
                            mode.to_string(),
                            row.latency_us_p50,
                            row.latency_us_p99
                        ));
                        rows.push(row);
                    }
                    Ok(())
                };
                match mode {
                    Between::Veth => {
                        let [client, server] = joined(lab)?;
                        record(&client, &server, (SERVER, PORT).into())?;
                    }
                    Between::Switches(mode) => {
                        let mut network = lab.network(mode, &format!("{}-{repetition}", mode.name()))?;
                        let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
                        record(&guests[0].namespace, &guests[1].namespace, (guests[1].address, PORT).into())?;
                        network.check()?;
                    }
                }
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = format!(
            "One TCP connection between two containers, each with its host on its own processor; requests and answers \
             of {} bytes, one at a time. Medians, with the minimum and maximum of the repetitions in brackets. *Added* \
             is the difference to a veth pair between the containers; it includes both hosts' switches, and the link \
             between them, in both directions.\n",
            ping_pong::MESSAGE_LEN
        );
        for pace in Pace::ALL {
            text += &format!("\n### Requests {pace}\n\n");
            let mut table = Table::new(&["between", "P50 µs", "P99 µs", "added, P50 µs", "P50 of Open vSwitch's"]);
            for mode in modes(&rows) {
                let of = |mode, field| spread(&rows, mode, pace, field);
                let p50: fn(&Row) -> f64 = |r| r.latency_us_p50;
                table.row(vec![
                    mode.to_string(),
                    cell(of(mode, p50)),
                    cell(of(mode, |r| r.latency_us_p99)),
                    number(middle(of(mode, p50)) - middle(of(Between::Veth, p50))),
                    factor(middle(of(mode, p50)), middle(of(OVS, p50))),
                ]);
            }
            text += &table.render();
        }
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let modes = modes(&rows);
        let paces =
            [(Series::on("back to back"), Pace::BackToBack), (Series::off("1000 a second"), Pace::ThousandPerSecond)];
        let panel = |title: &str, field: fn(&Row) -> f64| {
            let x = ("between the guests", modes.as_slice());
            Panel::over(title, x, (title, false), &paces, |pace, mode| spread(&rows, *mode, pace, field))
        };
        let panels = [panel("P50 [µs]", |r| r.latency_us_p50), panel("P99 [µs]", |r| r.latency_us_p99)];
        Ok(vec![plot::draw(&directory.join("latency.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut bars = Vec::new();
        for pace in Pace::ALL {
            for mode in [Mode::Off, Mode::Bifrost, Mode::BifrostXdp] {
                let is = |mode| move |r: &Row| r.mode == mode && r.pace == pace;
                let both = || (is(Between::Switches(mode)), is(OVS));
                let over = |field| paired_ratio(&rows, |r| r.repetition, both(), field);
                let bar = |what: &str, measured| {
                    let name = format!("{}, requests {pace}: {what} over Open vSwitch's", mode.name());
                    Bar::new(name, measured, Sense::AtMost, 1.0, "x")
                };
                bars.push(bar("P50", over(|r| r.latency_us_p50)));
                bars.push(bar("P99", over(|r| r.latency_us_p99)));
            }
        }
        Ok(bars)
    }
}

const OVS: Between = Between::Switches(Mode::OpenVswitch);
/// The answering guest, if there is no switch.
const SERVER: [u8; 4] = [10, 0, 0, 2];

impl Row {
    fn new(mode: Between, pace: Pace, repetition: u32, latencies: &Histogram<u64>) -> Self {
        let percentile = |q| latencies.value_at_quantile(q) as f64 / 1000.0;
        Self {
            mode,
            pace,
            repetition,
            requests: latencies.len(),
            latency_us_avg: latencies.mean() / 1000.0,
            latency_us_p50: percentile(0.5),
            latency_us_p99: percentile(0.99),
            latency_us_max: latencies.max() as f64 / 1000.0,
        }
    }
}

/// Two guests joined by a veth pair, each on the same processor as with a switch.
fn joined(lab: &Lab) -> Result<[Namespace; 2]> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let create = |number: usize, name: &str| -> Result<Namespace> {
        let mut namespace = Namespace::create(format!("{}-veth-{name}", lab.run.id()))?;
        if !lab.options.share_processors && processors > 1 {
            namespace.pin(number % processors);
        }
        Ok(namespace)
    };
    let guests = [create(0, "a")?, create(1, "b")?];
    guests[0].ip_batch(&format!(
        "link add eth0 mtu {GUEST_MTU} type veth peer name eth0 mtu {GUEST_MTU} netns {}\naddr add 10.0.0.1/24 dev \
         eth0\nlink set eth0 up\n",
        guests[1].name()
    ))?;
    guests[1].ip_batch("addr add 10.0.0.2/24 dev eth0\nlink set eth0 up\n")?;
    Ok(guests)
}

/// The measured connections, in the order of reports.
fn modes(rows: &[Row]) -> Vec<Between> {
    let all = [Between::Veth].into_iter().chain(Mode::ALL.map(Between::Switches));
    all.filter(|mode| rows.iter().any(|row| row.mode == *mode)).collect()
}

/// The median over repetitions; `None` if it was not measured.
fn spread(rows: &[Row], mode: Between, pace: Pace, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.mode == mode && row.pace == pace).map(field))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(mode: Between, pace: Pace, latency_us_p50: f64, latency_us_p99: f64) -> Row {
        Row {
            mode,
            pace,
            repetition: 0,
            requests: 1,
            latency_us_avg: 1.0,
            latency_us_p50,
            latency_us_p99,
            latency_us_max: 1.0,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |p50, p99| -> Vec<bool> {
            let rows: Vec<Row> = Pace::ALL
                .into_iter()
                .flat_map(|pace| {
                    let ours = [Mode::Off, Mode::Bifrost, Mode::BifrostXdp]
                        .map(|mode| row(Between::Switches(mode), pace, p50, p99));
                    [row(OVS, pace, 100.0, 200.0)].into_iter().chain(ours)
                })
                .collect();
            SwitchLatency.bars(&to_values(&rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(99.0, 199.0), [true; 12]);
        assert_eq!(passed(101.0, 199.0), [false, true].repeat(6));
        assert_eq!(passed(99.0, 201.0), [true, false].repeat(6));
        assert_eq!(SwitchLatency.bars(&[]).unwrap().iter().filter(|bar| bar.passes()).count(), 0);
    }

    #[test]
    fn the_report_shows_what_a_switch_adds() {
        let rows = [
            row(Between::Veth, Pace::BackToBack, 20.0, 30.0),
            row(OVS, Pace::BackToBack, 100.0, 200.0),
            row(Between::Switches(Mode::Off), Pace::BackToBack, 70.0, 90.0),
        ];
        let values = to_values(&rows).unwrap();
        assert_eq!(values[0]["mode"], "veth");
        assert_eq!(values[2]["mode"], "off");
        let report = SwitchLatency.report(&values).unwrap();
        assert!(report.contains("50.00") && report.contains("0.70x"), "{report}");
    }
}
