//! Packed rings: their differences from split ones. `tests` has the common tests for both.

use std::collections::VecDeque;

use bifrost_wire::virtio_net::Header;
use proptest::prelude::*;

use super::index::Index;
use super::mock::{F_INDIRECT, F_NEXT, F_WRITE, GUEST, Guest, Kind, MEMORY, bytes, fetch};
use super::packed::Packed;
use super::ring::{BadChain, Ring, WRAP};
use super::*;
use crate::guest::{PlaceError, TxFrame};

const KIND: Kind = Kind { packed: true, size: 16, event_idx: true, mergeable: true };
/// Address of the transmit ring's record in the mock.
const RECORD: u64 = GUEST + (2 << 20) + (1 << 20) + (1 << 19);

/// A name, the error, the pieces of a buffer, and their flags.
type Case = (&'static str, BadChain, &'static [(u64, u32)], u16);
type Misdeed = fn(&mut Guest, &mut VhostQueue);

fn fetched(queue: &mut VhostQueue) -> Vec<u8> {
    fetch(queue).iter().map(|f| queue.bytes(f.handle).0[0]).collect()
}

/// Sends `frame` bytes of this value in this many pieces.
fn send(guest: &mut Guest, value: u8, pieces: usize) -> Option<u16> {
    guest.send(Header::default(), &[value; 100], &vec![20; pieces - 1], false)
}

#[test]
fn bad_buffers_are_returned_and_the_next_one_is_taken() {
    const END: u64 = GUEST + MEMORY;
    const AT: u64 = GUEST + (4 << 20);
    const TABLE: u64 = GUEST + (5 << 20);
    let cases: &[Case] = &[
        ("behind memory", BadChain::Address, &[(END, 60)], 0),
        ("over the end of memory", BadChain::Address, &[(END - 59, 60)], 0),
        ("address overflows", BadChain::Address, &[(u64::MAX - 5, 60)], 0),
        ("second one before memory", BadChain::Address, &[(AT, 60), (0, 60)], 0),
        ("writable", BadChain::Direction, &[(AT, 60)], F_WRITE),
        ("too long", BadChain::Length, &[(AT, 1 << 20)], 0),
        ("sum overflows", BadChain::Length, &[(AT, 1000), (AT, u32::MAX)], 0),
        ("table of no size", BadChain::Indirect, &[(TABLE, 0)], F_INDIRECT),
        ("table of odd size", BadChain::Indirect, &[(TABLE, 17)], F_INDIRECT),
        ("endless table", BadChain::Indirect, &[(TABLE, !15)], F_INDIRECT),
        ("two tables", BadChain::Indirect, &[(TABLE, 16), (TABLE, 16)], F_INDIRECT),
        ("table outside", BadChain::Address, &[(END - 8, 16)], F_INDIRECT),
        ("table with a table", BadChain::Indirect, &[(TABLE, 16)], F_INDIRECT),
    ];
    for &(name, reason, pieces, flags) in cases {
        let mut guest = Guest::new(KIND);
        let mut queue = guest.queue();
        let nested = u128::from(AT) | 16 << 64 | u128::from(F_INDIRECT) << 112;
        assert!(guest.memory.write(TABLE, &nested.to_le_bytes()));
        let bad = guest.tx.add(pieces, flags).expect("room");
        let good = send(&mut guest, 7, 3).expect("room");
        let got = fetch(&mut queue);
        assert_eq!(got.iter().map(|f| f.handle.0).collect::<Vec<_>>(), [u32::from(good)], "{name}");
        assert_eq!(guest.tx.reap(), Some((bad, 0)), "{name}");
        assert_eq!(queue.vhost_counters().tx_bad_chain_packets[reason as usize], 1, "{name}");
        assert_eq!(queue.vhost_counters().broken_rings, 0, "{name}");
    }
}

#[test]
fn a_ring_with_a_format_violation_is_taken_out_of_use() {
    let at = GUEST + (4 << 20);
    let piece = [(at, 60)];
    let broken: [(&str, Misdeed); 5] = [
        ("no such buffer", |g, _| g.tx.add_packed(16, &[(GUEST, 60)], 0)),
        ("a buffer twice", |g, _| {
            g.tx.add_packed(3, &[(GUEST, 60)], 0);
            g.tx.add_packed(3, &[(GUEST, 60)], 0);
        }),
        ("a chain without end", |g, _| {
            for slot in 0..16 {
                g.tx.descriptor(slot, GUEST, 60, slot, F_NEXT | 1 << 7);
            }
        }),
        ("a chain over buffers that are not back", |g, queue| {
            g.tx.add_packed(3, &[(GUEST, 60); 10], 0);
            assert_eq!(fetch(queue).len(), 1);
            g.tx.add_packed(4, &[(GUEST, 60); 7], 0);
        }),
        ("more buffers than the ring has", |g, queue| {
            for id in 0..15 {
                g.tx.add_packed(id, &[(GUEST, 60)], 0);
            }
            g.tx.add_packed(15, &[(GUEST, 60)], 0);
            assert_eq!(fetch(queue).len(), 16);
            g.tx.add_packed(0, &[(GUEST, 60)], 0);
        }),
    ];
    for (name, act) in broken {
        let mut guest = Guest::new(KIND);
        let mut queue = guest.queue();
        act(&mut guest, &mut queue);
        fetch(&mut queue);
        assert_eq!(queue.vhost_counters().broken_rings, 1, "{name}");
        guest.tx.add_packed(9, &piece, 0);
        assert!(fetch(&mut queue).is_empty(), "{name}");
        // The other direction continues.
        guest.fill(&[2048]);
        assert!(queue.place(&[1; 60], false).is_ok(), "{name}");
    }
    let mut guest = Guest::new(KIND);
    let mut queue = guest.queue();
    guest.rx.add_packed(99, &[(at, 2048)], F_WRITE);
    assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
    guest.fill(&[2048]);
    assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
    assert_eq!(queue.vhost_counters().broken_rings, 1);
}

#[test]
fn the_driver_is_notified_at_the_descriptor_that_it_requested() {
    for size in [10, 16] {
        let mut guest = Guest::new(Kind { size, ..KIND });
        let mut queue = guest.queue();
        let mut seed = 1u32;
        for round in 0..400 {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let (count, ahead) = (1 + (seed >> 8) % 5, (seed >> 16) % 7);
            for _ in 0..count {
                send(&mut guest, 1, 2).expect("room");
            }
            // Each packet has two descriptors. An event on the first one is reached, and one on the second is passed.
            let event = guest.tx.place(guest.tx.next_used + ahead as u16);
            guest.tx.write16(guest.tx.available, event);
            guest.tx.write16(guest.tx.available + 2, 2);
            guest.tx.calls();
            for frame in fetch(&mut queue) {
                queue.complete(frame.handle);
            }
            queue.flush();
            assert_eq!(guest.tx.calls() > 0, ahead < 2 * count, "size {size}, round {round}: {ahead} of {}", 2 * count);
            while guest.tx.reap().is_some() {}
        }
    }
}

#[test]
fn rings_must_be_in_memory() {
    let guest = Guest::new(KIND);
    let wrong: [fn(&mut super::ring::RingSpec); 8] = [
        |s| s.size = 0,
        |s| s.size = WRAP + 1,
        |s| s.base = 16,
        |s| s.descriptors += 8,
        |s| s.descriptors += MEMORY - 255,
        |s| s.available += 2,
        |s| s.used += 2,
        |s| s.used = 0,
    ];
    for change in wrong {
        let mut spec = guest.rx.spec(WRAP);
        change(&mut spec);
        assert!(Packed::open(&guest.memory, spec).is_none());
    }
    let ring = Packed::open(&guest.memory, guest.rx.spec(WRAP)).expect("a ring");
    assert_eq!(ring.base(), WRAP);
    // A front-end without wrap counters: only a new ring can start there.
    let ring = Packed::open(&guest.memory, guest.rx.spec(0)).expect("a ring");
    assert_eq!(ring.base(), WRAP);
    guest.rx.descriptor(0, GUEST, 1, 0, 0);
    let ring = Packed::open(&guest.memory, guest.rx.spec(0)).expect("a ring");
    assert_eq!(ring.base(), 0, "it has wrapped once");
}

#[test]
fn a_kill_between_showing_and_recording_repeats_nothing() {
    // Progress at the kill: before the descriptor that shows the batch, after it, or halfway through the record updates
    // after it.
    for progress in 0..3 {
        let mut guest = Guest::new(KIND);
        guest.tx.inflight = true;
        let mut queue = guest.queue();
        for (value, pieces) in [(1, 1), (2, 3), (3, 2), (4, 1)] {
            send(&mut guest, value, pieces).expect("room");
        }
        let got = fetch(&mut queue);
        queue.complete(got[0].handle);
        queue.flush();
        assert!(guest.tx.reap().is_some());
        let (mut record, mut ring) = ([0; 32 + 32 * 16], [0; 16]);
        let first = guest.tx.descriptors + 16;
        assert!(guest.memory.read(RECORD, &mut record) && guest.memory.read(first, &mut ring));
        for i in [3, 1] {
            queue.complete(got[i].handle);
        }
        queue.flush();
        // The old record, except for the new list and index.
        let restore = |at: usize, len: usize| assert!(guest.memory.write(RECORD + at as u64, &record[at..at + len]));
        restore(18, 2);
        restore(21, 1);
        if progress < 2 {
            restore(14, 2);
            for entry in 0..16 {
                restore(32 + 32 * entry, 1);
            }
        }
        if progress == 0 {
            assert!(guest.memory.write(first, &ring));
        }
        guest.kill(queue);
        let mut queue = guest.queue();
        if progress > 0 {
            assert_eq!(fetched(&mut queue), [3], "progress {progress}");
            assert!(guest.tx.reap().is_some() && guest.tx.reap().is_some() && guest.tx.reap().is_none());
        } else {
            let again = fetch(&mut queue);
            assert_eq!(again.iter().map(|f| queue.bytes(f.handle).0[0]).collect::<Vec<_>>(), [2, 3, 4]);
            assert_eq!(guest.tx.reap(), None);
            // The part of the batch already written to the ring is not adjacent to what is shown now.
            queue.complete(again[0].handle);
            queue.flush();
            assert!(guest.tx.reap().is_some() && guest.tx.reap().is_none());
        }
        drop(queue);
        while guest.tx.reap().is_some() {}
        assert!(guest.tx.chains.is_empty());
    }
    // All records in flight: the list of free ones is empty before the batch.
    let mut guest = Guest::new(KIND);
    guest.tx.inflight = true;
    let mut queue = guest.queue();
    for value in 0..16 {
        send(&mut guest, value, 1).expect("room");
    }
    let got = fetch(&mut queue);
    let mut before = [0; 32 + 32 * 16];
    assert!(guest.memory.read(RECORD, &mut before));
    queue.complete(got[0].handle);
    queue.flush();
    for (at, len) in [(14, 2), (18, 2), (21, 1), (32, 1)] {
        assert!(guest.memory.write(RECORD + at, &before[at as usize..][..len]));
    }
    guest.kill(queue);
    assert_eq!(fetched(&mut guest.queue()), (1..16).collect::<Vec<_>>());
}

/// A driver may reuse an id before it can know that its buffer was returned. Afterwards the record has the right number
/// of free entries, and the entries of buffers in flight are unchanged.
#[test]
fn an_id_reused_before_its_buffer_was_shown_leaks_no_records() {
    let mut guest = Guest::new(KIND);
    guest.tx.inflight = true;
    let mut ring = Packed::open(&guest.memory, guest.tx.spec(0)).expect("a ring");
    guest.tx.add_packed(0, &[(GUEST, 60); 8], 0);
    let first = ring.pop().expect("the ring is in order").expect("a buffer");
    ring.push_used(first, 0);
    guest.tx.add_packed(0, &[(GUEST, 60)], 0);
    assert_eq!(ring.pop(), Ok(Some(first)));
    ring.show();
    guest.tx.add_packed(1, &[(GUEST, 60); 15], 0);
    assert_eq!(ring.pop().map(|id| id.map(Index::get)), Ok(Some(1)), "a record per descriptor");

    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..50 {
        let mut guest = Guest::new(KIND);
        guest.tx.inflight = true;
        let mut ring = Packed::open(&guest.memory, guest.tx.spec(0)).expect("a ring");
        let mut taken: Vec<(Index, usize)> = Vec::new();
        let mut unshown = 0;
        for _ in 0..2_000 {
            let room = 16 - unshown - taken.iter().map(|t| t.1).sum::<usize>();
            let (id, count) = (rng.u16(..4), rng.usize(1..5));
            match rng.u8(..4) {
                0 | 1 if count <= room && taken.iter().all(|t| t.0.get() != id) => {
                    guest.tx.add_packed(id, &vec![(GUEST, 60); count], 0);
                    taken.push((ring.pop().expect("the ring is in order").expect("a buffer"), count));
                }
                2 if !taken.is_empty() => {
                    let (head, count) = taken.swap_remove(rng.usize(..taken.len()));
                    ring.push_used(head, 0);
                    unshown += count;
                }
                3 => {
                    ring.show();
                    unshown = 0;
                }
                _ => {}
            }
        }
        // The next life finds each buffer that was not shown as used exactly once.
        if unshown == 0 {
            let mut found = Packed::open(&guest.memory, guest.tx.spec(0)).expect("a ring").take_recovered();
            found.sort_unstable_by_key(|id| id.get());
            taken.sort_unstable_by_key(|t| t.0.get());
            assert_eq!(found, taken.iter().map(|t| t.0).collect::<Vec<_>>());
        }
    }
}

/// QEMU returns buffers from its own ring position when its back-end disconnects.
#[test]
fn buffers_returned_by_the_front_end_are_not_returned_twice() {
    let mut guest = Guest::new(KIND);
    guest.tx.inflight = true;
    let mut queue = guest.queue();
    for value in 1..4 {
        send(&mut guest, value, 1).expect("room");
    }
    assert_eq!(fetched(&mut queue), [1, 2, 3]);
    guest.kill(queue);
    guest.tx.descriptor(0, 0, 0, 1, 1 << 7 | 1 << 15);
    assert_eq!(guest.tx.reap(), Some((1, 0)));
    let mut queue = guest.queue();
    assert_eq!(fetched(&mut queue), [1, 3]);
    drop(queue);
    assert!(guest.tx.reap().is_some() && guest.tx.reap().is_some() && guest.tx.chains.is_empty());
}

/// The front-end starts at an old stop position, which may differ from the ring's current one, and returns buffers that
/// we have never taken.
#[test]
fn buffers_returned_by_the_front_end_before_they_were_taken_are_skipped() {
    const USED: u16 = 1 << 7 | 1 << 15;
    // In flight at the kill, and made available after it, before those that the front-end takes.
    for (in_flight, waiting) in [(0, 0), (2, 0), (0, 1), (2, 3)] {
        let mut guest = Guest::new(KIND);
        guest.tx.inflight = true;
        let mut queue = guest.queue();
        for value in 1..=in_flight {
            send(&mut guest, value, 1).expect("room");
        }
        assert_eq!(fetch(&mut queue).len(), usize::from(in_flight));
        guest.kill(queue);
        for value in 21..21 + waiting {
            send(&mut guest, value, 1).expect("room");
        }
        // Two packets that it takes, drops and returns in place, and one behind.
        for value in [11, 12] {
            let slot = guest.tx.next_available;
            let id = send(&mut guest, value, 1).expect("room");
            guest.tx.descriptor(slot, GUEST, 0, id, USED);
        }
        send(&mut guest, 13, 1).expect("room");
        let back = std::iter::from_fn(|| guest.tx.reap()).count();
        let in_turn = in_flight + waiting == 0;
        assert_eq!(back, if in_turn { 2 } else { 0 }, "the driver reads the ring in order");
        let mut queue = guest.queue();
        let got = fetch(&mut queue);
        let values: Vec<u8> = got.iter().map(|f| queue.bytes(f.handle).0[0]).collect();
        let expected: Vec<u8> = (1..=in_flight).chain(21..21 + waiting).chain([13]).collect();
        assert_eq!(values, expected, "{in_flight} in flight, {waiting} waiting");
        let refused = u64::from(!in_turn) * 2;
        assert_eq!(
            queue.vhost_counters().tx_bad_chain_packets.iter().sum::<u64>()
                + queue.vhost_counters().tx_bad_buffer_packets,
            refused
        );
        got.iter().for_each(|f| queue.complete(f.handle));
        queue.flush();
        // Each once: the mock tracks the buffers that the device holds.
        while guest.tx.reap().is_some() {}
        assert!(guest.tx.chains.is_empty());
        send(&mut guest, 14, 2).expect("room");
        assert_eq!(fetched(&mut queue), [14]);
    }
}

/// A ring that was restarted meanwhile is not at the record's position.
#[test]
fn a_record_of_an_earlier_ring_is_ignored() {
    let mut guest = Guest::new(KIND);
    guest.tx.inflight = true;
    let mut queue = guest.queue();
    for value in 1..4 {
        send(&mut guest, value, 1).expect("room");
    }
    let got = fetch(&mut queue);
    queue.complete(got[0].handle);
    queue.flush();
    guest.kill(queue);
    assert!(guest.memory.write(guest.tx.descriptors, &[0; 256]));
    (guest.tx.next_available, guest.tx.next_used) = (0, 0);
    let mut queue = guest.queue();
    guest.tx.chains.clear();
    guest.tx.add_packed(0, &[(GUEST + (4 << 20), 60)], 0);
    guest.tx.chains.insert(0, vec![0]);
    assert_eq!(fetch(&mut queue).len(), 1);
    drop(queue);
    assert_eq!(guest.tx.reap(), Some((0, 0)));
}

/// A transmit ring whose daemon is killed at random.
#[derive(Clone, Debug)]
enum Step {
    Send(usize),
    Fetch(usize),
    Complete(usize),
    Flush,
    Reap,
    Kill,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (1..4usize).prop_map(Step::Send),
        5 => (1..6usize).prop_map(Step::Fetch),
        5 => (0..8usize).prop_map(Step::Complete),
        3 => Just(Step::Flush),
        3 => Just(Step::Reap),
        1 => Just(Step::Kill),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// After each kill, exactly the buffers not shown are fetched again, in order.
    #[test]
    fn kills_lose_and_repeat_nothing(
        steps in prop::collection::vec(step(), 1..200),
        packed in any::<bool>(),
        size in prop::sample::select(vec![4u16, 16, 10]),
    ) {
        let size = if packed { size } else { size.next_power_of_two() };
        let mut guest = Guest::new(Kind { packed, size, ..KIND });
        guest.tx.inflight = true;
        let mut queue = guest.queue();
        // All sent and not shown, in order; this many of them were fetched by this life.
        let (mut all, mut seed) = (VecDeque::<u8>::new(), 0u8);
        let (mut held, mut unshown) = (Vec::<(TxFrame, u8)>::new(), Vec::new());
        let mut fresh: VecDeque<u8> = VecDeque::new();
        for step in steps {
            match step {
                Step::Send(pieces) => {
                    seed = seed.wrapping_add(1);
                    if send(&mut guest, seed, pieces).is_some() {
                        all.push_back(seed);
                        fresh.push_back(seed);
                    }
                }
                Step::Fetch(max) => {
                    let mut out = Vec::new();
                    queue.fetch(max, &mut out).expect("fetch");
                    for frame in out {
                        let want = fresh.pop_front();
                        prop_assert_eq!(bytes(&queue, &frame), vec![want.unwrap_or(0); 100]);
                        held.push((frame, want.unwrap_or(0)));
                    }
                    // Completed buffers are shown together with refused ones.
                    for value in unshown.drain(..) {
                        all.retain(|v| *v != value);
                    }
                }
                Step::Complete(i) if i < held.len() => {
                    let (frame, value) = held.remove(i);
                    queue.complete(frame.handle);
                    unshown.push(value);
                }
                Step::Complete(_) => {}
                Step::Flush => {
                    queue.flush();
                    for value in unshown.drain(..) {
                        all.retain(|v| *v != value);
                    }
                }
                Step::Reap => while guest.tx.reap().is_some() {},
                Step::Kill => {
                    guest.kill(queue);
                    queue = guest.queue();
                    held.clear();
                    unshown.clear();
                    fresh.clone_from(&all);
                }
            }
        }
        prop_assert_eq!(queue.vhost_counters().broken_rings, 0);
        drop(queue);
        while guest.tx.reap().is_some() {}
        let transmit = guest.ends.get().1 as u16;
        prop_assert_eq!(guest.tx.chains.len(), guest.tx.untaken(transmit));
    }

    /// A front-end may pass any record: it does no harm.
    #[test]
    fn any_record_is_survived(
        changes in prop::collection::vec((0..32 + 32 * 16u64, any::<u8>()), 0..40),
        small in prop::collection::vec((0..32 + 32 * 16u64, 0..17u8), 0..40),
    ) {
        let mut guest = Guest::new(KIND);
        guest.tx.inflight = true;
        let mut queue = guest.queue();
        for value in 1..5 {
            send(&mut guest, value, 1 + usize::from(value) % 3).expect("room");
        }
        let got = fetch(&mut queue);
        queue.complete(got[1].handle);
        queue.flush();
        guest.kill(queue);
        for (at, value) in changes.into_iter().chain(small) {
            prop_assert!(guest.memory.write(RECORD + at, &[value]));
        }
        let mut queue = guest.queue();
        let again = fetch(&mut queue);
        prop_assert!(again.len() <= 16);
        for frame in again.iter().step_by(2) {
            let mut out = Vec::new();
            queue.copy(frame.handle, 0, frame.len as usize, &mut out);
            queue.complete(frame.handle);
        }
        queue.flush();
    }
}
