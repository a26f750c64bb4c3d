//! One end of a connection, and its received messages.

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

/// A received message. Its memory is reused when it is dropped.
#[derive(Debug)]
pub struct Message {
    data: Vec<u8>,
    pub(crate) inner: Rc<RefCell<Inner>>,
    pub(crate) id: ConnectionId,
    /// The memory was taken by the application.
    taken: bool,
}

/// A request that needs a response.
#[derive(Debug)]
pub struct Request {
    /// The request's data.
    pub message: Message,
    pub(crate) call: u32,
}

impl Endpoint {
    /// The peer's setup address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Returns memory for a message, reused from earlier messages: in the steady state nothing is allocated. It
    /// contains old data.
    #[must_use]
    pub fn buffer(&self, len: usize) -> Vec<u8> {
        self.inner.borrow_mut().host.vector(self.id, len)
    }

    /// Smoothed and smallest round trip, ns; window, bytes; share of packets lost; queue pair in use.
    #[must_use]
    pub fn measured(&self) -> Option<(u64, u64, u32, f32, u8)> {
        self.inner.borrow().host.measured(self.id)
    }

    /// Sends on queue pairs of `service`, UC or RC, from now on. The connection must have both ([`Service::Both`],
    /// which begins with UC). Messages in flight are not affected: each arrives once and in order.
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

    /// The service of the queue pairs on which this end sends: UC or RC. `None`: the connection has ended.
    #[must_use]
    pub fn service(&self) -> Option<Service> {
        self.inner.borrow().host.service_in_use(self.id)
    }

    /// Messages that were sent and have not yet arrived.
    #[must_use]
    pub fn open_messages(&self) -> usize {
        self.inner.borrow().host.open_messages(self.id)
    }

    /// Whether 1024 messages are open: [`Endpoint::send`] then fails until one has arrived.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.inner.borrow().host.is_full(self.id)
    }

    /// Sends a message. It is in flight when this returns, and has arrived when [`Endpoint::open_messages`] no longer
    /// counts it.
    ///
    /// # Errors
    /// When the connection has ended, the message is too long, or 1024 are open.
    pub fn send(&self, data: Vec<u8>) -> Result<MessageId, Error> {
        self.post(Class::Message, 0, data)
    }

    /// Waits until no message is open.
    ///
    /// # Errors
    /// When the connection has ended, or on timeout.
    pub fn flush(&self, timeout: Duration) -> Result<(), Error> {
        self.until(timeout, |inner, id| (inner.host.open_messages(id) == 0).then_some(()))
    }

    /// The next message, if there is one.
    ///
    /// # Errors
    /// When the connection has ended and all messages were read.
    pub fn try_recv(&self) -> Result<Option<Message>, Error> {
        let mut inner = self.inner.borrow_mut();
        inner.poll()?;
        match inner.take_message(self.id) {
            Some(data) => Ok(Some(self.message(data))),
            None => inner.check(self.id, self.peer).map(|()| None),
        }
    }

    /// The next message that was received when the worker was last polled; does not poll it.
    ///
    /// # Errors
    /// When the connection has ended and all messages were read.
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
    /// When the connection has ended, or on timeout.
    pub fn recv(&self, timeout: Duration) -> Result<Message, Error> {
        self.until(timeout, Inner::take_message).map(|data| self.message(data))
    }

    /// Begins a call; [`Endpoint::try_response`] returns the response.
    ///
    /// # Errors
    /// As for [`Endpoint::send`].
    pub fn begin_call(&self, request: Vec<u8>) -> Result<u32, Error> {
        self.open_call(None, |inner, now, call| {
            let sent = inner.host.send(now, self.id, Class::Request, call, request);
            sent.map(drop).map_err(|(error, _)| error)
        })
    }

    /// Begins a write to a region of the peer; [`Endpoint::try_response`] returns an empty response once it is done.
    /// Writes to one region are executed in the order in which they were begun.
    ///
    /// # Errors
    /// [`Error::Range`], or as for [`Endpoint::send`]: `data` must be 24 bytes shorter than the longest message.
    pub fn begin_write(&self, region: &RemoteRegion, offset: u64, data: &[u8]) -> Result<u32, Error> {
        inside(region, offset, data.len())?;
        self.open_call(Some(0), |inner, now, call| {
            inner.host.write_remote(now, self.id, call, (region.key, offset), data)
        })
    }

    /// Begins a read from a region of the peer; [`Endpoint::try_response`] returns the bytes. They include all writes
    /// that this end began earlier.
    ///
    /// # Errors
    /// [`Error::Range`], or as for [`Endpoint::send`].
    pub fn begin_read(&self, region: &RemoteRegion, offset: u64, len: u32) -> Result<u32, Error> {
        inside(region, offset, len as usize)?;
        self.open_call(Some(len), |inner, now, call| {
            inner.host.read_remote(now, self.id, call, (region.key, offset), len)
        })
    }

    /// The response to a call, write or read, if it has arrived.
    ///
    /// # Errors
    /// When the peer refuses, or the connection has ended.
    pub fn try_response(&self, call: u32) -> Result<Option<Message>, Error> {
        let taken = self.inner.borrow_mut().take_response(self.id, call);
        match taken {
            Some((class, data, expected)) => self.response(class, data, expected).map(Some),
            None => self.inner.borrow().check(self.id, self.peer).map(|()| None),
        }
    }

    /// Whether a call, write or read is open: its response was neither taken nor discarded.
    #[must_use]
    pub fn is_open(&self, call: u32) -> bool {
        self.inner.borrow().connections.get(&self.id).is_some_and(|state| state.calls.contains_key(&call))
    }

    /// Discards the response to a call, write or read. The operation itself may still happen.
    pub fn forget(&self, call: u32) {
        self.inner.borrow_mut().forget_call(self.id, call);
    }

    /// Sends a request, and waits for the response.
    ///
    /// # Errors
    /// When the peer refuses, the connection has ended, or on timeout.
    pub fn call(&self, request: Vec<u8>, timeout: Duration) -> Result<Message, Error> {
        let call = self.begin_call(request)?;
        self.finish(call, timeout)
    }

    /// Writes to a region of the peer, and waits until the write is done. The peer's application is not involved, but
    /// its worker must be polled.
    ///
    /// # Errors
    /// As for [`Endpoint::begin_write`]; and when the peer refuses, the connection has ended, or on timeout. In the
    /// last two cases the write may or may not happen, also later.
    pub fn write(&self, region: &RemoteRegion, offset: u64, data: &[u8], timeout: Duration) -> Result<(), Error> {
        let call = self.begin_write(region, offset, data)?;
        self.finish(call, timeout).map(drop)
    }

    /// Reads from a region of the peer. The peer's application is not involved, but its worker must be polled.
    ///
    /// # Errors
    /// As for [`Endpoint::begin_read`]; and when the peer refuses, the connection has ended, or on timeout.
    pub fn read(&self, region: &RemoteRegion, offset: u64, len: u32, timeout: Duration) -> Result<Message, Error> {
        let call = self.begin_read(region, offset, len)?;
        self.finish(call, timeout)
    }

    /// The next request, if there is one.
    ///
    /// # Errors
    /// When the connection has ended and all requests were read.
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
    /// When the connection has ended, or on timeout.
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

    /// Refuses a request, with a reason.
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

    /// Opens a call and sends its first message.
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

    /// Converts a response to a message or an error.
    pub(crate) fn response(&self, class: Class, data: Vec<u8>, expected: Option<u32>) -> Result<Message, Error> {
        // Recycles the memory in all cases.
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

/// Checks that an access stays within a region, as far as this end knows.
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
    /// Takes its data.
    #[must_use]
    pub fn into_vec(mut self) -> Vec<u8> {
        let data = std::mem::take(&mut self.data);
        self.recycle(data.len(), Vec::new());
        self.taken = true;
        data
    }

    fn recycle(&self, len: usize, data: Vec<u8>) {
        let mut inner = self.inner.borrow_mut();
        let now = inner.host.provider().now_ns();
        inner.host.consumed_bytes(now, self.id, len as u32, data);
    }
}

impl Drop for Message {
    fn drop(&mut self) {
        if !self.taken {
            let data = std::mem::take(&mut self.data);
            self.recycle(data.len(), data);
        }
    }
}
