//! Notices when the machine itself stands still, so that a hypervisor's pause is not taken for the network's.
//!
//! On every processor a thread before all others asks to be woken each millisecond. When it is woken late by more than
//! an interrupt handler can explain, nothing on this processor has run, whatever its priority.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::thread::{CpuSet, sched_setaffinity};

use crate::processor;

/// How often a watcher wants to run.
const PERIOD: Duration = Duration::from_millis(1);
/// Later than this is a standstill: a network interrupt's work ends after 2 ms (`MAX_SOFTIRQ_TIME`).
const LATE: Duration = Duration::from_millis(4);
/// How often a point is measured at most, while the machine stands still in the middle of it.
const ATTEMPTS: u32 = 3;
/// A standstill of the machine that long disturbs a point by itself.
const LONG: Duration = Duration::from_millis(10);

/// A time in which a processor did not run anything.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Standstill {
    /// When it began.
    pub began: Instant,
    /// How long it lasted.
    pub length: Duration,
}

/// Watches all processors until it is asked what it saw.
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
    /// No thread can be started. A watcher that may not have its priority says so in [`Watch::finish`].
    pub fn start() -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::new(Mutex::new(Vec::new()));
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = (0..processors)
            .map(|processor| {
                let (stop, seen) = (Arc::clone(&stop), Arc::clone(&seen));
                let builder = std::thread::Builder::new().name(format!("lab-watch-{processor}"));
                builder.spawn(move || watch(processor, &stop, &seen)).context("starting a thread")
            })
            .collect::<Result<_>>()?;
        Ok(Self { stop, seen, threads })
    }

    /// What was seen so far on any processor, oldest first.
    pub fn seen(&self) -> Vec<Standstill> {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        seen.sort_by_key(|standstill| standstill.began);
        seen
    }

    /// Ends the watch and returns what was seen on any processor, oldest first.
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

/// What `attempt` measures with `clients` clients, again if the machine stood still so often that it would be the machine that
/// is measured: the attempt with the shortest standstills, and how many there were. What decides is what a watch saw, never
/// the result.
///
/// # Errors
/// Those of `attempt`.
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

/// Whether what was seen says more about the machine than about the network: a standstill holds up one request of each
/// client, and more than half of the slowest thousandth would be such; or one was long enough to be the maximum.
fn disturbs(seen: &[Standstill], clients: u32, requests: u64) -> bool {
    let held_up = seen.len() as u64 * u64::from(clients);
    2 * held_up > requests.div_ceil(1000) || seen.iter().any(|standstill| standstill.length >= LONG)
}

/// The time in each of `count` bins of length `bin` from `start` on in which a processor stood still, ms; of processors
/// that stood still at once, the longer time counts. What happens up to `slack` beside a bin belongs to it too.
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

/// How long the machine stood still; of processors that stood still at once, the longer time counts.
pub fn total(seen: &[Standstill]) -> Duration {
    let mut until: Option<Instant> = None;
    seen.iter().fold(Duration::ZERO, |total, standstill| {
        let end = standstill.began + standstill.length;
        let from = until.map_or(standstill.began, |until| until.max(standstill.began));
        until = Some(until.map_or(end, |until| until.max(end)));
        total + end.saturating_duration_since(from)
    })
}

fn watch(processor: usize, stop: &AtomicBool, seen: &Mutex<Vec<Standstill>>) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    sched_setaffinity(None, &set).with_context(|| format!("choosing processor {processor}"))?;
    processor::run_before_all_others()?;
    let mut due = Instant::now() + PERIOD;
    while !stop.load(Ordering::Relaxed) {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        let now = Instant::now();
        let length = now.saturating_duration_since(due);
        if length >= LATE {
            seen.lock().unwrap_or_else(PoisonError::into_inner).push(Standstill { began: due, length });
        }
        due = now + PERIOD;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn bins_know_how_long_the_machine_stood_still() {
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
        // Whether it sees anything is the machine's business; without root it may not watch at all.
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
        assert!(disturbs(&seen(&[10]), 50, 1_000_000), "it may be the maximum");
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
