//! Load balancers: the choice of the backend, that connections stay there, and the translation of their packets.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use std::collections::HashMap;
use std::net::IpAddr;

use bifrost_avs::{
    Action, Affinity, Backend, BuildError, By, DropReason, FlowLimits, GATEWAY_MAC, GroupId, LoadBalancer, PeerId,
    PortId, Switch, Tables, Transport, Verdict, WorkerId, Workers,
};
use bifrost_nic::{Checksum, Offload, transport_checksum};
use common::any::{SECOND, SYN};
use common::ends::*;
use common::*;

const ACK: u8 = 0x10;
const FIN: u8 = 0x11;
const RST: u8 = 0x04;
const ETHERNET: usize = 14;

const VIP: &str = "10.0.0.100";
const VIP6: &str = "fd00::100";

fn balancer(address: &str, port: u16, protocol: Transport, backends: &[(&str, u16, u16)]) -> LoadBalancer {
    let backend = |&(address, port, weight): &(&str, u16, u16)| Backend { address: ip(address), port, weight };
    LoadBalancer {
        vni: vni(100),
        address: ip(address),
        port,
        protocol,
        affinity: Affinity::Connection,
        backends: backends.iter().map(backend).collect(),
    }
}

/// Backends 10.0.0.2 here, 10.0.0.3 at peer 1, and 10.1.0.9 at peer 2.
const THREE: [(&str, u16, u16); 3] = [("10.0.0.2", 8080, 1), ("10.0.0.3", 8080, 1), ("10.1.0.9", 8080, 1)];

fn world(balancers: Vec<LoadBalancer>) -> Tables {
    Tables { load_balancers: balancers, ..tables() }
}

fn web(backends: &[(&str, u16, u16)]) -> Tables {
    world(vec![
        balancer(VIP, 80, Transport::Tcp, backends),
        balancer(VIP, 53, Transport::Udp, backends),
        balancer(VIP6, 80, Transport::Tcp, &[("fd00::2", 80, 1), ("fd00::3", 8080, 1)]),
    ])
}

fn build(tables: &Tables) -> Switch {
    let mut switch = Switch::build(tables, 1).unwrap();
    switch.advance(1000 * SECOND);
    switch
}

/// Sends a packet from guest 1 to a load balancer.
fn ask(switch: &mut Switch, from: (&str, u16), to: (&str, u16), tcp: Option<u8>) -> (Verdict, Vec<u8>) {
    let frame = frame((mac(1), GATEWAY_MAC), from, to, tcp);
    let verdict = guest(switch, 0, &frame);
    let out = if verdict.passes() { rewritten(&frame, &verdict) } else { frame };
    (verdict, out)
}

/// The backend of a connection of guest 1.
fn backend(switch: &mut Switch, port: u16, flags: u8) -> Result<(IpAddr, u16), DropReason> {
    let (verdict, out) = ask(switch, ("10.0.0.1", port), (VIP, 80), Some(flags));
    match verdict.drop_reason() {
        Some(reason) => Err(reason),
        None => Ok(ends(&out).1),
    }
}

#[test]
fn both_directions_are_translated() {
    let mut seen = HashMap::new();
    for (own, to, tcp) in
        [("10.0.0.1", (VIP, 80), Some(SYN)), ("10.0.0.1", (VIP, 53), None), ("fd00::1", (VIP6, 80), Some(SYN))]
    {
        for port in 1000..1030 {
            let mut switch = build(&web(&THREE));
            let (verdict, out) = ask(&mut switch, (own, port), to, tcp);
            let (source, chosen) = ends(&out);
            assert_eq!(source, at(own, port), "the client's address stays");
            *seen.entry(chosen).or_insert(0) += 1;
            assert_eq!(read(&out).src_mac, GATEWAY_MAC);
            let there = read(&out).dst_mac;
            // The backend replies, within its network or through the gateway.
            let answer_tcp = tcp.map(|_| SYN | ACK);
            let address = chosen.0.to_string();
            let answer = |macs| frame(macs, (&address, chosen.1), (own, port), answer_tcp);
            let (verdict, answer) = match verdict.action {
                Action::Forward { peer, local, remote, .. } => {
                    assert_eq!((local, remote), (mac(1), there));
                    let source = if there == mac(4) { GATEWAY_MAC } else { there };
                    let answer = answer((source, mac(1)));
                    (*switch.from_underlay(vni(100), peer, &answer, &read(&answer)), answer)
                }
                Action::Deliver { port: PortId(1), worker: None } => {
                    let answer = answer((mac(2), mac(1)));
                    (guest(&mut switch, 1, &answer), answer)
                }
                other => panic!("{other:?}"),
            };
            assert_eq!(verdict.action, Action::Deliver { port: PortId(0), worker: None });
            let back = rewritten(&answer, &verdict);
            assert_eq!(ends(&back), (at(to.0, to.1), at(own, port)));
            assert_eq!((read(&back).src_mac, read(&back).dst_mac), (GATEWAY_MAC, mac(1)));
            let counters = switch.connection_counters();
            assert_eq!((counters.created, counters.current), (1, 1), "one connection, one session");
        }
    }
    assert_eq!(seen.len(), 5, "three backends of IPv4, which TCP and UDP share, and two of IPv6: {seen:?}");
}

#[test]
fn packets_outside_of_connections_are_not_translated() {
    let mut switch = build(&web(&THREE));
    // The guest connects to a backend directly, and the backend to the guest.
    let direct = frame((mac(1), mac(3)), ("10.0.0.1", 1000), ("10.0.0.3", 8080), Some(SYN));
    assert_eq!(guest(&mut switch, 0, &direct).rewrite, None);
    let asked = frame((mac(3), mac(1)), ("10.0.0.3", 8080), ("10.0.0.1", 1000), Some(SYN | ACK));
    assert_eq!(underlay(&mut switch, 100, 1, &asked), Ok(PortId(0)));
    assert_eq!(switch.connection_counters().created, 0);
}

#[test]
fn packets_that_cannot_be_balanced_are_dropped() {
    let none = [("10.0.0.2", 80, 0), ("10.0.0.3", 80, 0)];
    let drop = |tables: &Tables, frame: &[u8]| guest(&mut build(tables), 0, frame).drop_reason();
    let to = |to, tcp| frame((mac(1), GATEWAY_MAC), ("10.0.0.1", 1000), to, tcp);
    assert_eq!(drop(&web(&none), &to((VIP, 80), Some(SYN))), Some(DropReason::NoBackend));
    assert_eq!(drop(&web(&THREE), &to((VIP, 81), Some(SYN))), Some(DropReason::NoService));
    assert_eq!(drop(&web(&THREE), &to((VIP, 80), None)), Some(DropReason::NoService), "another protocol");
    let whole = to((VIP, 53), None);
    for fragment in pieces(&whole, 7, &[8]) {
        assert_eq!(drop(&web(&THREE), &fragment), Some(DropReason::ServiceFragment));
    }
    let elsewhere = [("10.77.0.1", 80, 1)];
    assert_eq!(drop(&web(&elsewhere), &to((VIP, 80), Some(SYN))), Some(DropReason::NoRoute));
    // No other vNIC may use the address.
    let spoofed = frame((mac(3), mac(1)), (VIP, 80), ("10.0.0.1", 1000), Some(ACK));
    assert_eq!(underlay(&mut build(&web(&THREE)), 100, 1, &spoofed), Err(DropReason::WrongPeer));
}

#[test]
fn the_virtual_address_answers_arp_and_pings() {
    let mut switch = build(&web(&THREE));
    assert_eq!(switch.resolve(vni(100), ip(VIP)), Some(GATEWAY_MAC));
    assert_eq!(switch.resolve(vni(200), ip(VIP)), None);
    for (own, address) in [("10.0.0.1", VIP), ("fd00::1", VIP6)] {
        let ping = ping((mac(1), GATEWAY_MAC), own, address, b"there?");
        assert_eq!(guest(&mut switch, 0, &ping), answered());
        assert_eq!(read(switch.answer()).src_ip, ip(address));
    }
}

#[test]
fn existing_connections_stay_and_new_ones_are_balanced() {
    let mut switch = build(&web(&THREE));
    let mut chosen = HashMap::new();
    for port in 1000..1300 {
        chosen.insert(port, backend(&mut switch, port, SYN).unwrap());
    }
    for address in THREE {
        let count = chosen.values().filter(|b| b.0 == ip(address.0)).count();
        assert!((60..140).contains(&count), "{address:?} has {count} of 300");
    }
    // One backend is drained and another is added: existing connections are not affected.
    let drained = [("10.0.0.2", 8080, 0), ("10.0.0.3", 8080, 1), ("10.1.0.9", 8080, 1), ("10.1.0.10", 8080, 1)];
    switch.replace(&web(&drained)).unwrap();
    for (&port, &before) in &chosen {
        assert_eq!(backend(&mut switch, port, ACK), Ok(before));
    }
    let new: Vec<_> = (2000..2300).map(|port| backend(&mut switch, port, SYN).unwrap().0).collect();
    assert!(!new.contains(&ip("10.0.0.2")) && new.contains(&ip("10.1.0.10")));
    // The drained one is removed: only its own connections end, and begin again elsewhere.
    switch.replace(&web(&drained[1..])).unwrap();
    for (&port, &before) in &chosen {
        let lost = before.0 == ip("10.0.0.2");
        let expected = if lost { Err(DropReason::BackendGone) } else { Ok(before) };
        assert_eq!(backend(&mut switch, port, ACK), expected);
        if lost {
            let elsewhere = backend(&mut switch, port, SYN).unwrap();
            assert_ne!(elsewhere.0, ip("10.0.0.2"));
            assert_eq!(backend(&mut switch, port, ACK), Ok(elsewhere));
        }
    }
}

#[test]
fn all_connections_of_a_client_can_stay_together() {
    let mut tables = web(&THREE);
    tables.load_balancers[0].affinity = Affinity::Client;
    let mut switch = build(&tables);
    let chosen: Vec<_> = (1000..1050).map(|port| backend(&mut switch, port, SYN).unwrap()).collect();
    assert!(chosen.windows(2).all(|pair| pair[0] == pair[1]), "{chosen:?}");
}

#[test]
fn weights_are_shares() {
    let mut switch = build(&web(&[("10.0.0.2", 80, 1), ("10.0.0.3", 80, 4)]));
    let heavy = (1000..3000).filter(|port| backend(&mut switch, *port, SYN).unwrap().0 == ip("10.0.0.3")).count();
    assert!((1500..1700).contains(&heavy), "{heavy} of 2000");
}

#[test]
fn a_backend_can_be_its_own_client() {
    let mut switch = build(&web(&[("10.0.0.1", 8080, 1)]));
    let (verdict, out) = ask(&mut switch, ("10.0.0.1", 5000), (VIP, 80), Some(SYN));
    assert_eq!(verdict.action, Action::Deliver { port: PortId(0), worker: None });
    assert_eq!(ends(&out), (at(VIP, 5000), at("10.0.0.1", 8080)), "its answer comes to the switch");
    assert_eq!((read(&out).src_mac, read(&out).dst_mac), (GATEWAY_MAC, mac(1)));
    let (verdict, out) = ask(&mut switch, ("10.0.0.1", 8080), (VIP, 5000), Some(SYN | ACK));
    assert_eq!(verdict.action, Action::Deliver { port: PortId(0), worker: None });
    assert_eq!(ends(&out), (at(VIP, 80), at("10.0.0.1", 5000)));
    assert_eq!(switch.connection_counters().created, 1);
    assert_eq!(switch.connection_counters().established, 0);
    ask(&mut switch, ("10.0.0.1", 5000), (VIP, 80), Some(ACK));
    assert_eq!(switch.connection_counters().established, 1);
}

#[test]
fn colliding_connections_get_another_source_port() {
    let one = [("10.0.0.3", 8080, 1)];
    let tables = world((0..3).map(|n| balancer(VIP, 80 + n, Transport::Tcp, &one)).collect());
    let mut switch = build(&tables);
    let mut sources = Vec::new();
    for to in 80..83 {
        let (_, out) = ask(&mut switch, ("10.0.0.1", 5000), (VIP, to), Some(SYN));
        let ((address, source), _) = ends(&out);
        assert_eq!(address, ip("10.0.0.1"));
        assert!(!sources.contains(&source) && (to > 80 || source == 5000), "{source}");
        sources.push(source);
    }
    for (to, source) in (80..83).zip(sources) {
        let answer = frame((mac(3), mac(1)), ("10.0.0.3", 8080), ("10.0.0.1", source), Some(SYN | ACK));
        let verdict = *switch.from_underlay(vni(100), PeerId(1), &answer, &read(&answer));
        assert_eq!(ends(&rewritten(&answer, &verdict)), (at(VIP, to), at("10.0.0.1", 5000)));
    }
}

#[test]
fn a_closed_connection_may_begin_again_at_any_backend() {
    let mut switch = build(&web(&THREE));
    let first = backend(&mut switch, 1000, SYN).unwrap();
    let address = first.0.to_string();
    let peer = if first.0 == ip("10.1.0.9") { 2 } else { 1 };
    let there = if peer == 2 { GATEWAY_MAC } else { mac(3) };
    let reset = frame((there, mac(1)), (&address, first.1), ("10.0.0.1", 1000), Some(RST));
    if first.0 == ip("10.0.0.2") {
        let reset = frame((mac(2), mac(1)), (&address, first.1), ("10.0.0.1", 1000), Some(RST));
        assert!(guest(&mut switch, 1, &reset).passes());
    } else {
        assert!(switch.from_underlay(vni(100), PeerId(peer), &reset, &read(&reset)).passes());
    }
    assert_eq!(backend(&mut switch, 1000, SYN).unwrap(), first, "the same hash, the same backends");
    assert_eq!((switch.connection_counters().created, switch.connection_counters().current), (2, 1));
    // It is forgotten after its timeout.
    let _ = backend(&mut switch, 1000, FIN);
    for step in 1..200 {
        switch.advance((1000 + step * 100) * SECOND);
    }
    assert_eq!(switch.connection_counters().current, 0);
}

#[test]
fn tables_that_contradict_themselves_are_refused() {
    let with = |change: fn(&mut Tables)| {
        let mut tables = web(&THREE);
        change(&mut tables);
        Switch::build(&tables, 1).map(|_| ()).unwrap_err()
    };
    let (vni, address) = (vni(100), ip(VIP));
    let twice = with(|t| t.load_balancers.push(t.load_balancers[0].clone()));
    assert_eq!(twice, BuildError::DuplicateLoadBalancer { vni, address, port: 80 });
    let owned = with(|t| t.ports[0].addresses.push(ip(VIP)));
    assert_eq!(owned, BuildError::DuplicatePrefix { vni, prefix: address.into() });
    let gateway = with(|t| t.vpcs[0].gateways.push(ip(VIP)));
    assert_eq!(gateway, BuildError::DuplicatePrefix { vni, prefix: address.into() });
    assert_eq!(
        with(|t| t.load_balancers[0].backends[0].address = ip("fd00::2")),
        BuildError::BackendFamily(ip("fd00::2"))
    );
    assert_eq!(with(|t| t.load_balancers[0].vni = common::vni(999)), BuildError::UnknownVni(common::vni(999)));
}

#[test]
fn a_trace_reports_the_backend_and_changes_nothing() {
    let mut switch = build(&web(&[("10.0.0.3", 8080, 1)]));
    let syn = frame((mac(1), GATEWAY_MAC), ("10.0.0.1", 1000), (VIP, 80), Some(SYN));
    for is_new in [true, false] {
        let before = format!("{switch:?}");
        let trace = switch.trace_from_guest(PortId(0), &syn, syn.len(), Offload::default(), &read(&syn));
        assert_eq!(before, format!("{switch:?}"));
        let found = trace.checks.iter().find_map(|check| match check.by {
            By::LoadBalancer { backend, is_new, .. } => Some((backend, is_new)),
            _ => None,
        });
        assert_eq!(found, Some((at("10.0.0.3", 8080), is_new)));
        assert_eq!(trace.hop.unwrap().mac, mac(3));
        assert_eq!(trace.verdict, guest(&mut switch, 0, &syn));
    }
}

#[test]
fn the_receivers_worker_translates_for_its_port() {
    let mut tables = web(&[("10.0.0.2", 8080, 1)]);
    (tables.ports[0].home, tables.ports[1].home) = (Some(WorkerId(0)), Some(WorkerId(1)));
    let mut workers =
        [0, 1].map(|own| build(&Tables { workers: Workers { own: WorkerId(own), count: 2 }, ..tables.clone() }));
    let syn = frame((mac(1), GATEWAY_MAC), ("10.0.0.1", 1000), (VIP, 80), Some(SYN));
    let verdict = guest(&mut workers[0], 0, &syn);
    assert_eq!(verdict.action, Action::Deliver { port: PortId(1), worker: Some(WorkerId(1)) });
    let out = rewritten(&syn, &verdict);
    let there = *workers[1].from_worker(PortId(0), PortId(1), &out, &read(&out));
    assert_eq!((there.passes(), there.rewrite), (true, None));
    let answer = frame((mac(2), mac(1)), ("10.0.0.2", 8080), ("10.0.0.1", 1000), Some(SYN | ACK));
    let verdict = guest(&mut workers[1], 1, &answer);
    assert_eq!(verdict.action, Action::Deliver { port: PortId(0), worker: Some(WorkerId(0)) });
    let back = *workers[0].from_worker(PortId(1), PortId(0), &answer, &read(&answer));
    assert_eq!(ends(&rewritten(&answer, &back)), (at(VIP, 80), at("10.0.0.1", 1000)));
}

/// A connection of guest 1 with backend 3 at peer 1: the packet that leaves, and the reply.
fn connected(switch: &mut Switch, own: &str, vip: &str, there: &str) -> (Vec<u8>, Vec<u8>) {
    let (_, sent) = ask(switch, (own, 1000), (vip, 80), Some(SYN));
    let answer = frame((mac(3), mac(1)), (there, 8080), (own, 1000), Some(SYN | ACK));
    let verdict = *switch.from_underlay(vni(100), PeerId(1), &answer, &read(&answer));
    (sent, rewritten(&answer, &verdict))
}

#[test]
fn icmp_errors_about_a_connection_are_translated_for_both_ends() {
    let ends_of_port = |address: &str, port: u16| (ip(address), port);
    for (own, vip, there, router) in
        [("10.0.0.1", VIP, "10.0.0.3", "10.1.0.7"), ("fd00::1", VIP6, "fd00::3", "fd00::3")]
    {
        let mut tables = web(&[("10.0.0.3", 8080, 1)]);
        tables.load_balancers[2].backends.remove(0);
        for rules in [false, true] {
            if rules {
                // The groups accept only packets of existing conversations.
                tables.groups = vec![Default::default()];
                tables.ports[0].groups = vec![GroupId(0)];
            }
            let mut switch = build(&tables);
            let (sent, answer) = connected(&mut switch, own, vip, there);
            // To the client: from the backend, whose address it does not know, or from a router, whose address stays.
            for (from, seen_from, macs) in [
                (there, vip, (mac(3), mac(1))),
                (router, if router == there { vip } else { router }, (GATEWAY_MAC, mac(1))),
            ] {
                for most in [if own == "10.0.0.1" { 28 } else { 48 }, 500] {
                    let peer = if from == "10.1.0.7" { 2 } else { 1 };
                    let macs = if peer == 1 { (mac(3), mac(1)) } else { macs };
                    let error = error(macs, from, &sent, most);
                    let verdict = *switch.from_underlay(vni(100), PeerId(peer), &error, &read(&error));
                    if rules && from == "10.1.0.7" {
                        assert_eq!(verdict.drop_reason(), Some(DropReason::GroupIngress), "a stranger's");
                        continue;
                    }
                    assert!(verdict.passes(), "{verdict:?}");
                    let mut seen = error.clone();
                    verdict.rewrite.unwrap().apply(&mut seen);
                    assert_eq!((read(&seen).src_ip, read(&seen).dst_ip), (ip(seen_from), ip(own)));
                    let quote = quoted(&seen);
                    if most == 500 {
                        assert_eq!(ends(&quote), (ends_of_port(own, 1000), ends_of_port(vip, 80)));
                        assert_eq!(transport_checksum(&quote, &read(&quote)), Checksum::Valid);
                    } else {
                        let l4 = quote.len() - 8;
                        assert_eq!(quote[l4..l4 + 4], [3, 232, 0, 80]);
                    }
                }
            }
            // An error to the backend.
            let error = error((mac(1), GATEWAY_MAC), own, &answer, 500);
            let verdict = guest(&mut switch, 0, &error);
            let Action::Forward { remote, .. } = verdict.action else { panic!("{verdict:?}") };
            assert_eq!(remote, mac(3));
            let mut seen = error.clone();
            verdict.rewrite.unwrap().apply(&mut seen);
            assert_eq!((read(&seen).src_ip, read(&seen).dst_ip), (ip(own), ip(there)));
            let quote = quoted(&seen);
            assert_eq!(ends(&quote), (ends_of_port(there, 8080), ends_of_port(own, 1000)));
            assert_eq!(transport_checksum(&quote, &read(&quote)), Checksum::Valid);
            assert_eq!(switch.connection_counters().created, 1);
        }
    }
}

#[test]
fn icmp_errors_about_no_connection_are_not_translated() {
    let mut switch = build(&web(&[("10.0.0.3", 8080, 1)]));
    let (sent, answer) = connected(&mut switch, "10.0.0.1", VIP, "10.0.0.3");
    // An error about another connection, and one that quotes too little.
    let mut other = sent.clone();
    other[ETHERNET + 21] ^= 1;
    for (about, most) in [(&other, 500), (&sent, 24)] {
        let error = error((mac(3), mac(1)), "10.0.0.3", about, most);
        assert_eq!(underlay(&mut switch, 100, 1, &error), Ok(PortId(0)));
    }
    let mut other = answer.clone();
    other[ETHERNET + 23] ^= 1;
    let error = error((mac(1), GATEWAY_MAC), "10.0.0.1", &other, 500);
    assert_eq!(guest(&mut switch, 0, &error).drop_reason(), Some(DropReason::NoService));
}

#[test]
fn a_backend_that_is_its_own_client_can_refuse() {
    let mut switch = build(&web(&[("10.0.0.1", 8080, 1)]));
    let (_, sent) = ask(&mut switch, ("10.0.0.1", 5000), (VIP, 80), Some(SYN));
    let error = error((mac(1), GATEWAY_MAC), "10.0.0.1", &sent, 500);
    let verdict = guest(&mut switch, 0, &error);
    assert_eq!(verdict.action, Action::Deliver { port: PortId(0), worker: None });
    let mut seen = error.clone();
    verdict.rewrite.unwrap().apply(&mut seen);
    assert_eq!((read(&seen).src_ip, read(&seen).dst_ip), (ip(VIP), ip("10.0.0.1")));
    assert_eq!(ends(&quoted(&seen)), (at("10.0.0.1", 5000), at(VIP, 80)));
}

#[test]
fn balanced_packets_use_flow_records() {
    let mut switch = build(&web(&[("10.0.0.3", 8080, 1)]));
    connected(&mut switch, "10.0.0.1", VIP, "10.0.0.3");
    let answer = frame((mac(3), mac(1)), ("10.0.0.3", 8080), ("10.0.0.1", 1000), Some(ACK));
    for n in 0..10u64 {
        // A new turn each time, so that no note is used.
        switch.advance((1000 + n) * SECOND);
        let (verdict, out) = ask(&mut switch, ("10.0.0.1", 1000), (VIP, 80), Some(ACK));
        assert!(verdict.passes());
        assert_eq!(ends(&out).1, at("10.0.0.3", 8080));
        let back = *switch.from_underlay(vni(100), PeerId(1), &answer, &read(&answer));
        assert_eq!(ends(&rewritten(&answer, &back)).0, at(VIP, 80));
        assert_eq!((switch.flow_counters().found_packets, switch.flow_counters().batched_packets), (2 * n, 0));
    }
    // The packets keep the connection alive.
    for n in 1010..12_000 {
        switch.advance(n * SECOND);
        if n % 1000 == 0 {
            assert!(ask(&mut switch, ("10.0.0.1", 1000), (VIP, 80), Some(ACK)).0.passes());
        }
    }
    assert_eq!((switch.connection_counters().current, switch.connection_counters().established), (1, 1));
    // The connection ends with its port, and its records are invalid.
    let mut tables = web(&[("10.0.0.3", 8080, 1)]);
    tables.ports[0].mac = mac(7);
    switch.replace(&tables).unwrap();
    switch.replace(&web(&[("10.0.0.3", 8080, 1)])).unwrap();
    let back = *switch.from_underlay(vni(100), PeerId(1), &answer, &read(&answer));
    assert_eq!((back.passes(), back.rewrite), (true, None));
}

#[test]
fn a_client_can_reuse_a_port_for_balanced_and_direct_connections() {
    // With a backend on this host, and with one at a peer.
    for (address, there) in [("10.0.0.2", 2), ("10.0.0.3", 3)] {
        let mut switch = build(&web(&[(address, 8080, 1)]));
        let mut second = 1000;
        let mut answer = |switch: &mut Switch, flags| {
            // A new turn each time, so that no note is used.
            second += 1;
            switch.advance(second * SECOND);
            let answer = frame((mac(there), mac(1)), (address, 8080), ("10.0.0.1", 1000), Some(flags));
            let verdict = match there {
                2 => guest(switch, 1, &answer),
                _ => *switch.from_underlay(vni(100), PeerId(1), &answer, &read(&answer)),
            };
            ends(&rewritten(&answer, &verdict)).0
        };
        let direct = |switch: &mut Switch, flags| {
            let frame = frame((mac(1), mac(there)), ("10.0.0.1", 1000), (address, 8080), Some(flags));
            assert!(guest(switch, 0, &frame).passes());
        };
        direct(&mut switch, SYN);
        for flags in [SYN | ACK, ACK, ACK, FIN] {
            assert_eq!(answer(&mut switch, flags), at(address, 8080), "flags {flags:#x}");
        }
        assert!(switch.flow_counters().found_packets >= 2, "the direct connection has a record");
        // The client's kernel does not know the connection to the load balancer, and reuses the port.
        assert!(ask(&mut switch, ("10.0.0.1", 1000), (VIP, 80), Some(SYN)).0.passes());
        for flags in [SYN | ACK, ACK, ACK, RST] {
            assert_eq!(answer(&mut switch, flags), at(VIP, 80), "flags {flags:#x}");
        }
        direct(&mut switch, SYN);
        for flags in [SYN | ACK, ACK, ACK, FIN] {
            assert_eq!(answer(&mut switch, flags), at(address, 8080), "flags {flags:#x}");
        }
        assert_eq!(switch.connection_counters().current, 0);
    }
}

#[test]
fn a_reply_does_not_bring_back_a_removed_backend() {
    let mut switch = build(&web(&[("10.0.0.3", 8080, 1)]));
    connected(&mut switch, "10.0.0.1", VIP, "10.0.0.3");
    switch.replace(&web(&[("10.0.0.2", 8080, 1)])).unwrap();
    let answer = frame((mac(3), mac(1)), ("10.0.0.3", 8080), ("10.0.0.1", 1000), Some(ACK));
    for _ in 0..3 {
        switch.from_underlay(vni(100), PeerId(1), &answer, &read(&answer));
    }
    assert_eq!(backend(&mut switch, 1000, ACK), Err(DropReason::BackendGone));
}

/// A simple model of where each connection goes: to its first backend, as long as that exists.
#[derive(Default)]
struct Model(HashMap<u16, (IpAddr, u16)>);

#[test]
fn connections_stay_as_in_a_model() {
    let mut moved = 0;
    for seed in 0..if cfg!(miri) { 1 } else { 60 } {
        let mut rng = fastrand::Rng::with_seed(seed);
        let all = ["10.0.0.2", "10.0.0.3", "10.1.0.9", "10.1.0.10", "10.1.0.11"];
        let any = |rng: &mut fastrand::Rng| {
            let mut backends: Vec<_> = all.iter().map(|address| (*address, 8080, rng.u16(0..4))).collect();
            backends.retain(|_| rng.u8(0..4) > 0);
            backends
        };
        let mut backends = any(&mut rng);
        let flows = FlowLimits { records: 64, vectors: true };
        let forgetful = FlowLimits { records: 0, vectors: false };
        let mut quick = build(&Tables { flows, ..web(&backends) });
        let mut slow = build(&Tables { flows: forgetful, ..web(&backends) });
        let mut model = Model::default();
        let mut now = 1000 * SECOND;
        for step in 0..400 {
            if rng.u8(0..20) == 0 {
                backends = any(&mut rng);
                quick.replace(&Tables { flows, ..web(&backends) }).unwrap();
                slow.replace(&Tables { flows: forgetful, ..web(&backends) }).unwrap();
            }
            if rng.u8(0..4) == 0 {
                now += SECOND / 10;
                quick.advance(now);
                slow.advance(now);
            }
            let (port, flags) = (rng.u16(1000..1010), *rng.choice(&[SYN, ACK, ACK, ACK]).unwrap());
            let got = backend(&mut quick, port, flags);
            assert_eq!(got, backend(&mut slow, port, flags), "{seed} {step}: what is noted changes nothing");
            let is_there = |b: &(IpAddr, u16)| backends.iter().any(|(address, ..)| ip(address) == b.0);
            let is_taken = backends.iter().any(|(.., weight)| *weight > 0);
            match model.0.get(&port) {
                Some(before) if is_there(before) => assert_eq!(got, Ok(*before), "{seed} {step}: it has moved"),
                Some(_) if flags == ACK => assert_eq!(got, Err(DropReason::BackendGone), "{seed} {step}"),
                _ if !is_taken => assert_eq!(got, Err(DropReason::NoBackend), "{seed} {step}"),
                known => {
                    moved += u32::from(known.is_some());
                    let chosen = got.unwrap();
                    assert!(backends.iter().any(|(a, _, weight)| ip(a) == chosen.0 && *weight > 0), "{seed} {step}");
                    model.0.insert(port, chosen);
                }
            }
        }
    }
    assert!(cfg!(miri) || moved > 50, "{moved}: no backend with connections was removed");
}
