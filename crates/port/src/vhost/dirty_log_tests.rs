//! Every page that a queue changes is marked, for any sequence of operations.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use bifrost_wire::virtio_net::Header;
use fastrand::Rng;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};

use super::*;
use crate::guest::{GuestPort, RxHandle, TxFrame};
use crate::vhost::call::Target;
use crate::vhost::mock::{GUEST, Guest, Kind, MEMORY};
use crate::vhost::{VhostQueue, mock};

/// A log for a guest's memory, and its file.
struct Shared {
    file: File,
    log: DirtyLog,
}

impl Shared {
    fn new(bytes: u64, offset: u64) -> Shared {
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("a file"));
        file.set_len(offset + bytes).expect("its size");
        let copy = file.try_clone().expect("another descriptor");
        let log = DirtyLog::open(copy, offset, bytes, &Arc::default()).expect("a log");
        Shared { file, log }
    }

    fn for_guest() -> Shared {
        Shared::new((GUEST + MEMORY) / LOG_BYTE, 0)
    }

    /// Takes the marked pages and clears the marks, like a front-end.
    fn take(&self) -> BTreeSet<u64> {
        let mut bits = vec![0; self.file.metadata().expect("its size").len() as usize];
        self.file.read_exact_at(&mut bits, 0).expect("its bits");
        self.file.write_all_at(&vec![0; bits.len()], 0).expect("room");
        (0..8 * bits.len() as u64).filter(|page| bits[(page / 8) as usize] >> (page % 8) & 1 != 0).collect()
    }
}

#[test]
fn the_pages_of_an_area_are_marked_and_no_others() {
    let shared = Shared::new(3, 4096 + 5);
    let marks = |guest: u64, len: u64| {
        shared.log.mark(guest, len);
        shared.take().into_iter().map(|bit| bit - 8 * (4096 + 5)).collect::<Vec<u64>>()
    };
    for (guest, len, pages) in [
        (0, 0, 0..0),
        (0, 1, 0..1),
        (0, 4096, 0..1),
        (1, 4096, 0..2),
        (4095, 2, 0..2),
        (7 * 4096, 4097, 7..9),
        (5 * 4096, 14 * 4096, 5..19),
        (0, 3 * LOG_BYTE, 0..24),
        // Beyond the end.
        (23 * 4096, u64::MAX, 23..24),
        (24 * 4096, 4096, 0..0),
        (u64::MAX - 1, 4096, 0..0),
        (u64::MAX, u64::MAX, 0..0),
    ] {
        assert_eq!(marks(guest, len), pages.collect::<Vec<_>>(), "{guest:#x}, {len:#x}");
    }
}

#[test]
fn a_log_has_a_bit_for_each_page_of_the_memory() {
    let guest = Guest::new(Kind { packed: false, size: 16, event_idx: true, mergeable: true });
    let enough = (GUEST + MEMORY) / LOG_BYTE;
    assert!(DirtyLog::covers(enough, &guest.memory) && !DirtyLog::covers(enough - 1, &guest.memory));
    assert!(DirtyLog::covers(1, &Memory::default()) && DirtyLog::covers(u64::MAX, &guest.memory));
    let shared = Shared::for_guest();
    shared.log.mark_all(&guest.memory);
    assert_eq!(shared.take(), (GUEST / LOG_PAGE..(GUEST + MEMORY) / LOG_PAGE).collect());
    let file = File::from(memfd_create("short", MemfdFlags::CLOEXEC).expect("a file"));
    file.set_len(4096).expect("its size");
    for (offset, bytes) in [(0, 4097), (1, 4096), (u64::MAX, 1), (4096, 1)] {
        let copy = file.try_clone().expect("another descriptor");
        assert!(DirtyLog::open(copy, offset, bytes, &Arc::default()).is_err(), "{offset} {bytes}");
    }
}

#[test]
fn a_front_end_is_notified_of_marked_pages_if_requested() {
    let told = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).expect("an eventfd");
    let call = Arc::new(Call::default());
    call.set(Some(Target::Counter(told.try_clone().expect("another descriptor"))));
    let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("a file"));
    file.set_len(1 << 20).expect("its size");
    let log = DirtyLog::open(file, 0, 1 << 20, &call).expect("a log");
    let mut guest = Guest::new(Kind { packed: false, size: 16, event_idx: true, mergeable: true });
    let mut queue = guest.queue();
    queue.log_writes(Some(log));
    guest.fill(&[2048]);
    let handle = queue.place(&[1; 100], false).expect("room");
    queue.publish(handle);
    assert!(rustix::io::read(&told, &mut [0; 8]).is_err(), "no visible mark");
    queue.notify().expect("notify");
    assert!(rustix::io::read(&told, &mut [0; 8]).is_ok());
}

/// The guest's memory, except for the inflight records, which are the front-end's here.
fn contents(guest: &Guest) -> Vec<u8> {
    let mut bytes = vec![0; MEMORY as usize];
    assert!(guest.memory.read(GUEST, &mut bytes));
    for side in [&guest.rx, &guest.tx] {
        let record = (side.used + (1 << 19) - GUEST) as usize;
        bytes[record..record + (1 << 19)].fill(0);
    }
    bytes
}

/// What the device does and holds.
struct Device {
    queue: Option<VhostQueue>,
    held: Vec<TxFrame>,
    placed: Vec<RxHandle>,
}

impl Device {
    fn act(&mut self, rng: &mut Rng) {
        let Some(queue) = &mut self.queue else { return };
        match rng.u8(..8) {
            0 | 1 => {
                let mut frame = vec![0; rng.usize(14..9018)];
                rng.fill(&mut frame);
                self.placed.extend(queue.place(&frame, rng.bool()));
            }
            2 | 3 if !self.placed.is_empty() => {
                let handle = self.placed.swap_remove(rng.usize(..self.placed.len()));
                if rng.u8(..6) == 0 { queue.discard(handle) } else { queue.publish(handle) }
            }
            4 => {
                let _ = queue.fetch(rng.usize(1..8), &mut self.held).expect("fetch");
            }
            5 if !self.held.is_empty() => {
                let frame = self.held.swap_remove(rng.usize(..self.held.len()));
                queue.complete(frame.handle);
            }
            6 => queue.flush(),
            7 => queue.notify().expect("notify"),
            _ => {}
        }
    }
}

#[test]
fn every_page_that_differs_after_random_traffic_is_marked() {
    // Comparing 16 MiB is slow, so there are few rounds.
    const ROUNDS: u64 = if cfg!(miri) { 1 } else { 12 };
    let (mut marked, mut differing) = (0, 0);
    for seed in 0..ROUNDS {
        let mut rng = Rng::with_seed(seed);
        let kind = Kind {
            packed: seed % 2 != 0,
            // Also buffers that span several pages.
            size: [16, 64, 1024][rng.usize(..3)],
            event_idx: rng.bool(),
            mergeable: rng.u8(..4) != 0,
        };
        let mut guest = Guest::new(kind);
        (guest.merged, guest.in_order) = (rng.bool(), kind.packed || rng.bool());
        let mut device = Device { queue: Some(guest.queue()), held: Vec::new(), placed: Vec::new() };
        let shared = Shared::for_guest();
        if let Some(queue) = &mut device.queue {
            queue.log_writes(Some(shared.log.clone()));
        }
        for _ in 0..8 {
            // The driver's turn, then the device's: only the device's writes are checked.
            for _ in 0..rng.usize(..40) {
                let sizes = [rng.u32(60..300), 2048, rng.u32(1..12_000)];
                guest.fill(&sizes[..rng.usize(..=3)]);
                let cuts = [rng.usize(..300), 20];
                guest.send(Header::default(), &vec![7; rng.usize(14..4000)], &cuts[..rng.usize(..=2)], rng.bool());
            }
            while guest.rx.reap().is_some() || guest.tx.reap().is_some() {}
            let before = contents(&guest);
            for _ in 0..rng.usize(..120) {
                device.act(&mut rng);
            }
            if rng.u8(..6) == 0 {
                // Stopping the rings returns all buffers, which writes to them.
                (device.held, device.placed) = (Vec::new(), Vec::new());
                drop(device.queue.take());
                let (receive, transmit) = guest.ends.get();
                device.queue = Some(guest.logged_queue_from(receive as u16, transmit as u16, shared.log.clone()));
            }
            // Used entries are marked when they are shown: they are not read before.
            if let Some(queue) = &mut device.queue {
                queue.flush();
                queue.notify().expect("notify");
            }
            let after = contents(&guest);
            let pages = before.chunks(LOG_PAGE as usize).zip(after.chunks(LOG_PAGE as usize));
            let differs = pages.enumerate().filter(|(_, (before, after))| before != after);
            let first = GUEST / LOG_PAGE;
            let now: BTreeSet<u64> = differs.map(|(page, _)| first + page as u64).collect();
            let log = shared.take();
            let missed: Vec<_> = now.difference(&log).collect();
            assert!(missed.is_empty(), "seed {seed}, {kind:?}: pages {missed:?} are not marked");
            marked += log.len();
            differing += now.len();
        }
        if let Some(queue) = &mut device.queue {
            queue.log_writes(None);
            guest.fill(&[2048; 8]);
            let _ = mock::fetch(queue);
            let _ = queue.place(&[1; 60], false).map(|handle| queue.publish(handle));
            queue.notify().expect("notify");
        }
        assert_eq!(shared.take(), BTreeSet::new(), "seed {seed}: logging stopped");
    }
    println!("{marked} pages are marked, {differing} differ");
    // Ring flags are marked when they may have changed; otherwise marks equal writes.
    assert!(differing > 10 * ROUNDS as usize && marked < 3 * differing, "{marked} marked, {differing} differ");
}
