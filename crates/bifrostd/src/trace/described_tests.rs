//! Frames built from descriptions of packets, as the parser sees them.

use bifrost_control::api::TraceSpec;
use bifrost_control::described::{frame, question};
use bifrost_nic::parse;
use bifrost_wire::Mac;
use bifrost_wire::protocol::TCP;
use bifrost_wire::tcp::Flags;

fn spec(to: &str) -> TraceSpec {
    TraceSpec { port: Some("a".into()), to: Some(to.parse().unwrap()), ..TraceSpec::default() }
}

#[test]
fn frames_match_their_descriptions() {
    let macs = (Mac([2, 0, 0, 0, 0, 1]), Mac([2, 0, 0, 0, 0, 2]));
    for (from, to) in [("10.0.0.1", "10.0.0.2"), ("fd00::1", "fd00::2")] {
        let (source, destination) = (from.parse().unwrap(), to.parse().unwrap());
        let flags = vec!["syn".to_owned(), "ack".to_owned()];
        let tcp = TraceSpec { tcp: Some((40_000, 6379)), flags, size_bytes: Some(1500), ..spec(to) };
        let bytes = frame(&tcp, source, destination, macs).unwrap();
        let parsed = parse(&bytes, bytes.len()).unwrap();
        assert_eq!(
            (parsed.src_ip, parsed.dst_ip, parsed.src_mac, parsed.dst_mac),
            (source, destination, macs.0, macs.1)
        );
        assert_eq!((parsed.src_port, parsed.dst_port, parsed.protocol, bytes.len()), (40_000, 6379, TCP, 1514));
        assert_eq!(parsed.tcp.unwrap().flags, Flags::SYN.with(Flags::ACK));
        for other in [
            TraceSpec { udp: Some((1, 53)), size_bytes: Some(65_535), ..spec(to) },
            TraceSpec { udp: Some((1, 53)), ..spec(to) },
            TraceSpec { ping: true, ..spec(to) },
        ] {
            let bytes = frame(&other, source, destination, macs).unwrap();
            let parsed = parse(&bytes, bytes.len()).unwrap();
            assert_eq!(parsed.dst_port, other.udp.map_or(0, |_| 53));
        }
        let asked = question(source, destination, macs.0);
        assert_eq!(parse(&asked, asked.len()).unwrap().src_mac, macs.0);
    }
}

#[test]
fn impossible_packets_are_refused() {
    let (from, to) = ("10.0.0.1".parse().unwrap(), "10.0.0.2".parse().unwrap());
    let small = TraceSpec { tcp: Some((1, 2)), size_bytes: Some(39), ..spec("10.0.0.2") };
    assert_eq!(frame(&small, from, to, (Mac::ZERO, Mac::ZERO)).unwrap_err().location, "size_bytes");
    let flag = TraceSpec { tcp: Some((1, 2)), flags: vec!["urgent".into()], ..spec("10.0.0.2") };
    assert_eq!(frame(&flag, from, to, (Mac::ZERO, Mac::ZERO)).unwrap_err().location, "flags");
}
