//! Completion queues.

use std::collections::VecDeque;
use std::net::IpAddr;

use bifrost_wire::roce::Qpn;

/// A completion queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CqId(pub(crate) u16);

impl CqId {
    /// The queue of that number, for providers.
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

/// What has been done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompletionKind {
    /// A send request. UC, UD: its packets have left. RC: the peer has acknowledged them.
    Send,
    /// A SEND has come in.
    Receive,
    /// A WRITE with immediate data has come in; it has taken a receive request, but not its memory.
    ReceiveWrite,
}

/// How it went (IBTA 11.6.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// As wanted.
    Success,
    /// The queue pair was in error, or was reset, before the request was done.
    Flushed,
    /// The peer did not acknowledge, however often it was repeated.
    RetryExceeded,
    /// The peer had no receive request, however often it was asked.
    ReceiverNotReady,
    /// The peer refused key, address or length.
    RemoteAccess,
    /// The peer refused the request.
    RemoteInvalid,
    /// The region of the request is registered no more.
    LocalProtection,
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The request's.
    pub token: u64,
    /// The queue pair of the request.
    pub queue_pair: Qpn,
    /// What has been done.
    pub kind: CompletionKind,
    /// How it went.
    pub status: Status,
    /// Receives: bytes of the message.
    pub len: u32,
    /// Receives: immediate data.
    pub immediate: Option<u32>,
    /// UD receives: where the datagram came from.
    pub source: Option<(IpAddr, Qpn)>,
    /// When, ns of the NIC's clock.
    pub time_ns: u64,
}

/// Completions to be polled. As many as requests of its queue pairs are posted and not polled, which their depths bound.
#[derive(Debug, Default)]
pub(crate) struct CompletionQueue(pub(crate) VecDeque<Completion>);
