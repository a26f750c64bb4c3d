//! The vectors of `docs/vectors/rdm.toml`: each is parsed, compared with its fields, and emitted again.

#![allow(missing_docs, clippy::unwrap_used)]

use std::path::Path;

use bifrost_wire::rdm::{
    Access, Class, Control, Immediate, LanePhase, MessageId, Number, Numbers, Refusal, SendHeader, SendKind, Setup,
    SetupKind,
};
use proptest::prelude::*;
use toml::{Table, Value};

#[test]
fn every_vector() {
    let mut seen = 0;
    for vector in load("rdm.toml") {
        let name = vector["name"].as_str().unwrap();
        let bytes = hex(vector["hex"].as_str().unwrap());
        let (read, again) = match vector["format"].as_str().unwrap() {
            "send" => {
                let total = bytes.len() + vector["payload_len"].as_integer().unwrap() as usize;
                let read = SendHeader::parse(&bytes, total);
                (read.map(|read| send(&read)), read.map(|read| read.emit().to_vec()))
            }
            "control" => {
                let read = Control::parse(&bytes);
                let mut out = [0; Control::MAX_LEN];
                let again = read.map(|read| out[..read.emit_into(&mut out.clone())].len());
                let again = again.map(|len| {
                    read.unwrap().emit_into(&mut out);
                    out[..len].to_vec()
                });
                (read.map(|read| control(&read)), again)
            }
            "setup" => {
                let read = Setup::parse(&bytes);
                let mut out = [0; Setup::MAX_LEN];
                let again = read.map(|read| read.emit_into(&mut out)).map(|len| out[..len].to_vec());
                (read.map(|read| setup(&read)), again)
            }
            format @ ("write" | "read") => {
                let class = if format == "write" { Class::Write } else { Class::Read };
                let read = Access::parse(class, &bytes);
                (read.map(|read| access(&read.0)), read.map(|read| [&read.0.emit()[..], read.1].concat()))
            }
            "immediate" => {
                let bits = u32::from_be_bytes(bytes[..].try_into().unwrap());
                let read = Immediate::from_bits(bits);
                let base = MessageId(vector["base"].as_integer().unwrap() as u32);
                let fields = format!(
                    "hint = {}\nmessage = {}\noffset = {}\nbase = {}",
                    read.hint,
                    read.message(base).0,
                    read.offset(),
                    base.0
                );
                (Ok(fields), Ok(read.bits().to_be_bytes().to_vec()))
            }
            other => panic!("{other}"),
        };
        if let Some(refused) = vector.get("refused") {
            assert_eq!(read.map_err(Refusal::name), Err(refused.as_str().unwrap()), "{name}");
        } else {
            let mut fields: Table = toml::from_str(&read.unwrap()).unwrap();
            for key in ["name", "format", "hex"] {
                fields.insert(key.to_owned(), vector[key].clone());
            }
            assert_eq!(Value::Table(fields), vector, "{name}");
            assert_eq!(again.unwrap(), bytes, "{name}");
        }
        seen += 1;
    }
    assert!(seen > 40);
}

fn send(header: &SendHeader) -> String {
    let len = if header.kind == SendKind::Announce { 0 } else { header.payload_len() };
    format!(
        "kind = \"{}\"\nhint = {}\nclass = \"{}\"\nmessage = {}\nglobal_number = {}\nlength = {}\noffset = {}\ncall = {}\n\
         payload_len = {len}",
        lower(header.kind),
        header.hint,
        lower(header.class),
        header.message.0,
        header.global,
        header.length,
        header.offset,
        header.call
    )
}

fn access(access: &Access) -> String {
    format!("key = \"{:#018x}\"\noffset = {}\nlength = {}", access.key, access.offset, access.length)
}

fn control(control: &Control) -> String {
    match control {
        Control::Ack(ack) => {
            let numbers = ack.numbers.as_slice().iter().map(|number| match number {
                Number::Send(global) => format!("\"send {global}\""),
                Number::Write(name) => format!("\"write {name:#010x}\""),
            });
            let numbers = numbers.collect::<Vec<_>>().join(", ");
            let held = ack.held_ns.map_or(String::new(), |held| format!("held_ns = {held}\n"));
            format!(
                "kind = \"ack\"\ntag = \"{:#010x}\"\nsequence = {}\nfresh = {}\n{held}base = {}\nlimit = {}\n\
                 numbers = [{numbers}]",
                ack.tag.0, ack.sequence, ack.fresh, ack.base.0, ack.limit.0
            )
        }
        Control::Grant(grant) => format!(
            "kind = \"grant\"\ntag = \"{:#010x}\"\nmessage = {}\naddress = \"{:#018x}\"\nkey = \"{:#010x}\"\nlength = {}",
            grant.tag.0, grant.message.0, grant.address, grant.key, grant.length
        ),
        Control::Probe(tag) => format!("kind = \"probe\"\ntag = \"{:#010x}\"", tag.0),
        Control::Close(close) => {
            format!("kind = \"close\"\ntag = \"{:#010x}\"\nreason = \"{}\"", close.tag.0, lower(close.reason))
        }
        Control::Lane(lane) => format!(
            "kind = \"lane\"\ntag = \"{:#010x}\"\nindex = {}\nphase = \"{}\"\ngeneration = {}\nsequence = {}",
            lane.tag.0,
            lane.index,
            if lane.phase == LanePhase::Request { "request" } else { "response" },
            lane.generation,
            lane.sequence
        ),
    }
}

fn setup(setup: &Setup) -> String {
    let kind = match setup.kind {
        SetupKind::Hello => "hello".to_owned(),
        SetupKind::Welcome => "welcome".to_owned(),
        SetupKind::Refused(reason) => format!("refused {}", lower(reason)),
    };
    let lanes = setup.lanes[..setup.service.lanes()].iter();
    let lanes = lanes.map(|lane| format!("\"{:#08x} {:#08x}\"", lane.queue_pair, lane.sequence));
    let lanes = lanes.collect::<Vec<_>>().join(", ");
    format!(
        "kind = \"{kind}\"\nservice = \"{}\"\naddress = \"{}\"\nport = {}\nmtu = {}\nqueue_pair = {}\n\
         queue_key = \"{:#010x}\"\ntag = \"{:#010x}\"\ncredits = {}\nwindow = {}\nlongest = {}\nlanes = [{lanes}]",
        lower(setup.service),
        setup.address,
        setup.port,
        setup.mtu,
        setup.control,
        setup.queue_key,
        setup.tag.0,
        setup.credits,
        setup.window,
        setup.longest
    )
}

fn lower(value: impl std::fmt::Debug) -> String {
    format!("{value:?}").to_lowercase()
}

proptest! {
    /// Any bytes give a value or a refusal; a value survives emitting and parsing.
    #[test]
    fn a_parsed_value_survives_emitting_and_parsing(
        mut bytes in prop::collection::vec(any::<u8>(), 0..200),
        first in prop::sample::select(vec![0x11u8, 0x12, 0x13, 0x14, 0x15, 0x00]),
        total in 0usize..40_000,
    ) {
        if let Some(byte) = bytes.first_mut().filter(|_| first != 0) {
            *byte = first;
        }
        if let Ok(control) = Control::parse(&bytes) {
            let mut out = [0; Control::MAX_LEN];
            let len = control.emit_into(&mut out);
            prop_assert_eq!(Control::parse(&out[..len]), Ok(control));
        }
        if let Ok(header) = SendHeader::parse(&bytes, total) {
            prop_assert_eq!(SendHeader::parse(&header.emit(), total), Ok(header));
            prop_assert!(header.offset <= header.length && header.payload_len() <= 4096);
        }
        if let Ok(setup) = Setup::parse(&bytes) {
            let mut out = [0; Setup::MAX_LEN];
            let len = setup.emit_into(&mut out);
            prop_assert_eq!(Setup::parse(&out[..len]), Ok(setup));
        }
    }

    /// Numbers that do not fit are left out, and so are all behind them; the others are unchanged.
    #[test]
    fn distant_numbers_are_left_out(globals in prop::collection::vec(0u64..1 << 34, 0..40)) {
        let mut numbers = Numbers::new();
        for (at, global) in globals.iter().enumerate() {
            prop_assert_eq!(numbers.push(Number::Send(*global)), at < 32);
        }
        let ack = bifrost_wire::rdm::Ack {
            tag: bifrost_wire::rdm::Tag(1),
            sequence: 2,
            fresh: numbers.as_slice().len() as u8,
            held_ns: None,
            base: MessageId(3),
            limit: MessageId(4),
            numbers,
        };
        let mut out = [0; Control::MAX_LEN];
        let len = Control::Ack(ack).emit_into(&mut out);
        let Ok(Control::Ack(read)) = Control::parse(&out[..len]) else { panic!("an ACK") };
        let sent = ack.numbers.as_slice();
        let kept = read.numbers.as_slice();
        prop_assert_eq!(kept, &sent[..kept.len()]);
        let least = globals.iter().take(32).min().copied().unwrap_or(0);
        if let Some(Number::Send(left_out)) = sent.get(kept.len()) {
            prop_assert!(left_out - least > u64::from(u32::MAX));
        }
    }
}

fn load(file: &str) -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/vectors").join(file);
    let table: Table = toml::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    table["vector"].as_array().unwrap().clone()
}

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.chars().filter_map(|c| c.to_digit(16)).map(|digit| digit as u8).collect();
    digits.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect()
}
