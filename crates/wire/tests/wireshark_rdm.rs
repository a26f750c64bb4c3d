//! What tshark shows: RoCEv2 by Wireshark's own dissector, messages over RDMA by `packaging/wireshark/bifrost-rdm.lua`.

// Miri cannot run other programs.
#![cfg(not(miri))]
#![allow(missing_docs, clippy::unwrap_used)]

use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use bifrost_wire::ipv6;
use bifrost_wire::roce::{
    Acknowledgement, Aeth, Bth, Deth, Header, ICRC_LEN, Icrc, Nak, Opcode, Operation, Qpn, Reth, Route, Sequence,
    Transport, UDP_PORT,
};
use toml::{Table, Value};

fn route() -> Route {
    let host = |n| IpAddr::V6(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, n));
    Route { source: host(1), destination: host(2), source_port: 50_000, destination_port: UDP_PORT }
}

fn header(transport: Transport, operation: Operation) -> Header {
    let opcode = Opcode { transport, operation }.byte();
    let bth = Bth { opcode, destination: Qpn::new(0x0a_bcde), sequence: Sequence::new(0x12_3456), ..Bth::default() };
    let deth = (transport == Transport::Ud).then_some(Deth { queue_key: 0x1122_3344, source: Qpn::new(0x1_0203) });
    Header { bth, deth, ..Header::default() }
}

/// A packet from IPv6 header to ICRC.
fn packet(mut header: Header, payload: &[u8]) -> Vec<u8> {
    header.bth.pad = (payload.len().wrapping_neg() & 3) as u8;
    let mut head = [0; Header::MAX_LEN];
    let len = header.emit_into(&mut head);
    let mut roce = [&head[..len], payload, &[0; 3][..usize::from(header.bth.pad)]].concat();
    let mut icrc = Icrc::new(&route(), roce.len() + ICRC_LEN);
    icrc.header(&roce);
    roce.extend_from_slice(&icrc.finish());
    let udp_len = 8 + roce.len() as u16;
    let (IpAddr::V6(source), IpAddr::V6(destination)) = (route().source, route().destination) else { panic!() };
    let ip = ipv6::Header {
        traffic_class: 0,
        flow_label: 0,
        payload_len: udp_len,
        next_header: 17,
        hop_limit: 64,
        source,
        destination,
    };
    let mut bytes = ip.emit().to_vec();
    for field in [route().source_port, UDP_PORT, udp_len, 0] {
        bytes.extend_from_slice(&field.to_be_bytes());
    }
    bytes.extend_from_slice(&roce);
    bytes
}

#[test]
fn wireshark_reads_our_rocev2() {
    let write = Header {
        reth: Some(Reth { address: 0x1122_3344_5566_7788, key: 0xdead_beef, length: 5 }),
        immediate: Some(0x8001_0002),
        ..header(Transport::Uc, Operation::WriteOnlyImm)
    };
    let nak = Header {
        aeth: Some(Aeth { what: Acknowledgement::Nak(Nak::RemoteAccess), messages: 7 }),
        ..header(Transport::Rc, Operation::Acknowledge)
    };
    let packets =
        [packet(write, b"12345"), packet(header(Transport::Ud, Operation::SendOnly), &[0; 8]), packet(nak, &[])];
    let fields = [
        "infiniband.bth.opcode",
        "infiniband.bth.destqp",
        "infiniband.bth.psn",
        "infiniband.bth.padcnt",
        "infiniband.reth.va",
        "infiniband.reth.r_key",
        "infiniband.reth.dmalen",
        "infiniband.immdt",
        "infiniband.deth.q_key",
        "infiniband.deth.srcqp",
        "infiniband.aeth.syndrome.error_code",
        "infiniband.aeth.msn",
    ];
    let rows = dissect("roce", &packets, &fields);
    let expected = [
        "43,0x0abcde,1193046,3,0x1122334455667788,0xdeadbeef,5,0x80010002,,,,",
        "100,0x0abcde,1193046,0,,,,,0x11223344,0x010203,,",
        "17,0x0abcde,1193046,0,,,,,,,2,7",
    ];
    for (row, expected) in rows.iter().zip(expected) {
        // Immediate data is shown twice, as hexadecimal digits.
        let once = |value: &String| value.split_once(',').map_or(value.clone(), |(first, _)| format!("0x{first}"));
        let row: Vec<String> = row.iter().map(once).collect();
        let numbers = |text: &str| -> Vec<Option<u64>> {
            let parse = |value: &str| match value.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16).ok(),
                None => value.parse().ok(),
            };
            text.split(',').map(parse).collect()
        };
        assert_eq!(numbers(&row.join(",")), numbers(expected), "{row:?}");
    }
    // The ICRC as Wireshark shows it: the last four bytes, not part of the payload.
    let crc = dissect("icrc", &packets, &["infiniband.invariant.crc"]);
    for (row, packet) in crc.iter().zip(&packets) {
        let last: String = packet[packet.len() - 4..].iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(row[0].trim_start_matches("0x"), last);
    }
}

#[test]
fn every_field_of_every_vector_is_dissected() {
    let path = root().join("docs/vectors/rdm.toml");
    let table: Table = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let of = |format: &str| -> Vec<Value> {
        let all = table["vector"].as_array().unwrap().iter();
        all.filter(|v| v["format"].as_str() == Some(format) && v.get("refused").is_none()).cloned().collect()
    };
    let sends = of("send");
    let packets: Vec<_> = sends
        .iter()
        .map(|vector| {
            let payload = vec![0; vector["payload_len"].as_integer().unwrap() as usize];
            let bytes = [hex(vector["hex"].as_str().unwrap()), payload].concat();
            packet(header(Transport::Uc, Operation::SendOnly), &bytes)
        })
        .collect();
    let keys = ["kind", "hint", "class", "message", "global_number", "length", "offset", "call"];
    let fields =
        ["send", "hint", "class", "message", "global", "length", "offset", "call"].map(|f| format!("bifrost_rdm.{f}"));
    compare("send", &sends, &packets, &keys, &fields);

    let controls = of("control");
    let packets: Vec<_> = controls
        .iter()
        .map(|vector| packet(header(Transport::Ud, Operation::SendOnly), &hex(vector["hex"].as_str().unwrap())))
        .collect();
    let keys = [
        "kind",
        "tag",
        "sequence",
        "fresh",
        "held_ns",
        "base",
        "limit",
        "message",
        "address",
        "key",
        "length",
        "reason",
        "index",
        "phase",
        "generation",
    ];
    let fields = [
        "control",
        "tag",
        "sequence",
        "fresh",
        "held_ns",
        "base",
        "limit",
        "message",
        "address",
        "key",
        "length",
        "reason",
        "lane",
        "phase",
        "generation",
    ]
    .map(|f| format!("bifrost_rdm.{f}"));
    compare("control", &controls, &packets, &keys, &fields);
    let rows = dissect("numbers", &packets, &["bifrost_rdm.acked_send", "bifrost_rdm.acked_write", "bifrost_rdm.psn"]);
    for (vector, row) in controls.iter().zip(&rows) {
        let lane = vector["kind"].as_str() == Some("lane");
        let psn = if lane { vector["sequence"].as_integer().unwrap().to_string() } else { String::new() };
        let list = vector.get("numbers").and_then(Value::as_array).cloned().unwrap_or_default();
        let with = |prefix: &str| -> String {
            let texts = list.iter().filter_map(|number| number.as_str()?.strip_prefix(prefix));
            texts.collect::<Vec<_>>().join(",")
        };
        assert_eq!(row[..], [with("send "), with("write "), psn], "{}", vector["name"]);
    }
}

/// Compares a vector with the fields shown; a field that the vector does not have is not shown.
fn compare(name: &str, vectors: &[Value], packets: &[Vec<u8>], keys: &[&str], fields: &[String]) {
    let fields: Vec<&str> = fields.iter().map(String::as_str).collect();
    let rows = dissect(name, packets, &fields);
    for (vector, row) in vectors.iter().zip(&rows) {
        for (key, shown) in keys.iter().zip(row) {
            let number = |names: &[&str], name: &str| names.iter().position(|n| *n == name).map(|n| n.to_string());
            let expected = match (vector.get(key), *key) {
                // A lane's number is a packet's, and has a separate field.
                (Some(_), "sequence") if vector["kind"].as_str() == Some("lane") => String::new(),
                (None, "held_ns") if vector["kind"].as_str() == Some("ack") => u32::MAX.to_string(),
                (None, _) => String::new(),
                (Some(Value::Boolean(value)), _) => u8::from(*value).to_string(),
                (Some(Value::Integer(value)), _) => value.to_string(),
                (Some(Value::String(text)), "kind") => {
                    let names: &[&str] = if name == "send" {
                        &["", "eager", "repair", "announce"]
                    } else {
                        &["", "ack", "grant", "probe", "close", "lane"]
                    };
                    number(names, text).unwrap()
                }
                (Some(Value::String(text)), "class") => {
                    number(&["message", "request", "response", "failure", "write", "read"], text).unwrap()
                }
                (Some(Value::String(text)), "reason") => number(&["", "done", "protocol", "silence"], text).unwrap(),
                (Some(Value::String(text)), "phase") => number(&["", "request", "response"], text).unwrap(),
                (Some(Value::String(text)), _) => text.clone(),
                other => panic!("{other:?}"),
            };
            assert_eq!(*shown, expected, "{}: {key}", vector["name"]);
        }
    }
}

/// The values of `fields` in each packet, as tshark prints them.
fn dissect(name: &str, packets: &[Vec<u8>], fields: &[&str]) -> Vec<Vec<String>> {
    let file = capture(name, packets);
    let script = root().join("packaging/wireshark/bifrost-rdm.lua");
    let mut command = Command::new("tshark");
    command.args([
        "-n",
        "-X",
        &format!("lua_script:{}", script.display()),
        "-r",
        file.to_str().unwrap(),
        "-T",
        "fields",
    ]);
    command.args(fields.iter().flat_map(|field| ["-e", *field]));
    let output =
        command.stdin(Stdio::null()).output().expect("tshark runs: scripts/install-debian-packages.sh installs it");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let wrong = errors.lines().find(|line| !line.starts_with("Running as user"));
    assert!(output.status.success() && wrong.is_none(), "{errors}");
    let printed = String::from_utf8(output.stdout).unwrap();
    // Releases from 4.2 on print booleans as words.
    let plain = |value: &str| value.replace("True", "1").replace("False", "0");
    let rows: Vec<Vec<String>> = printed.lines().map(|row| row.split('\t').map(plain).collect()).collect();
    assert_eq!(rows.len(), packets.len(), "{printed}");
    rows
}

/// A capture file of IPv6 packets.
fn capture(name: &str, packets: &[Vec<u8>]) -> PathBuf {
    // The classic format, version 2.4, link type IPV6.
    let mut file: Vec<u8> =
        [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 65_535, 229].iter().flat_map(|word| word.to_le_bytes()).collect();
    for packet in packets {
        let len = packet.len() as u32;
        file.extend([0, 0, len, len].iter().flat_map(|word| word.to_le_bytes()));
        file.extend_from_slice(packet);
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("rdm-{name}.pcap"));
    std::fs::write(&path, file).unwrap();
    path
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
