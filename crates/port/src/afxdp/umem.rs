//! The frame memory (UMEM) shared with the kernel, and handles for its chunks.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

/// One chunk of a [`Umem`] and the right to access it. Each chunk has exactly one handle, held here or lent to the
/// kernel.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Frame(u32);

impl Frame {
    /// Index of the chunk.
    pub(crate) fn number(&self) -> u32 {
        self.0
    }
}

/// Chunks of equal size, registered with the kernel.
#[derive(Debug)]
pub(crate) struct Umem {
    base: NonNull<u8>,
    chunk_bytes: usize,
    chunks: u32,
}

// SAFETY: plain memory; access is governed by `Frame` handles, of which each chunk has exactly one.
unsafe impl Send for Umem {}
// SAFETY: as above.
unsafe impl Sync for Umem {}

impl Umem {
    /// Maps memory and makes the handles for all chunks.
    pub(crate) fn new(chunk_bytes: usize, chunks: u32) -> io::Result<(Self, Vec<Frame>)> {
        let len = chunk_bytes * chunks as usize;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::POPULATE,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok((Self { base, chunk_bytes, chunks }, (0..chunks).map(Frame).collect()))
    }

    /// Start address, for the kernel.
    pub(crate) fn address(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    /// Total bytes.
    pub(crate) fn len(&self) -> usize {
        self.chunk_bytes * self.chunks as usize
    }

    /// Bytes per chunk.
    pub(crate) fn chunk_bytes(&self) -> usize {
        self.chunk_bytes
    }

    /// The kernel's address of the start of a frame.
    pub(crate) fn offset_of(&self, frame: &Frame) -> u64 {
        u64::from(frame.0) * self.chunk_bytes as u64
    }

    /// The frame at an address that the kernel returned, and the offset in its chunk; `None` if out of range. The
    /// kernel returns each lent frame once.
    pub(crate) fn take_back(&self, offset: u64) -> Option<(Frame, usize)> {
        let number = u32::try_from(offset / self.chunk_bytes as u64).ok().filter(|&n| n < self.chunks)?;
        Some((Frame(number), (offset % self.chunk_bytes as u64) as usize))
    }

    /// Bytes `start..start + len` of a frame; empty if out of range.
    pub(crate) fn bytes(&self, frame: &Frame, start: usize, len: usize) -> &[u8] {
        if frame.0 >= self.chunks || start.checked_add(len).is_none_or(|end| end > self.chunk_bytes) {
            return &[];
        }
        // SAFETY: inside the mapping, as just checked, which lives as long as `self`, and initialised by the kernel.
        // Nothing writes there while `frame` is borrowed: only the holder of the handle may, and the kernel does not
        // have it.
        unsafe {
            let at = self.base.as_ptr().add(frame.0 as usize * self.chunk_bytes + start);
            std::slice::from_raw_parts(at, len)
        }
    }

    /// All bytes of a frame.
    pub(crate) fn bytes_mut<'a>(&'a self, frame: &'a mut Frame) -> &'a mut [u8] {
        if frame.0 >= self.chunks {
            return &mut [];
        }
        // SAFETY: as in `bytes`; and nothing reads, because `frame` is borrowed exclusively.
        unsafe {
            let at = self.base.as_ptr().add(frame.0 as usize * self.chunk_bytes);
            std::slice::from_raw_parts_mut(at, self.chunk_bytes)
        }
    }
}

impl Drop for Umem {
    fn drop(&mut self) {
        // SAFETY: this mapping is ours, and borrows from it borrow `self`. The kernel holds its own references to the
        // pages.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_do_not_overlap_and_are_bounded() {
        let (umem, mut frames) = Umem::new(2048, 3).expect("memory");
        for frame in &mut frames {
            let number = frame.number() as u8 + 1;
            umem.bytes_mut(frame).fill(number);
        }
        for frame in &frames {
            assert_eq!(umem.bytes(frame, 0, 2048), [frame.number() as u8 + 1; 2048]);
            assert_eq!(umem.bytes(frame, 2048, 1), []);
            assert_eq!(umem.bytes(frame, 1, usize::MAX), []);
            assert_eq!(umem.take_back(umem.offset_of(frame) + 300), Some((Frame(frame.number()), 300)));
        }
        assert_eq!(umem.take_back(3 * 2048), None);
        assert_eq!(umem.take_back(u64::MAX), None);
        assert_eq!(umem.bytes(&Frame(3), 0, 1), []);
        assert!(umem.bytes_mut(&mut Frame(3)).is_empty());
    }
}
