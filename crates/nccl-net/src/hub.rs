//! A worker with its listeners and connections.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bifrost_endpoint::{Connecting, Endpoint, Listener, Worker};

use crate::comm::Comm;
use crate::fail::Fail;
use crate::ffi::HANDLE_LEN;
use crate::frame::Frame;
use crate::token::ID_MASK;

/// Time limit of a connection's setup, and of its first message.
const SETUP_TIME: Duration = Duration::from_secs(30);
/// Maximum number of peers of a listener that have not identified themselves.
const PENDING_MAX: usize = 16;

/// The state that a worker's lock protects.
#[derive(Debug)]
pub(crate) struct Hub {
    pub(crate) worker: Worker,
    /// The descriptor that is readable when packets arrive.
    pub(crate) descriptor: Arc<OwnedFd>,
    pub(crate) comms: HashMap<u32, Comm>,
    pub(crate) listens: HashMap<u32, Listen>,
    pub(crate) connecting: HashMap<u32, Waiting>,
    next: u32,
    /// When it was last polled.
    pub(crate) polled: Instant,
}

// SAFETY: the contents that are not `Send` are counted references (`Rc`) to the worker, and
// pointers to the application's memory. All references are inside this value, so they move
// together. The application guarantees its memory (`Target::new`, `Comm::send`) regardless of the
// thread.
unsafe impl Send for Hub {}

/// A listener.
#[derive(Debug)]
pub(crate) struct Listen {
    listener: Listener,
    nonce: u64,
    /// Peers that have not yet sent their first message.
    pending: Vec<(Endpoint, Instant)>,
}

/// A connection that is being set up, with an unpredictable number.
#[derive(Debug)]
pub(crate) struct Waiting {
    connecting: Connecting,
    pub(crate) secret: u64,
}

/// The handle that the connecting end gets, in the 128 bytes that NCCL transports; from its first
/// call on, also the state of its setup.
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

    /// Polls the worker and all connections. Returns whether anything was due.
    pub(crate) fn progress(&mut self) -> Result<bool, Fail> {
        let busy = self.poll()?;
        self.comms.values_mut().for_each(Comm::progress);
        Ok(busy)
    }

    /// Polls the worker. Returns whether anything was due.
    pub(crate) fn poll(&mut self) -> Result<bool, Fail> {
        self.polled = Instant::now();
        self.worker.poll().map_err(|error| Fail::System(error.to_string()))
    }

    /// Listens on an address. Returns the listener's number, and the handle for the peer.
    pub(crate) fn listen(&mut self, address: IpAddr) -> Result<(u32, Handle), Fail> {
        let listener = self.worker.listen((address, 0).into()).map_err(|error| Fail::System(error.to_string()))?;
        let at = listener.local_addr().map_err(|error| Fail::System(error.to_string()))?;
        let nonce = unpredictable();
        let id = self.id();
        self.listens.insert(id, Listen { listener, nonce, pending: Vec::new() });
        Ok((id, Handle { at, nonce, stage: (0, 0) }))
    }

    /// The next peer that has connected and sent the right number.
    pub(crate) fn accept(&mut self, id: u32) -> Result<Option<u32>, Fail> {
        self.poll()?;
        let unknown = || Fail::Argument("unknown listener".to_owned());
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
            let frame = first.as_ref().ok().and_then(Option::as_ref).map(|message| Frame::parse(message));
            match frame {
                Some(Some(Frame::Hello { nonce })) if nonce == listen.nonce => {
                    drop(first);
                    let (endpoint, _) = listen.pending.swap_remove(at);
                    let id = self.id();
                    self.comms.insert(id, Comm::receiver(endpoint));
                    return Ok(Some(id));
                }
                None if first.is_ok() && Instant::now() < *until => at += 1,
                // An unknown peer, or one that is gone.
                _ => {
                    drop(first);
                    drop(listen.pending.swap_remove(at));
                }
            }
        }
        Ok(None)
    }

    /// Begins to connect. Returns the connection's number and its secret.
    pub(crate) fn connect(&mut self, peer: SocketAddr) -> Result<(u32, u64), Fail> {
        let connecting =
            self.worker.begin_connect(peer, SETUP_TIME).map_err(|error| Fail::Remote(error.to_string()))?;
        let secret = unpredictable();
        let id = self.id();
        self.connecting.insert(id, Waiting { connecting, secret });
        Ok((id, secret))
    }

    /// Continues to connect. Returns the connection's number once it is set up.
    pub(crate) fn finish(&mut self, id: u32, nonce: u64) -> Result<Option<u32>, Fail> {
        self.polled = Instant::now();
        let unknown = || Fail::Argument("no connection is being set up with this handle".to_owned());
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

    /// An unused number.
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

    /// Parses a handle; `None`: it is invalid.
    pub(crate) fn parse(bytes: &[u8; HANDLE_LEN]) -> Option<Self> {
        let number = |at: usize| Some(u64::from_be_bytes(*bytes[at..].first_chunk()?));
        let address = Ipv6Addr::from(*bytes[8..].first_chunk::<16>()?);
        let port = u16::from_be_bytes(*bytes[24..].first_chunk()?);
        (bytes[..8] == Self::MARK && port != 0).then_some(())?;
        let at = SocketAddr::new(IpAddr::V6(address).to_canonical(), port);
        Some(Self { at, nonce: number(32)?, stage: (number(40)?, number(48)?) })
    }
}

/// 64 unpredictable bits from the system, by way of the standard library.
fn unpredictable() -> u64 {
    RandomState::new().build_hasher().finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_survive_encoding() {
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
