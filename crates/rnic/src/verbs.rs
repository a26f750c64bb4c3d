//! What the caller asks of the NIC.

use std::net::IpAddr;

use bifrost_wire::roce::{Qpn, Sequence, Transport};

use crate::completion::CqId;
use crate::region::{Domain, Key};

/// A new queue pair.
#[derive(Clone, Copy, Debug)]
pub struct QpInit {
    /// Its service.
    pub transport: Transport,
    /// Where completions of sends go.
    pub send_queue: CqId,
    /// Where completions of receives go.
    pub receive_queue: CqId,
    /// Send requests that may be posted and not polled, at least 1.
    pub send_depth: u16,
    /// Receive requests that may be posted and not polled, at least 1.
    pub receive_depth: u16,
    /// Whose memory it may use.
    pub domain: Domain,
    /// UD: the key that datagrams for it must have.
    pub queue_key: u32,
    /// Its packets leave before those of others.
    pub urgent: bool,
}

/// The other end of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct Connect {
    /// Where packets go, and where they must come from.
    pub address: IpAddr,
    /// UDP port there.
    pub port: u16,
    /// The queue pair there.
    pub queue_pair: Qpn,
    /// Our UDP source port: the path.
    pub source_port: u16,
    /// Number of our first packet.
    pub send_sequence: Sequence,
    /// Number of the peer's first packet.
    pub receive_sequence: Sequence,
    /// Payload of a packet, bytes: one of [`bifrost_wire::roce::PATH_MTUS`].
    pub mtu: u16,
    /// RC: repetitions without progress before the queue pair is in error.
    pub retries: u8,
    /// RC: time without progress until a repetition, ns.
    pub timeout_ns: u64,
}

/// A piece of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slice {
    /// The region.
    pub key: Key,
    /// First byte, from the begin of the region.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// Where a datagram goes.
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

/// What a send request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// Into the next receive request of the peer (RC, UC).
    Send,
    /// To a queue pair that need not be connected (UD).
    SendTo(Datagram),
    /// Into the peer's memory (RC, UC).
    Write {
        /// Where.
        address: u64,
        /// The key of the region there.
        key: u32,
    },
}

/// The most inline bytes of a send request.
pub const INLINE_MAX: usize = 32;

/// A send request: inline bytes, then those of a slice.
#[derive(Clone, Copy, Debug)]
pub struct SendRequest {
    /// Comes back in the completion.
    pub token: u64,
    /// What it does.
    pub operation: Operation,
    /// Shown in the receiver's completion.
    pub immediate: Option<u32>,
    /// Bytes that are sent first; of these [`SendRequest::inline_len`].
    pub inline: [u8; INLINE_MAX],
    /// How many, 0..=[`INLINE_MAX`].
    pub inline_len: u8,
    /// What follows.
    pub slice: Option<Slice>,
}

impl SendRequest {
    /// Bytes of the message.
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

/// A receive request: where the next SEND goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceiveRequest {
    /// Comes back in the completion.
    pub token: u64,
    /// Where to write.
    pub slice: Slice,
}

/// Why a request is not taken.
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
    /// As many requests are posted and not polled as the queue pair has room for.
    #[error("queue is full")]
    Full,
    /// The slice is not inside a region of the queue pair's domain.
    #[error("slice is not in a region of the queue pair's domain")]
    Memory,
    /// The operation is not one of the service, or the message is too long for it.
    #[error("operation or length does not suit the transport service")]
    Operation,
}

/// Why a queue pair or region cannot be made or changed.
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
    /// The system refused: what, and its error number.
    #[error("{0}: {text}", text = std::io::Error::from_raw_os_error(*.1))]
    System(&'static str, i32),
}
