//! A vhost-user front-end and its guest's memory on a real socket, and the worker behind it.

use std::cell::RefCell;
use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bifrost_port::vhost::{DirtyLog, Mode, QueueOwner, VhostConfig, VhostPort, VhostQueue};
use bifrost_port::{GuestPort, RxHandle, TxFrame};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

/// Position of the guest's memory: for the guest, for the front-end, in its file.
pub(super) const GUEST: u64 = 0x4000_0000;
pub(super) const USER: u64 = 0x7f00_0000_0000;
pub(super) const OFFSET: u64 = 0x1_0000;
pub(super) const MEMORY: u64 = 0x4_0000;
/// Entries of a ring in a valid set-up.
pub(super) const SIZE: u16 = 16;
/// Offset of the buffers from [`GUEST`].
pub(super) const BUFFERS: u64 = 0x8000;
/// The feature of packed rings.
pub(super) const PACKED: u64 = 1 << 34;
/// Timeout for a reply: much longer than needed on a busy machine.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) const GET_FEATURES: u32 = 1;
pub(super) const SET_FEATURES: u32 = 2;
const SET_OWNER: u32 = 3;
const SET_MEM_TABLE: u32 = 5;
pub(super) const SET_LOG_BASE: u32 = 6;
const SET_VRING_NUM: u32 = 8;
const SET_VRING_ADDR: u32 = 9;
const SET_VRING_BASE: u32 = 10;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
/// Requests that always have a reply.
const ANSWERED: [u32; 8] = [GET_FEATURES, SET_LOG_BASE, 11, 15, 17, 24, 31, 36];

/// The worker's state of a guest.
pub(super) struct Running {
    pub(super) queue: VhostQueue,
    pub(super) held: Vec<TxFrame>,
    pub(super) placed: Vec<RxHandle>,
}

/// The worker's side: it has a queue from start to stop.
#[derive(Clone, Default)]
struct Worker(Arc<Mutex<Option<Running>>>);

impl Worker {
    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        // A target that failed has poisoned the lock; that must not affect the next input.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueOwner for Worker {
    fn start(&mut self, queue: VhostQueue) {
        let before = self.running().replace(Running { queue, held: Vec::new(), placed: Vec::new() });
        assert!(before.is_none(), "started twice");
    }

    fn stop(&mut self) {
        assert!(self.running().take().is_some(), "stopped, but not started");
    }

    fn log_writes(&mut self, log: Option<DirtyLog>) -> bool {
        self.running().as_mut().map(|running| running.queue.log_writes(log)).is_some()
    }
}

/// A port that lives as long as its thread, and is used by one front-end after the other.
pub(super) struct Machine {
    worker: Worker,
    socket: PathBuf,
    _port: VhostPort,
    _directory: tempfile::TempDir,
}

thread_local! {
    static MACHINE: RefCell<Option<Machine>> = const { RefCell::new(None) };
}

/// Calls `f` with this thread's machine.
pub(super) fn with(f: impl FnOnce(&Machine)) {
    MACHINE.with(|machine| f(machine.borrow_mut().get_or_insert_with(Machine::new)));
}

impl Machine {
    #[allow(clippy::expect_used)]
    fn new() -> Machine {
        let directory = tempfile::tempdir().expect("a directory");
        let socket = directory.path().join("vm.sock");
        let worker = Worker::default();
        let config = VhostConfig {
            name: "fuzz".into(),
            socket: socket.clone(),
            mode: Mode::Server,
            mac: [2, 0, 0, 0, 0, 1],
            mtu: 1500,
            queues: 2,
            packed: true,
            slicing: true,
            merged: false,
            record: Some(directory.path().join("record")),
            message_rate: 0,
        };
        let port = VhostPort::open(config, Box::new(worker.clone())).expect("a port");
        Machine { worker, socket, _port: port, _directory: directory }
    }

    /// Calls `f` with the worker's state, if the guest runs.
    pub(super) fn work(&self, f: impl FnOnce(&mut Running)) {
        if let Some(running) = &mut *self.worker.running() {
            f(running);
        }
    }

    /// The same on a separate thread. Returns whether that ended within `patience`.
    pub(super) fn aside(&self, f: impl FnOnce(&mut Running) + Send + 'static, patience: Duration) -> bool {
        let (worker, (done, waits)) = (self.worker.clone(), channel());
        std::thread::spawn(move || {
            if let Some(running) = &mut *worker.running() {
                f(running);
            }
            let _ = done.send(());
        });
        waits.recv_timeout(patience).is_ok()
    }

    #[allow(clippy::expect_used)]
    pub(super) fn connect(&self) -> FrontEnd {
        let stream = UnixStream::connect(&self.socket).expect("the port listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
        FrontEnd { stream, file: memory(), step: 0, kick: File::from(event()), packed: false }
    }
}

/// A connection. The other side closes it when it refuses a message.
pub(super) struct FrontEnd {
    stream: UnixStream,
    /// The guest's memory.
    pub(super) file: File,
    /// Progress of the set-up.
    step: usize,
    kick: File,
    /// The driver has negotiated packed rings.
    packed: bool,
}

impl FrontEnd {
    /// Sends a request and waits until it has been processed. `false`: the other side has closed the connection.
    pub(super) fn ask(&mut self, request: u32, flags: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        let answered = ANSWERED.contains(&request);
        if !self.send(request, flags, payload, files) || answered && self.answer().is_none() {
            return false;
        }
        // Messages are processed in order, so the reply to this one shows that the previous one was.
        answered && flags == 1 || self.send(GET_FEATURES, 1, &[], &[]) && self.answer_to(GET_FEATURES)
    }

    /// Passes a descriptor with a request that has no reply; this side keeps none once the other side has read the
    /// whole request. On error the other side has closed the connection, and the descriptor is returned.
    pub(super) fn give(&mut self, request: u32, payload: &[u8], file: OwnedFd) -> Result<bool, OwnedFd> {
        let bytes = message(request, 9, payload);
        if !self.send_bytes(&bytes[..4], &[file.as_fd()]) {
            return Err(file);
        }
        drop(file);
        let sent = self.send_bytes(&bytes[4..], &[]) && self.send(GET_FEATURES, 1, &[], &[]);
        Ok(sent && self.answer_to(GET_FEATURES))
    }

    fn send(&mut self, request: u32, flags: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        self.send_bytes(&message(request, flags, payload), files)
    }

    fn send_bytes(&mut self, bytes: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(253))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(files));
        }
        sendmsg(&self.stream, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    /// Sends a possibly incomplete message.
    pub(super) fn half(&mut self, bytes: &[u8]) -> bool {
        let _ = std::io::Write::write(&mut self.stream, bytes);
        false
    }

    /// Skips acknowledgements up to the reply to `request`.
    fn answer_to(&mut self, request: u32) -> bool {
        loop {
            match self.answer() {
                Some(answered) if answered == request => return true,
                Some(_) => {}
                None => return false,
            }
        }
    }

    /// The request that the next reply belongs to; the kernel closes descriptors sent with it.
    fn answer(&mut self) -> Option<u32> {
        let mut header = [0; 12];
        self.read(&mut header)?;
        let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        assert_eq!(word(4), 5, "a reply, version 1");
        let size = word(8) as usize;
        assert!(size <= 4096, "a reply of {size} bytes");
        self.read(&mut vec![0; size])?;
        Some(word(0))
    }

    fn read(&mut self, out: &mut [u8]) -> Option<()> {
        match self.stream.read_exact(out) {
            Ok(()) => Some(()),
            Err(error) => {
                let kind = error.kind();
                assert!(kind != std::io::ErrorKind::WouldBlock, "no reply within {PATIENCE:?}");
                None
            }
        }
    }

    /// The next message of a valid set-up; `features` are the device features that the driver accepts. `false`: closed.
    pub(super) fn set_up_step(&mut self, features: u64) -> bool {
        const ORDER: [u32; 15] = [
            SET_OWNER,
            SET_FEATURES,
            SET_PROTOCOL_FEATURES,
            SET_MEM_TABLE,
            SET_VRING_NUM,
            SET_VRING_BASE,
            SET_VRING_ADDR,
            SET_VRING_KICK,
            SET_VRING_CALL,
            SET_VRING_NUM,
            SET_VRING_BASE,
            SET_VRING_ADDR,
            SET_VRING_KICK,
            SET_VRING_CALL,
            SET_VRING_ENABLE,
        ];
        let request = ORDER[self.step.min(ORDER.len() - 1)];
        let ring: u32 = if self.step < 9 { 0 } else { 1 };
        self.step += 1;
        let words = |words: &[u64]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        let pair = |value: u32| [ring.to_le_bytes(), value.to_le_bytes()].concat();
        let file = self.file.try_clone();
        let kick = self.kick.try_clone();
        let (Ok(file), Ok(kick)) = (file, kick) else { return false };
        match request {
            SET_OWNER => self.ask(request, 1, &[], &[]),
            SET_FEATURES => {
                self.packed = features & PACKED != 0;
                self.ask(request, 1, &words(&[features]), &[])
            }
            SET_PROTOCOL_FEATURES => self.ask(request, 1, &words(&[1 << 1 | 1 << 2 | 1 << 3 | 1 << 12]), &[]),
            SET_MEM_TABLE => self.ask(request, 9, &words(&[1, GUEST, MEMORY, USER, OFFSET]), &[file.as_fd()]),
            SET_VRING_NUM => self.ask(request, 9, &pair(u32::from(SIZE)), &[]),
            SET_VRING_BASE => self.ask(request, 9, &pair(0), &[]),
            SET_VRING_ADDR => {
                let at = |table: u64| USER + ring_at(ring as usize) + table;
                let tables = words(&[at(DESCRIPTORS), at(USED), at(AVAILABLE), 0]);
                self.ask(request, 9, &[&ring.to_le_bytes()[..], &[0; 4], &tables].concat(), &[])
            }
            SET_VRING_KICK => self.ask(request, 9, &words(&[u64::from(ring)]), &[kick.as_fd()]),
            SET_VRING_CALL => self.ask(request, 9, &words(&[u64::from(ring)]), &[event().as_fd()]),
            _ => {
                let enable = |ring: u32| [ring.to_le_bytes(), 1u32.to_le_bytes()].concat();
                self.ask(request, 9, &enable(0), &[]) && self.ask(request, 9, &enable(1), &[])
            }
        }
    }

    /// The whole set-up, or the rest of it.
    pub(super) fn set_up(&mut self, features: u64) -> bool {
        while self.step < 15 {
            if !self.set_up_step(features) {
                return false;
            }
        }
        true
    }

    /// Writes to the guest's memory, `at` bytes from its start; nothing is written beyond the end.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) {
        if at.saturating_add(bytes.len() as u64) <= MEMORY {
            let _ = self.file.write_all_at(bytes, OFFSET + at);
        }
    }

    pub(super) fn read_at(&self, at: u64, out: &mut [u8]) -> bool {
        self.file.read_exact_at(out, OFFSET + at).is_ok()
    }

    /// In a packed ring, the descriptor's id is its index; the next one follows it in memory.
    pub(super) fn descriptor(&self, ring: usize, index: u16, guest: u64, len: u32, flags: u16, next: u16) {
        let (third, fourth) = if self.packed { (index, flags | next << 5) } else { (flags, next) };
        let bits = u128::from(guest) | u128::from(len) << 64 | u128::from(third) << 96 | u128::from(fourth) << 112;
        self.write(ring_at(ring) + DESCRIPTORS + 16 * u64::from(index), &bits.to_le_bytes());
    }

    /// Puts `head` into the available ring at `index` and publishes it; in a packed ring, makes the descriptor there
    /// available.
    pub(super) fn offer(&self, ring: usize, index: u16, head: u16) {
        if self.packed {
            let at = ring_at(ring) + DESCRIPTORS + 16 * u64::from(index % SIZE) + 14;
            let mut flags = [0; 2];
            self.read_at(at, &mut flags);
            let available = if (index / SIZE).is_multiple_of(2) { 1 << 7 } else { 1 << 15 };
            return self.write(at, &(u16::from_le_bytes(flags) & 0x7f7f | available).to_le_bytes());
        }
        let at = ring_at(ring) + AVAILABLE;
        self.write(at + 4 + 2 * u64::from(index % SIZE), &head.to_le_bytes());
        self.write(at + 2, &index.wrapping_add(1).to_le_bytes());
    }

    pub(super) fn kick(&self) {
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }
}

fn message(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = [request, flags, payload.len() as u32].map(u32::to_le_bytes).concat();
    bytes.extend_from_slice(payload);
    bytes
}

/// Tables of a ring, from [`ring_at`] on.
pub(super) const DESCRIPTORS: u64 = 0;
pub(super) const AVAILABLE: u64 = 0x1000;
pub(super) const USED: u64 = 0x2000;

/// Offset of the tables of ring 0 (receive) or 1 (transmit) in the guest's memory.
pub(super) fn ring_at(ring: usize) -> u64 {
    0x3000 * ring as u64
}

/// The area before the guest's memory in its file, which nothing may write.
pub(super) const NOBODYS: u8 = 0xa5;

#[allow(clippy::expect_used)]
pub(super) fn memory() -> File {
    let file = File::from(memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a file"));
    file.set_len(OFFSET + MEMORY).expect("its size");
    file.write_all_at(&[NOBODYS; OFFSET as usize], 0).expect("room");
    file
}

#[allow(clippy::expect_used)]
pub(super) fn event() -> OwnedFd {
    eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd")
}
