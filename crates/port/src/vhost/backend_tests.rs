//! The back-end against an independent front-end implementation, over a real socket.

use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use bifrost_wire::virtio_net::Header;
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight, VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use super::mock::{GUEST, Guest, Kind, MEMORY, USER};
use super::ring::WRAP;
use super::*;
use crate::guest::GuestPort;

pub(super) const KIND: Kind = Kind { packed: false, size: 16, event_idx: true, mergeable: true };
/// VERSION_1, event index, indirect descriptors, mergeable buffers, MAC.
pub(super) const FEATURES: u64 = 1 << 32 | 1 << 29 | 1 << 28 | 1 << 15 | 1 << 5;

/// A worker that does nothing by itself.
struct Bench {
    queues: Sender<VhostQueue>,
    taken_back: Receiver<()>,
}

struct Worker {
    queues: Receiver<VhostQueue>,
    take_back: Sender<()>,
}

impl QueueOwner for Bench {
    fn start(&mut self, queue: VhostQueue) {
        self.queues.send(queue).expect("the test waits");
    }

    fn stop(&mut self) {
        // The test decides when to drop the queue, and the back-end waits for that.
        let _ = self.taken_back.recv_timeout(Duration::from_secs(10));
    }
}

fn bench() -> (Box<Bench>, Worker) {
    let ((queues, theirs), (take_back, taken_back)) = (channel(), channel());
    (Box::new(Bench { queues, taken_back }), Worker { queues: theirs, take_back })
}

impl Worker {
    fn next(&self) -> VhostQueue {
        self.queues.recv_timeout(Duration::from_secs(10)).expect("a queue starts")
    }

    fn drop(&self, queue: VhostQueue) {
        drop(queue);
        self.take_back.send(()).expect("the back-end is running");
    }
}

pub(super) fn config(socket: &Path, mode: Mode) -> VhostConfig {
    VhostConfig {
        name: "test".into(),
        socket: socket.to_owned(),
        mode,
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1450,
        queues: 1,
        packed: true,
        slicing: true,
        merged: false,
        record: None,
        message_rate: 0,
    }
}

pub(super) const PACKED: u64 = 1 << 34;

fn set_up(front: &mut Frontend) {
    set_up_with(front, FEATURES);
}

pub(super) fn set_up_with(front: &mut Frontend, features: u64) {
    front.set_owner().expect("owner");
    let offered = front.get_features().expect("features");
    assert_eq!(offered & features, features);
    front.set_features(features | 1 << 30).expect("features");
    let protocol = front.get_protocol_features().expect("protocol features");
    front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
    front.set_protocol_features(protocol).expect("protocol features");
}

/// Passes memory and rings; the rings start at `base`.
pub(super) fn give(front: &mut Frontend, guest: &Guest, base: [u16; 2]) {
    let region = VhostUserMemoryRegionInfo {
        guest_phys_addr: GUEST,
        memory_size: MEMORY,
        userspace_addr: USER,
        mmap_offset: 0,
        mmap_handle: guest.file.as_raw_fd(),
    };
    front.set_mem_table(&[region]).expect("memory");
    give_pair(front, guest, 0, base);
}

fn give_pair(front: &mut Frontend, guest: &Guest, pair: usize, base: [u16; 2]) {
    for (n, side) in [&guest.rx, &guest.tx].into_iter().enumerate() {
        let index = 2 * pair + n;
        let user = |at: u64| at - GUEST + USER;
        front.set_vring_num(index, guest.kind.size).expect("size");
        front.set_vring_base(index, base[n]).expect("base");
        let data = VringConfigData {
            queue_max_size: guest.kind.size,
            queue_size: guest.kind.size,
            flags: 0,
            desc_table_addr: user(side.descriptors),
            used_ring_addr: user(side.used),
            avail_ring_addr: user(side.available),
            log_addr: None,
        };
        front.set_vring_addr(index, &data).expect("addresses");
        front.set_vring_call(index, &EventFd::new(libc::EFD_NONBLOCK).expect("eventfd")).expect("call");
        front.set_vring_kick(index, &EventFd::new(libc::EFD_NONBLOCK).expect("eventfd")).expect("kick");
        front.set_vring_enable(index, true).expect("enable");
    }
}

fn sent(queue: &mut VhostQueue) -> Vec<Vec<u8>> {
    mock::fetch(queue).iter().map(|frame| mock::bytes(queue, frame)).collect()
}

#[test]
fn a_guest_stops_and_resumes_at_its_position() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("vm.sock");
    let (owner, worker) = bench();
    let port = VhostPort::open(config(&socket, Mode::Server), owner).expect("port");
    let mut front = Frontend::connect(&socket, 2).expect("connect");
    set_up(&mut front);
    let (_, space) = front.get_config(0, 12, VhostUserConfigFlags::empty(), &[0; 12]).expect("configuration");
    assert_eq!(space, [2, 0, 0, 0, 0, 1, 1, 0, 1, 0, 0xaa, 5], "MAC, link up, one pair, MTU 1450");

    let mut guest = Guest::new(KIND);
    give(&mut front, &guest, [0, 0]);
    let mut queue = worker.next();
    assert!(port.is_connected());
    guest.send(Header::default(), &[1; 100], &[], false);
    guest.send(Header::default(), &[2; 100], &[], false);
    assert_eq!(sent(&mut queue), [[1; 100], [2; 100]]);
    worker.drop(queue);
    assert_eq!(front.get_vring_base(0).expect("receive ring"), 0);
    assert_eq!(front.get_vring_base(1).expect("transmit ring"), 2);
    assert!(guest.tx.reap().is_some() && guest.tx.reap().is_some(), "all buffers are returned before the reply");

    guest.send(Header::default(), &[3; 100], &[], false);
    give(&mut front, &guest, [0, 2]);
    // Each message that completes the rings may start them; only the last start counts.
    let mut queue = worker.next();
    assert_eq!(sent(&mut queue), [[3; 100]]);

    // Closed without GET_VRING_BASE.
    worker.take_back.send(()).expect("lives");
    drop(front);
    drop(queue);
    let until = Instant::now() + Duration::from_secs(5);
    while port.is_connected() && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut front = Frontend::connect(&socket, 2).expect("the socket takes the next one");
    set_up(&mut front);
    drop(port);
    assert!(!socket.exists());
    assert!(front.get_features().is_err());
}

#[test]
fn the_port_configures_slicing() {
    let directory = tempfile::tempdir().expect("directory");
    for (slicing, last) in [(true, 9), (false, 1)] {
        let socket = directory.path().join(format!("{slicing}.sock"));
        let (owner, worker) = bench();
        let port = VhostPort::open(VhostConfig { slicing, ..config(&socket, Mode::Server) }, owner).expect("port");
        let mut front = Frontend::connect(&socket, 2).expect("connect");
        set_up(&mut front);
        let mut guest = Guest::new(KIND);
        give(&mut front, &guest, [0, 0]);
        let mut queue = worker.next();
        let at = guest.allocate(0);
        guest.send(Header::default(), &[1; 1000], &[], false);
        let fetched = mock::fetch(&mut queue);
        assert!(guest.memory.write(at, &[9; 1012]));
        let bytes = mock::bytes(&queue, &fetched[0]);
        assert_eq!((bytes[255], bytes[256], bytes[999]), (1, last, last));
        worker.drop(queue);
        drop((front, port));
    }
}

#[test]
fn a_restarted_daemon_recovers_buffers_in_flight() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("vm.sock");
    let mut guest = Guest::new(KIND);
    let mut record: Option<(VhostUserInflight, std::fs::File)> = None;
    for life in 0..3u8 {
        let (owner, worker) = bench();
        let port = VhostPort::open(config(&socket, Mode::Server), owner).expect("port");
        let mut front = Frontend::connect(&socket, 2).expect("connect");
        set_up(&mut front);
        assert!(front.get_protocol_features().expect("features").contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD));
        use vhost::vhost_user::VhostUserFrontend as _;
        let (inflight, file) = match record.take() {
            Some(kept) => kept,
            None => front.get_inflight_fd(&VhostUserInflight::new(0, 0, 2, 16)).expect("record"),
        };
        front.set_inflight_fd(&inflight, file.as_raw_fd()).expect("record");
        record = Some((inflight, file));
        guest.send(Header::default(), &[10 + life; 100], &[], false);
        let used = guest.tx.read16(guest.tx.used + 2);
        give(&mut front, &guest, [0, used]);
        let mut queue = worker.next();
        let want: Vec<_> = (0..=life).map(|i| vec![10 + i; 100]).collect();
        assert_eq!(sent(&mut queue), want, "life {life}");
        // Killed: no buffer is returned.
        std::mem::forget(queue);
        worker.take_back.send(()).expect("lives");
        drop(port);
    }
}

#[test]
fn the_port_keeps_the_record_if_the_front_end_does_not() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("vm.sock");
    let (record, kept) = (directory.path().join("record"), directory.path().join("kept"));
    let mut guest = Guest::new(KIND);
    for life in 0..3u8 {
        if life > 0 {
            std::fs::rename(&kept, &record).expect("a killed daemon removes nothing");
        }
        let (owner, worker) = bench();
        let config = VhostConfig { record: Some(record.clone()), ..config(&socket, Mode::Server) };
        let port = VhostPort::open(config, owner).expect("port");
        let mut front = Frontend::connect(&socket, 2).expect("connect");
        set_up(&mut front);
        for i in 0..3 {
            guest.send(Header::default(), &[10 * life + i; 100], &[], false);
        }
        // The ring indexes are all that a front-end knows after its back-end has gone.
        let used = [&guest.rx, &guest.tx].map(|side| side.read16(side.used + 2));
        give(&mut front, &guest, used);
        let mut queue = worker.next();
        let mut out = Vec::new();
        queue.fetch(64, &mut out).expect("fetch");
        let got: Vec<u8> = out.iter().map(|f| queue.bytes(f.handle).0[0]).collect();
        // In each life, two buffers were returned, and do not appear again. Buffers return in order, so these are the
        // first.
        let all = (0..=life).flat_map(|l| [10 * l, 10 * l + 1, 10 * l + 2]);
        assert_eq!(got, all.skip(2 * usize::from(life)).collect::<Vec<_>>(), "life {life}");
        if life == 0 {
            guest.fill(&[2048; 12]);
        }
        let placed: Vec<_> = (0..3).map(|i| queue.place(&[10 * life + i; 90], false).expect("room")).collect();
        queue.publish(placed[1]);
        queue.notify().expect("notify");
        queue.complete(out[1].handle);
        queue.flush();
        assert_eq!(guest.tx.reap(), None, "not before the first one");
        queue.complete(out[0].handle);
        queue.flush();
        assert!(guest.tx.reap().is_some() && guest.tx.reap().is_some() && guest.tx.reap().is_none());
        std::mem::forget(queue);
        worker.take_back.send(()).expect("lives");
        std::fs::hard_link(&record, &kept).expect("the record");
        drop(port);
        assert!(!record.exists(), "an orderly shutdown removes the record");
        assert_eq!(guest.receive().map(|r| r.1), Some(vec![10 * life + 1; 90]));
        assert!(guest.receive().is_none());
    }
}

/// QEMU's network devices: no inflight record, and after a restart the initial positions of the packed rings.
#[test]
fn packed_rings_continue_from_our_record() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("vm.sock");
    let record = directory.path().join("record");
    let mut guest = Guest::new(Kind { packed: true, ..KIND });
    guest.fill(&[2048; 12]);
    for life in 0..12u8 {
        // Every third daemon shuts down in order; the others are killed, and remove nothing.
        let in_order = life % 3 == 2;
        let (owner, worker) = bench();
        let config = VhostConfig { record: Some(record.clone()), ..config(&socket, Mode::Server) };
        let port = VhostPort::open(config, owner).expect("port");
        let mut front = Frontend::connect(&socket, 2).expect("connect");
        set_up_with(&mut front, FEATURES | PACKED);
        guest.send(Header::default(), &[life; 100], &[50], false).expect("room");
        give(&mut front, &guest, [WRAP; 2]);
        let mut queue = worker.next();
        let mut out = Vec::new();
        queue.fetch(64, &mut out).expect("fetch");
        let got: Vec<u8> = out.iter().map(|f| queue.bytes(f.handle).0[0]).collect();
        // The first of every three lives leaves its packet in flight. Buffers return in order, whichever completes
        // first.
        assert_eq!(got, if life % 3 == 1 { vec![life - 1, life] } else { vec![life] }, "life {life}");
        if life % 3 > 0 {
            let mut reaped = Vec::new();
            for frame in out.iter().rev() {
                queue.complete(frame.handle);
                queue.flush();
                reaped.push(std::iter::from_fn(|| guest.tx.reap()).count());
            }
            assert_eq!(reaped, if life % 3 == 1 { vec![0, 2] } else { vec![1] }, "life {life}");
        }
        let placed: Vec<_> = (0..3).map(|i| queue.place(&[10 * life + i; 90], false).expect("room")).collect();
        queue.publish(placed[1]);
        queue.notify().expect("notify");
        assert_eq!(guest.receive().map(|r| r.1), Some(vec![10 * life + 1; 90]));
        guest.fill(&[2048]);
        if in_order {
            let taking = std::thread::spawn(move || drop(port));
            worker.drop(queue);
            taking.join().expect("it ends");
            while let Some((_, frame)) = guest.receive() {
                assert!(frame.is_empty(), "an unused buffer returns empty");
                guest.fill(&[2048]);
            }
        } else {
            std::mem::forget(queue);
            worker.take_back.send(()).expect("lives");
            drop(port);
        }
        assert!(record.exists(), "the next daemon needs it, even after an orderly shutdown");
    }
    let (owner, worker) = bench();
    let config = VhostConfig { record: Some(record.clone()), ..config(&socket, Mode::Server) };
    let port = VhostPort::open(config, owner).expect("port");
    let mut front = Frontend::connect(&socket, 2).expect("connect");
    set_up_with(&mut front, FEATURES | PACKED);
    give(&mut front, &guest, [WRAP; 2]);
    worker.drop(worker.next());
    // Both indexes and wrap counters; all of the guest's descriptors are returned.
    let end = front.get_vring_base(1).expect("transmit ring");
    assert_eq!(end, u32::from(guest.tx.place(guest.tx.next_used)) * 0x1_0001);
    assert!(!record.exists(), "now the front-end knows the indexes");
    drop(port);
}

#[test]
fn a_client_port_reconnects() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("vm.sock");
    let (owner, worker) = bench();
    let port = VhostPort::open(config(&socket, Mode::Client), owner).expect("port");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("listen");
    let guest = Guest::new(KIND);
    for _ in 0..3 {
        let (stream, _) = listener.accept().expect("it comes");
        let mut front = Frontend::from_stream(stream, 2);
        set_up(&mut front);
        give(&mut front, &guest, [0, 0]);
        worker.drop(worker.next());
    }
    drop(port);
}

#[test]
fn invalid_messages_only_end_the_connection() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("vm.sock");
    let (owner, _worker) = bench();
    let port = VhostPort::open(config(&socket, Mode::Server), owner).expect("port");
    let attempts: [fn(&mut Frontend) -> bool; 6] = [
        |f| f.set_vring_num(1, 3).is_err() || f.get_features().is_err(),
        |f| f.set_vring_base(2, 0).is_err() || f.get_features().is_err(),
        |f| f.set_features(1 << 32 | 1 << 40).is_err() || f.get_features().is_err(),
        |f| f.set_features(1 << 29).is_err() || f.get_features().is_err(),
        |f| {
            let file = rustix::fs::memfd_create("short", rustix::fs::MemfdFlags::CLOEXEC).expect("no bytes");
            let region = VhostUserMemoryRegionInfo {
                guest_phys_addr: 0,
                memory_size: 4096,
                userspace_addr: 0,
                mmap_offset: 0,
                mmap_handle: file.as_raw_fd(),
            };
            f.set_mem_table(&[region]).is_err() || f.get_features().is_err()
        },
        |f| {
            // Always readable, and not an eventfd.
            use std::os::fd::FromRawFd;
            let zero = std::os::fd::IntoRawFd::into_raw_fd(std::fs::File::open("/dev/zero").expect("zeros"));
            // SAFETY: the descriptor was just opened and is not used elsewhere.
            let fake = unsafe { EventFd::from_raw_fd(zero) };
            f.set_vring_kick(0, &fake).is_err() || f.get_features().is_err()
        },
    ];
    for (i, attempt) in attempts.into_iter().enumerate() {
        let mut front = Frontend::connect(&socket, 2).expect("connect");
        front.set_owner().expect("owner");
        assert!(attempt(&mut front), "attempt {i}");
    }
    assert!(Frontend::connect(&socket, 2).expect("connect").get_features().is_ok());
    drop(port);
}

#[test]
fn only_owner_and_group_may_connect() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("vm.sock");
    let port = VhostPort::open(config(&socket, Mode::Server), bench().0).expect("port");
    assert_eq!(std::fs::metadata(&socket).expect("the socket").permissions().mode() & 0o777, 0o660);
    drop(port);
}

#[test]
fn a_socket_in_use_is_left_alone() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("vm.sock");
    let listener = std::os::unix::net::UnixListener::bind(&socket).expect("listen");
    let open = |path: &Path| VhostPort::open(config(path, Mode::Server), bench().0);
    assert!(matches!(open(&socket), Err(VhostError::Path { .. })));
    drop(listener);
    drop(open(&socket).expect("no process listens any more"));
    std::fs::write(&socket, "").expect("a file");
    assert!(matches!(open(&socket), Err(VhostError::Path { .. })));
    assert!(matches!(open(&directory.path().join("no/such")), Err(VhostError::Listen { .. })));
}

#[test]
fn a_driver_enables_and_disables_queue_pairs() {
    let directory = tempfile::tempdir().expect("directory");
    let socket = directory.path().join("vm.sock");
    let record = directory.path().join("record");
    let (owner, worker) = bench();
    let config = VhostConfig { queues: 3, record: Some(record.clone()), ..config(&socket, Mode::Server) };
    let port = VhostPort::open(config, owner).expect("port");
    let mut front = Frontend::connect(&socket, 8).expect("connect");
    set_up_with(&mut front, FEATURES | 1 << 22);
    assert!(front.get_protocol_features().expect("features").contains(VhostUserProtocolFeatures::MQ));
    let (_, space) = front.get_config(8, 2, VhostUserConfigFlags::empty(), &[0; 2]).expect("configuration");
    assert_eq!(space, [3, 0]);

    let mut pairs = [Guest::new(KIND), Guest::new(KIND)];
    pairs[1] = pairs[0].another_pair(KIND);
    let send = |pairs: &mut [Guest; 2], n: u8| {
        for (pair, guest) in pairs.iter_mut().enumerate() {
            guest.send(Header::default(), &[10 * n + pair as u8; 100], &[], false);
        }
    };
    // One pair runs while the other is still being set up.
    give(&mut front, &pairs[0], [0, 0]);
    let mut queue = worker.next();
    send(&mut pairs, 1);
    assert_eq!(sent(&mut queue), [[10; 100]]);
    worker.drop(queue);
    give_pair(&mut front, &pairs[1], 1, [0, 0]);
    let mut queue = worker.next();
    assert_eq!(sent(&mut queue), [[11; 100]]);
    send(&mut pairs, 2);
    let mut both = sent(&mut queue);
    both.sort();
    assert_eq!(both, [[20; 100], [21; 100]]);
    assert!(record.exists() && super::record::path(&record, 1).exists());

    // Without the second pair, the first continues at its position.
    worker.drop(queue);
    front.set_vring_enable(2, false).expect("disable");
    let mut queue = worker.next();
    send(&mut pairs, 3);
    assert_eq!(sent(&mut queue), [[30; 100]]);
    worker.drop(queue);
    front.set_vring_enable(2, true).expect("enable");
    let mut queue = worker.next();
    assert_eq!(sent(&mut queue), [[31; 100]]);

    // The rings stop one after the other, as with QEMU.
    worker.drop(queue);
    for (index, base) in [(0, 0), (1, 3), (2, 0), (3, 3)] {
        assert_eq!(front.get_vring_base(index).expect("stops"), base, "ring {index}");
    }
    for guest in &mut pairs {
        assert_eq!(std::iter::from_fn(|| guest.tx.reap()).count(), 3, "all buffers are returned");
    }
    assert_eq!(front.get_queue_num().expect("queues"), 3, "pairs, as all network front-ends understand it");
    let mut front = {
        drop(front);
        Frontend::connect(&socket, 8).expect("connect")
    };
    set_up_with(&mut front, FEATURES | 1 << 22);
    assert!(front.set_vring_num(6, 16).is_err(), "the device has six rings");
    drop(port);
    assert!(!record.exists() && !super::record::path(&record, 1).exists());
}
