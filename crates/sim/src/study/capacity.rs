//! Links as the bottleneck: the share of their capacity that a few TCP connections get, and the queue lengths.

use std::cell::RefCell;
use std::rc::Rc;

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::runs::{each, scenario};
use super::watch::{TcpSeen, TcpWatch};
use super::{Bar, Outcome};
use crate::scenario::{GuestGroup, Members, Reliability, Topology, VniConfig, Workload};
use crate::{Bytes, LinkPatch, Ns, Rate, Scenario, World};

/// Length of a full data packet on a link, and of a guest's TCP payload in it, bytes.
const FRAME_BYTES: u64 = 1500 + 14 + 8 + 16 + 66;
const PAYLOAD_BYTES: u64 = 1460;
/// Warm-up, which is not measured.
const WARM_UP_NS: u64 = 500_000_000;
const BIN_NS: u64 = 10_000_000;
/// Sampling interval of queues.
const LOOK_NS: u64 = 1_000_000;

/// Four links and their faults.
struct Shape {
    name: &'static str,
    mbps: [u64; 4],
    queue_frames: u64,
    delay_us: u64,
    loss: f64,
    /// Queue length above which packets are marked, frames; 0: never.
    mark_frames: u64,
}

const PLAIN: Shape =
    Shape { name: "4 x 100", mbps: [100; 4], queue_frames: 50, delay_us: 20, loss: 0.0, mark_frames: 0 };

const SHAPES: [Shape; 8] = [
    PLAIN,
    Shape { name: "4 x 200", mbps: [200; 4], queue_frames: 160, ..PLAIN },
    Shape { name: "3 x 100 + 20", mbps: [100, 100, 100, 20], ..PLAIN },
    Shape { name: "4 x 500", mbps: [500; 4], queue_frames: 400, ..PLAIN },
    Shape { name: "4 x 100, 1 % lost", loss: 0.01, ..PLAIN },
    Shape { name: "4 x 100, marks", mark_frames: 10, ..PLAIN },
    Shape { name: "4 x 100, 5 ms", delay_us: 2_500, ..PLAIN },
    Shape { name: "4 x 500, 5 ms, 1 % lost", mbps: [500; 4], queue_frames: 400, delay_us: 2_500, loss: 0.01, ..PLAIN },
];

/// Results of a run.
struct Answer {
    /// Share of the capacity of four links for full packets.
    share: f64,
    mbps: f64,
    /// Mean over time of the longest queue, frames.
    queue_frames: f64,
    dropped_percent: f64,
    repeated_percent: f64,
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let base = scenario("capacity", include_str!("../../studies/capacity.toml"))?;
    let flows: &[u32] = if quick { &[1, 4] } else { &[1, 2, 4, 8] };
    let duration = if quick { 1_500_000_000 } else { 3_000_000_000 };
    let runs: Vec<(usize, u32, bool)> = (0..SHAPES.len())
        .flat_map(|s| flows.iter().map(move |n| (s, *n, true)))
        .chain(flows.iter().map(|n| (0, *n, false)))
        .collect();
    let answers = each(&runs, |(s, n, reliable)| answer(&base, &SHAPES[*s], *n, *reliable, duration))?;
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    let mut shares = Panel::new("Full links: goodput", "TCP connections", "% of what the links carry").log(true, false);
    let mut queues = Panel::new("Full links: longest queue, mean", "TCP connections", "frames").log(true, false);
    let cubic = runs.iter().zip(&answers).filter(|((_, _, reliable), _)| !reliable);
    let cubic = cubic.map(|(_, a)| a.queue_frames).fold(f64::MAX, f64::min);
    for (s, reliable) in (0..SHAPES.len()).map(|s| (s, true)).chain([(0, false)]) {
        let shape = &SHAPES[s];
        let name = if reliable { shape.name.to_string() } else { format!("{}, plain VXLAN, cubic", shape.name) };
        let own = || runs.iter().zip(&answers).filter(|((rs, _, r), _)| *rs == s && *r == reliable);
        for ((_, n, _), a) in own() {
            outcome.lines.push(format!(
                "{name}, {n} connections: {:.0} Mbit/s, {:.1} %, longest queue {:.1} frames on average, {:.2} % dropped, \
                 {:.2} % repeated by guests",
                a.mbps,
                a.share * 100.0,
                a.queue_frames,
                a.dropped_percent,
                a.repeated_percent
            ));
            data.push(json!({ "links": name, "connections": n, "mbps": a.mbps, "share": a.share,
                "queue_frames": a.queue_frames, "dropped_percent": a.dropped_percent,
                "repeated_percent": a.repeated_percent }));
        }
        if reliable {
            let unused = own().map(|(_, a)| 100.0 - a.share * 100.0 / (1.0 - shape.loss)).fold(0.0, f64::max);
            outcome.bars.push(Bar { name: format!("{name}: unused at worst, %"), value: unused, limit: 10.0 });
        }
        if s == 0 && reliable {
            let longest = own().map(|(_, a)| a.queue_frames).fold(0.0, f64::max);
            outcome.bars.push(Bar {
                name: format!("{name}: longest queue, % of the shortest of cubic over plain VXLAN"),
                value: longest / cubic * 100.0,
                limit: 50.0,
            });
        }
        shares = shares.line(&name, own().map(|((_, n, _), a)| (f64::from(*n), a.share * 100.0)));
        queues = queues.line(&name, own().map(|((_, n, _), a)| (f64::from(*n), a.queue_frames)));
    }
    let shares_of_tenants = tenants(&base, duration)?;
    let (sum, squares) = shares_of_tenants.iter().fold((0.0, 0.0), |(s, q), x| (s + x, q + x * x));
    let jain = sum * sum / (shares_of_tenants.len() as f64 * f64::max(squares, f64::MIN_POSITIVE));
    outcome.lines.push(format!(
        "4 x 100, four tenants, the first with 8 connections, the others with one each: {} Mbit/s, Jain's index {jain:.3}",
        shares_of_tenants.iter().map(|m| format!("{m:.0}")).collect::<Vec<_>>().join(", ")
    ));
    outcome.bars.push(Bar {
        name: "four tenants with 8, 1, 1 and 1 connections: 1 - Jain's index, %".into(),
        value: (1.0 - jain) * 100.0,
        limit: 5.0,
    });
    data.push(json!({ "links": "4 x 100", "tenants_mbps": shares_of_tenants, "jain": jain }));
    let of_networks = networks(&base, duration)?;
    let (sum, weights) = (of_networks.iter().sum::<f64>(), NETWORKS.iter().map(|n| f64::from(n.0)).sum::<f64>());
    let due = |weight: u8| f64::from(weight) / weights * sum;
    let off = |(mbps, (weight, _)): (&f64, &(u8, u32))| (mbps / due(*weight) - 1.0).abs() * 100.0;
    let worst = of_networks.iter().zip(&NETWORKS).map(off).fold(0.0, f64::max);
    let texts = of_networks
        .iter()
        .zip(&NETWORKS)
        .map(|(mbps, (weight, pairs))| format!("{mbps:.0} Mbit/s (weight {weight}, {pairs} vNIC pairs)"));
    outcome.lines.push(format!("4 x 100, networks: {}", texts.collect::<Vec<_>>().join(", ")));
    outcome.bars.push(Bar {
        name: "networks of weights 1, 1 and 2 with 4, 1 and 1 vNIC pairs: farthest from the share that is due, %"
            .into(),
        value: worst,
        limit: 10.0,
    });
    data.push(json!({ "links": "4 x 100", "networks_mbps": of_networks, "weights_and_pairs": NETWORKS }));
    outcome.panels.extend([shares, queues]);
    outcome.data = data.into();
    Ok(outcome)
}

/// Four pairs of guests of the same two hosts, the first with eight connections: the rate of each, Mbit/s.
fn tenants(base: &Scenario, duration: u64) -> Result<Vec<f64>> {
    const TENANTS: u32 = 4;
    let mut s = over(base, &PLAIN, 1, true, duration);
    s.guests[0].per_host = TENANTS;
    let one = s.workloads[0].clone();
    s.workloads = (0..TENANTS)
        .map(|tenant| {
            let mut own = one.clone();
            if let Workload::Bulk { from, to, connections, .. } = &mut own {
                *from = Members::List(vec![tenant]);
                *to = Members::List(vec![TENANTS + tenant]);
                *connections = if tenant == 0 { 8 } else { 1 };
            }
            own
        })
        .collect();
    let mut world = World::new(&s, 1)?;
    let mut all = Vec::new();
    for tenant in 0..TENANTS {
        let (watch, seen) = TcpWatch::new(TENANTS + tenant, BIN_NS);
        world.add_checker(watch);
        all.push(seen);
    }
    world.run_until(duration - LOOK_NS);
    let skipped = (WARM_UP_NS / BIN_NS) as usize;
    let bytes = all.iter().map(|seen| seen.borrow().bins.iter().skip(skipped).sum::<u64>() as f64);
    Ok(bytes.map(|bytes| bytes * 8e3 / (duration - WARM_UP_NS) as f64).collect())
}

/// Networks of two hosts: weight, pairs of vNICs.
const NETWORKS: [(u8, u32); 3] = [(1, 4), (1, 1), (2, 1)];

/// The rates of [`NETWORKS`], each vNIC pair with four connections, Mbit/s.
fn networks(base: &Scenario, duration: u64) -> Result<Vec<f64>> {
    let mut s = over(base, &PLAIN, 4, true, duration);
    let (vni, group, bulk) = (s.vnis[0].clone(), s.guests[0].clone(), s.workloads[0].clone());
    (s.vnis, s.guests, s.workloads) = (Vec::new(), Vec::new(), Vec::new());
    let mut receivers: Vec<Vec<u32>> = Vec::new();
    let mut first = 0;
    for (id, (weight, pairs)) in (100..).zip(NETWORKS) {
        s.vnis.push(VniConfig { id, weight, ..vni.clone() });
        s.guests.push(GuestGroup { vni: id, per_host: pairs, ..group.clone() });
        for pair in 0..pairs {
            let mut own = bulk.clone();
            if let Workload::Bulk { from, to, .. } = &mut own {
                (*from, *to) = (Members::List(vec![first + pair]), Members::List(vec![first + pairs + pair]));
            }
            s.workloads.push(own);
        }
        receivers.push((0..pairs).map(|pair| first + pairs + pair).collect());
        first += 2 * pairs;
    }
    let mut world = World::new(&s, 1)?;
    let mut watch = |guest: u32| {
        let (watch, seen) = TcpWatch::new(guest, BIN_NS);
        world.add_checker(watch);
        seen
    };
    let seen: Vec<Vec<_>> = receivers.iter().map(|guests| guests.iter().map(|g| watch(*g)).collect()).collect();
    world.run_until(duration - LOOK_NS);
    let skipped = (WARM_UP_NS / BIN_NS) as usize;
    let of_guest = |seen: &Rc<RefCell<TcpSeen>>| seen.borrow().bins.iter().skip(skipped).sum::<u64>() as f64;
    let bytes = |seen: &Vec<_>| seen.iter().map(of_guest).sum::<f64>();
    Ok(seen.iter().map(bytes).map(|bytes| bytes * 8e3 / (duration - WARM_UP_NS) as f64).collect())
}

/// `base` over these links, with this many connections.
fn over(base: &Scenario, shape: &Shape, connections: u32, reliable: bool, duration: u64) -> Scenario {
    let mut s = base.clone();
    s.duration = Ns(duration);
    // A TCP without SACK makes no progress if its large frames overflow the queue.
    s.host.tso = reliable;
    s.vnis[0].reliability = if reliable { Reliability::Tcp } else { Reliability::Off };
    if let Topology::Parallel { link, path, .. } = &mut s.topology {
        link.delay = Some(Ns::us(shape.delay_us));
        link.queue = Some(Bytes(shape.queue_frames * FRAME_BYTES));
        link.loss = Some(shape.loss);
        link.ecn_threshold = Some(Bytes(shape.mark_frames * FRAME_BYTES));
        *path = shape.mbps.map(|m| LinkPatch { rate: Some(Rate(m * 1_000_000)), ..LinkPatch::default() }).to_vec();
    }
    if let Workload::Bulk { connections: own, .. } = &mut s.workloads[0] {
        *own = connections;
    }
    s
}

fn answer(base: &Scenario, shape: &Shape, connections: u32, reliable: bool, duration: u64) -> Result<Answer> {
    let s = over(base, shape, connections, reliable, duration);
    let mut world = World::new(&s, u64::from(connections))?;
    let (watch, seen) = TcpWatch::new(1, BIN_NS);
    world.add_checker(watch);
    let links: Vec<usize> = world.network().matching("h0>h1/*").map(|l| l as usize).collect();
    let (mut waits, mut looks) = (vec![0u64; links.len()], 0u64);
    let mut at = 0;
    while at + LOOK_NS < duration {
        at += LOOK_NS;
        world.run_until(at);
        if at >= WARM_UP_NS {
            looks += 1;
            for (wait, link) in waits.iter_mut().zip(&links) {
                *wait += world.network().links[*link].wait_ns(at);
            }
        }
    }
    let seen = seen.borrow();
    let bins = seen.bins.iter().skip((WARM_UP_NS / BIN_NS) as usize).take(((at - WARM_UP_NS) / BIN_NS) as usize);
    let bytes: u64 = bins.sum();
    let seconds = ((at - WARM_UP_NS) / BIN_NS * BIN_NS) as f64 / 1e9;
    let mbps = bytes as f64 * 8e-6 / seconds;
    let fits = shape.mbps.iter().sum::<u64>() as f64 * PAYLOAD_BYTES as f64 / FRAME_BYTES as f64;
    let of_links = || links.iter().map(|l| &world.network().links[*l]);
    let frames = |(wait, mbps): (&u64, &u64)| (*wait * *mbps) as f64 / 8e3 / FRAME_BYTES as f64 / looks.max(1) as f64;
    let (sent, dropped) =
        of_links().fold((0, 0), |(s, d), l| (s + l.packets + l.dropped_packets, d + l.dropped_packets));
    Ok(Answer {
        share: mbps / fits,
        mbps,
        queue_frames: waits.iter().zip(&shape.mbps).map(frames).fold(0.0, f64::max),
        dropped_percent: dropped as f64 / sent.max(1) as f64 * 100.0,
        repeated_percent: seen.repeated as f64 * PAYLOAD_BYTES as f64 / bytes.max(1) as f64 * 100.0,
    })
}
