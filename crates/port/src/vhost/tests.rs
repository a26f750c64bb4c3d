//! The queue against a driver that plays by the rules, and one that does not.

use std::sync::atomic::{AtomicBool, Ordering};

use bifrost_nic::Offload;
use bifrost_wire::virtio_net::{self, Header};
use proptest::prelude::*;

use super::mock::{F_INDIRECT, F_NEXT, F_WRITE, GUEST, Guest, Kind, MEMORY, bytes, fetch};
use super::ring::{BadChain, Piece, Ring, WRAP};
use super::split::Split;
use super::*;
use crate::guest::{GuestPort, PlaceError, TxFrame};

/// A descriptor: its number, address, length, flags, successor.
type Described = (u16, u64, u32, u16, u16);
type Misdeed = fn(&mut Guest);

const KIND: Kind = Kind { packed: false, size: 16, event_idx: true, mergeable: true };
const BOTH: [Kind; 2] = [KIND, Kind { packed: true, ..KIND }];

/// The same for packets that may leave more than once.
fn fetch_to_repeat(queue: &mut VhostQueue) -> Vec<TxFrame> {
    let frames = fetch(queue);
    frames.iter().for_each(|frame| queue.keep(frame.handle));
    frames
}

/// Bytes of packets that the queue has copies of, beyond their heads.
fn kept(queue: &VhostQueue) -> u64 {
    queue.counters().into_iter().find(|(name, _)| name == "tx_kept_bytes").map_or(0, |(_, bytes)| bytes)
}

fn frame(len: usize, seed: u8) -> Vec<u8> {
    (0..len).map(|i| (i as u8).wrapping_mul(7).wrapping_add(seed)).collect()
}

#[test]
fn sent_frames_stay_with_the_device_until_completed_and_go_back_in_that_order() {
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
        assert_eq!(guest.tx.reap(), Some((heads[1], 0)), "the end of a queue gives everything back");
    }
}

#[test]
fn what_was_decided_about_headers_stays_true_when_the_guest_changes_them() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        let mut queue = guest.queue();
        let original = frame(1000, 1);
        guest.send(Header::default(), &original, &[], false);
        let got = fetch(&mut queue);
        assert!(queue.is_intact(got[0].handle), "as far as that can be said");
        queue.complete(got[0].handle);
        assert_eq!(kept(&queue), 0, "it was not to leave again");
        guest.send(Header::default(), &original, &[], false);
        let got = fetch_to_repeat(&mut queue);
        assert_eq!(kept(&queue), 744, "nothing is proven yet");
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
fn a_guest_that_uses_buffers_early_has_its_packets_kept() {
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
            // What was kept can leave again; what was not is gone.
            assert_eq!(queue.is_intact(second.handle), !proven_first);
            if !proven_first {
                assert_eq!(bytes(&queue, &second), original);
            }
            assert_eq!(queue.vhost_counters().tx_reused_buffer_packets, 1);
            assert!(queue.is_intact(third.handle), "others are what they were");
            // From now on copies count.
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
fn frames_appear_in_the_order_of_publication_with_one_notification() {
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
        // The buffer of the one that never was shown, and those never taken: all but the first two are still in the ring.
        assert_eq!(guest.ends.get().0 as u16 & !WRAP, 4);
        assert_eq!((guest.rx.reap(), guest.rx.reap()), (Some((2, 0)), None));
    }
}

#[test]
fn a_driver_that_wants_no_notifications_gets_none() {
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
fn kicks_are_asked_for_when_the_ring_is_empty() {
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
            assert!(!guest.tx.kick_wanted(old), "the device comes again by itself");
        }
    }
}

#[test]
fn large_frames_take_several_buffers_that_appear_together() {
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
        let placed = queue.place(&large, false).expect("what could not be placed left its buffers");
        queue.discard(placed);
        queue.discard(placed);
        queue.publish(placed);
        let placed = queue.place(&large, false).expect("what was discarded left its buffers");
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
        assert!(guest.tx.reap().is_some() && guest.tx.reap().is_some(), "refused buffers go back at once");
        assert_eq!(queue.vhost_counters().tx_bad_buffer_packets, 1);
        assert_eq!(queue.vhost_counters().tx_malformed_packets.iter().sum::<u64>(), 1);
    }
}

#[test]
fn bad_buffers_are_given_back_and_the_next_one_is_taken() {
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
            assert_eq!(queue.vhost_counters().tx_bad_chain_packets[reason as usize], 1, "{name}");
        }
    }
}

#[test]
fn bad_receive_buffers_go_back_empty_and_the_next_one_is_taken() {
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
fn a_driver_that_breaks_the_ring_loses_it() {
    let broken: [(&str, Misdeed); 4] = [
        ("index from nowhere", |g| g.tx.write16(g.tx.available + 2, 17)),
        ("index that goes back", |g| g.tx.write16(g.tx.available + 2, u16::MAX)),
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
        // The other direction goes on.
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
fn a_guest_whose_memory_is_taken_away_loses_its_rings_and_nothing_else_happens() {
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
            assert_eq!(out.len(), 1000, "{what}: some bytes are as good as others");
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
fn bad_buffers_without_end_do_not_keep_the_device() {
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

/// What the driver, the transport and the clock may do.
#[derive(Clone, Debug)]
enum Step {
    Send { len: usize, cuts: Vec<usize>, indirect: bool },
    Fetch(usize),
    Complete(usize),
    Flush,
    Fill(Vec<u32>),
    Place(usize),
    Publish(usize),
    Discard(usize),
    Notify,
    Receive,
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3000usize, prop::collection::vec(0..1000usize, 0..4), any::<bool>())
            .prop_map(|(len, cuts, indirect)| Step::Send { len, cuts, indirect }),
        4 => (1..20usize).prop_map(Step::Fetch),
        4 => (0..32usize).prop_map(Step::Complete),
        2 => Just(Step::Flush),
        2 => prop::collection::vec(12..3000u32, 1..8).prop_map(Step::Fill),
        6 => (1..5000usize).prop_map(Step::Place),
        6 => (0..32usize).prop_map(Step::Publish),
        1 => (0..32usize).prop_map(Step::Discard),
        3 => Just(Step::Notify),
        3 => Just(Step::Receive),
        1 => Just(Step::Restart),
    ]
}

#[test]
fn after_a_kill_nothing_in_flight_is_lost_or_repeated() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        (guest.rx.inflight, guest.tx.inflight) = (true, true);
        let mut queue = guest.queue();
        for i in 0..6u8 {
            guest.send(Header::default(), &frame(100, i), &[], false);
        }
        let got = fetch(&mut queue);
        for i in [4, 1] {
            queue.complete(got[i].handle);
        }
        queue.flush();
        // Completed, but not shown before the end.
        queue.complete(got[0].handle);
        guest.fill(&[2048; 8]);
        let placed: Vec<_> = (0..5u8).map(|i| queue.place(&frame(90, i), false).expect("room")).collect();
        for i in [3, 1] {
            queue.publish(placed[i]);
        }
        queue.notify().expect("notify");
        queue.publish(placed[0]);
        guest.kill(queue);
        assert_eq!([guest.tx.reap(), guest.tx.reap(), guest.tx.reap()], [Some((4, 0)), Some((1, 0)), None]);
        guest.send(Header::default(), &frame(100, 6), &[], false);

        // A front-end that knows nothing else continues at the used index.
        let mut queue = guest.queue();
        let again: Vec<_> = fetch(&mut queue).iter().map(|f| bytes(&queue, f)).collect();
        assert_eq!(again, [0, 2, 3, 5, 6].map(|i| frame(100, i)));
        assert_eq!([guest.receive(), guest.receive()].map(|r| r.map(|r| r.1)), [3, 1].map(|i| Some(frame(90, i))));
        for i in 10..16u8 {
            let placed = queue.place(&frame(90, i), false).expect("three from before and three that were never taken");
            queue.publish(placed);
        }
        assert_eq!(queue.place(&frame(90, 1), false), Err(PlaceError::NoBuffer));
        queue.notify().expect("notify");
        for i in 10..16 {
            assert_eq!(guest.receive().map(|r| r.1), Some(frame(90, i)));
        }
        drop(queue);
        while guest.tx.reap().is_some() {}
        assert!(guest.tx.chains.is_empty() && guest.rx.chains.is_empty());
    }
}

#[test]
fn a_kill_between_showing_and_noting_repeats_nothing() {
    let mut guest = Guest::new(KIND);
    guest.tx.inflight = true;
    let mut queue = guest.queue();
    for i in 0..4u8 {
        guest.send(Header::default(), &frame(100, i), &[], false);
    }
    let got = fetch(&mut queue);
    queue.complete(got[0].handle);
    queue.flush();
    let record = guest.tx.used + (1 << 19);
    let mut before = [0; 16 + 16 * 16];
    for i in [3, 2] {
        queue.complete(got[i].handle);
    }
    assert!(guest.memory.read(record, &mut before));
    queue.flush();
    // As if it had not come to noting: the batch is linked, the marks are as before.
    for head in 0..16u64 {
        assert!(guest.memory.write(record + 16 + 16 * head, &before[16 + 16 * head as usize..][..1]));
    }
    guest.tx.write16(record + 14, 1);
    guest.kill(queue);
    let mut queue = guest.queue();
    assert_eq!(fetch(&mut queue).iter().map(|f| bytes(&queue, f)).collect::<Vec<_>>(), [frame(100, 1)]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// Every packet arrives once, whole, in the order in which it was published; every buffer comes back once.
    #[test]
    fn nothing_is_lost_or_repeated(
        steps in prop::collection::vec(step(), 1..200),
        packed in any::<bool>(),
        event_idx in any::<bool>(),
        size in prop::sample::select(vec![1u16, 2, 16, 10, 64]),
    ) {
        let size = if packed { size } else { size.next_power_of_two() };
        let mut guest = Guest::new(Kind { packed, size, event_idx, mergeable: true });
        let mut queue = guest.queue();
        let mut seed = 0u8;
        let (mut sent, mut fetched) = (std::collections::VecDeque::new(), Vec::<(TxFrame, Vec<u8>)>::new());
        let (mut placed, mut published) = (Vec::new(), std::collections::VecDeque::new());
        let mut shown = 0;
        for step in steps {
            seed = seed.wrapping_add(1);
            match step {
                Step::Send { len, cuts, indirect } => {
                    let frame = frame(len, seed);
                    if guest.send(Header::default(), &frame, &cuts, indirect).is_some() {
                        sent.push_back(frame);
                    }
                }
                Step::Fetch(max) => {
                    let mut out = Vec::new();
                    queue.fetch(max, &mut out).expect("fetch");
                    for f in out {
                        let want = sent.pop_front();
                        prop_assert_eq!(Some(bytes(&queue, &f)), want.clone());
                        fetched.push((f, want.unwrap_or_default()));
                    }
                }
                Step::Complete(i) => {
                    if i < fetched.len() {
                        let (f, want) = fetched.remove(i);
                        prop_assert_eq!(bytes(&queue, &f), want);
                        queue.complete(f.handle);
                    }
                }
                Step::Flush => {
                    queue.flush();
                    while guest.tx.reap().is_some() {}
                }
                Step::Fill(sizes) => drop(guest.fill(&sizes)),
                Step::Place(len) => {
                    let frame = frame(len, seed);
                    match queue.place(&frame, true) {
                        Ok(handle) => placed.push((handle, frame)),
                        Err(error) => prop_assert_eq!(error, PlaceError::NoBuffer),
                    }
                }
                Step::Publish(i) => {
                    if i < placed.len() {
                        let (handle, frame) = placed.remove(i);
                        queue.publish(handle);
                        published.push_back(frame);
                    }
                }
                Step::Discard(i) => {
                    if i < placed.len() {
                        queue.discard(placed.remove(i).0);
                    }
                }
                Step::Notify => {
                    queue.notify().expect("notify");
                    shown = published.len();
                }
                Step::Receive => {
                    while shown > 0 {
                        let got = guest.receive();
                        shown -= 1;
                        prop_assert_eq!(got.map(|g| g.1), published.pop_front());
                    }
                    prop_assert!(guest.receive().is_none());
                }
                Step::Restart => {
                    // As between GET_VRING_BASE and the next start: all that was held is the guest's again.
                    drop(queue);
                    while guest.tx.reap().is_some() {}
                    fetched.clear();
                    for frame in published.drain(..) {
                        prop_assert_eq!(guest.receive().map(|g| g.1), Some(frame));
                    }
                    // Whatever else comes back is empty.
                    while let Some(got) = guest.receive() {
                        prop_assert!(got.1.is_empty());
                    }
                    placed.clear();
                    shown = 0;
                    let (receive, transmit) = guest.ends.get();
                    queue = guest.queue_from(receive as u16, transmit as u16);
                }
            }
        }
        drop(queue);
        while guest.tx.reap().is_some() {}
        while guest.rx.reap().is_some() {}
        let (receive, transmit) = guest.ends.get();
        prop_assert_eq!(guest.tx.chains.len(), guest.tx.untaken(transmit as u16));
        prop_assert_eq!(guest.rx.chains.len(), guest.rx.untaken(receive as u16));
        prop_assert_eq!(sent.len(), guest.tx.chains.len());
    }

    /// Random descriptors: we find the pieces that the virtio-queue crate finds, or refuse; and we never leave memory.
    #[test]
    fn chains_are_what_another_implementation_sees(
        descriptors in prop::collection::vec((0..40u64, 0..5000u32, 0..8u16, 0..20u16), 16),
        table in prop::collection::vec((0..40u64, 0..5000u32, prop::sample::select(vec![0u16, 1, 1]), 0..6u16), 6),
        head in 0..16u16,
    ) {
        use virtio_queue::{Queue, QueueT};
        use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};
        let mut guest = Guest::new(KIND);
        let page = |n: u64| if n < 38 { GUEST + (5 << 20) + n * 4096 } else { GUEST + MEMORY - (n - 38) * 4096 };
        let tables = GUEST + (6 << 20);
        for (i, &(at, len, flags, next)) in descriptors.iter().enumerate() {
            let flags = flags & if i % 2 == 0 { 7 } else { 1 };
            let (at, len) = if flags & F_INDIRECT != 0 { (tables, 16 * (len % 7)) } else { (page(at), len) };
            guest.tx.descriptor(i as u16, at, len, flags, next);
        }
        for (i, &(at, len, flags, next)) in table.iter().enumerate() {
            let bits = u128::from(page(at)) | u128::from(len) << 64 | u128::from(flags) << 96 | u128::from(next) << 112;
            prop_assert!(guest.memory.write(tables + 16 * i as u64, &bits.to_le_bytes()));
        }
        guest.tx.offer(head);

        let ring = Split::open(&guest.memory, guest.tx.spec(0)).expect("ring");
        let mut ours = Vec::new();
        let result = ring.chain(head, false, 1 << 20, &mut ours);

        let file = FileOffset::new(guest.file.try_clone().expect("file"), 0);
        let memory: GuestMemoryMmap =
            GuestMemoryMmap::from_ranges_with_files([(GuestAddress(GUEST), MEMORY as usize, Some(file))]).expect("memory");
        let mut oracle = Queue::new(16).expect("queue");
        oracle.set_size(16);
        oracle.set_desc_table_address(Some(guest.tx.descriptors as u32), Some((guest.tx.descriptors >> 32) as u32));
        oracle.set_avail_ring_address(Some(guest.tx.available as u32), Some((guest.tx.available >> 32) as u32));
        oracle.set_used_ring_address(Some(guest.tx.used as u32), Some((guest.tx.used >> 32) as u32));
        oracle.set_ready(true);
        let chain = oracle.pop_descriptor_chain(&memory).expect("a chain");
        prop_assert_eq!(chain.head_index(), head);
        let (mut theirs, mut writable, mut ended) = (Vec::new(), false, false);
        for d in chain {
            writable |= d.is_write_only();
            ended = !d.has_next();
            theirs.push(Piece { guest: d.addr().0, len: d.len() });
        }
        theirs.retain(|p| p.len > 0);
        match result {
            Ok(total) => {
                prop_assert!(ended && !writable);
                prop_assert_eq!(u64::from(total), theirs.iter().map(|p| u64::from(p.len)).sum::<u64>());
                prop_assert_eq!(ours, theirs);
            }
            Err(BadChain::Direction) => {}
            Err(BadChain::Address) => {
                let inside = theirs.iter().all(|p| guest.memory.contains(p.guest, u64::from(p.len)));
                prop_assert!(!inside || !ended || writable);
            }
            // The oracle ends such chains early, or goes on where we do not.
            Err(BadChain::Link | BadChain::Indirect | BadChain::Length) => {}
        }
    }
}
