//! Fixed-size buffers in one allocation, named by number.

/// A pool whose free buffers are handed out last in, first out: the buffer used last is the one still in cache, and
/// memory is touched only as far as the pool has ever been used.
#[derive(Debug)]
pub(crate) struct Pool {
    slab: Vec<u8>,
    buffer_bytes: usize,
    capacity: u32,
    /// Those that were taken and given back.
    free: Vec<u32>,
    /// By buffer, of those that were ever taken.
    taken: Vec<bool>,
}

impl Pool {
    pub(crate) fn new(buffers: u32, buffer_bytes: usize) -> Self {
        Self {
            // Zeroed memory comes from the kernel untouched.
            slab: vec![0; buffers as usize * buffer_bytes],
            buffer_bytes,
            capacity: buffers,
            free: Vec::new(),
            taken: Vec::new(),
        }
    }

    /// Takes a buffer; its contents are whatever was there before.
    pub(crate) fn take(&mut self) -> Option<u32> {
        if let Some(buffer) = self.free.pop() {
            self.taken[buffer as usize] = true;
            return Some(buffer);
        }
        let fresh = self.taken.len() as u32;
        (fresh < self.capacity).then(|| {
            self.taken.push(true);
            fresh
        })
    }

    /// Gives a buffer back. Whether it had been taken: giving back twice does nothing.
    pub(crate) fn put(&mut self, buffer: u32) -> bool {
        let was_taken = self.is_taken(buffer);
        if was_taken {
            self.taken[buffer as usize] = false;
            self.free.push(buffer);
        }
        was_taken
    }

    pub(crate) fn is_taken(&self, buffer: u32) -> bool {
        self.taken.get(buffer as usize).copied().unwrap_or(false)
    }

    pub(crate) fn bytes(&self, buffer: u32) -> &[u8] {
        &self.slab[buffer as usize * self.buffer_bytes..][..self.buffer_bytes]
    }

    pub(crate) fn bytes_mut(&mut self, buffer: u32) -> &mut [u8] {
        &mut self.slab[buffer as usize * self.buffer_bytes..][..self.buffer_bytes]
    }

    pub(crate) fn capacity(&self) -> u32 {
        self.capacity
    }

    pub(crate) fn free(&self) -> u32 {
        self.capacity - self.taken.len() as u32 + self.free.len() as u32
    }

    pub(crate) fn buffer_bytes(&self) -> usize {
        self.buffer_bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_distinct_and_come_back_warm() {
        let mut pool = Pool::new(3, 8);
        let all: Vec<u32> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(all, [0, 1, 2]);
        for &b in &all {
            pool.bytes_mut(b).fill(b as u8 + 1);
        }
        assert_eq!(pool.bytes(1), [2; 8]);
        assert!(pool.put(1) && !pool.put(1) && !pool.put(7), "giving back twice, or what is not ours");
        assert!(pool.put(0));
        assert_eq!((pool.free(), pool.take(), pool.take(), pool.take()), (2, Some(0), Some(1), None));
    }
}
