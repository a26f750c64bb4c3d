//! A packet in a buffer that has room in front of it.

use crate::DropReason;

/// Bytes in front of a packet that let every header fit: from IP to VXLAN over IPv6 takes 84.
pub const HEADROOM: usize = 128;

/// An Ethernet frame in a buffer. Its front moves as headers are removed and added.
#[derive(Debug)]
pub struct Packet<'a> {
    buffer: &'a mut [u8],
    start: usize,
    end: usize,
    /// Bytes of payload behind `end` that are elsewhere.
    absent: usize,
}

impl<'a> Packet<'a> {
    /// The frame at `start..end` of `buffer`; out of range it is empty.
    pub fn new(buffer: &'a mut [u8], start: usize, end: usize) -> Self {
        let (start, end) = if start <= end && end <= buffer.len() { (start, end) } else { (0, 0) };
        Packet { buffer, start, end, absent: 0 }
    }

    /// The same, of a frame whose payload is elsewhere: its IP header says how long it is.
    pub fn header_only(buffer: &'a mut [u8], start: usize, end: usize) -> Self {
        Packet { absent: usize::MAX, ..Self::new(buffer, start, end) }
    }

    /// The bytes that are here.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Where they are in the buffer.
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

    /// Bytes to give the parser as the frame's length.
    pub(crate) fn claimed_len(&self) -> usize {
        if self.absent == usize::MAX { bifrost_nic::MAX_FRAME_LEN } else { self.end - self.start + self.absent }
    }

    /// Now it is known how long the frame is: padding goes, and what is absent has a number. False: the frame would end elsewhere than the payload
    /// that is absent.
    pub(crate) fn settle(&mut self, len: usize) -> bool {
        match self.absent {
            0 => self.end = self.end.min(self.start + len),
            usize::MAX if len > self.end - self.start => self.absent = len - (self.end - self.start),
            _ => return len == self.len(),
        }
        true
    }

    /// Bytes of the whole frame, payload included.
    pub(crate) fn len(&self) -> usize {
        (self.end - self.start).saturating_add(self.absent)
    }

    /// Removes `len` bytes in front; at most all.
    pub(crate) fn pull(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
    }

    /// Adds a header in front.
    pub(crate) fn push<const N: usize>(&mut self, header: &[u8; N]) -> Result<(), DropReason> {
        let start = self.start.checked_sub(N).ok_or(DropReason::NoHeadroom)?;
        self.buffer[start..start + N].copy_from_slice(header);
        self.start = start;
        Ok(())
    }

    /// Replaces the frame by what `write` writes behind the headroom; it returns the length, or 0 without room. The payload, if it was elsewhere, is
    /// not part of it.
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
