//! The XDP program: every frame goes to the socket of its queue, or to the kernel if there is none.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use crate::bpf::{self, Assembler, Instruction, ProgramKind, Register, Size, XdpMode};

// linux/bpf.h.
const XDP_PASS: i32 = 2;
const REDIRECT_MAP: i32 = 51;
/// Offset in `struct xdp_md`.
const RX_QUEUE_INDEX: i16 = 16;

/// A program that is attached as long as this lives, and its map of sockets by queue.
#[derive(Debug)]
pub(super) struct Redirect {
    pub(super) sockets: OwnedFd,
    _link: bpf::XdpLink,
    pub(super) native: bool,
}

impl Redirect {
    /// Attaches the program in the first of `modes` that the device can do.
    pub(super) fn attach(device: u32, queues: u32, modes: &[XdpMode]) -> io::Result<Self> {
        let sockets = bpf::create_socket_map(queues)?;
        let program = bpf::load_program(ProgramKind::Xdp, &assemble(&sockets), "bifrost_raw")?;
        let mut result = Err(io::Error::from(io::ErrorKind::InvalidInput));
        for &mode in modes {
            result = bpf::attach_xdp(program.as_fd(), device, mode).map(|link| (link, mode));
            if result.is_ok() {
                break;
            }
        }
        let (link, mode) = result?;
        Ok(Redirect { sockets, _link: link, native: mode == XdpMode::Native })
    }
}

fn assemble(sockets: &OwnedFd) -> Vec<Instruction> {
    let [context, map, key, otherwise] = [1, 1, 2, 3].map(Register);
    let mut a = Assembler::default();
    a.load(Size::Word, key, context, RX_QUEUE_INDEX);
    a.load_map(map, sockets.as_fd());
    a.set(otherwise, XDP_PASS);
    a.call(REDIRECT_MAP);
    a.exit();
    a.finish()
}
