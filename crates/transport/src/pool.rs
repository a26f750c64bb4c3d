//! A pool of pages shared by all connections (NSDI'26, 4.4: resource pooling).

/// Packets that a page describes.
pub const PAGE: u32 = 64;

/// A page that can be handed out again.
pub trait Page: Default {
    /// Back to the state of a new page.
    fn reset(&mut self);
}

/// Pages by number, with a bound. A page once made is reused, never freed.
#[derive(Clone, Debug)]
pub struct Pool<T> {
    pages: Vec<T>,
    free: Vec<u32>,
    limit: u32,
    /// Pages that can still be taken.
    available: u32,
}

impl<T: Page> Pool<T> {
    /// A pool of at most `limit` pages. None is made before it is taken.
    pub fn new(limit: u32) -> Self {
        Pool { pages: Vec::new(), free: Vec::new(), limit, available: limit }
    }

    /// A fresh page, or `None` at the bound.
    pub fn take(&mut self) -> Option<u32> {
        if self.available == 0 {
            return None;
        }
        self.available -= 1;
        if let Some(id) = self.free.pop() {
            return Some(id);
        }
        self.pages.push(T::default());
        Some(self.pages.len() as u32 - 1)
    }

    /// Takes back a page that [`take`](Self::take) has handed out.
    pub fn give(&mut self, id: u32) {
        self.pages[id as usize].reset();
        self.free.push(id);
        self.available += 1;
    }

    /// A page that is in use.
    #[inline]
    pub fn page(&self, id: u32) -> &T {
        &self.pages[id as usize]
    }

    /// A page that is in use.
    #[inline]
    pub fn page_mut(&mut self, id: u32) -> &mut T {
        &mut self.pages[id as usize]
    }

    /// Pages in use.
    pub fn used(&self) -> u32 {
        self.limit - self.available
    }

    /// Pages that can still be taken.
    #[inline]
    pub fn available(&self) -> u32 {
        self.available
    }
}

/// The pages of one window: a run of consecutive PSNs, 64 a page, aligned to multiples of 64.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    /// PSN of the first packet of the front page; a multiple of 64.
    first: u32,
    ids: std::collections::VecDeque<u32>,
}

impl Pages {
    /// The page that holds `psn`, if it exists, and the index inside it.
    #[inline]
    pub fn find(&self, psn: u32) -> Option<(u32, usize)> {
        let offset = psn.wrapping_sub(self.first);
        self.ids.get((offset / PAGE) as usize).map(|&id| (id, (psn % PAGE) as usize))
    }

    /// Like [`find`](Self::find), making pages up to it; `None` when the pool is empty. The caller has checked that
    /// `psn` is inside the window, so that the number of pages is bounded.
    #[inline]
    pub fn find_or_make<T: Page>(&mut self, pool: &mut Pool<T>, psn: u32, base: u32) -> Option<(u32, usize)> {
        self.find(psn).or_else(|| self.make(pool, psn, base))
    }

    #[cold]
    fn make<T: Page>(&mut self, pool: &mut Pool<T>, psn: u32, base: u32) -> Option<(u32, usize)> {
        if self.ids.is_empty() {
            self.first = base - base % PAGE;
        }
        let index = (psn.wrapping_sub(self.first) / PAGE) as usize;
        while self.ids.len() <= index {
            self.ids.push_back(pool.take()?);
        }
        self.find(psn)
    }

    /// Gives back all pages that lie wholly below `base`.
    pub fn release_below<T: Page>(&mut self, pool: &mut Pool<T>, base: u32) {
        while let Some(&front) = self.ids.front() {
            let end = self.first.wrapping_add(PAGE);
            if (base.wrapping_sub(end) as i32) < 0 {
                break;
            }
            pool.give(front);
            self.ids.pop_front();
            self.first = end;
        }
    }

    /// What the pages hold, in order.
    pub fn content<'a, T: Page>(&'a self, pool: &'a Pool<T>) -> impl Iterator<Item = &'a T> {
        self.ids.iter().map(|&id| pool.page(id))
    }

    /// Gives back everything.
    pub fn clear<T: Page>(&mut self, pool: &mut Pool<T>) {
        for id in self.ids.drain(..) {
            pool.give(id);
        }
    }

    /// 32 bits of a per-page 64-bit map, starting at `psn`; bit 31 of the result is `psn`. Missing pages read as 0.
    #[inline(always)]
    pub fn word<T: Page>(&self, pool: &Pool<T>, psn: u32, map: impl Fn(&T) -> u64) -> u32 {
        let read = |at: u32| self.find(at).map_or(0, |(id, _)| map(pool.page(id)));
        let shift = psn % PAGE;
        let low = read(psn) >> shift;
        let bits = if shift > 32 {
            let next = psn.wrapping_add(PAGE - shift);
            low | (read(next) << (PAGE - shift))
        } else {
            low
        };
        (bits as u32).reverse_bits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default, Debug)]
    struct Bits(u64);
    impl Page for Bits {
        fn reset(&mut self) {
            self.0 = 0;
        }
    }

    #[test]
    fn pages_follow_the_window_across_the_wrap() {
        let mut pool = Pool::<Bits>::new(8);
        let mut pages = Pages::default();
        let mut base = u32::MAX - 200;
        for step in 0..400u32 {
            let psn = base.wrapping_add(100);
            let (id, i) = pages.find_or_make(&mut pool, psn, base).expect("eight pages suffice");
            pool.page_mut(id).0 |= 1 << i;
            assert_eq!(pages.find(psn), Some((id, i)), "step {step}");
            base = base.wrapping_add(1);
            pages.release_below(&mut pool, base);
        }
        assert!(pool.used() <= 3);
        pages.clear(&mut pool);
        assert_eq!(pool.used(), 0);
    }

    #[test]
    fn words_start_anywhere() {
        let mut pool = Pool::<Bits>::new(8);
        let mut pages = Pages::default();
        let base = 1000u32;
        for psn in [1000, 1003, 1031, 1032, 1063, 1090, 1100] {
            let (id, i) = pages.find_or_make(&mut pool, psn, base).expect("room");
            pool.page_mut(id).0 |= 1 << i;
        }
        for start in 1000..1080u32 {
            let word = pages.word(&pool, start, |p| p.0);
            for i in 0..32 {
                let expect = [1000, 1003, 1031, 1032, 1063, 1090, 1100].contains(&(start + i));
                assert_eq!(word >> (31 - i) & 1 == 1, expect, "start {start} bit {i}");
            }
        }
    }

    #[test]
    fn the_pool_is_bounded() {
        let mut pool = Pool::<Bits>::new(2);
        let (a, _b) = (pool.take().expect("first"), pool.take().expect("second"));
        assert_eq!(pool.take(), None);
        pool.give(a);
        assert_eq!(pool.available(), 1);
        assert!(pool.take().is_some());
    }
}
