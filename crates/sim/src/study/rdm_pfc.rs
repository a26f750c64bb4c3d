//! RDMA with and without priority flow control (PFC) in a leaf-spine fabric: the goodput of hosts, and the harm to
//! bystanders of an incast, or of a host whose memory accepts no more writes (paper: section 2.2.1).

use anyhow::Result;
use serde_json::json;

use super::plot::Panel;
use super::rdm_mesh::{Run, Setup, run as run_mesh};
use super::runs::each;
use super::{Bar, Outcome};
use crate::rdma::{DcqcnConfig, Machine, Mesh, Topology};

const RATE: f64 = 25e9;
/// One-way delay from host to host over one switch, ns.
const DELAY_NS: u64 = 25_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Case {
    /// Only the bystanders.
    Calm,
    /// Some hosts of all leaves send to one host.
    Incast,
    /// The same, and after a while that host's NIC stops writing to memory, so it pauses its switch forever.
    Dead,
}

const CASES: [(Case, &str); 3] =
    [(Case::Calm, "alone"), (Case::Incast, "beside incast"), (Case::Dead, "beside a dead host")];

/// Hosts of a leaf. Those with the lowest numbers send to the last host of the fabric; the others are bystanders, which
/// send to each other.
struct Shape {
    leaves: usize,
    hosts: usize,
    /// For each leaf except the last one.
    senders: usize,
    len: u32,
}

impl Shape {
    fn target(&self) -> usize {
        self.leaves * self.hosts - 1
    }

    fn is_sender(&self, host: usize) -> bool {
        host % self.hosts < self.senders && host / self.hosts + 1 < self.leaves
    }

    fn bystanders(&self) -> impl Iterator<Item = usize> + Clone {
        (0..self.target()).filter(|host| !self.is_sender(*host))
    }

    fn senders(&self) -> impl Iterator<Item = usize> + Clone {
        (0..self.target()).filter(|host| self.is_sender(*host))
    }

    fn run(&self, setup: Setup, case: Case, seed: u64, times: (u64, u64, u64)) -> Result<Run> {
        let hosts = vec![(setup.stack(DcqcnConfig::new(RATE)), Machine::NEW); self.target() + 1];
        let mut mesh = Mesh::full(hosts, self.len, 16);
        let both = |a: usize, b: usize| !self.is_sender(a) && !self.is_sender(b) && a.max(b) < self.target();
        mesh.pairs.retain(|&(a, b)| both(a, b));
        if case != Case::Calm {
            mesh.pairs.extend(self.senders().map(|host| (host, self.target())));
        }
        let leaves = vec![self.hosts as u32; self.leaves];
        // The capacity between switches equals that to hosts.
        let rate = RATE * self.hosts as f64 / 2.0;
        let topology = Topology::LeafSpine { leaves, spines: 2, rate, delay_ns: 1_000 };
        run_mesh(&mesh, setup.fabric(RATE, DELAY_NS, true), &topology, seed, times, |world| {
            if case == Case::Dead {
                world.set_pcie_rate(self.target(), 0.0);
            }
        })
    }
}

pub(super) fn run(quick: bool) -> Result<Outcome> {
    let setups: &[Setup] = if quick {
        &[Setup::Engine, Setup::EnginePaused]
    } else {
        &[Setup::Engine, Setup::EnginePaused, Setup::RcPaused, Setup::Rc]
    };
    let shape = |len| match quick {
        true => Shape { leaves: 3, hosts: 4, senders: 2, len },
        false => Shape { leaves: 3, hosts: 6, senders: 3, len },
    };
    let lens: &[u32] = if quick { &[256 * 1024] } else { &[32 * 1024, 256 * 1024] };
    let times = if quick { (2_000_000, 1_000_000, 4) } else { (5_000_000, 2_000_000, 8) };
    let seeds: u64 = if quick { 1 } else { 2 };
    let mut runs = Vec::new();
    for &len in lens {
        for &setup in setups {
            for (case, _) in CASES {
                runs.extend((1..=seeds).map(|seed| (len, setup, case, seed)));
            }
        }
    }
    let answers = each(&runs, |&(len, setup, case, seed)| shape(len).run(setup, case, seed, times))?;
    let mut outcome = Outcome::default();
    let mut data = Vec::new();
    for &len in lens {
        let name = format!("messages of {} KB", len / 1024);
        let shape = shape(len);
        let of = |setup, case| {
            let own = runs.iter().zip(&answers).filter(move |(run, _)| (run.0, run.1, run.2) == (len, setup, case));
            own.map(|(_, run)| run)
        };
        let mean = |setup: Setup, case: Case, senders: bool| {
            let all = of(setup, case).map(|run| match senders {
                true => run.mean_gbps(shape.senders()) * shape.senders().count() as f64,
                false => run.mean_gbps(shape.bystanders()),
            });
            all.sum::<f64>() / seeds as f64
        };
        let mut panel = Panel::new(&format!("Bystanders, {name}"), "", "Gbit/s of a host").over(CASES.map(|(_, l)| l));
        for &setup in setups {
            let [alone, incast, dead] = CASES.map(|(case, _)| mean(setup, case, false));
            let into = mean(setup, Case::Incast, true);
            let counts = CASES.map(|(case, _)| {
                of(setup, case).fold((0, 0, 0, 0), |sum, run| {
                    let counts = run.counts;
                    let (dropped, overrun) = (sum.0 + counts.dropped_packets, sum.1 + counts.overrun_packets);
                    (dropped, overrun, sum.2 + counts.pauses, sum.3 + run.failed)
                })
            });
            outcome.lines.push(format!(
                "{name}, {}: bystanders {alone:.2} Gbit/s alone, {incast:.2} beside incast (which gets {into:.2}), {dead:.2} beside a dead \
                 host; dropped, overrun, pauses, connections failed: {counts:?}",
                setup.name()
            ));
            data.push(json!({ "message_bytes": len, "setup": setup.name(), "alone_gbps": alone, "incast_gbps": incast,
                "incast_target_gbps": into, "dead_gbps": dead, "counts": counts }));
            panel = panel.line(setup.name(), [alone, incast, dead].into_iter().enumerate().map(|(x, y)| (x as f64, y)));
        }
        outcome.panels.push(panel);
        let missing = |value: f64, of: f64| (1.0 - value / of) * 100.0;
        let alone = mean(Setup::Engine, Case::Calm, false);
        let bars = [
            (
                "alone: missing without PFC of what there is with it, %",
                missing(alone, mean(Setup::EnginePaused, Case::Calm, false)),
                2.0,
            ),
            (
                "incast: missing without PFC of what the target gets with it, %",
                missing(mean(Setup::Engine, Case::Incast, true), mean(Setup::EnginePaused, Case::Incast, true)),
                2.0,
            ),
            ("no PFC: bystanders lose beside incast, %", missing(mean(Setup::Engine, Case::Incast, false), alone), 5.0),
            (
                "no PFC: bystanders lose beside a dead host, %",
                missing(mean(Setup::Engine, Case::Dead, false), alone),
                5.0,
            ),
        ];
        outcome.bars.extend(bars.map(|(what, value, limit)| Bar { name: format!("{name}, {what}"), value, limit }));
    }
    outcome.data = data.into();
    Ok(outcome)
}
