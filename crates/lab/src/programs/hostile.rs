//! Traffic of a hostile guest: malformed frames of every protocol, SYN floods, endless new conversations; also
//! regular traffic for comparison. Reproducible by a seed.

use fastrand::Rng;

use crate::programs::packet_socket::OFFLOAD_LEN;

/// Longest frame that a guest's device with an MTU of 1500 accepts, bytes.
const LONGEST: usize = 1514;
/// Shortest frame, bytes: a kernel sends nothing without an Ethernet header.
const SHORTEST: usize = 14;

const ARP: u16 = 0x0806;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
/// TCP flags.
const SYN: u8 = 2;
const ACK: u8 = 16;

/// Ports of regular datagrams.
pub const INNOCENT_PORT: u16 = 9;

/// A vNIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vnic {
    /// Its MAC address.
    pub mac: [u8; 6],
    /// Its IPv4 address.
    pub v4: [u8; 4],
    /// An IPv6 address, which need not be configured.
    pub v6: [u8; 16],
}

/// Kinds of traffic.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Traffic {
    /// UDP datagrams of one conversation.
    Innocent,
    /// Frames of every protocol, most of them damaged, some with invalid offload headers.
    Damaged,
    /// TCP SYNs from and to random ports, one in four to a random address of the network.
    Syns,
    /// UDP datagrams from and to random ports; each begins a conversation.
    Conversations,
}

/// An endless sequence of frames from one vNIC to another.
#[derive(Debug)]
pub struct Frames {
    traffic: Traffic,
    from: Vnic,
    to: Vnic,
    random: Rng,
    /// Well-formed frames, which are damaged in turn.
    models: Vec<Vec<u8>>,
    turn: usize,
    frame: Vec<u8>,
}

impl Frames {
    /// Frames of `traffic`; the same seed gives the same frames.
    pub fn new(traffic: Traffic, from: Vnic, to: Vnic, seed: u64) -> Self {
        let models = if traffic == Traffic::Damaged { models(from, to) } else { Vec::new() };
        Self { traffic, from, to, random: Rng::with_seed(seed), models, turn: 0, frame: Vec::new() }
    }

    /// The next frame, with its offload header.
    pub fn next_frame(&mut self) -> ([u8; OFFLOAD_LEN], &[u8]) {
        let (from, mut to) = (self.from, self.to);
        let ports = (self.random.u16(..) | 1, self.random.u16(..) | 1);
        let mut offload = [0; OFFLOAD_LEN];
        self.frame = match self.traffic {
            Traffic::Innocent => {
                let ports = (INNOCENT_PORT, INNOCENT_PORT);
                ethernet(from, to, IPV4, &ipv4(from, to, UDP, &udp_v4(from, to, ports, &[7; 18])))
            }
            Traffic::Conversations => {
                ethernet(from, to, IPV4, &ipv4(from, to, UDP, &udp_v4(from, to, ports, &[7; 18])))
            }
            Traffic::Syns => {
                if self.random.u64(..4) == 0 {
                    to.v4[3] = self.random.u8(..);
                }
                ethernet(from, to, IPV4, &ipv4(from, to, TCP, &tcp_v4(from, to, ports, SYN, &[])))
            }
            Traffic::Damaged => {
                self.turn = (self.turn + 1) % self.models.len();
                let mut frame = self.models[self.turn].clone();
                self.damage(&mut frame);
                if self.random.u64(..4) == 0 {
                    offload = self.offload(&frame);
                }
                frame
            }
        };
        (offload, &self.frame)
    }

    /// Damages a frame in one of several ways.
    fn damage(&mut self, frame: &mut Vec<u8>) {
        for _ in 0..self.random.u64(..3) {
            let random = &mut self.random;
            let at = |random: &mut Rng, len: usize| random.usize(..len.max(1));
            match random.u64(..8) {
                // A flipped bit after the Ethernet addresses, whose bits matter little.
                0 | 1 => {
                    let position = 12 + at(random, frame.len() - 12);
                    frame[position] ^= 1 << random.u64(..8);
                }
                2 => {
                    let position = at(random, frame.len());
                    frame[position] = random.u8(..);
                }
                // A length, count, or offset field with an extreme value.
                3 => {
                    let position = 12 + at(random, frame.len() - 13);
                    let extreme = [0, 1, 0x7fff, 0xffff][random.usize(..4)];
                    frame[position..position + 2].copy_from_slice(&u16::to_be_bytes(extreme));
                }
                // A truncated frame, usually within a header.
                4 => frame.truncate((SHORTEST + at(random, frame.len().min(120))).min(frame.len())),
                // The payload of another frame.
                5 => {
                    let other = at(random, self.models.len());
                    let cut = SHORTEST + at(random, frame.len() - SHORTEST);
                    frame.truncate(cut);
                    let rest = &self.models[other][SHORTEST..];
                    frame.extend_from_slice(&rest[at(random, rest.len())..]);
                }
                // A frame of maximum length.
                6 => frame.resize(LONGEST, random.u8(..)),
                // A header repeated four times.
                _ => {
                    let begin = SHORTEST + at(random, frame.len() - SHORTEST);
                    let piece = frame[begin..(begin + 8).min(frame.len())].to_vec();
                    (0..3).for_each(|_| frame.splice(begin..begin, piece.iter().copied()).for_each(drop));
                }
            }
            frame.truncate(LONGEST);
            frame.resize(frame.len().max(SHORTEST), 0);
        }
    }

    /// An offload header (`struct virtio_net_hdr`) that a kernel may accept but that usually does not fit the frame.
    fn offload(&mut self, frame: &[u8]) -> [u8; OFFLOAD_LEN] {
        let random = &mut self.random;
        let transport = if frame[12..14] == IPV6.to_be_bytes() { 54 } else { 34 };
        let start = if random.u64(..4) == 0 { random.usize(..frame.len()) as u16 } else { transport };
        let offset = [6, 16, 0, 2][random.usize(..4)];
        let gso = [0, 0, 1, 4, 5, 0x81][random.usize(..6)];
        let size = [1, 8, 100, 1400][random.usize(..4)];
        let mut header = [0; OFFLOAD_LEN];
        (header[0], header[1]) = (1, gso);
        let words: [u16; 4] = [start + 8, if gso == 0 { 0 } else { size }, start, offset];
        header[2..].iter_mut().zip(words.iter().flat_map(|word| word.to_ne_bytes())).for_each(|(to, from)| *to = from);
        header
    }
}

/// One well-formed frame of each kind.
fn models(from: Vnic, to: Vnic) -> Vec<Vec<u8>> {
    let ports = (40_000, 80);
    let data = [7; 200];
    let v4 = |protocol, payload: &[u8]| ethernet(from, to, IPV4, &ipv4(from, to, protocol, payload));
    let v6 = |next, payload: &[u8]| ethernet(from, to, IPV6, &ipv6(from, to, next, payload));
    let icmp = |kind, code, rest: &[u8]| {
        let mut message = [&[kind, code, 0, 0][..], rest].concat();
        let sum = checksum(&message);
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        message
    };
    let icmpv6 = |kind, rest: &[u8]| {
        let mut message = [&[kind, 0, 0, 0][..], rest].concat();
        let sum = checksum(&[&pseudo_v6(from, to, ICMPV6, message.len())[..], &message].concat());
        message[2..4].copy_from_slice(&sum.to_be_bytes());
        message
    };
    let udp = udp_v4(from, to, ports, &data);
    let datagram_v6 = transport_v6(from, to, UDP, &udp_header(ports, data.len()), 6, &data);
    let segment_v6 = transport_v6(from, to, TCP, &tcp_header(ports, ACK, &[]), 16, &data);
    // Extension headers: next header, length in units of 8 bytes beyond the first 8, and PadN.
    let extension = |next: u8| [next, 0, 1, 4, 0, 0, 0, 0];
    let fragment = |next: u8, offset_and_more: u16| {
        let [high, low] = offset_and_more.to_be_bytes();
        [next, 0, high, low, 0, 0, 0, 9]
    };
    let mut with_options = ipv4(from, to, UDP, &[&[0x94, 4, 0, 0][..], &udp].concat());
    with_options[0] = 0x46;
    fix_ipv4(&mut with_options, 24);
    let mut first_fragment = ipv4(from, to, UDP, &udp);
    first_fragment[6] = 0x20;
    fix_ipv4(&mut first_fragment, 20);
    let mut later_fragment = ipv4(from, to, UDP, &data);
    later_fragment[7] = 100;
    fix_ipv4(&mut later_fragment, 20);
    let inner = ipv4(to, from, UDP, &udp_v4(to, from, (80, 40_000), &[]));
    let arp = |operation: u8, target: [u8; 4]| {
        let head = [0, 1, 8, 0, 6, 4, 0, operation];
        ethernet(from, to, ARP, &[&head[..], &from.mac, &from.v4, &[0; 6], &target].concat())
    };
    let tagged = [&[0, 5][..], &IPV4.to_be_bytes(), &ipv4(from, to, UDP, &udp)].concat();
    let twice = [&[0, 5][..], &0x8100u16.to_be_bytes(), &tagged].concat();
    let solicited = [&[0; 4][..], &to.v6, &[1, 1], &from.mac].concat();
    let chain =
        [&extension(60)[..], &extension(43), &[44, 0, 0, 0, 0, 0, 0, 0], &fragment(UDP, 1), &datagram_v6].concat();
    let long_chain = [&extension(60).repeat(20)[..], &extension(UDP), &datagram_v6].concat();
    let vxlan = [&[8, 0, 0, 0, 0, 0, 100, 0][..], &v4(UDP, &udp)].concat();
    vec![
        arp(1, to.v4),
        arp(1, from.v4),
        arp(2, to.v4),
        v4(UDP, &udp),
        v4(UDP, &udp_v4(from, to, (4789, 4789), &vxlan)),
        v4(UDP, &udp_v4(from, to, (4794, 4794), &[0x20; 60])),
        v4(TCP, &tcp_v4(from, to, ports, SYN, &[])),
        v4(TCP, &tcp_v4(from, to, ports, ACK, &data)),
        v4(ICMP, &icmp(8, 0, &data)),
        v4(ICMP, &icmp(3, 4, &[&[0, 0, 2, 0][..], &inner].concat())),
        v4(2, &[0x16, 0, 0, 0, 224, 0, 0, 251]),
        v4(47, &data),
        v4(132, &data),
        ethernet(from, to, IPV4, &with_options),
        ethernet(from, to, IPV4, &first_fragment),
        ethernet(from, to, IPV4, &later_fragment),
        v6(UDP, &datagram_v6),
        v6(TCP, &segment_v6),
        v6(ICMPV6, &icmpv6(128, &data)),
        v6(ICMPV6, &icmpv6(135, &solicited)),
        v6(ICMPV6, &icmpv6(136, &solicited)),
        v6(ICMPV6, &icmpv6(133, &[0; 4])),
        v6(ICMPV6, &icmpv6(134, &[64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0])),
        v6(ICMPV6, &icmpv6(2, &[&[0, 0, 5, 0][..], &ipv6(to, from, UDP, &datagram_v6)].concat())),
        v6(0, &chain),
        v6(60, &long_chain),
        v6(44, &[&fragment(TCP, 0x0100)[..], &data].concat()),
        v6(51, &[&[UDP, 4, 0, 0, 0, 0, 0, 1][..], &[0; 16], &datagram_v6].concat()),
        ethernet(from, to, 0x8100, &tagged),
        ethernet(from, to, 0x88a8, &twice),
        ethernet(from, to, 0x88cc, &data),
        ethernet(from, to, 38, &[&[0x42, 0x42, 3][..], &[0; 35]].concat()),
    ]
}

fn ethernet(from: Vnic, to: Vnic, kind: u16, payload: &[u8]) -> Vec<u8> {
    [&to.mac[..], &from.mac, &kind.to_be_bytes(), payload].concat()
}

fn ipv4(from: Vnic, to: Vnic, protocol: u8, payload: &[u8]) -> Vec<u8> {
    let head = [0x45, 0, 0, 0, 0, 1, 0, 0, 64, protocol, 0, 0];
    let mut packet = [&head[..], &from.v4, &to.v4, payload].concat();
    fix_ipv4(&mut packet, 20);
    packet
}

/// Sets length and checksum of a packet with `header` bytes of header.
fn fix_ipv4(packet: &mut [u8], header: usize) {
    let length = packet.len() as u16;
    packet[2..4].copy_from_slice(&length.to_be_bytes());
    packet[10..12].fill(0);
    let sum = checksum(&packet[..header]);
    packet[10..12].copy_from_slice(&sum.to_be_bytes());
}

fn ipv6(from: Vnic, to: Vnic, next: u8, payload: &[u8]) -> Vec<u8> {
    let [high, low] = (payload.len() as u16).to_be_bytes();
    [&[0x60, 0, 0, 0, high, low, next, 64][..], &from.v6, &to.v6, payload].concat()
}

fn udp_header(ports: (u16, u16), payload: usize) -> Vec<u8> {
    [ports.0, ports.1, 8 + payload as u16, 0].iter().flat_map(|word| word.to_be_bytes()).collect()
}

fn tcp_header(ports: (u16, u16), flags: u8, options: &[u8]) -> Vec<u8> {
    let words: Vec<u8> = [ports.0, ports.1].iter().flat_map(|port| port.to_be_bytes()).collect();
    let offset = (20 + options.len() as u8) << 2;
    [&words[..], &[0, 0, 0, 1, 0, 0, 0, 1, offset, flags, 0xff, 0xff, 0, 0, 0, 0], options].concat()
}

fn udp_v4(from: Vnic, to: Vnic, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    transport_v4(from, to, UDP, &udp_header(ports, payload.len()), 6, payload)
}

fn tcp_v4(from: Vnic, to: Vnic, ports: (u16, u16), flags: u8, payload: &[u8]) -> Vec<u8> {
    // MSS 1460, and window scale behind NOP.
    let options = if flags & SYN != 0 { &[2, 4, 5, 0xb4, 1, 3, 3, 7][..] } else { &[] };
    transport_v4(from, to, TCP, &tcp_header(ports, flags, options), 16, payload)
}

/// A transport header with its checksum at offset `sum_at`, and its payload.
fn transport_v4(from: Vnic, to: Vnic, protocol: u8, header: &[u8], sum_at: usize, payload: &[u8]) -> Vec<u8> {
    let mut segment = [header, payload].concat();
    let [high, low] = (segment.len() as u16).to_be_bytes();
    let sum = checksum(&[&from.v4[..], &to.v4, &[0, protocol, high, low], &segment].concat());
    segment[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
    segment
}

fn transport_v6(from: Vnic, to: Vnic, protocol: u8, header: &[u8], sum_at: usize, payload: &[u8]) -> Vec<u8> {
    let mut segment = [header, payload].concat();
    let sum = checksum(&[&pseudo_v6(from, to, protocol, segment.len())[..], &segment].concat());
    segment[sum_at..sum_at + 2].copy_from_slice(&sum.to_be_bytes());
    segment
}

fn pseudo_v6(from: Vnic, to: Vnic, next: u8, length: usize) -> Vec<u8> {
    [&from.v6[..], &to.v6, &(length as u32).to_be_bytes(), &[0, 0, 0, next]].concat()
}

/// The Internet checksum (RFC 1071).
fn checksum(bytes: &[u8]) -> u16 {
    let word = |w: &[u8]| u32::from(w[0]) << 8 | u32::from(w.get(1).copied().unwrap_or(0));
    let mut sum: u32 = bytes.chunks(2).map(word).sum();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn ends() -> (Vnic, Vnic) {
        let vnic = |n| Vnic {
            mac: [2, 0, 0, 0, 0, n],
            v4: [10, 9, 0, n],
            v6: [0xfd, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, n],
        };
        (vnic(1), vnic(2))
    }

    fn frames(traffic: Traffic, seed: u64, count: usize) -> Vec<([u8; OFFLOAD_LEN], Vec<u8>)> {
        let (from, to) = ends();
        let mut frames = Frames::new(traffic, from, to, seed);
        let next = |_| {
            let (offload, frame) = frames.next_frame();
            (offload, frame.to_vec())
        };
        (0..count).map(next).collect()
    }

    #[test]
    fn checksums_of_models_are_right() {
        let (from, to) = ends();
        for frame in models(from, to).iter().filter(|frame| frame[12..14] == IPV4.to_be_bytes()) {
            let packet = &frame[14..];
            let header = usize::from(packet[0] & 15) * 4;
            assert_eq!(checksum(&packet[..header]), 0, "{packet:x?}");
            let whole = packet[6] & 0x3f == 0 && packet[7] == 0;
            if whole && matches!(packet[9], TCP | UDP) {
                let segment = &packet[header..];
                let pseudo = [&packet[12..20], &[0, packet[9]], &(segment.len() as u16).to_be_bytes()].concat();
                assert_eq!(checksum(&[&pseudo[..], segment].concat()), 0, "{packet:x?}");
            }
        }
    }

    #[test]
    fn a_seed_determines_the_frames_and_every_frame_can_be_sent() {
        let damaged = frames(Traffic::Damaged, 1, 20_000);
        assert_eq!(damaged, frames(Traffic::Damaged, 1, 20_000));
        assert_ne!(damaged, frames(Traffic::Damaged, 2, 20_000));
        assert!(damaged.iter().all(|(_, frame)| (SHORTEST..=LONGEST).contains(&frame.len())));
        let distinct: BTreeSet<_> = damaged.iter().collect();
        assert!(distinct.len() > 10_000, "{}", distinct.len());
        assert!(damaged.iter().any(|(offload, _)| offload[1] != 0));
    }

    #[test]
    fn each_frame_of_a_flood_begins_a_conversation_but_regular_traffic_is_one() {
        let ports = |traffic| -> BTreeSet<Vec<u8>> {
            frames(traffic, 1, 1000).iter().map(|(_, frame)| frame[34..38].to_vec()).collect()
        };
        assert_eq!(ports(Traffic::Innocent).len(), 1);
        assert!(ports(Traffic::Syns).len() > 990 && ports(Traffic::Conversations).len() > 990);
        assert!(frames(Traffic::Syns, 1, 100).iter().all(|(_, frame)| frame[23] == TCP && frame[47] == SYN));
    }
}
