//! Packets that a peer should not send, and packets of strangers.

use bifrost_wire::roce::{Bth, Header, ICRC_LEN, Icrc, Opcode, Operation as Op, Reth};
use proptest::prelude::*;

use super::*;
use crate::Counters;

/// A packet from `a` to `b`, with a valid ICRC.
fn forge(a: &End, b: &End, mut header: Header, payload: &[u8]) -> (Route, Vec<u8>) {
    let route =
        Route { source: a.nic.address(), destination: b.nic.address(), source_port: 50_000, destination_port: 4791 };
    header.bth.pad = (payload.len().wrapping_neg() & 3) as u8;
    let mut head = [0; Header::MAX_LEN];
    let len = header.emit_into(&mut head);
    let mut bytes = [&head[..len], payload, &[0; 3][..usize::from(header.bth.pad)]].concat();
    let mut icrc = Icrc::new(&route, bytes.len() + ICRC_LEN);
    icrc.header(&bytes);
    bytes.extend_from_slice(&icrc.finish());
    (route, bytes)
}

fn bth(b: &End, operation: Op, sequence: u32) -> Bth {
    let opcode = Opcode { transport: Transport::Uc, operation }.byte();
    Bth { opcode, destination: b.qp, sequence: Sequence::new(sequence), ..Bth::default() }
}

#[test]
fn each_forgery_is_counted_and_has_no_effect() {
    let ok = Counters { received_packets: 1, ..Counters::default() };
    let denied = Counters { access_denied_messages: 1, ..Counters::default() };
    let place = Counters { out_of_place_packets: 1, ..Counters::default() };
    let torn = Counters { torn_packets: 1, ..Counters::default() };
    type Forge = fn(&mut Header, &mut Vec<u8>, &Region, &Region);
    let cases: [(&str, Forge, Counters); 13] = [
        ("nothing wrong", |_, _, _, _| {}, ok),
        ("another key", |h, _, _, _| h.reth.as_mut().unwrap().key ^= 0x1_0000, denied),
        (
            "the key of local memory",
            |h, _, _, local| {
                *h.reth.as_mut().unwrap() = Reth { address: local.address, key: local.key.0, length: 64 };
            },
            denied,
        ),
        ("before the region", |h, _, _, _| h.reth.as_mut().unwrap().address -= 1, denied),
        ("beyond its end", |h, _, _, _| h.reth.as_mut().unwrap().address += 64, denied),
        ("an address that overflows", |h, _, _, _| h.reth.as_mut().unwrap().address = u64::MAX - 3, denied),
        ("a length that overflows", |h, _, _, _| h.reth.as_mut().unwrap().length = u32::MAX, denied),
        ("more than announced", |h, _, _, _| h.reth.as_mut().unwrap().length = 10, denied),
        ("less than announced", |h, _, _, _| h.reth.as_mut().unwrap().length = 65, denied),
        ("a first packet that is not full", |h, _, _, _| h.bth.opcode = 0x26, place),
        ("a middle packet without a first", |h, _, _, _| (h.bth.opcode, h.reth) = (0x27, None), torn),
        (
            "longer than the MTU",
            |h, p, region, _| {
                *p = vec![0; 1025];
                *h.reth.as_mut().unwrap() = Reth { address: region.address, key: region.key.0, length: 1025 };
            },
            denied,
        ),
        (
            "another service",
            |h, _, _, _| h.bth.opcode = 0x0a,
            Counters { unknown_queue_pair_packets: 1, ..Counters::default() },
        ),
    ];
    for (name, change, expected) in cases {
        let (a, mut b) = pair(Transport::Uc);
        let target = b.memory(Access::RemoteWrite, vec![0xdd; 100]);
        let local = b.memory(Access::Local, vec![0xdd; 100]);
        let reth = Reth { address: target.address, key: target.key.0, length: 64 };
        let mut header = Header { bth: bth(&b, Op::WriteOnly, 0xff_fffe), reth: Some(reth), ..Header::default() };
        let mut payload = vec![1; 64];
        change(&mut header, &mut payload, &target, &local);
        let (route, bytes) = forge(&a, &b, header, &payload);
        b.nic.receive(0, &route, &bytes);
        assert_eq!(*b.nic.counters(), expected, "{name}");
        let written = usize::from(expected == ok) * 64;
        assert_eq!(b.bytes(target.key, 0, 100), [vec![1; written], vec![0xdd; 100 - written]].concat(), "{name}");
        assert_eq!(b.bytes(local.key, 0, 100), [0xdd; 100], "{name}");
    }
}

#[test]
fn packets_of_strangers_are_dropped() {
    let (a, mut b) = pair(Transport::Uc);
    b.post_receive(0, 100);
    let header = Header { bth: bth(&b, Op::SendOnly, 0xff_fffe), ..Header::default() };
    // From another host, which computes a valid ICRC.
    let (route, bytes) = forge(&End::new(3, Transport::Uc), &b, header, &[1; 64]);
    b.nic.receive(0, &route, &bytes);
    assert_eq!(b.nic.counters().foreign_packets, 1);
    // The ICRC covers the addresses.
    let (mut route, bytes) = forge(&a, &b, header, &[1; 64]);
    route.source_port += 1;
    b.nic.receive(0, &route, &bytes);
    assert_eq!(b.nic.counters().bad_icrc_packets, 1);
    assert!(b.poll().is_empty());
}

#[test]
fn memory_deregistered_during_a_message_is_not_written() {
    let (mut a, mut b) = pair(Transport::Uc);
    let target = b.memory(Access::RemoteWrite, vec![0xdd; 4096]);
    a.post(0, Operation::Write { address: target.address, key: target.key.0 }, None, vec![1; 4096]);
    let sent = packets(0, &mut a.nic);
    for (route, bytes) in &sent[..2] {
        b.nic.receive(0, route, bytes);
    }
    let memory = b.nic.deregister(target.key).unwrap();
    assert_eq!(memory, [vec![1; 2048], vec![0xdd; 2048]].concat());
    // In the same slot, with another key.
    let next = b.memory(Access::RemoteWrite, vec![0xdd; 4096]);
    for (route, bytes) in &sent[2..] {
        b.nic.receive(0, route, bytes);
    }
    assert_eq!(b.bytes(next.key, 0, 4096), [0xdd; 4096]);
    assert_eq!((b.nic.counters().access_denied_messages, b.nic.counters().torn_packets), (1, 1));
}

proptest! {
    /// Any bytes with a valid ICRC, to any queue pair: no panic, and local memory does not change.
    #[test]
    fn no_other_memory_is_written(
        transport in prop::sample::select(vec![Transport::Uc, Transport::Rc, Transport::Ud]),
        inputs in prop::collection::vec((prop::collection::vec(any::<u8>(), 12..80), any::<[bool; 4]>()), 1..60),
    ) {
        let (a, mut b) = pair(transport);
        let secret = b.memory(Access::Local, vec![0xdd; 4096]);
        let target = b.memory(Access::RemoteWrite, vec![0; 64]);
        let other = b.nic.register(Domain(99), Access::RemoteWrite, vec![0xdd; 4096]).unwrap();
        for token in 0..8 {
            b.post_receive(token, 64);
        }
        for (mut bytes, [aim, operation, key, next]) in inputs {
            if aim {
                bytes[5..8].copy_from_slice(&b.qp.get().to_be_bytes()[1..]);
            }
            if operation {
                bytes[0] = ((transport as u8) << 5) | (bytes[0] % 12);
                bytes[1] = 0x40 | bytes[1] & 0x30;
                bytes[2..4].copy_from_slice(&[0xff, 0xff]);
            }
            if key && bytes.len() >= 28 {
                let region = [secret, target, other][usize::from(bytes[27]) % 3];
                let address = region.address + u64::from(bytes[26]);
                bytes[12..20].copy_from_slice(&address.to_be_bytes());
                bytes[20..24].copy_from_slice(&region.key.0.to_be_bytes());
            }
            if next {
                bytes[9..12].copy_from_slice(&[0xff, 0xff, 0xfe]);
            }
            let route = Route {
                source: a.nic.address(),
                destination: b.nic.address(),
                source_port: 1,
                destination_port: 4791,
            };
            let mut icrc = Icrc::new(&route, bytes.len() + ICRC_LEN);
            icrc.header(&bytes);
            bytes.extend_from_slice(&icrc.finish());
            b.nic.receive(0, &route, &bytes);
            prop_assert!(packets(0, &mut b.nic).len() <= 1);
        }
        prop_assert_eq!(b.bytes(secret.key, 0, 4096), &[0xdd; 4096]);
        prop_assert_eq!(b.bytes(other.key, 0, 4096), &[0xdd; 4096]);
        prop_assert!(b.poll().len() <= 8);
    }
}
