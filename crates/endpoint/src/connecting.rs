//! Connecting without blocking: for applications that do other work meanwhile, and for two workers of one thread that
//! connect to each other.

use std::cell::RefCell;
use std::io::{self, Read};
use std::net::{SocketAddr, TcpStream};
use std::rc::Rc;
use std::time::{Duration, Instant};

use bifrost_rdm::{CloseReason, ConnectionId};
use bifrost_wire::rdm::{Setup, SetupKind};

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::inner::Inner;
use crate::setup::{self, SetupBytes};

/// A connection that is being set up. Dropping it cancels the setup.
#[derive(Debug)]
pub struct Connecting {
    inner: Rc<RefCell<Inner>>,
    id: ConnectionId,
    peer: SocketAddr,
    hello: Setup,
    /// Taken when the connection is established.
    stream: Option<TcpStream>,
    sent: bool,
    answer: SetupBytes,
    until: Instant,
}

impl Connecting {
    pub(crate) fn new(inner: Rc<RefCell<Inner>>, peer: SocketAddr, timeout: Duration) -> Result<Self, Error> {
        let local = inner.borrow().config.address;
        let stream = setup::open(local, peer).map_err(|error| Error::Setup(peer, error))?;
        let prepared = {
            let mut inner = inner.borrow_mut();
            let limits = inner.limits();
            inner.host.prepare(SetupKind::Hello, limits)
        };
        let (id, hello) = prepared.map_err(|error| Error::Host(peer, error))?;
        let (answer, until) = (([0; Setup::MAX_LEN], 0), Instant::now() + timeout);
        Ok(Self { inner, id, peer, hello, stream: Some(stream), sent: false, answer, until })
    }

    /// The peer's address.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Continues without blocking. Returns the endpoint once the peer has answered. Also polls the worker.
    ///
    /// # Errors
    /// When the peer cannot be reached, refuses, or has incompatible settings, or on timeout. After an error, or after
    /// the endpoint was returned, all further calls fail.
    pub fn try_finish(&mut self) -> Result<Option<Endpoint>, Error> {
        self.inner.borrow_mut().poll()?;
        let peer = self.peer;
        let Some(stream) = &mut self.stream else {
            return Err(Error::Closed { peer, why: "its setup has ended already" });
        };
        let failed = match advance(stream, &self.hello, &mut self.sent, &mut self.answer) {
            Ok(true) => None,
            Ok(false) if Instant::now() < self.until => return Ok(None),
            Ok(false) => Some(Error::Timeout(peer)),
            Err(error) => Some(Error::Setup(peer, error)),
        };
        let stream = self.stream.take();
        let connected = match (failed, stream) {
            (None, Some(stream)) => self.inner.borrow_mut().on_answer(self.id, peer, stream, &self.answer),
            (Some(error), _) => Err(error),
            (None, None) => Err(Error::Timeout(peer)),
        };
        match connected {
            Ok(()) => Ok(Some(Endpoint { inner: self.inner.clone(), id: self.id, peer })),
            Err(error) => {
                self.cancel();
                Err(error)
            }
        }
    }

    fn cancel(&mut self) {
        self.inner.borrow_mut().host.close(self.id, CloseReason::Done);
    }
}

impl Drop for Connecting {
    fn drop(&mut self) {
        if self.stream.take().is_some() {
            self.cancel();
        }
    }
}

/// Sends the setup message once the stream is open, and receives the answer. Returns whether the answer is complete.
fn advance(stream: &mut TcpStream, hello: &Setup, sent: &mut bool, answer: &mut SetupBytes) -> io::Result<bool> {
    if !*sent {
        if !setup::is_open(stream)? {
            return Ok(false);
        }
        setup::send(stream, hello)?;
        *sent = true;
    }
    let (bytes, len) = answer;
    loop {
        let due = Setup::len_of(&bytes[..*len]);
        if *len == due {
            return Ok(true);
        }
        match stream.read(&mut bytes[*len..due]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => *len += count,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
