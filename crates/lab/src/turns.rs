//! Measures points in several networks, interleaved.

use std::fmt::Display;

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::Value;

use crate::interrupt;
use crate::progress::Progress;
use crate::results::to_values;

/// Measures every one of `points` in every one of `networks`, `repetitions` times. `begin` builds a network with all
/// that a measurement needs; `measure` produces a row. The networks of a repetition exist side by side and are
/// measured in turn at each point, so that drift of the machine, even within a minute, affects all of them alike.
/// Returns the rows as in `results.json`.
///
/// # Errors
/// The errors of `begin` and `measure`, or an interruption.
pub fn measure<N: Display, B, P: Display, R: Display + Serialize>(
    repetitions: u32,
    networks: &[N],
    points: &[P],
    begin: impl Fn(&N, u32) -> Result<B>,
    mut measure: impl FnMut(&N, &mut B, &P, u32) -> Result<R>,
) -> Result<Vec<Value>> {
    let mut turns = Turns::new(repetitions, networks, points);
    for repetition in 0..repetitions {
        let mut benches = Vec::new();
        for network in networks {
            interrupt::check()?;
            let building = format!("building the network for {network}");
            turns.progress.begin(&building);
            benches.push(begin(network, repetition).context(building)?);
        }
        for point in points {
            for (network, bench) in networks.iter().zip(&mut benches) {
                let name = format!("{network}, {point}");
                turns.take(name, || measure(network, bench, point, repetition))?;
            }
        }
    }
    to_values(&turns.rows)
}

/// Like [`measure`], for networks that cannot exist side by side because each needs all processors: `measure` builds
/// the network, too.
///
/// # Errors
/// The errors of `measure`, or an interruption.
pub fn alternate<N: Display, P: Display, R: Display + Serialize>(
    repetitions: u32,
    networks: &[N],
    points: &[P],
    mut measure: impl FnMut(&N, &P, u32) -> Result<R>,
) -> Result<Vec<Value>> {
    let mut turns = Turns::new(repetitions, networks, points);
    for repetition in 0..repetitions {
        for point in points {
            for network in networks {
                turns.take(format!("{network}, {point}"), || measure(network, point, repetition))?;
            }
        }
    }
    to_values(&turns.rows)
}

/// Like [`alternate`], for experiments that vary only the network.
///
/// # Errors
/// The errors of `measure`, or an interruption.
pub fn each<N: Display, R: Display + Serialize>(
    repetitions: u32,
    networks: &[N],
    mut measure: impl FnMut(&N, u32) -> Result<R>,
) -> Result<Vec<Value>> {
    let mut turns = Turns::new(repetitions, networks, &[()]);
    for repetition in 0..repetitions {
        for network in networks {
            turns.take(network.to_string(), || measure(network, repetition))?;
        }
    }
    to_values(&turns.rows)
}

/// The rows so far.
struct Turns<R> {
    progress: Progress,
    rows: Vec<R>,
}

impl<R: Display> Turns<R> {
    fn new<N, P>(repetitions: u32, networks: &[N], points: &[P]) -> Self {
        let all = (networks.len() * points.len()) as u64 * u64::from(repetitions);
        Turns { progress: Progress::new(all), rows: Vec::new() }
    }

    fn take(&mut self, name: String, measure: impl FnOnce() -> Result<R>) -> Result<()> {
        interrupt::check()?;
        self.progress.begin(&name);
        let row = measure().context(name)?;
        self.progress.end(&row.to_string());
        self.rows.push(row);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_take_turns_at_each_point() {
        let begin = |network: &&str, repetition| Ok(format!("{network}{repetition}"));
        let rows = measure(2, &["a", "b"], &[1, 2], begin, |_, bench, point, repetition| {
            assert!(bench.ends_with(&repetition.to_string()));
            Ok(format!("{bench}:{point}"))
        });
        assert_eq!(rows.unwrap(), ["a0:1", "b0:1", "a0:2", "b0:2", "a1:1", "b1:1", "a1:2", "b1:2"]);
        let rows = alternate(2, &["a", "b"], &[1, 2], |network, point, repetition| {
            Ok(format!("{network}{repetition}:{point}"))
        });
        assert_eq!(rows.unwrap(), ["a0:1", "b0:1", "a0:2", "b0:2", "a1:1", "b1:1", "a1:2", "b1:2"]);
        let rows = each(2, &["a", "b"], |network, repetition| Ok(format!("{network}{repetition}")));
        assert_eq!(rows.unwrap(), ["a0", "b0", "a1", "b1"]);
        let failed = measure(1, &["a"], &["0.5 %"], begin, |_, _, _, _| -> Result<String> { anyhow::bail!("no") });
        assert_eq!(format!("{:#}", failed.unwrap_err()), "a, 0.5 %: no");
    }
}
