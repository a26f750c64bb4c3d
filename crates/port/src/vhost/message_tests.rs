//! Malicious front-ends: their messages, over a real socket.

use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

use super::helper::tests::lingering;
use super::*;

const GET_FEATURES: u32 = 1;
const SET_FEATURES: u32 = 2;
const SET_MEM_TABLE: u32 = 5;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ERR: u32 = 14;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_BACKEND_REQ_FD: u32 = 21;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;
/// Request flags: version 1, without and with a requested reply.
const PLAIN: u32 = 1;
const ANSWERED: u32 = 9;
/// Limit for operations that must be fast. Lingering descriptors take longer.
const MOMENT: Duration = Duration::from_secs(4);
const LONG: u64 = 15;

struct Nobody;

impl QueueOwner for Nobody {
    fn start(&mut self, queue: VhostQueue) {
        drop(queue);
    }

    fn stop(&mut self) {}
}

fn config(socket: &Path) -> VhostConfig {
    VhostConfig {
        name: "test".into(),
        socket: socket.to_owned(),
        mode: Mode::Server,
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1450,
        queues: 2,
        packed: true,
        slicing: true,
        merged: false,
        record: None,
        message_rate: 0,
    }
}

pub(super) struct FrontEnd(UnixStream);

impl FrontEnd {
    pub(super) fn connect(socket: &Path) -> FrontEnd {
        let stream = UnixStream::connect(socket).expect("the port listens");
        stream.set_read_timeout(Some(MOMENT)).expect("an option");
        FrontEnd(stream)
    }

    fn send(&mut self, request: u32, flags: u32, words: &[u64], files: &[BorrowedFd<'_>]) -> bool {
        let payload: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()).collect();
        let header = [request, flags, payload.len() as u32].map(u32::to_le_bytes).concat();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        sendmsg(&self.0, &[IoSlice::new(&[header, payload].concat())], &mut control, flags).is_ok()
    }

    /// Whether the message is accepted.
    pub(super) fn ask(&mut self, request: u32, words: &[u64], files: &[BorrowedFd<'_>]) -> bool {
        self.send(request, ANSWERED, words, files) && self.answer() == Some(0)
    }

    /// The number in the reply; `None`: the port has closed the connection.
    fn answer(&mut self) -> Option<u64> {
        let mut answer = [0; 20];
        match self.0.read_exact(&mut answer) {
            Ok(()) => Some(u64::from_le_bytes(std::array::from_fn(|i| answer[12 + i]))),
            Err(error) => {
                assert_ne!(error.kind(), std::io::ErrorKind::WouldBlock, "no reply within {MOMENT:?}");
                None
            }
        }
    }

    /// Negotiates replies.
    pub(super) fn begin(&mut self) {
        assert!(self.send(SET_FEATURES, PLAIN, &[1 << 32 | 1 << 30], &[]));
        assert!(self.send(SET_PROTOCOL_FEATURES, PLAIN, &[1 << 3], &[]));
    }
}

fn memory(bytes: u64) -> OwnedFd {
    let fd = memfd_create("guest", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).expect("a memfd");
    ftruncate(&fd, bytes).expect("its size");
    fd
}

fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd")
}

/// Checks that a port serves front-ends, and ends quickly, after `attack`.
fn survives(name: &str, attack: impl FnOnce(&Path) -> Vec<OwnedFd>) {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let port = VhostPort::open(config(&socket), Box::new(Nobody)).expect("a port");
    let kept = attack(&socket);
    let start = Instant::now();
    // The connected front-end must disconnect first.
    let mut front = FrontEnd::connect(&socket);
    assert!(front.send(GET_FEATURES, PLAIN, &[], &[]));
    assert!(front.answer().is_some(), "{name}: the next front-end is not served");
    drop(port);
    assert!(start.elapsed() < MOMENT, "{name}: it took {:?}", start.elapsed());
    drop(kept);
}

#[test]
fn descriptors_slow_to_close_block_nobody() {
    let ring = [0u64];
    let region = [1, 0, 4096, 0, 0];
    let messages: [(u32, &[u64]); 7] = [
        (SET_VRING_KICK, &ring),
        (SET_VRING_CALL, &ring),
        (SET_VRING_ERR, &ring),
        (SET_MEM_TABLE, &region),
        (ADD_MEM_REG, &[0, 0, 4096, 0, 0]),
        (SET_INFLIGHT_FD, &[4096, 0]),
        (GET_FEATURES, &[]),
    ];
    for (request, words) in messages {
        survives(&format!("message {request}"), |socket| {
            let mut front = FrontEnd::connect(socket);
            front.begin();
            let (slow, other) = lingering(LONG);
            assert!(front.send(request, PLAIN, words, &[slow.as_fd()]));
            drop((slow, front));
            vec![other.into()]
        });
    }
    // Inside a descriptor of a supported kind.
    survives("a socket with one in its queue", |socket| {
        let mut front = FrontEnd::connect(socket);
        front.begin();
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let (slow, other) = lingering(LONG);
        assert!(FrontEnd(ours).send(0, 0, &[], &[slow.as_fd()]));
        assert!(front.send(SET_BACKEND_REQ_FD, PLAIN, &[], &[theirs.as_fd()]));
        drop((slow, theirs, front));
        vec![other.into()]
    });
    survives("a message that is never read", |socket| {
        let mut front = FrontEnd::connect(socket);
        assert!(front.send(GET_FEATURES, 0xffff, &[], &[]), "closes the connection");
        let (slow, other) = lingering(LONG);
        let _ = front.send(GET_FEATURES, PLAIN, &[], &[slow.as_fd()]);
        drop((slow, front));
        vec![other.into()]
    });
}

#[test]
fn a_waiting_connection_does_not_delay_dropping_the_port() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let port = VhostPort::open(config(&socket), Box::new(Nobody)).expect("a port");
    let mut first = FrontEnd::connect(&socket);
    first.begin();
    let mut second = FrontEnd::connect(&socket);
    let (slow, _other) = lingering(LONG);
    assert!(second.send(GET_FEATURES, PLAIN, &[], &[slow.as_fd()]));
    drop((slow, second));
    let start = Instant::now();
    drop(port);
    assert!(start.elapsed() < MOMENT, "it took {:?}", start.elapsed());
}

#[test]
fn half_messages_and_unread_replies_block_nobody() {
    survives("half a message", |socket| {
        let front = FrontEnd::connect(socket);
        std::io::Write::write_all(&mut &front.0, &[1, 0, 0, 0, 1]).expect("room");
        drop(front);
        Vec::new()
    });
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let port = VhostPort::open(config(&socket), Box::new(Nobody)).expect("a port");
    let mut front = FrontEnd::connect(&socket);
    // Until the port waits for room for its replies, and then this side for room for its requests.
    while front.send(GET_FEATURES, PLAIN, &[], &[]) {}
    std::thread::sleep(Duration::from_millis(50));
    while front.send(GET_FEATURES, PLAIN, &[], &[]) {}
    let start = Instant::now();
    drop(port);
    assert!(start.elapsed() < MOMENT, "it took {:?}", start.elapsed());
}

#[test]
fn few_connections_wait_besides_the_one_being_served() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let _port = VhostPort::open(config(&socket), Box::new(Nobody)).expect("a port");
    let waiting: Vec<OwnedFd> = std::iter::from_fn(|| socket::dial(&socket).ok()).take(1000).collect();
    assert!((16..=20).contains(&waiting.len()), "{} connections wait", waiting.len());
}

#[test]
fn a_front_end_that_never_accepts_blocks_nobody() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let _listener = UnixListener::bind(&socket).expect("a listener");
    // Its queue is full.
    let full: Vec<OwnedFd> = std::iter::from_fn(|| socket::dial(&socket).ok()).collect();
    let port =
        VhostPort::open(VhostConfig { mode: Mode::Client, ..config(&socket) }, Box::new(Nobody)).expect("a port");
    std::thread::sleep(Duration::from_millis(50));
    let start = Instant::now();
    drop(port);
    assert!(start.elapsed() < MOMENT, "it took {:?}", start.elapsed());
    drop(full);
}

#[test]
fn only_memory_that_never_blocks_is_mapped() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let port = VhostPort::open(config(&socket), Box::new(Nobody)).expect("a port");
    let sealed = memory(1 << 20);
    fcntl_add_seals(&sealed, SealFlags::WRITE).expect("seals");
    let reader = {
        let fd = memory(1 << 20);
        use std::os::fd::AsRawFd;
        OwnedFd::from(std::fs::File::open(format!("/proc/self/fd/{}", fd.as_raw_fd())).expect("to be read"))
    };
    let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
    disk.set_len(1 << 20).expect("its size");
    let (pipe, _writer) = std::io::pipe().expect("a pipe");
    let null = std::fs::File::open("/dev/zero").expect("a device");
    let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).expect("an epoll");
    let shm = tempfile::tempfile_in("/dev/shm").expect("a file on tmpfs");
    shm.set_len(1 << 20).expect("its size");
    let files: [(&str, OwnedFd, bool); 9] = [
        ("memfd", memory(1 << 20), true),
        ("tmpfs", shm.into(), true),
        ("sealed", sealed, false),
        ("read-only", reader, false),
        ("on a disk", disk.into(), false),
        ("pipe", pipe.into(), false),
        ("device", null.into(), false),
        ("epoll", epoll, false),
        ("event counter", event(), false),
    ];
    for (name, fd, is_taken) in files {
        for message in [SET_MEM_TABLE, ADD_MEM_REG] {
            let mut front = FrontEnd::connect(&socket);
            front.begin();
            let words = [u64::from(message == SET_MEM_TABLE), 0x10000, 1 << 20, 0x5000_0000, 0];
            assert_eq!(front.ask(message, &words, &[fd.as_fd()]), is_taken, "{name}, message {message}");
        }
        let mut front = FrontEnd::connect(&socket);
        front.begin();
        assert_eq!(front.ask(SET_INFLIGHT_FD, &[1 << 20, 0, 16 << 16 | 2], &[fd.as_fd()]), is_taken, "{name}, record");
    }
    drop(port);
}

/// Address space used by this process, bytes.
fn addresses() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").expect("a report");
    pages.split(' ').next().and_then(|pages| pages.parse::<u64>().ok()).expect("a number") * 4096
}

#[test]
fn pages_at_a_large_file_offset_use_little_address_space() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let port = VhostPort::open(config(&socket), Box::new(Nobody)).expect("a port");
    let mut front = FrontEnd::connect(&socket);
    front.begin();
    let file = memory((1 << 46) + (64 << 12));
    let before = addresses();
    for n in 0..64 {
        let region = [0, n << 20, 4096, n << 20, (1 << 46) + (n << 12)];
        assert!(front.ask(ADD_MEM_REG, &region, &[file.as_fd()]), "region {n}");
    }
    // Other tests map memory, too, but less.
    let grown = addresses().saturating_sub(before);
    assert!(grown < 1 << 40, "{grown:#x} bytes of addresses for 64 pages");
    assert!(!front.ask(ADD_MEM_REG, &[0, 64 << 20, 4096, 64 << 20, 0], &[file.as_fd()]), "more than 64 regions");
    let mut front = FrontEnd::connect(&socket);
    front.begin();
    assert!(!front.ask(ADD_MEM_REG, &[0, 0, (2 << 40) + 4096, 0, 0], &[file.as_fd()]), "too much");
    let mut front = FrontEnd::connect(&socket);
    front.begin();
    assert!(front.ask(ADD_MEM_REG, &[0, 0, 1 << 40, 0, 0], &[file.as_fd()]), "much");
    assert!(!front.ask(ADD_MEM_REG, &[0, 1 << 42, (1 << 40) + 4096, 1 << 42, 0], &[file.as_fd()]), "too much in total");
    // A table replaces the previous one; sizes do not add up.
    let mut front = FrontEnd::connect(&socket);
    front.begin();
    for _ in 0..3 {
        assert!(front.ask(SET_MEM_TABLE, &[1, 0, 2 << 40, 0, 0], &[file.as_fd()]));
    }
    let refused = port.counters().find(|(name, _)| *name == "refused_messages");
    assert_eq!(refused, Some(("refused_messages", 3)));
    drop(port);
}

#[test]
fn descriptors_are_counted() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let port = VhostPort::open(config(&socket), Box::new(Nobody)).expect("a port");
    let (fd, file) = (event(), memfd_create("counted-once", MemfdFlags::CLOEXEC).expect("a memfd"));
    ftruncate(&file, 1 << 20).expect("its size");
    let mut events = vec![fd.as_fd(); 253];
    let ask = |request: u32, words: &[u64], files: &[BorrowedFd<'_>]| {
        let mut front = FrontEnd::connect(&socket);
        front.begin();
        front.ask(request, words, files)
    };
    assert!(ask(SET_VRING_CALL, &[0], &events[..1]));
    assert!(ask(SET_VRING_CALL, &[1 << 8], &[]), "none");
    assert!(!ask(SET_VRING_CALL, &[0], &events[..2]));
    assert!(!ask(SET_VRING_KICK, &[0], &events[..2]));
    assert!(!ask(SET_VRING_KICK, &[1 << 8], &[]), "a kick descriptor is required");
    assert!(!ask(SET_VRING_CALL, &[200], &events[..1]), "no such ring");
    assert!(!ask(SET_MEM_TABLE, &[1, 0, 4096, 0, 0], &[file.as_fd(), file.as_fd()]));
    assert!(!ask(SET_MEM_TABLE, &[2, 0, 4096, 0, 0], &[file.as_fd()]));
    assert!(!ask(SET_MEM_TABLE, &[65], &vec![file.as_fd(); 65]));
    assert!(!ask(ADD_MEM_REG, &[0, 0, 4096, 0, 0], &[]));
    assert!(!ask(SET_VRING_NUM, &[16 << 32], &events));
    events.clear();
    // The same file or descriptor, repeated, counts as one.
    let mut front = FrontEnd::connect(&socket);
    front.begin();
    for _ in 0..200 {
        assert!(front.ask(SET_VRING_CALL, &[0], &[fd.as_fd()]));
        assert!(front.ask(SET_VRING_KICK, &[0], &[fd.as_fd()]));
        assert!(front.ask(ADD_MEM_REG, &[0, 0, 4096, 0, 0], &[file.as_fd()]));
    }
    let is_it = |entry: std::fs::DirEntry| {
        std::fs::read_link(entry.path()).is_ok_and(|to| to.as_os_str().to_string_lossy().contains("counted-once"))
    };
    let open = std::fs::read_dir("/proc/self/fd")
        .expect("a list")
        .flatten()
        .filter_map(|entry| is_it(entry).then_some(()))
        .count();
    assert_eq!(open, 2, "ours and the port's");
    drop(port);
}

#[test]
fn a_front_end_that_floods_messages_is_delayed() {
    let directory = tempfile::tempdir().expect("a directory");
    let socket = directory.path().join("vm.sock");
    let paced = VhostConfig { message_rate: 2000, ..config(&socket) };
    let port = VhostPort::open(paced, Box::new(Nobody)).expect("a port");
    let mut front = FrontEnd::connect(&socket);
    front.begin();
    let start = Instant::now();
    for _ in 0..5096 {
        assert!(front.ask(SET_VRING_NUM, &[16 << 32], &[]));
    }
    assert!(start.elapsed() > Duration::from_millis(400), "1000 messages beyond the burst took {:?}", start.elapsed());
    let start = Instant::now();
    drop(port);
    assert!(start.elapsed() < MOMENT, "it took {:?}", start.elapsed());
}
