//! The metadata service of a running daemon.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::Duration;

use anyhow::Result;
use bifrost_avs::{GATEWAY_MAC, METADATA};
use bifrost_control::config::Port;
use bifrost_datapath::{HostFrame, Remote};
use bifrost_metadata::{Counters, Documents, Server};
use bifrost_port::{HostUnderlay, panics};
use bifrost_wire::Mac;
use bifrost_wire::ethernet::{self, ethertype};

use super::{AFTER_PANIC, BATCH, LONGEST_MS, QUEUE, documents, now_ms};
use crate::daemon::{Daemon, State, random};

/// A guest that has used the service.
struct Known {
    /// Its port when it last sent a request, and the domain of its VPC.
    port: Port,
    domain: Option<String>,
    about: Arc<Documents>,
    /// The worker that fetched its last frame.
    worker: u16,
}

/// The service, and the guests that have used it.
struct Service {
    server: Server,
    known: BTreeMap<u32, Known>,
}

/// Answers requests until the daemon ends. Restarts after an error or a panic, without the connections.
pub(crate) fn run(daemon: &Daemon) {
    loop {
        match panics::contain(|| run_loop(daemon)) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => {
                tracing::error!(error = format!("{error:#}"), "the metadata service failed; restarting it")
            }
            Err(panic) => tracing::error!(%panic, "the metadata service failed; restarting it"),
        }
        thread::sleep(AFTER_PANIC);
    }
}

fn run_loop(daemon: &Daemon) -> Result<()> {
    let (sender, frames) = sync_channel(QUEUE);
    let workers: Vec<Remote<HostUnderlay>> = {
        let state = daemon.state();
        if state.workers.is_empty() {
            return Ok(());
        }
        state.on_all(move |worker| worker.core_mut().set_host_queue(sender.clone()))?;
        state.workers.iter().map(|worker| worker.remote()).collect()
    };
    let secret = u64::from(random()?) << 32 | u64::from(random()?);
    let mut service = Service { server: Server::new(METADATA, secret), known: BTreeMap::new() };
    let mut counted = Counters::default();
    let mut wait_ms = LONGEST_MS;
    while let Some(frames) = next(&frames, wait_ms) {
        service.receive(daemon, frames);
        let (next_ms, by_worker) = service.poll();
        wait_ms = next_ms;
        for (worker, frames) in by_worker {
            let Some(worker) = workers.get(usize::from(worker)) else { continue };
            let given = worker.run(move |worker| {
                for (port, mac, frame) in &frames {
                    worker.core_mut().give_from_host(*port, *mac, frame);
                }
            });
            if given.is_err() {
                // The daemon is stopping.
                return Ok(());
            }
        }
        let now = service.server.counters();
        if now != counted {
            daemon.state().metadata.add(now, std::mem::replace(&mut counted, now));
        }
    }
    Ok(())
}

/// The next frames; none after a timeout of `wait_ms`; `None` if the workers have ended.
fn next(frames: &Receiver<HostFrame>, wait_ms: u64) -> Option<Vec<HostFrame>> {
    match frames.recv_timeout(Duration::from_millis(wait_ms)) {
        Ok(first) => Some([first].into_iter().chain(frames.try_iter().take(BATCH - 1)).collect()),
        Err(RecvTimeoutError::Timeout) => Some(Vec::new()),
        Err(RecvTimeoutError::Disconnected) => None,
    }
}

/// Frames for guests: port, MAC address, frame.
type Answers = Vec<(u32, Mac, Vec<u8>)>;

impl Service {
    fn receive(&mut self, daemon: &Daemon, frames: Vec<HostFrame>) {
        if frames.is_empty() {
            return;
        }
        let (state, now_ms) = (daemon.state(), now_ms());
        for HostFrame { worker, port: number, frame } in frames {
            let Ok(parsed) = bifrost_nic::parse(&frame, frame.len()) else { continue };
            let Some(packet) = frame.get(usize::from(parsed.l3)..parsed.end as usize) else { continue };
            let Some(known) = self.know(&state, number) else { continue };
            known.worker = worker;
            let about = Arc::clone(&known.about);
            self.server.receive(now_ms, number, &about, packet.to_vec());
        }
    }

    /// The guest of a port, updated from the current configuration; `None` if it has no metadata.
    fn know(&mut self, state: &State, number: u32) -> Option<&mut Known> {
        let port = state.names.port_name(number).and_then(|name| state.config.port(name));
        let Some(port) = port.filter(|port| port.metadata.is_some()) else {
            self.server.forget(number);
            self.known.remove(&number);
            return None;
        };
        let domain = state.config.vpc(port.vni).and_then(|vpc| vpc.domain.clone());
        let known = self.known.get(&number);
        if known.is_none_or(|known| known.port != *port || known.domain != domain) {
            if known.is_some_and(|known| (known.port.vni, known.port.mac) != (port.vni, port.mac)) {
                self.server.forget(number);
            }
            let about = Arc::new(documents(port, domain.as_deref()));
            self.known.insert(number, Known { port: port.clone(), domain, about, worker: 0 });
        }
        self.known.get_mut(&number)
    }

    /// Processes due events. Returns the time until the next call, ms, and frames for guests by worker.
    fn poll(&mut self) -> (u64, BTreeMap<u16, Answers>) {
        let (now_ms, mut packets) = (now_ms(), Vec::new());
        let next_ms =
            self.server.poll(now_ms, &mut packets).map_or(LONGEST_MS, |next| next.saturating_sub(now_ms).max(1));
        let mut by_worker = BTreeMap::<u16, Answers>::new();
        for (number, packet) in packets {
            let Some(known) = self.known.get(&number) else { continue };
            let kind =
                if packet.first().is_some_and(|first| first >> 4 == 6) { ethertype::IPV6 } else { ethertype::IPV4 };
            let header = ethernet::Header::new(known.port.mac, GATEWAY_MAC, kind).emit();
            by_worker.entry(known.worker).or_default().push((number, known.port.mac, [&header[..], &packet].concat()));
        }
        (next_ms.min(LONGEST_MS), by_worker)
    }
}
