//! Extended transport headers (IBTA 9.3).

use super::Qpn;

/// Datagram extended transport header (IBTA 9.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Deth {
    /// Queue key; the receiving queue pair checks it.
    pub queue_key: u32,
    /// The sender's queue pair.
    pub source: Qpn,
}

impl Deth {
    /// Length, bytes.
    pub const LEN: usize = 8;

    pub(super) fn parse(bytes: &[u8; Self::LEN]) -> Self {
        let [k0, k1, k2, k3, _, s0, s1, s2] = *bytes;
        Self { queue_key: u32::from_be_bytes([k0, k1, k2, k3]), source: Qpn::new(u32::from_be_bytes([0, s0, s1, s2])) }
    }

    pub(super) fn emit(&self) -> [u8; Self::LEN] {
        (u64::from(self.queue_key) << 32 | u64::from(self.source.get())).to_be_bytes()
    }
}

/// RDMA extended transport header (IBTA 9.3.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Reth {
    /// Start address of the message in the receiver's address space.
    pub address: u64,
    /// The key of the memory region there.
    pub key: u32,
    /// Length of the whole message, bytes.
    pub length: u32,
}

impl Reth {
    /// Length, bytes.
    pub const LEN: usize = 16;

    pub(super) fn parse(bytes: &[u8; Self::LEN]) -> Self {
        let [a0, a1, a2, a3, a4, a5, a6, a7, k0, k1, k2, k3, l0, l1, l2, l3] = *bytes;
        Self {
            address: u64::from_be_bytes([a0, a1, a2, a3, a4, a5, a6, a7]),
            key: u32::from_be_bytes([k0, k1, k2, k3]),
            length: u32::from_be_bytes([l0, l1, l2, l3]),
        }
    }

    pub(super) fn emit(&self) -> [u8; Self::LEN] {
        let low = u64::from(self.key) << 32 | u64::from(self.length);
        (u128::from(self.address) << 64 | u128::from(low)).to_be_bytes()
    }
}

/// Why a request fails, or must be retried (IBTA table 45).
#[repr(u8)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Nak {
    /// A packet before this one is missing: retransmit from the acknowledgement's PSN on.
    Sequence = 0,
    /// This queue pair does not accept the request.
    InvalidRequest = 1,
    /// Key, address or length do not match a region that the requester may write.
    RemoteAccess = 2,
    /// The responder failed.
    RemoteOperational = 3,
}

/// Syndrome of an acknowledgement (IBTA table 44).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Acknowledgement {
    /// Everything up to the packet's sequence number has arrived.
    Ack,
    /// The receiver has no receive request; retry after the time with this code (IBTA table 46).
    NotReady(u8),
    /// The request is refused.
    Nak(Nak),
}

/// ACK extended transport header (IBTA 9.3.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Aeth {
    /// Syndrome.
    pub what: Acknowledgement,
    /// Messages that the responder has completed, 24 bits.
    pub messages: u32,
}

impl Aeth {
    /// Length, bytes.
    pub const LEN: usize = 4;
    /// "Invalid credit count" (IBTA 9.7.7.2): this end does not limit the requester.
    const NO_CREDITS: u8 = 0x1f;

    pub(super) fn parse(bytes: &[u8; Self::LEN]) -> Option<Self> {
        let what = match bytes[0] >> 5 & 3 {
            0 => Acknowledgement::Ack,
            1 => Acknowledgement::NotReady(bytes[0] & 0x1f),
            3 => Acknowledgement::Nak(match bytes[0] & 0x1f {
                0 => Nak::Sequence,
                1 => Nak::InvalidRequest,
                2 => Nak::RemoteAccess,
                3 => Nak::RemoteOperational,
                _ => return None,
            }),
            _ => return None,
        };
        Some(Self { what, messages: u32::from_be_bytes([0, bytes[1], bytes[2], bytes[3]]) })
    }

    pub(super) fn emit(&self) -> [u8; Self::LEN] {
        let syndrome = match self.what {
            Acknowledgement::Ack => Self::NO_CREDITS,
            Acknowledgement::NotReady(timer) => 1 << 5 | timer & 0x1f,
            Acknowledgement::Nak(nak) => 3 << 5 | nak as u8,
        };
        let [_, m0, m1, m2] = self.messages.to_be_bytes();
        [syndrome, m0, m1, m2]
    }
}
