//! A queue that marks ECN instead of dropping (RFC 3168): a BPF program at the end of a link sets CE in frames that
//! would wait too long.
//!
//! Many kernels are built without a queue discipline that marks ECN. The program tracks the time at which a queue
//! with the link's rate would be empty, as the link's `tbf` does. It marks a frame that would wait longer than the
//! threshold if the frame is ECN-capable. It does not count frames that would find the queue full, because the link
//! drops them. The program is about twenty instructions, written here by hand, so no compiler is needed.

use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::time::Duration;

use anyhow::{Context as _, Result};
use rustix::net::netdevice::name_to_index;
use socket2::{Domain, Socket, Type};

use crate::netns::Namespace;

/// `enum bpf_cmd` of `linux/bpf.h`.
const MAP_CREATE: libc::c_long = 0;
const MAP_LOOKUP: libc::c_long = 1;
const PROG_LOAD: libc::c_long = 5;
const LINK_CREATE: libc::c_long = 28;
const MAP_TYPE_ARRAY: u32 = 2;
const PROG_TYPE_SCHED_CLS: u32 = 3;
const TCX_EGRESS: u32 = 47;

/// Numbers of kernel helper functions.
const MAP_LOOKUP_ELEM: i32 = 1;
const KTIME_GET_NS: i32 = 5;
const SKB_ECN_SET_CE: i32 = 97;

/// Map values, both u64: the time at which the queue is empty, ns; then the number of marked frames.
const VALUE_BYTES: u32 = 16;

/// A program at one end of a link. Dropping it detaches the program.
#[derive(Debug)]
pub struct Marker {
    map: OwnedFd,
    _link: OwnedFd,
}

/// Properties of a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marking {
    /// The link's rate, Mbit/s, 1..=10_000.
    pub mbit_per_s: u32,
    /// Waiting time from which on frames are marked.
    pub threshold: Duration,
    /// Waiting time from which on the link drops.
    pub room: Duration,
}

impl Marker {
    /// Marks frames that `namespace` sends over `link`.
    ///
    /// # Errors
    /// The link does not exist, or the kernel cannot attach the program (`tcx` needs Linux 6.6).
    pub fn start(namespace: &Namespace, link: &str, marking: Marking) -> Result<Self> {
        let device = link.to_owned();
        namespace
            .enter(move || {
                let probe = Socket::new(Domain::IPV4, Type::DGRAM, None).context("opening a socket")?;
                let index = name_to_index(&probe, &device).with_context(|| format!("looking for device {device}"))?;
                let map = create_map().context("creating a BPF map")?;
                let program = load(&instructions(map.as_raw_fd(), marking)).context("loading a BPF program")?;
                let _link = attach(&program, index).context("attaching a BPF program (this needs Linux 6.6)")?;
                Ok(Self { map, _link })
            })
            .with_context(|| format!("marking frames sent over {link}"))
    }

    /// Frames marked so far; a segmentation-offload frame of several segments counts as one.
    ///
    /// # Errors
    /// The map cannot be read.
    pub fn marked(&self) -> Result<u64> {
        let (key, mut value) = (0u32, [0u64; 2]);
        let attributes = [self.map.as_raw_fd() as u64, (&raw const key) as u64, (&raw mut value) as u64, 0];
        bpf(MAP_LOOKUP, &attributes).context("reading a BPF map")?;
        Ok(value[1])
    }
}

/// A BPF instruction: `struct bpf_insn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Instruction {
    code: u8,
    destination: u8,
    source: u8,
    offset: i16,
    immediate: i32,
}

impl Instruction {
    fn encode(self) -> u64 {
        let [low, high] = self.offset.to_le_bytes();
        let [a, b, c, d] = self.immediate.to_le_bytes();
        u64::from_le_bytes([self.code, self.destination | self.source << 4, low, high, a, b, c, d])
    }
}

const fn op(code: u8, destination: u8, source: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction { code, destination, source, offset, immediate }
}

const fn mov(destination: u8, source: u8) -> Instruction {
    op(0xbf, destination, source, 0, 0)
}

const fn call(helper: i32) -> Instruction {
    op(0x85, 0, 0, 0, helper)
}

/// The nanoseconds of a duration; waiting times of a queue fit.
fn nanoseconds(duration: Duration) -> i32 {
    i32::try_from(duration.as_nanos()).unwrap_or(i32::MAX)
}

fn instructions(map: i32, marking: Marking) -> Vec<u64> {
    const LOAD_MAP: u8 = 1;
    let program = [
        mov(6, 1),
        call(KTIME_GET_NS),
        mov(7, 0),
        // Key 0 is on the stack.
        op(0x62, 10, 0, -4, 0),
        op(0x18, 1, LOAD_MAP, 0, map),
        op(0, 0, 0, 0, 0),
        mov(2, 10),
        op(0x07, 2, 0, 0, -4),
        call(MAP_LOOKUP_ELEM),
        // No value: go to the end.
        op(0x15, 0, 0, 18, 0),
        mov(8, 0),
        // r1: the time when the queue is empty, at least now.
        op(0x79, 1, 8, 0, 0),
        op(0x3d, 1, 7, 1, 0),
        mov(1, 7),
        // Add the time of this frame: length * 8000 / rate. `__sk_buff` begins with the length.
        op(0x61, 2, 6, 0, 0),
        op(0x27, 2, 0, 0, 8000),
        op(0x37, 2, 0, 0, marking.mbit_per_s as i32),
        op(0x0f, 1, 2, 0, 0),
        mov(3, 1),
        op(0x1f, 3, 7, 0, 0),
        // Queue full: the link drops the frame. Below the threshold: do not mark.
        op(0x25, 3, 0, 7, nanoseconds(marking.room)),
        op(0x7b, 8, 1, 0, 0),
        op(0xb5, 3, 0, 5, nanoseconds(marking.threshold)),
        mov(1, 6),
        call(SKB_ECN_SET_CE),
        // The helper returns 0 for a frame that is not ECN-capable.
        op(0x15, 0, 0, 2, 0),
        op(0xb7, 1, 0, 0, 1),
        op(0xdb, 8, 1, 8, 0),
        // TCX_NEXT: continue with the next program, or transmit.
        op(0xb7, 0, 0, 0, -1),
        op(0x95, 0, 0, 0, 0),
    ];
    program.map(Instruction::encode).to_vec()
}

/// `bpf(2)`: attributes are the fields of `union bpf_attr` for that command, in words of 8 bytes.
fn bpf(command: libc::c_long, attributes: &[u64]) -> io::Result<i32> {
    // SAFETY: the kernel only accesses the attributes and the memory that they point to, which the caller keeps
    // alive.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attributes.as_ptr(), size_of_val(attributes)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result as i32) }
}

fn descriptor(number: i32) -> OwnedFd {
    // SAFETY: the kernel has just created the descriptor for this call, and nothing else owns it.
    unsafe { OwnedFd::from_raw_fd(number) }
}

fn pair(low: u32, high: u32) -> u64 {
    u64::from(low) | u64::from(high) << 32
}

fn create_map() -> io::Result<OwnedFd> {
    // map_type, key_size, value_size, max_entries.
    bpf(MAP_CREATE, &[pair(MAP_TYPE_ARRAY, 4), pair(VALUE_BYTES, 1)]).map(descriptor)
}

fn load(program: &[u64]) -> io::Result<OwnedFd> {
    let license = c"GPL";
    // prog_type and insn_cnt, insns, license; log_level and log_size, log_buf, kern_version and prog_flags.
    let attributes =
        [pair(PROG_TYPE_SCHED_CLS, program.len() as u32), program.as_ptr() as u64, license.as_ptr() as u64, 0, 0, 0];
    bpf(PROG_LOAD, &attributes).map(descriptor)
}

fn attach(program: &OwnedFd, device: u32) -> io::Result<OwnedFd> {
    // prog_fd and target_ifindex, attach_type and flags, then tcx's fields.
    bpf(LINK_CREATE, &[pair(program.as_raw_fd() as u32, device), pair(TCX_EGRESS, 0), 0, 0]).map(descriptor)
}
