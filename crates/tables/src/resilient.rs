//! Maps flows to paths so that few flows move when a path fails or recovers.

/// Buckets of a table. A flow's bucket is its hash modulo this.
const BUCKETS: usize = 256;
/// Maximum number of paths.
const MAX_PATHS: u8 = 8;

/// A set of paths: bit i is path i.
pub type PathSet = u8;

/// Behaviour of a bucket that has been idle for at least the gap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AfterGap {
    /// It returns to its home path, if that is good.
    #[default]
    Home,
    /// It picks a good path at random: flowlets, as in LetFlow (NSDI'17).
    Random,
}

/// Why a bucket's packets change path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Move {
    /// The previous path was not good.
    Left,
    /// Its home is good again.
    Returned,
    /// A new flowlet picked another path.
    Drawn,
}

/// The path for a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Its index.
    pub path: u8,
    /// Whether, and why, it differs from the path of the bucket's last packet.
    pub moved: Option<Move>,
}

/// The path of each flow, as in Linux's resilient next-hop groups.
///
/// A flow belongs to one of 256 buckets, and a bucket has a home path: its number modulo the number of paths. A bucket
/// leaves its path at once when the path is no longer good: for its home if that is good, otherwise for the good path
/// with the fewest buckets. In all other cases it moves only after a gap in its packets, so packets are not reordered
/// if the gap is longer than the difference in path delay. While all paths are good and [`AfterGap::Home`] applies,
/// nothing moves. There is no state per flow: a flow that shares a moving bucket moves with it.
///
/// It reads no clock: `now` is the time in ns on any clock. Time that goes back counts as no gap.
#[derive(Clone, Debug)]
pub struct Resilient {
    buckets: Box<[Bucket; BUCKETS]>,
    paths: u8,
    after_gap: AfterGap,
    gap_ns: u64,
    /// Buckets on each path.
    on_path: [u16; MAX_PATHS as usize],
    random: u64,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    /// Time of its last packet.
    used: u64,
    path: u8,
}

impl Resilient {
    /// A table for `paths` paths (1..=8; other values are clamped), with every bucket at home. `seed`: any number, for
    /// [`AfterGap::Random`].
    pub fn new(paths: usize, after_gap: AfterGap, gap_ns: u64, seed: u64) -> Self {
        let paths = paths.clamp(1, usize::from(MAX_PATHS)) as u8;
        let mut on_path = [0; MAX_PATHS as usize];
        let mut buckets = Box::new([Bucket { used: 0, path: 0 }; BUCKETS]);
        for (number, bucket) in buckets.iter_mut().enumerate() {
            bucket.path = home(number, paths);
            on_path[usize::from(bucket.path)] += 1;
        }
        Resilient { buckets, paths, after_gap, gap_ns, on_path, random: seed }
    }

    /// The path for a packet of the flow with this hash, out of those in `good`. If no path is good, the bucket keeps
    /// its path.
    #[inline]
    pub fn choose(&mut self, hash: u32, good: PathSet, now: u64) -> Choice {
        let number = hash as usize % BUCKETS;
        let bucket = &mut self.buckets[number];
        let idle = now.saturating_sub(bucket.used) >= self.gap_ns;
        bucket.used = now;
        let path = bucket.path;
        let at_rest = !idle || self.after_gap == AfterGap::Home && path == home(number, self.paths);
        if contains(good, path) && at_rest {
            return Choice { path, moved: None };
        }
        self.move_bucket(number, good, idle)
    }

    /// The result of [`choose`](Self::choose), without changing anything. `None` if the path would be picked at random.
    pub fn foresee(&self, hash: u32, good: PathSet, now: u64) -> Option<u8> {
        let number = hash as usize % BUCKETS;
        let bucket = &self.buckets[number];
        let idle = now.saturating_sub(bucket.used) >= self.gap_ns;
        let good = self.known(good);
        let draws = self.after_gap == AfterGap::Random && (idle || !contains(good, bucket.path));
        match good.count_ones() {
            0 => Some(bucket.path),
            1 => Some(good.trailing_zeros() as u8),
            _ if draws => None,
            _ => Some(self.settle(number, good, idle)),
        }
    }

    /// Not inlined: called when paths change and when bursts start.
    #[cold]
    fn move_bucket(&mut self, number: usize, good: PathSet, idle: bool) -> Choice {
        let good = self.known(good);
        let before = self.buckets[number].path;
        let path = match self.after_gap {
            _ if good == 0 => before,
            AfterGap::Home => self.settle(number, good, idle),
            AfterGap::Random => self.draw(good),
        };
        self.buckets[number].path = path;
        self.on_path[usize::from(before)] -= 1;
        self.on_path[usize::from(path)] += 1;
        let moved = (path != before).then_some(match self.after_gap {
            _ if !contains(good, before) => Move::Left,
            AfterGap::Home => Move::Returned,
            AfterGap::Random => Move::Drawn,
        });
        Choice { path, moved }
    }

    /// The path of a bucket that does not pick at random; at least one path is good.
    fn settle(&self, number: usize, good: PathSet, idle: bool) -> u8 {
        let (path, home) = (self.buckets[number].path, home(number, self.paths));
        let stays = contains(good, path);
        if contains(good, home) && (idle || !stays) {
            return home;
        }
        if stays {
            return path;
        }
        let candidates = (0..self.paths).filter(|path| contains(good, *path));
        candidates.min_by_key(|path| self.on_path[usize::from(*path)]).unwrap_or(path)
    }

    /// A random good path; there is at least one.
    fn draw(&mut self, good: PathSet) -> u8 {
        // SplitMix64: any state is valid, and it takes a few instructions.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.random ^ (self.random >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let turn = (mixed >> 33) as u32 % good.count_ones();
        let mut rest = good;
        for _ in 0..turn {
            rest &= rest - 1;
        }
        rest.trailing_zeros() as u8
    }

    /// The existing paths.
    fn known(&self, good: PathSet) -> PathSet {
        good & (PathSet::MAX >> (MAX_PATHS - self.paths))
    }
}

fn home(number: usize, paths: u8) -> u8 {
    (number % usize::from(paths)) as u8
}

fn contains(set: PathSet, path: u8) -> bool {
    set >> path & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    const GAP: u64 = 500_000;

    #[test]
    fn only_flows_of_a_lost_path_move_and_they_spread() {
        let mut table = Resilient::new(4, AfterGap::Home, GAP, 0);
        let before: Vec<u8> = (0..256).map(|hash| table.choose(hash, 0b1111, 1).path).collect();
        assert_eq!(before[..5], [0, 1, 2, 3, 0], "every bucket at home");
        let after: Vec<Choice> = (0..256).map(|hash| table.choose(hash, 0b1011, 2)).collect();
        for (hash, (before, after)) in before.iter().zip(&after).enumerate() {
            let moved = (*before == 2).then_some(Move::Left);
            assert_eq!((after.moved, after.path == *before), (moved, moved.is_none()), "{hash}");
        }
        let on = |path| after.iter().filter(|choice| choice.path == path).count();
        assert_eq!([on(0), on(1), on(2), on(3)], [86, 85, 0, 85]);
    }

    #[test]
    fn it_goes_home_after_a_gap_and_not_before() {
        let mut table = Resilient::new(2, AfterGap::Home, GAP, 0);
        let mut now = 10 * GAP;
        assert_eq!(table.choose(1, 0b01, now), Choice { path: 0, moved: Some(Move::Left) });
        for _ in 0..10 {
            now += GAP - 1;
            assert_eq!(table.foresee(1, 0b11, now), Some(0));
            assert_eq!(table.choose(1, 0b11, now), Choice { path: 0, moved: None }, "it has not been idle");
        }
        now += GAP;
        assert_eq!(table.choose(1, 0b01, now), Choice { path: 0, moved: None }, "its home is not good");
        now += GAP;
        assert_eq!(table.foresee(1, 0b11, now), Some(1));
        assert_eq!(table.choose(1, 0b11, now), Choice { path: 1, moved: Some(Move::Returned) });
        assert_eq!(table.choose(1, 0b01, now).moved, Some(Move::Left));
        assert_eq!(
            table.choose(1, 0b10, now),
            Choice { path: 1, moved: Some(Move::Left) },
            "home at once if it must move"
        );
    }

    #[test]
    fn without_a_good_path_nothing_changes() {
        for after_gap in [AfterGap::Home, AfterGap::Random] {
            let mut table = Resilient::new(3, after_gap, GAP, 7);
            let path = table.choose(2, 0b111, GAP).path;
            for good in [0, 0b1111_1000] {
                assert_eq!(table.choose(2, good, 9 * GAP), Choice { path, moved: None }, "{good:b}");
                assert_eq!(table.foresee(2, good, 99 * GAP), Some(path));
            }
        }
    }

    #[test]
    fn bursts_pick_good_paths_uniformly_and_stay_together() {
        let mut table = Resilient::new(5, AfterGap::Random, GAP, 42);
        let (mut now, mut drawn, mut moved) = (0, [0u32; 5], 0);
        for _ in 0..4000 {
            now += GAP;
            let first = table.choose(7, 0b11101, now);
            drawn[usize::from(first.path)] += 1;
            moved += u32::from(first.moved == Some(Move::Drawn));
            for _ in 0..3 {
                now += GAP - 1;
                assert_eq!(table.choose(7, 0b11101, now), Choice { path: first.path, moved: None });
            }
        }
        assert_eq!(drawn[1], 0);
        assert!(drawn.iter().enumerate().all(|(path, n)| path == 1 || (900..1100).contains(n)), "{drawn:?}");
        assert!((2900..3100).contains(&moved), "one draw in four is the same path: {moved}");
    }
}
