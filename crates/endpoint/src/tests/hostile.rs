//! A peer that violates the protocol harms only itself.

use bifrost_rdm::{Class, Service};
use bifrost_rnic::{INLINE_MAX, Operation, Qpn, SendRequest};
use bifrost_wire::rdm::{
    Ack, Close, CloseReason, Control, Grant, Immediate, Lane, LanePhase, MessageId, Number, Numbers, SendHeader,
    SendKind, Tag,
};
use proptest::prelude::*;

use super::world::{Link, Options, World};
use crate::HostEvent;

/// Posts a SEND with these bytes on a lane of side 1, bypassing its engine.
fn inject(world: &mut World, lane: usize, bytes: &[u8]) {
    let side = &mut world.sides[1];
    let queue_pair = side.host.lane_of(side.id, lane);
    let mut inline = [0; INLINE_MAX];
    inline[..bytes.len()].copy_from_slice(bytes);
    let request = SendRequest {
        token: u64::MAX,
        operation: Operation::Send,
        immediate: None,
        inline,
        inline_len: bytes.len() as u8,
        slice: None,
    };
    let _ = side.host.provider_mut().post_send(queue_pair, request);
}

/// Posts an empty WRITE with immediate data.
fn inject_write(world: &mut World, immediate: u32) {
    let side = &mut world.sides[1];
    let queue_pair: Qpn = side.host.lane_of(side.id, 0);
    let request = SendRequest {
        token: u64::MAX,
        operation: Operation::Write { address: 0, key: 0 },
        immediate: Some(immediate),
        inline: [0; INLINE_MAX],
        inline_len: 0,
        slice: None,
    };
    let _ = side.host.provider_mut().post_send(queue_pair, request);
}

fn events(world: &mut World, side: usize) -> usize {
    std::iter::from_fn(|| world.sides[side].host.next_event())
        .filter(|event| matches!(event, HostEvent::Message { .. }))
        .count()
}

#[test]
fn violations_are_counted_and_not_acknowledged() {
    let header = SendHeader {
        kind: SendKind::Eager,
        hint: true,
        class: Class::Message,
        message: MessageId(0),
        global: 0,
        length: 0,
        offset: 0,
        call: 0,
    };
    let cases: [(&str, SendHeader); 5] = [
        ("a repair without a grant", SendHeader { kind: SendKind::Repair, length: 4, ..header }),
        ("a message beyond the limit", SendHeader { message: MessageId(256), ..header }),
        ("a message far beyond", SendHeader { message: MessageId(1 << 30), ..header }),
        ("a short message with the length of a long one", SendHeader { length: 40_000, ..header }),
        (
            "an announcement longer than accepted",
            SendHeader { kind: SendKind::Announce, length: (1 << 20) + 1, ..header },
        ),
    ];
    for (name, header) in cases {
        let options = Options { limits: |limits| limits.longest = 1 << 20, ..Options::default() };
        let mut world = World::new(1, Link::new(0.0), &options);
        let mut bytes = header.emit().to_vec();
        if header.kind == SendKind::Repair {
            bytes.extend_from_slice(&[0; 4]);
        }
        inject(&mut world, 0, &bytes);
        while world.step(1_000_000) {}
        let counters = *world.sides[0].host.counters();
        assert_eq!(counters.refused + counters.no_room, 1, "{name}");
        assert_eq!((counters.sent_acks, counters.sent_grants, events(&mut world, 0)), (0, 0, 0), "{name}");
    }
}

#[test]
fn a_peer_cannot_complete_messages_that_it_did_not_write() {
    let mut world = World::new(2, Link::new(0.0), &Options::default());
    // Announce messages, and claim chunks that are empty, or of messages that do not exist.
    let header = SendHeader {
        kind: SendKind::Announce,
        hint: true,
        class: Class::Message,
        message: MessageId(0),
        global: 0,
        length: 100_000,
        offset: 0,
        call: 0,
    };
    inject(&mut world, 0, &header.emit());
    for (message, offset) in [(0, 0), (0, 4096), (1, 0), (300, 0), (20_000, 0)] {
        inject_write(&mut world, Immediate::new(MessageId(message), offset, true).bits());
    }
    while world.step(5_000_000) {}
    assert_eq!(world.sides[0].host.counters().sent_grants, 1);
    assert!(world.sides[0].host.counters().refused >= 4);
    assert_eq!(events(&mut world, 0), 0);
}

#[test]
fn announcements_are_granted_within_the_budget() {
    let options = Options { config: |config| config.budget = 1 << 20, ..Options::default() };
    let mut world = World::new(3, Link::new(0.0), &options);
    for n in 0..100 {
        let header = SendHeader {
            kind: SendKind::Announce,
            hint: true,
            class: Class::Message,
            message: MessageId(n),
            global: u64::from(n),
            length: 300_000,
            offset: 0,
            call: 0,
        };
        inject(&mut world, 0, &header.emit());
    }
    while world.step(5_000_000) {}
    assert_eq!(world.sides[0].host.counters().sent_grants, 3, "of 300 KB each, within 1 MiB");
}

/// Control datagrams of any kind and content, from the peer's queue pair and for the right connection.
fn control(tag: Tag) -> impl Strategy<Value = Control> {
    let number = prop_oneof![(0u64..200).prop_map(Number::Send), (0u32..1 << 22).prop_map(Number::Write)];
    let ack = (any::<u16>(), prop::collection::vec(number, 0..32), 0u32..400, prop_oneof![0u32..400, any::<u32>()]);
    prop_oneof![
        4 => ack.prop_map(move |(sequence, list, base, limit)| {
            let mut numbers = Numbers::new();
            list.into_iter().for_each(|number| { numbers.push(number); });
            let (base, limit) = (MessageId(base), MessageId(limit));
            let fresh = numbers.as_slice().len() as u8;
            Control::Ack(Ack { tag, sequence, fresh, held_ns: Some(1), base, limit, numbers })
        }),
        2 => (0u32..40, any::<u64>(), any::<u32>(), prop_oneof![Just(100_000u32), 1u32..1 << 20]).prop_map(
            move |(message, address, key, length)| {
                let address = address >> 1;
                Control::Grant(Grant { tag, message: MessageId(message), address, key, length })
            }
        ),
        1 => Just(Control::Probe(tag)),
        2 => (0u8..3, any::<bool>(), 1u16..20, 0u32..1 << 24).prop_map(move |(index, request, generation, sequence)| {
            let phase = if request { LanePhase::Request } else { LanePhase::Response };
            Control::Lane(Lane { tag, index, phase, generation, sequence })
        }),
        1 => Just(Control::Close(Close { tag, reason: CloseReason::Protocol })),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 30, ..ProptestConfig::default() })]

    /// Random control datagrams while messages flow: no panic, no hang, and all buffers are returned.
    #[test]
    fn random_control_datagrams_do_not_panic(
        controls in prop::collection::vec((control(Tag(0)), 0u64..300_000), 1..40),
        reliable in any::<bool>(),
    ) {
        let service = if reliable { Service::Rc } else { Service::Uc };
        let mut world = World::new(4, Link::new(0.01), &Options { service, ..Options::default() });
        for n in 0..30u32 {
            for side in &mut world.sides {
                let len = if n % 3 == 0 { 100_000 } else { 5000 };
                side.host.send(0, side.id, Class::Message, n, vec![1; len]).map_err(|(e, _)| e).unwrap();
            }
        }
        for (control, after) in controls {
            let until = world.now + after;
            while world.step(until) {}
            let now = world.now;
            let side = &mut world.sides[1];
            let id = side.id;
            side.host.send_raw_control(id, &control);
            side.host.turn(now);
        }
        let until = world.now + 50_000_000;
        let mut steps = 0u32;
        while world.step(until) {
            steps += 1;
            prop_assert!(steps < 3_000_000, "it never becomes idle");
        }
        let id = world.sides[0].id;
        world.sides[0].host.close(id, CloseReason::Protocol);
        prop_assert_eq!(world.sides[0].host.registered_buffers(), 0);
    }
}
