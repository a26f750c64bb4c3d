//! ARP for IPv4 over Ethernet (RFC 826).

use core::net::Ipv4Addr;

use crate::{Mac, Malformed};

/// Length of a packet, bytes.
pub const LEN: usize = 28;

/// Operation of an ARP packet.
#[repr(u16)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// Request: who has the target address?
    Request = 1,
    /// Reply: the sender has it.
    Reply = 2,
}

/// An ARP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Packet {
    /// Operation.
    pub operation: Operation,
    /// Sender's hardware address.
    pub sender_mac: Mac,
    /// Sender's protocol address; 0.0.0.0 in a probe (RFC 5227).
    pub sender_ip: Ipv4Addr,
    /// Target's hardware address; meaningless in a request.
    pub target_mac: Mac,
    /// Target's protocol address.
    pub target_ip: Ipv4Addr,
}

impl Packet {
    /// Parses the bytes after the Ethernet header; padding behind the packet is ignored.
    ///
    /// # Errors
    /// [`Malformed::Truncated`]; [`Malformed::Kind`] for other address families, address lengths or operations.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let b = bytes.first_chunk::<LEN>().ok_or(Malformed::Truncated)?;
        if b[..6] != ETHERNET_IPV4 {
            return Err(Malformed::Kind);
        }
        let operation = match u16::from_be_bytes([b[6], b[7]]) {
            1 => Operation::Request,
            2 => Operation::Reply,
            _ => return Err(Malformed::Kind),
        };
        Ok(Self {
            operation,
            sender_mac: Mac([b[8], b[9], b[10], b[11], b[12], b[13]]),
            sender_ip: Ipv4Addr::new(b[14], b[15], b[16], b[17]),
            target_mac: Mac([b[18], b[19], b[20], b[21], b[22], b[23]]),
            target_ip: Ipv4Addr::new(b[24], b[25], b[26], b[27]),
        })
    }

    /// The packet.
    #[must_use]
    pub fn emit(&self) -> [u8; LEN] {
        let mut out = [0; LEN];
        out[..6].copy_from_slice(&ETHERNET_IPV4);
        out[6..8].copy_from_slice(&(self.operation as u16).to_be_bytes());
        out[8..14].copy_from_slice(&self.sender_mac.0);
        out[14..18].copy_from_slice(&self.sender_ip.octets());
        out[18..24].copy_from_slice(&self.target_mac.0);
        out[24..].copy_from_slice(&self.target_ip.octets());
        out
    }

    /// The reply to this request: `mac` has the target address.
    #[must_use]
    pub const fn reply(&self, mac: Mac) -> Self {
        Self {
            operation: Operation::Reply,
            sender_mac: mac,
            sender_ip: self.target_ip,
            target_mac: self.sender_mac,
            target_ip: self.sender_ip,
        }
    }

    /// Whether the sender announces its own address (RFC 5227, section 3).
    #[must_use]
    pub fn is_gratuitous(&self) -> bool {
        self.sender_ip == self.target_ip
    }
}

/// Hardware type 1, protocol type IPv4, address lengths 6 and 4.
const ETHERNET_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Packet = Packet {
        operation: Operation::Request,
        sender_mac: Mac([2, 0, 0, 0, 0, 1]),
        sender_ip: Ipv4Addr::new(10, 0, 0, 1),
        target_mac: Mac::ZERO,
        target_ip: Ipv4Addr::new(10, 0, 0, 2),
    };

    #[test]
    fn round_trip_and_reply() {
        let bytes = REQUEST.emit();
        assert_eq!(bytes, [0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 0, 1, 0, 0, 0, 0, 0, 0, 10, 0, 0, 2]);
        assert_eq!(Packet::parse(&bytes), Ok(REQUEST));
        let reply = REQUEST.reply(Mac([2, 0, 0, 0, 0, 2]));
        assert_eq!(reply.target_mac, REQUEST.sender_mac);
        assert_eq!((reply.sender_ip, reply.target_ip), (REQUEST.target_ip, REQUEST.sender_ip));
        assert_eq!(Packet::parse(&reply.emit()), Ok(reply));
        assert!(!REQUEST.is_gratuitous());
    }

    #[test]
    fn refuses() {
        let good = REQUEST.emit();
        for len in 0..LEN {
            assert_eq!(Packet::parse(&good[..len]), Err(Malformed::Truncated));
        }
        for at in 0..7 {
            let mut bad = good;
            bad[at] ^= 0x40;
            assert_eq!(Packet::parse(&bad), Err(Malformed::Kind), "byte {at}");
        }
    }
}
