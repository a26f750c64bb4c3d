//! Saturated links: the measurement and reports shared by `capacity` and `ecn`.

mod measure;
mod row;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::lab::Lab;
use crate::options::{Cabling, Mode};
use crate::plot::{self, Panel, Series};
use crate::report::Table;
use crate::stats::{Spread, cell, median_of};
use crate::turns;

pub use row::{LinkAtEnd, PathAtEnd, Point, Row, Underneath};

/// The meaning of the columns of [`table`].
pub(super) const LEGEND: &str = "\
Links are limited by `tbf` with a burst of two frames and a `pfifo`, at both ends; offloads are off. Rates count \
Ethernet frames; goodput is the rate that `iperf3` received after the first second. The control, *bare_links*, is the \
kernel's TCP (cubic) between the hosts themselves: one `iperf3` per link, each with as many flows as the guests have \
together, and packets of 1,600 bytes. *Waiting*: the median round-trip time of an ICMP echo over a link every 20 ms \
during the load, minus that of the idle link; for the worst link. *Dropped*: frames that found a full queue, in both \
directions; *marked*: frames that left with CE instead. The only delay between hosts is that of the queues: more delay \
needs `netem`, which many kernels lack.
";

/// Measures every one of `points` over the bare links and over every mode of the run.
///
/// # Errors
/// A shape that does not fit the links, or an error of a measurement.
pub(super) fn measure(lab: &Lab, points: &[Point], seconds: f64, repetitions: u32) -> Result<Vec<Value>> {
    ensure!(
        lab.options.cabling == Cabling::Paths,
        "the experiment limits the links between two hosts: use --cabling paths"
    );
    for Point { shape, .. } in points {
        let links = shape.mbit_per_s.len();
        ensure!(links == usize::from(lab.options.paths), "{shape} has {links} links: --paths {links}");
    }
    // With the kernel's VXLAN there is only one tenant.
    let (one, several): (Vec<Point>, Vec<Point>) = points.iter().cloned().partition(|point| point.tenants == 1);
    let measure = |points: &[Point], has: fn(&Mode) -> bool| {
        let overlays = lab.options.modes.iter().copied().filter(has).map(Underneath::Overlay);
        let networks: Vec<_> = [Underneath::BareLinks].into_iter().chain(overlays).collect();
        turns::alternate(repetitions, &networks, points, |network, point, repetition| {
            measure::measure(lab, *network, point, seconds, repetition)
        })
    };
    Ok([measure(&one, |_| true)?, measure(&several, |mode| mode.is_bifrostd())?].concat())
}

/// A table with a row for each network at each point.
pub(super) fn table(rows: &[Row]) -> String {
    let mut table = Table::new(&[
        "links, load",
        "network",
        "goodput Mbit/s",
        "of the control",
        "waiting ms (worst link)",
        "of the control",
        "dropped/s",
        "marked/s",
        "with CE at the guest/s",
        "probes lost",
        "retransmitted/s",
        "fairness",
    ]);
    for point in distinct_points(rows) {
        for network in networks(rows) {
            let of = |field| spread(rows, network, &point, field);
            if of(Row::goodput_mbit_per_s).is_none() {
                continue;
            }
            let percent = |ratio: Option<f64>| ratio.map_or("-".to_owned(), |r| format!("{:.1} %", 100.0 * r));
            let fairness = if point.tenants > 1 { cell(of(Row::fairness)) } else { "-".to_owned() };
            table.row(vec![
                point.to_string(),
                network.to_string(),
                cell(of(Row::goodput_mbit_per_s)),
                percent(of_control(rows, network, &point)),
                cell(of(Row::waiting_ms)),
                percent(queue_of_control(rows, network, &point)),
                cell(of(Row::dropped_per_s)),
                cell(of(Row::marked_per_s)),
                cell(of(Row::received_ce_per_s)),
                cell(of(Row::probes_lost_percent)),
                cell(of(Row::retransmits_per_s)),
                fairness,
            ]);
        }
    }
    table.render()
}

/// Goodput and queues of each network.
///
/// # Errors
/// The file cannot be written.
pub(super) fn plot(rows: &[Row], file: &Path) -> Result<PathBuf> {
    let points = distinct_points(rows);
    let series: Vec<(Series, Underneath)> =
        networks(rows).into_iter().map(|network| (network.into(), network)).collect();
    let panel = |title: &str, y: &str, field: fn(&Row) -> f64| {
        let x = ("links, load", points.as_slice());
        Panel::over(title, x, (y, false), &series, |network, point| spread(rows, network, point, field))
    };
    let panels = [
        panel("goodput over the links' rate", "share", |row| row.goodput_mbit_per_s() / row.limit_mbit_per_s()),
        panel("waiting in the fullest queue", "ms", Row::waiting_ms),
    ];
    plot::draw(file, &panels, 1)
}

impl From<Underneath> for Series {
    fn from(network: Underneath) -> Self {
        match network {
            Underneath::BareLinks => Series::other("bare links"),
            Underneath::Overlay(mode) => mode.into(),
        }
    }
}

/// The networks that were measured, in the order of reports.
fn networks(rows: &[Row]) -> Vec<Underneath> {
    let all = [Underneath::BareLinks].into_iter().chain(Mode::ALL.map(Underneath::Overlay));
    all.filter(|network| rows.iter().any(|row| row.mode == *network)).collect()
}

/// The distinct points, in the order of their measurement.
pub(super) fn distinct_points(rows: &[Row]) -> Vec<Point> {
    let mut points: Vec<Point> = Vec::new();
    for row in rows {
        if !points.contains(&row.point) {
            points.push(row.point.clone());
        }
    }
    points
}

pub(super) fn spread(rows: &[Row], network: Underneath, point: &Point, field: fn(&Row) -> f64) -> Option<Spread> {
    let values = rows.iter().filter(|row| row.mode == network && row.point == *point).map(field);
    Spread::of(values.filter(|value| value.is_finite()))
}

/// The median over repetitions of `compare`, applied to `network`'s row and the control's row of the same repetition.
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

pub(super) fn of_control(rows: &[Row], network: Underneath, point: &Point) -> Option<f64> {
    against_control(rows, network, point, |row, control| {
        Some(row.goodput_mbit_per_s() / control.goodput_mbit_per_s()).filter(|ratio| ratio.is_finite())
    })
}

/// The queue of the worst link, relative to the control's.
pub(super) fn queue_of_control(rows: &[Row], network: Underneath, point: &Point) -> Option<f64> {
    against_control(rows, network, point, |row, control| {
        let ratios =
            row.links.iter().zip(&control.links).map(|(link, bare)| Some(link.waiting_ms()? / bare.waiting_ms()?));
        ratios.collect::<Option<Vec<f64>>>()?.into_iter().max_by(f64::total_cmp)
    })
}
