use super::world::*;
use bifrost_tables::{LimiterConfig, Rate};
use bifrost_wire::{Mac, Vni, vxlan};

use crate::{HostCounters, HostState};

const A: &str = "10.0.0.11";
const MAC_A: Mac = Mac([2, 0, 0, 0, 1, 1]);
const MS: u64 = 1_000_000;

fn one_host() -> World {
    World::new(pod(config(&[&[A]])), vec![Host::new(&[A], MAC_A, 9)])
}

fn state(world: &World) -> HostState {
    world.reliable().hosts().remove(0)
}

fn numbers(world: &World) -> impl Iterator<Item = &[u8]> {
    world.pod_got.iter().map(|(_, frame)| &frame[..])
}

fn send_from(world: &mut World, from: u32, to: u32) {
    for number in from..to {
        let now = world.now;
        world.hosts[0].send(now, 0, number);
        world.pass(20_000);
    }
}

/// Sends `count` frames of each flow, some in each step.
fn send(world: &mut World, flows: u16, count: u32) {
    for number in 0..count {
        let now = world.now;
        (0..flows).for_each(|flow| world.hosts[0].send(now, flow, number));
        world.pass(20_000);
    }
}

#[test]
fn frames_cross_a_lossy_network_once_and_in_order() {
    let addresses = [A, "10.0.1.11"];
    for addresses in [&addresses[..1], &addresses[..]] {
        let mut world = World::new(pod(config(&[addresses])), vec![Host::new(addresses, MAC_A, 9)]);
        world.echo = true;
        world.network = Network { lost: 30, repeated: 20, jitter_ns: 60_000 };
        send(&mut world, 4, 1000);
        world.pass(200 * MS);
        assert_complete(numbers(&world), 4, 1000);
        assert_complete(world.hosts[0].shown.iter().map(|f| &f[..]), 4, 1000);
        assert!(world.hosts[0].plain.is_empty());
        // The pod knows the host only by its tunnel endpoint.
        assert!(world.pod_got.iter().all(|(from, _)| from.to_string() == A));
        let state = state(&world);
        assert_eq!((state.connections, state.open_connections, state.given_up_packets), (1, 1, 0));
        assert!(state.retransmitted_packets > 40 && state.duplicate_packets > 40, "{state:?}");
        assert!(world.hosts[0].engine.counters().retransmitted_packets > 40);
        let counters = state.counters;
        assert_eq!((counters.rx_frames, counters.delivered_frames, counters.tx_frames), (4000, 4000, 4000));
        assert_eq!((state.held_frames, state.kept_frames, counters.surrendered_frames), (0, 0, 0));
        let all = 2048 * usize::from(world.reliable().hosts().len() as u16);
        assert_eq!(world.reliable().free_buffers(), (all, all));
    }
}

#[test]
fn frames_cross_in_ipv6_behind_tags_and_in_bundles() {
    const A6: &str = "fd00::11";
    for (address, vlan, bundles) in
        [(A6, None, false), (A, Some(100), false), (A, None, true), (A6, Some(4094), true), (A, Some(1), true)]
    {
        let mut pod = pod(config(&[&[address]]));
        pod.interfaces = vec![vlan];
        let mut world = World::new(pod, vec![Host::new(&[address], MAC_A, 9)]);
        world.hosts[0].bundles = bundles;
        world.echo = true;
        world.network = Network { lost: 30, repeated: 20, jitter_ns: 60_000 };
        send(&mut world, 4, 500);
        world.pass(200 * MS);
        assert_complete(numbers(&world), 4, 500);
        assert_complete(world.hosts[0].shown.iter().map(|f| &f[..]), 4, 500);
        assert!(world.hosts[0].plain.is_empty());
        assert!(world.pod_got.iter().all(|(from, _)| from.to_string() == address));
        let state = state(&world);
        assert_eq!((state.connections, state.open_connections, state.given_up_packets), (1, 1, 0));
        assert!(state.retransmitted_packets > 20 && state.duplicate_packets > 20, "{state:?}");
        let HostCounters { rx_frames, rx_datagrams, bad_packets, bad_checksum_datagrams, .. } = state.counters;
        assert_eq!((rx_frames, bad_packets, bad_checksum_datagrams), (2000, 0, 0));
        let bundled = world.hosts[0].bundled;
        assert_eq!(bundled > 1000, bundles, "{bundled} of 2000 frames shared {rx_datagrams} datagrams");
    }
}

#[test]
fn a_damaged_bundle_is_counted_and_leaves_no_frame_behind() {
    let mut world = one_host();
    world.hosts[0].bundles = true;
    send(&mut world, 1, 10);
    world.pass(5 * MS);
    // A length beyond the datagram.
    let tunnel = vxlan::emit(Vni::new(VNI).unwrap());
    let bundle = [8, 0x30, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0xff, 1, 2];
    assert_eq!(world.arrive(&frame(A, (49_152, PORT), &tunnel, &bundle)).unwrap().1, None);
    assert_eq!(state(&world).counters.bad_packets, 1);
    send_from(&mut world, 10, 20);
    world.pass(5 * MS);
    assert_complete(numbers(&world), 1, 20);
}

#[test]
fn the_gateway_opens_connections() {
    let mut world = one_host();
    world.network = Network { lost: 30, ..Network::default() };
    for number in 0..300 {
        world.pod_sends(0, 1, number);
        world.pass(20_000);
    }
    world.pass(100 * MS);
    assert_complete(world.hosts[0].shown.iter().map(|f| &f[..]), 1, 300);
    assert!(world.hosts[0].plain.is_empty());
    assert_eq!(world.reliable().engine_counters().opened_connections, 1);
}

#[test]
fn a_host_without_the_transport_gets_plain_vxlan() {
    let mut world = one_host();
    world.hosts[0].deaf = true;
    for number in 0..400 {
        world.pod_sends(0, 1, number);
        world.pass(MS);
    }
    // Frames that waited for the response come first.
    assert_complete(world.hosts[0].plain.iter().map(|f| &f[..]), 1, 400);
    let counters = state(&world).counters;
    assert!(counters.surrendered_frames > 50 && counters.plain_frames > 50, "{counters:?}");
    assert_eq!(counters.surrendered_frames + counters.plain_frames, 400);
    assert_eq!(state(&world).kept_frames, 0);
    // And the request is sent again.
    world.hosts[0].deaf = false;
    world.pass(31_000 * MS);
    world.pod_sends(0, 2, 0);
    world.pass(10 * MS);
    world.pod_sends(0, 2, 1);
    world.pass(10 * MS);
    assert!(world.hosts[0].shown.iter().any(|frame| read(frame) == (2, 1)));
}

#[test]
fn replacing_a_pod_ends_no_connection() {
    let mut world = one_host();
    send(&mut world, 1, 100);
    world.pass(5 * MS);
    world.set_up(false);
    let now = world.now;
    (100..200).for_each(|number| world.hosts[0].send(now, 0, number));
    world.pass(150 * MS);
    assert_eq!(numbers(&world).count(), 100);
    assert!(state(&world).counters.refused_no_ring_frames >= 100);
    world.set_up(true);
    world.pass(300 * MS);
    assert_complete(numbers(&world), 1, 200);
    let host = world.hosts[0].engine.counters();
    assert_eq!((host.given_up_packets, host.opened_connections, host.best_effort_connections), (0, 1, 0));
}

#[test]
fn frames_above_the_rate_are_not_retransmitted() {
    let rate = Rate { per_second: 1000, burst: 50 };
    let mut pod = pod(config(&[&[A]]));
    pod.limiter = LimiterConfig { first: rate, second: Rate { per_second: 1, burst: 1 }, ..LimiterConfig::default() };
    let mut world = World::new(pod, vec![Host::new(&[A], MAC_A, 9)]);
    let now = world.now;
    (0..500).for_each(|number| world.hosts[0].send(now, 0, number));
    world.pass(50 * MS);
    let counters = state(&world).counters;
    let passed = numbers(&world).count() as u64;
    assert!((50..=110).contains(&passed), "{passed}");
    assert_eq!((counters.limited_frames, counters.delivered_frames), (500 - passed, passed));
    let host = world.hosts[0].engine.counters();
    assert_eq!((host.retransmitted_packets, world.hosts[0].in_flight(world.now)), (0, 0));
}

#[test]
fn a_full_ring_stops_the_host() {
    let mut world = one_host();
    (world.ring_size, world.pace) = (4, 1);
    let now = world.now;
    (0..300).for_each(|number| world.hosts[0].send(now, (number % 3) as u16, number / 3));
    world.pass(400 * MS);
    assert_complete(numbers(&world), 3, 100);
    let counters = state(&world).counters;
    assert!(counters.refused_no_ring_frames > 0 && counters.undelivered_frames == 0, "{counters:?}");
    assert_eq!(world.hosts[0].engine.counters().given_up_packets, 0);
}

#[test]
fn memory_is_shared_by_host() {
    const B: &str = "10.0.0.12";
    const SHARE: u32 = 16;
    let mac_b = Mac([2, 0, 0, 0, 1, 2]);
    let mut settings = config(&[&[A], &[B]]);
    settings.memory_bytes = 2 * 2 * SHARE as usize * LONGEST;
    let hosts = vec![Host::new(&[A], MAC_A, 9), Host::new(&[B], mac_b, 9)];
    let mut world = World::new(pod(settings), hosts);
    for host in [0, 1] {
        world.pod_sends(host, 0, 0);
    }
    world.pass(5 * MS);
    // One host stops acknowledging: it has its share, its other frames leave as plain VXLAN, and the other host is not
    // affected.
    world.hosts[0].deaf = true;
    for number in 1..100 {
        world.pod_sends(0, 0, number);
    }
    assert_eq!(state(&world).kept_frames, SHARE);
    assert_eq!(state(&world).counters.plain_no_memory_frames, 99 - u64::from(SHARE));
    for number in 1..100 {
        world.pod_sends(1, 0, number);
        world.pass(40_000);
    }
    world.pass(MS);
    assert_complete(world.hosts[1].shown.iter().map(|f| &f[..]), 1, 100);
    assert_eq!(world.hosts[0].plain.len(), 99 - SHARE as usize);
    // After the connection gives up, no frame is kept.
    world.pass(2_000 * MS);
    assert_eq!(state(&world).kept_frames, 0);
}

#[test]
fn frames_that_wait_for_a_lost_one_are_bounded() {
    const SHARE: u32 = 32;
    let mut settings = config(&[&[A]]);
    settings.memory_bytes = 2 * SHARE as usize * LONGEST;
    let mut world = World::new(pod(settings), vec![Host::new(&[A], MAC_A, 9)]);
    send(&mut world, 1, 10);
    world.pass(5 * MS);
    let now = world.now;
    world.network.lost = 1000;
    world.hosts[0].send(now, 0, 10);
    world.pass(20_000);
    world.network.lost = 0;
    let now = world.now;
    (11..200).for_each(|number| world.hosts[0].send(now, 0, number));
    let mut most = 0;
    for _ in 0..200 {
        world.pass(20_000);
        most = most.max(state(&world).held_frames);
    }
    world.pass(500 * MS);
    assert_eq!(most, SHARE - SHARE / 4);
    assert_complete(numbers(&world), 1, 200);
    assert!(state(&world).counters.refused_no_memory_frames > 0);
    assert_eq!(world.hosts[0].engine.counters().given_up_packets, 0);
}

#[test]
fn invalid_settings_are_refused() {
    use crate::ReliableError::*;
    let refused = |change: fn(&mut crate::ReliableConfig)| {
        let mut settings = config(&[&[A], &["10.0.0.12"]]);
        settings.addresses.truncate(1);
        change(&mut settings);
        crate::Reliable::new(settings, LONGEST).unwrap_err()
    };
    assert_eq!(refused(|c| c.hosts.clear()), NoHosts);
    assert_eq!(refused(|c| c.hosts[1].clear()), Addresses(2));
    assert_eq!(refused(|c| c.hosts[1] = vec![A.parse().unwrap()]), Twice(A.parse().unwrap()));
    assert_eq!(refused(|c| c.hosts[1] = vec!["fd00::1".parse().unwrap()]), Family("fd00::1".parse().unwrap()));
    assert_eq!(refused(|c| c.addresses.clear()), Own);
    assert_eq!(refused(|c| c.addresses.push("10.0.0.2".parse().unwrap())), Own);
    assert_eq!(refused(|c| c.memory_bytes = 1000), Memory(1000, 32 * LONGEST));
    assert_eq!(refused(|c| c.paths = 9), Paths(9));
    assert_eq!(refused(|c| c.source_port_base = 65_534), SourcePort(65_534));
    assert_eq!(refused(|c| c.mac = bifrost_wire::Mac::BROADCAST), Mac(bifrost_wire::Mac::BROADCAST));
    assert_eq!(refused(|c| c.connections_per_host = 0), Connections(0));
}
