//! A driver or front-end that writes arbitrary data, also during reads: limits on the cost of each packet, in
//! descriptors and memory, and on what the device holds.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bifrost_wire::virtio_net::Header;

use super::chain::MAX_PIECES;
use super::credit::{PACKET_WORK, turn_work};
use super::index::{Index, Size};
use super::inflight::in_order;
use super::memory::Memory;
use super::mock::{F_AVAILABLE, F_INDIRECT, F_NEXT, F_USED, F_WRITE, GUEST, Guest, Kind, fetch};
use super::packed::Packed;
use super::ring::{BadChain, Broken, Ring, RingSpec, WRAP};
use super::split::Split;
use super::tests::{BOTH, frame};
use super::*;
use crate::guest::{GuestPort, PlaceError};

const PACKED: Kind = Kind { packed: true, size: 16, event_idx: true, mergeable: true };
/// Guest addresses of buffers, and of a descriptor table.
const AT: u64 = GUEST + (4 << 20);
const TABLE: u64 = GUEST + (5 << 20);
/// Maximum work of one packet: its limit plus one chain.
const MOST: u64 = (PACKET_WORK + MAX_PIECES) as u64;

/// Writes an indirect table of `count` pieces of `len` bytes; `last` are the flags of the last one.
fn write_table(guest: &Guest, count: u16, len: u32, flags: u16, last: u16) {
    for i in 0..count {
        let (more, flags) = if i + 1 < count { (F_NEXT, flags) } else { (0, last) };
        let (third, fourth) = if guest.kind.packed { (0, flags) } else { (flags | more, i + 1) };
        let bits = u128::from(AT) | u128::from(len) << 64 | u128::from(third) << 96 | u128::from(fourth) << 112;
        assert!(guest.memory.write(TABLE + 16 * u64::from(i), &bits.to_le_bytes()));
    }
}

fn broken(queue: &VhostQueue, reason: Broken) -> u64 {
    queue.vhost_counters().broken_for_rings[reason as usize]
}

#[test]
fn the_device_owns_used_buffers_until_they_are_shown() {
    for record in [false, true] {
        // Another CPU of the guest makes a slot available that it does not own.
        let mut guest = Guest::new(PACKED);
        guest.rx.inflight = record;
        let mut queue = guest.queue();
        guest.rx.add_packed(0, &[(AT, 60); 16], 0);
        assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
        guest.rx.descriptor(0, AT, 2048, 1, F_WRITE | F_USED);
        assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
        assert_eq!(broken(&queue, Broken::AvailableIndex), 1);

        let mut guest = Guest::new(PACKED);
        guest.tx.inflight = record;
        guest.tx.add_packed(0, &[(AT, 60); 16], F_WRITE);
        let mut ring = Packed::open(&guest.memory, guest.tx.spec(WRAP)).expect("a ring");
        let head = ring.pop().expect("a ring").expect("a buffer");
        ring.push_used(head, 0);
        guest.tx.descriptor(0, AT, 60, 1, F_USED);
        assert_eq!(ring.pop(), Err(Broken::AvailableIndex));
        ring.show();
        guest.tx.descriptor(0, AT, 60, 1, F_USED);
        assert_eq!(ring.pop().map(|head| head.map(Index::get)), Ok(Some(1)), "now the driver owns it");
    }
    // The same in a split ring, where the index makes it available.
    let mut guest = Guest::new(Kind { packed: false, ..PACKED });
    guest.rx.inflight = true;
    let mut queue = guest.queue();
    for head in 0..16 {
        guest.rx.descriptor(head, AT, 60, 0, 0);
        guest.rx.offer(head);
    }
    assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
    guest.rx.offer(0);
    assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
    assert_eq!(broken(&queue, Broken::AvailableIndex), 1);
}

#[test]
fn device_writes_over_a_ring_make_nothing_available() {
    for size in [16, 256] {
        let mut guest = Guest::new(Kind { size, ..PACKED });
        guest.rx.inflight = true;
        let mut queue = guest.queue();
        // All descriptors but one are buffers of the wrong direction.
        guest.rx.add_packed(0, &vec![(AT, 60); usize::from(size) - 1], 0);
        // In the last one, bytes 54 to 70 of the frame overwrite descriptor 0 of the ring.
        for (i, (to, len)) in [(AT, 66u32), (guest.rx.descriptors, 16), (AT + 4096, 2048)].into_iter().enumerate() {
            let bits = u128::from(to) | u128::from(len) << 64 | u128::from(F_WRITE) << 112;
            assert!(guest.memory.write(TABLE + 16 * i as u64, &bits.to_le_bytes()));
        }
        guest.rx.add_packed(1, &[(TABLE, 48)], F_INDIRECT);
        let mut frame = vec![7u8; 98];
        let descriptor = u128::from(AT) | 2048 << 64 | 2 << 96 | u128::from(F_WRITE | F_USED) << 112;
        frame[54..70].copy_from_slice(&descriptor.to_le_bytes());
        // A ring of 256 has more than one packet's limit.
        let placed: Vec<bool> = (0..3).map(|_| queue.place(&frame, true).is_ok()).collect();
        assert_eq!(placed.iter().filter(|placed| **placed).count(), 1, "ring of {size}: {placed:?}");
        assert_eq!(broken(&queue, Broken::AvailableIndex), 1, "ring of {size}");
        assert_eq!(broken(&queue, Broken::Records), 0, "ring of {size}");
    }
}

/// Two CPUs of the guest and the device access the same descriptors.
#[test]
fn changing_descriptors_during_reads_only_breaks_the_drivers_ring() {
    for record in [false, true] {
        let mut guest = Guest::new(PACKED);
        guest.tx.inflight = record;
        let mut queue = guest.queue();
        let (stop, memory, ring) = (AtomicBool::new(false), &guest.memory, guest.tx.descriptors);
        let write = |slot: u64, id: u16, flags: u16| {
            let bits = u128::from(AT) | 60 << 64 | u128::from(id) << 96 | u128::from(flags) << 112;
            assert!(memory.write(ring + 16 * slot, &bits.to_le_bytes()));
        };
        for slot in 1..16 {
            write(slot, 0, F_WRITE | if slot < 15 { F_NEXT } else { 0 });
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    write(0, 0, F_WRITE | F_NEXT | F_AVAILABLE);
                    write(0, 1, F_WRITE | F_USED);
                }
            });
            let (start, mut out) = (Instant::now(), Vec::new());
            while start.elapsed() < Duration::from_millis(200) && queue.vhost_counters().broken_rings == 0 {
                out.clear();
                queue.fetch(16, &mut out).expect("fetch");
            }
            stop.store(true, Ordering::Relaxed);
        });
        assert_eq!(broken(&queue, Broken::Records), 0);
    }
}

#[test]
fn record_numbers_are_read_once() {
    let size = Size::new(1024).expect("a size");
    let mut seed = 1u64;
    let reads = std::cell::Cell::new(0);
    for _ in 0..100 {
        let random = std::cell::RefCell::new(&mut seed);
        let number = |_| {
            reads.set(reads.get() + 1);
            let mut seed = random.borrow_mut();
            **seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            **seed
        };
        let (order, _) = in_order(size.indexes(), number);
        assert_eq!(order.len(), 1024);
    }
    assert_eq!(reads.get(), 100 * 1024);
    let (order, next) = in_order(size.indexes().take(3), |index| u64::MAX - u64::from(index.get()));
    assert_eq!(
        (order.iter().map(|i| i.get()).collect::<Vec<_>>(), next),
        (vec![2, 1, 0], 0),
        "the number that follows"
    );
}

/// Writes a record that claims that every descriptor is in flight.
fn write_record(memory: &Memory, packed: bool, size: u64, record: u64, number: impl Fn(u64) -> u64) {
    let (header, stride) = if packed { (32, 32) } else { (16, 16) };
    let write = |at: u64, value: u64| assert!(memory.write(record + at, &value.to_le_bytes()));
    if packed {
        write(8, 1 | size << 16 | 0xffff << 32 | 0xffff << 48);
        write(16, 1 << 32 | 1 << 40);
    } else {
        write(8, 1 | size << 16);
    }
    for i in 0..size {
        write(header + stride * i, if packed { 1 | 1 << 48 | i << 32 } else { 1 });
        write(header + stride * i + 8, number(i));
        if packed {
            write(header + stride * i + 16, i);
        }
    }
}

fn open(guest: &Guest, spec: RingSpec) -> Option<usize> {
    let recovered = if guest.kind.packed {
        Packed::open(&guest.memory, spec)?.take_recovered()
    } else {
        Split::open(&guest.memory, spec)?.take_recovered()
    };
    Some(recovered.len())
}

#[test]
fn a_front_end_may_change_its_record_during_reads() {
    for kind in BOTH {
        let mut guest = Guest::new(Kind { size: 1024, ..kind });
        guest.rx.inflight = true;
        let record = guest.rx.used + (1 << 19);
        let base = if kind.packed { WRAP } else { 0 };
        let number = |i| i;
        write_record(&guest.memory, kind.packed, 1024, record, number);
        assert_eq!(open(&guest, guest.rx.spec(base)), Some(1024), "it is accepted");
        let (stop, memory) = (AtomicBool::new(false), Arc::clone(&guest.memory));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut seed = 1u64;
                while !stop.load(Ordering::Relaxed) {
                    for i in 0..1024 {
                        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                        let at = if kind.packed { 32 + 32 * i } else { 16 + 16 * i };
                        assert!(memory.write(record + at + 8, &seed.to_le_bytes()));
                    }
                }
            });
            let start = Instant::now();
            while start.elapsed() < Duration::from_millis(300) {
                write_record(&guest.memory, kind.packed, 1024, record, number);
                assert!(open(&guest, guest.rx.spec(base)).is_some());
            }
            stop.store(true, Ordering::Relaxed);
        });
    }
}

#[test]
fn records_of_another_ring_size_or_with_wrapping_numbers_are_handled() {
    for kind in BOTH {
        for (first, then) in [(16, 8), (8, 16), (16, 1), (1, 16)] {
            let mut guest = Guest::new(Kind { size: first, ..kind });
            guest.tx.inflight = true;
            let mut queue = guest.queue();
            guest.send(Header::default(), &frame(60, 1), &[], false).expect("room");
            assert_eq!(fetch(&mut queue).len(), 1);
            guest.kill(queue);
            guest.tx.size = then;
            assert_eq!(open(&guest, guest.tx.spec(if kind.packed { WRAP } else { 0 })), Some(0), "{first}, {then}");
        }
        let mut guest = Guest::new(kind);
        guest.tx.inflight = true;
        let record = guest.tx.used + (1 << 19);
        write_record(&guest.memory, kind.packed, 16, record, |i| u64::MAX - 1 - i);
        let base = if kind.packed { WRAP } else { 0 };
        let mut queue = guest.queue_from(base, base);
        assert_eq!(fetch(&mut queue).len(), 0, "all of these buffers are bad");
        queue.flush();
        // Numbering continues after the last one.
        for _ in 0..3 {
            guest.send(Header::default(), &frame(60, 1), &[], false).expect("room");
            fetch(&mut queue).iter().for_each(|frame| queue.complete(frame.handle));
            queue.flush();
        }
    }
}

#[test]
fn bad_receive_buffers_cost_a_packet_little_and_then_the_ring() {
    for kind in BOTH {
        for size in [16, 256, 1024] {
            for pieces in [1, 2, 100, MAX_PIECES as u16, 1024] {
                let mut guest = Guest::new(Kind { size, ..kind });
                let mut queue = guest.queue();
                write_table(&guest, pieces, 0, F_WRITE, 0);
                let (mut packets, mut before) = (0, 0);
                while queue.vhost_counters().broken_rings == 0 {
                    while guest.rx.add(&[(TABLE, 16 * u32::from(pieces))], F_INDIRECT).is_some() {}
                    assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
                    queue.notify().expect("notify");
                    while guest.rx.reap().is_some() {}
                    let read = queue.vhost_counters().rx_descriptors;
                    assert!(read - before <= MOST, "{kind:?}, {pieces} pieces: {} in one packet", read - before);
                    (packets, before) = (packets + 1, read);
                    assert!(packets < 1000, "{kind:?}, {pieces} pieces: endless loop");
                }
                assert_eq!(broken(&queue, Broken::BadBuffers), 1);
                assert!(before <= 10 * u64::from(size) + 6 * u64::from(MAX_PIECES), "{before} of a ring of {size}");
                assert_eq!(queue.place(&[1; 60], false), Err(PlaceError::NoBuffer));
                assert_eq!(queue.vhost_counters().rx_descriptors, before, "no more descriptors are read");
            }
        }
    }
}

#[test]
fn a_ring_with_occasional_bad_buffers_stays_in_use() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        let mut queue = guest.queue();
        for _ in 0..2000 {
            guest.rx.add(&[(AT, 2048)], 0);
            guest.fill(&[2048; 10]);
            for _ in 0..10 {
                let placed = queue.place(&frame(60, 1), false).expect("a good buffer");
                queue.publish(placed);
            }
            queue.notify().expect("notify");
            while guest.rx.reap().is_some() {}
        }
        assert_eq!(queue.vhost_counters().broken_rings, 0);
        assert_eq!(queue.vhost_counters().rx_bad_chain_buffers[BadChain::Direction as usize], 2000);
    }
}

#[test]
fn a_packet_reads_only_the_descriptors_that_it_needs() {
    for kind in BOTH {
        // Good buffers of 256 pieces: of one byte each, and larger than the packet.
        for (len, most) in [(1, 72), (36, 2), (4096, 1)] {
            let mut guest = Guest::new(kind);
            let mut queue = guest.queue();
            write_table(&guest, MAX_PIECES as u16, len, F_WRITE, F_WRITE);
            guest.rx.add(&[(TABLE, 16 * MAX_PIECES)], F_INDIRECT).expect("room");
            let placed = queue.place(&frame(60, 1), false).expect("room");
            assert_eq!(queue.vhost_counters().rx_descriptors, most, "pieces of {len}");
            queue.publish(placed);
            queue.notify().expect("notify");
            assert_eq!(guest.rx.reap(), Some((0, 72)));
        }
        // A jumbo frame and one-byte buffers: the packet's limit applies.
        let mut guest = Guest::new(Kind { size: 4096, ..kind });
        let mut queue = guest.queue();
        guest.fill(&[12]);
        while guest.fill(&[1]) > 0 {}
        for _ in 0..20 {
            let before = queue.vhost_counters().rx_descriptors;
            assert_eq!(queue.place(&frame(9000, 1), false), Err(PlaceError::TooLarge));
            assert!(queue.vhost_counters().rx_descriptors - before <= MOST);
        }
        let placed = queue.place(&frame(20, 1), false).expect("21 buffers");
        queue.publish(placed);
        queue.notify().expect("notify");
        assert_eq!(guest.receive().map(|(_, frame)| frame), Some(frame(20, 1)));
    }
}

#[test]
fn a_header_across_pieces_and_buffers_is_written_correctly() {
    for kind in BOTH {
        let mut guest = Guest::new(kind);
        let mut queue = guest.queue();
        let [a, b, c] = [5, 7, 40].map(|len| guest.allocate(len));
        guest.rx.add(&[(a, 5), (b, 7), (c, 40)], F_WRITE).expect("room");
        guest.fill(&[100]);
        let placed = queue.place(&frame(120, 4), false).expect("room");
        queue.publish(placed);
        queue.notify().expect("notify");
        let header = Header { num_buffers: 2, ..Header::default() };
        assert_eq!(guest.receive(), Some((header, frame(120, 4))));
    }
}

#[test]
fn a_turn_is_limited_and_then_the_ring_is_taken_out_of_use() {
    for kind in BOTH {
        for (pieces, last) in [(256, 0), (256, F_WRITE), (100, F_WRITE), (1, F_WRITE), (1024, 0)] {
            let mut guest = Guest::new(Kind { size: 1024, ..kind });
            let mut queue = guest.queue();
            write_table(&guest, pieces, 1, 0, last);
            let (mut out, mut before, mut turns) = (Vec::new(), 0, 0);
            let is_good = last == 0 && pieces == 256;
            while turns < 300 && queue.vhost_counters().broken_rings == 0 {
                while guest.tx.add(&[(TABLE, 16 * u32::from(pieces))], F_INDIRECT).is_some() {}
                assert!(queue.fetch(64, &mut out).expect("fetch") || queue.vhost_counters().broken_rings > 0);
                out.drain(..).for_each(|frame| queue.complete(frame.handle));
                queue.flush();
                while guest.tx.reap().is_some() {}
                let read = queue.vhost_counters().tx_descriptors;
                assert!(read - before <= u64::from(turn_work(64) + MAX_PIECES), "{} in a turn", read - before);
                (before, turns) = (read, turns + 1);
            }
            assert_eq!(broken(&queue, Broken::BadBuffers), u64::from(!is_good), "{kind:?}: {pieces} pieces");
            assert_eq!(queue.vhost_counters().tx_packets > 300, is_good, "{kind:?}: {pieces} pieces");
        }
    }
}

#[test]
fn chains_with_too_many_descriptors_are_refused() {
    for (pieces, good) in [(MAX_PIECES, true), (MAX_PIECES + 1, false)] {
        for kind in BOTH {
            for indirect in [false, true] {
                let mut guest = Guest::new(Kind { size: 1024, ..kind });
                let mut queue = guest.queue();
                let cuts = vec![1; pieces as usize - 1];
                guest.send(Header::default(), &frame(1000, 1), &cuts, indirect).expect("room");
                assert_eq!(fetch(&mut queue).len(), usize::from(good), "{kind:?}, {pieces} pieces");
                // A chain that is too long breaks a packed ring: only its end gives the next position and its owner.
                let is_broken = kind.packed && !indirect && !good;
                assert_eq!(broken(&queue, Broken::ChainLength), u64::from(is_broken));
                let bad = queue.vhost_counters().tx_bad_chain_packets[BadChain::Pieces as usize];
                assert_eq!(bad, u64::from(!good && !is_broken));
            }
        }
    }
}

#[test]
fn descriptor_memory_is_bounded_by_the_ring_not_the_chain() {
    for kind in BOTH {
        for size in [16u16, 256] {
            for indirect in [false, true] {
                let mut guest = Guest::new(Kind { size, ..kind });
                let mut queue = guest.queue();
                let pieces = if indirect { MAX_PIECES as usize } else { usize::from(size) };
                // Each id once, with the longest possible chain; then all short.
                for _ in 0..u32::from(size) * 2 {
                    guest.send(Header::default(), &frame(1000, 1), &vec![1; pieces - 1], indirect).expect("room");
                    fetch(&mut queue).iter().for_each(|frame| queue.complete(frame.handle));
                    queue.flush();
                    while guest.tx.reap().is_some() {}
                }
                let bytes = queue.descriptor_bytes();
                assert!(bytes <= 1280 * u64::from(size) + 8192, "{kind:?}, {size}: {bytes} bytes");
            }
        }
        // All held at once: all but some are short.
        let mut guest = Guest::new(Kind { size: 256, ..kind });
        let mut queue = guest.queue();
        write_table(&guest, 256, 1, 0, 0);
        while guest.tx.add(&[(TABLE, 16 * 256)], F_INDIRECT).is_some() {}
        let held = fetch(&mut queue);
        assert_eq!(held.len(), 256 / 16 + 1);
        assert!(queue.vhost_counters().tx_bad_chain_packets[BadChain::Pieces as usize] > 0);
        held.iter().for_each(|frame| queue.complete(frame.handle));
        queue.flush();
    }
}
