//! Both services in one connection, and switches between them.

use bifrost_rdm::{Class, Order, Service};

use super::messages::exchange;
use super::world::{Link, Options, World, pattern};
use crate::{HostEvent, SendError};

const MS: u64 = 1_000_000;

fn both(seed: u64, loss: f64) -> World {
    World::new(seed, Link::new(loss), &Options { service: Service::Both, ..Options::default() })
}

/// The queue pair in use.
fn lane(world: &World, side: usize) -> u8 {
    let side = &world.sides[side];
    side.host.measured(side.id).unwrap().4
}

fn send(world: &mut World, number: u32, len: usize) {
    let now = world.now;
    let side = &mut world.sides[0];
    let data = pattern(len, u64::from(number));
    side.host.send(now, side.id, Class::Message, number, data).map_err(|(e, _)| e).unwrap();
}

/// Takes received messages at the other end; `next` is the number of the next one.
fn take(world: &mut World, next: &mut u32, len: usize) {
    while let Some(event) = world.sides[1].host.next_event() {
        let HostEvent::Message { connection, call, data, .. } = event else { panic!("{event:?}") };
        assert_eq!((call, data == pattern(len, u64::from(call))), (*next, true));
        *next += 1;
        let now = world.now;
        world.sides[1].host.consumed(now, connection, data);
    }
}

/// Runs until the other end has all messages before `end`. Returns when the last one arrived.
fn receive(world: &mut World, next: &mut u32, end: u32, len: usize, until: u64) -> u64 {
    take(world, next, len);
    while *next < end {
        assert!(world.step(until), "{next} of {end}: {:?}", world.sides[0].host.counters());
        take(world, next, len);
    }
    world.now
}

/// Runs until all messages are delivered and reported.
fn settle(world: &mut World) {
    let until = world.now + 300 * MS;
    while world.step(until) {}
    while world.sides[0].host.next_event().is_some() {}
    assert_eq!(world.sides[0].host.open_messages(world.sides[0].id), 0);
}

#[test]
fn a_connection_of_one_service_has_no_other() {
    for (service, other) in [(Service::Uc, Service::Rc), (Service::Rc, Service::Uc)] {
        let mut world = World::new(1, Link::new(0.0), &Options { service, ..Options::default() });
        let side = &mut world.sides[0];
        assert_eq!(side.host.service_in_use(side.id), Some(service));
        assert!(side.host.switch(0, side.id, service));
        assert!(!side.host.switch(0, side.id, other));
        assert!(!side.host.switch(0, side.id, Service::Both));
    }
}

#[test]
fn a_switch_loses_nothing_without_packet_loss() {
    let lens = [0, 1, 4095, 4096, 4097, 32_768, 32_769, 65_536, 300_000, 0, 5, 1 << 20, 100, 3 << 20, 7];
    for switch_every_ns in [10_000, 30_000, 100_000] {
        let mut world = both(1, 0.0);
        world.switch_every_ns = switch_every_ns;
        for _ in 0..5 {
            exchange(&mut world, &lens, Order::Sent, 100 * MS).unwrap();
        }
        for side in &world.sides {
            let counters = side.host.counters();
            assert!(counters.switches > 10, "{counters:?}");
            assert_eq!((counters.lost_requests, counters.refused, counters.timeouts), (0, 0, 0), "{switch_every_ns}");
        }
    }
}

#[test]
fn messages_after_a_switch_use_the_other_service() {
    let mut world = both(2, 0.0);
    assert_eq!(lane(&world, 0), 0);
    world.switch(0);
    assert_eq!((lane(&world, 0), lane(&world, 1)), (3, 0), "each end switches separately");
    exchange(&mut world, &[10, 100_000], Order::Sent, 100 * MS).unwrap();
    // Then all UC queue pairs of the sender fail, which are no longer used.
    for lane in 0..3 {
        let queue_pair = world.sides[0].host.lane_of(world.sides[0].id, lane);
        world.sides[0].host.provider_mut().put_into_error(world.now, queue_pair);
    }
    exchange(&mut world, &[10, 100_000], Order::Sent, 100 * MS).unwrap();
    assert_eq!(lane(&world, 0), 3);
    world.switch(0);
    assert!(lane(&world, 0) < 3, "they are repaired");
    exchange(&mut world, &[10, 100_000], Order::Sent, 100 * MS).unwrap();
}

#[test]
fn the_last_packets_before_a_switch_are_lost() {
    // Recovery does not wait for the timers of UC and RC, 0.4 ms and 4 ms: later messages show the loss.
    for first in [Service::Uc, Service::Rc] {
        for len in [20_000, 200_000] {
            let mut world = both(3, 0.0);
            exchange(&mut world, &[100_000; 20], Order::Sent, 100 * MS).unwrap();
            if first == Service::Rc {
                world.switch(0);
            }
            exchange(&mut world, &[100_000; 20], Order::Sent, 100 * MS).unwrap();
            let (begin, mut next) = (world.now, 0);
            (0..4).for_each(|number| send(&mut world, number, len));
            // The last packets that the NIC sends before the switch are lost.
            let outage_at = begin + if len < 100_000 { 15_000 } else { 100_000 };
            for (until, outage) in [(outage_at, true), (outage_at + 20_000, false)] {
                while world.step(until) {
                    take(&mut world, &mut next, len);
                }
                world.sides[0].outage = outage;
            }
            assert!(world.sides[0].dropped > 0);
            let switched = world.now;
            world.switch(0);
            (4..8).for_each(|number| send(&mut world, number, len));
            let at = receive(&mut world, &mut next, 8, len, switched + 100 * MS);
            let wire_ns = 8 * len as u64 * 8 / 25;
            let took = at - switched;
            assert!(took < 2 * wire_ns + 150_000, "{first:?} {len}: {took} {:?}", world.sides[0].host.counters());
        }
    }
}

#[test]
fn an_outage_in_the_middle_of_a_switch_is_survived() {
    for first in [Service::Uc, Service::Rc] {
        for (from_ns, outage_ns) in [(0, MS), (20_000, 20 * MS), (60_000, 300 * MS)] {
            let mut world = both(6, 0.001);
            exchange(&mut world, &[100_000; 10], Order::Sent, 100 * MS).unwrap();
            if first == Service::Rc {
                world.switch(0);
                exchange(&mut world, &[100_000; 10], Order::Sent, 100 * MS).unwrap();
            }
            (0..10).for_each(|number| send(&mut world, number, 200_000));
            let outage_at = world.now + 100_000;
            while world.step(outage_at - from_ns) {}
            world.switch(0);
            while world.step(outage_at) {}
            (10..20).for_each(|number| send(&mut world, number, 200_000));
            world.sides.iter_mut().for_each(|side| side.outage = true);
            let back = outage_at + outage_ns;
            while world.step(back) {}
            world.sides.iter_mut().for_each(|side| side.outage = false);
            let mut next = 0;
            receive(&mut world, &mut next, 20, 200_000, back + 1000 * MS);
            settle(&mut world);
            // The connection then uses the selected service.
            exchange(&mut world, &[100_000; 10], Order::Sent, 500 * MS).unwrap();
            while world.step(world.now + 500 * MS) {}
            let reliable = lane(&world, 0) >= 3;
            assert_eq!(reliable, first == Service::Uc, "{:?}", world.sides[0].host.counters());
        }
    }
}

#[test]
fn a_full_connection_switches() {
    // One credit: the end of a lane is retransmitted when a credit is free.
    let limits = |limits: &mut crate::Limits| limits.credits = 1;
    let options = Options { service: Service::Both, limits, ..Options::default() };
    let mut world = World::new(8, Link::new(0.02), &options);
    world.switch_every_ns = 50_000;
    exchange(&mut world, &[5000; 50], Order::Sent, 2000 * MS).unwrap();
    let side = &mut world.sides[0];
    let sent = (0..2000).map(|_| side.host.send(world.now, side.id, Class::Message, 0, vec![]));
    let full = sent.filter(|sent| matches!(sent, Err((SendError::Full, _)))).count();
    assert_eq!(full, 2000 - 1024);
    for _ in 0..100 {
        world.step(world.now + MS);
    }
}
