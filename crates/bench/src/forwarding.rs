//! The cost of a gateway pod's decision per packet: parsing the outer headers, looking up tables, rewriting the
//! packet in place.

use std::hint::black_box;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;

use bifrost_gateway::{
    Backends, Context, Core, HEADROOM, Host, INTERNET, Nat, NatConfig, NextHop, Packet, Route, Tables, Tunnel,
    TunnelKind, Verdict, Vpc,
};
use bifrost_tables::{Dir24, ExactMap, IpNet, Lpm, exact_map};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::UDP;
use bifrost_wire::{Mac, Vni, ipv4, udp, vxlan};

/// Packets per measurement.
pub const PACKETS: u32 = 8192;
/// Number of conversations, in turn.
const FLOWS: u32 = 1024;
const VPCS: u32 = 64;
const HOSTS: u32 = 256;
/// The network of the backends of cloud services, and how many there are.
const BACKENDS: u32 = 1000;
const BACKENDS_COUNT: u8 = 16;
/// The address and port of the cloud service in each VPC.
const SERVICE: (Ipv4Addr, u16) = (Ipv4Addr::new(100, 100, 0, 1), 443);
/// The first address of the customers' networks.
const OFFICES: u32 = 0xac10_0000;
const CUSTOMER: Ipv4Addr = Ipv4Addr::new(172, 31, 255, 254);
pub(crate) const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub(crate) const ROUTER: Ipv4Addr = Ipv4Addr::new(10, 255, 255, 254);
pub(crate) const MAC: Mac = Mac([2, 0, 0, 0, 0, 1]);

/// The service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// From a VPC to another one.
    Vpc,
    /// To the Internet, from its own address (EIP).
    Eip,
    /// To the Internet, from a shared address (SNAT).
    Snat,
    /// To a customer's network, in GRE.
    Idc,
    /// To a cloud service: both addresses and ports change.
    Cloud,
}

impl Service {
    /// All.
    pub const ALL: [Self; 5] = [Self::Vpc, Self::Eip, Self::Snat, Self::Idc, Self::Cloud];

    /// Its name in the table of costs.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Vpc => "vpc",
            Self::Eip => "eip",
            Self::Snat => "snat",
            Self::Idc => "idc",
            Self::Cloud => "cloud_service",
        }
    }
}

/// A core of a pod, and packets for it.
#[derive(Debug)]
pub struct Forwarding {
    core: Core,
    neighbours: ExactMap<IpAddr, Mac>,
    frames: Vec<Vec<u8>>,
    buffer: Vec<u8>,
    now: u64,
    /// Packets forwarded.
    pub forwarded: u32,
}

impl Forwarding {
    /// In steady state: all conversations are known.
    pub fn new(service: Service) -> Self {
        let nat = NatConfig {
            pools: vec![
                (INTERNET, vec![Ipv4Addr::new(203, 0, 113, 1).into()]),
                (BACKENDS, vec![Ipv4Addr::new(100, 64, 0, 1).into()]),
            ],
            cores: 1,
            sessions: 65_536,
            seed: 5,
        };
        let mut neighbours = exact_map(1);
        neighbours.insert(ROUTER.into(), Mac([2, 0, 0, 0, 0, 2]));
        let frames = (0..FLOWS).map(|flow| frame(service, flow)).collect();
        let mut forwarding = Forwarding {
            core: Core::new(Arc::new(tables(service)), Arc::new(Nat::new(nat)), 1, 3),
            neighbours,
            frames,
            buffer: vec![0; 2048],
            now: 1 << 40,
            forwarded: 0,
        };
        forwarding.run(FLOWS);
        forwarding.forwarded = 0;
        forwarding
    }

    /// Packets that the service has forwarded since the start.
    pub fn served(&self, service: Service) -> u32 {
        let service = match service {
            Service::Vpc => bifrost_gateway::Service::Vpc,
            Service::Eip | Service::Snat => bifrost_gateway::Service::Internet,
            Service::Idc => bifrost_gateway::Service::Idc,
            Service::Cloud => bifrost_gateway::Service::CloudService,
        };
        self.core.counters().forwarded(service) as u32
    }

    /// Forwards `packets` packets, each copied into a buffer first, as from a ring.
    pub fn run(&mut self, packets: u32) {
        for number in 0..packets {
            self.now += 1000;
            let frame = &self.frames[(number % FLOWS) as usize];
            let end = HEADROOM + frame.len();
            self.buffer[HEADROOM..end].copy_from_slice(frame);
            let mut packet = Packet::new(&mut self.buffer, HEADROOM, end);
            let context = Context { now: self.now, neighbours: &self.neighbours };
            let verdict = black_box(self.core.process(context, &mut packet));
            self.forwarded += u32::from(matches!(verdict, Verdict::Forward(_)));
        }
    }
}

fn private(host: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(0xc0a8_0000 | host)
}

fn vtep(host: u32) -> Ipv4Addr {
    Ipv4Addr::from_bits(0x0a01_0000 | host)
}

fn tables(service: Service) -> Tables {
    let net = |text: &str| text.parse::<IpNet>().unwrap_or_else(|e| unreachable!("{text}: {e}"));
    let mut tables = Tables::new(vec![GATEWAY.into()], MAC, 1600, 7);
    for vni in 1..=2 * VPCS {
        let near = (net("192.168.0.0/16"), if vni <= VPCS { Route::Peer(vni + VPCS) } else { Route::Local });
        let office = (service == Service::Idc).then(|| {
            let kind = TunnelKind::Gre { key: vni };
            (net("172.16.0.0/16"), Route::Idc(tables.add_tunnel(Tunnel { vni, remote: CUSTOMER.into(), kind })))
        });
        let routes = Lpm::new([near, (net("0.0.0.0/0"), Route::Internet)].into_iter().chain(office));
        let routes = routes.unwrap_or_else(|net| unreachable!("{net} twice"));
        tables.vpcs.insert(vni, Vpc { routes, snat: Some(0), ..Vpc::default() });
        for host in 0..HOSTS {
            let mac = Mac([2, 0, 0, vni as u8, 0, host as u8]);
            tables.add_host(vni, private(host).into(), Host { vtep: vtep(host).into(), mac });
            if service == Service::Eip {
                tables.add_eip(vni, private(host).into(), Ipv4Addr::from_bits(0xcb00_0000 | vni << 8 | host).into());
            }
        }
    }
    if service == Service::Cloud {
        add_cloud_service(&mut tables);
    }
    tables.router = Some(ROUTER.into());
    let mut fib = Dir24::new(16, 1);
    if let IpNet::V4(everywhere) = net("0.0.0.0/0") {
        fib.insert(everywhere, 0).unwrap_or_else(|e| unreachable!("{e}"));
    }
    tables.fib4 = Some(fib);
    tables.next_hops = vec![NextHop { address: ROUTER.into() }];
    tables
}

/// A service in each VPC, with the same backends.
fn add_cloud_service(tables: &mut Tables) {
    let list = (1..=BACKENDS_COUNT).map(|n| (IpAddr::from(Ipv4Addr::new(10, 90, 0, n)), 8443)).collect();
    let backends = Backends { vni: BACKENDS, pool: 1, list };
    for (number, (address, _)) in (0..).zip(&backends.list) {
        tables.add_host(BACKENDS, *address, Host { vtep: vtep(number).into(), mac: MAC });
    }
    tables.vpcs.insert(BACKENDS, Vpc::default());
    let (address, port) = SERVICE;
    for vni in 1..=VPCS {
        tables.services.insert((vni, address.into(), UDP, port), backends.clone());
    }
}

fn frame(service: Service, flow: u32) -> Vec<u8> {
    let (vni, host) = (1 + flow % VPCS, flow % HOSTS);
    let to = match service {
        Service::Vpc => private((host + 1) % HOSTS),
        Service::Eip | Service::Snat => Ipv4Addr::from_bits(0x0808_0000 | flow),
        Service::Idc => Ipv4Addr::from_bits(OFFICES | flow),
        Service::Cloud => SERVICE.0,
    };
    let link = |packet: &[u8]| [&ethernet::Header::new(MAC, MAC, ethertype::IPV4).emit()[..], packet].concat();
    let inner = link(&datagram(private(host), to, (10_000 + flow as u16, 443), &[0; 64]));
    let header = vxlan::emit(Vni::new(vni).unwrap_or(Vni::MAX));
    link(&datagram(vtep(host), GATEWAY, (50_000, vxlan::UDP_PORT), &[&header[..], &inner].concat()))
}

pub(crate) fn datagram(source: Ipv4Addr, destination: Ipv4Addr, ports: (u16, u16), payload: &[u8]) -> Vec<u8> {
    let len = (udp::HEADER_LEN + payload.len()) as u16;
    let header = ipv4::Header::new(source, destination, UDP, len);
    let udp = udp::Header { source_port: ports.0, destination_port: ports.1, len, checksum: 1 };
    [&header.emit()[..], &udp.emit(), payload].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_packet_is_forwarded() {
        for service in Service::ALL {
            let mut forwarding = Forwarding::new(service);
            forwarding.run(PACKETS);
            assert_eq!(forwarding.forwarded, PACKETS, "{service:?}");
            assert_eq!(forwarding.served(service), PACKETS + FLOWS, "{service:?}: by that service");
        }
    }
}
