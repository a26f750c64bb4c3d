//! Fixed-size buffers in one allocation, named by number.

/// The kernel provides memory in pages of at least this size, bytes.
const PAGE: usize = 4096;

/// A pool that hands out free buffers last in, first out: the buffer used last is still cached, and memory is touched
/// only up to the pool's peak use.
#[derive(Debug)]
pub(crate) struct Pool {
    slab: Vec<u8>,
    buffer_bytes: usize,
    capacity: u32,
    /// Free buffers that were in use before.
    free: Vec<u32>,
    /// Whether each buffer is in use, for buffers ever taken.
    taken: Vec<bool>,
    /// Number of buffers whose memory was touched without being taken.
    touched: u32,
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
            touched: 0,
        }
    }

    /// Takes a buffer; its contents are unspecified.
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

    /// Returns a buffer to the pool. Returns whether it was taken: a second return does nothing.
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

    /// Number of buffers that were ever in use, here or in the process whose number [`touch`](Self::touch) got.
    pub(crate) fn touched(&self) -> u32 {
        self.touched.max(self.taken.len() as u32)
    }

    /// Makes the kernel provide the memory of the first `buffers` buffers, or of all, now. Buffers must not be in use.
    pub(crate) fn touch(&mut self, buffers: u32) {
        let bytes = (buffers as usize).saturating_mul(self.buffer_bytes).min(self.slab.len());
        for page in self.slab[..bytes].chunks_mut(PAGE) {
            page[0] = std::hint::black_box(0);
        }
        self.touched = self.touched.max(buffers.min(self.capacity));
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
    fn buffers_are_distinct_and_reused_last_in_first_out() {
        let mut pool = Pool::new(3, 8);
        let all: Vec<u32> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(all, [0, 1, 2]);
        for &b in &all {
            pool.bytes_mut(b).fill(b as u8 + 1);
        }
        assert_eq!(pool.bytes(1), [2; 8]);
        assert!(pool.put(1) && !pool.put(1) && !pool.put(7), "a double return, or an unknown buffer");
        assert!(pool.put(0));
        assert_eq!((pool.free(), pool.take(), pool.take(), pool.take()), (2, Some(0), Some(1), None));
    }

    /// Resident memory of the mapping that contains these bytes, KiB.
    fn resident_kib(bytes: &[u8]) -> u64 {
        let text = std::fs::read_to_string("/proc/self/smaps").expect("Linux");
        let mut inside = false;
        for line in text.lines() {
            let range = line.split_whitespace().next().and_then(|range| range.split_once('-'));
            let ends =
                range.and_then(|(a, b)| usize::from_str_radix(a, 16).ok().zip(usize::from_str_radix(b, 16).ok()));
            if let Some((begin, end)) = ends {
                inside = (begin..end).contains(&(bytes[bytes.len() / 2..].as_ptr() as usize));
            } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| inside) {
                return kib.trim().trim_end_matches("kB").trim().parse().expect("a number");
            }
        }
        panic!("no mapping contains the bytes")
    }

    #[test]
    fn touched_memory_is_resident_and_counted() {
        let mut pool = Pool::new(2000, 64 << 10);
        assert_eq!((pool.take(), pool.touched()), (Some(0), 1));
        pool.put(0);
        let untouched = resident_kib(&pool.slab);
        pool.touch(1000);
        let touched = resident_kib(&pool.slab);
        assert!(untouched < 32_000 && touched >= 64_000, "{untouched} KiB, then {touched}");
        assert_eq!((pool.touched(), pool.take()), (1000, Some(0)));
        pool.touch(u32::MAX);
        assert_eq!(pool.touched(), 2000);
    }
}
