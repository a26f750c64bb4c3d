//! No message is lost, duplicated or reordered, whatever the network does.

use bifrost_rdm::{Class, CloseReason, Order, Service};
use proptest::prelude::*;

use super::world::{Link, Options, World, pattern};
use crate::{HostEvent, SendError};

const MS: u64 = 1_000_000;

/// Sends messages of the given lengths in both directions and checks them. Returns when all have arrived.
pub(super) fn exchange(world: &mut World, lens: &[usize], order: Order, within_ns: u64) -> Result<u64, String> {
    let mut sent = [0usize; 2];
    let mut reported = [0usize; 2];
    let mut got: [Vec<usize>; 2] = [vec![], vec![]];
    let end = world.now + within_ns;
    let content = |n: usize, len: usize, from: usize| pattern(len, (n * 2 + from) as u64);
    loop {
        for (from, sent) in sent.iter_mut().enumerate() {
            while *sent < lens.len() {
                let n = *sent;
                let side = &mut world.sides[from];
                let data = content(n, lens[n], from);
                match side.host.send(world.now, side.id, Class::Message, n as u32, data) {
                    Ok(_) => *sent += 1,
                    Err((SendError::Full, _)) => break,
                    Err((error, _)) => return Err(error.to_string()),
                }
            }
        }
        let more = world.step(end);
        for at in 0..2 {
            while let Some(event) = world.sides[at].host.next_event() {
                match event {
                    HostEvent::Message { connection, call, data, .. } => {
                        let n = call as usize;
                        if data != content(n, lens[n], 1 - at) {
                            return Err(format!("message {n} is damaged"));
                        }
                        got[at].push(n);
                        let now = world.now;
                        world.sides[at].host.consumed(now, connection, data);
                    }
                    HostEvent::Sent { .. } => reported[at] += 1,
                    HostEvent::Closed { reason, .. } => return Err(format!("closed: {reason:?}")),
                }
            }
        }
        if got.iter().all(|got| got.len() >= lens.len()) && reported == [lens.len(); 2] {
            break;
        }
        if !more {
            let counters = world.sides[0].host.counters();
            return Err(format!(
                "not all arrived in time: {:?} {reported:?} {counters:?}",
                got.each_ref().map(Vec::len)
            ));
        }
    }
    for got in &mut got {
        if order == Order::Complete {
            got.sort_unstable();
        }
        if *got != (0..lens.len()).collect::<Vec<_>>() {
            return Err(format!("duplicated or reordered: {got:?}"));
        }
    }
    Ok(world.now)
}

#[test]
fn lengths_around_every_boundary() {
    let lens = [0, 1, 4095, 4096, 4097, 8192, 32_767, 32_768, 32_769, 65_536, 300_000, 0, 5, 1 << 20];
    for service in [Service::Uc, Service::Rc] {
        for mtu in [256, 1024, 4096] {
            let options = Options { service, mtu, ..Options::default() };
            let mut world = World::new(1, Link::new(0.0), &options);
            exchange(&mut world, &lens, Order::Sent, 100 * MS).unwrap();
            let counters = world.sides[0].host.counters();
            assert_eq!((counters.lost_requests, counters.refused, counters.timeouts), (0, 0, 0), "{service:?} {mtu}");
        }
    }
}

#[test]
fn a_long_message_does_not_delay_short_ones() {
    // Time until a short message arrives that was sent after a long one.
    let options = Options { order: Order::Complete, ..Options::default() };
    let mut world = World::new(1, Link::new(0.0), &options);
    exchange(&mut world, &[1 << 20; 4], Order::Complete, 100 * MS).unwrap();
    let begin = world.now;
    let side = &mut world.sides[0];
    side.host.send(begin, side.id, Class::Message, 0, vec![1; 64 << 20]).map_err(|(e, _)| e).unwrap();
    while world.now < begin + 2 * MS {
        world.step(begin + 2 * MS);
    }
    let asked = world.now;
    let side = &mut world.sides[0];
    side.host.send(asked, side.id, Class::Message, 1, vec![2; 100]).map_err(|(e, _)| e).unwrap();
    let arrived = loop {
        assert!(world.step(begin + 10 * MS), "the short message has not arrived");
        if let Some(HostEvent::Message { call: 1, .. }) = world.sides[1].host.next_event() {
            break world.now - asked;
        }
    };
    assert!(arrived < 120_000, "{arrived} ns behind a message that takes 22 ms");
}

#[test]
fn an_application_that_does_not_read_stops_the_sender() {
    let options = Options { limits: |limits| limits.window = 8, ..Options::default() };
    let mut world = World::new(3, Link::new(0.01), &options);
    for n in 0..40 {
        let side = &mut world.sides[0];
        side.host.send(0, side.id, Class::Message, n, vec![0; 100]).map_err(|(e, _)| e).unwrap();
    }
    while world.step(50 * MS) {}
    let mut waiting = vec![];
    while let Some(event) = world.sides[1].host.next_event() {
        let HostEvent::Message { data, .. } = event else { continue };
        waiting.push(data);
    }
    assert_eq!(waiting.len(), 8, "not more than its window");
    // It reads one message at a time, and the rest arrives, even though ACKs that raise the limit are lost, too.
    let mut read = 0;
    while read < 40 {
        let now = world.now;
        let side = &mut world.sides[1];
        let id = side.id;
        for data in waiting.drain(..) {
            side.host.consumed(now, id, data);
            read += 1;
        }
        assert!(world.step(now + 500 * MS) || read == 40, "{read} have been read");
        while let Some(event) = world.sides[1].host.next_event() {
            let HostEvent::Message { data, .. } = event else { continue };
            waiting.push(data);
        }
    }
}

#[test]
fn messages_survive_a_reset_of_the_nic() {
    for service in [Service::Uc, Service::Rc, Service::Both] {
        let options = Options { service, ..Options::default() };
        let mut world = World::new(5, Link::new(0.0), &options);
        exchange(&mut world, &[100, 100_000], Order::Sent, 100 * MS).unwrap();
        for side in &mut world.sides {
            let nic = side.host.provider_mut();
            let all: Vec<_> = nic.ready().collect();
            // Its lanes, and the control queue pair.
            assert_eq!(all.len(), service.lanes() + 1);
            all.into_iter().for_each(|queue_pair| nic.put_into_error(world.now, queue_pair));
        }
        exchange(&mut world, &[100, 100_000], Order::Sent, 500 * MS).unwrap();
    }
}

#[test]
fn a_failed_path_is_replaced() {
    for service in [Service::Uc, Service::Rc] {
        let options = Options { service, ..Options::default() };
        let mut world = World::new(5, Link::new(0.0), &options);
        exchange(&mut world, &[100_000; 10], Order::Sent, 100 * MS).unwrap();
        // The path of the last data packet, of either end.
        world.dead_port = Some(world.last_port);
        exchange(&mut world, &[100_000; 10], Order::Sent, 200 * MS).unwrap();
        exchange(&mut world, &[1000; 10], Order::Sent, 200 * MS).unwrap();
        // Repaired lanes work, on another path.
        for _ in 0..20 {
            exchange(&mut world, &[50_000; 3], Order::Sent, 200 * MS).unwrap();
        }
    }
}

#[test]
fn an_outage_of_both_directions_is_survived() {
    for service in [Service::Uc, Service::Rc] {
        let options = Options { service, ..Options::default() };
        let mut world = World::new(6, Link::new(0.001), &options);
        exchange(&mut world, &[100_000; 10], Order::Sent, 100 * MS).unwrap();
        for n in 0..20 {
            let side = &mut world.sides[0];
            let now = world.now;
            side.host
                .send(now, side.id, Class::Message, n, pattern(200_000, u64::from(n)))
                .map_err(|(e, _)| e)
                .unwrap();
        }
        let cut_at = world.now + 100_000;
        while world.step(cut_at) {}
        for side in &mut world.sides {
            side.outage = true;
        }
        let back = cut_at + 300 * MS;
        while world.step(back) {}
        for side in &mut world.sides {
            side.outage = false;
        }
        let mut next = 0;
        while next < 20 {
            assert!(world.step(back + 1000 * MS), "{service:?}: {next} {:?}", world.sides[0].host.counters());
            while let Some(event) = world.sides[1].host.next_event() {
                let HostEvent::Message { connection, call, data, .. } = event else { panic!("{event:?}") };
                assert_eq!((call, data == pattern(200_000, u64::from(call))), (next, true));
                next += 1;
                let now = world.now;
                world.sides[1].host.consumed(now, connection, data);
            }
        }
        let counters = world.sides[0].host.counters();
        assert!(counters.lane_flips > 0, "{service:?}");
        // UC detects it by its own timers, RC by its NIC's.
        let why = (counters.lane_timeouts > 0, counters.lane_errors > 0);
        assert_eq!(why, (service == Service::Uc, service == Service::Rc), "{service:?}: {counters:?}");
    }
}

#[test]
fn a_peer_that_is_gone_is_reported() {
    let mut world = World::new(7, Link::new(0.0), &Options::default());
    world.sides[1].outage = true;
    let side = &mut world.sides[0];
    side.host.send(0, side.id, Class::Message, 0, vec![0; 10]).map_err(|(e, _)| e).unwrap();
    while world.step(4000 * MS) {}
    let side = &mut world.sides[0];
    let closed = std::iter::from_fn(|| side.host.next_event()).find_map(|event| match event {
        HostEvent::Closed { reason, by_peer, .. } => Some((reason, by_peer)),
        _ => None,
    });
    assert_eq!(closed, Some((CloseReason::Silence, false)));
    side.host.close(side.id, CloseReason::Silence);
    assert!(side.host.send(0, side.id, Class::Message, 0, vec![]).is_err());
}

#[test]
fn a_closed_connection_releases_everything() {
    let mut world = World::new(8, Link::new(0.0), &Options::default());
    exchange(&mut world, &[100_000; 4], Order::Sent, 100 * MS).unwrap();
    let side = &mut world.sides[0];
    side.host.send(world.now, side.id, Class::Message, 0, vec![0; 10_000]).map_err(|(e, _)| e).unwrap();
    side.host.close(side.id, CloseReason::Done);
    while world.step(world.now + MS) {}
    let closed = world.sides[1].host.next_event();
    assert!(matches!(closed, Some(HostEvent::Closed { reason: CloseReason::Done, by_peer: true, .. })), "{closed:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10, ..ProptestConfig::default() })]

    #[test]
    fn every_message_once_and_in_order(
        seed in any::<u32>(),
        lens in prop::collection::vec(prop_oneof![0usize..200, 0usize..40_000, 30_000usize..400_000], 1..60),
        loss in prop::sample::select(vec![0.0, 0.001, 0.01, 0.05]),
        duplicated in prop::sample::select(vec![0.0, 0.02]),
        mtu in prop::sample::select(vec![256u16, 1024, 4096]),
        service in prop::sample::select(vec![Service::Uc, Service::Rc, Service::Both]),
        switch_every_ns in prop::sample::select(vec![1_000u64, 30_000, 200_000, 3_000_000]),
        unordered in any::<bool>(),
    ) {
        let switch_every_ns = if service == Service::Both { switch_every_ns } else { 0 };
        let order = if unordered { Order::Complete } else { Order::Sent };
        let options = Options { service, order, mtu, ..Options::default() };
        let mut world = World::new(u64::from(seed), Link { duplicated, ..Link::new(loss) }, &options);
        world.switch_every_ns = switch_every_ns;
        let done = exchange(&mut world, &lens, order, 20_000 * MS);
        prop_assert!(done.is_ok(), "{}", done.unwrap_err());
        // The same seed repeats the run.
        let mut again = World::new(u64::from(seed), Link { duplicated, ..Link::new(loss) }, &options);
        again.switch_every_ns = switch_every_ns;
        prop_assert_eq!(exchange(&mut again, &lens, order, 20_000 * MS), done);
    }
}
