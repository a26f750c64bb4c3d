//! The bars that an experiment's results have to clear.

use std::collections::BTreeSet;
use std::fmt;

use anyhow::Result;
use serde_json::Value;

use crate::experiment::Experiment;
use crate::stats::Spread;

/// Which side of the bound is good.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sense {
    /// The measured value must not exceed the bound.
    AtMost,
    /// The measured value must reach the bound.
    AtLeast,
    /// The measured value must be smaller than the bound.
    Below,
}

/// One requirement and what was measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Bar {
    /// What is required, in words.
    pub name: String,
    /// What was measured; `None` if the results do not tell, which counts as a failure.
    pub measured: Option<f64>,
    /// The side of the bound that passes.
    pub sense: Sense,
    /// The bound.
    pub bound: f64,
    /// The unit of both.
    pub unit: &'static str,
    /// Whether the bound is about correctness, which no busy machine excuses.
    pub exact: bool,
}

impl Bar {
    /// A bar whose measured value may be unknown or not a number.
    pub fn new(name: impl Into<String>, measured: Option<f64>, sense: Sense, bound: f64, unit: &'static str) -> Self {
        Self { name: name.into(), measured: measured.filter(|m| m.is_finite()), sense, bound, unit, exact: false }
    }

    /// The bar, about correctness: [`Bar::passes_within`] then knows no slack.
    pub fn exact(self) -> Self {
        Self { exact: true, ..self }
    }

    /// Whether the bar is cleared.
    pub fn passes(&self) -> bool {
        self.passes_within(1.0)
    }

    /// Whether the bar is cleared once the bound is `slack` (1 or more) times as lenient.
    pub fn passes_within(&self, slack: f64) -> bool {
        let slack = if self.exact { 1.0 } else { slack };
        self.measured.is_some_and(|measured| match self.sense {
            Sense::AtMost => measured <= self.bound * slack,
            Sense::AtLeast => measured >= self.bound / slack,
            Sense::Below => measured < self.bound * slack,
        })
    }
}

/// What each of the experiment's bars comes to in single repetitions, in the order of [`Experiment::bars`]; `None` for a bar that no
/// single repetition tells.
///
/// # Errors
/// Rows that are not the experiment's.
pub fn spreads(experiment: &dyn Experiment, rows: &[Value]) -> Result<Vec<Option<Spread>>> {
    let of = |row: &Value| row.get("repetition").and_then(Value::as_u64);
    let repetitions: BTreeSet<u64> = rows.iter().filter_map(of).collect();
    let mut measured = vec![Vec::new(); experiment.bars(rows)?.len()];
    for repetition in repetitions {
        let only: Vec<Value> = rows.iter().filter(|row| of(row) == Some(repetition)).cloned().collect();
        let bars = experiment.bars(&only)?;
        measured.iter_mut().zip(bars).for_each(|(values, bar)| values.extend(bar.measured));
    }
    Ok(measured.into_iter().map(|values| Spread::of(values.into_iter())).collect())
}

impl fmt::Display for Bar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sense = match self.sense {
            Sense::AtMost => "at most",
            Sense::AtLeast => "at least",
            Sense::Below => "below",
        };
        let measured = self.measured.map_or("not measured".to_owned(), |m| format!("{m:.3} {}", self.unit));
        write!(f, "{}: {measured} ({sense} {} {})", self.name, self.bound, self.unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::flow_records::{FlowRecords, Judged, Row};
    use crate::results::to_values;

    #[test]
    fn single_repetitions_have_a_spread() {
        let row = |mode, repetition, packets_per_s| Row {
            mode,
            flows: 1,
            repetition,
            duration_s: 4.0,
            packets_per_s,
            cycles_per_packet: 700.0,
            lost_packets: 0,
        };
        let of = |repetition, rate| [row(Judged::Each, repetition, 1e6), row(Judged::Remembered, repetition, rate)];
        let rows = to_values(&[of(0, 1.5e6), of(1, 3e6), of(2, 2e6)].concat()).unwrap();
        let ratio = FlowRecords.bars(&rows).unwrap().iter().position(|bar| bar.measured == Some(2.0)).unwrap();
        let spreads = spreads(&FlowRecords, &rows).unwrap();
        assert_eq!(spreads[ratio], Some(Spread { median: 2.0, least: 1.5, most: 3.0 }));
        assert!(spreads.contains(&None), "more flows were not measured");
    }

    #[test]
    fn bounds_have_a_side() {
        let table = [
            (Sense::AtMost, Some(1.0), true),
            (Sense::AtMost, Some(1.1), false),
            (Sense::AtLeast, Some(1.0), true),
            (Sense::AtLeast, Some(0.9), false),
            (Sense::Below, Some(1.0), false),
            (Sense::Below, Some(0.9), true),
            (Sense::Below, None, false),
            (Sense::AtLeast, Some(f64::INFINITY), false),
            (Sense::AtMost, Some(f64::NAN), false),
        ];
        for (sense, measured, expected) in table {
            let bar = Bar::new("x", measured, sense, 1.0, "ms");
            assert_eq!(bar.passes(), expected, "{bar}");
        }
        assert!(Bar::new("x", Some(1.4), Sense::AtMost, 1.0, "ms").passes_within(1.5));
        assert!(!Bar::new("x", Some(1.4), Sense::AtMost, 1.0, "ms").exact().passes_within(1.5));
        assert!(!Bar::new("x", Some(0.6), Sense::AtLeast, 1.0, "ms").passes_within(1.5));
    }
}
