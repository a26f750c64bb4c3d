//! The table of sessions against a slow model, and with threads.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::thread;

use bifrost_wire::protocol::UDP;
use bifrost_wire::tcp::Flags;
use proptest::prelude::*;

use crate::nat::Seen;
use crate::rewrite::End;
use crate::session::{Flow, NOTED_EVERY_S};
use crate::shared::{Shared, Side};
use crate::{DropReason, INTERNET, Nat, NatConfig};

/// Operations of a test case.
const LONGEST: usize = if cfg!(miri) { 30 } else { 400 };

/// A flow, of IPv6 if the number is odd.
fn flow(number: u32) -> Flow {
    let address = |n: u32| -> IpAddr {
        match number % 2 {
            0 => Ipv4Addr::from_bits(n).into(),
            _ => Ipv6Addr::from_bits(0xfd00 << 112 | u128::from(n) << 64 | u128::from(!n)).into(),
        }
    };
    let end = |n: u32| End { address: address(n), port: n as u16 };
    Flow { network: number % 7, protocol: UDP, source: end(number), destination: end(!number) }
}

fn side(number: u32) -> Side {
    if number.is_multiple_of(3) { Side::Inside } else { Side::Outside }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 3 } else { 200 }))]

    /// The table has slots for 128 flows and searches collide; the model is a map.
    #[test]
    fn the_table_behaves_like_a_map(operations in proptest::collection::vec((0u32..120, 0u32..40, any::<bool>()), 1..LONGEST)) {
        let shared = Shared::new(1, 3);
        let mut model: BTreeMap<u32, (u32, u32, u32, u8)> = BTreeMap::new();
        for (now_s, (number, value, inserts)) in operations.into_iter().enumerate() {
            let now_s = now_s as u32;
            match model.get(&number) {
                None if inserts => {
                    if let Some(slot) = shared.insert(side(number), &flow(number), &flow(value), now_s, 0) {
                        model.insert(number, (slot, value, now_s, 0));
                    } else {
                        prop_assert!(model.len() >= 64, "no room");
                    }
                }
                Some((slot, ..)) if !inserts => {
                    prop_assert_eq!(shared.flow_at(*slot), flow(number));
                    shared.remove(*slot);
                    model.remove(&number);
                }
                _ => {
                    let mark = 1 << (value % 8);
                    let found = shared.find(side(number), &flow(number), now_s, mark);
                    prop_assert_eq!(found, model.get(&number).map(|(_, value, ..)| flow(*value)));
                    if let Some((_, _, seen_s, marks)) = model.get_mut(&number)
                        && (now_s - *seen_s >= NOTED_EVERY_S || *marks & mark == 0)
                    {
                        (*seen_s, *marks) = (now_s, *marks | mark);
                    }
                }
            }
            for (number, (slot, value, seen_s, marks)) in &model {
                prop_assert_eq!(shared.look(side(*number), &flow(*number)), Some(flow(*value)));
                let other = if side(*number) == Side::Inside { Side::Outside } else { Side::Inside };
                prop_assert_eq!(shared.look(other, &flow(*number)), None);
                let note = shared.note_at(*slot);
                prop_assert_eq!((note.seconds(), note.marks()), (*seen_s, *marks));
            }
        }
        for (number, (slot, ..)) in &model {
            shared.remove(*slot);
            prop_assert_eq!(shared.look(side(*number), &flow(*number)), None);
        }
        prop_assert!(shared.is_clean(), "nothing is left behind");
    }

    /// Sessions start, are used on either side, and end; the model knows until when a session must exist, and which
    /// outsides are taken.
    #[test]
    fn sessions_last_until_their_timeout(
        operations in proptest::collection::vec((0u32..60, 0u8..4, 0u64..50), 1..LONGEST),
    ) {
        let nat = nat(3, 40);
        let mut now_s = 1000;
        // By inside: the outside, and until when the session must exist, s.
        let mut model: BTreeMap<u32, (Flow, u64)> = BTreeMap::new();
        for (number, operation, pause_s) in operations {
            now_s += if operation == 3 { pause_s } else { 0 };
            let seen = |flow| Seen { now: now_s * 1_000_000_000, flow, flags: Flags(0) };
            let must = model.get(&number).filter(|(_, until_s)| now_s <= *until_s).copied();
            if operation == 0 {
                let Some((outside, _)) = model.get(&number).copied() else { continue };
                match nat.inward(seen(outside.reversed())) {
                    Ok(inside) => {
                        // An outside that is free again may belong to another session.
                        if must.is_some() {
                            prop_assert_eq!(inside, v4(number).reversed());
                            model.insert(number, (outside, now_s + 120));
                        }
                    }
                    Err(reason) => prop_assert!(must.is_none() && reason == DropReason::NatNoSession),
                }
                continue;
            }
            match nat.outward(seen(v4(number)), 0, None) {
                Ok(outside) => {
                    prop_assert!(must.is_none_or(|(was, _)| was == outside));
                    let taken = model.iter().any(|(n, (o, until_s))| *n != number && *o == outside && now_s <= *until_s);
                    prop_assert!(!taken);
                    model.insert(number, (outside, now_s + 120));
                }
                Err(reason) => {
                    prop_assert!(must.is_none() && reason == DropReason::NatFull);
                    let vpc = v4(number).network;
                    let there = |vpc: Option<u32>| {
                        model.keys().filter(|n| vpc.is_none_or(|vpc| v4(**n).network == vpc)).count()
                    };
                    prop_assert!(there(None) >= 40 || there(Some(vpc)) >= 20);
                }
            }
            prop_assert!(nat.len() <= 40);
        }
        let must = model.values().filter(|(_, until_s)| now_s <= *until_s).count();
        prop_assert!(nat.len() >= must);
    }
}

fn v4(number: u32) -> Flow {
    let end = |n: u32, port| End { address: Ipv4Addr::from_bits(n).into(), port };
    Flow { network: number % 3, protocol: UDP, source: end(number, number as u16), destination: end(!number, 53) }
}

fn nat(cores: u16, sessions: u32) -> Nat {
    let addresses = (1..=64).map(|n| Ipv4Addr::new(203, 0, 113, n).into()).collect();
    Nat::new(NatConfig { pools: vec![(INTERNET, addresses)], cores, sessions, seed: 5 })
}

/// Two threads insert and remove flows, in slots where two others search. A search never returns a mix of two flows,
/// and always finds a flow that stays in the table, with its record.
#[test]
fn readers_never_see_a_mix_of_two_flows() {
    let rounds = if cfg!(miri) { 30 } else { 30_000 };
    let shared = Shared::new(1, 9);
    let lasting: Vec<u32> = (0..24).collect();
    let slots: Vec<u32> = lasting
        .iter()
        .map(|number| shared.insert(side(*number), &flow(*number), &flow(*number), 1, 0).expect("room"))
        .collect();
    let done = AtomicBool::new(false);
    // A flow is translated to one of its own multiples, so all of its words belong together.
    let is_of = |number: u32, to: Flow| (1..=8).any(|n| to == flow(number * 1000 * n));
    thread::scope(|scope| {
        let writers: Vec<_> = [0u32, 1]
            .map(|writer| {
                let shared = &shared;
                scope.spawn(move || {
                    for round in 0..rounds {
                        let numbers = (0..12).map(|n| 100 + 2 * n + writer);
                        let inserted: Vec<u32> = numbers
                            .filter_map(|number| {
                                let to = flow(number * 1000 * (1 + round % 8));
                                shared.insert(side(number), &flow(number), &to, round, 0)
                            })
                            .collect();
                        assert_eq!(inserted.len(), 12, "the table has room for all");
                        inserted.into_iter().for_each(|slot| shared.remove(slot));
                    }
                })
            })
            .into();
        for _ in 0..2 {
            scope.spawn(|| {
                let (mut now_s, mut found) = (1, 0);
                while !done.load(Relaxed) || found == 0 {
                    now_s += 1;
                    for number in &lasting {
                        let to = shared.find(side(*number), &flow(*number), now_s, 1 << (now_s % 8));
                        assert_eq!(to, Some(flow(*number)));
                        found += 1;
                    }
                    for number in 100..124 {
                        let to = shared.find(side(number), &flow(number), now_s, 0);
                        assert!(to.is_none_or(|to| is_of(number, to)), "{number}: {to:?}");
                    }
                }
            });
        }
        writers.into_iter().for_each(|writer| writer.join().expect("a writer"));
        done.store(true, Relaxed);
    });
    slots.into_iter().for_each(|slot| shared.remove(slot));
    assert!(shared.is_clean(), "nothing is left behind");
}

/// A delayed core records its packet only in the packet's own flow.
#[test]
fn a_late_record_does_not_change_another_flow() {
    let shared = Shared::new(1, 9);
    let slot = shared.insert(Side::Inside, &flow(2), &flow(4), 100, 0).expect("room");
    let late = shared.note_at(slot);
    shared.remove(slot);
    let again = shared.insert(Side::Inside, &flow(2), &flow(6), 100, 0).expect("room");
    assert_eq!(again, slot);
    shared.see_late(slot, late, 200, 8);
    let note = shared.note_at(slot);
    assert_eq!((note.seconds(), note.marks()), (100, 0));
    // In its own flow it is recorded, whatever was recorded meanwhile.
    let late = shared.note_at(slot);
    shared.find(Side::Inside, &flow(2), 101, 2);
    shared.see_late(slot, late, 100, 8);
    let note = shared.note_at(slot);
    assert_eq!((note.seconds(), note.marks()), (101, 10));
}

/// All cores create and use sessions at the same time. An inside has the same outside on every core, and no two insides
/// have the same outside.
#[test]
fn threads_agree_about_sessions() {
    let (sessions, cores) = if cfg!(miri) { (20, 2) } else { (20_000, 4) };
    let nat = nat(cores, 4 * sessions);
    let seen = |flow| Seen { now: 1 << 40, flow, flags: Flags(0) };
    let of_threads: Vec<Vec<Flow>> = thread::scope(|scope| {
        let threads: Vec<_> = (0..cores)
            .map(|thread| {
                let nat = &nat;
                scope.spawn(move || {
                    let mut outsides = vec![None; sessions as usize];
                    // Each thread in a different order.
                    for n in 0..sessions {
                        let number = (n + sessions / u32::from(cores) * u32::from(thread)) % sessions;
                        let outside = nat.outward(seen(v4(number)), 0, None).expect("room");
                        let inside = nat.inward(seen(outside.reversed())).expect("a session");
                        assert_eq!(inside, v4(number).reversed());
                        outsides[number as usize] = Some(outside);
                    }
                    outsides.into_iter().flatten().collect()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("a thread")).collect()
    });
    assert!(of_threads.iter().all(|outsides| *outsides == of_threads[0]));
    assert_eq!(nat.len(), sessions as usize);
}

/// A million sessions, two VPCs: all of them fit, and not one more.
#[test]
#[cfg_attr(miri, ignore = "too many")]
fn a_million_sessions_fit() {
    const SESSIONS: u32 = 1 << 20;
    let nat = nat(8, SESSIONS);
    let of = |number: u32| Flow { network: number % 2, ..v4(number) };
    let seen = |number| Seen { now: 1 << 40, flow: of(number), flags: Flags(0) };
    for number in 0..SESSIONS {
        assert!(nat.outward(seen(number), 0, None).is_ok(), "{number}");
    }
    assert_eq!(nat.outward(seen(SESSIONS), 0, None), Err(DropReason::NatFull));
    assert_eq!(nat.len(), SESSIONS as usize);
    for number in (0..SESSIONS).step_by(997) {
        let outside = nat.known_outward(&of(number)).expect("a session");
        assert_eq!(nat.known_inward(&outside.reversed()), Some(of(number).reversed()));
    }
}
