//! The rings of a virtual machine whose other processors, or front-end, write to rings, descriptors, tables, buffers
//! and inflight records while the device reads them. A record always exists, and the guest can write it.
//!
//! The input decides who writes when: between two calls of the worker; with the feature `mutations` also before any of
//! the device's accesses to guest memory; or, for some inputs, in a separate thread, which is not reproducible.
//!
//! Invariants: the device holds no more buffers than exist; the cost of a packet is bounded, in descriptors rather than
//! in time, and so are the cost of bad buffers to their ring and the memory that descriptors take; no thread panics; a
//! valid driver is served afterwards.

mod guest;

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bifrost_nic::MAX_FRAME_LEN;
use bifrost_port::GuestPort;
use fastrand::Rng;

use self::guest::{Guest, Kind, RECORD, RECORD_BYTES, SIZES, TABLES, TABLES_AT};
use super::machine::{FrontEnd, Machine, PACKED, Running, event, with};
use crate::Input;

/// Virtio 1, protocol features, mergeable buffers, indirect descriptors.
const PLAIN: u64 = 1 << 32 | 1 << 30 | 1 << 15 | 1 << 28;
const EVENT_INDEX: u64 = 1 << 29;

/// Panics of any thread since the target was first run: a panic of the port's thread must not go unnoticed.
static PANICS: AtomicU64 = AtomicU64::new(0);

pub(crate) fn run(bytes: &[u8]) {
    watch_panics();
    let before = PANICS.load(Ordering::Relaxed);
    let input = &mut Input::new(bytes);
    let packed = input.chance(160);
    let features = PLAIN | if packed { PACKED } else { 0 } | if input.chance(128) { EVENT_INDEX } else { 0 };
    let size = input.pick(&SIZES);
    let mode = input.below(4);
    let guest = Arc::new(Guest::new(packed, size, input.chance(32)));
    with(|machine| {
        let mut front = machine.connect();
        assert!(set_up(&mut front, &guest, features), "a valid set-up is refused");
        let mut hostile = Hostile { guest: Arc::clone(&guest), refused: [0; 2] };
        let seed = u64::from(input.u32());
        match mode {
            1 => hostile.beside_a_thread(input, machine, &mut front, seed),
            #[cfg(feature = "mutations")]
            2 => hostile.interfered_with(input, machine, &mut front, seed),
            _ => hostile.act_all(input, machine, &mut front),
        }
        assert!(guest.is_front_untouched(), "something was written outside the guest's memory");
        drop(front);
        a_valid_guest_is_served(machine, features);
    });
    assert_eq!(PANICS.load(Ordering::Relaxed), before, "a thread has panicked");
}

fn watch_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.fetch_add(1, Ordering::Relaxed);
            before(info);
        }));
    });
}

/// The messages of a start, with the rings of `guest`.
fn set_up(front: &mut FrontEnd, guest: &Guest, features: u64) -> bool {
    let words = |words: &[u64]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
    let file = guest.file.as_fd();
    let mut up = front.ask(3, 1, &[], &[])
        && front.ask(2, 1, &words(&[features]), &[])
        && front.ask(16, 1, &words(&[1 << 3 | 1 << 12]), &[])
        && front.ask(5, 9, &words(&[1, guest::GUEST, guest::MEMORY, guest::USER, guest.offset]), &[file])
        && front.ask(
            32,
            9,
            &words(&[RECORD_BYTES, guest.offset + RECORD, u64::from(guest.size(0)) << 16 | 2]),
            &[file],
        );
    for ring in 0..2u32 {
        up = up && number(front, 8, ring, u32::from(guest.size(ring as usize))) && renew(front, guest, ring);
        let [descriptors, used, available] = guest.tables(ring as usize);
        let addresses = words(&[descriptors, used, available, 0]);
        up = up
            && front.ask(9, 9, &[&ring.to_le_bytes()[..], &[0; 4], &addresses].concat(), &[])
            && front.ask(12, 9, &words(&[u64::from(ring)]), &[event().as_fd()])
            && front.ask(13, 9, &words(&[u64::from(ring)]), &[event().as_fd()]);
    }
    up && number(front, 18, 0, 1) && number(front, 18, 1, 1)
}

fn number(front: &mut FrontEnd, request: u32, ring: u32, value: u32) -> bool {
    front.ask(request, 9, &[ring.to_le_bytes(), value.to_le_bytes()].concat(), &[])
}

/// The ring starts again, as a new one does.
fn renew(front: &mut FrontEnd, guest: &Guest, ring: u32) -> bool {
    guest.clear(ring as usize);
    number(front, 10, ring, if guest.packed { 1 << 15 } else { 0 })
}

struct Hostile {
    guest: Arc<Guest>,
    /// Refused buffers of each ring when its device was last checked.
    refused: [u64; 2],
}

impl Hostile {
    fn act_all(&mut self, input: &mut Input<'_>, machine: &Machine, front: &mut FrontEnd) {
        let mut acts = 0;
        while acts < 60 && !input.is_empty() && self.act(input, machine, front) {
            acts += 1;
        }
    }

    /// The same while another thread writes arbitrary values, as fast as it can.
    fn beside_a_thread(&mut self, input: &mut Input<'_>, machine: &Machine, front: &mut FrontEnd, seed: u64) {
        let (guest, stop) = (Arc::clone(&self.guest), AtomicBool::new(false));
        std::thread::scope(|scope| {
            let _stop = StopOnDrop(&stop);
            scope.spawn(|| {
                let mut rng = Rng::with_seed(seed);
                while !stop.load(Ordering::Relaxed) {
                    disturb(&guest, &mut rng);
                }
            });
            self.act_all(input, machine, front);
        });
    }

    /// The same with a write before one in this many accesses of the device.
    #[cfg(feature = "mutations")]
    fn interfered_with(&mut self, input: &mut Input<'_>, machine: &Machine, front: &mut FrontEnd, seed: u64) {
        use bifrost_port::vhost::interfere;
        struct EndOnDrop;
        impl Drop for EndOnDrop {
            fn drop(&mut self) {
                interfere(None);
            }
        }
        let _end = EndOnDrop;
        let (guest, mut rng) = (Arc::clone(&self.guest), Rng::with_seed(seed));
        let seldom = 1 << (seed % 9);
        interfere(Some(Box::new(move || {
            if rng.u32(..seldom) == 0 {
                disturb(&guest, &mut rng);
            }
        })));
        self.act_all(input, machine, front);
    }

    /// Takes one action. `false`: the connection has ended.
    fn act(&mut self, input: &mut Input<'_>, machine: &Machine, front: &mut FrontEnd) -> bool {
        let guest = Arc::clone(&self.guest);
        match input.below(16) {
            0..=3 => {
                let (ring, kind) = (input.below(2), kind(input));
                let times = if input.chance(60) { usize::from(guest.size(ring)) + 2 } else { 1 + input.below(8) };
                (0..times).for_each(|_| guest.offer(ring, kind));
            }
            4 => {
                let mut rng = Rng::with_seed(u64::from(input.u16()));
                (0..=input.below(32)).for_each(|_| disturb(&guest, &mut rng));
            }
            5 if input.chance(100) => {
                // Offered and refused, or taken and returned, repeatedly.
                let (ring, kind) = (input.below(2), kind(input));
                for _ in 0..64 {
                    (0..=guest.size(ring).min(64) / 4).for_each(|_| guest.offer(ring, kind));
                    machine.work(|running| self.work(if ring == 0 { 0 } else { 8 }, &mut Input::new(&[20]), running));
                    machine.work(|running| self.work(15, &mut Input::new(&[]), running));
                }
            }
            6 if input.chance(60) => {
                // The same rings restarted: from the current position, from the start, with another size, from a
                // record.
                let ring = input.below(2) as u32;
                let restarted = match input.below(5) {
                    0 => number(front, 18, ring, 0) && number(front, 18, ring, 1),
                    1 => renew(front, &guest, ring),
                    2 => {
                        guest.fill_record();
                        renew(front, &guest, ring)
                    }
                    3 => {
                        guest.set_size(ring as usize, input.pick(&SIZES));
                        number(front, 8, ring, u32::from(guest.size(ring as usize))) && renew(front, &guest, ring)
                    }
                    _ => number(front, 10, ring, u32::from(input.u16())),
                };
                self.refused = [0; 2];
                return restarted;
            }
            7 if input.chance(60) => {
                // Repeatedly, because the start is read quickly.
                for _ in 0..20 {
                    guest.fill_record();
                    if !renew(front, &guest, input.below(2) as u32) {
                        return false;
                    }
                }
                self.refused = [0; 2];
            }
            what => machine.work(|running| self.work(what, input, running)),
        }
        true
    }

    /// One step of a worker with a queue, and the guarantees that it relies on.
    fn work(&mut self, what: usize, input: &mut Input<'_>, running: &mut Running) {
        let guest = Arc::clone(&self.guest);
        let Running { queue, held, placed } = running;
        let before = queue.vhost_counters();
        let mut may_read = [0u64; 2];
        match what {
            0..=7 => {
                may_read[0] = 256 + 256;
                let mut frame = vec![0x5a; if input.chance(60) { 1500 } else { 98 }];
                // The buffer may overlap the ring: then it is a descriptor there.
                frame[54..70].copy_from_slice(&guest.next_descriptor(0));
                if let Ok(handle) = queue.place(&frame, true) {
                    assert!(
                        handle.0 < queue.rx_capacity() && !placed.contains(&handle),
                        "{handle:?} is placed already"
                    );
                    placed.push(handle);
                }
            }
            8..=11 => {
                let max = 1 + input.below(64);
                may_read[1] = 23 * max as u64 + 260;
                let mut frames = Vec::new();
                let _ = queue.fetch(max, &mut frames).map_err(|e| panic!("fetching fails: {e}"));
                assert!(frames.len() <= max);
                for frame in frames {
                    assert!(frame.len as usize <= MAX_FRAME_LEN && frame.handle.0 < queue.tx_capacity());
                    assert!(held.iter().all(|h| h.handle != frame.handle), "{:?} is held already", frame.handle);
                    held.push(frame);
                }
                assert!(held.len() as u32 + queue.tx_free() == queue.tx_capacity());
            }
            12 if !held.is_empty() => {
                let frame = held.swap_remove(input.below(held.len().min(256)));
                let mut out = Vec::new();
                queue.copy(frame.handle, 0, frame.len as usize, &mut out);
                assert_eq!(out.len(), frame.len as usize, "the whole frame existed when it was fetched");
                queue.complete(frame.handle);
            }
            13 if !placed.is_empty() => {
                let handle = placed.swap_remove(input.below(placed.len().min(256)));
                if input.chance(60) { queue.discard(handle) } else { queue.publish(handle) }
            }
            14 => {}
            _ => {
                // The end of a turn.
                held.drain(..).for_each(|frame| queue.complete(frame.handle));
                placed.drain(..).for_each(|handle| queue.publish(handle));
                queue.flush();
                let _ = queue.notify().map_err(|e| panic!("notifying fails: {e}"));
            }
        }
        let after = queue.vhost_counters();
        let read = [after.rx_descriptors - before.rx_descriptors, after.tx_descriptors - before.tx_descriptors];
        assert!(read[0] <= may_read[0] && read[1] <= may_read[1], "{read:?} descriptors read, {may_read:?} are enough");
        self.check(queue.counters(), queue.descriptor_bytes());
    }

    /// Invariants at any time.
    fn check(&self, counters: Vec<(String, u64)>, bytes: u64) {
        let sum = |start: &str, end: &str| -> u64 {
            counters.iter().filter(|(name, _)| name.starts_with(start) && name.ends_with(end)).map(|(_, n)| n).sum()
        };
        assert_eq!(sum("broken_records_rings", ""), 0, "more buffers were taken than exist");
        let largest = u64::from(self.guest.size(0).max(self.guest.size(1)));
        // The waste that a ring is allowed, at least five per bad buffer, plus what good buffers have earned.
        let waste = 10 * largest + 1024 + 260;
        let placed = sum("rx_packets", "") + sum("rx_discarded_frames", "") + largest;
        assert!(5 * sum("rx_bad_", "_buffers") <= waste + placed, "bad receive buffers: {counters:?}");
        assert!(5 * sum("tx_bad_", "_packets") <= waste + sum("tx_packets", ""), "bad transmit buffers: {counters:?}");
        let most = 1700 * largest + 24_576;
        assert!(bytes <= most, "descriptors take {bytes} bytes, {most} are enough");
    }
}

struct StopOnDrop<'a>(&'a AtomicBool);

impl Drop for StopOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn kind(input: &mut Input<'_>) -> Kind {
    match input.below(12) {
        0 | 1 => Kind::Good,
        2 => Kind::Chain(1 + u16::from(input.u8()), true),
        3 => Kind::Chain(1 + u16::from(input.u8()), false),
        4 => Kind::Whole,
        5 | 6 => Kind::OverRing,
        7 => Kind::Bad,
        8 => Kind::Empty,
        _ => Kind::Table(input.below(TABLES)),
    }
}

/// One write by another processor, or by the front-end: mostly near the data that the device reads next.
fn disturb(guest: &Guest, rng: &mut Rng) {
    let ring = rng.usize(..2);
    match rng.u8(..12) {
        0..=2 => guest.write_near(ring, &rng.u16(..).to_le_bytes(), rng),
        3 | 4 => guest.make_available(ring, rng),
        5 => guest.offer(ring, if rng.bool() { Kind::Good } else { Kind::Bad }),
        6 => guest.write(guest::ring_at(ring) + rng.u64(..guest::RING), &rng.u16(..40).to_le_bytes()),
        7 => guest.write(guest::ring_at(ring) + guest::AVAILABLE + 2, &rng.u16(..).to_le_bytes()),
        8 => guest.write(RECORD + rng.u64(..RECORD_BYTES / 8) * 8, &rng.u64(..).to_le_bytes()),
        9 => guest.shuffle_record(rng),
        10 => guest.write(TABLES_AT + rng.u64(..0x1_0000), &rng.u32(..).to_le_bytes()),
        _ => guest.write(rng.u64(..guest::MEMORY), &rng.u64(..).to_le_bytes()),
    }
}

/// A valid driver, with chains of two descriptors, for several rounds of the ring.
fn a_valid_guest_is_served(machine: &Machine, features: u64) {
    let guest = Guest::new(features & PACKED != 0, SIZES[0], false);
    let mut front = machine.connect();
    assert!(set_up(&mut front, &guest, features), "the next guest's set-up is refused");
    let mut served = false;
    machine.work(|Running { queue, .. }| {
        for n in 0..3 * u32::from(SIZES[0]) {
            guest.offer(1, Kind::Chain(2, true));
            guest.offer(0, Kind::Chain(2, true));
            let mut frames = Vec::new();
            let _ = queue.fetch(8, &mut frames);
            assert_eq!(frames.iter().map(|f| f.len).collect::<Vec<_>>(), [2 * guest::PIECE - 12], "packet {n}");
            queue.complete(frames[0].handle);
            queue.flush();
            let Ok(handle) = queue.place(&[7; 100], false) else { panic!("there is no room for packet {n}") };
            queue.publish(handle);
            let _ = queue.notify();
            assert!(guest.is_used(0, n) && guest.is_used(1, n), "packet {n} is not used");
        }
        assert_eq!(queue.vhost_counters().broken_rings, 0);
        served = true;
    });
    assert!(served, "the next guest's rings are set up but do not run");
}
