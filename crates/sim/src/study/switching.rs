//! Path selection in other networks. ECMP permanently assigns a flow to a path by hash. Probe-and-switch probes the
//! flow's path every second, and moves the flow if another path is better. Both carry plain VXLAN: the reliability of
//! the simulated hosts is off.

use crate::{Packet, Rng, VXLAN_PORT, World};

/// Probes per path and check.
const PROBES: u32 = 10;
/// Other paths tried per check.
const CANDIDATES: u32 = 4;
/// A flow moves to another path if its score is less than this fraction of the current path's score.
const BETTER: f64 = 0.5;
/// Delay assumed for a lost probe, ns.
const LOST_NS: f64 = 100e6;

/// A flow as seen by the network, and the time of its next check.
#[derive(Clone, Debug)]
pub(super) struct Switched {
    src: u32,
    dst: u32,
    source_port: u16,
    salt: u64,
    pub(super) next: u64,
    interval: u64,
    rng: Rng,
}

impl Switched {
    /// A flow between two hosts, whose path is checked every `interval`, ns, with a random phase.
    pub(super) fn new((src, dst, source_port): (u32, u32, u16), interval: u64, rng: &mut Rng) -> Self {
        let mut rng = rng.fork();
        Switched { src, dst, source_port, salt: 0, next: rng.below(interval), interval, rng }
    }

    /// Probes the flow's path and others, and moves the flow if one of them is much better.
    pub(super) fn look(&mut self, world: &mut World) {
        let now = world.now();
        self.next = now + self.interval;
        let own = self.score(world, self.salt);
        let mut best: Vec<(f64, u64)> = Vec::new();
        for _ in 0..CANDIDATES {
            let salt = self.rng.next_u64();
            best.push((self.score(world, salt), salt));
        }
        if let Some((score, salt)) = best.into_iter().min_by(|a, b| a.0.total_cmp(&b.0))
            && score < own * BETTER
        {
            self.salt = salt;
            world.network.rehash(self.src, self.dst, self.source_port, salt);
        }
    }

    /// Mean delay of probes if the flow had this salt, ns. Lost probes count as [`LOST_NS`].
    fn score(&mut self, world: &mut World, salt: u64) -> f64 {
        let now = world.now();
        world.network.rehash(self.src, self.dst, self.source_port, salt);
        let probe = Packet {
            src: self.src,
            dst: self.dst,
            source_port: self.source_port,
            dest_port: VXLAN_PORT,
            ..Packet::default()
        };
        let way = world.network.way(&probe);
        world.network.rehash(self.src, self.dst, self.source_port, self.salt);
        let links = way.iter().map(|l| &world.network.links[*l as usize]);
        let mut sum = 0.0;
        for _ in 0..PROBES {
            let lost = links.clone().any(|l| l.config.down || self.rng.chance(l.config.loss));
            let delay = || links.clone().map(|l| (l.config.delay.0 + l.wait_ns(now)) as f64).sum::<f64>();
            sum += if lost { LOST_NS } else { delay() };
        }
        sum / f64::from(PROBES)
    }
}

/// Runs until `until`; every flow's path is checked when it is due.
pub(super) fn run_until(world: &mut World, flows: &mut [Switched], until: u64) {
    while let Some(flow) = flows.iter_mut().min_by_key(|f| f.next).filter(|f| f.next < until) {
        world.run_until(flow.next);
        flow.look(world);
    }
    world.run_until(until);
}
