//! A raw vhost-user front-end and virtio driver, conforming or hostile: a test can write any byte into rings, records
//! and guest memory, from several threads, and send any message with any file descriptor.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recvmsg, sendmsg};

/// Requests (vhost-user, "Front-end message types").
pub const GET_FEATURES: u32 = 1;
pub const SET_FEATURES: u32 = 2;
pub const SET_OWNER: u32 = 3;
pub const RESET_OWNER: u32 = 4;
pub const SET_MEM_TABLE: u32 = 5;
pub const SET_VRING_NUM: u32 = 8;
pub const SET_VRING_ADDR: u32 = 9;
pub const SET_VRING_BASE: u32 = 10;
pub const GET_VRING_BASE: u32 = 11;
pub const SET_VRING_KICK: u32 = 12;
pub const SET_VRING_CALL: u32 = 13;
pub const GET_PROTOCOL_FEATURES: u32 = 15;
pub const SET_PROTOCOL_FEATURES: u32 = 16;
pub const SET_VRING_ENABLE: u32 = 18;
pub const GET_INFLIGHT_FD: u32 = 31;
pub const SET_INFLIGHT_FD: u32 = 32;
pub const ADD_MEM_REG: u32 = 37;
pub const REM_MEM_REG: u32 = 38;

const VERSION: u32 = 1;
const NEED_REPLY: u32 = 1 << 3;
/// Feature bits (virtio 1.3, sections 5.1.3 and 6; vhost-user, "Protocol features").
const MERGEABLE: u64 = 1 << 15;
const INDIRECT: u64 = 1 << 28;
const PROTOCOL_FEATURES: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;
const PACKED: u64 = 1 << 34;

/// Flags of descriptors; the last two are those of packed rings.
pub const F_NEXT: u16 = 1;
pub const F_WRITE: u16 = 2;
pub const F_INDIRECT: u16 = 4;
pub const F_AVAILABLE: u16 = 1 << 7;
pub const F_USED: u16 = 1 << 15;

/// Start of the memory in the guest's and in the front-end's address space.
pub const GUEST: u64 = 0x4000_0000;
pub const USER: u64 = 0x7f00_0000_0000;
/// Size of the memory, bytes; the file is sparse.
pub const MEMORY: u64 = 64 << 20;
/// Length of a `struct virtio_net_hdr_v1`, bytes.
pub const HEADER: usize = 12;
/// Indexes of the rings.
pub const RX: usize = 0;
pub const TX: usize = 1;
/// Offsets of rings, their parts, and buffers.
const RING: u64 = 2 << 20;
const AVAILABLE: u64 = 1 << 19;
const USED: u64 = 1 << 20;
const BUFFERS: u64 = 8 << 20;
/// Free area for attacks.
pub const SCRATCH: u64 = 48 << 20;
/// Size of each buffer, bytes.
const BUFFER: u64 = 2048;
/// Most buffers of each ring; larger rings share them.
const SLOTS: u64 = 8192;

/// A memory file that both sides map.
pub struct Memory {
    pub file: File,
    base: *mut u8,
    bytes: usize,
}

// SAFETY: all accesses are atomic, and the mapping stays until the last owner drops it.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    pub fn new(bytes: u64) -> Arc<Memory> {
        let file = File::from(rustix::fs::memfd_create("hostile-guest", MemfdFlags::CLOEXEC).unwrap());
        file.set_len(bytes).unwrap();
        let bytes = bytes as usize;
        let flags = rustix::mm::MapFlags::SHARED;
        let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap(std::ptr::null_mut(), bytes, access, flags, &file, 0) };
        Arc::new(Memory { file, base: base.unwrap().cast(), bytes })
    }

    fn at<T>(&self, at: u64) -> *const T {
        let at = at as usize;
        assert!(at + size_of::<T>() <= self.bytes && at.is_multiple_of(align_of::<T>()), "a test writes to {at:#x}");
        // SAFETY: the bytes lie in the mapping.
        unsafe { self.base.add(at).cast() }
    }

    pub fn write(&self, at: u64, bytes: &[u8]) {
        for (i, byte) in bytes.iter().enumerate() {
            // SAFETY: `at` checks bounds and alignment; the daemon and other threads access the same bytes atomically.
            unsafe { &*self.at::<AtomicU8>(at + i as u64) }.store(*byte, Ordering::Relaxed);
        }
    }

    pub fn read(&self, at: u64, bytes: usize) -> Vec<u8> {
        // SAFETY: as in `write`.
        let byte = |i| unsafe { &*self.at::<AtomicU8>(at + i) }.load(Ordering::Relaxed);
        (0..bytes as u64).map(byte).collect()
    }

    pub fn store16(&self, at: u64, value: u16) {
        // SAFETY: as in `write`.
        unsafe { &*self.at::<AtomicU16>(at) }.store(value.to_le(), Ordering::Release);
    }

    pub fn load16(&self, at: u64) -> u16 {
        // SAFETY: as in `write`.
        u16::from_le(unsafe { &*self.at::<AtomicU16>(at) }.load(Ordering::Acquire))
    }

    pub fn store64(&self, at: u64, value: u64) {
        // SAFETY: as in `write`.
        unsafe { &*self.at::<AtomicU64>(at) }.store(value.to_le(), Ordering::Release);
    }

    pub fn load64(&self, at: u64) -> u64 {
        // SAFETY: as in `write`.
        u64::from_le(unsafe { &*self.at::<AtomicU64>(at) }.load(Ordering::Acquire))
    }

    /// Writes a descriptor, its flags last. `third` and `fourth` are flags and next in split rings and tables, ID and
    /// flags in packed rings.
    pub fn descriptor(&self, at: u64, guest: u64, len: u32, third: u16, fourth: u16) {
        self.store64(at, guest);
        self.store64(at + 8, u64::from(len) | u64::from(third) << 32 | u64::from(fourth) << 48);
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: no references into the mapping exist any more.
        let _ = unsafe { rustix::mm::munmap(self.base.cast(), self.bytes) };
    }
}

/// Parameters of the rings.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    pub packed: bool,
    /// Descriptors of each ring.
    pub size: u16,
}

/// A connection to a port's socket, memory, and two rings.
pub struct FrontEnd {
    socket: UnixStream,
    pub kind: Kind,
    pub memory: Arc<Memory>,
    pub kicks: [OwnedFd; 2],
    /// Buffers offered, and taken back, since the rings were set up.
    offered: [u16; 2],
    taken: [u16; 2],
}

impl FrontEnd {
    /// Connects and negotiates features; nothing runs yet. `None`: there is no listener, or the daemon closes the
    /// connection.
    pub fn connect(socket: &Path, kind: Kind) -> Option<FrontEnd> {
        let deadline = Instant::now() + Duration::from_secs(5);
        let socket = loop {
            match UnixStream::connect(socket) {
                Ok(socket) => break socket,
                Err(_) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(5)),
                Err(_) => return None,
            }
        };
        FrontEnd::on(socket, kind)
    }

    /// As [`FrontEnd::connect`], on a connected socket.
    pub fn on(socket: UnixStream, kind: Kind) -> Option<FrontEnd> {
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let kick = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC).unwrap();
        let memory = Memory::new(MEMORY);
        let front_end = FrontEnd { socket, kind, memory, kicks: [kick(), kick()], offered: [0; 2], taken: [0; 2] };
        front_end.tell(SET_OWNER, &[], &[]);
        let offered = front_end.number(GET_FEATURES)?;
        let packed = if kind.packed { PACKED } else { 0 };
        let features = offered & (MERGEABLE | INDIRECT | PROTOCOL_FEATURES | VERSION_1) | packed;
        front_end.tell(SET_FEATURES, &features.to_le_bytes(), &[]);
        let protocol = front_end.number(GET_PROTOCOL_FEATURES)?;
        front_end.tell(SET_PROTOCOL_FEATURES, &protocol.to_le_bytes(), &[]);
        Some(front_end)
    }

    /// A running machine: memory and both rings are set up, and receive buffers offered.
    pub fn running(socket: &Path, kind: Kind) -> Option<FrontEnd> {
        let mut front_end = FrontEnd::connect(socket, kind)?;
        front_end.set_memory();
        front_end.start_rings();
        front_end.fill();
        front_end.is_alive().then_some(front_end)
    }

    /// Sends a message, without waiting until the daemon has received it.
    pub fn tell(&self, request: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        self.send_message(request, VERSION, payload, files)
    }

    /// Sends the first half of a message's header.
    pub fn tell_half(&self) {
        let sent = rustix::net::send(&self.socket, &[GET_FEATURES as u8, 0, 0, 0, 1, 0], SendFlags::NOSIGNAL);
        assert_eq!(sent, Ok(6));
    }

    /// Sends a message, and returns whether the daemon reports success.
    pub fn is_accepted(&self, request: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        self.send_message(request, VERSION | NEED_REPLY, payload, files)
            && self.reply().is_some_and(|(payload, _)| payload == 0u64.to_le_bytes())
    }

    /// Sends a request, and returns the answer with its file.
    pub fn ask(&self, request: u32, payload: &[u8]) -> Option<(Vec<u8>, Option<File>)> {
        if self.tell(request, payload, &[]) { self.reply() } else { None }
    }

    fn number(&self, request: u32) -> Option<u64> {
        self.ask(request, &[])?.0.first_chunk().copied().map(u64::from_le_bytes)
    }

    /// Whether the daemon still responds, after it has processed all earlier messages.
    pub fn is_alive(&self) -> bool {
        self.number(GET_FEATURES).is_some()
    }

    fn send_message(&self, request: u32, flags: u32, payload: &[u8], files: &[BorrowedFd<'_>]) -> bool {
        let mut bytes: Vec<u8> = [request, flags, payload.len() as u32].iter().flat_map(|w| w.to_le_bytes()).collect();
        bytes.extend_from_slice(payload);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(control.push(SendAncillaryMessage::ScmRights(files)));
        }
        sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).is_ok()
    }

    fn reply(&self) -> Option<(Vec<u8>, Option<File>)> {
        let mut header = [0; 12];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC | RecvFlags::WAITALL;
        let got = recvmsg(&self.socket, &mut [IoSliceMut::new(&mut header)], &mut control, flags).ok()?;
        let files = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut files) => files.next(),
            _ => None,
        });
        let file = files.map(File::from).next();
        if got.bytes < header.len() {
            return None;
        }
        let mut payload = vec![0; u32::from_le_bytes(*header.last_chunk().unwrap()) as usize];
        (&self.socket).read_exact(&mut payload).ok()?;
        Some((payload, file))
    }

    pub fn set_memory(&self) {
        self.tell(SET_MEM_TABLE, &table(&[region(GUEST, MEMORY, USER, 0)]), &[self.memory.file.as_fd()]);
    }

    /// Sets up and enables both rings.
    pub fn start_rings(&mut self) {
        for ring in [RX, TX] {
            self.tell(SET_VRING_NUM, &words(&[ring as u32, self.kind.size.into()]), &[]);
            // A packed ring starts with wrap counters of 1.
            let base = if self.kind.packed { 0x8000_8000 } else { 0 };
            self.tell(SET_VRING_BASE, &words(&[ring as u32, base]), &[]);
            self.set_address(ring);
            let index = (ring as u64).to_le_bytes();
            self.tell(SET_VRING_KICK, &index, &[self.kicks[ring].as_fd()]);
        }
        for ring in [RX, TX] {
            self.enable(ring, true);
        }
        (self.offered, self.taken) = ([0; 2], [0; 2]);
    }

    pub fn set_address(&self, ring: usize) {
        let mut address = words(&[ring as u32, 0]);
        for part in [self.descriptors(ring), self.used(ring), self.available(ring), 0] {
            address.extend((part + USER).to_le_bytes());
        }
        self.tell(SET_VRING_ADDR, &address, &[]);
    }

    pub fn enable(&self, ring: usize, enabled: bool) -> bool {
        self.tell(SET_VRING_ENABLE, &words(&[ring as u32, enabled.into()]), &[])
    }

    /// Memory offsets of a ring's parts. In a packed ring, "available" and "used" are the driver's and the device's
    /// event suppression structures.
    pub fn descriptors(&self, ring: usize) -> u64 {
        ring as u64 * RING
    }

    pub fn available(&self, ring: usize) -> u64 {
        self.descriptors(ring) + AVAILABLE
    }

    pub fn used(&self, ring: usize) -> u64 {
        self.descriptors(ring) + USED
    }

    /// Offset of the buffer of offer `n`.
    pub fn buffer(&self, ring: usize, n: u16) -> u64 {
        BUFFERS + (ring as u64 * SLOTS + u64::from(n % self.kind.size) % SLOTS) * BUFFER
    }

    /// Slot and flags of a packed ring's descriptor number `n`.
    pub fn place(&self, n: u16) -> (u16, u16) {
        let first_lap = (n / self.kind.size).is_multiple_of(2);
        (n % self.kind.size, if first_lap { F_AVAILABLE } else { F_USED })
    }

    /// Makes one descriptor available, for any buffer, with any flags. Buffers are offered in order, with one
    /// descriptor each.
    pub fn offer(&mut self, ring: usize, guest: u64, len: u32, flags: u16) {
        let (size, n) = (self.kind.size, self.offered[ring]);
        let slot = n % size;
        let at = self.descriptors(ring) + 16 * u64::from(slot);
        if self.kind.packed {
            self.memory.descriptor(at, guest, len, slot, flags | self.place(n).1);
        } else {
            self.memory.descriptor(at, guest, len, flags, 0);
            self.memory.store16(self.available(ring) + 4 + 2 * u64::from(slot), slot);
            self.memory.store16(self.available(ring) + 2, n.wrapping_add(1));
        }
        // A lap of a packed ring ends where 16 bits wrap, because its size is a power of two.
        self.offered[ring] = n.wrapping_add(1);
    }

    pub fn kick(&self, ring: usize) {
        let _ = rustix::io::write(&self.kicks[ring], &1u64.to_ne_bytes());
    }

    /// Number of buffers that the device has.
    pub fn outstanding(&mut self, ring: usize) -> u16 {
        while self.taken[ring] != self.offered[ring] && self.is_back(ring) {
            self.taken[ring] = self.taken[ring].wrapping_add(1);
        }
        self.offered[ring].wrapping_sub(self.taken[ring])
    }

    /// Whether the device has returned the next buffer. Buffers of this driver have one descriptor each.
    fn is_back(&self, ring: usize) -> bool {
        let n = self.taken[ring];
        if !self.kind.packed {
            return self.memory.load16(self.used(ring) + 2) != n;
        }
        let (slot, available) = self.place(n);
        let flags = (self.memory.load64(self.descriptors(ring) + 16 * u64::from(slot) + 8) >> 48) as u16;
        let both = flags & (F_AVAILABLE | F_USED);
        both == if available == F_AVAILABLE { F_AVAILABLE | F_USED } else { 0 }
    }

    /// Sends a frame without offloads. `false`: the ring stays full.
    pub fn send(&mut self, frame: &[u8]) -> bool {
        let sent = self.queue(frame);
        self.kick(TX);
        sent
    }

    /// As [`FrontEnd::send`], without a kick.
    pub fn queue(&mut self, frame: &[u8]) -> bool {
        let deadline = Instant::now() + Duration::from_millis(200);
        while self.outstanding(TX) >= self.kind.size {
            if Instant::now() > deadline {
                return false;
            }
            self.kick(TX);
            std::thread::yield_now();
        }
        let at = self.buffer(TX, self.offered[TX]);
        self.memory.write(at, &[0; HEADER]);
        self.memory.write(at + HEADER as u64, frame);
        self.offer(TX, GUEST + at, (HEADER + frame.len()) as u32, 0);
        true
    }

    /// Offers receive buffers until the ring is full.
    pub fn fill(&mut self) {
        while self.outstanding(RX) < self.kind.size {
            let at = self.buffer(RX, self.offered[RX]);
            self.offer(RX, GUEST + at, BUFFER as u32, F_WRITE);
        }
        self.kick(RX);
    }

    /// Takes received frames, and offers their buffers again. For split rings only. A frame in several buffers is
    /// returned in parts.
    pub fn receive(&mut self) -> Vec<Vec<u8>> {
        assert!(!self.kind.packed);
        let mut frames = Vec::new();
        while self.memory.load16(self.used(RX) + 2) != self.taken[RX] {
            let at = self.used(RX) + 4 + 8 * u64::from(self.taken[RX] % self.kind.size);
            let entry = self.memory.read(at, 8);
            let word = |at: usize| u32::from_le_bytes(*entry[at..].first_chunk().unwrap());
            let bytes = self.memory.read(self.buffer(RX, word(0) as u16), word(4) as usize);
            frames.push(bytes.get(HEADER..).unwrap_or_default().to_vec());
            self.taken[RX] = self.taken[RX].wrapping_add(1);
        }
        self.fill();
        frames
    }
}

/// A memory region in the format of messages.
pub fn region(guest: u64, bytes: u64, user: u64, offset: u64) -> Vec<u8> {
    [guest, bytes, user, offset].iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// The payload of SET_MEM_TABLE.
pub fn table(regions: &[Vec<u8>]) -> Vec<u8> {
    [words(&[regions.len() as u32, 0]), regions.concat()].concat()
}

/// Numbers in the format of messages.
pub fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}
