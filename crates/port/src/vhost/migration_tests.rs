//! A guest that migrates to another port, as QEMU does it: the log starts while the rings run, and they stop and start
//! again.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use bifrost_wire::virtio_net::Header;
use rustix::fs::{MemfdFlags, memfd_create};
use vhost::vhost_user::Frontend;
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VringConfigData};

use super::backend_tests::{FEATURES, KIND, PACKED, config, give, set_up_with};
use super::mock::{self, GUEST, Guest, Kind, MEMORY, USER};
use super::ring::WRAP;
use super::*;

/// `VHOST_F_LOG_ALL`.
const LOG_ALL: u64 = 1 << 26;
/// Size of the log of the guest's memory, bytes, and its offset in its file.
const BYTES: u64 = (GUEST + MEMORY) / 8 / LOG_PAGE;
const OFFSET: u64 = 4096;

/// A worker that holds a queue between its turns.
#[derive(Clone)]
struct Worker(Arc<State>);

struct State {
    queue: Mutex<Option<VhostQueue>>,
    /// Whether it can switch logging while the queue runs.
    logs: bool,
    starts: AtomicU32,
    arrivals: AtomicU32,
}

impl QueueOwner for Worker {
    fn start(&mut self, queue: VhostQueue) {
        self.0.starts.fetch_add(1, Ordering::Relaxed);
        assert!(self.0.queue.lock().expect("nobody panics").replace(queue).is_none());
    }

    fn stop(&mut self) {
        drop(self.0.queue.lock().expect("nobody panics").take());
    }

    fn log_writes(&mut self, log: Option<DirtyLog>) -> bool {
        let mut queue = self.0.queue.lock().expect("nobody panics");
        self.0.logs && queue.as_mut().map(|queue| queue.log_writes(log)).is_some()
    }

    fn arrived(&mut self) {
        self.0.arrivals.fetch_add(1, Ordering::Relaxed);
    }
}

impl Worker {
    fn new(logs: bool) -> Worker {
        let (starts, arrivals) = Default::default();
        Worker(Arc::new(State { queue: Mutex::default(), logs, starts, arrivals }))
    }

    /// One turn.
    fn work<T>(&self, turn: impl FnOnce(&mut VhostQueue) -> T) -> T {
        turn(self.0.queue.lock().expect("nobody panics").as_mut().expect("a running guest"))
    }

    fn deliver(&self, fill: u8) {
        self.work(|queue| {
            let handle = queue.place(&[fill; 300], false).expect("room");
            queue.publish(handle);
            queue.notify().expect("notify");
        });
    }

    fn starts(&self) -> u32 {
        self.0.starts.load(Ordering::Relaxed)
    }
}

/// A front-end's log.
struct Log {
    file: File,
}

impl Log {
    fn new() -> Log {
        let file = File::from(memfd_create("log", MemfdFlags::CLOEXEC).expect("a file"));
        file.set_len(OFFSET + BYTES).expect("its size");
        Log { file }
    }

    fn region(&self, mmap_size: u64) -> Option<VhostUserDirtyLogRegion> {
        Some(VhostUserDirtyLogRegion { mmap_size, mmap_offset: OFFSET, mmap_handle: self.file.as_raw_fd() })
    }

    /// Copies marked pages to `to`, and clears their marks. Returns their number.
    fn copy_marked(&self, from: &Guest, to: &Guest) -> usize {
        let mut bits = vec![0; BYTES as usize];
        self.file.read_exact_at(&mut bits, OFFSET).expect("its bits");
        self.file.write_all_at(&vec![0; bits.len()], OFFSET).expect("room");
        let marked = (0..8 * BYTES).filter(|page| bits[(page / 8) as usize] >> (page % 8) & 1 != 0);
        let pages = marked.map(|page| page * LOG_PAGE).filter(|at| *at >= GUEST);
        pages
            .map(|at| {
                let mut page = [0; LOG_PAGE as usize];
                assert!(from.memory.read(at, &mut page) && to.memory.write(at, &page));
            })
            .count()
    }
}

fn contents(guest: &Guest) -> Vec<u8> {
    let mut bytes = vec![0; MEMORY as usize];
    assert!(guest.memory.read(GUEST, &mut bytes));
    bytes
}

/// The front-end knows the driver's writes without a log.
fn drive<T>(guest: &mut Guest, there: &Guest, turn: impl FnOnce(&mut Guest) -> T) -> T {
    let before = contents(guest);
    let outcome = turn(guest);
    let size = LOG_PAGE as usize;
    for (n, (old, new)) in before.chunks(size).zip(contents(guest).chunks(size)).enumerate() {
        assert!(old == new || there.memory.write(GUEST + n as u64 * LOG_PAGE, new));
    }
    outcome
}

fn connect(port: &Path, features: u64) -> Frontend {
    let mut front = Frontend::connect(port, 2).expect("connect");
    set_up_with(&mut front, features);
    front
}

/// Sets the rings' addresses again, with their addresses in the log.
fn addresses(front: &mut Frontend, guest: &Guest, log: impl Fn(u64) -> Option<u64>) -> bool {
    [&guest.rx, &guest.tx].into_iter().enumerate().all(|(index, side)| {
        let user = |at: u64| at - GUEST + USER;
        let data = VringConfigData {
            queue_max_size: side.size,
            queue_size: side.size,
            flags: u32::from(log(side.used).is_some()),
            desc_table_addr: user(side.descriptors),
            used_ring_addr: user(side.used),
            avail_ring_addr: user(side.available),
            log_addr: log(side.used),
        };
        front.set_vring_addr(index, &data).is_ok()
    })
}

#[test]
fn a_migrated_guest_has_all_writes() {
    let directory = tempfile::tempdir().expect("a directory");
    let paths = ["here.sock", "there.sock"].map(|name| directory.path().join(name));
    for (packed, logs) in [(false, true), (false, false), (true, true), (true, false)] {
        let workers = [Worker::new(logs), Worker::new(logs)];
        let open = |n: usize| VhostPort::open(config(&paths[n], Mode::Server), Box::new(workers[n].clone()));
        let ports = [open(0).expect("a port"), open(1).expect("a port")];
        let features = FEATURES | if packed { PACKED } else { 0 };
        let kind = Kind { packed, ..KIND };
        let (mut guest, there) = (Guest::new(kind), Guest::new(kind));
        let mut front = connect(&paths[0], features);
        give(&mut front, &guest, if packed { [WRAP; 2] } else { [0; 2] });
        guest.fill(&[2048; 14]);
        workers[0].deliver(1);

        // Start the log while a packet is in flight.
        let log = Log::new();
        front.set_log_base(0, log.region(BYTES)).expect("a log");
        workers[0].deliver(2);
        assert_eq!(log.copy_marked(&guest, &there), 0, "logging is not enabled yet");
        guest.send(Header::default(), &[3; 300], &[], false).expect("room");
        let held = workers[0].work(mock::fetch);
        let before = workers[0].starts();
        front.set_features(features | 1 << 30 | LOG_ALL).expect("features");
        assert!(addresses(&mut front, &guest, Some));
        assert_eq!(workers[0].starts() - before, u32::from(!logs), "the rings keep running if possible");
        // All memory is copied first, then marked pages while they change.
        log.copy_marked(&guest, &there);
        assert!(there.memory.write(GUEST, &contents(&guest)));
        if logs {
            workers[0].work(|queue| {
                queue.complete(held[0].handle);
                queue.flush();
            });
            assert!(log.copy_marked(&guest, &there) > 0);
        }
        assert!(drive(&mut guest, &there, |guest| guest.tx.reap()).is_some());
        for fill in 4..8 {
            workers[0].deliver(fill);
            assert!(log.copy_marked(&guest, &there) > 1);
        }
        assert!(contents(&guest) == contents(&there), "a page that differs was not marked");
        // The guest stops with a packet in each ring.
        drive(&mut guest, &there, |guest| guest.send(Header::default(), &[8; 300], &[], false).expect("room"));
        assert_eq!(workers[0].work(mock::fetch).len(), 1);
        workers[0].work(|queue| queue.place(&[8; 300], false).expect("room"));
        let bases = [0, 1].map(|ring| front.get_vring_base(ring).expect("its end") as u16);
        assert!(log.copy_marked(&guest, &there) > 0);
        assert!(contents(&guest) == contents(&there), "nothing is written after that");
        let ends = if packed { [guest.rx.place(6), guest.tx.place(2)] } else { [6, 2] };
        assert_eq!(bases, ends, "exactly the shown buffers were taken");

        // It continues on the other host, and announces that.
        let mut guest = guest.moved_to(there);
        let mut front = connect(&paths[1], features);
        give(&mut front, &guest, bases);
        workers[1].deliver(9);
        guest.send(Header::default(), &[10; 300], &[], false).expect("room");
        let fetched = workers[1].work(mock::fetch);
        assert_eq!(workers[1].work(|queue| mock::bytes(queue, &fetched[0])), [10; 300]);
        let received: Vec<u8> = std::iter::from_fn(|| guest.receive()).map(|(_, frame)| frame[0]).collect();
        assert_eq!(received, [1, 2, 4, 5, 6, 7, 9]);
        assert!(guest.tx.reap().is_some() && guest.tx.reap().is_none(), "the packet in flight at the other device");
        drop(ports);
    }
}

/// An upgrade while the front-end logs, and one after a migration that was cancelled: the log stays set then.
#[test]
fn the_log_goes_with_the_port_to_another_process() {
    let directory = tempfile::tempdir().expect("a directory");
    for (packed, logging) in [(false, true), (true, true), (false, false)] {
        let path = directory.path().join("vm.sock");
        let workers = [Worker::new(true), Worker::new(true)];
        let config = config(&path, Mode::Server);
        let old = VhostPort::open(config.clone(), Box::new(workers[0].clone())).expect("a port");
        let features = FEATURES | if packed { PACKED } else { 0 };
        let kind = Kind { packed, ..KIND };
        let (mut guest, there) = (Guest::new(kind), Guest::new(kind));
        let mut front = connect(&path, features);
        give(&mut front, &guest, if packed { [WRAP; 2] } else { [0; 2] });
        guest.fill(&[2048; 14]);
        let log = Log::new();
        front.set_log_base(0, log.region(BYTES)).expect("a log");
        front.set_features(features | 1 << 30 | if logging { LOG_ALL } else { 0 }).expect("features");
        assert!(addresses(&mut front, &guest, Some));
        log.copy_marked(&guest, &there);
        assert!(there.memory.write(GUEST, &contents(&guest)));
        workers[0].deliver(1);

        let handed = old.hand_over().expect("nothing prevents it");
        let new = VhostPort::adopt(config, Box::new(workers[1].clone()), handed).expect("the same state");
        workers[0].deliver(2);
        let bases = old.leave().expect("its thread answers");
        assert!(new.begin(bases), "its rings run");
        old.handed_over();
        drop(old);
        new.own();
        workers[1].deliver(3);
        let copied = log.copy_marked(&guest, &there);
        assert_eq!(copied > 0, logging);
        if logging {
            assert!(contents(&guest) == contents(&there), "a page that differs was not marked");
        }
        workers[1].deliver(4);
        assert_eq!(log.copy_marked(&guest, &there) > 0, logging, "the new process marks what it writes");
        assert!(!logging || contents(&guest) == contents(&there), "a page that differs was not marked");
        let received: Vec<u8> = std::iter::from_fn(|| guest.receive()).map(|(_, frame)| frame[0]).collect();
        assert_eq!(received, [1, 2, 3, 4]);
        drop((front, new));
    }
}

#[test]
fn invalid_logs_are_refused() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("vm.sock");
    let worker = Worker::new(true);
    let port = VhostPort::open(config(&path, Mode::Server), Box::new(worker.clone())).expect("a port");
    let guest = Guest::new(KIND);
    let pipe = std::io::pipe().expect("a pipe").1;
    let log = Log::new();
    let try_log = |bytes: u64, offset: u64, file: i32| {
        let mut front = connect(&path, FEATURES);
        give(&mut front, &guest, [0, 0]);
        let region = VhostUserDirtyLogRegion { mmap_size: bytes, mmap_offset: offset, mmap_handle: file };
        front.set_log_base(0, Some(region)).is_ok()
    };
    let file = log.file.as_raw_fd();
    assert!(try_log(BYTES, OFFSET, file) && try_log(BYTES, 1, file) && try_log(BYTES + 4096, 0, file));
    for (bytes, offset, file) in [
        (0, 0, file),
        (BYTES - 1, 0, file),
        (BYTES, OFFSET + 1, file),
        (BYTES, u64::MAX, file),
        (u64::MAX, 0, file),
        (u64::MAX, 1, file),
        ((8 << 30) + 1, 0, file),
        (BYTES, OFFSET, pipe.as_raw_fd()),
    ] {
        assert!(!try_log(bytes, offset, file), "{bytes:#x} bytes at {offset:#x}");
    }
    // An address outside the log marks nothing, and does not overflow.
    for (at, is_taken) in [(u64::MAX, false), (u64::MAX - (1 << 20), true), (1 << 47, true), (0, true)] {
        let mut front = connect(&path, FEATURES);
        give(&mut front, &guest, [0, 0]);
        front.set_log_base(0, log.region(BYTES)).expect("a log");
        front.set_features(FEATURES | 1 << 30 | LOG_ALL).expect("features");
        assert_eq!(addresses(&mut front, &guest, |_| Some(at)), is_taken, "{at:#x}");
    }
    assert!(worker.0.queue.lock().expect("nobody panics").is_some(), "the last one runs");
    drop(port);
}

/// QEMU sets the log last when a guest's driver starts during the migration.
#[test]
fn writes_before_the_log_was_set_mark_all_pages() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("vm.sock");
    let worker = Worker::new(true);
    let port = VhostPort::open(config(&path, Mode::Server), Box::new(worker.clone())).expect("a port");
    let guest = Guest::new(KIND);
    let mut front = connect(&path, FEATURES | LOG_ALL);
    give(&mut front, &guest, [0, 0]);
    let log = Log::new();
    front.set_log_base(0, log.region(BYTES)).expect("a log");
    assert_eq!(log.copy_marked(&guest, &guest), (MEMORY / LOG_PAGE) as usize);
    // A larger log replaces it: it has only new writes.
    let next = Log::new();
    front.set_log_base(0, next.region(BYTES)).expect("a log");
    worker.work(mock::fetch);
    assert_eq!(
        (log.copy_marked(&guest, &guest), next.copy_marked(&guest, &guest)),
        (0, 1),
        "where kicks are asked for"
    );
    drop((front, port));
}

#[test]
fn the_port_is_notified_of_a_migrated_guest() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("vm.sock");
    let worker = Worker::new(true);
    let port = VhostPort::open(config(&path, Mode::Server), Box::new(worker.clone())).expect("a port");
    let mut front = super::message_tests::FrontEnd::connect(&path);
    front.begin();
    assert!(front.ask(19, &[u64::from_le_bytes([2, 0, 0, 0, 0, 1, 0, 0])], &[]));
    assert_eq!(worker.0.arrivals.load(Ordering::Relaxed), 1);
    assert!(!front.ask(19, &[], &[]), "without an address");
    drop(port);
}
