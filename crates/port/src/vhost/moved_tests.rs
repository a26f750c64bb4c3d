//! Rings that return buffers in order, and packets moved out of them.

use std::collections::VecDeque;

use bifrost_wire::virtio_net::Header;

use super::mock::{Guest, Kind, bytes, fetch};
use crate::guest::{GuestPort, TxHandle};

const SIZE: u16 = 64;

fn guest(packed: bool) -> Guest {
    let mut guest = Guest::new(Kind { packed, size: SIZE, event_idx: true, mergeable: true });
    guest.in_order = true;
    guest
}

/// Each frame repeats one byte this many times.
fn frame(n: u32) -> Vec<u8> {
    vec![n as u8; 60 + (n as usize * 977) % 3000]
}

#[test]
fn a_waiting_packet_does_not_block_those_behind_it() {
    for packed in [false, true] {
        let mut guest = guest(packed);
        let mut port = guest.queue();
        for n in 0..u32::from(SIZE) {
            guest.send(Header::default(), &frame(n), &[], false).expect("room");
        }
        let waiting = fetch(&mut port);
        assert_eq!(waiting.len(), usize::from(SIZE));
        // Those behind the first are completed, and wait for it.
        for other in &waiting[1..8] {
            port.complete(other.handle);
        }
        port.flush();
        assert_eq!(guest.tx.reap(), None);
        assert!(guest.send(Header::default(), &frame(0), &[], false).is_none(), "the ring is full");

        port.relieve();
        let back = std::iter::from_fn(|| guest.tx.reap()).count();
        assert_eq!(back, usize::from(SIZE / 2) + 7, "half of the ring, and the completed ones behind the first");
        for (n, frame_at) in (0..).zip(&waiting) {
            if !(1..8).contains(&n) {
                assert!(port.is_intact(frame_at.handle));
                assert_eq!(bytes(&port, frame_at), frame(n), "packed: {packed}, packet {n}");
            }
        }
        // Their buffers are reused under new handles.
        let mut others = Vec::new();
        for n in 100..100 + back as u32 {
            guest.send(Header::default(), &frame(n), &[], false).expect("room");
        }
        others.extend(fetch(&mut port));
        assert_eq!(others.len(), back);
        let live = waiting.iter().enumerate().filter(|(n, _)| !(1..8).contains(n)).map(|(_, f)| f.handle.0);
        let mut names: Vec<u32> = live.chain(others.iter().map(|f| f.handle.0)).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), usize::from(SIZE) - 7 + back);
        assert!(names.iter().all(|name| *name < port.tx_capacity()));
        for frame in waiting.iter().chain(&others) {
            port.complete(frame.handle);
        }
        port.flush();
        assert_eq!(std::iter::from_fn(|| guest.tx.reap()).count(), usize::from(SIZE));
        assert_eq!((port.tx_free(), port.kept_bytes()), (port.tx_capacity(), 0));
        assert_eq!(port.vhost_counters().broken_rings, 0);
    }
}

#[test]
fn a_ring_with_room_keeps_its_packets() {
    let mut guest = guest(false);
    let mut port = guest.queue();
    for n in 0..u32::from(SIZE) / 2 {
        guest.send(Header::default(), &frame(n), &[], false).expect("room");
    }
    fetch(&mut port);
    port.relieve();
    assert_eq!(guest.tx.reap(), None);
    assert_eq!(port.vhost_counters().tx_moved_packets, 0);
}

#[test]
fn at_most_one_ring_of_packets_is_moved() {
    let mut guest = guest(false);
    let mut port = guest.queue();
    let mut held: VecDeque<TxHandle> = VecDeque::new();
    for n in 0..10_000 {
        if guest.send(Header::default(), &frame(n), &[], false).is_none() {
            port.relieve();
            if std::iter::from_fn(|| guest.tx.reap()).count() == 0 {
                break;
            }
        }
        held.extend(fetch(&mut port).iter().map(|frame| frame.handle));
    }
    assert_eq!(held.len(), 2 * usize::from(SIZE), "in the ring, and moved");
    assert_eq!(port.vhost_counters().tx_moved_packets, u64::from(SIZE));
    // The oldest are completed: there is room again.
    for handle in held.drain(..10) {
        port.complete(handle);
    }
    port.relieve();
    assert_eq!(std::iter::from_fn(|| guest.tx.reap()).count(), 10);
}

/// Random operations: each packet is unchanged while it is held, and each buffer is returned once.
#[test]
fn moved_packets_are_unchanged() {
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 0..40 {
        let mut guest = guest(round % 2 == 0);
        let mut port = guest.queue();
        let (mut held, mut offered, mut back): (Vec<_>, u32, usize) = (Vec::new(), 0, 0);
        let mut fetched = 0;
        for _ in 0..400 {
            match rng.u32(0..6) {
                0..=2 => {
                    if guest.send(Header::default(), &frame(offered), &[rng.usize(1..50)], rng.bool()).is_some() {
                        offered += 1;
                    }
                }
                3 => {
                    for frame in fetch(&mut port) {
                        held.push((fetched, frame));
                        fetched += 1;
                    }
                }
                4 if !held.is_empty() => {
                    let (n, packet) = held.swap_remove(rng.usize(..held.len()));
                    assert_eq!(bytes(&port, &packet), frame(n));
                    port.complete(packet.handle);
                    port.complete(packet.handle);
                    port.flush();
                }
                _ => port.relieve(),
            }
            back += std::iter::from_fn(|| guest.tx.reap()).count();
        }
        for (n, packet) in &held {
            assert_eq!(bytes(&port, packet), frame(*n), "round {round}");
        }
        drop(port);
        back += std::iter::from_fn(|| guest.tx.reap()).count();
        assert_eq!(back, fetched as usize, "round {round}");
    }
}
