//! What the switch changes in a frame: Ethernet addresses, time to live, and the two ends of a conversation.
//!
//! This is the only place where the headers of a tenant's frame are changed. Checksums are updated, not computed (RFC 1624):
//! damage stays visible, and the payload is not read.

use std::net::IpAddr;

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::{Mac, checksum, ipv4, ipv6, tcp, udp};

/// Changes of one frame, to be applied to it or to every frame that it is segmented or fragmented into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rewrite {
    destination: Mac,
    source: Mac,
    /// Where the IP header begins, bytes.
    l3: u16,
    v6: bool,
    /// Whether a router passes it on.
    hop: bool,
    translation: Option<Translation>,
}

/// One end of a conversation over TCP or UDP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Endpoint {
    pub(crate) address: IpAddr,
    pub(crate) port: u16,
}

/// Other ends of a TCP or UDP packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Translation {
    pub(crate) source: Endpoint,
    pub(crate) destination: Endpoint,
}

/// IPv6 extension header of fragments (RFC 8200, section 4.5), and its length.
const FRAGMENT: u8 = 44;
const FRAGMENT_LEN: usize = 8;

impl Rewrite {
    /// One hop through a router: new Ethernet addresses, one less to live.
    pub(crate) fn hop(parsed: &Parsed, source: Mac, destination: Mac) -> Self {
        Rewrite { hop: true, ..Rewrite::link(parsed, source, destination) }
    }

    /// New Ethernet addresses.
    pub(crate) fn link(parsed: &Parsed, source: Mac, destination: Mac) -> Self {
        Rewrite { destination, source, l3: parsed.l3, v6: parsed.kind == L3::V6, hop: false, translation: None }
    }

    /// The same, and other ends.
    #[must_use]
    pub(crate) fn translated(self, translation: Option<Translation>) -> Self {
        Rewrite { translation, ..self }
    }

    /// Changes a frame. One that is too short, or of another family, is left as it is.
    pub fn apply(&self, frame: &mut [u8]) {
        let l3 = usize::from(self.l3);
        let Some((link, packet)) = frame.split_at_mut_checked(l3) else { return };
        let hops = u8::from(self.hop);
        let ttl = if self.v6 {
            let header = packet.first_chunk_mut::<{ ipv6::HEADER_LEN }>();
            header.map(|ip| ipv6::set_hop_limit(ip, ip[7].saturating_sub(hops)))
        } else {
            let header = packet.first_chunk_mut::<{ ipv4::HEADER_LEN }>();
            header.map(|ip| ipv4::set_ttl(ip, ip[8].saturating_sub(hops)))
        };
        if let (Some(()), Some(macs)) = (ttl, link.first_chunk_mut::<12>()) {
            macs[..6].copy_from_slice(&self.destination.0);
            macs[6..].copy_from_slice(&self.source.0);
        }
        if let Some(translation) = &self.translation {
            translation.apply(packet, self.v6);
        }
    }

    /// The destination MAC address after the change.
    pub fn destination(&self) -> Mac {
        self.destination
    }
}

impl Translation {
    /// Whether a packet has its ends where [`apply`](Self::apply) finds them: TCP or UDP right behind the IP header, whole.
    pub(crate) fn is_possible(parsed: &Parsed) -> bool {
        let v6 = parsed.kind == L3::V6;
        let plain = !v6 || usize::from(parsed.l4 - parsed.l3) == ipv6::HEADER_LEN;
        plain && matches!(parsed.protocol, TCP | UDP) && !parsed.is_fragment()
    }

    /// What a packet's headers say after the change. The hash of its flow stays: order is kept within the flow as the sender knows it.
    pub(crate) fn of(&self, parsed: &Parsed) -> Parsed {
        Parsed {
            src_ip: self.source.address,
            dst_ip: self.destination.address,
            src_port: self.source.port,
            dst_port: self.destination.port,
            ..*parsed
        }
    }

    #[cold]
    fn apply(&self, packet: &mut [u8], v6: bool) {
        let (src, dst) = (self.source.address, self.destination.address);
        match (v6, src, dst) {
            (false, IpAddr::V4(src), IpAddr::V4(dst)) => {
                let Some((protocol, l4)) = transport_v4(packet) else { return };
                let mut new = [0; 8];
                new[..4].copy_from_slice(&src.octets());
                new[4..].copy_from_slice(&dst.octets());
                let old = replace(&mut packet[12..20], &new);
                update(&mut packet[10..12], &old, &new, false);
                self.ports(packet, protocol, l4, &old, &new);
            }
            (true, IpAddr::V6(src), IpAddr::V6(dst)) => {
                let Some((protocol, l4)) = transport_v6(packet) else { return };
                let mut new = [0; 32];
                new[..16].copy_from_slice(&src.octets());
                new[16..].copy_from_slice(&dst.octets());
                let old = replace(&mut packet[8..40], &new);
                self.ports(packet, protocol, l4, &old, &new);
            }
            _ => {}
        }
    }

    /// Changes the ports, and the checksum after the change of addresses from `old` to `new`. `l4`: where the transport header begins, in
    /// a packet that has one; later fragments have none.
    fn ports(&self, packet: &mut [u8], protocol: u8, l4: Option<usize>, old: &[u8], new: &[u8]) {
        let at = match protocol {
            TCP => tcp::CHECKSUM_OFFSET,
            UDP => udp::CHECKSUM_OFFSET,
            _ => return,
        };
        let Some(header) = l4.and_then(|l4| packet.get_mut(l4..)) else { return };
        let Some(header) = header.get_mut(..at + 2) else { return };
        let [a, b] = self.source.port.to_be_bytes();
        let [c, d] = self.destination.port.to_be_bytes();
        let ports = [a, b, c, d];
        let old_ports = replace(&mut header[..4], &ports);
        let is_udp = protocol == UDP;
        if is_udp && header[at..] == [0, 0] {
            // The sender has computed none (RFC 768).
            return;
        }
        update(&mut header[at..], old, new, is_udp);
        update(&mut header[at..], &old_ports, &ports, is_udp);
    }
}

/// The protocol of an IPv4 packet, and where its transport header begins, if it has one.
fn transport_v4(packet: &[u8]) -> Option<(u8, Option<usize>)> {
    let header = packet.first_chunk::<{ ipv4::HEADER_LEN }>()?;
    let first = u16::from_be_bytes([header[6], header[7]]) & 0x1fff == 0;
    Some((header[9], first.then_some(usize::from(header[0] & 0xf) * 4)))
}

/// The same of an IPv6 packet, which has no extension headers but that of a fragment.
fn transport_v6(packet: &[u8]) -> Option<(u8, Option<usize>)> {
    let (header, rest) = packet.split_first_chunk::<{ ipv6::HEADER_LEN }>()?;
    if header[6] != FRAGMENT {
        return Some((header[6], Some(ipv6::HEADER_LEN)));
    }
    let fragment = rest.first_chunk::<FRAGMENT_LEN>()?;
    let first = u16::from_be_bytes([fragment[2], fragment[3]]) & 0xfff8 == 0;
    Some((fragment[0], first.then_some(ipv6::HEADER_LEN + FRAGMENT_LEN)))
}

/// Writes `new`, and returns what was there.
fn replace<const N: usize>(bytes: &mut [u8], new: &[u8; N]) -> [u8; N] {
    let mut old = [0; N];
    if let Some(bytes) = bytes.first_chunk_mut() {
        old = *bytes;
        *bytes = *new;
    }
    old
}

/// Updates a checksum after words have changed. `is_udp`: zero means that there is none, so it is written as its other form.
fn update(field: &mut [u8], old: &[u8], new: &[u8], is_udp: bool) {
    let [a, b] = field else { return };
    let mut sum = u16::from_be_bytes([*a, *b]);
    for (old, new) in old.chunks_exact(2).zip(new.chunks_exact(2)) {
        sum = checksum::update_u16(sum, u16::from_be_bytes([old[0], old[1]]), u16::from_be_bytes([new[0], new[1]]));
    }
    if is_udp && sum == 0 {
        sum = 0xffff;
    }
    [*a, *b] = sum.to_be_bytes();
}
