//! Waiting for a condition.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::interrupt;

/// Time limit of a step.
const PATIENCE: Duration = Duration::from_secs(30);

/// Delay between two checks.
const PAUSE: Duration = Duration::from_millis(2);

/// Waits until `is` returns a value.
///
/// # Errors
/// It returns none in time.
pub fn until<T>(what: &str, is: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    until_within(PATIENCE, PAUSE, what, is)
}

/// Like [`until`], for at most `patience`, with `pause` between two checks.
///
/// # Errors
/// It returns none in time.
pub fn until_within<T>(
    patience: Duration,
    pause: Duration,
    what: &str,
    mut is: impl FnMut() -> Result<Option<T>>,
) -> Result<T> {
    let deadline = Instant::now() + patience;
    loop {
        if let Some(found) = is()? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {patience:?}");
        }
        interrupt::sleep(pause)?;
    }
}
