//! One end of a connection, and what comes in on it.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::ops::Deref;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bifrost_rdm::{Class, CloseReason, ConnectionId, MessageId};

use crate::error::Error;
use crate::inner::Inner;

/// One end of a connection. Dropping it closes the connection.
#[derive(Debug)]
pub struct Endpoint {
    pub(crate) inner: Rc<RefCell<Inner>>,
    pub(crate) id: ConnectionId,
    pub(crate) peer: SocketAddr,
}

/// A message that has come in. Its memory serves for others when it is dropped.
#[derive(Debug)]
pub struct Message {
    data: Vec<u8>,
    pub(crate) inner: Rc<RefCell<Inner>>,
    pub(crate) id: ConnectionId,
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

impl Endpoint {
    /// The peer's address for set-up.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
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
        let mut inner = self.inner.borrow_mut();
        inner.poll()?;
        loop {
            if let Some(taken) = take(&mut inner, self.id) {
                return Ok(taken);
            }
            inner.check(self.id, self.peer)?;
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::Timeout(self.peer));
            }
            inner.wait(left)?;
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
