//! `ecn`: saturated links that mark packets instead of dropping them (RFC 3168).
//!
//! The sender's end of each link marks packets that would wait behind more than a threshold of frames. An ECN-capable
//! network then has no reason to lose packets, and should keep the queue short.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::Value;

use super::full_links::{self, Point, Row, Underneath, distinct_points, spread};
use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::options::Mode;
use crate::results::from_values;
use crate::shape::Shape;
use crate::stats::median_of;

/// Duration of a point, s, and in a quick run.
const SECONDS: (f64, f64) = (30.0, 5.0);
/// TCP flows.
const FLOWS: [u32; 2] = [1, 4];
/// Marking threshold, as a share of the queue's length.
const MARK_SHARE: u32 = 4;

/// The bars: share of the links' capacity used as goodput, share of the queue's length in use, and marked packets per
/// second that reach guests.
const LEAST_FILLED: f64 = 0.95;
const MOST_WAITING: f64 = 0.5;
const LEAST_SEEN_PER_S: f64 = 1.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Ecn;

fn points(lab: &Lab) -> Vec<Point> {
    let full = || vec![Shape::equal(4, 100, 50), Shape::equal(4, 200, 160)];
    let shapes =
        lab.options.shapes.clone().unwrap_or_else(|| if lab.options.quick { full()[..1].to_vec() } else { full() });
    let flows = lab.options.flows.clone().unwrap_or_else(|| FLOWS.to_vec());
    let with = |shape: &Shape, flows: u32, tcp_ecn| Point {
        mark_frames: Some((shape.queue_frames / MARK_SHARE).max(1)),
        tcp_ecn,
        ..Point::new(shape, flows)
    };
    let of_shape = |shape: &Shape| {
        let of_flows = |flows: &u32| [false, true].map(|tcp_ecn| with(shape, *flows, tcp_ecn));
        flows.iter().flat_map(of_flows).collect::<Vec<_>>()
    };
    shapes.iter().flat_map(of_shape).collect()
}

impl Experiment for Ecn {
    fn name(&self) -> &'static str {
        "ecn"
    }

    fn summary(&self) -> &'static str {
        "TCP over saturated links that mark packets instead of dropping them"
    }

    fn keeps_awake(&self) -> bool {
        true
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        full_links::measure(lab, &points(lab), lab.seconds(SECONDS.0, SECONDS.1), lab.repetitions(1))
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        Ok(format!(
            "{} The sender's end of each link marks packets that would wait behind more frames than the given number, \
             with a BPF program that tracks the link's rate. Its queue still drops when it is full.\n\n{}",
            full_links::LEGEND.trim_end(),
            full_links::table(&rows)
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        Ok(vec![full_links::plot(&rows, &directory.join("ecn.svg"))?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let ours = Underneath::Overlay(Mode::Bifrost);
        let mut bars = Vec::new();
        for point in distinct_points(&rows) {
            let median = |field| spread(&rows, ours, &point, field).map(|spread| spread.median);
            let of_ours = rows.iter().filter(|row| row.mode == ours && row.point == point);
            let bar = |what: &str, measured, sense, bound, unit| {
                Bar::new(format!("{point}: {what}"), measured, sense, bound, unit)
            };
            let dropped = of_ours.clone().map(Row::dropped_per_s).reduce(f64::max);
            bars.push(bar("frames that BIFROST made a queue drop", dropped, Sense::AtMost, 0.0, "/s").exact());
            let filled = median(Row::filled);
            bars.push(bar("BIFROST's goodput, of what the links can carry", filled, Sense::AtLeast, LEAST_FILLED, "x"));
            let waiting = median_of(of_ours.map(Row::waiting_of_room));
            bars.push(bar("what waits in the fullest queue, of its room", waiting, Sense::AtMost, MOST_WAITING, "x"));
            if point.tcp_ecn {
                let seen = median(Row::received_ce_per_s);
                bars.push(bar("marked packets that the guest got", seen, Sense::AtLeast, LEAST_SEEN_PER_S, "/s"));
            }
        }
        if bars.is_empty() {
            bars.push(Bar::new("BIFROST over links that mark", None, Sense::AtLeast, LEAST_FILLED, "x"));
        }
        Ok(bars)
    }
}

#[cfg(test)]
mod tests {
    use super::full_links::LinkAtEnd;
    use super::*;
    use crate::results::to_values;

    fn row(tcp_ecn: bool) -> Row {
        let shape = Shape::equal(1, 100, 50);
        Row {
            mode: Underneath::Overlay(Mode::Bifrost),
            point: Point { mark_frames: Some(12), tcp_ecn, ..Point::new(&shape, 1) },
            repetition: 0,
            duration_s: 10.0,
            goodput_by_second_mbit_per_s: vec![0.0, 90.0, 90.0],
            goodput_of_each_mbit_per_s: vec![90.0],
            guest_retransmits: 0,
            received_ce_packets: 100,
            links: vec![LinkAtEnd {
                limit_mbit_per_s: 100,
                sent_mbit_per_s: 98.0,
                dropped_frames: 0,
                dropped_back_frames: 0,
                marked_frames: Some(500),
                idle_rtt_ms: Some(0.1),
                rtt_ms_p50: Some(2.0),
                rtt_ms_p99: Some(3.0),
                probes: 100,
                probes_lost: 0,
            }],
            paths: Vec::new(),
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |change: fn(&mut Row)| -> Vec<bool> {
            let mut row = row(true);
            change(&mut row);
            Ecn.bars(&to_values(&[row]).unwrap()).unwrap().iter().map(Bar::passes).collect()
        };
        assert_eq!(passed(|_| ()), [true; 4]);
        assert_eq!(passed(|row| row.links[0].dropped_back_frames = 1), [false, true, true, true]);
        assert_eq!(passed(|row| row.goodput_by_second_mbit_per_s = vec![0.0, 86.0]), [true, false, true, true]);
        // 50 frames of 1,614 bytes take 6.5 ms.
        assert_eq!(passed(|row| row.links[0].rtt_ms_p50 = Some(3.4)), [true, true, false, true]);
        assert_eq!(passed(|row| row.received_ce_packets = 9), [true, true, true, false]);
        assert_eq!(Ecn.bars(&[]).unwrap().iter().filter(|bar| bar.passes()).count(), 0);
        let without = Ecn.bars(&to_values(&[row(false)]).unwrap()).unwrap();
        assert_eq!(without.len(), 3, "guests without ECN get no marks");
    }

    #[test]
    fn the_report_shows_marks_and_guests_with_ecn() {
        let report = Ecn.report(&to_values(&[row(true), row(false)]).unwrap()).unwrap();
        for text in ["marks from 12 frames, guests with ECN", "guests without ECN", " 50.00 |", " 10.00 |"] {
            assert!(report.contains(text), "{text}: {report}");
        }
    }
}
