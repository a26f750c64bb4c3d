//! Security groups and network ACLs: what may begin, what belongs to an allowed conversation, and what is dropped.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{
    AclRule, Action, AddressSetId, BuildError, Direction, DropReason, GATEWAY_MAC, GroupId, GroupRule, Member, Pattern,
    PortId, Remote, SecurityGroup, SessionLimits, Switch, Tables, Verdict,
};
use bifrost_tables::IpNet;
use bifrost_wire::{Mac, arp};
use common::*;

const SECOND: u64 = 1 << 30;
const SYN: u8 = 2;
const ACK: u8 = 16;

fn allow(direction: Direction, pattern: Pattern) -> GroupRule {
    GroupRule::new(direction, pattern)
}

fn tcp_to(port: u16) -> Pattern {
    Pattern { protocol: Some(6), dst_ports: port..=port, ..Pattern::default() }
}

/// Port 0 has a group with these rules; port 1 has none.
fn guarded(rules: Vec<GroupRule>) -> Tables {
    let mut tables = tables();
    tables.groups = vec![SecurityGroup::new(rules)];
    tables.ports[0].groups = vec![GroupId(0)];
    tables
}

fn switch_of(tables: &Tables) -> Switch {
    let mut switch = Switch::build(tables, 1).unwrap();
    switch.advance(1000 * SECOND);
    switch
}

/// A TCP segment with these flags.
fn segment(from: u8, to: u8, ports: (u16, u16), flags: u8) -> Vec<u8> {
    let mut body = [0; 20];
    body[..2].copy_from_slice(&ports.0.to_be_bytes());
    body[2..4].copy_from_slice(&ports.1.to_be_bytes());
    (body[12], body[13]) = (0x50, flags);
    packet((mac(from), mac(to)), &format!("10.0.0.{from}"), &format!("10.0.0.{to}"), 64, 6, &body)
}

fn datagram(from: u8, to: u8, ports: (u16, u16)) -> Vec<u8> {
    udp((mac(from), mac(to)), &format!("10.0.0.{from}"), &format!("10.0.0.{to}"), ports)
}

/// Whether guest 1 may send a frame.
fn leaves(switch: &mut Switch, frame: &[u8]) -> Result<(), DropReason> {
    match guest(switch, 0, frame).action {
        Action::Drop(reason) => Err(reason),
        _ => Ok(()),
    }
}

/// Whether guest 1 receives a frame from vNIC 3.
fn arrives(switch: &mut Switch, frame: &[u8]) -> Result<(), DropReason> {
    underlay(switch, 100, 1, frame).map(|port| assert_eq!(port, PortId(0)))
}

const IN: Result<(), DropReason> = Err(DropReason::GroupIngress);
const OUT: Result<(), DropReason> = Err(DropReason::GroupEgress);

#[test]
fn replies_pass_and_new_conversations_need_a_rule() {
    let mut s = switch_of(&guarded(vec![allow(Direction::Ingress, tcp_to(80))]));
    let cases = [
        ("nobody asked", datagram(3, 1, (53, 4000)), false, IN),
        ("the guest may ask", datagram(1, 3, (4000, 53)), true, Ok(())),
        ("and is answered", datagram(3, 1, (53, 4000)), false, Ok(())),
        ("from there alone", datagram(3, 1, (54, 4000)), false, IN),
        ("a service that is open", segment(3, 1, (5000, 80), SYN), false, Ok(())),
        ("one that is not", segment(3, 1, (5000, 81), SYN), false, IN),
        ("no back door", segment(3, 1, (80, 5000), ACK), false, IN),
        ("another protocol", datagram(3, 1, (5000, 80)), false, IN),
    ];
    for (name, frame, out, expected) in cases {
        let passed = if out { leaves(&mut s, &frame) } else { arrives(&mut s, &frame) };
        assert_eq!(passed, expected, "{name}");
    }
    assert_eq!(s.session_counters().created, 2);
    assert_eq!(s.port_counters(PortId(0)).unwrap().to_remote_packets, 1);
}

#[test]
fn egress_can_be_restricted_without_affecting_replies() {
    let rules = vec![allow(Direction::Ingress, tcp_to(80)), allow(Direction::Egress, tcp_to(443))];
    let mut s = switch_of(&guarded(rules));
    assert_eq!(leaves(&mut s, &segment(1, 3, (5000, 443), SYN)), Ok(()));
    assert_eq!(leaves(&mut s, &segment(1, 3, (5000, 22), SYN)), OUT);
    assert_eq!(leaves(&mut s, &segment(1, 3, (80, 6000), SYN | ACK)), OUT);
    assert_eq!(arrives(&mut s, &segment(3, 1, (6000, 80), SYN)), Ok(()));
    assert_eq!(leaves(&mut s, &segment(1, 3, (80, 6000), SYN | ACK)), Ok(()));
}

#[test]
fn both_ports_are_checked_when_guests_share_a_host() {
    let mut tables = guarded(vec![allow(Direction::Ingress, tcp_to(80))]);
    let mut s = switch_of(&tables);
    assert_eq!(guest(&mut s, 1, &segment(2, 1, (5000, 81), SYN)), Verdict::drop(DropReason::GroupIngress));
    assert!(matches!(
        guest(&mut s, 1, &segment(2, 1, (5000, 80), SYN)).action,
        Action::Deliver { port: PortId(0), .. }
    ));
    assert!(matches!(guest(&mut s, 0, &segment(1, 2, (80, 5000), SYN | ACK)).action, Action::Deliver { .. }));
    // The other port gets a second group, which allows only DNS from its guest.
    let dns = Pattern { protocol: Some(17), dst_ports: 53..=53, ..Pattern::default() };
    tables.groups.push(SecurityGroup::new(vec![allow(Direction::Egress, dns)]));
    tables.ports[1].groups = vec![GroupId(1)];
    s.replace(&tables).unwrap();
    assert_eq!(guest(&mut s, 1, &segment(2, 1, (5001, 80), SYN)), Verdict::drop(DropReason::GroupEgress));
    assert_eq!(guest(&mut s, 1, &datagram(2, 1, (5001, 53))), Verdict::drop(DropReason::GroupIngress));
}

#[test]
fn groups_of_one_port_add_up() {
    let mut tables = guarded(vec![allow(Direction::Ingress, tcp_to(80))]);
    tables.groups.push(SecurityGroup::new(vec![allow(Direction::Ingress, tcp_to(22))]));
    tables.ports[0].groups = vec![GroupId(0), GroupId(1)];
    let mut s = switch_of(&tables);
    let open = [21, 22, 80].map(|port| arrives(&mut s, &segment(3, 1, (5000, port), SYN)).is_ok());
    assert_eq!(open, [false, true, true]);
    tables.ports[0].groups = vec![GroupId(7)];
    assert!(Switch::build(&tables, 0).is_err(), "a group that does not exist");
}

/// A port-unreachable error from `from` to guest 1, about the quoted packet.
fn unreachable(from: u8, to: &str, quoted: &[u8]) -> Vec<u8> {
    let body = [&[3, 3, 0, 0, 0, 0, 0, 0], &quoted[14..]].concat();
    packet((mac(from), mac(1)), &format!("10.0.0.{from}"), to, 64, 1, &body)
}

#[test]
fn icmp_errors_pass_only_between_the_ends_of_the_quoted_packet() {
    let mut tables = guarded(vec![]);
    tables.ports[0].addresses.push(ip("10.0.0.11"));
    let sent = datagram(1, 3, (4000, 53));
    let mut later = sent.clone();
    later[21] = 1;
    let mut short = sent.clone();
    short.truncate(14 + 24);
    let mut no_payload = sent.clone();
    no_payload[17] = 20;
    let mut from_another = sent.clone();
    from_another[29] = 11;
    let about = |quoted: &[u8]| unreachable(3, "10.0.0.1", quoted);
    let cases = [
        ("the packet", about(&sent), Ok(())),
        ("from a third one", unreachable(2, "10.0.0.1", &sent), IN),
        ("to another address of the guest's", unreachable(3, "10.0.0.11", &sent), IN),
        ("with ports alone", about(&short), IN),
        ("about a later fragment", about(&later), IN),
        ("about a packet without them", about(&no_payload), IN),
        ("about another sender's", about(&from_another), IN),
        ("about the other direction", about(&datagram(3, 1, (53, 4000))), IN),
    ];
    for (name, frame, expected) in cases {
        let mut s = switch_of(&tables);
        assert_eq!(leaves(&mut s, &sent), Ok(()));
        let got = if frame[11] == 2 {
            match guest(&mut s, 1, &frame).action {
                Action::Drop(reason) => Err(reason),
                _ => Ok(()),
            }
        } else {
            arrives(&mut s, &frame)
        };
        assert_eq!(got, expected, "{name}");
    }
    // From a router with its own address: vNIC 4, with 10.1.0.0/16 behind it.
    let mut s = switch_of(&tables);
    let ask = udp((mac(1), GATEWAY_MAC), "10.0.0.1", "10.1.2.3", (4000, 53));
    assert_eq!(leaves(&mut s, &ask), Ok(()));
    let body = [&[11, 0, 0, 0, 0, 0, 0, 0], &ask[14..]].concat();
    let from = |address: &str| packet((GATEWAY_MAC, mac(1)), address, "10.0.0.1", 64, 1, &body);
    assert_eq!(underlay(&mut s, 100, 2, &from("10.1.0.1")), Ok(PortId(0)));
    assert_eq!(underlay(&mut s, 100, 1, &from("10.0.0.3")), Err(DropReason::GroupIngress));
}

#[test]
fn icmp_messages_admit_only_their_replies() {
    let mut s = switch_of(&guarded(vec![]));
    let message = |from: u8, to: u8, kind: u8| {
        let body = [kind, 0, 0, 0, 0, 13, 0, 0, 0, 0, 0, 0];
        packet((mac(from), mac(to)), &format!("10.0.0.{from}"), &format!("10.0.0.{to}"), 64, 1, &body)
    };
    assert_eq!(leaves(&mut s, &message(1, 3, 13)), Ok(()), "a question for the time");
    for kind in [0, 3, 5, 8, 9, 11, 12, 15, 17, 18, 200] {
        assert_eq!(arrives(&mut s, &message(3, 1, kind)), IN, "{kind}");
    }
    assert_eq!(arrives(&mut s, &message(3, 1, 14)), Ok(()), "its answer");
    // Errors and redirects do not begin a conversation.
    for kind in [3, 5, 11] {
        assert_eq!(leaves(&mut s, &message(1, 3, kind)), Ok(()));
        assert_eq!(arrives(&mut s, &message(3, 1, kind)), IN, "{kind}");
    }
    assert_eq!(s.session_counters().created, 1);
}

#[test]
fn icmp_errors_about_allowed_packets_pass() {
    let mut s = switch_of(&guarded(vec![]));
    let sent = datagram(1, 3, (4000, 53));
    let unreachable = |quoted: &[u8]| {
        let body = [&[3, 3, 0, 0, 0, 0, 0, 0], &quoted[14..42]].concat();
        packet((mac(3), mac(1)), "10.0.0.3", "10.0.0.1", 64, 1, &body)
    };
    assert_eq!(arrives(&mut s, &unreachable(&sent)), IN, "about no known packet");
    assert_eq!(leaves(&mut s, &sent), Ok(()));
    assert_eq!(arrives(&mut s, &unreachable(&sent)), Ok(()));
    assert_eq!(arrives(&mut s, &unreachable(&datagram(1, 3, (4001, 53)))), IN);
    // Quotes that are truncated or have a wrong length.
    for length in 14..42 {
        let mut cut = sent.clone();
        cut.truncate(length);
        cut.resize(42, 0xff);
        let _ = arrives(&mut s, &unreachable(&cut));
    }
}

#[test]
fn a_ping_admits_its_reply_but_no_ping_back() {
    let mut s = switch_of(&guarded(vec![]));
    let (there, back) = ((mac(1), mac(3)), (mac(3), mac(1)));
    let mut reply = ping(back, "10.0.0.3", "10.0.0.1", b"x");
    reply[34] = 0;
    assert_eq!(arrives(&mut s, &reply), IN);
    assert_eq!(leaves(&mut s, &ping(there, "10.0.0.1", "10.0.0.3", b"x")), Ok(()));
    assert_eq!(arrives(&mut s, &reply), Ok(()));
    assert_eq!(arrives(&mut s, &ping(back, "10.0.0.3", "10.0.0.1", b"x")), IN, "a request with the same identifier");
}

#[test]
fn address_resolution_always_passes() {
    let mut s = switch_of(&guarded(vec![allow(Direction::Egress, tcp_to(1))]));
    let request = arp((mac(1), Mac::BROADCAST), arp::Operation::Request, (mac(1), "10.0.0.1"), (mac(0), "10.0.0.3"));
    assert_eq!(guest(&mut s, 0, &request), answered());
    assert_eq!(leaves(&mut s, &datagram(1, 3, (1, 1))), OUT);
}

#[test]
fn a_change_of_rules_ends_sessions_that_are_no_longer_allowed() {
    let both = guarded(vec![allow(Direction::Ingress, tcp_to(80)), allow(Direction::Ingress, tcp_to(81))]);
    let mut s = switch_of(&both);
    for port in [80, 81] {
        assert_eq!(arrives(&mut s, &segment(3, 1, (5000, port), SYN)), Ok(()));
        assert_eq!(leaves(&mut s, &segment(1, 3, (port, 5000), SYN | ACK)), Ok(()));
    }
    s.replace(&guarded(vec![allow(Direction::Ingress, tcp_to(80)), allow(Direction::Egress, tcp_to(443))])).unwrap();
    assert_eq!(leaves(&mut s, &segment(1, 3, (80, 5000), ACK)), Ok(()), "still allowed, in the direction it began");
    assert_eq!(leaves(&mut s, &segment(1, 3, (81, 5000), ACK)), OUT);
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 81), ACK)), IN);
    assert_eq!((s.session_counters().revoked, s.session_counters().current), (1, 1));
    // Without groups there are no checks.
    s.replace(&tables()).unwrap();
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 81), ACK)), Ok(()));
}

#[test]
fn a_reused_port_number_inherits_no_session() {
    let mut tables = guarded(vec![]);
    let mut s = switch_of(&tables);
    assert_eq!(leaves(&mut s, &datagram(1, 3, (4000, 53))), Ok(()));
    tables.ports[0].mac = mac(9);
    s.replace(&tables).unwrap();
    assert_eq!(s.session_counters().current, 0);
}

#[test]
fn a_flood_evicts_neither_established_sessions_nor_those_of_other_ports() {
    let mut tables = guarded(vec![allow(Direction::Ingress, tcp_to(80))]);
    tables.ports[1].groups = vec![GroupId(0)];
    let room: u16 = if cfg!(miri) { 10 } else { 100 };
    tables.sessions = SessionLimits { total: 2 * u32::from(room), per_port: u32::from(room) };
    let mut s = switch_of(&tables);
    let connect = |s: &mut Switch, port: u32, from: u16, to: u8| {
        assert!(matches!(underlay(s, 100, 1, &segment(3, to, (from, 80), SYN)), Ok(at) if at == PortId(port)));
        assert!(!matches!(guest(s, port, &segment(to, 3, (80, from), SYN | ACK)).action, Action::Drop(_)));
        underlay(s, 100, 1, &segment(3, to, (from, 80), ACK)).unwrap();
    };
    connect(&mut s, 0, 1, 1);
    connect(&mut s, 1, 2, 2);
    for from in 1000..1000 + 20 * room {
        underlay(&mut s, 100, 1, &segment(3, 1, (from, 80), SYN)).unwrap();
    }
    let c = *s.session_counters();
    assert_eq!((c.current, c.established, c.evicted), (u64::from(room) + 1, 2, u64::from(19 * room) + 1));
    // Both ports still have their sessions.
    assert!(!matches!(guest(&mut s, 0, &segment(1, 3, (80, 1), ACK)).action, Action::Drop(_)));
    connect(&mut s, 1, 3, 2);
    // All sessions are established: a port that has all of them evicts one for the next.
    for from in 10_000..10_000 + 2 * room {
        connect(&mut s, 0, from, 1);
    }
    assert_eq!(arrives(&mut s, &segment(3, 1, (20_000, 80), SYN)), Ok(()));
    let c = s.session_counters();
    // Except the newest, and one that was never established: some room is reserved for new sessions.
    assert_eq!(c.current, u64::from(room) + 2);
    assert!(c.established >= u64::from(room), "{c:?}");
}

#[test]
fn an_acl_judges_each_packet_by_itself() {
    let mut tables = tables();
    let rule = |direction, allow, pattern| AclRule { direction, pattern, allow, log: None };
    let from_three = Pattern { src: Some("10.0.0.3/32".parse().unwrap()), ..tcp_to(80) };
    tables.vpcs[0].acl = vec![
        rule(Direction::Ingress, true, from_three),
        rule(Direction::Ingress, false, tcp_to(80)),
        rule(Direction::Egress, false, Pattern { protocol: Some(17), ..Pattern::default() }),
    ];
    let mut s = switch_of(&tables);
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 80), SYN)), Ok(()));
    let refused = Verdict::drop(DropReason::Acl);
    assert_eq!(guest(&mut s, 1, &segment(2, 1, (5000, 80), SYN)), refused, "the first rule that matches decides");
    assert!(matches!(guest(&mut s, 1, &segment(2, 1, (5000, 81), SYN)).action, Action::Deliver { .. }));
    assert_eq!(guest(&mut s, 1, &datagram(2, 3, (1, 1))), refused);
    assert_eq!(s.session_counters().created, 0);
    assert_eq!(s.port_counters(PortId(1)).unwrap().dropped.packets(DropReason::Acl), 2);
}

#[test]
fn a_remote_group_means_its_members_in_the_same_network() {
    let from = |remote| GroupRule { remote, ..allow(Direction::Ingress, tcp_to(80)) };
    let mut tables = guarded(vec![from(Remote::Group(GroupId(1)))]);
    tables.groups.push(SecurityGroup::default());
    tables.ports[0].groups = vec![GroupId(0)];
    // Port 1 has no ingress rule but is a member; vNIC 3 is a member in another network only.
    tables.ports[1].groups = vec![GroupId(1)];
    let member = |of, prefix: &str| Member { vni: vni(of), group: GroupId(1), prefix: prefix.parse().unwrap() };
    tables.members = vec![member(200, "10.0.0.3/32")];
    let mut s = switch_of(&tables);
    let knock = |s: &mut Switch, source| guest(s, 1, &segment(2, 1, (source, 80), SYN)).action;
    assert!(matches!(knock(&mut s, 5000), Action::Deliver { port: PortId(0), .. }));
    assert_eq!(guest(&mut s, 1, &segment(2, 1, (5000, 81), SYN)), Verdict::drop(DropReason::GroupIngress));
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 80), SYN)), IN, "a member of another network");

    // A vNIC of another host becomes a member, and the local one leaves: its connection ends.
    tables.members.push(member(100, "10.0.0.3/32"));
    tables.ports[1].groups.clear();
    s.replace(&tables).unwrap();
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 80), SYN)), Ok(()));
    let data = segment(2, 1, (5000, 80), ACK);
    assert_eq!(guest(&mut s, 1, &data), Verdict::drop(DropReason::GroupIngress), "no member any longer");

    tables.groups[0].rules[0].remote = Remote::Group(GroupId(9));
    assert!(matches!(s.replace(&tables), Err(BuildError::UnknownGroup(GroupId(9)))));
}

#[test]
fn a_set_of_addresses_changes_member_by_member() {
    let rules = vec![
        GroupRule { remote: Remote::Set(AddressSetId(0)), ..allow(Direction::Ingress, tcp_to(80)) },
        GroupRule { remote: Remote::Set(AddressSetId(0)), ..allow(Direction::Egress, tcp_to(443)) },
        allow(Direction::Ingress, tcp_to(22)),
    ];
    let mut tables = guarded(rules);
    let with = |nets: &[&str]| vec![nets.iter().map(|net| net.parse().unwrap()).collect::<Vec<_>>()];
    assert!(matches!(Switch::build(&tables, 0), Err(BuildError::UnknownSet(AddressSetId(0)))));
    tables.address_sets = with(&["10.0.0.2/32"]);
    let mut s = switch_of(&tables);
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 80), SYN)), IN);
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 22), SYN)), Ok(()), "a rule about anybody");
    assert_eq!(leaves(&mut s, &segment(1, 3, (5000, 443), SYN)), OUT, "the set means the other end");
    // Duplicates, also within a wider prefix: sets may overlap.
    tables.address_sets = with(&["10.0.0.3/32", "10.0.0.3/32", "10.0.0.2/31"]);
    s.replace(&tables).unwrap();
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 80), SYN)), Ok(()));
    assert_eq!(leaves(&mut s, &segment(1, 3, (5000, 443), SYN)), Ok(()));
    tables.address_sets = with(&["10.0.0.2/32"]);
    s.replace(&tables).unwrap();
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 80), ACK)), IN, "its connection ends");
    assert_eq!(arrives(&mut s, &segment(3, 1, (5000, 22), ACK)), Ok(()), "the other one goes on");
}

#[test]
fn egress_can_be_closed_without_a_rule() {
    let mut tables = guarded(vec![allow(Direction::Ingress, tcp_to(80))]);
    tables.groups[0].restricts_egress = true;
    let mut s = switch_of(&tables);
    assert_eq!(leaves(&mut s, &segment(1, 3, (5000, 443), SYN)), OUT);
    assert_eq!(arrives(&mut s, &segment(3, 1, (6000, 80), SYN)), Ok(()));
    assert_eq!(leaves(&mut s, &segment(1, 3, (80, 6000), SYN | ACK)), Ok(()), "answers pass");
    // Groups are additive: the rule of another group allows more.
    tables.groups.push(SecurityGroup::new(vec![allow(Direction::Egress, tcp_to(443))]));
    tables.ports[0].groups.push(GroupId(1));
    s.replace(&tables).unwrap();
    assert_eq!(leaves(&mut s, &segment(1, 3, (5000, 443), SYN)), Ok(()));
    assert_eq!(leaves(&mut s, &segment(1, 3, (5000, 22), SYN)), OUT);
}

/// Rules about sets and groups, compared with a classifier that has a rule for each pair of rule and member.
#[test]
fn rules_about_sets_are_those_of_their_members() {
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 0..200 {
        let address = |rng: &mut fastrand::Rng| format!("10.0.0.{}", rng.u8(2..6));
        let set = |rng: &mut fastrand::Rng| -> Vec<IpNet> {
            (0..rng.usize(0..4)).map(|_| format!("{}/{}", address(rng), rng.u8(30..33)).parse().unwrap()).collect()
        };
        let sets: Vec<Vec<IpNet>> = (0..3).map(|_| set(&mut rng)).collect();
        let rule = |rng: &mut fastrand::Rng| {
            let remote = match rng.u16(0..4) {
                3 => Remote::Anybody,
                n => Remote::Set(AddressSetId(n)),
            };
            GroupRule { remote, ..allow(Direction::Ingress, tcp_to(rng.u16(80..83))) }
        };
        let rules: Vec<GroupRule> = (0..rng.usize(1..6)).map(|_| rule(&mut rng)).collect();
        let mut named = guarded(rules.clone());
        named.address_sets = sets.clone();
        let alternatives = rules.iter().flat_map(|rule| match rule.remote {
            Remote::Set(id) => sets[usize::from(id.0)]
                .iter()
                .map(|net| allow(Direction::Ingress, Pattern { src: Some(*net), ..rule.pattern.clone() }))
                .collect(),
            _ => vec![rule.clone()],
        });
        let listed = guarded(alternatives.collect());
        let (mut named, mut listed) = (switch_of(&named), switch_of(&listed));
        for port in 80..83 {
            let frame = segment(3, 1, (5000, port), SYN);
            assert_eq!(arrives(&mut named, &frame), arrives(&mut listed, &frame), "round {round}, port {port}");
            let frame = segment(2, 1, (5000, port), SYN);
            assert_eq!(guest(&mut named, 1, &frame), guest(&mut listed, 1, &frame), "round {round}, port {port}");
        }
    }
}
