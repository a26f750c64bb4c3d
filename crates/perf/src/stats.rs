//! Counters in Prometheus's text format.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use bifrost_endpoint::{Worker, exposition};

/// Writes a worker's counters to a file, atomically for readers; `-` is standard output.
pub(crate) fn write(worker: &Worker, path: Option<&Path>) -> Result<()> {
    let Some(path) = path else { return Ok(()) };
    let text = exposition(&worker.statistics());
    if path == Path::new("-") {
        print!("{text}");
        return Ok(());
    }
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    let written = fs::write(&new, text).and_then(|()| fs::rename(&new, path));
    written.with_context(|| format!("cannot write --stats {}", path.display()))
}
