//! `upgrade`: what guests notice when a host's daemon is replaced by another one while they communicate, and when the
//! new daemon is killed at any point of that.

mod killer;
mod machine;
mod traffic;

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::daemon::{Daemon, Settings};
use crate::frame::Experiment;
use crate::inject;
use crate::interrupt;
use crate::lab::{Lab, Network};
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::process;
use crate::programs::key_value_client::Request;
use crate::progress::Progress;
use crate::report::Table;
use crate::results::{from_values, to_values};
use crate::standstill::{self, Standstill, Watch};
use crate::stats::{Spread, cell, percentile};
use machine::Machine;
use traffic::{Outcome, Traffic};

/// Sessions of security groups on the first host, by default and with `--quick`.
const SESSIONS: [u32; 2] = [100_000, 10_000];
/// Connections that carry nothing.
const IDLE: [u32; 2] = [5_000, 500];
/// Upgrades of a repetition, and kills.
const UPGRADES: [u32; 2] = [100, 10];
const KILLS: [u32; 2] = [1_000, 20];
/// Packets lost on each link, percent.
const LOSS_PERCENT: f64 = 1.0;
/// From one upgrade to the next, and how much of that after its end is attributed to an upgrade, at most. An equal time
/// before it is the reference.
const PERIOD: Duration = Duration::from_millis(1500);
const AFTER: Duration = Duration::from_millis(150);
/// Upgrades whose time a standstill of the machine touched are made again, up to this many per wanted upgrade.
const ATTEMPTS: u32 = 3;
/// Shortest time within which a new daemon is killed.
const KILL_SOONEST: Duration = Duration::from_millis(1);
/// Descriptors are counted this often, and the least number counts: a connection of the API is open for a moment.
const SAMPLES: u32 = 20;
const BETWEEN_SAMPLES: Duration = Duration::from_millis(50);
/// Required P99.9 of the longest stall of a request in an upgrade, ms.
const MOST_STALL_MS: f64 = 10.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Upgrade;

/// What happens to the daemons, in turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// Upgrades.
    Upgrade,
    /// Upgrades whose new daemon gets SIGKILL at a random time.
    Kill,
}

impl What {
    /// Both.
    pub const ALL: [What; 2] = [What::Upgrade, What::Kill];
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            What::Upgrade => "upgrade",
            What::Kill => "kill",
        })
    }
}

/// Many upgrades in a row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What happened to the daemons.
    #[serde(rename = "mode")]
    pub what: What,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Upgrades that were started, in turn on both hosts.
    pub upgrades: u32,
    /// Upgrades among them whose times do not count, because the machine stood still during them or just before.
    pub disturbed: u32,
    /// New daemons that were killed before they had taken over.
    pub failed: u32,
    /// New daemons that were killed after that, and restarted.
    pub restarted: u32,
    /// The longest time that a request took, of each upgrade, ms; ascending.
    pub stall_ms: Vec<f64>,
    /// The same without an upgrade, of an equal period before each, ms; ascending.
    pub reference_ms: Vec<f64>,
    /// As `stall_ms`, of requests to the virtual machine, whose host is upgraded.
    pub machine_stall_ms: Vec<f64>,
    /// As `reference_ms`, of requests to the virtual machine.
    pub machine_reference_ms: Vec<f64>,
    /// How long no packets were fetched from guests, of each upgrade, ms; ascending.
    pub held_ms: Vec<f64>,
    /// Least number of sessions that the first host's daemon has handed over.
    pub sessions: u64,
    /// Answered requests.
    pub requests: u64,
    /// Bytes of the streams that were received and compared.
    pub compared_bytes: u64,
    /// Connections: of requests, streams, iperf3, idle ones, and that of the virtual machine.
    pub connections: u64,
    /// Connections that ended, or did not work any more at the end.
    pub broken_connections: u64,
    /// Wrong answers and wrong bytes of streams.
    pub wrong: u64,
    /// Open descriptors of both daemons at the end, less those at the beginning.
    pub more_descriptors: i64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { what, upgrades, failed, restarted, broken_connections, wrong, .. } = self;
        let worst = |times: &[f64]| times.last().copied().unwrap_or(f64::NAN);
        write!(f, "{what}: {upgrades} upgrades")?;
        match what {
            What::Upgrade => write!(
                f,
                ", longest stall {:.1} ms, {:.1} ms without",
                worst(&self.stall_ms),
                worst(&self.reference_ms)
            ),
            What::Kill => write!(f, ", {failed} failed, {restarted} restarted"),
        }?;
        write!(f, "; {broken_connections} connections broken, {wrong} wrong answers")
    }
}

impl Experiment for Upgrade {
    fn name(&self) -> &'static str {
        "upgrade"
    }

    fn summary(&self) -> &'static str {
        "What guests notice of many upgrades of their hosts' daemons, and of new daemons that are killed"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Bifrost]
    }

    fn keeps_awake(&self) -> bool {
        true
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let repetitions = lab.repetitions(1);
        let mut progress = Progress::new(What::ALL.len() as u64 * u64::from(repetitions));
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            for what in What::ALL {
                progress.begin(&format!("{what}, repetition {repetition}"));
                let row = measure(lab, what, repetition)?;
                progress.end(&row.to_string());
                rows.push(row);
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "daemons",
            "upgrades",
            "disturbed",
            "failed, restarted",
            "sessions",
            "longest request P50 ms",
            "P99.9 ms",
            "without: P50 ms",
            "P99.9 ms",
            "guests held P50 ms",
            "connections broken",
            "wrong",
        ]);
        for (what, of_machine) in [(What::Upgrade, false), (What::Upgrade, true), (What::Kill, false)] {
            let own: Vec<&Row> = rows.iter().filter(|row| row.what == what).collect();
            let sum = |field: fn(&Row) -> u64| own.iter().map(|row| field(row)).sum::<u64>();
            let of = |field: fn(&Row) -> &Vec<f64>, percent: f64| {
                cell(Spread::of(
                    own.iter().filter(|row| !field(row).is_empty()).map(|row| percentile(field(row), percent)),
                ))
            };
            if of_machine {
                let [none_before, none_after] = [vec!["-".to_owned(); 4], vec!["-".to_owned(); 3]];
                let times = [
                    of(|row| &row.machine_stall_ms, 50.0),
                    of(|row| &row.machine_stall_ms, 99.9),
                    of(|row| &row.machine_reference_ms, 50.0),
                    of(|row| &row.machine_reference_ms, 99.9),
                ];
                let name = [format!("{what}, to the machine")];
                table.row(name.into_iter().chain(none_before).chain(times).chain(none_after).collect());
                continue;
            }
            table.row(vec![
                what.to_string(),
                sum(|row| row.upgrades.into()).to_string(),
                sum(|row| row.disturbed.into()).to_string(),
                format!("{}, {}", sum(|row| row.failed.into()), sum(|row| row.restarted.into())),
                own.iter().map(|row| row.sessions).min().unwrap_or(0).to_string(),
                of(|row| &row.stall_ms, 50.0),
                of(|row| &row.stall_ms, 99.9),
                of(|row| &row.reference_ms, 50.0),
                of(|row| &row.reference_ms, 99.9),
                of(|row| &row.held_ms, 50.0),
                format!("{} of {}", sum(|row| row.broken_connections), sum(|row| row.connections)),
                sum(|row| row.wrong).to_string(),
            ]);
        }
        Ok(format!(
            "The daemons of two hosts are upgraded in turn, one each {} ms, while {LOSS_PERCENT} % of all packets are \
             lost on the links. Between the hosts' containers: 1,000 requests a second to Redis, streams whose bytes \
             are compared, iperf3, and idle connections, which are tested at the end. From the second host's container to \
             a QEMU machine (without KVM) on the first one: requests one at a time. The longest request of an upgrade \
             is that within {} ms of its end; the reference is an equal time before its beginning. Neither counts if \
             the machine itself stood still in one of them: another upgrade is made instead, at most {ATTEMPTS} for \
             each that counts. `kill`: the new daemon gets SIGKILL at a random \
             time.\n\n{}",
            PERIOD.as_millis(),
            AFTER.as_millis(),
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let line = |times: fn(&Row) -> &Vec<f64>| {
            let row = rows.iter().find(|row| row.what == What::Upgrade);
            let times = row.map(|row| times(row).as_slice()).unwrap_or_default();
            let share = |at: usize| (at + 1) as f64 / times.len() as f64 * 100.0;
            times.iter().enumerate().map(|(at, ms)| (*ms, share(at))).collect::<Vec<_>>()
        };
        let panel = Panel {
            title: "longest request, first repetition".to_owned(),
            x_title: "ms".to_owned(),
            y_title: "% of the upgrades".to_owned(),
            lines: vec![
                (Series::on("upgrade"), line(|row| &row.stall_ms)),
                (Series::off("none"), line(|row| &row.reference_ms)),
            ],
            ..Panel::default()
        };
        Ok(vec![plot::draw(&directory.join("upgrade.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let own = |what| rows.iter().filter(move |row| row.what == what);
        let stalls: Vec<f64> = own(What::Upgrade).flat_map(|row| row.stall_ms.iter().copied()).collect();
        let stall = (!stalls.is_empty()).then(|| percentile(&stalls, 99.9));
        let machine: Vec<f64> = own(What::Upgrade).flat_map(|row| row.machine_stall_ms.iter().copied()).collect();
        let machine = (!machine.is_empty()).then(|| percentile(&machine, 99.9));
        let below = |name: &str, measured| Bar::new(name, measured, Sense::Below, MOST_STALL_MS, "ms");
        let mut bars = vec![
            below("upgrade: longest request of an upgrade, P99.9", stall),
            below("upgrade: longest request to the machine, P99.9", machine),
        ];
        for what in What::ALL {
            let sum = |field: fn(&Row) -> u64| {
                let any = own(what).next().is_some();
                any.then(|| own(what).map(field).sum::<u64>() as f64)
            };
            let none =
                |name: &str, measured| Bar::new(format!("{what}: {name}"), measured, Sense::AtMost, 0.0, "").exact();
            bars.push(none("connections broken", sum(|row| row.broken_connections)));
            bars.push(none("wrong answers and bytes", sum(|row| row.wrong)));
        }
        let lost = own(What::Upgrade).map(|row| row.more_descriptors.unsigned_abs() as f64).reduce(f64::max);
        bars.push(Bar::new("upgrade: descriptors lost or left open", lost, Sense::AtMost, 0.0, "").exact());
        Ok(bars)
    }
}

fn measure(lab: &Lab, what: What, repetition: u32) -> Result<Row> {
    let of = |counts: [u32; 2]| counts[usize::from(lab.options.quick)];
    let (sessions, idle) = (of(SESSIONS), of(IDLE));
    let rounds = of(if what == What::Upgrade { UPGRADES } else { KILLS });
    let label = format!("{what}-{repetition}");
    let limit = format!("[sessions]\nper_port = {}\n", sessions * 2);
    let settings = Settings { more: vec![limit.clone(), limit], ..lab.settings() };
    let mut network = lab.network_with(Mode::Bifrost, &label, settings)?;
    for daemon in &network.overlay.daemons {
        daemon.reconfigure(with_groups)?;
    }
    inject::wire_loss(&network.topology, &[], LOSS_PERCENT)?;
    let flow = (what == What::Upgrade).then(|| PERIOD * (rounds * ATTEMPTS + 1));
    let traffic = Traffic::start(&network, (sessions, idle), flow, &lab.logs(&label))?;
    wait_for_sessions(&network.overlay.daemons[0], sessions)?;
    let machine = Machine::start(&network, &lab.logs(&label))?;
    let mut row = Row {
        what,
        repetition,
        upgrades: rounds,
        disturbed: 0,
        failed: 0,
        restarted: 0,
        stall_ms: Vec::new(),
        reference_ms: Vec::new(),
        machine_stall_ms: Vec::new(),
        machine_reference_ms: Vec::new(),
        held_ms: Vec::new(),
        sessions: u64::MAX,
        requests: 0,
        compared_bytes: 0,
        connections: 0,
        broken_connections: 0,
        wrong: 0,
        more_descriptors: 0,
    };
    // A daemon that has taken over has a few other descriptors than one that was started.
    let mut took = Duration::ZERO;
    for daemon in &mut network.overlay.daemons {
        let report = daemon.upgrade().context("the first upgrade")?;
        let us = ["prepared_us", "held_us"].iter().filter_map(|name| report.get(*name)?.as_u64()).sum();
        took = took.max(Duration::from_micros(us));
    }
    let before = descriptors(&network)?;
    let mut began = Vec::new();
    match what {
        What::Upgrade => {
            began = upgrade_all(&mut network, &mut row)?;
            let handed = row.sessions;
            ensure!(handed >= sessions.into(), "an upgrade handed over {handed} sessions instead of {sessions}");
        }
        What::Kill => kill_all(lab, &mut network, &mut row, took)?,
    }
    row.more_descriptors = descriptors(&network)? - before;
    let answers = machine.finish()?;
    let Outcome { requests, connections, broken, wrong, compared_bytes } = traffic.finish()?;
    network.check()?;
    row.requests = requests.iter().filter(|request| request.answered).count() as u64;
    (row.connections, row.broken_connections) = (connections + 1, broken + u64::from(answers.broken));
    (row.wrong, row.compared_bytes) = (wrong, compared_bytes);
    let during = |upgrade: &Done| (upgrade.began, upgrade.began + upgrade.window);
    let before = |upgrade: &Done| (upgrade.began - upgrade.window, upgrade.began);
    row.stall_ms = longest(&requests, began.iter().map(during));
    row.reference_ms = longest(&requests, began.iter().map(before));
    let of_machine = || began.iter().filter(|upgrade| upgrade.host == 0);
    row.machine_stall_ms = longest(&answers.requests, of_machine().map(during));
    row.machine_reference_ms = longest(&answers.requests, of_machine().map(before));
    row.held_ms.sort_by(f64::total_cmp);
    Ok(row)
}

/// A finished upgrade.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Done {
    /// The host.
    host: usize,
    /// When it began.
    began: Instant,
    /// How much of the time since then is attributed to it.
    window: Duration,
}

/// Upgrades the hosts in turn until `row.upgrades` upgrades count. Returns these; `row.upgrades` then is the number of
/// all of them.
fn upgrade_all(network: &mut Network, row: &mut Row) -> Result<Vec<Done>> {
    let wanted = row.upgrades as usize;
    let watch = Watch::start()?;
    let mut done: Vec<Done> = Vec::new();
    let mut next = Instant::now() + PERIOD;
    loop {
        interrupt::sleep_until(next)?;
        if done.len() == wanted * ATTEMPTS as usize || undisturbed(&done, &watch.seen()) >= wanted {
            break;
        }
        next += PERIOD;
        let host = done.len() % network.overlay.daemons.len();
        let began = Instant::now();
        let report = network.overlay.daemons[host]
            .upgrade()
            .with_context(|| format!("upgrade {}, of host {host}", done.len()))?;
        let window = began.elapsed() + AFTER;
        done.push(Done { host, began, window });
        // The reference of the next upgrade, which may take as long, must not overlap with this one.
        next = next.max(began + window * 2);
        let number = |name: &str| {
            let number = report.get(name).and_then(Value::as_u64);
            number.with_context(|| format!("the report of an upgrade has no {name}: {report}"))
        };
        row.held_ms.push(number("held_us")? as f64 / 1e3);
        if host == 0 {
            row.sessions = row.sessions.min(number("sessions")?);
        }
    }
    row.upgrades = done.len() as u32;
    let counted = least_disturbed(done, &watch.finish()?, wanted);
    row.disturbed = row.upgrades - counted.len() as u32;
    Ok(counted)
}

/// How long the machine stood still during an upgrade and in the reference before it.
fn stood_still(upgrade: &Done, seen: &[Standstill]) -> Duration {
    let Done { began, window, .. } = *upgrade;
    let ms: f64 = standstill::by_bin(seen, began - window, window * 2, 1, Duration::ZERO).iter().sum();
    Duration::from_secs_f64(ms / 1e3)
}

fn undisturbed(done: &[Done], seen: &[Standstill]) -> usize {
    done.iter().filter(|upgrade| stood_still(upgrade, seen).is_zero()).count()
}

/// The `wanted` upgrades with the shortest standstills; earlier ones first if they are equal.
fn least_disturbed(mut done: Vec<Done>, seen: &[Standstill], wanted: usize) -> Vec<Done> {
    done.sort_by_key(|upgrade| stood_still(upgrade, seen));
    done.truncate(wanted);
    done
}

/// `took`: how long an upgrade takes. New daemons are killed within that time: most of them early, because an upgrade
/// with few sessions takes less.
fn kill_all(lab: &Lab, network: &mut Network, row: &mut Row, took: Duration) -> Result<()> {
    let mut random = Rng::with_seed(lab.options.seed);
    row.sessions = 0;
    for round in 0..row.upgrades {
        interrupt::check()?;
        let number = round as usize % network.overlay.daemons.len();
        let daemon = &mut network.overlay.daemons[number];
        let within = KILL_SOONEST.mul_f64((took.as_secs_f64() / KILL_SOONEST.as_secs_f64()).powf(random.f64()));
        let killer = killer::start(daemon.pid(), within, &mut random);
        let upgraded = daemon.upgrade();
        let was_killed = killer.join().map_err(|_| anyhow!("the thread that kills panicked"))??;
        let works = if upgraded.is_ok() && was_killed {
            process::wait_for_end(daemon.pid(), PERIOD)?;
            false
        } else {
            daemon.wait_until_ready().is_ok()
        };
        match upgraded {
            Err(error) if !was_killed => return Err(error.context("an upgrade whose daemon was not killed")),
            Err(_) if works => row.failed += 1,
            _ if works => {}
            _ => {
                daemon.start_again(&network.topology.hosts[number], &lab.binaries)?;
                daemon.wait_until_ready()?;
                row.restarted += 1;
            }
        }
        interrupt::sleep(Duration::from_millis(50))?;
    }
    Ok(())
}

/// A configuration in which guests have a security group that accepts TCP and ICMP.
fn with_groups(text: String) -> String {
    let group =
        "\n[[security_group]]\nname = \"upgrade\"\ningress = [{ protocol = \"tcp\" }, { protocol = \"icmp\" }]\n";
    text.replacen("\n[[port]]\n", &format!("{group}\n[[port]]\nsecurity_groups = [\"upgrade\"]\n"), 1)
}

fn wait_for_sessions(daemon: &Daemon, wanted: u32) -> Result<()> {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let sessions = daemon.counter("avs.current_sessions")?;
        if sessions >= u64::from(wanted) {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{sessions} sessions instead of {wanted} after a minute");
        interrupt::sleep(Duration::from_millis(200))?;
    }
}

/// Open descriptors of all daemons.
fn descriptors(network: &Network) -> Result<i64> {
    let of = |daemon: &Daemon| -> Result<i64> {
        let path = format!("/proc/{}/fd", daemon.pid());
        let mut least = i64::MAX;
        for _ in 0..SAMPLES {
            let now = std::fs::read_dir(&path).with_context(|| format!("reading {path}"))?.count() as i64;
            least = least.min(now);
            std::thread::sleep(BETWEEN_SAMPLES);
        }
        Ok(least)
    };
    network.overlay.daemons.iter().map(of).sum()
}

/// The longest time that a request took which was in flight in each of some periods, ms; ascending.
fn longest(requests: &[Request], periods: impl Iterator<Item = (Instant, Instant)>) -> Vec<f64> {
    let of = |(from, to): (Instant, Instant)| {
        let during = requests.iter().filter(|request| request.due < to && request.ended >= from);
        during.map(|request| request.ended.duration_since(request.due).as_secs_f64() * 1e3).reduce(f64::max)
    };
    let mut all: Vec<f64> = periods.filter_map(of).collect();
    all.sort_by(f64::total_cmp);
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(what: What) -> Row {
        Row {
            what,
            repetition: 0,
            upgrades: 4,
            disturbed: 0,
            failed: 1,
            restarted: 1,
            stall_ms: vec![1.0, 2.0, 3.0, 9.9],
            reference_ms: vec![1.0; 4],
            machine_stall_ms: vec![1.0, 9.8],
            machine_reference_ms: vec![1.0; 2],
            held_ms: vec![2.0; 4],
            sessions: 100_000,
            requests: 4_000,
            compared_bytes: 1 << 20,
            connections: 5_007,
            broken_connections: 0,
            wrong: 0,
            more_descriptors: 0,
        }
    }

    #[test]
    fn each_bar_can_fail() {
        let failing = |change: fn(&mut Row, &mut Row)| -> Vec<usize> {
            let (mut upgrade, mut kill) = (row(What::Upgrade), row(What::Kill));
            change(&mut upgrade, &mut kill);
            let bars = Upgrade.bars(&to_values(&[upgrade, kill]).unwrap()).unwrap();
            bars.iter().enumerate().filter(|(_, bar)| !bar.passes()).map(|(number, _)| number).collect()
        };
        assert_eq!(failing(|_, _| {}), [0; 0]);
        assert_eq!(failing(|upgrade, _| upgrade.stall_ms[3] = 10.0), [0]);
        assert_eq!(failing(|upgrade, _| upgrade.machine_stall_ms[1] = 10.0), [1]);
        assert_eq!(failing(|upgrade, _| upgrade.broken_connections = 1), [2]);
        assert_eq!(failing(|upgrade, _| upgrade.wrong = 1), [3]);
        assert_eq!(failing(|_, kill| kill.broken_connections = 1), [4]);
        assert_eq!(failing(|_, kill| kill.wrong = 1), [5]);
        assert_eq!(failing(|upgrade, _| upgrade.more_descriptors = -1), [6]);
        assert_eq!(failing(|_, kill| kill.stall_ms[3] = 500.0), [0; 0]);
        assert!(Upgrade.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn requests_count_in_each_period_in_which_they_are_in_flight() {
        let began = Instant::now();
        let ms = |n: u64| began + Duration::from_millis(n);
        let request = |due, ended| Request { client: 0, due: ms(due), ended: ms(ended), answered: true };
        let requests = [request(0, 1), request(8, 12), request(21, 22)];
        let found =
            longest(&requests, [(ms(0), ms(10)), (ms(10), ms(20)), (ms(20), ms(30)), (ms(30), ms(40))].into_iter());
        assert_eq!(found.iter().map(|ms| ms.round()).collect::<Vec<_>>(), [1.0, 4.0, 4.0]);
    }

    #[test]
    fn guests_get_a_security_group() {
        let text = with_groups("[[vpc]]\nvni = 100\n\n[[port]]\nname = \"a\"\n".to_owned());
        assert!(text.contains("[[port]]\nsecurity_groups = [\"upgrade\"]\nname = \"a\"\n"), "{text}");
        assert_eq!(text.matches("[[security_group]]").count(), 1);
    }
}
