//! Fragmented packets: rules see what the whole packet would be, and no fragment passes of a packet that would not.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{
    AclRule, Action, By, Direction, DropReason, GATEWAY_MAC, GroupId, GroupRule, Pattern, PeerId, Port, PortId, Route,
    SecurityGroup, Switch, Tables, Verdict, WorkerId, Workers,
};
use bifrost_nic::{Malformed, Offload, Segments, copy_of, parse};
use common::*;
use proptest::prelude::*;

const SECOND: u64 = 1 << 30;
const SYN: u8 = 2;

fn to_port(protocol: u8, port: u16) -> Pattern {
    Pattern { protocol: Some(protocol), dst_ports: port..=port, ..Pattern::default() }
}

fn switch_of(tables: &Tables) -> Switch {
    let mut switch = Switch::build(tables, 1).unwrap();
    switch.advance(1000 * SECOND);
    switch
}

/// Network 100 denies TCP to port 22 in both directions.
fn without_ssh() -> Tables {
    let mut tables = tables();
    let rule = |direction| AclRule { direction, allow: false, pattern: to_port(6, 22), log: None };
    tables.vpcs[0].acl = vec![rule(Direction::Ingress), rule(Direction::Egress)];
    tables
}

/// Port 0 accepts only UDP to port 53.
fn dns_server() -> Tables {
    let mut tables = tables();
    tables.groups = vec![SecurityGroup::new(vec![GroupRule::new(Direction::Ingress, to_port(17, 53))])];
    tables.ports[0].groups = vec![GroupId(0)];
    tables
}

fn between(from: u8, to: u8, v6: bool, protocol: u8, body: &[u8]) -> Vec<u8> {
    let address = |n: u8| if v6 { format!("fd00::{n}") } else { format!("10.0.0.{n}") };
    packet((mac(from), mac(to)), &address(from), &address(to), 64, protocol, body)
}

/// A SYN with 28 bytes after its header.
fn syn(from: u8, to: u8, v6: bool, port: u16) -> Vec<u8> {
    let mut body = [0; 48];
    body[..2].copy_from_slice(&5000u16.to_be_bytes());
    body[2..4].copy_from_slice(&port.to_be_bytes());
    (body[12], body[13]) = (0x50, SYN);
    between(from, to, v6, 6, &body)
}

fn datagram(from: u8, to: u8, v6: bool, ports: (u16, u16), len: usize) -> Vec<u8> {
    let mut body = vec![0; len];
    body[..2].copy_from_slice(&ports.0.to_be_bytes());
    body[2..4].copy_from_slice(&ports.1.to_be_bytes());
    body[4..6].copy_from_slice(&(len as u16).to_be_bytes());
    between(from, to, v6, 17, &body)
}

fn echo(from: u8, to: u8, v6: bool, reply: bool, len: usize) -> Vec<u8> {
    let mut frame = match v6 {
        true => ping((mac(from), mac(to)), &format!("fd00::{from}"), &format!("fd00::{to}"), &vec![7; len]),
        false => ping((mac(from), mac(to)), &format!("10.0.0.{from}"), &format!("10.0.0.{to}"), &vec![7; len]),
    };
    if reply {
        frame[if v6 { 54 } else { 34 }] = if v6 { 129 } else { 0 };
    }
    frame
}

/// Whether a frame from guest 1 or 2, or from vNIC 3, passes.
fn passes(switch: &mut Switch, from: u8, frame: &[u8]) -> Result<(), DropReason> {
    match from {
        3 => underlay(switch, 100, 1, frame).map(|_| ()),
        n => match guest(switch, u32::from(n) - 1, frame).action {
            Action::Drop(reason) => Err(reason),
            _ => Ok(()),
        },
    }
}

const ORPHAN: Result<(), DropReason> = Err(DropReason::FragmentWithoutFirst);
const MISMATCH: Result<(), DropReason> = Err(DropReason::FragmentMismatch);

#[test]
fn an_acl_sees_ports_in_the_first_fragment() {
    for v6 in [false, true] {
        for (from, to) in [(1, 3), (3, 1), (1, 2)] {
            let mut s = switch_of(&without_ssh());
            assert_eq!(passes(&mut s, from, &syn(from, to, v6, 22)), Err(DropReason::Acl));
            let mut refused = pieces(&syn(from, to, v6, 22), 7, &[24, 40]).into_iter();
            assert_eq!(passes(&mut s, from, &refused.next().unwrap()), Err(DropReason::Acl), "{from} to {to}");
            for later in refused {
                assert_eq!(passes(&mut s, from, &later), ORPHAN, "{from} to {to}");
            }
            for (id, whole) in [(8, syn(from, to, v6, 80)), (9, datagram(from, to, v6, (22, 22), 48))] {
                for piece in pieces(&whole, id, &[24, 40]) {
                    assert_eq!(passes(&mut s, from, &piece), Ok(()), "{from} to {to}, {id}");
                }
            }
        }
    }
}

#[test]
fn without_port_rules_each_fragment_is_judged_by_itself() {
    let mut tables = tables();
    let whole = syn(1, 3, false, 22);
    let later = pieces(&whole, 7, &[24]).remove(1);
    assert_eq!(passes(&mut switch_of(&tables), 1, &later), Ok(()), "no rules");
    let pattern = Pattern { dst: Some("10.0.0.3/32".parse().unwrap()), ..Pattern::default() };
    tables.vpcs[0].acl = vec![AclRule { direction: Direction::Egress, allow: false, pattern, log: None }];
    assert_eq!(passes(&mut switch_of(&tables), 1, &later), Err(DropReason::Acl), "a rule about addresses");
    assert_eq!(passes(&mut switch_of(&tables), 1, &pieces(&syn(1, 2, false, 22), 7, &[24])[1]), Ok(()));
    // In IPv6 only the first fragment contains the protocol.
    let tcp = Pattern { protocol: Some(6), ..Pattern::default() };
    tables.vpcs[0].acl = vec![AclRule { direction: Direction::Egress, allow: false, pattern: tcp, log: None }];
    assert_eq!(passes(&mut switch_of(&tables), 1, &later), Err(DropReason::Acl));
    let mut lying = pieces(&syn(1, 3, true, 22), 7, &[24]).remove(1);
    lying[54] = 17;
    assert_eq!(passes(&mut switch_of(&tables), 1, &lying), ORPHAN);
    assert_eq!(passes(&mut switch_of(&tables), 3, &later_of(3)), Ok(()), "the other direction has no rule");
}

fn later_of(from: u8) -> Vec<u8> {
    pieces(&syn(from, 1, true, 22), 7, &[24]).remove(1)
}

#[test]
fn fragments_of_a_reply_admit_nothing_else() {
    for v6 in [false, true] {
        let mut s = switch_of(&dns_server());
        let attack = |id| pieces(&datagram(3, 1, v6, (4000, 111), 64), id, &[32]);
        let refused = |s: &mut Switch, id| {
            let [first, later] = &attack(id)[..] else { panic!() };
            assert_eq!(passes(s, 3, first), Err(DropReason::GroupIngress));
            assert_eq!(passes(s, 3, later), ORPHAN);
        };
        refused(&mut s, 1);
        assert_eq!(passes(&mut s, 3, &datagram(3, 1, v6, (4000, 53), 64)), Ok(()));
        // Fragments of a large reply, and of a packet that begins a conversation of the guest.
        for (id, ports) in [(7, (53, 4000)), (8, (111, 4001))] {
            for piece in pieces(&datagram(1, 3, v6, ports, 64), id, &[24, 48]) {
                assert_eq!(passes(&mut s, 1, &piece), Ok(()));
            }
        }
        assert_eq!(passes(&mut s, 1, &pieces(&datagram(1, 3, v6, (53, 4000), 64), 9, &[24])[1]), ORPHAN);
        refused(&mut s, 2);
        // Fragments of the guest's conversation pass as well.
        for piece in pieces(&datagram(3, 1, v6, (4001, 111), 64), 3, &[8, 32]) {
            assert_eq!(passes(&mut s, 3, &piece), Ok(()));
        }
        assert_eq!(s.session_counters().created, 2, "a fragmented packet has the session of a whole one");
    }
}

#[test]
fn large_pings_and_their_replies_pass() {
    let mut tables = tables();
    tables.groups = vec![SecurityGroup::default()];
    tables.ports[0].groups = vec![GroupId(0)];
    for v6 in [false, true] {
        // With a vNIC at a peer, and with one on this host.
        for other in [3, 2] {
            let mut s = switch_of(&tables);
            let at = [1400, 2800];
            let unasked = pieces(&echo(other, 1, v6, true, 4000), 6, &at);
            assert_eq!(passes(&mut s, other, &unasked[0]), Err(DropReason::GroupIngress));
            for piece in pieces(&echo(1, other, v6, false, 4000), 7, &at) {
                assert_eq!(passes(&mut s, 1, &piece), Ok(()));
            }
            for piece in pieces(&echo(other, 1, v6, true, 4000), 7, &at) {
                assert_eq!(passes(&mut s, other, &piece), Ok(()));
            }
            assert_eq!(s.session_counters().created, 1);
            let asked = pieces(&echo(other, 1, v6, false, 4000), 8, &at);
            assert_eq!(passes(&mut s, other, &asked[0]), Err(DropReason::GroupIngress), "the other side may not ask");
            assert_eq!(passes(&mut s, other, &asked[1]), ORPHAN);
        }
    }
}

/// Sequences of fragments of datagrams from vNIC 3 to port 53 of guest 1, which may pass.
#[test]
fn fragments_that_could_form_another_packet_are_rejected() {
    type Step = (&'static str, Vec<u8>, Result<(), DropReason>);
    for v6 in [false, true] {
        let good = datagram(3, 1, v6, (4000, 53), 64);
        let bad = datagram(3, 1, v6, (4000, 111), 64);
        let part = |from, to, more| piece(&good, 7, from, to, more);
        let first = || ("first", part(0, 32, true), Ok(()));
        let mut lengthened = good.clone();
        lengthened[if v6 { 59 } else { 39 }] = 72;
        let cases: Vec<(&str, Vec<Step>)> = vec![
            (
                "later before the first",
                vec![("later", part(32, 64, false), ORPHAN), first(), ("again", part(32, 64, false), Ok(()))],
            ),
            (
                "another header over it",
                vec![first(), ("bad first", piece(&bad, 7, 0, 32, true), Err(DropReason::GroupIngress))],
            ),
            (
                "over the end of the header",
                vec![first(), ("overlap", part(8, 40, true), MISMATCH), ("last", part(32, 64, false), Ok(()))],
            ),
            ("over the end of the first", vec![first(), ("overlap", part(24, 64, false), MISMATCH)]),
            ("twice", vec![first(), ("middle", part(32, 48, true), Ok(())), ("again", part(32, 48, true), MISMATCH)]),
            ("another identification", vec![first(), ("later", piece(&good, 8, 32, 64, false), ORPHAN)]),
            ("complete", vec![first(), ("last", part(32, 64, false), Ok(())), ("more", part(32, 64, false), ORPHAN)]),
            (
                "a second packet of that name",
                vec![first(), ("first", part(0, 16, true), Ok(())), ("rest", part(16, 64, false), Ok(()))],
            ),
            (
                "shorter than it says",
                vec![("first", piece(&lengthened, 7, 0, 32, true), Ok(())), ("last", part(32, 64, false), MISMATCH)],
            ),
            (
                "two ends",
                vec![first(), ("last", part(40, 64, false), Ok(())), ("another", part(32, 40, false), MISMATCH)],
            ),
        ];
        for (name, steps) in cases {
            let mut s = switch_of(&dns_server());
            for (step, frame, expected) in steps {
                assert_eq!(passes(&mut s, 3, &frame), expected, "{name}: {step}, IPv6: {v6}");
            }
        }
    }
}

#[test]
fn the_parser_rejects_hidden_headers() {
    let cut = |whole: &[u8], from, to, more| {
        let frame = piece(whole, 7, from, to, more);
        parse(&frame, frame.len()).map(|_| ())
    };
    for v6 in [false, true] {
        let syn = syn(3, 1, v6, 22);
        assert_eq!(cut(&syn, 0, 8, true), Err(Malformed::TinyFragment));
        assert_eq!(cut(&syn, 0, 16, true), Err(Malformed::TinyFragment));
        assert_eq!(cut(&syn, 8, 48, false), Err(Malformed::TinyFragment));
        assert_eq!(cut(&syn, 0, 28, true), Err(Malformed::FragmentLength));
        assert_eq!(cut(&syn, 0, 24, true), Ok(()));
    }
    // After the fragment header come 8 bytes of options, then TCP; in a fragment and in an atomic fragment
    // (RFC 6946).
    let with_options = |more| {
        let mut frame = piece(&syn(3, 1, true, 22), 7, 0, 40, more);
        frame[54] = 60;
        frame.splice(62..62, [6, 0, 1, 4, 0, 0, 0, 0]);
        frame[19] += 8;
        frame
    };
    let frame = with_options(true);
    assert_eq!(parse(&frame, frame.len()).map(|_| ()), Err(Malformed::FragmentExtensions));
    let frame = with_options(false);
    assert_eq!(parse(&frame, frame.len()).map(|p| (p.is_fragment(), p.dst_port)), Ok((false, 22)));
    assert_eq!(passes(&mut switch_of(&without_ssh()), 3, &frame), Err(DropReason::Acl));
}

/// vNIC 3 also has a network behind it, and vNIC 4 sends from any address in 10.1.0.0/16.
#[test]
fn later_fragments_need_a_first_one_of_the_same_sender() {
    let mut tables = dns_server();
    tables.routes.push(Route {
        vni: vni(100),
        prefix: "10.2.0.0/16".parse().unwrap(),
        peer: PeerId(1),
        mac: mac(3),
        mtu: 1500,
    });
    let mut s = switch_of(&tables);
    let whole = |macs, from: &str| {
        let mut body = [0; 64];
        (body[3], body[5]) = (53, 64);
        packet(macs, from, "10.0.0.1", 64, 17, &body)
    };
    // Any vNIC may use an address that no route covers.
    let direct = |n: u8| pieces(&whole((mac(n), mac(1)), "10.9.0.1"), 7, &[32]);
    assert_eq!(underlay(&mut s, 100, 1, &direct(3)[0]).map(|_| ()), Ok(()));
    assert_eq!(underlay(&mut s, 100, 2, &direct(4)[1]).map(|_| ()), ORPHAN, "of another vNIC");
    assert_eq!(underlay(&mut s, 100, 1, &direct(3)[1]).map(|_| ()), Ok(()));
    let routed = |from: &str| pieces(&whole((GATEWAY_MAC, mac(1)), from), 8, &[32]);
    assert_eq!(underlay(&mut s, 100, 1, &routed("10.2.0.1")[0]).map(|_| ()), Ok(()));
    assert_eq!(underlay(&mut s, 100, 2, &routed("10.1.0.1")[1]).map(|_| ()), ORPHAN, "of another address");
    // To another port with the same group.
    let mut both = tables.clone();
    both.ports[1].groups = vec![GroupId(0)];
    let mut s = switch_of(&both);
    let good = pieces(&datagram(3, 1, false, (4000, 53), 64), 7, &[32]);
    let mut other = pieces(&datagram(3, 2, false, (4000, 53), 64), 7, &[32]).remove(1);
    assert_eq!(passes(&mut s, 3, &good[0]), Ok(()));
    assert_eq!(passes(&mut s, 3, &other), ORPHAN, "to another port");
    other = good[1].clone();
    other[..6].copy_from_slice(&mac(2).0);
    assert_eq!(passes(&mut s, 3, &other), ORPHAN, "to another port, with the same addresses");
    assert_eq!(passes(&mut s, 3, &good[1]), Ok(()));
}

#[test]
fn a_flood_of_first_fragments_evicts_no_other_sender() {
    let mut s = switch_of(&dns_server());
    let of = |from: u8, id| pieces(&datagram(from, 1, false, (4000, 53), 64), id, &[32]);
    let routed = |n: u32| {
        let mut body = [0; 64];
        (body[3], body[5]) = (53, 64);
        let source = format!("10.1.{}.{}", n / 200, 1 + n % 200);
        pieces(&packet((GATEWAY_MAC, mac(1)), &source, "10.0.0.1", 64, 17, &body), 7, &[32]).remove(0)
    };
    assert_eq!(passes(&mut s, 3, &of(3, 1)[0]), Ok(()));
    assert_eq!(passes(&mut s, 2, &of(2, 1)[0]), Ok(()));
    // vNIC 4 has 65,536 addresses, the others have one each.
    for n in 0..1000 {
        assert_eq!(underlay(&mut s, 100, 2, &routed(n)).map(|_| ()), Ok(()));
    }
    assert_eq!(passes(&mut s, 3, &of(3, 1)[1]), Ok(()));
    assert_eq!(passes(&mut s, 2, &of(2, 1)[1]), Ok(()));
    let counted = *s.fragment_counters();
    assert_eq!((counted.created_records, counted.evicted_records), (1002, 1002 - 64));
}

#[test]
fn records_end_with_time_and_configuration() {
    let good = pieces(&datagram(3, 1, false, (4000, 53), 64), 7, &[32]);
    for (name, expected) in [("soon", Ok(())), ("late", ORPHAN), ("reload", ORPHAN)] {
        let mut s = switch_of(&dns_server());
        assert_eq!(passes(&mut s, 3, &good[0]), Ok(()));
        match name {
            "soon" => s.advance(1000 * SECOND + 4_000_000_000),
            "late" => s.advance(1000 * SECOND + 5_000_000_000),
            _ => s.replace(&dns_server()).unwrap(),
        }
        assert_eq!(passes(&mut s, 3, &good[1]), expected, "{name}");
    }
}

#[test]
fn a_trace_predicts_fragments_and_changes_nothing() {
    let mut s = switch_of(&dns_server());
    let good = pieces(&datagram(3, 1, false, (4000, 53), 64), 7, &[32]);
    let trace = |s: &Switch, frame: &[u8]| {
        let parsed = parse(frame, frame.len()).unwrap();
        let trace = s.trace_from_underlay(vni(100), PeerId(1), frame, &parsed);
        trace.checks.last().map(|check| (check.by, check.result)).unwrap()
    };
    assert!(matches!(trace(&s, &good[0]), (By::Groups { .. }, Ok(()))));
    assert_eq!(trace(&s, &good[1]), (By::Fragments, ORPHAN));
    assert_eq!(passes(&mut s, 3, &good[0]), Ok(()));
    for _ in 0..2 {
        assert_eq!(trace(&s, &good[1]), (By::Fragments, Ok(())));
    }
    assert_eq!(passes(&mut s, 3, &good[1]), Ok(()));
}

/// Fragments that the switch itself makes of a too large packet are judged again by the receiver's worker.
#[test]
fn fragments_made_by_the_host_pass_the_receivers_worker() {
    let mut tables = dns_server();
    tables.ports.iter_mut().for_each(|port: &mut Port| port.mtu = 576);
    (tables.ports[0].home, tables.ports[1].home) = (Some(WorkerId(1)), Some(WorkerId(0)));
    let worker = |own| Tables { workers: Workers { own: WorkerId(own), count: 2 }, ..tables.clone() };
    let (mut sender, mut receiver) = (switch_of(&worker(0)), switch_of(&worker(1)));
    for (port, expected) in [(53, Ok(())), (111, Err(DropReason::GroupIngress))] {
        let mut frame = datagram(2, 1, false, (4000, port), 2000);
        frame[20] = 0;
        let Verdict { action: Action::Deliver { port: to, worker: Some(WorkerId(1)) }, fragment_to: Some(mtu), .. } =
            guest(&mut sender, 1, &frame)
        else {
            panic!("not handed over");
        };
        let plan = Segments::plan_within(&frame, frame.len(), Offload::default(), mtu).unwrap();
        let passed: Vec<_> = (0..plan.count())
            .map(|n| {
                let mut out = Vec::new();
                plan.write(n, |from, to, out| copy_of(&frame, &[], from, to, out), &mut out);
                receiver
                    .from_worker(PortId(1), to, &out, &parse(&out, out.len()).unwrap())
                    .drop_reason()
                    .map_or(Ok(()), Err)
            })
            .collect();
        assert_eq!(passed.len(), 4);
        assert_eq!(passed[0], expected);
        let later = if expected.is_ok() { Ok(()) } else { ORPHAN };
        assert!(passed[1..].iter().all(|p| *p == later), "{passed:?}");
    }
}

/// In peered networks, a packet is judged when it leaves one network and when it arrives in the other.
#[test]
fn peered_networks_judge_fragments_as_whole_packets() {
    let mut tables = dns_server();
    tables.vpcs[1].gateways = vec![ip("10.2.0.254")];
    tables.ports[2].addresses = vec![ip("10.2.0.1")];
    tables.routes.retain(|route| route.vni == vni(100));
    let peering =
        |of, prefix: &str, to| bifrost_avs::Peering { vni: vni(of), prefix: prefix.parse().unwrap(), to: vni(to) };
    tables.peerings = vec![peering(100, "10.2.0.0/16", 200), peering(200, "10.0.0.0/24", 100)];
    let rule = |direction| AclRule { direction, allow: false, pattern: to_port(17, 54), log: None };
    tables.vpcs[1].acl = vec![rule(Direction::Egress)];
    let mut s = switch_of(&tables);
    for (id, (port, first)) in
        [(53, Ok(())), (54, Err(DropReason::Acl)), (55, Err(DropReason::GroupIngress))].into_iter().enumerate()
    {
        let mut body = [0; 64];
        (body[1], body[3], body[5]) = (9, port, 64);
        let whole = packet((mac(1), GATEWAY_MAC), "10.2.0.1", "10.0.0.1", 64, 17, &body);
        let passed: Vec<_> = pieces(&whole, id as u32, &[16, 32])
            .iter()
            .map(|piece| match guest(&mut s, 5, piece).action {
                Action::Drop(reason) => Err(reason),
                Action::Deliver { port: PortId(0), .. } => Ok(()),
                other => panic!("{other:?}"),
            })
            .collect();
        let later = if first.is_ok() { Ok(()) } else { ORPHAN };
        assert_eq!(passed, [first, later, later], "to port {port}");
    }
}

proptest! {
    /// A packet, fragmented as operating systems do it, passes if it would pass whole; each fragment has the same
    /// verdict.
    #[test]
    fn fragments_in_order_pass_like_the_whole_packet(
        v6: bool,
        from in prop::sample::select(vec![1u8, 2, 3]),
        protocol in prop::sample::select(vec![6u8, 17, 1, 47]),
        ports in (prop::sample::select(vec![53u16, 4000]), prop::sample::select(vec![22u16, 53, 80])),
        cuts in prop::collection::btree_set(3usize..12, 0..6),
        warm: bool,
        rules in 0..3,
    ) {
        let mut tables = match rules { 0 => without_ssh(), 1 => dns_server(), _ => Tables { groups: dns_server().groups, ..without_ssh() } };
        if rules == 2 {
            tables.ports[0].groups = vec![GroupId(0)];
        }
        let to = if from == 1 { 3 } else { 1 };
        let mut whole = match protocol {
            6 => syn(from, to, v6, ports.1),
            17 => datagram(from, to, v6, ports, 100),
            1 => echo(from, to, v6, false, 92),
            other => between(from, to, v6, other, &[7; 100]),
        };
        if protocol == 6 {
            whole.resize(whole.len() + 52, 0);
            let at = if v6 { 19 } else { 17 };
            whole[at] += 52;
        }
        let mut as_whole = switch_of(&tables);
        let mut in_pieces = switch_of(&tables);
        if warm {
            for s in [&mut as_whole, &mut in_pieces] {
                for _ in 0..3 {
                    let _ = passes(s, 3, &datagram(3, 1, v6, (4000, 53), 64));
                    let _ = passes(s, 1, &datagram(1, 3, v6, (53, 4000), 64));
                }
            }
        }
        let expected = passes(&mut as_whole, from, &whole);
        let cuts: Vec<usize> = cuts.into_iter().map(|at| at * 8).collect();
        for (n, piece) in pieces(&whole, 9, &cuts).iter().enumerate() {
            let passed = passes(&mut in_pieces, from, piece);
            let expected = if n == 0 || expected.is_ok() { expected } else { ORPHAN };
            prop_assert_eq!(passed, expected, "piece {}", n);
        }
        let (a, b) = (as_whole.session_counters(), in_pieces.session_counters());
        prop_assert_eq!(a, b);
    }
}
