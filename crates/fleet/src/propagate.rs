//! Time from the request of a change until agents have it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use bifrost_intent::Change;
use serde_json::Value;
use tokio::task::JoinSet;

use crate::agents::{Agents, mark};
use crate::cli::{Propagate, Size, What};
use crate::floor;
use crate::network::{GROUP, group, port_key};
use crate::program::{Api, Relay};
use crate::report::{Report, progress};

/// Bars for ports, and for groups of all hosts, milliseconds.
const PORT_BAR: f64 = 100.0;
const GROUP_BAR: f64 = 1000.0;
/// Maximum wait for the last change.
const REST: Duration = Duration::from_secs(5);

pub(crate) async fn run(options: &Propagate) -> Result<Report> {
    let Propagate { size, rate, seconds, what } = *options;
    let directory = tempfile::tempdir()?;
    let mut relay = Relay::start(directory.path())?;
    relay.wait_ready().await?;
    load(&relay.api(), size).await?;
    let mut agents = Agents::start(size.hosts, &relay.endpoint())?;
    let revision = relay.wait_ready().await?.revision;
    agents.wait_in_sync(revision, Duration::from_secs(120)).await?;
    let addresses = addresses(&relay.api()).await?;

    let (_, processor) = relay.usage()?;
    let started = Instant::now();
    let mut interval = tokio::time::interval(Duration::from_secs(1) / rate.max(1));
    let mut requests = JoinSet::new();
    let mut commits = Vec::new();
    let count = rate * seconds;
    let bar = progress("changes");
    bar.set_length(count.into());
    for number in 0..count as usize {
        interval.tick().await;
        let (change, mark) = change(options, number, &addresses);
        agents.expect(mark);
        let api = relay.api();
        requests.spawn_blocking(move || {
            let start = Instant::now();
            api.apply(vec![change]).map(|_| start.elapsed())
        });
        while let Some(done) = requests.try_join_next() {
            commits.push(done??);
        }
        bar.inc(1);
    }
    while let Some(done) = requests.join_next().await {
        commits.push(done??);
    }
    let elapsed = started.elapsed();
    bar.finish_and_clear();
    let revision = relay.wait_ready().await?.revision;
    // Agents that a change does not concern receive groups and routes later, or never.
    let _ = agents.wait_in_sync(revision, REST).await;
    let (memory, after) = relay.usage()?;
    let marks = agents.marks();
    let lost = marks.iter().filter(|(_, took)| took.is_empty()).count();
    let told: Vec<Duration> = marks.iter().flat_map(|(_, took)| took).copied().collect();
    let last: Vec<Duration> = marks.iter().filter_map(|(_, took)| took.iter().max().copied()).collect();
    agents.stop();

    let (name, most) = match what {
        What::Port => ("a port moves", PORT_BAR),
        What::Group => ("a group of all ports changes", GROUP_BAR),
    };
    let Size { hosts, ports, .. } = size;
    let mut report =
        Report::new(format!("{name}, {rate} times a second for {seconds} s; {hosts} hosts, {ports} ports"));
    report.tell("changes", marks.len() as f64, "");
    report.tell("hosts per change, mean", told.len() as f64 / marks.len().max(1) as f64, "");
    report.bar("changes that no host received", lost as f64, "", 0.0);
    report.tell("changes a second", f64::from(count) / elapsed.as_secs_f64(), "");
    report.times("request to acknowledgement", &commits, None);
    report.times("request to an agent", &told, None);
    report.times("request to the last agent", &last, Some(most));
    let hosts_each = told.len() / marks.len().max(1);
    report.times("floor: this program alone", &floor::run(hosts, hosts_each, rate).await?, None);
    report.tell(
        "the relay's processor time per change",
        (after - processor).as_secs_f64() * 1e3 / f64::from(count),
        "ms",
    );
    report.tell("the relay's memory", memory as f64, "MB");
    Ok(report)
}

/// Creates all objects.
pub(crate) async fn load(api: &Api, size: Size) -> Result<()> {
    let api = api.clone();
    tokio::task::spawn_blocking(move || {
        let bar = progress("objects");
        let result = api.apply_all(&size.objects(), &bar);
        bar.finish_and_clear();
        result
    })
    .await?
}

/// VNI and address of each port.
async fn addresses(api: &Api) -> Result<HashMap<usize, (u64, String)>> {
    let api = api.clone();
    let objects = tokio::task::spawn_blocking(move || api.objects()).await??.objects;
    let named = |kind: &str| {
        let of_kind = objects.iter().filter(|object| object.key.kind().name() == kind);
        of_kind.map(|object| (object.key.name(), &object.spec)).collect::<HashMap<&str, &Value>>()
    };
    let (vpcs, subnets) = (named("vpc"), named("subnet"));
    let mut found = HashMap::new();
    for (name, spec) in named("port") {
        let subnet = spec["subnets"][0].as_str().and_then(|subnet| subnets.get(subnet));
        let vpc = subnet.and_then(|subnet| vpcs.get(subnet["vpc"].as_str()?));
        let vni = vpc.and_then(|vpc| vpc["vni"].as_u64()).context("a port has no VPC")?;
        let address = spec["addresses"][0].as_str().context("a port has no address")?;
        let number =
            name.strip_prefix('p').and_then(|number| number.parse().ok()).context("a port has another name")?;
        found.insert(number, (vni, address.to_owned()));
    }
    Ok(found)
}

/// A change, and how agents recognise it.
fn change(options: &Propagate, number: usize, addresses: &HashMap<usize, (u64, String)>) -> (Change, String) {
    match options.what {
        What::Group => {
            let change = group(number + 1);
            let spec = change.spec.clone().unwrap_or_default();
            let mut item = serde_json::Map::new();
            item.insert("ingress".into(), spec["ingress"].clone());
            item.insert("name".into(), "demo.all".into());
            debug_assert_eq!(change.key.to_string(), GROUP);
            (change, mark("security_group", "demo.all", &Value::Object(item).to_string()))
        }
        What::Port => {
            let size = options.size;
            // In each round every port moves once, to its next host.
            let (port, round) = (number % size.ports, number / size.ports + 1);
            let host = (size.host_of(port) + round) % size.hosts;
            let (vni, address) = addresses.get(&port).cloned().unwrap_or_default();
            debug_assert_eq!(size.port(port, host).key.to_string(), port_key(port));
            (size.port(port, host), format!("route {vni}/{address}/32 h{host}"))
        }
    }
}
