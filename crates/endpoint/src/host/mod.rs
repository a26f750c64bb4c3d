//! Joins the engine and a provider: completions go to the engine, its work requests to the provider.

mod completions;
mod lanes;
mod memory;
mod settings;
mod work;

use std::collections::VecDeque;

use bifrost_rdm::{BufferId, Class, CloseReason, Config, ConnectionId, Counters, Engine, MessageId, Output, SendError};
use bifrost_verbs::{Access, Completion, CqId, Provider};
use bifrost_wire::rdm::Service;

use self::lanes::Bound;
pub use self::memory::MAX_ACCESS;
pub use self::settings::{HostConfig, HostError, HostEvent, Limits};
use crate::buffers::{Buffers, Store, domain};
use crate::control::ControlQueue;
use crate::served::Served;

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
    served: Served,
    events: VecDeque<HostEvent>,
    random: fastrand::Rng,
    /// Time of the last turn, ns.
    now_ns: u64,
}

impl<P: Provider> Host<P> {
    /// Creates a host without connections.
    ///
    /// # Errors
    /// When the provider cannot create the control queue pair.
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
            served: Served::default(),
            events: VecDeque::new(),
            random,
            now_ns: 0,
        })
    }

    /// The provider.
    pub fn provider(&self) -> &P {
        &self.provider
    }

    /// The provider, mutable.
    pub fn provider_mut(&mut self) -> &mut P {
        &mut self.provider
    }

    /// The engine's counters.
    pub fn counters(&self) -> &Counters {
        self.engine.counters()
    }

    /// Smoothed and smallest round trip, ns; window, bytes; share of packets lost; lane in use.
    pub fn measured(&self, connection: ConnectionId) -> Option<(u64, u64, u32, f32, u8)> {
        self.engine.measured(connection)
    }

    /// Messages sent and not reported, excluding answers to the peer's memory accesses.
    pub fn open_messages(&self, connection: ConnectionId) -> usize {
        self.engine.open_messages(connection).saturating_sub(self.served.open(connection))
    }

    /// Whether the maximum number of messages is open.
    pub fn is_full(&self, connection: ConnectionId) -> bool {
        self.engine.is_full(connection)
    }

    /// Work requests that are neither acknowledged nor considered lost.
    pub fn open_requests(&self, connection: ConnectionId) -> u32 {
        self.engine.open_requests(connection)
    }

    /// Buffers of messages in flight, in both directions, on all connections.
    pub fn registered_buffers(&self) -> usize {
        self.buffers.registered()
    }

    /// Memory of a connection's state, bytes.
    pub fn connection_bytes(&self, connection: ConnectionId) -> usize {
        self.engine.connection_bytes(connection)
    }

    /// Returns memory for a message, reused from received messages if possible.
    pub fn vector(&mut self, connection: ConnectionId, len: usize) -> Vec<u8> {
        self.buffers.vector(connection, len)
    }

    /// Sends a message.
    ///
    /// # Errors
    /// A [`SendError`], with the message.
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

    /// The application has consumed a received message, so the window has space for another.
    pub fn consumed(&mut self, now_ns: u64, connection: ConnectionId, data: Vec<u8>) {
        self.consumed_bytes(now_ns, connection, data.len() as u32, data);
    }

    /// The same for a message of `len` bytes whose memory the application may have kept; `data` is reused.
    pub fn consumed_bytes(&mut self, now_ns: u64, connection: ConnectionId, len: u32, data: Vec<u8>) {
        let mut store = Store { provider: &mut self.provider, buffers: &mut self.buffers };
        self.engine.consumed(now_ns, connection, len, &mut store, &mut self.out);
        if self.bound(connection).is_some() {
            self.buffers.recycle(connection, data);
        }
    }

    /// Sends on queue pairs of `service`, UC or RC, from now on. Returns whether the connection has such queue pairs.
    pub fn switch(&mut self, now_ns: u64, connection: ConnectionId, service: Service) -> bool {
        self.engine.switch(now_ns, connection, service, &mut self.out)
    }

    /// The service on which this end sends: UC or RC.
    pub fn service_in_use(&self, connection: ConnectionId) -> Option<Service> {
        self.engine.service_in_use(connection)
    }

    /// Ends a connection.
    pub fn close(&mut self, connection: ConnectionId, reason: CloseReason) {
        self.engine.close(connection, reason, &mut self.out, |_| {});
        // Before the queue pairs are destroyed, so that the peer is informed.
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
        self.served.forget(connection);
    }

    /// Takes the next event.
    pub fn next_event(&mut self) -> Option<HostEvent> {
        self.events.pop_front()
    }

    /// Handles completions, timers and work requests. Returns whether there were any.
    pub fn turn(&mut self, now_ns: u64) -> bool {
        self.now_ns = now_ns;
        if self.engine.clock_mut().wants_check(now_ns) {
            let nic_ns = self.provider.clock_ns(now_ns);
            self.engine.clock_mut().check(now_ns, nic_ns);
        }
        let control = self.control.poll(now_ns, &mut self.provider, &mut self.engine, &mut self.out);
        let data = self.poll_data(now_ns);
        let answered = self.answer(now_ns);
        self.turn_engine(now_ns);
        let work = !self.out.work.is_empty() || !self.out.events.is_empty();
        self.perform(now_ns);
        control || data || answered || work
    }

    /// When [`Host::turn`] is due, ns.
    pub fn next_deadline(&self) -> u64 {
        self.engine.next_deadline()
    }

    #[cfg(test)]
    pub(crate) fn lane_of(&self, id: ConnectionId, lane: usize) -> bifrost_verbs::Qpn {
        self.bound(id).map(|bound| bound.lanes[lane].queue_pair).unwrap_or_default()
    }

    /// Sends a control datagram with the peer's tag, bypassing the engine.
    #[cfg(test)]
    pub(crate) fn send_raw_control(&mut self, id: ConnectionId, control: &bifrost_wire::rdm::Control) {
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
