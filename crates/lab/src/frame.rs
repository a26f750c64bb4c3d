//! The trait that every experiment implements.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::Value;

use crate::bars::Bar;
use crate::daemon::Binaries;
use crate::lab::Lab;
use crate::options::{Guests, Mode};
use crate::stats::Spread;

/// An experiment: it measures rows, presents them, and judges them.
pub trait Experiment {
    /// The name on the command line and in `results.json`.
    fn name(&self) -> &'static str;

    /// One line for `bifrost-lab list`.
    fn summary(&self) -> &'static str;

    /// The networks that it can compare.
    fn modes(&self) -> Vec<Mode> {
        Mode::USUAL.to_vec()
    }

    /// The networks that are compared by default; a quick run may compare fewer.
    fn default_modes(&self, _quick: bool) -> Vec<Mode> {
        self.modes()
    }

    /// The kinds of guests it supports, the default first.
    fn guests(&self) -> Vec<Guests> {
        vec![Guests::Container]
    }

    /// Whether the processors are kept from halting while it runs: where it judges single latencies, which a hypervisor
    /// would decide otherwise ([`crate::awake`]).
    fn keeps_awake(&self) -> bool {
        false
    }

    /// Programs that it runs, beyond those of the switch and the gateway: `run all` measures again what is older than one
    /// of them.
    fn programs(&self, _binaries: &Binaries) -> Vec<PathBuf> {
        Vec::new()
    }

    /// Measures. When this returns, with success or an error, everything that it started has ended.
    fn run(&self, lab: &Lab) -> Result<Vec<Value>>;

    /// The body of `report.md`.
    fn report(&self, rows: &[Value]) -> Result<String>;

    /// Draws plots into `directory` and returns their paths, the most informative first.
    fn plots(&self, rows: &[Value], directory: &Path) -> Result<Vec<PathBuf>>;

    /// The bars with their measured values.
    fn bars(&self, rows: &[Value]) -> Result<Vec<Bar>>;
}

/// The spread of each bar over single repetitions, in the order of [`Experiment::bars`]; `None` for a bar that a
/// single repetition cannot have.
///
/// # Errors
/// Rows of another experiment.
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
}
