//! The set-up messages of a connection (RDM §4.1): one in each direction, over TCP or any other reliable stream.

use core::net::Ipv6Addr;

use super::{MAX_WINDOW, Refusal, Tag, UNIT, VERSION, half, word};

/// Queue pairs of a connection with one service: one in use and two spares (RDM §7).
pub const LANES: usize = 3;

/// Maximum number of queue pairs of a connection: three of each service.
pub const MAX_LANES: usize = 2 * LANES;

/// Transport service of a connection's lanes.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Service {
    /// Reliable connections: the NIC retransmits.
    Rc = 1,
    /// Unreliable connections: the engine retransmits.
    Uc = 2,
    /// Both services. Each end uses one at a time (RDM §7.5). The UC lanes come first, then the RC lanes.
    Both = 3,
}

impl Service {
    /// How many lanes a connection has.
    #[must_use]
    pub const fn lanes(self) -> usize {
        match self {
            Self::Rc | Self::Uc => LANES,
            Self::Both => MAX_LANES,
        }
    }

    /// Whether the NIC retransmits packets lost on a lane.
    #[must_use]
    pub const fn is_reliable(self, lane: u8) -> bool {
        match self {
            Self::Rc => true,
            Self::Uc => false,
            Self::Both => lane as usize >= LANES,
        }
    }
}

/// Why a connection is refused.
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetupRefusal {
    /// No version in common.
    Version = 1,
    /// The services, units or path MTUs differ.
    Parameters = 2,
    /// Too many connections.
    Resources = 3,
    /// Connections from this address are not allowed.
    Policy = 4,
}

/// Kind of a set-up message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SetupKind {
    /// Request of the end that connects.
    Hello,
    /// The listening end accepts.
    Welcome,
    /// The listening end refuses.
    Refused(SetupRefusal),
}

/// A queue pair, and the PSN of its first packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LaneAddress {
    /// The queue pair, 24 bits.
    pub queue_pair: u32,
    /// PSN of the first packet, 24 bits.
    pub sequence: u32,
}

/// A set-up message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Setup {
    /// Kind of the message.
    pub kind: SetupKind,
    /// The service of the lanes.
    pub service: Service,
    /// Address of this end for packets; IPv4 as a mapped address.
    pub address: Ipv6Addr,
    /// UDP port of this end.
    pub port: u16,
    /// Path MTU, bytes: one of [`crate::roce::PATH_MTUS`].
    pub mtu: u16,
    /// The UD queue pair for control datagrams, 24 bits.
    pub control: u32,
    /// Queue key of that queue pair.
    pub queue_key: u32,
    /// This end's tag for the connection.
    pub tag: Tag,
    /// Receive credits: work requests that this end can hold on each lane, 1..=4096 (RDM §6.1).
    pub credits: u16,
    /// Messages that this end accepts before its application takes them, 1..=1024 (RDM §5.3).
    pub window: u16,
    /// Maximum length of a message that this end accepts, bytes.
    pub longest: u32,
    /// The lanes; the first [`Service::lanes`] are valid.
    pub lanes: [LaneAddress; MAX_LANES],
}

impl Setup {
    /// Length with one service, bytes.
    pub const LEN: usize = 76;
    /// Length with both services.
    pub const MAX_LEN: usize = Self::LEN + 8 * LANES;
    const MARK: [u8; 4] = *b"BRDM";
    /// Maximum number of credits.
    pub const MAX_CREDITS: u16 = 4096;

    /// Length of the message that starts with these bytes. It is known from the first 8 bytes; with fewer, the minimum.
    #[must_use]
    pub fn len_of(begin: &[u8]) -> usize {
        if begin.get(7) == Some(&(Service::Both as u8)) { Self::MAX_LEN } else { Self::LEN }
    }

    /// Writes the message and returns its length.
    #[must_use]
    pub fn emit_into(&self, out: &mut [u8; Self::MAX_LEN]) -> usize {
        let (kind, reason) = match self.kind {
            SetupKind::Hello => (1, 0),
            SetupKind::Welcome => (2, 0),
            SetupKind::Refused(reason) => (3, reason as u8),
        };
        out[..4].copy_from_slice(&Self::MARK);
        out[4..8].copy_from_slice(&[VERSION, kind, reason, self.service as u8]);
        out[8..24].copy_from_slice(&self.address.octets());
        out[24..26].copy_from_slice(&self.port.to_be_bytes());
        out[26..28].copy_from_slice(&self.mtu.to_be_bytes());
        out[28..32].copy_from_slice(&UNIT.to_be_bytes());
        out[32..36].copy_from_slice(&self.control.to_be_bytes());
        out[36..40].copy_from_slice(&self.queue_key.to_be_bytes());
        out[40..44].copy_from_slice(&self.tag.0.to_be_bytes());
        out[44..46].copy_from_slice(&self.credits.to_be_bytes());
        out[46..48].copy_from_slice(&self.window.to_be_bytes());
        out[48..52].copy_from_slice(&self.longest.to_be_bytes());
        for (slot, lane) in out[52..].as_chunks_mut::<8>().0.iter_mut().zip(self.lanes) {
            *slot = (u64::from(lane.queue_pair) << 32 | u64::from(lane.sequence)).to_be_bytes();
        }
        52 + 8 * self.service.lanes()
    }

    /// Parses a message.
    ///
    /// # Errors
    /// A [`Refusal`].
    pub fn parse(message: &[u8]) -> Result<Self, Refusal> {
        if message.len() != Self::len_of(message) {
            return Err(Refusal::Length);
        }
        let bytes = &mut [0; Self::MAX_LEN];
        bytes[..message.len()].copy_from_slice(message);
        if bytes[..4] != Self::MARK {
            return Err(Refusal::Mark);
        }
        if bytes[4] != VERSION {
            return Err(Refusal::Version);
        }
        let kind = match (bytes[5], bytes[6]) {
            (1, _) => SetupKind::Hello,
            (2, _) => SetupKind::Welcome,
            (3, 1) => SetupKind::Refused(SetupRefusal::Version),
            (3, 2) => SetupKind::Refused(SetupRefusal::Parameters),
            (3, 3) => SetupKind::Refused(SetupRefusal::Resources),
            (3, 4) => SetupKind::Refused(SetupRefusal::Policy),
            (3, _) => return Err(Refusal::Value),
            _ => return Err(Refusal::Kind),
        };
        let service = match bytes[7] {
            1 => Service::Rc,
            2 => Service::Uc,
            3 => Service::Both,
            _ => return Err(Refusal::Value),
        };
        let mut address = [0; 16];
        address.copy_from_slice(&bytes[8..24]);
        let mut lanes = [LaneAddress::default(); MAX_LANES];
        for (at, lane) in lanes.iter_mut().enumerate() {
            *lane = LaneAddress { queue_pair: word(bytes, 52 + 8 * at), sequence: word(bytes, 56 + 8 * at) };
        }
        let setup = Self {
            kind,
            service,
            address: Ipv6Addr::from(address),
            port: half(bytes, 24),
            mtu: half(bytes, 26),
            control: word(bytes, 32),
            queue_key: word(bytes, 36),
            tag: Tag(word(bytes, 40)),
            credits: half(bytes, 44),
            window: half(bytes, 46),
            longest: word(bytes, 48),
            lanes,
        };
        let number = |value: u32| value <= crate::roce::Qpn::MAX;
        let sound = word(bytes, 28) == UNIT
            && setup.port != 0
            && crate::roce::PATH_MTUS.contains(&setup.mtu)
            && number(setup.control)
            && (1..=Self::MAX_CREDITS).contains(&setup.credits)
            && (1..=MAX_WINDOW).contains(&setup.window)
            && lanes.iter().all(|lane| number(lane.queue_pair) && number(lane.sequence));
        // The other fields of a refusal are meaningless.
        if sound || matches!(kind, SetupKind::Refused(_)) { Ok(setup) } else { Err(Refusal::Value) }
    }
}
