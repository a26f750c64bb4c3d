//! An RDMA connection with both services changes between them under load, while packets are lost (paper: section 5.4,
//! figure 12). The study checks whether messages are lost, duplicated or reordered, and how long no message arrives.

use anyhow::{Result, ensure};
use bifrost_endpoint::Service;
use serde_json::json;

use super::plot::Panel;
use super::runs::{cumulative, each, percentile};
use super::{Bar, Outcome};
use crate::rdma::{Fabric, Load, MessageNode, MessageOptions, RdmaWorld, connect, nic};
use crate::swarm::Draw as _;
use crate::{Rng, mix};

const RATE: f64 = 25e9;
/// One-way delay from host to host, ns; the round trip is twice that.
const DELAY_NS: u64 = 25_000;
const RTT_NS: u64 = 2 * DELAY_NS;
/// Share of packets lost.
const LOSSES: [(&str, f64); 2] = [("none", 0.0), ("1/256", 1.0 / 256.0)];
const INBOUND: u64 = 4 << 20;
const WARM_NS: u64 = 5_000_000;
/// Time after the last message was sent within which everything arrives, ns.
const DRAIN_NS: u64 = 200_000_000;

/// Length and number of open messages: sent as units in SENDs, and as chunks in WRITEs.
const LENS: [(u32, u32); 2] = [(8 * 1024, 96), (64 * 1024, 16)];

/// What changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stack {
    /// UC and RC alternately.
    Both,
    /// No change: a connection of one service, measured at the times of the others' changes.
    One(Service),
}

const STACKS: [(Stack, &str); 3] =
    [(Stack::Both, "UC and RC in turn"), (Stack::One(Service::Uc), "UC alone"), (Stack::One(Service::Rc), "RC alone")];

/// A change, or the time of the others' changes.
#[derive(Clone, Copy, Debug)]
struct Change {
    to: Service,
    /// Longest time without a message, from the change until the arrival of a message sent after it, ns.
    pause_ns: u64,
}

#[derive(Clone, Debug)]
struct Run {
    changes: Vec<Change>,
    /// Messages out of sequence, and messages that never arrived.
    wrong: u64,
    missing: u64,
    gbps: f64,
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    run_seeds(quick, if quick { 3 } else { 100 })
}

pub(super) fn run_seeds(quick: bool, seeds: u64) -> Result<Outcome> {
    let plan = if quick {
        Plan { apart_ns: (1_000_000, 5_000_000), end_ns: 30_000_000 }
    } else {
        Plan { apart_ns: (1_000_000, 100_000_000), end_ns: 200_000_000 }
    };
    let mut runs = Vec::new();
    for (loss, _) in LOSSES.iter().enumerate() {
        for (stack, _) in STACKS {
            for len in LENS {
                runs.extend((1..=seeds).map(|seed| (stack, len, loss, seed)));
            }
        }
    }
    let answers = each(&runs, |&(stack, len, loss, seed)| plan.run(stack, len, LOSSES[loss].1, seed))?;
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    for (loss, (lost, _)) in LOSSES.iter().enumerate() {
        for len in LENS {
            let name = format!("messages of {} KB, packets lost: {lost}", len.0 / 1024);
            let mut panel = Panel::new(&name, "longest time without a message, round trips", "% of changes");
            // The median and the maximum pause of each stack.
            let mut pauses = Vec::new();
            for (stack, label) in STACKS {
                let own = runs.iter().zip(&answers).filter(|(run, _)| (run.0, run.1, run.2) == (stack, len, loss));
                let own: Vec<&Run> = own.map(|(_, answer)| answer).collect();
                let gbps = own.iter().map(|run| run.gbps).sum::<f64>() / seeds as f64;
                let wrong: u64 = own.iter().map(|run| run.wrong + run.missing).sum();
                let mut all: Vec<f64> = Vec::new();
                for to in [Service::Uc, Service::Rc] {
                    let some = own.iter().flat_map(|run| &run.changes).filter(|change| change.to == to);
                    let mut some: Vec<f64> = some.map(|change| change.pause_ns as f64 / RTT_NS as f64).collect();
                    let [half, most, longest] = [0.5, 0.99, 1.0].map(|share| percentile(&mut some, share));
                    outcome.lines.push(format!(
                        "{name}, {label}: {gbps:.2} Gbit/s, {wrong} messages lost, repeated or reordered; {} changes to {to:?}: \
                         pause P50 {half:.2}, P99 {most:.2}, longest {longest:.2} round trips",
                        some.len()
                    ));
                    data.push(json!({ "message_bytes": len.0, "lost": lost, "stack": label, "to": format!("{to:?}"),
                        "changes": some.len(), "goodput_gbps": gbps, "wrong": wrong, "pause_p50_rtt": half,
                        "pause_p99_rtt": most, "pause_longest_rtt": longest }));
                    all.extend(some);
                }
                outcome.bars.push(Bar {
                    name: format!("{name}, {label}: messages lost, repeated or reordered"),
                    value: wrong as f64,
                    limit: 0.0,
                });
                pauses.push((percentile(&mut all, 0.5), percentile(&mut all, 1.0)));
                panel = panel.line(label, cumulative(&mut all));
            }
            outcome.panels.push(panel);
            let [both, others @ ..] = &pauses[..] else { continue };
            // At a loss of 1/256, single services sometimes stall for longer than that, so the bar limits only what a
            // change adds.
            let alone = others.iter().map(|pause| pause.0).fold(0.0, f64::max);
            outcome.bars.push(match loss {
                0 => Bar { name: format!("{name}: longest pause of a change, round trips"), value: both.1, limit: 2.0 },
                _ => Bar {
                    name: format!("{name}: what a change adds to the median pause, round trips"),
                    value: both.0 - alone,
                    limit: 2.0,
                },
            });
        }
    }
    outcome.data = data.into();
    Ok(outcome)
}

/// Times of changes, and the end of the measurement.
struct Plan {
    apart_ns: (u64, u64),
    end_ns: u64,
}

impl Plan {
    /// Times of changes for a seed, ns.
    fn changes(&self, seed: u64) -> Vec<u64> {
        let mut rng = Rng::new(mix(seed ^ 0x0075_7067));
        let mut at = WARM_NS;
        let mut all = Vec::new();
        loop {
            at += rng.scale(self.apart_ns.0, self.apart_ns.1);
            if at >= self.end_ns {
                return all;
            }
            all.push(at);
        }
    }

    fn run(&self, stack: Stack, (len, depth): (u32, u32), loss: f64, seed: u64) -> Result<Run> {
        let service = match stack {
            Stack::Both => Service::Both,
            Stack::One(service) => service,
        };
        let options = MessageOptions { service, ..MessageOptions::default() };
        let mut a = MessageNode::new(nic(0, seed, 64), 4, INBOUND, seed)?;
        let mut b = MessageNode::new(nic(1, seed, 64), 4, INBOUND, seed + 1000)?;
        connect(&mut a, &mut b, &options)?;
        b.keep_arrivals();
        a.send(Load { len: len as usize, depth, begin_ns: 0, stagger_ns: 0 });
        let mut world = RdmaWorld::new(Fabric { loss, ..Fabric::new(RATE, DELAY_NS) }, vec![a, b], seed);
        world.run_until(WARM_NS);
        let before = world.node(1).received_bytes();
        let mut to = Service::Rc;
        let mut done = Vec::new();
        for at in self.changes(seed) {
            world.run_until(at);
            let now = world.now;
            let node = world.node_mut(0);
            let first = if stack == Stack::Both { node.switch(now, to) } else { node.given() };
            done.push((now, first, to));
            to = if to == Service::Uc { Service::Rc } else { Service::Uc };
        }
        world.run_until(self.end_ns);
        let bytes = world.node(1).received_bytes() - before;
        world.node_mut(0).stop();
        world.run_until(self.end_ns + DRAIN_NS);
        ensure!(world.node(0).mistakes().1 + world.node(1).mistakes().1 == 0, "seed {seed}: a connection ended");
        let (given, arrivals) = (world.node(0).given(), world.node(1).arrivals_ns());
        let pause = |&(at, first, to): &(u64, u64, Service)| {
            let from = arrivals.partition_point(|arrival| *arrival < at);
            let until = arrivals.len().min(first as usize + 1).max(from);
            let (mut last, mut pause_ns) = (at, 0);
            for &arrival in &arrivals[from..until] {
                pause_ns = pause_ns.max(arrival - last);
                last = arrival;
            }
            Change { to, pause_ns }
        };
        Ok(Run {
            changes: done.iter().map(pause).collect(),
            wrong: world.node(1).mistakes().0,
            missing: given.saturating_sub(arrivals.len() as u64),
            gbps: bytes as f64 * 8.0 / (self.end_ns - WARM_NS) as f64,
        })
    }
}
