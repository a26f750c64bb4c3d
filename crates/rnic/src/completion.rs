//! Completion queues.

use std::collections::VecDeque;
use std::net::IpAddr;

use bifrost_wire::roce::Qpn;

/// A completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CqId(pub(crate) u16);

impl CqId {
    /// The queue with that number, for providers.
    #[must_use]
    pub const fn new(index: u16) -> Self {
        Self(index)
    }

    /// Its number.
    #[must_use]
    pub const fn index(self) -> u16 {
        self.0
    }
}

/// The completed operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionKind {
    /// A send request. UC, UD: its packets were sent. RC: the peer has acknowledged them.
    Send,
    /// A SEND has arrived.
    Receive,
    /// A WRITE with immediate data has arrived; it has consumed a receive request, but not its memory.
    ReceiveWrite,
}

/// Status of a completion (IBTA 11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success.
    Success,
    /// The queue pair entered the error state, or was reset, before the request completed.
    Flushed,
    /// The peer did not acknowledge after all retries.
    RetryExceeded,
    /// The peer had no receive request after all retries.
    ReceiverNotReady,
    /// The peer refused key, address or length.
    RemoteAccess,
    /// The peer refused the request.
    RemoteInvalid,
    /// The region of the request is no longer registered.
    LocalProtection,
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// Identifier of the request.
    pub token: u64,
    /// The queue pair of the request.
    pub queue_pair: Qpn,
    /// The operation.
    pub kind: CompletionKind,
    /// The status.
    pub status: Status,
    /// Receives: length of the message, bytes.
    pub len: u32,
    /// Receives: immediate data.
    pub immediate: Option<u32>,
    /// UD receives: source of the datagram.
    pub source: Option<(IpAddr, Qpn)>,
    /// Time on the NIC's clock, ns.
    pub time_ns: u64,
}

/// Completions to be polled. At most as many as requests that are posted and not polled, which the depths of the queue
/// pairs bound.
#[derive(Debug, Default)]
pub(crate) struct CompletionQueue(pub(crate) VecDeque<Completion>);
