//! Control datagrams (RDM §3.3 to §3.7), which go from UD queue pair to UD queue pair.

use super::{Ack, MAX_LANES, MAX_MESSAGE, MessageId, Refusal, VERSION, first_byte, half, long, word};

pub(super) const ACK: u8 = 1;
const GRANT: u8 = 2;
const PROBE: u8 = 3;
const CLOSE: u8 = 4;
const LANE: u8 = 5;

/// A receiver's name for a connection, chosen by it when the connection is set up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Tag(pub u32);

/// Permission to write a long message into the granter's memory (RDM §3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Grant {
    /// The receiver's name for the connection.
    pub tag: Tag,
    /// The message.
    pub message: MessageId,
    /// Address to write to.
    pub address: u64,
    /// The key of the memory there.
    pub key: u32,
    /// The length of the message, as announced, bytes.
    pub length: u32,
}

/// Why one end closes a connection (RDM §3.6).
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CloseReason {
    /// The application closed it.
    Done = 1,
    /// The peer broke the protocol.
    Protocol = 2,
    /// The peer did not answer.
    Silence = 3,
}

/// Closes a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Close {
    /// The receiver's name for the connection.
    pub tag: Tag,
    /// The reason.
    pub reason: CloseReason,
}

/// Phase of the repair of a lane (RDM §7.3).
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LanePhase {
    /// Asks the peer to reset its end and respond.
    Request = 1,
    /// The response.
    Response = 2,
}

/// The repair of a queue pair (RDM §3.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Lane {
    /// The receiver's name for the connection.
    pub tag: Tag,
    /// Index of the queue pair in the connection, 0..=5.
    pub index: u8,
    /// Request or response.
    pub phase: LanePhase,
    /// Counts the repairs of the lane: odd from the end that connected, even from the other.
    pub generation: u16,
    /// PSN of the sender's next packet on the lane, 24 bits.
    pub sequence: u32,
}

/// A control datagram.
// Boxing would mean an allocation for each ACK.
#[allow(clippy::large_enum_variant)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Acknowledges work requests.
    Ack(Ack),
    /// Grants permission to write.
    Grant(Grant),
    /// Send an ACK at once (RDM §3.5).
    Probe(Tag),
    /// Closes the connection.
    Close(Close),
    /// Repairs a queue pair.
    Lane(Lane),
}

impl Control {
    /// Maximum length, bytes.
    pub const MAX_LEN: usize = Ack::MAX_LEN;

    /// Writes the datagram to the start of `out` and returns its length.
    pub fn emit_into(&self, out: &mut [u8; Self::MAX_LEN]) -> usize {
        let mut begin = |kind, one, two: [u8; 2], tag: Tag| {
            out[..4].copy_from_slice(&[first_byte(kind), one, two[0], two[1]]);
            out[4..8].copy_from_slice(&tag.0.to_be_bytes());
        };
        match self {
            Self::Ack(ack) => ack.emit_into(out),
            Self::Grant(grant) => {
                begin(GRANT, 0, [0; 2], grant.tag);
                out[8..12].copy_from_slice(&grant.message.0.to_be_bytes());
                out[12..20].copy_from_slice(&grant.address.to_be_bytes());
                out[20..24].copy_from_slice(&grant.key.to_be_bytes());
                out[24..28].copy_from_slice(&grant.length.to_be_bytes());
                28
            }
            Self::Probe(tag) => {
                begin(PROBE, 0, [0; 2], *tag);
                8
            }
            Self::Close(close) => {
                begin(CLOSE, close.reason as u8, [0; 2], close.tag);
                8
            }
            Self::Lane(lane) => {
                begin(LANE, lane.index << 4 | lane.phase as u8, lane.generation.to_be_bytes(), lane.tag);
                out[8..12].copy_from_slice(&(lane.sequence & 0xff_ffff).to_be_bytes());
                12
            }
        }
    }

    /// Reads a whole datagram.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn parse(bytes: &[u8]) -> Result<Self, Refusal> {
        let begin = bytes.first_chunk::<8>().ok_or(Refusal::Length)?;
        if begin[0] >> 4 != VERSION {
            return Err(Refusal::Version);
        }
        let tag = Tag(word(begin, 4));
        match begin[0] & 0x0f {
            ACK => Ack::parse(bytes).map(Self::Ack),
            GRANT => {
                let b: &[u8; 28] = bytes.try_into().map_err(|_| Refusal::Length)?;
                let length = word(b, 24);
                if !(1..=MAX_MESSAGE).contains(&length) {
                    return Err(Refusal::MessageLength);
                }
                let grant =
                    Grant { tag, message: MessageId(word(b, 8)), address: long(b, 12), key: word(b, 20), length };
                // The last byte needs a valid address, too.
                grant.address.checked_add(u64::from(length)).ok_or(Refusal::Value)?;
                Ok(Self::Grant(grant))
            }
            PROBE if bytes.len() == 8 => Ok(Self::Probe(tag)),
            CLOSE if bytes.len() == 8 => {
                let reason = match begin[1] {
                    1 => CloseReason::Done,
                    2 => CloseReason::Protocol,
                    3 => CloseReason::Silence,
                    _ => return Err(Refusal::Value),
                };
                Ok(Self::Close(Close { tag, reason }))
            }
            LANE => {
                let b: &[u8; 12] = bytes.try_into().map_err(|_| Refusal::Length)?;
                let (index, generation) = (b[1] >> 4, half(b, 2));
                let phase = match b[1] & 0x0f {
                    1 => LanePhase::Request,
                    2 => LanePhase::Response,
                    _ => return Err(Refusal::Lane),
                };
                if usize::from(index) >= MAX_LANES || generation == 0 {
                    return Err(Refusal::Lane);
                }
                Ok(Self::Lane(Lane { tag, index, phase, generation, sequence: word(b, 8) & 0xff_ffff }))
            }
            PROBE | CLOSE => Err(Refusal::Length),
            _ => Err(Refusal::Kind),
        }
    }
}
