//! More ports and peers than 16 bits can count.
#![allow(clippy::unwrap_used)]

mod common;

use std::net::{IpAddr, Ipv4Addr};

use bifrost_avs::{
    Action, BuildError, DropReason, GroupId, PeerId, Port, PortId, Route, SecurityGroup, Switch, Tables,
};
use bifrost_wire::Mac;
use common::{ends, guest, tables, underlay, vni};

const COUNT: u32 = 70_000;
const LAST: u32 = COUNT - 1;
/// The number whose lower 16 bits are those of the last one.
const TWIN: u32 = LAST - (1 << 16);
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

fn address(net: u8, n: u32) -> IpAddr {
    let [_, a, b, c] = n.to_be_bytes();
    IpAddr::V4(Ipv4Addr::new(net + a, b, c, 1))
}

fn mac(net: u8, n: u32) -> Mac {
    let [_, a, b, c] = n.to_be_bytes();
    Mac([2, net, a, b, c, 1])
}

fn port(n: u32) -> Port {
    Port {
        id: PortId(n),
        vni: vni(100),
        mac: mac(20, n),
        addresses: vec![address(20, n)],
        routed: vec![],
        mtu: 1500,
        groups: vec![GroupId(0)],
        home: None,
    }
}

fn route(n: u32) -> Route {
    Route { vni: vni(100), prefix: address(40, n).into(), peer: PeerId(n), mac: mac(40, n), mtu: 1500 }
}

/// One network with all ports and peers; the twin's port has the last one's address in another network.
fn world() -> Tables {
    let mut tables = tables();
    tables.groups = vec![SecurityGroup::default()];
    tables.ports = (0..COUNT).map(port).collect();
    let twin = &mut tables.ports[TWIN as usize];
    (twin.vni, twin.mac, twin.addresses) = (vni(200), mac(20, LAST), vec![address(20, LAST)]);
    tables.routes = (0..COUNT).map(route).collect();
    tables.routes.push(Route { vni: vni(200), peer: PeerId(TWIN), ..route(LAST) });
    tables
}

fn frame(is_out: bool, flags: u8) -> Vec<u8> {
    let (local, remote) = ((address(20, LAST).to_string(), 5000), (address(40, LAST).to_string(), 80));
    let (local, remote) = ((&*local.0, local.1), (&*remote.0, remote.1));
    if is_out {
        ends::frame((mac(20, LAST), mac(40, LAST)), local, remote, Some(flags))
    } else {
        ends::frame((mac(40, LAST), mac(20, LAST)), remote, local, Some(flags))
    }
}

/// Where a packet of the last port's guest goes.
fn peer_of(switch: &mut Switch, flags: u8) -> Option<u32> {
    match guest(switch, LAST, &frame(true, flags)).action {
        Action::Forward { peer, .. } => Some(peer.0),
        _ => None,
    }
}

#[test]
fn packets_pass_the_last_port_and_the_last_peer() {
    let tables = world();
    let mut switch = Switch::build(&tables, 0).unwrap();
    assert_eq!(peer_of(&mut switch, SYN), Some(LAST));
    // Only the session allows the answer; the port with the same lower bits has none.
    assert_eq!(underlay(&mut switch, 200, TWIN, &frame(false, SYN | ACK)), Err(DropReason::GroupIngress));
    assert_eq!(underlay(&mut switch, 100, LAST, &frame(false, SYN | ACK)), Ok(PortId(LAST)));
    // By flow records from the second packet on. A record belongs to one peer.
    for _ in 0..3 {
        assert_eq!(peer_of(&mut switch, ACK), Some(LAST));
        assert_eq!(underlay(&mut switch, 100, LAST, &frame(false, ACK)), Ok(PortId(LAST)));
        assert_eq!(underlay(&mut switch, 100, TWIN, &frame(false, ACK)), Err(DropReason::WrongPeer));
    }
    // Another process continues the session at the same port.
    let mut bytes = Vec::new();
    switch.carry_memory(&mut bytes);
    let mut next = Switch::build(&tables, 1).unwrap();
    assert_eq!(next.take_over_memory(0, &bytes).unwrap().sessions, 1);
    assert_eq!(underlay(&mut next, 200, TWIN, &frame(false, ACK)), Err(DropReason::GroupIngress));
    assert_eq!(underlay(&mut next, 100, LAST, &frame(false, ACK)), Ok(PortId(LAST)));
}

#[test]
fn numbers_have_limits() {
    let mut tables = tables();
    tables.ports[0].id = PortId(PortId::LIMIT);
    assert_eq!(Switch::build(&tables, 0).err(), Some(BuildError::PortNumber(PortId(PortId::LIMIT))));
    tables.ports[0].id = PortId(PortId::LIMIT - 1);
    tables.routes[2].peer = PeerId(PeerId::LIMIT);
    assert_eq!(Switch::build(&tables, 0).err(), Some(BuildError::PeerNumber(PeerId(PeerId::LIMIT))));
    tables.routes[2].peer = PeerId(PeerId::LIMIT - 1);
    assert!(Switch::build(&tables, 0).is_ok());
}
