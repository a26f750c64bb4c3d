//! Detects pauses of the machine itself, so that a hypervisor's pause is not attributed to the network.
//!
//! A thread with a real-time priority on every processor wakes up each millisecond. When it wakes up later than an
//! interrupt handler can explain, nothing ran on this processor, whatever its priority.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::processor;

/// The interval of a watcher.
const PERIOD: Duration = Duration::from_millis(1);
/// A later wakeup is a standstill: softirq processing yields after 2 ms (`MAX_SOFTIRQ_TIME`).
const LATE: Duration = Duration::from_millis(4);
/// Maximum number of measurements of a point while standstills disturb it.
const ATTEMPTS: u32 = 3;
/// A single standstill of this length disturbs a point.
const LONG: Duration = Duration::from_millis(10);

/// A period in which a processor ran nothing.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standstill {
    /// When it began.
    pub began: Instant,
    /// How long it lasted.
    pub length: Duration,
}

/// Watches all processors until it is finished or dropped.
#[derive(Debug)]
pub struct Watch {
    stop: Arc<AtomicBool>,
    seen: Arc<Mutex<Vec<Standstill>>>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Watch {
    /// Starts a watcher on each processor.
    ///
    /// # Errors
    /// No thread can be started. A watcher that is refused its priority reports that in [`Watch::finish`].
    pub fn start() -> Result<Self> {
        Self::with(PERIOD, LATE)
    }

    /// As [`Watch::start`], but each watcher wakes up every `period`, and a wakeup that comes `late` or later is a
    /// standstill. If `late` is shorter than an interrupt handler can take, only the caller knows whether that matters.
    ///
    /// # Errors
    /// As for [`Watch::start`].
    pub fn with(period: Duration, late: Duration) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (0..processors)
            .map(|processor| {
                let (stop, seen) = (Arc::clone(&stop), Arc::clone(&seen));
                let builder = std::thread::Builder::new().name(format!("lab-watch-{processor}"));
                builder.spawn(move || watch(processor, period, late, &stop, &seen)).context("starting a thread")
            })
            .collect::<Result<_>>()?;
        Ok(Self { stop, seen, threads })
    }

    /// The standstills so far on any processor, oldest first.
    pub fn seen(&self) -> Vec<Standstill> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        seen.sort_by_key(|standstill| standstill.began);
        seen
    }

    /// Ends the watch and returns the standstills on any processor, oldest first.
    ///
    /// # Errors
    /// A watcher could not be bound to its processor or was refused its priority.
    pub fn finish(mut self) -> Result<Vec<Standstill>> {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.join().map_err(|_| anyhow!("a thread that watches a processor panicked"))??;
        }
        Ok(self.seen())
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

/// Measures with `clients` clients by `attempt`. It repeats the measurement while standstills disturb it too much,
/// and returns the attempt with the shortest standstills, and the number of its standstills. Only the observed
/// standstills decide, never the result.
///
/// # Errors
/// The errors of `attempt`.
pub fn least_disturbed<M>(
    clients: u32,
    requests: fn(&M) -> u64,
    mut attempt: impl FnMut() -> Result<(Vec<Standstill>, M)>,
) -> Result<(M, u32)> {
    let mut attempts = 1;
    let (mut least, mut best) = attempt()?;
    let mut disturbed = disturbs(&least, clients, requests(&best));
    while disturbed && attempts < ATTEMPTS {
        attempts += 1;
        let (seen, measured) = attempt()?;
        disturbed = disturbs(&seen, clients, requests(&measured));
        if total(&seen) < total(&least) {
            (least, best) = (seen, measured);
        }
    }
    Ok((best, attempts))
}

/// Whether the standstills say more about the machine than about the network: a standstill delays one request of each
/// client. They disturb if they account for more than half of the slowest thousandth, or if one is long enough to be
/// the maximum.
fn disturbs(seen: &[Standstill], clients: u32, requests: u64) -> bool {
    let held_up = seen.len() as u64 * u64::from(clients);
    2 * held_up > requests.div_ceil(1000) || seen.iter().any(|standstill| standstill.length >= LONG)
}

/// For each of `count` bins of length `bin` from `start` on: the time in which a processor stood still, ms. If
/// several processors stood still at once, the longest time counts. Standstills up to `slack` before or after a bin
/// count for it, too.
pub fn by_bin(seen: &[Standstill], start: Instant, bin: Duration, count: usize, slack: Duration) -> Vec<f64> {
    (0..count)
        .map(|index| {
            let from = start + bin * index as u32;
            let to = from + bin + slack;
            let from = from.checked_sub(slack).unwrap_or(from);
            let (mut total, mut until) = (Duration::ZERO, from);
            for standstill in seen {
                let end = (standstill.began + standstill.length).min(to);
                total += end.saturating_duration_since(standstill.began.max(until));
                until = until.max(end);
            }
            total.as_secs_f64() * 1000.0
        })
        .collect()
}

/// How long the machine stood still. If several processors stood still at once, the longest time counts.
pub fn total(seen: &[Standstill]) -> Duration {
    let mut until: Option<Instant> = None;
    seen.iter().fold(Duration::ZERO, |total, standstill| {
        let end = standstill.began + standstill.length;
        let from = until.map_or(standstill.began, |until| until.max(standstill.began));
        until = Some(until.map_or(end, |until| until.max(end)));
        total + end.saturating_duration_since(from)
    })
}

fn watch(
    processor: usize,
    period: Duration,
    late: Duration,
    stop: &AtomicBool,
    seen: &Mutex<Vec<Standstill>>,
) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    sched_setaffinity(None, &set).with_context(|| format!("choosing processor {processor}"))?;
    processor::run_before_all_others()?;
    let mut due = Instant::now() + period;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let now = Instant::now();
        let length = now.saturating_duration_since(due);
        if length >= late {
            seen.lock().unwrap_or_else(PoisonError::into_inner).push(Standstill { began: due, length });
        }
        due = now + period;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn bins_have_the_time_of_their_standstills() {
        let start = Instant::now();
        let seen = [
            Standstill { began: start + 95 * MS, length: 10 * MS },
            // The other processor, at the same time but longer.
            Standstill { began: start + 95 * MS, length: 15 * MS },
            Standstill { began: start + 250 * MS, length: 20 * MS },
        ];
        let bins =
            |slack| by_bin(&seen, start, 100 * MS, 4, slack).iter().map(|ms| ms.round() as u32).collect::<Vec<_>>();
        assert_eq!(bins(Duration::ZERO), [5, 10, 20, 0]);
        assert_eq!(bins(20 * MS), [15, 15, 20, 0]);
        assert_eq!(total(&seen), 35 * MS);
    }

    #[test]
    fn a_watch_ends_when_asked() {
        let watch = Watch::start().unwrap();
        std::thread::sleep(20 * MS);
        // Whether there are standstills depends on the machine; without root the watch may be refused.
        if let Ok(seen) = watch.finish() {
            assert!(seen.iter().all(|s| s.length >= LATE));
        }
    }

    #[test]
    fn few_standstills_do_not_disturb_a_tail() {
        let began = Instant::now();
        let seen = |lengths: &[u32]| lengths.iter().map(|l| Standstill { began, length: *l * MS }).collect::<Vec<_>>();
        assert!(!disturbs(&[], 50, 10));
        assert!(!disturbs(&seen(&[5]), 50, 100_000));
        assert!(disturbs(&seen(&[5]), 50, 99_000), "50 of the slowest 99");
        assert!(disturbs(&seen(&[5, 5]), 50, 100_000));
        assert!(disturbs(&seen(&[10]), 50, 1_000_000), "long enough to be the maximum");
    }

    #[test]
    fn the_attempt_with_the_shortest_standstills_counts() {
        let began = Instant::now();
        let try_lengths = |lengths: [u32; 3]| {
            let mut lengths = lengths.into_iter();
            least_disturbed(
                50,
                |_| 10_000,
                || {
                    let length = lengths.next().unwrap();
                    let seen = if length == 0 { vec![] } else { vec![Standstill { began, length: length * MS }] };
                    Ok((seen, length))
                },
            )
            .unwrap()
        };
        assert_eq!(try_lengths([0, 1, 1]), (0, 1));
        assert_eq!(try_lengths([20, 0, 1]), (0, 2));
        assert_eq!(try_lengths([20, 15, 30]), (15, 3));
    }
}
