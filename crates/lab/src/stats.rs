//! Basic statistics.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::report::number;

/// The median; the mean of the middle two for an even count; NaN for an empty slice.
pub fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => sorted[middle],
        _ => (sorted[middle - 1] + sorted[middle]) / 2.0,
    }
}

/// The median over repetitions; `None` if there are none.
pub fn median_of(values: impl Iterator<Item = f64>) -> Option<f64> {
    let values: Vec<f64> = values.collect();
    (!values.is_empty()).then(|| median(&values))
}

/// The spread of a measurement's repetitions.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The minimum.
    pub least: f64,
    /// The maximum.
    pub most: f64,
}

impl Spread {
    /// The spread of `values`; `None` if there are none.
    pub fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let values: Vec<f64> = values.collect();
        let least = values.iter().copied().min_by(f64::total_cmp)?;
        let most = values.iter().copied().max_by(f64::total_cmp)?;
        Some(Self { median: median(&values), least, most })
    }
}

impl fmt::Display for Spread {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&number(self.median))?;
        if self.least < self.most {
            write!(f, " ({}..{})", number(self.least), number(self.most))?;
        }
        Ok(())
    }
}

/// The median; NaN without measurements.
pub fn middle(spread: Option<Spread>) -> f64 {
    spread.map_or(f64::NAN, |spread| spread.median)
}

/// A table's cell; a dash without measurements.
pub fn cell(spread: Option<Spread>) -> String {
    spread.map_or_else(|| "-".to_owned(), |spread| spread.to_string())
}

/// The median over repetitions of the ratio of the value that `over` selects to the value that `under` selects.
/// Values of the same repetition are compared because the machine drifts, and values measured at nearly the same time
/// are most comparable. `None` if no repetition has both.
pub fn paired_ratio<R, K: PartialEq>(
    rows: &[R],
    repetition: impl Fn(&R) -> K,
    (over, under): (impl Fn(&R) -> bool, impl Fn(&R) -> bool),
    field: fn(&R) -> f64,
) -> Option<f64> {
    median_of(rows.iter().filter(|row| over(row)).filter_map(|row| {
        let other = rows.iter().find(|other| repetition(other) == repetition(row) && under(other))?;
        Some(field(row) / field(other))
    }))
}

/// The smallest of `values` that at least `percent` of them do not exceed (nearest rank); NaN if there are none.
pub fn percentile(values: &[f64], percent: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (percent / 100.0 * sorted.len() as f64).ceil().max(1.0) as usize;
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}

/// The distinct values of `key` over `rows`, in order.
pub fn distinct<R, T: Ord>(rows: &[R], key: fn(&R) -> T) -> Vec<T> {
    let set: BTreeSet<T> = rows.iter().map(key).collect();
    set.into_iter().collect()
}

/// Distinct values, sorted.
pub fn distinct_values(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.dedup();
    values
}

/// The arithmetic mean; NaN for an empty slice.
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { f64::NAN } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// The slope of the least-squares line through points (x, y); 0 for fewer than two distinct x.
pub fn slope(points: &[(f64, f64)]) -> f64 {
    let n = points.len() as f64;
    let mean_x = points.iter().map(|p| p.0).sum::<f64>() / n;
    let mean_y = points.iter().map(|p| p.1).sum::<f64>() / n;
    let covariance: f64 = points.iter().map(|p| (p.0 - mean_x) * (p.1 - mean_y)).sum();
    let variance: f64 = points.iter().map(|p| (p.0 - mean_x).powi(2)).sum();
    if variance > 0.0 { covariance / variance } else { 0.0 }
}

/// A field of [`LatencyMs`]: its title, and its accessor.
pub type LatencyField = (&'static str, fn(&LatencyMs) -> f64);

/// Latencies of requests, ms.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct LatencyMs {
    /// Mean.
    pub avg: f64,
    /// Median.
    pub p50: f64,
    /// 90th percentile.
    pub p90: f64,
    /// 99th percentile.
    pub p99: f64,
    /// 99.9th percentile.
    pub p99_9: f64,
    /// Maximum.
    pub max: f64,
}

impl LatencyMs {
    /// The fields, in the order of reports.
    pub const FIELDS: [LatencyField; 6] = [
        ("avg", |l| l.avg),
        ("P50", |l| l.p50),
        ("P90", |l| l.p90),
        ("P99", |l| l.p99),
        ("P99.9", |l| l.p99_9),
        ("max", |l| l.max),
    ];

    /// The median of each field over repetitions; `None` if there are none.
    pub fn median_of(latencies: impl Iterator<Item = LatencyMs>) -> Option<Self> {
        let all: Vec<LatencyMs> = latencies.collect();
        let of = |field: fn(&LatencyMs) -> f64| median_of(all.iter().map(field));
        let [avg, p50, p90, p99, p99_9, max] = Self::FIELDS.map(|(_, field)| of(field));
        Some(Self { avg: avg?, p50: p50?, p90: p90?, p99: p99?, p99_9: p99_9?, max: max? })
    }

    /// The medians over repetitions, as cells of a table with the columns [`LatencyMs::FIELDS`].
    pub fn cells(latencies: impl Iterator<Item = LatencyMs> + Clone) -> [String; 6] {
        Self::FIELDS.map(|(_, field)| cell(Spread::of(latencies.clone().map(|latency| field(&latency)))))
    }
}

impl fmt::Display for LatencyMs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields: Vec<_> = Self::FIELDS.iter().map(|(name, field)| format!("{name} {:.3}", field(self))).collect();
        write!(f, "{} ms", fields.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), 2.5);
        assert!(median(&[]).is_nan());
    }

    #[test]
    fn spreads_show_minimum_and_maximum() {
        assert_eq!(cell(Spread::of([3.0, 1.0, 2.0].into_iter())), "2.000 (1.000..3.000)");
        assert_eq!(cell(Spread::of([2.0].into_iter())), "2.000");
        assert_eq!(cell(Spread::of(std::iter::empty())), "-");
    }

    #[test]
    fn percentiles_are_elements_of_the_sample() {
        let values: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        for (percent, expected) in [(0.0, 1.0), (1.0, 1.0), (1.5, 2.0), (50.0, 50.0), (99.0, 99.0), (100.0, 100.0)] {
            assert_eq!(percentile(&values, percent), expected, "{percent}");
        }
        assert_eq!(percentile(&[7.0, 3.0], 50.0), 3.0);
        assert!(percentile(&[], 50.0).is_nan());
    }

    #[test]
    fn latencies_keep_the_order_of_fields() {
        let of = |n: f64| LatencyMs { avg: n, p50: n + 1.0, p90: n + 2.0, p99: n + 3.0, p99_9: n + 4.0, max: n + 5.0 };
        assert_eq!(LatencyMs::median_of([of(1.0), of(9.0), of(2.0)].into_iter()), Some(of(2.0)));
        assert_eq!(LatencyMs::median_of(std::iter::empty()), None);
        assert_eq!(LatencyMs::cells([of(1.0), of(9.0), of(2.0)].into_iter())[4], "6.000 (5.000..13.00)");
        let text = "avg 1.000, P50 2.000, P90 3.000, P99 4.000, P99.9 5.000, max 6.000 ms";
        assert_eq!(of(1.0).to_string(), text);
    }

    #[test]
    fn ratios_are_of_the_same_repetition() {
        // A machine that gets slower: one mode is twice the other, except in the last repetition.
        let rows = [
            (0, 'a', 10.0),
            (0, 'b', 5.0),
            (1, 'a', 4.0),
            (1, 'b', 2.0),
            (2, 'a', 1.0),
            (3, 'b', 9.0),
            (4, 'a', 6.0),
            (4, 'b', 6.0),
        ];
        let ratio = |a, b| paired_ratio(&rows, |r| r.0, (|r| r.1 == a, |r| r.1 == b), |r: &(u32, char, f64)| r.2);
        assert_eq!(ratio('a', 'b'), Some(2.0));
        assert_eq!(ratio('b', 'a'), Some(0.5));
        assert_eq!(ratio('a', 'c'), None);
    }

    #[test]
    fn slopes() {
        assert_eq!(slope(&[(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)]), 2.0);
        assert_eq!(slope(&[(1.0, 3.0)]), 0.0);
        assert_eq!(slope(&[]), 0.0);
    }
}
