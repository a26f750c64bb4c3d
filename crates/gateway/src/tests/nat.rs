use std::collections::BTreeSet;

use bifrost_wire::tcp::Flags;

use super::build::*;
use crate::*;

const REMOTE: &str = "198.51.100.1";

fn out(port: u16, flags: Flags) -> Vec<u8> {
    tunnelled(HOST_A, VPC, &tcp_packet(("192.168.0.1", port), (REMOTE, 443), flags))
}

fn back(port: u16, flags: Flags) -> Vec<u8> {
    link(&tcp_packet((REMOTE, 443), (NAT_ADDRESS, port), flags))
}

#[test]
fn snat_both_ways_over_any_core() {
    let mut pod = Pod::new();
    let mut ports = BTreeSet::new();
    for port in 3000..3100 {
        let syn = pod.forward(&out(port, Flags::SYN));
        assert_eq!((syn.vxlan, syn.inner.src_ip), (None, ip(NAT_ADDRESS)));
        // The other core knows the session.
        let ack = pod.forward(&out(port, Flags::ACK));
        assert_eq!(ack.inner.src_port, syn.inner.src_port);
        for _ in 0..2 {
            let reply = pod.forward(&back(syn.inner.src_port, Flags::ACK));
            assert_eq!((reply.inner.dst_ip, reply.inner.dst_port), (ip("192.168.0.1"), port));
            assert_eq!(reply.vxlan.map(|v| v.0), Some(VPC));
        }
        assert!(ports.insert(syn.inner.src_port), "one port for two sessions with the same remote endpoint");
    }
}

#[test]
fn packets_that_start_no_session() {
    let mut pod = Pod::new();
    assert_eq!(pod.dropped(&out(1, Flags::ACK)), DropReason::NatNoSession);
    assert_eq!(pod.dropped(&back(2000, Flags::SYN)), DropReason::NatNoSession);
    for port in [0, 1023, 65_535] {
        assert_eq!(pod.dropped(&back(port, Flags::ACK)), DropReason::NatNoSession, "{port}");
    }
    // Another remote endpoint cannot use the mapping.
    let port = pod.forward(&out(1, Flags::SYN)).inner.src_port;
    let foreign = link(&tcp_packet(("198.51.100.2", 443), (NAT_ADDRESS, port), Flags::ACK));
    assert_eq!(pod.dropped(&foreign), DropReason::NatNoSession);
    let esp = tunnelled(HOST_A, VPC, &packet("192.168.0.1", REMOTE, 50, 64, &[0; 20]));
    assert_eq!(pod.dropped(&esp), DropReason::NatProtocol);
}

#[test]
fn echo_is_translated_by_its_identifier() {
    let mut pod = Pod::new();
    let asked = pod.forward(&tunnelled(HOST_A, VPC, &echo("192.168.0.1", REMOTE, 8, 77)));
    let identifier = u16::from_be_bytes([asked.l4()[4], asked.l4()[5]]);
    assert_eq!(asked.inner.src_ip, ip(NAT_ADDRESS));
    assert!(identifier >= 1024);
    let answer = pod.forward(&link(&echo(REMOTE, NAT_ADDRESS, 0, identifier)));
    assert_eq!(answer.inner.dst_ip, ip("192.168.0.1"));
    assert_eq!(&answer.l4()[4..6], &77u16.to_be_bytes());
    // An unsolicited reply starts no session.
    let stray = tunnelled(HOST_A, VPC, &echo("192.168.0.1", REMOTE, 0, 78));
    assert_eq!(pod.dropped(&stray), DropReason::NatNoSession);
}

#[test]
fn sessions_end() {
    const S: u64 = 1_000_000_000;
    type Case<'a> = (&'a str, &'a [(bool, Flags)], u64, bool);
    let cases: &[Case<'_>] = &[
        ("opening, before its timeout", &[], 29, true),
        ("opening", &[], 36, false),
        ("established", &[(false, Flags::ACK)], 7000, true),
        ("established, idle", &[(false, Flags::ACK)], 7446, false),
        ("half closed", &[(false, Flags::ACK), (true, Flags::FIN)], 7000, true),
        ("closed", &[(false, Flags::FIN), (true, Flags::FIN)], 36, false),
        ("reset", &[(false, Flags::RST)], 36, false),
    ];
    for (name, packets, idle_s, lives) in cases {
        let mut pod = Pod::new();
        let port = pod.forward(&out(9, Flags::SYN)).inner.src_port;
        for (from_inside, flags) in *packets {
            pod.forward(&if *from_inside { out(9, *flags) } else { back(port, *flags) });
        }
        pod.now += idle_s * S;
        // Starting sessions looks for expired ones.
        for other in 0..64 {
            pod.forward(&out(100 + other, Flags::SYN));
        }
        let there = matches!(pod.process(&back(port, Flags::ACK)).0, Verdict::Forward(_));
        assert_eq!(there, *lives, "{name}");
    }
}

#[test]
fn a_vpc_gets_half_of_the_sessions() {
    let mut pod = Pod::new();
    let mut begun = 0;
    for port in 0..4000 {
        match pod.process(&out(port, Flags::SYN)).0 {
            Verdict::Forward(_) => begun += 1,
            verdict => assert_eq!(verdict, Verdict::Drop(DropReason::NatFull)),
        }
    }
    assert_eq!(begun, 2000);
    // A minute later all of them have expired.
    pod.now += 60_000_000_000;
    for port in 4000..4500 {
        pod.forward(&out(port, Flags::SYN));
    }
}

#[test]
fn prefetching_finds_the_flow_of_a_session() {
    use crate::rewrite::End;
    use crate::session::Flow;

    let end = |address: &str, port| End { address: ip(address), port };
    let inside = Flow { network: VPC, protocol: 6, source: end("192.168.0.1", 3000), destination: end(REMOTE, 443) };
    assert_eq!(crate::ahead::flow_of(&out(3000, Flags::ACK)), Some(inside));
    let reply = Flow { network: INTERNET, protocol: 6, source: end(REMOTE, 443), destination: end(NAT_ADDRESS, 2000) };
    assert_eq!(crate::ahead::flow_of(&back(2000, Flags::ACK)), Some(reply));
    let six = Flow { network: VPC, protocol: 17, source: end("fd10::1", 1), destination: end("fd11::1", 2) };
    let packet = udp_packet(("fd10::1", 1), ("fd11::1", 2), &[]);
    for host in [HOST_A, HOST_6] {
        assert_eq!(crate::ahead::flow_of(&tunnelled(host, VPC, &packet)), Some(six));
    }
    let other = [
        tunnelled(HOST_A, VPC, &echo("192.168.0.1", REMOTE, 8, 77)),
        out(3000, Flags::ACK)[..87].to_vec(),
        tunnelled(HOST_6, VPC, &packet)[..127].to_vec(),
        Vec::new(),
    ];
    assert!(other.iter().all(|frame| crate::ahead::flow_of(frame).is_none()));
}

#[test]
fn prefetching_finds_where_packets_go() {
    let mut pod = Pod::new();
    let to = |address: &str| tunnelled(HOST_A, VPC, &udp_packet(("192.168.0.1", 9), (address, 9), &[0; 8]));
    let port = pod.forward(&out(3000, Flags::SYN)).inner.src_port;
    let known = [
        to("192.168.0.2"),
        to("192.168.1.1"),
        to("10.50.0.1"),
        to(REMOTE),
        tunnelled(HOST_6, VPC, &udp_packet(("fd10::1", 1), ("fd11::1", 2), &[0; 8])),
        back(port, Flags::ACK),
        link(&udp_packet((REMOTE, 5), ("203.0.113.2", 6), &[])),
    ];
    for frame in &known {
        assert_eq!(pod.found_ahead(std::slice::from_ref(frame)), 1, "{frame:02x?}");
    }
    assert_eq!(pod.found_ahead(&known), known.len());
    // No host, no route, no session, no VPC. And more packets than a vector holds.
    let unknown = [
        to("192.168.0.77"),
        to("192.168.9.1"),
        back(port ^ 1, Flags::ACK),
        tunnelled(HOST_A, 999, &udp_packet(("192.168.0.1", 9), (REMOTE, 9), &[])),
    ];
    assert_eq!(pod.found_ahead(&unknown), 0);
    assert_eq!(pod.found_ahead(&vec![to(REMOTE); VECTOR + 1]), VECTOR);
}

#[test]
fn a_trace_has_the_decision_of_each_stage() {
    let mut pod = Pod::new();
    let stages = |steps: &[Step]| steps.iter().map(|step| step.stage).collect::<Vec<_>>();
    let (verdict, _, steps) = pod.trace(&out(3000, Flags::SYN));
    assert_eq!(verdict, Verdict::Forward(Service::Internet));
    assert_eq!(
        stages(&steps),
        ["outer", "sender", "inner", "route", "acl", "translation", "meter", "size", "egress", "link"]
    );
    assert!(steps[5].what.starts_with("a session would begin: it leaves as 203.0.113.200:"), "{steps:?}");
    let port = pod.forward(&out(3000, Flags::SYN)).inner.src_port;
    let (_, _, steps) = pod.trace(&out(3000, Flags::ACK));
    assert_eq!(steps[5].what, format!("its session: it leaves as {NAT_ADDRESS}:{port} to {REMOTE}:443"));
    let (_, _, steps) = pod.trace(&back(port, Flags::ACK));
    assert!(steps.iter().any(|step| step.what.contains("192.168.0.1:3000")), "{steps:?}");
    let (verdict, _, steps) = pod.trace(&out(1, Flags::ACK));
    assert_eq!(verdict, Verdict::Drop(DropReason::NatNoSession));
    assert_eq!(steps.last().map(|step| (step.stage, step.what.as_str())), Some(("translation", "nat no session")));
}
