//! A small cloud, packets for it, and the packets that leave, with all checksums verified.

use std::net::IpAddr;
use std::sync::Arc;

use bifrost_nic::{Checksum, L3, Parsed, parse, transport_checksum};
use bifrost_tables::{Classifier, Dir24, ExactMap, Lpm, Pattern, exact_map};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};
use bifrost_wire::{Mac, Vni, checksum, ipv4, ipv6, tcp, udp, vxlan};

use crate::*;

pub(super) const VPC: u32 = 100;
pub(super) const PEER: u32 = 200;
pub(super) const SERVICE: u32 = 300;
pub(super) const GATEWAY: &str = "10.0.0.1";
pub(super) const GATEWAY_6: &str = "fd00::1";
pub(super) const HOST_A: &str = "10.0.0.11";
pub(super) const HOST_B: &str = "10.0.0.12";
pub(super) const HOST_6: &str = "fd00::13";
pub(super) const CUSTOMER: &str = "172.16.0.9";
pub(super) const ISP: &str = "10.0.0.254";
pub(super) const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);
pub(super) const NAT_ADDRESS: &str = "203.0.113.200";

pub(super) fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

pub(super) fn mac_of(address: IpAddr) -> Mac {
    let last = match address {
        IpAddr::V4(a) => a.octets()[3],
        IpAddr::V6(a) => a.octets()[15],
    };
    Mac([2, 9, 9, 9, 9, last])
}

pub(super) fn tables() -> Tables {
    let mut t = Tables::new(vec![ip(GATEWAY), ip(GATEWAY_6)], MAC, 1600, 7);
    let host = |vtep: &str, address: &str| Host { vtep: ip(vtep), mac: mac_of(ip(address)) };
    for (vni, vtep, address) in [
        (VPC, HOST_A, "192.168.0.1"),
        (VPC, HOST_B, "192.168.0.2"),
        (VPC, HOST_6, "192.168.0.3"),
        (VPC, HOST_A, "fd10::1"),
        (VPC, HOST_B, "fd10::2"),
        (PEER, HOST_B, "192.168.1.1"),
        (PEER, HOST_B, "fd11::1"),
        (SERVICE, HOST_B, "100.64.0.80"),
        (SERVICE, HOST_B, "100.64.0.81"),
    ] {
        t.add_host(vni, ip(address), host(vtep, address));
    }
    let vxlan = t.add_tunnel(Tunnel {
        vni: VPC,
        remote: ip(CUSTOMER),
        kind: TunnelKind::Vxlan { vni: 7, mac: Mac([2, 7, 7, 7, 7, 7]) },
    });
    let gre = t.add_tunnel(Tunnel { vni: VPC, remote: ip("fd99::9"), kind: TunnelKind::Gre { key: 77 } });
    let net = |text: &str| text.parse().unwrap();
    let routes = Lpm::new([
        (net("192.168.0.0/24"), Route::Local),
        (net("192.168.1.0/24"), Route::Peer(PEER)),
        (net("192.168.9.0/24"), Route::Blackhole),
        (net("10.50.0.0/16"), Route::Idc(vxlan)),
        (net("10.60.0.0/16"), Route::Idc(gre)),
        (net("fd10::/64"), Route::Local),
        (net("fd11::/64"), Route::Peer(PEER)),
        (net("fd60::/64"), Route::Idc(gre)),
        (net("0.0.0.0/0"), Route::Internet),
        (net("::/0"), Route::Internet),
    ]);
    let refused = Pattern { dst: Some(net("198.51.100.66/32")), ..Pattern::default() };
    let acl = Classifier::new([(refused, false), (Pattern::default(), true)]);
    let routers = vec![ip("192.168.0.254"), ip("fd10::ffff")];
    let vpc = Vpc { routes: routes.unwrap(), acl: Some(acl), meter: None, snat: Some(0), routers };
    t.vpcs.insert(VPC, vpc);
    let service = Vpc {
        routes: Lpm::new([(net("100.64.0.0/16"), Route::Local)]).unwrap(),
        routers: vec![ip("100.64.0.254")],
        ..Vpc::default()
    };
    t.vpcs.insert(SERVICE, service);
    t.vpcs.insert(PEER, Vpc { routes: Lpm::default(), ..Vpc::default() });
    t.add_eip(VPC, ip("192.168.0.2"), ip("203.0.113.2"));
    t.add_eip(VPC, ip("fd10::2"), ip("fd10::2"));
    let backends = Backends { vni: SERVICE, pool: 1, list: vec![(ip("100.64.0.80"), 8080), (ip("100.64.0.81"), 8080)] };
    t.services.insert((VPC, ip("192.168.0.253"), TCP, 80), backends);
    t.nat_addresses.insert((INTERNET, ip(NAT_ADDRESS)), ());
    t.nat_addresses.insert((SERVICE, ip("100.64.1.1")), ());
    let mut fib = Dir24::new(16, 1);
    fib.insert("0.0.0.0/0".parse().unwrap(), 0).unwrap();
    t.fib4 = Some(fib);
    t.fib6 = Lpm::new([(net("::/0"), 1)]).unwrap();
    t.next_hops = vec![NextHop { address: ip(ISP) }, NextHop { address: ip("fd00::fffe") }];
    t.on_link = Lpm::new([(net("10.0.0.0/24"), ()), (net("fd00::/64"), ())]).unwrap();
    t.router = Some(ip(ISP));
    t
}

pub(super) fn nat_config() -> NatConfig {
    let pools = vec![(INTERNET, vec![ip(NAT_ADDRESS)]), (SERVICE, vec![ip("100.64.1.1")])];
    NatConfig { pools, cores: 4, sessions: 4000, seed: 5 }
}

pub(super) fn nat() -> Nat {
    Nat::new(nat_config())
}

/// A pod with two cores, which get packets in turn.
pub(super) struct Pod {
    cores: [Core; 2],
    tables: Arc<Tables>,
    nat: Arc<Nat>,
    turn: usize,
    /// All packets go to one core, as fragments do.
    pub(super) one_core: bool,
    pub(super) now: u64,
    neighbours: ExactMap<IpAddr, Mac>,
}

impl Pod {
    pub(super) fn new() -> Self {
        Self::of(tables())
    }

    pub(super) fn of(tables: Tables) -> Self {
        Self::with(tables, nat())
    }

    pub(super) fn with_nat(config: NatConfig) -> Self {
        Self::with(tables(), Nat::new(config))
    }

    /// A pod whose sessions are in `cores` parts, with another seed.
    pub(super) fn with_nat_cores(cores: u16) -> Self {
        Self::with_nat(NatConfig { cores, seed: 6, ..nat_config() })
    }

    /// The link-layer address of a next hop.
    pub(super) fn learn(&mut self, address: IpAddr) {
        self.neighbours.insert(address, mac_of(address));
    }

    pub(super) fn tables(&self) -> &Tables {
        &self.tables
    }

    pub(super) fn nat(&self) -> &Nat {
        &self.nat
    }

    pub(super) fn with(tables: Tables, nat: Nat) -> Self {
        let (tables, nat) = (Arc::new(tables), Arc::new(nat));
        let core = || Core::new(Arc::clone(&tables), Arc::clone(&nat), 2, 3);
        let mut neighbours = exact_map(1);
        for address in [HOST_A, HOST_B, HOST_6, ISP, "fd00::fffe"] {
            neighbours.insert(ip(address), mac_of(ip(address)));
        }
        Pod { cores: [core(), core()], tables, nat, turn: 0, one_core: false, now: 1 << 40, neighbours }
    }

    /// The trace of a packet; checks that it changes nothing.
    pub(super) fn trace(&self, frame: &[u8]) -> (Verdict, Vec<u8>, Vec<Step>) {
        let mut buffer = [&[0; HEADROOM][..], frame].concat();
        buffer.resize(buffer.len().max(HEADROOM + 2048), 0);
        let mut packet = Packet::new(&mut buffer, HEADROOM, HEADROOM + frame.len());
        let context = Context { now: self.now, neighbours: &self.neighbours };
        let sessions = self.nat.len();
        let (verdict, steps) = trace(&self.tables, &self.nat, context, &mut packet);
        assert_eq!(self.nat.len(), sessions);
        assert_eq!(steps.last().is_some_and(|step| !step.passes), matches!(verdict, Verdict::Drop(_)), "{steps:?}");
        (verdict, packet.bytes().to_vec(), steps)
    }

    pub(super) fn process(&mut self, frame: &[u8]) -> (Verdict, Vec<u8>) {
        let mut buffer = [&[0; HEADROOM][..], frame].concat();
        buffer.resize(buffer.len().max(HEADROOM + 2048), 0);
        let mut packet = Packet::new(&mut buffer, HEADROOM, HEADROOM + frame.len());
        let foreseen = self.trace(frame);
        let verdict = self.run(&mut packet);
        let bytes = packet.bytes().to_vec();
        // Rates and fragments belong to cores, and expired sessions are removed when others start.
        let by_state = |v| {
            matches!(
                v,
                Verdict::Drop(
                    DropReason::Meter
                        | DropReason::AnswerRate
                        | DropReason::ErrorRate
                        | DropReason::NatFull
                        | DropReason::FragmentWithoutFirst
                        | DropReason::FragmentMismatch
                )
            )
        };
        if !by_state(verdict) && !by_state(foreseen.0) {
            assert_eq!(foreseen.0, verdict, "{:?}", foreseen.2);
            assert!(matches!(verdict, Verdict::Drop(_)) || foreseen.1 == bytes, "{:?}", foreseen.2);
        }
        (verdict, bytes)
    }

    /// Number of frames whose destination a core finds when it prefetches.
    pub(super) fn found_ahead(&self, frames: &[Vec<u8>]) -> usize {
        self.cores[0].found_ahead(frames)
    }

    pub(super) fn run(&mut self, packet: &mut Packet<'_>) -> Verdict {
        self.turn += 1;
        let context = Context { now: self.now, neighbours: &self.neighbours };
        let core = if self.one_core { 0 } else { self.turn % 2 };
        self.cores[core].process(context, packet)
    }

    /// Frames that left in addition to the last one, for a pod that uses one core.
    pub(super) fn take_more(&mut self) -> Vec<Vec<u8>> {
        self.cores[0].take_more().collect()
    }

    pub(super) fn counter(&self, name: &str) -> u64 {
        self.cores.iter().flat_map(|core| core.counters().iter()).filter(|(n, _)| n == name).map(|(_, v)| v).sum()
    }

    pub(super) fn forward(&mut self, frame: &[u8]) -> Out {
        match self.process(frame) {
            (Verdict::Drop(reason), _) => panic!("dropped: {reason:?}"),
            (_, frame) => Out::read(&frame),
        }
    }

    pub(super) fn take_missing(&mut self) -> Option<IpAddr> {
        self.cores.iter_mut().find_map(Core::take_missing)
    }

    pub(super) fn dropped(&mut self, frame: &[u8]) -> DropReason {
        match self.process(frame) {
            (Verdict::Drop(reason), _) => reason,
            (verdict, frame) => panic!("{verdict:?}: {frame:02x?}"),
        }
    }
}

/// An IP packet of any protocol.
pub(super) fn packet(source: &str, destination: &str, protocol: u8, ttl: u8, payload: &[u8]) -> Vec<u8> {
    match (ip(source), ip(destination)) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let header = ipv4::Header {
                header_len: 20,
                traffic_class: 0,
                total_len: (20 + payload.len()) as u16,
                identification: 1,
                dont_fragment: true,
                more_fragments: false,
                fragment_offset: 0,
                ttl,
                protocol,
                checksum: 0,
                source,
                destination,
            };
            [&header.emit()[..], payload].concat()
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let header = ipv6::Header {
                traffic_class: 0,
                flow_label: 0,
                payload_len: payload.len() as u16,
                next_header: protocol,
                hop_limit: ttl,
                source,
                destination,
            };
            [&header.emit()[..], payload].concat()
        }
        _ => panic!("mixed families"),
    }
}

fn with_checksum(source: &str, destination: &str, protocol: u8, mut payload: Vec<u8>, offset: usize) -> Vec<u8> {
    let len = payload.len() as u32;
    let pseudo = match (ip(source), ip(destination)) {
        (IpAddr::V4(s), IpAddr::V4(d)) if protocol != ICMP => checksum::pseudo_v4(s, d, protocol, len),
        (IpAddr::V6(s), IpAddr::V6(d)) => checksum::pseudo_v6(s, d, protocol, len),
        _ => 0,
    };
    let sum = checksum::Sum::starting(pseudo).then(&payload).finish();
    payload[offset..offset + 2].copy_from_slice(&sum.to_be_bytes());
    packet(source, destination, protocol, 64, &payload)
}

pub(super) fn udp_packet(source: (&str, u16), destination: (&str, u16), payload: &[u8]) -> Vec<u8> {
    let len = (8 + payload.len()) as u16;
    let header = udp::Header { source_port: source.1, destination_port: destination.1, len, checksum: 0 };
    with_checksum(source.0, destination.0, UDP, [&header.emit()[..], payload].concat(), udp::CHECKSUM_OFFSET)
}

pub(super) fn tcp_packet(source: (&str, u16), destination: (&str, u16), flags: tcp::Flags) -> Vec<u8> {
    let mut header = [0u8; 20];
    header[..2].copy_from_slice(&source.1.to_be_bytes());
    header[2..4].copy_from_slice(&destination.1.to_be_bytes());
    (header[12], header[13]) = (0x50, flags.0);
    with_checksum(source.0, destination.0, TCP, header.to_vec(), tcp::CHECKSUM_OFFSET)
}

pub(super) fn echo(source: &str, destination: &str, kind: u8, identifier: u16) -> Vec<u8> {
    let protocol = if ip(source).is_ipv4() { ICMP } else { ICMPV6 };
    let [a, b] = identifier.to_be_bytes();
    with_checksum(source, destination, protocol, vec![kind, 0, 0, 0, a, b, 0, 1, 5, 5], 2)
}

pub(super) fn link(packet: &[u8]) -> Vec<u8> {
    let kind = if packet[0] >> 4 == 4 { ethertype::IPV4 } else { ethertype::IPV6 };
    [&ethernet::Header::new(MAC, Mac([2, 1, 1, 1, 1, 1]), kind).emit()[..], packet].concat()
}

/// A frame of VXLAN from a host.
pub(super) fn tunnelled(host: &str, vni: u32, packet: &[u8]) -> Vec<u8> {
    encapsulated(host, vni, &link(packet))
}

pub(super) fn encapsulated(host: &str, vni: u32, inner: &[u8]) -> Vec<u8> {
    let gateway = if ip(host).is_ipv4() { GATEWAY } else { GATEWAY_6 };
    let payload = [&vxlan::emit(Vni::new(vni).unwrap())[..], inner].concat();
    link(&udp_packet((host, 50_000), (gateway, 4789), &payload))
}

/// A packet that left.
#[derive(Debug)]
pub(super) struct Out {
    pub(super) outer: Parsed,
    pub(super) link_destination: Mac,
    /// VNI, and the inner Ethernet destination.
    pub(super) vxlan: Option<(u32, Mac)>,
    pub(super) gre: Option<u32>,
    /// The innermost packet; without a tunnel it is `outer`.
    pub(super) inner: Parsed,
    pub(super) inner_frame: Vec<u8>,
}

impl Out {
    pub(super) fn read(frame: &[u8]) -> Self {
        let outer = parse(frame, frame.len()).unwrap();
        assert_eq!(outer.end as usize, frame.len());
        verify_ip(frame, &outer);
        let (mut vxlan_of, mut gre) = (None, None);
        let inner_frame = if outer.protocol == UDP && outer.dst_port == 4789 {
            let (vni, inner) = vxlan::parse(&frame[usize::from(outer.payload)..]).unwrap();
            vxlan_of = Some((vni.get(), Mac(*inner.first_chunk().unwrap())));
            inner.to_vec()
        } else if outer.protocol == 47 {
            let bytes = &frame[usize::from(outer.l4)..];
            let (header, packet) = bifrost_wire::gre::Header::parse(bytes).unwrap();
            gre = Some(header.key);
            [&ethernet::Header::new(MAC, MAC, header.ethertype).emit()[..], packet].concat()
        } else {
            frame.to_vec()
        };
        let inner = parse(&inner_frame, inner_frame.len()).unwrap();
        verify_ip(&inner_frame, &inner);
        if !inner.is_fragment() {
            assert_ne!(transport_checksum(&inner_frame, &inner), Checksum::Invalid, "{inner:?}");
        }
        Out { link_destination: outer.dst_mac, outer, vxlan: vxlan_of, gre, inner, inner_frame }
    }

    pub(super) fn l4(&self) -> &[u8] {
        &self.inner_frame[usize::from(self.inner.l4)..]
    }
}

fn verify_ip(frame: &[u8], parsed: &Parsed) {
    if parsed.kind == L3::V4 {
        assert!(ipv4::checksum_is_valid(&frame[usize::from(parsed.l3)..usize::from(parsed.l4)]));
    }
}
