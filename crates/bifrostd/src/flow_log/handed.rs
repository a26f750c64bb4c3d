//! Flow logs in an upgrade: the old daemon's conversations, and its connection to the collector of the host's flow log.
//!
//! The socket is handed over with the number of records sent on it, so to the collector it stays the same exporter
//! (RFC 7011, section 3.1). Other logs get new sockets, and to their collectors they are new exporters. If the new daemon
//! cannot continue the conversations, the old one writes their records.

use std::collections::BTreeMap;
use std::net::UdpSocket;
use std::os::fd::OwnedFd;
use std::sync::{MutexGuard, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bifrost_avs::{PortId, read_handed_flows, write_handed_flows};
use bifrost_port::clock::monotonic_ns;
use rustix::net::SocketType;
use serde::{Deserialize, Serialize};

use super::configured::{HOST, wanted};
use super::{Exports, Outputs, Records, Writing};
use crate::daemon::State;

/// How long to wait for records that are being written.
const WRITING: Duration = Duration::from_secs(1);
const POLL: Duration = Duration::from_millis(1);
/// Conversations that are added in one step. Packets wait for it, some tenths of a millisecond.
const STEP: usize = 256;

/// What another daemon needs to continue the flow logs.
#[derive(Debug, Default)]
pub(crate) struct Handed {
    pub(crate) description: Description,
    /// Conversations of each worker.
    pub(crate) flows: Vec<Vec<u8>>,
    /// The socket to the collector.
    pub(crate) socket: Option<OwnedFd>,
}

/// The part of it that is sent as JSON.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Description {
    /// Names of ports by number, including removed ones.
    names: BTreeMap<u32, String>,
    /// The collector's.
    collector: Option<CollectorState>,
}

/// State of the connection to the collector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct CollectorState {
    /// Number of data records sent, modulo 2^32.
    sequence: u32,
    /// Time since the templates were sent, ms; `None`: they were not.
    templates_age_ms: Option<u64>,
}

impl Exports {
    /// Waits until records that have left a worker are written.
    fn written(&self) -> Option<MutexGuard<'_, Writing>> {
        let deadline = Instant::now() + WRITING;
        loop {
            match self.writing.try_lock() {
                Ok(writing) => return Some(writing),
                Err(TryLockError::Poisoned(writing)) => return Some(writing.into_inner()),
                Err(TryLockError::WouldBlock) if Instant::now() < deadline => thread::sleep(POLL),
                Err(TryLockError::WouldBlock) => return None,
            }
        }
    }
}

impl State {
    /// Hands over the flow logs; the workers have stopped, and another daemon has taken over. The records of rules are
    /// written here. `is_taken`: the other daemon continues conversations.
    ///
    /// # Errors
    /// A worker does not answer, or records are still being written.
    pub(crate) fn hand_over_flow_logs(&self, is_taken: bool) -> Result<Handed> {
        let mut writing = self.flow_log.written().context("the last records are still being written")?;
        writing.name_ports(&self.config, &self.names);
        // The new daemon has only the logs that the configuration wants now.
        let is_wanted = |name: &str, open: &Outputs| wanted(&self.config).any(|log| log == (name, &open.spec));
        let has_logs = wanted(&self.config).next().is_some();
        let is_taken = is_taken && has_logs && writing.outputs.iter().all(|(name, open)| is_wanted(name, open));
        let now_ns = monotonic_ns();
        let end = move |worker: &mut bifrost_datapath::Worker<_>| {
            let switch = worker.core_mut().switch_mut();
            let (mut flows, mut rules) = (Vec::new(), Vec::new());
            let handed = if is_taken { write_handed_flows(&switch.handed_flows()) } else { Vec::new() };
            if !is_taken {
                switch.end_flow_logs(now_ns, &mut flows);
            }
            switch.end_rule_logs(now_ns, &mut rules);
            (handed, Records { flows, rules })
        };
        let mut handed = Handed::default();
        let mut records = Records::default();
        for (flows, of_worker) in self.on_all(end)? {
            handed.flows.push(flows);
            records.add(of_worker);
        }
        if !records.is_empty() {
            writing.open_missing(&self.config);
        }
        writing.export(&self.flow_log, records, now_ns);
        let of_host = writing.outputs.get(HOST).and_then(|outputs| outputs.collector.as_ref());
        if let Some(collector) = of_host.filter(|_| is_taken) {
            let socket = collector.socket.as_ref().map(UdpSocket::try_clone).transpose();
            handed.socket = socket.context("copying the socket to the collector")?.map(OwnedFd::from);
            let age = collector.templates_sent.map(|sent| sent.elapsed().as_millis() as u64);
            let sequence = collector.exporter.sequence();
            handed.description.collector = Some(CollectorState { sequence, templates_age_ms: age });
        }
        handed.description.names = writing.names.iter().map(|(id, name)| (id.0, name.clone())).collect();
        Ok(handed)
    }

    /// Continues the flow logs of another daemon. Returns the number of conversations that were left out.
    ///
    /// # Errors
    /// The conversations are invalid, or a worker does not answer. What was valid is continued.
    pub(crate) fn continue_flow_logs(&self, handed: Handed) -> Result<u64> {
        let Handed { description, flows, socket } = handed;
        let mut writing = self.flow_log.writing();
        writing.names = description.names.into_iter().map(|(id, name)| (PortId(id), name)).collect();
        if let (Some(spec), Some(state)) = (&self.config.flow_log, description.collector) {
            let mut outputs = Outputs::new(HOST, spec.clone());
            if let Some(collector) = &mut outputs.collector {
                collector.exporter.continue_at(state.sequence);
                // On another socket, the templates are sent first.
                match socket.map(|socket| connected(socket, spec.collector)).transpose() {
                    Ok(None) => {}
                    Ok(socket) => {
                        collector.socket = socket;
                        let age = state.templates_age_ms.map(Duration::from_millis);
                        collector.templates_sent = age.and_then(|age| Instant::now().checked_sub(age));
                    }
                    Err(error) => tracing::warn!("another socket to the collector is used: {error:#}"),
                }
            }
            writing.outputs.insert(HOST.to_owned(), outputs);
        }
        drop(writing);
        let mut left_out = 0;
        let mut by_worker = vec![Vec::new(); self.workers.len()];
        let recounted = flows.len() != self.workers.len();
        for (at, bytes) in flows.into_iter().enumerate() {
            let (flows, invalid) = read_handed_flows(&bytes)?;
            left_out += invalid;
            for flow in flows {
                let worker = if recounted { usize::from(self.tables.worker_of_flow(&flow).0) } else { at };
                match by_worker.get_mut(worker) {
                    Some(of_worker) => of_worker.push(flow),
                    None => left_out += 1,
                }
            }
        }
        for (worker, flows) in self.workers.iter().zip(by_worker) {
            for some in flows.chunks(STEP) {
                let some = some.to_vec();
                left_out +=
                    worker.run(move |worker| worker.core_mut().switch_mut().continue_flows(&some, monotonic_ns()))?;
            }
        }
        Ok(left_out)
    }
}

/// The socket of another daemon, if it leads to the `collector`.
fn connected(socket: OwnedFd, collector: Option<std::net::SocketAddr>) -> Result<UdpSocket> {
    let kind = rustix::net::sockopt::socket_type(&socket).context("the collector's socket")?;
    ensure!(kind == SocketType::DGRAM, "the collector's socket is not a UDP socket");
    let socket = UdpSocket::from(socket);
    let peer = socket.peer_addr().context("the collector's socket")?;
    ensure!(Some(peer) == collector, "the collector's socket leads to {peer}");
    socket.set_nonblocking(true).context("the collector's socket")?;
    Ok(socket)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_sockets_to_the_collector_are_used() {
        let [a, b] = [(); 2].map(|()| UdpSocket::bind("127.0.0.1:0").unwrap());
        let address = |socket: &UdpSocket| Some(socket.local_addr().unwrap());
        assert!(connected(a.try_clone().unwrap().into(), address(&b)).is_err(), "not connected");
        a.connect(b.local_addr().unwrap()).unwrap();
        assert!(connected(a.try_clone().unwrap().into(), address(&a)).is_err(), "another address");
        assert!(connected(std::fs::File::open("/dev/null").unwrap().into(), address(&b)).is_err());
        let taken = connected(a.into(), address(&b)).unwrap();
        taken.send(&[7]).unwrap();
        assert_eq!(b.recv(&mut [0; 9]).unwrap(), 1);
    }
}
