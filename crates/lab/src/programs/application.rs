//! Common applications: a server in one guest, and a client in another one that times every request.

use std::fs;
use std::io::BufWriter;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use hdrhistogram::Histogram;

use crate::process::Program;
use crate::topology::Guest;

/// User and group for servers that refuse to run as root: Debian's `nobody` and `nogroup`.
pub const NOBODY: u32 = 65534;

/// Number of connections of loads that do not set their own.
pub const CONNECTIONS: u32 = 16;

/// Time for a server to become ready, also on a busy machine.
pub const READY_TIMEOUT: Duration = Duration::from_secs(30);

/// A server and its client.
pub trait Application {
    /// Starts the server on the guest's address, and returns once it answers and holds the data that the load
    /// requests. It may keep files in `files`, an existing directory that is removed after the server's end.
    fn serve(&self, guest: &Guest, files: &Path, logs: &Path) -> Result<Box<dyn Server>>;

    /// Runs the load.
    ///
    /// # Errors
    /// A request fails (unless the application runs on UDP), or an answer is wrong.
    fn load(&self, load: &Load<'_>) -> Result<Measurement>;
}

/// A running server. Dropping it ends it.
pub trait Server {
    /// An error if the server has ended.
    fn check_alive(&mut self) -> Result<()>;
}

impl Server for Program {
    fn check_alive(&mut self) -> Result<()> {
        Program::check_alive(self)
    }
}

/// Endpoints and duration of a load.
#[derive(Debug, Clone, Copy)]
pub struct Load<'a> {
    /// The client's guest.
    pub client: &'a Guest,
    /// The server's guest.
    pub server: &'a Guest,
    /// Duration; programs that take whole seconds round it up.
    pub duration: Duration,
    /// Directory of its log, `<program>-<name>.txt`.
    pub logs: &'a Path,
    /// Name of the measurement, as a part of a file name.
    pub name: &'a str,
}

impl Load<'_> {
    /// [`Load::duration`] in whole seconds, at least 1.
    pub fn seconds(&self) -> u64 {
        self.duration.as_secs_f64().ceil().max(1.0) as u64
    }

    /// Runs a client program to completion, and returns its output.
    pub fn run(&self, command: Command, program: &str) -> Result<String> {
        let log = self.logs.join(format!("{program}-{}.txt", self.name));
        Program::start(command, program, &log)?.finish(self.duration + Duration::from_secs(120))
    }
}

/// The result of a load.
#[derive(Debug, Clone, PartialEq)]
pub struct Measurement {
    /// Requests answered per second, with closed loops; for UDP, at the rate of the requests.
    pub requests_per_s: f64,
    /// For latencies from an open loop: the request rate, 1/s. Latencies count from when each request was due.
    pub paced_requests_per_s: Option<f64>,
    /// Latencies of every answered request, µs.
    pub latency_us: Histogram<u64>,
    /// Requests without an answer. Only with UDP; other loads fail instead.
    pub lost_requests: u64,
}

/// A histogram for latencies from 1 µs to an hour, with three significant digits.
pub fn latencies() -> Result<Histogram<u64>> {
    Histogram::new_with_bounds(1, 3_600_000_000, 3).context("creating a histogram")
}

/// Writes the percentiles of `latency_us` to `path`, in ms, as a table in the format of HdrHistogram's percentile
/// plotter.
///
/// # Errors
/// The file cannot be written.
pub fn write_percentiles(latency_us: &Histogram<u64>, path: &Path) -> Result<()> {
    use std::io::Write as _;
    let failed = || format!("writing {}", path.display());
    let mut file = BufWriter::new(fs::File::create(path).with_context(failed)?);
    writeln!(file, "{:>12} {:>14} {:>10} {:>14}\n", "Value", "Percentile", "TotalCount", "1/(1-Percentile)")?;
    for step in latency_us.iter_quantiles(5) {
        let (value, quantile) = (step.value_iterated_to() as f64 / 1000.0, step.quantile_iterated_to());
        let rest = if quantile < 1.0 { format!("{:14.2}", 1.0 / (1.0 - quantile)) } else { format!("{:>14}", "inf") };
        let count = latency_us.count_between(0, step.value_iterated_to());
        writeln!(file, "{value:12.3} {quantile:14.12} {count:10} {rest}").with_context(failed)?;
    }
    writeln!(
        file,
        "#[Mean    = {:12.3}, StdDeviation   = {:12.3}]",
        latency_us.mean() / 1e3,
        latency_us.stdev() / 1e3
    )?;
    writeln!(file, "#[Max     = {:12.3}, Total count    = {:12}]", latency_us.max() as f64 / 1e3, latency_us.len())?;
    file.flush().with_context(failed)
}

/// A server that is a thread of the lab. Dropping it stops the thread and waits for it.
#[derive(Debug)]
pub struct ServerThread {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<()>>>,
}

impl ServerThread {
    /// Starts `serve` in the guest's namespace. It must check the flag at least each second and return once it is
    /// set.
    pub fn start(guest: &Guest, serve: impl FnOnce(&AtomicBool) -> Result<()> + Send + 'static) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let flag = Arc::clone(&stop);
        let thread = guest.namespace.spawn(move || serve(&flag))?;
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Server for ServerThread {
    fn check_alive(&mut self) -> Result<()> {
        if self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            return Ok(());
        }
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(Err(error))) => Err(error.context("the lab's server ended")),
            Some(Err(_)) => bail!("the lab's server panicked"),
            _ => bail!("the lab's server ended"),
        }
    }
}

impl Drop for ServerThread {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // A caller that is interested in the outcome has called `check_alive` before.
            let _ = thread.join();
        }
    }
}

/// Calls `send` with each request's number and due time, in order, `per_s` times a second, for `duration` from
/// `start` on. Late requests are sent immediately.
///
/// # Errors
/// Errors of `send`, which end the loop.
pub fn pace(
    start: Instant,
    per_s: f64,
    duration: Duration,
    mut send: impl FnMut(u32, Instant) -> Result<()>,
) -> Result<()> {
    let count = (duration.as_secs_f64() * per_s) as u32;
    for number in 0..count {
        let due = due(start, per_s, number);
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        send(number, due)?;
    }
    Ok(())
}

/// The time when request `number` is due, at `per_s` requests a second.
pub fn due(start: Instant, per_s: f64, number: u32) -> Instant {
    start + Duration::from_secs_f64(f64::from(number) / per_s)
}

/// The number after `title` in a program's output.
///
/// # Errors
/// No line begins with `title`, or it has no number.
pub fn number_after(output: &str, title: &str) -> Result<f64> {
    let line = output.lines().find_map(|line| line.trim_start().strip_prefix(title));
    let line = line.with_context(|| format!("no line begins with `{title}`"))?;
    let word = line.split_whitespace().next().unwrap_or_default();
    word.parse().map_err(|_| anyhow!("`{title}{line}` has no number"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_due_at_a_fixed_rate_and_late_ones_at_once() {
        let start = Instant::now();
        let mut sent = Vec::new();
        pace(start, 1000.0, Duration::from_millis(20), |number, due| {
            if number == 5 {
                std::thread::sleep(Duration::from_millis(5));
            }
            sent.push((number, due - start, start.elapsed()));
            Ok(())
        })
        .unwrap();
        assert_eq!(sent.len(), 20);
        for (number, due, at) in sent {
            assert_eq!(due, Duration::from_millis(u64::from(number)));
            assert!(at >= due && (!(6..10).contains(&number) || at >= Duration::from_millis(10)), "{number}: {at:?}");
        }
        assert!(pace(start, 1000.0, Duration::from_millis(20), |_, _| bail!("no")).is_err());
    }

    #[test]
    fn percentiles_have_the_format_of_hdr_histogram() {
        let mut histogram = latencies().unwrap();
        (1..=1000).for_each(|ms| histogram.record(ms * 1000).unwrap());
        let file = tempfile::NamedTempFile::new().unwrap();
        write_percentiles(&histogram, file.path()).unwrap();
        let text = std::fs::read_to_string(file.path()).unwrap();
        let rows: Vec<Vec<f64>> = text
            .lines()
            .skip(2)
            .filter(|line| !line.starts_with('#'))
            .map(|line| line.split_whitespace().map(|word| word.parse().unwrap()).collect())
            .collect();
        let half = rows.iter().find(|row| row[1] >= 0.5).unwrap();
        assert!((half[0] - 500.0).abs() < 2.0 && (half[2] - 500.0).abs() < 2.0, "{half:?}");
        let last = rows.last().unwrap();
        assert!((last[0] - 1000.0).abs() < 1.0 && last[1] == 1.0 && last[2] == 1000.0, "{last:?}");
    }

    #[test]
    fn numbers_are_found_after_their_title() {
        assert_eq!(number_after("a\n  tps = 12.5 (x)\n", "tps =").unwrap(), 12.5);
        assert!(number_after("tps = fast", "tps =").unwrap_err().to_string().contains("has no number"));
        assert!(number_after("", "tps =").is_err());
    }
}
