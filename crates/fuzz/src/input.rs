//! Derives decisions from bytes.

use arbitrary::Unstructured;

/// Bytes read as a sequence of decisions. It never fails: after the end all bytes are zero, which by convention is the
/// most harmless choice.
#[derive(Debug)]
pub struct Input<'a>(Unstructured<'a>);

impl<'a> Input<'a> {
    /// Decisions from `bytes`.
    pub fn new(bytes: &'a [u8]) -> Self {
        Input(Unstructured::new(bytes))
    }

    /// Whether all bytes are used up.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A byte.
    pub fn u8(&mut self) -> u8 {
        self.0.arbitrary().unwrap_or_default()
    }

    /// Two bytes.
    pub fn u16(&mut self) -> u16 {
        self.0.arbitrary().unwrap_or_default()
    }

    /// Four bytes.
    pub fn u32(&mut self) -> u32 {
        self.0.arbitrary().unwrap_or_default()
    }

    /// Eight bytes.
    pub fn u64(&mut self) -> u64 {
        self.0.arbitrary().unwrap_or_default()
    }

    /// A number below `n`, which is 1 to 256: one byte, so that small changes have small effects.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.u8()) % n
    }

    /// True in `n` of 256 cases.
    pub fn chance(&mut self, n: u8) -> bool {
        // Zero, which follows the end, means false.
        self.u8() > 255 - n
    }

    /// One of several items.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// At most `n` bytes.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let n = n.min(self.0.len());
        self.0.bytes(n).unwrap_or_default()
    }

    /// All remaining bytes.
    pub fn rest(&mut self) -> &'a [u8] {
        self.bytes(usize::MAX)
    }

    /// A number: often close to `near`, otherwise at an edge of a window of 4096, or any.
    pub fn around(&mut self, near: u32) -> u32 {
        match self.below(8) {
            0 | 1 => near,
            2 => near.wrapping_add(u32::from(self.u8())),
            3 => near.wrapping_sub(u32::from(self.u8())),
            4 => near.wrapping_add(4090 + self.below(12) as u32),
            5 => near.wrapping_sub(4090 + self.below(12) as u32),
            6 => near.wrapping_add(1 << 31).wrapping_add(self.below(5) as u32).wrapping_sub(2),
            _ => self.u32(),
        }
    }
}
