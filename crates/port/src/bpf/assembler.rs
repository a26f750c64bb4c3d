//! An eBPF assembler: instructions by name, jumps to labels.

use std::os::fd::{AsRawFd, BorrowedFd};

use super::Instruction;

/// A register. 0 holds results, 1 to 5 arguments (clobbered by calls), 6 to 9 are callee-saved, 10 is the frame
/// pointer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Register(pub(crate) u8);

/// Width of a load or store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Size {
    Byte = 0x10,
    Half = 0x08,
    Word = 0x00,
    Double = 0x18,
}

/// Jump condition: left operand compared with the right one, both unsigned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Jump {
    Equal = 0x10,
    Greater = 0x20,
    GreaterOrEqual = 0x30,
    NotEqual = 0x50,
    Less = 0xa0,
}

/// A jump target in the program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Label(usize);

/// A program under construction.
#[derive(Debug, Default)]
pub(crate) struct Assembler {
    code: Vec<Instruction>,
    places: Vec<Option<usize>>,
    jumps: Vec<(usize, Label)>,
}

// Instruction classes and modes (linux/bpf_common.h, linux/bpf.h).
const LOAD: u8 = 0x61;
const STORE_IMMEDIATE: u8 = 0x62;
const STORE: u8 = 0x63;
const FROM_REGISTER: u8 = 0x08;
const ALU_32: u8 = 0x04;
const ALU_64: u8 = 0x07;
const JUMP_64: u8 = 0x05;
const JUMP_32: u8 = 0x06;
const ADD: u8 = 0x00;
const MULTIPLY: u8 = 0x20;
const AND: u8 = 0x50;
const SHIFT_RIGHT: u8 = 0x70;
const MODULO: u8 = 0x90;
const XOR: u8 = 0xa0;
const MOVE: u8 = 0xb0;
const TO_BIG_ENDIAN: u8 = 0xdc;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
const LOAD_DOUBLE: u8 = 0x18;
/// Source "register" of a [`LOAD_DOUBLE`] whose value is a map's file descriptor.
const MAP_DESCRIPTOR: u8 = 1;

impl Assembler {
    /// A label that is not placed yet.
    pub(crate) fn label(&mut self) -> Label {
        self.places.push(None);
        Label(self.places.len() - 1)
    }

    /// Places a label here.
    pub(crate) fn place(&mut self, label: Label) {
        self.places[label.0] = Some(self.code.len());
    }

    /// `to` = memory at `from` + `offset`, zero-extended.
    pub(crate) fn load(&mut self, size: Size, to: Register, from: Register, offset: i16) {
        self.push(LOAD | size as u8, to.0 | from.0 << 4, offset, 0);
    }

    /// [`load`](Self::load) of a big-endian number.
    pub(crate) fn load_big_endian(&mut self, size: Size, to: Register, from: Register, offset: i16) {
        self.load(size, to, from, offset);
        match size {
            Size::Byte => {}
            Size::Half => self.push(TO_BIG_ENDIAN, to.0, 0, 16),
            Size::Word => self.push(TO_BIG_ENDIAN, to.0, 0, 32),
            Size::Double => self.push(TO_BIG_ENDIAN, to.0, 0, 64),
        }
    }

    /// Memory at `to` + `offset` = `from`.
    pub(crate) fn store(&mut self, size: Size, to: Register, offset: i16, from: Register) {
        self.push(STORE | size as u8, to.0 | from.0 << 4, offset, 0);
    }

    /// Memory at `to` + `offset` = `value`.
    pub(crate) fn store_constant(&mut self, size: Size, to: Register, offset: i16, value: u32) {
        self.push(STORE_IMMEDIATE | size as u8, to.0, offset, value.cast_signed());
    }

    /// `to` = `from`, 64 bits; also for pointers.
    pub(crate) fn copy(&mut self, to: Register, from: Register) {
        self.push(ALU_64 | MOVE | FROM_REGISTER, to.0 | from.0 << 4, 0, 0);
    }

    /// `to` = `value`, sign-extended.
    pub(crate) fn set(&mut self, to: Register, value: i32) {
        self.push(ALU_64 | MOVE, to.0, 0, value);
    }

    /// `to` += `value`, 64 bits.
    pub(crate) fn add(&mut self, to: Register, value: i32) {
        self.push(ALU_64 | ADD, to.0, 0, value);
    }

    /// `to` += `from`, 64 bits.
    pub(crate) fn add_register(&mut self, to: Register, from: Register) {
        self.push(ALU_64 | ADD | FROM_REGISTER, to.0 | from.0 << 4, 0, 0);
    }

    /// `to` ^= `from`, 32 bits.
    pub(crate) fn xor_register(&mut self, to: Register, from: Register) {
        self.push(ALU_32 | XOR | FROM_REGISTER, to.0 | from.0 << 4, 0, 0);
    }

    /// `to` &= `value`, 32 bits.
    pub(crate) fn and(&mut self, to: Register, value: u32) {
        self.push(ALU_32 | AND, to.0, 0, value.cast_signed());
    }

    /// `to` *= `value`, 32 bits.
    pub(crate) fn multiply(&mut self, to: Register, value: u32) {
        self.push(ALU_32 | MULTIPLY, to.0, 0, value.cast_signed());
    }

    /// `to` >>= `bits`, 32 bits.
    pub(crate) fn shift_right(&mut self, to: Register, bits: u32) {
        self.push(ALU_32 | SHIFT_RIGHT, to.0, 0, bits.cast_signed());
    }

    /// `to` %= `value`, 32 bits; `value` is not 0.
    pub(crate) fn modulo(&mut self, to: Register, value: u32) {
        self.push(ALU_32 | MODULO, to.0, 0, value.cast_signed());
    }

    /// `to` = its low 32 bits, byte-swapped on little-endian machines: converts a value loaded as is to host order.
    pub(crate) fn big_endian_word(&mut self, to: Register) {
        self.push(TO_BIG_ENDIAN, to.0, 0, 32);
    }

    /// Unconditional jump.
    pub(crate) fn jump(&mut self, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.push(JUMP_64, 0, 0, 0);
    }

    /// Jumps by comparing the low 32 bits of `left` with a constant.
    pub(crate) fn jump_if(&mut self, left: Register, when: Jump, right: u32, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.push(JUMP_32 | when as u8, left.0, 0, right.cast_signed());
    }

    /// Jumps by comparing two registers, 64 bits; also for pointers.
    pub(crate) fn jump_if_register(&mut self, left: Register, when: Jump, right: Register, to: Label) {
        self.jumps.push((self.code.len(), to));
        self.push(JUMP_64 | when as u8 | FROM_REGISTER, left.0 | right.0 << 4, 0, 0);
    }

    /// `to` = a map reference.
    pub(crate) fn load_map(&mut self, to: Register, map: BorrowedFd<'_>) {
        self.push(LOAD_DOUBLE, to.0 | MAP_DESCRIPTOR << 4, 0, map.as_raw_fd());
        self.push(0, 0, 0, 0);
    }

    /// Calls a helper of the kernel (linux/bpf.h, `__BPF_FUNC_MAPPER`).
    pub(crate) fn call(&mut self, helper: i32) {
        self.push(CALL, 0, 0, helper);
    }

    /// Exits the program; register 0 is its result.
    pub(crate) fn exit(&mut self) {
        self.push(EXIT, 0, 0, 0);
    }

    /// The program, with its jumps resolved.
    ///
    /// # Panics
    /// A label was never placed, or is too far away: a mistake in the program that its tests find.
    pub(crate) fn finish(mut self) -> Vec<Instruction> {
        for (at, label) in self.jumps {
            let place = self.places[label.0].expect("every label is placed");
            self.code[at].offset = i16::try_from(place as isize - at as isize - 1).expect("a jump of less than 32768");
        }
        self.code
    }

    fn push(&mut self, code: u8, registers: u8, offset: i16, immediate: i32) {
        self.code.push(Instruction { code, registers, offset, immediate });
    }
}
