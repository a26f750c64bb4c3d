//! Fragmented packets, and packets that must be fragmented. The output is reassembled, and its checksum verified.

use bifrost_nic::{Checksum, Offload, Segments, parse, transport_checksum};
use bifrost_tables::{Classifier, Pattern};
use bifrost_wire::protocol::{ICMP, ICMPV6, UDP};
use bifrost_wire::{icmp, ipv4};

use super::build::*;
use crate::*;

const REMOTE: &str = "198.51.100.1";
const REMOTE_6: &str = "2001:db8::1";

/// The packet without DF.
fn cuttable(mut packet: Vec<u8>) -> Vec<u8> {
    packet[6] &= !0x40;
    ipv4::fill_checksum(&mut packet[..20]);
    packet
}

/// A packet as IPv4 fragments of at most `mtu` bytes, or as IPv6 fragments with at most that payload.
fn pieces(packet: &[u8], mtu: u16) -> Vec<Vec<u8>> {
    if packet[0] >> 4 == 6 {
        return pieces_6(packet, usize::from(mtu) & !7);
    }
    let frame = link(&cuttable(packet.to_vec()));
    let plan = Segments::plan_within(&frame, frame.len(), Offload::default(), mtu).unwrap();
    let piece = |index| {
        let mut out = Vec::new();
        plan.write(index, |from, to, out: &mut Vec<u8>| out.extend_from_slice(&frame[from..to]), &mut out);
        out.split_off(14)
    };
    (0..plan.count()).map(piece).collect()
}

fn pieces_6(packet: &[u8], len: usize) -> Vec<Vec<u8>> {
    let (header, payload) = packet.split_at(40);
    let count = payload.len().div_ceil(len);
    let piece = |(number, part): (usize, &[u8])| {
        let mut header = header.to_vec();
        header[4..6].copy_from_slice(&((part.len() + 8) as u16).to_be_bytes());
        let protocol = std::mem::replace(&mut header[6], 44);
        let field = (number * len) as u16 | u16::from(number + 1 < count);
        [&header[..], &[protocol, 0], &field.to_be_bytes(), &[0, 0, 0, 9], part].concat()
    };
    payload.chunks(len).enumerate().map(piece).collect()
}

/// Reassembles IPv4 fragments without Ethernet.
fn whole(pieces: &[Vec<u8>]) -> Vec<u8> {
    let offset = |piece: &Vec<u8>| usize::from(u16::from_be_bytes([piece[6], piece[7]]) & 0x1fff) * 8;
    let mut out = pieces[0][..20].to_vec();
    for (number, piece) in pieces.iter().enumerate() {
        assert_eq!(offset(piece), out.len() - 20, "each starts where the previous one ends");
        assert_eq!(piece[6] & 0x20 != 0, number + 1 < pieces.len(), "more follow all but the last");
        assert!(ipv4::checksum_is_valid(&piece[..20]));
        out.extend_from_slice(&piece[20..]);
    }
    let len = out.len() as u16;
    out[2..4].copy_from_slice(&len.to_be_bytes());
    out[6..8].fill(0);
    ipv4::fill_checksum(&mut out[..20]);
    let frame = link(&out);
    let parsed = parse(&frame, frame.len()).unwrap();
    let is_right = match parsed.protocol {
        ICMP => icmp::v4::checksum_is_valid(&out[20..]),
        _ => transport_checksum(&frame, &parsed) == Checksum::Valid,
    };
    assert!(is_right);
    out
}

fn one_core(tables: Tables) -> Pod {
    let mut pod = Pod::of(tables);
    pod.one_core = true;
    pod
}

fn long(source: (&str, u16), destination: (&str, u16)) -> Vec<u8> {
    udp_packet(source, destination, &(0..1000).map(|n| n as u8).collect::<Vec<_>>())
}

#[test]
fn a_fragmented_packet_is_translated_like_a_whole_one_in_both_directions() {
    let mut pod = one_core(tables());
    let asked = cuttable(long(("192.168.0.1", 5000), (REMOTE, 53)));
    let expected = pod.forward(&tunnelled(HOST_A, VPC, &asked)).inner_frame.split_off(14);
    let out: Vec<Vec<u8>> = pieces(&asked, 400)
        .iter()
        .map(|piece| pod.forward(&tunnelled(HOST_A, VPC, piece)).inner_frame.split_off(14))
        .collect();
    assert_eq!((out.len(), whole(&out)), (3, expected.clone()));
    let port = u16::from_be_bytes([expected[20], expected[21]]);
    let answer = cuttable(long((REMOTE, 53), (NAT_ADDRESS, port)));
    let expected = pod.forward(&link(&answer)).inner_frame.split_off(14);
    let back = pieces(&answer, 600);
    let out: Vec<Vec<u8>> = back.iter().map(|piece| pod.forward(&link(piece)).inner_frame.split_off(14)).collect();
    assert_eq!((out.len(), whole(&out)), (2, expected));
    // The packet is complete.
    assert_eq!(pod.dropped(&link(&back[1])), DropReason::FragmentWithoutFirst);
}

#[test]
fn a_fragmented_echo_is_translated() {
    let mut pod = one_core(tables());
    let mut message = vec![8, 0, 0, 0, 0, 77, 0, 1];
    message.resize(1000, 5);
    let sum = bifrost_wire::checksum::Sum::starting(0).then(&message).finish();
    message[2..4].copy_from_slice(&sum.to_be_bytes());
    let asked = packet("192.168.0.1", REMOTE, ICMP, 64, &message);
    let out: Vec<Vec<u8>> = pieces(&asked, 400)
        .iter()
        .map(|piece| pod.forward(&tunnelled(HOST_A, VPC, piece)).inner_frame.split_off(14))
        .collect();
    let whole = whole(&out);
    assert_eq!(whole[12..16], [203, 0, 113, 200]);
    assert_eq!(whole[28..], message[8..], "the payload is unchanged");
}

#[test]
fn fragments_that_do_not_fit_are_dropped() {
    let mut pod = one_core(tables());
    let asked = long(("192.168.0.1", 5000), (REMOTE, 53));
    let all = pieces(&asked, 400);
    let send = |pod: &mut Pod, piece: &[u8]| pod.process(&tunnelled(HOST_A, VPC, piece)).0;
    let without = Verdict::Drop(DropReason::FragmentWithoutFirst);
    let mismatch = Verdict::Drop(DropReason::FragmentMismatch);
    assert_eq!(send(&mut pod, &all[1]), without, "before the first");
    assert!(matches!(send(&mut pod, &all[0]), Verdict::Forward(_)));
    let other = &pieces(&long(("192.168.0.2", 5000), (REMOTE, 53)), 400)[1];
    assert_eq!(pod.process(&tunnelled(HOST_A, PEER, &all[1])).0, Verdict::Drop(DropReason::NoRoute), "another VPC");
    assert_eq!(send(&mut pod, other), without, "another source");
    let mut overlapping = all[1].clone();
    overlapping[7] -= 1;
    ipv4::fill_checksum(&mut overlapping[..20]);
    assert_eq!(send(&mut pod, &overlapping), mismatch);
    pod.now += 5_000_000_000;
    assert_eq!(send(&mut pod, &all[1]), without, "too late");
    // A source that sends many first fragments evicts its own.
    let first = |identification: u16| {
        let mut piece = all[0].clone();
        piece[4..6].copy_from_slice(&identification.to_be_bytes());
        ipv4::fill_checksum(&mut piece[..20]);
        piece
    };
    for identification in 1..=17 {
        assert!(matches!(send(&mut pod, &first(identification)), Verdict::Forward(_)));
    }
    assert_eq!(send(&mut pod, &all[1]), without, "record 1 was evicted");
}

#[test]
fn rules_about_ports_apply_to_fragmented_packets() {
    let port = Pattern { dst_ports: 53..=53, ..Pattern::default() };
    let mut refusing = tables();
    let acl = Classifier::new([(port, false), (Pattern::default(), true)]);
    refusing.vpcs.get_mut(&VPC).unwrap().acl = Some(acl);
    let mut pod = one_core(refusing);
    for (port, passes) in [(53, false), (54, true)] {
        for (source, remote) in [("192.168.0.2", REMOTE), ("fd10::2", REMOTE_6)] {
            for piece in pieces(&long((source, 5000), (remote, port)), 400) {
                let verdict = pod.process(&tunnelled(HOST_B, VPC, &piece)).0;
                assert_eq!(matches!(verdict, Verdict::Forward(_)), passes, "{source} {port}: {verdict:?}");
            }
        }
    }
}

#[test]
fn without_rules_about_ports_fragments_need_no_first_one() {
    let mut pod = one_core(tables());
    let all = pieces(&long(("192.168.0.1", 5000), ("192.168.0.2", 53)), 400);
    for piece in all.iter().rev() {
        assert_eq!(pod.forward(&tunnelled(HOST_A, VPC, piece)).inner_frame[34..], piece[20..]);
    }
}

#[test]
fn a_packet_that_is_too_large_is_fragmented_if_allowed() {
    let mut pod = one_core(tables());
    let payload: Vec<u8> = (0..1560).map(|n| n as u8).collect();
    let large = udp_packet((REMOTE, 53), ("203.0.113.2", 5000), &payload);
    let (verdict, first) = pod.process(&link(&cuttable(large.clone())));
    assert_eq!(verdict, Verdict::Forward(Service::Internet));
    let frames: Vec<Vec<u8>> = std::iter::once(first).chain(pod.take_more()).collect();
    let outs: Vec<Out> = frames.iter().map(|frame| Out::read(frame)).collect();
    assert!(outs.iter().all(|out| out.outer.packet_len() <= 1600 && out.vxlan.is_some()));
    assert!(outs.iter().all(|out| out.inner.dst_ip == ip("192.168.0.2") && out.inner.protocol == UDP));
    let inner: Vec<Vec<u8>> = outs.into_iter().map(|out| out.inner_frame[14..].to_vec()).collect();
    let whole = whole(&inner);
    assert_eq!((inner.len(), &whole[28..]), (2, &payload[..]));
    assert_eq!((pod.counter("fragmented_packets"), pod.counter("extra_fragment_packets")), (1, 1));
    // With DF, and in IPv6, the sender of the large packet gets an error.
    let out = pod.forward(&link(&large));
    assert_eq!((out.inner.protocol, out.inner.dst_ip), (ICMP, ip(REMOTE)));
    assert_eq!((&out.l4()[..2], &out.l4()[6..8]), (&[3, 4][..], &1550_u16.to_be_bytes()[..]));
    assert_eq!(out.l4()[8..60], large[..52]);
    let out = pod.forward(&link(&udp_packet((REMOTE_6, 53), ("fd10::2", 5000), &payload)));
    assert_eq!((out.inner.protocol, out.inner.dst_ip), (ICMPV6, ip(REMOTE_6)));
    assert_eq!((out.l4()[0], &out.l4()[4..8]), (2, &1550_u32.to_be_bytes()[..]));
    assert!(pod.take_more().is_empty());
}

#[test]
fn a_packet_that_is_too_large_and_has_its_payload_elsewhere_is_dropped() {
    let mut pod = one_core(tables());
    let frame = link(&cuttable(udp_packet((REMOTE, 53), ("203.0.113.2", 5000), &[0; 1560])));
    let mut buffer = [&[0; HEADROOM][..], &frame[..42], &[0; 256]].concat();
    let verdict = pod.run(&mut Packet::header_only(&mut buffer, HEADROOM, HEADROOM + 42));
    assert_eq!(verdict, Verdict::Drop(DropReason::TooLarge));
}
