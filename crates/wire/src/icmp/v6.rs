//! ICMPv6 (RFC 4443), with neighbour solicitations, neighbour advertisements and router solicitations (RFC 4861).

use core::net::Ipv6Addr;

use crate::{Mac, Malformed, checksum, protocol};

/// Length of the header that all messages share, bytes.
pub const HEADER_LEN: usize = 8;
/// Length of a neighbour solicitation or advertisement with one link-layer address option, bytes.
pub const NEIGHBOUR_LEN: usize = 32;
/// Maximum number of options parsed in a neighbour discovery message.
pub const MAX_OPTIONS: usize = 16;

/// A message, as far as a switch needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Echo request.
    EchoRequest {
        /// Identifier.
        identifier: u16,
        /// Sequence number.
        sequence: u16,
    },
    /// Echo reply.
    EchoReply {
        /// Identifier.
        identifier: u16,
        /// Sequence number.
        sequence: u16,
    },
    /// Packet too big; the packet is quoted.
    PacketTooBig {
        /// MTU of the next hop, bytes.
        mtu: u32,
    },
    /// Router solicitation.
    RouterSolicitation {
        /// Link-layer address of the sender.
        source_mac: Option<Mac>,
    },
    /// Neighbour solicitation: who has the target address?
    Solicitation(Solicitation),
    /// Neighbour advertisement: the sender has the address.
    Advertisement(Advertisement),
    /// Any other message.
    Other {
        /// Type.
        kind: u8,
        /// Code.
        code: u8,
    },
}

/// A neighbour solicitation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Solicitation {
    /// The address to resolve.
    pub target: Ipv6Addr,
    /// Link-layer address of the sender; `None` in duplicate address detection.
    pub source_mac: Option<Mac>,
}

/// A neighbour advertisement.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Advertisement {
    /// Router flag: the sender is a router.
    pub router: bool,
    /// Solicited flag: answers a solicitation.
    pub solicited: bool,
    /// Override flag: replaces a cached entry.
    pub overrides: bool,
    /// The address that the sender has.
    pub target: Ipv6Addr,
    /// Its link-layer address.
    pub target_mac: Option<Mac>,
}

impl Message {
    /// Parses a whole message. The checksum is not verified (see [`checksum_is_valid`]), nor is the hop limit, which
    /// must be 255 for the neighbour messages (RFC 4861, section 7.1).
    ///
    /// # Errors
    /// [`Malformed::Truncated`]; [`Malformed::Length`] when a neighbour option has length 0 or reaches beyond the
    /// message; [`Malformed::Kind`] for more than [`MAX_OPTIONS`] of them.
    pub fn parse(bytes: &[u8]) -> Result<Self, Malformed> {
        let b = bytes.first_chunk::<HEADER_LEN>().ok_or(Malformed::Truncated)?;
        let (high, low) = (u16::from_be_bytes([b[4], b[5]]), u16::from_be_bytes([b[6], b[7]]));
        Ok(match (b[0], b[1]) {
            (ECHO_REQUEST, 0) => Self::EchoRequest { identifier: high, sequence: low },
            (ECHO_REPLY, 0) => Self::EchoReply { identifier: high, sequence: low },
            // The code is to be ignored (RFC 4443, section 3.2).
            (PACKET_TOO_BIG, _) => Self::PacketTooBig { mtu: u32::from(high) << 16 | u32::from(low) },
            (ROUTER_SOLICITATION, 0) => {
                Self::RouterSolicitation { source_mac: link_layer(&bytes[HEADER_LEN..], SOURCE_LINK_LAYER)? }
            }
            (SOLICITATION, 0) => {
                let (target, options) = target(bytes)?;
                Self::Solicitation(Solicitation { target, source_mac: link_layer(options, SOURCE_LINK_LAYER)? })
            }
            (ADVERTISEMENT, 0) => {
                let (target, options) = target(bytes)?;
                Self::Advertisement(Advertisement {
                    router: b[4] & ROUTER != 0,
                    solicited: b[4] & SOLICITED != 0,
                    overrides: b[4] & OVERRIDE != 0,
                    target,
                    target_mac: link_layer(options, TARGET_LINK_LAYER)?,
                })
            }
            (kind, code) => Self::Other { kind, code },
        })
    }
}

impl Solicitation {
    /// The message from `source` to `destination`, with its checksum; without a source address it has no option and is
    /// 8 bytes shorter.
    #[must_use]
    pub fn emit(&self, source: Ipv6Addr, destination: Ipv6Addr) -> ([u8; NEIGHBOUR_LEN], usize) {
        let option = self.source_mac.map(|mac| (SOURCE_LINK_LAYER, mac));
        neighbour([SOLICITATION, 0], self.target, option, source, destination)
    }

    /// The advertisement that answers this solicitation for `mac`. The solicited flag is set unless the solicitation
    /// comes from the unspecified address (duplicate address detection; RFC 4861, section 7.2.4).
    #[must_use]
    pub const fn answer(&self, mac: Mac, from_unspecified: bool) -> Advertisement {
        Advertisement {
            router: false,
            solicited: !from_unspecified,
            overrides: true,
            target: self.target,
            target_mac: Some(mac),
        }
    }
}

impl Advertisement {
    /// The message from `source` to `destination`, with its checksum, and its length; without a link-layer address it
    /// has no option and is 8 bytes shorter.
    #[must_use]
    pub fn emit(&self, source: Ipv6Addr, destination: Ipv6Addr) -> ([u8; NEIGHBOUR_LEN], usize) {
        let flag = |set: bool, bit: u8| if set { bit } else { 0 };
        let flags = flag(self.router, ROUTER) | flag(self.solicited, SOLICITED) | flag(self.overrides, OVERRIDE);
        let option = self.target_mac.map(|mac| (TARGET_LINK_LAYER, mac));
        neighbour([ADVERTISEMENT, flags], self.target, option, source, destination)
    }
}

/// The header of a "packet too big" from `source` to `destination`, with the checksum over it and `quoted`, the start
/// of the packet that was too big.
#[must_use]
pub fn emit_packet_too_big(mtu: u32, quoted: &[u8], source: Ipv6Addr, destination: Ipv6Addr) -> [u8; HEADER_LEN] {
    let mut out = [PACKET_TOO_BIG, 0, 0, 0, 0, 0, 0, 0];
    out[4..].copy_from_slice(&mtu.to_be_bytes());
    let len = (HEADER_LEN + quoted.len()) as u32;
    let pseudo = checksum::pseudo_v6(source, destination, protocol::ICMPV6, len);
    let checksum = checksum::Sum::starting(pseudo).then(&out).then(quoted).finish();
    out[2..4].copy_from_slice(&checksum.to_be_bytes());
    out
}

/// Whether the checksum of a whole message is valid.
#[must_use]
pub fn checksum_is_valid(message: &[u8], source: Ipv6Addr, destination: Ipv6Addr) -> bool {
    let pseudo = checksum::pseudo_v6(source, destination, protocol::ICMPV6, message.len() as u32);
    checksum::Sum::starting(pseudo).then(message).partial() == 0xffff
}

/// The solicited-node multicast address of `address` (RFC 4291, section 2.7.1).
#[must_use]
pub const fn solicited_node(address: Ipv6Addr) -> Ipv6Addr {
    let [.., a, b, c] = address.octets();
    Ipv6Addr::from_octets([0xff, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, a, b, c])
}

const PACKET_TOO_BIG: u8 = 2;
const ECHO_REQUEST: u8 = 128;
const ECHO_REPLY: u8 = 129;
const ROUTER_SOLICITATION: u8 = 133;
const SOLICITATION: u8 = 135;
const ADVERTISEMENT: u8 = 136;

const SOURCE_LINK_LAYER: u8 = 1;
const TARGET_LINK_LAYER: u8 = 2;

const ROUTER: u8 = 0x80;
const SOLICITED: u8 = 0x40;
const OVERRIDE: u8 = 0x20;

/// Length of a neighbour message without options.
const TARGET_END: usize = 24;

fn target(bytes: &[u8]) -> Result<(Ipv6Addr, &[u8]), Malformed> {
    let (fixed, options) = bytes.split_first_chunk::<TARGET_END>().ok_or(Malformed::Truncated)?;
    let mut octets = [0; 16];
    octets.copy_from_slice(&fixed[8..]);
    Ok((Ipv6Addr::from(octets), options))
}

/// The first Ethernet address in an option of type `kind`; all options must be well-formed.
fn link_layer(mut options: &[u8], kind: u8) -> Result<Option<Mac>, Malformed> {
    let mut found = None;
    for _ in 0..MAX_OPTIONS {
        let Some(&[option, units]) = options.first_chunk::<2>() else {
            return if options.is_empty() { Ok(found) } else { Err(Malformed::Length) };
        };
        let len = usize::from(units) * 8;
        if len == 0 {
            return Err(Malformed::Length);
        }
        let (this, behind) = options.split_at_checked(len).ok_or(Malformed::Length)?;
        if let (true, None, &[_, _, a, b, c, d, e, f]) = (option == kind, found, this) {
            found = Some(Mac([a, b, c, d, e, f]));
        }
        options = behind;
    }
    if options.is_empty() { Ok(found) } else { Err(Malformed::Kind) }
}

fn neighbour(
    [kind, flags]: [u8; 2],
    target: Ipv6Addr,
    option: Option<(u8, Mac)>,
    source: Ipv6Addr,
    destination: Ipv6Addr,
) -> ([u8; NEIGHBOUR_LEN], usize) {
    let mut out = [0; NEIGHBOUR_LEN];
    out[0] = kind;
    out[4] = flags;
    out[8..TARGET_END].copy_from_slice(&target.octets());
    let mut len = TARGET_END;
    if let Some((option, mac)) = option {
        out[24..26].copy_from_slice(&[option, 1]);
        out[26..].copy_from_slice(&mac.0);
        len = NEIGHBOUR_LEN;
    }
    let pseudo = checksum::pseudo_v6(source, destination, protocol::ICMPV6, len as u32);
    let checksum = checksum::Sum::starting(pseudo).then(&out[..len]).finish();
    out[2..4].copy_from_slice(&checksum.to_be_bytes());
    (out, len)
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
    const B: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0xaabb, 0xccdd);
    const MAC: Mac = Mac([2, 0, 0, 0, 0, 9]);

    #[test]
    fn neighbour_round_trips() {
        for source_mac in [Some(MAC), None] {
            let solicitation = Solicitation { target: B, source_mac };
            let (bytes, len) = solicitation.emit(A, solicited_node(B));
            let bytes = &bytes[..len];
            assert!(checksum_is_valid(bytes, A, solicited_node(B)));
            assert!(!checksum_is_valid(bytes, A, B));
            assert_eq!(Message::parse(bytes), Ok(Message::Solicitation(solicitation)));

            let advertisement = solicitation.answer(MAC, source_mac.is_none());
            assert_eq!(advertisement.solicited, source_mac.is_some());
            let (bytes, len) = advertisement.emit(B, A);
            assert!(checksum_is_valid(&bytes[..len], B, A));
            assert_eq!(Message::parse(&bytes[..len]), Ok(Message::Advertisement(advertisement)));
        }
        assert_eq!(solicited_node(B), "ff02::1:ffbb:ccdd".parse::<Ipv6Addr>().unwrap());
    }

    #[test]
    fn packet_too_big() {
        let bytes = [&emit_packet_too_big(1400, &[1, 2, 3], A, B)[..], &[1, 2, 3]].concat();
        assert!(checksum_is_valid(&bytes, A, B));
        assert_eq!(Message::parse(&bytes), Ok(Message::PacketTooBig { mtu: 1400 }));
    }

    #[test]
    fn others() {
        assert_eq!(
            Message::parse(&[128, 0, 0, 0, 0, 1, 0, 2]),
            Ok(Message::EchoRequest { identifier: 1, sequence: 2 })
        );
        assert_eq!(Message::parse(&[129, 0, 0, 0, 0, 1, 0, 2]), Ok(Message::EchoReply { identifier: 1, sequence: 2 }));
        assert_eq!(Message::parse(&[134, 0, 0, 0, 0, 0, 0, 0]), Ok(Message::Other { kind: 134, code: 0 }));
    }

    #[test]
    fn router_solicitations() {
        let fixed = [133, 0, 0, 0, 0, 0, 0, 0];
        let solicitation = |source_mac| Ok(Message::RouterSolicitation { source_mac });
        assert_eq!(Message::parse(&fixed), solicitation(None));
        let option = [&[1, 1][..], &MAC.0].concat();
        assert_eq!(Message::parse(&[&fixed[..], &option].concat()), solicitation(Some(MAC)));
        assert_eq!(Message::parse(&[&fixed[..], &option[..7]].concat()), Err(Malformed::Length));
        assert_eq!(Message::parse(&[133, 1, 0, 0, 0, 0, 0, 0]), Ok(Message::Other { kind: 133, code: 1 }));
    }

    #[test]
    fn refuses() {
        let (good, _) = Solicitation { target: B, source_mac: Some(MAC) }.emit(A, B);
        for len in 0..NEIGHBOUR_LEN {
            let expected = match len {
                0..24 => Err(Malformed::Truncated),
                24 => Ok(Message::Solicitation(Solicitation { target: B, source_mac: None })),
                _ => Err(Malformed::Length),
            };
            assert_eq!(Message::parse(&good[..len]), expected, "{len}");
        }
        let mut zero = good;
        zero[25] = 0;
        assert_eq!(Message::parse(&zero), Err(Malformed::Length));
        let unknown = [14, 1, 0, 0, 0, 0, 0, 0];
        let with = |count: usize| [&good[..24], &unknown.repeat(count)].concat();
        assert!(Message::parse(&with(MAX_OPTIONS)).is_ok());
        assert_eq!(Message::parse(&with(MAX_OPTIONS + 1)), Err(Malformed::Kind));
    }
}
