//! `rdm-sort`: a distributed sort between two hosts with packet loss, over messages and over TCP.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::experiments::rdm_hosts::{self, MTU, OFTEN, SERVER, Transport, finish, number};
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel};
use crate::process::Program;
use crate::report::Table;
use crate::results::from_values;
use crate::stats::{Spread, cell, distinct_values, paired_ratio};
use crate::turns;

/// Records of 100 bytes that a mapper sends to each reducer, on average: a megabyte, as with the paper's 1000 mappers
/// and 1000 reducers.
const RECORDS: u64 = 10_000;
/// Time to start and connect all processes.
const START: Duration = Duration::from_secs(3);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct RdmSort;

/// The result of one sort.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The transport of the records.
    pub mode: Transport,
    /// Packet loss in each direction, percent.
    pub loss_percent: f64,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of mappers, and of reducers; a process each.
    pub mappers: u32,
    /// Number of generated records.
    pub records: u64,
    /// Whether the reducers have all records, each once, and in order.
    pub correct: bool,
    /// Time from the start until reducers have all records of a mapper, mean of the mappers, s.
    pub run_s: f64,
    /// The same for the last mapper, s.
    pub run_s_max: f64,
    /// Part of the mean in which a mapper waited for the network, s.
    pub block_s: f64,
    /// Packets lost.
    pub dropped_packets: u64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let verdict = if self.correct { "correct" } else { "WRONG" };
        write!(f, "{}: {:.3} s, of which {:.3} s blocked; {verdict}", self.mode, self.run_s, self.block_s)
    }
}

#[derive(Debug, Clone, Copy)]
struct Point(f64);

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.3} % lost", self.0)
    }
}

impl Experiment for RdmSort {
    fn name(&self) -> &'static str {
        "rdm-sort"
    }

    fn summary(&self) -> &'static str {
        "A distributed sort over messages with packet loss, compared with RC and with TCP (cubic and BBR)"
    }

    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let points: Vec<Point> = lab.losses(&[0.0, OFTEN], &[0.0, OFTEN]).into_iter().map(Point).collect();
        turns::measure(
            lab.repetitions(5),
            &Transport::WITH_RC,
            &points,
            |transport, _| rdm_hosts::create(lab, transport.congestion().as_deref()),
            |transport, hosts, point, repetition| measure(lab, hosts, *transport, point.0, repetition),
        )
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table =
            Table::new(&["lost, %", "over", "run time, s", "of the last mapper, s", "blocked, s", "correct"]);
        for loss in distinct_values(rows.iter().map(|row| row.loss_percent)) {
            for mode in Transport::WITH_RC {
                let correct = rows.iter().filter(|row| is(row, mode, loss)).all(|row| row.correct);
                table.row(vec![
                    format!("{loss:.3}"),
                    mode.to_string(),
                    cell(spread(&rows, mode, loss, |row| row.run_s)),
                    cell(spread(&rows, mode, loss, |row| row.run_s_max)),
                    cell(spread(&rows, mode, loss, |row| row.block_s)),
                    if correct { "all" } else { "NOT ALL" }.to_owned(),
                ]);
            }
        }
        let count = rows.first().map_or(0, |row| row.mappers);
        Ok(format!(
            "{count} mappers on one host and {count} reducers on the other, a process each; each mapper sends a \
             megabyte to each reducer, in blocks of 64 KB. Links have an MTU of {MTU} and no offloads; each host has a \
             processor. nftables drops packets at random in both directions. *Run time* is the mean over mappers of \
             the time until reducers have all their records; *blocked* is the part of it in which they waited for the \
             network. Medians, with the minimum and maximum of the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let losses = distinct_values(rows.iter().map(|row| row.loss_percent));
        let labels: Vec<String> = losses.iter().map(|loss| format!("{loss:.3}")).collect();
        let panel = |title, field: fn(&Row) -> f64| {
            Panel::over(title, ("packets lost [%]", &labels[..]), ("s", false), &rdm_hosts::series(), |mode, label| {
                let at = labels.iter().position(|known| known == label)?;
                spread(&rows, mode, *losses.get(at)?, field)
            })
        };
        let panels = [panel("run time of a mapper", |row| row.run_s), panel("blocked", |row| row.block_s)];
        Ok(vec![plot::draw(&directory.join("sort.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let wrong = (!rows.is_empty()).then(|| rows.iter().filter(|row| !row.correct).count() as f64);
        let ratio = |over: (Transport, f64), under: (Transport, f64), field: fn(&Row) -> f64| {
            let of = |(mode, loss)| move |row: &Row| is(row, mode, loss);
            paired_ratio(&rows, |row| row.repetition, (of(over), of(under)), field)
        };
        let (lossy, rc) = ((Transport::Messages, OFTEN), (Transport::Rc, OFTEN));
        let own = ratio(lossy, (Transport::Messages, 0.0), |row| row.run_s);
        let (run, block) = (ratio(lossy, rc, |row| row.run_s), ratio(lossy, rc, |row| row.block_s));
        Ok(vec![
            Bar::new("sorts with a wrong result", wrong, Sense::AtMost, 0.0, "").exact(),
            Bar::new("run time at 1/256, of its own without loss", own, Sense::AtMost, 1.25, "x"),
            // The paper's values: 16 and 10 % shorter, without loss.
            Bar::new("run time at 1/256 beside RC", run, Sense::AtMost, 0.84, "x"),
            Bar::new("blocked at 1/256 beside RC", block, Sense::AtMost, 0.9, "x"),
        ])
    }
}

fn is(row: &Row, mode: Transport, loss: f64) -> bool {
    row.mode == mode && (row.loss_percent - loss).abs() < 1e-9
}

fn spread(rows: &[Row], mode: Transport, loss: f64, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| is(row, mode, loss)).map(field))
}

fn measure(lab: &Lab, hosts: &[Namespace; 2], mode: Transport, loss: f64, repetition: u32) -> Result<Row> {
    rdm_hosts::lose(hosts, loss)?;
    let count: u32 = if lab.options.quick { 8 } else { 16 };
    let logs = lab.logs(&format!("{mode}-{loss:.3}-{repetition}"));
    let start = |host: usize, what: &str, words: &[String], name: &str| -> Result<Program> {
        let words: Vec<&str> = words.iter().map(String::as_str).collect();
        rdm_hosts::start(lab, hosts, host, mode, &[&["sort", what][..], &words].concat(), &logs.join(name))
    };
    let words = |pairs: &[(&str, String)]| -> Vec<String> {
        pairs.iter().flat_map(|(name, value)| [(*name).to_owned(), value.clone()]).collect()
    };
    let reducers: Result<Vec<Program>> = (0..count)
        .map(|at| {
            let port = (PORT + at).to_string();
            let (all, number) = (count.to_string(), at.to_string());
            let words = words(&[("-p", port), ("--mappers", all.clone()), ("--reducers", all), ("--number", number)]);
            start(1, "reduce", &words, &format!("reduce-{at}"))
        })
        .collect();
    let reducers = reducers?;
    let to: Vec<String> = (0..count).map(|at| format!("[{SERVER}]:{}", PORT + at)).collect();
    let begin = SystemTime::now() + START;
    let begin_ms = begin.duration_since(SystemTime::UNIX_EPOCH).context("the clock")?.as_millis();
    let mappers: Result<Vec<Program>> = (0..count)
        .map(|at| {
            let records = (RECORDS * u64::from(count)).to_string();
            // Each repetition sorts other records.
            let seed = ((u64::from(repetition) << 32) | u64::from(at)).to_string();
            let times = begin_ms.to_string();
            let words =
                words(&[("--reducers", to.join(",")), ("--records", records), ("--seed", seed), ("--begin-ms", times)]);
            start(0, "map", &words, &format!("map-{at}"))
        })
        .collect();
    let read = |programs: Vec<Program>| programs.into_iter().map(finish).collect::<Result<Vec<Value>>>();
    let (mapped, reduced) = (read(mappers?)?, read(reducers)?);
    let sum = |reports: &[Value], field: &str| -> Option<u64> {
        reports.iter().try_fold(0u64, |sum, report| Some(sum.wrapping_add(report[field].as_u64()?)))
    };
    let same = |field| sum(&mapped, field).is_some_and(|sum_of_mappers| sum(&reduced, field) == Some(sum_of_mappers));
    let times = |pointer: &str| mapped.iter().map(|report| number(report, pointer)).collect::<Result<Vec<f64>>>();
    let (run, block) = (times("/run_s")?, times("/block_s")?);
    Ok(Row {
        mode,
        loss_percent: loss,
        repetition,
        mappers: count,
        records: sum(&mapped, "records").context("no records in a report of bifrost-perf")?,
        correct: same("records") && same("checksum") && reduced.iter().all(|report| report["sorted"] == true),
        run_s: crate::stats::mean(&run),
        run_s_max: run.iter().copied().fold(0.0, f64::max),
        block_s: crate::stats::mean(&block),
        dropped_packets: rdm_hosts::dropped(hosts)?,
    })
}

/// Port of the first reducer.
const PORT: u32 = 7000;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    #[test]
    fn each_bar_can_fail() {
        let row = |mode, time: f64| Row {
            mode,
            loss_percent: OFTEN,
            repetition: 0,
            mappers: 8,
            records: 640_000,
            correct: true,
            run_s: time,
            run_s_max: time,
            block_s: time / 2.0,
            dropped_packets: 100,
        };
        let missed = |change: fn(&mut Vec<Row>)| {
            let free = Row { loss_percent: 0.0, ..row(Transport::Messages, 0.8) };
            let mut rows = vec![free, row(Transport::Messages, 0.8), row(Transport::Rc, 1.0), row(Transport::Bbr, 0.5)];
            change(&mut rows);
            let bars = RdmSort.bars(&to_values(&rows).unwrap()).unwrap();
            bars.iter().enumerate().filter(|(_, bar)| !bar.passes()).map(|(at, _)| at).collect::<Vec<_>>()
        };
        assert_eq!(missed(|_| {}), [0; 0]);
        assert_eq!(missed(|rows| rows[3].correct = false), [0], "of TCP, too");
        assert_eq!(missed(|rows| rows[0].run_s = 0.6), [1]);
        assert_eq!(missed(|rows| rows[2].run_s = 0.9), [2]);
        assert_eq!(missed(|rows| rows[2].block_s = 0.4), [3]);
        assert_eq!(missed(|rows| rows.truncate(2)), [2, 3], "no reference");
    }
}
