//! Where processor time is spent: the profile behind a comparison of switches that share processors with their
//! guests.

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::thread::{CpuSet, sched_setaffinity};
use thread_priority::{RealtimeThreadSchedulePolicy, ThreadPriority, ThreadSchedulePolicy};

use crate::process::stat_fields;
use crate::report::{Table, number};
use crate::stats::median_of;

/// Shares of the time of all processors by part, percent; the sum is 100.
pub type Shares = BTreeMap<String, f64>;

/// Programs that are reported by name: prefixes of their names in the kernel.
const SWITCHES: [&str; 2] = ["bifrostd", "ovs-vswitchd"];
const SERVERS: [&str; 2] = ["redis-server", "nginx"];

/// Number of rounds of [`transfer_ns`], and of ping-pongs in a round.
const ROUNDS: u32 = 9;
const TURNS: u32 = 2000;

/// The parts, in the order of reports.
pub const PARTS: [&str; 6] = ["switch", "switch's kernel", "server", "load and all else", "interrupts", "idle"];

/// The meaning of [`PARTS`] where guests are containers.
pub const LEGEND: &str = "*switch*: all daemons in user space, *switch's kernel*: their system calls, which include the \
                          guests' TCP; kernel VXLAN has neither";

/// A table of medians with a row for each group of measurements; `titles` name the columns that distinguish the
/// groups.
pub fn table<'a, const N: usize>(
    titles: [&str; N],
    rows: impl IntoIterator<Item = ([String; N], Vec<&'a Shares>)>,
) -> String {
    let mut table = Table::new(&[&titles[..], &PARTS].concat());
    for (of, shares) in rows {
        let share = |part: &str| median_of(shares.iter().filter_map(|shares| shares.get(part).copied()));
        table.row(of.into_iter().chain(PARTS.map(|part| number(share(part).unwrap_or(f64::NAN)))).collect());
    }
    table.render()
}

/// Gives the calling thread a real-time priority: it runs as soon as it wakes up.
///
/// # Errors
/// The system refuses the priority.
pub fn run_before_all_others() -> Result<()> {
    let priority = ThreadPriority::from_posix(thread_priority::ScheduleParams { sched_priority: REAL_TIME });
    let policy = ThreadSchedulePolicy::Realtime(RealtimeThreadSchedulePolicy::Fifo);
    thread_priority::set_thread_priority_and_policy(thread_priority::thread_native_id(), priority, policy)
        .map_err(|error| anyhow!("cannot set a real-time priority ({error}); the lab needs root"))
}

/// The priority of [`run_before_all_others`], in the scheduling class SCHED_FIFO.
pub const REAL_TIME: i32 = 50;

/// Runs `work` on a new thread that is bound to one processor.
///
/// # Errors
/// The processor does not exist, or an error of `work`.
pub fn on<T: Send>(processor: usize, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    std::thread::scope(|scope| {
        let bound = move || {
            let mut set = CpuSet::new();
            set.set(processor);
            sched_setaffinity(None, &set).with_context(|| format!("choosing processor {processor}"))?;
            work()
        };
        scope.spawn(bound).join().map_err(|_| anyhow!("a thread on processor {processor} panicked"))?
    })
}

/// How long it takes until another processor sees a write, ns: half of a round trip through one shared word, the
/// median of several rounds. On a virtual machine whose virtual processors migrate it changes by the minute, and with
/// it the cost of everything that two processors do together.
///
/// # Errors
/// A processor does not exist, or there is no round trip within a second.
pub fn transfer_ns(one: usize, other: usize) -> Result<f64> {
    let word = AtomicU32::new(0);
    let deadline = Instant::now() + Duration::from_secs(1);
    // Waits for the other thread's turn to end, then ends its own.
    let take_turn = |at: u32| {
        let mut spins = 0u32;
        while word.load(Acquire) != at {
            spins = spins.wrapping_add(1);
            if spins.is_multiple_of(1 << 16) && Instant::now() > deadline {
                bail!("processors {one} and {other} do not take turns");
            }
        }
        word.store(at + 1, Release);
        Ok(())
    };
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| on(other, || (0..ROUNDS * TURNS).try_for_each(|n| take_turn(2 * n + 1))));
        let measured = on(one, || {
            let round = |round: u32| {
                let began = Instant::now();
                (round * TURNS..(round + 1) * TURNS).try_for_each(|n| take_turn(2 * n))?;
                Ok(began.elapsed().as_nanos() as f64 / f64::from(2 * TURNS))
            };
            (0..ROUNDS).map(round).collect::<Result<Vec<f64>>>()
        });
        answers.join().map_err(|_| anyhow!("a thread on processor {other} panicked"))??;
        median_of(measured?.into_iter()).context("nothing was measured")
    })
}

/// Ticks of a line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal.
fn ticks(line: &str) -> Result<[u64; 8]> {
    let ticks: Vec<u64> = line.split_whitespace().skip(1).take(8).map_while(|field| field.parse().ok()).collect();
    ticks.try_into().map_err(|_| anyhow!("/proc/stat has an unknown format: `{line}`"))
}

fn interrupt_ticks([.., hard, soft, _steal]: &[u64; 8]) -> u64 {
    hard + soft
}

/// The kernel's counters so far, ticks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reading {
    /// For each process that is a switch or a server: its kind, and its time in user space and in the kernel.
    processes: BTreeMap<u32, (bool, [u64; 2])>,
    interrupts: u64,
    idle: u64,
    total: u64,
}

impl Reading {
    /// Reads the kernel's counters.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn take() -> Result<Self> {
        let mut reading = Self::default();
        reading.add_processors(&fs::read_to_string("/proc/stat").context("reading /proc/stat")?)?;
        for entry in fs::read_dir("/proc").context("reading /proc")?.flatten() {
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
            // The process may have ended.
            let Ok(text) = fs::read_to_string(entry.path().join("stat")) else { continue };
            reading.add_process(pid, &text);
        }
        Ok(reading)
    }

    /// How the time since `earlier` was spent.
    pub fn since(&self, earlier: &Reading) -> Shares {
        let total = (self.total - earlier.total).max(1) as f64;
        let percent = |ticks: u64| 100.0 * ticks as f64 / total;
        let mut of = [[0; 2]; 2];
        for (pid, (is_switch, now)) in &self.processes {
            let before = earlier.processes.get(pid).map_or([0; 2], |(_, before)| *before);
            for (sum, (now, before)) in of[usize::from(*is_switch)].iter_mut().zip(now.iter().zip(before)) {
                *sum += now.saturating_sub(before);
            }
        }
        let [[server_user, server_kernel], [user, kernel]] = of;
        let known = [
            percent(user),
            percent(kernel),
            percent(server_user + server_kernel),
            percent(self.interrupts - earlier.interrupts),
            percent(self.idle - earlier.idle),
        ];
        // Ticks come from different clocks, so the difference may be slightly negative.
        let rest = (100.0 - known.iter().sum::<f64>()).max(0.0);
        let [switch, kernel, server, interrupts, idle] = known;
        PARTS.map(str::to_owned).into_iter().zip([switch, kernel, server, rest, interrupts, idle]).collect()
    }

    /// Reads the first line of `/proc/stat`.
    fn add_processors(&mut self, text: &str) -> Result<()> {
        let line = text.lines().find(|line| line.starts_with("cpu "));
        let ticks = ticks(line.context("/proc/stat has no line for all processors")?)?;
        let [_, nice, _, idle, wait, ..] = ticks;
        // Threads that keep the processors awake are "nice".
        (self.idle, self.interrupts, self.total) = (idle + wait + nice, interrupt_ticks(&ticks), ticks.iter().sum());
        Ok(())
    }

    fn add_process(&mut self, pid: u32, stat: &str) {
        let Some((name, fields)) = stat_fields(stat) else { return };
        let is = |names: &[&str]| names.contains(&name);
        if !is(&SWITCHES) && !is(&SERVERS) {
            return;
        }
        let times = [11, 12].map(|field| fields.get(field).and_then(|ticks| ticks.parse().ok()).unwrap_or(0));
        self.processes.insert(pid, (is(&SWITCHES), times));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(processors: &str, processes: &[(u32, &str)]) -> Reading {
        let mut reading = Reading::default();
        reading.add_processors(processors).unwrap();
        processes.iter().for_each(|(pid, text)| reading.add_process(*pid, text));
        reading
    }

    fn process(name: &str, user: u64, system: u64) -> String {
        format!("7 ({name}) S 1 7 7 0 -1 4194560 100 0 0 0 {user} {system} 0 0 20 0 3 0 50 1000 200")
    }

    #[test]
    fn all_time_is_assigned_to_a_part() {
        let (bifrostd, redis, other) =
            (process("bifrostd", 10, 20), process("redis-server", 5, 5), process("(odd) name", 90, 90));
        let before =
            reading("intr 1\ncpu  100 0 100 700 10 5 5 0 0 0\ncpu0 1\n", &[(7, &bifrostd), (8, &redis), (9, &other)]);
        let (bifrostd, redis) = (process("bifrostd", 20, 60), process("redis-server", 15, 15));
        let new = process("ovs-vswitchd", 1, 2);
        let after = reading("cpu  150 0 200 720 20 7 13 0 0 0\n", &[(7, &bifrostd), (8, &redis), (11, &new)]);
        let shares = after.since(&before);
        let of = |name: &str| (shares[name] * 190.0 / 100.0).round() as u64;
        assert_eq!(PARTS.map(of), [11, 42, 20, 77, 10, 30]);
        assert!((shares.values().sum::<f64>() - 100.0).abs() < 1e-9, "{shares:?}");
    }

    #[test]
    fn tables_show_medians() {
        let shares = [1.0, 2.0, 4.0].map(|share| Shares::from([("switch".to_owned(), share)]));
        let text = table(["mode"], [(["off".to_owned()], shares.iter().collect())]);
        assert!(text.contains("| mode |") && text.contains("| off  |  2.000 |               - |"), "{text}");
    }

    #[test]
    fn lines_of_proc_stat_are_parsed() {
        let before = Reading::take().unwrap();
        let after = Reading::take().unwrap();
        assert!(after.total >= before.total && after.since(&before).len() == PARTS.len());
        assert_eq!(interrupt_ticks(&ticks("cpu0 1 2 3 4 5 60 700 8 0 0").unwrap()), 760);
        assert!(Reading::default().add_processors("cpu0 1 2\n").is_err());
        assert!(Reading::default().add_processors("cpu 1 2 x\n").is_err());
    }
}
