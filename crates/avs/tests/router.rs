//! IPv6 settings of guests: router advertisements, solicited and unsolicited, and DHCPv6; and that guests cannot send
//! these themselves.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::{IpAddr, Ipv6Addr};

use bifrost_avs::{
    Action, BuildError, DropReason, GATEWAY_MAC, Ipv6Lease, PortId, Switch, Tables, Verdict, WorkerId, Workers,
};
use bifrost_nic::{Checksum, parse, transport_checksum};
use bifrost_wire::protocol::{ICMPV6, UDP};
use bifrost_wire::{Mac, icmp::v6};
use common::{answered, guest, ip, mac, packet, pieces, tables, udp, underlay, v6_addr};

const ME: Mac = mac(1);
const MINE: &str = "fe80::ff:fe00:1";
const ROUTER: &str = "fe80::bf:ff:fe00:1";
const ROUTERS: (Mac, &str) = (Mac([0x33, 0x33, 0, 0, 0, 2]), "ff02::2");
const SERVERS: (Mac, &str) = (Mac([0x33, 0x33, 0, 1, 0, 2]), "ff02::1:2");
const ALL: (Mac, &str) = (Mac([0x33, 0x33, 0, 0, 0, 1]), "ff02::1");
const SECOND_NS: u64 = 1_000_000_000;
/// Time of the first advance, ns.
const START_NS: u64 = 1 << 40;

fn lease(port: u32) -> Ipv6Lease {
    let addresses = vec![(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1 + port as u16), 64)];
    Ipv6Lease { port: PortId(port), addresses, dns: vec![], domain: None, mtu: 1400, seconds: 3600, interval_s: 600 }
}

fn world() -> Tables {
    Tables { ipv6_leases: vec![lease(0)], ..tables() }
}

fn switch_of(tables: &Tables) -> Switch {
    let mut switch = Switch::build(tables, 1).unwrap();
    switch.advance(START_NS);
    switch
}

/// A router solicitation of guest 1 with these options.
fn solicit(from: &str, to: (Mac, &str), options: &[u8]) -> Vec<u8> {
    packet((ME, to.0), from, to.1, 255, ICMPV6, &[&[133, 0, 0, 0, 0, 0, 0, 0], options].concat())
}

fn own_mac() -> Vec<u8> {
    [&[1, 1][..], &ME.0].concat()
}

/// An advertisement: MAC and IP address of its receiver, lifetime in s, and options by type.
type Heard = ((Mac, IpAddr), u16, Vec<(u8, Vec<u8>)>);

fn read(frame: &[u8]) -> Heard {
    let parsed = parse(frame, frame.len()).unwrap();
    let message = &frame[usize::from(parsed.l4)..];
    assert_eq!((parsed.src_mac, parsed.src_ip, frame[21]), (GATEWAY_MAC, ip(ROUTER), 255), "sender and hop limit");
    let IpAddr::V6(to) = parsed.dst_ip else { panic!("not IPv6") };
    assert!(v6::checksum_is_valid(message, v6_addr(ROUTER), to));
    assert_eq!((message[..2].to_vec(), message[4]), (vec![134, 0], 64));
    let lifetime = u16::from_be_bytes([message[6], message[7]]);
    assert_eq!(message[5], if lifetime > 0 { 0x80 } else { 0 }, "addresses are managed");
    assert_eq!(message[8..16], [0; 8]);
    let (mut rest, mut options) = (&message[16..], vec![]);
    while let [kind, units, ..] = rest {
        let (option, behind) = rest.split_at(usize::from(*units) * 8);
        options.push((*kind, option[2..].to_vec()));
        rest = behind;
    }
    ((parsed.dst_mac, parsed.dst_ip), lifetime, options)
}

#[test]
fn a_solicitation_is_answered_at_once() {
    let dns = v6_addr("fd00::53");
    let addresses = ["fd00::1", "fd00::9", "fd00:1::1", "fd00:2::1"].map(v6_addr).into_iter().zip([64, 64, 48, 128]);
    let domain = Some("vpc1.internal".into());
    let lease = Ipv6Lease { addresses: addresses.collect(), dns: vec![dns], domain, ..lease(0) };
    let mut switch = switch_of(&Tables { ipv6_leases: vec![lease], ..tables() });
    let (lifetime, nothing) = (1800u32.to_be_bytes(), [0; 4]);
    let prefix =
        |text: &str, len: u8| (3, [&[len, 0x80][..], &lifetime, &lifetime, &nothing, &v6_addr(text).octets()].concat());
    let expected = vec![
        (1, GATEWAY_MAC.0.to_vec()),
        (5, vec![0, 0, 0, 0, 0x05, 0x78]),
        prefix("fd00::", 64),
        prefix("fd00:1::", 48),
        (25, [&[0, 0][..], &lifetime, &dns.octets()].concat()),
        (31, [&[0, 0][..], &lifetime, b"\x04vpc1\x08internal\0\0"].concat()),
    ];
    for (name, frame, to) in [
        ("to all routers", solicit(MINE, ROUTERS, &own_mac()), (ME, MINE)),
        ("without its MAC address", solicit(MINE, ROUTERS, &[]), (ME, MINE)),
        ("with a nonce", solicit(MINE, ROUTERS, &[14, 1, 1, 2, 3, 4, 5, 6]), (ME, MINE)),
        ("from a global address", solicit("fd00::1", ROUTERS, &own_mac()), (ME, "fd00::1")),
        ("to the router", solicit(MINE, (GATEWAY_MAC, ROUTER), &own_mac()), (ME, MINE)),
        ("before it has an address", solicit("::", ROUTERS, &[]), ALL),
    ] {
        assert_eq!(guest(&mut switch, 0, &frame), answered(), "{name}");
        assert_eq!(read(switch.answer()), ((to.0, ip(to.1)), 1800, expected.clone()), "{name}");
    }
    assert_eq!(switch.port_counters(PortId(0)).unwrap().answered_packets, 6);
}

#[test]
fn invalid_solicitations_are_dropped() {
    let mut other_mac = own_mac();
    other_mac[7] = 7;
    let changed = |at: usize, to: u8| {
        let mut frame = solicit(MINE, ROUTERS, &own_mac());
        frame[at] = to;
        frame
    };
    let nonces = |n: usize| [14, 1, 1, 2, 3, 4, 5, 6].repeat(n);
    use DropReason::{MalformedNeighbour, Multicast, SpoofedIp, SpoofedNeighbour};
    for (name, frame, reason) in [
        ("from far away", changed(21, 64), MalformedNeighbour),
        ("another code", changed(14 + 41, 1), MalformedNeighbour),
        ("an empty option", changed(14 + 49, 0), MalformedNeighbour),
        ("an option that is cut", changed(14 + 49, 2), MalformedNeighbour),
        ("too long", solicit(MINE, ROUTERS, &nonces(9)), MalformedNeighbour),
        ("of another", solicit(MINE, ROUTERS, &other_mac), SpoofedNeighbour),
        ("of nobody, with a MAC address", solicit("::", ROUTERS, &own_mac()), MalformedNeighbour),
        ("from another's address", solicit("fe80::ff:fe00:2", ROUTERS, &[]), SpoofedIp),
        ("another message to the group", packet((ME, ROUTERS.0), MINE, ROUTERS.1, 255, ICMPV6, &[128; 8]), Multicast),
    ] {
        assert_eq!(guest(&mut switch_of(&world()), 0, &frame), Verdict::drop(reason), "{name}");
    }
    assert_eq!(
        guest(&mut switch_of(&world()), 0, &solicit(MINE, ROUTERS, &nonces(8))),
        answered(),
        "as long as one has to be"
    );
    // Without a lease there is no router.
    let frame = solicit(MINE, ROUTERS, &own_mac());
    assert_eq!(guest(&mut switch_of(&tables()), 0, &frame), Verdict::drop(Multicast));
    assert_eq!(guest(&mut switch_of(&world()), 1, &solicit_of(2)), Verdict::drop(Multicast));
}

fn solicit_of(n: u8) -> Vec<u8> {
    packet((mac(n), ROUTERS.0), &format!("fe80::ff:fe00:{n}"), ROUTERS.1, 255, ICMPV6, &[133, 0, 0, 0, 0, 0, 0, 0])
}

#[test]
fn a_guest_that_asks_too_often_waits() {
    let mut switch = switch_of(&world());
    let solicitation = solicit(MINE, ROUTERS, &[]);
    let asked = (0..30).filter(|_| guest(&mut switch, 0, &solicitation) == answered()).count();
    assert_eq!(asked, 20);
    assert_eq!(guest(&mut switch, 0, &solicitation), Verdict::drop(DropReason::SolicitationRate));
    assert_eq!(guest(&mut switch, 0, &request(&[1, 0, 0, 0])), Verdict::drop(DropReason::DhcpRate));
    switch.advance(START_NS + SECOND_NS / 10);
    let parsed = parse(&solicitation, solicitation.len()).unwrap();
    let trace = switch.trace_from_guest(PortId(0), &solicitation, solicitation.len(), Default::default(), &parsed);
    assert_eq!(trace.verdict, answered());
    assert_eq!(guest(&mut switch, 0, &solicitation), answered());
}

/// A message of guest 1 to all DHCPv6 servers.
fn request(message: &[u8]) -> Vec<u8> {
    request_from(MINE, SERVERS, (546, 547), message)
}

fn request_from(from: &str, to: (Mac, &str), ports: (u16, u16), message: &[u8]) -> Vec<u8> {
    let len = (8 + message.len() as u16).to_be_bytes();
    let header = [ports.0.to_be_bytes(), ports.1.to_be_bytes(), len, [0, 0]];
    packet((ME, to.0), from, to.1, 1, UDP, &[header.as_flattened(), message].concat())
}

/// A DHCPv6 message of this kind, with a client DUID and an association.
fn solicit_dhcp(kind: u8) -> Vec<u8> {
    let client = [0, 1, 0, 10, 0, 3, 0, 1, 2, 0, 0, 0, 0, 1];
    [&[kind, 1, 2, 3][..], &client, &[0, 3, 0, 12, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]].concat()
}

#[test]
fn the_gateway_is_the_dhcpv6_server() {
    let mut switch = switch_of(&world());
    for port in [546, 40_000] {
        let frame = request_from(MINE, SERVERS, (port, 547), &solicit_dhcp(1));
        assert_eq!(guest(&mut switch, 0, &frame), answered());
        let answer = switch.answer();
        let parsed = parse(answer, answer.len()).unwrap();
        assert_eq!((parsed.src_mac, parsed.dst_mac), (GATEWAY_MAC, ME));
        assert_eq!((parsed.src_ip, parsed.dst_ip), (ip(ROUTER), ip(MINE)));
        assert_eq!((parsed.src_port, parsed.dst_port), (547, 546));
        assert_eq!(transport_checksum(answer, &parsed), Checksum::Valid);
        let message = &answer[usize::from(parsed.payload)..];
        assert_eq!(message[..4], [2, 1, 2, 3], "an offer");
        assert!(message.windows(16).any(|part| part == v6_addr("fd00::1").octets()), "its address");
    }
}

#[test]
fn other_dhcpv6_messages_are_dropped() {
    use DropReason::{DhcpMalformed, DhcpServer, DhcpUnanswered, GatewayService, Multicast, UnknownMac};
    let solicit = solicit_dhcp(1);
    let to = |to, ports| request_from(MINE, to, ports, &solicit);
    for (name, frame, reason) in [
        ("to another port", to(SERVERS, (546, 548)), Multicast),
        ("to another group", to(ALL, (546, 547)), Multicast),
        ("from a global address", request_from("fd00::1", SERVERS, (546, 547), &solicit), DhcpMalformed),
        ("nonsense", request(&[]), DhcpMalformed),
        ("to the server alone", to((GATEWAY_MAC, ROUTER), (546, 547)), DhcpUnanswered),
        ("to the gateway's other address", to((GATEWAY_MAC, "fd00::fe"), (546, 547)), GatewayService),
        ("to a server in the network", to((mac(9), "fd00::9"), (546, 547)), UnknownMac),
        ("to a client", to((mac(2), "fe80::ff:fe00:2"), (547, 546)), DhcpServer),
        ("to all clients", to(ALL, (547, 546)), DhcpServer),
        ("to a client, through the gateway", to((GATEWAY_MAC, "fd00::2"), (40_000, 546)), DhcpServer),
    ] {
        assert_eq!(guest(&mut switch_of(&world()), 0, &frame), Verdict::drop(reason), "{name}");
    }
    // Fragmented as well, and whether guests have leases or not.
    let whole = request_from(MINE, (mac(2), "fe80::ff:fe00:2"), (547, 546), &solicit_dhcp(2));
    for tables in [tables(), world()] {
        let first = pieces(&whole, 7, &[16]).remove(0);
        assert_eq!(guest(&mut switch_of(&tables), 0, &first), Verdict::drop(DhcpServer));
        assert_eq!(guest(&mut switch_of(&tables), 0, &whole), Verdict::drop(DhcpServer));
    }
    // In IPv4 the port has no meaning.
    let v4 = udp((ME, mac(2)), "10.0.0.1", "10.0.0.2", (547, 546));
    assert!(!matches!(guest(&mut switch_of(&world()), 0, &v4).action, Action::Drop(DhcpServer)));
}

#[test]
fn nobody_but_the_switch_is_a_router() {
    let advertisement =
        |macs, from, to| packet(macs, from, to, 255, ICMPV6, &[134, 0, 0, 0, 64, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0]);
    for to in [(mac(2), "fe80::ff:fe00:2"), ALL, (GATEWAY_MAC, ROUTER)] {
        let frame = advertisement((ME, to.0), MINE, to.1);
        let spoofed = DropReason::SpoofedNeighbour;
        assert_eq!(guest(&mut switch_of(&world()), 0, &frame), Verdict::drop(spoofed), "{to:?}");
    }
    let frame = advertisement((mac(3), ME), "fe80::ff:fe00:3", MINE);
    assert_eq!(underlay(&mut switch_of(&world()), 100, 1, &frame), Err(DropReason::SpoofedNeighbour));
}

/// Time and port of all unsolicited advertisements during `for_s` seconds.
fn told(switch: &mut Switch, from_ns: u64, for_s: u64) -> Vec<(u64, u32)> {
    let (mut now_ns, mut all) = (from_ns, vec![]);
    loop {
        switch.advance(now_ns);
        while let Some(port) = switch.advertise() {
            let (to, ..) = read(switch.answer());
            assert_eq!(to, (ALL.0, ip(ALL.1)));
            all.push((now_ns, port.0));
        }
        match switch.next_advertisement_ns() {
            Some(next_ns) if next_ns <= from_ns + for_s * SECOND_NS => now_ns = next_ns,
            _ => return all,
        }
    }
}

#[test]
fn guests_get_unsolicited_advertisements_at_intervals() {
    let mut switch = switch_of(&Tables { ipv6_leases: vec![lease(0), lease(1)], ..tables() });
    assert_eq!(switch.next_advertisement_ns(), Some(0));
    let all = told(&mut switch, START_NS, 3600);
    for port in 0..2 {
        let times: Vec<u64> =
            all.iter().filter(|(_, of)| *of == port).map(|(at, _)| (at - START_NS) / SECOND_NS).collect();
        assert!((8..=22).contains(&times.len()), "{times:?}");
        assert!(times[2] <= 48, "the first three come soon: {times:?}");
        assert!(times.windows(2).all(|pair| pair[1] - pair[0] <= 600), "{times:?}");
    }
    let counters = switch.port_counters(PortId(0)).unwrap();
    let of_first = all.iter().filter(|(_, port)| *port == 0).count() as u64;
    assert_eq!((counters.advertised_packets, counters.answered_packets), (of_first, 0));
    // An unchanged lease keeps its schedule. A guest whose lease ends gets a final advertisement.
    let now_ns = START_NS + 3601 * SECOND_NS;
    switch.advance(now_ns);
    let next_ns = switch.next_advertisement_ns();
    switch.replace(&Tables { ipv6_leases: vec![lease(0), lease(1)], ..tables() }).unwrap();
    assert_eq!(switch.next_advertisement_ns(), next_ns);
    switch.replace(&world()).unwrap();
    assert_eq!(switch.advertise(), Some(PortId(1)));
    assert_eq!(read(switch.answer()), ((ALL.0, ip(ALL.1)), 0, vec![(1, GATEWAY_MAC.0.to_vec())]));
    assert_eq!(switch.advertise(), None);
    // A changed lease is advertised soon. A removed port gets nothing.
    let mut changed = world();
    changed.ipv6_leases[0].mtu = 1300;
    switch.replace(&changed).unwrap();
    assert_eq!(told(&mut switch, now_ns, 48).len(), 3);
    changed.ipv6_leases.clear();
    changed.ports.remove(0);
    switch.replace(&changed).unwrap();
    assert_eq!((switch.advertise(), switch.next_advertisement_ns()), (None, None));
}

#[test]
fn one_worker_advertises_to_each_guest() {
    let mut tellers = [vec![], vec![], vec![]];
    for (own, told) in tellers.iter_mut().enumerate() {
        let mut tables = Tables { ipv6_leases: vec![lease(0), lease(1)], ..tables() };
        tables.workers = Workers { own: WorkerId(own as u16), count: 3 };
        tables.ports[0].home = Some(WorkerId(2));
        let mut switch = switch_of(&tables);
        *told = self::told(&mut switch, START_NS, 60).into_iter().map(|(_, port)| port).collect();
        told.dedup();
    }
    assert_eq!(tellers, [vec![], vec![1], vec![0]]);
}

#[test]
fn a_lease_needs_a_port_and_is_alone() {
    for (leases, port) in [(vec![lease(0), lease(0)], 0), (vec![lease(3)], 3)] {
        let tables = Tables { ipv6_leases: leases, ..tables() };
        assert_eq!(Switch::build(&tables, 0).err(), Some(BuildError::Lease(PortId(port))));
    }
}
