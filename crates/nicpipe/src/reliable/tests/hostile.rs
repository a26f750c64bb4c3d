use super::world::*;
use bifrost_wire::bifrost::{Cid, DataHeader, PathId, Psn, Setup, SetupKind, Tick, Version};
use bifrost_wire::{Mac, Vni, vxlan};

const A: &str = "10.0.0.11";
const B: &str = "10.0.0.12";
const MS: u64 = 1_000_000;

fn two_hosts() -> World {
    let hosts = vec![Host::new(&[A], Mac([2, 0, 0, 0, 1, 1]), 9), Host::new(&[B], Mac([2, 0, 0, 0, 1, 2]), 9)];
    World::new(pod(config(&[&[A], &[B]])), hosts)
}

/// A REQUEST in a frame.
fn request(from: &str, vni: u32, to: Mac, vnic: u16) -> Vec<u8> {
    let [a, b] = vnic.to_be_bytes();
    let setup = Setup {
        kind: SetupKind::Request { oldest: 1 },
        version: 4,
        cc: 1,
        worker: 0,
        local: Cid(1000 + u32::from(vnic)),
        destination: Cid::NONE,
        to,
        from: Mac([2, 9, 0, 0, a, b]),
        instance: 5,
        generation: 1,
        window: 512,
        ack_delay_us: 500,
    };
    let head = [&vxlan::emit(Vni::new(vni).unwrap())[..], &setup.emit()].concat();
    frame(from, (49_152, PORT), &head, &[])
}

#[test]
fn requests_for_others_are_refused() {
    let mut world = two_hosts();
    for (from, vni, to) in
        [(A, VNI, Mac([2, 0, 0, 0, 0, 0xfd])), (A, VNI + 1, GATEWAY_MAC), ("10.0.0.13", VNI, GATEWAY_MAC)]
    {
        assert_eq!(world.arrive(&request(from, vni, to, 1)).unwrap().1, None);
    }
    world.pass(MS);
    let reliable = world.reliable();
    assert_eq!((reliable.counters().refused_requests, reliable.counters().unknown_host_datagrams), (2, 1));
    assert_eq!(reliable.engine_counters().rejected_vnic_packets, 2);
    assert!(reliable.hosts().iter().all(|host| host.connections == 0));
    // The known host got REJECTs; the other one got nothing.
    assert_eq!(reliable.hosts()[0].counters.tx_datagrams, 2);
}

#[test]
fn connections_of_a_host_are_limited() {
    let mut world = two_hosts();
    for vnic in 0..2000 {
        assert!(world.arrive(&request(A, VNI, GATEWAY_MAC, vnic)).is_ok());
    }
    world.pass(MS);
    let hosts = world.reliable().hosts();
    assert_eq!((hosts[0].connections, hosts[1].connections), (8, 0));
    assert_eq!(world.reliable().engine_counters().rejected_resources_packets, 1992);
    let now = world.now;
    world.hosts[1].send(now, 0, 0);
    world.pass(5 * MS);
    assert_eq!(world.pod_got.len(), 1);
    assert_eq!(world.reliable().hosts()[1].open_connections, 1);
}

/// Frames of one host's connection, and forgeries of another host.
#[test]
fn a_host_cannot_use_connections_of_others() {
    let mut world = two_hosts();
    let now = world.now;
    world.hosts[0].send(now, 0, 0);
    world.pass(5 * MS);
    let cid = world.reliable().engine.cid_of(pair_of(&world)).unwrap();
    let [mac, other] = [0, 1].map(|host| world.hosts[host].mac);
    let header = |psn| DataHeader {
        version: Version::LATEST,
        cc: 0,
        probe: false,
        ack_now: false,
        from_responder: false,
        ecn: true,
        retransmit: false,
        path: PathId::default(),
        distance: 0,
        psn: Psn(psn),
        cid,
        timestamp: Tick(0),
    };
    let send = |world: &mut World, from, psn, inner: &[u8]| {
        let head = [&vxlan::emit(Vni::new(VNI).unwrap())[..], &header(psn).emit()].concat();
        world.arrive(&frame(from, (49_152, PORT), &head, inner)).unwrap();
        world.pass(MS);
    };
    send(&mut world, B, 1, &inner(GATEWAY_MAC, mac, 0, 1));
    assert_eq!((world.pod_got.len(), world.reliable().engine_counters().wrong_peer_packets), (1, 1));
    // On its own connection, but with a wrong source; and with a wrong destination.
    send(&mut world, A, 1, &inner(GATEWAY_MAC, other, 0, 1));
    send(&mut world, A, 2, &inner(other, mac, 0, 1));
    assert_eq!((world.pod_got.len(), world.reliable().hosts()[0].counters.wrong_address_frames), (1, 2));
    // A frame that it has routed.
    send(&mut world, A, 3, &inner(GATEWAY_MAC, Mac::ROUTER, 0, 1));
    assert_eq!(world.pod_got.len(), 2);
    // A damaged frame is refused and not acknowledged, as the next ACK shows.
    let mut damaged = inner(GATEWAY_MAC, mac, 0, 1);
    damaged[14 + 20 + 7] ^= 1;
    send(&mut world, A, 4, &damaged);
    assert_eq!((world.pod_got.len(), world.reliable().hosts()[0].counters.refused_damaged_frames), (2, 1));
    // Too far ahead of a missing packet: no memory for it.
    send(&mut world, A, 4 + 2000, &inner(GATEWAY_MAC, mac, 1, 1));
    assert_eq!(world.reliable().hosts()[0].held_frames, 0);
}

fn pair_of(world: &World) -> bifrost_rte::Pair {
    bifrost_rte::Pair { vni: VNI, local: GATEWAY_MAC, remote: world.hosts[0].mac }
}

#[test]
fn every_arriving_frame_is_counted() {
    let mut world = two_hosts();
    let now = world.now;
    world.hosts[0].send(now, 0, 0);
    world.pass(5 * MS);
    let mut random = fastrand::Rng::with_seed(8);
    let good = request(A, VNI, GATEWAY_MAC, 3);
    let mut sent = 0;
    for round in 0..20_000 {
        let len = random.usize(..200);
        let noise: Vec<u8> = (0..len).map(|_| random.u8(..)).collect();
        let kind = random.u8(..6) << 4 | random.u8(..16);
        let head = [&vxlan::emit(Vni::new(VNI).unwrap())[..], &[kind], &noise[..]].concat();
        let mut bytes = match round % 3 {
            0 => frame(A, (49_152, PORT), &head, &[]),
            1 => good.clone(),
            _ => frame(B, (1, PORT), &noise, &[]),
        };
        if round % 3 == 1 {
            let at = random.usize(42..bytes.len());
            bytes[at] ^= 1 << random.u8(..8);
        }
        sent += u64::from(world.arrive(&bytes).is_ok());
        if round % 100 == 0 {
            world.pass(20_000);
        }
    }
    world.pass(2000 * MS);
    let hosts = world.reliable().hosts();
    let seen: u64 = hosts.iter().map(|host| host.counters.rx_datagrams).sum();
    assert!(seen >= sent, "{seen} of {sent}");
    assert!(hosts[0].counters.bad_checksum_datagrams > 5000 && hosts[0].counters.bad_packets > 5000, "{hosts:?}");
    assert!(hosts.iter().all(|host| host.held_frames == 0 && host.connections <= 8));
    // And it works as before.
    let before = world.pod_got.len();
    let now = world.now;
    world.hosts[0].send(now, 5, 0);
    world.pass(20 * MS);
    assert_eq!(world.pod_got.len(), before + 1);
}
