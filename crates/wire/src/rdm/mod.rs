//! Reliable messages over RDMA: the formats of SENDs, immediate data, control datagrams and connection set-up
//! (`docs/RDM.md`, cited as RDM §n).

mod access;
mod ack;
mod control;
mod number;
mod refusal;
mod send;
mod setup;

pub use access::Access;
pub use ack::{Ack, Number, Numbers};
pub use control::{Close, CloseReason, Control, Grant, Lane, LanePhase, Tag};
pub use number::{Immediate, MessageId};
pub use refusal::Refusal;
pub use send::{Class, SendHeader, SendKind};
pub use setup::{LANES, LaneAddress, MAX_LANES, Service, Setup, SetupKind, SetupRefusal};

/// The version of everything here.
pub const VERSION: u8 = 1;

/// Bytes of a unit, the smallest piece of a message that is retransmitted (RDM §2.3).
pub const UNIT: u32 = 4096;

/// Maximum length of a message, bytes: as many units as an immediate can name (RDM §2.3).
pub const MAX_MESSAGE: u32 = UNIT << 16;

/// Maximum length of a message that is sent without a grant, bytes (RDM §5.1).
pub const MAX_EAGER: u32 = 32 * 1024;

/// Messages that may be open at once, in each direction of a connection (RDM §2.2).
pub const MAX_WINDOW: u16 = 1024;

fn first_byte(kind: u8) -> u8 {
    VERSION << 4 | kind
}

fn word<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn half<const N: usize>(bytes: &[u8; N], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn long<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from(word(bytes, at)) << 32 | u64::from(word(bytes, at + 4))
}
