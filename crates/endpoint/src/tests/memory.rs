//! Peers access only the memory that they are permitted to, whatever the network loses.

use std::collections::HashMap;

use bifrost_rdm::{Class, Service};
use bifrost_wire::rdm::Access;
use proptest::prelude::*;

use super::world::{Link, Options, World, pattern};
use crate::{AccessCounters, HostEvent, Rights, SendError};

const MS: u64 = 1_000_000;

/// Responses to calls of side 0, by the call's number.
fn responses(world: &mut World) -> Vec<(u32, Class, Vec<u8>)> {
    let mut list = Vec::new();
    while let Some(event) = world.sides[0].host.next_event() {
        match event {
            HostEvent::Message { connection, class, call, data } => {
                list.push((call, class, data.clone()));
                let now = world.now;
                world.sides[0].host.consumed(now, connection, data);
            }
            HostEvent::Sent { .. } => {}
            HostEvent::Closed { reason, .. } => panic!("closed: {reason:?}"),
        }
    }
    list
}

#[test]
fn writes_and_reads_see_each_other_in_order_under_losses() {
    for (service, loss) in [(Service::Uc, 0.0), (Service::Uc, 0.02), (Service::Rc, 0.005)] {
        let mut world = World::new(7, Link::new(loss), &Options { service, ..Options::default() });
        let mut random = fastrand::Rng::with_seed(5);
        let peer = world.sides[1].id;
        let size = 1 << 20;
        let key = world.sides[1].host.register_memory(vec![0; size]).unwrap();
        assert!(world.sides[1].host.allow(key, peer, Rights::ReadWrite));
        let mut model = vec![0; size];
        // Expected bytes: of a read its data, of a write none.
        let mut open: HashMap<u32, Vec<u8>> = HashMap::new();
        let (mut begun, mut done) = (0u32, 0u32);
        let (count, end) = (300, world.now + 2_000 * MS);
        while done < count {
            // A write begins only when all reads are answered, because otherwise a read may include it.
            while begun < count && open.values().all(Vec::is_empty) {
                let len = [1, 100, 4096, 40_000, 300_000][random.usize(..5)];
                let offset = random.usize(..=size - len);
                let (side, now) = (&mut world.sides[0], world.now);
                let target = (key, offset as u64);
                let sent = if random.bool() {
                    let data = pattern(len, u64::from(begun));
                    let sent = side.host.write_remote(now, side.id, begun, target, &data);
                    if sent.is_ok() {
                        model[offset..][..len].copy_from_slice(&data);
                        open.insert(begun, Vec::new());
                    }
                    sent
                } else {
                    open.insert(begun, model[offset..][..len].to_vec());
                    side.host.read_remote(now, side.id, begun, target, len as u32)
                };
                sent.unwrap();
                begun += 1;
            }
            assert!(world.step(end), "{service:?} {loss}: {done} of {count} are done");
            for (call, class, data) in responses(&mut world) {
                assert_eq!(class, Class::Response, "{call}");
                assert!(open.remove(&call) == Some(data), "{service:?} {loss}: call {call} has other bytes");
                done += 1;
            }
        }
        assert!(world.sides[1].host.memory(key) == Some(&model[..]), "{service:?} {loss}");
        let counters = *world.sides[1].host.access_counters();
        assert_eq!((counters.writes + counters.reads, counters.refused), (u64::from(count), 0));
        assert!(world.sides[1].host.next_event().is_none_or(|event| matches!(event, HostEvent::Sent { .. })));
        if loss > 0.0 {
            assert!(world.sides.iter().all(|side| side.dropped > 10), "packets were lost");
        }
    }
}

#[test]
fn refused_accesses_are_answered_and_change_nothing() {
    let mut world = World::new(8, Link::new(0.0), &Options::default());
    let peer = world.sides[1].id;
    let host = &mut world.sides[1].host;
    let [open, closed, read_only] = [1, 2, 3].map(|byte| host.register_memory(vec![byte; 100]).unwrap());
    assert!(host.allow(open, peer, Rights::ReadWrite) && host.allow(read_only, peer, Rights::Read));
    let head = |key, offset, length| Access { key, offset, length }.emit().to_vec();
    let with = |key, offset, data: &[u8]| [head(key, offset, data.len() as u32), data.to_vec()].concat();
    let cases: [(Class, Vec<u8>, &str); 12] = [
        (Class::Write, with(open, 97, b"four"), "inside"),
        (Class::Write, with(open, u64::MAX, b"x"), "inside"),
        (Class::Write, with(closed, 0, b"x"), "key"),
        (Class::Write, with(open + 1000, 0, b"x"), "key"),
        (Class::Write, with(open | 1 << 32, 0, b"x"), "key"),
        (Class::Write, with(read_only, 0, b"x"), "grant"),
        (Class::Write, head(open, 0, 5), "malformed"),
        (Class::Write, vec![], "malformed"),
        (Class::Read, head(open, 0, 101), "inside"),
        (Class::Read, head(open, 1, u32::MAX), "inside"),
        (Class::Read, head(closed, 0, 1), "key"),
        (Class::Read, with(open, 0, b"x"), "malformed"),
    ];
    let count = cases.len();
    for (call, (class, bytes, _)) in cases.iter().enumerate() {
        let (side, now) = (&mut world.sides[0], world.now);
        side.host.send(now, side.id, *class, call as u32, bytes.clone()).unwrap();
    }
    while world.step(20 * MS) {}
    let answers = responses(&mut world);
    assert_eq!(answers.len(), count);
    for (call, class, text) in answers {
        let text = String::from_utf8(text).unwrap();
        assert!(class == Class::Failure && text.contains(cases[call as usize].2), "case {call}: {class:?} {text}");
    }
    let host = &world.sides[1].host;
    for (key, byte) in [(open, 1), (closed, 2), (read_only, 3)] {
        assert_eq!(host.memory(key), Some(&[byte; 100][..]));
    }
    assert_eq!(*host.access_counters(), AccessCounters { refused: count as u64, ..AccessCounters::default() });
}

#[test]
fn answers_in_flight_are_bounded() {
    let mut world = World::new(9, Link::new(0.0), &Options::default());
    let peer = world.sides[1].id;
    let key = world.sides[1].host.register_memory(vec![7; 1 << 20]).unwrap();
    world.sides[1].host.allow(key, peer, Rights::Read);
    let (mut begun, mut done, mut most) = (0, 0, 0);
    while done < 64 {
        let (side, now) = (&mut world.sides[0], world.now);
        while begun < 64 {
            match side.host.read_remote(now, side.id, begun, (key, 0), 1 << 20) {
                Ok(()) => begun += 1,
                Err(SendError::Full) => break,
                Err(error) => panic!("{error}"),
            }
        }
        assert!(world.step(world.now + 100 * MS), "{done} of {begun} reads are answered");
        most = most.max(world.sides[1].host.registered_buffers());
        for (_, class, data) in responses(&mut world) {
            assert!(class == Class::Response && data.len() == 1 << 20 && data.iter().all(|byte| *byte == 7));
            done += 1;
        }
    }
    // Four answers of 1 MiB, and incoming requests.
    assert!((2..=4 + 32).contains(&most), "{most} buffers");
    assert_eq!(world.sides[1].host.access_counters().read_bytes, 64 << 20);
}

#[test]
fn the_end_of_a_connection_ends_its_permissions() {
    let mut world = World::new(10, Link::new(0.0), &Options::default());
    let peer = world.sides[1].id;
    let host = &mut world.sides[1].host;
    let key = host.register_memory(vec![7; 8]).unwrap();
    assert!(host.allow(key, peer, Rights::Read));
    host.close(peer, crate::CloseReason::Done);
    assert!(!host.allow(key, peer, Rights::Read), "the connection has ended");
    assert_eq!(host.deregister_memory(key), Some(vec![7; 8]));
    assert_eq!((host.deregister_memory(key), host.memory(key)), (None, None));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    /// Random messages as accesses, among valid ones: each is answered once, and only memory that the peer may write is
    /// changed.
    #[test]
    fn hostile_accesses_change_nothing_else(
        seed in 0..1000u64,
        list in prop::collection::vec(
            (any::<bool>(), 0..3usize, prop_oneof![0..300u64, Just(u64::MAX), any::<u64>()],
             prop_oneof![0..300u32, any::<u32>()], 0..300usize, any::<[u8; 8]>(), 0..4u8),
            1..40,
        ),
    ) {
        let mut world = World::new(seed, Link::new(0.01), &Options::default());
        let peer = world.sides[1].id;
        let host = &mut world.sides[1].host;
        let rights = [Rights::ReadWrite, Rights::Read];
        let keys = [0, 1].map(|at| {
            let key = host.register_memory(vec![at as u8; 256]).unwrap();
            host.allow(key, peer, rights[at]);
            key
        });
        let secret = host.register_memory(vec![0x5e; 256]).unwrap();
        for (call, (write, at, offset, length, data, wild, form)) in list.iter().enumerate() {
            let key = keys.get(*at).copied().unwrap_or(if *form == 1 { secret } else { u64::from_be_bytes(*wild) });
            let mut bytes = Access { key, offset: *offset, length: *length }.emit().to_vec();
            match form {
                0 => bytes.truncate(usize::from(wild[0] % 24)),
                1 => bytes.resize(24 + data, 0xee),
                2 => bytes[20..].copy_from_slice(&wild[..4]),
                _ => {
                    bytes = Access { key, offset: *offset, length: *data as u32 }.emit().to_vec();
                    bytes.resize(24 + if *write { *data } else { 0 }, 0xee);
                }
            }
            let class = if *write { Class::Write } else { Class::Read };
            let (side, now) = (&mut world.sides[0], world.now);
            side.host.send(now, side.id, class, call as u32, bytes).unwrap();
        }
        let mut answers = Vec::new();
        let end = world.now + 2_000 * MS;
        while answers.len() < list.len() && world.step(end) {
            answers.extend(responses(&mut world));
        }
        prop_assert_eq!(answers.len(), list.len());
        for (_, class, data) in &answers {
            prop_assert!(*class == Class::Failure || data.iter().all(|byte| matches!(byte, 0 | 1 | 0xee)), "a secret is read");
        }
        let host = &world.sides[1].host;
        prop_assert!(host.memory(keys[0]).unwrap().iter().all(|byte| matches!(byte, 0 | 0xee)));
        prop_assert_eq!(host.memory(keys[1]), Some(&[1; 256][..]));
        prop_assert_eq!(host.memory(secret), Some(&[0x5e; 256][..]));
    }
}
