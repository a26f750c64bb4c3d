//! Pods that share a VLAN, and are added and removed.

use bifrost_plb::{TRAILER_LEN, Trailer};
use bifrost_wire::ethernet::{self, ethertype};
use bifrost_wire::{Mac, arp};

use super::world::*;
use crate::*;

const MACS: [Mac; 2] = [Mac([2, 0, 0, 0, 0, 0xa]), Mac([2, 0, 0, 0, 0, 0xb])];
const SWITCH: Mac = Mac([2, 0, 0, 0, 0, 0xff]);

/// Rings that accept everything.
struct Open;

impl Rings for Open {
    fn has_room(&mut self, _: Ring) -> bool {
        true
    }

    fn put(&mut self, _: Ring, _: &[&[u8]]) -> bool {
        true
    }
}

fn of(number: usize) -> PodConfig {
    let mut pod = config(1);
    pod.name = format!("pod{number}");
    pod.balancer.pod = number as u16;
    pod.mac = Some(MACS[number]);
    pod.rules.own = vec![format!("10.1.0.{}", number + 1).parse().unwrap()];
    pod
}

fn pipeline() -> Pipeline {
    let pods = vec![of(0), of(1)];
    let mut pipeline = Pipeline::new(PipelineConfig { pods, longest: LONGEST, seed: SEED }).unwrap();
    pipeline.pods_mut().iter_mut().for_each(|pod| pod.set_up(0, true));
    pipeline
}

/// A packet to a MAC address.
fn to(mac: Mac) -> Vec<u8> {
    let mut frame = packet(1, 2, 3, 100);
    frame[..6].copy_from_slice(&mac.0);
    frame
}

fn arrive(pipeline: &mut Pipeline, frame: &[u8]) -> Result<usize, Refusal> {
    pipeline.arrive(0, 0, frame, |_| Open).map(|(place, _)| place.pod)
}

fn arp(from: Mac, sender: [u8; 4], target: [u8; 4]) -> Vec<u8> {
    let packet = arp::Packet {
        operation: arp::Operation::Request,
        sender_mac: from,
        sender_ip: sender.into(),
        target_mac: Mac::ZERO,
        target_ip: target.into(),
    };
    [&ethernet::Header::new(Mac::BROADCAST, from, ethertype::ARP).emit()[..], &packet.emit()].concat()
}

fn tagged(frame: &[u8]) -> Vec<u8> {
    [&frame[..12], &[0x81, 0, 0, VLAN as u8], &frame[12..]].concat()
}

#[test]
fn pods_of_a_vlan_are_distinguished_by_their_mac_addresses() {
    let mut pipeline = pipeline();
    assert_eq!(MACS.map(|mac| arrive(&mut pipeline, &to(mac))), [Ok(0), Ok(1)]);
    assert_eq!(arrive(&mut pipeline, &to(SWITCH)), Err(Refusal::NoPod));
    // An ARP requester does not know the MAC address yet.
    for (target, pod) in [(1, Ok(0)), (2, Ok(1)), (3, Err(Refusal::NoPod))] {
        let question = tagged(&arp(SWITCH, [10, 1, 0, 254], [10, 1, 0, target]));
        assert_eq!(arrive(&mut pipeline, &question), pod, "{target}");
    }
    let mut same = of(1);
    same.mac = Some(MACS[0]);
    same.balancer.pod = 7;
    let error = |settings| pipeline.check(&settings).unwrap_err().to_string();
    assert_eq!(error(same.clone()), "pod pod1: 02:00:00:00:00:0a: another pod has this MAC address, too");
    same.mac = None;
    assert!(error(same.clone()).starts_with("pod pod1: VLAN 7: another interface has it, too"));
    let group = Pod::new(PodConfig { mac: Some(Mac::BROADCAST), ..same }, LONGEST).unwrap_err();
    assert_eq!(group.to_string(), "pod pod1: ff:ff:ff:ff:ff:ff is not a unicast MAC address");
}

#[test]
pub(super) fn a_pod_cannot_pretend_to_be_another() {
    let mut pipeline = pipeline();
    let trailer = Trailer { psn: 0, payload: None, pod: 0, queue: 0, drop: false, unordered: true };
    let mut leaves = |frame: &[u8]| {
        let bytes = [frame, &trailer.emit()].concat();
        let mut left = Vec::new();
        let read = |buffer: &mut [u8]| {
            buffer[..bytes.len()].copy_from_slice(&bytes);
            Some(Ok::<_, ()>(bytes.len()))
        };
        let pod = &mut pipeline.pods_mut()[0];
        assert!(pod.take_back(0, read, |leaving| left.push(leaving.parts.concat())) && bytes.len() > TRAILER_LEN);
        (left.len(), pod.counters().returned_wrong_address_packets)
    };
    assert_eq!(leaves(&arp(MACS[0], [10, 1, 0, 1], [10, 1, 0, 254])), (1, 0));
    let spoofs = [
        arp(MACS[1], [10, 1, 0, 1], [10, 1, 0, 254]),
        arp(MACS[0], [10, 1, 0, 2], [10, 1, 0, 254]),
        tagged(&arp(MACS[0], [10, 1, 0, 1], [10, 1, 0, 254])),
        arp(MACS[0], [10, 1, 0, 1], [10, 1, 0, 254])[..20].to_vec(),
    ];
    for (number, frame) in (1..).zip(spoofs) {
        assert_eq!(leaves(&frame), (0, number));
    }
}

/// Rings of two pods: one takes nothing out of its ring, the other one everything.
enum Apart<'a> {
    Hangs(&'a mut usize),
    Works(&'a mut Vec<Vec<u8>>),
}

impl Rings for Apart<'_> {
    fn has_room(&mut self, _: Ring) -> bool {
        !matches!(self, Apart::Hangs(64))
    }

    fn put(&mut self, _: Ring, parts: &[&[u8]]) -> bool {
        match self {
            Apart::Hangs(taken) => **taken += 1,
            Apart::Works(taken) => taken.push(parts.concat()),
        }
        true
    }
}

#[test]
fn a_pod_that_hangs_in_a_flood_costs_others_nothing() {
    const PACKETS: u32 = 2_000;
    let mut pipeline = pipeline();
    let (mut stuck, mut taken, mut left) = (0, Vec::new(), Vec::new());
    let mut refused = 0;
    for number in 0..PACKETS {
        let now = 1_000_000 + u64::from(number) * 1_000;
        // The same tenant floods the pod that hangs: 50 million packets a second.
        for _ in 0..50 {
            refused += u32::from(pipeline.arrive(now, now, &to(MACS[0]), |_| Apart::Hangs(&mut stuck)).is_err());
        }
        let mut frame = packet(1, 2, number, 100);
        frame[..6].copy_from_slice(&MACS[1].0);
        let place = pipeline.arrive(now, now, &frame, |_| Apart::Works(&mut taken)).map(|(place, _)| place.pod);
        assert_eq!(place, Ok(1), "packet {number}");
        // Returned at once, from the pod's own MAC address.
        for mut bytes in taken.drain(..) {
            bytes[6..12].copy_from_slice(&MACS[1].0);
            let read = |buffer: &mut [u8]| {
                buffer[..bytes.len()].copy_from_slice(&bytes);
                Some(Ok::<_, ()>(bytes.len()))
            };
            assert!(pipeline.pods_mut()[1].take_back(0, read, |leaving| left.push(leaving.parts.concat())));
        }
        for pod in pipeline.pods_mut() {
            pod.release(now, u32::MAX, |leaving| left.push(leaving.parts.concat()));
        }
    }
    assert_eq!((stuck, refused), (64, 50 * PACKETS - 64));
    let numbers: Vec<u32> = left.iter().map(|frame| read(frame).1).collect();
    assert!(numbers.iter().copied().eq(0..PACKETS), "not all of them in order: {} came", numbers.len());
    assert_eq!(pipeline.pods()[1].occupancy().0, 0);
}

#[test]
fn pods_come_and_go_while_others_work() {
    let mut pipeline = pipeline();
    let sent = arrive(&mut pipeline, &to(MACS[1]));
    assert_eq!(sent, Ok(1));
    assert_eq!(pipeline.remove(0).unwrap().name(), "pod0");
    assert!(pipeline.remove(0).is_none() && pipeline.pods()[0].is_vacant());
    assert_eq!(arrive(&mut pipeline, &to(MACS[0])), Err(Refusal::NoPod));
    // The other one keeps its number and its state.
    assert_eq!(arrive(&mut pipeline, &to(MACS[1])), Ok(1));
    assert_eq!((pipeline.pods()[1].occupancy().0, pipeline.deadline().is_some()), (2, true));
    assert!(pipeline.add(Pod::new(of(1), LONGEST).unwrap()).is_err(), "it exists already");
    assert_eq!(pipeline.add(Pod::new(of(0), LONGEST).unwrap()), Ok(0));
    assert_eq!(arrive(&mut pipeline, &to(MACS[0])), Err(Refusal::PodDown), "no client is connected yet");
    pipeline.pods_mut()[0].set_up(0, true);
    assert_eq!(arrive(&mut pipeline, &to(MACS[0])), Ok(0));
    // Whole VLANs are released, too.
    let mut sole = config(1);
    (sole.interfaces, sole.balancer.pod) = (vec![Some(9), None], 9);
    let number = pipeline.add(Pod::new(sole.clone(), LONGEST).unwrap()).unwrap();
    assert_eq!((number, pipeline.check(&sole).is_err()), (2, true));
    pipeline.remove(number);
    assert_eq!(pipeline.check(&sole), Ok(()));
}
