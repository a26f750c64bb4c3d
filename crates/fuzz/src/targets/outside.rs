//! NAT at an uplink, with arbitrary frames from guests and the outside: no guest can send from an outside address that
//! it does not own, and no outside host can send from an inside address.

use std::collections::BTreeMap;
use std::net::IpAddr;

use bifrost_avs::{
    Action, FloatingIp, FlowLimits, GATEWAY_MAC, GroupId, GroupRule, Nat, Ordering, Pattern, Port, PortForward, PortId,
    Reliability, SecurityGroup, SessionLimits, SourceNat, Switch, Tables, Transport, Verdict, Vpc,
};
use bifrost_nic::{L3, Offload, Parsed, parse};

use super::frame::frame;
use super::tables::{mac, vni};
use crate::Input;

const UPLINK: PortId = PortId(3);
/// Ports that guests share, one of which the frames often use.
const BLOCK: (u16, u16) = (6378, 6379);

const fn v4(net: u8, n: u8) -> IpAddr {
    IpAddr::V4(std::net::Ipv4Addr::new(10, net, 0, n))
}

const fn v6(n: u16) -> IpAddr {
    IpAddr::V6(std::net::Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n))
}

const SHARED: [IpAddr; 2] = [v4(1, 3), v6(3)];
const FLOATING: [IpAddr; 2] = [v4(1, 4), v6(4)];

/// Guest 1 shares addresses, guest 2 has some of its own, and a security group; the uplink is alone in its network.
fn tables() -> Tables {
    let network = |n, gateways| Vpc {
        vni: vni(n),
        reliability: Reliability::Off,
        ordering: Ordering::Off,
        gateways,
        acl: vec![],
    };
    let port = |id, of, n: u8, addresses| Port {
        id,
        vni: vni(of),
        mac: mac(n),
        addresses,
        routed: vec![],
        mtu: if n == 2 { 100 } else { 1500 },
        groups: if n == 2 { vec![GroupId(0)] } else { vec![] },
        home: None,
    };
    let floating =
        |place: usize, inside| FloatingIp { vni: vni(100), uplink: UPLINK, outside: FLOATING[place], inside };
    let forward = |place: usize, inside| PortForward {
        vni: vni(100),
        uplink: UPLINK,
        protocol: Transport::Udp,
        outside: (SHARED[place], 53),
        inside: (inside, 53),
    };
    let source = SourceNat { vni: vni(100), uplink: UPLINK, addresses: SHARED.to_vec(), ports: BLOCK, per_guest: 6 };
    let tcp = Pattern { protocol: Some(6), ..Pattern::default() };
    Tables {
        vpcs: vec![network(100, vec![v4(0, 254), v6(254)]), network(900, vec![])],
        ports: vec![
            port(PortId(0), 100, 1, vec![v4(0, 1), v6(1)]),
            port(PortId(1), 100, 2, vec![v4(0, 2), v6(2)]),
            port(UPLINK, 900, 5, vec![]),
        ],
        nat: Nat {
            uplinks: vec![UPLINK],
            sources: vec![source],
            floating: vec![floating(0, v4(0, 2)), floating(1, v6(2))],
            forwards: vec![forward(0, v4(0, 1)), forward(1, v6(1))],
        },
        groups: vec![SecurityGroup::new(vec![GroupRule::new(bifrost_avs::Direction::Ingress, tcp)])],
        sessions: SessionLimits { total: 8, per_port: 4 },
        flows: FlowLimits { records: 8, vectors: true },
        ..Tables::default()
    }
}

type End = (IpAddr, u16);

pub(super) fn run(input: &mut Input<'_>) {
    let mut switch = Switch::build(&tables(), 0).unwrap_or_else(|e| panic!("{e}"));
    // Outside endpoints in use, and their owners; cleared when time advances.
    let mut owners: BTreeMap<(u8, End), (PortId, End)> = BTreeMap::new();
    let mut now_s = 0;
    while !input.is_empty() {
        let wait_s = input.pick(&[0, 0, 0, 1, 100, 10_000]);
        if wait_s > 0 {
            now_s += wait_s;
            switch.advance(now_s << 30);
            owners.clear();
        }
        let port = input.pick(&[PortId(0), PortId(0), PortId(1), UPLINK, UPLINK]);
        let frame = frame(input, 64);
        let Ok(parsed) = parse(&frame, frame.len()) else { continue };
        // Its flow is cached after the second time at the latest.
        for _ in 0..3 {
            sent(&mut switch, port, &frame, &parsed, &mut owners);
        }
        assert!(switch.connection_counters().current <= 8, "more connections than allowed");
        assert!(switch.nat_counters().current <= 6, "more ports than allowed per guest");
    }
}

fn sent(
    switch: &mut Switch,
    from: PortId,
    frame: &[u8],
    parsed: &Parsed,
    owners: &mut BTreeMap<(u8, End), (PortId, End)>,
) {
    let &Verdict { action, rewrite, .. } = switch.from_guest(from, frame, frame.len(), Offload::default(), parsed);
    match action {
        Action::Forward { .. } | Action::Copy | Action::Host | Action::Ask { .. } => panic!("there is no other host"),
        Action::Answer { .. } => {
            let answer = switch.answer();
            let answered = parse(answer, answer.len()).unwrap_or_else(|e| panic!("malformed answer: {e}"));
            if from == UPLINK && answered.is_ip() {
                let outside = |address| SHARED.contains(&address) || FLOATING.contains(&address);
                assert!(outside(answered.src_ip), "answers the outside from {}", answered.src_ip);
            }
        }
        Action::Deliver { port: to, .. } => {
            let Some(rewrite) = rewrite else {
                assert!(from != UPLINK && to != UPLINK, "unchanged from or to the outside");
                return;
            };
            let mut out = frame.to_vec();
            rewrite.apply(&mut out);
            let after = parse(&out, out.len()).unwrap_or_else(|e| panic!("NAT made it malformed: {e}"));
            assert_eq!(after.src_mac, GATEWAY_MAC);
            assert_eq!((after.payload, after.end), (parsed.payload, parsed.end));
            if parsed.kind == L3::V4 {
                let l3 = usize::from(parsed.l3);
                let header = |f: &[u8]| bifrost_wire::ipv4::checksum_is_valid(&f[l3..usize::from(parsed.l4)]);
                assert_eq!(header(&out), header(frame), "a valid checksum stays valid, a wrong one wrong");
            }
            if to == UPLINK {
                assert_eq!((after.dst_mac, after.dst_ip), (mac(5), parsed.dst_ip));
                let own = if from == PortId(0) { SHARED } else { FLOATING };
                assert!(own.contains(&after.src_ip), "leaves as {}", after.src_ip);
                if matches!(parsed.protocol, 6 | 17) && from == PortId(0) {
                    let (outside, inside) = ((after.src_ip, after.src_port), (parsed.src_ip, parsed.src_port));
                    let in_block = (BLOCK.0..=BLOCK.1).contains(&after.src_port);
                    assert!(in_block || (parsed.protocol, inside.1, after.src_port) == (17, 53, 53));
                    let owner = *owners.entry((parsed.protocol, outside)).or_insert((from, inside));
                    assert_eq!(owner, (from, inside), "a port is allocated twice");
                }
                return;
            }
            let guest = switch.port(to).cloned();
            let Some(guest) = guest else { panic!("to a port that does not exist") };
            assert_eq!(after.dst_mac, guest.mac);
            assert!(guest.addresses.contains(&after.dst_ip), "{} is not the guest's", after.dst_ip);
            if from == UPLINK {
                assert_eq!(after.src_ip, parsed.src_ip);
                let inside = [v4(0, 1), v4(0, 2), v4(0, 254), v6(1), v6(2), v6(254)];
                assert!(!inside.contains(&after.src_ip), "the outside sends as {}", after.src_ip);
            }
        }
        Action::Drop(_) => {}
    }
}
