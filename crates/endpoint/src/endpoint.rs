//! One end of a connection, and what comes in on it.

use std::cell::RefCell;
use std::net::SocketAddr;
use std::ops::Deref;
use std::rc::Rc;
use std::time::{Duration, Instant};

use bifrost_rdm::{Class, CloseReason, ConnectionId, MessageId, SendError, Service};

use crate::error::Error;
use crate::inner::Inner;
use crate::remote::RemoteRegion;

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
    pub(crate) call: u32,
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

    /// What this end sends from now on goes by the queue pairs of `service`, UC or RC, of a connection that has both
    /// ([`Service::Both`], which begins with UC). Messages on their way arrive all the same, each once and in order.
    ///
    /// # Errors
    /// When the connection has no such queue pairs, or has ended.
    pub fn switch(&self, service: Service) -> Result<(), Error> {
        let mut inner = self.inner.borrow_mut();
        inner.check(self.id, self.peer)?;
        let now = inner.host.provider().now_ns();
        if !inner.host.switch(now, self.id, service) {
            return Err(Error::Service(self.peer));
        }
        inner.push_out(now);
        Ok(())
    }

    /// The service of the queue pairs that this end sends by: UC or RC. `None`: the connection has ended.
    #[must_use]
    pub fn service(&self) -> Option<Service> {
        self.inner.borrow().host.service_in_use(self.id)
    }

    /// Messages that were sent and have not arrived.
    #[must_use]
    pub fn open_messages(&self) -> usize {
        self.inner.borrow().host.open_messages(self.id)
    }

    /// Whether 1024 messages are open: [`Endpoint::send`] takes none before one has arrived.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.inner.borrow().host.is_full(self.id)
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

    /// The next message, if one has come in when the worker was polled last: it is not polled by this.
    ///
    /// # Errors
    /// When the connection has ended, and nothing is left to be read.
    pub fn next_queued(&self) -> Result<Option<Message>, Error> {
        let mut inner = self.inner.borrow_mut();
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
        self.open_call(None, |inner, now, call| {
            let sent = inner.host.send(now, self.id, Class::Request, call, request);
            sent.map(drop).map_err(|(error, _)| error)
        })
    }

    /// Begins to write to a region of the peer; [`Endpoint::try_response`] has an empty response once the bytes are there.
    /// Writes to one region take place in the order in which they were begun.
    ///
    /// # Errors
    /// [`Error::Range`]; and as for [`Endpoint::send`]: `data` may have 24 bytes less than a message.
    pub fn begin_write(&self, region: &RemoteRegion, offset: u64, data: &[u8]) -> Result<u32, Error> {
        inside(region, offset, data.len())?;
        self.open_call(Some(0), |inner, now, call| {
            inner.host.write_remote(now, self.id, call, (region.key, offset), data)
        })
    }

    /// Begins to read from a region of the peer; [`Endpoint::try_response`] has the bytes. It sees writes of this end that
    /// were begun before.
    ///
    /// # Errors
    /// [`Error::Range`]; and as for [`Endpoint::send`].
    pub fn begin_read(&self, region: &RemoteRegion, offset: u64, len: u32) -> Result<u32, Error> {
        inside(region, offset, len as usize)?;
        self.open_call(Some(len), |inner, now, call| {
            inner.host.read_remote(now, self.id, call, (region.key, offset), len)
        })
    }

    /// The response to a call, to a write or to a read, if it has come.
    ///
    /// # Errors
    /// When the peer says that it has none, or the connection has ended.
    pub fn try_response(&self, call: u32) -> Result<Option<Message>, Error> {
        let taken = self.inner.borrow_mut().take_response(self.id, call);
        match taken {
            Some((class, data, expected)) => self.response(class, data, expected).map(Some),
            None => self.inner.borrow().check(self.id, self.peer).map(|()| None),
        }
    }

    /// Whether a call, a write or a read is open: it was begun, and its response was neither taken nor forgotten.
    #[must_use]
    pub fn is_open(&self, call: u32) -> bool {
        self.inner.borrow().connections.get(&self.id).is_some_and(|state| state.calls.contains_key(&call))
    }

    /// Gives up waiting for the response to a call, a write or a read. What was asked for may happen all the same.
    pub fn forget(&self, call: u32) {
        self.inner.borrow_mut().forget_call(self.id, call);
    }

    /// Asks the peer, and waits for its response.
    ///
    /// # Errors
    /// When the peer says that it has none, the connection has ended, or `timeout` is over.
    pub fn call(&self, request: Vec<u8>, timeout: Duration) -> Result<Message, Error> {
        let call = self.begin_call(request)?;
        self.finish(call, timeout)
    }

    /// Writes to a region of the peer, and waits until the bytes are there. The peer's application has nothing to do with it;
    /// its worker must be polled.
    ///
    /// # Errors
    /// As for [`Endpoint::begin_write`]; and when the peer refuses, the connection has ended, or `timeout` is over: then the
    /// bytes may be there or not, or come later.
    pub fn write(&self, region: &RemoteRegion, offset: u64, data: &[u8], timeout: Duration) -> Result<(), Error> {
        let call = self.begin_write(region, offset, data)?;
        self.finish(call, timeout).map(drop)
    }

    /// Reads from a region of the peer. The peer's application has nothing to do with it; its worker must be polled.
    ///
    /// # Errors
    /// As for [`Endpoint::begin_read`]; and when the peer refuses, the connection has ended, or `timeout` is over.
    pub fn read(&self, region: &RemoteRegion, offset: u64, len: u32, timeout: Duration) -> Result<Message, Error> {
        let call = self.begin_read(region, offset, len)?;
        self.finish(call, timeout)
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

    pub(crate) fn post(&self, class: Class, call: u32, data: Vec<u8>) -> Result<MessageId, Error> {
        let mut inner = self.inner.borrow_mut();
        inner.check(self.id, self.peer)?;
        let now = inner.host.provider().now_ns();
        let sent = inner.host.send(now, self.id, class, call, data);
        let message = sent.map_err(|(error, _)| Error::Send { peer: self.peer, error })?;
        inner.push_out(now);
        Ok(message)
    }

    /// Opens a call and sends what begins it.
    fn open_call(
        &self,
        expected: Option<u32>,
        send: impl FnOnce(&mut Inner, u64, u32) -> Result<(), SendError>,
    ) -> Result<u32, Error> {
        let mut inner = self.inner.borrow_mut();
        inner.check(self.id, self.peer)?;
        let call = inner.open_call(self.id, expected).ok_or_else(|| self.ended())?;
        let now = inner.host.provider().now_ns();
        if let Err(error) = send(&mut inner, now, call) {
            inner.forget_call(self.id, call);
            return Err(Error::Send { peer: self.peer, error });
        }
        inner.push_out(now);
        Ok(call)
    }

    /// Waits for the response to a call.
    fn finish(&self, call: u32, timeout: Duration) -> Result<Message, Error> {
        match self.until(timeout, |inner, id| inner.take_response(id, call)) {
            Ok((class, data, expected)) => self.response(class, data, expected),
            Err(error) => {
                self.inner.borrow_mut().forget_call(self.id, call);
                Err(error)
            }
        }
    }

    /// What a response means.
    pub(crate) fn response(&self, class: Class, data: Vec<u8>, expected: Option<u32>) -> Result<Message, Error> {
        // Its memory goes back in any case.
        let message = self.message(data);
        if class == Class::Failure {
            return Err(Error::Failure(self.peer, String::from_utf8_lossy(&message).into_owned()));
        }
        if expected.is_some_and(|expected| expected as usize != message.len()) {
            return Err(Error::Answer(self.peer));
        }
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

    pub(crate) fn message(&self, data: Vec<u8>) -> Message {
        Message { data, inner: self.inner.clone(), id: self.id, taken: false }
    }

    fn ended(&self) -> Error {
        Error::Closed { peer: self.peer, why: "it was closed here" }
    }
}

/// Whether an access stays inside of a region, as far as this end knows.
fn inside(region: &RemoteRegion, offset: u64, len: usize) -> Result<(), Error> {
    if region.has(offset, len) { Ok(()) } else { Err(Error::Range { offset, len: len as u64, region: region.len }) }
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
