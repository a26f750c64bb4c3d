//! The hex test vectors of `docs/vectors`: parse, compare every field, emit again.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use bifrost_wire::Mac;
use bifrost_wire::bifrost::{
    AckHeader, AckKind, Bitmap, Cid, DataHeader, Packet, PathId, Psn, Refusal, RejectReason, Reset, Setup, SetupKind,
    Tick, Version, bundle, parse,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;

#[test]
fn data_vectors() {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Vector {
        #[serde(flatten)]
        common: Common,
        r#type: String,
        version: u8,
        cc: u8,
        se: bool,
        ack: bool,
        dir: bool,
        ece: bool,
        ret: bool,
        path: u8,
        distance: u8,
        psn: u32,
        cid: String,
        timestamp: u32,
        #[serde(default)]
        frame: String,
    }
    for v in load::<Vector>("data.toml") {
        let header = DataHeader {
            version: Version::try_from(v.version).unwrap(),
            cc: v.cc,
            probe: v.se,
            ack_now: v.ack,
            from_responder: v.dir,
            ecn: v.ece,
            retransmit: v.ret,
            path: PathId::new(v.path).unwrap(),
            distance: v.distance,
            psn: Psn(v.psn),
            cid: cid(&v.cid),
            timestamp: Tick(v.timestamp),
        };
        let frame = hex(&v.frame);
        let (expected, emitted) = match v.r#type.as_str() {
            "DATA" => (Packet::Data(header, &frame), [&header.emit()[..], &frame].concat()),
            "PROBE" => (Packet::Probe(header), header.emit().to_vec()),
            "SKIP" => (Packet::Skip(header), header.emit_skip().to_vec()),
            other => panic!("{other}"),
        };
        v.common.check(expected, &emitted);
    }
}

#[test]
fn ack_vectors() {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Vector {
        #[serde(flatten)]
        common: Common,
        r#type: String,
        version: u8,
        cc: u8,
        se: bool,
        path: u8,
        hops: u8,
        ack_type: String,
        psn: u32,
        cid: String,
        timestamp_value: u32,
        timestamp_echo: u32,
        timestamp_nic_rx: u32,
        num_ack: u16,
        num_ece: u16,
        psn_base: u32,
        bitmap: Vec<String>,
    }
    for v in load::<Vector>("ack.toml") {
        assert_eq!(v.r#type, "ACK");
        let words: Vec<u32> = v.bitmap.iter().map(|word| number(word)).collect();
        let ack = AckHeader {
            version: Version::try_from(v.version).unwrap(),
            cc: v.cc,
            probe: v.se,
            path: PathId::new(v.path).unwrap(),
            hops: v.hops,
            kind: match v.ack_type.as_str() {
                "cumulative" => AckKind::Cumulative,
                "selective" => AckKind::Selective,
                "rate_limited" => AckKind::RateLimited,
                "not_taken" => AckKind::NotTaken,
                other => panic!("{other}"),
            },
            psn: Psn(v.psn),
            cid: cid(&v.cid),
            sent: Tick(v.timestamp_value),
            echo: Tick(v.timestamp_echo),
            nic_rx: Tick(v.timestamp_nic_rx),
            num_ack: v.num_ack,
            num_ece: v.num_ece,
            base: Psn(v.psn_base),
            bitmap: Bitmap::from_words(&words).unwrap(),
        };
        let mut emitted = vec![];
        ack.emit(&mut emitted);
        assert_eq!(emitted.len(), ack.len());
        v.common.check(Packet::Ack(ack), &emitted);
    }
}

#[test]
fn setup_vectors() {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Vector {
        #[serde(flatten)]
        common: Common,
        r#type: String,
        version: u8,
        cc: u8,
        thread: u8,
        oldest: Option<u8>,
        reason: Option<String>,
        local_cid: String,
        destination_cid: String,
        to: String,
        from: String,
        instance: String,
        generation: u32,
        window: u16,
        ack_delay_us: u16,
    }
    for v in load::<Vector>("setup.toml") {
        let kind = match (v.r#type.as_str(), v.oldest, v.reason.as_deref()) {
            ("REQUEST", Some(oldest), None) => SetupKind::Request { oldest },
            ("RESPONSE", None, None) => SetupKind::Response,
            ("REJECT", None, Some(reason)) => SetupKind::Reject(
                (1..=4).map(|n| RejectReason::try_from(n).unwrap()).find(|r| r.name() == reason).unwrap(),
            ),
            other => panic!("{other:?}"),
        };
        let setup = Setup {
            kind,
            version: v.version,
            cc: v.cc,
            worker: v.thread,
            local: cid(&v.local_cid),
            destination: cid(&v.destination_cid),
            to: v.to.parse::<Mac>().unwrap(),
            from: v.from.parse::<Mac>().unwrap(),
            instance: v.instance.parse().unwrap(),
            generation: v.generation,
            window: v.window,
            ack_delay_us: v.ack_delay_us,
        };
        v.common.check(Packet::Setup(setup), &setup.emit());
    }
}

#[test]
fn reset_vectors() {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Vector {
        #[serde(flatten)]
        common: Common,
        r#type: String,
        unknown_cid: String,
    }
    for v in load::<Vector>("reset.toml") {
        assert_eq!(v.r#type, "RESET");
        let reset = Reset { unknown: cid(&v.unknown_cid) };
        v.common.check(Packet::Reset(reset), &reset.emit());
    }
}

#[test]
fn bundle_vectors() {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Vector {
        name: String,
        hex: String,
        emits: Option<String>,
        r#type: String,
        cid: String,
        packets: Vec<String>,
    }
    for v in load::<Vector>("bundle.toml") {
        assert_eq!(v.r#type, "BUNDLE");
        let (bytes, packets) = (hex(&v.hex), v.packets.iter().map(|packet| hex(packet)).collect::<Vec<_>>());
        let Ok(Packet::Bundle(found)) = parse(&bytes) else { panic!("{}: {:?}", v.name, parse(&bytes)) };
        assert_eq!(found.cid, cid(&v.cid), "{}", v.name);
        assert!(found.packets().eq(packets.iter().map(Vec::as_slice)), "{}", v.name);
        assert!(packets.iter().all(|packet| parse(packet).is_ok()), "{}", v.name);
        let mut emitted = packets[0].clone();
        bundle::begin(&mut emitted, 0);
        packets[1..].iter().for_each(|packet| bundle::append(&mut emitted, |out| out.extend_from_slice(packet)));
        assert_eq!(emitted, v.emits.as_deref().map_or_else(|| bytes.clone(), hex), "{}", v.name);
        // A truncated bundle is refused as a whole, unless it ends at a packet boundary.
        for len in 0..bytes.len() {
            let Ok(Packet::Bundle(rest)) = parse(&bytes[..len]) else { continue };
            let rest: Vec<_> = rest.packets().collect();
            assert!(rest.len() < packets.len() && packets.iter().zip(&rest).all(|(a, b)| a == b), "{}: {len}", v.name);
        }
    }
}

#[test]
fn refused_vectors() {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Vector {
        name: String,
        reason: String,
        hex: String,
    }
    let mut seen = [false; Refusal::ALL.len()];
    for v in load::<Vector>("refused.toml") {
        let refusal = parse(&hex(&v.hex)).expect_err(&v.name);
        assert_eq!(refusal.name(), v.reason, "{}", v.name);
        seen[refusal.index()] = true;
    }
    for reason in Refusal::ALL {
        assert!(seen[reason.index()], "no vector is refused for {reason:?}");
    }
}

/// What every vector has.
#[derive(Deserialize)]
struct Common {
    name: String,
    hex: String,
    emits: Option<String>,
}

impl Common {
    fn check(&self, expected: Packet<'_>, emitted: &[u8]) {
        let bytes = hex(&self.hex);
        assert_eq!(parse(&bytes), Ok(expected), "{}", self.name);
        let canonical = self.emits.as_deref().map_or_else(|| bytes.clone(), hex);
        assert_eq!(emitted, canonical, "{}", self.name);
        assert_eq!(parse(&canonical), Ok(expected), "{}", self.name);
        // Every truncation of a packet of fixed size is refused; a DATA packet may lose the end of its frame.
        for len in 0..bytes.len() {
            match parse(&bytes[..len]) {
                Err(_) => {}
                Ok(Packet::Data(header, frame)) => {
                    assert!(matches!(expected, Packet::Data(whole, _) if whole == header), "{}", self.name);
                    assert_eq!(frame, &bytes[16..len], "{}", self.name);
                }
                Ok(other) => panic!("{}: {len} bytes returned {other:?}", self.name),
            }
        }
    }
}

fn load<T: DeserializeOwned>(file: &str) -> Vec<T> {
    #[derive(Deserialize)]
    struct File<T> {
        vector: Vec<T>,
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/vectors").join(file);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let file: File<T> = toml::from_str(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(!file.vector.is_empty(), "{}", path.display());
    file.vector
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter(|c| !c.is_whitespace()).map(|c| c.to_digit(16).unwrap() as u8).collect();
    assert!(digits.len().is_multiple_of(2), "{text}");
    digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect()
}

fn number(text: &str) -> u32 {
    u32::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap()
}

fn cid(text: &str) -> Cid {
    Cid(number(text))
}
