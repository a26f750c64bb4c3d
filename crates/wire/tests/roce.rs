//! RoCEv2 against another implementation (`docs/vectors/roce.toml`), tshark, and itself.

#![allow(missing_docs, clippy::unwrap_used)]

use std::net::IpAddr;
use std::path::Path;

use bifrost_wire::roce::{
    Acknowledgement, Aeth, Bth, Deth, Header, ICRC_LEN, Icrc, IcrcStarts, Opcode, Operation, Packet, Qpn, Refusal,
    Reth, Route, Sequence, Transport,
};
use proptest::prelude::*;
use toml::{Table, Value};

fn route(ip: &str) -> Route {
    let (source, destination): (IpAddr, IpAddr) = match ip {
        "v4" => ("192.0.2.1".parse().unwrap(), "192.0.2.2".parse().unwrap()),
        _ => ("2001:db8::1".parse().unwrap(), "2001:db8::2".parse().unwrap()),
    };
    Route { source, destination, source_port: 49_152, destination_port: 4791 }
}

/// A packet as bytes.
fn emit(route: &Route, mut header: Header, payload: &[u8]) -> Vec<u8> {
    header.bth.pad = (payload.len().wrapping_neg() & 3) as u8;
    let mut head = [0; Header::MAX_LEN];
    let len = header.emit_into(&mut head);
    let mut bytes = [&head[..len], payload, &[0; 3][..usize::from(header.bth.pad)]].concat();
    let mut icrc = Icrc::new(route, bytes.len() + ICRC_LEN);
    icrc.header(&bytes[..len]);
    icrc.payload(&bytes[len..]);
    bytes.extend_from_slice(&icrc.finish());
    bytes
}

#[test]
fn packets_of_another_implementation() {
    let vectors = load();
    for vector in &vectors {
        let text = |key: &str| vector.get(key).and_then(Value::as_str);
        let number = |key: &str| {
            let parse = |text: &str| u64::from_str_radix(text.trim_start_matches("0x"), 16).unwrap();
            text(key).map(parse).or(vector.get(key).and_then(Value::as_integer).map(|n| n as u64))
        };
        let name = text("name").unwrap();
        let bytes = hex(text("hex").unwrap());
        let route = route(text("ip").unwrap());
        assert!(Icrc::is_valid(&route, &bytes), "{name}");
        let packet = Packet::parse(&bytes).unwrap();
        assert_eq!(format!("{:?}", packet.opcode.transport).to_uppercase(), text("transport").unwrap(), "{name}");
        assert_eq!(format!("{:?}", packet.opcode.operation), text("operation").unwrap(), "{name}");
        let payload = hex(text("payload").unwrap());
        assert_eq!(packet.payload, payload, "{name}");
        let header = Header {
            bth: Bth {
                opcode: packet.opcode.byte(),
                pad: (payload.len().wrapping_neg() & 3) as u8,
                destination: Qpn::new(number("destination").unwrap() as u32),
                sequence: Sequence::new(number("sequence").unwrap() as u32),
                acknowledge: vector.get("acknowledge").is_some(),
                ..Bth::default()
            },
            deth: number("queue_key")
                .map(|key| Deth { queue_key: key as u32, source: Qpn::new(number("source").unwrap() as u32) }),
            reth: number("address").map(|address| Reth {
                address,
                key: number("key").unwrap() as u32,
                length: number("length").unwrap() as u32,
            }),
            aeth: number("messages").map(|messages| Aeth { what: Acknowledgement::Ack, messages: messages as u32 }),
            immediate: number("immediate").map(|immediate| immediate as u32),
        };
        assert_eq!(packet.header, header, "{name}");
        assert_eq!(emit(&route, header, &payload), bytes, "{name}");
    }
    assert_eq!(vectors.len(), 10);
}

#[test]
fn invalid_packets_are_refused_with_their_reason() {
    let whole = emit(&route("v6"), header(Transport::Uc, Operation::WriteOnlyImm, 1), &[7; 5]);
    for len in 0..Header::MAX_LEN + ICRC_LEN {
        assert_eq!(Packet::parse(&whole[..len]), Err(Refusal::Truncated), "{len}");
    }
    type Change = fn(&mut Vec<u8>);
    let cases: [(Change, Refusal); 5] = [
        (|b| b[1] |= 1, Refusal::Version),
        (|b| b[0] = 0x2c, Refusal::Opcode),
        (|b| b[0] = 0x0c, Refusal::Opcode),
        (|b| b.truncate(b.len() - 1), Refusal::Pad),
        (|b| (b[0], b[12]) = (0x11, 0x40), Refusal::Syndrome),
    ];
    for (change, refusal) in cases {
        let mut bytes = whole.clone();
        change(&mut bytes);
        assert_eq!(Packet::parse(&bytes), Err(refusal));
    }
    let empty = emit(&route("v6"), header(Transport::Uc, Operation::SendOnly, 1), &[]);
    let padded = [&[empty[0], empty[1] | 0x10], &empty[2..]].concat();
    assert_eq!(Packet::parse(&padded), Err(Refusal::Pad), "more pad than payload");
}

/// Other implementations number their IPv4 packets, and a socket does not show the number.
#[test]
fn the_identification_of_ipv4_follows_from_the_icrc() {
    let route = route("v4");
    for (id, len) in
        [0, 1, 0x100, 0x1234, 0x8000, u16::MAX].into_iter().flat_map(|id| [0, 5, 64, 4096].map(|len| (id, len)))
    {
        let sent = header(Transport::Rc, Operation::of(false, true, true, false), 7);
        let mut bytes = emit(&route, sent, &vec![0xa5; len]);
        let udp_len = bytes.len() as u16 + 8;
        // IBTA A17.3.3: ones for the fields that routers change, the rest as it is.
        let mut covered = vec![0xff; 8];
        covered.extend([0x45, 0xff]);
        covered.extend((udp_len + 20).to_be_bytes());
        covered.extend(id.to_be_bytes());
        covered.extend([0x40, 0, 0xff, 17, 0xff, 0xff, 192, 0, 2, 1, 192, 0, 2, 2]);
        covered.extend(49_152u16.to_be_bytes());
        covered.extend(4791u16.to_be_bytes());
        covered.extend(udp_len.to_be_bytes());
        covered.extend([0xff, 0xff]);
        covered.extend(&bytes[..bytes.len() - ICRC_LEN]);
        covered[8 + 20 + 8 + Bth::VARIANT_BYTE] = 0xff;
        let crc = crc32fast::hash(&covered).to_le_bytes();
        let at = bytes.len() - ICRC_LEN;
        bytes[at..].copy_from_slice(&crc);
        assert_eq!(Icrc::is_valid(&route, &bytes), id == 0, "{id} {len}");
        assert_eq!(Icrc::identification(&route, &bytes), Some(id), "{id} {len}");
        bytes[at] ^= 1;
        assert_eq!(Icrc::identification(&route, &bytes), None, "{id} {len}");
    }
    assert_eq!(Icrc::identification(&self::route("v6"), &[0; 60]), None);
    assert_eq!(Icrc::identification(&route, &[0; 15]), None);
}

fn header(transport: Transport, operation: Operation, seed: u32) -> Header {
    let bth = Bth {
        opcode: Opcode { transport, operation }.byte(),
        solicited: seed & 1 != 0,
        destination: Qpn::new(seed.wrapping_mul(31)),
        acknowledge: seed & 2 != 0,
        sequence: Sequence::new(seed.wrapping_mul(17)),
        ..Bth::default()
    };
    Header {
        bth,
        deth: (transport == Transport::Ud).then_some(Deth { queue_key: seed, source: Qpn::new(seed) }),
        reth: operation.has_reth().then_some(Reth { address: u64::from(seed) << 20, key: seed, length: seed }),
        aeth: (operation == Operation::Acknowledge)
            .then_some(Aeth { what: Acknowledgement::NotReady(seed as u8 & 0x1f), messages: seed & 0xff_ffff }),
        immediate: operation.has_immediate().then_some(seed),
    }
}

proptest! {
    #[test]
    fn every_packet_is_read_as_it_was_sent(
        byte in prop::sample::select((0..=255u8).filter(|b| Opcode::from_byte(*b).is_some()).collect::<Vec<_>>()),
        seed in any::<u32>(),
        payload in prop::collection::vec(any::<u8>(), 0..300),
        v6 in any::<bool>(),
        flip in any::<(u16, u8)>(),
    ) {
        let opcode = Opcode::from_byte(byte).unwrap();
        let route = route(if v6 { "v6" } else { "v4" });
        let sent = header(opcode.transport, opcode.operation, seed);
        let mut bytes = emit(&route, sent, &payload);
        prop_assert!(Icrc::is_valid(&route, &bytes));
        let packet = Packet::parse(&bytes).unwrap();
        prop_assert_eq!((packet.opcode, packet.payload), (opcode, &payload[..]));
        let pad = packet.header.bth.pad;
        prop_assert_eq!(packet.header, Header { bth: Bth { pad, ..sent.bth }, ..sent });
        // Any bit but those that routers may change.
        let at = usize::from(flip.0) % bytes.len();
        bytes[at] ^= 1 << (flip.1 % 8);
        prop_assert_eq!(Icrc::is_valid(&route, &bytes), at == Bth::VARIANT_BYTE);
        let other = Route { source_port: 1, ..route };
        bytes[at] ^= 1 << (flip.1 % 8);
        prop_assert!(!Icrc::is_valid(&other, &bytes));
    }

    #[test]
    fn cached_starts_match_only_the_same_route_and_length(
        packets in prop::collection::vec((any::<bool>(), 0u16..3, 0usize..20), 1..60),
    ) {
        let mut starts = IcrcStarts::default();
        for (v6, source_port, words) in packets {
            let route = Route { source_port, ..route(if v6 { "v6" } else { "v4" }) };
            let fresh = Icrc::new(&route, 4 * words).finish();
            prop_assert_eq!(starts.begin(&route, 4 * words).finish(), fresh);
        }
    }

    #[test]
    fn any_bytes_are_a_packet_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        if let Ok(packet) = Packet::parse(&bytes) {
            prop_assert!(packet.payload.len() + Bth::LEN + ICRC_LEN <= bytes.len());
        }
        let _ = Icrc::is_valid(&route("v4"), &bytes);
    }
}

fn load() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/vectors/roce.toml");
    let table: Table = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    table["vector"].as_array().unwrap().clone()
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect()
}
