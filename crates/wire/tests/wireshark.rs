//! The Wireshark dissector against the test vectors: `tshark` must show what each vector says.

// Miri cannot run other programs.
#![cfg(not(miri))]
#![allow(missing_docs, clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use toml::Value;

/// A vector's key, and the dissector's field.
const FIELDS: [(&str, &str); 33] = [
    ("type", "bifrost.type"),
    ("version", "bifrost.version"),
    ("cc", "bifrost.cc"),
    ("se", "bifrost.se"),
    ("ack", "bifrost.ack"),
    ("dir", "bifrost.dir"),
    ("ece", "bifrost.ece"),
    ("ret", "bifrost.ret"),
    ("path", "bifrost.path"),
    ("distance", "bifrost.distance"),
    ("psn", "bifrost.psn"),
    ("cid", "bifrost.cid"),
    ("timestamp", "bifrost.timestamp"),
    ("hops", "bifrost.hops"),
    ("ack_type", "bifrost.ack_type"),
    ("timestamp_value", "bifrost.timestamp"),
    ("timestamp_echo", "bifrost.echo"),
    ("timestamp_nic_rx", "bifrost.nic_rx"),
    ("num_ack", "bifrost.num_ack"),
    ("num_ece", "bifrost.num_ece"),
    ("psn_base", "bifrost.psn_base"),
    ("bitmap", "bifrost.bitmap.word"),
    ("thread", "bifrost.thread"),
    ("oldest", "bifrost.oldest"),
    ("reason", "bifrost.reason"),
    ("local_cid", "bifrost.local_cid"),
    ("destination_cid", "bifrost.cid"),
    ("to", "bifrost.to"),
    ("from", "bifrost.from"),
    ("instance", "bifrost.instance"),
    ("generation", "bifrost.generation"),
    ("window", "bifrost.window"),
    ("ack_delay_us", "bifrost.ack_delay_us"),
];

#[test]
fn every_field_of_every_vector_is_dissected() {
    let files = ["data.toml", "ack.toml", "setup.toml", "reset.toml"];
    let vectors: Vec<Value> = files.iter().flat_map(|file| load(file)).collect();
    // After the vectors' own fields: the dissector's fields for the whole packet, and Wireshark's for the inner frame.
    let mut fields =
        vec!["bifrost.refusal", "bifrost.vni", "eth.dst", "eth.src", "bifrost.bitmap.psn", "bifrost.previous"];
    let others = fields.len();
    fields.extend(FIELDS.iter().map(|(_, field)| *field));
    // Two keys may have the same field, which tshark prints once.
    fields[others..].sort_unstable();
    fields.dedup();
    let rows = dissect("fields", &vectors, &fields);
    for (vector, row) in vectors.iter().zip(&rows) {
        let name = vector["name"].as_str().unwrap();
        let mut compared = 0;
        let shown = |field: &str| &row[fields.iter().position(|f| *f == field).unwrap()];
        for (key, field) in FIELDS {
            if let Some(expected) = vector.get(key) {
                assert_eq!(*shown(field), text(key, expected), "{name}: {field}");
                compared += 1;
            }
        }
        let others =
            ["name", "hex", "emits", "frame", "unknown_cid"].iter().filter(|k| vector.get(k).is_some()).count();
        assert_eq!(compared + others, vector.as_table().unwrap().len(), "{name}: a key without a field");
        let [refusal, vni, dst, src, set, previous, ..] = &row[..] else { panic!("{row:?}") };
        assert_eq!((refusal.as_str(), vni.as_str()), ("", "100"), "{name}");
        let frame = vector.get("frame").map(|frame| frame.as_str().unwrap()).filter(|frame| !frame.is_empty());
        let mac = |at: usize| frame.map_or(String::new(), |frame| mac(&frame[2 * at..2 * at + 12]));
        assert_eq!((dst, src), (&mac(0), &mac(6)), "{name}: the inner frame");
        assert_eq!(*set, set_bits(vector), "{name}: PSNs that the bitmap stands for");
        let distance = vector.get("distance").and_then(Value::as_integer).filter(|distance| *distance > 0);
        let psn = |distance: i64| (vector["psn"].as_integer().unwrap() - distance).to_string();
        assert_eq!(*previous, distance.map_or(String::new(), psn), "{name}: the previous packet of the flow");
        if let Some(unknown) = vector.get("unknown_cid") {
            assert_eq!(shown("bifrost.local_cid"), unknown.as_str().unwrap(), "{name}");
        }
    }
}

#[test]
fn each_packet_of_a_bundle_is_dissected() {
    let vectors = load("bundle.toml");
    let fields = ["bifrost.type", "bifrost.length", "bifrost.psn", "eth.dst", "bifrost.refusal", "_ws.lua.error"];
    let rows = dissect("bundles", &vectors, &fields);
    for (vector, row) in vectors.iter().zip(&rows) {
        let packets: Vec<String> = vector["packets"].as_array().unwrap().iter().map(digits).collect();
        let byte = |packet: &str, at: usize| u32::from_str_radix(&packet[2 * at..2 * at + 2], 16).unwrap();
        let psn = |packet: &String| u32::from_str_radix(&packet[8..16], 16).unwrap().to_string();
        let list = |of: &dyn Fn(&String) -> String| packets.iter().map(of).collect::<Vec<_>>().join(",");
        let frames = packets.iter().filter(|packet| byte(packet, 0) == 1);
        let to: Vec<String> = frames.map(|packet| mac(&packet[32..44])).collect();
        let expected = [
            format!("8,{}", list(&|packet| byte(packet, 0).to_string())),
            list(&|packet| (packet.len() / 2).to_string()),
            list(&psn),
            to.join(","),
            String::new(),
            String::new(),
        ];
        assert_eq!(row[..], expected, "{}", vector["name"]);
    }
}

#[test]
fn refused_packets_are_marked_with_the_reason() {
    let vectors = load("refused.toml");
    let rows = dissect("refused", &vectors, &["bifrost.refusal", "_ws.expert.severity", "_ws.lua.error"]);
    for (vector, row) in vectors.iter().zip(&rows) {
        let name = &vector["name"];
        assert_eq!(row[0], vector["reason"].as_str().unwrap(), "{name}");
        assert!(!row[1].is_empty(), "{name} is not marked");
        assert_eq!(row[2], "", "{name}");
    }
}

#[test]
fn packets_are_found_by_their_number() {
    let vectors = load("data.toml");
    let file = capture("filter", &vectors);
    let found = run(&["-r", file.to_str().unwrap(), "-Y", "bifrost.psn == 7 && bifrost.type == 1"]);
    let expected = vectors.iter().filter(|v| v["psn"].as_integer() == Some(7)).count();
    assert!(expected > 0);
    assert_eq!(found.lines().count(), expected, "{found}");
}

/// A value as tshark prints it.
fn text(key: &str, value: &Value) -> String {
    let number = |names: &[&str], name: &str| names.iter().position(|n| *n == name).unwrap().to_string();
    match (key, value) {
        ("type", Value::String(name)) => {
            let name = if name == "PROBE" { "DATA" } else { name };
            number(&["", "DATA", "ACK", "REQUEST", "RESPONSE", "REJECT", "RESET", "SKIP", "BUNDLE"], name)
        }
        ("ack_type", Value::String(name)) => number(&["cumulative", "selective", "rate_limited", "not_taken"], name),
        ("reason", Value::String(name)) => number(&["", "version", "unknown_vnic", "resources", "policy"], name),
        (_, Value::String(text)) => text.clone(),
        (_, Value::Boolean(value)) => u8::from(*value).to_string(),
        (_, Value::Integer(number)) => number.to_string(),
        (_, Value::Array(items)) => items.iter().map(|item| item.as_str().unwrap()).collect::<Vec<_>>().join(","),
        other => panic!("{other:?}"),
    }
}

/// The PSNs of the bits that are set in an ACK's bitmap (PROTOCOL §3.3).
fn set_bits(vector: &Value) -> String {
    let Some(Value::Array(words)) = vector.get("bitmap") else { return String::new() };
    let base = vector["psn_base"].as_integer().unwrap() as u32;
    let words = words.iter().map(|w| u32::from_str_radix(&w.as_str().unwrap()[2..], 16).unwrap());
    let bits = words.enumerate().flat_map(|(w, word)| {
        (0..32).filter(move |bit| word & (1 << (31 - bit)) != 0).map(move |bit| w as u32 * 32 + bit)
    });
    bits.map(|bit| base.wrapping_add(bit).to_string()).collect::<Vec<_>>().join(",")
}

fn mac(hex: &str) -> String {
    (0..6).map(|i| hex[2 * i..2 * i + 2].to_string()).collect::<Vec<_>>().join(":")
}

/// The values of `fields` in each packet, as tshark prints them.
fn dissect(name: &str, vectors: &[Value], fields: &[&str]) -> Vec<Vec<String>> {
    let file = capture(name, vectors);
    let mut args = vec!["-r", file.to_str().unwrap(), "-T", "fields"];
    args.extend(fields.iter().flat_map(|field| ["-e", *field]));
    let printed = run(&args);
    // Releases from 4.2 on print booleans as words.
    let plain = |value: &str| match value {
        "True" => "1".to_string(),
        "False" => "0".to_string(),
        value => value.to_string(),
    };
    let rows: Vec<Vec<String>> = printed.lines().map(|row| row.split('\t').map(plain).collect()).collect();
    assert_eq!(rows.len(), vectors.len(), "{printed}");
    rows
}

fn run(args: &[&str]) -> String {
    let script = root().join("packaging/wireshark/bifrost.lua");
    let output = Command::new("tshark")
        .arg("-n")
        .args(["-X", &format!("lua_script:{}", script.display())])
        .args(args)
        .stdin(Stdio::null())
        .output()
        .expect("tshark runs: scripts/install-debian-packages.sh installs it");
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let wrong = errors.lines().find(|line| !line.starts_with("Running as user"));
    assert!(output.status.success() && wrong.is_none(), "{errors}");
    String::from_utf8(output.stdout).unwrap()
}

/// The vectors as a capture file: each behind IPv4, UDP and VXLAN headers.
fn capture(name: &str, vectors: &[Value]) -> PathBuf {
    // The classic format, version 2.4, link type IPV4.
    let mut file: Vec<u8> =
        [0xa1b2_c3d4u32, 0x0004_0002, 0, 0, 65_535, 228].iter().flat_map(|w| w.to_le_bytes()).collect();
    for vector in vectors {
        let packet = [&[8, 0, 0, 0, 0, 0, 100, 0], &hex(vector["hex"].as_str().unwrap())[..]].concat();
        let mut datagram = vec![0x45, 0];
        datagram.extend_from_slice(&(28 + packet.len() as u16).to_be_bytes());
        datagram.extend_from_slice(&[0, 0, 0x40, 0, 64, 17, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2]);
        for field in [49_152, bifrost_wire::bifrost::UDP_PORT, 8 + packet.len() as u16, 0] {
            datagram.extend_from_slice(&field.to_be_bytes());
        }
        datagram.extend_from_slice(&packet);
        let len = datagram.len() as u32;
        file.extend([0, 0, len, len].iter().flat_map(|word| word.to_le_bytes()));
        file.extend_from_slice(&datagram);
    }
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("vectors-{name}.pcap"));
    std::fs::write(&path, file).unwrap();
    path
}

fn load(file: &str) -> Vec<Value> {
    let path = root().join("docs/vectors").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let table: toml::Table = toml::from_str(&text).unwrap();
    table["vector"].as_array().unwrap().clone()
}

fn digits(packet: &Value) -> String {
    packet.as_str().unwrap().split_whitespace().collect()
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
