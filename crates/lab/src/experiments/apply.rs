//! `apply`: the time until a single route or port that an agent adds or deletes is in force, on a host with very many
//! routes, and the effect on the latency of its guests.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::bars::{Bar, Sense};
use crate::daemon::{Remote, Settings};
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::programs::ping_pong;
use crate::progress::Progress;
use crate::report::Table;
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell, median_of, paired_ratio};

/// Routes of the host, by default and with `--quick`.
const ROUTES: [u32; 2] = [1_000_000, 100_000];
/// Number of objects in a batch of routes.
const BATCH: u32 = 10_000;
/// The VPC with the routes, and a prefix that none of them contains.
const VNI: u32 = 300;
const OTHER_PREFIX: &str = "172.16.0.0/24";
/// Pause between two changes.
const PAUSE: Duration = Duration::from_millis(20);
/// Interval of the guests' requests, and the server's port.
const INTERVAL: Duration = Duration::from_millis(1);
const ECHO_PORT: u16 = 5_555;
/// Bound for the 99th percentile of the changes' times, ms.
const MOST_MS: f64 = 5.0;
/// Bound for the guests' P99.9 while objects change, relative to that without changes.
const MOST_LATENCY: f64 = 1.1;
/// Time until the tables have been merged after routes were added.
const SETTLE: Duration = Duration::from_secs(30);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Apply;

/// The object that is added and deleted in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Nothing: the reference.
    Nothing,
    /// A route.
    Route,
    /// The port of a container.
    Port,
}

impl What {
    /// All of them, in the order of measurement and report.
    pub const ALL: [What; 3] = [What::Nothing, What::Route, What::Port];
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            What::Nothing => "nothing",
            What::Route => "route",
            What::Port => "port",
        })
    }
}

/// A period in which one kind of object changes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The kind of object.
    #[serde(rename = "mode")]
    pub what: What,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Number of routes of the host.
    pub routes: u32,
    /// Times of all changes, from the request until the answer, which comes when all workers have applied the change,
    /// ms; ascending.
    pub change_ms: Vec<f64>,
    /// 99.9th percentile of the guests' requests, µs.
    pub guest_latency_us_p99_9: f64,
    /// Resident memory of the daemon, MiB.
    pub memory_mib: f64,
}

impl Row {
    /// The time within which `share` of the changes were in force, ms.
    fn change(&self, share: f64) -> f64 {
        let rank = (self.change_ms.len() as f64 * share).ceil() as usize;
        self.change_ms.get(rank.saturating_sub(1)).copied().unwrap_or(f64::NAN)
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (count, p50, p99) = (self.change_ms.len(), self.change(0.5), self.change(0.99));
        write!(f, "{}: {count} changes, P50 {p50:.2} ms, P99 {p99:.2} ms", self.what)
    }
}

impl Experiment for Apply {
    fn name(&self) -> &'static str {
        "apply"
    }

    fn summary(&self) -> &'static str {
        "Time until one route or port of an agent is in force on a host with a million routes, and its guests' latency"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Bifrost]
    }

    fn keeps_awake(&self) -> bool {
        true
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let repetitions = lab.repetitions(3);
        let routes = lab.options.routes.unwrap_or(ROUTES[usize::from(lab.options.quick)]);
        let mut progress = Progress::new(What::ALL.len() as u64 * u64::from(repetitions));
        let label = "apply";
        progress.begin("building the network");
        let settings = Settings { more: vec![format!("[[vpc]]\nvni = {VNI}\n")], ..lab.settings() };
        let mut network = lab.network_with(Mode::Bifrost, label, settings)?;
        progress.begin(&format!("adding {routes} routes"));
        add_routes(&network, routes)?;
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            for what in What::ALL {
                interrupt::check()?;
                progress.begin(&format!("{what} changes"));
                let row = measure(lab, &network, what, (repetition, routes))?;
                progress.end(&row.to_string());
                rows.push(row);
            }
        }
        network.check()?;
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "what changes",
            "routes",
            "changes",
            "P50 ms",
            "P99 ms",
            "longest ms",
            "guests' P99.9 µs",
            "memory MiB",
        ]);
        for what in What::ALL {
            let own = || rows.iter().filter(|row| row.what == what);
            let of = |field: &dyn Fn(&Row) -> f64| cell(Spread::of(own().map(field)));
            table.row(vec![
                what.to_string(),
                of(&|row| row.routes.into()),
                of(&|row| row.change_ms.len() as f64),
                of(&|row| row.change(0.5)),
                of(&|row| row.change(0.99)),
                of(&|row| row.change(1.0)),
                of(&|row| row.guest_latency_us_p99_9),
                of(&|row| row.memory_mib),
            ]);
        }
        Ok(format!(
            "An agent adds an object and deletes it again, one change each {} ms, while a guest asks another one, on \
             another host, once a millisecond. A change ends when all workers have it. Medians, with the minimum and \
             maximum of the repetitions in brackets.\n\n{}",
            PAUSE.as_millis(),
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let line = |what| {
            let row = rows.iter().find(|row| row.what == what);
            let times = row.map(|row| row.change_ms.as_slice()).unwrap_or_default();
            let share = |at: usize| (at + 1) as f64 / times.len() as f64 * 100.0;
            times.iter().enumerate().map(|(at, ms)| (*ms, share(at))).collect::<Vec<_>>()
        };
        let panel = Panel {
            title: "one change, first repetition".to_owned(),
            x_title: "ms".to_owned(),
            y_title: "% of the changes".to_owned(),
            lines: vec![(Series::on("route"), line(What::Route)), (Series::off("port"), line(What::Port))],
            ..Panel::default()
        };
        Ok(vec![plot::draw(&directory.join("apply.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut bars = Vec::new();
        for what in [What::Route, What::Port] {
            let own = || rows.iter().filter(|row| row.what == what);
            let p99 = median_of(own().map(|row| row.change(0.99)));
            bars.push(Bar::new(format!("{what}: P99 of a change"), p99, Sense::AtMost, MOST_MS, "ms"));
            let is = |wanted| move |row: &Row| row.what == wanted;
            let pair = (is(what), is(What::Nothing));
            let ratio = paired_ratio(&rows, |row| row.repetition, pair, |row| row.guest_latency_us_p99_9);
            let name = format!("{what}: guests' P99.9 while it changes, over that without changes");
            bars.push(Bar::new(name, ratio, Sense::AtMost, MOST_LATENCY, "x"));
        }
        Ok(bars)
    }
}

/// Route number `n`, below 2^24, of the first host's daemon: a separate /32 prefix on the other host.
fn route(n: u32, peer: &str) -> Value {
    let prefix = Ipv4Addr::from(0x0a00_0000 + n);
    json!({ "op": "set", "kind": "route", "owner": "lab",
        "spec": { "vni": VNI, "prefix": format!("{prefix}/32"), "peer": peer, "mac": "02:00:00:00:00:99" } })
}

/// The name of the other host, in the first host's configuration.
fn peer(daemon: &Remote) -> Result<String> {
    let paths = daemon.control(&["paths"])?;
    let name = paths.as_array().and_then(|paths| paths.first()?.get("peer")?.as_str()).map(str::to_owned);
    name.context("`bifrostctl paths` shows no path")
}

fn add_routes(network: &Network, routes: u32) -> Result<()> {
    let daemon = network.overlay.daemons[0].remote();
    let peer = peer(&daemon)?;
    for first in (0..routes).step_by(BATCH as usize) {
        interrupt::check()?;
        let items: Vec<Value> = (first..routes.min(first + BATCH)).map(|n| route(n, &peer)).collect();
        daemon.post("/v1/apply", &json!({ "items": items }))?;
    }
    // The tables of the last batches are merged once nothing has changed for a while.
    interrupt::sleep(SETTLE.mul_f64((f64::from(routes) / f64::from(ROUTES[0])).min(1.0)))
}

fn measure(lab: &Lab, network: &Network, what: What, (repetition, routes): (u32, u32)) -> Result<Row> {
    let [one, other] = &network.topology.hosts[..] else { return Err(anyhow!("two hosts are needed")) };
    let (client, server) = (&one.guest, &other.guest);
    let daemon = network.overlay.daemons[0].remote();
    let (stop, duration) = (AtomicBool::new(false), Duration::from_secs_f64(lab.seconds(10.0, 3.0)));
    let (latencies, changes) = std::thread::scope(|scope| {
        let changing = scope.spawn(|| change(&daemon, what, &stop));
        let address = (server.address, ECHO_PORT).into();
        let latencies = ping_pong::run(&client.namespace, &server.namespace, address, Some(INTERVAL), duration);
        stop.store(true, Ordering::Relaxed);
        (latencies, changing.join())
    });
    let mut change_ms = changes.map_err(|_| anyhow!("the thread that changes objects panicked"))??;
    change_ms.sort_by(f64::total_cmp);
    Ok(Row {
        what,
        repetition,
        routes,
        change_ms,
        guest_latency_us_p99_9: latencies?.value_at_quantile(0.999) as f64 / 1000.0,
        memory_mib: network.overlay.daemons[0].memory_kib()? / 1024.0,
    })
}

/// Adds and deletes an object until `stop` is set. Returns how long each change took, ms.
fn change(daemon: &Remote, what: What, stop: &AtomicBool) -> Result<Vec<f64>> {
    let (kind, key, spec) = match what {
        What::Nothing => return Ok(Vec::new()),
        What::Route => {
            let spec = json!({ "vni": VNI, "prefix": OTHER_PREFIX, "peer": peer(daemon)?, "mac": "02:00:00:00:00:98" });
            ("route", format!("{VNI}/{OTHER_PREFIX}"), spec)
        }
        What::Port => {
            let name = "changing";
            let spec = json!({ "name": name, "vni": VNI, "mac": "02:00:00:00:00:97",
                "addresses": ["172.17.0.1/24"], "device": "changing0" });
            ("port", name.to_owned(), spec)
        }
    };
    let set = json!({ "items": [{ "op": "set", "kind": kind, "owner": "lab", "spec": spec }] });
    let delete = json!({ "items": [{ "op": "delete", "kind": kind, "owner": "lab", "key": key }] });
    let mut times = Vec::new();
    let mut next = Instant::now();
    while !stop.load(Ordering::Relaxed) {
        for batch in [&set, &delete] {
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            let began = Instant::now();
            daemon.post("/v1/apply", batch)?;
            times.push(began.elapsed().as_secs_f64() * 1e3);
            next = (next + PAUSE).max(Instant::now());
        }
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(what: What, slow_ms: f64, latency: f64) -> Row {
        let mut change_ms = vec![1.0; 197];
        change_ms.extend([slow_ms; 3]);
        if what == What::Nothing {
            change_ms.clear();
        }
        Row { what, repetition: 0, routes: 1_000_000, change_ms, guest_latency_us_p99_9: latency, memory_mib: 400.0 }
    }

    #[test]
    fn each_bar_can_fail() {
        let passed = |route: Row, port: Row| -> Vec<bool> {
            let rows = to_values(&[row(What::Nothing, 0.0, 100.0), route, port]).unwrap();
            Apply.bars(&rows).unwrap().iter().map(Bar::passes).collect()
        };
        let good = |what| row(what, 4.9, 109.0);
        assert_eq!(passed(good(What::Route), good(What::Port)), [true; 4]);
        assert_eq!(passed(row(What::Route, 5.1, 109.0), good(What::Port)), [false, true, true, true]);
        assert_eq!(passed(row(What::Route, 4.9, 111.0), good(What::Port)), [true, false, true, true]);
        assert_eq!(passed(good(What::Route), row(What::Port, 5.1, 111.0)), [true, true, false, false]);
        assert!(Apply.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn the_percentile_is_the_nearest_rank() {
        let row = row(What::Route, 7.0, 1.0);
        assert_eq!((row.change(0.5), row.change(0.985), row.change(0.99), row.change(1.0)), (1.0, 1.0, 7.0, 7.0));
    }

    #[test]
    fn all_routes_have_different_prefixes_and_none_the_changing_one() {
        let prefix = |n| route(n, "b")["spec"]["prefix"].as_str().unwrap().to_owned();
        assert_eq!((prefix(0), prefix(ROUTES[0] - 1)), ("10.0.0.0/32".to_owned(), "10.15.66.63/32".to_owned()));
    }
}
