//! A guest sends its gateway DNS queries that are nearly valid: only that guest gets an answer, which is well-formed
//! and contains nothing about other networks.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_avs::{Action, GATEWAY_MAC, PortId, Switch, Tables, Zone};
use bifrost_nic::{Checksum, Offload, parse, transport_checksum};
use bifrost_wire::protocol::UDP;
use bifrost_wire::{ethernet, ipv4, ipv6, udp};

use super::tables::{mac, plain_tables, vni};
use crate::Input;

const V4: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 254)];
const V6: [Ipv6Addr; 2] = [Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1), Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 254)];
/// Names and addresses of a network that the guest does not belong to.
const SECRET: &[u8] = b"\x06secret";

pub(super) fn run(input: &mut Input<'_>) {
    let count = input.pick(&[1, 3, 100]);
    let mut names: Vec<_> = (0..count).map(|n| ("web".to_owned(), IpAddr::from([10, 0, 0, n]))).collect();
    names.push(("db.web".to_owned(), IpAddr::V6(V6[0])));
    let (domain, subnets) = ("vpc".to_owned(), vec!["10.0.0.0/24".parse().unwrap_or_else(|e| panic!("{e}"))]);
    let zone = Zone { vni: vni(100), domain, names, subnets };
    let secret = Zone { vni: vni(200), domain: "secret".into(), names: vec![], subnets: vec![] };
    let mut tables = Tables { zones: vec![zone], ..plain_tables() };
    let other = tables.vpcs[0].clone();
    tables.vpcs.push(bifrost_avs::Vpc { vni: vni(200), ..other });
    tables.zones.push(secret);
    let mut switch = Switch::build(&tables, 0).unwrap_or_else(|e| panic!("{e}"));
    let mut now_ns = 0;
    while !input.is_empty() {
        now_ns += u64::from(input.u8()) << 20;
        switch.advance(now_ns);
        let (frame, asked) = frame(input);
        let Ok(parsed) = parse(&frame, frame.len()) else { continue };
        // A port may pass less than the whole frame, but never less than the headers.
        let unseen = input.pick(&[0, 0, 0, 1, 40]).min(frame.len() - usize::from(parsed.payload));
        let head = &frame[..frame.len() - unseen];
        match switch.from_guest(PortId(0), head, frame.len(), Offload::default(), &parsed).action {
            Action::Answer { .. } => answered(switch.answer(), parsed.dst_ip, &asked),
            Action::Drop(_) => {}
            Action::Forward { .. } | Action::Deliver { .. } | Action::Host | Action::Copy | Action::Ask { .. } => {
                panic!("the query leaves the host")
            }
        }
    }
}

fn answered(answer: &[u8], gateway: IpAddr, asked: &[u8]) {
    let parsed = parse(answer, answer.len()).unwrap_or_else(|e| panic!("malformed answer: {e}"));
    assert_eq!((parsed.src_mac, parsed.src_ip, parsed.src_port), (GATEWAY_MAC, gateway, 53));
    assert_eq!(parsed.dst_mac, mac(1), "the answer goes to another guest");
    assert_eq!(transport_checksum(answer, &parsed), Checksum::Valid);
    let message = &answer[usize::from(parsed.payload)..];
    assert!(message.len() <= 1232 && message[..2] == asked[..2] && message[2] & 0x80 != 0 && asked[2] & 0x80 == 0);
    if !asked.windows(SECRET.len()).any(|part| part == SECRET) {
        assert!(!message.windows(SECRET.len()).any(|part| part == SECRET), "contains another network's data");
    }
}

/// A query, and the DNS message in it.
fn frame(input: &mut Input<'_>) -> (Vec<u8>, Vec<u8>) {
    let mut message = vec![input.u8(), input.u8(), 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
    let labels: &[&[u8]] = &[b"web", b"DB", b"nobody", b"1", b"0", b"f", b"10"];
    for _ in 0..input.below(6) {
        let label = labels[input.below(labels.len())];
        message.push(label.len() as u8);
        message.extend_from_slice(label);
    }
    let ends: &[&[u8]] = &[b"\x03vpc", b"\x07in-addr\x04arpa", b"\x03ip6\x04arpa", SECRET, b""];
    message.extend_from_slice(ends[input.below(ends.len())]);
    message.extend([0, 0, input.pick(&[1, 28, 12, 255, 6, 65]), 0, 1]);
    if input.chance(128) {
        message[11] = 1;
        message.extend([0, 0, 41]);
        message.extend(input.u16().to_be_bytes());
        message.extend([0, 0, 0, 0, 0, 0]);
    }
    for _ in 0..input.u8() / 100 {
        let at = usize::from(input.u16()) % message.len();
        message[at] = input.u8();
    }
    if input.chance(20) {
        message.truncate(3 + usize::from(input.u16()) % message.len());
    }
    let len = (udp::HEADER_LEN + message.len()) as u16;
    let udp = udp::Header { source_port: input.pick(&[53, 5000]), destination_port: 53, len, checksum: 0 };
    let (ethertype, ip) = if input.chance(128) {
        (ethernet::ethertype::IPV6, ipv6::Header::new(V6[0], V6[1], UDP, len).emit().to_vec())
    } else {
        (ethernet::ethertype::IPV4, ipv4::Header::new(V4[0], V4[1], UDP, len).emit().to_vec())
    };
    let ethernet = ethernet::Header::new(GATEWAY_MAC, mac(1), ethertype);
    ([&ethernet.emit()[..], &ip, &udp.emit(), &message].concat(), message)
}
