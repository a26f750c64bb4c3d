//! The reliable transport between hosts and a pod (docs/PROTOCOL.md), terminated here, in front of the pod.
//!
//! ```text
//!  host -> arrive -> engine -> a buffer -> flow order -> backlog -> the pod's ring (as plain VXLAN)
//!  host <- emit  <- engine <- a buffer <- depart    <-------------- what the pod sends to a host
//! ```
//!
//! A connection joins a vNIC of a host with the gateway's address in the same VNI. A frame is acknowledged when it is
//! in the pod's ring, or in the backlog of frames that are next in their flows and wait for room in the ring. While
//! there is a backlog, or no pod, no more frames are accepted, and hosts retransmit them; so replacing a pod ends no
//! connection. Frames that exceed the tenant's rate are dropped and acknowledged, because the host would retransmit
//! them otherwise.
//!
//! Frames to hosts are kept until they are acknowledged. Each host has a share of the buffers in either direction, and
//! a maximum number of connections; frames that do not fit leave as plain VXLAN, and are counted. The same happens
//! until a host is known to speak the transport.
//!
//! Order of calls in a turn: [`Reliable::arrive`] for each frame, [`settle`](Reliable::settle),
//! [`depart`](Reliable::depart) for each frame of the pod, [`emit`](Reliable::emit).

mod host;
mod outer;
mod receive;
mod send;
#[cfg(test)]
mod tests;

use std::collections::{HashSet, VecDeque};
use std::net::IpAddr;

use bifrost_rte::{Counters, Engine, Output, PathSnapshot, PeerId, Time};
use bifrost_wire::Mac;
use bifrost_wire::bifrost::PathId;
use foldhash::fast::RandomState;
use hashbrown::HashMap;
use thiserror::Error;

use crate::buffers::Buffers;
use crate::{HostCounters, TransportCounters};
use host::Host;

/// Retry interval for frames that wait for the pod's rings, ns.
const RETRY_NS: u64 = 100_000;
/// Packets of one connection that may be missing before a packet that is accepted; the window that connections
/// announce. 1 to 4096.
const RECEIVE_WINDOW: u32 = 1024;
/// Packets that a page of the engine describes.
const PAGE_PACKETS: u32 = 64;
/// Minimum number of buffers per host and direction.
const LEAST_SHARE: usize = 16;
/// Maximum number of hosts of a pod.
const MOST_HOSTS: usize = 4096;

/// Settings of a pod's transport.
#[derive(Clone, Debug)]
pub struct ReliableConfig {
    /// The gateway's tunnel addresses, at most one of each family.
    pub addresses: Vec<IpAddr>,
    /// The gateway's address in each VPC.
    pub mac: Mac,
    /// The VPCs.
    pub vnis: Vec<u32>,
    /// The hosts that may use the transport: the addresses of each. The first address of a family is its tunnel
    /// endpoint (VTEP).
    pub hosts: Vec<Vec<IpAddr>>,
    /// UDP port of the transport, at both ends; 4794 unless configured otherwise.
    pub port: u16,
    /// Paths to a host, 1 to 8; the same as the hosts have.
    pub paths: u8,
    /// UDP source port of path 0.
    pub source_port_base: u16,
    /// Memory for frames, bytes: half for each direction.
    pub memory_bytes: usize,
    /// Maximum number of connections with one host.
    pub connections_per_host: u32,
    /// Settings of the engine; limits of connections and pages are computed here.
    pub engine: bifrost_rte::Config,
    /// Start of the program, us since the epoch.
    pub instance: u64,
    /// A random number.
    pub salt: u32,
}

/// Invalid settings.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReliableError {
    /// No hosts.
    #[error("no hosts")]
    NoHosts,
    /// More hosts than the engine has numbers for.
    #[error("{0} hosts; a pod has at most 4096")]
    Hosts(usize),
    /// A host has no address, or more than eight.
    #[error("host {0}: a host has 1 to 8 addresses")]
    Addresses(usize),
    /// Two hosts have the same address, or one has it twice.
    #[error("{0}: another host has this address, too")]
    Twice(IpAddr),
    /// The gateway has no address of its family.
    #[error("{0}: the gateway has no address of this family")]
    Family(IpAddr),
    /// Two addresses of one family, or none.
    #[error("the gateway has one address, or one of each family")]
    Own,
    /// Too little memory for the hosts.
    #[error("{0} bytes are too few: each host needs {1}")]
    Memory(usize, usize),
    /// The number of paths is out of range.
    #[error("{0} paths; a host has 1 to 8")]
    Paths(u8),
    /// The last source port would exceed 65535.
    #[error("source port {0}: the last path's port would exceed 65535")]
    SourcePort(u16),
    /// Multicast, or zero.
    #[error("{0} is not a unicast MAC address")]
    Mac(Mac),
    /// No connection allowed, or more than the engine has numbers for.
    #[error("{0} connections for each host: 1 to 65536, and 1048576 for all hosts")]
    Connections(u32),
}

/// Whether the pod can take a frame from the transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gate {
    /// It can.
    Open,
    /// The tenant exceeds its rate.
    Limited,
    /// It is down.
    Closed,
}

/// Result of delivering a frame of the backlog.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Delivery {
    /// The pod has it.
    Taken,
    /// Not now.
    NoRoom,
    /// Never.
    Dropped,
}

/// A frame that waits for its turn, or for room in the pod's ring: a whole plain VXLAN frame in a buffer.
#[derive(Clone, Copy, Debug, Default)]
struct Received {
    host: u32,
    len: u16,
    interface: u8,
}

/// The inner frame that is kept until it is acknowledged.
#[derive(Clone, Copy, Debug, Default)]
struct Kept {
    host: u32,
    len: u16,
    vni: u32,
    to: Mac,
    flow: u32,
    ecn: u8,
}

/// Destination of waiting frames: host, VNI and vNIC.
type Key = (u32, u32, Mac);

/// A pod's transport. See the module.
#[derive(Debug)]
pub struct Reliable {
    config: ReliableConfig,
    longest: usize,
    engine: Engine,
    out: Output,
    now: Time,
    hosts: Vec<Host>,
    /// Host, and index of its address.
    by_address: HashMap<IpAddr, (u32, u8), RandomState>,
    by_engine: Vec<u32>,
    /// Buffers per host and direction.
    share: u32,
    rx: Buffers,
    received: Box<[Received]>,
    /// In flow order: the frames for the pod.
    backlog: VecDeque<u32>,
    tx: Buffers,
    kept: Box<[Kept]>,
    /// Frames that wait for a window, and the round-robin order of their queues.
    waiting: HashMap<Key, VecDeque<u32>, RandomState>,
    turns: VecDeque<Key>,
    /// Headers of the frame being written.
    scratch: Vec<u8>,
    /// The control packet being written.
    control: Vec<u8>,
    counters: TransportCounters,
}

/// State of a host.
#[derive(Clone, Debug)]
pub struct HostState {
    /// Its addresses.
    pub addresses: Vec<IpAddr>,
    /// Connections of all states.
    pub connections: u32,
    /// Of these, open ones.
    pub open_connections: u32,
    /// Connections that have fallen back to plain VXLAN because all paths are silent.
    pub best_effort_connections: u32,
    /// Packets retransmitted.
    pub retransmitted_packets: u64,
    /// Packets that arrived more than once.
    pub duplicate_packets: u64,
    /// Packets given up.
    pub given_up_packets: u64,
    /// Frames from it that wait for their turn or for the pod.
    pub held_frames: u32,
    /// Frames to it that are kept until they are acknowledged.
    pub kept_frames: u32,
    /// Maximum number of frames of either kind.
    pub share_frames: u32,
    /// Its paths.
    pub paths: Vec<PathSnapshot>,
    /// Its counters.
    pub counters: HostCounters,
}

impl ReliableConfig {
    /// Checks the settings, for frames of up to `longest` bytes. Allocates no memory.
    ///
    /// # Errors
    /// The invalid setting.
    pub fn check(&self, longest: usize) -> Result<(), ReliableError> {
        check(self)?;
        if self.memory_bytes / 2 / longest.max(1) / self.hosts.len() < LEAST_SHARE {
            return Err(ReliableError::Memory(self.memory_bytes, 2 * LEAST_SHARE * longest));
        }
        let mut seen = HashSet::new();
        for (number, addresses) in self.hosts.iter().enumerate() {
            Host::new(addresses.clone(), &self.addresses, self.paths, PeerId(number as u32))?;
            if let Some(twice) = addresses.iter().find(|address| !seen.insert(**address)) {
                return Err(ReliableError::Twice(*twice));
            }
        }
        Ok(())
    }
}

impl Reliable {
    /// Allocates all memory for frames. `longest`: maximum length of a frame, bytes.
    ///
    /// # Errors
    /// Invalid settings.
    pub fn new(config: ReliableConfig, longest: usize) -> Result<Self, ReliableError> {
        config.check(longest)?;
        let hosts_count = config.hosts.len();
        let buffers = config.memory_bytes / 2 / longest.max(1);
        let share = buffers / hosts_count;
        let (buffers, share) = (buffers.min(u32::MAX as usize / 2) as u32, share.min(u32::MAX as usize / 2) as u32);
        let connections = config.connections_per_host.saturating_mul(hosts_count as u32);
        // A window at any position touches one page more.
        let pages_each = RECEIVE_WINDOW.max(config.engine.max_window.into()) / PAGE_PACKETS + 2;
        let engine = bifrost_rte::Config {
            max_connections: connections,
            max_connections_per_peer: config.connections_per_host,
            max_pages: connections.saturating_mul(pages_each),
            ..config.engine.clone()
        };
        let mut engine = Engine::new(engine, 0, config.instance, config.salt);
        engine.set_receive_window(0, RECEIVE_WINDOW);
        let (mut hosts, mut by_address, mut by_engine) = (Vec::new(), HashMap::default(), Vec::new());
        for (number, addresses) in config.hosts.iter().enumerate() {
            for (index, &address) in addresses.iter().enumerate() {
                by_address.insert(address, (number as u32, index as u8));
            }
            let id = engine.add_peer(config.paths.into());
            by_engine.push(number as u32);
            debug_assert_eq!(id.0 as usize + 1, by_engine.len());
            hosts.push(Host::new(addresses.clone(), &config.addresses, config.paths, id)?);
        }
        Ok(Reliable {
            longest,
            engine,
            out: Output::default(),
            now: Time(0),
            hosts,
            by_address,
            by_engine,
            share,
            rx: Buffers::new(buffers, longest),
            received: vec![Received::default(); buffers as usize].into(),
            backlog: VecDeque::new(),
            tx: Buffers::new(buffers, longest),
            kept: vec![Kept::default(); buffers as usize].into(),
            waiting: HashMap::default(),
            turns: VecDeque::new(),
            scratch: Vec::with_capacity(longest),
            control: Vec::with_capacity(longest),
            counters: TransportCounters::default(),
            config,
        })
    }

    /// When to call [`Pipeline::settle`](crate::Pipeline::settle) next if nothing arrives until then, ns.
    pub fn deadline(&self) -> Option<u64> {
        let is_waiting = !self.backlog.is_empty() || !self.out.publish.is_empty();
        let retry = is_waiting.then(|| self.now.0 + RETRY_NS);
        [self.engine.next_timeout().map(|at| at.0), retry].into_iter().flatten().min()
    }

    /// Counters that do not belong to a host.
    pub fn counters(&self) -> &TransportCounters {
        &self.counters
    }

    /// Counters of the engine.
    pub fn engine_counters(&self) -> &Counters {
        self.engine.counters()
    }

    /// All hosts, in the order of the configuration.
    pub fn hosts(&self) -> Vec<HostState> {
        let mut states: Vec<HostState> = self.hosts.iter().map(|host| host.state(self.share)).collect();
        for connection in self.engine.connection_snapshots(self.now) {
            let Some(state) = self.number_of(connection.peer).and_then(|n| states.get_mut(n as usize)) else {
                continue;
            };
            state.connections += 1;
            state.open_connections += u32::from(connection.state == bifrost_rte::State::Open);
            state.best_effort_connections += u32::from(connection.state == bifrost_rte::State::BestEffort);
            state.retransmitted_packets += connection.retransmitted_packets;
            state.duplicate_packets += connection.duplicate_packets;
            state.given_up_packets += connection.given_up_packets;
        }
        for path in self.engine.path_snapshots(self.now) {
            if let Some(state) = self.number_of(path.peer).and_then(|n| states.get_mut(n as usize)) {
                state.paths.push(path);
            }
        }
        states
    }

    fn number_of(&self, peer: PeerId) -> Option<u32> {
        self.by_engine.get(peer.0 as usize).copied()
    }

    /// The gateway's address of the family of `remote`.
    fn local(&self, remote: IpAddr) -> Option<IpAddr> {
        self.config.addresses.iter().find(|own| own.is_ipv4() == remote.is_ipv4()).copied()
    }

    fn source_port(&self, path: PathId) -> u16 {
        self.config.source_port_base.wrapping_add(u16::from(path.get()))
    }

    #[cfg(test)]
    pub(crate) fn free_buffers(&self) -> (usize, usize) {
        (self.rx.free(), self.tx.free())
    }
}

fn check(config: &ReliableConfig) -> Result<(), ReliableError> {
    let [v4, v6] = [true, false].map(|v4| config.addresses.iter().filter(|a| a.is_ipv4() == v4).count());
    if v4 > 1 || v6 > 1 || v4 + v6 == 0 {
        return Err(ReliableError::Own);
    }
    if config.hosts.is_empty() {
        return Err(ReliableError::NoHosts);
    }
    if config.hosts.len() > MOST_HOSTS {
        return Err(ReliableError::Hosts(config.hosts.len()));
    }
    if !(1..=PathId::MAX).contains(&usize::from(config.paths)) {
        return Err(ReliableError::Paths(config.paths));
    }
    if config.source_port_base.checked_add(u16::from(config.paths) - 1).is_none() {
        return Err(ReliableError::SourcePort(config.source_port_base));
    }
    if !config.mac.is_unicast() || config.mac == Mac::ZERO {
        return Err(ReliableError::Mac(config.mac));
    }
    let all = u64::from(config.connections_per_host) * config.hosts.len() as u64;
    if !(1..=1 << 16).contains(&config.connections_per_host) || all > 1 << 20 {
        return Err(ReliableError::Connections(config.connections_per_host));
    }
    Ok(())
}
