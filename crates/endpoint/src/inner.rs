//! What a worker and its endpoints share: the host, and what has come in for the application.

use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use bifrost_rdm::{Adaptive, Class, CloseReason, ConnectionConfig, ConnectionId, NEVER, Swift, SwiftConfig};
use bifrost_verbs::Soft;
use bifrost_wire::rdm::{Setup, SetupKind, SetupRefusal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::config::WorkerConfig;
use crate::error::{Error, reason, refusal};
use crate::host::{Host, HostEvent, Limits};
use crate::setup;

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) config: WorkerConfig,
    pub(crate) host: Host<Soft>,
    pub(crate) connections: HashMap<ConnectionId, State>,
    pub(crate) looked: Instant,
}

/// A connection, as the application sees it.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) stream: TcpStream,
    pub(crate) messages: VecDeque<Vec<u8>>,
    pub(crate) requests: VecDeque<(u32, Vec<u8>)>,
    /// Calls that are open, and what has come in for them.
    pub(crate) calls: HashMap<u32, Option<(Class, Vec<u8>)>>,
    pub(crate) next_call: u32,
    pub(crate) closed: Option<&'static str>,
}

/// How often streams are looked at: peers that have ended.
const LOOK_EVERY: Duration = Duration::from_millis(100);

impl Inner {
    pub(crate) fn limits(&self) -> Limits {
        let mut limits = Limits::new(self.config.service, self.config.mtu);
        limits.window = self.config.window;
        limits.longest = self.config.longest;
        // The kernel's scheduler is in the way of each acknowledgement.
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
        let (chunking, congestion) = (Box::new(Adaptive::default()), Box::new(Swift::new(swift)));
        self.host.complete(now, id, setup, config, chunking, congestion).map_err(|error| Error::Host(peer, error))
    }

    /// A peer's wish; `None` if it is refused.
    pub(crate) fn accept(
        &mut self,
        mut stream: TcpStream,
        peer: SocketAddr,
        hello: &[u8; Setup::LEN],
    ) -> Option<ConnectionId> {
        let hello = Setup::parse(hello).ok().filter(|hello| hello.kind == SetupKind::Hello)?;
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
                // 76 bytes fit into the buffer of a stream on which nothing has been sent.
                let told = self.complete(id, peer, &hello, false).is_ok() && stream.write_all(&welcome.emit()).is_ok();
                if told {
                    self.connections.insert(id, State::new(stream));
                    return Some(id);
                }
                self.host.close(id, CloseReason::Done);
                None
            }
            Err(refusal) => {
                // A courtesy: the peer may be gone.
                let _ = stream.write_all(&Setup { kind: SetupKind::Refused(refusal), ..hello }.emit());
                None
            }
        }
    }

    pub(crate) fn on_answer(
        &mut self,
        id: ConnectionId,
        peer: SocketAddr,
        stream: TcpStream,
        answer: &[u8; Setup::LEN],
    ) -> Result<(), Error> {
        let answer = Setup::parse(answer).map_err(|error| Error::Protocol(peer, error))?;
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
        let busy = self.host.turn(now);
        self.host.provider_mut().transmit();
        while let Some(event) = self.host.next_event() {
            self.on_event(event);
        }
        if self.looked.elapsed() >= LOOK_EVERY {
            self.looked = Instant::now();
            for state in self.connections.values_mut().filter(|state| state.closed.is_none()) {
                if setup::is_gone(&state.stream) {
                    state.closed = Some("the peer has ended");
                }
            }
        }
        Ok(busy || received > 0)
    }

    /// Does what there is to do, and waits for something if there is nothing.
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
                    Class::Message => state.messages.push_back(data),
                    Class::Request => state.requests.push_back((call, data)),
                    Class::Response | Class::Failure => match state.calls.get_mut(&call) {
                        Some(slot @ None) => *slot = Some((class, data)),
                        // Nobody waits for it any more, or never did.
                        _ => {
                            let now = self.host.provider().now_ns();
                            self.host.consumed_bytes(now, connection, data.len() as u32, data);
                        }
                    },
                }
            }
            HostEvent::Sent { .. } => {}
            HostEvent::Closed { connection, reason: why, by_peer } => {
                if let Some(state) = self.connections.get_mut(&connection) {
                    state.closed = state.closed.or(Some(reason(why, by_peer)));
                }
            }
        }
    }

    /// Waits for a packet, or until something is due.
    pub(crate) fn sleep(&mut self, at_most: Duration) -> Result<(), Error> {
        let now = self.host.provider().now_ns();
        let due = self.host.next_deadline().min(self.host.provider().next_deadline());
        let wait = match due {
            NEVER => at_most,
            due => at_most.min(Duration::from_nanos(due.saturating_sub(now))),
        };
        let wait = wait.min(LOOK_EVERY);
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

    pub(crate) fn take_response(&mut self, id: ConnectionId, call: u32) -> Option<(Class, Vec<u8>)> {
        let calls = &mut self.connections.get_mut(&id)?.calls;
        calls.get(&call)?.as_ref()?;
        calls.remove(&call).flatten()
    }

    pub(crate) fn check(&self, id: ConnectionId, peer: SocketAddr) -> Result<(), Error> {
        match self.connections.get(&id).map(|state| state.closed) {
            Some(None) => Ok(()),
            Some(Some(why)) => Err(Error::Closed { peer, why }),
            None => Err(Error::Closed { peer, why: "it was closed here" }),
        }
    }
}

/// Bytes in flight: what the sockets of the other end have room for.
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
        }
    }
}
