//! All members of etcd are killed while guests of real daemons exchange packets: none is lost, and once etcd is back,
//! every change is in force everywhere.

mod traffic;
mod world;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bifrost_intent::Change;
use serde_json::json;

use self::traffic::{Counted, Traffic};
use self::world::World;
use crate::cli::Outage;
use crate::failover::wanted;
use crate::host::{Host, underlay};
use crate::network::{delete, host, port_key, set};
use crate::program::Api;
use crate::report::{Report, progress};

/// Bars: from the start of etcd until a change is made, which includes an election; from then until all hosts have
/// everything; until a change is refused.
const CHANGED_BAR: f64 = 30.0;
const STALE_BAR: f64 = 5.0;
const REFUSED_BAR: f64 = 30.0;
/// How long to wait for what a bar judges.
const PATIENCE: Duration = Duration::from_secs(60);
/// Time between changes that are asked for while etcd is down.
const PERIOD: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(20);
/// Numbers of ports: guests have the first, then come those that are there before, of which some are deleted.
const OLD: usize = 100;
const NEW: usize = 1000;

/// Changes that were asked for while etcd was down.
#[derive(Debug, Default)]
struct Asked {
    refused: u64,
    longest_refusal: Duration,
    /// Those that were acknowledged although no member ran.
    accepted: u64,
    /// All of them, in order; made again when etcd is back.
    pending: Vec<Change>,
}

pub(crate) fn run(options: &Outage) -> Result<Report> {
    let Outage { etcd, hosts, ref etcd_program } = *options;
    let down = Duration::from_secs(etcd.into());
    let mut world = World::start(hosts, etcd_program)?;
    let api = world.api();
    api.apply(objects(&world))?;
    world.hosts.iter_mut().try_for_each(Host::start_agent)?;
    await_all(&world, &api).context("before the outage")?;
    let next = |n: usize| (n + 1) % hosts;
    let mut traffic = Vec::new();
    for n in 0..hosts {
        let (client, server) = (&world.hosts[n].guest, &world.hosts[next(n)].guest);
        traffic.push(Traffic::start(client, server, &guest_address(next(n)))?);
    }

    // The last host's agent is away: what is changed now is pending for it.
    let last = hosts - 1;
    world.hosts[last].kill_agent();
    api.apply(vec![delete(&port_key(OLD + last)), port(NEW, last)])?;
    world.kill_etcd();
    let (begin, is_over) = (Instant::now(), AtomicBool::new(false));
    let (asked, told, started) = std::thread::scope(|scope| -> Result<_> {
        let _stopper = Stopper(&is_over);
        let asking = scope.spawn(|| ask(&api, hosts, &is_over));
        let bar = progress("seconds without etcd");
        bar.set_length(etcd.into());
        let mut is_back = false;
        while begin.elapsed() < down {
            std::thread::sleep(POLL.min(down.saturating_sub(begin.elapsed())));
            bar.set_position(begin.elapsed().as_secs());
            if !is_back && begin.elapsed() >= down / 2 {
                world.hosts[last].start_agent()?;
                is_back = true;
            }
        }
        bar.finish_and_clear();
        // What the relay knows, hosts may have before etcd is back.
        let told = api.objects().and_then(|objects| wanted(&objects)).and_then(|wanted| behind(&world, &wanted));
        // A request that is answered from now on may have been made by etcd after its return.
        is_over.store(true, Ordering::SeqCst);
        let started = Instant::now();
        world.start_etcd()?;
        let asked = asking.join().map_err(|_| anyhow::anyhow!("a client of the relay has panicked"))?;
        Ok((asked, told.ok().map(|behind| hosts - behind.len()), started))
    })?;

    for change in &asked.pending {
        make(&api, change)?;
    }
    let changed = started.elapsed();
    let (stale, healed) = await_all_within(&world, &api, PATIENCE)?;
    let mut counted = Counted::default();
    for one in traffic {
        counted = counted.and(one.stop()?);
    }

    let mut report = Report::new(format!("all members of etcd are down for {etcd} s; {hosts} hosts with a guest each"));
    report.tell("datagrams between guests", counted.datagrams as f64, "");
    report.bar("datagrams lost", counted.lost_datagrams as f64, "", 0.0);
    report.tell("longest time between two of a guest", counted.longest_silence.as_secs_f64() * 1e3, "ms");
    report.tell("questions over TCP", counted.questions as f64, "");
    report.bar("questions without an answer", counted.unanswered as f64, "", 0.0);
    report.tell("longest time until an answer", counted.longest_answer.as_secs_f64() * 1e3, "ms");
    report.tell("changes pending when etcd was back", asked.pending.len() as f64, "");
    report.tell("changes refused while etcd was down", asked.refused as f64, "");
    report.bar("longest time until a refusal", asked.longest_refusal.as_secs_f64(), "s", REFUSED_BAR);
    report.bar("changes acknowledged while etcd was down", asked.accepted as f64, "", 0.0);
    if let Some(told) = told {
        report.tell("hosts that had all earlier changes before etcd was back", told as f64, "");
    }
    report.bar("from etcd's start until all pending changes were made", changed.as_secs_f64(), "s", CHANGED_BAR);
    report.bar("then, until all hosts have everything", healed.as_secs_f64(), "s", STALE_BAR);
    report.bar("hosts with wrong objects", stale as f64, "", 0.0);
    Ok(report)
}

/// Says that the outage is over, also after an error.
struct Stopper<'a>(&'a AtomicBool);

impl Drop for Stopper<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn guest_address(n: usize) -> String {
    format!("10.0.0.{}", 10 + n)
}

/// The hosts, a network, a guest on each host, and a port on each host without a guest.
fn objects(world: &World) -> Vec<Change> {
    let mut all =
        vec![set("vpc/demo/net", json!({})), set("subnet/demo/a", json!({"vpc": "net", "prefix": "10.0.0.0/16"}))];
    for (n, of_host) in world.hosts.iter().enumerate() {
        all.push(set(&host(n), json!({"addresses": [underlay(n)]})));
        let spec = json!({"subnets": ["a"], "host": format!("h{n}"), "netns": of_host.guest.name(),
                          "addresses": [guest_address(n)]});
        all.push(set(&port_key(n), spec));
        all.push(port(OLD + n, n));
    }
    all
}

/// A port without a guest: its namespace is not there.
fn port(n: usize, host: usize) -> Change {
    set(&port_key(n), json!({"subnets": ["a"], "host": format!("h{host}"), "netns": format!("bfleet-none-{n}")}))
}

/// Asks for changes until the outage is over: each host gets ports, and loses the one that it had.
fn ask(api: &Api, hosts: usize, is_over: &AtomicBool) -> Asked {
    let mut asked = Asked::default();
    let old = (0..hosts - 1).map(|n| delete(&port_key(OLD + n)));
    let new = (1..).map(|n| port(NEW + n, n % hosts));
    for change in old.chain(new) {
        let begin = Instant::now();
        let answer = api.apply(vec![change.clone()]);
        asked.pending.push(change);
        if is_over.load(Ordering::SeqCst) {
            return asked;
        }
        match answer {
            Ok(_) => asked.accepted += 1,
            Err(_) => {
                asked.refused += 1;
                asked.longest_refusal = asked.longest_refusal.max(begin.elapsed());
            }
        }
        std::thread::sleep(PERIOD.saturating_sub(begin.elapsed()));
        if is_over.load(Ordering::SeqCst) {
            break;
        }
    }
    asked
}

/// Makes a change, as soon as etcd takes it.
fn make(api: &Api, change: &Change) -> Result<()> {
    let begin = Instant::now();
    loop {
        match api.apply(vec![change.clone()]) {
            Ok(_) => return Ok(()),
            Err(_) if begin.elapsed() < PATIENCE => std::thread::sleep(POLL),
            Err(error) => return Err(error.context(format!("{} after {PATIENCE:?}", change.key))),
        }
    }
}

/// Hosts that do not have what they should, each with an example.
fn behind(world: &World, wanted: &BTreeMap<usize, crate::agents::Has>) -> Result<BTreeSet<String>> {
    let mut behind = BTreeSet::new();
    for (n, host) in world.hosts.iter().enumerate() {
        let different = host.differences(wanted.get(&n).with_context(|| format!("h{n} is unknown to the relay"))?)?;
        behind.extend(different.into_iter().next().map(|example| format!("h{n}: {example}")));
    }
    Ok(behind)
}

/// Waits until all hosts have what they should; how many do not, and how long it took.
fn await_all_within(world: &World, api: &Api, patience: Duration) -> Result<(usize, Duration)> {
    let begin = Instant::now();
    let wanted = wanted(&api.objects()?)?;
    loop {
        let behind = behind(world, &wanted)?;
        if behind.is_empty() || begin.elapsed() > patience {
            behind.iter().for_each(|host| eprintln!("{host}"));
            return Ok((behind.len(), begin.elapsed()));
        }
        std::thread::sleep(POLL);
    }
}

fn await_all(world: &World, api: &Api) -> Result<()> {
    let (stale, _) = await_all_within(world, api, PATIENCE)?;
    ensure!(stale == 0, "{stale} hosts do not have everything after {PATIENCE:?}");
    Ok(())
}
