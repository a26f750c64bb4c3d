//! Packets that are larger than the path MTU: which are fragmented, and who gets which ICMP error.
#![allow(clippy::unwrap_used)]

mod common;

use bifrost_avs::{Action, DropReason, GATEWAY_MAC, PeerId, PortId, Switch, Tables, Verdict};
use bifrost_nic::{Checksum, Offload, Segment, SegmentKind, parse, transport_checksum};
use bifrost_wire::{Mac, icmp, ipv4};
use common::*;

const ME: Mac = mac(1);
const S: u64 = 1_000_000_000;

/// The path MTU is 1300 to port 1, 1400 (IPv4) and 1450 (IPv6) to vNIC 3 at peer 1, and 600 to the network behind
/// vNIC 4.
fn small() -> Tables {
    let mut tables = tables();
    tables.ports[1].mtu = 1300;
    for (route, mtu) in tables.routes.iter_mut().zip([1400, 1450, 600, 1500]) {
        route.mtu = mtu;
    }
    tables
}

fn switch() -> Switch {
    Switch::build(&small(), 0).unwrap()
}

/// An IP packet of `len` bytes with this protocol; its payload starts with `body`.
fn sized(to: Mac, src: &str, dst: &str, protocol: u8, body: &[u8], len: usize) -> Vec<u8> {
    let header = if ip(src).is_ipv6() { 40 } else { 20 };
    let mut body = body.to_vec();
    body.resize(len - header, 0);
    if protocol == 17 {
        let udp_len = (body.len() as u16).to_be_bytes();
        body[4..6].copy_from_slice(&udp_len);
    }
    packet((ME, to), src, dst, 64, protocol, &body)
}

/// The same packet without DF.
fn may_cut(mut frame: Vec<u8>) -> Vec<u8> {
    frame[20] &= !0x40;
    frame
}

fn from_guest(switch: &mut Switch, frame: &[u8], offload: Offload) -> Verdict {
    let parsed = parse(frame, frame.len()).unwrap();
    // The switch sees the start of large frames.
    *switch.from_guest(PortId(0), &frame[..frame.len().min(256)], frame.len(), offload, &parsed)
}

/// Checks an ICMP error about a packet; returns its sender, its receiver, and the MTU.
fn error(answer: &[u8], about: &[u8]) -> ((Mac, String), (Mac, String), u32) {
    let parsed = parse(answer, answer.len()).unwrap();
    let message = &answer[usize::from(parsed.l4)..];
    let mtu = if parsed.src_ip.is_ipv6() {
        assert_eq!(transport_checksum(answer, &parsed), Checksum::Valid);
        assert!(answer.len() - 14 <= 1280);
        match icmp::v6::Message::parse(message).unwrap() {
            icmp::v6::Message::PacketTooBig { mtu } => mtu,
            other => panic!("{other:?}"),
        }
    } else {
        assert!(ipv4::checksum_is_valid(&answer[14..34]) && icmp::v4::checksum_is_valid(message));
        assert!(answer.len() - 14 <= 576);
        match icmp::v4::Message::parse(message).unwrap() {
            icmp::v4::Message::FragmentationNeeded { mtu } => u32::from(mtu),
            other => panic!("{other:?}"),
        }
    };
    let quote = &message[8..];
    assert!(quote.len() >= 28 && about[14..].starts_with(quote), "the quote is not what was sent");
    ((parsed.src_mac, parsed.src_ip.to_string()), (parsed.dst_mac, parsed.dst_ip.to_string()), mtu)
}

#[test]
fn packets_of_guests() {
    const GW: Mac = GATEWAY_MAC;
    let gw4 = Some((GW, "10.0.0.254"));
    let gw6 = Some((GW, "fd00::fe"));
    let udp = |to, src, dst, len| sized(to, src, dst, 17, &[0, 1, 0, 2], len);
    let v4 = |len| udp(mac(3), "10.0.0.1", "10.0.0.3", len);
    let v6 = |len| udp(mac(3), "fd00::1", "fd00::3", len);
    let ping = |kind, len| sized(mac(3), "10.0.0.1", "10.0.0.3", 1, &[kind], len);
    let fragment = |field: u16| {
        let mut frame = v4(1404);
        frame[20..22].copy_from_slice(&(0x4000 | field).to_be_bytes());
        frame
    };
    // The expected outcome: passes, with the MTU for fragmentation; or an ICMP error with its sender; or only a
    // counter.
    type Outcome = Result<Option<u16>, Option<(Mac, &'static str)>>;
    let cases: Vec<(&str, Vec<u8>, u16, Outcome)> = vec![
        ("just fits", v4(1400), 0, Ok(None)),
        ("one too many", v4(1401), 1400, Err(gw4)),
        ("without DF", may_cut(v4(1401)), 1400, Ok(Some(1400))),
        // A MAC address has the smallest path MTU of its routes.
        ("IPv6, just fits", v6(1400), 0, Ok(None)),
        ("IPv6", v6(1401), 1400, Err(gw6)),
        ("routed", udp(GW, "10.0.0.1", "10.1.0.9", 601), 600, Err(gw4)),
        ("routed, just fits", udp(GW, "10.0.0.1", "10.1.0.9", 600), 0, Ok(None)),
        ("routed, IPv6, by its own route", udp(GW, "fd00::1", "fd00::3", 1450), 0, Ok(None)),
        ("here", udp(mac(2), "10.0.0.1", "10.0.0.2", 1301), 1300, Err(gw4)),
        ("here, without DF", may_cut(udp(mac(2), "10.0.0.1", "10.0.0.2", 1301)), 1300, Ok(Some(1300))),
        ("a ping", ping(8, 1401), 1400, Err(gw4)),
        ("an ICMP error", ping(3, 1401), 0, Err(None)),
        ("a redirect", ping(5, 1401), 0, Err(None)),
        ("an ICMPv6 error", sized(mac(3), "fd00::1", "fd00::3", 58, &[1, 4], 1451), 0, Err(None)),
        ("an ICMPv6 ping", sized(mac(3), "fd00::1", "fd00::3", 58, &[128, 0], 1451), 1400, Err(gw6)),
        ("the first fragment", fragment(0x2000), 1400, Err(gw4)),
        ("a later fragment", fragment(0x2010), 0, Err(None)),
    ];
    for (name, frame, mtu, expected) in cases {
        let mut switch = switch();
        let got = from_guest(&mut switch, &frame, Offload::default());
        match (got.action, expected) {
            (Action::Forward { .. } | Action::Deliver { .. }, Ok(expected)) => {
                assert_eq!(got.fragment_to, expected, "{name}");
                let counters = switch.port_counters(PortId(0)).unwrap();
                assert_eq!(counters.fragmented_packets, u64::from(expected.is_some()), "{name}");
            }
            (Action::Answer { .. }, Err(Some((from, address)))) => {
                let parsed = parse(&frame, frame.len()).unwrap();
                let said = error(switch.answer(), &frame);
                let to = (ME, parsed.src_ip.to_string());
                assert_eq!(said, ((from, address.to_string()), to, u32::from(mtu)), "{name}");
                let counters = switch.port_counters(PortId(0)).unwrap();
                assert_eq!((counters.answered_packets, counters.too_big_packets), (1, 1), "{name}");
            }
            (Action::Drop(DropReason::PathMtu), Err(None)) => {}
            other => panic!("{name}: {other:?}"),
        }
    }
}

#[test]
fn without_a_gateway_the_error_comes_from_the_receiver() {
    let mut tables = small();
    tables.routes[3].mtu = 700;
    let mut switch = Switch::build(&tables, 0).unwrap();
    let frame = sized(mac(3), "10.0.0.1", "10.0.0.3", 17, &[0, 1, 0, 2], 701);
    let parsed = parse(&frame, frame.len()).unwrap();
    let got = switch.from_guest(PortId(5), &frame, frame.len(), Offload::default(), &parsed);
    assert_eq!(*got, Verdict::unchanged(Action::Answer { vni: vni(200) }));
    let expected = ((mac(3), "10.0.0.3".to_string()), (ME, "10.0.0.1".to_string()), 700);
    assert_eq!(error(switch.answer(), &frame), expected);
}

#[test]
fn packets_with_segmentation_offload() {
    let tso = |mss| Offload { checksum: Some((34, 16)), segment: Some(Segment { mss, kind: SegmentKind::TcpV4 }) };
    let uso = |mss| Offload { checksum: Some((34, 6)), segment: Some(Segment { mss, kind: SegmentKind::Udp }) };
    let mut header = [0; 20];
    header[12] = 0x50;
    let large = |protocol| sized(mac(3), "10.0.0.1", "10.0.0.3", protocol, &header, 9000);
    let cut = |verdict: Verdict| matches!(verdict.action, Action::Forward { .. }).then_some(verdict.fragment_to);
    let mut switch = switch();
    // 20 + 20 bytes of headers.
    assert_eq!(cut(from_guest(&mut switch, &large(6), tso(1360))), Some(None));
    assert_eq!(cut(from_guest(&mut switch, &large(6), tso(1361))), Some(Some(1400)), "TCP is segmented, DF or not");
    // 20 + 8 bytes of headers.
    assert_eq!(cut(from_guest(&mut switch, &large(17), uso(1372))), Some(None));
    assert_eq!(from_guest(&mut switch, &large(17), uso(1373)), answered());
    assert_eq!(error(switch.answer(), &large(17)).2, 1400);
    assert_eq!(cut(from_guest(&mut switch, &may_cut(large(17)), uso(1373))), Some(Some(1400)));
}

#[test]
fn packets_that_may_not_pass_cause_no_error() {
    let mut tables = small();
    let pattern = bifrost_avs::Pattern { protocol: Some(17), ..Default::default() };
    let rule = bifrost_avs::AclRule { direction: bifrost_avs::Direction::Egress, pattern, allow: false, log: None };
    tables.vpcs[0].acl = vec![rule];
    let mut switch = Switch::build(&tables, 0).unwrap();
    let frame = sized(mac(3), "10.0.0.1", "10.0.0.3", 17, &[0, 1, 0, 2], 1401);
    assert_eq!(from_guest(&mut switch, &frame, Offload::default()), Verdict::drop(DropReason::Acl));
}

#[test]
fn errors_are_bounded_for_each_port() {
    let mut switch = switch();
    switch.advance(S);
    let frame = sized(mac(3), "10.0.0.1", "10.0.0.3", 17, &[0, 1, 0, 2], 1401);
    let sent = if cfg!(miri) { 110 } else { 1000 };
    let burst = |switch: &mut Switch| {
        let told = (0..sent).filter(|_| from_guest(switch, &frame, Offload::default()) == answered());
        told.count()
    };
    assert_eq!(burst(&mut switch), 100);
    assert_eq!(switch.port_counters(PortId(0)).unwrap().dropped.packets(DropReason::PathMtu), sent - 100);
    switch.advance(S + S / 100);
    assert_eq!(burst(&mut switch), 10, "1000 a second");
    switch.replace(&small()).unwrap();
    assert_eq!(burst(&mut switch), 0, "a reload does not refill the token bucket");
}

#[test]
fn packets_from_the_underlay() {
    let mut tables = small();
    tables.ports[0].mtu = 1000;
    let mut switch = Switch::build(&tables, 0).unwrap();
    let mut from = |frame: &[u8], peer| {
        let parsed = parse(frame, frame.len()).unwrap();
        let got = *switch.from_underlay(vni(100), PeerId(peer), frame, &parsed);
        (got, switch.answer().to_vec())
    };
    let udp = |macs, src: &str, len: usize| {
        let mut body = vec![0; len - 20];
        body[4..6].copy_from_slice(&(len as u16 - 20).to_be_bytes());
        packet(macs, src, "10.0.0.1", 63, 17, &body)
    };
    let neighbour = |len| udp((mac(3), ME), "10.0.0.3", len);
    let whole = Verdict::unchanged(Action::Deliver { port: PortId(0), worker: None });
    assert_eq!(from(&neighbour(1000), 1).0, whole);
    assert_eq!(from(&may_cut(neighbour(1001)), 1).0, Verdict { fragment_to: Some(1000), ..whole });
    let (got, answer) = from(&neighbour(1001), 1);
    assert_eq!(got, answered());
    let me = (ME, "10.0.0.1".to_string());
    assert_eq!(error(&answer, &neighbour(1001)), (me.clone(), (mac(3), "10.0.0.3".to_string()), 1000));
    // An error about a routed packet goes to the vNIC behind which its sender is.
    let routed = udp((GATEWAY_MAC, ME), "10.1.2.3", 1001);
    let (got, answer) = from(&routed, 2);
    assert_eq!(got, answered());
    assert_eq!(error(&answer, &routed), (me, (mac(4), "10.1.2.3".to_string()), 1000));
    // A sender that is not at the peer gets no error.
    assert_eq!(from(&neighbour(1001), 2).0, Verdict::drop(DropReason::WrongPeer));
    let counters = switch.port_counters(PortId(0)).unwrap();
    assert_eq!((counters.from_underlay_packets, counters.fragmented_packets, counters.too_big_packets), (2, 1, 2));
    let all = switch.underlay_counters();
    assert_eq!((all.accepted_packets, all.too_big_answered_packets, all.ingress_dropped_packets), (2, 2, 0));
}
