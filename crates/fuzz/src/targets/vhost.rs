//! A hostile virtual machine, with arbitrary messages and memory content: the port neither ends nor hangs, keeps its
//! guarantees to the worker, accesses only the guest's memory, marks written pages if logging is on, and serves the next
//! machine well.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use bifrost_nic::MAX_FRAME_LEN;
use bifrost_port::GuestPort;
use bifrost_port::vhost::LOG_PAGE;

use super::machine::{
    AVAILABLE, BUFFERS, DESCRIPTORS, FrontEnd, GUEST, MEMORY, Machine, NOBODYS, OFFSET, PACKED, Running, SET_FEATURES,
    SET_LOG_BASE, SIZE, USED, USER, event, memory, ring_at, with,
};
use crate::Input;

/// Virtio 1, protocol features.
const PLAIN: u64 = 1 << 32 | 1 << 30;
/// What is written is logged.
const LOG_ALL: u64 = 1 << 26;
/// Bytes of a log that has a bit for each page.
const LOG: u64 = (GUEST + MEMORY) / (8 * LOG_PAGE);
/// A request that wants to be answered.
const ANSWERED: u32 = 9;
/// Mergeable buffers, indirect descriptors, event indexes, checksums, segmentation, packed rings.
const OPTIONS: [u64; 6] = [1 << 15, 1 << 28, 1 << 29, 1 << 0 | 1 << 1, 1 << 0 | 1 << 11 | 1 << 12, PACKED];

pub(crate) fn run(bytes: &[u8]) {
    let input = &mut Input::new(bytes);
    with(|machine| {
        let mut front = machine.connect();
        let mut guest = Hostile::default();
        // Most start with a valid set-up, or they would not get far.
        if input.chance(16) || guest.begin(input, &mut front) {
            while guest.acts < 200 && !input.is_empty() && guest.act(input, machine, &mut front) {}
        }
        check_bounds(&front.file);
        drop(front);
        a_valid_guest_is_served(machine);
    });
}

#[derive(Default)]
struct Hostile {
    /// Number of buffers offered in each ring.
    offered: [u16; 2],
    /// What the driver has chosen.
    features: u64,
    /// Where everything that the device writes is marked.
    log: Option<File>,
    acts: u32,
}

impl Hostile {
    /// Completes a valid set-up, with some buffers for the device.
    fn begin(&mut self, input: &mut Input<'_>, front: &mut FrontEnd) -> bool {
        self.features = features(input.u8());
        let up = front.set_up(self.features);
        for _ in 0..input.below(6) {
            self.receive(2048, front);
        }
        up
    }

    /// Takes one action. `false`: the connection has ended.
    fn act(&mut self, input: &mut Input<'_>, machine: &Machine, front: &mut FrontEnd) -> bool {
        self.acts += 1;
        let act = input.below(20);
        if act < 3 || act == 11 {
            // What may end the log, or take memory away.
            self.log = None;
        }
        match act {
            0 if input.chance(60) => return front.set_up(PLAIN),
            1 if input.chance(60) => return front.set_up_step(PLAIN),
            2 if input.chance(60) => return message(input, front),
            3 => {
                let at = input.pick(&[AVAILABLE, AVAILABLE + 2, USED, USED + 2, AVAILABLE + 4 + 2 * u64::from(SIZE)]);
                let near = self.offered[1];
                let value = [near, near.wrapping_add(1), near.wrapping_add(SIZE), near.wrapping_sub(1), u16::MAX];
                let value = if input.chance(40) { input.u16() } else { input.pick(&value) };
                front.write(ring_at(input.below(2)) + at, &value.to_le_bytes());
            }
            4 => {
                let ring = input.below(2);
                let index = input.below(usize::from(SIZE)) as u16;
                let flags = u16::from(input.u8() & 7);
                front.descriptor(ring, index, address(input), length(input), flags, u16::from(input.u8() & 31));
            }
            5 => {
                let bytes = input.bytes(8).to_vec();
                front.write(u64::from(input.u16()) << 2 & (MEMORY - 1), &bytes);
            }
            6 | 7 => self.send(input, front),
            8 | 9 => self.receive(input.pick(&[2048, 60, 12, 5, 300]), front),
            10 => {
                let (ring, head) = (input.below(2), u16::from(input.u8() & 31));
                self.offer(ring, head, front);
            }
            11 if input.chance(60) => cut(input, &front.file),
            12 if input.chance(10) => return false,
            13 if input.chance(60) => front.kick(),
            14 if input.chance(40) => return self.begin_log(input, front),
            what => {
                let before = self.log.as_ref().and_then(|_| contents(front));
                machine.work(|running| {
                    work(what, input, running);
                    if before.is_some() {
                        // Used entries are marked when they are shown.
                        work(19, input, running);
                    }
                });
                if let (Some(log), Some(before), Some(after)) = (&self.log, before, contents(front)) {
                    check_marks(log, &before, &after);
                }
            }
        }
        true
    }

    /// Has what is written logged, in a log that is long enough or not.
    fn begin_log(&mut self, input: &mut Input<'_>, front: &mut FrontEnd) -> bool {
        let log = memory();
        let bytes = input.pick(&[LOG, LOG, LOG, LOG, LOG + 1, LOG - 1, 0, MEMORY + OFFSET, u64::MAX]);
        let offset = input.pick(&[0, 0, 0, 1, OFFSET + MEMORY - LOG, u64::MAX]);
        let words = |words: &[u64]| words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>();
        let is_begun = front.ask(SET_LOG_BASE, ANSWERED, &words(&[bytes, offset]), &[log.as_fd()])
            && front.ask(SET_FEATURES, ANSWERED, &words(&[self.features | LOG_ALL]), &[]);
        // What was there in front of its bits is nobody's business.
        let is_simple = is_begun && offset == 0 && log.write_all_at(&[0; LOG as usize], 0).is_ok();
        self.log = is_simple.then_some(log);
        is_begun
    }

    /// Offers a buffer of `len` bytes.
    fn receive(&mut self, len: u32, front: &FrontEnd) {
        let head = self.offered[0] % SIZE;
        front.descriptor(0, head, GUEST + BUFFERS + 0x800 * u64::from(head), len, 2, 0);
        self.offer(0, head, front);
    }

    fn offer(&mut self, ring: usize, head: u16, front: &FrontEnd) {
        front.offer(ring, self.offered[ring], head);
        self.offered[ring] = self.offered[ring].wrapping_add(1);
    }

    /// Sends a frame that may be valid, in one or two parts.
    fn send(&mut self, input: &mut Input<'_>, front: &FrontEnd) {
        let head = self.offered[1] % SIZE;
        let at = BUFFERS + 0x8000 + 0x800 * u64::from(head);
        // A header without offloads is valid for any frame.
        let header = if input.chance(60) { 0 } else { 12 };
        front.write(at, &[0; 12]);
        front.write(at + header, input.bytes(8));
        let len = 12 + u32::from(input.u8()) * 4;
        match input.below(3) {
            0 => front.descriptor(1, head, GUEST + at, len, 0, 0),
            1 => {
                let next = (head + 1) % SIZE;
                let rest = if input.chance(80) { address(input) } else { GUEST + at + 512 };
                front.descriptor(1, head, GUEST + at, 512, 1, next);
                front.descriptor(1, next, rest, len, 0, 0);
            }
            _ => {
                let table = BUFFERS + 0x1_8000;
                let bits = u128::from(GUEST + at) | u128::from(len) << 64;
                front.write(table, &bits.to_le_bytes());
                front.descriptor(1, head, GUEST + table, 16, 4, 0);
            }
        }
        self.offer(1, head, front);
    }
}

/// One step of a worker with a queue, and the guarantees that it relies on.
fn work(what: usize, input: &mut Input<'_>, running: &mut Running) {
    let Running { queue, held, placed } = running;
    match what {
        0..=2 | 11..=15 => {
            let max = 1 + input.below(40);
            let mut frames = Vec::new();
            let _ = queue.fetch(max, &mut frames).map_err(|e| panic!("fetching fails: {e}"));
            assert!(frames.len() <= max);
            for frame in frames {
                assert!(frame.len as usize <= MAX_FRAME_LEN && frame.handle.0 < queue.tx_capacity());
                assert!(held.iter().all(|h| h.handle != frame.handle), "{:?} is held already", frame.handle);
                let (head, tail) = queue.bytes(frame.handle);
                assert!(head.len() <= frame.len as usize && tail.is_empty());
                held.push(frame);
            }
            assert!(held.len() as u32 + queue.tx_free() == queue.tx_capacity());
        }
        16 if !held.is_empty() => {
            let frame = held.swap_remove(input.below(held.len()));
            let mut out = Vec::new();
            queue.copy(frame.handle, 0, frame.len as usize, &mut out);
            assert_eq!(out.len(), frame.len as usize, "the whole frame existed when it was fetched");
            queue.complete(frame.handle);
        }
        17 => {
            let frame = vec![0x5a; 14 + usize::from(input.u8()) * 6];
            if let Ok(handle) = queue.place(&frame, input.chance(128)) {
                assert!(handle.0 < queue.rx_capacity() && !placed.contains(&handle));
                placed.push(handle);
            }
        }
        18 if !placed.is_empty() => {
            let handle = placed.swap_remove(input.below(placed.len()));
            if input.chance(60) { queue.discard(handle) } else { queue.publish(handle) }
        }
        _ => {
            queue.flush();
            let _ = queue.notify().map_err(|e| panic!("notifying fails: {e}"));
        }
    }
}

/// The guest's memory; `None`: it was cut.
fn contents(front: &FrontEnd) -> Option<Vec<u8>> {
    let mut bytes = vec![0; MEMORY as usize];
    front.read_at(0, &mut bytes).then_some(bytes)
}

/// Each page that the device has changed is marked.
fn check_marks(log: &File, before: &[u8], after: &[u8]) {
    let page = LOG_PAGE as usize;
    let mut bits = [0; LOG as usize];
    assert!(log.read_exact_at(&mut bits, 0).is_ok());
    for (n, (before, after)) in (GUEST / LOG_PAGE..).zip(before.chunks(page).zip(after.chunks(page))) {
        let is_marked = bits[(n / 8) as usize] >> (n % 8) & 1 != 0;
        assert!(is_marked || before == after, "page {n:#x} was changed and is not marked");
    }
}

/// Any message, with any payload, and any descriptors.
fn message(input: &mut Input<'_>, front: &mut FrontEnd) -> bool {
    let request = input.below(45) as u32;
    let flags = input.pick(&[1, 9, 9, 9, 1, 0, 5, 2]);
    let mut payload = Vec::new();
    for _ in 0..input.below(8) {
        let word = match input.below(8) {
            0 => 0,
            1 => 1,
            2 => u64::from(input.u8()),
            3 => USER + u64::from(input.u16()) * 4,
            4 => GUEST + u64::from(input.u16()) * 4,
            5 => u64::from(SIZE) << 32 | u64::from(input.u8() & 1),
            6 => input.pick(&[PLAIN, MEMORY, OFFSET, u64::MAX, 1 << 32, 1 << 47]),
            _ => input.u64(),
        };
        payload.extend(word.to_le_bytes());
    }
    payload.truncate(payload.len().saturating_sub(usize::from(input.u8() & 7)));
    let files: Vec<File> = (0..input.below(4)).filter_map(|_| descriptor(input, front)).collect();
    let files: Vec<BorrowedFd<'_>> = files.iter().map(AsFd::as_fd).collect();
    front.ask(request, flags, &payload, &files)
}

fn descriptor(input: &mut Input<'_>, front: &FrontEnd) -> Option<File> {
    match input.below(5) {
        0 => front.file.try_clone().ok(),
        1 => Some(memory()),
        2 => Some(File::from(event())),
        3 => File::open("/dev/null").ok(),
        _ => std::io::pipe().ok().map(|(_, writer)| File::from(std::os::fd::OwnedFd::from(writer))),
    }
}

/// Removes memory, or adds it again.
fn cut(input: &mut Input<'_>, file: &File) {
    let _ = file.set_len(input.pick(&[0, OFFSET, OFFSET + 0x2000, OFFSET + BUFFERS, OFFSET + MEMORY]));
}

fn features(options: u8) -> u64 {
    OPTIONS.iter().enumerate().filter(|(i, _)| options >> i & 1 != 0).fold(PLAIN, |all, (_, bits)| all | bits)
}

fn address(input: &mut Input<'_>) -> u64 {
    let near = GUEST + u64::from(input.u16()) * 4;
    input.pick(&[near, near, near, GUEST + MEMORY - 8, GUEST - 8, 0, u64::MAX - 8, USER])
}

fn length(input: &mut Input<'_>) -> u32 {
    let short = u32::from(input.u8()) * 4;
    input.pick(&[short, short, short, 16, 12, 0, 1 << 17, u32::MAX])
}

/// Checks that nothing has written the area before the guest's memory in the file.
fn check_bounds(file: &File) {
    let len = file.metadata().map_or(0, |m| m.len()).min(OFFSET) as usize;
    let mut bytes = vec![0; len];
    // Truncated and extended again, it is zero.
    let touched = file.read_exact_at(&mut bytes, 0).is_ok() && bytes.iter().any(|b| *b != NOBODYS && *b != 0);
    assert!(!touched, "something was written outside the guest's memory");
}

/// The port has no state of the previous machine.
fn a_valid_guest_is_served(machine: &Machine) {
    let mut front = machine.connect();
    assert!(front.set_up(PLAIN), "its set-up is refused");
    let frame: Vec<u8> = (0..100).collect();
    front.write(BUFFERS, &[&[0; 12][..], &frame].concat());
    front.descriptor(1, 3, GUEST + BUFFERS, 112, 0, 0);
    front.offer(1, 0, 3);
    front.descriptor(0, 5, GUEST + BUFFERS + 0x1000, 2048, 2, 0);
    front.offer(0, 0, 5);
    let mut served = false;
    machine.work(|Running { queue, .. }| {
        let mut frames = Vec::new();
        let _ = queue.fetch(8, &mut frames);
        assert_eq!(frames.iter().map(|f| f.len).collect::<Vec<_>>(), [100]);
        assert_eq!(queue.bytes(frames[0].handle).0, frame);
        queue.complete(frames[0].handle);
        queue.flush();
        let Ok(handle) = queue.place(&frame, false) else { panic!("there is no room") };
        queue.publish(handle);
        let _ = queue.notify();
        served = true;
    });
    assert!(served, "its rings are set up but do not run");
    for (ring, head, len) in [(0, 5, 112), (1, 3, 0)] {
        let mut used = [0; 12];
        assert!(front.read_at(ring_at(ring) + USED, &mut used));
        let word = |at: usize| u16::from_le_bytes([used[at], used[at + 1]]);
        assert_eq!((word(2), word(4), word(8)), (1, head, len), "ring {ring}");
    }
    let mut got = [0; 100];
    assert!(front.read_at(BUFFERS + 0x1000 + 12, &mut got) && got[..] == frame[..]);
}

const _: () = assert!(DESCRIPTORS + 16 * (SIZE as u64) <= AVAILABLE);
