//! One RDMA connection over 25 Gbit/s with a round trip of 50 us and random losses: the engine, go-back-N RC, and whole
//! chunks as UCCL retransmits them (paper: figure 7).

use anyhow::{Result, ensure};
use serde_json::json;

use super::plot::Panel;
use super::runs::each;
use super::{Bar, Outcome};
use crate::rdma::{Counts, Fabric, Load, MessageNode, MessageOptions, Node, PlainRc, RdmaWorld, Uccl, connect, nic};

const RATE: f64 = 25e9;
const MTU: u16 = 1024;
/// Maximum bytes in flight to a receiver.
const INBOUND: u64 = 4 << 20;
/// Share of packets lost: none, 1/4096, 1/1024, 1/256.
const LOSSES: [(&str, f64); 4] =
    [("0", 0.0), ("1/4096", 1.0 / 4096.0), ("1/1024", 1.0 / 1024.0), ("1/256", 1.0 / 256.0)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stack {
    Engine,
    GoBackN,
    Chunks,
}

const STACKS: [(Stack, &str); 3] =
    [(Stack::Engine, "this engine"), (Stack::GoBackN, "RC, go back N"), (Stack::Chunks, "whole chunks (UCCL-like)")];

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let sizes: &[u32] = if quick { &[4096, 1 << 20] } else { &[1024, 4096, 16_384, 65_536, 262_144, 1 << 20] };
    let seeds: u64 = if quick { 1 } else { 3 };
    let mut runs = Vec::new();
    for (stack, _) in STACKS {
        for &size in sizes {
            for (_, loss) in LOSSES {
                runs.extend((1..=seeds).map(|seed| (stack, size, loss, seed)));
            }
        }
    }
    let (warm, end) = if quick { (5_000_000, 25_000_000) } else { (10_000_000, 110_000_000) };
    let goodputs = each(&runs, |&(stack, size, loss, seed)| goodput(stack, size, loss, seed, warm, end))?;
    let mean = |stack: Stack, size: u32, loss: f64| {
        let own = runs.iter().zip(&goodputs).filter(|(run, _)| (run.0, run.1, run.2) == (stack, size, loss));
        own.map(|(_, goodput)| goodput).sum::<f64>() / seeds as f64
    };
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    for &size in sizes {
        let name = if size >= 1 << 20 { "1 MB".to_owned() } else { format!("{} KB", size / 1024) };
        let mut panel = Panel::new(&format!("Messages of {name}: goodput"), "packets lost", "Gbit/s")
            .over(LOSSES.iter().map(|(label, _)| *label));
        for (stack, label) in STACKS {
            let line: Vec<f64> = LOSSES.iter().map(|(_, loss)| mean(stack, size, *loss)).collect();
            let list: Vec<String> = LOSSES.iter().zip(&line).map(|((l, _), g)| format!("{l}: {g:.2}")).collect();
            outcome.lines.push(format!("{name}, {label}: Gbit/s at a loss of {}", list.join(", ")));
            for ((lost, _), goodput) in LOSSES.iter().zip(&line) {
                data.push(json!({ "message_bytes": size, "stack": label, "loss": lost, "goodput_gbps": goodput }));
            }
            if stack == Stack::Engine {
                for (index, lost) in [(2, "1/1024"), (3, "1/256")] {
                    outcome.bars.push(Bar {
                        name: format!("{name}: share of the lossless goodput that is missing at {lost}, %"),
                        value: (1.0 - line[index] / line[0]) * 100.0,
                        limit: 5.0,
                    });
                }
            }
            panel = panel.line(label, line.into_iter().enumerate().map(|(x, y)| (x as f64, y)));
        }
        outcome.panels.push(panel);
    }
    outcome.data = data.into();
    Ok(outcome)
}

fn fabric(loss: f64) -> Fabric {
    Fabric { loss, ..Fabric::new(RATE, 25_000) }
}

/// Gbit/s of payload between `warm` and `end`, ns.
fn goodput(stack: Stack, len: u32, loss: f64, seed: u64, warm: u64, end: u64) -> Result<f64> {
    // Enough open messages to fill the link twice.
    let depth = (1_048_576 / len).clamp(8, 256);
    let nics = || [nic(0, seed, 64), nic(1, seed, 64)];
    let bytes = match stack {
        Stack::Engine => {
            let [a, b] = nics();
            let (mut a, mut b) =
                (MessageNode::new(a, 4, INBOUND, seed)?, MessageNode::new(b, 4, INBOUND, seed + 1000)?);
            connect(&mut a, &mut b, &MessageOptions::default())?;
            a.send(Load { len: len as usize, depth, begin_ns: 0, stagger_ns: 0 });
            let (bytes, world) = between(vec![a, b], loss, seed, warm, end, MessageNode::received_bytes);
            for side in 0..2 {
                ensure!(
                    world.node(side).mistakes() == (0, 0),
                    "messages are out of sequence: {:?}",
                    world.node(side).mistakes()
                );
            }
            bytes
        }
        Stack::GoBackN => {
            let nodes = PlainRc::pair(nics(), MTU, len, depth)?;
            between(nodes.into(), loss, seed, warm, end, |node| node.delivered().0).0
        }
        Stack::Chunks => {
            let nodes = Uccl::pair(nics(), MTU, len, depth, RATE)?;
            between(nodes.into(), loss, seed, warm, end, Uccl::delivered_bytes).0
        }
    };
    Ok(bytes as f64 * 8.0 / (end - warm) as f64)
}

/// Bytes that the second host receives between `warm` and `end`.
fn between<N: Node>(
    nodes: Vec<N>,
    loss: f64,
    seed: u64,
    warm: u64,
    end: u64,
    bytes: impl Fn(&N) -> u64,
) -> (u64, RdmaWorld<N>) {
    let mut world = RdmaWorld::new(fabric(loss), nodes, seed);
    world.run_until(warm);
    let before = bytes(world.node(1));
    world.run_until(end);
    debug_assert_ne!(world.counts, Counts::default());
    (bytes(world.node(1)) - before, world)
}
