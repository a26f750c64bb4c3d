//! A packet in a buffer with headroom.

use crate::DropReason;

/// Headroom that every combination of headers fits: from IP to VXLAN over IPv6 takes 84 bytes.
pub const HEADROOM: usize = 128;

/// An Ethernet frame in a buffer. Its start moves as headers are removed and added.
#[derive(Debug)]
pub struct Packet<'a> {
    buffer: &'a mut [u8],
    start: usize,
    end: usize,
    /// Bytes of payload behind `end` that are stored elsewhere.
    absent: usize,
}

impl<'a> Packet<'a> {
    /// The frame at `start..end` of `buffer`; empty if out of range.
    pub fn new(buffer: &'a mut [u8], start: usize, end: usize) -> Self {
        let (start, end) = if start <= end && end <= buffer.len() { (start, end) } else { (0, 0) };
        Packet { buffer, start, end, absent: 0 }
    }

    /// Like [`new`](Self::new), for a frame whose payload is elsewhere. Its IP header gives the length.
    pub fn header_only(buffer: &'a mut [u8], start: usize, end: usize) -> Self {
        Packet { absent: usize::MAX, ..Self::new(buffer, start, end) }
    }

    /// The bytes in the buffer.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Their position in the buffer.
    pub fn range(&self) -> std::ops::Range<usize> {
        self.start..self.end
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.buffer[self.start..self.end]
    }

    /// Whether the payload is elsewhere.
    pub fn is_header_only(&self) -> bool {
        self.absent > 0
    }

    /// The frame length to pass to the parser.
    pub(crate) fn claimed_len(&self) -> usize {
        if self.absent == usize::MAX { bifrost_nic::MAX_FRAME_LEN } else { self.end - self.start + self.absent }
    }

    /// Sets the frame's end once its length is known: removes padding, and computes the length of the absent payload.
    /// False if the frame would not end with the absent payload.
    pub(crate) fn settle(&mut self, len: usize) -> bool {
        match self.absent {
            0 => self.end = self.end.min(self.start + len),
            usize::MAX if len > self.end - self.start => self.absent = len - (self.end - self.start),
            _ => return len == self.len(),
        }
        true
    }

    /// Length of the whole frame, payload included, bytes.
    pub(crate) fn len(&self) -> usize {
        (self.end - self.start).saturating_add(self.absent)
    }

    /// Removes `len` bytes at the front; at most all.
    pub(crate) fn pull(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
    }

    /// Adds a header at the front.
    pub(crate) fn push<const N: usize>(&mut self, header: &[u8; N]) -> Result<(), DropReason> {
        let start = self.start.checked_sub(N).ok_or(DropReason::NoHeadroom)?;
        self.buffer[start..start + N].copy_from_slice(header);
        self.start = start;
        Ok(())
    }

    /// Replaces the frame by the output of `write`, placed after the headroom. `write` returns the length, or 0 if it
    /// does not fit. A payload that was elsewhere is discarded.
    pub(crate) fn replace(&mut self, write: impl FnOnce(&mut [u8]) -> usize) -> Result<(), DropReason> {
        let room = self.buffer.get_mut(HEADROOM..).unwrap_or_default();
        let len = write(room).min(room.len());
        if len == 0 {
            return Err(DropReason::NoHeadroom);
        }
        (self.start, self.end, self.absent) = (HEADROOM, HEADROOM + len, 0);
        Ok(())
    }
}
