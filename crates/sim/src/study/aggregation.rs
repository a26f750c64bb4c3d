//! How many connections are saved with one per pair of vNICs instead of one per 5-tuple (NSDI'26, 4.4 and 6.1.4).
//!
//! The paper counts connections of production servers. Here the trace is generated, so the saved share follows from the
//! chosen distribution: the study shows which distribution corresponds to the paper's 70 %.

use std::collections::HashSet;

use anyhow::Result;
use serde_json::json;

use super::Outcome;
use super::plot::Panel;
use super::runs::{cumulative, percentile};
use crate::Rng;

/// vNICs of a server.
const VNICS: u32 = 32;
/// Tenants that they belong to; a vNIC talks only to vNICs of its tenant.
const TENANTS: u64 = 8;
/// vNICs of a tenant on other servers.
const REMOTE: u64 = 1000;
/// Number of these that a vNIC talks to: Pareto distributed with this exponent, from 1 to this maximum.
const PEERS: (f64, u64) = (1.2, 200);
/// Maximum number of flows of a pair.
const MOST_FLOWS: u64 = 10_000;
/// Exponents of the number of flows of a pair, heaviest tail first.
const EXPONENTS: [f64; 6] = [1.2, 1.4, 1.6, 2.0, 2.5, 3.0];

/// A flow between two vNICs, as seen by its sender's server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Flow {
    vni: u32,
    /// Source and destination vNIC addresses.
    addresses: [u32; 2],
    protocol: u8,
    ports: [u16; 2],
}

/// Connections that a server's flows need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Connections {
    /// One per 5-tuple of each network.
    five_tuples: usize,
    /// One per pair of vNICs.
    vnic_pairs: usize,
}

impl Connections {
    fn of(flows: &[Flow]) -> Self {
        let five_tuples: HashSet<&Flow> = flows.iter().collect();
        let vnic_pairs: HashSet<_> = flows.iter().map(|flow| (flow.vni, flow.addresses)).collect();
        Connections { five_tuples: five_tuples.len(), vnic_pairs: vnic_pairs.len() }
    }

    /// The saved share of connections, percent.
    fn saved_percent(self) -> f64 {
        if self.five_tuples == 0 {
            return 0.0;
        }
        100.0 * (1.0 - self.vnic_pairs as f64 / self.five_tuples as f64)
    }
}

/// A whole number from 1 to `most` that is at least `n` with probability `n` to the power of `-exponent` (a Pareto
/// distribution, rounded down).
fn heavy(rng: &mut Rng, exponent: f64, most: u64) -> u64 {
    ((1.0 - rng.unit()).powf(-1.0 / exponent) as u64).clamp(1, most)
}

/// The flows of a server.
fn trace(seed: u64, exponent: f64) -> Vec<Flow> {
    let mut rng = Rng::new(seed);
    let mut flows = Vec::new();
    for vnic in 0..VNICS {
        let vni = rng.below(TENANTS) as u32;
        for _ in 0..heavy(&mut rng, PEERS.0, PEERS.1) {
            // Some peers are drawn twice: that is one pair with the flows of both.
            let peer = 1 << 24 | rng.below(REMOTE) as u32;
            for _ in 0..heavy(&mut rng, exponent, MOST_FLOWS) {
                let protocol = if rng.chance(0.9) { 6 } else { 17 };
                let ephemeral = 32_768 + rng.below(28_232) as u16;
                let service = [53, 80, 443, 3306, 6379, 8080][rng.below(6) as usize];
                flows.push(Flow { vni, addresses: [vnic, peer], protocol, ports: [ephemeral, service] });
            }
        }
    }
    flows
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let servers = if quick { 30 } else { 300 };
    let mut outcome = Outcome::default();
    let mut by_mean = Vec::new();
    let mut panel = Panel::new("Connections saved, by server", "saved [%]", "servers [%]");
    let mut data = serde_json::Map::new();
    for exponent in EXPONENTS {
        let counted: Vec<Connections> = (1..=servers).map(|server| Connections::of(&trace(server, exponent))).collect();
        let flows: usize = counted.iter().map(|c| c.five_tuples).sum();
        let pairs: usize = counted.iter().map(|c| c.vnic_pairs).sum();
        let mut saved: Vec<f64> = counted.iter().map(|c| c.saved_percent()).collect();
        let mean = saved.iter().sum::<f64>() / saved.len() as f64;
        let flows_per_pair = flows as f64 / pairs as f64;
        let [low, high] = [0.05, 0.95].map(|p| percentile(&mut saved, p));
        outcome.lines.push(format!(
            "exponent {exponent}: {flows_per_pair:.2} flows per pair; connections saved, mean of {servers} servers: {mean:.1} %, P5 {low:.1}, P95 {high:.1}"
        ));
        panel = panel.line(format!("exponent {exponent}"), cumulative(&mut saved));
        by_mean.push((flows_per_pair, mean));
        data.insert(
            exponent.to_string(),
            json!({ "flows": flows, "pairs": pairs, "saved_percent": { "mean": mean, "p5": low, "p95": high } }),
        );
    }
    by_mean.reverse();
    let overall = Panel::new("Connections saved, by flows of a pair", "flows of a pair, mean", "saved [%]");
    outcome.panels.push(overall.line("mean of the servers", by_mean));
    outcome.panels.push(panel);
    outcome.data = data.into();
    Ok(outcome)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flows_of_a_pair_share_a_connection() {
        let flow = |vni, addresses, protocol, ports| Flow { vni, addresses, protocol, ports };
        let mut flows = vec![flow(1, [1, 2], 6, [40_000, 80])];
        let of = |flows: &[Flow]| {
            let Connections { five_tuples, vnic_pairs } = Connections::of(flows);
            (five_tuples, vnic_pairs)
        };
        assert_eq!(of(&[]), (0, 0));
        assert_eq!(of(&flows), (1, 1));
        // The same again; another port, protocol, address, network; the reverse direction.
        let table = [
            (flows[0], (1, 1)),
            (flow(1, [1, 2], 6, [40_001, 80]), (2, 1)),
            (flow(1, [1, 2], 17, [40_000, 80]), (3, 1)),
            (flow(1, [1, 3], 6, [40_000, 80]), (4, 2)),
            (flow(2, [1, 2], 6, [40_000, 80]), (5, 3)),
            (flow(1, [2, 1], 6, [80, 40_000]), (6, 4)),
        ];
        for (more, expected) in table {
            flows.push(more);
            assert_eq!(of(&flows), expected, "{more:?}");
        }
        let share = Connections { five_tuples: 10, vnic_pairs: 3 }.saved_percent();
        assert!((share - 70.0).abs() < 1e-9, "{share}");
        assert_eq!(Connections::of(&[]).saved_percent(), 0.0);
    }

    #[test]
    fn the_tail_is_as_heavy_as_stated() {
        let mut rng = Rng::new(1);
        let drawn: Vec<u64> = (0..100_000).map(|_| heavy(&mut rng, 1.4, 50)).collect();
        assert!(drawn.iter().all(|n| (1..=50).contains(n)));
        for least in [2u64, 5, 20] {
            let share = drawn.iter().filter(|n| **n >= least).count() as f64 / 1e5;
            let expected = (least as f64).powf(-1.4);
            assert!((share / expected - 1.0).abs() < 0.1, "{least}: {share}, expected {expected}");
        }
    }

    #[test]
    fn a_trace_depends_only_on_its_seed() {
        assert_eq!(trace(7, 1.4), trace(7, 1.4));
        assert_ne!(trace(7, 1.4), trace(8, 1.4));
    }
}
