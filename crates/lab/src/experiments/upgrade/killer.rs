//! Kills a new daemon at a random time of its upgrade.

use std::fs;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fastrand::Rng;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// How long an upgrade may take to start its daemon.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_micros(200);

/// Waits until the daemon with this process ID starts another one, and kills that one at a random time `within` this
/// period. Returns whether it was killed.
pub(super) fn start(daemon: u32, within: Duration, random: &mut Rng) -> JoinHandle<Result<bool>> {
    let after = within.mul_f64(random.f64());
    std::thread::spawn(move || {
        let deadline = Instant::now() + PATIENCE;
        loop {
            // A descriptor, because process IDs are reused.
            if let Some(child) = children(daemon).first().copied().and_then(Pid::from_raw)
                && let Ok(child) = pidfd_open(child, PidfdFlags::empty())
            {
                std::thread::sleep(after);
                return match pidfd_send_signal(&child, Signal::KILL) {
                    Ok(()) => Ok(true),
                    Err(rustix::io::Errno::SRCH) => Ok(false),
                    Err(error) => Err(error).context("killing a new daemon"),
                };
            }
            if Instant::now() > deadline {
                return Ok(false);
            }
            std::thread::sleep(POLL);
        }
    })
}

/// The child processes of a process.
fn children(pid: u32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|n| n.parse().ok()).collect::<Vec<_>>()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_child_of_the_process_is_killed() {
        let mut parent = std::process::Command::new("sh").args(["-c", "sleep 60; exit 3"]).spawn().unwrap();
        let killer = start(parent.id(), Duration::from_millis(10), &mut Rng::with_seed(1));
        let status = parent.wait().unwrap();
        assert!(killer.join().unwrap().unwrap());
        assert_eq!(status.code(), Some(3));
    }
}
