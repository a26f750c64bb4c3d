//! State shared by a worker and its endpoints: the host, and received messages.

use std::collections::{HashMap, VecDeque};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use bifrost_rdm::{
    Adaptive, Class, CloseReason, ConnectionConfig, ConnectionId, MessageId, NEVER, Service, Swift, SwiftConfig,
};
use bifrost_verbs::Any;
use bifrost_wire::rdm::{Setup, SetupKind, SetupRefusal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::config::WorkerConfig;
use crate::error::{Error, reason, refusal};
use crate::flag::Flag;
use crate::host::{Host, HostEvent, Limits};
use crate::setup;
use crate::wakers::Wakers;

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: WorkerConfig,
    pub(crate) host: Host<Any>,
    pub(crate) connections: HashMap<ConnectionId, State>,
    /// When streams were last checked, ns of the provider's clock.
    pub(crate) checked_ns: u64,
    /// Tasks that wait for a peer to connect or to answer, and when they were last woken, ns.
    pub(crate) acceptors: Wakers,
    pub(crate) woken_ns: u64,
    /// An executor waits on the provider's descriptor.
    pub(crate) watched: bool,
    /// The file that selects the service of all connections.
    pub(crate) flag: Option<Flag>,
}

/// A connection, as the application sees it.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) stream: TcpStream,
    pub(crate) messages: VecDeque<Vec<u8>>,
    pub(crate) requests: VecDeque<(u32, Vec<u8>)>,
    /// Open calls, and open accesses to the peer's memory.
    pub(crate) calls: HashMap<u32, Call>,
    pub(crate) next_call: u32,
    pub(crate) closed: Option<&'static str>,
    /// Tasks that wait for a message, for a request, and for permission to send a message.
    pub(crate) readers: Wakers,
    pub(crate) servers: Wakers,
    pub(crate) senders: Wakers,
    /// Messages whose arrival a task waits for: whether they have arrived, and the task.
    pub(crate) arrivals: HashMap<MessageId, (bool, Wakers)>,
}

/// An open call.
#[derive(Debug, Default)]
pub(crate) struct Call {
    /// Required length of the response, bytes.
    pub(crate) expected: Option<u32>,
    /// The response, if it has arrived.
    pub(crate) response: Option<(Class, Vec<u8>)>,
    pub(crate) waiting: Wakers,
}

/// Interval for checking streams, for peers that have ended, and the file that selects the service.
pub(crate) const CHECK_EVERY: Duration = Duration::from_millis(100);
/// Interval for checking whether peers have connected or answered.
const ACCEPT_EVERY: Duration = Duration::from_millis(5);

impl Inner {
    pub(crate) fn limits(&self) -> Limits {
        let mut limits = Limits::new(self.config.service, self.config.mtu);
        limits.window = self.config.window;
        limits.longest = self.config.longest;
        // The kernel's scheduler delays each acknowledgement.
        limits.timeout_ns = 20_000_000;
        limits
    }

    pub(crate) fn connection_config(&self, initiator: bool) -> ConnectionConfig {
        let mut config = ConnectionConfig::new(self.config.service, self.config.mtu);
        config.order = self.config.order;
        config.initiator = initiator;
        config.patience_ns = self.config.patience.as_nanos() as u64;
        config
    }

    pub(crate) fn complete(
        &mut self,
        id: ConnectionId,
        peer: SocketAddr,
        setup: &Setup,
        initiator: bool,
    ) -> Result<(), Error> {
        let config = self.connection_config(initiator);
        let mut swift = SwiftConfig::new(self.config.queue.as_nanos() as u64);
        swift.max = WINDOW_MAX;
        let now = self.host.provider().now_ns();
        let chunking = Adaptive { longest: self.config.chunk, ..Adaptive::default() };
        let (chunking, congestion) = (Box::new(chunking), Box::new(Swift::new(swift)));
        self.host.complete(now, id, setup, config, chunking, congestion).map_err(|error| Error::Host(peer, error))?;
        if let Some(flag) = &self.flag {
            self.host.switch(now, id, flag.service);
        }
        Ok(())
    }

    /// Handles a peer's setup message; `None` if it is refused.
    pub(crate) fn accept(
        &mut self,
        mut stream: TcpStream,
        peer: SocketAddr,
        hello: &setup::SetupBytes,
    ) -> Option<ConnectionId> {
        let hello = Setup::parse(&hello.0[..hello.1]).ok().filter(|hello| hello.kind == SetupKind::Hello)?;
        let limits = self.limits();
        let refused = if !setup::is_own_address(&hello, peer) {
            Some(SetupRefusal::Policy)
        } else if hello.service != limits.service || hello.mtu != limits.mtu {
            Some(SetupRefusal::Parameters)
        } else {
            None
        };
        let prepared = match refused {
            Some(refusal) => Err(refusal),
            None => self.host.prepare(SetupKind::Welcome, limits).map_err(|_| SetupRefusal::Resources),
        };
        match prepared {
            Ok((id, welcome)) => {
                let accepted =
                    self.complete(id, peer, &hello, false).is_ok() && setup::send(&mut stream, &welcome).is_ok();
                if accepted {
                    self.connections.insert(id, State::new(stream));
                    return Some(id);
                }
                self.host.close(id, CloseReason::Done);
                None
            }
            Err(refusal) => {
                // Best effort: the peer may be gone.
                let _ = setup::send(&mut stream, &Setup { kind: SetupKind::Refused(refusal), ..hello });
                None
            }
        }
    }

    pub(crate) fn on_answer(
        &mut self,
        id: ConnectionId,
        peer: SocketAddr,
        stream: TcpStream,
        answer: &setup::SetupBytes,
    ) -> Result<(), Error> {
        let answer = Setup::parse(&answer.0[..answer.1]).map_err(|error| Error::Protocol(peer, error))?;
        match answer.kind {
            SetupKind::Welcome if setup::is_own_address(&answer, peer) => {}
            SetupKind::Welcome => return Err(Error::Refused(peer, refusal(SetupRefusal::Policy))),
            SetupKind::Refused(why) => return Err(Error::Refused(peer, refusal(why))),
            SetupKind::Hello => return Err(Error::Protocol(peer, bifrost_wire::rdm::Refusal::Kind)),
        }
        self.complete(id, peer, &answer, true)?;
        self.connections.insert(id, State::new(stream));
        Ok(())
    }

    pub(crate) fn poll(&mut self) -> Result<bool, Error> {
        let received = self.host.provider_mut().receive()?;
        let now = self.host.provider().now_ns();
        let is_check_due = now.saturating_sub(self.checked_ns) >= CHECK_EVERY.as_nanos() as u64;
        if is_check_due && let Some(service) = self.flag.as_mut().and_then(Flag::reload) {
            self.switch_all(now, service);
        }
        let busy = self.host.turn(now);
        self.host.provider_mut().transmit();
        while let Some(event) = self.host.next_event() {
            self.on_event(event);
        }
        if is_check_due {
            self.checked_ns = now;
            for state in self.connections.values_mut().filter(|state| state.closed.is_none()) {
                if setup::is_gone(&state.stream) {
                    state.close("the peer has ended");
                }
            }
        }
        if now.saturating_sub(self.woken_ns) >= ACCEPT_EVERY.as_nanos() as u64 {
            self.woken_ns = now;
            self.acceptors.wake();
        }
        let busy = busy || received > 0;
        Ok(busy || (self.watched && self.host.provider_mut().arm()))
    }

    /// Sends on `service` from now on, on all connections.
    pub(crate) fn switch_all(&mut self, now_ns: u64, service: Service) {
        for id in self.connections.keys() {
            self.host.switch(now_ns, *id, service);
        }
    }

    /// Handles whatever is due; if nothing is, waits.
    pub(crate) fn wait(&mut self, timeout: Duration) -> Result<bool, Error> {
        let begin = Instant::now();
        loop {
            if self.poll()? {
                return Ok(true);
            }
            let waited = begin.elapsed();
            if waited >= timeout {
                return Ok(false);
            }
            if waited >= self.config.spin {
                self.sleep(timeout - waited)?;
            } else {
                std::hint::spin_loop();
            }
        }
    }

    pub(crate) fn on_event(&mut self, event: HostEvent) {
        match event {
            HostEvent::Message { connection, class, call, data } => {
                let Some(state) = self.connections.get_mut(&connection) else { return };
                match class {
                    Class::Message => {
                        state.messages.push_back(data);
                        state.readers.wake();
                    }
                    Class::Request => {
                        state.requests.push_back((call, data));
                        state.servers.wake();
                    }
                    Class::Response | Class::Failure => match state.calls.get_mut(&call) {
                        Some(open) if open.response.is_none() => {
                            open.response = Some((class, data));
                            open.waiting.wake();
                        }
                        // The call was discarded, or never existed.
                        _ => {
                            let now = self.host.provider().now_ns();
                            self.host.consumed_bytes(now, connection, data.len() as u32, data);
                        }
                    },
                    // The host executes and answers these itself.
                    Class::Write | Class::Read => {}
                }
            }
            HostEvent::Sent { connection, message } => {
                let Some(state) = self.connections.get_mut(&connection) else { return };
                state.senders.wake();
                if let Some((arrived, waiting)) = state.arrivals.get_mut(&message) {
                    *arrived = true;
                    waiting.wake();
                }
            }
            HostEvent::Closed { connection, reason: why, by_peer } => {
                if let Some(state) = self.connections.get_mut(&connection) {
                    state.close(reason(why, by_peer));
                }
            }
        }
    }

    /// How long the worker can be idle if no packet arrives.
    pub(crate) fn due(&self) -> Duration {
        let now = self.host.provider().now_ns();
        let interval = if self.acceptors.is_empty() { CHECK_EVERY } else { ACCEPT_EVERY };
        match self.host.next_deadline().min(self.host.provider().next_deadline()) {
            NEVER => interval,
            due => interval.min(Duration::from_nanos(due.saturating_sub(now))),
        }
    }

    /// Waits for a packet, or until something is due.
    pub(crate) fn sleep(&mut self, at_most: Duration) -> Result<(), Error> {
        if self.host.provider_mut().arm() {
            return Ok(());
        }
        let wait = self.due().min(at_most);
        let timeout = Timespec { tv_sec: wait.as_secs() as i64, tv_nsec: wait.subsec_nanos().into() };
        let mut descriptors = [PollFd::from_borrowed_fd(self.host.provider().descriptor(), PollFlags::IN)];
        match poll(&mut descriptors, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(Error::Socket(error.into())),
        }
    }

    pub(crate) fn take_message(&mut self, id: ConnectionId) -> Option<Vec<u8>> {
        self.connections.get_mut(&id)?.messages.pop_front()
    }

    pub(crate) fn take_request(&mut self, id: ConnectionId) -> Option<(u32, Vec<u8>)> {
        self.connections.get_mut(&id)?.requests.pop_front()
    }

    /// The response to a call, and its required length.
    pub(crate) fn take_response(&mut self, id: ConnectionId, call: u32) -> Option<(Class, Vec<u8>, Option<u32>)> {
        let calls = &mut self.connections.get_mut(&id)?.calls;
        calls.get(&call)?.response.as_ref()?;
        let Call { expected, response, .. } = calls.remove(&call)?;
        response.map(|(class, data)| (class, data, expected))
    }

    /// Opens a call.
    pub(crate) fn open_call(&mut self, id: ConnectionId, expected: Option<u32>) -> Option<u32> {
        let state = self.connections.get_mut(&id)?;
        // Numbers wrap; skip those of open calls.
        loop {
            state.next_call = state.next_call.wrapping_add(1);
            if !state.calls.contains_key(&state.next_call) {
                break;
            }
        }
        state.calls.insert(state.next_call, Call { expected, ..Call::default() });
        Some(state.next_call)
    }

    /// Discards a call; if its response has arrived, its memory is recycled.
    pub(crate) fn forget_call(&mut self, id: ConnectionId, call: u32) {
        let open = self.connections.get_mut(&id).and_then(|state| state.calls.remove(&call));
        if let Some((_, data)) = open.and_then(|open| open.response) {
            let now = self.host.provider().now_ns();
            self.host.consumed_bytes(now, id, data.len() as u32, data);
        }
    }

    /// Sends posted requests; received packets are handled at the next poll.
    pub(crate) fn push_out(&mut self, now_ns: u64) {
        self.host.turn(now_ns);
        self.host.provider_mut().transmit();
    }

    pub(crate) fn check(&self, id: ConnectionId, peer: SocketAddr) -> Result<(), Error> {
        match self.connections.get(&id).map(|state| state.closed) {
            Some(None) => Ok(()),
            Some(Some(why)) => Err(Error::Closed { peer, why }),
            None => Err(Error::Closed { peer, why: "it was closed here" }),
        }
    }
}

/// Maximum number of bytes in flight: fits into the peer's socket buffers.
const WINDOW_MAX: u32 = 2 << 20;

impl State {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            messages: VecDeque::new(),
            requests: VecDeque::new(),
            calls: HashMap::new(),
            next_call: 0,
            closed: None,
            readers: Wakers::default(),
            servers: Wakers::default(),
            senders: Wakers::default(),
            arrivals: HashMap::new(),
        }
    }

    /// The connection has ended: wakes all waiting tasks.
    fn close(&mut self, why: &'static str) {
        self.closed = self.closed.or(Some(why));
        for wakers in [&mut self.readers, &mut self.servers, &mut self.senders] {
            wakers.wake();
        }
        self.calls.values_mut().for_each(|call| call.waiting.wake());
        self.arrivals.values_mut().for_each(|(_, waiting)| waiting.wake());
    }
}
