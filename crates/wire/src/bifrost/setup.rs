//! Connection set-up: REQUEST, RESPONSE, REJECT (PROTOCOL §3.2, §4; NSDI'26 figure C3).

use crate::Mac;

use super::field::{byte, word};
use super::{Cid, PacketType, Refusal, Version};

/// Why a REQUEST was rejected.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RejectReason {
    /// No version that both sides accept.
    Version = 1,
    /// The destination vNIC is not on this host, or not in that VNI.
    UnknownVnic = 2,
    /// No room for another connection.
    Resources = 3,
    /// This host does not carry the VNI reliably.
    Policy = 4,
}

impl RejectReason {
    /// A stable name for counters, in snake case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Version => "version",
            Self::UnknownVnic => "unknown_vnic",
            Self::Resources => "resources",
            Self::Policy => "policy",
        }
    }
}

impl TryFrom<u8> for RejectReason {
    type Error = Refusal;

    fn try_from(number: u8) -> Result<Self, Refusal> {
        match number {
            1 => Ok(Self::Version),
            2 => Ok(Self::UnknownVnic),
            3 => Ok(Self::Resources),
            4 => Ok(Self::Policy),
            _ => Err(Refusal::RejectReason),
        }
    }
}

/// Which of the three set-up packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetupKind {
    /// Asks for a connection.
    Request {
        /// The lowest version that the sender accepts, 1..=`version`.
        oldest: u8,
    },
    /// Grants it.
    Response,
    /// Refuses it.
    Reject(RejectReason),
}

/// A set-up packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Setup {
    /// Which of the three.
    pub kind: SetupKind,
    /// REQUEST: the highest version that the sender speaks; RESPONSE: the chosen version; REJECT: the rejecter's
    /// highest version. 1..=15, because a peer of a later version than ours may ask or reject; in a parsed RESPONSE a
    /// [`Version`] of ours.
    pub version: u8,
    /// CC Type, 4 bits: the sender's congestion control; see [`super::cc`].
    pub cc: u8,
    /// The sender's worker (Thread ID).
    pub worker: u8,
    /// The sender's identifier of the connection; [`Cid::NONE`] in a REJECT.
    pub local: Cid,
    /// The receiver's identifier, if known; never none in a parsed RESPONSE or REJECT.
    pub destination: Cid,
    /// The receiver's vNIC.
    pub to: Mac,
    /// The sender's vNIC.
    pub from: Mac,
    /// When the sending daemon started, µs since the Unix epoch.
    pub instance: u64,
    /// Incremented with each connection attempt of that daemon.
    pub generation: u32,
    /// Receive window, packets; never 0 in a parsed REQUEST or RESPONSE.
    pub window: u16,
    /// Longest time that the sender holds back an ACK, µs.
    pub ack_delay_us: u16,
}

impl Setup {
    /// Length of the packet, bytes: header and body.
    pub const LEN: usize = 40;
    /// Length of the header, bytes.
    pub const HEADER_LEN: usize = 12;

    /// The packet. Only the low 4 bits of `version`, `cc` and `oldest` count.
    #[must_use]
    pub fn emit(&self) -> [u8; Self::LEN] {
        let (kind, reserved) = match self.kind {
            SetupKind::Request { oldest } => (PacketType::Request, byte(oldest, 0)),
            SetupKind::Response => (PacketType::Response, 0),
            SetupKind::Reject(reason) => (PacketType::Reject, reason as u8),
        };
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&[kind as u8, byte(self.version, self.cc), self.worker, reserved]);
        out[4..8].copy_from_slice(&self.local.0.to_be_bytes());
        out[8..12].copy_from_slice(&self.destination.0.to_be_bytes());
        out[12..18].copy_from_slice(&self.to.0);
        out[18..24].copy_from_slice(&self.from.0);
        out[24..32].copy_from_slice(&self.instance.to_be_bytes());
        out[32..36].copy_from_slice(&self.generation.to_be_bytes());
        out[36..38].copy_from_slice(&self.window.to_be_bytes());
        out[38..].copy_from_slice(&self.ack_delay_us.to_be_bytes());
        out
    }

    /// Parses a whole datagram of one of the three types; the caller has checked the type byte.
    pub(super) fn parse(packet_type: PacketType, bytes: &[u8]) -> Result<Self, Refusal> {
        if bytes.len() < Self::HEADER_LEN {
            return Err(Refusal::ShortDatagram);
        }
        let (fixed, rest) = bytes.split_first_chunk::<{ Self::LEN }>().ok_or(Refusal::BodyTruncated)?;
        if !rest.is_empty() {
            return Err(Refusal::TrailingBytes);
        }
        let mac = |at: usize| Mac([0, 1, 2, 3, 4, 5].map(|i| fixed[at + i]));
        let version = fixed[1] >> 4;
        let kind = match packet_type {
            PacketType::Request => SetupKind::Request { oldest: fixed[3] >> 4 },
            PacketType::Response => SetupKind::Response,
            PacketType::Reject => SetupKind::Reject(RejectReason::try_from(fixed[3] & 0x0f)?),
            _ => return Err(Refusal::PacketType),
        };
        let setup = Self {
            kind,
            version,
            cc: fixed[1] & 0x0f,
            worker: fixed[2],
            local: Cid(word(fixed, 4)),
            destination: Cid(word(fixed, 8)),
            to: mac(12),
            from: mac(18),
            instance: u64::from(word(fixed, 24)) << 32 | u64::from(word(fixed, 28)),
            generation: word(fixed, 32),
            window: u16::from_be_bytes([fixed[36], fixed[37]]),
            ack_delay_us: u16::from_be_bytes([fixed[38], fixed[39]]),
        };
        setup.check()?;
        Ok(setup)
    }

    fn check(&self) -> Result<(), Refusal> {
        if self.version == 0 {
            return Err(Refusal::Version);
        }
        let (needs_local, needs_destination) = match self.kind {
            SetupKind::Request { oldest } => {
                if oldest == 0 || oldest > self.version {
                    return Err(Refusal::VersionRange);
                }
                (true, false)
            }
            SetupKind::Response => {
                Version::try_from(self.version)?;
                (true, true)
            }
            SetupKind::Reject(_) => (false, true),
        };
        if needs_local && self.local.is_none() || needs_destination && self.destination.is_none() {
            return Err(Refusal::ZeroCid);
        }
        if self.to.is_multicast() || self.from.is_multicast() {
            return Err(Refusal::GroupVnic);
        }
        if needs_local && self.window == 0 {
            return Err(Refusal::ZeroWindow);
        }
        Ok(())
    }
}
