//! eBPF without a compiler: an assembler, and the `bpf` system call. The kernel's verifier checks every program.

mod assembler;
mod link;
mod sys;
pub(crate) mod xdp;

pub(crate) use assembler::{Assembler, Jump, Label, Register, Size};
pub(crate) use link::{XdpLink, XdpMode, attach_xdp};
#[cfg(test)]
pub(crate) use sys::test_run;
pub(crate) use sys::{create_socket_map, load_program, remove_socket, set_socket};

/// Program types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramKind {
    /// Runs on packets of a socket, or chooses the queue of a TAP device.
    SocketFilter,
    /// Runs on frames before the kernel allocates an skb.
    Xdp,
}

/// One eBPF instruction (linux/bpf.h).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Instruction {
    pub(crate) code: u8,
    /// Destination register in the low four bits, source register in the high four.
    pub(crate) registers: u8,
    pub(crate) offset: i16,
    pub(crate) immediate: i32,
}
