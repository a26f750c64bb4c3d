//! A progress bar on a terminal; one line per step elsewhere (CI logs).

use std::io::IsTerminal as _;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Shows the progress of an experiment.
#[derive(Debug)]
pub struct Progress {
    bar: Option<ProgressBar>,
    total: u64,
    done: u64,
    started: Instant,
}

impl Progress {
    /// Starts with `total` steps to do.
    pub fn new(total: u64) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new(total);
            let style =
                ProgressStyle::with_template("{elapsed_precise} [{bar:30}] {pos}/{len} (left: {eta}) {wide_msg}");
            if let Ok(style) = style {
                bar.set_style(style.progress_chars("=> "));
            }
            bar.enable_steady_tick(Duration::from_millis(250));
            bar
        });
        Self { bar, total, done: 0, started: Instant::now() }
    }

    /// Announces the next step.
    pub fn begin(&self, step: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(step.to_owned());
        }
    }

    /// Records the result of the current step.
    pub fn end(&mut self, result: &str) {
        self.done += 1;
        match &self.bar {
            Some(bar) => {
                bar.println(format!("  {result}"));
                bar.inc(1);
            }
            None => {
                eprintln!("[{:>4.0} s] {}/{} {result}", self.started.elapsed().as_secs_f64(), self.done, self.total);
            }
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
