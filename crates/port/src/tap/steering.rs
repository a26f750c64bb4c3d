//! Steers each packet of a guest to the queue of the worker that owns its vNIC pair. An eBPF program in the kernel
//! chooses the queue, so that one worker sees all packets of a connection.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

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
const MODULO_32: u8 = 0x94;
const EXIT: u8 = 0x95;

/// A program that steers packets to the first queues of a device: queue = [`crate::steer::worker_of_pair`] of source and
/// destination MAC address. Queues are numbered in the order of attachment, one per worker. The device may have more
/// queues, which get nothing.
#[derive(Debug)]
pub struct Steering(OwnedFd);

impl Steering {
    /// Loads the program for this number of queues, at least 1.
    ///
    /// # Errors
    /// The kernel refuses; this needs CAP_BPF.
    pub fn load(queues: u16) -> io::Result<Steering> {
        bpf::load_program(ProgramKind::SocketFilter, &program(queues.max(1)), "bifrost_queue").map(Steering)
    }

    /// Makes the device of this queue use the program, instead of the one before. The device then holds a reference.
    ///
    /// # Errors
    /// The device is gone.
    pub fn attach(&self, queue: BorrowedFd<'_>) -> io::Result<()> {
        sys::set_steering(queue, self.0.as_fd())
    }
}

/// The driver reduces the result modulo the number of queues that exist, which may be more than those in use. A frame
/// that is too short ends it with 0.
fn program(queues: u16) -> [Instruction; 12] {
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
        op(MODULO_32, 0, 0, i32::from(queues)),
        op(EXIT, 0, 0, 0),
    ]
}

fn op(code: u8, to: u8, from: u8, immediate: i32) -> Instruction {
    Instruction { code, registers: to | from << 4, offset: 0, immediate }
}
