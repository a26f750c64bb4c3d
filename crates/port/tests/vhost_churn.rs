//! A front-end that connects and disconnects at any time, with a driver that writes anything. No resource may leak.
//! This is a separate test program, because it counts the process's descriptors and mappings.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bifrost_port::vhost::{Mode, QueueOwner, VhostConfig, VhostPort, VhostQueue};
use bifrost_port::{GuestPort, RxHandle, TxFrame};
use fastrand::Rng;
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserInflight};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

const SEQUENCES: u32 = 1000;
const GUEST: u64 = 0x1000_0000;
const USER: u64 = 0x7000_0000_0000;
const MEMORY: u64 = 1 << 20;
const RING: u16 = 64;
/// VERSION_1, packed rings, event index, indirect descriptors, mergeable buffers, protocol features.
const FEATURES: u64 = 1 << 32 | 1 << 34 | 1 << 30 | 1 << 29 | 1 << 28 | 1 << 15;

/// A worker's state for a queue.
#[derive(Default)]
struct Worker {
    queue: Option<VhostQueue>,
    fetched: Vec<TxFrame>,
    placed: Vec<RxHandle>,
    started: u32,
}

struct Owner(Arc<Mutex<Worker>>);

impl QueueOwner for Owner {
    fn start(&mut self, queue: VhostQueue) {
        let mut worker = self.0.lock().expect("no test failed");
        assert!(worker.queue.is_none(), "two queues of one guest");
        worker.queue = Some(queue);
        worker.started += 1;
    }

    fn stop(&mut self) {
        let mut worker = self.0.lock().expect("no test failed");
        assert!(worker.queue.take().is_some(), "a queue that was not started");
        (worker.fetched, worker.placed) = (Vec::new(), Vec::new());
    }
}

impl Worker {
    /// A turn of the data path, as the port sees it.
    fn turn(&mut self, random: &mut Rng) {
        let Some(queue) = &mut self.queue else { return };
        queue.fetch(16, &mut self.fetched).expect("only a ring breaks, never the port");
        let mut bytes = Vec::new();
        for frame in &self.fetched {
            if random.u64(..4) > 0 {
                queue.keep(frame.handle);
            }
            if random.u64(..4) == 0 {
                queue.is_intact(frame.handle);
            }
            queue.copy(frame.handle, 0, frame.len as usize, &mut bytes);
        }
        while !self.fetched.is_empty() && random.u64(..3) > 0 {
            let frame = self.fetched.swap_remove(random.u64(..self.fetched.len() as u64) as usize);
            queue.complete(frame.handle);
        }
        queue.flush();
        for _ in 0..random.u64(..8) {
            let frame = vec![7; random.u64(..1500) as usize + 14];
            self.placed.extend(queue.place(&frame, true).ok());
        }
        while !self.placed.is_empty() && random.u64(..4) > 0 {
            let handle = self.placed.swap_remove(random.u64(..self.placed.len() as u64) as usize);
            if random.u64(..4) > 0 { queue.publish(handle) } else { queue.discard(handle) }
        }
        queue.notify().expect("notifications do not fail");
    }
}

/// A front-end and the driver in it.
struct Machine {
    front: Frontend,
    memory: File,
    /// Whether the driver has chosen packed rings.
    packed: bool,
}

impl Machine {
    fn connect(socket: &Path) -> Machine {
        let memory = rustix::fs::memfd_create("guest", rustix::fs::MemfdFlags::CLOEXEC);
        let memory = File::from(memory.expect("a file"));
        memory.set_len(MEMORY).expect("its size");
        Machine { front: Frontend::connect(socket, 2).expect("the socket takes the next one"), memory, packed: false }
    }

    /// The back-end may have closed the connection after an earlier message: errors are expected.
    fn step(&mut self, step: u64, random: &mut Rng) -> Result<(), Box<dyn std::error::Error>> {
        let front = &mut self.front;
        match step {
            0 => front.set_owner()?,
            1 => drop(front.get_features()?),
            2 => {
                self.packed = random.u64(..2) > 0;
                let less = u64::from(!self.packed) << 34 | random.u64(..2) << 29 | random.u64(..2) << 15;
                front.set_features(FEATURES & !less)?;
            }
            3 => {
                let protocol = front.get_protocol_features()?;
                front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
                front.set_protocol_features(protocol)?;
            }
            4 => {
                let region = VhostUserMemoryRegionInfo {
                    guest_phys_addr: GUEST,
                    memory_size: MEMORY,
                    userspace_addr: USER,
                    mmap_offset: 0,
                    mmap_handle: self.memory.as_raw_fd(),
                };
                front.set_mem_table(&[region])?;
            }
            5 | 6 => {
                let (index, at) = (step as usize - 5, USER + (step - 5) * 0x10000);
                front.set_vring_num(index, RING)?;
                front.set_vring_base(index, if random.u64(..4) == 0 { random.u16(..) } else { 0 })?;
                let data = VringConfigData {
                    queue_max_size: RING,
                    queue_size: RING,
                    flags: 0,
                    desc_table_addr: at,
                    used_ring_addr: at + 0x2000,
                    avail_ring_addr: at + 0x4000,
                    log_addr: None,
                };
                front.set_vring_addr(index, &data)?;
                front.set_vring_call(index, &EventFd::new(libc::EFD_NONBLOCK)?)?;
                front.set_vring_kick(index, &EventFd::new(libc::EFD_NONBLOCK)?)?;
            }
            7 | 8 => front.set_vring_enable(step as usize - 7, true)?,
            9 => {
                let (inflight, file) = front.get_inflight_fd(&VhostUserInflight::new(0, 0, 2, RING))?;
                front.set_inflight_fd(&inflight, file.as_raw_fd())?;
            }
            // Disconnected: the rings stop one after the other.
            10 => {
                front.get_vring_base(0)?;
                front.get_vring_base(1)?;
            }
            11 => front.set_vring_enable(random.u64(..2) as usize, random.u64(..2) > 0)?,
            12 => front.reset_owner()?,
            13 => front.set_vring_call(random.u64(..2) as usize, &EventFd::new(libc::EFD_NONBLOCK)?)?,
            // A driver that describes buffers, mostly correctly.
            14..=16 => self.fill(random)?,
            // A driver that writes anything anywhere in its rings.
            _ => {
                for _ in 0..random.u64(..40) {
                    self.memory.write_all_at(&random.u64(..).to_le_bytes()[..2], random.u64(..0x16000))?;
                }
            }
        }
        Ok(())
    }

    fn fill(&self, random: &mut Rng) -> std::io::Result<()> {
        for ring in 0..2u64 {
            let at = ring * 0x10000;
            for i in 0..u64::from(RING) {
                let guest = GUEST + 0x40000 + i * 0x800 * (1 + random.u64(..2));
                // For receiving or sending; now and then the reverse, or with a successor.
                let flags = (u16::from(ring == 0) << 1) ^ (u16::from(random.u64(..20) == 0) << random.u64(..3));
                let next = random.u64(..70) as u16;
                // Packed: mostly its own id, and available in the first round.
                let id = if random.u64(..20) == 0 { next } else { i as u16 };
                let (third, fourth) = if self.packed { (id, flags | 1 << 7) } else { (flags, next) };
                let descriptor = u128::from(guest)
                    | u128::from(random.u64(..0x800)) << 64
                    | u128::from(third) << 96
                    | u128::from(fourth) << 112;
                self.memory.write_all_at(&descriptor.to_le_bytes(), at + 16 * i)?;
                self.memory.write_all_at(&(i as u16).to_le_bytes(), at + 0x4004 + 2 * i)?;
            }
            self.memory.write_all_at(&(random.u64(..u64::from(RING) + 2) as u16).to_le_bytes(), at + 0x4002)?;
        }
        Ok(())
    }
}

/// Descriptors, mappings of shared files, and threads of this process.
fn belongings() -> (usize, usize, usize) {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("its mappings");
    let shared = maps.lines().filter(|l| l.split(' ').nth(1).is_some_and(|p| p.ends_with('s'))).count();
    let entries = |what: &str| std::fs::read_dir(format!("/proc/self/{what}")).expect("its entries").count();
    (entries("fd"), shared, entries("task"))
}

#[test]
fn a_thousand_front_ends_leak_nothing() {
    let directory = tempfile::tempdir().expect("a directory");
    let (socket, record) = (directory.path().join("vm.sock"), directory.path().join("record"));
    let worker = Arc::new(Mutex::new(Worker::default()));
    let config = VhostConfig {
        name: "test".into(),
        socket: socket.clone(),
        mode: Mode::Server,
        mac: [2, 0, 0, 0, 0, 1],
        mtu: 1500,
        queues: 2,
        packed: true,
        slicing: true,
        merged: true,
        record: Some(record),
        message_rate: 0,
    };
    let port = VhostPort::open(config, Box::new(Owner(Arc::clone(&worker)))).expect("a port");
    let mut random = Rng::with_seed(1);
    let mut before = None;
    for sequence in 0..SEQUENCES {
        let mut machine = Machine::connect(&socket);
        // The sequence of a front-end, up to some point, with other messages between.
        let whole = random.u64(..4) > 0;
        let mut order: Vec<u64> = (0..9).collect();
        order.truncate(if whole { 9 } else { random.u64(..9) as usize });
        if random.u64(..3) == 0 {
            order.insert(random.u64(..order.len() as u64 + 1) as usize, 9);
        }
        order.extend((0..random.u64(..12)).map(|_| 9 + random.u64(..9)));
        for step in order {
            if random.u64(..30) == 0 || machine.step(step, &mut random).is_err() {
                break;
            }
            worker.lock().expect("no panic").turn(&mut random);
        }
        drop(machine);
        let deadline = Instant::now() + Duration::from_secs(10);
        while port.is_connected() || worker.lock().expect("no panic").queue.is_some() {
            assert!(Instant::now() < deadline, "sequence {sequence}: the connection does not end");
            std::thread::sleep(Duration::from_micros(200));
        }
        // The first ones create permanent state.
        if sequence == 20 {
            std::thread::sleep(Duration::from_millis(100));
            before = Some(belongings());
        }
    }
    let deadline = Instant::now() + Duration::from_secs(5);
    while Some(belongings()) != before {
        assert!(Instant::now() < deadline, "descriptors, shared mappings, threads: {:?}, {before:?}", belongings());
        std::thread::sleep(Duration::from_millis(10));
    }
    let started = worker.lock().expect("no panic").started;
    assert!(started > SEQUENCES / 3, "only {started} guests started");
    drop(port);
    assert_eq!(std::fs::read_dir(directory.path()).expect("the directory exists").count(), 0, "files");
}
