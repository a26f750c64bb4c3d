//! ICMP errors about translated packets. Packets that leave are parsed with all checksums verified.

use bifrost_nic::parse;
use bifrost_wire::protocol::{ICMP, ICMPV6};
use bifrost_wire::tcp::Flags;
use bifrost_wire::{checksum, ipv4};

use super::build::*;
use crate::*;

const REMOTE: &str = "198.51.100.1";
const ROUTER: &str = "198.51.100.250";

/// An error of `kind` and code 0 that quotes a packet.
fn error(source: &str, destination: &str, kind: u8, quoted: &[u8]) -> Vec<u8> {
    let mut message = [&[kind, 0, 0, 0, 0, 0, 5, 0][..], quoted].concat();
    let v4 = ip(source).is_ipv4();
    let pseudo = match (ip(source), ip(destination)) {
        (std::net::IpAddr::V6(s), std::net::IpAddr::V6(d)) => checksum::pseudo_v6(s, d, ICMPV6, message.len() as u32),
        _ => 0,
    };
    let sum = checksum::Sum::starting(pseudo).then(&message).finish();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    packet(source, destination, if v4 { ICMP } else { ICMPV6 }, 64, &message)
}

/// Addresses and ports of the packet that an error quotes; its IP checksum must be valid.
fn quoted(out: &Out) -> ((std::net::IpAddr, u16), (std::net::IpAddr, u16)) {
    let bytes = &out.l4()[8..];
    if bytes[0] >> 4 == 4 {
        assert!(ipv4::checksum_is_valid(&bytes[..20]));
    }
    let frame = link(bytes);
    let parsed = parse(&frame, frame.len()).unwrap();
    ((parsed.src_ip, parsed.src_port), (parsed.dst_ip, parsed.dst_port))
}

/// The packet as it left, without Ethernet.
fn sent(out: &Out) -> Vec<u8> {
    out.inner_frame[14..].to_vec()
}

#[test]
fn from_the_internet_about_a_translated_packet() {
    for (name, packet) in [
        ("UDP", udp_packet(("192.168.0.1", 5000), (REMOTE, 53), b"query")),
        ("TCP", tcp_packet(("192.168.0.1", 5000), (REMOTE, 443), Flags::SYN)),
    ] {
        let mut pod = Pod::new();
        let out = pod.forward(&tunnelled(HOST_A, VPC, &packet));
        let reply = pod.forward(&link(&error(ROUTER, NAT_ADDRESS, 11, &sent(&out))));
        assert_eq!((reply.inner.src_ip, reply.inner.dst_ip), (ip(ROUTER), ip("192.168.0.1")), "{name}");
        assert_eq!(reply.vxlan, Some((VPC, mac_of(ip("192.168.0.1")))), "{name}");
        let remote = (ip(REMOTE), out.inner.dst_port);
        assert_eq!(quoted(&reply), ((ip("192.168.0.1"), 5000), remote), "{name}");
        // The quoted packet is the one that the sender sent, including its checksum.
        assert_eq!(reply.l4()[8 + 20..], packet[20..], "{name}");
        // Eight bytes of the transport header are enough.
        let short = pod.forward(&link(&error(ROUTER, NAT_ADDRESS, 3, &sent(&out)[..28])));
        assert_eq!(short.l4()[28..32], packet[20..24], "{name}");
    }
}

#[test]
fn from_the_internet_about_an_echo() {
    let mut pod = Pod::new();
    let asked = echo("192.168.0.1", REMOTE, 8, 77);
    let out = pod.forward(&tunnelled(HOST_A, VPC, &asked));
    let reply = pod.forward(&link(&error(ROUTER, NAT_ADDRESS, 3, &sent(&out))));
    assert_eq!(reply.l4()[8 + 20..], asked[20..]);
}

#[test]
fn to_the_internet_about_an_incoming_packet() {
    let mut pod = Pod::new();
    let asked = pod.forward(&tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 5000), (REMOTE, 53), b"query")));
    let port = asked.inner.src_port;
    let answer = udp_packet((REMOTE, 53), (NAT_ADDRESS, port), b"answer");
    let came = pod.forward(&link(&answer));
    // The port is closed by the time the packet arrives.
    let error = error("192.168.0.1", REMOTE, 3, &sent(&came));
    let out = pod.forward(&tunnelled(HOST_A, VPC, &error));
    assert_eq!((out.vxlan, out.inner.src_ip, out.inner.dst_ip), (None, ip(NAT_ADDRESS), ip(REMOTE)));
    assert_eq!(quoted(&out), ((ip(REMOTE), 53), (ip(NAT_ADDRESS), port)));
    assert_eq!(out.l4()[28..], answer[20..]);
}

#[test]
fn about_packets_of_public_addresses() {
    let mut pod = Pod::new();
    let packet = udp_packet(("192.168.0.2", 9), (REMOTE, 53), b"query");
    let out = pod.forward(&tunnelled(HOST_B, VPC, &packet));
    let reply = pod.forward(&link(&error(ROUTER, "203.0.113.2", 11, &sent(&out))));
    assert_eq!((reply.inner.dst_ip, reply.l4()[28..].to_vec()), (ip("192.168.0.2"), packet[20..].to_vec()));
    assert_eq!(quoted(&reply).0, (ip("192.168.0.2"), 9));
    let came = pod.forward(&link(&udp_packet((REMOTE, 7), ("203.0.113.2", 8), b"x")));
    let out = pod.forward(&tunnelled(HOST_B, VPC, &error("192.168.0.2", REMOTE, 3, &sent(&came))));
    assert_eq!(out.inner.src_ip, ip("203.0.113.2"));
    assert_eq!(quoted(&out), ((ip(REMOTE), 7), (ip("203.0.113.2"), 8)));
}

#[test]
fn between_a_client_and_a_service() {
    let mut pod = Pod::new();
    let (client, service) = ("192.168.0.1", "192.168.0.253");
    let syn = tcp_packet((client, 5000), (service, 80), Flags::SYN);
    let out = pod.forward(&tunnelled(HOST_A, VPC, &syn));
    let backend = out.inner.dst_ip.to_string();
    let from_backend = error(&backend, "100.64.1.1", 3, &sent(&out));
    let reply = pod.forward(&tunnelled(HOST_B, SERVICE, &from_backend));
    assert_eq!((reply.inner.src_ip, reply.inner.dst_ip), (ip(service), ip(client)), "the backend is hidden");
    assert_eq!((reply.vxlan.map(|v| v.0), &reply.l4()[28..]), (Some(VPC), &syn[20..]));
    let answer = tcp_packet((&backend, 8080), ("100.64.1.1", out.inner.src_port), Flags::ACK);
    let came = pod.forward(&tunnelled(HOST_B, SERVICE, &answer));
    let out = pod.forward(&tunnelled(HOST_A, VPC, &error(client, service, 3, &sent(&came))));
    assert_eq!((out.inner.src_ip, out.inner.dst_ip.to_string()), (ip("100.64.1.1"), backend));
    assert_eq!((out.vxlan.map(|v| v.0), &out.l4()[28..]), (Some(SERVICE), &answer[20..]));
}

#[test]
fn errors_that_are_not_translated() {
    let mut pod = Pod::new();
    let out = pod.forward(&tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 5000), (REMOTE, 53), b"query")));
    let good = error(ROUTER, NAT_ADDRESS, 11, &sent(&out));
    let mut damaged = good.clone();
    damaged[40] ^= 1;
    let mut later = sent(&out);
    later[7] = 1;
    let other = udp_packet((NAT_ADDRESS, 9999), (REMOTE, 53), b"query");
    for (name, packet, reason) in [
        ("a wrong checksum", damaged, DropReason::NatProtocol),
        ("too short a quote", error(ROUTER, NAT_ADDRESS, 11, &sent(&out)[..27]), DropReason::NatProtocol),
        ("a later fragment", error(ROUTER, NAT_ADDRESS, 11, &later), DropReason::NatProtocol),
        ("nothing quoted", error(ROUTER, NAT_ADDRESS, 11, &[]), DropReason::NatProtocol),
        ("of no session", error(ROUTER, NAT_ADDRESS, 11, &other), DropReason::NatNoSession),
        ("neither error nor echo", error(ROUTER, NAT_ADDRESS, 5, &sent(&out)), DropReason::NatProtocol),
    ] {
        assert_eq!(pod.dropped(&link(&packet)), reason, "{name}");
    }
    // Errors between hosts, which are not translated, pass whatever they quote. So do errors from and to public
    // addresses.
    for (source, destination) in [("192.168.0.1", "192.168.0.2"), ("192.168.0.2", REMOTE)] {
        let odd = error(source, destination, 3, &later);
        let out = pod.forward(&tunnelled(HOST_A, VPC, &odd));
        assert_eq!(out.l4()[28..], odd[48..], "{source} to {destination}");
    }
    let odd = link(&error(ROUTER, "203.0.113.2", 3, &later));
    assert_eq!(pod.forward(&odd).inner.dst_ip, ip("192.168.0.2"));
    // A flood of errors is not translated.
    let last = (0..1000).map(|_| pod.process(&link(&good)).0).last();
    assert_eq!(last, Some(Verdict::Drop(DropReason::ErrorRate)));
}
