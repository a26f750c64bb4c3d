//! Memory of the pipeline: for packets that wait for their turn, and for payloads that wait for their headers.

/// Buffers of equal size, by number.
#[derive(Debug)]
pub(crate) struct Buffers {
    bytes: Box<[u8]>,
    size: usize,
    free: Vec<u32>,
}

impl Buffers {
    pub(crate) fn new(count: u32, size: usize) -> Self {
        Buffers { bytes: vec![0; count as usize * size].into(), size, free: (0..count).rev().collect() }
    }

    /// Takes a free buffer, until it is [given back](Self::give).
    pub(crate) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    pub(crate) fn give(&mut self, number: u32) {
        self.free.push(number);
    }

    pub(crate) fn get(&self, number: u32) -> &[u8] {
        let start = number as usize * self.size;
        self.bytes.get(start..start + self.size).unwrap_or_default()
    }

    pub(crate) fn get_mut(&mut self, number: u32) -> &mut [u8] {
        let start = number as usize * self.size;
        self.bytes.get_mut(start..start + self.size).unwrap_or_default()
    }

    #[cfg(test)]
    pub(crate) fn free(&self) -> usize {
        self.free.len()
    }
}
