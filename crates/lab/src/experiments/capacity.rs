//! `capacity`: TCP's goodput over saturated links, and the queues that it builds up there.
//!
//! Every link between two hosts has a rate and a drop-tail queue limited in frames, in both directions. The control
//! is the kernel's TCP over the bare links: one `iperf3` per link, each with as many flows as the guests have
//! together.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::Value;

use super::full_links::{self, Point, Row, Underneath, distinct_points, of_control, queue_of_control, spread};
use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::lab::Lab;
use crate::options::Mode;
use crate::results::from_values;
use crate::shape::Shape;

/// Duration of a point, s, and in a quick run.
const SECONDS: (f64, f64) = (30.0, 5.0);
/// Numbers of TCP flows of one tenant.
const FLOWS: [u32; 4] = [1, 2, 4, 8];
const QUICK_FLOWS: [u32; 2] = [1, 4];
/// Number of tenants that share the links, each with one flow.
const TENANTS: u8 = 4;
/// Random loss at the point with loss, percent.
const LOSS_PERCENT: f64 = 1.0;
/// Number of the receiver's paths at the point where it has fewer than the sender.
const FEWER_PATHS: u8 = 2;

/// The bars.
const LEAST_OF_CONTROL: f64 = 0.9;
const MOST_OF_QUEUE: f64 = 0.5;
const LEAST_FAIRNESS: f64 = 0.95;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Capacity;

fn shapes(quick: bool) -> Vec<Shape> {
    let uneven = Shape { mbit_per_s: vec![100, 100, 100, 20], queue_frames: 50 };
    if quick {
        return vec![Shape::equal(4, 100, 50), uneven];
    }
    vec![Shape::equal(4, 100, 50), Shape::equal(4, 200, 160), uneven, Shape::equal(4, 500, 400)]
}

/// All points: each shape with each number of flows; then, with the first shape, links with random loss, a receiver
/// with fewer paths, and four tenants.
fn points(lab: &Lab) -> Vec<Point> {
    let quick = lab.options.quick;
    let shapes = lab.options.shapes.clone().unwrap_or_else(|| shapes(quick));
    let flows = lab.options.flows.clone().unwrap_or_else(|| if quick { QUICK_FLOWS.to_vec() } else { FLOWS.to_vec() });
    let losses = lab.losses(&[LOSS_PERCENT], &[LOSS_PERCENT]);
    let mut points = Vec::new();
    for shape in &shapes {
        points.extend(flows.iter().map(|flows| Point::new(shape, *flows)));
    }
    if let (Some(shape), Some(most)) = (shapes.first(), flows.iter().max()) {
        let point = Point::new(shape, *most);
        points.extend(losses.iter().filter(|l| **l > 0.0).map(|l| Point { loss_percent: *l, ..point.clone() }));
        if !quick && lab.options.paths > FEWER_PATHS {
            points.push(Point { receiver_paths: Some(FEWER_PATHS), ..point });
        }
        points.push(Point { tenants: TENANTS, ..Point::new(shape, 1) });
    }
    points
}

impl Experiment for Capacity {
    fn name(&self) -> &'static str {
        "capacity"
    }

    fn summary(&self) -> &'static str {
        "TCP over saturated links: goodput and queues, compared with the kernel's TCP over the bare links"
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let points = points(lab);
        let seconds = lab.seconds(SECONDS.0, SECONDS.1);
        full_links::measure(lab, &points, seconds, lab.repetitions(1))
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        Ok(format!("{}\n{}", full_links::LEGEND, full_links::table(&rows)))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        Ok(vec![full_links::plot(&rows, &directory.join("capacity.svg"))?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let ours = Underneath::Overlay(Mode::Bifrost);
        let mut bars = Vec::new();
        for point in distinct_points(&rows) {
            bars.push(Bar::new(
                format!("{point}: BIFROST's goodput over the bare links'"),
                of_control(&rows, ours, &point),
                Sense::AtLeast,
                LEAST_OF_CONTROL,
                "x",
            ));
            bars.push(Bar::new(
                format!("{point}: what waits in the link that is worst, over what cubic leaves in the bare link"),
                queue_of_control(&rows, ours, &point),
                Sense::AtMost,
                MOST_OF_QUEUE,
                "x",
            ));
            if point.tenants > 1 {
                let fairness = spread(&rows, ours, &point, Row::fairness).map(|spread| spread.median);
                let name = format!("{point}: Jain's index of the tenants' goodput");
                bars.push(Bar::new(name, fairness, Sense::AtLeast, LEAST_FAIRNESS, ""));
            }
        }
        if bars.is_empty() {
            bars.push(Bar::new("BIFROST's goodput over the bare links'", None, Sense::AtLeast, LEAST_OF_CONTROL, "x"));
        }
        Ok(bars)
    }
}

#[cfg(test)]
mod tests;
