//! `isolation`: how one tenant affects another one on the same hosts, with malformed frames, SYN floods and endless
//! new conversations, compared with a tenant that sends nothing and with one that sends as many regular packets.
//!
//! Two networks on two hosts. In one, `redis-benchmark` measures; in the other, the *neighbour*, a guest sends
//! generated frames at a fixed rate. Guests share their host's processor with its switch, and so does the program
//! that generates the frames. Therefore the report shows who used the processors, and the cost of an attack relative
//! to the same number of datagrams that are accepted and absorbed.

mod tenant;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use self::tenant::{Counted, Neighbours, SESSIONS_PER_PORT};
use crate::bars::{Bar, Sense};
use crate::daemon::{Daemon, Settings};
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::Lab;
use crate::options::{Mode, Op};
use crate::plot::{self, Panel, Series};
use crate::processor::{self, LEGEND, Reading, Shares};
use crate::programs::flood::Flood;
use crate::programs::hostile::{Frames, Traffic};
use crate::programs::redis_benchmark::{self, Load};
use crate::programs::redis_server::RedisServer;
use crate::report::{Table, number};
use crate::results::from_values;
use crate::stats::{Spread, cell, median_of};
use crate::turns;

/// Rate of the neighbour's frames, 1/s.
const RATE: f64 = 20_000.0;
/// Minimum time that the neighbour sends before the measurement starts.
const WARM_UP: Duration = Duration::from_millis(700);
/// Timeout for the neighbour to use all its sessions.
const PATIENCE: Duration = Duration::from_secs(20);
/// Bound for the degradation by an attack, percent.
const WORSE_PERCENT: f64 = 5.0;
/// Bound for the growth of memory during an attack, MiB: reading it allocates some memory.
const MEMORY_MIB: f64 = 8.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Isolation;

/// What the neighbour sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Neighbour {
    /// Nothing.
    Quiet,
    /// Datagrams that are accepted and absorbed.
    Innocent,
    /// The same again: the difference of two equal runs.
    InnocentAgain,
    /// Malformed frames of every protocol.
    DamagedFrames,
    /// SYNs from and to random ports.
    SynFlood,
    /// Datagrams from and to random ports, while all sessions of its ports are in use.
    Sessions,
}

impl Neighbour {
    /// In the order of a repetition: attacks between innocent runs.
    const ALL: [Neighbour; 6] = [
        Neighbour::Quiet,
        Neighbour::Innocent,
        Neighbour::DamagedFrames,
        Neighbour::SynFlood,
        Neighbour::InnocentAgain,
        Neighbour::Sessions,
    ];
    const ATTACKS: [Neighbour; 3] = [Neighbour::DamagedFrames, Neighbour::SynFlood, Neighbour::Sessions];

    /// The traffic; `None` for a quiet neighbour.
    fn traffic(self) -> Option<Traffic> {
        match self {
            Neighbour::Quiet => None,
            Neighbour::Innocent | Neighbour::InnocentAgain => Some(Traffic::Innocent),
            Neighbour::DamagedFrames => Some(Traffic::Damaged),
            Neighbour::SynFlood => Some(Traffic::Syns),
            Neighbour::Sessions => Some(Traffic::Conversations),
        }
    }
}

impl fmt::Display for Neighbour {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Neighbour::Quiet => "quiet",
            Neighbour::Innocent => "innocent",
            Neighbour::InnocentAgain => "innocent again",
            Neighbour::DamagedFrames => "damaged frames",
            Neighbour::SynFlood => "SYN flood",
            Neighbour::Sessions => "sessions",
        })
    }
}

/// Results of one tenant while the other one sent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    pub mode: Mode,
    /// What the neighbour sent.
    pub neighbour: Neighbour,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Requests answered.
    pub requests: u64,
    /// Requests answered per second.
    pub requests_per_s: f64,
    /// Their median latency, ms.
    pub latency_ms_p50: f64,
    /// Their 99th percentile, ms.
    pub latency_ms_p99: f64,
    /// Frames per second that the neighbour's kernel accepted.
    pub frames_per_s: f64,
    /// Frames that it refused to send.
    pub refused_frames: u64,
    /// Packets delivered to the neighbour's other guest.
    pub delivered_packets: u64,
    /// Packets of the neighbour that were dropped, by counter, on both hosts.
    pub neighbour_drops_packets: BTreeMap<String, u64>,
    /// Packets of the measured tenant that were dropped, by counter.
    pub tenant_drops_packets: BTreeMap<String, u64>,
    /// Packets that a daemon lost without counting them.
    pub unexplained_packets: u64,
    /// Sessions at the end, on the host that has more.
    pub sessions: u64,
    /// Maximum number of sessions: of the neighbour's port and of the tenant's connections.
    pub sessions_bound: u64,
    /// Evicted sessions.
    pub evicted_sessions: u64,
    /// Growth of the daemons' memory during the measurement, KiB.
    pub memory_growth_kib: f64,
    /// Use of all processors during the measurement, percent.
    pub processor_percent: Shares,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { mode, neighbour, requests_per_s: rate, latency_ms_p99: p99, frames_per_s: frames, .. } = self;
        write!(f, "{mode:<8} {neighbour:<15} {rate:.0} requests/s, P99 {p99:.3} ms, neighbour {frames:.0} frames/s")
    }
}

impl Experiment for Isolation {
    fn name(&self) -> &'static str {
        "isolation"
    }

    fn summary(&self) -> &'static str {
        "How an attacking tenant affects another one on the same hosts"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Off, Mode::Bifrost]
    }

    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        vec![Mode::Bifrost]
    }

    fn keeps_awake(&self) -> bool {
        true
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        turns::alternate(lab.repetitions(7), &lab.options.modes, &Neighbour::ALL, |mode, neighbour, repetition| {
            measure(lab, *mode, *neighbour, repetition)
        })
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut text = format!(
            "Two tenants on two hosts. One measures with `redis-benchmark` (`GET`, persistent connections, security \
             groups); a guest of the other one, the neighbour, sends {RATE:.0} frames per second, or none while it is \
             \"quiet\". \"Innocent\" frames are datagrams that are accepted and absorbed. Each run is compared with \
             the quiet run, and with the two innocent runs, of the same repetition. Medians, with the minimum and \
             maximum of the repetitions in brackets.\n"
        );
        for mode in modes(&rows) {
            let noise = |field| noise(&rows, mode, field).map_or(f64::NAN, |noise| noise * 100.0);
            text += &format!(
                "\n### {}\n\nTwo innocent runs of one repetition differ by {} % in requests/s and {} % in P99 \
                 (median).\n\n",
                mode.name(),
                number(noise(|r| r.requests_per_s)),
                number(noise(|r| r.latency_ms_p99)),
            );
            let mut table = Table::new(&[
                "neighbour",
                "requests/s",
                "of quiet, %",
                "of innocent, %",
                "P50 ms",
                "P99 ms",
                "of quiet, %",
                "of innocent, %",
                "frames/s",
                "delivered, %",
                "sessions",
            ]);
            for neighbour in Neighbour::ALL {
                let of = |field| spread(&rows, mode, neighbour, field);
                let percent = |ratio: Option<f64>| number(ratio.map_or(f64::NAN, |ratio| ratio * 100.0));
                let quiet = |field| percent(against_quiet(&rows, mode, neighbour, field));
                let innocent = |field| percent(against_innocent(&rows, mode, neighbour, field));
                let delivered: fn(&Row) -> f64 = |r| {
                    r.delivered_packets as f64 * 100.0
                        / (r.delivered_packets as f64 + sum(&r.neighbour_drops_packets) as f64).max(1.0)
                };
                table.row(vec![
                    neighbour.to_string(),
                    cell(of(|r| r.requests_per_s)),
                    quiet(|r| r.requests_per_s),
                    innocent(|r| r.requests_per_s),
                    cell(of(|r| r.latency_ms_p50)),
                    cell(of(|r| r.latency_ms_p99)),
                    quiet(|r| r.latency_ms_p99),
                    innocent(|r| r.latency_ms_p99),
                    cell(of(|r| r.frames_per_s)),
                    cell(of(delivered)),
                    cell(of(|r| r.sessions as f64)),
                ]);
            }
            text += &table.render();
            text += &format!("\nUse of both processors, percent, medians; {LEGEND}:\n\n");
            let shares = |neighbour: Neighbour| {
                let of = rows.iter().filter(|row| row.mode == mode && row.neighbour == neighbour);
                ([neighbour.to_string()], of.map(|row| &row.processor_percent).collect())
            };
            text += &processor::table(["neighbour"], Neighbour::ALL.map(shares));
            text += "\nPackets that did not arrive, sum of all repetitions:\n\n";
            let mut table = Table::new(&["neighbour", "whose", "counter", "packets"]);
            for neighbour in Neighbour::ALL {
                for whose in ["the neighbour's", "the other tenant's"] {
                    let mut drops: BTreeMap<&str, u64> = BTreeMap::new();
                    for row in rows.iter().filter(|row| row.mode == mode && row.neighbour == neighbour) {
                        let of = if whose == "the neighbour's" {
                            &row.neighbour_drops_packets
                        } else {
                            &row.tenant_drops_packets
                        };
                        of.iter().for_each(|(counter, n)| *drops.entry(counter).or_default() += n);
                    }
                    for (counter, packets) in drops {
                        let cells = [&neighbour.to_string(), whose, counter, &packets.to_string()];
                        table.row(cells.map(ToOwned::to_owned).to_vec());
                    }
                }
            }
            text += &table.render();
        }
        Ok(text)
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series: Vec<_> = modes(&rows).into_iter().map(|mode| (Series::from(mode), mode)).collect();
        let panel = |title: &str, field: fn(&Row) -> f64| {
            let x = ("the neighbour sends", &Neighbour::ALL[..]);
            Panel::over(title, x, (title, false), &series, |mode, neighbour| spread(&rows, mode, *neighbour, field))
        };
        let panels = [panel("requests/s", |r| r.requests_per_s), panel("P99 [ms]", |r| r.latency_ms_p99)];
        Ok(vec![plot::draw(&directory.join("isolation.svg"), &panels, 2)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut bars = Vec::new();
        let at_most = |name: String, measured, bound, unit| Bar::new(name, measured, Sense::AtMost, bound, unit);
        for mode in modes(&rows) {
            for neighbour in Neighbour::ATTACKS {
                for (beside, against) in [("a quiet", against_quiet as Against), ("an innocent", against_innocent)] {
                    let worse = |field, sign: f64| {
                        Some(((against(&rows, mode, neighbour, field)? - 1.0) * sign).max(0.0) * 100.0)
                    };
                    let name = |what: &str| format!("{}, {neighbour}: {what} beside {beside} neighbour", mode.name());
                    let rate = worse(|r| r.requests_per_s, -1.0);
                    bars.push(at_most(name("requests/s lost of those"), rate, WORSE_PERCENT, "%"));
                    let tail = worse(|r| r.latency_ms_p99, 1.0);
                    bars.push(at_most(name("P99 gained over that"), tail, WORSE_PERCENT, "%"));
                }
            }
        }
        let worst = |field: fn(&Row) -> f64| rows.iter().map(field).reduce(f64::max);
        bars.push(
            at_most("packets that vanished uncounted".into(), worst(|r| r.unexplained_packets as f64), 0.0, "packets")
                .exact(),
        );
        bars.push(
            at_most(
                "packets of the other tenant that were dropped".into(),
                worst(|r| sum(&r.tenant_drops_packets) as f64),
                0.0,
                "packets",
            )
            .exact(),
        );
        bars.push(
            at_most(
                "sessions beyond the bound".into(),
                worst(|r| r.sessions.saturating_sub(r.sessions_bound) as f64),
                0.0,
                "sessions",
            )
            .exact(),
        );
        bars.push(
            at_most("growth of the daemons' memory".into(), worst(|r| r.memory_growth_kib / 1024.0), MEMORY_MIB, "MiB")
                .exact(),
        );
        Ok(bars)
    }
}

fn measure(lab: &Lab, mode: Mode, neighbour: Neighbour, repetition: u32) -> Result<Row> {
    let label = format!("{mode}-{}-{repetition}", neighbour.to_string().replace(' ', "-"));
    let logs = lab.logs(&label);
    let neighbours = Neighbours::create(&lab.run)?;
    let settings = Settings { security_groups: true, more: neighbours.configuration(), ..lab.settings() };
    let mut network = lab.network_with(mode, &label, settings)?;
    neighbours.absorb()?;
    let guests = [&network.topology.hosts[0].guest, &network.topology.hosts[1].guest];
    let mut server = RedisServer::start(guests[1], &logs)?;
    let seed = lab.options.seed.wrapping_add(u64::from(repetition));
    let [from, to] = tenant::VNICS;
    let start = |traffic| Flood::start(&neighbours.namespaces[0], "eth0", Frames::new(traffic, from, to, seed), RATE);
    let flood = neighbour.traffic().map(start).transpose()?;
    interrupt::sleep(WARM_UP)?;
    let daemons = &network.overlay.daemons;
    if neighbour == Neighbour::Sessions {
        wait_until_full(daemons)?;
    }
    let duration_s = lab.seconds(3.0, 1.0);
    let timeout = Duration::from_secs_f64(60.0 + 10.0 * duration_s);
    let run = |requests, name: &str| {
        let load = Load { op: Op::Get, clients: lab.options.clients, requests, keep_alive: true, pipeline: 1 };
        redis_benchmark::run(guests[0], guests[1], load, timeout, &logs.join(format!("redis-benchmark-{name}.txt")))
    };
    let trial = run(redis_benchmark::TRIAL_REQUESTS, "trial")?;
    let memory = |daemons: &[Daemon]| -> Result<f64> { daemons.iter().map(Daemon::memory_kib).sum() };
    let (before, memory_before) = (Counted::of(daemons)?, memory(daemons)?);
    let processors = Reading::take()?;
    let measured = run(trial.requests_in(duration_s), "run")?;
    let processor_percent = Reading::take()?.since(&processors);
    let (after, memory_after) = (Counted::of(daemons)?, memory(daemons)?);
    let sent = flood.map(Flood::finish).transpose()?;
    server.check_alive()?;
    network.overlay.check_alive()?;
    Ok(Row {
        mode,
        neighbour,
        repetition,
        requests: measured.requests,
        requests_per_s: measured.rps,
        latency_ms_p50: measured.latency_ms.p50,
        latency_ms_p99: measured.latency_ms.p99,
        frames_per_s: sent.as_ref().map_or(0.0, |sent| sent.frames as f64 / sent.seconds),
        refused_frames: sent.as_ref().map_or(0, |sent| sent.refused_frames),
        delivered_packets: after.delivered - before.delivered,
        neighbour_drops_packets: after.neighbour_drops_since(&before),
        tenant_drops_packets: after.tenant_drops_since(&before),
        unexplained_packets: after.unexplained,
        sessions: after.sessions,
        // Connections of redis-benchmark's two runs, and of the check that the server is up.
        sessions_bound: SESSIONS_PER_PORT + 2 * u64::from(lab.options.clients) + 16,
        evicted_sessions: after.evicted_sessions - before.evicted_sessions,
        memory_growth_kib: memory_after - memory_before,
        processor_percent,
    })
}

/// Waits until sessions are evicted on both hosts.
fn wait_until_full(daemons: &[Daemon]) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    for daemon in daemons {
        while daemon.counter("avs.evicted_sessions")? == 0 {
            if Instant::now() > deadline {
                bail!("{} never reached its limit of sessions", daemon.host());
            }
            interrupt::sleep(Duration::from_millis(50))?;
        }
    }
    Ok(())
}

fn sum(counts: &BTreeMap<String, u64>) -> u64 {
    counts.values().sum()
}

fn modes(rows: &[Row]) -> Vec<Mode> {
    Mode::ALL.into_iter().filter(|mode| rows.iter().any(|row| row.mode == *mode)).collect()
}

/// The median over repetitions; `None` if that was not measured.
fn spread(rows: &[Row], mode: Mode, neighbour: Neighbour, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|r| r.mode == mode && r.neighbour == neighbour).map(field))
}

/// The value of a repetition with a neighbour.
fn at(rows: &[Row], mode: Mode, neighbour: Neighbour, repetition: u32, field: fn(&Row) -> f64) -> Option<f64> {
    rows.iter().find(|r| r.mode == mode && r.neighbour == neighbour && r.repetition == repetition).map(field)
}

fn repetitions(rows: &[Row]) -> impl Iterator<Item = u32> {
    0..rows.iter().map(|row| row.repetition + 1).max().unwrap_or(0)
}

/// The ratio of a value to that with another neighbour.
type Against = fn(&[Row], Mode, Neighbour, fn(&Row) -> f64) -> Option<f64>;

/// The median of ratios to the quiet run of the same repetition.
fn against_quiet(rows: &[Row], mode: Mode, neighbour: Neighbour, field: fn(&Row) -> f64) -> Option<f64> {
    let at = |neighbour, repetition| at(rows, mode, neighbour, repetition, field);
    median_of(repetitions(rows).filter_map(|r| Some(at(neighbour, r)? / at(Neighbour::Quiet, r)?)))
}

/// The median of ratios to the mean of the innocent runs of the same repetition.
fn against_innocent(rows: &[Row], mode: Mode, neighbour: Neighbour, field: fn(&Row) -> f64) -> Option<f64> {
    let ratio = |repetition| {
        let of = |neighbour| at(rows, mode, neighbour, repetition, field);
        Some(of(neighbour)? * 2.0 / (of(Neighbour::Innocent)? + of(Neighbour::InnocentAgain)?))
    };
    median_of(repetitions(rows).filter_map(ratio))
}

/// The difference of the two innocent runs of a repetition, relative to their mean; the median.
fn noise(rows: &[Row], mode: Mode, field: fn(&Row) -> f64) -> Option<f64> {
    let difference = |repetition| {
        let of = |neighbour| at(rows, mode, neighbour, repetition, field);
        let (one, other) = (of(Neighbour::Innocent)?, of(Neighbour::InnocentAgain)?);
        Some((one - other).abs() * 2.0 / (one + other))
    };
    median_of(repetitions(rows).filter_map(difference))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::results::to_values;

    fn row(neighbour: Neighbour, requests_per_s: f64, latency_ms_p99: f64) -> Row {
        Row {
            mode: Mode::Bifrost,
            neighbour,
            repetition: 0,
            requests: 1000,
            requests_per_s,
            latency_ms_p50: 1.0,
            latency_ms_p99,
            frames_per_s: RATE,
            refused_frames: 0,
            delivered_packets: 1,
            neighbour_drops_packets: BTreeMap::from([("drop".to_owned(), 1)]),
            tenant_drops_packets: BTreeMap::new(),
            unexplained_packets: 0,
            sessions: 10,
            sessions_bound: 10,
            evicted_sessions: 0,
            memory_growth_kib: 0.0,
            processor_percent: Shares::from([("switch".to_owned(), 40.0)]),
        }
    }

    fn run(attack_rate: f64, attack_p99: f64) -> Vec<Row> {
        let quiet = row(Neighbour::Quiet, 1000.0, 2.0);
        let innocent = [row(Neighbour::Innocent, 990.0, 2.0), row(Neighbour::InnocentAgain, 1010.0, 2.0)];
        let attacks = Neighbour::ATTACKS.map(|neighbour| row(neighbour, attack_rate, attack_p99));
        [&[quiet][..], &innocent, &attacks].concat()
    }

    fn passed(rows: &[Row]) -> Vec<bool> {
        Isolation.bars(&to_values(rows).unwrap()).unwrap().iter().map(Bar::passes).collect()
    }

    #[test]
    fn attacks_are_compared_with_quiet_and_with_innocent_neighbours() {
        assert_eq!(passed(&run(951.0, 2.09)), [true; 16], "5 % is allowed, and noise is not added");
        let slow = passed(&run(940.0, 2.2));
        assert_eq!(slow, [[false; 12].as_slice(), &[true; 4]].concat());
        assert_eq!(passed(&run(2000.0, 0.1)), [true; 16]);
        // The tenant of the quiet neighbour is faster than that of the innocent one: each has its own bar.
        let mut rows = run(1000.0, 2.0);
        rows[0].requests_per_s = 1100.0;
        assert_eq!(passed(&rows)[..4], [false, true, true, true]);
        let without = &run(1000.0, 2.0)[3..];
        assert_eq!(passed(without)[..12], [false; 12]);
    }

    #[test]
    fn each_fact_has_its_bar() {
        let facts: [fn(&mut Row); 4] = [
            |row| row.unexplained_packets = 1,
            |row| row.tenant_drops_packets = BTreeMap::from([("drop".to_owned(), 1)]),
            |row| row.sessions = 11,
            |row| row.memory_growth_kib = 9.0 * 1024.0,
        ];
        for (fact, change) in facts.into_iter().enumerate() {
            let mut rows = run(1000.0, 2.0);
            change(&mut rows[3]);
            let expected: Vec<bool> = (0..16).map(|bar| bar != 12 + fact).collect();
            assert_eq!(passed(&rows), expected);
        }
        assert_eq!(passed(&[]), [false; 4]);
    }

    #[test]
    fn the_report_names_what_was_dropped() {
        let report = Isolation.report(&to_values(&run(1000.0, 2.0)).unwrap()).unwrap();
        assert!(
            report.contains("| SYN flood ") && report.contains(" drop |") && report.contains("| quiet "),
            "{report}"
        );
    }
}
