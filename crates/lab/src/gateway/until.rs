//! Waiting for something to come true.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};

use crate::interrupt;

/// How long a step may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Waits until `is` finds something.
///
/// # Errors
/// It does not.
pub fn until<T>(what: &str, mut is: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = is()? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {PATIENCE:?}");
        }
        interrupt::sleep(Duration::from_millis(2))?;
    }
}
