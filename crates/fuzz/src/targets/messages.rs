//! A front-end that sends any message in any order with any descriptor, and keeps and uses the other end of each
//! descriptor, while a worker serves its guest. No message and no turn of the worker takes long, only the guest's
//! memory is mapped, and none of the descriptors stays open.

use std::fs::File;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use bifrost_port::GuestPort;
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{
    FallocateFlags, MemfdFlags, OFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_getfl, fcntl_setfl, ftruncate,
    memfd_create,
};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::machine::{
    BUFFERS, FrontEnd, GUEST, MEMORY, Machine, OFFSET, Running, SET_FEATURES, SET_LOG_BASE, SIZE, USER, with,
};
use crate::Input;

/// Virtio 1, protocol features.
const PLAIN: u64 = 1 << 32 | 1 << 30;
/// What is written is logged.
const LOG_ALL: u64 = 1 << 26;
const SET_MEM_TABLE: u32 = 5;
const SET_LOG_FD: u32 = 7;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_CALL: u32 = 13;
const SET_VRING_ENABLE: u32 = 18;
const SET_INFLIGHT_FD: u32 = 32;
const ADD_MEM_REG: u32 = 37;
const REM_MEM_REG: u32 = 38;
/// Flag: the request needs a reply.
const ANSWERED: u32 = 9;
/// Timeout of a turn of the worker, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(10);
/// Maximum size of a guest's mappings, and of other mappings of the process meanwhile, bytes.
const MAX_ADDRESSES: u64 = (2 << 40) + (64 << 30);

pub(crate) fn run(bytes: &[u8]) {
    let input = &mut Input::new(bytes);
    with(|machine| {
        let before = addresses();
        let mut attacker = Attacker::new(machine);
        let mut acts = 0;
        while acts < 100 && !input.is_empty() {
            attacker.act(input, machine);
            acts += 1;
            let grown = addresses().saturating_sub(before);
            assert!(grown < MAX_ADDRESSES, "{grown:#x} bytes of addresses are mapped");
        }
        attacker.leave(machine);
    });
}

struct Attacker {
    front: FrontEnd,
    pool: Pool,
    /// Receive buffers that were offered.
    offered: u16,
    /// Start of memory beyond that of the set-up.
    mapped: u64,
}

impl Attacker {
    fn new(machine: &Machine) -> Attacker {
        Attacker { front: machine.connect(), pool: Pool::new(), offered: 0, mapped: GUEST }
    }

    /// Takes one action. If the port closes the connection, connects again.
    fn act(&mut self, input: &mut Input<'_>, machine: &Machine) {
        let goes_on = match input.below(12) {
            0 => self.front.set_up(PLAIN),
            1 => self.front.set_up_step(PLAIN),
            2 => self.any_message(input),
            3 => self.call(input),
            4 => self.map(input),
            5 => {
                self.pool.abuse(input);
                true
            }
            6 => {
                self.offer(input);
                true
            }
            7 | 8 => {
                let turn = machine.aside(turn, PATIENCE);
                assert!(turn, "a turn of the worker does not end");
                true
            }
            9 => self.front.half(input.bytes(20)),
            10 => self.linger(input),
            _ => {
                let (ring, bits) = (input.below(4) as u64, input.u8());
                if bits >> 5 == 5 {
                    self.log(input)
                } else {
                    self.front.ask(SET_VRING_ENABLE, ANSWERED, &words(&[ring | u64::from(bits & 1) << 32]), &[])
                }
            }
        };
        if !goes_on {
            (self.front, self.offered, self.mapped) = (machine.connect(), 0, GUEST);
        }
    }

    /// Any message, with any payload, and any descriptors.
    fn any_message(&mut self, input: &mut Input<'_>) -> bool {
        let request = input.below(45) as u32;
        let flags = input.pick(&[1, 9, 9, 9, 1, 0, 5, 2]);
        let mut payload = words(&std::array::from_fn::<u64, 6, _>(|_| self.word(input)));
        payload.truncate(input.below(payload.len() + 1));
        let count = input.pick(&[0, 1, 1, 2, 64, 200]);
        let picked: Vec<&OwnedFd> = (0..count).map(|_| self.pool.pick(input).1).collect();
        let files: Vec<BorrowedFd<'_>> = picked.into_iter().map(AsFd::as_fd).collect();
        self.front.ask(request, flags, &payload, &files)
    }

    fn word(&self, input: &mut Input<'_>) -> u64 {
        match input.below(8) {
            0 => 0,
            1 => 1,
            2 => u64::from(input.u8()),
            3 => USER + u64::from(input.u16()) * 4,
            4 => GUEST + u64::from(input.u16()) * 4,
            5 => u64::from(SIZE) << 32 | u64::from(input.u8() & 3),
            6 => input.pick(&[PLAIN, MEMORY, OFFSET, u64::MAX, 1 << 32, 1 << 40, 1 << 45, 4096]),
            _ => input.u64(),
        }
    }

    /// Passes a descriptor for notifications (kick or call).
    fn call(&mut self, input: &mut Input<'_>) -> bool {
        let message = if input.chance(64) { SET_VRING_KICK } else { SET_VRING_CALL };
        let ring = u64::from(input.u8() & 1);
        let (_, file) = self.pool.pick(input);
        self.front.ask(message, ANSWERED, &words(&[ring]), &[file.as_fd()])
    }

    /// Adds or removes memory.
    fn map(&mut self, input: &mut Input<'_>) -> bool {
        let (kind, file) = self.pool.pick(input);
        let at = u64::from(input.u8()) << 24;
        let size = input.pick(&[4096, 4096, MEMORY, 1 << 21, (1 << 21) + 4096, 1 << 30, 1 << 41, 0]);
        let offset = input.pick(&[0, 4096, OFFSET, 1 << 21, (1 << 45) - 4096, 1 << 45, 0x1800, u64::MAX]);
        let message = input.pick(&[SET_MEM_TABLE, ADD_MEM_REG, ADD_MEM_REG, ADD_MEM_REG, REM_MEM_REG, SET_INFLIGHT_FD]);
        let payload = match message {
            SET_MEM_TABLE => words(&[1, GUEST + at, size, USER + at, offset]),
            SET_INFLIGHT_FD => words(&[size, offset, u64::from(SIZE) << 16 | 2]),
            _ => words(&[0, GUEST + at, size, USER + at, offset]),
        };
        let files = [file.as_fd()];
        let files = if message == REM_MEM_REG { &files[..0] } else { &files };
        let taken = self.front.ask(message, ANSWERED, &payload, files);
        assert!(!taken || files.is_empty() || kind.is_memory(), "a file of kind {kind:?} is memory");
        if taken && message == ADD_MEM_REG {
            self.mapped = GUEST + at;
        }
        taken
    }

    /// Sets the descriptor of log events, enables logging, or sets the dirty log.
    fn log(&mut self, input: &mut Input<'_>) -> bool {
        let (kind, file) = self.pool.pick(input);
        let files = [file.as_fd()];
        match input.below(4) {
            0 => self.front.ask(SET_LOG_FD, ANSWERED, &[], &files),
            1 => self.front.ask(SET_FEATURES, ANSWERED, &words(&[PLAIN | LOG_ALL]), &[]),
            _ => {
                let size = input.pick(&[(GUEST + MEMORY) >> 15, 1 << 20, 8 << 30, (8 << 30) + 1, 1 << 41, 0, u64::MAX]);
                let offset = input.pick(&[0, 4096, 1, 1 << 45, u64::MAX]);
                let taken = self.front.ask(SET_LOG_BASE, ANSWERED, &words(&[size, offset]), &files);
                assert!(!taken || kind.is_memory(), "a file of kind {kind:?} is a log");
                taken
            }
        }
    }

    /// Passes a descriptor whose closing takes long.
    fn linger(&mut self, input: &mut Input<'_>) -> bool {
        let Some(slow) = self.pool.lingering() else { return true };
        let message = input.pick(&[SET_VRING_CALL, SET_VRING_KICK, SET_INFLIGHT_FD, ADD_MEM_REG, 14, 21, 2, 39]);
        let payload = words(&[0, GUEST, 4096, USER, 0]);
        match self.front.give(message, &payload, slow) {
            Ok(goes_on) => goes_on,
            Err(slow) => {
                let _ = rustix::net::sockopt::set_socket_linger(&slow, None);
                false
            }
        }
    }

    /// Offers a receive buffer, in the memory of the set-up or in that added last.
    fn offer(&mut self, input: &mut Input<'_>) {
        let head = input.below(usize::from(SIZE)) as u16;
        let at = input.pick(&[GUEST + BUFFERS + 0x800 * u64::from(head), self.mapped]);
        self.front.descriptor(0, head, at, 2048, 2, 0);
        self.front.offer(0, self.offered, head);
        self.offered = self.offered.wrapping_add(1);
    }

    /// Disconnects. All descriptors that it sent are closed, and the next guest is served.
    fn leave(self, machine: &Machine) {
        let Attacker { front, mut pool, .. } = self;
        drop(front);
        // A lingering socket ends when its peer does.
        pool.others.clear();
        let names = pool.names();
        let until = Instant::now() + PATIENCE;
        while open(&names) > names.len() {
            assert!(Instant::now() < until, "{} descriptors too many are open", open(&names) - names.len());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(machine.connect().set_up(PLAIN), "the next front-end is refused");
    }
}

/// One step of a worker with the guest.
fn turn(running: &mut Running) {
    let Running { queue, .. } = running;
    let mut frames = Vec::new();
    let _ = queue.fetch(16, &mut frames);
    frames.iter().for_each(|frame| queue.complete(frame.handle));
    queue.flush();
    for _ in 0..2 {
        if let Ok(handle) = queue.place(&[0x5a; 100], false) {
            queue.publish(handle);
        }
    }
    let _ = queue.notify();
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

/// Size of this process's mappings, bytes.
fn addresses() -> u64 {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    pages.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0) * 4096
}

/// Number of this process's descriptors whose names are in `names`.
fn open(names: &[String]) -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    entries
        .filter_map(|entry| std::fs::read_link(entry.path()).ok())
        .filter(|to| names.iter().any(|n| to == n.as_str()))
        .count()
}

/// Kinds of descriptors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Memory,
    HugePages,
    Counter,
    Socket,
    Pipe,
    Epoll,
    Device,
    Disk,
}

impl Kind {
    fn is_memory(self) -> bool {
        matches!(self, Kind::Memory | Kind::HugePages)
    }

    fn is_written(self) -> bool {
        matches!(self, Kind::Counter | Kind::Socket | Kind::Pipe)
    }
}

/// Descriptors of all kinds; the front-end keeps a copy of each.
struct Pool {
    files: Vec<(Kind, OwnedFd)>,
    /// The other ends of the lingering sockets.
    others: Vec<TcpStream>,
}

impl Pool {
    #[allow(clippy::expect_used)]
    fn new() -> Pool {
        let counter = |start| eventfd(start, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event counter");
        let memory = |bytes, flags: MemfdFlags| {
            let name = format!("pool-{:?}-{bytes:x}", std::thread::current().id());
            let file = memfd_create(name, MemfdFlags::CLOEXEC | flags).ok()?;
            ftruncate(&file, bytes).ok().map(|()| file)
        };
        let socket = |kind| socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None).expect("sockets");
        let (one, other) = socket(SocketType::STREAM);
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let mut files = vec![
            (Kind::Counter, counter(0)),
            (Kind::Counter, counter(1)),
            (Kind::Socket, one),
            (Kind::Socket, other),
            (Kind::Socket, socket(SocketType::DGRAM).0),
            (Kind::Pipe, reader.into()),
            (Kind::Pipe, writer.into()),
            (Kind::Epoll, epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll")),
            (Kind::Device, File::open("/dev/null").expect("a device").into()),
        ];
        let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).expect("a file");
        disk.set_len(OFFSET + MEMORY).expect("its size");
        files.push((Kind::Disk, disk.into()));
        for bytes in [4096, OFFSET + MEMORY, 1 << 46] {
            files.extend(memory(bytes, MemfdFlags::ALLOW_SEALING).map(|file| (Kind::Memory, file)));
        }
        // The descriptor may have no pages: then there is nothing behind the addresses.
        files.extend(memory(4 << 20, MemfdFlags::HUGETLB).map(|file| (Kind::HugePages, file)));
        Pool { files, others: Vec::new() }
    }

    fn pick(&self, input: &mut Input<'_>) -> (Kind, &OwnedFd) {
        let (kind, file) = &self.files[input.below(self.files.len())];
        (*kind, file)
    }

    /// Uses its copy of a descriptor.
    fn abuse(&mut self, input: &mut Input<'_>) {
        let (kind, file) = self.pick(input);
        match input.below(8) {
            0 | 1 if kind.is_written() => {
                if let Ok(flags) = fcntl_getfl(file) {
                    let _ = fcntl_setfl(file, flags | OFlags::NONBLOCK);
                    fill(kind, file);
                    let _ = fcntl_setfl(file, flags - OFlags::NONBLOCK);
                }
            }
            2 => drop(fcntl_getfl(file).and_then(|flags| fcntl_setfl(file, flags | OFlags::NONBLOCK))),
            3 if kind.is_memory() => drop(ftruncate(file, input.pick(&[0, 4096, OFFSET, 1 << 21, 1 << 46]))),
            4 if kind.is_memory() => {
                let _ = fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, 1 << 22);
            }
            5 if kind.is_memory() => drop(fcntl_add_seals(file, input.pick(&[SealFlags::SHRINK, SealFlags::WRITE]))),
            _ => {}
        }
    }

    /// A TCP socket with a linger time of a minute, and unread bytes in it.
    fn lingering(&mut self) -> Option<OwnedFd> {
        if self.others.len() == 4 {
            return None;
        }
        let listener = TcpListener::bind("127.0.0.1:0").ok()?;
        let mut stream = TcpStream::connect(listener.local_addr().ok()?).ok()?;
        self.others.push(listener.accept().ok()?.0);
        stream.set_nonblocking(true).ok()?;
        while stream.write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(60))).ok()?;
        Some(stream.into())
    }

    /// The kernel's names of descriptors with unique names.
    fn names(&self) -> Vec<String> {
        use std::os::fd::AsRawFd;
        let link = |fd: &OwnedFd| std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd())).ok();
        let own = [Kind::Memory, Kind::HugePages, Kind::Socket, Kind::Pipe];
        let named = self.files.iter().filter(|(kind, _)| own.contains(kind)).filter_map(|(_, fd)| link(fd));
        named.map(|to| to.to_string_lossy().into_owned()).collect()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // Unblocks a thread that failed while blocked.
        for (kind, file) in &self.files {
            if *kind == Kind::Counter
                && let Ok(flags) = fcntl_getfl(file)
            {
                let _ = fcntl_setfl(file, flags | OFlags::NONBLOCK);
                let _ = rustix::io::read(file, &mut [0; 8]);
            }
        }
    }
}

/// Until nothing more fits.
fn fill(kind: Kind, file: &OwnedFd) {
    if kind == Kind::Counter {
        let _ = rustix::io::read(file, &mut [0; 8]);
        let _ = rustix::io::write(file, &(u64::MAX - 1).to_ne_bytes());
        return;
    }
    for bytes in [4096, 8] {
        while rustix::io::write(file, &vec![0; bytes]).is_ok() {}
    }
}
