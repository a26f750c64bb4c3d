//! `gw-kill`: SIGKILL for each program of a gateway in turn, under load: packet loss, and the time until everything is
//! restored automatically.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::bars::{Bar, Sense};
use crate::frame::Experiment;
use crate::gateway::fabric::{Fabric, Settings};
use crate::gateway::switch::Daemon;
use crate::gateway::until::until;
use crate::interrupt;
use crate::lab::Lab;
use crate::options::Mode;
use crate::plot::{self, Panel, Series};
use crate::report::Table;
use crate::results::{from_values, to_values};
use crate::stats::{Spread, cell};

/// Probes per second.
const PROBES: u32 = 10_000;
const PODS: usize = 2;
const PROXIES: usize = 2;
/// Time within which BFD detects that a pod is gone (three intervals of 50 ms, counted from the last packet), and the
/// proxies and the switch's kernel have removed it from the route, ms.
const MISSED_MS: f64 = 300.0;
/// Bound for the share of one of two pods in the probes' 64 flows: half, plus three standard deviations of a fair hash.
const SHARE: f64 = 0.5 + 3.0 * 0.0625;
/// Time within which a program that all routes depend on has restarted, and the routes are back, ms: the service
/// manager waits for 100 ms, and the program starts in 400 ms. A neighbour that has just tried to connect tries again
/// after 1 s (`timers connect 1`, and the same in pods), and an announcement reaches the switch's kernel in 500 ms.
const RESTARTED_MS: f64 = 2000.0;
/// How long FRR sets the Restart State bit after its start (RFC 4724), whatever its configuration, s. A switch that
/// restarts does not wait for the routes of such a neighbour, so its kernel has none until they arrive.
const STARTING_S: f64 = 120.0;
/// Maximum time of a new pod until it forwards, ms. Whatever was killed, everything must be restored by then.
const BACK_MS: f64 = 10_000.0;

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct GwKill;

/// The program that gets SIGKILL.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Victim {
    /// One of two pods.
    Pod,
    /// `bifrost-nicd`.
    Pipeline,
    /// FRR of one of two proxies: bgpd, bfdd and zebra.
    Proxy,
    /// bgpd of the switch.
    Switch,
    /// BIRD, if the switch runs it.
    Bird,
}

impl Victim {
    /// In the order in which they are killed. The proxy is last, because it counts as starting for two minutes after a
    /// restart.
    const ALL: [Victim; 5] = [Victim::Pod, Victim::Pipeline, Victim::Switch, Victim::Bird, Victim::Proxy];

    /// The switch's BGP daemon meanwhile.
    fn daemon(self) -> Daemon {
        match self {
            Victim::Pod | Victim::Pipeline | Victim::Proxy | Victim::Switch => Daemon::Frr,
            Victim::Bird => Daemon::Bird,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Victim::Pod => "one of two pods",
            Victim::Pipeline => "the pipeline",
            Victim::Proxy => "one of two proxies",
            Victim::Switch => "bgpd of the switch",
            Victim::Bird => "BIRD of the switch",
        }
    }

    /// Bounds for the longest time without a probe, ms, and for the number of lost probes. `settled`: the proxies have
    /// been running for long.
    fn bars(self, settled: bool) -> (f64, f64) {
        let of = |ms: f64, share: f64| ms / 1e3 * f64::from(PROBES) * share;
        match self {
            Victim::Pod => (MISSED_MS, of(MISSED_MS, SHARE)),
            // The kernel keeps the routes (RFC 4724).
            Victim::Switch | Victim::Bird if settled => (100.0, 0.0),
            Victim::Pipeline | Victim::Switch | Victim::Bird => (RESTARTED_MS, of(RESTARTED_MS, 1.0)),
            // No packet passes through a proxy, and the other proxy has the same routes. The rest is the scheduler's
            // delay.
            Victim::Proxy => (100.0, 0.0),
        }
    }
}

/// The result of killing one program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The program.
    #[serde(rename = "mode")]
    pub victim: Victim,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Probes sent.
    pub sent_probes: u32,
    /// Probes lost, of these.
    pub lost_probes: u32,
    /// The longest time between two received probes, ms.
    pub longest_gap_ms: f64,
    /// Time until all sessions and next hops existed again, ms.
    pub back_ms: f64,
    /// How long its neighbours had been running, s.
    pub neighbours_ran_s: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Row { victim, sent_probes, lost_probes, longest_gap_ms, back_ms, .. } = self;
        write!(
            f,
            "{}: {lost_probes} of {sent_probes} probes lost, none for {longest_gap_ms:.0} ms; all is there again after \
             {back_ms:.0} ms",
            victim.name()
        )
    }
}

impl Experiment for GwKill {
    fn name(&self) -> &'static str {
        "gw-kill"
    }

    fn summary(&self) -> &'static str {
        "SIGKILL for a gateway's pod, pipeline, proxy and switch daemon under load: what is lost, and for how long"
    }

    /// None: it builds its own network.
    fn modes(&self) -> Vec<Mode> {
        Vec::new()
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let mut rows = Vec::new();
        for repetition in 0..lab.repetitions(3) {
            let mut fabrics = Vec::new();
            for daemon in Daemon::ALL {
                let label = format!("kill-{}{repetition}", &daemon.name()[..1]);
                let settings = Settings { proxies: PROXIES, switch: daemon, ..Settings::default() };
                let fabric = Fabric::start(lab, &label, settings)?;
                ["one", "two"].iter().try_for_each(|name| fabric.pod(&["create", name]).map(drop))?;
                fabrics.push((daemon, fabric, Instant::now()));
            }
            for victim in Victim::ALL {
                let found = fabrics.iter().find(|(daemon, ..)| *daemon == victim.daemon());
                let (_, fabric, started) = found.context("a network with this switch")?;
                if matches!(victim, Victim::Switch | Victim::Bird) {
                    let wanted = Duration::from_secs_f64(lab.seconds(STARTING_S + 5.0, 0.0));
                    interrupt::sleep(wanted.saturating_sub(started.elapsed()))?;
                }
                let row = measure(fabric, victim, repetition, *started)
                    .with_context(|| format!("{}, repetition {repetition}", victim.name()))?;
                println!("{row}");
                rows.push(row);
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&["killed", "probes lost", "longest gap [ms]", "all is there again after [ms]"]);
        for victim in Victim::ALL {
            let fields: [fn(&Row) -> f64; 3] =
                [|row| row.lost_probes.into(), |row| row.longest_gap_ms, |row| row.back_ms];
            let cells = fields.map(|field| cell(spread(&rows, victim, field)));
            table.row([victim.name().to_owned()].into_iter().chain(cells).collect());
        }
        Ok(format!(
            "Two pods in containers behind two proxies (FRR) and a switch (FRR or BIRD); {PROBES} probes a second pass. Each program \
             gets SIGKILL in turn. What starts it again is Podman for pods, and for the others what a service manager with \
             `Restart=always` and `RestartSec=100ms` does. Medians, and in brackets the least and the most of the \
             repetitions.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let series = [(Series::on("longest gap"), ())];
        let victims: Vec<u32> = (0..Victim::ALL.len() as u32).collect();
        let labels = "0: pod, 1: pipeline, 2: bgpd, 3: BIRD, 4: proxy";
        let panel =
            Panel::over("what is killed", (labels, &victims), ("no probe for [ms]", false), &series, |(), of| {
                spread(&rows, Victim::ALL[*of as usize], |row| row.longest_gap_ms)
            });
        Ok(vec![plot::draw(&directory.join("gap.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut bars = Vec::new();
        for victim in Victim::ALL {
            let name = victim.name();
            let most = |field: fn(&Row) -> f64| spread(&rows, victim, field).map(|spread| spread.most);
            let of = || rows.iter().filter(|row| row.victim == victim);
            let settled = of().next().is_some() && of().all(|row| row.neighbours_ran_s >= STARTING_S);
            let (gap, lost) = victim.bars(settled);
            let lost_probes = most(|row| row.lost_probes.into());
            bars.push(Bar::new(format!("{name}: probes lost"), lost_probes, Sense::AtMost, lost, "probes"));
            bars.push(Bar::new(
                format!("{name}: no probe for"),
                most(|row| row.longest_gap_ms),
                Sense::AtMost,
                gap,
                "ms",
            ));
            let back = most(|row| row.back_ms);
            bars.push(Bar::new(format!("{name}: all is there again after"), back, Sense::AtMost, BACK_MS, "ms"));
        }
        Ok(bars)
    }
}

fn spread(rows: &[Row], victim: Victim, field: fn(&Row) -> f64) -> Option<Spread> {
    Spread::of(rows.iter().filter(|row| row.victim == victim).map(field))
}

fn measure(fabric: &Fabric, victim: Victim, repetition: u32, started: Instant) -> Result<Row> {
    until("all sessions are there", || Ok(is_whole(fabric).then_some(())))?;
    // Waits until earlier activity has ended, such as restart timers.
    interrupt::sleep(Duration::from_secs(2))?;
    let probes = fabric.probe(PROBES)?;
    interrupt::sleep(Duration::from_secs(1))?;
    let began = Instant::now();
    let neighbours_ran_s = (began - started).as_secs_f64();
    match victim {
        Victim::Pod => fabric.signal("two", Signal::KILL)?,
        Victim::Pipeline => fabric.pipeline().kill()?,
        Victim::Proxy => fabric.proxy(0).kill(&["bgpd", "bfdd", "zebra"])?,
        Victim::Switch | Victim::Bird => fabric.switch().kill_bgp()?,
    }
    // By then the failure has been detected.
    interrupt::sleep(Duration::from_millis(500))?;
    until("all sessions are there again", || Ok(is_whole(fabric).then_some(())))?;
    let back_ms = began.elapsed().as_secs_f64() * 1e3;
    // Waits until stale state, such as stale routes, has been removed, so that losses caused by that are counted.
    interrupt::sleep(Duration::from_secs(3))?;
    let probed = probes.stop()?;
    Ok(Row {
        victim,
        repetition,
        sent_probes: probed.sent,
        lost_probes: probed.lost(),
        longest_gap_ms: probed.longest_gap.as_secs_f64() * 1e3,
        back_ms,
        neighbours_ran_s,
    })
}

/// Whether all sessions are established, and packets go to all pods. A daemon that does not answer counts as down.
fn is_whole(fabric: &Fabric) -> bool {
    let hops = fabric.next_hops().is_ok_and(|hops| hops == PODS);
    let switch = || fabric.switch().sessions().is_ok_and(|sessions| sessions == PROXIES);
    // Each proxy has sessions with the pods and with the switch.
    let proxy = |number| fabric.proxy(number).sessions().is_ok_and(|sessions| sessions == PODS + 1);
    hops && switch() && (0..PROXIES).all(proxy)
}
