use std::collections::HashMap;

use bifrost_nic::parse;
use bifrost_wire::tcp::Flags;

use super::*;

const S: u64 = 1 << 30;

/// A key of a port. Conversations have different `n`.
fn key(port: u32, n: u32) -> Key {
    let [a, b, c, d] = n.to_be_bytes();
    // Ethernet, IPv4, UDP: from 10.a.b.c, port d.
    let mut frame = vec![2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0];
    frame.extend([0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, a, b, c, 10, 0, 0, 1]);
    frame.extend([0, d, 0, 53, 0, 8, 0, 0]);
    let parsed = parse(&frame, frame.len()).unwrap();
    Key::of(PortId(port), Direction::Egress, &frame, &parsed)
}

fn sessions(total: u32, per_port: u32) -> Sessions {
    let mut sessions = Sessions::new(SessionLimits { total, per_port }, 1);
    sessions.advance(1000 * S);
    sessions
}

#[test]
fn a_port_evicts_its_own_least_valuable_session() {
    let mut s = sessions(100, 3);
    for n in 0..3 {
        s.insert(key(1, n), Direction::Egress, Event::Datagram, 0, false).unwrap();
    }
    s.insert(key(2, 9), Direction::Egress, Event::Datagram, 0, false).unwrap();
    let answer = |s: &mut Sessions, n| {
        let index = s.find(&key(1, n)).unwrap();
        s.touch(index, Direction::Ingress, Event::Datagram, 0);
    };
    answer(&mut s, 0);
    s.insert(key(1, 3), Direction::Egress, Event::Datagram, 0, false).unwrap();
    let there = |s: &Sessions| [0, 1, 2, 3, 4].map(|n| s.find(&key(1, n)).is_some());
    assert_eq!(there(&s), [true, false, true, true, false], "the first is answered, the second the oldest that is not");
    assert!(s.find(&key(2, 9)).is_some());
    (2..4).for_each(|n| answer(&mut s, n));
    s.insert(key(1, 4), Direction::Egress, Event::Datagram, 0, false).unwrap();
    assert!(
        there(&s)[4] && there(&s).iter().filter(|there| **there).count() == 3,
        "all are answered: one of them goes"
    );
    assert_eq!((s.counters().current, s.counters().established, s.counters().evicted), (4, 2, 2));
    let counted = PortSessions { current: 3, evicted: [1, 1, 0, 0, 0] };
    assert_eq!([1, 2].map(|port| s.of_port(PortId(port))), [counted, PortSessions { current: 1, evicted: [0; 5] }]);
    s.forget_counters(PortId(1));
    assert_eq!(s.of_port(PortId(1)), PortSessions { current: 3, evicted: [0; 5] });
}

#[test]
fn a_session_that_replaces_another_evicts_none() {
    let mut s = sessions(2, 2);
    (0..2).for_each(|n| s.insert(key(1, n), Direction::Egress, Event::Datagram, 0, false).unwrap());
    // Now there are more sessions than the limits allow.
    s.set_limits(SessionLimits { total: 1, per_port: 1 });
    s.remove(s.find(&key(1, 1)).unwrap());
    s.insert(key(1, 1), Direction::Ingress, Event::Datagram, 0, true).unwrap();
    assert_eq!((s.counters().current, s.counters().evicted), (2, 0));
    let mut plan = Planned::NOTHING;
    // A limit of 0 allows no sessions.
    s.set_limits(SessionLimits { total: 1, per_port: 0 });
    assert_eq!(s.insert(key(1, 2), Direction::Egress, Event::Datagram, 0, false), Err(Full));
    assert_eq!(s.plan_insert(&key(1, 2), Direction::Egress, &mut plan), Err(Full));
}

#[test]
fn a_session_has_80_bytes() {
    assert_eq!(size_of::<Session<()>>(), 80);
}

#[test]
fn memory_is_allocated_once() {
    let mut s = sessions(500, 500);
    assert_eq!((s.slab.capacity(), s.index.capacity_bytes()), (0, 0), "none is needed yet");
    s.insert(key(1, 0), Direction::Egress, Event::Datagram, 0, false).unwrap();
    let room = |s: &Sessions| (s.slab.capacity(), s.index.capacity_bytes());
    let made = room(&s);
    (1..600).for_each(|n| s.insert(key(1, n), Direction::Egress, Event::Datagram, 0, false).unwrap());
    assert_eq!((room(&s), s.slab.len(), s.counters().current), (made, 500, 500));
    s.set_limits(SessionLimits { total: 5000, per_port: 5000 });
    (600..6000).for_each(|n| s.insert(key(1, n), Direction::Egress, Event::Datagram, 0, false).unwrap());
    assert_eq!((s.slab.len(), s.counters().current), (5000, 5000));
}

#[test]
fn at_the_total_limit_the_port_with_the_most_sessions_loses_one() {
    let mut s = sessions(4, 4);
    for n in 0..4 {
        s.insert(key(1, n), Direction::Egress, Event::Datagram, 0, false).unwrap();
    }
    s.insert(key(2, 0), Direction::Egress, Event::Datagram, 0, false).unwrap();
    s.insert(key(2, 1), Direction::Egress, Event::Datagram, 0, false).unwrap();
    assert_eq!([0, 1, 2, 3].map(|n| s.find(&key(1, n)).is_some()), [false, false, true, true]);
    assert_eq!(s.counters().current, 4);
}

#[test]
fn sessions_expire_at_their_timeout_and_not_before() {
    let mut s = sessions(10, 10);
    let syn = Event::Tcp(Flags::SYN);
    s.insert(key(0, 0), Direction::Egress, syn, 0, false).unwrap();
    s.insert(key(0, 1), Direction::Egress, syn, 0, false).unwrap();
    s.insert(key(0, 2), Direction::Egress, Event::Icmp, 0, false).unwrap();
    let open = s.find(&key(0, 1)).unwrap();
    s.touch(open, Direction::Ingress, Event::Tcp(Flags::SYN.with(Flags::ACK)), 0);
    s.touch(open, Direction::Egress, Event::Tcp(Flags::ACK), 0);
    let there = |s: &Sessions| [0, 1, 2].map(|n| s.find(&key(0, n)).is_some());
    for (at_s, expected) in
        [(1059, [true; 3]), (1061, [true, true, false]), (1119, [true, true, false]), (1122, [false, true, false])]
    {
        s.advance(at_s * S);
        assert_eq!(there(&s), expected, "at {at_s} s");
    }
    // Each second is a step of the wheel; two hours are too many for Miri.
    if cfg!(miri) {
        return;
    }
    // A packet extends the lifetime of a session; RST shortens it.
    s.advance(5000 * S);
    s.touch(open, Direction::Egress, Event::Tcp(Flags::ACK), 0);
    s.advance((5000 + 7439) * S);
    assert_eq!(there(&s), [false, true, false]);
    s.touch(open, Direction::Egress, Event::Tcp(Flags::RST), 0);
    s.advance((5000 + 7439 + 242) * S);
    assert_eq!((there(&s), s.counters().current), ([false; 3], 0));
    // The wheel restarts after a long pause.
    s.insert(key(0, 3), Direction::Egress, syn, 0, false).unwrap();
    s.advance(1_000_000 * S);
    s.advance(1_000_001 * S);
    assert_eq!((s.find(&key(0, 3)), s.counters().expired), (None, 4));
}

#[test]
fn a_jump_of_the_clock_costs_at_most_one_turn_of_the_wheel() {
    let mut s = sessions(10, 10);
    s.insert(key(0, 0), Direction::Egress, Event::Datagram, 0, false).unwrap();
    // Fifty years in steps of a second would take minutes.
    let later = 1_600_000_000;
    s.advance(later * S);
    assert!(s.find(&key(0, 0)).is_none());
    // The clock jumps back: time stands still.
    s.insert(key(0, 1), Direction::Egress, Event::Datagram, 0, false).unwrap();
    s.advance(S);
    (0..3).for_each(|_| s.advance((later + 29) * S));
    assert!(s.find(&key(0, 1)).is_some());
}

/// Compares random operations with a map.
#[test]
fn the_table_agrees_with_a_map() {
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..if cfg!(miri) { 1 } else { 4 } {
        let mut s = sessions(1000, 1000);
        let mut oracle: HashMap<Key, (State, Direction, u32, u32)> = HashMap::new();
        let mut now_s = 1000;
        for _ in 0..if cfg!(miri) { 50 } else { 3000 } {
            if rng.u8(..) < 20 {
                now_s += rng.u32(0..100);
                s.advance(u64::from(now_s) * S);
                // One call expires a bounded number of sessions, so several may be needed.
                (0..8).for_each(|_| s.advance(u64::from(now_s) * S));
                oracle.retain(|_, (state, _, seen_s, _)| *seen_s + state.timeout_s() >= now_s);
            }
            let key = key(rng.u32(0..3), rng.u32(0..60));
            let direction = if rng.bool() { Direction::Egress } else { Direction::Ingress };
            let flags = [Flags::SYN, Flags::ACK, Flags::FIN, Flags::RST, Flags::SYN.with(Flags::ACK)];
            let event = match rng.u8(0..3) {
                0 => Event::Datagram,
                1 => Event::Icmp,
                _ => Event::Tcp(flags[rng.usize(0..flags.len())]),
            };
            match s.find(&key) {
                Some(index) if rng.u8(0..20) == 0 => {
                    s.revoke(index);
                    oracle.remove(&key);
                }
                Some(index) => {
                    s.touch(index, direction, event, 0);
                    if let Some((state, origin, seen_s, answered_s)) = oracle.get_mut(&key) {
                        let before = *state;
                        *state = before.after(event, direction == *origin, (now_s - *answered_s) as u16);
                        *seen_s = now_s;
                        if *state == State::Exchange && before != State::Exchange {
                            *answered_s = now_s;
                        }
                    }
                }
                None => {
                    s.insert(key, direction, event, 0, false).unwrap();
                    oracle.insert(key, (State::first(event), direction, now_s, 0));
                }
            }
            // In the second of its timeout, a session may still exist or not.
            let sure = oracle.iter().filter(|(_, (state, _, seen_s, _))| *seen_s + state.timeout_s() > now_s);
            for (key, (state, origin, ..)) in sure {
                let index = s.find(key).expect("the session of the oracle");
                assert_eq!((s.slab[index as usize].state, s.origin(index)), (*state, *origin));
            }
            oracle.retain(|key, _| s.find(key).is_some());
            assert_eq!(oracle.len() as u64, s.counters().current);
            let established = oracle.values().filter(|(state, ..)| state.is_established()).count();
            assert_eq!(established as u64, s.counters().established);
        }
        s.forget_port(PortId(0));
        s.forget_port(PortId(1));
        s.forget_port(PortId(2));
        assert_eq!((s.counters().current, s.counters().established, s.index.len()), (0, 0, 0));
    }
}
