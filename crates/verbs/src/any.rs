//! Chooses the provider for a host: its RDMA NIC, or software if it has none.

use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;

use bifrost_rnic::{
    Access, Completion, Connect, Counters, CqId, Domain, Key, PostError, QpInit, Qpn, ReceiveRequest, Region,
    SendRequest, Slice, VerbsError,
};

use crate::provider::Provider;
use crate::rdma_core::{OpenError, RdmaCore, RdmaCoreConfig};
use crate::soft::{Soft, SoftConfig, SoftCounters};

/// The requested provider.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// The RDMA NIC that has the address, if there is a usable one; software otherwise.
    #[default]
    Auto,
    /// The RDMA NIC that has the address.
    Verbs,
    /// RoCEv2 over UDP sockets.
    Soft,
}

/// Why there is no provider.
#[derive(Debug, thiserror::Error)]
pub enum AnyError {
    /// The software NIC's address or port cannot be bound.
    #[error("cannot bind {0}: {1}")]
    Bind(SocketAddr, io::Error),
    /// There is no RDMA NIC for the address.
    #[error(transparent)]
    Verbs(#[from] OpenError),
    /// The RDMA NIC does not support the settings.
    #[error("{0}")]
    Unfit(String),
}

/// One of the two providers.
#[derive(Debug)]
enum Either {
    Soft(Box<Soft>),
    Verbs(Box<RdmaCore>),
}

/// A provider, and why it was chosen.
#[derive(Debug)]
pub struct Any {
    nic: Either,
    /// Why the RDMA NIC was not chosen.
    reason: Option<String>,
}

impl Any {
    /// Creates a provider with packets of up to `mtu` bytes of payload. Its [`fmt::Display`] tells which one was
    /// chosen.
    ///
    /// # Errors
    /// If the requested one cannot be used; with [`Choice::Auto`] if none can.
    pub fn new(choice: Choice, config: SoftConfig, mtu: u16) -> Result<Self, AnyError> {
        let reason = match choice {
            Choice::Soft => Some("as wanted".to_owned()),
            Choice::Verbs => return Ok(Self::of(Either::Verbs(Box::new(verbs(config, mtu)?)), None)),
            Choice::Auto => match verbs(config, mtu) {
                Ok(nic) => return Ok(Self::of(Either::Verbs(Box::new(nic)), None)),
                // The remedies matter only to users who want a NIC.
                Err(AnyError::Verbs(OpenError::NoDevice)) => Some("this host has no RDMA device".to_owned()),
                Err(error) => Some(error.to_string()),
            },
        };
        let at = SocketAddr::new(config.address, config.port);
        let soft = Soft::new(config).map_err(|error| AnyError::Bind(at, error))?;
        Ok(Self::of(Either::Soft(Box::new(soft)), reason))
    }

    fn of(nic: Either, reason: Option<String>) -> Self {
        Self { nic, reason }
    }

    /// The software NIC, if it was chosen.
    #[must_use]
    pub fn soft(&self) -> Option<&Soft> {
        match &self.nic {
            Either::Soft(soft) => Some(soft),
            Either::Verbs(_) => None,
        }
    }

    /// The RDMA NIC, if it was chosen.
    #[must_use]
    pub fn verbs(&self) -> Option<&RdmaCore> {
        match &self.nic {
            Either::Soft(_) => None,
            Either::Verbs(nic) => Some(nic),
        }
    }

    /// The clock for callers, ns since the provider was created.
    #[must_use]
    pub fn now_ns(&self) -> u64 {
        match &self.nic {
            Either::Soft(soft) => soft.now_ns(),
            Either::Verbs(nic) => nic.now_ns(),
        }
    }

    /// When the timers are due, ns.
    #[must_use]
    pub fn next_deadline(&self) -> u64 {
        match &self.nic {
            Either::Soft(soft) => soft.next_deadline(),
            Either::Verbs(_) => u64::MAX,
        }
    }

    /// Readable when something has arrived, after [`Any::arm`].
    #[must_use]
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        match &self.nic {
            Either::Soft(soft) => soft.descriptor(),
            Either::Verbs(nic) => nic.descriptor(),
        }
    }

    /// Prepares for waiting on the descriptor. Returns whether something has arrived already.
    pub fn arm(&mut self) -> bool {
        match &mut self.nic {
            Either::Soft(_) => false,
            Either::Verbs(nic) => nic.arm(),
        }
    }

    /// Receives. Returns the number of packets, if this process receives them itself.
    ///
    /// # Errors
    /// If the software NIC's socket fails.
    pub fn receive(&mut self) -> io::Result<usize> {
        match &mut self.nic {
            Either::Soft(soft) => soft.receive(),
            Either::Verbs(nic) => {
                nic.disarm();
                Ok(0)
            }
        }
    }

    /// Sends everything that was posted. Returns the number of packets or requests.
    pub fn transmit(&mut self) -> usize {
        match &mut self.nic {
            Either::Soft(soft) => soft.transmit(),
            Either::Verbs(nic) => nic.transmit(),
        }
    }

    /// Counters of the software NIC and its socket; 0 if it is not used.
    #[must_use]
    pub fn soft_counters(&self) -> (Counters, SoftCounters) {
        self.soft().map_or_else(Default::default, |soft| (*soft.nic_counters(), *soft.counters()))
    }
}

impl fmt::Display for Any {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = SocketAddr::new(self.address(), self.port());
        match &self.nic {
            Either::Soft(_) => write!(f, "soft: RoCEv2 over UDP at {at}")?,
            Either::Verbs(nic) => write!(f, "verbs: {} at {at}", nic.description())?,
        }
        match &self.reason {
            Some(reason) => write!(f, " ({reason})"),
            None => Ok(()),
        }
    }
}

/// The RDMA NIC that has the address, if it supports the settings.
fn verbs(config: SoftConfig, mtu: u16) -> Result<RdmaCore, AnyError> {
    let SoftConfig { address, port, queue_pairs, regions, seed } = config;
    if port != bifrost_wire::roce::UDP_PORT {
        return Err(AnyError::Unfit(format!("UDP port {port} is configured, but an RDMA NIC receives only on 4791")));
    }
    let nic = RdmaCore::new(RdmaCoreConfig { address, queue_pairs, regions, seed })?;
    if mtu > nic.mtu() {
        return Err(AnyError::Unfit(format!(
            "packets of {mtu} bytes are configured, but the path MTU of the RDMA NIC is {}: choose a smaller one, or raise the \
             MTU of its network device",
            nic.mtu()
        )));
    }
    Ok(nic)
}

/// Forwards a call.
macro_rules! either {
    ($self:expr, $nic:ident => $call:expr) => {
        match $self {
            Either::Soft($nic) => $call,
            Either::Verbs($nic) => $call,
        }
    };
}

impl Provider for Any {
    fn address(&self) -> IpAddr {
        either!(&self.nic, nic => nic.address())
    }
    fn port(&self) -> u16 {
        either!(&self.nic, nic => nic.port())
    }
    fn clock_ns(&mut self, now_ns: u64) -> u64 {
        either!(&mut self.nic, nic => nic.clock_ns(now_ns))
    }
    fn create_queue(&mut self) -> Result<CqId, VerbsError> {
        either!(&mut self.nic, nic => nic.create_queue())
    }
    fn create_queue_pair(&mut self, init: QpInit) -> Result<Qpn, VerbsError> {
        either!(&mut self.nic, nic => nic.create_queue_pair(init))
    }
    fn connect(&mut self, queue_pair: Qpn, peer: Connect) -> Result<(), VerbsError> {
        either!(&mut self.nic, nic => nic.connect(queue_pair, peer))
    }
    fn reset(&mut self, queue_pair: Qpn) -> Result<(), VerbsError> {
        either!(&mut self.nic, nic => nic.reset(queue_pair))
    }
    fn destroy(&mut self, queue_pair: Qpn) -> Result<(), VerbsError> {
        either!(&mut self.nic, nic => nic.destroy(queue_pair))
    }
    fn register(&mut self, domain: Domain, access: Access, memory: Vec<u8>) -> Result<Region, (VerbsError, Vec<u8>)> {
        either!(&mut self.nic, nic => nic.register(domain, access, memory))
    }
    fn deregister(&mut self, key: Key) -> Option<Vec<u8>> {
        either!(&mut self.nic, nic => nic.deregister(key))
    }
    fn bytes(&self, slice: Slice) -> Option<&[u8]> {
        either!(&self.nic, nic => nic.bytes(slice))
    }
    fn bytes_mut(&mut self, slice: Slice) -> Option<&mut [u8]> {
        either!(&mut self.nic, nic => nic.bytes_mut(slice))
    }
    fn copy(&mut self, from: Slice, to: Slice) -> bool {
        either!(&mut self.nic, nic => nic.copy(from, to))
    }
    fn post_send(&mut self, queue_pair: Qpn, request: SendRequest) -> Result<(), PostError> {
        either!(&mut self.nic, nic => nic.post_send(queue_pair, request))
    }
    fn post_receive(&mut self, queue_pair: Qpn, request: ReceiveRequest) -> Result<(), PostError> {
        either!(&mut self.nic, nic => nic.post_receive(queue_pair, request))
    }
    fn poll(&mut self, queue: CqId, max: usize, out: &mut Vec<Completion>) -> usize {
        either!(&mut self.nic, nic => nic.poll(queue, max, out))
    }
}
