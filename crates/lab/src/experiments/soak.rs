//! `soak`: mixed traffic with changing faults. At the end every byte must be correct, memory constant, and drops
//! explained.

mod account;
mod faults;

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::daemon::Daemon;
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::options::Mode;
use crate::plot::{self, Panel};
use crate::programs::key_value_client::{self, BIN, Load};
use crate::programs::key_value_protocol::Protocol;
use crate::programs::redis_server::{PORT, RedisServer};
use crate::programs::stream;
use crate::progress::Progress;
use crate::report::{Table, number};
use crate::results::{from_values, to_values};
use crate::stats::slope;

/// Duration of a fault, s.
const FAULT_S: f64 = 3.0;
/// Duration of each of the first faults, which are one of each kind at its full strength, s.
const WARM_FAULT_S: f64 = 1.5;
/// Duration of a fault that blocks all traffic, s.
const TOTAL_FAULT_S: f64 = 1.0;
/// Number of streams in each direction.
const STREAMS: u16 = 2;
/// Rate limit of a stream, bytes/s.
const STREAM_BYTES_PER_S: f64 = 10e6;
/// First port of the streams.
const STREAM_PORT: u16 = 7000;
/// Share of the time, at the start, in which memory may grow: longer than all the first faults take.
const WARM_UP: f64 = 0.5;
/// Time for the network to drain after the load has ended.
const REST: Duration = Duration::from_secs(3);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Soak;

/// The result of one soak.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// Duration of the load, s.
    pub duration_s: f64,
    /// Seed of the choice of faults.
    pub seed: u64,
    /// The faults, in order.
    pub faults: Vec<FaultEntry>,
    /// The byte streams.
    pub streams: Vec<StreamResult>,
    /// Redis requests answered.
    pub redis_answered_requests: u64,
    /// Redis requests not answered within 10 s.
    pub redis_failed_requests: u64,
    /// Redis answers with a wrong value.
    pub redis_wrong_answers: u64,
    /// 99.9th percentile of the latency of Redis, ms.
    pub redis_latency_ms_p99_9: f64,
    /// The daemons.
    pub daemons: Vec<DaemonResult>,
    /// Reliable packets that one daemon sent and the other did not receive, without those that were given up or
    /// retransmitted by a restarted connection, over both directions; null without a reliable transport.
    pub missing_packets: Option<u64>,
    /// Redis requests answered in each 100 ms, per second.
    pub bins_rps: Vec<f64>,
}

/// An applied fault.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FaultEntry {
    /// Start, s.
    pub start_s: f64,
    /// Description.
    pub description: String,
    /// Packets affected by the daemons' own fault injection, over both hosts.
    pub hits_packets: u64,
}

/// A byte stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StreamResult {
    /// The sending and the receiving guest.
    pub direction: String,
    /// Bytes sent.
    pub sent_bytes: u64,
    /// Correct bytes received.
    pub correct_bytes: u64,
    /// The error; null if there was none.
    pub error: Option<String>,
}

/// A daemon's memory and counters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DaemonResult {
    /// Its host.
    pub host: String,
    /// Resident memory after the warm-up, KiB.
    pub rss_start_kib: f64,
    /// Resident memory at the end, KiB.
    pub rss_end_kib: f64,
    /// Slope of the regression line of its resident memory since the warm-up, KiB per minute.
    pub rss_slope_kib_per_minute: f64,
    /// Packets that were dropped, by reason.
    pub drops_packets: BTreeMap<String, u64>,
    /// Drops that no fault explains.
    pub unexplained_packets: BTreeMap<String, u64>,
    /// All counters.
    pub counters: BTreeMap<String, u64>,
}

impl Experiment for Soak {
    fn name(&self) -> &'static str {
        "soak"
    }

    fn summary(&self) -> &'static str {
        "Checked byte streams and Redis under changing faults, 10 minutes; memory and counters of the daemons"
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        vec![Mode::Bifrost]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let duration_s = lab.seconds(600.0, 60.0);
        let warm_up = faults::strongest(&lab.options.faults).len() as f64;
        let steps = (warm_up + (duration_s - warm_up * WARM_FAULT_S).max(0.0) / FAULT_S).ceil() as u64;
        let steps = steps * lab.options.modes.len() as u64;
        let mut progress = Progress::new(steps);
        let mut rows = Vec::new();
        for &mode in &lab.options.modes {
            progress.begin(&format!("building the network for {}", mode.name()));
            rows.push(soak(lab, mode, duration_s, &mut progress)?);
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let mut text = String::new();
        for row in from_values::<Row>(rows)? {
            let mut streams = Table::new(&["stream", "sent MB", "correct MB", "error"]);
            for stream in &row.streams {
                streams.row(vec![
                    stream.direction.clone(),
                    number(stream.sent_bytes as f64 / 1e6),
                    number(stream.correct_bytes as f64 / 1e6),
                    stream.error.clone().unwrap_or_else(|| "none".to_owned()),
                ]);
            }
            let mut daemons = Table::new(&["daemon", "RSS KiB", "KiB/min", "drops", "unexplained"]);
            for daemon in &row.daemons {
                daemons.row(vec![
                    daemon.host.clone(),
                    format!("{:.0}", daemon.rss_end_kib),
                    number(daemon.rss_slope_kib_per_minute),
                    daemon.drops_packets.values().sum::<u64>().to_string(),
                    daemon.unexplained_packets.values().sum::<u64>().to_string(),
                ]);
            }
            let mut drops = Table::new(&["reason", "host", "packets"]);
            for daemon in &row.daemons {
                for (reason, packets) in &daemon.drops_packets {
                    drops.row(vec![reason.clone(), daemon.host.clone(), packets.to_string()]);
                }
            }
            text += &format!(
                "### {}, {:.0} s, seed {}\n\n{} faults. Redis: {} requests answered, {} not, {} wrong, P99.9 {} \
                 ms.{}\n\n{}\n{}\n{}\n",
                row.mode.name(),
                row.duration_s,
                row.seed,
                row.faults.len(),
                row.redis_answered_requests,
                row.redis_failed_requests,
                row.redis_wrong_answers,
                number(row.redis_latency_ms_p99_9),
                row.missing_packets.map_or(String::new(), |n| format!(" Reliable packets missing: {n}.")),
                streams.render(),
                daemons.render(),
                drops.render(),
            );
        }
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let panel = |row: &Row| Panel {
            title: format!("Redis under changing faults, {}", row.mode.name()),
            x_title: "time [s]".to_owned(),
            y_title: "requests per second".to_owned(),
            lines: vec![(
                row.mode.into(),
                row.bins_rps.iter().enumerate().map(|(i, y)| (i as f64 * BIN.as_secs_f64(), *y)).collect(),
            )],
            marks: row.faults.iter().map(|fault| (fault.start_s, String::new())).collect(),
            ..Panel::default()
        };
        let panels: Vec<Panel> = from_values::<Row>(rows)?.iter().map(panel).collect();
        Ok(vec![plot::draw(&directory.join("rps.svg"), &panels, 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let row = rows.iter().find(|row| row.mode == Mode::Bifrost);
        let daemons = || row.into_iter().flat_map(|row| &row.daemons);
        let broken =
            row.map(|row| row.streams.iter().filter(|s| s.error.is_some() || s.sent_bytes != s.correct_bytes).count());
        let over_daemons = |field: fn(&DaemonResult) -> f64| daemons().map(field).fold(f64::NAN, f64::max);
        let unexplained = |daemon: &DaemonResult| daemon.unexplained_packets.values().sum::<u64>() as f64;
        let missing = row.and_then(|row| row.missing_packets).map(|packets| packets as f64);
        let growth = |daemon: &DaemonResult| (daemon.rss_end_kib / daemon.rss_start_kib - 1.0) * 100.0;
        let none = |name: &str, measured| Bar::new(name, measured, Sense::AtMost, 0.0, "").exact();
        Ok(vec![
            none("byte streams with a wrong, missing or extra byte", broken.map(|n| n as f64)),
            none("Redis answers with a wrong value", row.map(|row| row.redis_wrong_answers as f64)),
            none("reliable packets that never arrived", missing),
            none("dropped packets that no fault explains", Some(over_daemons(unexplained))),
            Bar::new(
                "growth of a daemon's memory since it has warmed up",
                Some(over_daemons(growth)),
                Sense::AtMost,
                5.0,
                "%",
            ),
        ])
    }
}

/// The load: streams in both directions and Redis.
struct LoadThreads {
    stop: Arc<AtomicBool>,
    streams: Vec<StreamThreads>,
    redis: Option<JoinHandle<Result<key_value_client::Report>>>,
    _server: RedisServer,
}

fn soak(lab: &Lab, mode: Mode, duration_s: f64, progress: &mut Progress) -> Result<Row> {
    let label = mode.name();
    let mut network = lab.network(mode, label)?;
    let mut load = LoadThreads::start(lab, &network, duration_s, &lab.logs(label))?;
    let began = Instant::now();
    let mut random = Rng::with_seed(lab.options.seed);
    let mut memory = vec![Vec::new(); network.overlay.daemons.len()];
    let mut entries = Vec::new();
    let mut warm_up = faults::strongest(&lab.options.faults).into_iter();
    while began.elapsed().as_secs_f64() < duration_s {
        let strong = if mode.is_bifrostd() { warm_up.next() } else { None };
        let whole_s = if strong.is_some() { WARM_FAULT_S } else { FAULT_S };
        let choose = || match strong {
            Some(fault) => Ok(fault),
            None => faults::choose_among(&mut random, lab.options.paths, &lab.options.faults),
        };
        let fault = mode.is_bifrostd().then(choose).transpose()?;
        let description = fault.as_ref().map_or("no fault".to_owned(), |fault| fault.description.clone());
        progress.begin(&description);
        let start_s = began.elapsed().as_secs_f64();
        let mut lasts = whole_s;
        if let Some(fault) = &fault {
            fault.apply(&network, random.u64(..))?;
            lasts = if fault.is_total() { TOTAL_FAULT_S } else { whole_s };
        }
        interrupt::sleep_until(began + Duration::from_secs_f64((start_s + lasts).min(duration_s)))?;
        let hits_packets = faults::clear(&network)?.iter().sum();
        interrupt::sleep_until(began + Duration::from_secs_f64((start_s + whole_s).min(duration_s)))?;
        for (daemon, memory) in network.overlay.daemons.iter_mut().zip(&mut memory) {
            daemon.check_alive()?;
            memory.push((began.elapsed().as_secs_f64() / 60.0, daemon.memory_kib()?));
        }
        progress.end(&format!("{} from {start_s:.1} s: {description}", mode.name()));
        entries.push(FaultEntry { start_s, description, hits_packets });
    }
    let (streams, report) = load.finish()?;
    interrupt::sleep(REST)?;
    let mut daemons = Vec::new();
    for (daemon, memory) in network.overlay.daemons.iter_mut().zip(&memory) {
        daemon.check_alive()?;
        daemons.push(account(daemon, memory)?);
    }
    Ok(Row {
        mode,
        duration_s,
        seed: lab.options.seed,
        faults: entries,
        streams,
        redis_answered_requests: report.answered(),
        redis_failed_requests: report.failed(),
        redis_wrong_answers: report.wrong_answers,
        redis_latency_ms_p99_9: report.latency_us.value_at_quantile(0.999) as f64 / 1000.0,
        missing_packets: missing(&daemons),
        daemons,
        bins_rps: report.bins.iter().map(|bin| bin.answered as f64 / BIN.as_secs_f64()).collect(),
    })
}

/// A stream's direction, sender and receiver.
type StreamThreads = (String, JoinHandle<Result<u64>>, JoinHandle<Result<stream::Received>>);

impl LoadThreads {
    fn start(lab: &Lab, network: &Network, duration_s: f64, logs: &Path) -> Result<Self> {
        let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
        let server = RedisServer::start(guests[1], logs)?;
        let stop = Arc::new(AtomicBool::new(false));
        let load = Load {
            server: (guests[1].address, PORT).into(),
            transport: guests[0].namespace.stream_protocol(),
            protocol: Protocol::Redis,
            clients: lab.options.clients,
            keep_alive: true,
            duration: Duration::from_secs_f64(duration_s),
            timeout: Duration::from_secs(10),
            patience: Duration::ZERO,
            warm_up: Duration::ZERO,
            op: None,
            requests_per_s: None,
            record: false,
            stop: Arc::clone(&stop),
        };
        let mut threads = Self { stop: Arc::clone(&stop), streams: Vec::new(), redis: None, _server: server };
        threads.redis = Some(guests[0].namespace.spawn(move || key_value_client::run(&load))?);
        for index in 0..STREAMS {
            for (from, to) in [(guests[0], guests[1]), (guests[1], guests[0])] {
                let address = SocketAddr::from((to.address, STREAM_PORT + index));
                let seed = lab.options.seed ^ u64::from(index) << 8 ^ u64::from(to.address.octets()[3]);
                let listener =
                    to.namespace.enter(move || TcpListener::bind(address).context("listening for a stream"))?;
                let receiver = to.namespace.spawn(move || stream::receive(&listener, seed))?;
                let stop = Arc::clone(&stop);
                let sender = from.namespace.spawn(move || stream::send(address, seed, STREAM_BYTES_PER_S, &stop))?;
                threads.streams.push((format!("{} to {}, {index}", from.name, to.name), sender, receiver));
            }
        }
        Ok(threads)
    }

    fn finish(&mut self) -> Result<(Vec<StreamResult>, key_value_client::Report)> {
        self.stop.store(true, Ordering::Relaxed);
        let mut results = Vec::new();
        for (direction, sender, receiver) in self.streams.drain(..) {
            let sent = sender.join().map_err(|_| anyhow!("a sender panicked"))?;
            let received = receiver.join().map_err(|_| anyhow!("a receiver panicked"))?;
            let (correct_bytes, wrong) = match &received {
                Ok(received) => (received.bytes, received.first_wrong_byte),
                Err(_) => (0, None),
            };
            let wrong = wrong.map(|position| format!("byte {position} is wrong"));
            let error =
                wrong.or(received.err().or(sent.as_ref().err().map(|e| anyhow!("{e:#}"))).map(|e| format!("{e:#}")));
            results.push(StreamResult { direction, sent_bytes: sent.unwrap_or(0), correct_bytes, error });
        }
        let redis = self.redis.take().ok_or_else(|| anyhow!("the Redis client has ended already"))?;
        let report = redis.join().map_err(|_| anyhow!("the Redis client panicked"))??;
        Ok((results, report))
    }
}

impl Drop for LoadThreads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn account(daemon: &Daemon, memory: &[(f64, f64)]) -> Result<DaemonResult> {
    let counters = account::counters(daemon)?;
    let drops_packets = account::drops(&counters);
    let end_minutes = memory.last().map_or(0.0, |point| point.0);
    let cold = memory.iter().take_while(|point| point.0 < end_minutes * WARM_UP).count();
    let warm = &memory[cold..];
    Ok(DaemonResult {
        host: daemon.host().to_owned(),
        rss_start_kib: warm.first().map_or(0.0, |point| point.1),
        rss_end_kib: warm.last().map_or(0.0, |point| point.1),
        rss_slope_kib_per_minute: slope(warm),
        unexplained_packets: account::unexplained(&drops_packets),
        drops_packets,
        counters,
    })
}

/// Packets sent reliably in either direction that were not received and have no explanation: given up, withdrawn, or
/// retransmitted by a restarted connection. Packets that the peer's switch refuses count as received.
fn missing(daemons: &[DaemonResult]) -> Option<u64> {
    let [a, b] = daemons else { return None };
    let direction = |from: &DaemonResult, to: &DaemonResult| {
        let count = |daemon: &DaemonResult, name: &str| daemon.counters.get(name).copied();
        let sent = count(from, "rte.sent_packets")?;
        let received = count(to, "rte.received_packets")?;
        let excuses = ["rte.given_up_packets", "rte.withdrawn_packets", "rte.restarted_packets"];
        let excused: u64 = excuses.iter().filter_map(|name| count(from, name)).sum();
        Some(sent.saturating_sub(received + excused))
    };
    Some(direction(a, b)? + direction(b, a)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn daemon(sent: u64, received: u64, given_up: u64) -> DaemonResult {
        let table =
            [("rte.sent_packets", sent), ("rte.received_packets", received), ("rte.given_up_packets", given_up)];
        DaemonResult {
            host: "host-a".to_owned(),
            rss_start_kib: 10_000.0,
            rss_end_kib: 10_100.0,
            rss_slope_kib_per_minute: 1.0,
            drops_packets: BTreeMap::new(),
            unexplained_packets: BTreeMap::new(),
            counters: table.iter().map(|(name, value)| (name.to_string(), *value)).collect(),
        }
    }

    fn row() -> Row {
        let daemons = vec![daemon(100, 200, 1), daemon(200, 99, 0)];
        Row {
            mode: Mode::Bifrost,
            duration_s: 60.0,
            seed: 1,
            faults: Vec::new(),
            streams: vec![StreamResult {
                direction: "a to b".to_owned(),
                sent_bytes: 10,
                correct_bytes: 10,
                error: None,
            }],
            redis_answered_requests: 10,
            redis_failed_requests: 0,
            redis_wrong_answers: 0,
            redis_latency_ms_p99_9: 1.0,
            missing_packets: missing(&daemons),
            daemons,
            bins_rps: vec![1.0, 2.0],
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let failing = |change: fn(&mut Row)| -> Vec<usize> {
            let mut row = row();
            change(&mut row);
            let bars = Soak.bars(&to_values(&[row]).unwrap()).unwrap();
            bars.iter().enumerate().filter(|(_, bar)| !bar.passes()).map(|(index, _)| index).collect()
        };
        assert_eq!(failing(|_| {}), [] as [usize; 0]);
        assert_eq!(failing(|row| row.streams[0].correct_bytes = 9), [0]);
        assert_eq!(failing(|row| row.redis_wrong_answers = 1), [1]);
        assert_eq!(failing(|row| row.missing_packets = missing(&[daemon(100, 200, 0), daemon(200, 99, 0)])), [2]);
        assert_eq!(failing(|row| row.daemons[0].unexplained_packets = BTreeMap::from([("x".to_owned(), 1)])), [3]);
        assert_eq!(failing(|row| row.daemons[1].rss_end_kib = 11_000.0), [4]);
        assert_eq!(Soak.bars(&[]).unwrap().iter().filter(|bar| bar.passes()).count(), 0);
    }
}
