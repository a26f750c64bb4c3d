use super::*;

/// Fewer and shorter under Miri, which is a thousand times slower.
const SEEDS: u64 = if cfg!(miri) { 2 } else { 60 };
const COUNT: u32 = if cfg!(miri) { 30 } else { 600 };

/// The rule of PROTOCOL.md in its simplest form: after every arrival, publish everything that may be published.
struct Oracle {
    ordering: Ordering,
    base: u32,
    present: std::collections::BTreeMap<u32, u8>,
    published: std::collections::BTreeSet<u32>,
}

impl Oracle {
    fn arrive(&mut self, psn: u32, distance: u8) -> Vec<u32> {
        self.present.insert(psn, distance);
        let mut shown = Vec::new();
        loop {
            let ready: Vec<u32> = self
                .present
                .iter()
                .filter(|(p, d)| !self.published.contains(p) && self.may(**p, **d))
                .map(|(p, _)| *p)
                .collect();
            if ready.is_empty() {
                return shown;
            }
            for psn in ready {
                self.published.insert(psn);
                shown.push(psn);
            }
            while self.published.contains(&self.base) {
                self.base += 1;
            }
        }
    }

    fn may(&self, psn: u32, distance: u8) -> bool {
        let all_below = |limit: u32| self.base >= limit;
        match (self.ordering, distance) {
            (Ordering::Off, _) => true,
            (Ordering::Strict, _) | (_, 0) => all_below(psn),
            (_, 255) => psn < 254 || all_below(psn - 254),
            (_, d) => {
                psn < u32::from(d) || psn - u32::from(d) < self.base || self.published.contains(&(psn - u32::from(d)))
            }
        }
    }
}

fn random(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

/// Compares with the oracle: the same set of packets becomes visible after every arrival.
#[test]
fn publishes_exactly_what_the_rule_allows() {
    for start in [0u32, u32::MAX - COUNT / 2] {
        for ordering in [Ordering::Flow, Ordering::Strict, Ordering::Off] {
            for seed in 1..SEEDS {
                let mut seed = seed * 7919;
                let mut pool = Pool::new(128);
                let mut window = RecvWindow::new(Psn(start));
                let mut oracle =
                    Oracle { ordering, base: 0, present: Default::default(), published: Default::default() };
                let count = COUNT;
                let mut order: Vec<u32> = (0..count).collect();
                let spread = 1 + random(&mut seed) % 300;
                order.sort_by_cached_key(|p| u64::from(*p) + random(&mut seed) % spread);
                let mut stack = Vec::new();
                for psn in order {
                    let distance = match random(&mut seed) % 4 {
                        0 => 0,
                        1 => 255,
                        _ => (random(&mut seed) % 254 + 1) as u8,
                    };
                    let at = Psn(start.wrapping_add(psn));
                    assert_eq!(window.check(&pool, at), Check::New);
                    let mut shown = Vec::new();
                    let placed = Placed { psn: at, distance, handle: Some(psn) };
                    assert!(window.place(&mut pool, ordering, placed, &mut stack, &mut |h| shown.push(h)));
                    let mut expected = oracle.arrive(psn, distance);
                    expected.sort_unstable();
                    let mut sorted = shown.clone();
                    sorted.sort_unstable();
                    assert_eq!(sorted, expected, "after {psn} (distance {distance}), {ordering:?}");
                    assert_eq!(window.base(), Psn(start.wrapping_add(oracle.base)));
                    assert_eq!(window.check(&pool, at), Check::Duplicate);
                    for word in 0..if cfg!(miri) { 1 } else { 8u32 } {
                        let bits = window.bitmap(&pool, window.base());
                        for bit in 0..32 {
                            let p = oracle.base + word * 32 + bit;
                            assert_eq!(
                                bits.bit((word * 32 + bit) as usize),
                                oracle.present.contains_key(&p),
                                "bit of {p}"
                            );
                        }
                    }
                }
                assert_eq!(window.held(), 0);
                assert_eq!(pool.used(), 0, "pages are freed");
            }
        }
    }
}

#[test]
fn a_flow_is_never_shown_out_of_order() {
    for seed in 1..SEEDS {
        let mut seed = seed * 104_729;
        let mut pool = Pool::new(128);
        let mut window = RecvWindow::new(Psn(0));
        let mut last = std::collections::HashMap::new();
        let packets: Vec<(u32, u64, u8)> = (0..3 * COUNT)
            .map(|psn| {
                let flow = random(&mut seed) % 40;
                let distance = last.insert(flow, psn).map_or(0, |before: u32| (psn - before).min(255) as u8);
                (psn, flow, distance)
            })
            .collect();
        let mut order = packets.clone();
        order.sort_by_cached_key(|p| u64::from(p.0) + random(&mut seed) % 500);
        let (mut stack, mut seen) = (Vec::new(), Vec::new());
        for (psn, _, distance) in order {
            let placed = Placed { psn: Psn(psn), distance, handle: Some(psn) };
            assert!(window.place(&mut pool, Ordering::Flow, placed, &mut stack, &mut |h| seen.push(h)));
        }
        assert_eq!(seen.len(), packets.len());
        let mut newest = std::collections::HashMap::new();
        for psn in seen {
            let flow = packets[psn as usize].1;
            assert!(newest.insert(flow, psn).is_none_or(|before| before < psn), "flow {flow} at {psn}");
        }
    }
}

#[test]
fn a_skip_publishes_held_packets_and_moves_base() {
    let mut pool = Pool::new(8);
    let mut window = RecvWindow::new(Psn(10));
    let (mut stack, mut seen) = (Vec::new(), Vec::new());
    for (psn, distance) in [(12u32, 0u8), (14, 2), (15, 1), (20, 6)] {
        let placed = Placed { psn: Psn(psn), distance, handle: Some(psn) };
        assert!(window.place(&mut pool, Ordering::Flow, placed, &mut stack, &mut |h| seen.push(h)));
    }
    assert!(seen.is_empty());
    assert!(window.skip_to(&mut pool, Psn(13), &mut stack, &mut |h| seen.push(h)));
    assert_eq!(
        {
            let mut s = seen.clone();
            s.sort_unstable();
            s
        },
        [12, 14, 15, 20]
    );
    assert_eq!(window.base(), Psn(13));
    assert!(window.skip_to(&mut pool, Psn(16), &mut stack, &mut |h| seen.push(h)));
    assert_eq!(window.base(), Psn(16), "13 was missing, 16 is next");
    assert!(!window.skip_to(&mut pool, Psn(16 + 4097), &mut stack, &mut |_| {}), "beyond the window");
    assert!(window.skip_to(&mut pool, Psn(3), &mut stack, &mut |_| {}), "an old SKIP changes nothing");
    assert_eq!(window.base(), Psn(16));
}

#[test]
fn an_exhausted_pool_refuses_and_loses_nothing() {
    let mut pool = Pool::new(1);
    let mut window = RecvWindow::new(Psn(0));
    let mut stack = Vec::new();
    let mut seen = Vec::new();
    let mut put = |window: &mut RecvWindow, pool: &mut Pool<RecvPage>, psn: u32| {
        let placed = Placed { psn: Psn(psn), distance: 0, handle: Some(psn) };
        window.place(pool, Ordering::Flow, placed, &mut stack, &mut |h| seen.push(h))
    };
    assert!(put(&mut window, &mut pool, 5));
    assert!(!put(&mut window, &mut pool, 70), "needs a second page");
    for psn in 0..5 {
        assert!(put(&mut window, &mut pool, psn));
    }
    assert_eq!(seen, [0, 1, 2, 3, 4, 5]);
    assert_eq!(pool.used(), 0);
}
