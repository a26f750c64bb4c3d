//! Parameters and progress of a measurement.

use std::time::{Duration, Instant};

use anyhow::Result;
use bifrost_endpoint::{Endpoint, Service};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Test {
    Bandwidth,
    Latency,
}

/// A measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Plan {
    pub(crate) test: Test,
    /// Length of a message, bytes.
    pub(crate) size: usize,
    /// Messages or calls in flight.
    pub(crate) depth: usize,
    /// The measurement ends after this number of messages or this time, whichever is first.
    pub(crate) iters: u64,
    pub(crate) seconds: f64,
    /// Interval at which the connection changes its service.
    pub(crate) switch_every: Option<Duration>,
}

/// Progress, shown on standard error if it is a terminal.
pub(crate) struct Progress {
    bar: ProgressBar,
    begin: Instant,
    plan: Plan,
    drawn: Instant,
    switched: Instant,
}

impl Progress {
    pub(crate) fn begin(plan: &Plan) -> Self {
        let bar = ProgressBar::new(1000);
        let style = ProgressStyle::with_template("{wide_bar} {msg}").unwrap_or_else(|_| ProgressStyle::default_bar());
        bar.set_style(style);
        let now = Instant::now();
        Self { bar, begin: now, plan: *plan, drawn: now, switched: now }
    }

    /// Whether to continue after `done` messages.
    pub(crate) fn continues(&mut self, done: u64) -> bool {
        let elapsed = self.begin.elapsed();
        if self.drawn.elapsed() >= Duration::from_millis(100) {
            self.drawn = Instant::now();
            let share = (elapsed.as_secs_f64() / self.plan.seconds).max(done as f64 / self.plan.iters as f64);
            self.bar.set_position((share * 1000.0) as u64);
            self.bar.set_message(format!("{done} done"));
        }
        done < self.plan.iters && elapsed.as_secs_f64() < self.plan.seconds
    }

    /// Changes the connection's service, if it is due.
    pub(crate) fn switch(&mut self, endpoint: &Endpoint) -> Result<()> {
        if self.plan.switch_every.is_some_and(|every| self.switched.elapsed() >= every) {
            self.switched = Instant::now();
            let other = if endpoint.service() == Some(Service::Uc) { Service::Rc } else { Service::Uc };
            endpoint.switch(other)?;
        }
        Ok(())
    }

    pub(crate) fn elapsed(&self) -> f64 {
        self.begin.elapsed().as_secs_f64()
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
