//! Several queue pairs as one port.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::time::Duration;

use bifrost_wire::virtio_net::Header;
use rustix::event::{Timespec, epoll};

use super::mock::{Guest, Kind};
use super::pairs::Pairs;
use super::*;
use crate::guest::{GuestPort, PolledPort};

const KIND: Kind = Kind { packed: false, size: 16, event_idx: true, mergeable: true };

/// Two pairs of a guest, the second one with smaller rings.
fn guest() -> [Guest; 2] {
    let mut first = Guest::new(KIND);
    let second = first.another_pair(Kind { size: 8, ..KIND });
    [first, second]
}

fn port(guest: &[Guest; 2]) -> Pairs {
    Pairs::new(guest.iter().map(Guest::queue).collect()).expect("descriptors")
}

/// A UDP packet over IPv4 without checksums.
fn frame(from: (u8, u16), to: (u8, u16), payload: u8) -> Vec<u8> {
    let mut frame = vec![2, 0, 0, 0, 0, to.0, 2, 0, 0, 0, 0, from.0, 8, 0];
    frame.extend([0x45, 0, 0, 29, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, from.0, 10, 0, 0, to.0]);
    frame.extend([from.1, to.1, 9, 0].iter().flat_map(|w| w.to_be_bytes()));
    frame.push(payload);
    frame
}

#[test]
fn each_pair_gets_its_buffers_back() {
    let mut guest = guest();
    let mut port = port(&guest);
    assert_eq!((port.tx_capacity(), port.tx_free(), port.receive_window()), (32, 24, 4));
    let sent: Vec<Vec<u8>> = (0..10).map(|n| frame((1, n), (2, 7), n as u8)).collect();
    for (n, frame) in sent.iter().enumerate() {
        guest[n % 2].send(Header::default(), frame, &[], false).expect("room");
    }
    let got = mock::fetch(&mut port);
    assert_eq!(port.tx_free(), 14);
    let mut bytes = Vec::new();
    for f in &got {
        let frame = mock::bytes(&port, f);
        assert_eq!(port.bytes(f.handle).0, frame);
        assert!(f.handle.0 < port.tx_capacity() && port.is_intact(f.handle));
        bytes.push(frame);
    }
    bytes.sort();
    assert_eq!(bytes, sent);
    for f in &got {
        port.complete(f.handle);
    }
    port.flush();
    for pair in &mut guest {
        for _ in 0..5 {
            assert!(pair.tx.reap().is_some());
        }
        assert!(pair.tx.reap().is_none());
    }
    assert_eq!((port.tx_free(), port.vhost_counters().tx_packets), (24, 10));
    assert!(port.counters().contains(&("tx_packets".into(), 10)));
}

#[test]
fn replies_go_to_the_requesting_pair_in_order() {
    let mut guest = guest();
    let mut port = port(&guest);
    for pair in &mut guest {
        pair.fill(&[2048; 8]);
    }
    // The flow moves to the other pair, and its replies with it.
    for asking in [1, 0, 1] {
        guest[asking].send(Header::default(), &frame((1, 1000), (2, 53), 0), &[], false).expect("room");
        let got = mock::fetch(&mut port);
        port.complete(got[0].handle);
        let answers: Vec<_> = (0..2).map(|n| frame((2, 53), (1, 1000), n)).collect();
        let placed: Vec<_> = answers.iter().map(|a| port.place(a, true).expect("room")).collect();
        assert!(placed.iter().all(|p| p.0 < port.rx_capacity()));
        placed.into_iter().for_each(|handle| port.publish(handle));
        port.notify().expect("notify");
        for answer in answers {
            assert_eq!(guest[asking].receive().expect("an answer").1, answer);
        }
        assert!(guest.iter_mut().all(|pair| pair.receive().is_none()));
    }
}

#[test]
fn flows_not_started_by_the_guest_are_spread_and_each_stays_on_one_pair() {
    let mut guest = guest();
    let mut port = port(&guest);
    for pair in &mut guest {
        pair.fill(&[2048; 8]);
    }
    let mut seen = [0; 2];
    for n in 0..64u16 {
        let mut where_to = Vec::new();
        for _ in 0..2 {
            let handle = port.place(&frame((2, n), (1, 80), 0), true).expect("room");
            port.publish(handle);
            port.notify().expect("notify");
            let pair = (0..2).find(|p| guest[*p].receive().is_some()).expect("one has it");
            guest[pair].fill(&[2048]);
            where_to.push(pair);
        }
        assert_eq!(where_to[0], where_to[1]);
        seen[where_to[0]] += 1;
    }
    assert!(seen.iter().all(|count| *count > 16), "{seen:?}");
}

#[test]
fn each_kick_wakes_although_kicks_are_never_read() {
    let guest = guest();
    let queues: Vec<_> = guest.iter().map(Guest::queue).collect();
    let kicks: Vec<_> = queues.iter().map(|q| q.fd().try_clone_to_owned().expect("another descriptor")).collect();
    let port = Pairs::new(queues).expect("descriptors");
    let worker = epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
    assert!(port.is_edge_triggered());
    epoll::add(&worker, port.fd(), epoll::EventData::new_u64(1), epoll::EventFlags::IN | epoll::EventFlags::ET)
        .expect("watched");
    let woken = || {
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; 4];
        let soon = Timespec::try_from(Duration::from_millis(20)).expect("short");
        !epoll::wait(&worker, &mut events, Some(&soon)).expect("wait").0.is_empty()
    };
    assert!(!woken());
    for kick in [0, 1, 1, 0, 0] {
        rustix::io::write(kicks[kick].as_fd(), &1u64.to_ne_bytes()).expect("a kick");
        assert!(woken(), "by {kick}");
        assert!(!woken());
    }
}
