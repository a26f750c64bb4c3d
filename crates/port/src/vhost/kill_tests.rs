//! The rings after a daemon is killed, against a model of what the driver knows.

use bifrost_wire::virtio_net::Header;
use proptest::prelude::*;

use super::index::Size;
use super::mock::{F_INDIRECT, GUEST, Guest, Kind, MEMORY, bytes, fetch};
use super::ring::{BadChain, Piece, Ring, Want};
use super::split::Split;
use super::tests::{BOTH, KIND, frame};
use crate::guest::{GuestPort, PlaceError, TxFrame};

/// Possible steps of the driver, the transport and the clock.
#[derive(Clone, Debug)]
enum Step {
    Send {
        len: usize,
        cuts: Vec<usize>,
        indirect: bool,
    },
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
    /// Another process continues.
    Leave,
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
        1 => Just(Step::Leave),
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
        // Completed, but not shown before the kill.
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

        // A front-end without other knowledge continues at the used index.
        let mut queue = guest.queue();
        let again: Vec<_> = fetch(&mut queue).iter().map(|f| bytes(&queue, f)).collect();
        assert_eq!(again, [0, 2, 3, 5, 6].map(|i| frame(100, i)));
        assert_eq!([guest.receive(), guest.receive()].map(|r| r.map(|r| r.1)), [3, 1].map(|i| Some(frame(90, i))));
        for i in 10..16u8 {
            let placed = queue.place(&frame(90, i), false).expect("three old buffers and three never taken");
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
fn a_kill_between_showing_and_recording_repeats_nothing() {
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
    // As if killed before recording: the batch is linked, the marks are as before.
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

    /// Every packet arrives once, whole, in publish order; every buffer is returned once.
    #[test]
    fn nothing_is_lost_or_repeated(
        steps in prop::collection::vec(step(), 1..200),
        packed in any::<bool>(),
        event_idx in any::<bool>(),
        is_recorded in any::<bool>(),
        size in prop::sample::select(vec![1u16, 2, 16, 10, 64]),
    ) {
        let size = if packed { size } else { size.next_power_of_two() };
        let mut guest = Guest::new(Kind { packed, size, event_idx, mergeable: true });
        (guest.rx.inflight, guest.tx.inflight) = (is_recorded, is_recorded);
        guest.in_order = packed || !is_recorded;
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
                Step::Restart | Step::Leave => {
                    // As between GET_VRING_BASE and the next start: all held buffers are returned, except those of
                    // unfinished packets that are left to another process.
                    let (mut again, mut must) = (Vec::new(), Vec::new());
                    if matches!(step, Step::Leave) {
                        must.extend(fetched.iter().filter(|(f, _)| queue.stays(f.handle)).map(|(_, want)| want.clone()));
                        guest.ends.leave();
                    }
                    drop(queue);
                    while guest.tx.reap().is_some() {}
                    fetched.clear();
                    for frame in published.drain(..) {
                        prop_assert_eq!(guest.receive().map(|g| g.1), Some(frame));
                    }
                    // All other returned buffers are empty.
                    while let Some(got) = guest.receive() {
                        prop_assert!(got.1.is_empty());
                    }
                    placed.clear();
                    shown = 0;
                    let (receive, transmit) = guest.ends.get();
                    guest.ends = std::sync::Arc::default();
                    queue = guest.queue_from(receive as u16, transmit as u16);
                    if matches!(step, Step::Leave) {
                        queue.fetch(usize::from(u16::MAX), &mut again).expect("fetch");
                        let first_new = again.len().saturating_sub(sent.len());
                        for (place, f) in again.into_iter().enumerate() {
                            let got = bytes(&queue, &f);
                            if place >= first_new {
                                prop_assert_eq!(Some(got.clone()), sent.pop_front());
                            } else {
                                // Packets that were completed may come again behind those that were not.
                                must.iter().position(|want| *want == got).map(|at| must.remove(at));
                            }
                            fetched.push((f, got));
                        }
                        prop_assert!(must.is_empty(), "{} packets were not fetched again", must.len());
                        prop_assert!(sent.is_empty());
                    }
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

    /// Random descriptors: we find the same pieces as the virtio-queue crate, or refuse; and never access outside
    /// memory.
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
        let want = Want { writable: false, limit: 1 << 20, enough: u32::MAX };
        let first = Size::new(16).and_then(|size| size.check(head)).expect("below 16");
        let result = ring.chain(first, want, &mut ours).bytes;

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
            // The oracle ends such chains early, or continues where we do not.
            Err(BadChain::Link | BadChain::Indirect | BadChain::Length | BadChain::Pieces) => {}
        }
    }
}
