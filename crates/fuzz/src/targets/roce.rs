//! RoCEv2 packets and messages over RDMA: parsers handle any input, emitting reverses parsing, and a NIC writes only
//! where its peer may.

use std::net::{IpAddr, Ipv6Addr};

use bifrost_rnic::{Access, Burst, Config, Connect, Domain, Nic, QpInit, Qpn, ReceiveRequest, Route, Sequence, Slice};
use bifrost_wire::rdm::{self, Class, Control, SendHeader, Setup};
use bifrost_wire::roce::{Bth, ICRC_LEN, Icrc, Packet, Transport};

use crate::Input;

/// Length of each region, and the content of those that the peer may not write.
const REGION: u32 = 256;
const SECRET: u8 = 0xdd;

pub(crate) fn run(bytes: &[u8]) {
    parsers(bytes);
    nic(bytes);
}

fn parsers(bytes: &[u8]) {
    if let Ok(packet) = Packet::parse(bytes) {
        assert!(packet.payload.len() + Bth::LEN + ICRC_LEN <= bytes.len());
    }
    if let Ok(control) = Control::parse(bytes) {
        let mut out = [0; Control::MAX_LEN];
        let len = control.emit_into(&mut out);
        assert_eq!(Control::parse(&out[..len]), Ok(control));
    }
    if let Ok(header) = SendHeader::parse(bytes, bytes.len()) {
        assert!(header.offset <= header.length);
        assert_eq!(SendHeader::parse(&header.emit(), bytes.len()), Ok(header));
    }
    for class in [Class::Write, Class::Read] {
        if let Ok((access, data)) = rdm::Access::parse(class, bytes) {
            assert_eq!([&access.emit()[..], data].concat(), bytes);
            assert!(class == Class::Read || data.len() == access.length as usize);
        }
    }
    let setup = &bytes[..bytes.len().min(Setup::len_of(bytes))];
    if let Ok(setup) = Setup::parse(setup) {
        let mut out = [0; Setup::MAX_LEN];
        let len = setup.emit_into(&mut out);
        assert_eq!(Setup::parse(&out[..len]), Ok(setup));
    }
}

/// A NIC with a queue pair of each service receives packets with headers derived from the input.
fn nic(bytes: &[u8]) {
    let host = |n| IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n));
    let mut nic = Nic::new(Config { address: host(1), port: 4791, queue_pairs: 4, regions: 16, seed: 1 });
    let Ok(queue) = nic.create_queue() else { return };
    let mut input = Input::new(bytes);
    let secret = nic.register(Domain(1), Access::Local, vec![SECRET; REGION as usize]).expect("room");
    let other = nic.register(Domain(2), Access::RemoteWrite, vec![SECRET; REGION as usize]).expect("room");
    let target = nic.register(Domain(1), Access::RemoteWrite, vec![0; REGION as usize]).expect("room");
    let slots = nic.register(Domain(1), Access::Local, vec![0; REGION as usize]).expect("room");
    let numbers = [Transport::Rc, Transport::Uc, Transport::Ud].map(|transport| {
        let init = QpInit {
            transport,
            send_queue: queue,
            receive_queue: queue,
            send_depth: 4,
            receive_depth: 4,
            domain: Domain(1),
            queue_key: 0,
            urgent: false,
        };
        let number = nic.create_queue_pair(init).expect("room");
        for token in 0..4u32 {
            let slice = Slice { key: slots.key, offset: token * 64, len: 64 };
            nic.post_receive(number, ReceiveRequest { token: u64::from(token), slice }).expect("room");
        }
        let connect = Connect {
            address: host(2),
            port: 4791,
            queue_pair: Qpn::new(9),
            source_port: 1,
            send_sequence: Sequence::new(0),
            receive_sequence: Sequence::new(0),
            mtu: 256,
            retries: 2,
            timeout_ns: 1000,
        };
        if transport != Transport::Ud {
            nic.connect(number, connect).expect("a queue pair that is reset");
        }
        number
    });
    let mut sequence = 0u32;
    for step in 0..40 {
        if input.is_empty() {
            break;
        }
        let at = usize::from(input.u8()) % 3;
        let opcode = [0u8, 0x20, 0x60][at] | (input.u8() % 0x18);
        let mut packet = vec![opcode, 0x40 | input.u8() & 0x30, 0xff, 0xff, 0];
        packet.extend_from_slice(&numbers[at].get().to_be_bytes()[1..]);
        if input.below(4) > 0 {
            packet.extend_from_slice(&sequence.to_be_bytes());
        } else {
            packet.extend_from_slice(&input.u32().to_be_bytes());
        }
        packet[8] = input.u8() & 0x80;
        sequence = sequence.wrapping_add(1) & 0xff_ffff;
        if input.below(2) == 0 {
            let region = [secret, other, target][input.below(3)];
            packet.extend_from_slice(&(region.address + u64::from(input.u8())).to_be_bytes());
            packet.extend_from_slice(&region.key.0.to_be_bytes());
            packet.extend_from_slice(&u32::from(input.u8()).to_be_bytes());
        }
        let len = usize::from(input.u8()) + if input.below(4) == 0 { 200 } else { 0 };
        packet.resize(packet.len() + len / 4 * 4, 0x11);
        let route = Route { source: host(2), destination: host(1), source_port: 1, destination_port: 4791 };
        let mut icrc = Icrc::new(&route, packet.len() + ICRC_LEN);
        icrc.header(&packet);
        packet.extend_from_slice(&icrc.finish());
        nic.receive(step * 100, &route, &packet);
        nic.advance(step * 100);
        let mut burst = Burst::new();
        assert!(nic.transmit(step * 100, 64, &mut burst) <= 1, "one answer per packet");
    }
    for region in [secret, other] {
        let held = nic.bytes(Slice { key: region.key, offset: 0, len: REGION }).expect("its memory");
        assert!(held.iter().all(|byte| *byte == SECRET), "written by a peer without permission");
    }
    let mut completions = Vec::new();
    assert!(nic.poll(queue, usize::MAX, &mut completions) <= 12, "one for each request");
}
