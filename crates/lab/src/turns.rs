//! Points that are measured in one network after the other.

use std::fmt::Display;

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::Value;

use crate::interrupt;
use crate::progress::Progress;
use crate::results::to_values;

/// Measures every one of `points` in every one of `networks`, `repetitions` times; `begin` builds a network with all that a
/// measurement needs, and `measure` takes a row. The networks of a repetition stand side by side and take turns at each point: what
/// drifts on the machine, within a minute even, then touches all of them alike. Returns the rows as `results.json` holds them.
///
/// # Errors
/// What `begin` or `measure` could not do, or an interruption.
pub fn measure<N: Display, B, P: Display, R: Display + Serialize>(
    repetitions: u32,
    networks: &[N],
    points: &[P],
    begin: impl Fn(&N, u32) -> Result<B>,
    mut measure: impl FnMut(&N, &mut B, &P, u32) -> Result<R>,
) -> Result<Vec<Value>> {
    let mut progress = Progress::new((networks.len() * points.len()) as u64 * u64::from(repetitions));
    let mut rows = Vec::new();
    for repetition in 0..repetitions {
        let mut benches = Vec::new();
        for network in networks {
            interrupt::check()?;
            progress.begin(&format!("building the network for {network}"));
            benches.push(begin(network, repetition).with_context(|| format!("building the network for {network}"))?);
        }
        for point in points {
            for (network, bench) in networks.iter().zip(&mut benches) {
                interrupt::check()?;
                let name = format!("{network}, {point}");
                progress.begin(&name);
                let row = measure(network, bench, point, repetition).context(name)?;
                progress.end(&row.to_string());
                rows.push(row);
            }
        }
    }
    to_values(&rows)
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
        let failed = measure(1, &["a"], &["0.5 %"], begin, |_, _, _, _| -> Result<String> { anyhow::bail!("no") });
        assert_eq!(format!("{:#}", failed.unwrap_err()), "a, 0.5 %: no");
    }
}
