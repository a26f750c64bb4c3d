//! The same operations as futures, for any executor.
//!
//! A future makes progress when its worker is polled, which wakes the tasks that wait for arrivals.
//! [`Worker::block_on`](crate::Worker::block_on) does this by itself. On another single-threaded executor, a task must
//! poll the worker whenever [`Worker::descriptor`](crate::Worker::descriptor) is readable or
//! [`Worker::due`](crate::Worker::due) has passed. Dropping a future that is not ready stops waiting, but does not
//! cancel what was sent.

use std::future::poll_fn;
use std::task::{Context, Poll};

use bifrost_rdm::{Class, MessageId};

use crate::endpoint::{Endpoint, Message, Request};
use crate::error::Error;
use crate::remote::RemoteRegion;

/// An open call, which is discarded when this is dropped.
struct Call<'a> {
    endpoint: &'a Endpoint,
    call: u32,
}

/// A wait for the arrival of a message, which ends when this is dropped.
struct Arrival<'a> {
    endpoint: &'a Endpoint,
    message: MessageId,
}

impl Endpoint {
    /// The next message.
    ///
    /// # Errors
    /// When the connection has ended and all messages were read.
    pub async fn recv_async(&self) -> Result<Message, Error> {
        poll_fn(|context| {
            let mut inner = self.inner.borrow_mut();
            if let Some(data) = inner.take_message(self.id) {
                return Poll::Ready(Ok(self.message(data)));
            }
            inner.check(self.id, self.peer)?;
            if let Some(state) = inner.connections.get_mut(&self.id) {
                state.readers.add(context.waker());
            }
            Poll::Pending
        })
        .await
    }

    /// The next request.
    ///
    /// # Errors
    /// When the connection has ended and all requests were read.
    pub async fn next_request_async(&self) -> Result<Request, Error> {
        poll_fn(|context| {
            let mut inner = self.inner.borrow_mut();
            if let Some((call, data)) = inner.take_request(self.id) {
                return Poll::Ready(Ok(Request { message: self.message(data), call }));
            }
            inner.check(self.id, self.peer)?;
            if let Some(state) = inner.connections.get_mut(&self.id) {
                state.servers.add(context.waker());
            }
            Poll::Pending
        })
        .await
    }

    /// Sends a message, waiting while 1024 are open, and waits until it has arrived.
    ///
    /// # Errors
    /// When the connection has ended, or the message is too long.
    pub async fn send_async(&self, data: Vec<u8>) -> Result<(), Error> {
        self.room().await?;
        let message = self.post(Class::Message, 0, data)?;
        if let Some(state) = self.inner.borrow_mut().connections.get_mut(&self.id) {
            state.arrivals.insert(message, Default::default());
        }
        let arrival = Arrival { endpoint: self, message };
        poll_fn(|context| arrival.poll(context)).await
    }

    /// Sends a request, and waits for the response.
    ///
    /// # Errors
    /// When the peer refuses, the connection has ended, or the request is too long.
    pub async fn call_async(&self, request: Vec<u8>) -> Result<Message, Error> {
        self.room().await?;
        self.response_async(self.begin_call(request)?).await
    }

    /// Writes to a region of the peer; ready once the write is done.
    ///
    /// # Errors
    /// As for [`Endpoint::write`].
    pub async fn write_async(&self, region: &RemoteRegion, offset: u64, data: &[u8]) -> Result<(), Error> {
        self.room().await?;
        self.response_async(self.begin_write(region, offset, data)?).await.map(drop)
    }

    /// Reads from a region of the peer.
    ///
    /// # Errors
    /// As for [`Endpoint::read`].
    pub async fn read_async(&self, region: &RemoteRegion, offset: u64, len: u32) -> Result<Message, Error> {
        self.room().await?;
        self.response_async(self.begin_read(region, offset, len)?).await
    }

    /// Waits until another message may be sent.
    async fn room(&self) -> Result<(), Error> {
        poll_fn(|context| {
            let mut inner = self.inner.borrow_mut();
            inner.check(self.id, self.peer)?;
            if !inner.host.is_full(self.id) {
                return Poll::Ready(Ok(()));
            }
            if let Some(state) = inner.connections.get_mut(&self.id) {
                state.senders.add(context.waker());
            }
            Poll::Pending
        })
        .await
    }

    async fn response_async(&self, call: u32) -> Result<Message, Error> {
        let call = Call { endpoint: self, call };
        poll_fn(|context| call.poll(context)).await
    }
}

impl Call<'_> {
    fn poll(&self, context: &Context<'_>) -> Poll<Result<Message, Error>> {
        let Endpoint { inner, id, peer } = self.endpoint;
        let taken = inner.borrow_mut().take_response(*id, self.call);
        if let Some((class, data, expected)) = taken {
            return Poll::Ready(self.endpoint.response(class, data, expected));
        }
        let mut inner = inner.borrow_mut();
        inner.check(*id, *peer)?;
        if let Some(open) = inner.connections.get_mut(id).and_then(|state| state.calls.get_mut(&self.call)) {
            open.waiting.add(context.waker());
        }
        Poll::Pending
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.endpoint.inner.borrow_mut().forget_call(self.endpoint.id, self.call);
    }
}

impl Arrival<'_> {
    fn poll(&self, context: &Context<'_>) -> Poll<Result<(), Error>> {
        let Endpoint { inner, id, peer } = self.endpoint;
        let mut inner = inner.borrow_mut();
        let arrival = inner.connections.get_mut(id).and_then(|state| state.arrivals.get_mut(&self.message));
        match arrival {
            Some((true, _)) => return Poll::Ready(Ok(())),
            Some((false, waiting)) => waiting.add(context.waker()),
            None => {}
        }
        inner.check(*id, *peer)?;
        Poll::Pending
    }
}

impl Drop for Arrival<'_> {
    fn drop(&mut self) {
        if let Some(state) = self.endpoint.inner.borrow_mut().connections.get_mut(&self.endpoint.id) {
            state.arrivals.remove(&self.message);
        }
    }
}
