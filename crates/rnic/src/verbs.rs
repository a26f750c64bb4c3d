//! Arguments of the NIC's verbs.

use std::net::IpAddr;

use bifrost_wire::roce::{Qpn, Sequence, Transport};

use crate::completion::CqId;

/// A protection domain: queue pairs can use only regions of their own domain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Domain(pub u32);

/// The key of a region, for local or remote access. A later region in the same slot has another key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(pub u32);

/// A new queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// Its service.
    pub transport: Transport,
    /// Completion queue of sends.
    pub send_queue: CqId,
    /// Completion queue of receives.
    pub receive_queue: CqId,
    /// Maximum number of send requests posted and not polled, at least 1.
    pub send_depth: u16,
    /// Maximum number of receive requests posted and not polled, at least 1.
    pub receive_depth: u16,
    /// Its protection domain.
    pub domain: Domain,
    /// UD: the key that datagrams for it must carry.
    pub queue_key: u32,
    /// Its packets are sent before those of others.
    pub urgent: bool,
}

/// The other end of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct Connect {
    /// Destination of packets, and required source of received ones.
    pub address: IpAddr,
    /// UDP port there.
    pub port: u16,
    /// The queue pair there.
    pub queue_pair: Qpn,
    /// Our UDP source port: the path.
    pub source_port: u16,
    /// PSN of our first packet.
    pub send_sequence: Sequence,
    /// PSN of the peer's first packet.
    pub receive_sequence: Sequence,
    /// Payload of a packet, bytes: one of [`bifrost_wire::roce::PATH_MTUS`].
    pub mtu: u16,
    /// RC: retries without progress before the queue pair is in error.
    pub retries: u8,
    /// RC: time without progress until a retransmission, ns.
    pub timeout_ns: u64,
}

/// A piece of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The region.
    pub key: Key,
    /// Offset in the region, bytes.
    pub offset: u32,
    /// Length, bytes.
    pub len: u32,
}

/// Destination of a datagram.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// Address.
    pub address: IpAddr,
    /// UDP port.
    pub port: u16,
    /// UDP source port.
    pub source_port: u16,
    /// Queue pair.
    pub queue_pair: Qpn,
    /// Its key.
    pub queue_key: u32,
}

/// Operation of a send request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Into the next receive request of the peer (RC, UC).
    Send,
    /// To a queue pair that need not be connected (UD).
    SendTo(Datagram),
    /// Into the peer's memory (RC, UC).
    Write {
        /// Remote address.
        address: u64,
        /// The key of the region there.
        key: u32,
    },
}

/// Maximum number of inline bytes of a send request.
pub const INLINE_MAX: usize = 32;

/// A send request: inline bytes, then those of a slice.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest {
    /// Returned in the completion.
    pub token: u64,
    /// The operation.
    pub operation: Operation,
    /// Immediate data, for the receiver's completion.
    pub immediate: Option<u32>,
    /// Bytes that are sent first; the first [`SendRequest::inline_len`] are valid.
    pub inline: [u8; INLINE_MAX],
    /// Their number, 0..=[`INLINE_MAX`].
    pub inline_len: u8,
    /// The memory that follows.
    pub slice: Option<Slice>,
}

impl SendRequest {
    /// Length of the message, bytes.
    #[must_use]
    pub fn len(&self) -> u32 {
        u32::from(self.inline_len) + self.slice.map_or(0, |slice| slice.len)
    }

    /// Nothing to send but headers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A receive request: the buffer for the next SEND.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// Returned in the completion.
    pub token: u64,
    /// The memory.
    pub slice: Slice,
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PostError {
    /// No such queue pair.
    #[error("no such queue pair")]
    UnknownQueuePair,
    /// The queue pair is not connected.
    #[error("queue pair is not connected")]
    NotConnected,
    /// The queue pair is in error.
    #[error("queue pair is in error")]
    InError,
    /// The maximum number of requests is posted and not polled.
    #[error("queue is full")]
    Full,
    /// The slice is not inside a region of the queue pair's domain.
    #[error("slice is not in a region of the queue pair's domain")]
    Memory,
    /// The service does not support the operation, or the message is too long for it.
    #[error("the transport service does not support the operation or length")]
    Operation,
}

/// Why a queue pair or region cannot be created or changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum VerbsError {
    /// All numbers are taken.
    #[error("no queue pair or region is left")]
    Exhausted,
    /// No such queue pair, completion queue or region.
    #[error("no such queue pair, completion queue or region")]
    Unknown,
    /// A value is out of range.
    #[error("value is out of range: {0}")]
    Value(&'static str),
    /// The operating system refused: operation and error number.
    #[error("{0}: {text}", text = std::io::Error::from_raw_os_error(*.1))]
    System(&'static str, i32),
}
