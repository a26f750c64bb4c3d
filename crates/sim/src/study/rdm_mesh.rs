//! Shared by studies with many RDMA hosts: stacks by name, and goodput in bins of time.

use anyhow::{Result, ensure};

use crate::rdma::{Counts, DcqcnConfig, Fabric, Mark, Mesh, MeshHost, Pause, RdmaWorld, Stack, Topology};

/// A stack and the network configuration that it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Setup {
    /// The engine, in a network that drops.
    Engine,
    /// The engine, with priority flow control.
    EnginePaused,
    /// RC with DCQCN and priority flow control, its intended environment.
    RcPaused,
    /// RC with DCQCN in a network that drops.
    Rc,
}

impl Setup {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Setup::Engine => "this engine, no PFC",
            Setup::EnginePaused => "this engine, PFC",
            Setup::RcPaused => "RC and DCQCN, PFC",
            Setup::Rc => "RC and DCQCN, no PFC",
        }
    }

    pub(super) const fn is_engine(self) -> bool {
        matches!(self, Setup::Engine | Setup::EnginePaused)
    }

    pub(super) const fn stack(self, dcqcn: DcqcnConfig) -> Stack {
        if self.is_engine() { Stack::Engine } else { Stack::Rc(Some(dcqcn)) }
    }

    /// Thresholds leave room for packets in flight when a transmitter is paused: two delays of its link.
    pub(super) fn fabric(self, rate: f64, delay_ns: u64, between_switches: bool) -> Fabric {
        let pause = Pause { off_bytes: 256 << 10, on_bytes: 128 << 10, between_switches };
        Fabric {
            pause: matches!(self, Setup::EnginePaused | Setup::RcPaused).then_some(pause),
            mark: (!self.is_engine()).then_some(Mark::DCQCN),
            ..Fabric::new(rate, delay_ns)
        }
    }
}

/// A run: bytes that each host had sent, after `warm` and after each bin that follows.
pub(super) struct Run {
    pub(super) bins: Vec<Vec<u64>>,
    pub(super) bin_ns: u64,
    /// Counters of the network.
    pub(super) counts: Counts,
    /// Number of failed connections.
    pub(super) failed: u64,
}

impl Run {
    /// Mean rate of these hosts in each bin, Gbit/s.
    pub(super) fn gbps(&self, hosts: impl Iterator<Item = usize> + Clone) -> Vec<f64> {
        let count = hosts.clone().count().max(1) as f64;
        let sum = |bin: &Vec<u64>| hosts.clone().map(|host| bin[host]).sum::<u64>();
        let bits = |pair: &[Vec<u64>]| (sum(&pair[1]) - sum(&pair[0])) as f64 * 8.0;
        self.bins.windows(2).map(|pair| bits(pair) / self.bin_ns as f64 / count).collect()
    }

    /// Mean rate of these hosts over all bins, Gbit/s.
    pub(super) fn mean_gbps(&self, hosts: impl Iterator<Item = usize> + Clone) -> f64 {
        let all = self.gbps(hosts);
        all.iter().sum::<f64>() / all.len().max(1) as f64
    }
}

/// Runs a mesh for `warm` ns and `bins` times `bin_ns`; `at_warm` changes the world after `warm`.
pub(super) fn run(
    mesh: &Mesh,
    fabric: Fabric,
    topology: &Topology,
    seed: u64,
    (warm, bin_ns, bins): (u64, u64, u64),
    at_warm: impl Fn(&mut RdmaWorld<MeshHost>),
) -> Result<Run> {
    let mut world = mesh.world(fabric, topology, seed)?;
    world.run_until(warm);
    at_warm(&mut world);
    let sent = |world: &RdmaWorld<MeshHost>| (0..mesh.hosts.len()).map(|host| world.node(host).sent_bytes()).collect();
    let mut all = vec![sent(&world)];
    for bin in 1..=bins {
        world.run_until(warm + bin * bin_ns);
        all.push(sent(&world));
    }
    ensure!(world.counts.livelocks == 0, "a host is busy without end");
    let failed = (0..mesh.hosts.len()).map(|host| world.node(host).failed()).sum::<Result<u64>>()?;
    Ok(Run { bins: all, bin_ns, counts: world.counts, failed })
}
