//! Steers each packet of a guest to the queue of the worker that owns its vNIC pair. An eBPF program in the kernel
//! chooses the queue, so that one worker sees all packets of a connection.

use std::io;
use std::os::fd::BorrowedFd;

use super::sys;
use crate::bpf::{self, Instruction, ProgramKind};
use crate::steer::{FOLD_MULTIPLIER, FOLD_SHIFT};

// Instruction codes.
const LOAD_PACKET_WORD: u8 = 0x20;
const MOVE_64: u8 = 0xbf;
const MOVE_32: u8 = 0xbc;
const XOR_32: u8 = 0xac;
const MULTIPLY_32: u8 = 0x24;
const SHIFT_RIGHT_32: u8 = 0x74;
const EXIT: u8 = 0x95;

/// Steers a multi-queue device: queue = [`crate::steer::worker_of_pair`] of source and destination MAC address; queues
/// are numbered in the order of attachment, one per worker.
pub(crate) fn attach(queue: BorrowedFd<'_>) -> io::Result<()> {
    let program = bpf::load_program(ProgramKind::SocketFilter, &program(), "bifrost_queue")?;
    // From here on the device holds a reference.
    sys::set_steering(queue, std::os::fd::AsFd::as_fd(&program))
}

/// The program returns the hash; the driver reduces it modulo the number of queues. A frame that is too short ends it
/// with 0.
fn program() -> [Instruction; 11] {
    let packet = |offset| op(LOAD_PACKET_WORD, 0, 0, offset);
    [
        // Packet loads take the context in register 6, return the value in 0 and preserve 6 to 9.
        op(MOVE_64, 6, 1, 0),
        packet(2), // low 32 bits of the destination MAC
        op(MOVE_64, 7, 0, 0),
        packet(8), // low 32 bits of the source MAC
        op(XOR_32, 0, 7, 0),
        // Fold the hash.
        op(MOVE_32, 7, 0, 0),
        op(SHIFT_RIGHT_32, 7, 0, FOLD_SHIFT as i32),
        op(XOR_32, 0, 7, 0),
        op(MULTIPLY_32, 0, 0, FOLD_MULTIPLIER as i32),
        op(SHIFT_RIGHT_32, 0, 0, FOLD_SHIFT as i32),
        op(EXIT, 0, 0, 0),
    ]
}

fn op(code: u8, to: u8, from: u8, immediate: i32) -> Instruction {
    Instruction { code, registers: to | from << 4, offset: 0, immediate }
}
