//! `migrate`: downtime of a virtual machine that moves to another host, compared with QEMU's own networking: a TAP
//! device in a bridge, where the machine's first frames from its new host show the bridges its location.
//!
//! A container on a third host pings the machine 500 times per second and has a TCP connection to it, on which each
//! answer is checked.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::bars::{Bar, Sense};
use crate::daemon::VNI;
use crate::frame::Experiment;
use crate::interrupt;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::options::Mode;
use crate::plot::{self, Panel};
use crate::programs::echo_prober::{EchoProber, Probe};
use crate::programs::tcp_requests::TcpRequests;
use crate::progress::Progress;
use crate::qemu::{Device, Image, Moved, Qemu};
use crate::report::{Table, number};
use crate::results::{from_values, to_values};
use crate::state::Run;
use crate::stats::{Spread, distinct, median_of};
use crate::topology::overlay::Overlay;
use crate::topology::{Plan, Topology};

const MACHINE: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 9);
const MAC: &str = "02:00:00:00:00:09";
/// The container that communicates with the machine.
const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const MTU: u32 = 1450;
const PORT: u16 = 5001;
/// Bound for the machine's downtime beyond that with QEMU's own networking, ms.
const MOST_MS: f64 = 20.0;
/// Duration of traffic before the move, and after it.
const AROUND: Duration = Duration::from_secs(2);
const BETWEEN_PINGS: Duration = Duration::from_millis(2);

/// The experiment.
#[derive(Debug, Clone, Copy)]
pub struct Migrate;

/// The network that joins the machine with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Network {
    /// A vhost-user port. The hosts are told where the machine is.
    Bifrost,
    /// A TAP device in a bridge. The bridges of all hosts learn where the machine is.
    Bridge,
}

impl Network {
    const ALL: [Network; 2] = [Network::Bifrost, Network::Bridge];
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Network::Bifrost => "bifrost",
            Network::Bridge => "bridge",
        })
    }
}

/// The result of one move.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The network.
    #[serde(rename = "mode")]
    pub network: Network,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// The longest time between two answers to pings, ms.
    pub away_ms: f64,
    /// The longest time until an answer over TCP, ms.
    pub tcp_stall_ms: f64,
    /// Number of answers over TCP.
    pub tcp_answers: u64,
    /// Whether the connection ended, or an answer was wrong.
    pub broken: bool,
    /// Time from the machine's stop on the old host to its start on the new one, as reported by QEMU, ms.
    pub qemu_downtime_ms: f64,
    /// Duration of the migration, including that time, as reported by QEMU, ms.
    pub qemu_total_ms: f64,
}

impl Experiment for Migrate {
    fn name(&self) -> &'static str {
        "migrate"
    }

    fn summary(&self) -> &'static str {
        "How long a virtual machine is away when it moves to another host, beside a TAP device in a bridge"
    }

    fn modes(&self) -> Vec<Mode> {
        vec![Mode::Bifrost]
    }

    fn run(&self, lab: &Lab) -> Result<Vec<Value>> {
        let repetitions = lab.repetitions(10);
        let mut progress = Progress::new(u64::from(repetitions) * 2);
        let mut rows = Vec::new();
        for repetition in 0..repetitions {
            let mut turns = Network::ALL;
            turns.rotate_left(repetition as usize % 2);
            for network in turns {
                progress.begin(&format!("{network}, repetition {repetition}"));
                let row = measure(lab, network, repetition)?;
                progress.end(&format!(
                    "{network:>8}: away for {:.0} ms (QEMU: {:.0} ms), TCP for {:.0} ms{}",
                    row.away_ms,
                    row.qemu_downtime_ms,
                    row.tcp_stall_ms,
                    if row.broken { ", BROKEN" } else { "" }
                ));
                rows.push(row);
            }
        }
        to_values(&rows)
    }

    fn report(&self, rows: &[Value]) -> Result<String> {
        let rows: Vec<Row> = from_values(rows)?;
        let mut table = Table::new(&[
            "network",
            "moves",
            "away P50 ms",
            "least to most",
            "QEMU's downtime P50 ms",
            "TCP stall P50 ms",
            "broken",
        ]);
        for network in Network::ALL {
            let of = |field: fn(&Row) -> f64| Spread::of(some(&rows, network).map(field));
            let middle =
                |field: fn(&Row) -> f64| median_of(some(&rows, network).map(field)).map_or("-".to_owned(), number);
            table.row(vec![
                network.to_string(),
                some(&rows, network).count().to_string(),
                middle(|row| row.away_ms),
                of(|row| row.away_ms).map_or("-".to_owned(), |s| format!("{} to {}", number(s.least), number(s.most))),
                middle(|row| row.qemu_downtime_ms),
                middle(|row| row.tcp_stall_ms),
                some(&rows, network).filter(|row| row.broken).count().to_string(),
            ]);
        }
        Ok(format!(
            "A QEMU machine of 128 MB, without KVM, moves from one host to another while a container on a third host pings it 500 times a second and \
             asks it over one TCP connection. `away`: the longest time between two answers to pings. `QEMU's downtime`: what QEMU says \
             itself.\n\n{}",
            table.render()
        ))
    }

    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>> {
        let rows: Vec<Row> = from_values(rows)?;
        let kinds = [(plot::Series::on("bifrost"), Network::Bifrost), (plot::Series::off("bridge"), Network::Bridge)];
        let repetitions = distinct(&rows, |row| row.repetition);
        let x = ("move", repetitions.as_slice());
        let panel = Panel::over("away", x, ("ms", false), &kinds, |network, repetition| {
            Spread::of(some(&rows, network).filter(|row| row.repetition == *repetition).map(|row| row.away_ms))
        });
        Ok(vec![plot::draw(&directory.join("migrate.svg"), &[panel], 1)?])
    }

    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>> {
        let rows: Vec<Row> = from_values(rows)?;
        let away = |network| median_of(some(&rows, network).map(|row: &Row| row.away_ms));
        let longer = away(Network::Bifrost).zip(away(Network::Bridge)).map(|(ours, theirs)| ours - theirs);
        let broken = some(&rows, Network::Bifrost).filter(|row| row.broken).count();
        let broken = (!rows.is_empty()).then_some(broken as f64);
        Ok(vec![
            Bar::new("away for longer than with a bridge, P50", longer, Sense::AtMost, MOST_MS, "ms"),
            Bar::new("connections broken", broken, Sense::AtMost, 0.0, "connections").exact(),
        ])
    }
}

fn some(rows: &[Row], network: Network) -> impl Iterator<Item = &Row> + Clone {
    rows.iter().filter(move |row| row.network == network)
}

/// Measures one move of a new machine.
fn measure(lab: &Lab, network: Network, repetition: u32) -> Result<Row> {
    let part = lab.run.part()?;
    let logs = lab.logs(&format!("{network}-{repetition}"));
    let script = format!("nc -ll -p {PORT} -e cat");
    let image = Image::build(part.directory(), MACHINE, MTU, &script)?;
    match network {
        Network::Bifrost => {
            let topology = Topology::build(&part, Plan { hosts: 3, ..lab.plan() })?;
            let overlay = Overlay::start(&part, &topology, Mode::Bifrost, &lab.settings(), &lab.binaries, &logs)?;
            let [a, b, c] = &topology.hosts[..] else { return Err(anyhow!("there are not three hosts")) };
            let [here, there] = ["here", "there"].map(|name| part.directory().join(format!("{name}.vhost")));
            let apply = |host: usize, items: Value| apply(&overlay, host, items);
            apply(0, json!([port(&here)]))?;
            apply(1, json!([route(&a.name)]))?;
            // As if the new host already had guests that communicate with the machine.
            apply(2, json!([route(&a.name)]))?;
            let hosts = [(&a.namespace, Device::VhostUser(&here)), (&c.namespace, Device::VhostUser(&there))];
            let prepare = || apply(2, json!([gone("route", &format!("{VNI}/{MACHINE}/32")), port(&there)]));
            // Both hosts are told at the same time, because they are independent.
            let tell = || {
                thread::scope(|scope| {
                    let other = scope.spawn(|| apply(1, json!([route(&c.name)])));
                    apply(0, json!([gone("port", "machine"), route(&c.name)]))?;
                    other.join().map_err(|_| anyhow!("telling a host has panicked"))?
                })
            };
            run(&image, (&part, &logs), (network, repetition), &b.guest.namespace, hosts, prepare, tell)
        }
        Network::Bridge => {
            let link = Link::build(&part)?;
            let hosts = [(&link.hosts[0], Device::Tap("tap0")), (&link.hosts[1], Device::Tap("tap0"))];
            run(&image, (&part, &logs), (network, repetition), &link.client, hosts, || Ok(()), || Ok(()))
        }
    }
}

/// Starts the machine on the first host, moves it to the second one, and measures from `client`.
fn run(
    image: &Image,
    (part, logs): (&Run, &Path),
    (network, repetition): (Network, u32),
    client: &Namespace,
    [here, there]: [(&Namespace, Device<'_>); 2],
    prepare: impl Fn() -> Result<()>,
    tell: impl Fn() -> Result<()>,
) -> Result<Row> {
    let (directory, incoming) = (part.directory(), part.directory().join("incoming"));
    let mut machine = Qemu::start(image, here.0, ("here", MAC), here.1, (directory, logs), None)?;
    machine.wait_until_ready()?;
    let requests = TcpRequests::start(client, (MACHINE, PORT).into())?;
    let pings = EchoProber::start(client, CLIENT, MACHINE, BETWEEN_PINGS)?;
    interrupt::sleep(AROUND)?;
    prepare()?;
    let _there = Qemu::start(image, there.0, ("there", MAC), there.1, (directory, logs), Some(&incoming))?;
    interrupt::sleep(AROUND)?;
    let Moved { downtime_ms, total_ms } = machine.migrate(&incoming)?;
    tell()?;
    interrupt::sleep(AROUND)?;
    let away_ms = longest_gap_ms(&pings.finish()?).context("pings have no two answers")?;
    let answers = requests.finish()?;
    Ok(Row {
        network,
        repetition,
        away_ms,
        tcp_stall_ms: answers.longest().as_secs_f64() * 1e3,
        tcp_answers: answers.requests.len() as u64,
        broken: answers.broken,
        qemu_downtime_ms: downtime_ms,
        qemu_total_ms: total_ms,
    })
}

/// Hosts and a client in one network. Each host has a separate bridge.
struct Link {
    hosts: [Namespace; 2],
    client: Namespace,
    _middle: Namespace,
}

impl Link {
    fn build(part: &Run) -> Result<Link> {
        let namespace = |name: &str| Namespace::create(format!("{}-{name}", part.id()));
        let middle = namespace("middle")?;
        middle.ip_batch("link add b0 type bridge\nlink set b0 up\n")?;
        let join = |to: &Namespace, n: usize, name: &str| {
            middle.ip_batch(&format!(
                "link add l{n} type veth peer name {name} netns {}\nlink set l{n} master b0 up\n",
                to.name()
            ))
        };
        let host = |n: usize| {
            let host = namespace(&format!("bridge-{n}"))?;
            join(&host, n, "u0")?;
            host.ip_batch(&format!(
                "link add b0 type bridge\nlink set b0 up\nlink set u0 master b0 up\ntuntap add tap0 mode tap\n\
                 link set tap0 mtu {MTU} master b0 up\n"
            ))?;
            anyhow::Ok(host)
        };
        let (hosts, client) = ([host(0)?, host(1)?], namespace("client")?);
        join(&client, 2, "eth0")?;
        client.ip_batch(&format!("link set eth0 mtu {MTU} up\naddr add {CLIENT}/24 dev eth0\n"))?;
        Ok(Link { hosts, client, _middle: middle })
    }
}

/// Changes objects of a host's daemon.
fn apply(overlay: &Overlay, host: usize, items: Value) -> Result<()> {
    overlay.daemons[host].post("/v1/apply", &json!({"items": items})).map(drop)
}

fn port(socket: &Path) -> Value {
    json!({"op": "set", "kind": "port", "owner": "lab", "spec": {
        "name": "machine", "kind": "vhost-user", "mode": "client", "socket": socket, "vni": VNI, "mac": MAC,
        "addresses": [format!("{MACHINE}/24")], "mtu": MTU,
    }})
}

fn route(peer: &str) -> Value {
    json!({"op": "set", "kind": "route", "owner": "lab", "spec": {
        "vni": VNI, "prefix": format!("{MACHINE}/32"), "peer": peer, "mac": MAC,
    }})
}

fn gone(kind: &str, key: &str) -> Value {
    json!({"op": "delete", "kind": kind, "key": key, "owner": "lab"})
}

/// The longest time between two answers to probes, ms.
fn longest_gap_ms(probes: &[Probe]) -> Option<f64> {
    let mut answered: Vec<Instant> = probes.iter().filter_map(|probe| Some(probe.sent + probe.took?)).collect();
    answered.sort();
    answered.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e3).reduce(f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(network: Network, away_ms: f64, broken: bool) -> Row {
        let (tcp_stall_ms, tcp_answers, qemu_downtime_ms, qemu_total_ms) = (250.0, 4000, 30.0, 700.0);
        Row { network, repetition: 0, away_ms, tcp_stall_ms, tcp_answers, broken, qemu_downtime_ms, qemu_total_ms }
    }

    #[test]
    fn the_bars_can_fail() {
        let passes = |ours: f64, broken| {
            let rows = to_values(&[row(Network::Bifrost, ours, broken), row(Network::Bridge, 50.0, false)]).unwrap();
            Migrate.bars(&rows).unwrap().iter().map(Bar::passes).collect::<Vec<_>>()
        };
        assert_eq!(passes(70.0, false), [true, true]);
        assert_eq!(passes(71.0, false), [false, true]);
        assert_eq!(passes(60.0, true), [true, false]);
        assert!(Migrate.bars(&[]).unwrap().iter().all(|bar| !bar.passes()));
    }

    #[test]
    fn gaps_are_between_answers() {
        let began = Instant::now();
        let ms = Duration::from_millis;
        let probe = |sent: u64, took: Option<u64>| Probe { sent: began + ms(sent), took: took.map(ms) };
        let probes = [probe(0, Some(1)), probe(2, None), probe(4, Some(47)), probe(6, Some(46)), probe(56, Some(1))];
        assert_eq!(longest_gap_ms(&probes).map(f64::round), Some(50.0));
        assert_eq!(longest_gap_ms(&probes[..2]), None);
    }

    #[test]
    fn the_report_has_both_networks() {
        let rows = to_values(&[row(Network::Bifrost, 40.0, false), row(Network::Bridge, 50.0, false)]).unwrap();
        let report = Migrate.report(&rows).unwrap();
        assert!(report.contains("bifrost") && report.contains("bridge") && report.contains("40"), "{report}");
    }
}
