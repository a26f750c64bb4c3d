//! The table of conversations that are being logged.

use std::hash::BuildHasher as _;
use std::sync::Arc;

use bifrost_wire::Vni;
use bifrost_wire::tcp::Flags;
use foldhash::fast::FixedState;
use hashbrown::HashTable;

use super::FlowLogCounters;
use super::record::{FlowEnd, FlowRecord, Traffic};
use super::sample::is_sampled;
use crate::drop_reason::DropReason;
use crate::frame::Frame;
use crate::ids::{Direction, PortId};
use crate::session::Key;
use crate::tables::FlowLogSpec;

/// Maximum number of records that wait to be taken, of conversations that ended because another one reused their key.
pub(super) const PENDING: usize = 4096;
/// Time after its end during which a conversation still counts late packets, ns.
const LINGER_NS: u64 = 1_000_000_000;

/// What the log counts of a frame from or to a guest.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Packet {
    pub(crate) packets: u64,
    pub(crate) bytes: u64,
    pub(crate) flags: Option<Flags>,
}

impl Packet {
    /// The packets of a frame. A frame that is to be segmented counts as its segments.
    pub(crate) fn of(frame: Frame<'_>) -> Self {
        let p = frame.parsed;
        let (len, flags) = (p.packet_len() as u64, p.tcp.map(|tcp| tcp.flags));
        let headers = u64::from(p.payload - p.l3);
        match frame.offload.segment {
            Some(segment) if len > headers => {
                let packets = (len - headers).div_ceil(u64::from(segment.mss.max(1)));
                Packet { packets, bytes: len + (packets - 1) * headers, flags }
            }
            _ => Packet { packets: 1, bytes: len, flags },
        }
    }
}

/// Progress of a TCP handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handshake {
    /// Its beginning was not seen.
    Unknown,
    /// SYN sent at this time, ns.
    Asked(u64),
    /// SYN sent at this time, ns, and answered.
    Answered(u64),
    /// Complete; it took this long, ns.
    Done(u64),
}

impl Handshake {
    fn after(self, flags: Flags, by_originator: bool, is_first: bool, now_ns: u64) -> Handshake {
        let (syn, ack) = (flags.contains(Flags::SYN), flags.contains(Flags::ACK));
        match self {
            Handshake::Unknown if is_first && syn && !ack => Handshake::Asked(now_ns),
            // It is unknown which SYN will be answered (Karn's algorithm).
            Handshake::Asked(_) if by_originator && syn => Handshake::Unknown,
            Handshake::Asked(at) if !by_originator && syn && ack => Handshake::Answered(at),
            Handshake::Answered(at) if by_originator && ack && !syn => Handshake::Done(now_ns.saturating_sub(at)),
            other => other,
        }
    }
}

/// A conversation, or the part of it since its previous record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Flow {
    pub(crate) name: Name,
    /// Direction of the first packet.
    pub(crate) origin: Direction,
    pub(crate) handshake: Handshake,
    /// Indexed by direction.
    pub(crate) traffic: [Traffic; 2],
    /// TCP flags of all its records, indexed by direction.
    pub(crate) flags: [u8; 2],
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    /// The slot is free.
    is_free: bool,
}

/// The key of a conversation. Accepted and rejected packets are two conversations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Name {
    pub(crate) key: Key,
    /// The network of the port at that time.
    pub(crate) vni: Vni,
    pub(crate) rejected: Option<DropReason>,
}

impl Flow {
    pub(crate) fn begin(name: Name, origin: Direction, now_ns: u64) -> Flow {
        Flow {
            name,
            origin,
            handshake: Handshake::Unknown,
            traffic: [Traffic::default(); 2],
            flags: [0; 2],
            start_ns: now_ns,
            end_ns: now_ns,
            is_free: false,
        }
    }

    fn count(&mut self, packet: Packet, direction: Direction, is_first: bool, now_ns: u64) {
        let at = direction as usize;
        let traffic = &mut self.traffic[at];
        if traffic.packets == 0 && self.traffic_is_empty() {
            self.start_ns = now_ns;
        }
        let traffic = &mut self.traffic[at];
        traffic.packets += packet.packets;
        traffic.bytes += packet.bytes;
        self.end_ns = now_ns;
        if let Some(flags) = packet.flags {
            traffic.tcp_flags |= flags.0;
            self.flags[at] |= flags.0;
            self.handshake = self.handshake.after(flags, direction == self.origin, is_first, now_ns);
        }
    }

    pub(super) fn traffic_is_empty(&self) -> bool {
        self.traffic.iter().all(|traffic| traffic.packets == 0)
    }

    pub(super) fn is_closed(&self) -> bool {
        let has = |flags: u8, flag: Flags| flags & flag.0 != 0;
        let [sent, received] = self.flags;
        has(sent | received, Flags::RST) || has(sent, Flags::FIN) && has(received, Flags::FIN)
    }

    pub(super) fn record(&self, log: &Arc<str>, end: FlowEnd) -> FlowRecord {
        let (local, remote) = self.name.key.ends();
        let [sent, received] = self.traffic;
        FlowRecord {
            log: Arc::clone(log),
            port: self.name.key.port(),
            vni: self.name.vni,
            origin: self.origin,
            local: local.address,
            local_port: local.port,
            remote: remote.address,
            remote_port: remote.port,
            protocol: self.name.key.protocol(),
            rejected: self.name.rejected,
            sent,
            received,
            start_ns: self.start_ns,
            end_ns: self.end_ns,
            end,
            handshake_ns: if let Handshake::Done(ns) = self.handshake { Some(ns) } else { None },
        }
    }
}

/// A flow log of one switch.
#[derive(Debug)]
pub(crate) struct FlowLog {
    pub(super) spec: FlowLogSpec,
    /// Indexed by port number: whether the port is logged, and its number of conversations.
    ports: Vec<(bool, u32)>,
    /// Maximum number of conversations per port.
    per_port: u32,
    hasher: FixedState,
    index: HashTable<u32>,
    flows: Vec<Flow>,
    free: Vec<u32>,
    pub(super) pending: Vec<FlowRecord>,
    /// Where the next scan begins.
    cursor: usize,
    pub(super) counters: FlowLogCounters,
}

impl FlowLog {
    /// `seed`: secret seed of the hash, because tenants choose the keys.
    pub(crate) fn new(spec: FlowLogSpec, seed: u64) -> Self {
        let mut log = FlowLog {
            spec: FlowLogSpec { ports: Vec::new(), ..spec.clone() },
            ports: Vec::new(),
            per_port: 0,
            hasher: FixedState::with_seed(seed),
            index: HashTable::new(),
            flows: Vec::new(),
            free: Vec::new(),
            pending: Vec::new(),
            cursor: 0,
            counters: FlowLogCounters::default(),
        };
        log.set_spec(Some(spec));
        log
    }

    /// Changes what is logged; `None`: nothing, except that existing records can still be taken.
    pub(crate) fn set_spec(&mut self, spec: Option<FlowLogSpec>) {
        self.ports.iter_mut().for_each(|(is_logged, _)| *is_logged = false);
        let Some(spec) = spec else { return };
        for port in &spec.ports {
            if self.ports.len() <= port.place() {
                self.ports.resize(port.place() + 1, (false, 0));
            }
            self.ports[port.place()].0 = true;
        }
        self.per_port = if spec.ports.len() > 1 { (spec.flows / 4).max(1) } else { spec.flows };
        self.spec = spec;
    }

    /// Whether nothing is logged any more, and no record is left.
    pub(crate) fn is_over(&self) -> bool {
        self.counters.current_flows == 0
            && self.pending.is_empty()
            && !self.ports.iter().any(|(is_logged, _)| *is_logged)
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.spec.name
    }

    pub(crate) fn counters(&self) -> &FlowLogCounters {
        &self.counters
    }

    /// Whether packets of a port with this fate are logged.
    #[inline]
    pub(crate) fn wants(&self, port: PortId, rejected: Option<DropReason>) -> bool {
        let is_wanted = if rejected.is_some() { self.spec.rejected } else { self.spec.accepted };
        is_wanted && self.ports.get(port.place()).is_some_and(|(is_logged, _)| *is_logged)
    }

    /// Whether a conversation is among those that sampling leaves.
    #[inline]
    pub(super) fn samples(&self, name: &Name) -> bool {
        self.spec.one_in <= 1 || is_sampled(name, self.spec.one_in)
    }

    /// Counts a packet from or to the guest of a port. Its port and fate must be [wanted](Self::wants).
    pub(crate) fn count(&mut self, name: Name, direction: Direction, packet: Packet, now_ns: u64) {
        if !self.samples(&name) {
            self.counters.unsampled_packets += packet.packets;
            return;
        }
        let hash = self.hasher.hash_one(name);
        let found = self.index.find(hash, |&at| self.flows[at as usize].name == name).copied();
        if let Some(at) = found {
            let flow = &mut self.flows[at as usize];
            let begins = packet.flags.is_some_and(|f| f.contains(Flags::SYN) && !f.contains(Flags::ACK));
            if !begins || !flow.is_closed() {
                return flow.count(packet, direction, false, now_ns);
            }
            // Another conversation with the same key.
            let over = flow.record(&self.spec.name, FlowEnd::Closed);
            *flow = Flow::begin(name, direction, now_ns);
            flow.count(packet, direction, true, now_ns);
            self.counters.created_records += 1;
            if self.pending.len() < PENDING {
                self.pending.push(over);
            } else {
                self.counters.lost_records += 1;
            }
            return;
        }
        self.begin(hash, name, direction, packet, now_ns);
    }

    #[inline(never)]
    fn begin(&mut self, hash: u64, name: Name, direction: Direction, packet: Packet, now_ns: u64) {
        let mut flow = Flow::begin(name, direction, now_ns);
        flow.count(packet, direction, true, now_ns);
        if !self.insert(hash, flow) {
            self.counters.unlogged_packets += packet.packets;
        }
    }

    /// All conversations in the table.
    pub(super) fn open(&self) -> impl Iterator<Item = &Flow> {
        self.flows.iter().filter(|flow| !flow.is_free)
    }

    /// The conversation with this name.
    pub(super) fn find(&mut self, name: &Name) -> Option<&mut Flow> {
        let at = *self.index.find(self.hasher.hash_one(name), |&at| self.flows[at as usize].name == *name)?;
        self.flows.get_mut(at as usize)
    }

    /// Adds a conversation whose port is logged, and whose name is not in the table. Returns false if there is no room.
    pub(super) fn add(&mut self, flow: Flow) -> bool {
        self.insert(self.hasher.hash_one(flow.name), flow)
    }

    fn insert(&mut self, hash: u64, flow: Flow) -> bool {
        let of_port = &mut self.ports[flow.name.key.port().place()].1;
        if *of_port >= self.per_port || self.counters.current_flows >= u64::from(self.spec.flows) {
            return false;
        }
        *of_port += 1;
        self.counters.current_flows += 1;
        let at = match self.free.pop() {
            Some(at) => {
                self.flows[at as usize] = flow;
                at
            }
            None => {
                self.flows.push(flow);
                (self.flows.len() - 1) as u32
            }
        };
        let FlowLog { index, flows, hasher, .. } = self;
        index.insert_unique(hash, at, |&at| hasher.hash_one(flows[at as usize].name));
        true
    }

    /// Scans the next of `parts` parts of the table, and adds the records of conversations that have ended or are due
    /// for an interim record.
    pub(crate) fn take(&mut self, parts: usize, now_ns: u64, out: &mut Vec<FlowRecord>) {
        out.append(&mut self.pending);
        let end = self.flows.len().min(self.cursor + self.flows.len().div_ceil(parts.max(1)));
        for at in self.cursor..end {
            let Some(end) = self.end_of(&self.flows[at], now_ns) else { continue };
            let flow = &mut self.flows[at];
            if !flow.traffic_is_empty() {
                self.counters.created_records += 1;
                out.push(flow.record(&self.spec.name, end));
            }
            if end == FlowEnd::Active {
                flow.traffic = Default::default();
                // Each handshake is reported once.
                flow.handshake = Handshake::Unknown;
                flow.start_ns = now_ns;
            } else {
                self.forget(at as u32);
            }
        }
        self.cursor = if end == self.flows.len() { 0 } else { end };
    }

    fn end_of(&self, flow: &Flow, now_ns: u64) -> Option<FlowEnd> {
        if flow.is_free {
            return None;
        }
        let silent_ns = now_ns.saturating_sub(flow.end_ns);
        if !self.ports.get(flow.name.key.port().place()).is_some_and(|(is_logged, _)| *is_logged) {
            Some(FlowEnd::Forced)
        } else if flow.is_closed() && silent_ns >= LINGER_NS {
            Some(FlowEnd::Closed)
        } else if silent_ns >= self.spec.idle_ns {
            Some(FlowEnd::Idle)
        } else if now_ns.saturating_sub(flow.start_ns) >= self.spec.active_ns && !flow.traffic_is_empty() {
            Some(FlowEnd::Active)
        } else {
            None
        }
    }

    fn forget(&mut self, at: u32) {
        let flow = &mut self.flows[at as usize];
        flow.is_free = true;
        let name = flow.name;
        if let Ok(entry) = self.index.find_entry(self.hasher.hash_one(name), |&other| other == at) {
            entry.remove();
        }
        self.ports[name.key.port().place()].1 -= 1;
        self.counters.current_flows -= 1;
        self.free.push(at);
    }
}
