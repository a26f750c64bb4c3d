//! Link-layer addresses of next hops, and replies for the gateway's own addresses: ARP, neighbour discovery, ping.
//! Without I/O.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv6Addr};

use bifrost_nic::{L3, Parsed, parse};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::{ICMP, ICMPV6};
use bifrost_wire::{Mac, arp, icmp, ipv4, ipv6};

const S: u64 = 1_000_000_000;
/// Interval of requests for an unknown address, and age at which a known address is requested again.
const RETRY_NS: u64 = S;
const REFRESH_NS: u64 = 20 * S;
/// Age at which an address that does not answer becomes unknown.
const LOST_NS: u64 = 60 * S;
/// The same for a watched address, which is requested each second and is lost after three requests without an answer.
const WATCHED_REFRESH_NS: u64 = S;
const WATCHED_LOST_NS: u64 = 3 * S + S / 2;
/// Maximum number of addresses that are resolved.
const MAX: usize = 4096;
const HOP_LIMIT: u8 = 64;
/// Neighbour discovery requires it (RFC 4861, section 7.1).
const ND_HOP_LIMIT: u8 = 255;

#[derive(Clone, Copy, Debug)]
struct Entry {
    mac: Option<Mac>,
    confirmed_at: u64,
    asked_at: Option<u64>,
    watched: bool,
}

/// The neighbours of a link.
#[derive(Debug)]
pub struct Neighbours {
    mac: Mac,
    own: Vec<IpAddr>,
    /// Addresses to resolve. No others are stored, whatever packets say.
    wanted: BTreeMap<IpAddr, Entry>,
    changed: bool,
}

impl Neighbours {
    /// Creates the table of a gateway with these addresses.
    pub fn new(mac: Mac, own: Vec<IpAddr>) -> Self {
        Neighbours { mac, own, wanted: BTreeMap::new(), changed: false }
    }

    /// From now on, resolves an address.
    pub fn want(&mut self, address: IpAddr) {
        if self.wanted.len() < MAX {
            let new = Entry { mac: None, confirmed_at: 0, asked_at: None, watched: false };
            self.wanted.entry(address).or_insert(new);
        }
    }

    /// From now on, resolves an address, and checks it so often that it becomes unknown within four seconds if it stops
    /// answering.
    pub fn watch(&mut self, address: IpAddr) {
        self.want(address);
        if let Some(entry) = self.wanted.get_mut(&address) {
            entry.watched = true;
        }
    }

    /// The known addresses, if they have changed since the last call.
    pub fn changes(&mut self) -> Option<Vec<(IpAddr, Mac)>> {
        std::mem::take(&mut self.changed).then(|| {
            let known = self.wanted.iter().filter_map(|(address, entry)| Some((*address, entry.mac?)));
            known.collect()
        })
    }

    /// All addresses that are resolved, with the link-layer addresses that are known.
    pub fn iter(&self) -> impl Iterator<Item = (IpAddr, Option<Mac>)> {
        self.wanted.iter().map(|(address, entry)| (*address, entry.mac))
    }

    /// The link-layer address of an address that is resolved, if it is known.
    pub fn get(&self, address: IpAddr) -> Option<Mac> {
        self.wanted.get(&address).and_then(|entry| entry.mac)
    }

    /// The requests that are due.
    pub fn questions(&mut self, now: u64) -> Vec<Vec<u8>> {
        let mut all = Vec::new();
        let (mac, own) = (self.mac, &self.own);
        for (address, entry) in &mut self.wanted {
            let age = now.saturating_sub(entry.confirmed_at);
            let (refresh, lost) =
                if entry.watched { (WATCHED_REFRESH_NS, WATCHED_LOST_NS) } else { (REFRESH_NS, LOST_NS) };
            if entry.mac.is_some() && age > lost {
                entry.mac = None;
                self.changed = true;
            }
            let due = entry.asked_at.is_none_or(|at| now.saturating_sub(at) >= RETRY_NS);
            if due && (entry.mac.is_none() || age >= refresh) {
                entry.asked_at = Some(now);
                all.extend(question(mac, own, *address));
            }
        }
        all
    }

    /// Learns from a frame. Returns the reply to it, if any.
    pub fn on_frame(&mut self, now: u64, frame: &[u8]) -> Option<Vec<u8>> {
        let parsed = parse(frame, frame.len()).ok()?;
        match (parsed.kind, parsed.protocol) {
            (L3::Arp, _) => self.on_arp(now, frame, &parsed),
            (L3::V4, ICMP) => self.on_icmp(frame, &parsed),
            (L3::V6, ICMPV6) => self.on_icmpv6(now, frame, &parsed),
            _ => None,
        }
    }

    fn learn(&mut self, now: u64, address: IpAddr, mac: Mac) {
        if let Some(entry) = self.wanted.get_mut(&address).filter(|_| mac.is_unicast()) {
            self.changed |= entry.mac != Some(mac);
            entry.mac = Some(mac);
            entry.confirmed_at = now;
        }
    }

    fn on_arp(&mut self, now: u64, frame: &[u8], parsed: &Parsed) -> Option<Vec<u8>> {
        let packet = arp::Packet::parse(frame.get(usize::from(parsed.l3)..)?).ok()?;
        self.learn(now, IpAddr::V4(packet.sender_ip), packet.sender_mac);
        let asked = packet.operation == arp::Operation::Request && self.own.contains(&IpAddr::V4(packet.target_ip));
        asked.then(|| {
            let header = ethernet::Header::new(packet.sender_mac, self.mac, ethertype::ARP);
            [&header.emit()[..], &packet.reply(self.mac).emit()].concat()
        })
    }

    fn on_icmp(&self, frame: &[u8], parsed: &Parsed) -> Option<Vec<u8>> {
        let (IpAddr::V4(source), IpAddr::V4(own)) = (parsed.src_ip, parsed.dst_ip) else { return None };
        let message = frame.get(usize::from(parsed.l4)..parsed.end as usize)?;
        let asked = icmp::v4::Message::parse(message).ok()?;
        let icmp::v4::Message::EchoRequest { identifier, sequence } = asked else { return None };
        let good = icmp::v4::checksum_is_valid(message) && !parsed.is_fragment();
        if !good || !self.own.contains(&parsed.dst_ip) {
            return None;
        }
        let data = &message[icmp::v4::HEADER_LEN..];
        let reply = icmp::v4::Message::EchoReply { identifier, sequence }.emit(data);
        let header = ipv4::Header { ttl: HOP_LIMIT, ..ipv4::Header::new(own, source, ICMP, message.len() as u16) };
        let link = ethernet::Header::new(parsed.src_mac, self.mac, ethertype::IPV4);
        Some([&link.emit()[..], &header.emit(), &reply, data].concat())
    }

    fn on_icmpv6(&mut self, now: u64, frame: &[u8], parsed: &Parsed) -> Option<Vec<u8>> {
        let (IpAddr::V6(source), IpAddr::V6(destination)) = (parsed.src_ip, parsed.dst_ip) else { return None };
        let message = frame.get(usize::from(parsed.l4)..parsed.end as usize)?;
        if parsed.is_fragment() || !icmp::v6::checksum_is_valid(message, source, destination) {
            return None;
        }
        let from_link = frame.get(usize::from(parsed.l3) + 7) == Some(&ND_HOP_LIMIT);
        match icmp::v6::Message::parse(message).ok()? {
            icmp::v6::Message::Solicitation(asked) if from_link => {
                if let Some(mac) = asked.source_mac {
                    self.learn(now, IpAddr::V6(source), mac);
                }
                if !self.own.contains(&IpAddr::V6(asked.target)) {
                    return None;
                }
                let unspecified = source.is_unspecified();
                let to = if unspecified { Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1) } else { source };
                let (bytes, len) = asked.answer(self.mac, unspecified).emit(asked.target, to);
                Some(self.v6(parsed.src_mac, asked.target, to, ND_HOP_LIMIT, &bytes[..len]))
            }
            icmp::v6::Message::Advertisement(said) if from_link => {
                if let Some(mac) = said.target_mac {
                    self.learn(now, IpAddr::V6(said.target), mac);
                }
                None
            }
            icmp::v6::Message::EchoRequest { .. } if self.own.contains(&parsed.dst_ip) => {
                let mut reply = message.to_vec();
                // The type changes, and source and destination are swapped. Only the type affects the checksum.
                const ECHO_REPLY: u8 = 129;
                reply[0] = ECHO_REPLY;
                let sum = u16::from_be_bytes([reply[2], reply[3]]);
                let new = bifrost_wire::checksum::update_u16(sum, 128 << 8, 129 << 8);
                reply[2..4].copy_from_slice(&new.to_be_bytes());
                Some(self.v6(parsed.src_mac, destination, source, HOP_LIMIT, &reply))
            }
            _ => None,
        }
    }

    fn v6(&self, to: Mac, source: Ipv6Addr, destination: Ipv6Addr, hop_limit: u8, message: &[u8]) -> Vec<u8> {
        v6_frame(to, self.mac, source, destination, hop_limit, message)
    }
}

/// The request for an address; `None` without an own address of its family.
fn question(mac: Mac, own: &[IpAddr], address: IpAddr) -> Option<Vec<u8>> {
    match address {
        IpAddr::V4(target_ip) => {
            let sender_ip = own.iter().find_map(|own| match own {
                IpAddr::V4(own) => Some(*own),
                IpAddr::V6(_) => None,
            })?;
            let packet = arp::Packet {
                operation: arp::Operation::Request,
                sender_mac: mac,
                sender_ip,
                target_mac: Mac::ZERO,
                target_ip,
            };
            let header = ethernet::Header::new(Mac::BROADCAST, mac, ethertype::ARP);
            Some([&header.emit()[..], &packet.emit()].concat())
        }
        IpAddr::V6(target) => {
            let source = own.iter().find_map(|own| match own {
                IpAddr::V6(own) => Some(*own),
                IpAddr::V4(_) => None,
            })?;
            let group = icmp::v6::solicited_node(target);
            let [.., a, b, c, d] = group.octets();
            let (bytes, len) = icmp::v6::Solicitation { target, source_mac: Some(mac) }.emit(source, group);
            Some(v6_frame(Mac([0x33, 0x33, a, b, c, d]), mac, source, group, ND_HOP_LIMIT, &bytes[..len]))
        }
    }
}

fn v6_frame(to: Mac, mac: Mac, source: Ipv6Addr, destination: Ipv6Addr, hop_limit: u8, message: &[u8]) -> Vec<u8> {
    let header = ipv6::Header::new(source, destination, ICMPV6, message.len() as u16);
    let header = ipv6::Header { hop_limit, ..header };
    [&ethernet::Header::new(to, mac, ethertype::IPV6).emit()[..], &header.emit(), message].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
    const PEER: Mac = Mac([2, 0, 0, 0, 0, 2]);

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn link(mac: Mac, own: &[&str]) -> Neighbours {
        Neighbours::new(mac, own.iter().map(|a| ip(a)).collect())
    }

    #[test]
    fn two_gateways_find_each_other() {
        for (mine, theirs) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
            let (mut a, mut b) = (link(MAC, &[mine]), link(PEER, &[theirs]));
            a.want(ip(theirs));
            let questions = a.questions(S);
            assert_eq!(questions.len(), 1);
            assert!(a.questions(S + 1).is_empty(), "asked a moment ago");
            let answer = b.on_frame(S, &questions[0]).unwrap();
            assert_eq!(a.on_frame(S, &answer), None);
            assert_eq!(a.changes(), Some(vec![(ip(theirs), PEER)]));
            assert_eq!((a.changes(), b.changes()), (None, None), "only who is wanted is learned");
            assert!(a.questions(10 * S).is_empty(), "still fresh");
            assert_eq!(a.questions(22 * S).len(), 1, "confirmed again");
            assert_eq!(a.questions(62 * S).len(), 1);
            assert_eq!(a.changes(), Some(vec![]), "silent for a minute");
        }
    }

    #[test]
    fn a_watched_address_that_is_silent_is_lost_soon() {
        let mut a = link(MAC, &["10.0.0.1"]);
        a.watch(ip("10.0.0.2"));
        assert_eq!(a.questions(S).len(), 1);
        a.learn(S, ip("10.0.0.2"), PEER);
        assert_eq!(a.changes(), Some(vec![(ip("10.0.0.2"), PEER)]));
        assert!(a.questions(S + S / 2).is_empty());
        for second in [2, 3, 4] {
            assert_eq!((a.questions(second * S).len(), a.changes()), (1, None), "{second}");
        }
        assert_eq!((a.questions(5 * S).len(), a.changes()), (1, Some(vec![])));
        a.learn(5 * S, ip("10.0.0.2"), PEER);
        assert_eq!(a.get(ip("10.0.0.2")), Some(PEER));
    }

    #[test]
    fn what_is_not_answered() {
        let mut a = link(MAC, &["10.0.0.1", "fd00::1"]);
        let mut b = link(PEER, &["10.0.0.9"]);
        b.want(ip("10.0.0.3"));
        for question in b.questions(0) {
            assert_eq!(a.on_frame(0, &question), None, "another's address");
        }
        assert_eq!(a.on_frame(0, b"short"), None);
        // A group's MAC address is not learned.
        a.want(ip("10.0.0.9"));
        a.learn(0, ip("10.0.0.9"), Mac::BROADCAST);
        assert_eq!(a.changes(), None);
    }

    #[test]
    fn ping() {
        let request = icmp::v4::Message::EchoRequest { identifier: 1, sequence: 2 }.emit(b"data");
        let header = ipv4::Header {
            header_len: 20,
            traffic_class: 0,
            total_len: 32,
            identification: 0,
            dont_fragment: false,
            more_fragments: false,
            fragment_offset: 0,
            ttl: 1,
            protocol: ICMP,
            checksum: 0,
            source: [10, 0, 0, 2].into(),
            destination: [10, 0, 0, 1].into(),
        };
        let link_header = ethernet::Header::new(MAC, PEER, ethertype::IPV4).emit();
        let frame = [&link_header[..], &header.emit(), &request, b"data"].concat();
        let reply = link(MAC, &["10.0.0.1"]).on_frame(0, &frame).unwrap();
        let parsed = parse(&reply, reply.len()).unwrap();
        assert_eq!((parsed.dst_mac, parsed.dst_ip), (PEER, ip("10.0.0.2")));
        let message = &reply[34..];
        assert!(icmp::v4::checksum_is_valid(message));
        assert_eq!(icmp::v4::Message::parse(message), Ok(icmp::v4::Message::EchoReply { identifier: 1, sequence: 2 }));
        assert_eq!(link(MAC, &["10.0.0.7"]).on_frame(0, &frame), None);

        let (source, own): (Ipv6Addr, Ipv6Addr) = ("fd00::2".parse().unwrap(), "fd00::1".parse().unwrap());
        let mut message = vec![128, 0, 0, 0, 0, 1, 0, 2, 5];
        let pseudo = bifrost_wire::checksum::pseudo_v6(source, own, ICMPV6, message.len() as u32);
        let sum = bifrost_wire::checksum::Sum::starting(pseudo).then(&message).finish();
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        let frame = v6_frame(MAC, PEER, source, own, 64, &message);
        let reply = link(MAC, &["fd00::1"]).on_frame(0, &frame).unwrap();
        assert_eq!(reply[54], 129);
        assert!(icmp::v6::checksum_is_valid(&reply[54..], own, source));
    }
}
