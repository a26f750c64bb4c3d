//! Packets that are larger than the path MTU (Triton paper, section 5.2): fragmented, or refused with an ICMP error that says how
//! large they may be.
//!
//! All of this is rare: a packet that fits costs one comparison.

use std::net::{IpAddr, Ipv4Addr};

use bifrost_nic::{L3, Parsed, Segments, TooLarge as Refusal};
use bifrost_tables::TokenBucket;
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::{ICMP, ICMPV6};
use bifrost_wire::{Mac, icmp, ipv4, ipv6};

use crate::frame::Frame;

/// ICMP errors a second, and how many at once, that one port may cause: enough for a guest that begins to talk to many others.
const ERRORS_PER_SECOND: u64 = 1000;
const ERRORS_AT_ONCE: u64 = 100;

/// Longest packets with an ICMP error (RFC 1812, section 4.3.2.3; RFC 4443, section 2.4 c).
const MAX_V4_ERROR: usize = 576;
const MAX_V6_ERROR: usize = 1280;

/// What can be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Remedy {
    /// It is fragmented, or segmented into smaller ones.
    Fragment,
    /// Its sender gets the error that was made.
    Answer,
    /// Nothing.
    None,
}

/// A frame that is larger than what gets there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TooLarge<'a> {
    pub(crate) frame: Frame<'a>,
    /// Bytes of the largest IP packet.
    pub(crate) mtu: u16,
    /// Between whom the error goes; `None`: nobody may send one.
    pub(crate) ends: Option<Ends>,
}

/// Which host sends an ICMP error, and to which vNIC.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ends {
    pub(crate) source: IpAddr,
    pub(crate) source_mac: Mac,
    pub(crate) destination_mac: Mac,
}

/// A full allowance of ICMP errors.
pub(crate) fn allowance() -> TokenBucket {
    TokenBucket::new(ERRORS_PER_SECOND, ERRORS_AT_ONCE)
}

/// What is to be done about a frame that is too large; `error` receives the frame for its sender, as long as `allowance` lasts.
#[cold]
pub(crate) fn remedy(
    TooLarge { frame, mtu, ends }: TooLarge<'_>,
    allowance: &mut TokenBucket,
    now_ns: u64,
    error: &mut Vec<u8>,
) -> Remedy {
    match Segments::plan_within(frame.head, frame.len, frame.offload, mtu) {
        // The plan is made again when the frame leaves, and what is wrong is counted then.
        Ok(_) | Err(Refusal::Malformed(_)) => Remedy::Fragment,
        Err(Refusal::Uncuttable) => Remedy::None,
        Err(Refusal::DontFragment) => match ends {
            Some(ends) if may_be_answered(frame.head, frame.parsed) && allowance.take(now_ns, 1) => {
                too_big(frame, mtu, ends, error).map_or(Remedy::None, |()| Remedy::Answer)
            }
            _ => Remedy::None,
        },
    }
}

/// Whether an ICMP error may be sent about an IP packet: never about an ICMP error, to a group, from or about what is no single
/// host, or for a later fragment (RFC 1122, section 3.2.2; RFC 4443, section 2.4 e, where later fragments are not excepted).
fn may_be_answered(head: &[u8], parsed: &Parsed) -> bool {
    let single = |addr: IpAddr| match addr {
        IpAddr::V4(a) => !(a.is_unspecified() || a.is_multicast() || a.is_broadcast() || a.is_loopback()),
        IpAddr::V6(a) => !(a.is_unspecified() || a.is_multicast() || a.is_loopback()),
    };
    let unicast = !parsed.dst_mac.is_multicast() && single(parsed.src_ip) && single(parsed.dst_ip);
    let kind = head.get(usize::from(parsed.l4)).copied();
    let about = match (parsed.kind, parsed.protocol) {
        // Destination unreachable, source quench, redirect, time exceeded, parameter problem.
        (L3::V4, ICMP) => !matches!(kind, None | Some(3..=5 | 11 | 12)),
        // Errors, redirect, and neighbour discovery, which may go to another port than it says.
        (L3::V6, ICMPV6) => !matches!(kind, None | Some(0..=127 | 133..=137)),
        (L3::V4 | L3::V6, _) => true,
        _ => false,
    };
    let field = head.get(usize::from(parsed.l3) + 6..usize::from(parsed.l3) + 8);
    let later = parsed.kind == L3::V4 && field.is_none_or(|f| u16::from_be_bytes([f[0], f[1]]) & 0x1fff != 0);
    unicast && about && !later
}

/// "Fragmentation needed and DF set" (RFC 792, RFC 1191) or "packet too big" (RFC 4443, section 3.2), with the start of the packet
/// as it came.
fn too_big(frame: Frame<'_>, mtu: u16, ends: Ends, out: &mut Vec<u8>) -> Option<()> {
    let parsed = frame.parsed;
    let packet = frame.head.get(usize::from(parsed.l3)..frame.head.len().min(parsed.end as usize))?;
    let start = |out: &mut Vec<u8>, ethertype| {
        out.clear();
        out.extend_from_slice(&ethernet::Header::new(ends.destination_mac, ends.source_mac, ethertype).emit());
    };
    match (ends.source, parsed.src_ip) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let quote = &packet[..packet.len().min(MAX_V4_ERROR - ipv4::HEADER_LEN - icmp::v4::HEADER_LEN)];
            let message = icmp::v4::Message::FragmentationNeeded { mtu }.emit(quote);
            start(out, ethertype::IPV4);
            out.extend_from_slice(&v4_header(source, destination, message.len() + quote.len()).emit());
            out.extend_from_slice(&message);
            out.extend_from_slice(quote);
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let quote = &packet[..packet.len().min(MAX_V6_ERROR - ipv6::HEADER_LEN - icmp::v6::HEADER_LEN)];
            let message = icmp::v6::emit_packet_too_big(u32::from(mtu), quote, source, destination);
            let ip = ipv6::Header {
                traffic_class: 0,
                flow_label: 0,
                payload_len: (message.len() + quote.len()) as u16,
                next_header: ICMPV6,
                hop_limit: 64,
                source,
                destination,
            };
            start(out, ethertype::IPV6);
            out.extend_from_slice(&ip.emit());
            out.extend_from_slice(&message);
            out.extend_from_slice(quote);
        }
        // Never so: who answers is of the packet's family.
        _ => return None,
    }
    Some(())
}

fn v4_header(source: Ipv4Addr, destination: Ipv4Addr, payload: usize) -> ipv4::Header {
    ipv4::Header {
        header_len: ipv4::HEADER_LEN as u8,
        // Internetwork control (RFC 1812, section 4.3.2.5).
        traffic_class: 0xc0,
        total_len: (ipv4::HEADER_LEN + payload) as u16,
        // One packet, never to be cut, needs none (RFC 6864).
        identification: 0,
        dont_fragment: true,
        more_fragments: false,
        fragment_offset: 0,
        ttl: 64,
        protocol: ICMP,
        checksum: 0,
        source,
        destination,
    }
}
