//! The XDP program: it redirects every frame to the socket of its queue, or passes it to the kernel if there is none.
//! In front of the frame it writes the arrival time.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use crate::bpf::{self, Assembler, Instruction, ProgramKind, Register, Size, XdpMode, xdp};

/// Length of what the program writes directly in front of a frame, bytes: [`STAMP_MAGIC`], and in two words the arrival
/// time (monotonic clock, ns), in native byte order.
pub(super) const STAMP_BYTES: usize = 12;
/// Distinguishes the program's words from stale contents of a chunk.
pub(super) const STAMP_MAGIC: u32 = 0xb1f2_a771;

/// Stack offset of the time.
const TIME_SLOT: i16 = -8;

/// A program that stays attached while this lives, and its map of sockets by queue.
#[derive(Debug)]
pub(super) struct Redirect {
    pub(super) sockets: OwnedFd,
    _link: bpf::XdpLink,
    pub(super) native: bool,
}

impl Redirect {
    /// Attaches the program in the first of `modes` that the device supports.
    pub(super) fn attach(device: u32, queues: u32, modes: &[XdpMode]) -> io::Result<Self> {
        let sockets = bpf::create_socket_map(queues)?;
        let program = bpf::load_program(ProgramKind::Xdp, &assemble(&sockets), "bifrost_raw")?;
        let (link, mode) = bpf::attach_xdp(program.as_fd(), device, modes)?;
        Ok(Redirect { sockets, _link: link, native: mode == XdpMode::Native })
    }
}

fn assemble(sockets: &OwnedFd) -> Vec<Instruction> {
    let [result, first, second, third] = [0, 1, 2, 3].map(Register);
    let (context, stack) = (Register(6), Register(10));
    let mut a = Assembler::default();
    let redirect = a.label();
    a.copy(context, first);
    a.call(xdp::KTIME_GET_NS);
    a.store(Size::Double, stack, TIME_SLOT, result);
    // Without headroom in front of the frame there is no timestamp.
    xdp::make_room(&mut a, context, STAMP_BYTES, redirect);
    a.store_constant(Size::Word, first, 0, STAMP_MAGIC);
    xdp::copy_double(&mut a, stack, TIME_SLOT, 4);
    a.place(redirect);
    a.load(Size::Word, second, context, xdp::RX_QUEUE_INDEX);
    a.load_map(first, sockets.as_fd());
    a.set(third, xdp::PASS);
    a.call(xdp::REDIRECT_MAP);
    a.exit();
    a.finish()
}

/// The arrival time from the bytes in front of a frame, ns on the monotonic clock; `None` if the program did not write
/// them.
pub(super) fn stamp(bytes: &[u8]) -> Option<u64> {
    let (magic, time) = bytes.split_first_chunk()?;
    (u32::from_ne_bytes(*magic) == STAMP_MAGIC).then_some(u64::from_ne_bytes(*time.first_chunk()?))
}
