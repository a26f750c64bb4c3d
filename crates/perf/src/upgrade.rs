//! Calls at a constant rate, while a file makes both ends change the service: measures losses, duplicates and
//! reordering, and how much throughput varies between windows (paper: section 5.4, figure 12).

use std::collections::VecDeque;
use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use bifrost_endpoint::{Endpoint, Service, Worker};
use hdrhistogram::Histogram;
use serde::Serialize;

use crate::numbered;
use crate::report::Engine;

/// Maximum number of open calls: a connection has at most 1024 open messages.
const OPEN: usize = 900;
/// Time limit of the last responses.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Offered load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Length of requests and responses, bytes.
    pub(crate) size: usize,
    /// Calls per second.
    pub(crate) rate: f64,
    pub(crate) duration: Duration,
    /// Length of the windows in which throughput is measured.
    pub(crate) window: Duration,
}

/// A report.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Report {
    test: &'static str,
    transport: String,
    size_bytes: usize,
    offered_calls_per_s: f64,
    seconds: f64,
    calls: u64,
    /// Calls without a response.
    lost: u64,
    /// Calls that reached the server out of order: duplicated, reordered, or after such a call.
    out_of_order: u64,
    changes: Vec<Change>,
    window_s: f64,
    windows: Vec<Window>,
    /// Mean of the windows before the first change.
    #[serde(skip_serializing_if = "Option::is_none")]
    before_gbit_per_s: Option<f64>,
    /// Largest deviation from that mean in those windows, percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    jitter_before_percent: Option<f64>,
    /// Largest deviation from that mean since the first change, percent.
    #[serde(skip_serializing_if = "Option::is_none")]
    jitter_percent: Option<f64>,
    engine: Option<Engine>,
}

/// A change of this end's service.
#[derive(Clone, Debug, Serialize)]
struct Change {
    at_s: f64,
    service: &'static str,
}

/// Responses in one window.
#[derive(Clone, Debug, Serialize)]
struct Window {
    /// This end's service at the end of the window.
    service: &'static str,
    /// Requests and responses together.
    gbit_per_s: f64,
    /// Latency, measured from the time at which the call was due, us.
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

/// An open call.
struct Open {
    call: u32,
    number: u64,
    due: Instant,
}

pub(crate) fn run(worker: &Worker, endpoint: &Endpoint, load: &Load) -> Result<Report> {
    let mut recorder = Recorder::new(load)?;
    let mut changes = Vec::new();
    let mut open: VecDeque<Open> = VecDeque::new();
    let (mut begun, mut out_of_order) = (0u64, 0u64);
    let mut service = endpoint.service();
    let mut scratch = Vec::new();
    let begin = Instant::now();
    let due_at = |number: u64| begin + Duration::from_secs_f64(number as f64 / load.rate);
    loop {
        worker.poll()?;
        let elapsed = begin.elapsed();
        if endpoint.service() != service {
            service = endpoint.service();
            changes.push(Change { at_s: elapsed.as_secs_f64(), service: name(service) });
        }
        recorder.turn(elapsed, name(service));
        let is_over = elapsed >= load.duration;
        if is_over && (open.is_empty() || elapsed >= load.duration + TIMEOUT) {
            break;
        }
        let mut any = false;
        while !is_over && open.len() < OPEN && due_at(begun) <= Instant::now() {
            let mut request = endpoint.buffer(load.size);
            numbered::write(&mut request, begun);
            let call = endpoint.begin_call(request)?;
            open.push_back(Open { call, number: begun, due: due_at(begun) });
            begun += 1;
            any = true;
        }
        // Responses arrive in the order of the calls.
        while let Some(Open { call, number, due }) = open.front() {
            let Some(response) = endpoint.try_response(*call)? else { break };
            ensure!(response.len() == load.size, "a response of {} bytes", response.len());
            out_of_order += u64::from(numbered::check(&response, *number, &mut scratch)? != *number);
            recorder.record(due.elapsed());
            open.pop_front();
            any = true;
        }
        if !any {
            worker.wait(due_at(begun).saturating_duration_since(Instant::now()).min(Duration::from_millis(10)))?;
        }
    }
    let windows = recorder.windows;
    let steady = Steady::of(&windows, load.window, changes.first().map(|change| change.at_s));
    Ok(Report {
        test: "upgrade",
        transport: worker.provider(),
        size_bytes: load.size,
        offered_calls_per_s: load.rate,
        seconds: load.duration.as_secs_f64(),
        calls: begun,
        lost: open.len() as u64,
        out_of_order,
        changes,
        window_s: load.window.as_secs_f64(),
        windows,
        before_gbit_per_s: steady.mean,
        jitter_before_percent: steady.before_percent,
        jitter_percent: steady.since_percent,
        engine: Engine::of(worker, endpoint),
    })
}

/// Assigns responses to windows.
struct Recorder {
    load: Load,
    histogram: Histogram<u64>,
    windows: Vec<Window>,
}

impl Recorder {
    fn new(load: &Load) -> Result<Self> {
        let histogram = Histogram::new_with_bounds(100, 60_000_000_000, 3)?;
        Ok(Self { load: *load, histogram, windows: Vec::new() })
    }

    fn record(&mut self, took: Duration) {
        self.histogram.saturating_record(took.as_nanos() as u64);
    }

    /// Closes the windows that end before `elapsed`. Responses after the end of the load belong to no window.
    fn turn(&mut self, elapsed: Duration, service: &'static str) {
        let ends = |windows: usize| self.load.window * (windows as u32 + 1);
        while ends(self.windows.len()) <= elapsed.min(self.load.duration) {
            let bits = self.histogram.len() as f64 * self.load.size as f64 * 16.0;
            let us = |ns: u64| ns as f64 / 1e3;
            self.windows.push(Window {
                service,
                gbit_per_s: bits / self.load.window.as_secs_f64() / 1e9,
                p50_us: us(self.histogram.value_at_quantile(0.5)),
                p99_us: us(self.histogram.value_at_quantile(0.99)),
                max_us: us(self.histogram.max()),
            });
            self.histogram.reset();
        }
    }
}

/// Variation of throughput. Unknown without a change, or with fewer than two windows before it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Steady {
    mean: Option<f64>,
    before_percent: Option<f64>,
    since_percent: Option<f64>,
}

impl Steady {
    /// Ignores the first window, in which the connection is new.
    fn of(windows: &[Window], window: Duration, first_change_s: Option<f64>) -> Self {
        let Some(at) = first_change_s else { return Self::default() };
        let before = ((at / window.as_secs_f64()) as usize).min(windows.len());
        let (Some(old), Some(since)) = (windows.get(1..before), windows.get(before..)) else { return Self::default() };
        if old.is_empty() || since.is_empty() {
            return Self::default();
        }
        let mean = old.iter().map(|window| window.gbit_per_s).sum::<f64>() / old.len() as f64;
        let deviation = |windows: &[Window]| {
            let percent = windows.iter().map(|window| (window.gbit_per_s / mean - 1.0).abs() * 100.0);
            Some(percent.fold(0.0, f64::max))
        };
        Self { mean: Some(mean), before_percent: deviation(old), since_percent: deviation(since) }
    }
}

fn name(service: Option<Service>) -> &'static str {
    match service {
        Some(Service::Uc) => "uc",
        Some(Service::Rc) => "rc",
        _ => "none",
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{} over {}", self.test, self.transport)?;
        let (calls, size, seconds) = (self.calls, self.size_bytes, self.seconds);
        writeln!(
            f,
            "{calls} calls of {size} bytes in {seconds:.2} s: {} lost, {} out of order",
            self.lost, self.out_of_order
        )?;
        writeln!(
            f,
            "{:>10} {:>8} {:>10} {:>10} {:>10} {:>10}",
            "until s", "service", "Gbit/s", "p50", "p99", "max us"
        )?;
        for (at, window) in self.windows.iter().enumerate() {
            let Window { service, gbit_per_s, p50_us, p99_us, max_us } = window;
            let until = (at + 1) as f64 * self.window_s;
            writeln!(f, "{until:>10.2} {service:>8} {gbit_per_s:>10.3} {p50_us:>10.1} {p99_us:>10.1} {max_us:>10.1}")?;
        }
        for Change { at_s, service } in &self.changes {
            writeln!(f, "changed to {service} after {at_s:.2} s")?;
        }
        match (self.before_gbit_per_s, self.jitter_before_percent, self.jitter_percent) {
            (Some(mean), Some(before), Some(since)) => writeln!(
                f,
                "{mean:.3} Gbit/s before; a window deviates by at most {since:.2} % since, and by {before:.2} % before"
            ),
            _ => writeln!(f, "no change of service, or fewer than two windows before it: nothing to compare"),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const LOAD: Load =
        Load { size: 1000, rate: 1000.0, duration: Duration::from_millis(350), window: Duration::from_millis(100) };

    #[test]
    fn windows_end_in_time_however_often_they_are_updated() {
        let mut recorder = Recorder::new(&LOAD).unwrap();
        recorder.turn(Duration::from_millis(99), "uc");
        assert!(recorder.windows.is_empty());
        (0..3).for_each(|ms| recorder.record(Duration::from_millis(ms + 1)));
        // A pause longer than a window: earlier responses belong to the first window, and the second is empty.
        recorder.turn(Duration::from_millis(250), "uc");
        recorder.record(Duration::from_millis(180));
        // The load has ended: there is no partial last window.
        recorder.turn(Duration::from_secs(9), "rc");
        let rates: Vec<f64> = recorder.windows.iter().map(|window| window.gbit_per_s * 1e9).collect();
        for (rate, calls) in rates.iter().zip([3.0, 0.0, 1.0]) {
            assert!((rate - calls * 16_000.0 / 0.1).abs() < 1e-3, "{rates:?}");
        }
        assert_eq!((rates.len(), recorder.windows[2].service), (3, "rc"));
        assert!((recorder.windows[0].max_us - 3000.0).abs() < 3.0);
    }

    #[test]
    fn jitter_is_that_of_the_worst_window() {
        let window = |gbit_per_s| Window { service: "uc", gbit_per_s, p50_us: 0.0, p99_us: 0.0, max_us: 0.0 };
        let windows = [5.0, 1.01, 0.99, 0.98, 1.0, 1.03].map(window);
        let second = Duration::from_secs(1);
        let steady = Steady::of(&windows, second, Some(3.5));
        let close = |value: Option<f64>, expected: f64| (value.unwrap() - expected).abs() < 1e-9;
        assert!(close(steady.mean, 1.0) && close(steady.before_percent, 1.0) && close(steady.since_percent, 3.0));
        for unknown in [None, Some(0.5), Some(1.5), Some(6.5)] {
            assert_eq!(Steady::of(&windows, second, unknown), Steady::default(), "{unknown:?}");
        }
    }
}
