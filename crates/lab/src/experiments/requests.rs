//! The common part of the experiments about services of the switch: `ab` in one container requests 1 KB from `nginx` in
//! another one, in several setups in turn, with a connection for each request and over persistent ones.

pub(super) mod networks;

use std::fmt;
use std::net::Ipv4Addr;

use anyhow::Result;
use serde::{Deserialize, Serialize};

pub use super::nginx::Connections;
use crate::bars::{Bar, Sense};
use crate::interrupt;
use crate::lab::Lab;
use crate::plot::{Panel, Series};
use crate::processor::{self, LEGEND, Reading, Shares};
use crate::programs::apache_bench::{self, Load};
use crate::programs::nginx::PORT;
use crate::progress::Progress;
use crate::report::{Table, factor};
use crate::stats::{Spread, cell, middle, paired_ratio};
use crate::topology::Guest;

/// Number of clients: enough to keep the server busy.
pub const CLIENTS: u32 = 16;
/// Required ratio of requests over persistent connections to those without the service: it may cost a tenth.
const LEAST_SHARE: f64 = 0.9;

/// What is between client and server.
pub trait Setup: Copy + PartialEq + fmt::Display + 'static {
    /// All setups, in the order of measurement and report.
    const ALL: &'static [Self];
}

/// One run of `ab`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row<S> {
    /// What is between client and server.
    #[serde(rename = "mode")]
    pub through: S,
    /// Whether connections are persistent.
    pub connections: Connections,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of clients, each with one request in flight.
    pub clients: u32,
    /// Requests answered.
    pub requests: u64,
    /// Requests answered per second; with short connections, also connections opened and closed.
    pub rps: f64,
    /// Median time of a request, including its connection setup, ms.
    pub latency_ms_p50: f64,
    /// 99th percentile, ms.
    pub latency_ms_p99: f64,
    /// Use of all processors, percent.
    pub processor_percent: Shares,
}

/// A progress bar for `repetitions` of [`measure`] in all setups.
pub fn progress<S: Setup>(repetitions: u32) -> Progress {
    Progress::new((S::ALL.len() * Connections::ALL.len()) as u64 * u64::from(repetitions))
}

/// Measures both kinds of connections from `client` to `server`. Logs go to the part `label` of the lab's logs.
///
/// # Errors
/// A request fails, or an interruption.
pub fn measure<S: Setup>(
    lab: &Lab,
    progress: &mut Progress,
    (label, repetition): (&str, u32),
    through: S,
    (client, server): (&Guest, Ipv4Addr),
) -> Result<Vec<Row<S>>> {
    client.allow_many_connections()?;
    let measure = |connections| {
        interrupt::check()?;
        progress.begin(&format!("{through}, {connections}"));
        let load = Load {
            server: (server, PORT).into(),
            clients: CLIENTS,
            seconds: lab.seconds(5.0, 1.0).ceil() as u32,
            keep_alive: connections == Connections::Persistent,
        };
        let before = Reading::take()?;
        let measured = apache_bench::run(client, load, &lab.logs(label), &format!("{through}-{connections}"))?;
        let processor_percent = Reading::take()?.since(&before);
        progress.end(&format!("{through:<14} {connections:<10}: {:.0} requests/s", measured.rps));
        Ok(Row {
            through,
            connections,
            repetition,
            clients: CLIENTS,
            requests: measured.requests,
            rps: measured.rps,
            latency_ms_p50: measured.latency_ms.p50,
            latency_ms_p99: measured.latency_ms.p99,
            processor_percent,
        })
    };
    Connections::ALL.into_iter().map(measure).collect()
}

/// A table for each kind of connections, with a column of ratios for each of `references` and its title.
pub fn tables<S: Setup>(rows: &[Row<S>], references: &[(S, &str)]) -> String {
    let mut text = String::new();
    let titles: Vec<&str> = references.iter().map(|(_, title)| *title).collect();
    for connections in Connections::ALL {
        text += match connections {
            Connections::Short => "\n### A connection for each request\n\n",
            Connections::Persistent => "\n### Persistent connections\n\n",
        };
        let mut table = Table::new(&[&["through", "requests/s", "P50 ms", "P99 ms"], &titles[..]].concat());
        for &through in S::ALL {
            let of = |through, field| spread(rows, through, connections, field);
            let rps: fn(&Row<S>) -> f64 = |r| r.rps;
            let mut cells = vec![
                through.to_string(),
                cell(of(through, rps)),
                cell(of(through, |r| r.latency_ms_p50)),
                cell(of(through, |r| r.latency_ms_p99)),
            ];
            let ratio = |(other, _): &(S, &str)| factor(middle(of(through, rps)), middle(of(*other, rps)));
            cells.extend(references.iter().map(ratio));
            table.row(cells);
        }
        text += &table.render();
    }
    text + &profile(rows)
}

/// What limits the rates: the use of the processors.
fn profile<S: Setup>(rows: &[Row<S>]) -> String {
    let points = Connections::ALL.into_iter().flat_map(|kind| S::ALL.iter().map(move |&through| (kind, through)));
    let shares = points.map(|(kind, through)| {
        let here = rows.iter().filter(|row| row.connections == kind && row.through == through);
        ([kind.to_string(), through.to_string()], here.map(|row| &row.processor_percent).collect())
    });
    format!(
        "\n### Use of the processors\n\nPercent of both, medians; {LEGEND}:\n\n{}",
        processor::table(["connections", "through"], shares)
    )
}

/// Requests per second in each setup.
pub fn panel<S: Setup>(rows: &[Row<S>]) -> Panel {
    let kinds = [(Series::on("short"), Connections::Short), (Series::off("persistent"), Connections::Persistent)];
    Panel::over("requests/s", ("through", S::ALL), ("requests/s", false), &kinds, |connections, through| {
        spread(rows, *through, connections, |r| r.rps)
    })
}

/// The bar: requests over persistent connections in the setup `with`, of those in the setup `without` the service.
pub fn share<S: Setup>(rows: &[Row<S>], with: S, without: S) -> Bar {
    let name = format!("{with}: requests over persistent connections, of those of `{without}`");
    Bar::new(name, ratio(rows, Connections::Persistent, (with, without)), Sense::AtLeast, LEAST_SHARE, "x")
}

/// The bar: new connections per second in the setup `of`, over those in `reference`, at least `bound`.
pub fn new_connections<S: Setup>(rows: &[Row<S>], (of, reference): (S, S), bound: f64) -> Bar {
    let name = format!("{of}: new connections/s over those of `{reference}`");
    Bar::new(name, ratio(rows, Connections::Short, (of, reference)), Sense::AtLeast, bound, "x")
}

/// The median over repetitions of the ratio of two setups' requests per second.
fn ratio<S: Setup>(rows: &[Row<S>], connections: Connections, (over, under): (S, S)) -> Option<f64> {
    let is = |through| move |r: &Row<S>| r.through == through && r.connections == connections;
    paired_ratio(rows, |r| r.repetition, (is(over), is(under)), |r| r.rps)
}

/// The median over repetitions; `None` if it was not measured.
fn spread<S: Setup>(
    rows: &[Row<S>],
    through: S,
    connections: Connections,
    field: fn(&Row<S>) -> f64,
) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.through == through && row.connections == connections).map(field))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// A row with `rps` requests per second.
    pub(crate) fn row<S>(through: S, connections: Connections, rps: f64) -> Row<S> {
        Row {
            through,
            connections,
            repetition: 0,
            clients: CLIENTS,
            requests: 1,
            rps,
            latency_ms_p50: 1.0,
            latency_ms_p99: 2.0,
            processor_percent: Shares::from([("switch".to_owned(), 43.0)]),
        }
    }
}
