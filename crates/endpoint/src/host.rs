//! The engine and a provider, joined: completions go to the engine, its work requests to the provider.

use std::collections::VecDeque;
use std::net::IpAddr;

use bifrost_rdm::{
    Arrival, BufferId, Chunking, Class, CloseReason, Config, Congestion, ConnectionConfig, ConnectionId, Counters,
    Engine, Event, MessageId, OpenError, Output, SendError, Work,
};
use bifrost_verbs::{
    Access, Completion, CompletionKind, Connect, CqId, INLINE_MAX, Operation, PostError, Provider, QpInit, Qpn,
    SendRequest, Sequence, Slice, Status, Transport, VerbsError,
};
use bifrost_wire::rdm::{LANES, LaneAddress, SendHeader, Service, Setup, SetupKind, Tag, UNIT};

use crate::buffers::{Buffers, Store, domain};
use crate::control::{ControlPeer, ControlQueue};
use crate::slots::Slots;

/// Settings of a host.
#[derive(Clone, Copy, Debug)]
pub struct HostConfig {
    /// Connections, at most.
    pub connections: u32,
    /// Bytes of long messages on their way to this host at once ([`Config::inbound`]).
    pub inbound: u64,
    /// Of everything that is to be random.
    pub seed: u64,
}

impl HostConfig {
    /// With the engine's default for what may be on its way.
    #[must_use]
    pub const fn new(connections: u32, seed: u64) -> Self {
        Self { connections, inbound: Config::new(connections, seed).inbound, seed }
    }
}

/// What a connection is to have.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Who repeats.
    pub service: Service,
    /// Payload of a packet, bytes.
    pub mtu: u16,
    /// Work requests that may be on their way on a lane.
    pub credits: u16,
    /// Messages that are taken ahead of the application.
    pub window: u16,
    /// The longest message that is taken, bytes.
    pub longest: u32,
    /// RC: repetitions by the NIC (paper §3.4.2: two).
    pub retries: u8,
    /// RC: time until a repetition, ns.
    pub timeout_ns: u64,
}

impl Limits {
    /// What the project's own programs use.
    #[must_use]
    pub const fn new(service: Service, mtu: u16) -> Self {
        let config = ConnectionConfig::new(service, mtu);
        Self {
            service,
            mtu,
            credits: config.credits,
            window: config.window,
            longest: config.longest,
            retries: 2,
            timeout_ns: 4_000_000,
        }
    }
}

/// Why a host cannot do what it is asked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// The NIC says no.
    #[error("NIC: {0}")]
    Verbs(#[from] VerbsError),
    /// The NIC does not take a request.
    #[error("NIC: {0}")]
    Post(#[from] PostError),
    /// The engine has no place.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// No such connection.
    #[error("no such connection")]
    Unknown,
    /// The two ends want different things.
    #[error("the peer's {0} differs from this end's")]
    Mismatch(&'static str),
}

/// What the application should know.
#[derive(Debug)]
pub enum HostEvent {
    /// A message has come in.
    Message {
        /// On which connection.
        connection: ConnectionId,
        /// What it is.
        class: Class,
        /// The number of the call.
        call: u32,
        /// Its bytes.
        data: Vec<u8>,
    },
    /// A message has arrived at the peer.
    Sent {
        /// On which connection.
        connection: ConnectionId,
        /// Which.
        message: MessageId,
    },
    /// A connection has ended.
    Closed {
        /// Which.
        connection: ConnectionId,
        /// Why.
        reason: CloseReason,
        /// The peer did it.
        by_peer: bool,
    },
}

/// A connection, as the provider knows it.
#[derive(Debug)]
struct Bound {
    id: ConnectionId,
    limits: Limits,
    tag: Tag,
    lanes: [Lane; LANES],
    peer: Option<Remote>,
    #[cfg(test)]
    peer_tag: Option<Tag>,
}

#[derive(Clone, Copy, Debug)]
struct Lane {
    queue_pair: Qpn,
    slots: Slots,
    sequence: u32,
}

/// The other end of a connection.
#[derive(Clone, Copy, Debug)]
struct Remote {
    address: IpAddr,
    port: u16,
    lanes: [Qpn; LANES],
    control: ControlPeer,
}

/// Receive requests beyond the credits: for what was taken to be lost, and comes late.
const SPARE_SLOTS: u16 = 32;
/// Send requests beyond the credits: completions that are not polled yet.
const SPARE_SENDS: u16 = 128;
/// Length of a slot: a header and a unit.
const SLOT: u32 = SendHeader::LEN as u32 + UNIT;
/// Completions that are taken at once.
const BATCH: usize = 256;

/// The engine and a provider.
#[derive(Debug)]
pub struct Host<P> {
    provider: P,
    engine: Engine,
    out: Output,
    queue: CqId,
    control: ControlQueue,
    completions: Vec<Completion>,
    bound: Vec<Option<Box<Bound>>>,
    buffers: Buffers,
    events: VecDeque<HostEvent>,
    random: fastrand::Rng,
    /// When it had its last turn, ns.
    now_ns: u64,
}

impl<P: Provider> Host<P> {
    /// A host without connections.
    ///
    /// # Errors
    /// When the provider has no room for the control queue pair.
    pub fn new(mut provider: P, config: HostConfig) -> Result<Self, HostError> {
        let mut random = fastrand::Rng::with_seed(config.seed);
        let queue = provider.create_queue()?;
        let control = ControlQueue::new(&mut provider, random.u32(..))?;
        let engine = Engine::new(Config { inbound: config.inbound, ..Config::new(config.connections, random.u64(..)) });
        Ok(Self {
            provider,
            engine,
            out: Output::new(),
            queue,
            control,
            completions: Vec::new(),
            bound: Vec::new(),
            buffers: Buffers::default(),
            events: VecDeque::new(),
            random,
            now_ns: 0,
        })
    }

    /// The provider.
    pub fn provider(&self) -> &P {
        &self.provider
    }

    /// The provider, to be changed.
    pub fn provider_mut(&mut self) -> &mut P {
        &mut self.provider
    }

    /// What the engine has counted.
    pub fn counters(&self) -> &Counters {
        self.engine.counters()
    }

    /// Smoothed and smallest round trip, ns; window, bytes; share of packets lost; lane in use.
    pub fn measured(&self, connection: ConnectionId) -> Option<(u64, u64, u32, f32, u8)> {
        self.engine.measured(connection)
    }

    /// Messages that are sent and not reported.
    pub fn open_messages(&self, connection: ConnectionId) -> usize {
        self.engine.open_messages(connection)
    }

    /// Work requests that are neither acknowledged nor taken to be lost.
    pub fn open_requests(&self, connection: ConnectionId) -> u32 {
        self.engine.open_requests(connection)
    }

    /// Buffers of messages that are under way, in either direction, on all connections.
    pub fn registered_buffers(&self) -> usize {
        self.buffers.registered()
    }

    /// Memory of a connection's state in the engine, bytes.
    pub fn connection_bytes(&self, connection: ConnectionId) -> usize {
        self.engine.connection_bytes(connection)
    }

    /// Reserves a connection, and says what the peer must know of it.
    ///
    /// # Errors
    /// When there is no room.
    pub fn prepare(&mut self, kind: SetupKind, limits: Limits) -> Result<(ConnectionId, Setup), HostError> {
        let (id, tag) = self.engine.reserve()?;
        let lanes = match self.make_lanes(id, &limits) {
            Ok(lanes) => lanes,
            Err(error) => {
                self.engine.close(id, CloseReason::Done, &mut self.out, |_| {});
                return Err(error);
            }
        };
        if self.bound.len() <= id.index() {
            self.bound.resize_with(id.index() + 1, || None);
        }
        self.bound[id.index()] = Some(Box::new(Bound {
            id,
            limits,
            tag,
            lanes,
            peer: None,
            #[cfg(test)]
            peer_tag: None,
        }));
        Ok((id, self.describe(kind, id).ok_or(HostError::Unknown)?))
    }

    /// What the peer must know of a connection.
    fn describe(&self, kind: SetupKind, id: ConnectionId) -> Option<Setup> {
        let bound = self.bound(id)?;
        let address = match self.provider.address() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        let lane = |lane: &Lane| LaneAddress { queue_pair: lane.queue_pair.get(), sequence: lane.sequence };
        Some(Setup {
            kind,
            service: bound.limits.service,
            address,
            port: self.provider.port(),
            mtu: bound.limits.mtu,
            control: self.control.queue_pair.get(),
            queue_key: self.control.queue_key,
            tag: bound.tag,
            credits: bound.limits.credits,
            window: bound.limits.window,
            longest: bound.limits.longest,
            lanes: [lane(&bound.lanes[0]), lane(&bound.lanes[1]), lane(&bound.lanes[2])],
        })
    }

    fn make_lanes(&mut self, id: ConnectionId, limits: &Limits) -> Result<[Lane; LANES], HostError> {
        let mut made = Vec::with_capacity(LANES);
        for _ in 0..LANES {
            match self.make_lane(id, limits) {
                Ok(lane) => made.push(lane),
                Err(error) => {
                    for lane in made {
                        self.drop_lane(&lane);
                    }
                    return Err(error);
                }
            }
        }
        Ok([made[0], made[1], made[2]])
    }

    fn make_lane(&mut self, id: ConnectionId, limits: &Limits) -> Result<Lane, HostError> {
        let count = limits.credits.saturating_add(SPARE_SLOTS);
        let transport = if limits.service == Service::Rc { Transport::Rc } else { Transport::Uc };
        let init = QpInit {
            transport,
            send_queue: self.queue,
            receive_queue: self.queue,
            send_depth: limits.credits.saturating_add(SPARE_SENDS),
            receive_depth: count,
            domain: domain(id),
            queue_key: 0,
            urgent: false,
        };
        let queue_pair = self.provider.create_queue_pair(init)?;
        match Slots::new(&mut self.provider, domain(id), SLOT, u32::from(count)) {
            Ok(slots) => Ok(Lane { queue_pair, slots, sequence: self.random.u32(..1 << 24) }),
            Err(error) => {
                let _ = self.provider.destroy(queue_pair);
                Err(error.into())
            }
        }
    }

    fn drop_lane(&mut self, lane: &Lane) {
        let _ = self.provider.destroy(lane.queue_pair);
        lane.slots.release(&mut self.provider);
    }

    /// Completes a connection with what the peer has said of it.
    ///
    /// # Errors
    /// When the ends want different things, or the provider says no. The connection is to be closed then.
    pub fn complete(
        &mut self,
        now_ns: u64,
        id: ConnectionId,
        peer: &Setup,
        mut config: ConnectionConfig,
        chunking: Box<dyn Chunking>,
        congestion: Box<dyn Congestion>,
    ) -> Result<(), HostError> {
        let bound = self.bound(id).ok_or(HostError::Unknown)?;
        let limits = bound.limits;
        if peer.service != limits.service {
            return Err(HostError::Mismatch("transport service"));
        }
        if peer.mtu != limits.mtu {
            return Err(HostError::Mismatch("path MTU"));
        }
        let address = match (self.provider.address(), peer.address.to_ipv4_mapped()) {
            (IpAddr::V4(_), Some(v4)) => IpAddr::V4(v4),
            (IpAddr::V6(_), None) => IpAddr::V6(peer.address),
            _ => return Err(HostError::Mismatch("address family")),
        };
        config.service = limits.service;
        config.mtu = limits.mtu;
        config.window = limits.window;
        config.longest = limits.longest;
        config.credits = peer.credits.min(limits.credits);
        config.peer_window = peer.window;
        config.peer_longest = peer.longest;
        let control = ControlPeer {
            address,
            port: peer.port,
            source_port: 0xc000 | self.random.u16(..0x4000),
            queue_pair: Qpn::new(peer.control),
            queue_key: peer.queue_key,
        };
        let lanes = peer.lanes.map(|lane| Qpn::new(lane.queue_pair));
        let remote = Remote { address, port: peer.port, lanes, control };
        if let Some(bound) = self.bound_mut(id) {
            bound.peer = Some(remote);
            #[cfg(test)]
            {
                bound.peer_tag = Some(peer.tag);
            }
        }
        for lane in 0..LANES as u8 {
            let send_sequence = self.bound(id).map_or(0, |bound| bound.lanes[usize::from(lane)].sequence);
            let source_port = 0xc000 | self.random.u16(..0x4000);
            self.connect_lane(id, lane, send_sequence, peer.lanes[usize::from(lane)].sequence, source_port)?;
        }
        self.engine.open(now_ns, id, (address, peer.control), peer.tag, config, chunking, congestion)?;
        Ok(())
    }

    fn connect_lane(
        &mut self,
        id: ConnectionId,
        lane: u8,
        send_sequence: u32,
        receive_sequence: u32,
        source_port: u16,
    ) -> Result<(), HostError> {
        let bound = self.bound(id).ok_or(HostError::Unknown)?;
        let (limits, local) = (bound.limits, bound.lanes[usize::from(lane)]);
        let peer = bound.peer.ok_or(HostError::Unknown)?;
        let connect = Connect {
            address: peer.address,
            port: peer.port,
            queue_pair: peer.lanes[usize::from(lane)],
            source_port,
            send_sequence: Sequence::new(send_sequence),
            receive_sequence: Sequence::new(receive_sequence),
            mtu: limits.mtu,
            retries: limits.retries,
            timeout_ns: limits.timeout_ns,
        };
        self.provider.connect(local.queue_pair, connect)?;
        local.slots.post_all(&mut self.provider, local.queue_pair, lane_token(id, lane))?;
        Ok(())
    }

    /// Memory for a message to be sent: of messages that came in before, if there is some.
    pub fn vector(&mut self, connection: ConnectionId, len: usize) -> Vec<u8> {
        self.buffers.vector(connection, len)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// A [`SendError`], and the message comes back.
    pub fn send(
        &mut self,
        now_ns: u64,
        connection: ConnectionId,
        class: Class,
        call: u32,
        data: Vec<u8>,
    ) -> Result<MessageId, (SendError, Vec<u8>)> {
        let Ok(len) = u32::try_from(data.len()) else { return Err((SendError::TooLong, data)) };
        if self.bound(connection).is_none() {
            return Err((SendError::Closed, data));
        }
        let domain = domain(connection);
        let registered = self.buffers.register(&mut self.provider, connection, domain, Access::Local, data);
        let (buffer, _) = registered.map_err(|data| (SendError::Full, data))?;
        self.engine
            .send(now_ns, connection, buffer, len, class, call)
            .map_err(|error| (error, self.buffers.deregister(&mut self.provider, buffer).unwrap_or_default()))
    }

    /// The application has done with a message that came in: there is room for another.
    pub fn consumed(&mut self, now_ns: u64, connection: ConnectionId, data: Vec<u8>) {
        self.consumed_bytes(now_ns, connection, data.len() as u32, data);
    }

    /// The same for a message of `len` bytes whose memory the application may have kept: `data` serves for others.
    pub fn consumed_bytes(&mut self, now_ns: u64, connection: ConnectionId, len: u32, data: Vec<u8>) {
        let mut store = Store { provider: &mut self.provider, buffers: &mut self.buffers };
        self.engine.consumed(now_ns, connection, len, &mut store, &mut self.out);
        if self.bound(connection).is_some() {
            self.buffers.recycle(connection, data);
        }
    }

    /// Ends a connection.
    pub fn close(&mut self, connection: ConnectionId, reason: CloseReason) {
        self.engine.close(connection, reason, &mut self.out, |_| {});
        // Before its queue pairs are gone: the peer is to be told.
        self.perform_work();
        let Some(bound) = self.bound.get_mut(connection.index()) else { return };
        let Some(bound) = bound.take_if(|bound| bound.id == connection) else { return };
        for lane in &bound.lanes {
            self.drop_lane(lane);
        }
        let left: Vec<BufferId> = self.buffers.of(connection).collect();
        for buffer in left {
            drop(self.buffers.deregister(&mut self.provider, buffer));
        }
        self.buffers.forget(connection);
    }

    /// Takes the next event.
    pub fn next_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }

    /// One turn: completions, timers, work requests. Whether there was something to do.
    pub fn turn(&mut self, now_ns: u64) -> bool {
        self.now_ns = now_ns;
        if self.engine.clock_mut().wants_check(now_ns) {
            let nic_ns = self.provider.clock_ns(now_ns);
            self.engine.clock_mut().check(now_ns, nic_ns);
        }
        let control = self.control.poll(now_ns, &mut self.provider, &mut self.engine, &mut self.out);
        let data = self.poll_data(now_ns);
        self.turn_engine(now_ns);
        let work = !self.out.work.is_empty() || !self.out.events.is_empty();
        self.perform(now_ns);
        control || data || work
    }

    /// When [`Host::turn`] is due, ns.
    pub fn next_deadline(&self) -> u64 {
        self.engine.next_deadline()
    }

    fn poll_data(&mut self, now_ns: u64) -> bool {
        let mut completions = std::mem::take(&mut self.completions);
        self.provider.poll(self.queue, BATCH, &mut completions);
        for completion in &completions {
            self.on_completion(now_ns, completion);
        }
        let any = !completions.is_empty();
        completions.clear();
        self.completions = completions;
        any
    }

    /// A reset forgets completions that were not polled. RC has acknowledged what they tell of, so the peer does not send it again.
    /// Errors of the queue pair itself are known, and left out.
    fn take_before_reset(&mut self, queue_pair: Qpn) {
        let mut completions = Vec::new();
        while self.provider.poll(self.queue, BATCH, &mut completions) > 0 {
            for completion in completions.drain(..) {
                if completion.queue_pair != queue_pair || completion.status == Status::Success {
                    self.on_completion(self.now_ns, &completion);
                }
            }
        }
    }

    fn on_completion(&mut self, now_ns: u64, completion: &Completion) {
        let success = completion.status == Status::Success;
        if completion.kind == CompletionKind::Send {
            self.engine.on_sent(now_ns, completion.token, success, completion.time_ns, &mut self.out);
            return;
        }
        let id = Engine::connection_of(completion.token);
        let (lane, slot) = (completion.token >> 16 & 0xff, completion.token as u32 & 0xffff);
        let Some(local) = self.bound(id).and_then(|bound| bound.lanes.get(lane as usize).copied()) else { return };
        if !success {
            self.engine.on_lane_error(now_ns, id, lane as u8, &mut self.out);
            return;
        }
        let slice = local.slots.slice(slot);
        let mut head = [0; SendHeader::LEN];
        let arrival = match (completion.kind, completion.immediate) {
            (CompletionKind::Receive, _) => {
                let len = completion.len.min(head.len() as u32);
                if let Some(bytes) = self.provider.bytes(Slice { len, ..slice }) {
                    head[..bytes.len()].copy_from_slice(bytes);
                }
                Arrival::Send { head: &head[..len as usize], len: completion.len }
            }
            (_, immediate) => Arrival::Write { immediate: immediate.unwrap_or_default(), len: completion.len },
        };
        let mut store = Store { provider: &mut self.provider, buffers: &mut self.buffers };
        let place = self.engine.on_arrival(now_ns, id, arrival, completion.time_ns, &mut store, &mut self.out);
        if let Some(place) = place
            && let Some(to) = self.buffers.slice(place.buffer, place.offset, place.len)
        {
            let offset = slice.offset + SendHeader::LEN as u32;
            self.provider.copy(Slice { offset, len: place.len, ..slice }, to);
        }
        // Events of a message are looked at when all of it is in its place.
        self.collect();
        let _ = local.slots.post(&mut self.provider, local.queue_pair, lane_token(id, lane as u8), slot);
    }

    fn perform(&mut self, now_ns: u64) {
        self.perform_work();
        self.collect();
        // A lane that did not take a request is in error.
        if !self.out.work.is_empty() {
            self.turn_engine(now_ns);
        }
    }

    fn turn_engine(&mut self, now_ns: u64) {
        let mut store = Store { provider: &mut self.provider, buffers: &mut self.buffers };
        self.engine.turn(now_ns, &mut store, &mut self.out);
    }

    fn perform_work(&mut self) {
        let mut work = std::mem::take(&mut self.out.work);
        for work in &work {
            self.perform_one(work);
        }
        work.clear();
        // What came in meanwhile follows.
        work.append(&mut self.out.work);
        self.out.work = work;
    }

    fn perform_one(&mut self, work: &Work) {
        match *work {
            Work::Send { connection, lane, token, header, buffer, offset, len } => {
                let mut inline = [0; INLINE_MAX];
                inline[..header.len()].copy_from_slice(&header);
                let slice = self.buffers.slice(buffer, offset, len);
                let (operation, inline_len) = (Operation::Send, header.len() as u8);
                let request = SendRequest { token, operation, immediate: None, inline, inline_len, slice };
                self.post(connection, lane, request);
            }
            Work::Write { connection, lane, token, buffer, offset, len, address, key, immediate } => {
                let slice = self.buffers.slice(buffer, offset, len);
                let operation = Operation::Write { address, key };
                let (inline, inline_len) = ([0; INLINE_MAX], 0);
                let request = SendRequest { token, operation, immediate: Some(immediate), inline, inline_len, slice };
                self.post(connection, lane, request);
            }
            Work::Control { connection, ref control } => {
                let peer = self.bound(connection).and_then(|bound| bound.peer);
                if let Some(peer) = peer {
                    self.control.send(&mut self.provider, &peer.control, control);
                }
            }
            Work::Repath { connection } => {
                let source_port = 0xc000 | self.random.u16(..0x4000);
                if let Some(peer) = self.bound_mut(connection).and_then(|bound| bound.peer.as_mut()) {
                    peer.control.source_port = source_port;
                }
            }
            Work::Reset { connection, lane } => {
                if let Some(local) = self.bound(connection).map(|bound| bound.lanes[usize::from(lane)]) {
                    self.take_before_reset(local.queue_pair);
                    let _ = self.provider.reset(local.queue_pair);
                }
            }
            Work::Connect { connection, lane, send_sequence, receive_sequence, source_port } => {
                // The values are sound, and the queue pair was reset: it does not fail but for a bug, and then the lane
                // is silent, and another is used.
                let _ = self.connect_lane(connection, lane, send_sequence, receive_sequence, source_port);
            }
        }
    }

    fn post(&mut self, connection: ConnectionId, lane: u8, request: SendRequest) {
        let Some(local) = self.bound(connection).map(|bound| bound.lanes[usize::from(lane)]) else { return };
        if self.provider.post_send(local.queue_pair, request).is_err() {
            // Not posted, so not sent: the engine resets the lane and repeats what was on it.
            self.engine.on_sent(0, request.token, false, 0, &mut self.out);
        }
    }

    /// Takes the engine's events over: buffers come back from the NIC.
    fn collect(&mut self) {
        for event in self.out.events.drain(..) {
            match event {
                Event::Delivered { connection, buffer, class, call, .. } => {
                    let Some(data) = self.buffers.deregister(&mut self.provider, buffer) else { continue };
                    self.events.push_back(HostEvent::Message { connection, class, call, data });
                }
                Event::Sent { connection, message, buffer } => {
                    if let Some(data) = self.buffers.deregister(&mut self.provider, buffer) {
                        self.buffers.recycle(connection, data);
                    }
                    self.events.push_back(HostEvent::Sent { connection, message });
                }
                Event::Closed { connection, reason, by_peer } => {
                    self.events.push_back(HostEvent::Closed { connection, reason, by_peer });
                }
            }
        }
    }

    #[cfg(test)]
    pub(crate) fn lane_of(&self, id: ConnectionId, lane: usize) -> Qpn {
        self.bound(id).map(|bound| bound.lanes[lane].queue_pair).unwrap_or_default()
    }

    /// Sends a control datagram past the engine, with the peer's tag.
    #[cfg(test)]
    pub(crate) fn lie(&mut self, id: ConnectionId, control: &bifrost_wire::rdm::Control) {
        use bifrost_wire::rdm::Control;
        let Some((peer, tag)) = self.bound(id).and_then(|bound| Some((bound.peer?, bound.peer_tag?))) else { return };
        let mut control = *control;
        match &mut control {
            Control::Ack(ack) => ack.tag = tag,
            Control::Grant(grant) => grant.tag = tag,
            Control::Probe(probe) => *probe = tag,
            Control::Close(close) => close.tag = tag,
            Control::Lane(lane) => lane.tag = tag,
        }
        self.control.send(&mut self.provider, &peer.control, &control);
    }

    fn bound(&self, id: ConnectionId) -> Option<&Bound> {
        self.bound.get(id.index())?.as_deref().filter(|bound| bound.id == id)
    }

    fn bound_mut(&mut self, id: ConnectionId) -> Option<&mut Bound> {
        self.bound.get_mut(id.index())?.as_deref_mut().filter(|bound| bound.id == id)
    }
}

/// Token of a lane's receive requests, but for the slot.
fn lane_token(id: ConnectionId, lane: u8) -> u64 {
    id.token() | u64::from(lane) << 16
}
