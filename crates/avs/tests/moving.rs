//! Connections through load balancers and port forwards go with a guest to another host.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::net::IpAddr;

use bifrost_avs::{
    Affinity, Backend, DropReason, GATEWAY_MAC, LoadBalancer, PeerId, PortId, Switch, Tables, Transport, WorkerId,
    Workers, read_moving_sessions, write_moving_sessions,
};
use common::any::{SECOND, SYN};
use common::ends::*;
use common::outside::*;
use common::*;

const ACK: u8 = 0x10;
const VIP: &str = "10.0.0.100";
/// The guest's port on the first and on the second host.
const BEFORE: u32 = 0;
const AFTER: u32 = 9;

fn switch_at(tables: &Tables, secret: u64, now_s: u64) -> Switch {
    let mut switch = Switch::build(tables, secret).unwrap();
    switch.advance(now_s * SECOND);
    switch
}

/// The conversations of a port in the format between hosts.
fn leaving(switch: &Switch, port: u32) -> Vec<u8> {
    let all = (0..switch.moving_places()).filter_map(|place| switch.moving_session_at(PortId(port), place));
    write_moving_sessions(all.collect())
}

/// Takes over all of them; returns the numbers of those taken over and of those left out.
fn arriving(switch: &mut Switch, port: u32, bytes: &[u8]) -> (usize, usize) {
    let (all, unreadable) = read_moving_sessions(bytes).unwrap();
    let taken = all.iter().filter(|moving| switch.take_over_session(PortId(port), moving)).count();
    (taken, all.len() - taken + unreadable as usize)
}

/// The guest is behind another port of another host.
fn there(mut tables: Tables) -> Tables {
    tables.ports[0].id = PortId(AFTER);
    tables
}

/// Load balancers; the first backend takes new connections with weight `first`, the second one with `second`.
fn balanced(others: u16, first: u16, second: u16) -> Tables {
    let backend = |address, weight| Backend { address: ip(address), port: 8080, weight };
    let balancer = |port, backends| LoadBalancer {
        vni: vni(100),
        address: ip(VIP),
        port,
        protocol: Transport::Tcp,
        affinity: Affinity::Connection,
        backends,
    };
    let mut load_balancers: Vec<_> = (0..others).map(|n| balancer(1000 + n, vec![backend("10.1.0.9", 1)])).collect();
    load_balancers.push(balancer(80, vec![backend("10.0.0.3", first), backend("10.1.0.9", second)]));
    Tables { load_balancers, ..tables() }
}

/// The backend that gets a packet of the guest.
fn backend(switch: &mut Switch, port: u32, from: u16, flags: u8) -> Result<(IpAddr, u16), DropReason> {
    let sent = frame((mac(1), GATEWAY_MAC), ("10.0.0.1", from), (VIP, 80), Some(flags));
    let verdict = guest(switch, port, &sent);
    match verdict.drop_reason() {
        Some(reason) => Err(reason),
        None => Ok(ends(&rewritten(&sent, &verdict)).1),
    }
}

/// The source of a backend's reply as the guest sees it.
fn reply(switch: &mut Switch, from: u16) -> (IpAddr, u16) {
    let sent = frame((mac(3), mac(1)), ("10.0.0.3", 8080), ("10.0.0.1", from), Some(SYN | ACK));
    let verdict = *switch.from_underlay(vni(100), PeerId(1), &sent, &read(&sent));
    assert!(verdict.passes(), "{verdict:?}");
    if verdict.rewrite.is_none() { ends(&sent).0 } else { ends(&rewritten(&sent, &verdict)).0 }
}

#[test]
fn connections_stay_at_their_backend() {
    let mut first = switch_at(&balanced(0, 1, 0), 1, 5000);
    let one = at("10.0.0.3", 8080);
    for from in 1..=20 {
        assert_eq!(backend(&mut first, BEFORE, from, SYN), Ok(one));
        assert_eq!(reply(&mut first, from), at(VIP, 80));
        assert_eq!(backend(&mut first, BEFORE, from, ACK), Ok(one));
    }
    let bytes = leaving(&first, BEFORE);
    // The load balancer has another number, and gives new connections to another backend.
    let tables = there(balanced(3, 0, 1));
    let mut second = switch_at(&tables, 2, 300);
    assert_eq!(arriving(&mut second, AFTER, &bytes), (20, 0));
    assert_eq!(arriving(&mut second, AFTER, &bytes), (0, 20), "they are there");
    for from in 1..=20 {
        assert_eq!(reply(&mut second, from), at(VIP, 80));
        assert_eq!(backend(&mut second, AFTER, from, ACK), Ok(one));
    }
    assert_eq!(backend(&mut second, AFTER, 21, SYN), Ok(at("10.1.0.9", 8080)));
    // Without them, the other backend would get the packets.
    assert_eq!(backend(&mut switch_at(&tables, 2, 300), AFTER, 1, ACK), Ok(at("10.1.0.9", 8080)));
    // A backend that does not exist there ends the connection; a load balancer that does not exist has none.
    let mut tables = there(balanced(0, 1, 1));
    tables.load_balancers[0].backends.remove(0);
    let mut third = switch_at(&tables, 3, 300);
    assert_eq!(arriving(&mut third, AFTER, &bytes), (20, 0));
    assert_eq!(backend(&mut third, AFTER, 1, ACK), Err(DropReason::BackendGone));
    tables.load_balancers.clear();
    assert_eq!(arriving(&mut switch_at(&tables, 3, 300), AFTER, &bytes), (0, 20));
    // Another guest gets none of them.
    assert_eq!(arriving(&mut switch_at(&balanced(0, 1, 1), 3, 300), 1, &bytes), (0, 20));
}

#[test]
fn connections_keep_their_age() {
    let mut first = switch_at(&balanced(0, 1, 0), 1, 5000);
    backend(&mut first, BEFORE, 1, SYN).unwrap();
    first.advance(5100 * SECOND);
    let bytes = leaving(&first, BEFORE);
    let mut second = switch_at(&there(balanced(0, 1, 0)), 2, 300);
    assert_eq!(arriving(&mut second, AFTER, &bytes), (1, 0));
    let current = |switch: &mut Switch, s| {
        switch.advance(s * SECOND);
        switch.connection_counters().current
    };
    // Both end at the same age.
    let ends_at = (5100..5400).find(|s| current(&mut first, *s) == 0).unwrap() - 5100;
    assert_eq!((300..600).find(|s| current(&mut second, *s) == 0).unwrap() - 300, ends_at);
}

#[test]
fn connections_through_port_forwards_move_and_those_through_source_nat_stay() {
    let mut first = switch_at(&world(), 1, 5000);
    let outwards = |from: &str, port, tcp| from_guest((from, port), (REMOTE, 7000), Some(tcp));
    let inwards = |tcp| frame(outside(), (REMOTE, 7000), (SHARED, 8080), Some(tcp));
    let (port, came) = comes(&mut first, &inwards(SYN)).unwrap();
    let (_, (address, inside)) = ends(&came);
    assert_eq!((port, address), (BEFORE, ip("10.0.0.1")));
    leaves(&mut first, BEFORE, &outwards("10.0.0.1", inside, SYN | ACK)).unwrap();
    leaves(&mut first, BEFORE, &outwards("10.0.0.1", 5001, SYN)).unwrap();
    assert_eq!(first.connection_counters().current, 2);
    let bytes = leaving(&first, BEFORE);
    let tables = there(world());
    let mut second = switch_at(&tables, 2, 300);
    assert_eq!(comes(&mut second, &inwards(ACK)), Err(DropReason::NatNoMapping), "no packet of it has begun it here");
    assert_eq!(arriving(&mut second, AFTER, &bytes), (1, 0));
    let (port, came) = comes(&mut second, &inwards(ACK)).unwrap();
    assert_eq!((port, ends(&came).1), (AFTER, at("10.0.0.1", inside)));
    let left = leaves(&mut second, AFTER, &outwards("10.0.0.1", inside, ACK)).unwrap();
    assert_eq!(ends(&left), (at(SHARED, 8080), at(REMOTE, 7000)));
    // Of several workers, the one of the uplink takes it.
    let of = |own| {
        let mut tables = tables.clone();
        tables.workers = Workers { own: WorkerId(own), count: 2 };
        tables.ports.iter_mut().for_each(|port| port.home = Some(WorkerId(u16::from(port.id.0 == UPLINK))));
        switch_at(&tables, 2, 300)
    };
    assert_eq!([0, 1].map(|own| arriving(&mut of(own), AFTER, &bytes)), [(0, 1), (1, 0)]);
    // Without the port forward there is nothing to continue.
    let mut tables = tables.clone();
    tables.nat.forwards.clear();
    assert_eq!(arriving(&mut switch_at(&tables, 2, 300), AFTER, &bytes), (0, 1));
}

#[test]
fn damaged_records_do_no_harm() {
    let mut first = switch_at(&balanced(0, 1, 0), 1, 5000);
    for from in 1..=20 {
        let _ = backend(&mut first, BEFORE, from, SYN);
    }
    let bytes = leaving(&first, BEFORE);
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..if cfg!(miri) { 20 } else { 300 } {
        let mut damaged = bytes.clone();
        (0..random.usize(1..6)).for_each(|_| damaged[random.usize(8..bytes.len())] = random.u8(..));
        let mut second = switch_at(&there(balanced(0, 1, 0)), 2, 300);
        let Ok((all, _)) = read_moving_sessions(&damaged) else { continue };
        for moving in &all {
            second.take_over_session(PortId(AFTER), moving);
        }
        assert!(second.connection_counters().current <= 20);
        for from in 1..=20 {
            let _ = backend(&mut second, AFTER, from, ACK);
        }
    }
}
