//! Heavy hitters: a sketch of constant size (*Space-Saving*, Metwally et al., ICDT 2005).

/// Maximum number of tenants in the sketch.
const TENANTS: usize = 64;
/// Samples after which all counts are halved, so that old samples weigh less.
const HALVED_AT: u32 = 1 << 16;

/// The heaviest tenants, found in samples of their packets.
///
/// A tenant with more than a 64th of the samples is always included. Its count is too high by at most a 64th of all
/// samples.
#[derive(Clone, Debug, Default)]
pub struct HeavyHitters {
    /// Tenant and count; at most [`TENANTS`].
    counts: Vec<(u32, u32)>,
    samples: u32,
}

impl HeavyHitters {
    /// Counts a sample of a tenant.
    pub fn sample(&mut self, tenant: u32) {
        self.samples += 1;
        if self.samples >= HALVED_AT {
            self.samples /= 2;
            self.counts.iter_mut().for_each(|(_, count)| *count /= 2);
        }
        if let Some((_, count)) = self.counts.iter_mut().find(|(known, _)| *known == tenant) {
            *count += 1;
        } else if self.counts.len() < TENANTS {
            self.counts.push((tenant, 1));
        } else if let Some(least) = self.counts.iter_mut().min_by_key(|(_, count)| *count) {
            // The new tenant inherits the count, because it may have been counted before.
            *least = (tenant, least.1 + 1);
        }
    }

    /// The heaviest `n`, with their shares of the recent samples, percent; the heaviest first.
    pub fn top(&self, n: usize) -> Vec<(u32, f64)> {
        let mut all = self.counts.clone();
        all.sort_unstable_by_key(|(tenant, count)| (std::cmp::Reverse(*count), *tenant));
        let percent = |count: u32| 100.0 * f64::from(count) / f64::from(self.samples.max(1));
        all.into_iter().take(n).map(|(tenant, count)| (tenant, percent(count))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heavy_tenants_are_found_among_a_million() {
        let mut sketch = HeavyHitters::default();
        let mut random = 1u64;
        let mut sent = 0;
        for n in 0..200_000u32 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            // A tenth from one tenant, a twentieth from another, and the rest from a million.
            let tenant = match (random >> 33) % 20 {
                0 | 1 => 7,
                2 => 8,
                _ => 1000 + n,
            };
            sent += u32::from(tenant == 7);
            sketch.sample(tenant);
        }
        let top = sketch.top(2);
        let share = 100.0 * f64::from(sent) / 200_000.0;
        assert_eq!((top[0].0, top[1].0), (7, 8));
        assert!((share..share + 100.0 / TENANTS as f64 + 1.0).contains(&(top[0].1 + 0.5)), "{top:?}, {share}");
        assert!(sketch.counts.len() <= TENANTS && sketch.samples < HALVED_AT);
    }

    #[test]
    fn few_tenants_are_counted_exactly() {
        let mut sketch = HeavyHitters::default();
        assert!(sketch.top(5).is_empty());
        [1, 2, 1, 1].iter().for_each(|tenant| sketch.sample(*tenant));
        assert_eq!(sketch.top(5), [(1, 75.0), (2, 25.0)]);
        assert_eq!(sketch.top(1), [(1, 75.0)]);
    }
}
