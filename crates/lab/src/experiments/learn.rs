//! `learn`: the first packet to each of many destinations in a very large VPC whose routes hosts learn, and the memory
//! that a host needs for what it has learned.
//!
//! `bifrost-fleet run learn` builds the network, with a real relay, agents and daemons, and measures. This runs it, and
//! judges its report.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::daemon::Binaries;
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::options::{Mode, Options};
use crate::plot::{self, Panel, Series};
use crate::process::{Program, tail};
use crate::report::Table;
use crate::results::from_values;
use crate::state;
use crate::stats::{Spread, cell, distinct, median_of};
use crate::turns;

/// Routes of the VPC, by default and with `--quick`, and how many `bifrost-fleet` accepts.
const ROUTES: [u32; 2] = [1_000_000, 100_000];
const POSSIBLE_ROUTES: RangeInclusive<u32> = 2_000..=1_000_000;
/// Destinations that a guest uses, by default and with `--quick`.
const USED: [u32; 2] = [1_000, 200];
/// Timeout of `bifrost-fleet`.
const PATIENCE: Duration = Duration::from_secs(1_800);

/// Bound for the 99th percentile of the first packets' round trips, ms.
const MOST_MS: f64 = 5.0;
/// Bound for the memory of daemon and agent for what was learned, MiB.
const MOST_MIB: f64 = 10.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Learn;

/// How a host comes to know the routes of its VPC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Routes {
    /// It asks the relay when a packet needs one.
    Learned,
}

impl fmt::Display for Routes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Routes::Learned => f.write_str("learned"),
        }
    }
}

/// The result of one run of `bifrost-fleet`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// How the host knows the VPC's routes.
    pub mode: Routes,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of routes of the VPC.
    pub routes: u64,
    /// Number of destinations that a guest sent to, each for the first time.
    pub used_destinations: u32,
    /// Number of routes that the guest's host was sent because it cannot learn them.
    pub sent_routes: u64,
    /// Number of routes that it had learned in the end.
    pub learned_routes: u64,
    /// First packets without a reply.
    pub lost_packets: u64,
    /// Median of the first packets' round trips, ms.
    pub first_ms_p50: f64,
    /// 99th percentile, ms.
    pub first_ms_p99: f64,
    /// Maximum, ms.
    pub first_ms_max: f64,
    /// Median of the round trips of the second packet to each destination, ms.
    pub second_ms_p50: f64,
    /// 99th percentile, ms.
    pub second_ms_p99: f64,
    /// Maximum, ms.
    pub second_ms_max: f64,
    /// Growth of the daemon's resident memory from before the first packet until after the last one, MiB.
    pub daemon_growth_mib: f64,
    /// That of the agent's, MiB.
    pub agent_growth_mib: f64,
    /// Resident memory of the daemon before it had a VPC, MiB.
    pub daemon_empty_mib: f64,
    /// Resident memory of the daemon in the end, MiB.
    pub daemon_mib: f64,
    /// Resident memory of the relay, which has all routes, MiB.
    pub relay_mib: f64,
    /// Time to make the VPC's objects in the relay, s.
    pub objects_s: f64,
}

/// A value of a row.
type Field = fn(&Row) -> f64;

impl Row {
    /// What daemon and agent need for what was learned, MiB.
    fn growth_mib(&self) -> f64 {
        self.daemon_growth_mib + self.agent_growth_mib
    }

    /// The result in a report of `bifrost-fleet`.
    ///
    /// # Errors
    /// It lacks a value.
    fn of(report: &Report, used_destinations: u32, repetition: u32) -> Result<Row> {
        let count = |what| Ok::<_, anyhow::Error>(report.value(what)? as u64);
        Ok(Row {
            mode: Routes::Learned,
            repetition,
            routes: count("routes of the VPC")?,
            used_destinations,
            sent_routes: count("routes that the host was sent")?,
            learned_routes: count("routes that it has learned")?,
            lost_packets: count("first packets without a reply")?,
            first_ms_p50: report.value("round trip of the first packet, P50")?,
            first_ms_p99: report.value("round trip of the first packet, P99")?,
            first_ms_max: report.value("round trip of the first packet, longest")?,
            second_ms_p50: report.value("round trip of the second, P50")?,
            second_ms_p99: report.value("round trip of the second, P99")?,
            second_ms_max: report.value("round trip of the second, longest")?,
            daemon_growth_mib: report.value("what the daemon needs for it")?,
            agent_growth_mib: report.value("what the agent needs for it")?,
            daemon_empty_mib: report.value("the daemon before it had a VPC")?,
            daemon_mib: report.value("the daemon afterwards")?,
            relay_mib: report.value("the relay")?,
            objects_s: report.value("time to make the objects")?,
        })
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { routes, used_destinations, lost_packets, first_ms_p50, first_ms_p99, .. } = self;
        write!(
            f,
            "{used_destinations} of {routes} routes: first packets P50 {first_ms_p50:.2} ms, P99 {first_ms_p99:.2} ms, \
             {lost_packets} lost; {:.1} MiB",
            self.growth_mib()
        )
    }
}

impl Experiment for Learn {
    fn name(&self) -> &'static str {
        "learn"
    }

    fn summary(&self) -> &'static str {
        "First packets to many destinations of a VPC of a million routes that hosts learn, and the memory that it takes"
    }

    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn programs(&self, binaries: &Binaries) -> Vec<PathBuf> {
        binaries.fleet.to_vec()
    }

    fn keeps_awake(&self) -> bool {
        true
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let (routes, used) = size(&lab.options)?;
        turns::each(lab.repetitions(3), &[Routes::Learned], |_, repetition| measure(lab, (routes, used), repetition))
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let of = |field: Field| cell(Spread::of(rows.iter().map(field)));
        let count = |field: fn(&Row) -> u64| match distinct(&rows, field)[..] {
            [] => "-".to_owned(),
            [count] => count.to_string(),
            [least, .., most] => format!("{least} to {most}"),
        };
        let mut packets = Table::new(&["packet", "P50 ms", "P99 ms", "longest ms"]);
        packets.row(vec![
            "first".to_owned(),
            of(|row| row.first_ms_p50),
            of(|row| row.first_ms_p99),
            of(|row| row.first_ms_max),
        ]);
        packets.row(vec![
            "second".to_owned(),
            of(|row| row.second_ms_p50),
            of(|row| row.second_ms_p99),
            of(|row| row.second_ms_max),
        ]);
        let mut memory = Table::new(&["memory", "MiB"]);
        let fields: [(&str, Field); 5] = [
            ("the daemon, for what it has learned", |row| row.daemon_growth_mib),
            ("the agent, for what it has learned", |row| row.agent_growth_mib),
            ("the daemon before it had a VPC", |row| row.daemon_empty_mib),
            ("the daemon in the end", |row| row.daemon_mib),
            ("the relay", |row| row.relay_mib),
        ];
        for (name, field) in fields {
            memory.row(vec![name.to_owned(), of(field)]);
        }
        Ok(format!(
            "In a VPC of {} routes a guest pings {} destinations twice, one after the other. For the first packet to a \
             destination, its host has to ask the relay. In the end the host had learned {} routes; {} others it was \
             sent. First packets without a reply: {}. The relay was given the objects in {} s. Medians, with the \
             minimum and maximum of the repetitions in brackets.\n\n{}\n{}",
            count(|row| row.routes),
            count(|row| row.used_destinations.into()),
            count(|row| row.learned_routes),
            count(|row| row.sent_routes),
            count(|row| row.lost_packets),
            of(|row| row.objects_s),
            packets.render(),
            memory.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let shares: [(&str, [Field; 2]); 3] = [
            ("P50", [|row| row.first_ms_p50, |row| row.second_ms_p50]),
            ("P99", [|row| row.first_ms_p99, |row| row.second_ms_p99]),
            ("longest", [|row| row.first_ms_max, |row| row.second_ms_max]),
        ];
        let labels = shares.map(|(label, _)| label);
        let series = [(Series::on("first packet"), 0), (Series::off("second packet"), 1)];
        let x = ("of all destinations", &labels[..]);
        let panel = Panel::over("round trips", x, ("ms", true), &series, |packet: usize, label| {
            let (_, fields) = shares.iter().find(|(known, _)| known == label)?;
            Spread::of(rows.iter().map(fields.get(packet)?))
        });
        Ok(vec![plot::draw(&directory.join("learn.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        // Without any reply there is no round trip.
        let answered = rows.iter().filter(|row| row.lost_packets < u64::from(row.used_destinations));
        let p99 = median_of(answered.map(|row| row.first_ms_p99));
        let growth = median_of(rows.iter().map(Row::growth_mib));
        let lost = rows.iter().map(|row| row.lost_packets as f64).reduce(f64::max);
        Ok(vec![
            Bar::new("P99 of the first packets' round trips", p99, Sense::AtMost, MOST_MS, "ms"),
            Bar::new("memory of daemon and agent for what was learned", growth, Sense::AtMost, MOST_MIB, "MiB"),
            Bar::new("first packets without a reply, worst repetition", lost, Sense::AtMost, 0.0, "packets").exact(),
        ])
    }
}

/// Numbers of routes and of destinations.
///
/// # Errors
/// More or fewer routes than `bifrost-fleet` accepts.
fn size(options: &Options) -> Result<(u32, u32)> {
    let at = usize::from(options.quick);
    let routes = options.routes.unwrap_or(ROUTES[at]);
    let (least, most) = (*POSSIBLE_ROUTES.start(), *POSSIBLE_ROUTES.end());
    ensure!(POSSIBLE_ROUTES.contains(&routes), "learn does not run with --routes {routes}: use {least} to {most}");
    Ok((routes, options.used.unwrap_or(USED[at])))
}

fn measure(lab: &Lab, (routes, used): (u32, u32), repetition: u32) -> Result<Row> {
    // It and its programs end with the lab, even if that is killed.
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL"]).arg(lab.binaries.fleet()?);
    command.args(["--json", "run", "learn", "--routes", &routes.to_string(), "--used", &used.to_string()]);
    // Its files are removed together with those of the run.
    command.env("TMPDIR", lab.run.directory());
    let log = lab.logs("learn").join(format!("bifrost-fleet-{repetition}.json"));
    let ended = Program::start(command, "bifrost-fleet", &log)?.wait(PATIENCE);
    // If it was interrupted, it has not removed them itself.
    state::remove_namespaces_of_fleets()?;
    let (status, output) = ended?;
    // The status is that of a failure, too, if one of its own bars is missed.
    let Ok(report) = serde_json::from_str(&output) else {
        bail!("bifrost-fleet failed ({status}), and printed to {}: {}", log.display(), tail(&output));
    };
    let row = Row::of(&report, used, repetition).with_context(|| format!("reading {}", log.display()))?;
    ensure!(row.learned_routes > 0, "the host has learned no route (see {})", log.display());
    Ok(row)
}

/// What `bifrost-fleet --json` prints.
#[derive(Debug, Deserialize)]
struct Report {
    rows: Vec<Measured>,
}

#[derive(Debug, Deserialize)]
struct Measured {
    what: String,
    value: f64,
}

impl Report {
    fn value(&self, what: &str) -> Result<f64> {
        let measured = self.rows.iter().find(|row| row.what == what).map(|row| row.value);
        measured.with_context(|| {
            format!("the report has no \"{what}\": build bifrost-fleet from the same sources as bifrost-lab")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    /// The beginning of a report of `bifrost-fleet --json run learn`, and its other values.
    fn report() -> String {
        let more: Vec<String> = [
            ("routes that the host was sent", 66.0),
            ("routes that it has learned", 1001.0),
            ("first packets without a reply", 0.0),
            ("round trip of the first packet, P50", 0.5),
            ("round trip of the first packet, P99", 4.9),
            ("round trip of the first packet, longest", 9.5),
            ("round trip of the second, P50", 0.1),
            ("round trip of the second, P99", 0.2),
            ("round trip of the second, longest", 0.4),
            ("what the daemon needs for it", 6.0),
            ("what the agent needs for it", 3.5),
            ("what the host needs for it", 9.5),
            ("the daemon before it had a VPC", 20.0),
            ("the daemon afterwards", 50.0),
            ("the relay", 900.0),
            ("time to make the objects", 25.5),
        ]
        .iter()
        .map(|(what, value)| format!(r#"{{"what": "{what}", "value": {value}, "unit": "", "bar": 1.0}}"#))
        .collect();
        format!(
            r#"{{"title": "a VPC", "rows": [{{"what": "routes of the VPC", "value": 999999.0, "unit": ""}}, {}]}}"#,
            more.join(", ")
        )
    }

    fn row() -> Row {
        Row::of(&serde_json::from_str(&report()).unwrap(), 1000, 0).unwrap()
    }

    #[test]
    fn a_report_becomes_a_row() {
        let row = row();
        assert_eq!((row.routes, row.used_destinations, row.sent_routes), (999_999, 1000, 66));
        assert_eq!((row.learned_routes, row.lost_packets, row.growth_mib()), (1001, 0, 9.5));
        assert_eq!((row.first_ms_p50, row.first_ms_p99, row.first_ms_max), (0.5, 4.9, 9.5));
        assert_eq!((row.second_ms_p50, row.second_ms_p99, row.second_ms_max), (0.1, 0.2, 0.4));
        assert_eq!((row.daemon_empty_mib, row.daemon_mib, row.relay_mib, row.objects_s), (20.0, 50.0, 900.0, 25.5));
        let other = serde_json::from_str(&report().replace("the relay", "the relay's")).unwrap();
        let error = Row::of(&other, 1000, 0).unwrap_err().to_string();
        assert!(error.contains("no \"the relay\""), "{error}");
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |change: fn(&mut Row)| -> Vec<bool> {
            let mut changed = row();
            change(&mut changed);
            Learn.bars(&to_values(&[changed]).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(|_| {}), [true; 3]);
        assert_eq!(passed(|row| row.first_ms_p99 = 5.1), [false, true, true]);
        assert_eq!(passed(|row| row.agent_growth_mib = 4.1), [true, false, true]);
        assert_eq!(passed(|row| row.daemon_growth_mib = 6.6), [true, false, true]);
        assert_eq!(passed(|row| row.lost_packets = 1), [true, true, false]);
        assert_eq!(passed(|row| row.lost_packets = 1000), [false, true, false], "no reply at all");
        assert!(Learn.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn one_lost_packet_is_not_hidden_by_other_repetitions() {
        let repetition = |repetition, lost_packets| Row { repetition, lost_packets, ..row() };
        let rows = to_values(&[repetition(0, 0), repetition(1, 1), repetition(2, 0)]).unwrap();
        let bars = Learn.bars(&rows).unwrap();
        assert_eq!(bars.iter().map(|bar| bar.passes_within(10.0)).collect::<Vec<_>>(), [true, true, false]);
    }

    #[test]
    fn the_report_shows_numbers_and_times() {
        let repetition = |repetition, learned_routes| Row { repetition, learned_routes, ..row() };
        let report = Learn.report(&to_values(&[repetition(0, 1001), repetition(1, 1004)]).unwrap()).unwrap();
        for part in ["of 999999 routes", "1000 destinations", "learned 1001 to 1004 routes", "reply: 0.", "4.900"] {
            assert!(report.contains(part), "{part}: {report}");
        }
        assert!(Learn.report(&[]).is_ok());
    }

    #[test]
    fn sizes_are_those_of_the_options() {
        let full = Options::default();
        let quick = Options { quick: true, ..full.clone() };
        assert_eq!((size(&full).unwrap(), size(&quick).unwrap()), ((1_000_000, 1_000), (100_000, 200)));
        let chosen = Options { routes: Some(2_000), used: Some(16), ..quick.clone() };
        assert_eq!(size(&chosen).unwrap(), (2_000, 16));
        for routes in [1_999, 1_000_001] {
            let error = size(&Options { routes: Some(routes), ..full.clone() }).unwrap_err().to_string();
            assert!(error.contains(&routes.to_string()) && error.contains("2000 to 1000000"), "{error}");
        }
    }
}
