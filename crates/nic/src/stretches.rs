//! Which parts of a fragmented packet have passed.

/// Byte ranges of a fragmented packet's payload that have passed. Overlapping fragments do not pass (RFC 5722).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretches {
    /// From and to, ascending, with gaps between them.
    stretches: [(u16, u16); Stretches::MOST],
    count: u8,
    /// The end of the payload, once its last fragment has passed; otherwise 0.
    total: u16,
}

impl Stretches {
    /// Maximum number of ranges with gaps between them.
    pub const MOST: usize = 8;

    /// The range of a first fragment, which ends at `end`.
    pub fn first(end: u16) -> Self {
        let mut stretches = [(0, 0); Self::MOST];
        stretches[0] = (0, end);
        Stretches { stretches, count: 1, total: 0 }
    }

    /// Whether the whole payload has passed.
    pub fn is_complete(&self) -> bool {
        self.count == 1 && self.total != 0 && self.stretches[0] == (0, self.total)
    }

    /// Adds a fragment if it overlaps nothing, is before the end, is the last one if it says so, and does not leave too
    /// many gaps.
    pub fn add(&mut self, start: u16, end: u16, more: bool) -> bool {
        let stretches = &self.stretches[..usize::from(self.count)];
        let at = stretches.partition_point(|&(_, to)| to <= start);
        let next = stretches.get(at).copied();
        let last = stretches.last().map_or(0, |&(_, to)| to);
        let overlaps = next.is_some_and(|(from, _)| from < end);
        let behind = self.total != 0 && (end > self.total || !more);
        if overlaps || behind || (!more && last > start) {
            return false;
        }
        let joins_last = at > 0 && stretches[at - 1].1 == start;
        let joins_next = next.is_some_and(|(from, _)| from == end);
        match (joins_last, joins_next) {
            (true, true) => {
                self.stretches[at - 1].1 = self.stretches[at].1;
                self.stretches[at..usize::from(self.count)].rotate_left(1);
                self.count -= 1;
            }
            (true, false) => self.stretches[at - 1].1 = end,
            (false, true) => self.stretches[at].0 = start,
            (false, false) => {
                if usize::from(self.count) == Self::MOST {
                    return false;
                }
                self.count += 1;
                self.stretches[at..usize::from(self.count)].rotate_right(1);
                self.stretches[at] = (start, end);
            }
        }
        if !more {
            self.total = end;
        }
        true
    }
}
