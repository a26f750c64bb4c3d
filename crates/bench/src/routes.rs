//! The cost of very many routes: memory, time to build, and time of a look-up as part of the decision about a packet.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Instant;

use bifrost_avs::{GATEWAY_MAC, Ordering, PeerId, Port, PortId, Reliability, Route, Switch, Tables, VECTOR, Vpc};
use bifrost_nic::{Offload, Parsed, parse};
use bifrost_tables::IpNet;
use bifrost_wire::{Mac, Vni, ethernet, ipv4, ipv6};

use crate::account::{Account, balance};

/// Numbers of networks, and of routes in each, half of them IPv4 and half IPv6, to half as many vNICs.
const LOADS: [(u32, u32); 3] = [(1, 1_000), (1, 100_000), (10, 100_000)];
/// Packets to random destinations.
const PACKETS: usize = 1 << 16;
const REPETITIONS: usize = 9;

/// The cost of routes.
#[derive(Clone, Debug)]
pub struct Cost {
    /// Number of networks, and of routes in each.
    pub name: String,
    /// Memory of the switch, bytes per route.
    pub bytes_each: f64,
    /// Time to build its tables, ms.
    pub build_ms: f64,
    /// Time to decide about a packet routed to another host, ns; the median of runs.
    pub packet_ns: f64,
}

/// Measures all loads, for some seconds. [`crate::account::Counting`] must be the program's allocator.
pub fn costs() -> Vec<Cost> {
    LOADS.map(|(networks, routes)| cost(networks, routes)).into()
}

fn cost(networks: u32, routes: u32) -> Cost {
    let tables = tables(networks, routes);
    let before = balance(Account::Other).bytes;
    let began = Instant::now();
    let mut switch = Switch::build(&tables, 7).unwrap_or_else(|e| unreachable!("the tables: {e}"));
    let build_ms = began.elapsed().as_secs_f64() * 1e3;
    let bytes = balance(Account::Other).bytes - before;
    drop(tables);
    let packets = packets(networks, routes);
    let mut now_ns = 1 << 40;
    let mut run = || {
        let began = Instant::now();
        for (n, (port, frame, parsed)) in packets.iter().enumerate() {
            if n % VECTOR == 0 {
                now_ns += 1;
                switch.advance(now_ns);
            }
            let verdict = switch.from_guest(*port, black_box(frame), frame.len(), Offload::default(), parsed);
            assert!(black_box(verdict).passes() && verdict.rewrite.is_some(), "{verdict:?}");
        }
        began.elapsed().as_nanos() as f64 / PACKETS as f64
    };
    let mut runs: Vec<f64> = (0..REPETITIONS).map(|_| run()).collect();
    runs.sort_unstable_by(f64::total_cmp);
    Cost {
        name: format!("routes.{networks}_networks_of_{routes}"),
        bytes_each: bytes as f64 / f64::from(networks * routes),
        build_ms,
        packet_ns: runs[REPETITIONS / 2],
    }
}

fn vni(network: u32) -> Vni {
    Vni::new(100 + network).unwrap_or_default()
}

/// MAC address of the guest in each network.
const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

/// The guest's address in a family.
fn guest(v6: bool) -> IpAddr {
    if v6 { Ipv6Addr::new(0xfd01, 0, 0, 0, 0, 0, 0, 1).into() } else { Ipv4Addr::new(10, 255, 0, 1).into() }
}

/// The prefix behind vNIC number `vnic`: an address, or a subnet.
fn behind(vnic: u32, v6: bool) -> IpNet {
    let [_, a, b, c] = vnic.to_be_bytes();
    let (addr, len): (IpAddr, u8) = if v6 {
        (Ipv6Addr::new(0xfd00, 0, (vnic >> 16) as u16, vnic as u16, 0, 0, 0, 0).into(), 64)
    } else {
        (Ipv4Addr::new(10, a, b, c).into(), 32)
    };
    IpNet::new(addr, len).unwrap_or_else(|e| unreachable!("{len}: {e}"))
}

fn tables(networks: u32, routes: u32) -> Tables {
    let vpc = |network| Vpc {
        vni: vni(network),
        reliability: Reliability::Tcp,
        ordering: Ordering::Flow,
        gateways: vec![Ipv4Addr::new(10, 255, 0, 254).into(), Ipv6Addr::new(0xfd01, 0, 0, 0, 0, 0, 0, 0xfe).into()],
        acl: Vec::new(),
    };
    let port = |network| Port {
        id: PortId(network),
        vni: vni(network),
        mac: MAC,
        addresses: vec![guest(false), guest(true)],
        routed: vec![],
        mtu: 1500,
        groups: Vec::new(),
        home: None,
    };
    let route = |network, vnic: u32, v6| {
        let [_, a, b, c] = vnic.to_be_bytes();
        let (prefix, mac) = (behind(vnic, v6), Mac([2, 1, 0, a, b, c]));
        Route { vni: vni(network), prefix, peer: PeerId(vnic % 1000), mac, mtu: 1500 }
    };
    let all = (0..networks).flat_map(|network| (0..routes / 2).map(move |vnic| (network, vnic)));
    Tables {
        vpcs: (0..networks).map(vpc).collect(),
        ports: (0..networks).map(port).collect(),
        routes: all.flat_map(|(network, vnic)| [false, true].map(|v6| route(network, vnic, v6))).collect(),
        ..Tables::default()
    }
}

fn packets(networks: u32, routes: u32) -> Vec<(PortId, Vec<u8>, Parsed)> {
    let mut rng = fastrand::Rng::with_seed(7);
    let packet = |_| {
        let v6 = rng.bool();
        let frame = datagram(guest(v6), behind(rng.u32(0..routes / 2), v6).addr(), rng.u16(1024..));
        let parsed = parse(&frame, frame.len()).unwrap_or_else(|e| unreachable!("its own frame: {e}"));
        (PortId(rng.u32(0..networks)), frame, parsed)
    };
    (0..PACKETS).map(packet).collect()
}

/// A UDP datagram without payload, through the gateway.
fn datagram(from: IpAddr, to: IpAddr, port: u16) -> Vec<u8> {
    let [a, b] = port.to_be_bytes();
    let udp = [a, b, 0, 53, 0, 8, 0, 0];
    match (from, to) {
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            let (payload_len, next_header) = (udp.len() as u16, 17);
            let ip = ipv6::Header {
                traffic_class: 0,
                flow_label: 0,
                payload_len,
                next_header,
                hop_limit: 64,
                source,
                destination,
            };
            let ethernet = ethernet::Header::new(GATEWAY_MAC, MAC, ethernet::ethertype::IPV6);
            [&ethernet.emit()[..], &ip.emit(), &udp].concat()
        }
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            let ip = ipv4::Header::new(source, destination, 17, udp.len() as u16);
            let ethernet = ethernet::Header::new(GATEWAY_MAC, MAC, ethernet::ethertype::IPV4);
            [&ethernet.emit()[..], &ip.emit(), &udp].concat()
        }
        _ => unreachable!("one family"),
    }
}
