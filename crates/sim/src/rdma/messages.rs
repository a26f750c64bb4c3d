//! A host whose application sends messages with the engine.

use std::collections::HashMap;

use anyhow::{Result, anyhow};
use bifrost_endpoint::{
    Adaptive, Chunking, Class, Congestion, ConnectionConfig, ConnectionId, Counters, Host, HostConfig, HostEvent,
    Limits, MessageId, Order, Service, Swift, SwiftConfig,
};
use bifrost_rnic::Nic;
use bifrost_wire::rdm::SetupKind;

use super::Node;
use crate::Rng;

/// Traffic of the application on each connection that it opened.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Length of a message, bytes, at least 8.
    pub len: usize,
    /// Number of open messages.
    pub depth: u32,
    /// When the first one is sent, ns; the second connection starts `stagger_ns` later, and so on.
    pub begin_ns: u64,
    /// Delay between the starts of connections, ns.
    pub stagger_ns: u64,
}

/// Settings of connections.
#[derive(Clone, Copy, Debug)]
pub struct MessageOptions {
    /// The transport service.
    pub service: Service,
    /// Payload of a packet, bytes.
    pub mtu: u16,
    /// Work requests in flight on a lane.
    pub credits: u16,
    /// Number of work requests per ACK, 1..=16.
    pub ack_requests: u8,
    /// The congestion controller.
    pub swift: SwiftConfig,
    /// The length of chunks.
    pub chunking: Adaptive,
}

impl Default for MessageOptions {
    fn default() -> Self {
        let ConnectionConfig { credits, ack_requests, .. } = ConnectionConfig::new(Service::Uc, 1024);
        let (swift, chunking) = (SwiftConfig::new(50_000), Adaptive::default());
        MessageOptions { service: Service::Uc, mtu: 1024, credits, ack_requests, swift, chunking }
    }
}

/// A connection that this host opened.
#[derive(Debug)]
struct Sending {
    id: ConnectionId,
    /// Open messages, and when each was sent.
    open: Vec<(MessageId, u64)>,
    next: u64,
    begin_ns: u64,
}

/// What arrived on a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Received {
    /// Number of messages.
    pub messages: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// A host that sends and receives messages. The application checks the sequence of messages.
#[derive(Debug)]
pub struct MessageNode {
    host: Host<Nic>,
    load: Option<Load>,
    /// Whether the load's depth applies to the host, whose messages go to random connections.
    shares_depth: bool,
    random: Rng,
    sending: Vec<Sending>,
    /// Connections that others opened to this host.
    receiving: Vec<ConnectionId>,
    received: HashMap<ConnectionId, Received>,
    /// Messages out of sequence.
    wrong: u64,
    closed: u64,
    /// Bytes of messages that are known to have arrived.
    sent_bytes: u64,
    /// From sending a message until the sender knows that it has arrived, ns.
    latencies_ns: Vec<u64>,
    /// Arrival times of messages, ns, if recorded.
    arrivals_ns: Option<Vec<u64>>,
}

impl MessageNode {
    /// A host without connections. It can have up to `connections` of them, and up to `inbound` bytes in flight to it.
    ///
    /// # Errors
    /// If the NIC is too small.
    pub fn new(nic: Nic, connections: u32, inbound: u64, seed: u64) -> Result<Self> {
        let host = Host::new(nic, HostConfig { connections, inbound, seed })?;
        Ok(MessageNode {
            host,
            load: None,
            shares_depth: false,
            random: Rng::new(seed),
            sending: Vec::new(),
            receiving: Vec::new(),
            received: HashMap::new(),
            wrong: 0,
            closed: 0,
            sent_bytes: 0,
            latencies_ns: Vec::new(),
            arrivals_ns: None,
        })
    }

    /// The application starts sending.
    pub fn send(&mut self, load: Load) {
        for (index, sending) in self.sending.iter_mut().enumerate() {
            sending.begin_ns = load.begin_ns + index as u64 * load.stagger_ns;
        }
        self.load = Some(load);
    }

    /// The application starts sending, each message on a random connection. The load's depth applies to all connections
    /// together.
    pub fn send_to_any(&mut self, load: Load) {
        self.shares_depth = true;
        self.send(load);
    }

    /// The application stops sending.
    pub fn stop(&mut self) {
        self.load = None;
    }

    /// From now on, the first connection that this host opened uses `service`. Returns the number of messages sent on
    /// it so far.
    pub fn switch(&mut self, now_ns: u64, service: Service) -> u64 {
        let Some(sending) = self.sending.first() else { return 0 };
        self.host.switch(now_ns, sending.id, service);
        sending.next
    }

    /// Number of messages that the application sent on the first connection.
    pub fn given(&self) -> u64 {
        self.sending.first().map_or(0, |sending| sending.next)
    }

    /// From now on, arrival times of messages are recorded.
    pub fn keep_arrivals(&mut self) {
        self.arrivals_ns = Some(Vec::new());
    }

    /// Arrival times of messages, ns, in order.
    pub fn arrivals_ns(&self) -> &[u64] {
        self.arrivals_ns.as_deref().unwrap_or_default()
    }

    /// Traffic that arrived, by connection, in the order in which they were opened.
    pub fn received(&self) -> Vec<Received> {
        self.receiving.iter().map(|id| self.received.get(id).copied().unwrap_or_default()).collect()
    }

    /// Bytes that arrived.
    pub fn received_bytes(&self) -> u64 {
        self.received.values().map(|received| received.bytes).sum()
    }

    /// Bytes of messages that this host has sent and knows to have arrived.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Messages out of sequence, and connections that ended.
    pub fn mistakes(&self) -> (u64, u64) {
        (self.wrong, self.closed)
    }

    /// Returns the latencies of messages that have arrived since the last call, ns.
    pub fn take_latencies_ns(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.latencies_ns)
    }

    /// The engine's counters.
    pub fn counters(&self) -> &Counters {
        self.host.counters()
    }

    fn fill(&mut self, now_ns: u64) -> bool {
        let Some(load) = self.load else { return false };
        if self.shares_depth {
            return self.fill_any(now_ns, &load);
        }
        let mut any = false;
        for sending in &mut self.sending {
            while now_ns >= sending.begin_ns && sending.open.len() < load.depth as usize {
                let mut data = self.host.vector(sending.id, load.len);
                data[..8].copy_from_slice(&sending.next.to_be_bytes());
                let Ok(message) = self.host.send(now_ns, sending.id, Class::Message, 0, data) else { break };
                sending.next += 1;
                sending.open.push((message, now_ns));
                any = true;
            }
        }
        any
    }

    fn fill_any(&mut self, now_ns: u64, load: &Load) -> bool {
        let mut open: usize = self.sending.iter().map(|sending| sending.open.len()).sum();
        let mut any = false;
        while open < load.depth as usize && !self.sending.is_empty() {
            let at = self.random.below(self.sending.len() as u64) as usize;
            let sending = &mut self.sending[at];
            let mut data = self.host.vector(sending.id, load.len);
            data[..8].copy_from_slice(&sending.next.to_be_bytes());
            let Ok(message) = self.host.send(now_ns, sending.id, Class::Message, 0, data) else { break };
            sending.next += 1;
            sending.open.push((message, now_ns));
            (any, open) = (true, open + 1);
        }
        any
    }

    fn on_event(&mut self, now_ns: u64, event: HostEvent) {
        match event {
            HostEvent::Message { connection, data, .. } => {
                let received = self.received.entry(connection).or_default();
                let number = data.first_chunk().map(|bytes| u64::from_be_bytes(*bytes));
                self.wrong += u64::from(number != Some(received.messages));
                received.messages += 1;
                received.bytes += data.len() as u64;
                self.arrivals_ns.iter_mut().for_each(|arrivals| arrivals.push(now_ns));
                self.host.consumed(now_ns, connection, data);
            }
            HostEvent::Sent { connection, message } => {
                let Some(sending) = self.sending.iter_mut().find(|sending| sending.id == connection) else { return };
                if let Some(at) = sending.open.iter().position(|(open, _)| *open == message) {
                    let (_, since) = sending.open.swap_remove(at);
                    self.sent_bytes += self.load.map_or(0, |load| load.len as u64);
                    self.latencies_ns.push(now_ns - since);
                }
            }
            HostEvent::Closed { .. } => self.closed += 1,
        }
    }
}

impl Node for MessageNode {
    fn nic(&mut self) -> &mut Nic {
        self.host.provider_mut()
    }

    fn turn(&mut self, now_ns: u64) -> bool {
        let busy = self.host.turn(now_ns);
        let mut any = false;
        while let Some(event) = self.host.next_event() {
            self.on_event(now_ns, event);
            any = true;
        }
        self.fill(now_ns) || busy || any
    }

    fn next_deadline(&mut self, now_ns: u64) -> u64 {
        let begins = self.sending.iter().map(|sending| sending.begin_ns).filter(|begin| *begin > now_ns).min();
        let begins = if self.load.is_some() { begins } else { None };
        self.host.next_deadline().min(begins.unwrap_or(u64::MAX))
    }
}

/// Opens a connection, on which `from` sends and `to` receives.
///
/// # Errors
/// If one of them has no room for it.
pub fn connect(from: &mut MessageNode, to: &mut MessageNode, options: &MessageOptions) -> Result<()> {
    let mut limits = Limits::new(options.service, options.mtu);
    limits.credits = options.credits;
    let (a, hello) = from.host.prepare(SetupKind::Hello, limits)?;
    let (b, welcome) = to.host.prepare(SetupKind::Welcome, limits)?;
    for (host, id, peer, initiator) in [(&mut from.host, a, &welcome, true), (&mut to.host, b, &hello, false)] {
        let mut config = ConnectionConfig::new(options.service, options.mtu);
        config.order = Order::Sent;
        config.ack_requests = options.ack_requests;
        config.initiator = initiator;
        let chunking: Box<dyn Chunking> = Box::new(options.chunking);
        let congestion: Box<dyn Congestion> = Box::new(Swift::new(options.swift));
        host.complete(0, id, peer, config, chunking, congestion).map_err(|error| anyhow!("setup: {error}"))?;
    }
    from.sending.push(Sending { id: a, open: Vec::new(), next: 0, begin_ns: 0 });
    to.receiving.push(b);
    Ok(())
}
