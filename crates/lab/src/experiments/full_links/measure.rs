//! One network at one point.

use std::fs;
use std::net::SocketAddrV4;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde::Deserialize;

use super::row::{LinkAtEnd, PathAtEnd, Point, Row, SETTLE_S, Underneath};
use crate::daemon::Daemon;
use crate::lab::{Lab, Network};
use crate::netns::Namespace;
use crate::programs::echo_prober::{EchoProber, Probe};
use crate::programs::iperf3::{self, Flow, Load};
use crate::stats::{mean, percentile};
use crate::topology::marker::{Marker, Marking};
use crate::topology::shape::{self, Queue};
use crate::topology::tenants::Tenants;
use crate::topology::{Topology, link_name};
use crate::{inject, interrupt};

/// How long the idle links are probed before the load.
const IDLE: Duration = Duration::from_millis(400);
/// Interval of probes of a link.
const PROBE_INTERVAL: Duration = Duration::from_millis(20);
/// How long before the end of the load the daemons are asked for their paths.
const BEFORE_END: Duration = Duration::from_millis(500);

/// The hosts, the links, and the network that carries the flows.
enum Bench {
    Bare(Topology),
    // The order matters: guests of tenants are removed before the daemons that have ports for them.
    Overlay(Tenants, Box<Network>),
}

impl Bench {
    fn build(lab: &Lab, network: Underneath, point: &Point, label: &str) -> Result<Self> {
        let mode = match network {
            Underneath::BareLinks => return Ok(Bench::Bare(Topology::build(&lab.run.part()?, lab.plan())?)),
            Underneath::Overlay(mode) => mode,
        };
        ensure!(
            point.tenants == 1 || mode.is_bifrostd(),
            "{point}: only bifrostd has several tenants here, and {} is none",
            mode.name()
        );
        let tenants = Tenants::create(&lab.run.part()?, point.tenants - 1, lab.plan())?;
        let mut settings = lab.settings();
        settings.spread_flows = true;
        settings.more = tenants.configuration(if mode.is_reliable() { "tcp" } else { "off" });
        settings.paths = point.receiver_paths.map_or_else(Vec::new, |paths| vec![lab.options.paths, paths]);
        let network = lab.network_with(mode, label, settings)?;
        tenants.choose_cubic()?;
        Ok(Bench::Overlay(tenants, Box::new(network)))
    }

    fn topology(&self) -> &Topology {
        match self {
            Bench::Bare(topology) => topology,
            Bench::Overlay(_, network) => &network.topology,
        }
    }

    fn daemons(&self) -> &[Daemon] {
        match self {
            Bench::Bare(_) => &[],
            Bench::Overlay(_, network) => &network.overlay.daemons,
        }
    }

    /// The ends of the flows: the namespaces of each sender and receiver.
    fn ends(&self) -> Vec<[&Namespace; 2]> {
        match self {
            Bench::Bare(topology) => vec![[0, 1].map(|host| &topology.hosts[host].namespace)],
            Bench::Overlay(tenants, network) => {
                let first = [0, 1].map(|host| &network.topology.hosts[host].guest.namespace);
                let others = tenants.guests.iter().map(|guests| [&guests[0].namespace, &guests[1].namespace]);
                [first].into_iter().chain(others).collect()
            }
        }
    }

    /// Starts the flows of each tenant, or over each bare link.
    fn start(&self, lab: &Lab, point: &Point, seconds: f64, label: &str) -> Result<Vec<iperf3::Running>> {
        let logs = lab.logs(label);
        match self {
            Bench::Bare(Topology { hosts, .. }) => {
                let flows = point.flows * u32::from(point.tenants);
                let load = Load { flows, ..Load::one_flow(seconds) };
                let over = |(number, address): (u16, _)| {
                    let to = SocketAddrV4::new(address, iperf3::PORT + number);
                    let ends = (&hosts[0].namespace, &hosts[1].namespace);
                    iperf3::Running::start_in(ends, to, load, &["-C", "cubic"], &logs, &format!("iperf3-{number}"))
                };
                (0..).zip(hosts[1].underlay.iter().copied()).map(over).collect()
            }
            Bench::Overlay(tenants, network) => {
                let load = Load { flows: point.flows, ..Load::one_flow(seconds) };
                let [from, to] = [0, 1].map(|host| &network.topology.hosts[host].guest);
                let others = tenants.guests.iter().map(|guests| (&guests[0], &guests[1]));
                let ends = [(from, to)].into_iter().chain(others).enumerate();
                ends.map(|(n, ends)| iperf3::Running::start(ends, load, &logs, &format!("iperf3-{n}"))).collect()
            }
        }
    }
}

pub(super) fn measure(lab: &Lab, network: Underneath, point: &Point, seconds: f64, repetition: u32) -> Result<Row> {
    let label = format!("{network}-{point}-{repetition}").replace([' ', ',', '/'], "_");
    let mut bench = Bench::build(lab, network, point, &label)?;
    let topology = bench.topology();
    shape::limit(topology, &point.shape)?;
    if point.loss_percent > 0.0 {
        inject::wire_loss(topology, &[], point.loss_percent)?;
    }
    for namespace in bench.ends().iter().flatten() {
        namespace.write_sysctls(&[("net/ipv4/tcp_ecn", if point.tcp_ecn { "1" } else { "0" })])?;
    }
    let markers = mark(topology, point)?;
    let [sender, receiver] = [0, 1].map(|host| &topology.hosts[host]);
    let links = point.shape.mbit_per_s.len();
    let queues = || Ok::<_, anyhow::Error>((shape::queues(sender, links)?, shape::queues(receiver, links)?));
    let pairs = sender.underlay.iter().zip(&receiver.underlay).take(links);
    let prober = |(local, remote): (&_, &_)| EchoProber::start(&sender.namespace, *local, *remote, PROBE_INTERVAL);
    let probers: Vec<EchoProber> = pairs.map(prober).collect::<Result<_>>()?;
    interrupt::sleep(IDLE)?;
    let received_ce = || bench.ends().iter().map(|[_, to]| received_ce(to)).sum::<Result<u64>>();
    let (before, ce_before) = (queues()?, received_ce()?);
    let began = Instant::now();
    let loads = bench.start(lab, point, seconds, &label)?;
    let asked = began + Duration::from_secs_f64(seconds) - BEFORE_END;
    interrupt::sleep(asked.saturating_duration_since(Instant::now()))?;
    let paths = paths(bench.daemons())?;
    let mut flows = loads.into_iter().map(iperf3::Running::finish).collect::<Result<Vec<Flow>>>()?;
    flows.iter_mut().for_each(|flow| fill_silence(flow, seconds));
    let (duration_s, after) = (began.elapsed().as_secs_f64(), queues()?);
    let received_ce_packets = received_ce()? - ce_before;
    let marked = markers.iter().map(Marker::marked).collect::<Result<Vec<u64>>>()?;
    drop(markers);
    let probes = probers.into_iter().map(EchoProber::finish).collect::<Result<Vec<_>>>()?;
    if let Bench::Overlay(_, network) = &mut bench {
        network.check()?;
    }
    let judged = (began + Duration::from_secs(SETTLE_S as u64), began + Duration::from_secs_f64(seconds));
    let link = |number: usize| {
        let of = |queues: &Vec<Queue>| queues[number];
        let (near, near_before) = (of(&after.0), of(&before.0));
        LinkAtEnd {
            sent_mbit_per_s: (near.sent_bytes - near_before.sent_bytes) as f64 * 8.0 / 1e6 / duration_s,
            dropped_frames: near.dropped - near_before.dropped,
            dropped_back_frames: of(&after.1).dropped - of(&before.1).dropped,
            marked_frames: marked.get(number).copied(),
            ..of_probes(point.shape.mbit_per_s[number], &probes[number], began, judged)
        }
    };
    Ok(Row {
        mode: network,
        point: point.clone(),
        repetition,
        duration_s,
        goodput_by_second_mbit_per_s: by_second(&flows),
        goodput_of_each_mbit_per_s: flows.iter().map(after_settling).collect(),
        guest_retransmits: flows.iter().map(|flow| flow.retransmits).sum(),
        received_ce_packets,
        links: (0..links).map(link).collect(),
        paths,
    })
}

/// Makes the sender's end of each link mark packets, if the point requires it. Returns the markers in the links' order.
fn mark(topology: &Topology, point: &Point) -> Result<Vec<Marker>> {
    let Some(frames) = point.mark_frames else { return Ok(Vec::new()) };
    let bits = f64::from(topology.plan.underlay_mtu() + shape::ETHERNET) * 8.0;
    let start = |(path, mbit_per_s): (u8, &u32)| {
        let waiting = |frames: u32| Duration::from_secs_f64(f64::from(frames) * bits / (f64::from(*mbit_per_s) * 1e6));
        let (threshold, room) = (waiting(frames), waiting(point.shape.queue_frames));
        let marking = Marking { mbit_per_s: *mbit_per_s, threshold, room };
        Marker::start(&topology.hosts[0].namespace, &link_name(path), marking)
    };
    (0..).zip(&point.shape.mbit_per_s).map(start).collect()
}

/// Number of CE-marked packets that the IP stack of a namespace has received so far.
fn received_ce(namespace: &Namespace) -> Result<u64> {
    namespace.enter(|| {
        let text = fs::read_to_string("/proc/thread-self/net/netstat").context("reading what the kernel counts")?;
        ip_extension(&text, "InCEPkts")
    })
}

/// A counter of `/proc/net/netstat`, which has a line of names before each line of values.
fn ip_extension(text: &str, name: &str) -> Result<u64> {
    let mut lines = text.lines().filter(|line| line.starts_with("IpExt:"));
    let names = lines.next().context("the kernel counts nothing of IP")?;
    let place = names.split(' ').position(|own| own == name).with_context(|| format!("the kernel has no {name}"))?;
    let value = lines.next().and_then(|values| values.split(' ').nth(place));
    value.and_then(|value| value.parse().ok()).with_context(|| format!("{name} is no number"))
}

/// The results of a link's probes: idle before `load_began`, and under load between `from` and `to`.
fn of_probes(
    limit_mbit_per_s: u32,
    probes: &[Probe],
    load_began: Instant,
    (from, to): (Instant, Instant),
) -> LinkAtEnd {
    let took = |of: &[&Probe]| -> Vec<f64> {
        of.iter().filter_map(|probe| probe.took).map(|took| took.as_secs_f64() * 1000.0).collect()
    };
    let idle: Vec<&Probe> = probes.iter().filter(|probe| probe.sent < load_began).collect();
    let loaded: Vec<&Probe> = probes.iter().filter(|probe| (from..to).contains(&probe.sent)).collect();
    let of = |times: &[f64], percent| (!times.is_empty()).then(|| percentile(times, percent));
    let (idle, times) = (took(&idle), took(&loaded));
    LinkAtEnd {
        limit_mbit_per_s,
        sent_mbit_per_s: 0.0,
        dropped_frames: 0,
        dropped_back_frames: 0,
        marked_frames: None,
        idle_rtt_ms: of(&idle, 50.0),
        rtt_ms_p50: of(&times, 50.0),
        rtt_ms_p99: of(&times, 99.0),
        probes: loaded.len() as u64,
        probes_lost: (loaded.len() - times.len()) as u64,
    }
}

/// Number of goodput bins per second.
fn bins_per_second() -> usize {
    (1.0 / iperf3::BIN_S).round() as usize
}

/// Adds bins of 0: a flow that stalls until its end reports no bins for that time.
fn fill_silence(flow: &mut Flow, seconds: f64) {
    let bins = seconds.ceil() as usize * bins_per_second();
    flow.bins_gbit_per_s.resize(flow.bins_gbit_per_s.len().max(bins), 0.0);
}

/// Total goodput of all flows in each whole second, Mbit/s.
fn by_second(flows: &[Flow]) -> Vec<f64> {
    let bins = bins_per_second();
    let seconds = flows.iter().map(|flow| flow.bins_gbit_per_s.len() / bins).min().unwrap_or(0);
    let second =
        |n: usize| flows.iter().map(|flow| mean(&flow.bins_gbit_per_s[n * bins..(n + 1) * bins]) * 1000.0).sum();
    (0..seconds).map(second).collect()
}

/// Mean goodput after the first second, Mbit/s.
fn after_settling(flow: &Flow) -> f64 {
    mean(flow.bins_gbit_per_s.get(SETTLE_S * bins_per_second()..).unwrap_or_default()) * 1000.0
}

/// The fields of a path in `bifrostctl paths` that are used.
#[derive(Deserialize)]
struct Path {
    path: u8,
    state: String,
    cwnd_packets: f64,
    in_flight_packets: u64,
    srtt_us: Option<f64>,
    min_rtt_us: Option<f64>,
    loss_percent: f64,
    share_percent: f64,
    tx_packets: u64,
    lost_packets: u64,
    ce_marked_packets: u64,
}

/// The current paths of all daemons.
fn paths(daemons: &[Daemon]) -> Result<Vec<PathAtEnd>> {
    let mut all = Vec::new();
    for daemon in daemons {
        let answer = daemon.control(&["paths"])?;
        let paths: Vec<Path> = serde_json::from_value(answer).context("`bifrostctl paths` printed something else")?;
        all.extend(paths.into_iter().map(|path| PathAtEnd {
            host: daemon.host().to_owned(),
            path: path.path,
            state: path.state,
            cwnd_packets: path.cwnd_packets,
            in_flight_packets: path.in_flight_packets,
            srtt_us: path.srtt_us,
            min_rtt_us: path.min_rtt_us,
            loss_percent: path.loss_percent,
            share_percent: path.share_percent,
            tx_packets: path.tx_packets,
            lost_packets: path.lost_packets,
            ce_marked_packets: path.ce_marked_packets,
        }));
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_whole_and_of_all_flows() {
        let flow = |bins: &[f64]| Flow { gbit_per_s: 0.0, bins_gbit_per_s: bins.to_vec(), retransmits: 0 };
        let flows = [flow(&[0.1; 25]), flow(&[0.2; 31])];
        let seconds: Vec<u32> = by_second(&flows).iter().map(|rate| rate.round() as u32).collect();
        assert_eq!(seconds, [300, 300]);
        assert_eq!(after_settling(&flow(&[[0.0; 10], [0.5; 10]].concat())), 500.0);
        let mut silent = flow(&[0.1; 5]);
        fill_silence(&mut silent, 2.0);
        assert_eq!((silent.bins_gbit_per_s.len(), after_settling(&silent)), (20, 0.0));
        fill_silence(&mut silent, 1.0);
        assert_eq!(silent.bins_gbit_per_s.len(), 20, "what there is stays");
    }

    #[test]
    fn counters_are_found_by_name() {
        let text = "TcpExt: A InCEPkts\nTcpExt: 1 2\nIpExt: A B InCEPkts\nIpExt: 7 8 9\n";
        assert_eq!((ip_extension(text, "InCEPkts").unwrap(), ip_extension(text, "A").unwrap()), (9, 7));
        for broken in ["", "IpExt: A\nIpExt: 1\n", "IpExt: InCEPkts\n", "IpExt: InCEPkts\nIpExt: x\n"] {
            assert!(ip_extension(broken, "InCEPkts").is_err(), "{broken}");
        }
    }

    #[test]
    fn probes_are_of_the_idle_or_of_the_full_link() {
        let start = Instant::now();
        let ms = Duration::from_millis;
        let probe = |at, took: Option<u64>| Probe { sent: start + ms(at), took: took.map(ms) };
        let probes = [
            probe(0, Some(1)),
            probe(20, Some(1)),
            probe(110, Some(50)),
            probe(1200, Some(5)),
            probe(1300, None),
            probe(1400, Some(7)),
            probe(1500, Some(6)),
            probe(2200, Some(90)),
        ];
        let link = of_probes(100, &probes, start + ms(100), (start + ms(1100), start + ms(2100)));
        assert_eq!((link.idle_rtt_ms, link.rtt_ms_p50, link.rtt_ms_p99), (Some(1.0), Some(6.0), Some(7.0)));
        assert_eq!((link.probes, link.probes_lost, link.waiting_ms()), (4, 1, Some(5.0)));
        let silent = of_probes(100, &probes[4..5], start, (start, start + ms(2000)));
        assert_eq!((silent.probes_lost, silent.waiting_ms()), (1, None));
    }
}
