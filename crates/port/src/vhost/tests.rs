//! The queue against a driver that follows the rules, and one that does not.

use std::sync::atomic::{AtomicBool, Ordering};

use bifrost_nic::Offload;
use bifrost_wire::virtio_net::{self, Header};

use super::mock::{F_INDIRECT, F_NEXT, F_WRITE, GUEST, Guest, Kind, MEMORY, bytes, fetch};
use super::ring::{BadChain, Ring, WRAP};
use super::split::Split;
use super::*;
use crate::guest::{GuestPort, PlaceError, TxFrame};

/// A descriptor: its index, address, length, flags, successor.
type Described = (u16, u64, u32, u16, u16);
type Misdeed = fn(&mut Guest);

pub(super) const KIND: Kind = Kind { packed: false, size: 16, event_idx: true, mergeable: true };
pub(super) const BOTH: [Kind; 2] = [KIND, Kind { packed: true, ..KIND }];

/// The same for packets that may be sent more than once.
fn fetch_to_repeat(queue: &mut VhostQueue) -> Vec<TxFrame> {
    let frames = fetch(queue);
    frames.iter().for_each(|frame| queue.keep(frame.handle));
    frames
}

/// Bytes of packets copied by the queue, beyond their heads.
fn kept(queue: &VhostQueue) -> u64 {
    queue.counters().into_iter().find(|(name, _)| name == "tx_kept_bytes").map_or(0, |(_, bytes)| bytes)
}

pub(super) fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed)).collect()
}

#[test]
fn tx_buffers_return_in_the_order_of_completion() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        let mut queue = guest.queue();
        let frames = [frame(60, 1), frame(3000, 2), frame(60_000, 3)];
        let heads: Vec<u16> = [(0, false), (1, false), (2, true)]
            .map(|(i, indirect)| {
                let cuts: &[usize] = [&[12][..], &[5, 7, 100, 1], &[300, 20_000, 20_000]][i];
                guest.send(Header::default(), &frames[i], cuts, indirect).expect("room")
            })
            .to_vec();
        let got = fetch(&mut queue);
        assert_eq!(got.iter().map(|f| bytes(&queue, f)).collect::<Vec<_>>(), frames);
        assert!(got.iter().all(|f| f.offload == Offload::default()));
        assert_eq!(queue.bytes(got[1].handle).0, &frames[1][..256]);
        let mut part = Vec::new();
        queue.copy(got[1].handle, 250, 260, &mut part);
        queue.copy(got[1].handle, 2990, 4000, &mut part);
        assert_eq!(part, [&frames[1][250..260], &frames[1][2990..]].concat());
        assert_eq!(queue.tx_free(), 13);
        guest.tx.arm();
        for i in [2, 0] {
            queue.complete(got[i].handle);
            queue.complete(got[i].handle);
        }
        assert_eq!((guest.tx.reap(), guest.tx.calls()), (None, 0), "nothing is shown before the batch ends");
        queue.flush();
        queue.flush();
        assert_eq!(
            (guest.tx.reap(), guest.tx.reap(), guest.tx.reap()),
            (Some((heads[2], 0)), Some((heads[0], 0)), None)
        );
        assert_eq!((guest.tx.calls(), queue.tx_free()), (1, 15));
        drop(queue);
        assert_eq!(guest.tx.reap(), Some((heads[1], 0)), "dropping a queue returns everything");
    }
}

#[test]
fn header_checks_stay_valid_when_the_guest_changes_headers() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        let mut queue = guest.queue();
        let original = frame(1000, 1);
        guest.send(Header::default(), &original, &[], false);
        let got = fetch(&mut queue);
        assert!(queue.is_intact(got[0].handle), "as far as known");
        queue.complete(got[0].handle);
        assert_eq!(kept(&queue), 0, "no resend was expected");
        guest.send(Header::default(), &original, &[], false);
        let got = fetch_to_repeat(&mut queue);
        assert_eq!(kept(&queue), 744, "not proven yet");
        assert!(queue.is_intact(got[0].handle));
        queue.complete(got[0].handle);
        // From now on packets stay in the guest's memory.
        let at = guest.allocate(0);
        guest.send(Header::default(), &original, &[], false);
        let got = fetch_to_repeat(&mut queue);
        assert_eq!(kept(&queue), 0);
        assert!(guest.memory.write(at, &[0xff; 2048]));
        assert_eq!(bytes(&queue, &got[0]), [&original[..256], &[0xff; 744]].concat());
    }
}

#[test]
fn packets_of_a_guest_that_reuses_buffers_early_are_copied() {
    for kind in BOTH {
        for proven_first in [false, true] {
            let mut guest = Guest::new(kind);
            let mut queue = guest.queue();
            let original = frame(3000, 1);
            let send = |guest: &mut Guest, queue: &mut VhostQueue| {
                let at = guest.allocate(0);
                guest.send(Header::default(), &original, &[], false);
                (at, fetch_to_repeat(queue)[0])
            };
            if proven_first {
                let (_, first) = send(&mut guest, &mut queue);
                assert!(queue.is_intact(first.handle) && queue.is_intact(first.handle));
            }
            let (at, second) = send(&mut guest, &mut queue);
            let (_, third) = send(&mut guest, &mut queue);
            assert!(guest.memory.write(at, &[0xee; 3012]));
            // Copied packets can be sent again; the others are lost.
            assert_eq!(queue.is_intact(second.handle), !proven_first);
            if !proven_first {
                assert_eq!(bytes(&queue, &second), original);
            }
            assert_eq!(queue.vhost_counters().tx_reused_buffer_packets, 1);
            assert!(queue.is_intact(third.handle), "others are unchanged");
            // From now on packets are copied.
            let (at, fourth) = send(&mut guest, &mut queue);
            assert!(guest.memory.write(at, &[0xee; 3012]));
            assert!(queue.is_intact(fourth.handle));
            assert_eq!(bytes(&queue, &fourth), original);
            let mut part = Vec::new();
            queue.copy(fourth.handle, 200, 300, &mut part);
            queue.copy(fourth.handle, 2990, 4000, &mut part);
            assert_eq!(part, [&original[200..300], &original[2990..]].concat());
            drop(queue);
            let given_back = std::iter::from_fn(|| guest.tx.reap()).count();
            assert_eq!(given_back, if proven_first { 4 } else { 3 });
        }
    }
}

#[test]
fn frozen_packets_do_not_change_with_guest_memory() {
    for kind in BOTH {
        for proven in [false, true] {
            let mut guest = Guest::new(kind);
            let mut queue = guest.queue();
            guest.send(Header::default(), &frame(1000, 1), &[], false);
            let first = fetch_to_repeat(&mut queue)[0];
            if proven {
                assert!(queue.is_intact(first.handle));
            }
            for len in [100, 256, 257, 1000, 60_000] {
                let original = frame(len, 2);
                let at = guest.allocate(0);
                guest.send(Header::default(), &original, &[20, len / 2], false);
                let got = fetch(&mut queue)[0];
                queue.freeze(got.handle);
                let overwritten = vec![0xee; (guest.allocate(0) - at) as usize];
                assert!(guest.memory.write(at, &overwritten));
                assert_eq!(bytes(&queue, &got), original, "{len}");
                let (head, rest) = queue.bytes(got.handle);
                assert_eq!([head, rest].concat(), original, "{len}: the port has all of it");
                // A guest that reuses in-flight buffers is detected, but the packet can still be sent again.
                assert!(queue.is_intact(got.handle));
                assert_eq!(bytes(&queue, &got), original, "{len}");
                queue.complete(got.handle);
                assert_eq!(queue.bytes(got.handle), (&[][..], &[][..]));
            }
        }
    }
}

#[test]
fn without_slicing_packets_are_sent_as_fetched() {
    for kind in BOTH {
        for slicing in [true, false] {
            let mut guest = Guest::new(kind);
            guest.slicing = slicing;
            let mut queue = guest.queue();
            let mut reused = 0;
            // A packet's copy is in memory that held another one's, longer or shorter.
            for (seed, len) in [3000, 60, 60_000, 300, 256, 9000].into_iter().enumerate() {
                let original = frame(len, seed as u8);
                let at = guest.allocate(0);
                guest.send(Header::default(), &original, &[5, len / 2], false);
                let got = fetch(&mut queue)[0];
                let behind = len.saturating_sub(256);
                assert_eq!(kept(&queue), if slicing { 0 } else { behind as u64 }, "{len}");
                let overwritten = vec![0xee; (guest.allocate(0) - at) as usize];
                assert!(guest.memory.write(at, &overwritten));
                let (head, rest) = original.split_at(len - behind);
                let rest = if slicing { &overwritten[..behind] } else { rest };
                assert_eq!(bytes(&queue, &got), [head, rest].concat(), "{len}");
                assert_eq!(queue.is_intact(got.handle), !slicing, "{len}: can it be sent again?");
                reused += u64::from(slicing);
                assert_eq!(queue.vhost_counters().tx_reused_buffer_packets, reused);
                queue.complete(got.handle);
                queue.flush();
                assert_eq!((guest.tx.reap().is_some(), kept(&queue)), (true, 0), "{len}");
            }
        }
    }
}

#[test]
fn frames_appear_in_publish_order_with_one_notification() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        let mut queue = guest.queue();
        guest.fill(&[2048; 16]);
        let frames: Vec<_> = (0..4).map(|i| frame(100 + i, i as u8)).collect();
        let placed: Vec<_> = frames.iter().map(|f| queue.place(f, true).expect("room")).collect();
        guest.rx.arm();
        for i in [1, 3, 0] {
            queue.publish(placed[i]);
            queue.publish(placed[i]);
        }
        assert_eq!((guest.receive(), guest.rx.calls()), (None, 0));
        queue.notify().expect("notify");
        let header = Header { flags: virtio_net::F_DATA_VALID, num_buffers: 1, ..Default::default() };
        for i in [1, 3, 0] {
            assert_eq!(guest.receive(), Some((header, frames[i].clone())));
        }
        assert_eq!((guest.receive(), guest.rx.calls()), (None, 1));
        queue.notify().expect("notify");
        assert_eq!(guest.rx.calls(), 0);
        drop(queue);
        // The buffer that was never shown, and those never taken: all but the first two are still in the ring.
        assert_eq!(guest.ends.get().0 as u16 & !WRAP, 4);
        assert_eq!((guest.rx.reap(), guest.rx.reap()), (Some((2, 0)), None));
    }
}

#[test]
fn a_driver_without_notifications_gets_none() {
    for kind in BOTH {
        for event_idx in [false, true] {
            let mut guest = Guest::new(Kind { event_idx, ..kind });
            let mut queue = guest.queue();
            guest.fill(&[2048; 8]);
            guest.rx.arm();
            let mut show = |guest: &Guest| {
                let placed = queue.place(&[7; 60], false).expect("room");
                queue.publish(placed);
                queue.notify().expect("notify");
                guest.rx.calls()
            };
            assert_eq!(show(&guest), 1);
            if event_idx {
                assert_eq!(show(&guest), 0, "the event index was passed before");
            } else {
                guest.rx.silence();
                assert_eq!(show(&guest), 0);
            }
            guest.rx.next_used = 2;
            guest.rx.arm();
            assert_eq!(show(&guest), 1);
        }
    }
}

#[test]
fn kicks_are_requested_when_the_ring_is_empty() {
    for kind in BOTH {
        for event_idx in [false, true] {
            let mut guest = Guest::new(Kind { event_idx, ..kind });
            let mut queue = guest.queue();
            fetch(&mut queue);
            let old = guest.tx.next_available;
            guest.send(Header::default(), &[1; 60], &[], false);
            assert!(guest.tx.kick_wanted(old));
            let mut out = Vec::new();
            assert!(queue.fetch(1, &mut out).expect("fetch"), "more may be waiting");
            let old = guest.tx.next_available;
            guest.send(Header::default(), &[1; 60], &[], false);
            assert!(!guest.tx.kick_wanted(old), "the device polls again by itself");
        }
    }
}

#[test]
fn large_frames_use_several_buffers_shown_together() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        let mut queue = guest.queue();
        guest.fill(&[1500, 100, 13, 4000, 4000, 4000]);
        let large = frame(5000, 9);
        let placed = queue.place(&large, false).expect("room");
        queue.publish(placed);
        queue.notify().expect("notify");
        let (header, got) = guest.receive().expect("visible");
        assert_eq!((header.num_buffers, header.flags, got), (4, 0, large.clone()));
        // Two buffers are left: 8000 bytes.
        assert_eq!(queue.place(&frame(8500, 1), false), Err(PlaceError::NoBuffer));
        assert_eq!(queue.place(&frame(9019, 1), false), Err(PlaceError::TooLarge));
        let placed = queue.place(&large, false).expect("the failed frame released its buffers");
        queue.discard(placed);
        queue.discard(placed);
        queue.publish(placed);
        let placed = queue.place(&large, false).expect("the discarded frame released its buffers");
        queue.publish(placed);
        queue.notify().expect("notify");
        assert_eq!(guest.receive().map(|r| r.1), Some(large));
        assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
    }
}

#[test]
fn without_mergeable_buffers_a_frame_must_fit_one() {
    for kind in BOTH {
        let mut guest = Guest::new(Kind { mergeable: false, ..kind });
        let mut queue = guest.queue();
        let (a, b) = (guest.allocate(12), guest.allocate(1500));
        guest.rx.add(&[(a, 12), (b, 1500)], F_WRITE).expect("room");
        assert_eq!(queue.place(&frame(1501, 3), false), Err(PlaceError::TooLarge));
        let placed = queue.place(&frame(1500, 3), false).expect("fits");
        queue.publish(placed);
        queue.notify().expect("notify");
        assert_eq!(guest.receive(), Some((Header { num_buffers: 1, ..Default::default() }, frame(1500, 3))));
    }
}

#[test]
fn a_virtio_header_that_does_not_fit_its_frame_is_refused() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        let mut queue = guest.queue();
        let bad = Header { flags: virtio_net::F_NEEDS_CSUM, csum_start: 14, csum_offset: 5000, ..Default::default() };
        guest.send(bad, &frame(100, 1), &[], false);
        guest.tx.add(&[(GUEST + (4 << 20), 11)], 0);
        assert!(fetch(&mut queue).is_empty());
        assert!(guest.tx.reap().is_some() && guest.tx.reap().is_some(), "refused buffers return at once");
        assert_eq!(queue.vhost_counters().tx_bad_buffer_packets, 1);
        assert_eq!(queue.vhost_counters().tx_malformed_packets.iter().sum::<u64>(), 1);
    }
}

#[test]
fn bad_buffers_are_returned_and_the_next_one_is_taken() {
    let end = GUEST + MEMORY;
    let at = GUEST + (4 << 20);
    let table = GUEST + (5 << 20);
    let cases: &[(&str, BadChain, &[Described])] = &[
        ("loop", BadChain::Link, &[(0, at, 10, F_NEXT, 0)]),
        ("loop of two", BadChain::Link, &[(0, at, 10, F_NEXT, 1), (1, at, 10, F_NEXT, 0)]),
        ("loop of nothing", BadChain::Link, &[(0, at, 0, F_NEXT, 0)]),
        ("out of the table", BadChain::Link, &[(0, at, 10, F_NEXT, 16)]),
        ("behind memory", BadChain::Address, &[(0, end, 60, 0, 0)]),
        ("over the end of memory", BadChain::Address, &[(0, end - 59, 60, 0, 0)]),
        ("address overflows", BadChain::Address, &[(0, u64::MAX - 5, 60, 0, 0)]),
        ("before memory", BadChain::Address, &[(0, 0, 60, 0, 0)]),
        ("writable", BadChain::Direction, &[(0, at, 60, F_WRITE, 0)]),
        ("second writable", BadChain::Direction, &[(0, at, 60, F_NEXT, 1), (1, at, 60, F_WRITE, 0)]),
        ("too long", BadChain::Length, &[(0, at, 1 << 20, 0, 0)]),
        ("sum overflows", BadChain::Length, &[(0, at, 1000, F_NEXT, 1), (1, at, u32::MAX, 0, 0)]),
        ("table of no size", BadChain::Indirect, &[(0, table, 0, F_INDIRECT, 0)]),
        ("table of odd size", BadChain::Indirect, &[(0, table, 17, F_INDIRECT, 0)]),
        ("table with a successor", BadChain::Indirect, &[(0, table, 16, F_INDIRECT | F_NEXT, 1)]),
        ("table in the middle", BadChain::Indirect, &[(0, at, 10, F_NEXT, 1), (1, table, 16, F_INDIRECT, 0)]),
        ("table outside", BadChain::Address, &[(0, end - 8, 16, F_INDIRECT, 0)]),
        ("endless table", BadChain::Indirect, &[(0, table, !15, F_INDIRECT, 0)]),
    ];
    for &(name, reason, descriptors) in cases {
        for size in [16, 2048] {
            let mut guest = Guest::new(Kind { size, ..KIND });
            let mut queue = guest.queue();
            for &(index, at, len, flags, next) in descriptors {
                let next = if next == 16 { size } else { next };
                guest.tx.descriptor(index, at, len, flags, next);
            }
            guest.tx.chains.insert(0, vec![0]);
            guest.tx.offer(0);
            guest.tx.descriptor(9, at, 60, 0, 0);
            guest.tx.chains.insert(9, vec![9]);
            guest.tx.offer(9);
            let got = fetch(&mut queue);
            assert_eq!(got.iter().map(|f| f.handle.0).collect::<Vec<_>>(), [9], "{name}");
            assert_eq!(guest.tx.reap(), Some((0, 0)), "{name}");
            // In a large ring, a loop looks like a chain that is too long.
            let reason = if size == 2048 && name.starts_with("loop") { BadChain::Pieces } else { reason };
            assert_eq!(queue.vhost_counters().tx_bad_chain_packets[reason as usize], 1, "{name}");
        }
    }
}

#[test]
fn bad_receive_buffers_return_empty_and_the_next_one_is_taken() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        let mut queue = guest.queue();
        guest.rx.add(&[(GUEST + MEMORY - 10, 2048)], F_WRITE);
        guest.rx.add(&[(GUEST + (4 << 20), 2048)], 0);
        guest.fill(&[2048]);
        let placed = queue.place(&frame(60, 1), true).expect("the third");
        queue.publish(placed);
        queue.notify().expect("notify");
        assert_eq!((guest.rx.reap(), guest.rx.reap()), (Some((0, 0)), Some((1, 0))));
        assert_eq!(guest.receive().map(|r| r.1), Some(frame(60, 1)));
    }
}

#[test]
fn a_ring_with_a_format_violation_is_taken_out_of_use() {
    let broken: [(&str, Misdeed); 4] = [
        ("index out of range", |g| g.tx.write16(g.tx.available + 2, 17)),
        ("index that decreases", |g| g.tx.write16(g.tx.available + 2, u16::MAX)),
        ("no such descriptor", |g| g.tx.offer(16)),
        ("one buffer twice", |g| {
            g.tx.descriptor(0, GUEST, 60, 0, 0);
            g.tx.offer(0);
            g.tx.offer(0);
        }),
    ];
    for (name, act) in broken {
        let mut guest = Guest::new(KIND);
        let mut queue = guest.queue();
        act(&mut guest);
        fetch(&mut queue);
        assert_eq!(queue.vhost_counters().broken_rings, 1, "{name}");
        guest.send(Header::default(), &[1; 60], &[], false);
        assert!(fetch(&mut queue).is_empty(), "{name}");
        // The other direction continues.
        guest.fill(&[2048]);
        assert!(queue.place(&[1; 60], false).is_ok(), "{name}");
    }
    let mut guest = Guest::new(KIND);
    let mut queue = guest.queue();
    guest.rx.write16(guest.rx.available + 2, 40);
    assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
    guest.fill(&[2048]);
    assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
    assert_eq!(queue.vhost_counters().broken_rings, 1);
}

#[test]
fn lost_guest_memory_only_takes_its_rings_out_of_use() {
    for kind in BOTH {
        for (cut, what) in [(0, "everything"), (4 << 20, "all buffers"), (1 << 20, "half of the receive ring's tables")]
        {
            let mut guest = Guest::new(kind);
            let mut other = Guest::new(kind);
            let (mut queue, mut others) = (guest.queue(), other.queue());
            guest.fill(&[2048; 8]);
            other.fill(&[2048; 8]);
            for i in 0..3 {
                guest.send(Header::default(), &frame(1000, i), &[], false);
            }
            let got = fetch(&mut queue);
            let placed = queue.place(&[1; 60], false).expect("room");
            guest.file.set_len(cut).expect("shorter");
            let mut out = Vec::new();
            queue.copy(got[0].handle, 0, 1000, &mut out);
            assert_eq!(out.len(), 1000, "{what}: lost memory reads as other bytes");
            let _ = queue.place(&[1; 60], false);
            queue.publish(placed);
            queue.complete(got[1].handle);
            queue.flush();
            queue.notify().expect("nothing fails");
            assert_eq!(fetch(&mut queue).len(), 0, "{what}");
            assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer), "{what}");
            assert_eq!(queue.vhost_counters().broken_rings, 2, "{what}");
            drop(queue);
            let placed = others.place(&[2; 60], false).expect("room");
            others.publish(placed);
            others.notify().expect("notify");
            assert_eq!(other.receive().map(|r| r.1), Some(vec![2; 60]), "{what}");
        }
    }
}

/// A driver that adds bad buffers as fast as they are refused.
#[test]
fn endless_bad_buffers_do_not_block_the_device() {
    let mut guest = Guest::new(KIND);
    let mut queue = guest.queue();
    guest.rx.descriptor(0, GUEST, 100, 0, 0);
    for _ in 0..guest.rx.size {
        guest.rx.offer(0);
    }
    let (stop, memory, index) = (AtomicBool::new(false), &guest.memory, guest.rx.available + 2);
    let base = guest.rx.next_available;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut next = base;
            while !stop.load(Ordering::Relaxed) {
                next = next.wrapping_add(1);
                assert!(memory.write(index, &next.to_le_bytes()));
            }
        });
        for _ in 0..100 {
            assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn rings_must_be_in_memory() {
    let guest = Guest::new(KIND);
    let wrong: [fn(&mut super::ring::RingSpec); 7] = [
        |s| s.size = 0,
        |s| s.size = 15,
        |s| s.descriptors += 8,
        |s| s.available += 1,
        |s| s.used += 2,
        |s| s.descriptors += MEMORY - 255,
        |s| s.used = 0,
    ];
    for change in wrong {
        let mut spec = guest.rx.spec(0);
        change(&mut spec);
        assert!(Split::open(&guest.memory, spec).is_none());
    }
    assert!(Split::open(&guest.memory, guest.rx.spec(0)).is_some());
}
