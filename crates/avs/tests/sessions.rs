//! Floods of conversations: a guest can still begin new ones, and established ones survive.

#![allow(clippy::unwrap_used, clippy::panic)]

mod common;

use bifrost_avs::{
    Action, CarryError, Class, Direction, DropReason, GATEWAY_MAC, GroupId, GroupRule, Pattern, PortId, SecurityGroup,
    SessionLimits, SessionView, Switch, Tables, read_moving_sessions, write_moving_sessions,
};
use common::any::{SECOND, SYN};
use common::*;

const ACK: u8 = 0x10;
const FIN: u8 = 0x11;

/// Guest 1 accepts UDP port 53 and TCP port 80 from everybody.
fn server(room: u32) -> Tables {
    let mut tables = tables();
    let open = |protocol, port| Pattern { protocol: Some(protocol), dst_ports: port..=port, ..Pattern::default() };
    let rules = [open(17, 53), open(6, 80)].map(|pattern| GroupRule::new(Direction::Ingress, pattern));
    tables.groups = vec![SecurityGroup::new(rules.to_vec())];
    tables.ports[0].groups = vec![GroupId(0)];
    tables.sessions = SessionLimits { per_port: room, ..SessionLimits::default() };
    tables
}

/// A remote host: vNIC 3, or one in the network behind vNIC 4 and the gateway.
#[derive(Clone, Copy)]
struct Remote {
    number: u16,
}

impl Remote {
    fn address(self) -> String {
        match self.number {
            0 => "10.0.0.3".to_owned(),
            n => format!("10.1.{}.{}", n >> 8, n & 255),
        }
    }

    /// A frame to the guest, or from it.
    fn frame(self, to_guest: bool, protocol: u8, (remote, local): (u16, u16), flags: u8) -> Vec<u8> {
        let (ports, other) = (if to_guest { [remote, local] } else { [local, remote] }, self.address());
        let mut body = vec![0; if protocol == 6 { 20 } else { 8 }];
        body[..2].copy_from_slice(&ports[0].to_be_bytes());
        body[2..4].copy_from_slice(&ports[1].to_be_bytes());
        match protocol {
            6 => (body[12], body[13]) = (0x50, flags),
            _ => body[5] = 8,
        }
        let mac_there = if self.number == 0 { mac(3) } else { GATEWAY_MAC };
        if to_guest {
            packet((mac_there, mac(1)), &other, "10.0.0.1", 64, protocol, &body)
        } else {
            packet((mac(1), mac_there), "10.0.0.1", &other, 64, protocol, &body)
        }
    }

    fn says(self, s: &mut Switch, protocol: u8, ports: (u16, u16), flags: u8) -> Result<(), DropReason> {
        let peer = if self.number == 0 { 1 } else { 2 };
        underlay(s, 100, peer, &self.frame(true, protocol, ports, flags)).map(|port| assert_eq!(port, PortId(0)))
    }

    fn is_told(self, s: &mut Switch, protocol: u8, ports: (u16, u16), flags: u8) -> Result<(), DropReason> {
        match guest(s, 0, &self.frame(false, protocol, ports, flags)).action {
            Action::Drop(reason) => Err(reason),
            _ => Ok(()),
        }
    }

    fn connects(self, s: &mut Switch, from: u16) -> Result<(), DropReason> {
        self.says(s, 6, (from, 80), SYN)?;
        self.is_told(s, 6, (from, 80), SYN | ACK)?;
        self.says(s, 6, (from, 80), ACK)
    }

    /// The guest connects to this host.
    fn is_connected(self, s: &mut Switch, from: u16) -> Result<(), DropReason> {
        self.is_told(s, 6, (443, from), SYN)?;
        self.says(s, 6, (443, from), SYN | ACK)?;
        self.is_told(s, 6, (443, from), ACK)
    }
}

const NEIGHBOUR: Remote = Remote { number: 0 };

/// What an attacker does with one source port.
type Attack = fn(&mut Switch, Remote, u16) -> Result<(), DropReason>;

fn exchange(s: &mut Switch, from: Remote, port: u16) -> Result<(), DropReason> {
    from.says(s, 17, (port, 53), 0)?;
    from.is_told(s, 17, (port, 53), 0)
}

/// Sends a query.
fn question(s: &mut Switch, from: Remote, port: u16) -> Result<(), DropReason> {
    from.says(s, 17, (port, 53), 0)
}

fn connection(s: &mut Switch, from: Remote, port: u16) -> Result<(), DropReason> {
    from.connects(s, port)
}

/// A connection in which only the guest has sent FIN.
fn half_closed(s: &mut Switch, from: Remote, port: u16) -> Result<(), DropReason> {
    from.connects(s, port)?;
    from.is_told(s, 6, (port, 80), FIN)
}

fn half_open(s: &mut Switch, from: Remote, port: u16) -> Result<(), DropReason> {
    from.says(s, 6, (port, 80), SYN)?;
    from.is_told(s, 6, (port, 80), SYN | ACK)
}

#[test]
#[cfg_attr(miri, ignore = "hundreds of thousands of packets")]
fn floods_neither_block_new_sessions_nor_end_established_ones() {
    let attacks: [(&str, Attack); 5] = [
        ("exchanges of one question and one answer", exchange),
        ("questions without an answer", question),
        ("connections that are never completed", half_open),
        ("clients that vanish before they close", half_closed),
        ("clients that vanish once connected", connection),
    ];
    let room = 4096u32;
    for (name, attack) in attacks {
        for sources in [1, 400] {
            let mut s = Switch::build(&server(room), 1).unwrap();
            s.advance(1000 * SECOND);
            let established = [NEIGHBOUR.connects(&mut s, 1), NEIGHBOUR.is_connected(&mut s, 2)];
            assert_eq!(established, [Ok(()), Ok(())]);
            for n in 0..2 * room {
                let from = Remote { number: 1 + (n % sources) as u16 };
                assert_eq!(attack(&mut s, from, 1000 + (n / sources) as u16), Ok(()), "{name}: {n}");
                if n % 500 == 0 {
                    // Keep the established connections in use.
                    NEIGHBOUR.says(&mut s, 6, (1, 80), ACK).unwrap();
                    NEIGHBOUR.says(&mut s, 6, (443, 2), ACK).unwrap_or_else(|e| panic!("{name}: {e}"));
                    s.advance((1000 + u64::from(n) / 100) * SECOND);
                }
            }
            let sessions = s.port_sessions(PortId(0)).unwrap();
            // Port 2 of the guest is reachable only because its own connection is tracked.
            assert_eq!(NEIGHBOUR.says(&mut s, 6, (443, 2), ACK), Ok(()), "{name}");
            // New conversations still work: connections from and to the guest, queries to and from it.
            assert_eq!(NEIGHBOUR.is_connected(&mut s, 3), Ok(()), "{name}");
            assert_eq!(NEIGHBOUR.connects(&mut s, 4), Ok(()), "{name}");
            assert_eq!(exchange(&mut s, NEIGHBOUR, 5), Ok(()), "{name}");
            assert_eq!(NEIGHBOUR.is_told(&mut s, 17, (53, 6), 0), Ok(()), "{name}");
            assert_eq!(NEIGHBOUR.says(&mut s, 17, (53, 6), 0), Ok(()), "{name}");
            assert!(sessions.current <= room, "{name}: {sessions:?}");
            let port = s.port_counters(PortId(0)).unwrap();
            let refused =
                port.dropped.packets(DropReason::SessionsFull) + port.ingress_dropped.packets(DropReason::SessionsFull);
            assert_eq!(refused, 0, "{name}");
        }
    }
}

#[test]
fn evictions_are_counted_by_class_for_the_port() {
    let mut s = Switch::build(&server(16), 1).unwrap();
    s.advance(1000 * SECOND);
    let others = [1, 2].map(|number| Remote { number });
    (0..10).for_each(|n| question(&mut s, others[0], n).unwrap());
    (0..10).for_each(|n| exchange(&mut s, others[1], n).unwrap());
    (0..20).for_each(|n| connection(&mut s, NEIGHBOUR, n).unwrap());
    let sessions = s.port_sessions(PortId(0)).unwrap();
    let [unanswered, answered, closing, assured, established] = sessions.evicted;
    assert_eq!((sessions.current, sessions.evicted.iter().sum::<u64>()), (16, 24));
    assert!(unanswered > 0 && answered > 0 && established > 0, "{sessions:?}");
    assert_eq!((closing, assured), (0, 0));
    assert_eq!(s.session_counters().evicted, 24);
    s.forget_counters(PortId(0));
    assert_eq!(s.port_sessions(PortId(0)).unwrap().evicted, [0; 5]);
    assert_eq!((s.port_sessions(PortId(7)), s.port_sessions(PortId(1)).unwrap().current), (None, 0));
}

#[test]
fn sessions_expire_by_state() {
    type Begin = fn(&mut Switch);
    // The last packet of each case is at 1000 s. The number is the timeout, s.
    let cases: [(&str, Begin, (u8, u16), u64); 6] = [
        ("a question", |s| NEIGHBOUR.is_told(s, 17, (53, 9), 0).unwrap(), (17, 53), 30),
        (
            "a question and its answer",
            |s| {
                NEIGHBOUR.is_told(s, 17, (53, 9), 0).unwrap();
                NEIGHBOUR.says(s, 17, (53, 9), 0).unwrap();
            },
            (17, 53),
            30,
        ),
        (
            "datagrams that go on",
            |s| {
                s.advance(995 * SECOND);
                NEIGHBOUR.is_told(s, 17, (53, 9), 0).unwrap();
                NEIGHBOUR.says(s, 17, (53, 9), 0).unwrap();
                s.advance(1000 * SECOND);
                NEIGHBOUR.is_told(s, 17, (53, 9), 0).unwrap();
            },
            (17, 53),
            180,
        ),
        ("a SYN", |s| NEIGHBOUR.is_told(s, 6, (443, 9), SYN).unwrap(), (6, 443), 120),
        ("a connection", |s| NEIGHBOUR.is_connected(s, 9).unwrap(), (6, 443), 7440),
        (
            "one that is half closed",
            |s| {
                NEIGHBOUR.is_connected(s, 9).unwrap();
                NEIGHBOUR.is_told(s, 6, (443, 9), FIN).unwrap();
            },
            (6, 443),
            240,
        ),
    ];
    for (name, begin, (protocol, remote), seconds) in cases {
        for (later, expected) in [(seconds - 1, Ok(())), (seconds + 2, Err(DropReason::GroupIngress))] {
            let mut s = Switch::build(&server(4096), 1).unwrap();
            s.advance(990 * SECOND);
            if name != "datagrams that go on" {
                s.advance(1000 * SECOND);
            }
            begin(&mut s);
            if !cfg!(miri) || later < 500 {
                s.advance((1000 + later) * SECOND);
                assert_eq!(NEIGHBOUR.says(&mut s, protocol, (remote, 9), ACK), expected, "{name}, {later} s later");
            }
        }
    }
}

#[test]
fn a_record_is_never_used_for_a_session_that_reuses_its_slot() {
    let mut s = Switch::build(&server(16), 1).unwrap();
    s.advance(1000 * SECOND);
    let known = |s: &Switch| s.flow_counters().found_packets + s.flow_counters().batched_packets;
    // The guest sends a query, and the replies have a flow record.
    NEIGHBOUR.is_told(&mut s, 17, (53, 9), 0).unwrap();
    (0..4).for_each(|_| NEIGHBOUR.says(&mut s, 17, (53, 9), 0).unwrap());
    let before = known(&s);
    NEIGHBOUR.says(&mut s, 17, (53, 9), 0).unwrap();
    assert_eq!(known(&s), before + 1);
    // Other sessions replace it, also in its slot of the array; all within the same turn.
    for n in 0..200 {
        let other = Remote { number: 1 + n };
        other.is_told(&mut s, 17, (53, n), 0).unwrap();
        other.says(&mut s, 17, (53, n), 0).unwrap();
    }
    let before = known(&s);
    assert_eq!(NEIGHBOUR.says(&mut s, 17, (53, 9), 0), Err(DropReason::GroupIngress));
    assert_eq!(known(&s), before);
}

#[test]
fn another_switch_continues_sessions() {
    let tables = server(4096);
    let mut first = Switch::build(&tables, 1).unwrap();
    first.advance(1000 * SECOND);
    // The guest may connect anywhere; nobody may connect to these ports.
    for from in 1..=20 {
        NEIGHBOUR.is_connected(&mut first, from).unwrap();
    }
    half_closed(&mut first, NEIGHBOUR, 7000).unwrap();
    let mut bytes = Vec::new();
    first.carry_memory(&mut bytes);
    let mut second = Switch::build(&tables, 2).unwrap();
    assert_eq!(NEIGHBOUR.says(&mut second, 6, (443, 1), ACK), Err(DropReason::GroupIngress), "not let in before");
    let taken = second.take_over_memory(1000 * SECOND, &bytes).unwrap();
    assert_eq!((taken.sessions, taken.left_out), (21, 0));
    let counters = *second.session_counters();
    assert_eq!((counters.current, counters.established), (21, first.session_counters().established));
    for from in 1..=20 {
        NEIGHBOUR.says(&mut second, 6, (443, from), ACK).unwrap();
    }
    assert_eq!(NEIGHBOUR.says(&mut second, 6, (443, 21), ACK), Err(DropReason::GroupIngress));
    // Existing sessions stay, and timeouts continue from the last packet.
    assert_eq!(second.take_over_memory(1000 * SECOND, &bytes).unwrap().left_out, 21);
    second.advance(1200 * SECOND);
    second.advance(1300 * SECOND);
    assert_eq!(second.session_counters().current, 20, "the half-closed one has ended");
    assert_eq!(second.session_counters().revoked, 0);
}

/// The switch evicts the sessions that are idle for longest first, whether it has them from another one or not.
#[test]
fn copies_keep_the_order_in_which_sessions_are_evicted() {
    let bound = 8;
    let tables = server(bound);
    let mut first = Switch::build(&tables, 1).unwrap();
    first.advance(1000 * SECOND);
    for from in 1..=8 {
        NEIGHBOUR.is_connected(&mut first, from).unwrap();
    }
    // Later packets: the sessions with the lowest places are no longer the ones that are idle for longest.
    first.advance(1100 * SECOND);
    for from in 1..=4 {
        NEIGHBOUR.says(&mut first, 6, (443, from), ACK).unwrap();
        NEIGHBOUR.is_told(&mut first, 6, (443, from), ACK).unwrap();
    }
    let (mut second, mut copying) = (Switch::build(&tables, 2).unwrap(), first.start_copying());
    loop {
        let mut bytes = Vec::new();
        let left = first.copy_some(&mut copying, 3, &mut bytes);
        copying.sort();
        second.take_over_copies(1100 * SECOND, &bytes).unwrap();
        if left == 0 {
            break;
        }
    }
    let mut rest = Vec::new();
    first.copy_rest(&mut rest);
    assert_eq!(second.take_over_memory(1100 * SECOND, &rest).unwrap().sessions, 8);
    for from in 11..=14 {
        NEIGHBOUR.is_connected(&mut second, from).unwrap();
    }
    assert_eq!(second.session_counters().evicted, 4);
    for from in 1..=4 {
        NEIGHBOUR.says(&mut second, 6, (443, from), ACK).unwrap();
    }
}

/// The sessions of a port, serialized for another host.
fn moving(switch: &Switch, port: PortId) -> Vec<u8> {
    write_moving_sessions(
        (0..switch.moving_places()).filter_map(|place| switch.moving_session_at(port, place)).collect(),
    )
}

/// Takes over all readable sessions; returns the numbers of those taken over and of those left out.
fn take_over(switch: &mut Switch, port: PortId, bytes: &[u8]) -> Result<(usize, usize), CarryError> {
    let (sessions, unreadable) = read_moving_sessions(bytes)?;
    let taken = sessions.iter().filter(|session| switch.take_over_session(port, session)).count();
    Ok((taken, sessions.len() - taken + unreadable as usize))
}

#[test]
fn the_switch_of_another_host_continues_a_ports_sessions() {
    let tables = server(4096);
    let mut first = Switch::build(&tables, 1).unwrap();
    first.advance(5000 * SECOND);
    for from in 1..=20 {
        NEIGHBOUR.is_connected(&mut first, from).unwrap();
    }
    half_closed(&mut first, NEIGHBOUR, 7000).unwrap();
    first.advance(5100 * SECOND);
    let bytes = moving(&first, tables.ports[0].id);
    // On the other host the port has another number, and the clock another origin.
    let there = |number: u32| {
        let mut tables = server(4096);
        tables.ports[0].id = PortId(number);
        let mut second = Switch::build(&tables, 2).unwrap();
        second.advance(300 * SECOND);
        (second, tables.ports[0].id)
    };
    let (mut second, port) = there(9);
    assert_eq!(take_over(&mut second, port, &bytes), Ok((21, 0)));
    assert_eq!(take_over(&mut second, port, &bytes), Ok((0, 21)), "existing sessions stay");
    second.advance(420 * SECOND);
    assert_eq!(second.session_counters().current, 21);
    second.advance(520 * SECOND);
    assert_eq!(second.session_counters().current, 20, "the half-closed one had 100 s of its 240 s behind it");
    // Another port does not get the sessions, and malformed data is rejected.
    let (mut other, _) = there(9);
    assert_eq!(take_over(&mut other, PortId(3), &bytes), Ok((0, 21)));
    assert_eq!(read_moving_sessions(&moving(&first, PortId(3))), Ok((Vec::new(), 0)));
    for cut in 0..bytes.len() {
        assert!(read_moving_sessions(&bytes[..cut]).is_err() || cut == 8, "{cut}");
    }
    let mut foreign = bytes.clone();
    foreign[4] = 2;
    assert_eq!(read_moving_sessions(&foreign), Err(CarryError::Foreign));
    let mut random = fastrand::Rng::with_seed(7);
    for _ in 0..2000 {
        let mut damaged = bytes.clone();
        (0..random.usize(1..6)).for_each(|_| damaged[random.usize(..bytes.len())] = random.u8(..));
        let (mut second, port) = there(9);
        if let Ok((taken, left_out)) = take_over(&mut second, port, &damaged) {
            assert!(taken + left_out <= 21);
        }
    }
}

#[test]
fn sessions_are_listed_by_position() {
    let tables = server(4096);
    let mut switch = Switch::build(&tables, 1).unwrap();
    switch.advance(5000 * SECOND);
    for from in 1..=3 {
        NEIGHBOUR.is_connected(&mut switch, from).unwrap();
    }
    switch.advance(5100 * SECOND);
    half_closed(&mut switch, NEIGHBOUR, 7000).unwrap();
    let all: Vec<_> = (0..switch.session_places()).filter_map(|place| switch.session_at(place)).collect();
    let [first, _, _, last] = &all[..] else { panic!("{all:?}") };
    // 107 s are 100 of the switch's seconds.
    let since = SessionView {
        port: tables.ports[0].id,
        protocol: 6,
        local: "10.0.0.1:1".parse().unwrap(),
        remote: "10.0.0.3:443".parse().unwrap(),
        origin: Direction::Egress,
        class: Class::Established,
        idle_s: 107,
        expires_s: 7881,
    };
    assert_eq!(*first, since);
    let (local, remote) = ("10.0.0.1:80".parse().unwrap(), "10.0.0.3:7000".parse().unwrap());
    let (origin, class, idle_s, expires_s) = (Direction::Ingress, Class::Closing, 0, 257);
    assert_eq!(*last, SessionView { local, remote, origin, class, idle_s, expires_s, ..since });
    assert_eq!(switch.session_at(switch.session_places()), None);
    switch.advance(5400 * SECOND);
    assert_eq!((0..switch.session_places()).filter_map(|place| switch.session_at(place)).count(), 3, "one has ended");
}
