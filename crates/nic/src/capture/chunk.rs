//! The bounded buffer that a worker fills with captured packets.

/// One packet at one stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record<T> {
    /// Time, ns since the epoch.
    pub at_ns: u64,
    /// Where the packet was seen, and its metadata.
    pub what: T,
    /// Bytes of the packet.
    pub len: u32,
    start: u32,
    kept: u32,
}

/// Records in order, and the captured bytes of their packets. Both are bounded, and allocated once.
#[derive(Debug)]
pub struct Chunk<T> {
    records: Vec<Record<T>>,
    bytes: Vec<u8>,
    /// Packets that did not fit.
    missed: u64,
}

/// Bytes reserved per record.
const BYTES_PER_RECORD: usize = 128;

/// Without capacity.
impl<T: Copy> Default for Chunk<T> {
    fn default() -> Self {
        Self::new(0)
    }
}

impl<T: Copy> Chunk<T> {
    /// Capacity for `bytes` bytes, and for as many small packets as these hold.
    pub fn new(bytes: usize) -> Self {
        Chunk {
            records: Vec::with_capacity(bytes.div_ceil(BYTES_PER_RECORD)),
            bytes: Vec::with_capacity(bytes),
            missed: 0,
        }
    }

    /// The records, each with its captured bytes.
    pub fn iter(&self) -> impl Iterator<Item = (&Record<T>, &[u8])> {
        self.records.iter().map(|r| (r, &self.bytes[r.start as usize..(r.start + r.kept) as usize]))
    }

    /// Packets that did not fit.
    pub fn missed(&self) -> u64 {
        self.missed
    }

    /// Removes all records; keeps the capacity.
    pub fn clear(&mut self) {
        self.records.clear();
        self.bytes.clear();
        self.missed = 0;
    }

    /// Adds a record of a packet of `len` bytes, of which `pieces` are kept. If it does not fit, it is counted.
    pub fn push(&mut self, at_ns: u64, what: T, len: u32, pieces: [&[u8]; 2]) {
        let kept = pieces[0].len() + pieces[1].len();
        let full = self.records.len() == self.records.capacity() || self.bytes.len() + kept > self.bytes.capacity();
        if full {
            self.missed += 1;
            return;
        }
        let start = self.bytes.len() as u32;
        for piece in pieces {
            self.bytes.extend_from_slice(piece);
        }
        self.records.push(Record { at_ns, what, len, start, kept: kept as u32 });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_that_do_not_fit_are_counted_and_nothing_grows() {
        let mut chunk = Chunk::new(1000);
        let (records, bytes) = (chunk.records.capacity(), chunk.bytes.capacity());
        for i in 0..100u8 {
            chunk.push(u64::from(i), i, 400, [&[i; 100], &[i; 50]]);
        }
        let kept: Vec<u64> = chunk.iter().map(|(r, _)| r.at_ns).collect();
        assert_eq!(kept, (0..kept.len() as u64).collect::<Vec<_>>(), "the first ones, in order");
        assert_eq!(kept.len(), bytes / 150);
        assert_eq!(kept.len() as u64 + chunk.missed(), 100);
        assert!(
            chunk.iter().all(|(r, b)| b.len() == 150 && b.iter().all(|x| u64::from(*x) == r.at_ns) && r.len == 400)
        );
        assert_eq!((chunk.records.capacity(), chunk.bytes.capacity()), (records, bytes));
        chunk.clear();
        assert_eq!((chunk.iter().count(), chunk.missed()), (0, 0));
        chunk.push(7, 0, 0, [&[], &[]]);
        assert_eq!(chunk.iter().count(), 1);
        for _ in 0..1000 {
            chunk.push(8, 0, 0, [&[], &[]]);
        }
        assert_eq!(chunk.iter().count(), records, "records without bytes are bounded, too");
        assert_eq!(chunk.records.capacity(), records);
    }
}
