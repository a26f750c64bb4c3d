//! Thousands of RDMA connections into one link of 50 Gbit/s; the switch has 16 MB of buffer and no priority flow
//! control (paper: figure 9).

use anyhow::{Context as _, Result, ensure};
use serde_json::json;

use super::plot::Panel;
use super::runs::percentile;
use super::{Bar, Outcome};
use crate::rdma::{AROUND, Fabric, Load, MessageNode, MessageOptions, RdmaWorld, connect, nic};

const RATE: f64 = 50e9;
const MTU: u16 = 1024;
/// Overhead of RoCE per WRITE packet, bytes: BTH and ICRC. RETH and immediate data are in one packet of a chunk.
const HEADERS: f64 = 16.0;
/// Maximum bytes in flight to a receiver: three round trips of the link.
const INBOUND: u64 = 1 << 20;
const BINS: u64 = 40;

/// Senders, and connections per sender.
const SHAPES: [(usize, usize); 2] = [(90, 64), (6000, 1)];

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    let shapes: &[(usize, usize)] = if quick { &[(90, 8)] } else { &SHAPES };
    let (warm, end) = if quick { (10_000_000, 30_000_000) } else { (50_000_000, 250_000_000) };
    let mut throughput = Panel::new("Incast into 50 Gbit/s: goodput", "ms", "Gbit/s");
    let mut queue = Panel::new("Incast into 50 Gbit/s: most bytes in the switch", "ms", "KB");
    for &(senders, connections) in shapes {
        let name = format!("{senders} senders x {connections}");
        let answer = incast(senders, connections, warm, end)?;
        throughput = throughput.line(&name, answer.bins.iter().map(|bin| (bin.0, bin.1)));
        queue = queue.line(&name, answer.bins.iter().map(|bin| (bin.0, bin.2)));
        outcome.lines.push(format!(
            "{name}: {:.2} % of the link, {:.2e} of the packets dropped (all: {:.2e}), Jain {:.4}, most in the switch {:.0} KB, \
             message P50 {:.2} ms P99 {:.2} ms",
            answer.share * 100.0, answer.dropped, answer.dropped_at_all, answer.jain, answer.queue_kb, answer.p50_ms, answer.p99_ms
        ));
        let bars = [
            ("of the link that is not used, %", (1.0 - answer.share) * 100.0, 2.0),
            ("packets dropped in a million", answer.dropped * 1e6, 10.0),
            ("1 - Jain's index of the connections", 1.0 - answer.jain, 0.1),
        ];
        outcome.bars.extend(bars.map(|(what, value, limit)| Bar { name: format!("{name}: {what}"), value, limit }));
        data.push(json!({ "senders": senders, "connections": connections, "share": answer.share,
            "dropped": answer.dropped, "dropped_with_start": answer.dropped_at_all, "jain": answer.jain,
            "queue_kb": answer.queue_kb, "p50_ms": answer.p50_ms, "p99_ms": answer.p99_ms }));
    }
    outcome.panels = vec![throughput, queue];
    outcome.data = data.into();
    Ok(outcome)
}

struct Answer {
    /// Share of the payload that the link can carry.
    share: f64,
    /// Share of packets dropped: after the start, and from the first packet on.
    dropped: f64,
    dropped_at_all: f64,
    jain: f64,
    queue_kb: f64,
    p50_ms: f64,
    p99_ms: f64,
    /// Time, ms; goodput, Gbit/s; maximum queue in the switch, KB.
    bins: Vec<(f64, f64, f64)>,
}

fn incast(senders: usize, connections: usize, warm: u64, end: u64) -> Result<Answer> {
    let options = MessageOptions { mtu: MTU, credits: 16, ..MessageOptions::default() };
    let all = (senders * connections) as u32;
    let mut receiver = MessageNode::new(nic(0, 1, all * 3 + 1), all, INBOUND, 1)?;
    let mut nodes = Vec::new();
    for index in 1..=senders {
        let nic = nic(index, 1, connections as u32 * 3 + 1);
        let mut sender = MessageNode::new(nic, connections as u32, INBOUND, index as u64 + 1)?;
        for _ in 0..connections {
            connect(&mut sender, &mut receiver, &options)?;
        }
        sender.send(Load { len: 64 * 1024, depth: 2, begin_ns: 0, stagger_ns: 0 });
        nodes.push(sender);
    }
    nodes.insert(0, receiver);
    let mut world = RdmaWorld::new(Fabric::new(RATE, 25_000), nodes, 1);
    let mut bins = Vec::new();
    let (mut before, mut counts) = (0, world.counts);
    let mut start = None;
    for bin in 1..=BINS {
        world.counts.queue_bytes_max = 0;
        world.run_until(end * bin / BINS);
        let now = world.node(0).received_bytes();
        let gbps = (now - before) as f64 * 8.0 / (end / BINS) as f64;
        bins.push((world.now as f64 / 1e6, gbps, world.counts.queue_bytes_max as f64 / 1e3));
        before = now;
        if start.is_none() && world.now >= warm {
            start = Some((world.now, now, world.node(0).received()));
            counts = world.counts;
            (1..=senders).for_each(|index| drop(world.node_mut(index).take_latencies_ns()));
        }
    }
    let (began, bytes, received) = start.context("the study has no time to warm up")?;
    for index in 0..=senders {
        ensure!(world.node(index).mistakes() == (0, 0), "host {index}: {:?}", world.node(index).mistakes());
    }
    let mut times: Vec<f64> = Vec::new();
    for index in 1..=senders {
        times.extend(world.node_mut(index).take_latencies_ns().into_iter().map(|ns| ns as f64 / 1e6));
    }
    let after = world.node(0).received();
    let shares: Vec<f64> = after.iter().zip(&received).map(|(now, then)| (now.bytes - then.bytes) as f64).collect();
    let (sum, squares): (f64, f64) = shares.iter().fold((0.0, 0.0), |(s, q), share| (s + share, q + share * share));
    let payload = f64::from(MTU) / (f64::from(MTU) + HEADERS + AROUND as f64);
    let sent = (world.counts.sent_packets - counts.sent_packets) as f64;
    let dropped = (world.counts.dropped_packets - counts.dropped_packets) as f64;
    let ns = (world.now - began) as f64;
    Ok(Answer {
        share: (world.node(0).received_bytes() - bytes) as f64 * 8e9 / ns / RATE / payload,
        dropped: dropped / sent,
        dropped_at_all: world.counts.dropped_packets as f64 / world.counts.sent_packets as f64,
        jain: sum * sum / (f64::from(all) * squares),
        queue_kb: bins.iter().map(|bin| bin.2).fold(0.0, f64::max),
        p50_ms: percentile(&mut times, 0.5),
        p99_ms: percentile(&mut times, 0.99),
        bins,
    })
}
