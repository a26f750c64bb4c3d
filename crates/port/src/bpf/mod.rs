//! eBPF without a compiler: programs put together instruction by instruction, and the `bpf` system call. The kernel's verifier
//! is the judge of every program.

mod assembler;
mod sys;
pub(crate) mod xdp;

pub(crate) use assembler::{Assembler, Jump, Label, Register, Size};
#[cfg(test)]
pub(crate) use sys::test_run;
pub(crate) use sys::{XdpLink, XdpMode, attach_xdp, create_socket_map, load_program, set_socket};

/// What a program is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ProgramKind {
    /// Sees packets of a socket, or of a TAP device that asks for a queue.
    SocketFilter,
    /// Sees frames before the kernel makes packets of them.
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
