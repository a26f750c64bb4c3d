//! Waiting for something to come true.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::interrupt;

/// How long a step may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Between two looks.
const PAUSE: Duration = Duration::from_millis(2);

/// Waits until `is` finds something.
///
/// # Errors
/// It does not.
pub fn until<T>(what: &str, is: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    until_within(PATIENCE, PAUSE, what, is)
}

/// As [`until`], for as long as `patience`, with `pause` between two looks.
///
/// # Errors
/// It does not.
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
