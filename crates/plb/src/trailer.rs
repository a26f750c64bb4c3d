//! The trailer behind each packet between pipeline and pod: docs/GATEWAY-TRAILER.md.

use thiserror::Error;

/// Bytes of a trailer of version 1 (§2.1).
pub const TRAILER_LEN: usize = 16;

/// The payload slot of a packet that carries its own payload (§2.3).
pub const NO_PAYLOAD: u32 = u32::MAX;

const VERSION: u8 = 1;
const MAGIC: [u8; 2] = [0xa1, 0xba];

/// The last four bytes of every trailer of version 1.
const END: u32 = u32::from_be_bytes([VERSION, TRAILER_LEN as u8, MAGIC[0], MAGIC[1]]);

const DROP: u8 = 0x01;
const HEADER_ONLY: u8 = 0x02;
const UNORDERED: u8 = 0x04;
const FLAGS: u8 = DROP | HEADER_ONLY | UNORDERED;

/// The fields of a trailer (§2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Trailer {
    /// The packet's PSN in its order queue. Without an order: a value that distinguishes users of a payload slot, or 0.
    pub psn: u32,
    /// Slot in which the pipeline keeps the payload of a packet that is delivered without it.
    pub payload: Option<u32>,
    /// The pod.
    pub pod: u16,
    /// The pod's order queue; 0 without an order.
    pub queue: u8,
    /// The pod drops the packet: the pipeline must free what it keeps for it.
    pub drop: bool,
    /// The packet has no entry in an order queue.
    pub unordered: bool,
}

/// Why a trailer is refused (§3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TrailerError {
    /// The last two bytes are not those of a trailer.
    #[error("no trailer: the packet ends with {0:02x?}, not with a1 ba")]
    Magic([u8; 2]),
    /// An unsupported version, or a length that is not this version's.
    #[error("trailer of version {version} and {len} bytes; only version 1 of 16 bytes is supported")]
    Version {
        /// The version in the trailer.
        version: u8,
        /// The length in the trailer, bytes.
        len: u8,
    },
    /// Unknown flags.
    #[error("trailer with unknown flags {0:#04x}")]
    Flags(u8),
    /// A payload slot without the flag, or the flag without a slot.
    #[error("trailer with contradicting header-only flag and payload slot {0:#x}")]
    Payload(u32),
    /// An order queue, although the packet is unordered.
    #[error("unordered trailer that names order queue {0}")]
    Queue(u8),
}

impl Trailer {
    /// Parses a trailer, which the caller has copied once from the pod's memory (§3.1).
    ///
    /// # Errors
    /// It is not a trailer of version 1, or its fields contradict each other.
    #[inline]
    pub fn parse(bytes: [u8; TRAILER_LEN]) -> Result<Self, TrailerError> {
        let [p0, p1, p2, p3, s0, s1, s2, s3, pod0, pod1, queue, flags, version, len, magic @ ..] = bytes;
        // One comparison in the common case.
        if u32::from_be_bytes([version, len, magic[0], magic[1]]) != END {
            return Err(if magic == MAGIC {
                TrailerError::Version { version, len }
            } else {
                TrailerError::Magic(magic)
            });
        }
        if flags & !FLAGS != 0 {
            return Err(TrailerError::Flags(flags));
        }
        let slot = u32::from_be_bytes([s0, s1, s2, s3]);
        let payload = (flags & HEADER_ONLY != 0).then_some(slot);
        if (slot == NO_PAYLOAD) != payload.is_none() {
            return Err(TrailerError::Payload(slot));
        }
        let unordered = flags & UNORDERED != 0;
        if unordered && queue != 0 {
            return Err(TrailerError::Queue(queue));
        }
        let (psn, pod) = (u32::from_be_bytes([p0, p1, p2, p3]), u16::from_be_bytes([pod0, pod1]));
        Ok(Trailer { psn, payload, pod, queue, drop: flags & DROP != 0, unordered })
    }

    /// The bytes to append to the packet. The payload slot [`NO_PAYLOAD`] means none.
    #[inline]
    pub fn emit(&self) -> [u8; TRAILER_LEN] {
        let slot = self.payload.unwrap_or(NO_PAYLOAD);
        let flag = |set, bit| if set { bit } else { 0 };
        let flags = flag(self.drop, DROP) | flag(slot != NO_PAYLOAD, HEADER_ONLY) | flag(self.unordered, UNORDERED);
        let mut bytes = [0; TRAILER_LEN];
        bytes[..4].copy_from_slice(&self.psn.to_be_bytes());
        bytes[4..8].copy_from_slice(&slot.to_be_bytes());
        bytes[8..10].copy_from_slice(&self.pod.to_be_bytes());
        bytes[10..14].copy_from_slice(&[self.queue, flags, VERSION, TRAILER_LEN as u8]);
        bytes[14..].copy_from_slice(&MAGIC);
        bytes
    }
}
