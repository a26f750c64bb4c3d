//! Two pods of unequal size, all-to-all traffic (paper: figure 8). Priority flow control ends at the pod.

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::rdm_mesh::{Run, Setup, run as run_mesh};
use super::runs::each;
use super::{Bar, Outcome};
use crate::rdma::{DcqcnConfig, Machine, Mesh, Topology};

/// Two ports of 25 Gbit/s.
const RATE: f64 = 50e9;
/// One-way delay from host to host over one switch, ns.
const DELAY_NS: u64 = 25_000;
/// As in the paper: requests of 512 KB, 4 threads with 8 each.
const LEN: u32 = 512 * 1024;
const DEPTH: u32 = 32;

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let pods: [u32; 2] = if quick { [2, 6] } else { [3, 27] };
    let times = if quick { (4_000_000, 2_000_000, 4) } else { (5_000_000, 2_500_000, 8) };
    let setups: &[Setup] = if quick { &[Setup::Engine] } else { &[Setup::Engine, Setup::RcPaused] };
    let runs = each(setups, |setup| mesh(*setup, pods, times))?;
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    for (setup, run) in setups.iter().zip(&runs) {
        let mut panel =
            Panel::new(&format!("Pods of {} and {}: {}", pods[0], pods[1], setup.name()), "ms", "Gbit/s of a host");
        let first = pods[0] as usize;
        let lines = [run.gbps(0..first), run.gbps(first..(pods[0] + pods[1]) as usize)];
        let means = lines.each_ref().map(|line| line.iter().sum::<f64>() / line.len() as f64);
        for ((line, mean), size) in lines.iter().zip(means).zip(pods) {
            let worst = line.iter().map(|gbps| (gbps / mean - 1.0).abs()).fold(0.0, f64::max) * 100.0;
            let at = |bin: usize| (times.0 + (bin as u64 + 1) * times.1) as f64 / 1e6;
            panel = panel.line(format!("pod of {size}"), line.iter().enumerate().map(|(bin, gbps)| (at(bin), *gbps)));
            outcome.lines.push(format!(
                "{}, pod of {size}: {mean:.2} Gbit/s of a host, off by at most {worst:.1} % in {} ms; {} dropped, {} pauses, {} \
                 connections failed",
                setup.name(),
                times.1 / 1_000_000,
                run.counts.dropped_packets,
                run.counts.pauses,
                run.failed
            ));
            data.push(json!({ "setup": setup.name(), "pod": size, "gbps": mean, "worst_percent": worst,
                "dropped": run.counts.dropped_packets, "pauses": run.counts.pauses, "failed": run.failed }));
            if *setup == Setup::Engine {
                outcome.bars.push(Bar {
                    name: format!("pod of {size}: most that a bin differs from the mean, %"),
                    value: worst,
                    limit: 10.0,
                });
            }
        }
        if *setup == Setup::Engine {
            let gap = (means[0] - means[1]).abs() / means[0].max(means[1]) * 100.0;
            outcome.bars.push(Bar { name: "difference of the pods, %".into(), value: gap, limit: 10.0 });
        }
        outcome.panels.push(panel);
    }
    outcome.data = data.into();
    Ok(outcome)
}

fn mesh(setup: Setup, pods: [u32; 2], times: (u64, u64, u64)) -> Result<Run> {
    let hosts = vec![(setup.stack(DcqcnConfig::new(RATE)), Machine::OLD); (pods[0] + pods[1]) as usize];
    let mesh = Mesh::full(hosts, LEN, DEPTH);
    // The capacity between the pods equals what the smaller one can send.
    let rate = RATE * f64::from(pods[0]) / 2.0;
    let topology = Topology::LeafSpine { leaves: pods.to_vec(), spines: 2, rate, delay_ns: 1_000 };
    run_mesh(&mesh, setup.fabric(RATE, DELAY_NS, false), &topology, 1, times, |_| ())
}
