//! Checks that acknowledged changes reach all hosts although the relay is killed.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bifrost_intent::api::Objects;
use bifrost_intent::{Model, Spans, Spec, Stored};

use crate::agents::{Agents, Has, lock};
use crate::cli::{Failover, Size};
use crate::network::{delete, port_key};
use crate::program::{Api, Relay};
use crate::propagate::load;
use crate::report::{Report, progress};

/// Time between two kills.
const PERIOD: Duration = Duration::from_secs(2);
/// How long a host may have stale objects after the relay is back.
const STALE: Duration = Duration::from_secs(5);

/// What is known of a port: the host acknowledged last, or its deletion; and requests since then without a response.
#[derive(Debug)]
struct Known {
    acknowledged: Option<usize>,
    asked: Vec<Option<usize>>,
}

pub(crate) async fn run(options: &Failover) -> Result<Report> {
    let Failover { size, rate, kills } = *options;
    let directory = tempfile::tempdir()?;
    let mut relay = Relay::start(directory.path())?;
    relay.wait_ready().await?;
    load(&relay.api(), size).await?;
    let mut agents = Agents::start(size.hosts, &relay.endpoint())?;
    agents.wait_in_sync(1, Duration::from_secs(60)).await?;

    let changing = tokio::task::spawn_blocking({
        let api = relay.api();
        let until = Instant::now() + PERIOD * (kills + 1);
        move || change_until(&api, size, rate, until)
    });
    let bar = progress("kills");
    bar.set_length(kills.into());
    for _ in 0..kills {
        tokio::time::sleep(PERIOD.mul_f64(0.5 + fastrand::f64() * 0.5)).await;
        relay.kill();
        tokio::time::sleep(Duration::from_millis(fastrand::u64(0..500))).await;
        relay.restart()?;
        bar.inc(1);
    }
    let (known, acknowledged, unanswered) = changing.await??;
    bar.finish_and_clear();
    let status = relay.wait_ready().await?;
    let back = Instant::now();
    let api = relay.api();
    let objects = tokio::task::spawn_blocking(move || api.objects()).await??;
    let wrong = contradictions(&known, &objects);
    let wanted = wanted(&objects)?;
    let stale = loop {
        let stale = agents.all.iter().enumerate().filter(|(n, agent)| lock(agent).has != wanted[n]).count();
        if stale == 0 || back.elapsed() > STALE {
            break stale;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    };
    let healed = back.elapsed();
    let connections: u64 = agents.all.iter().map(|agent| lock(agent).connections).sum();
    agents.stop();

    let Size { hosts, ports, .. } = size;
    let mut report = Report::new(format!("the relay is killed {kills} times; {hosts} hosts, {ports} ports"));
    report.tell("changes acknowledged", acknowledged as f64, "");
    report.tell("requests without a response", unanswered as f64, "");
    report.tell("connections of agents", connections as f64, "");
    report.tell("revision", status.revision as f64, "");
    report.bar("acknowledged changes that the store does not have", wrong as f64, "", 0.0);
    report.bar("hosts with wrong objects", stale as f64, "", 0.0);
    report.bar(
        "after the relay is back, until all hosts have everything",
        healed.as_secs_f64(),
        "s",
        STALE.as_secs_f64(),
    );
    Ok(report)
}

type Changed = (BTreeMap<usize, Known>, usize, usize);

/// Moves and deletes ports.
fn change_until(api: &Api, size: Size, rate: u32, until: Instant) -> Result<Changed> {
    let mut known: BTreeMap<usize, Known> = BTreeMap::new();
    let (mut acknowledged, mut unanswered) = (0, 0);
    let mut next = Instant::now();
    while Instant::now() < until {
        next += Duration::from_secs(1) / rate.max(1);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let port = fastrand::usize(0..size.ports.min(500));
        let host = fastrand::bool().then(|| fastrand::usize(0..size.hosts));
        let change = match host {
            Some(host) => size.port(port, host),
            None => delete(&port_key(port)),
        };
        let entry = known.entry(port).or_insert(Known { acknowledged: Some(size.host_of(port)), asked: Vec::new() });
        match api.apply(vec![change]) {
            Ok(_) => {
                *entry = Known { acknowledged: host, asked: Vec::new() };
                acknowledged += 1;
            }
            Err(_) => {
                entry.asked.push(host);
                unanswered += 1;
            }
        }
    }
    Ok((known, acknowledged, unanswered))
}

/// Ports that match neither the acknowledged state nor a request without a response.
fn contradictions(known: &BTreeMap<usize, Known>, objects: &Objects) -> usize {
    let ports: BTreeMap<String, String> = objects
        .objects
        .iter()
        .filter_map(|object| Some((object.key.to_string(), object.spec.get("host")?.as_str()?.to_owned())))
        .collect();
    let is_wrong = |(port, known): &(&usize, &Known)| {
        let there = ports.get(&port_key(**port)).and_then(|host| host.strip_prefix('h')?.parse::<usize>().ok());
        there != known.acknowledged && !known.asked.contains(&there)
    };
    known.iter().filter(is_wrong).count()
}

/// The objects that each host must have, computed from the desired state.
pub(crate) fn wanted(objects: &Objects) -> Result<BTreeMap<usize, Has>> {
    let mut model = Model::default();
    for object in &objects.objects {
        let spec = Spec::parse(object.key.kind(), &object.spec);
        let spec = spec.map_err(|(field, what)| anyhow::anyhow!("{}: {field}: {what}", object.key))?;
        model
            .set(object.key.clone(), Stored { spec, generation: object.generation, committed_ms: object.committed_ms });
    }
    let spans = Spans::of(&model);
    let hosts = model.iter().filter_map(|(key, _)| key.name().strip_prefix('h').filter(|_| key.project().is_empty()));
    let mut wanted = BTreeMap::new();
    for host in hosts {
        let item = |(id, item): (bifrost_intent::ItemId, Option<bifrost_intent::Item>)| {
            Some(((id.kind.name().to_owned(), id.key), item?.spec.as_bytes().to_vec()))
        };
        let has: Has = spans.of_host(&format!("h{host}")).into_iter().filter_map(item).collect();
        wanted.insert(host.parse().context("a host has another name")?, has);
    }
    Ok(wanted)
}
