//! Shared parts of the XDP programs: constants of linux/bpf.h, and writing in front of a frame.

use super::{Assembler, Jump, Label, Register, Size};

/// Result of a program: pass the frame to the kernel.
pub(crate) const PASS: i32 = 2;
/// Helper: the time, ns on the monotonic clock.
pub(crate) const KTIME_GET_NS: i32 = 5;
/// Helper: redirects the frame to a socket of a map.
pub(crate) const REDIRECT_MAP: i32 = 51;
/// Helper: adjusts the metadata area in front of the frame.
const ADJUST_META: i32 = 54;

// Offsets in `struct xdp_md`.
pub(crate) const DATA: i16 = 0;
pub(crate) const DATA_END: i16 = 4;
const DATA_META: i16 = 8;
pub(crate) const RX_QUEUE_INDEX: i16 = 16;

const R0: Register = Register(0);
const R1: Register = Register(1);
const R2: Register = Register(2);
const R3: Register = Register(3);

/// Reserves `bytes` bytes directly in front of the frame; R1 then points at them. Jumps to `otherwise` if the driver
/// has no headroom. Clobbers R0 to R5; pointers into the frame become invalid.
pub(crate) fn make_room(a: &mut Assembler, context: Register, bytes: usize, otherwise: Label) {
    a.copy(R1, context);
    a.set(R2, -(bytes as i32));
    a.call(ADJUST_META);
    a.jump_if(R0, Jump::NotEqual, 0, otherwise);
    a.load(Size::Word, R1, context, DATA_META);
    a.load(Size::Word, R2, context, DATA);
    a.copy(R3, R1);
    a.add(R3, bytes as i32);
    a.jump_if_register(R3, Jump::Greater, R2, otherwise);
}

/// Copies a double word from the stack to R1 + `to`, using R3. In halves, because the kernel aligns metadata to 4 bytes
/// only.
pub(crate) fn copy_double(a: &mut Assembler, stack: Register, slot: i16, to: i16) {
    for half in [0, 4] {
        a.load(Size::Word, R3, stack, slot + half);
        a.store(Size::Word, R1, to + half, R3);
    }
}
