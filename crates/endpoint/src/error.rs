//! Errors.

use std::io;
use std::net::SocketAddr;

use bifrost_rdm::{CloseReason, SendError};
use bifrost_verbs::AnyError;
use bifrost_wire::rdm::{Refusal, SetupRefusal};

use crate::host::HostError;

/// Why an operation failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A socket could not be created.
    #[error("cannot bind {0}: {1}")]
    Bind(SocketAddr, io::Error),
    /// There is no usable RDMA NIC.
    #[error("no RDMA NIC for {0}: {1}")]
    Provider(SocketAddr, AnyError),
    /// The peer cannot be reached for connection setup.
    #[error("cannot set up a connection with {0}: {1}")]
    Setup(SocketAddr, io::Error),
    /// The peer's setup message is invalid.
    #[error("{0} does not speak this protocol: {1}")]
    Protocol(SocketAddr, Refusal),
    /// The peer refused.
    #[error("{0} refused the connection: {1}")]
    Refused(SocketAddr, &'static str),
    /// This end lacks resources, or the two ends have incompatible settings.
    #[error("connection with {0}: {1}")]
    Host(SocketAddr, HostError),
    /// The socket of the NIC failed.
    #[error("the software NIC's socket failed: {0}")]
    Socket(#[from] io::Error),
    /// The connection has ended.
    #[error("connection with {peer} has ended: {why}")]
    Closed {
        /// The peer.
        peer: SocketAddr,
        /// The reason.
        why: &'static str,
    },
    /// A message was refused.
    #[error("connection with {peer}: {error}")]
    Send {
        /// The peer.
        peer: SocketAddr,
        /// The reason.
        error: SendError,
    },
    /// The connection has no queue pairs of the requested service.
    #[error("the connection with {0} has no queue pairs of that service; configure `Service::Both` at both ends")]
    Service(SocketAddr),
    /// The file that selects the service is unusable.
    #[error("cannot follow a file that selects the service: {0}")]
    Flag(String),
    /// Timeout.
    #[error("timeout while waiting for {0}")]
    Timeout(SocketAddr),
    /// An access outside the region.
    #[error("{len} bytes at offset {offset} are not inside a region of {region} bytes")]
    Range {
        /// Offset, bytes.
        offset: u64,
        /// Length, bytes.
        len: u64,
        /// Length of the region, bytes.
        region: u64,
    },
    /// The peer's response to a memory access has the wrong length.
    #[error("{0} responded to a memory access with the wrong number of bytes")]
    Answer(SocketAddr),
    /// The peer refused a request.
    #[error("{0} refused: {1}")]
    Failure(SocketAddr, String),
}

impl Error {
    /// Whether 1024 messages are open: wait for some to arrive.
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::Send { error: SendError::Full, .. })
    }
}

/// A reason for the end of a connection, as text.
pub(crate) fn reason(reason: CloseReason, by_peer: bool) -> &'static str {
    match (reason, by_peer) {
        (CloseReason::Done, true) => "the peer closed it",
        (CloseReason::Done, false) => "this end closed it",
        (CloseReason::Protocol, true) => "the peer reports that this end violated the protocol",
        (CloseReason::Protocol, false) => "the peer violated the protocol",
        (CloseReason::Silence, true) => "the peer heard nothing from this end",
        (CloseReason::Silence, false) => "the peer did not respond on any path",
    }
}

/// A refusal as text.
pub(crate) fn refusal(refusal: SetupRefusal) -> &'static str {
    match refusal {
        SetupRefusal::Version => "no protocol version in common",
        SetupRefusal::Parameters => "it uses another transport service or path MTU",
        SetupRefusal::Resources => "it has no room for another connection",
        SetupRefusal::Policy => "the setup message names an address other than its source",
    }
}
