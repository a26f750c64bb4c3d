//! Many worlds on all CPUs.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Result, ensure};

use crate::{Report, Scenario, World};

/// Runs `work` on every item, on all CPUs; results in the order of the items.
pub(super) fn each<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> Result<R> + Sync) -> Result<Vec<R>> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len().max(1));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(item) = items.get(index) else { break };
                    let result = work(item);
                    done.lock().unwrap_or_else(|e| e.into_inner()).push((index, result));
                }
            });
        }
    });
    let mut done = done.into_inner().unwrap_or_else(|e| e.into_inner());
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}

/// The scenario of a study.
pub(super) fn scenario(name: &str, text: &str) -> Result<Scenario> {
    Ok(Scenario::parse(name, text)?)
}

/// A whole run without violations.
pub(super) fn whole(scenario: &Scenario, seed: u64) -> Result<(World, Report)> {
    let mut world = World::new(scenario, seed)?;
    world.run();
    let report = Report::of(&world);
    ensure!(report.violations == 0, "{report}");
    Ok((world, report))
}

/// The quantile `p` of `values` (nearest rank); 0 if there are none.
pub(super) fn percentile(values: &mut [f64], p: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = ((values.len() as f64 * p).ceil() as usize).clamp(1, values.len().max(1));
    values.get(rank - 1).copied().unwrap_or(0.0)
}

/// The distribution of `values` as a line: value against the share at or below it.
pub(super) fn cumulative(values: &mut [f64]) -> Vec<(f64, f64)> {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    let step = (n / 120).max(1);
    let mut line: Vec<(f64, f64)> =
        (0..n).step_by(step).map(|i| (values[i], (i + 1) as f64 / n as f64 * 100.0)).collect();
    line.extend(values.last().map(|v| (*v, 100.0)));
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_items() {
        let items: Vec<u32> = (0..100).collect();
        assert_eq!(each(&items, |n| Ok(n * 2)).expect("results"), (0..100).map(|n| n * 2).collect::<Vec<u32>>());
        assert!(each(&items, |n| if *n == 7 { anyhow::bail!("7") } else { Ok(()) }).is_err());
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        let mut values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!([0.0, 0.5, 0.99, 1.0].map(|p| percentile(&mut values, p)), [1.0, 50.0, 99.0, 100.0]);
        assert_eq!(percentile(&mut [], 0.5), 0.0);
    }
}
