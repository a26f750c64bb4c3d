//! The API: a worker for each thread, and its endpoints.

use std::cell::RefCell;
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::ops::Deref;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bifrost_rdm::{Class, CloseReason, ConnectionId, Counters, MessageId, Order, SendError, Service};
use bifrost_verbs::{Soft, SoftConfig, SoftCounters};
use bifrost_wire::rdm::{MAX_MESSAGE, SetupKind};

use crate::error::Error;
use crate::host::{Host, HostConfig};
use crate::inner::Inner;
use crate::setup::{self, Listener, PATIENCE};

/// Settings of a worker.
#[derive(Clone, Copy, Debug)]
pub struct WorkerConfig {
    /// The address of its packets.
    pub address: IpAddr,
    /// The UDP port for RoCEv2: 4791, or another if several processes share the address; 0: any. Peers are told.
    pub port: u16,
    /// Who repeats what is lost.
    pub service: Service,
    /// Payload of a packet, bytes: 256, 512, 1024, 2048 or 4096. The way must take 86 bytes more over IPv6.
    pub mtu: u16,
    /// In which order messages are delivered.
    pub order: Order,
    /// Messages that are taken ahead of the application, 1..=1024.
    pub window: u16,
    /// The longest message that is taken, bytes, up to 256 MiB.
    pub longest: u32,
    /// Queueing that congestion control aims at. Hosts in software add hundreds of microseconds by themselves.
    pub queue: Duration,
    /// Added to the time within which an answer is expected.
    pub patience: Duration,
    /// For how long to look for packets before sleeping.
    pub spin: Duration,
    /// Connections, at most.
    pub connections: u32,
}

impl WorkerConfig {
    /// Settings for a host without an RDMA NIC.
    #[must_use]
    pub const fn new(address: IpAddr) -> Self {
        Self {
            address,
            port: bifrost_wire::roce::UDP_PORT,
            service: Service::Uc,
            mtu: 1024,
            order: Order::Sent,
            window: 256,
            longest: MAX_MESSAGE,
            queue: Duration::from_micros(500),
            patience: Duration::from_micros(500),
            spin: Duration::from_micros(30),
            connections: 256,
        }
    }
}

/// Looks after the connections of one thread. Clones are the same worker.
#[derive(Clone, Debug)]
pub struct Worker {
    inner: Rc<RefCell<Inner>>,
}

/// One end of a connection. Dropping it closes the connection.
#[derive(Debug)]
pub struct Endpoint {
    inner: Rc<RefCell<Inner>>,
    id: ConnectionId,
    peer: SocketAddr,
}

/// A message that has come in. Its memory serves for others when it is dropped.
#[derive(Debug)]
pub struct Message {
    data: Vec<u8>,
    inner: Rc<RefCell<Inner>>,
    id: ConnectionId,
    /// The memory is somebody else's.
    taken: bool,
}

/// A request that wants a response.
#[derive(Debug)]
pub struct Request {
    /// What is asked.
    pub message: Message,
    call: u32,
}

impl Worker {
    /// A worker with a software NIC of its own: RoCEv2 over UDP sockets.
    ///
    /// # Errors
    /// When the address or the port cannot be bound.
    pub fn new(config: WorkerConfig) -> Result<Self, Error> {
        let at = SocketAddr::new(config.address, config.port);
        let soft = SoftConfig {
            address: config.address,
            port: config.port,
            queue_pairs: 3 * config.connections + 1,
            regions: 65_536,
            seed: unpredictable(),
        };
        let soft = Soft::new(soft).map_err(|error| Error::Bind(at, error))?;
        let host = HostConfig::new(config.connections, unpredictable());
        let host = Host::new(soft, host).map_err(|error| Error::Host(at, error))?;
        let looked = Instant::now();
        let inner = Inner { config, host, connections: HashMap::new(), looked };
        Ok(Self { inner: Rc::new(RefCell::new(inner)) })
    }

    /// What carries the packets, in words.
    #[must_use]
    pub fn provider(&self) -> String {
        let inner = self.inner.borrow();
        let at = SocketAddr::new(inner.config.address, inner.host.provider().nic_port());
        format!("soft: RoCEv2 over UDP at {at}, MTU {}", inner.config.mtu)
    }

    /// Listens for peers that want to set a connection up, over TCP.
    ///
    /// # Errors
    /// When the address cannot be bound.
    pub fn listen(&self, address: SocketAddr) -> Result<Listener, Error> {
        Listener::bind(address).map_err(|error| Error::Bind(address, error))
    }

    /// The next peer that has connected, if there is one.
    ///
    /// # Errors
    /// When the listening socket fails. Peers that are refused are no error.
    pub fn try_accept(&self, listener: &mut Listener) -> Result<Option<Endpoint>, Error> {
        self.poll()?;
        while let Some((stream, peer, hello)) = listener.next()? {
            let accepted = self.inner.borrow_mut().accept(stream, peer, &hello);
            if let Some(id) = accepted {
                return Ok(Some(Endpoint { inner: self.inner.clone(), id, peer }));
            }
        }
        Ok(None)
    }

    /// Waits for a peer to connect.
    ///
    /// # Errors
    /// When the listening socket fails, or `timeout` is over.
    pub fn accept(&self, listener: &mut Listener, timeout: Duration) -> Result<Endpoint, Error> {
        let until = Instant::now() + timeout;
        loop {
            if let Some(endpoint) = self.try_accept(listener)? {
                return Ok(endpoint);
            }
            if Instant::now() >= until {
                return Err(Error::Timeout(listener.local_addr()?));
            }
            self.wait(Duration::from_millis(5))?;
        }
    }

    /// Connects to a peer that listens.
    ///
    /// # Errors
    /// When it cannot be reached, or refuses, or does not fit.
    pub fn connect(&self, peer: SocketAddr, timeout: Duration) -> Result<Endpoint, Error> {
        let (id, hello) = {
            let mut inner = self.inner.borrow_mut();
            let limits = inner.limits();
            inner.host.prepare(SetupKind::Hello, limits).map_err(|error| Error::Host(peer, error))?
        };
        let answer = setup::ask(peer, &hello, timeout);
        let mut inner = self.inner.borrow_mut();
        let connected = answer
            .map_err(|error| Error::Setup(peer, error))
            .and_then(|(stream, answer)| inner.on_answer(id, peer, stream, &answer));
        match connected {
            Ok(()) => Ok(Endpoint { inner: self.inner.clone(), id, peer }),
            Err(error) => {
                inner.host.close(id, CloseReason::Done);
                Err(error)
            }
        }
    }

    /// Does what there is to do, without waiting. Whether there was something.
    ///
    /// # Errors
    /// When the NIC's socket fails.
    pub fn poll(&self) -> Result<bool, Error> {
        self.inner.borrow_mut().poll()
    }

    /// Does what there is to do, and waits for something if there is nothing, for at most `timeout`.
    ///
    /// # Errors
    /// When the NIC's socket fails.
    pub fn wait(&self, timeout: Duration) -> Result<bool, Error> {
        let mut inner = self.inner.borrow_mut();
        let begin = Instant::now();
        loop {
            if inner.poll()? {
                return Ok(true);
            }
            let waited = begin.elapsed();
            if waited >= timeout {
                return Ok(false);
            }
            if waited >= inner.config.spin {
                inner.sleep(timeout - waited)?;
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// What the engine has counted.
    #[must_use]
    pub fn counters(&self) -> Counters {
        *self.inner.borrow().host.counters()
    }

    /// What the NIC and its socket have counted.
    #[must_use]
    pub fn nic_counters(&self) -> (bifrost_verbs::Counters, SoftCounters) {
        let inner = self.inner.borrow();
        (*inner.host.provider().nic_counters(), *inner.host.provider().counters())
    }
}

impl Endpoint {
    /// The peer's address for set-up.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The worker that looks after this endpoint.
    #[must_use]
    pub fn worker(&self) -> Worker {
        Worker { inner: self.inner.clone() }
    }

    /// Memory for a message, of messages that came in or arrived before: in the steady state nothing is allocated. Its
    /// bytes are what they were.
    #[must_use]
    pub fn buffer(&self, len: usize) -> Vec<u8> {
        self.inner.borrow_mut().host.vector(self.id, len)
    }

    /// Smoothed and smallest round trip, ns; window, bytes; share of packets that is lost; queue pair in use.
    #[must_use]
    pub fn measured(&self) -> Option<(u64, u64, u32, f32, u8)> {
        self.inner.borrow().host.measured(self.id)
    }

    /// Messages that were sent and have not arrived.
    #[must_use]
    pub fn open_messages(&self) -> usize {
        self.inner.borrow().host.open_messages(self.id)
    }

    /// Sends a message. It is on its way when this returns, and has arrived when it is no longer one of
    /// [`Endpoint::open_messages`].
    ///
    /// # Errors
    /// When the connection has ended, the message is too long, or 1024 are open.
    pub fn send(&self, data: Vec<u8>) -> Result<MessageId, Error> {
        self.post(Class::Message, 0, data)
    }

    /// Waits until no message is open.
    ///
    /// # Errors
    /// When the connection has ended, or `timeout` is over.
    pub fn flush(&self, timeout: Duration) -> Result<(), Error> {
        self.until(timeout, |inner, id| (inner.host.open_messages(id) == 0).then_some(()))
    }

    /// The next message, if there is one.
    ///
    /// # Errors
    /// When the connection has ended, and nothing is left to be read.
    pub fn try_recv(&self) -> Result<Option<Message>, Error> {
        let mut inner = self.inner.borrow_mut();
        inner.poll()?;
        match inner.take_message(self.id) {
            Some(data) => Ok(Some(self.message(data))),
            None => inner.check(self.id, self.peer).map(|()| None),
        }
    }

    /// Waits for the next message.
    ///
    /// # Errors
    /// When the connection has ended, or `timeout` is over.
    pub fn recv(&self, timeout: Duration) -> Result<Message, Error> {
        self.until(timeout, Inner::take_message).map(|data| self.message(data))
    }

    /// Begins a call; [`Endpoint::try_response`] has the response.
    ///
    /// # Errors
    /// As for [`Endpoint::send`].
    pub fn begin_call(&self, request: Vec<u8>) -> Result<u32, Error> {
        let call = {
            let mut inner = self.inner.borrow_mut();
            let state = inner.connections.get_mut(&self.id).ok_or(self.ended())?;
            state.next_call = state.next_call.wrapping_add(1);
            state.calls.insert(state.next_call, None);
            state.next_call
        };
        let sent = self.post(Class::Request, call, request);
        if sent.is_err()
            && let Some(state) = self.inner.borrow_mut().connections.get_mut(&self.id)
        {
            state.calls.remove(&call);
        }
        sent.map(|_| call)
    }

    /// The response to a call, if it has come.
    ///
    /// # Errors
    /// When the peer says that it has none, or the connection has ended.
    pub fn try_response(&self, call: u32) -> Result<Option<Message>, Error> {
        let taken = self.inner.borrow_mut().take_response(self.id, call);
        match taken {
            Some((Class::Failure, text)) => Err(Error::Failure(self.peer, String::from_utf8_lossy(&text).into_owned())),
            Some((_, data)) => Ok(Some(self.message(data))),
            None => self.inner.borrow().check(self.id, self.peer).map(|()| None),
        }
    }

    /// Asks the peer, and waits for its response.
    ///
    /// # Errors
    /// When the peer says that it has none, the connection has ended, or `timeout` is over.
    pub fn call(&self, request: Vec<u8>, timeout: Duration) -> Result<Message, Error> {
        let call = self.begin_call(request)?;
        let response = self.until(timeout, |inner, id| {
            let come = inner.connections.get(&id)?.calls.get(&call)?.is_some();
            come.then_some(())
        });
        if let Err(error) = response {
            if let Some(state) = self.inner.borrow_mut().connections.get_mut(&self.id) {
                state.calls.remove(&call);
            }
            return Err(error);
        }
        self.try_response(call)?.ok_or(Error::Timeout(self.peer))
    }

    /// The next request, if there is one.
    ///
    /// # Errors
    /// When the connection has ended, and nothing is left to be read.
    pub fn try_request(&self) -> Result<Option<Request>, Error> {
        let mut inner = self.inner.borrow_mut();
        inner.poll()?;
        match inner.take_request(self.id) {
            Some((call, data)) => Ok(Some(Request { message: self.message(data), call })),
            None => inner.check(self.id, self.peer).map(|()| None),
        }
    }

    /// Waits for the next request.
    ///
    /// # Errors
    /// When the connection has ended, or `timeout` is over.
    pub fn next_request(&self, timeout: Duration) -> Result<Request, Error> {
        let (call, data) = self.until(timeout, Inner::take_request)?;
        Ok(Request { message: self.message(data), call })
    }

    /// Answers a request.
    ///
    /// # Errors
    /// As for [`Endpoint::send`].
    pub fn respond(&self, request: &Request, response: Vec<u8>) -> Result<MessageId, Error> {
        self.post(Class::Response, request.call, response)
    }

    /// Answers a request that cannot be met with the reason.
    ///
    /// # Errors
    /// As for [`Endpoint::send`].
    pub fn refuse(&self, request: &Request, reason: &str) -> Result<MessageId, Error> {
        self.post(Class::Failure, request.call, reason.as_bytes().to_vec())
    }

    fn post(&self, class: Class, call: u32, data: Vec<u8>) -> Result<MessageId, Error> {
        let mut inner = self.inner.borrow_mut();
        inner.check(self.id, self.peer)?;
        let now = inner.host.provider().now_ns();
        let sent = inner.host.send(now, self.id, class, call, data);
        let message = sent.map_err(|(error, _)| Error::Send { peer: self.peer, error })?;
        // Out at once; what has come in meanwhile waits for the next poll.
        inner.host.turn(now);
        inner.host.provider_mut().transmit();
        Ok(message)
    }

    fn until<T>(
        &self,
        timeout: Duration,
        mut take: impl FnMut(&mut Inner, ConnectionId) -> Option<T>,
    ) -> Result<T, Error> {
        let until = Instant::now() + timeout;
        let worker = self.worker();
        worker.poll()?;
        loop {
            {
                let mut inner = self.inner.borrow_mut();
                if let Some(taken) = take(&mut inner, self.id) {
                    return Ok(taken);
                }
                inner.check(self.id, self.peer)?;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout(self.peer));
            }
            worker.wait(left)?;
        }
    }

    fn message(&self, data: Vec<u8>) -> Message {
        Message { data, inner: self.inner.clone(), id: self.id, taken: false }
    }

    fn ended(&self) -> Error {
        Error::Closed { peer: self.peer, why: "it was closed here" }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let mut inner = self.inner.borrow_mut();
        inner.connections.remove(&self.id);
        inner.host.close(self.id, CloseReason::Done);
        inner.host.provider_mut().transmit();
    }
}

impl Deref for Message {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.data
    }
}

impl Message {
    /// Its bytes, to be kept.
    #[must_use]
    pub fn into_vec(mut self) -> Vec<u8> {
        let data = std::mem::take(&mut self.data);
        self.give_back(data.len(), Vec::new());
        self.taken = true;
        data
    }

    fn give_back(&self, len: usize, data: Vec<u8>) {
        let mut inner = self.inner.borrow_mut();
        let now = inner.host.provider().now_ns();
        inner.host.consumed_bytes(now, self.id, len as u32, data);
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if !self.taken {
            let data = std::mem::take(&mut self.data);
            self.give_back(data.len(), data);
        }
    }
}

impl Error {
    /// Whether 1024 messages are open: wait for some to arrive.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Send { error: SendError::Full, .. })
    }
}

/// 64 bits from the system's source of chance, by way of the standard library.
fn unpredictable() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// For how long set-up may take, unless the caller says otherwise.
pub const SETUP_PATIENCE: Duration = PATIENCE;
