//! A worker with its listeners and connections.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bifrost_endpoint::{Connecting, Endpoint, Listener, Worker};

use crate::comm::Comm;
use crate::ffi::HANDLE_LEN;
use crate::frame::Frame;
use crate::plugin::{Fail, unpredictable};
use crate::token::ID_MASK;

/// For how long a connection may take, and its first message.
const SETUP_TIME: Duration = Duration::from_secs(30);
/// Peers that have connected to a listener and not said who they are, at most.
const PENDING_MAX: usize = 16;

/// What is behind a worker's lock.
#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) worker: Worker,
    /// What it receives on.
    pub(crate) descriptor: Arc<OwnedFd>,
    pub(crate) comms: HashMap<u32, Comm>,
    pub(crate) listens: HashMap<u32, Listen>,
    pub(crate) connecting: HashMap<u32, Waiting>,
    next: u32,
    /// When it was polled last.
    pub(crate) polled: Instant,
}

// SAFETY: what is not `Send` in here are counted references (`Rc`) to the worker and pointers to
// memory of the application. All references are inside of this one value, so they move together;
// the memory is the application's promise (`Target::new`, `Comm::send`), which does not depend on
// threads.
unsafe impl Send for Hub {}

/// A listener.
#[derive(Debug)]
pub(crate) struct Listen {
    listener: Listener,
    nonce: u64,
    /// Peers whose first message is waited for.
    pending: Vec<(Endpoint, Instant)>,
}

/// A connection that is being set up, with a number that nobody can guess.
#[derive(Debug)]
pub(crate) struct Waiting {
    connecting: Connecting,
    pub(crate) secret: u64,
}

/// What the end that connects is told, in the 128 bytes that NCCL carries there; and, from its
/// first call on, what it is at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Handle {
    pub(crate) at: SocketAddr,
    pub(crate) nonce: u64,
    /// The connection that is being set up, and its secret; 0: none.
    pub(crate) stage: (u64, u64),
}

impl Hub {
    pub(crate) fn new(worker: Worker) -> Result<Self, Fail> {
        let descriptor = worker.descriptor().map_err(|error| Fail::System(error.to_string()))?;
        Ok(Self {
            worker,
            descriptor: Arc::new(descriptor),
            comms: HashMap::new(),
            listens: HashMap::new(),
            connecting: HashMap::new(),
            next: 0,
            polled: Instant::now(),
        })
    }

    /// Does what there is to do for all connections: takes what has come in, sends what may be
    /// sent. Whether there was something.
    pub(crate) fn progress(&mut self) -> Result<bool, Fail> {
        let busy = self.poll()?;
        self.comms.values_mut().for_each(Comm::progress);
        Ok(busy)
    }

    /// Polls the worker; whether there was something to do.
    pub(crate) fn poll(&mut self) -> Result<bool, Fail> {
        self.polled = Instant::now();
        self.worker.poll().map_err(|error| Fail::System(error.to_string()))
    }

    /// Listens at an address: what the peer must be told, but for its number here.
    pub(crate) fn listen(&mut self, address: IpAddr) -> Result<(u32, Handle), Fail> {
        let listener = self.worker.listen((address, 0).into()).map_err(|error| Fail::System(error.to_string()))?;
        let at = listener.local_addr().map_err(|error| Fail::System(error.to_string()))?;
        let nonce = unpredictable();
        let id = self.id();
        self.listens.insert(id, Listen { listener, nonce, pending: Vec::new() });
        Ok((id, Handle { at, nonce, stage: (0, 0) }))
    }

    /// The next peer that has connected and was told the number.
    pub(crate) fn accept(&mut self, id: u32) -> Result<Option<u32>, Fail> {
        self.poll()?;
        let unknown = || Fail::Argument("there is no such listener".to_owned());
        let listen = self.listens.get_mut(&id).ok_or_else(unknown)?;
        while listen.pending.len() < PENDING_MAX {
            let accepted = self.worker.try_accept(&mut listen.listener);
            match accepted.map_err(|error| Fail::System(error.to_string()))? {
                Some(endpoint) => listen.pending.push((endpoint, Instant::now() + SETUP_TIME)),
                None => break,
            }
        }
        let mut at = 0;
        while let Some((endpoint, until)) = listen.pending.get(at) {
            let first = endpoint.next_queued();
            let said = first.as_ref().ok().and_then(Option::as_ref).map(|message| Frame::parse(message));
            match said {
                Some(Some(Frame::Hello { nonce })) if nonce == listen.nonce => {
                    drop(first);
                    let (endpoint, _) = listen.pending.swap_remove(at);
                    let id = self.id();
                    self.comms.insert(id, Comm::receiver(endpoint));
                    return Ok(Some(id));
                }
                None if first.is_ok() && Instant::now() < *until => at += 1,
                // A stranger, or one that is gone.
                _ => {
                    drop(first);
                    drop(listen.pending.swap_remove(at));
                }
            }
        }
        Ok(None)
    }

    /// Begins to connect: its number here, and the secret that belongs to it.
    pub(crate) fn connect(&mut self, peer: SocketAddr) -> Result<(u32, u64), Fail> {
        let connecting =
            self.worker.begin_connect(peer, SETUP_TIME).map_err(|error| Fail::Remote(error.to_string()))?;
        let secret = unpredictable();
        let id = self.id();
        self.connecting.insert(id, Waiting { connecting, secret });
        Ok((id, secret))
    }

    /// Goes on with connecting; the connection's number, once there is one.
    pub(crate) fn finish(&mut self, id: u32, nonce: u64) -> Result<Option<u32>, Fail> {
        self.polled = Instant::now();
        let unknown = || Fail::Argument("nothing is being connected by this handle".to_owned());
        let waiting = self.connecting.get_mut(&id).ok_or_else(unknown)?;
        match waiting.connecting.try_finish() {
            Ok(None) => Ok(None),
            Ok(Some(endpoint)) => {
                self.connecting.remove(&id);
                let comm = Comm::sender(endpoint, nonce)?;
                let id = self.id();
                self.comms.insert(id, comm);
                Ok(Some(id))
            }
            Err(error) => {
                self.connecting.remove(&id);
                Err(Fail::Remote(error.to_string()))
            }
        }
    }

    /// A number that nothing here has.
    fn id(&mut self) -> u32 {
        loop {
            self.next = (self.next + 1) & ID_MASK;
            let id = self.next;
            if !self.comms.contains_key(&id) && !self.listens.contains_key(&id) && !self.connecting.contains_key(&id) {
                return id;
            }
        }
    }
}

impl Handle {
    const MARK: [u8; 8] = *b"BNCCL\0\0\x01";

    pub(crate) fn emit(&self) -> [u8; HANDLE_LEN] {
        let address = match self.at.ip() {
            IpAddr::V4(address) => address.to_ipv6_mapped(),
            IpAddr::V6(address) => address,
        };
        let mut out = [0; HANDLE_LEN];
        out[..8].copy_from_slice(&Self::MARK);
        out[8..24].copy_from_slice(&address.octets());
        out[24..26].copy_from_slice(&self.at.port().to_be_bytes());
        out[32..40].copy_from_slice(&self.nonce.to_be_bytes());
        out[40..48].copy_from_slice(&self.stage.0.to_be_bytes());
        out[48..56].copy_from_slice(&self.stage.1.to_be_bytes());
        out
    }

    /// Reads a handle; `None` is not one.
    pub(crate) fn parse(bytes: &[u8; HANDLE_LEN]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_be_bytes(*bytes[at..].first_chunk()?));
        let address = Ipv6Addr::from(*bytes[8..].first_chunk::<16>()?);
        let port = u16::from_be_bytes(*bytes[24..].first_chunk()?);
        (bytes[..8] == Self::MARK && port != 0).then_some(())?;
        let at = SocketAddr::new(IpAddr::V6(address).to_canonical(), port);
        Some(Self { at, nonce: number(32)?, stage: (number(40)?, number(48)?) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_are_read_as_they_were_written() {
        for at in ["[fd00::1]:700", "10.1.2.3:65535"] {
            let handle = Handle { at: at.parse().unwrap(), nonce: 77, stage: (1 << 60, 3) };
            let mut bytes = handle.emit();
            assert_eq!(Handle::parse(&bytes), Some(handle));
            bytes[0] ^= 1;
            assert_eq!(Handle::parse(&bytes), None);
        }
        assert_eq!(Handle::parse(&[0; HANDLE_LEN]), None);
    }
}
