//! A guest sends DHCP requests that are nearly valid: it gets its own address or none, and no other guest receives the
//! request.

use std::net::{IpAddr, Ipv4Addr};

use bifrost_avs::{Action, GATEWAY_MAC, Lease, PortId, Switch, Tables};
use bifrost_nic::{Checksum, Offload, parse, transport_checksum};
use bifrost_wire::protocol::UDP;
use bifrost_wire::{ethernet, ipv4, udp};

use super::tables::{mac, plain_tables};
use crate::Input;

const ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 254);

pub(super) fn run(input: &mut Input<'_>) {
    let dns = vec![GATEWAY; input.below(Lease::MAX_DNS + 2)];
    let domain = input.chance(100).then(|| "d".repeat(usize::from(input.u8())));
    let (prefix_len, mtu) = (input.below(34) as u8, input.u16());
    let lease = Lease {
        port: PortId(0),
        address: ADDRESS,
        prefix_len,
        gateway: GATEWAY,
        dns,
        domain,
        mtu,
        seconds: input.u32(),
    };
    let tables = Tables { leases: vec![lease], ..plain_tables() };
    let mut switch = Switch::build(&tables, 0).unwrap_or_else(|e| panic!("{e}"));
    let mut now_ns = 0;
    while !input.is_empty() {
        now_ns += u64::from(input.u8()) << 20;
        switch.advance(now_ns);
        let frame = frame(input);
        let Ok(parsed) = parse(&frame, frame.len()) else { continue };
        // A port may pass less than the whole frame, but never less than the headers.
        let unseen = input.pick(&[0, 0, 0, 1, 40]).min(frame.len() - usize::from(parsed.payload));
        let head = &frame[..frame.len() - unseen];
        let action = switch.from_guest(PortId(0), head, frame.len(), Offload::default(), &parsed).action;
        match action {
            Action::Answer { .. } if (parsed.src_port, parsed.dst_port) == (68, 67) => answered(switch.answer()),
            Action::Answer { .. } | Action::Host | Action::Copy | Action::Ask { .. } | Action::Drop(_) => {}
            Action::Forward { .. } | Action::Deliver { .. } => {
                assert!(!parsed.dst_mac.is_multicast(), "other guests receive the request");
            }
        }
    }
}

fn answered(answer: &[u8]) {
    let parsed = parse(answer, answer.len()).unwrap_or_else(|e| panic!("malformed answer: {e}"));
    assert_eq!((parsed.src_mac, parsed.src_ip), (GATEWAY_MAC, IpAddr::V4(GATEWAY)));
    assert!(parsed.dst_mac == mac(1) || parsed.dst_mac.is_broadcast(), "the answer goes to another guest");
    assert_eq!(transport_checksum(answer, &parsed), Checksum::Valid);
    assert!(answer.len() <= 14 + 576, "larger than a client must accept");
    let message = &answer[usize::from(parsed.payload)..];
    assert_eq!((message[0], &message[28..34]), (2, &mac(1).0[..]));
    let told: [u8; 4] = std::array::from_fn(|n| message[16 + n]);
    assert!([Ipv4Addr::UNSPECIFIED, ADDRESS].contains(&told.into()), "another guest's address");
}

fn frame(input: &mut Input<'_>) -> Vec<u8> {
    let mut message = vec![0; 240];
    message[..3].copy_from_slice(&[1, 1, 6]);
    message[10] = input.pick(&[0, 0x80]);
    message[12..16].copy_from_slice(&input.pick(&[[0; 4], [10, 0, 0, 1], [10, 0, 0, 2]]));
    message[28..34].copy_from_slice(&mac(1).0);
    message[236..240].copy_from_slice(&[99, 130, 83, 99]);
    message.extend([53, 1, input.u8() % 10]);
    for _ in 0..input.below(5) {
        let len = input.pick(&[4, 4, 1, 12, 255]);
        let data = input.bytes(len).to_vec();
        message.extend([input.pick(&[50, 54, 55, 61, 53, 0, 255, 57]), data.len() as u8]);
        message.extend(match input.below(4) {
            0 if data.len() == 4 => ADDRESS.octets().to_vec(),
            1 if data.len() == 4 => GATEWAY.octets().to_vec(),
            _ => data,
        });
    }
    if input.chance(200) {
        message.push(255);
    }
    for _ in 0..input.u8() / 100 {
        let at = usize::from(input.u16()) % message.len();
        message[at] = input.u8();
    }
    if input.chance(20) {
        message.truncate(usize::from(input.u16()) % message.len());
    }
    let broadcast = input.chance(160);
    let len = (udp::HEADER_LEN + message.len()) as u16;
    let ip = {
        let (source, destination) =
            if broadcast { (Ipv4Addr::UNSPECIFIED, Ipv4Addr::BROADCAST) } else { (ADDRESS, GATEWAY) };
        ipv4::Header::new(source, destination, UDP, len)
    };
    let ports = (input.pick(&[68, 68, 68, 69]), input.pick(&[67, 67, 67, 69]));
    let udp = udp::Header { source_port: ports.0, destination_port: ports.1, len, checksum: 0 };
    let to = if broadcast { bifrost_wire::Mac::BROADCAST } else { GATEWAY_MAC };
    let ethernet = ethernet::Header::new(to, mac(1), ethernet::ethertype::IPV4);
    [&ethernet.emit()[..], &ip.emit(), &udp.emit(), &message].concat()
}
