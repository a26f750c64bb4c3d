//! A virtual machine's port: its vhost-user socket, and the worker that serves its queues while the machine runs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use bifrost_datapath::{Device, Handle, PortFault, Remote, Stage};
use bifrost_port::HostUnderlay;
use bifrost_port::clock::monotonic_ns;
use bifrost_port::panics::Panic;
use bifrost_port::vhost::{DirtyLog, HandedPort, QueueOwner, Unplugged, VhostConfig, VhostPort, VhostQueue};
use bifrost_rte::Time;

use crate::moves::end_of_forwarding;

/// A served vhost-user socket. Dropping it closes the socket and leaves the worker an empty port.
pub(crate) struct Machine {
    running: Arc<AtomicBool>,
    port: VhostPort,
}

impl Machine {
    /// Serves the socket for port `owner` of `worker`, which must have an [`Unplugged`] device.
    pub(crate) fn open(config: VhostConfig, owner: u32, worker: &Handle<HostUnderlay>) -> Result<Machine> {
        let running = Arc::new(AtomicBool::new(false));
        let (running_too, has_arrived) = (Arc::clone(&running), false);
        let plug = Plug { owner, worker: worker.remote(), running: running_too, has_arrived };
        Ok(Machine { running, port: VhostPort::open(config, Box::new(plug))? })
    }

    /// As [`open`](Self::open), with the socket and the front-end of another daemon.
    pub(crate) fn adopt(
        config: VhostConfig,
        owner: u32,
        worker: &Handle<HostUnderlay>,
        handed: HandedPort,
    ) -> Result<Machine> {
        let running = Arc::new(AtomicBool::new(false));
        let plug = Plug { owner, worker: worker.remote(), running: Arc::clone(&running), has_arrived: false };
        Ok(Machine { running, port: VhostPort::adopt(config, Box::new(plug), handed)? })
    }

    /// The vhost-user port.
    pub(crate) fn port(&self) -> &VhostPort {
        &self.port
    }

    /// Counters of its front-ends, by name.
    pub(crate) fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.port.counters()
    }

    /// Whether a guest's driver has started.
    pub(crate) fn is_running(&self) -> bool {
        self.running.load(Ordering::Relaxed)
    }
}

/// Changes the device behind a port of a worker.
struct Plug {
    owner: u32,
    worker: Remote<HostUnderlay>,
    running: Arc<AtomicBool>,
    /// Whether the guest came by migration from another host, and has not stopped since.
    has_arrived: bool,
}

impl Plug {
    /// Replaces the device. The old one is dropped here, on the socket's thread.
    fn swap(&self, device: Device) -> Result<()> {
        let owner = self.owner;
        let old = self.worker.run(move |worker| worker.swap_device(owner, device))?;
        old.map(drop).context("changing the device behind a port")
    }
}

impl QueueOwner for Plug {
    fn start(&mut self, queue: VhostQueue) {
        match self.swap(queue) {
            Ok(()) => self.running.store(true, Ordering::Relaxed),
            Err(error) => tracing::error!(port = self.owner, "cannot serve a guest: {error:#}"),
        }
    }

    fn log_writes(&mut self, log: Option<DirtyLog>) -> bool {
        let owner = self.owner;
        let run = self.worker.run(move |worker| worker.core_mut().device_mut(owner).map(|d| d.log_writes(log)));
        matches!(run, Ok(Some(())))
    }

    fn arrived(&mut self) {
        // The front-end reports it several times.
        if !std::mem::replace(&mut self.has_arrived, true) {
            tracing::info!(port = self.owner, "a guest has arrived from another host");
        }
        let (owner, until) = (self.owner, end_of_forwarding());
        let _ = self.worker.run(move |worker| worker.core_mut().note_arrived(owner, until));
    }

    fn fault(&mut self, panic: &Panic) {
        let fault = PortFault { stage: Stage::Message, panic: panic.clone(), at: Time(monotonic_ns()) };
        let owner = self.owner;
        // A worker that has ended does not report faults.
        let _ = self.worker.run(move |worker| worker.core_mut().note_fault(owner, fault));
    }

    fn stop(&mut self) {
        self.running.store(false, Ordering::Relaxed);
        self.has_arrived = false;
        // If the worker has ended, or the port was removed, the queue was dropped already.
        let unplugged = Unplugged::new().map_err(anyhow::Error::from);
        if let Err(error) = unplugged.and_then(|device| self.swap(Box::new(device))) {
            tracing::debug!(port = self.owner, "a guest's port was removed already: {error:#}");
        }
    }
}
