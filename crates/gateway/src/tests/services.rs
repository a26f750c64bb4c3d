use bifrost_tables::Rate;
use bifrost_wire::protocol::UDP;
use bifrost_wire::{Mac, arp, ethernet, tcp};

use super::build::*;
use crate::*;

#[test]
fn vpc_to_vpc() {
    let cases: &[(&str, &str, &str, u32, &str)] = &[
        ("same VPC", "192.168.0.1", "192.168.0.2", VPC, HOST_B),
        ("same VPC, IPv6 underlay", "192.168.0.1", "192.168.0.3", VPC, HOST_6),
        ("peer", "192.168.0.1", "192.168.1.1", PEER, HOST_B),
        ("IPv6", "fd10::1", "fd10::2", VPC, HOST_B),
        ("IPv6 peer", "fd10::1", "fd11::1", PEER, HOST_B),
    ];
    for (name, source, destination, vni, host) in cases {
        let mut pod = Pod::new();
        let out = pod.forward(&tunnelled(HOST_A, VPC, &udp_packet((source, 1), (destination, 2), b"payload")));
        assert_eq!(out.vxlan, Some((*vni, mac_of(ip(destination)))), "{name}");
        assert_eq!((out.outer.dst_ip, out.link_destination), (ip(host), mac_of(ip(host))), "{name}");
        assert_eq!((out.inner.src_ip, out.inner.dst_ip), (ip(source), ip(destination)), "{name}");
        assert_eq!(&out.l4()[8..], b"payload", "{name}");
        let hops = if ip(source).is_ipv4() { 8 } else { 7 };
        assert_eq!(out.inner_frame[14 + hops], 63, "{name}");
    }
}

#[test]
fn refused() {
    let packet = |destination| udp_packet(("192.168.0.1", 1), (destination, 2), b"x");
    let good = packet("192.168.0.2");
    let mut tagged = link(&good);
    tagged.splice(12..12, [0x81, 0, 0, 5]);
    let cases: Vec<(&str, Vec<u8>, DropReason)> = vec![
        ("empty", vec![], DropReason::OuterMalformed),
        ("another's address", link(&packet("10.9.9.9")), DropReason::NotForUs),
        ("no tunnel", link(&udp_packet((HOST_A, 1), (GATEWAY, 53), b"x")), DropReason::NotForUs),
        ("unknown host", tunnelled("10.0.0.99", VPC, &good), DropReason::UnknownSender),
        ("unknown VNI", tunnelled(HOST_A, 999, &good), DropReason::UnknownVni),
        ("nothing inside", encapsulated(HOST_A, VPC, b"short"), DropReason::InnerMalformed),
        ("tagged inside", encapsulated(HOST_A, VPC, &tagged), DropReason::InnerKind),
        ("multicast", tunnelled(HOST_A, VPC, &packet("224.0.0.1")), DropReason::InnerKind),
        ("blackhole", tunnelled(HOST_A, VPC, &packet("192.168.9.1")), DropReason::NoRoute),
        ("no route", tunnelled(HOST_A, PEER, &packet("192.168.9.1")), DropReason::NoRoute),
        ("no such host", tunnelled(HOST_A, VPC, &packet("192.168.0.77")), DropReason::NoHost),
        ("ACL", tunnelled(HOST_A, VPC, &packet("198.51.100.66")), DropReason::Acl),
    ];
    for (name, frame, reason) in cases {
        let mut pod = Pod::new();
        assert_eq!(pod.dropped(&frame), reason, "{name}");
    }
}

#[test]
fn eip_both_ways() {
    let mut pod = Pod::new();
    for n in 0..4 {
        let out =
            pod.forward(&tunnelled(HOST_B, VPC, &udp_packet(("192.168.0.2", 9), ("198.51.100.1", 53 + n), b"query")));
        assert_eq!((out.vxlan, out.link_destination), (None, mac_of(ip(ISP))));
        assert_eq!((out.inner.src_ip, out.inner.dst_ip), (ip("203.0.113.2"), ip("198.51.100.1")));
        let back = pod.forward(&link(&udp_packet(("198.51.100.1", 53), ("203.0.113.2", 9), b"answer")));
        assert_eq!(back.vxlan, Some((VPC, mac_of(ip("192.168.0.2")))));
        assert_eq!((back.outer.dst_ip, back.inner.dst_ip), (ip(HOST_B), ip("192.168.0.2")));
    }
    let out = pod.forward(&tunnelled(HOST_B, VPC, &udp_packet(("fd10::2", 9), ("2001:db8::1", 53), b"query")));
    assert_eq!((out.vxlan, out.inner.src_ip), (None, ip("fd10::2")));
    let back = pod.forward(&link(&udp_packet(("2001:db8::1", 53), ("fd10::2", 9), b"answer")));
    assert_eq!(back.vxlan.map(|v| v.0), Some(VPC));
    // The ACL applies to incoming packets, too: its first rule is about a destination, so packets from there pass.
    assert!(matches!(
        pod.process(&link(&udp_packet(("198.51.100.66", 1), ("203.0.113.2", 9), b"x"))).0,
        Verdict::Forward(Service::Internet)
    ));
}

#[test]
fn the_meter_limits() {
    let mut tables = tables();
    let meter = tables.new_meter(Rate { per_second: 2_000_000, burst: 131_070 });
    tables.vpcs.get_mut(&VPC).unwrap().meter = Some(meter);
    let mut pod = Pod::of(tables);
    let frame = tunnelled(HOST_B, VPC, &udp_packet(("192.168.0.2", 9), ("198.51.100.1", 53), &[0; 972]));
    let mut passed = 0;
    // 4 MB in a second, where 2 MB/s are allowed with a burst of 128 KB.
    for _ in 0..4000 {
        pod.now += 250_000;
        passed += usize::from(matches!(pod.process(&frame).0, Verdict::Forward(_)));
    }
    assert!((2080..2180).contains(&passed), "{passed}");
}

#[test]
fn customer_networks() {
    let mut pod = Pod::new();
    // A packet to a router that is not on the gateway's link goes to the gateway's own router.
    let out = pod.forward(&tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 1), ("10.50.1.1", 2), b"x")));
    assert_eq!((out.vxlan, out.outer.dst_ip), (Some((7, Mac([2, 7, 7, 7, 7, 7]))), ip(CUSTOMER)));
    assert_eq!(out.link_destination, mac_of(ip(ISP)));
    let back = pod.forward(&tunnelled(CUSTOMER, 7, &udp_packet(("10.50.1.1", 2), ("192.168.0.1", 1), b"y")));
    assert_eq!((back.vxlan.map(|v| v.0), back.outer.dst_ip), (Some(VPC), ip(HOST_A)));
    // The customer's VNI from a host, or a host's from the customer, is unknown.
    let frame = tunnelled(HOST_A, 7, &udp_packet(("10.50.1.1", 2), ("192.168.0.1", 1), b"y"));
    assert_eq!(pod.dropped(&frame), DropReason::UnknownVni);
    let frame = tunnelled(CUSTOMER, VPC, &udp_packet(("10.50.1.1", 2), ("192.168.0.1", 1), b"y"));
    assert_eq!(pod.dropped(&frame), DropReason::UnknownSender);
}

#[test]
fn gre() {
    let mut tables = tables();
    tables.router = Some(ip("fd00::fffe"));
    let mut pod = Pod::of(tables);
    for (source, destination) in [("192.168.0.1", "10.60.0.5"), ("fd10::1", "fd60::5")] {
        let out = pod.forward(&tunnelled(HOST_A, VPC, &udp_packet((source, 1), (destination, 2), b"x")));
        assert_eq!((out.gre, out.outer.dst_ip), (Some(77), ip("fd99::9")));
        assert_eq!((out.inner.src_ip, out.inner.dst_ip), (ip(source), ip(destination)));
        let inner = udp_packet((destination, 2), (source, 1), b"back");
        let kind: [u8; 2] = if ip(source).is_ipv4() { [8, 0] } else { [0x86, 0xdd] };
        let gre = [&[0x20, 0][..], &kind, &[0, 0, 0, 77], &inner].concat();
        let back = pod.forward(&link(&packet("fd99::9", GATEWAY_6, 47, 60, &gre)));
        assert_eq!((back.vxlan.map(|v| v.0), back.inner.dst_ip), (Some(VPC), ip(source)));
        let other_key = [&[0x20, 0][..], &kind, &[0, 0, 0, 78], &inner].concat();
        assert_eq!(pod.dropped(&link(&packet("fd99::9", GATEWAY_6, 47, 60, &other_key))), DropReason::UnknownSender);
        let with_checksum = [&[0xa0, 0][..], &kind, &[0, 0, 0, 77], &inner].concat();
        let frame = link(&packet("fd99::9", GATEWAY_6, 47, 60, &with_checksum));
        assert_eq!(pod.dropped(&frame), DropReason::OuterMalformed);
    }
}

#[test]
fn cloud_service() {
    let mut pod = Pod::new();
    let mut backends = std::collections::BTreeSet::new();
    for port in 2000..2032 {
        let to = ("192.168.0.253", 80);
        let mut seen = None;
        for flags in [tcp::Flags::SYN, tcp::Flags::ACK, tcp::Flags::ACK] {
            let out = pod.forward(&tunnelled(HOST_A, VPC, &tcp_packet(("192.168.0.1", port), to, flags)));
            assert_eq!((out.vxlan.map(|v| v.0), out.inner.src_ip), (Some(SERVICE), ip("100.64.1.1")));
            let ends = (out.inner.src_port, out.inner.dst_ip, out.inner.dst_port);
            assert!(seen.is_none_or(|seen| seen == ends), "a session stays with its backend");
            seen = Some(ends);
        }
        let (nat_port, backend, backend_port) = seen.unwrap();
        assert_eq!(backend_port, 8080);
        backends.insert(backend);
        let reply =
            tcp_packet((&backend.to_string(), 8080), ("100.64.1.1", nat_port), tcp::Flags::SYN.with(tcp::Flags::ACK));
        let back = pod.forward(&tunnelled(HOST_B, SERVICE, &reply));
        assert_eq!(back.vxlan, Some((VPC, mac_of(ip("192.168.0.1")))));
        assert_eq!((back.inner.src_ip, back.inner.src_port), (ip("192.168.0.253"), 80));
        assert_eq!((back.inner.dst_ip, back.inner.dst_port), (ip("192.168.0.1"), port));
    }
    assert_eq!(backends.len(), 2, "both backends are used");
    // Another tenant's packets to the same address do not go to the service.
    let frame = tunnelled(HOST_A, PEER, &tcp_packet(("192.168.0.1", 1), ("192.168.0.253", 80), tcp::Flags::SYN));
    assert_eq!(pod.dropped(&frame), DropReason::NoRoute);
}

#[test]
fn hop_limit_and_size_are_answered() {
    for (source, destination, family) in [("192.168.0.1", "192.168.0.2", 4), ("fd10::1", "fd10::2", 6)] {
        let mut pod = Pod::new();
        let mut one_hop = udp_packet((source, 1), (destination, 2), b"trace");
        if family == 4 {
            one_hop[8] = 1;
            bifrost_wire::ipv4::fill_checksum(&mut one_hop[..20]);
        } else {
            one_hop[7] = 1;
        }
        let out = pod.forward(&tunnelled(HOST_A, VPC, &one_hop));
        let router = if family == 4 { "192.168.0.254" } else { "fd10::ffff" };
        assert_eq!((out.inner.src_ip, out.inner.dst_ip), (ip(router), ip(source)));
        assert_eq!((out.vxlan.map(|v| v.0), out.outer.dst_ip), (Some(VPC), ip(HOST_A)));
        assert_eq!(out.l4()[0], if family == 4 { 11 } else { 3 });
        // 1,600 bytes minus VXLAN over IPv4 leave 1,550.
        let fits = udp_packet((source, 1), (destination, 2), &vec![0; if family == 4 { 1522 } else { 1502 }]);
        assert!(pod.forward(&tunnelled(HOST_A, VPC, &fits)).vxlan.is_some());
        let large = udp_packet((source, 1), (destination, 2), &[0; 1523]);
        let out = pod.forward(&tunnelled(HOST_A, VPC, &large));
        let (kind, mtu) = (out.l4()[0], u16::from_be_bytes([out.l4()[6], out.l4()[7]]));
        assert_eq!((kind, mtu), if family == 4 { (3, 1550) } else { (2, 1550) });
        assert_eq!(pod.process(&tunnelled(HOST_A, VPC, &large)).0, Verdict::Answer);
    }
    // A packet that may be fragmented is fragmented; its sender gets no error.
    let mut large = udp_packet(("192.168.0.1", 1), ("192.168.0.2", 2), &[0; 1523]);
    large[6] = 0;
    bifrost_wire::ipv4::fill_checksum(&mut large[..20]);
    let verdict = Pod::new().process(&tunnelled(HOST_A, VPC, &large)).0;
    assert_eq!(verdict, Verdict::Forward(Service::Vpc));
}

#[test]
fn answers_are_rate_limited() {
    let mut pod = Pod::new();
    let frame = tunnelled(HOST_A, VPC, &packet("192.168.0.1", "192.168.0.2", UDP, 1, &[0, 1, 0, 2, 0, 8, 0, 0]));
    let answered = (0..1000).filter(|_| pod.process(&frame).0 == Verdict::Answer).count();
    assert_eq!(answered, 200, "a hundred per core");
    assert_eq!(pod.dropped(&frame), DropReason::AnswerRate);
}

#[test]
fn arp_and_neighbour_discovery() {
    let guest = Mac([2, 3, 3, 3, 3, 3]);
    let request = arp::Packet {
        operation: arp::Operation::Request,
        sender_mac: guest,
        sender_ip: [192, 168, 0, 1].into(),
        target_mac: Mac::ZERO,
        target_ip: [192, 168, 0, 254].into(),
    };
    let header = ethernet::Header::new(Mac::BROADCAST, guest, 0x0806);
    let out = Pod::new().forward(&encapsulated(HOST_A, VPC, &[&header.emit()[..], &request.emit()].concat()));
    assert_eq!((out.vxlan, out.outer.dst_ip), (Some((VPC, guest)), ip(HOST_A)));
    let reply = arp::Packet::parse(&out.inner_frame[14..]).unwrap();
    assert_eq!((reply.sender_mac, reply.sender_ip), (MAC, request.target_ip));

    let (source, target): (std::net::Ipv6Addr, _) = ("fd10::1".parse().unwrap(), "fd10::ffff".parse().unwrap());
    let asked = bifrost_wire::icmp::v6::Solicitation { target, source_mac: Some(guest) };
    let group = bifrost_wire::icmp::v6::solicited_node(target);
    let (bytes, len) = asked.emit(source, group);
    let ask = |ttl| tunnelled(HOST_A, VPC, &packet("fd10::1", &group.to_string(), 58, ttl, &bytes[..len]));
    let out = Pod::new().forward(&ask(255));
    assert_eq!((out.inner.src_ip, out.l4()[0]), (ip("fd10::ffff"), 136));
    assert_eq!(Pod::new().dropped(&ask(64)), DropReason::InnerKind, "hop limit 64, so from another link");
}

#[test]
fn pods_of_a_service_have_one_mac_address_in_vpcs() {
    const SHARED: Mac = Mac([2, 8, 8, 8, 8, 8]);
    let mut tables = tables();
    tables.vpc_mac = SHARED;
    let mut pod = Pod::of(tables);
    for destination in ["192.168.0.2", "10.50.0.1"] {
        let frame = tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 1), (destination, 2), b"x"));
        let out = pod.forward(&frame);
        assert_eq!((out.inner.src_mac, out.outer.src_mac), (SHARED, MAC), "to {destination}");
    }
    let out = pod.forward(&tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 1), ("198.51.100.1", 2), b"x")));
    assert_eq!((out.vxlan, out.outer.src_mac), (None, MAC), "to the Internet");
    let guest = Mac([2, 3, 3, 3, 3, 3]);
    let request = arp::Packet {
        operation: arp::Operation::Request,
        sender_mac: guest,
        sender_ip: [192, 168, 0, 1].into(),
        target_mac: Mac::ZERO,
        target_ip: [192, 168, 0, 254].into(),
    };
    let header = ethernet::Header::new(Mac::BROADCAST, guest, 0x0806);
    let out = pod.forward(&encapsulated(HOST_A, VPC, &[&header.emit()[..], &request.emit()].concat()));
    let reply = arp::Packet::parse(&out.inner_frame[14..]).unwrap();
    assert_eq!((reply.sender_mac, out.inner.src_mac, out.outer.src_mac), (SHARED, SHARED, MAC));
}

#[test]
fn packets_without_their_payload_are_forwarded() {
    let whole = tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 1), ("198.51.100.1", 2), &[7; 1000]));
    let mut pod = Pod::new();
    let (verdict, expected) = pod.process(&whole);
    let head = 14 + 20 + 8 + 8 + 14 + 20 + 8;
    let mut buffer = [&[0; HEADROOM][..], &whole[..head]].concat();
    let end = buffer.len();
    let mut packet = Packet::header_only(&mut buffer, HEADROOM, end);
    assert_eq!(pod.run(&mut packet), verdict);
    assert!(packet.is_header_only());
    assert_eq!([packet.bytes(), &[7; 1000]].concat(), expected);
}

#[test]
fn unknown_next_hops_are_named() {
    let mut tables = tables();
    tables.add_host(VPC, ip("192.168.0.2"), Host { vtep: ip("10.0.0.77"), mac: MAC });
    let mut pod = Pod::of(tables);
    let frame = tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 1), ("192.168.0.2", 2), b"x"));
    assert_eq!(pod.dropped(&frame), DropReason::NoNeighbour);
    assert_eq!((pod.take_missing(), pod.take_missing()), (Some(ip("10.0.0.77")), None));
}
