#![allow(clippy::unwrap_used)]

use proptest::prelude::*;
use simple_dns::rdata::{OPT, RData};
use simple_dns::{CLASS, Name, Packet, PacketFlag, QTYPE, Question, RCODE, TYPE};

use super::*;

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

fn names() -> Names {
    let name = |name: &str, address| (name.to_owned(), ip(address));
    Names::new(&Zone {
        vni: bifrost_wire::Vni::new(100).unwrap(),
        domain: "vpc1.internal".into(),
        names: vec![
            name("web1", "10.0.0.1"),
            name("web1", "fd00::1"),
            name("Web2", "10.0.0.2"),
            name("a.b", "10.0.0.3"),
            name("..", "10.0.0.4"),
        ],
        subnets: vec!["10.0.0.0/24".parse().unwrap(), "fd00::/64".parse().unwrap()],
    })
}

fn query(name: &str, kind: TYPE, edns: Option<u16>) -> Vec<u8> {
    let mut packet = Packet::new_query(0x1234);
    packet.set_flags(PacketFlag::RECURSION_DESIRED);
    packet.questions.push(Question::new(Name::new_unchecked(name), kind.into(), CLASS::IN.into(), false));
    *packet.opt_mut() = edns.map(|size| OPT { opt_codes: vec![], udp_packet_size: size, version: 0 });
    packet.build_bytes_vec().unwrap()
}

/// The response code and the answers as text.
fn asked(name: &str, kind: TYPE) -> (RCODE, Vec<String>) {
    let reply = answer(&names(), &query(name, kind, None), 1500).unwrap();
    let packet = Packet::parse(&reply).unwrap();
    assert!(packet.has_flags(PacketFlag::RESPONSE | PacketFlag::RECURSION_DESIRED) && packet.id() == 0x1234);
    assert!(!packet.has_flags(PacketFlag::RECURSION_AVAILABLE) && packet.opt().is_none());
    assert_eq!(packet.questions[0].qname.to_string(), name);
    let is_inside = name.to_ascii_lowercase().ends_with("vpc1.internal");
    assert_eq!(packet.has_flags(PacketFlag::AUTHORITATIVE_ANSWER), is_inside);
    // A negative answer has an SOA record, which says how long it may be cached.
    assert_eq!(packet.name_servers.len(), usize::from(is_inside && packet.answers.is_empty()));
    for record in &packet.name_servers {
        assert_eq!(record.name.to_string().to_ascii_lowercase(), "vpc1.internal");
        let RData::SOA(soa) = &record.rdata else { unreachable!("{record:?}") };
        assert_eq!((soa.minimum, soa.rname.to_string().to_ascii_lowercase()), (60, "hostmaster.vpc1.internal".into()));
    }
    let words = packet.answers.iter().map(|record| {
        assert_eq!((record.name.to_string(), record.ttl), (name.to_owned(), 60));
        match &record.rdata {
            RData::A(a) => Ipv4Addr::from(a.address).to_string(),
            RData::AAAA(a) => Ipv6Addr::from(a.address).to_string(),
            RData::PTR(name) => name.0.to_string(),
            other => unreachable!("{other:?}"),
        }
    });
    (packet.rcode(), words.collect())
}

#[test]
fn names_of_the_domain_resolve_and_others_do_not_exist() {
    let told = |words: &[&str]| (RCODE::NoError, words.iter().map(|word| (*word).to_owned()).collect::<Vec<_>>());
    assert_eq!(asked("web1.vpc1.internal", TYPE::A), told(&["10.0.0.1"]));
    assert_eq!(asked("web1.vpc1.internal", TYPE::AAAA), told(&["fd00::1"]));
    assert_eq!(asked("WEB2.Vpc1.internal", TYPE::A), told(&["10.0.0.2"]));
    assert_eq!(asked("a.b.vpc1.internal", TYPE::A), told(&["10.0.0.3"]));
    // Another type, an intermediate name, and the domain itself: the name exists, but has no such records.
    for (name, kind) in [
        ("web1.vpc1.internal", TYPE::MX),
        ("web2.vpc1.internal", TYPE::AAAA),
        ("b.vpc1.internal", TYPE::A),
        ("vpc1.internal", TYPE::A),
    ] {
        assert_eq!(asked(name, kind), told(&[]), "{name}");
    }
    for name in ["web3.vpc1.internal", "x.web1.vpc1.internal"] {
        assert_eq!(asked(name, TYPE::A), (RCODE::NameError, vec![]), "{name}");
    }
    for name in ["example.com", "internal", "xvpc1.internal.com", "web1"] {
        assert_eq!(asked(name, TYPE::A), (RCODE::Refused, vec![]), "{name}");
    }
}

#[test]
fn reverse_lookups_resolve() {
    let told = |name: &str| (RCODE::NoError, vec![name.to_owned()]);
    assert_eq!(asked("2.0.0.10.in-addr.arpa", TYPE::PTR), told("web2.vpc1.internal"));
    let v6 = format!("1.{}0.0.d.f.ip6.arpa", "0.".repeat(27));
    assert_eq!(asked(&v6, TYPE::PTR), told("web1.vpc1.internal"));
    assert_eq!(asked("2.0.0.10.in-addr.arpa", TYPE::A), (RCODE::NoError, vec![]));
    assert_eq!(asked("9.0.0.10.in-addr.arpa", TYPE::PTR), (RCODE::NameError, vec![]));
    for name in ["1.1.1.1.in-addr.arpa", "0.0.10.in-addr.arpa", "01.0.0.10.in-addr.arpa", "x.2.0.0.10.in-addr.arpa"] {
        assert_eq!(asked(name, TYPE::PTR), (RCODE::Refused, vec![]), "{name}");
    }
}

#[test]
fn a_long_response_is_truncated_and_sets_tc() {
    let address = |n: u16| ("many".to_owned(), IpAddr::from([10, 0, (n >> 8) as u8, n as u8]));
    let zone = Zone {
        vni: bifrost_wire::Vni::new(100).unwrap(),
        domain: "d".into(),
        names: (0..200).map(address).collect(),
        subnets: vec![],
    };
    let names = Names::new(&zone);
    for (edns, limit, most, records) in [
        (None, 1500, 512, 30),
        (Some(100), 1500, 512, 29),
        (Some(1000), 1500, 1000, 60),
        (Some(9000), 1500, 1232, 74),
        (Some(9000), 600, 600, 35),
        (Some(9000), 10, 512, 29),
    ] {
        let reply = answer(&names, &query("many.d", TYPE::A, edns), limit).unwrap();
        let packet = Packet::parse(&reply).unwrap();
        assert!(reply.len() <= most && reply.len() + 16 > most, "{edns:?}: {}", reply.len());
        assert_eq!((packet.answers.len(), packet.has_flags(PacketFlag::TRUNCATION)), (records, true), "{edns:?}");
        assert_eq!(packet.opt().map(|opt| opt.udp_packet_size), edns.map(|_| 1232));
    }
}

#[test]
fn messages_that_are_not_queries_are_refused_or_dropped() {
    let good = query("web1.vpc1.internal", TYPE::A, Some(1232));
    let with = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut message = good.clone();
        change(&mut message);
        answer(&names(), &message, 1232).map(|reply| {
            let packet = Packet::parse(&reply).unwrap();
            assert!(packet.answers.is_empty() && packet.id() == 0x1234);
            packet.rcode()
        })
    };
    let end = good.len();
    for (name, change, code) in [
        ("an update", &(|m: &mut Vec<u8>| m[2] |= 5 << 3) as &dyn Fn(&mut Vec<u8>), RCODE::NotImplemented),
        ("no question", &|m| m[5] = 0, RCODE::FormatError),
        ("two", &|m| m[5] = 2, RCODE::FormatError),
        ("with answers", &|m| m[7] = 1, RCODE::FormatError),
        ("more records than there are", &|m| m[10] = 255, RCODE::FormatError),
        ("cut short", &|m| m.truncate(20), RCODE::FormatError),
        ("a name that is a pointer", &|m| m[12] = 0xc0, RCODE::FormatError),
        ("a label that is too long", &|m| m[12] = 64, RCODE::FormatError),
        (
            "two sizes",
            &|m| {
                m[11] = 2;
                m.extend_from_within(end - 11..)
            },
            RCODE::FormatError,
        ),
        ("another class", &|m| m[end - 12] = 3, RCODE::Refused),
    ] {
        assert_eq!(with(change), Ok(code), "{name}");
    }
    // An unsupported EDNS version: the upper bits of the code are in the OPT record (RFC 6891, section 6.1.3), and
    // the response has version 0.
    let mut other = good.clone();
    other[end - 5] = 1;
    let reply = answer(&names(), &other, 1232).unwrap();
    assert_eq!((reply[3] & 15, &reply[reply.len() - 11..]), (0, &[0, 0, 41, 4, 0xd0, 1, 0, 0, 0, 0, 0][..]));
    // An unknown record type.
    let mut unknown = good.clone();
    unknown[end - 15..end - 13].copy_from_slice(&[0xff, 0]);
    let reply = answer(&names(), &unknown, 1232).unwrap();
    assert_eq!((reply[3] & 15, &reply[4..12]), (0, &[0, 1, 0, 0, 0, 1, 0, 1][..]));
    assert_eq!(with(&|m| m[2] |= 0x80), Err(DropReason::DnsMalformed), "an answer");
    assert_eq!(with(&|m| m.truncate(11)), Err(DropReason::DnsMalformed));
    assert_eq!(with(&|m| m.clear()), Err(DropReason::DnsMalformed));
    // A name of 255 bytes is accepted, a longer one is not.
    let long = |last: usize| format!("{0}.{0}.{0}.{1}", "x".repeat(63), "x".repeat(last));
    assert_eq!(asked(&long(61), TYPE::A).0, RCODE::Refused);
    let reply = answer(&names(), &query(&long(62), TYPE::A, None), 512).unwrap();
    assert_eq!(Packet::parse(&reply).unwrap().rcode(), RCODE::FormatError);
}

proptest! {
    /// For any message: no panic, a response that other parsers accept, and none to a response.
    #[test]
    fn any_message_gets_a_readable_response_or_none(
        at in proptest::collection::vec((any::<usize>(), any::<u8>()), 0..6),
        name in "[a-zA-Z0-9.]{0,40}(vpc1.internal|in-addr.arpa|ip6.arpa)",
        kind in any::<u16>(),
        cut in 0usize..200,
        limit in 0usize..2000,
    ) {
        let mut message = query(&name, TYPE::A, Some(limit as u16));
        let len = message.len();
        message[len - 15..len - 13].copy_from_slice(&kind.to_be_bytes());
        for (at, byte) in at {
            message[at % len] = byte;
        }
        message.truncate(cut.max(100));
        if let Ok(reply) = answer(&names(), &message, limit) {
            prop_assert!(message[2] & 0x80 == 0 && reply.len() <= limit.clamp(512, 1232));
            prop_assert_eq!(&reply[..2], &message[..2]);
            prop_assert_eq!(reply[2] & 0x80, 0x80);
            let knows = matches!(QTYPE::try_from(kind), Ok(QTYPE::TYPE(_) | QTYPE::ANY));
            if reply.len() > 12 && knows && Packet::parse(&message).is_ok() {
                let packet = Packet::parse(&reply);
                prop_assert!(packet.is_ok(), "{:?}", packet);
            }
        }
    }
}
