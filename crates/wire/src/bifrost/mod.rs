//! The packets of the BIFROST reliable transport, as specified in `docs/PROTOCOL.md` (cited as PROTOCOL §n).
//!
//! The header layouts are those of the NSDI'26 paper, appendix C. A BIFROST packet is what follows the VXLAN header of
//! a datagram to the BIFROST port.

mod ack;
mod bitmap;
pub mod bundle;
mod cid;
mod data;
mod field;
mod path;
mod psn;
mod refusal;
mod reset;
mod setup;
mod tick;
mod version;

pub use ack::{AckHeader, AckKind};
pub use bitmap::Bitmap;
pub use bundle::Bundle;
pub use cid::Cid;
pub use data::DataHeader;
pub use path::PathId;
pub use psn::Psn;
pub use refusal::Refusal;
pub use reset::Reset;
pub use setup::{RejectReason, Setup, SetupKind};
pub use tick::Tick;
pub use version::Version;

/// The UDP destination port of BIFROST packets unless configured otherwise (PROTOCOL §1.3). It is not that of plain
/// VXLAN (4789), so plain VXLAN is unaffected and the port alone tells the two apart.
pub const UDP_PORT: u16 = 4794;

/// Offset of the most significant byte of the Destination CID, the worker, in every packet (bytes from the start of the
/// BIFROST header; PROTOCOL §1.4). Receive steering reads only this byte.
pub const STEERING_OFFSET: usize = 8;

/// Values of the CC Type field (PROTOCOL §13.1). It is informational: a receiver accepts every value.
pub mod cc {
    /// No congestion control.
    pub const NONE: u8 = 0;
    /// Swift (SIGCOMM 2020), one window per path.
    pub const SWIFT: u8 = 1;
}

/// A parsed packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Packet<'a> {
    /// A guest's frame (at least an Ethernet header) and its header.
    Data(DataHeader, &'a [u8]),
    /// A path probe; outside the sequence.
    Probe(DataHeader),
    /// Acknowledges packets.
    Ack(AckHeader),
    /// Sets up a connection, or refuses to.
    Setup(Setup),
    /// The sender owns no such connection.
    Reset(Reset),
    /// The sender gave up everything before the header's PSN.
    Skip(DataHeader),
    /// Several packets in one datagram.
    Bundle(Bundle<'a>),
}

impl Packet<'_> {
    /// The packet's Destination CID: [`Cid::NONE`] in a RESET and in a first REQUEST.
    #[must_use]
    pub const fn destination(&self) -> Cid {
        match self {
            Self::Data(header, _) | Self::Probe(header) | Self::Skip(header) => header.cid,
            Self::Ack(ack) => ack.cid,
            Self::Setup(setup) => setup.destination,
            Self::Reset(_) => Cid::NONE,
            Self::Bundle(bundle) => bundle.cid,
        }
    }
}

/// Parses what follows the VXLAN header of a datagram to the BIFROST port.
///
/// # Errors
/// The first reason, in the order of the specification (PROTOCOL §16.1), why the datagram is not a valid packet.
pub fn parse(bytes: &[u8]) -> Result<Packet<'_>, Refusal> {
    let packet_type = PacketType::try_from(*bytes.first().ok_or(Refusal::ShortDatagram)?)?;
    match packet_type {
        PacketType::Data => {
            let (header, frame) = parse_data(bytes)?;
            if header.probe {
                return if frame.is_empty() { Ok(Packet::Probe(header)) } else { Err(Refusal::TrailingBytes) };
            }
            if frame.len() < MIN_FRAME_LEN { Err(Refusal::ShortFrame) } else { Ok(Packet::Data(header, frame)) }
        }
        PacketType::Skip => {
            let (header, rest) = parse_data(bytes)?;
            if rest.is_empty() { Ok(Packet::Skip(header)) } else { Err(Refusal::TrailingBytes) }
        }
        PacketType::Ack => AckHeader::parse(bytes).map(Packet::Ack),
        PacketType::Request | PacketType::Response | PacketType::Reject => {
            Setup::parse(packet_type, bytes).map(Packet::Setup)
        }
        PacketType::Reset => Reset::parse(bytes).map(Packet::Reset),
        PacketType::Bundle => Bundle::parse(bytes).map(Packet::Bundle),
    }
}

/// Parses the most frequent packet, DATA with a frame, faster than [`parse`]. Returns `None` for any other packet and
/// for malformed ones: call [`parse`] for those.
#[inline]
#[must_use]
pub fn parse_data_packet(bytes: &[u8]) -> Option<(DataHeader, &[u8])> {
    let (header, frame) = bytes.split_first_chunk::<{ DataHeader::LEN }>()?;
    let data = header[0] == PacketType::Data as u8 && frame.len() >= MIN_FRAME_LEN;
    let header = DataHeader::parse(header).ok().filter(|header| data && !header.probe)?;
    Some((header, frame))
}

/// An Ethernet header.
const MIN_FRAME_LEN: usize = 14;

/// Pkt Type (PROTOCOL §3).
#[repr(u8)]
#[derive(Clone, Copy, PartialEq, Eq)]
enum PacketType {
    Data = 1,
    Ack = 2,
    Request = 3,
    Response = 4,
    Reject = 5,
    Reset = 6,
    Skip = 7,
    Bundle = 8,
}

impl TryFrom<u8> for PacketType {
    type Error = Refusal;

    fn try_from(number: u8) -> Result<Self, Refusal> {
        Ok(match number {
            1 => Self::Data,
            2 => Self::Ack,
            3 => Self::Request,
            4 => Self::Response,
            5 => Self::Reject,
            6 => Self::Reset,
            7 => Self::Skip,
            8 => Self::Bundle,
            _ => return Err(Refusal::PacketType),
        })
    }
}

fn parse_data(bytes: &[u8]) -> Result<(DataHeader, &[u8]), Refusal> {
    let (header, rest) = bytes.split_first_chunk::<{ DataHeader::LEN }>().ok_or(Refusal::ShortDatagram)?;
    Ok((DataHeader::parse(header)?, rest))
}
