//! An upgrade to another number of workers: what belongs to a worker is distributed by the rules that steer packets.
//!
//! Sockets and queues of new workers exist before the old daemon stops, or are opened when it has stopped
//! (port/src/udp, port/src/tap/requeued.rs); one program for each group of sockets and each device changes where packets
//! go. Connections of the transport are set up again in any upgrade, so their CIDs, which name workers, are no obstacle.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use anyhow::{Context as _, Result, anyhow};
use bifrost_avs::Distribution;
use bifrost_control::config::PortKind;
use bifrost_datapath::Worker;
use bifrost_port::HostUnderlay;
use bifrost_port::steer;
use bifrost_port::tap::{self, Requeued, Steering};

use super::format::WorkerState;
use crate::daemon::State;
use crate::translate;

/// Maximum bytes of guests' packets that are moved from one queue to another; more stay where they are.
const MOST_BYTES: usize = 32 << 20;

/// A device whose packets go to another number of queues, and the program that steers them to those.
#[derive(Debug)]
pub(super) struct Steered {
    port: String,
    requeued: Requeued,
    steering: Arc<Steering>,
}

/// Programs by number of queues.
#[derive(Debug, Default)]
struct Programs(BTreeMap<u16, Arc<Steering>>);

impl Programs {
    fn of(&mut self, queues: u16) -> Result<Arc<Steering>> {
        if let Some(known) = self.0.get(&queues) {
            return Ok(Arc::clone(known));
        }
        let loaded = Steering::load(queues).context("loading the program that chooses a device's queue")?;
        let loaded = Arc::new(loaded);
        self.0.insert(queues, Arc::clone(&loaded));
        Ok(loaded)
    }
}

impl State {
    /// The devices that may have several queues, steered as now: for [`begin_queues`](Self::begin_queues) after another
    /// daemon has failed that has begun to use another number of them.
    pub(super) fn own_queues(&self) -> Result<Vec<Steered>> {
        let mut programs = Programs::default();
        let mut all = Vec::new();
        for port in self.config.ports.iter().filter(|port| port.kind == PortKind::Tap) {
            let Some(owner) = self.names.port(&port.name) else { continue };
            let mut queues = Vec::new();
            for worker in self.serving(port, owner) {
                let queue = worker.run(move |worker: &mut Worker<HostUnderlay>| {
                    let device = worker.core_mut().device(owner)?;
                    let is_multi = tap::is_multi_queue(device.fd()).unwrap_or(false);
                    is_multi.then(|| device.fd().try_clone_to_owned())
                })?;
                queues.extend(queue.transpose().context("copying a device's queue")?);
            }
            if !queues.is_empty() {
                let steering = programs.of(translate::tap(&self.config, port).queues)?;
                all.push(Steered { port: port.name.clone(), requeued: Requeued::new(queues), steering });
            }
        }
        Ok(all)
    }

    /// Prepares devices with another number of queues than in the old daemon.
    pub(super) fn prepare_queues(&mut self) -> Result<Vec<Steered>> {
        let mut programs = Programs::default();
        let mut all = Vec::new();
        for (port, requeued) in self.kept.take_requeued() {
            let Some(of_port) = self.config.port(&port) else { continue };
            let steering = programs.of(translate::tap(&self.config, of_port).queues)?;
            all.push(Steered { port, requeued, steering });
        }
        Ok(all)
    }

    /// Steers guests' packets to the queues of this daemon's workers, which do not fetch any now. Packets that wait are put
    /// in front of others at the worker that they belong to. Returns how many were left out.
    pub(super) fn begin_queues(&self, all: &[Steered]) -> Result<u64> {
        for Steered { port, requeued, steering } in all {
            requeued.begin(steering).with_context(|| format!("steering packets of port {port}"))?;
        }
        let mut waiting = vec![Vec::new(); self.workers.len()];
        let (mut owners, mut left) = (Owners::default(), MOST_BYTES);
        for Steered { port, requeued, .. } in all {
            let Some(owner) = self.names.port(port) else { continue };
            let packets = requeued.fetch(left);
            left = left.saturating_sub(packets.iter().map(Vec::len).sum());
            for packet in packets {
                waiting[owners.worker_of(self, owner, &packet)].push((owner, packet));
            }
        }
        let mut left_out = 0;
        for (worker, packets) in self.workers.iter().zip(waiting).filter(|(_, packets)| !packets.is_empty()) {
            let put = move |worker: &mut Worker<HostUnderlay>| {
                let taken = packets.into_iter().map(|(owner, packet)| worker.put_in_front(owner, packet));
                taken.filter(|is_taken| !is_taken).count() as u64
            };
            left_out += worker.run(put)?;
        }
        Ok(left_out)
    }

    /// The state of the old daemon's workers, for as many workers as this daemon has. `distribution`: that daemon has
    /// another number.
    pub(super) fn distribute(
        &self,
        distribution: Option<&mut Distribution>,
        former: Vec<WorkerState>,
    ) -> Result<Vec<WorkerState>> {
        let Some(distribution) = distribution else { return Ok(former) };
        let (memory, packets): (Vec<Vec<u8>>, Vec<_>) =
            former.into_iter().map(|WorkerState { memory, packets }| (memory, packets)).unzip();
        let memory = self.tables.distribute(distribution, &memory).map_err(|error| anyhow!("{error}"))?;
        let of_worker = |memory| WorkerState { memory, packets: Vec::new() };
        let mut next: Vec<WorkerState> = memory.into_iter().map(of_worker).collect();
        let mut owners = Owners::default();
        // Those of a pair of vNICs come from one worker, so they stay in order.
        for (owner, packet) in packets.into_iter().flatten() {
            let worker = owners.worker_of(self, owner, &packet);
            if let Some(next) = next.get_mut(worker) {
                next.packets.push((owner, packet));
            }
        }
        Ok(next)
    }
}

/// The only workers of ports, by port number.
#[derive(Debug, Default)]
struct Owners(HashMap<u32, Option<u16>>);

impl Owners {
    /// The worker that processes a packet of a port's guest, given with its virtio header. Below the number of workers.
    fn worker_of(&mut self, state: &State, owner: u32, packet: &[u8]) -> usize {
        let home = *self.0.entry(owner).or_insert_with(|| {
            let port = state.names.port_name(owner).and_then(|name| state.config.port(name))?;
            translate::home(&state.config, port, owner)
        });
        let workers = state.workers.len();
        let by_pair = || {
            let (to, rest) = tap::frame(packet).split_first_chunk()?;
            Some(steer::worker_of_pair(*to, *rest.first_chunk()?, workers as u16))
        };
        let worker = home.or_else(by_pair).unwrap_or(0);
        usize::from(worker).min(workers.saturating_sub(1))
    }
}
