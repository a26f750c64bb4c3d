//! Ctrl-C and SIGTERM, as a flag that every wait in the lab checks.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

/// Installs the handler. A second signal has no effect: the cleanup that the first one started is short and bounded.
pub fn install() -> Result<()> {
    ctrlc::set_handler(|| INTERRUPTED.store(true, Ordering::Relaxed)).context("cannot install the Ctrl-C handler")
}

/// Whether a signal has arrived.
pub fn is_set() -> bool {
    INTERRUPTED.load(Ordering::Relaxed)
}

/// Returns an error once a signal has arrived, so that `?` unwinds to the cleanup.
pub fn check() -> Result<()> {
    if is_set() {
        bail!("interrupted");
    }
    Ok(())
}

/// Sleeps, and returns an error as soon as a signal arrives.
pub fn sleep(duration: Duration) -> Result<()> {
    sleep_until(Instant::now() + duration)
}

/// Sleeps until `deadline`, and returns an error as soon as a signal arrives.
pub fn sleep_until(deadline: Instant) -> Result<()> {
    loop {
        check()?;
        let now = Instant::now();
        if now >= deadline {
            return Ok(());
        }
        std::thread::sleep((deadline - now).min(Duration::from_millis(20)));
    }
}
