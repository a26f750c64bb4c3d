//! The key of a flow record.

use crate::ids::{PeerId, PortId};
use std::net::IpAddr;

use bifrost_nic::Parsed;
use bifrost_wire::Vni;
use bifrost_wire::protocol::UDP;
use bifrost_wire::tcp::Flags;

/// All fields of a packet that the tables' decision depends on, except its size and TTL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(pub(super) [u64; 7]);

/// Where the number of the port or peer begins in a key's last word.
const SOURCE_AT: u32 = 40;

const _: () = assert!(PortId::LIMIT <= PeerId::LIMIT && PeerId::LIMIT as u64 == 1 << (u64::BITS - SOURCE_AT));

/// Who sent a packet to the switch.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Source {
    /// The guest behind a port.
    Guest(PortId),
    /// A peer, in a network.
    Peer(Vni, PeerId),
}

impl Key {
    /// A key that no packet has.
    pub(crate) const NONE: Key = Key([0; 7]);

    /// The key of a packet, if this kind of packet has flow records.
    #[inline(always)]
    pub(crate) fn of(source: Source, parsed: &Parsed) -> Option<Key> {
        let ordinary = match parsed.tcp {
            Some(tcp) => !tcp.flags.contains(Flags::SYN),
            None => parsed.protocol == UDP && !parsed.is_fragment(),
        };
        if ordinary { Self::of_next(source, parsed) } else { None }
    }

    /// The key that later packets of the flow have, for a TCP or UDP packet.
    #[inline(always)]
    pub(crate) fn of_next(source: Source, parsed: &Parsed) -> Option<Key> {
        if parsed.vlan.is_some() || parsed.dst_mac.is_multicast() {
            return None;
        }
        let (addresses, v6) = match (parsed.src_ip, parsed.dst_ip) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                ([u64::from(u32::from(src)) << 32 | u64::from(u32::from(dst)), 0, 0, 0], 0)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                let (src, dst) = (u128::from(src), u128::from(dst));
                ([(src >> 64) as u64, src as u64, (dst >> 64) as u64, dst as u64], 1)
            }
            // Unreachable: both addresses of a packet are of one family.
            _ => return None,
        };
        let (vni, from) = match source {
            Source::Guest(port) => (0, port.0),
            Source::Peer(vni, peer) => (vni.get(), peer.0),
        };
        let [a, b, c, d] = addresses;
        Some(Key([
            a,
            b,
            c,
            d,
            parsed.src_mac.as_u64() << 16 | u64::from(parsed.src_port),
            parsed.dst_mac.as_u64() << 16 | u64::from(parsed.dst_port),
            u64::from(from) << SOURCE_AT | u64::from(vni) << 16 | u64::from(parsed.protocol) << 8 | v6,
        ]))
    }

    /// Compares two keys without a call and without a branch per word.
    #[inline(always)]
    pub(crate) fn is(&self, other: &Key) -> bool {
        self.0.iter().zip(&other.0).fold(0, |different, (a, b)| different | (a ^ b)) == 0
    }

    /// The hash from which the record's set is computed, with a secret multiplier. It includes the source: flow
    /// hashes are not secret, and with them alone a guest could choose which set it fills.
    #[inline(always)]
    pub(crate) fn place(&self, flow_hash: u32) -> u64 {
        let (from, vni) = (self.0[6] >> SOURCE_AT, self.0[6] >> 16);
        ((from ^ vni << 8) << 32) | u64::from(flow_hash)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use bifrost_nic::parse;

    use super::*;

    fn frame(protocol: u8, flags: u8, fragment: bool) -> Vec<u8> {
        let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
        frame.extend([0x45, 0, 0, 40, 0, 0, 0, if fragment { 3 } else { 0 }, 64, protocol, 0, 0]);
        frame.extend([10, 0, 0, 1, 10, 0, 0, 2]);
        frame.extend([0, 7, 0, 9, 0, 20, 0, 0, 0, 0, 0, 0, 0x50, flags, 0, 0, 0, 0, 0, 0]);
        frame
    }

    fn key(source: Source, frame: &[u8]) -> Option<Key> {
        Key::of(source, &parse(frame, frame.len()).unwrap())
    }

    const GUEST: Source = Source::Guest(PortId(3));

    #[test]
    fn only_ordinary_packets_have_a_key() {
        for (name, frame, has) in [
            ("ACK", frame(6, 16, false), true),
            ("FIN", frame(6, 17, false), true),
            ("SYN", frame(6, 2, false), false),
            ("SYN and ACK", frame(6, 18, false), false),
            ("a fragment of TCP", frame(6, 16, true), false),
            ("UDP", frame(17, 0, false), true),
            ("a fragment of UDP", frame(17, 0, true), false),
            ("ICMP", frame(1, 0, false), false),
            ("something else", frame(47, 0, false), false),
        ] {
            assert_eq!(key(GUEST, &frame).is_some(), has, "{name}");
        }
        let mut multicast = frame(17, 0, false);
        multicast[0] = 1;
        assert_eq!(key(GUEST, &multicast), None);
    }

    #[test]
    fn the_key_has_all_fields_that_the_tables_look_at() {
        let plain = frame(17, 0, false);
        let known = key(GUEST, &plain);
        let peer = |vni, peer| Source::Peer(Vni::new(vni).unwrap(), PeerId(peer));
        assert_eq!(key(GUEST, &plain), known);
        // MAC addresses, IP addresses and ports.
        for at in (0..12).filter(|at| *at != 0).chain(26..38) {
            let mut other = plain.clone();
            other[at] ^= 4;
            assert_ne!(key(GUEST, &other), known, "byte {at}");
        }
        assert_ne!(key(GUEST, &frame(6, 16, false)), known);
        assert_ne!(key(Source::Guest(PortId(4)), &plain), known);
        assert_ne!(key(peer(1, 3), &plain), key(peer(1, 4), &plain));
        assert_ne!(key(peer(1, 3), &plain), key(peer(2, 3), &plain));
        // Fields that are not in the key: TTL, identification, payload, TCP flags.
        for at in [18, 22, 50] {
            let mut same = plain.clone();
            same[at] ^= 4;
            assert_eq!(key(GUEST, &same), known, "byte {at}");
        }
        assert_eq!(key(GUEST, &frame(6, 16, false)), key(GUEST, &frame(6, 25, false)));
    }
}
