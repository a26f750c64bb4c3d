//! The table of buckets against an oracle that stores only each bucket's path and last packet, and recounts every time.

use bifrost_tables::{AfterGap, Choice, Move, Resilient};
use proptest::prelude::*;

const GAP: u64 = 1000;

/// Buckets as a list of (path, last use).
struct Oracle {
    buckets: Vec<(u8, u64)>,
    paths: u8,
}

impl Oracle {
    fn new(paths: u8) -> Self {
        Oracle { buckets: (0..256u32).map(|number| ((number % u32::from(paths)) as u8, 0)).collect(), paths }
    }

    fn choose(&mut self, hash: u32, good: &[u8], now: u64) -> Choice {
        let number = hash % 256;
        let (before, used) = self.buckets[number as usize];
        let home = (number % u32::from(self.paths)) as u8;
        let idle = now >= used + GAP;
        let fewest = || {
            let count = |path: &u8| (self.buckets.iter().filter(|b| b.0 == *path).count(), *path);
            good.iter().copied().min_by_key(count)
        };
        let path = if good.contains(&before) {
            if idle && good.contains(&home) { home } else { before }
        } else if good.contains(&home) {
            home
        } else {
            fewest().unwrap_or(before)
        };
        self.buckets[number as usize] = (path, now);
        let why = if good.contains(&before) { Move::Returned } else { Move::Left };
        Choice { path, moved: (path != before).then_some(why) }
    }
}

fn set(good: &[u8]) -> u8 {
    good.iter().fold(0, |set, path| set | 1 << path)
}

/// Events: a new set of good paths, or a packet after a pause.
#[derive(Clone, Debug)]
enum Event {
    Good(u8),
    Packet(u32, u64),
}

fn events() -> impl Strategy<Value = Vec<Event>> {
    let pause = prop_oneof![8 => 0u64..20, 1 => GAP - 2..GAP + 2, 1 => Just(3 * GAP)];
    // Few flows, so that packets of a flow come within the gap and after it.
    let hash = prop_oneof![0u32..24, 256u32..264, any::<u32>()];
    let event =
        prop_oneof![1 => any::<u8>().prop_map(Event::Good), 20 => (hash, pause).prop_map(|(h, p)| Event::Packet(h, p))];
    prop::collection::vec(event, 1..400)
}

proptest! {
    #[test]
    fn chooses_like_the_oracle(paths in 1u8..=8, events in events()) {
        let mut table = Resilient::new(usize::from(paths), AfterGap::Home, GAP, 0);
        let mut oracle = Oracle::new(paths);
        let mut good: Vec<u8> = (0..paths).collect();
        let mut now = 0;
        for event in events {
            match event {
                Event::Good(bits) => good = (0..paths).filter(|path| bits >> path & 1 == 1).collect(),
                Event::Packet(hash, pause) => {
                    now += pause;
                    let foreseen = table.foresee(hash, set(&good), now);
                    let choice = table.choose(hash, set(&good), now);
                    prop_assert_eq!(choice, oracle.choose(hash, &good, now), "{} of {:?} at {}", hash, good, now);
                    prop_assert_eq!(foreseen, Some(choice.path));
                }
            }
        }
    }

    #[test]
    fn flowlets_stay_together_and_on_good_paths(paths in 1u8..=8, seed in any::<u64>(), events in events()) {
        let mut table = Resilient::new(usize::from(paths), AfterGap::Random, GAP, seed);
        // The path and time of each bucket's last packet.
        let mut last = std::collections::HashMap::new();
        let mut good: Vec<u8> = (0..paths).collect();
        let mut now = GAP;
        for event in events {
            match event {
                Event::Good(bits) => good = (0..paths).filter(|path| bits >> path & 1 == 1).collect(),
                Event::Packet(hash, pause) => {
                    now += pause;
                    let foreseen = table.foresee(hash, set(&good), now);
                    let Choice { path, moved } = table.choose(hash, set(&good), now);
                    prop_assert!(foreseen.is_none_or(|foreseen| foreseen == path));
                    let home = (hash % 256 % u32::from(paths)) as u8;
                    let (before, used) = last.insert(hash % 256, (path, now)).unwrap_or((home, 0));
                    prop_assert!(good.is_empty() || good.contains(&path));
                    prop_assert_eq!(moved.is_some(), path != before);
                    if good.is_empty() || good.contains(&before) && now < used + GAP {
                        prop_assert_eq!(path, before, "within a burst");
                    }
                    prop_assert_eq!(moved == Some(Move::Left), path != before && !good.contains(&before));
                }
            }
        }
    }
}
