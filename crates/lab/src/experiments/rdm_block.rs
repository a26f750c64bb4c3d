//! `rdm-block`: block storage with three back ends, over messages and over TCP, with packet loss.

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::Result;
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
use crate::stats::{Spread, cell, distinct, distinct_values, paired_ratio};
use crate::turns;

/// Number of back ends, and the first one's port.
const BACK_ENDS: u32 = 3;
const PORT: u32 = 7000;
/// Number of concurrent operations.
const DEPTH: u32 = 16;
/// Bytes of a small operation.
const SHORT: u32 = 4096;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct RdmBlock;

/// The result of one run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The transport of the operations.
    pub mode: Transport,
    /// Packet loss in each direction, percent.
    pub loss_percent: f64,
    /// Bytes of an operation; 0: a mix from 4 to 128 KiB.
    pub operation_bytes: u32,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Reads and writes per second.
    pub operations_per_s: f64,
    /// Payload read and written, Gbit/s; a write to three back ends counts once.
    pub gbit_per_s: f64,
    /// Median time of reads, ms.
    pub read_ms_p50: f64,
    /// 99th percentile, ms.
    pub read_ms_p99: f64,
    /// 99.9th percentile, ms.
    pub read_ms_p99_9: f64,
    /// Median time of writes, until all back ends have answered, ms.
    pub write_ms_p50: f64,
    /// 99th percentile, ms.
    pub write_ms_p99: f64,
    /// 99.9th percentile, ms.
    pub write_ms_p99_9: f64,
    /// Packets lost.
    pub dropped_packets: u64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rate, write) = (self.operations_per_s, self.write_ms_p99_9);
        write!(f, "{}: {rate:.0} operations/s, P99.9 of writes {write:.2} ms", self.mode)
    }
}

#[derive(Debug, Clone, Copy)]
struct Point {
    bytes: u32,
    loss: f64,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:.3} % lost", name(self.bytes), self.loss)
    }
}

fn name(bytes: u32) -> String {
    if bytes == 0 { "4 to 128 KiB".to_owned() } else { format!("{} KiB", bytes / 1024) }
}

impl Experiment for RdmBlock {
    fn name(&self) -> &'static str {
        "rdm-block"
    }

    fn summary(&self) -> &'static str {
        "Block storage with three back ends over messages with packet loss, compared with RC and with TCP (cubic \
         and BBR)"
    }

    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let losses = lab.losses(&[0.0, OFTEN], &[0.0, OFTEN]);
        let points: Vec<Point> = [SHORT, 0]
            .into_iter()
            .flat_map(|bytes| losses.iter().map(move |loss| Point { bytes, loss: *loss }))
            .collect();
        turns::measure(
            lab.repetitions(5),
            &Transport::WITH_RC,
            &points,
            |transport, _| rdm_hosts::create(lab, transport.congestion().as_deref()),
            |transport, hosts, point, repetition| measure(lab, hosts, *transport, *point, repetition),
        )
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let titles = ["operations", "lost, %", "over", "operations/s", "reads: P50, ms", "P99, ms", "P99.9, ms"];
        let mut table = Table::new(&[&titles[..], &["writes: P50, ms", "P99, ms", "P99.9, ms"]].concat());
        for bytes in distinct(&rows, |row| row.operation_bytes).into_iter().rev() {
            for loss in distinct_values(rows.iter().map(|row| row.loss_percent)) {
                for mode in Transport::WITH_RC {
                    let of = |field: fn(&Row) -> f64| cell(spread(&rows, (mode, loss, bytes), field));
                    table.row(vec![
                        name(bytes),
                        format!("{loss:.3}"),
                        mode.to_string(),
                        of(|row| row.operations_per_s),
                        of(|row| row.read_ms_p50),
                        of(|row| row.read_ms_p99),
                        of(|row| row.read_ms_p99_9),
                        of(|row| row.write_ms_p50),
                        of(|row| row.write_ms_p99),
                        of(|row| row.write_ms_p99_9),
                    ]);
                }
            }
        }
        Ok(format!(
            "A front end on one host and {BACK_ENDS} back ends on the other, a process each. Of 100 operations 70 read \
             from one back end, and 30 write to all of them; {DEPTH} operations are outstanding, with one connection \
             to each back end. Mixed operations: 60 of 100 have 4 KiB, 25 16 KiB, 10 64 KiB, 5 128 KiB. Back ends keep \
             blocks in memory; data that is read is verified. Links have an MTU of {MTU} and no offloads; each host \
             has a processor. nftables drops packets at random in both directions. Medians, with the minimum and \
             maximum of the repetitions in brackets.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let losses = distinct_values(rows.iter().map(|row| row.loss_percent));
        let labels: Vec<String> = losses.iter().map(|loss| format!("{loss:.3}")).collect();
        let panel = |bytes, y: (&str, bool), field: fn(&Row) -> f64| {
            Panel::over(&name(bytes), ("packets lost [%]", &labels[..]), y, &rdm_hosts::series(), |mode, label| {
                let at = labels.iter().position(|known| known == label)?;
                spread(&rows, (mode, *losses.get(at)?, bytes), field)
            })
        };
        let panels = [
            panel(SHORT, ("operations/s", false), |row| row.operations_per_s),
            panel(SHORT, ("P99.9 of writes [ms]", true), |row| row.write_ms_p99_9),
            panel(0, ("operations/s", false), |row| row.operations_per_s),
            panel(0, ("P99.9 of writes [ms]", true), |row| row.write_ms_p99_9),
        ];
        Ok(vec![plot::draw(&directory.join("block.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut bars = Vec::new();
        for bytes in [SHORT, 0] {
            let ratio = |over: (Transport, f64), under: (Transport, f64), field: fn(&Row) -> f64| {
                let of = |(mode, loss)| move |row: &Row| is(row, (mode, loss, bytes));
                paired_ratio(&rows, |row| row.repetition, (of(over), of(under)), field)
            };
            let (free, lossy) = ((Transport::Messages, 0.0), (Transport::Messages, OFTEN));
            let rate: fn(&Row) -> f64 = |row| row.operations_per_s;
            let tail = |tcp| ratio(lossy, (tcp, OFTEN), |row| row.write_ms_p99_9);
            let tails = tail(Transport::Cubic).zip(tail(Transport::Bbr)).map(|(cubic, bbr)| cubic.max(bbr));
            let name = name(bytes);
            let own = format!("{name}: operations a second at 1/256, of its own without loss");
            let beside = format!("{name}: operations a second without loss beside RC");
            let tcp = format!("{name}: P99.9 of writes at 1/256 beside the better of cubic and BBR");
            bars.extend([
                Bar::new(own, ratio(lossy, free, rate), Sense::AtLeast, 0.9, "x"),
                Bar::new(beside, ratio(free, (Transport::Rc, 0.0), rate), Sense::AtLeast, 0.9, "x"),
                Bar::new(tcp, tails, Sense::AtMost, 1.0, "x"),
            ]);
        }
        Ok(bars)
    }
}

fn is(row: &Row, (mode, loss, bytes): (Transport, f64, u32)) -> bool {
    row.mode == mode && row.operation_bytes == bytes && (row.loss_percent - loss).abs() < 1e-9
}

fn spread(rows: &[Row], point: (Transport, f64, u32), field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| is(row, point)).map(field))
}

fn measure(lab: &Lab, hosts: &[Namespace; 2], mode: Transport, point: Point, repetition: u32) -> Result<Row> {
    let Point { bytes, loss } = point;
    rdm_hosts::lose(hosts, loss)?;
    let logs = lab.logs(&format!("{mode}-{bytes}-{loss:.3}-{repetition}"));
    let start = |host: usize, words: &[&str], name: &str| -> Result<Program> {
        rdm_hosts::start(lab, hosts, host, mode, &[&["block"], words].concat(), &logs.join(name))
    };
    let back_ends: Result<Vec<Program>> = (0..BACK_ENDS)
        .map(|at| start(1, &["serve", "--clients", "1", "-p", &(PORT + at).to_string()], &format!("back-end-{at}")))
        .collect();
    let mut back_ends = back_ends?;
    let to: Vec<String> = (0..BACK_ENDS).map(|at| format!("[{SERVER}]:{}", PORT + at)).collect();
    let (to, size, depth) = (to.join(","), bytes.to_string(), DEPTH.to_string());
    let seconds = (lab.seconds(5.0, 2.0).ceil() as u32).to_string();
    let report =
        finish(start(0, &["run", "--backends", &to, "-s", &size, "-t", &depth, "-D", &seconds], "front-end")?)?;
    // The back ends exit with their client.
    drop(back_ends.drain(..));
    let ms = |of: &str, key: &str| number(&report, &format!("/{of}_latency_us/{key}")).map(|us| us / 1e3);
    Ok(Row {
        mode,
        loss_percent: loss,
        operation_bytes: bytes,
        repetition,
        operations_per_s: number(&report, "/operations_per_s")?,
        gbit_per_s: number(&report, "/gbit_per_s")?,
        read_ms_p50: ms("read", "p50")?,
        read_ms_p99: ms("read", "p99")?,
        read_ms_p99_9: ms("read", "p99_9")?,
        write_ms_p50: ms("write", "p50")?,
        write_ms_p99: ms("write", "p99")?,
        write_ms_p99_9: ms("write", "p99_9")?,
        dropped_packets: rdm_hosts::dropped(hosts)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    #[test]
    fn each_bar_can_fail() {
        let row = |mode, loss_percent, operation_bytes, rate: f64, ms: f64| Row {
            mode,
            loss_percent,
            operation_bytes,
            repetition: 0,
            operations_per_s: rate,
            gbit_per_s: 1.0,
            read_ms_p50: 0.1,
            read_ms_p99: 1.0,
            read_ms_p99_9: ms,
            write_ms_p50: 0.1,
            write_ms_p99: 1.0,
            write_ms_p99_9: ms,
            dropped_packets: 100,
        };
        let missed = |change: fn(&mut Vec<Row>)| {
            let mut rows: Vec<Row> = [SHORT, 0]
                .into_iter()
                .flat_map(|bytes| {
                    [
                        row(Transport::Messages, 0.0, bytes, 1000.0, 1.0),
                        row(Transport::Messages, OFTEN, bytes, 950.0, 2.0),
                        row(Transport::Rc, 0.0, bytes, 1050.0, 1.0),
                        row(Transport::Cubic, OFTEN, bytes, 1000.0, 200.0),
                        row(Transport::Bbr, OFTEN, bytes, 900.0, 3.0),
                    ]
                })
                .collect();
            change(&mut rows);
            let bars = RdmBlock.bars(&to_values(&rows).unwrap()).unwrap();
            bars.iter().enumerate().filter(|(_, bar)| !bar.passes()).map(|(at, _)| at).collect::<Vec<_>>()
        };
        assert_eq!(missed(|_| {}), [0; 0]);
        assert_eq!(missed(|rows| rows[1].operations_per_s = 890.0), [0]);
        assert_eq!(missed(|rows| rows[2].operations_per_s = 1200.0), [1]);
        assert_eq!(missed(|rows| rows[9].write_ms_p99_9 = 1.9), [5], "relative to the better of the two");
        assert_eq!(missed(|rows| rows.truncate(7)), [4, 5], "no reference");
    }
}
