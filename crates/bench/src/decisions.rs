//! The cost of the switch's decision: parsed packets of a small network, whose verdicts are requested.

use std::hint::black_box;
use std::net::IpAddr;

use bifrost_avs::{
    AclRule, Affinity, Backend, Direction, FlowLimits, GATEWAY_MAC, GroupId, GroupRule, LoadBalancer, Ordering,
    Pattern, PeerId, Port, PortId, Reliability, Route, SecurityGroup, Switch, Tables, Transport, VECTOR, Vpc,
};
use bifrost_nic::{Offload, Parsed, parse};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::protocol::TCP;
use bifrost_wire::{Mac, Vni, ipv4, tcp};

/// Packets of one measurement.
pub const PACKETS: u32 = 256;
/// Number of routes to addresses behind a vNIC.
const ROUTES: u32 = 1000;

/// The path of the packets, and the rules that apply to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kind {
    /// The case.
    pub case: Case,
    /// Rules of the network's ACL for each direction; none of them matches the packets.
    pub acl: u32,
    /// Whether ports have a security group: ten rules for each direction, of which the last one accepts the packets.
    pub groups: bool,
    /// Whether there are flow records.
    pub remembered: bool,
}

/// The path of the packets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// From a guest to another host, by MAC address.
    Remote,
    /// From a guest to another host, through the gateway, by one of a thousand routes.
    Routed,
    /// From a guest to another one of the same host.
    Local,
    /// From another host to a guest.
    In,
    /// From a guest to a load balancer, whose backend is on another host.
    Balanced,
    /// From that backend to the guest.
    BalancedIn,
}

impl Case {
    fn is_in(self) -> bool {
        matches!(self, Case::In | Case::BalancedIn)
    }

    fn is_balanced(self) -> bool {
        matches!(self, Case::Balanced | Case::BalancedIn)
    }
}

/// A switch, and packets of established TCP connections, in turn.
#[derive(Debug)]
pub struct Decisions {
    switch: Switch,
    /// `In`, or any other.
    case: Case,
    packets: Vec<(Vec<u8>, Parsed)>,
    now_ns: u64,
}

impl Decisions {
    /// A packet of each of `flows` flows, at most 2^16; the switch has seen all of them before.
    pub fn new(kind: Kind, flows: u32) -> Self {
        let mut switch = Switch::build(&tables(kind), 7).unwrap_or_else(|e| unreachable!("the tables: {e}"));
        let now_ns = 1 << 40;
        switch.advance(now_ns);
        let here = [10, 0, 0, 1];
        // Destinations of packets, and sources of answers.
        let (there, from) = match kind.case {
            Case::Remote | Case::In => ([10, 0, 0, 3], [10, 0, 0, 3]),
            Case::Routed => ([10, 1, 0, 77], [10, 1, 0, 77]),
            Case::Local => ([10, 0, 0, 2], [10, 0, 0, 2]),
            Case::Balanced | Case::BalancedIn => (BALANCER, [10, 0, 0, 3]),
        };
        let (mac_there, mac_from) = match kind.case {
            Case::Remote | Case::In => (mac(3), mac(3)),
            Case::Routed => (GATEWAY_MAC, GATEWAY_MAC),
            Case::Local => (mac(2), mac(2)),
            Case::Balanced | Case::BalancedIn => (GATEWAY_MAC, mac(3)),
        };
        let both = |flow: u32, flags| {
            let port = 1024 + flow as u16;
            let out = segment((mac(1), mac_there), (here, there), (port, 443), flags);
            let back = segment((mac_from, mac(1)), (from, here), (443, port), flags);
            (out, back)
        };
        let mut decisions = Decisions {
            switch,
            case: if kind.case.is_in() { Case::In } else { Case::Remote },
            packets: Vec::new(),
            now_ns,
        };
        // A handshake, and some more packets.
        let syn_ack = tcp::Flags::SYN.with(tcp::Flags::ACK);
        for (out_flags, back_flags) in
            [(tcp::Flags::SYN, syn_ack), (tcp::Flags::ACK, tcp::Flags::ACK), (tcp::Flags::ACK, tcp::Flags::ACK)]
        {
            for flow in 0..flows {
                let outwards = if kind.case.is_in() { Case::Remote } else { kind.case };
                let backwards = if kind.case == Case::Local { Case::Local } else { Case::In };
                decisions.decide(outwards, 0, &both(flow, out_flags).0);
                decisions.decide(backwards, 1, &both(flow, back_flags).1);
            }
        }
        decisions.packets = (0..flows)
            .map(|flow| {
                let (out, back) = both(flow, tcp::Flags::ACK);
                if kind.case.is_in() { back } else { out }
            })
            .collect();
        assert!(decisions.run(flows.max(PACKETS)), "all pass");
        decisions
    }

    /// Decides about `count` packets, in turns of a [`VECTOR`]. Returns whether all of them passed.
    #[inline(never)]
    pub fn run(&mut self, count: u32) -> bool {
        let Decisions { switch, case, packets, now_ns } = self;
        let mut all = true;
        for (n, (head, parsed)) in packets.iter().cycle().take(count as usize).enumerate() {
            if n % VECTOR == 0 {
                *now_ns += 1;
                switch.advance(*now_ns);
            }
            all &= match case {
                Case::In => black_box(switch.from_underlay(vni(), PeerId(1), black_box(head), parsed)).passes(),
                _ => black_box(switch.from_guest(PortId(0), black_box(head), 64, Offload::default(), parsed)).passes(),
            };
        }
        all
    }

    fn decide(&mut self, case: Case, port: u32, (head, parsed): &(Vec<u8>, Parsed)) {
        match case {
            Case::In => {
                // Packets that return through the gateway come from the host behind it.
                let peer = PeerId(if parsed.src_mac == GATEWAY_MAC { 2 } else { 1 });
                self.switch.from_underlay(vni(), peer, head, parsed);
            }
            _ => {
                self.switch.from_guest(PortId(port), head, 64, Offload::default(), parsed);
            }
        }
    }
}

fn vni() -> Vni {
    Vni::new(100).unwrap_or_default()
}

const fn mac(n: u8) -> Mac {
    Mac([2, 0, 0, 0, 0, n])
}

/// Guests 10.0.0.1 and 10.0.0.2 here, 10.0.0.3 at peer 1, and networks 10.1.x.0/24 and others behind vNIC 4 at peer 2.
fn tables(Kind { case, acl, groups, remembered }: Kind) -> Tables {
    let port = |id: u32, n: u8| Port {
        id: PortId(id),
        vni: vni(),
        mac: mac(n),
        addresses: vec![IpAddr::from([10, 0, 0, n])],
        routed: vec![],
        mtu: 1500,
        groups: if groups { vec![GroupId(0)] } else { vec![] },
        home: None,
    };
    let route = |addr: [u8; 4], len: u8, peer, n| Route {
        vni: vni(),
        prefix: net(addr, len),
        peer: PeerId(peer),
        mac: mac(n),
        mtu: 1500,
    };
    let mut routes = vec![route([10, 0, 0, 3], 32, 1, 3)];
    routes.extend((0..ROUTES).map(|n| route([10, 1 + (n >> 8) as u8, n as u8, 0], 24, 2, 4)));
    let both = [Direction::Egress, Direction::Ingress];
    let acl = both.into_iter().flat_map(|direction| {
        (0..acl).map(move |n| {
            // Some ports of some networks.
            let n = n as u16;
            let src = Some(net([172, 16 + (n % 16) as u8, (n / 16) as u8, 0], 24));
            let pattern = Pattern { src, dst_ports: n..=n + 9, protocol: Some(TCP), ..Pattern::default() };
            AclRule { direction, pattern, allow: false, log: None }
        })
    });
    let rules = both.into_iter().flat_map(|direction| {
        (0..10).map(move |n| {
            let dst_ports = if n == 9 { 443..=443 } else { 1000 * n..=1000 * n + 10 };
            let pattern = Pattern { protocol: Some(TCP), dst_ports, ..Pattern::default() };
            GroupRule::new(direction, pattern)
        })
    });
    Tables {
        vpcs: vec![Vpc {
            vni: vni(),
            reliability: Reliability::Tcp,
            ordering: Ordering::Flow,
            gateways: vec![IpAddr::from([10, 0, 0, 254])],
            acl: acl.collect(),
        }],
        ports: vec![port(0, 1), port(1, 2)],
        routes,
        load_balancers: if case.is_balanced() { vec![balancer()] } else { vec![] },
        groups: vec![SecurityGroup::new(rules.collect())],
        flows: if remembered { FlowLimits::default() } else { FlowLimits { records: 0, vectors: false } },
        ..Tables::default()
    }
}

/// Address of the load balancer.
const BALANCER: [u8; 4] = [10, 0, 0, 100];

fn balancer() -> LoadBalancer {
    let backend = |n: u8| Backend { address: IpAddr::from([10, 0, 0, n]), port: 443, weight: 1 };
    LoadBalancer {
        vni: vni(),
        address: IpAddr::from(BALANCER),
        port: 443,
        protocol: Transport::Tcp,
        affinity: Affinity::Connection,
        backends: vec![backend(3)],
    }
}

fn net(addr: [u8; 4], len: u8) -> bifrost_tables::IpNet {
    bifrost_tables::IpNet::new(addr.into(), len).unwrap_or_else(|e| unreachable!("{len}: {e}"))
}

/// A segment without payload, with its headers.
fn segment(
    (source, destination): (Mac, Mac),
    (from, to): ([u8; 4], [u8; 4]),
    (source_port, destination_port): (u16, u16),
    flags: tcp::Flags,
) -> (Vec<u8>, Parsed) {
    let ip = ipv4::Header::new(from.into(), to.into(), TCP, tcp::HEADER_LEN as u16);
    let segment = tcp::Header {
        source_port,
        destination_port,
        sequence: 1,
        acknowledgment: 1,
        header_len: tcp::HEADER_LEN as u8,
        flags,
        window: 1000,
        checksum: 0,
        urgent: 0,
    };
    let ethernet = ethernet::Header::new(destination, source, ethertype::IPV4);
    let mut frame = [&ethernet.emit()[..], &ip.emit(), &segment.emit()].concat();
    frame.resize(64, 0);
    let parsed = parse(&frame, frame.len()).unwrap_or_else(|e| unreachable!("its own frame: {e}"));
    (frame, parsed)
}
