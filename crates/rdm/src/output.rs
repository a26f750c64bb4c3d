//! Work that an engine requests, and its events.

use bifrost_wire::rdm::{Class, CloseReason, Control, MessageId, SendHeader};

/// A connection of an engine. A later one at the same index has another identifier.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub(crate) u32);

impl ConnectionId {
    /// The connection's index, below the engine's number of connections: for the caller's tables.
    #[must_use]
    pub const fn index(self) -> usize {
        (self.0 & 0xffff) as usize
    }

    /// A token whose low 32 bits are free, and from which [`crate::Engine::connection_of`] returns the connection.
    #[must_use]
    pub const fn token(self) -> u64 {
        (self.0 as u64) << 32
    }
}

/// A buffer of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

/// Memory for incoming messages.
pub trait Memory {
    /// Returns a buffer of `len` bytes for a message of `connection` that contains no data of other connections. With
    /// `remote`, the peer will write to it, and address and key are returned, too. `None`: not now.
    fn allocate(&mut self, connection: ConnectionId, len: u32, remote: bool) -> Option<(BufferId, u64, u32)>;
}

/// A work request.
// Boxing would allocate for each.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// A SEND: the header, then `len` bytes of a buffer.
    Send {
        /// The connection.
        connection: ConnectionId,
        /// The lane.
        lane: u8,
        /// To be passed to [`crate::Engine::on_sent`].
        token: u64,
        /// The header.
        header: [u8; SendHeader::LEN],
        /// The buffer with the payload.
        buffer: BufferId,
        /// Offset of the payload in the buffer, bytes.
        offset: u32,
        /// Length of the payload, bytes; 0: none.
        len: u32,
    },
    /// A WRITE with immediate data.
    Write {
        /// The connection.
        connection: ConnectionId,
        /// The lane.
        lane: u8,
        /// To be passed to [`crate::Engine::on_sent`].
        token: u64,
        /// The buffer to write from.
        buffer: BufferId,
        /// Offset in the buffer, bytes.
        offset: u32,
        /// Length, bytes.
        len: u32,
        /// The peer's address.
        address: u64,
        /// The peer's key.
        key: u32,
        /// The immediate data.
        immediate: u32,
    },
    /// A datagram to the peer's control queue pair.
    Control {
        /// The connection.
        connection: ConnectionId,
        /// The datagram.
        control: Control,
    },
    /// Send control datagrams from another UDP source port, and so on another path.
    Repath {
        /// The connection.
        connection: ConnectionId,
    },
    /// Reset a lane: the NIC discards what was posted on it.
    Reset {
        /// The connection.
        connection: ConnectionId,
        /// The lane.
        lane: u8,
    },
    /// Connect a lane that was reset, and post its receive requests again.
    Connect {
        /// The connection.
        connection: ConnectionId,
        /// The lane.
        lane: u8,
        /// Sequence number of our first packet.
        send_sequence: u32,
        /// Sequence number of the peer's first packet.
        receive_sequence: u32,
        /// The UDP source port, which selects another path.
        source_port: u16,
    },
}

/// Events for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message has arrived, and the caller owns its buffer. The peer cannot write to it once its key is invalidated.
    Delivered {
        /// The connection.
        connection: ConnectionId,
        /// Its number.
        message: MessageId,
        /// Its buffer.
        buffer: BufferId,
        /// Length, bytes.
        len: u32,
        /// Its class.
        class: Class,
        /// The number of the call.
        call: u32,
    },
    /// A message has arrived at the peer; the caller owns its buffer again.
    Sent {
        /// The connection.
        connection: ConnectionId,
        /// Its number.
        message: MessageId,
        /// Its buffer.
        buffer: BufferId,
    },
    /// A connection has ended. The caller owns all its buffers.
    Closed {
        /// The connection.
        connection: ConnectionId,
        /// The reason.
        reason: CloseReason,
        /// The peer ended it.
        by_peer: bool,
    },
}

/// What the caller must do, in this order: work first, then events.
#[derive(Debug, Default)]
pub struct Output {
    /// Work requests.
    pub work: Vec<Work>,
    /// Events.
    pub events: Vec<Event>,
}

impl Output {
    /// An empty output.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Removes everything and keeps the memory.
    pub fn clear(&mut self) {
        self.work.clear();
        self.events.clear();
    }
}
