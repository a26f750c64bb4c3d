//! Selects a backend for a key so that few keys move when backends come and go: Maglev hashing (Eisenbud et al.,
//! "Maglev: A Fast and Reliable Software Network Load Balancer", NSDI 2016, section 3.4), with weights.
//!
//! Each backend has its own permutation of the table's slots, which depends only on its name. In turns, as often as its
//! weight says, each backend takes the next free slot of its permutation. So the table depends only on the set of
//! backends, and is the same on all hosts.

/// Slots of a table; a prime, so that each permutation contains all of them.
const SLOTS: usize = 16_381;

/// A table of backends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Maglev {
    /// The backend of each slot; empty without backends.
    slots: Box<[u16]>,
}

impl Maglev {
    /// Maximum number of backends: each still has 64 slots.
    pub const MAX_BACKENDS: usize = 256;

    /// A table of backends, each with a name and a weight. Backends with weight 0 get no keys. Of the others, those
    /// after the first [`MAX_BACKENDS`](Self::MAX_BACKENDS) are left out. Names identify backends, so they must differ;
    /// their bits need not be uniform.
    pub fn new(backends: &[(u64, u16)]) -> Self {
        let mut order: Vec<usize> = (0..backends.len().min(usize::from(u16::MAX))).collect();
        order.retain(|&at| backends[at].1 > 0);
        order.sort_by_key(|&at| backends[at].0);
        order.truncate(Self::MAX_BACKENDS);
        let heaviest = order.iter().map(|&at| u32::from(backends[at].1)).max().unwrap_or(0);
        if heaviest == 0 {
            return Maglev { slots: Box::new([]) };
        }
        const FREE: u16 = u16::MAX;
        let mut slots = vec![FREE; SLOTS].into_boxed_slice();
        let mut wanted: Vec<Wanted> = order.iter().map(|&at| Wanted::of(backends[at].0)).collect();
        let mut left = SLOTS;
        while left > 0 {
            for (wanted, &at) in wanted.iter_mut().zip(&order) {
                wanted.credit += u32::from(backends[at].1);
                if wanted.credit < heaviest || left == 0 {
                    continue;
                }
                wanted.credit -= heaviest;
                while slots[wanted.next] != FREE {
                    wanted.advance();
                }
                slots[wanted.next] = at as u16;
                left -= 1;
            }
        }
        Maglev { slots }
    }

    /// Index of a key's backend in the list that the table was made from; `None` without backends. `hash` is the key's
    /// hash; all of its bits must be uniform.
    #[inline]
    pub fn pick(&self, hash: u64) -> Option<usize> {
        let slot = (u128::from(hash) * self.slots.len() as u128) >> 64;
        self.slots.get(slot as usize).map(|&backend| usize::from(backend))
    }
}

/// A backend's permutation of the slots.
struct Wanted {
    next: usize,
    step: usize,
    /// Sum of its weight over the turns so far, minus the cost of the slots that it took.
    credit: u32,
}

impl Wanted {
    fn of(name: u64) -> Self {
        let next = mix(name) % SLOTS as u64;
        let step = mix(name ^ 0x6d61_676c_6576_0001) % (SLOTS as u64 - 1) + 1;
        Wanted { next: next as usize, step: step as usize, credit: 0 }
    }

    fn advance(&mut self) {
        self.next = (self.next + self.step) % SLOTS;
    }
}

/// Mixes the bits of a number (the finalizer of SplitMix64; Steele et al., OOPSLA 2014). The same on all hosts and in
/// all versions.
pub const fn mix(number: u64) -> u64 {
    let n = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(table: &Maglev, backends: usize) -> Vec<usize> {
        let mut counts = vec![0; backends];
        table.slots.iter().for_each(|&backend| counts[usize::from(backend)] += 1);
        counts
    }

    #[test]
    fn slots_are_shared_by_weight() {
        let cases: [&[u16]; 6] = [&[1], &[1, 1, 1], &[7, 0, 7], &[1, 2, 4, 8], &[100, 1], &[1; 256]];
        for weights in cases {
            let backends: Vec<_> = weights.iter().enumerate().map(|(n, w)| (n as u64 * 7919, *w)).collect();
            let total: usize = weights.iter().map(|w| usize::from(*w)).sum();
            let counts = counts(&Maglev::new(&backends), backends.len());
            for (&count, &weight) in counts.iter().zip(weights) {
                let fair = SLOTS * usize::from(weight) / total;
                assert!(count.abs_diff(fair) <= 2, "{weights:?}: {count} of {fair}");
            }
        }
    }

    #[test]
    fn an_empty_table_selects_no_backend() {
        for backends in [&[][..], &[(1, 0), (2, 0)]] {
            assert_eq!(Maglev::new(backends).pick(u64::MAX), None);
        }
        assert_eq!(Maglev::new(&[(1, 0), (2, 3)]).pick(u64::MAX), Some(1));
    }

    #[test]
    fn the_order_of_the_list_does_not_matter() {
        let backends = [(5, 1), (3, 2), (9, 1), (1, 0)];
        let mut other = backends;
        other.reverse();
        let (a, b) = (Maglev::new(&backends), Maglev::new(&other));
        for n in 0..1000 {
            let hash = mix(n);
            assert_eq!(a.pick(hash).map(|at| backends[at]), b.pick(hash).map(|at| other[at]));
        }
    }

    /// Keys of a removed backend must move; of the others few do (the paper's figure 12: a few per cent).
    #[test]
    fn few_keys_move_between_backends_that_stay() {
        for count in [2usize, 3, 10, 50] {
            let backends: Vec<(u64, u16)> = (0..count as u64).map(|n| (n * 31 + 7, 1)).collect();
            let all = Maglev::new(&backends);
            for gone in [0, count / 2, count - 1] {
                let mut fewer = backends.clone();
                fewer[gone].1 = 0;
                let fewer = Maglev::new(&fewer);
                let stayed = all.slots.iter().zip(&fewer.slots).filter(|(before, _)| usize::from(**before) != gone);
                let moved = stayed.filter(|(before, after)| before != after).count();
                assert!(moved <= SLOTS * 6 / 100, "{count} backends: {moved} of {SLOTS} slots moved");
            }
        }
    }
}
