//! What an engine wants to be done.

use bifrost_wire::rdm::{Class, CloseReason, Control, MessageId, SendHeader};

/// A connection of an engine. A later one in its place has another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId(pub(crate) u32);

impl ConnectionId {
    /// The connection's place, below the engine's number of connections: for tables beside the engine.
    #[must_use]
    pub const fn index(self) -> usize {
        (self.0 & 0xffff) as usize
    }

    /// A token whose low 32 bits are free, and which [`crate::Engine::connection_of`] knows.
    #[must_use]
    pub const fn token(self) -> u64 {
        (self.0 as u64) << 32
    }
}

/// A buffer of the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BufferId(pub u32);

/// Memory for messages that come in.
pub trait Memory {
    /// A buffer of `len` bytes for a message of `connection`, without the bytes of another connection's. With `remote`
    /// the peer is to write it: then address and key come back, too. `None`: not now.
    fn allocate(&mut self, connection: ConnectionId, len: u32, remote: bool) -> Option<(BufferId, u64, u32)>;
}

/// A work request.
// A box would be an allocation for each.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// A SEND: the header, then `len` bytes of a buffer.
    Send {
        /// Of which connection.
        connection: ConnectionId,
        /// On which of its queue pairs.
        lane: u8,
        /// To be given to [`crate::Engine::on_sent`].
        token: u64,
        /// The header.
        header: [u8; SendHeader::LEN],
        /// What follows.
        buffer: BufferId,
        /// From where.
        offset: u32,
        /// How much; 0: nothing follows.
        len: u32,
    },
    /// A WRITE with immediate data.
    Write {
        /// Of which connection.
        connection: ConnectionId,
        /// On which of its queue pairs.
        lane: u8,
        /// To be given to [`crate::Engine::on_sent`].
        token: u64,
        /// What is written.
        buffer: BufferId,
        /// From where in the buffer.
        offset: u32,
        /// How much.
        len: u32,
        /// To where.
        address: u64,
        /// The key there.
        key: u32,
        /// The immediate data.
        immediate: u32,
    },
    /// A datagram to the peer's control queue pair.
    Control {
        /// Of which connection.
        connection: ConnectionId,
        /// The datagram.
        control: Control,
    },
    /// Send control datagrams from another UDP source port: by another path.
    Repath {
        /// Of which connection.
        connection: ConnectionId,
    },
    /// Reset a lane: what was posted there is forgotten.
    Reset {
        /// Of which connection.
        connection: ConnectionId,
        /// Which queue pair.
        lane: u8,
    },
    /// Connect a lane that was reset, and post its receive requests again.
    Connect {
        /// Of which connection.
        connection: ConnectionId,
        /// Which queue pair.
        lane: u8,
        /// Number of our first packet.
        send_sequence: u32,
        /// Number of the peer's first packet.
        receive_sequence: u32,
        /// The UDP source port: another path.
        source_port: u16,
    },
}

/// What the caller should know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Event {
    /// A message has come in; its buffer is the caller's. Nobody writes to it any more, once its key is taken back.
    Delivered {
        /// On which connection.
        connection: ConnectionId,
        /// Its number.
        message: MessageId,
        /// Where it is.
        buffer: BufferId,
        /// Bytes.
        len: u32,
        /// What it is.
        class: Class,
        /// The number of the call.
        call: u32,
    },
    /// A message has arrived at the peer; its buffer is the caller's again.
    Sent {
        /// On which connection.
        connection: ConnectionId,
        /// Its number.
        message: MessageId,
        /// Where it was.
        buffer: BufferId,
    },
    /// A connection has ended. Buffers that were not given back are the caller's.
    Closed {
        /// Which.
        connection: ConnectionId,
        /// Why.
        reason: CloseReason,
        /// The peer did it.
        by_peer: bool,
    },
}

/// What is to be done, in this order: work first, then events.
#[derive(Debug, Default)]
pub struct Output {
    /// Work requests.
    pub work: Vec<Work>,
    /// Events.
    pub events: Vec<Event>,
}

impl Output {
    /// Nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets everything and keeps the memory.
    pub fn clear(&mut self) {
        self.work.clear();
        self.events.clear();
    }
}
