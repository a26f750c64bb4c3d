//! What can go wrong, in words.

use std::io;
use std::net::SocketAddr;

use bifrost_rdm::{CloseReason, SendError};
use bifrost_verbs::AnyError;
use bifrost_wire::rdm::{Refusal, SetupRefusal};

use crate::host::HostError;

/// Why something failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A socket could not be made.
    #[error("cannot bind {0}: {1}")]
    Bind(SocketAddr, io::Error),
    /// There is no RDMA NIC that can be used.
    #[error("no RDMA NIC for {0}: {1}")]
    Provider(SocketAddr, AnyError),
    /// The peer cannot be reached to set a connection up.
    #[error("cannot set up a connection with {0}: {1}")]
    Setup(SocketAddr, io::Error),
    /// The peer's set-up message makes no sense.
    #[error("{0} does not speak this protocol: {1}")]
    Protocol(SocketAddr, Refusal),
    /// The peer refused.
    #[error("{0} refused the connection: {1}")]
    Refused(SocketAddr, &'static str),
    /// This end has no room, or the ends do not fit.
    #[error("connection with {0}: {1}")]
    Host(SocketAddr, HostError),
    /// The socket of the NIC failed.
    #[error("the software NIC's socket: {0}")]
    Socket(#[from] io::Error),
    /// The connection has ended.
    #[error("connection with {peer} has ended: {why}")]
    Closed {
        /// With whom.
        peer: SocketAddr,
        /// Why.
        why: &'static str,
    },
    /// A message is not taken.
    #[error("connection with {peer}: {error}")]
    Send {
        /// To whom.
        peer: SocketAddr,
        /// Why.
        error: SendError,
    },
    /// The connection has no queue pairs of that service.
    #[error("the connection with {0} has no queue pairs of that service: both ends must set up both")]
    Service(SocketAddr),
    /// A file cannot choose the service.
    #[error("the file that chooses the service: {0}")]
    Flag(String),
    /// It took too long.
    #[error("nothing from {0} in time")]
    Timeout(SocketAddr),
    /// An access to memory that would leave the region.
    #[error("{len} bytes at offset {offset} are not inside of a region of {region} bytes")]
    Range {
        /// Where, bytes.
        offset: u64,
        /// How many bytes.
        len: u64,
        /// Bytes of the region.
        region: u64,
    },
    /// The peer's response to an access to its memory has another length than was asked for.
    #[error("{0} answered an access to its memory with another number of bytes")]
    Answer(SocketAddr),
    /// The peer could not do what it was asked for.
    #[error("{0} says: {1}")]
    Failure(SocketAddr, String),
}

impl Error {
    /// Whether 1024 messages are open: wait for some to arrive.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Send { error: SendError::Full, .. })
    }
}

/// A reason in words.
pub(crate) fn reason(reason: CloseReason, by_peer: bool) -> &'static str {
    match (reason, by_peer) {
        (CloseReason::Done, true) => "the peer closed it",
        (CloseReason::Done, false) => "it was closed here",
        (CloseReason::Protocol, true) => "the peer says that this end broke the protocol",
        (CloseReason::Protocol, false) => "the peer broke the protocol",
        (CloseReason::Silence, true) => "the peer did not hear this end",
        (CloseReason::Silence, false) => "the peer did not answer, on any path",
    }
}

/// A refusal in words.
pub(crate) fn refusal(refusal: SetupRefusal) -> &'static str {
    match refusal {
        SetupRefusal::Version => "no protocol version in common",
        SetupRefusal::Parameters => "it uses another transport service or path MTU",
        SetupRefusal::Resources => "it has no room for another connection",
        SetupRefusal::Policy => "the address in the set-up message is not the one that it came from",
    }
}
