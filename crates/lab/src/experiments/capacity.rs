//! `capacity`: what TCP gets out of links that are full, and what it leaves waiting in their queues.
//!
//! Every link between two hosts has a rate and a drop-tail queue of so many frames, in both directions. The control is the
//! kernel's TCP over the bare links, one `iperf3` a link, each with as many flows as the guests have together.

mod measure;
mod row;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::experiment::{Experiment, Lab};
use crate::options::{Cabling, Mode};
use crate::plot::{self, Panel, Series};
use crate::report::Table;
use crate::results::from_values;
use crate::stats::{Spread, cell, median_of};
use crate::topology::shape::Shape;
use crate::turns;

pub use row::{LinkAtEnd, PathAtEnd, Point, Row, Underneath};

/// How long a point lasts, s, and in a quick run.
const SECONDS: (f64, f64) = (30.0, 5.0);
/// TCP flows of one tenant.
const FLOWS: [u32; 4] = [1, 2, 4, 8];
const QUICK_FLOWS: [u32; 2] = [1, 4];
/// Tenants that share the links, each with one flow.
const TENANTS: u8 = 4;
/// Where links also lose packets, percent.
const LOSS_PERCENT: f64 = 1.0;
/// Paths of the receiver, where it has fewer than the sender.
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

/// Everything that is measured: each shape with each number of flows; then, with the first shape, links that lose packets, a receiver
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
        "TCP over links that are full: goodput and queues beside the kernel's TCP over the bare links"
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        ensure!(lab.options.cabling == Cabling::Paths, "capacity limits the links between two hosts: --cabling paths");
        let points = points(lab);
        for Point { shape, .. } in &points {
            let links = shape.mbit_per_s.len();
            ensure!(links == usize::from(lab.options.paths), "{shape} has {links} links: --paths {links}");
        }
        let seconds = lab.seconds(SECONDS.0, SECONDS.1);
        // The kernel's VXLAN has one tenant here.
        let (one, several): (Vec<Point>, Vec<Point>) = points.into_iter().partition(|point| point.tenants == 1);
        let measure = |points: &[Point], has: fn(&Mode) -> bool| {
            let overlays = lab.options.modes.iter().copied().filter(has).map(Underneath::Overlay);
            let networks: Vec<_> = [Underneath::BareLinks].into_iter().chain(overlays).collect();
            turns::alternate(lab.repetitions(1), &networks, points, |network, point, repetition| {
                measure::measure(lab, *network, point, seconds, repetition)
            })
        };
        Ok([measure(&one, |_| true)?, measure(&several, |mode| mode.is_bifrostd())?].concat())
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "links, load",
            "network",
            "goodput Mbit/s",
            "of the control",
            "waiting ms (worst link)",
            "of the control",
            "dropped/s",
            "probes lost",
            "sent again/s",
            "fairness",
        ]);
        for point in distinct_points(&rows) {
            for network in networks(&rows) {
                let of = |field| spread(&rows, network, &point, field);
                if of(Row::goodput_mbit_per_s).is_none() {
                    continue;
                }
                let percent = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |r| format!("{:.1} %", 100.0 * r));
                let fairness = if point.tenants > 1 { cell(of(Row::fairness)) } else { "-".to_owned() };
                table.row(vec![
                    point.to_string(),
                    network.to_string(),
                    cell(of(Row::goodput_mbit_per_s)),
                    percent(of_control(&rows, network, &point)),
                    cell(of(Row::waiting_ms)),
                    percent(queue_of_control(&rows, network, &point)),
                    cell(of(Row::dropped_per_s)),
                    cell(of(Row::probes_lost_percent)),
                    cell(of(Row::retransmits_per_s)),
                    fairness,
                ]);
            }
        }
        Ok(format!(
            "Links are limited by `tbf` with a burst of two frames and a `pfifo`, at both ends; offloads are off. Rates count Ethernet frames; \
             goodput is what `iperf3` received after the first second. The control, *bare_links*, is the kernel's TCP (cubic) between the hosts \
             themselves, one `iperf3` for each link with as many flows as the guests have together, packets of {} bytes. *Waiting*: the median \
             round-trip time of an ICMP echo over a link every 20 ms during the load, less that of the idle link; of the link with the most. \
             *Dropped*: frames that found a queue full, both directions. Hosts have no delay between them but that of the queues: more takes \
             `netem`, which many kernels lack.\n\n{}",
            crate::topology::UNDERLAY_MTU,
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let points = distinct_points(&rows);
        let series: Vec<(Series, Underneath)> =
            networks(&rows).into_iter().map(|network| (network.into(), network)).collect();
        let panel = |title: &str, y: &str, field: fn(&Row) -> f64| {
            let x = ("links, load", points.as_slice());
            Panel::over(title, x, (y, false), &series, |network, point| spread(&rows, network, point, field))
        };
        let panels = [
            panel("goodput over the links' rate", "share", |row| row.goodput_mbit_per_s() / row.limit_mbit_per_s()),
            panel("waiting in the fullest queue", "ms", Row::waiting_ms),
        ];
        Ok(vec![plot::draw(&directory.join("capacity.svg"), &panels, 1)?])
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

impl From<Underneath> for Series {
    fn from(network: Underneath) -> Self {
        match network {
            Underneath::BareLinks => Series::other("bare links"),
            Underneath::Overlay(mode) => mode.into(),
        }
    }
}

/// What was measured, in the order of reports.
fn networks(rows: &[Row]) -> Vec<Underneath> {
    let all = [Underneath::BareLinks].into_iter().chain(Mode::ALL.map(Underneath::Overlay));
    all.filter(|network| rows.iter().any(|row| row.mode == *network)).collect()
}

/// Each once, in the order of their measurement.
fn distinct_points(rows: &[Row]) -> Vec<Point> {
    let mut points: Vec<Point> = Vec::new();
    for row in rows {
        if !points.contains(&row.point) {
            points.push(row.point.clone());
        }
    }
    points
}

fn spread(rows: &[Row], network: Underneath, point: &Point, field: fn(&Row) -> f64) -> Option<Spread> {
    let values = rows.iter().filter(|row| row.mode == network && row.point == *point).map(field);
    Spread::of(values.filter(|value| value.is_finite()))
}

/// The median over repetitions of what `compare` makes of `network`'s row and the control's of the same repetition.
fn against_control(
    rows: &[Row],
    network: Underneath,
    point: &Point,
    compare: impl Fn(&Row, &Row) -> Option<f64>,
) -> Option<f64> {
    let at = |network| rows.iter().filter(move |row: &&Row| row.mode == network && row.point == *point);
    let pairs = at(network).filter_map(|row| {
        let control = at(Underneath::BareLinks).find(|control| control.repetition == row.repetition)?;
        compare(row, control)
    });
    median_of(pairs.collect::<Vec<_>>().into_iter())
}

fn of_control(rows: &[Row], network: Underneath, point: &Point) -> Option<f64> {
    against_control(rows, network, point, |row, control| {
        Some(row.goodput_mbit_per_s() / control.goodput_mbit_per_s()).filter(|ratio| ratio.is_finite())
    })
}

/// Of the link where it is worst.
fn queue_of_control(rows: &[Row], network: Underneath, point: &Point) -> Option<f64> {
    against_control(rows, network, point, |row, control| {
        let ratios =
            row.links.iter().zip(&control.links).map(|(link, bare)| Some(link.waiting_ms()? / bare.waiting_ms()?));
        ratios.collect::<Option<Vec<f64>>>()?.into_iter().max_by(f64::total_cmp)
    })
}

#[cfg(test)]
mod tests;
