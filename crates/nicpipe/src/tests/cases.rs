use bifrost_plb::Trailer;
use bifrost_wire::protocol::{GRE, ICMP, TCP};
use bifrost_wire::{Vni, gre, vxlan};

use super::world::*;
use bifrost_tables::Rate;

use crate::*;

const OWN: [u8; 4] = [10, 0, 0, 1];
const PEER: [u8; 4] = [10, 0, 0, 254];

fn tcp(source: [u8; 4], destination: [u8; 4], port: u16) -> Vec<u8> {
    let mut header = [0u8; 20];
    header[..2].copy_from_slice(&port.to_be_bytes());
    header[2..4].copy_from_slice(&50_000u16.to_be_bytes());
    header[12] = 0x50;
    framed(Some(VLAN), &ip(source, destination, TCP, &header))
}

#[test]
pub(super) fn classes() {
    let mut arp = framed(Some(VLAN), &[0; 28]);
    arp[16..26].copy_from_slice(&[8, 6, 0, 1, 8, 0, 6, 4, 0, 1]);
    let cases = [
        ("tunnel", packet(1, 2, 3, 10), Class::Plb),
        ("ARP", arp, Class::Priority),
        ("BGP to us", tcp(PEER, OWN, 179), Class::Priority),
        ("BGP through us", tcp(PEER, [203, 0, 113, 9], 179), Class::Plb),
        ("BFD to us", framed(Some(VLAN), &datagram(PEER, OWN, (50_000, 3784), b"x")), Class::Priority),
        ("ping to us", framed(Some(VLAN), &ip(PEER, OWN, ICMP, &[8, 0, 0, 0, 0, 1, 0, 1])), Class::Priority),
        ("ping through us", framed(Some(VLAN), &ip(PEER, PEER, ICMP, &[8, 0, 0, 0, 0, 1, 0, 1])), Class::Plb),
        ("a rule's port", framed(Some(VLAN), &datagram(PEER, PEER, (1, 7777), b"x")), Class::Rss),
    ];
    let mut config = config(2);
    let rule =
        Rule { ethertype: None, protocol: None, port: Some(7777), destination: None, vni: None, class: Class::Rss };
    config.rules.list.push(rule);
    for (name, frame, class) in cases {
        let arrival = look(&frame).unwrap();
        assert_eq!(config.rules.class(&arrival, &frame), class, "{name}");
        let mut world = World::new(config.clone());
        let (_, ring) = world.arrive(&frame).unwrap();
        assert_eq!(ring == Ring::Priority, class == Class::Priority, "{name}");
        let bytes = match class {
            Class::Priority => world.priority[0].clone(),
            _ => (0..2).find_map(|core| world.ring_of(core).next().map(<[u8]>::to_vec)).unwrap(),
        };
        let trailer = Trailer::parse(bytes[bytes.len() - 16..].try_into().unwrap()).unwrap();
        assert_eq!(trailer.unordered, class != Class::Plb, "{name}");
        world.give_back(&bytes);
        world.pass(200_000);
        assert_eq!(world.left[0], frame, "{name}");
    }
}

#[test]
pub(super) fn control_traffic_has_a_rate_and_passes_a_full_data_plane() {
    let mut world = World::new(config(1));
    world.stopped[0] = u64::MAX;
    while world.arrive(&packet(1, 2, 3, 10)).is_ok() {}
    assert_eq!(world.arrive(&packet(1, 2, 3, 10)), Err(Refusal::RingFull));
    let passed = (0..20).filter(|_| world.arrive(&tcp(PEER, OWN, 179)).is_ok()).count();
    assert_eq!((passed, world.priority.len()), (8, 8));
    assert_eq!(world.arrive(&tcp(PEER, OWN, 179)), Err(Refusal::ControlRate));
    // Without the priority ring it has the fate of all others.
    let mut without = config(1);
    without.rules.control_with_data = true;
    let mut world = World::new(without);
    assert_eq!(world.arrive(&tcp(PEER, OWN, 179)).map(|(_, ring)| ring), Ok(Ring::Core(0)));
    world.stopped[0] = u64::MAX;
    while world.arrive(&packet(1, 2, 3, 10)).is_ok() {}
    assert_eq!(world.arrive(&tcp(PEER, OWN, 179)), Err(Refusal::RingFull));
}

#[test]
fn vlans_are_distinguished() {
    let pods = |vlans: &[&[Option<u16>]]| PipelineConfig {
        pods: vlans
            .iter()
            .zip(0..)
            .map(|(interfaces, n)| {
                let mut pod = config(1);
                pod.name = format!("pod{n}");
                pod.balancer.pod = n;
                pod.interfaces = interfaces.to_vec();
                pod
            })
            .collect(),
        longest: LONGEST,
        seed: SEED,
    };
    let error = |vlans: &[&[Option<u16>]]| Pipeline::new(pods(vlans)).unwrap_err().to_string();
    assert_eq!(
        error(&[&[Some(1)], &[Some(2), Some(1)]]),
        "pod pod1: VLAN 1: another interface has it, too; pods share a VLAN if each has a mac"
    );
    assert_eq!(
        error(&[&[None], &[None]]),
        "pod pod1: untagged: another interface has it, too; pods share a VLAN if each has a mac"
    );
    assert_eq!(error(&[&[Some(4095)]]), "pod pod0: VLAN 4095; VLANs are 1 to 4094");
    assert_eq!(error(&[&[]]), "pod pod0: 0 interfaces; a pod has 1 to 4");
    let pipeline = Pipeline::new(pods(&[&[Some(1), None], &[Some(2)]])).unwrap();
    assert_eq!(pipeline.pods().len(), 2);
}

#[test]
pub(super) fn a_pod_that_goes_down_loses_waiting_packets() {
    let mut world = World::new(config(2));
    world.stopped = vec![u64::MAX; 2];
    for number in 0..10 {
        world.arrive(&packet(1, 2, number, 10)).unwrap();
    }
    // The second one returns, and waits for the first.
    let second = world.ring_of(1).next().unwrap().to_vec();
    world.give_back(&second);
    assert_eq!(world.pod().occupancy(), (10, 1));
    world.pod().set_up(0, false);
    assert_eq!((world.pod().occupancy(), world.pod().free_buffers()), ((0, 0), 513));
    assert_eq!(world.arrive(&packet(1, 2, 3, 10)), Err(Refusal::PodDown));
    world.pod().set_up(0, true);
    assert!(world.arrive(&packet(1, 2, 3, 10)).is_ok());
}

#[test]
pub(super) fn header_only_packets_are_short() {
    let mut world = World::new(PodConfig { header_only_from: Some(100), ..config(1) });
    let frame = packet(1, 2, 3, 1000);
    world.arrive(&frame).unwrap();
    let bytes = world.ring_of(0).next().unwrap();
    // Without the tag and the payload, with the trailer.
    assert_eq!(bytes.len(), frame.len() - 4 - 1000 + 16);
    world.pass(10_000);
    assert_eq!(world.left, [frame]);
}

#[test]
pub(super) fn headers_of_a_tunnel_stay_with_the_packet() {
    let mut world = World::new(PodConfig { header_only_from: Some(100), ..config(1) });
    let udp = in_gre(&datagram([192, 168, 0, 1], [192, 168, 0, 2], (1, 2), &[5; 400]));
    // Packets that are neither TCP nor UDP go whole: the end of their headers is unknown.
    let icmp = in_gre(&ip([192, 168, 0, 1], [192, 168, 0, 2], ICMP, &[0; 400]));
    let echo = framed(Some(VLAN), &ip([192, 168, 0, 1], [192, 168, 0, 2], ICMP, &[0; 400]));
    for (frame, kept) in [(&udp, udp.len() - 400), (&icmp, icmp.len()), (&echo, echo.len())] {
        world.arrive(frame).unwrap();
        let bytes = world.ring_of(0).last().unwrap();
        assert_eq!(bytes[..12], frame[..12]);
        // Without the tag, with the trailer.
        assert_eq!(bytes[12..bytes.len() - 16], frame[16..kept]);
    }
    world.pass(10_000);
    assert_eq!(world.left, [udp, icmp, echo]);
}

#[test]
fn flows_in_gre_have_separate_order_queues() {
    let flow = |port: u16| {
        let frame = in_gre(&datagram([192, 168, 0, 1], [192, 168, 0, 2], (port, 2), b"x"));
        look(&frame).unwrap().flow(&frame, SEED).hash
    };
    assert_eq!(flow(1), flow(1));
    assert_ne!(flow(1), flow(2));
}

/// A packet in a customer's GRE tunnel.
fn in_gre(packet: &[u8]) -> Vec<u8> {
    let header = gre::Header { key: 9, ethertype: 0x0800 };
    framed(Some(VLAN), &ip([198, 51, 100, 1], OWN, GRE, &[&header.emit()[..], packet].concat()))
}

#[test]
pub(super) fn fragments_of_a_packet_go_to_one_core_whole() {
    #[derive(Clone, Copy)]
    enum Inside {
        Nothing,
        Vxlan,
        Gre,
    }
    let fragment = |inside: Inside, offset: u16| {
        let mut packet = ip([192, 168, 0, 1], [192, 168, 0, 2], 17, &[1; 400]);
        let field = (offset / 8) | 0x2000;
        packet[6..8].copy_from_slice(&field.to_be_bytes());
        match inside {
            Inside::Nothing => framed(Some(VLAN), &packet),
            Inside::Vxlan => {
                let payload = [&vxlan::emit(Vni::new(7).unwrap())[..], &framed(None, &packet)].concat();
                // Each with a different outer flow.
                framed(Some(VLAN), &datagram([10, 0, 0, 11], OWN, (50_000 + offset, 4789), &payload))
            }
            Inside::Gre => in_gre(&packet),
        }
    };
    for inside in [Inside::Nothing, Inside::Vxlan, Inside::Gre] {
        let mut world = World::new(PodConfig { header_only_from: Some(100), ..config(4) });
        let frames: Vec<Vec<u8>> = (0..8).map(|n| fragment(inside, n * 400)).collect();
        for frame in &frames {
            let foreseen = world.pipeline.explain(world.now, frame, |_, _| true);
            assert!(foreseen.last().unwrap().what.ends_with("by its flow"), "{foreseen:?}");
            world.arrive(frame).unwrap();
        }
        let used: Vec<usize> = (0..4_usize).filter(|core| world.ring_of(*core).next().is_some()).collect();
        assert_eq!(used.len(), 1, "{used:?}");
        for (bytes, frame) in world.ring_of(used[0]).zip(&frames) {
            let (bytes, trailer) = bytes.split_at(bytes.len() - 16);
            let trailer = Trailer::parse(trailer.try_into().unwrap()).unwrap();
            assert!(trailer.unordered && trailer.payload.is_none());
            assert_eq!(bytes[12..], frame[16..], "in order and complete");
        }
    }
}

#[test]
pub(super) fn a_trace_predicts_what_happens_to_a_frame() {
    let mut pod = config(2);
    pod.limiter.first = Rate { per_second: 0, burst: 2 };
    pod.limiter.second = Rate { per_second: 0, burst: 1 };
    pod.limiter.sample_drops = 0;
    let mut world = World::new(pod);
    let last = |world: &World, frame: &[u8], room: bool| {
        let steps = world.pipeline.explain(world.now, frame, |_, _| room);
        steps.last().map(|step| (step.stage, step.passes)).unwrap()
    };
    let frame = packet(1000, 3, 7, 64);
    for expected in [("core", true), ("core", true), ("core", true), ("limiter", false)] {
        assert_eq!(last(&world, &frame, true), expected);
        assert_eq!(world.arrive(&frame).is_ok(), expected.1, "the prediction is right");
    }
    assert_eq!(last(&world, &packet(1001, 3, 7, 64), false), ("core", false));
    assert_eq!(last(&world, &tcp(PEER, OWN, 179), true), ("class", true));
    assert_eq!(last(&world, &framed(Some(9), &datagram(PEER, OWN, (1, 2), b"x")), true), ("pod", false));
    assert_eq!(last(&world, &[0; 5], true), ("parse", false));
    world.pod().set_up(0, false);
    assert_eq!(last(&world, &frame, true), ("pod", false));
}
