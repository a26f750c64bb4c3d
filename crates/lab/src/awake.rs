//! Keeps the processors of a virtual machine from halting while latencies are measured.
//!
//! When nothing runs on a virtual processor, it halts, and the hypervisor may give its time to others. The next
//! interrupt then waits until the hypervisor schedules the processor again, which takes milliseconds where machines
//! share a host. A thread of the lowest scheduling class on every processor prevents the halt. It gives way to all
//! other threads at once. This is what the kernel's parameter `idle=poll` does for a whole system.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use anyhow::{Context, Result, anyhow};
use rustix::process::nice;
use rustix::thread::{CpuSet, sched_setaffinity};
use thread_priority::{NormalThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy};

/// Rounds of a loop, tens of microseconds, between two looks at whether other threads are ready.
const ROUNDS: u32 = 500;

/// The processors stay awake until this is dropped.
#[derive(Debug)]
pub struct Awake {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Awake {
    /// Starts a thread on each processor.
    ///
    /// # Errors
    /// No thread can be started, or the system refuses its priority.
    pub fn start() -> Result<Self> {
        let mut awake = Self { stop: Arc::default(), threads: Vec::new() };
        let _ungrouped = Ungrouped::begin()?;
        let (ready, answers) = std::sync::mpsc::channel();
        for processor in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            let (stop, ready) = (Arc::clone(&awake.stop), ready.clone());
            let spin = move || {
                let prepared = be_idle_on(processor);
                let is_prepared = prepared.is_ok();
                let _ = ready.send(prepared);
                // The caller waits until all senders are gone.
                drop(ready);
                while is_prepared && !stop.load(Ordering::Relaxed) {
                    (0..ROUNDS).for_each(|_| std::hint::spin_loop());
                    // If a thread became ready while a real-time thread ran, the scheduler may have preferred this one.
                    std::thread::yield_now();
                }
            };
            let builder = std::thread::Builder::new().name(format!("lab-awake-{processor}"));
            awake.threads.push(builder.spawn(spin).context("starting a thread")?);
        }
        drop(ready);
        answers.into_iter().collect::<Result<()>>()?;
        Ok(awake)
    }
}

impl Drop for Awake {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The setting by which the kernel shares processors among sessions before it shares them among threads of a session
/// (sched(7), "The autogroup feature").
const AUTOGROUP: &str = "/proc/sys/kernel/sched_autogroup_enabled";

/// Threads created until this is dropped belong to no session's group. In such a group, a thread of the lowest class
/// would use the share of its session while threads of other sessions wait.
struct Ungrouped {
    was_enabled: bool,
}

impl Ungrouped {
    fn begin() -> Result<Self> {
        // A kernel without the feature has no such file.
        let was_enabled = std::fs::read_to_string(AUTOGROUP).is_ok_and(|text| text.trim() == "1");
        if was_enabled {
            std::fs::write(AUTOGROUP, "0").with_context(|| format!("writing {AUTOGROUP}"))?;
        }
        Ok(Self { was_enabled })
    }
}

impl Drop for Ungrouped {
    fn drop(&mut self) {
        if self.was_enabled {
            let _ = std::fs::write(AUTOGROUP, "1");
        }
    }
}

/// Binds the calling thread to a processor that it uses only while nothing else wants to. The kernel counts its time as
/// that of a "nice" thread, which [`crate::processor::Reading`] takes for idle.
fn be_idle_on(processor: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(processor);
    sched_setaffinity(None, &set).with_context(|| format!("choosing processor {processor}"))?;
    let idle = ThreadSchedulePolicy::Normal(NormalThreadSchedulePolicy::Idle);
    thread_priority::set_thread_priority_and_policy(thread_priority::thread_native_id(), ThreadPriority::Min, idle)
        .map_err(|error| anyhow!("cannot set the scheduling policy SCHED_IDLE: {error}"))?;
    nice(19).context("lowering a thread's priority")?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::process::stat_fields;

    /// The scheduling policy (field 41 of proc_pid_stat(5)) and the processor (field 39) of threads with this name.
    fn threads(prefix: &str) -> Vec<(u32, u32)> {
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let text = tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("stat")).ok());
        let of = |text: String| {
            let (name, fields) = stat_fields(&text)?;
            let field = |n: usize| fields.get(n - 3)?.parse().ok();
            name.starts_with(prefix).then(|| Some((field(41)?, field(39)?)))?
        };
        let mut all: Vec<_> = text.filter_map(of).collect();
        all.sort_unstable();
        all
    }

    #[test]
    fn each_processor_has_a_thread_that_gives_way() {
        let awake = Awake::start().unwrap();
        std::thread::sleep(Duration::from_millis(10));
        let count = std::thread::available_parallelism().unwrap().get() as u32;
        let idle = libc::SCHED_IDLE as u32;
        assert_eq!(threads("lab-awake"), (0..count).map(|processor| (idle, processor)).collect::<Vec<_>>());
        drop(awake);
        // The kernel wakes the joiner before it removes the thread from /proc. All else runs before a thread of this class.
        let give_up = Instant::now() + Duration::from_secs(10);
        while !threads("lab-awake").is_empty() {
            assert!(Instant::now() < give_up, "these threads have not ended: {:?}", threads("lab-awake"));
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
