//! UD.

use super::*;
use crate::{Datagram, PostError, QpInit};

fn to(end: &End, queue_key: u32) -> Operation {
    Operation::SendTo(Datagram {
        address: end.nic.address(),
        port: 4791,
        source_port: 49_152,
        queue_pair: end.qp,
        queue_key,
    })
}

#[test]
fn datagrams_need_the_key_and_a_receive_request_that_is_long_enough() {
    let (mut a, mut b) = pair(Transport::Ud);
    let (right, wrong) = (to(&b, 77), to(&b, 78));
    a.post(0, right, None, vec![1; 50]);
    carry(0, &mut a.nic, &mut b.nic, |_| true);
    assert_eq!(b.nic.counters().no_receive_request_messages, 1);
    let slot = b.post_receive(5, 50);
    a.post(1, wrong, None, vec![2; 50]);
    a.post(2, right, None, vec![3; 51]);
    a.post(3, right, Some(9), vec![4; 49]);
    carry(4, &mut a.nic, &mut b.nic, |_| true);
    assert_eq!((b.nic.counters().bad_queue_key_packets, b.nic.counters().too_long_messages), (1, 1));
    let [got] = b.poll()[..] else { panic!("one") };
    assert_eq!((got.token, got.len, got.immediate, got.time_ns), (5, 49, Some(9), 4));
    assert_eq!(got.source, Some((a.nic.address(), a.qp)));
    assert_eq!(b.bytes(slot.key, 0, 50), [vec![4; 49], vec![0xee]].concat());
}

#[test]
fn invalid_datagrams_are_dropped() {
    let (mut a, b) = pair(Transport::Ud);
    let slice = |a: &mut End, len: u32| {
        let region = a.memory(Access::Local, vec![0; len as usize]);
        Some(Slice { key: region.key, offset: 0, len })
    };
    let (short, long) = (slice(&mut a, 10), slice(&mut a, 4097));
    assert_eq!(a.nic.post_send(a.qp, request(0, to(&b, 77), None, long)), Err(PostError::Operation));
    assert_eq!(a.nic.post_send(a.qp, request(0, Operation::Send, None, short)), Err(PostError::Operation));
    assert_eq!(
        a.nic.post_send(Qpn::new(1), request(0, Operation::Send, None, short)),
        Err(PostError::UnknownQueuePair)
    );
}

#[test]
fn urgent_queue_pairs_go_first() {
    let mut a = End::new(1, Transport::Ud);
    let b = End::new(2, Transport::Ud);
    let init = QpInit {
        transport: Transport::Ud,
        send_queue: a.queue,
        receive_queue: a.queue,
        send_depth: 4,
        receive_depth: 4,
        domain: a.domain,
        queue_key: 0,
        urgent: true,
    };
    let urgent = a.nic.create_queue_pair(init).unwrap();
    for token in 0..40 {
        a.post(token, to(&b, 77), None, vec![0; 4]);
    }
    a.nic.post_send(urgent, request(99, to(&b, 77), None, None)).unwrap();
    let mut burst = Burst::new();
    assert_eq!(a.nic.transmit(0, 20, &mut burst), 20);
    assert_eq!(a.poll()[0].token, 99);
}

#[test]
fn while_paused_only_urgent_queue_pairs_send() {
    let (mut a, mut b) = pair(Transport::Ud);
    let init = QpInit {
        transport: Transport::Ud,
        send_queue: a.queue,
        receive_queue: a.queue,
        send_depth: 8,
        receive_depth: 8,
        domain: a.domain,
        queue_key: 77,
        urgent: true,
    };
    let urgent = a.nic.create_queue_pair(init).unwrap();
    let to_b = to(&b, 77);
    a.nic.set_paused(true);
    a.post(0, to_b, None, vec![1; 8]);
    assert!(!a.nic.has_packets());
    a.nic.post_send(urgent, request(1, to_b, None, None)).unwrap();
    assert!(a.nic.has_packets());
    b.post_receive(0, 50);
    b.post_receive(1, 50);
    assert_eq!(carry(0, &mut a.nic, &mut b.nic, |_| true), 1);
    assert_eq!(b.poll()[0].source, Some((a.nic.address(), urgent)));
    assert!(!a.nic.has_packets());
    a.nic.set_paused(false);
    assert_eq!(carry(0, &mut a.nic, &mut b.nic, |_| true), 1);
    assert_eq!(b.poll()[0].len, 8);
}

/// A hardware NIC numbers its IPv4 packets; the ICRC covers the number.
#[test]
fn ipv4_packets_with_an_identification_are_accepted() {
    let address = |last| IpAddr::from([192, 0, 2, last]);
    let route = Route { source: address(1), destination: address(2), source_port: 49_152, destination_port: 4791 };
    let mut nic = Nic::new(Config { address: address(2), port: 4791, queue_pairs: 1, regions: 1, seed: 1 });
    let bth = bifrost_wire::roce::Bth { opcode: 0x24, destination: Qpn::new(5), ..Default::default() };
    let header = bifrost_wire::roce::Header { bth, ..Default::default() };
    let mut head = [0; 32];
    let len = header.emit_into(&mut head);
    let mut bytes = head[..len].to_vec();
    let mut icrc = bifrost_wire::roce::Icrc::new(&route, bytes.len() + 4);
    icrc.header(&bytes);
    // A CRC is linear: the change is the CRC of the number alone, followed by zeros.
    let behind = 14 + 8 + bytes.len();
    let changed = [&[0x12u8, 0x34][..], &vec![0; behind]].concat().iter().fold(0u32, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 })
    });
    let icrc = u32::from_le_bytes(icrc.finish()) ^ changed;
    bytes.extend(icrc.to_le_bytes());
    nic.receive(0, &route, &bytes);
    let counters = nic.counters();
    assert_eq!((counters.bad_icrc_packets, counters.unknown_queue_pair_packets), (0, 1));
    bytes[13] ^= 1;
    nic.receive(0, &route, &bytes);
    assert_eq!(nic.counters().bad_icrc_packets, 1);
}
