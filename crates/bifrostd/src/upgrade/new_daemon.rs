//! The new daemon's process, as its parent sees it.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, WaitId, WaitIdOptions, WaitIdStatus, WaitOptions, waitid, waitpid};

use crate::background::at_lower_priority;

/// How long to wait for the exit status of a new daemon that has failed.
const EXPLAIN: Duration = Duration::from_millis(100);
/// How long guests wait for the end of a killed daemon.
const END: Duration = Duration::from_millis(100);
/// Polling interval for both.
const POLL: Duration = Duration::from_millis(1);

/// The new daemon's process: dropping this kills it, unless [`leave`](Self::leave) was called.
pub(super) struct NewDaemon(Child);

impl NewDaemon {
    /// # Errors
    /// The process cannot be started.
    pub(super) fn start(command: &mut Command) -> std::io::Result<NewDaemon> {
        command.spawn().map(NewDaemon)
    }

    /// Lets the process live; either process may end first.
    pub(super) fn leave(self) {
        std::mem::forget(self);
    }

    /// Adds the exit status of the new daemon, which often explains the error better.
    pub(super) fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        match self.wait(EXPLAIN) {
            Some(status) => error.context(format!("the new daemon has ended: {status}")),
            None => error,
        }
    }

    /// Waits for its end, at most this long. The process remains a zombie: removing it can take the kernel seconds, in
    /// which it waits, without sleeping, for threads of the process that have a lower priority.
    fn wait(&self, patience: Duration) -> Option<ExitStatus> {
        let deadline = Instant::now() + patience;
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        loop {
            match waitid(WaitId::Pid(self.pid()), options) {
                Ok(None) if Instant::now() < deadline => thread::sleep(POLL),
                ended => return ended.ok().flatten().map(|ended| status(&ended)),
            }
        }
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }
}

impl Drop for NewDaemon {
    fn drop(&mut self) {
        // The process may have ended already.
        let _ = self.0.kill();
        // After SIGKILL no thread returns to the program, so guests need not wait for the kernel any longer.
        if self.wait(END).is_none() {
            let id = self.0.id();
            tracing::error!(pid = id, threads = threads(id), "the kernel has not ended the killed daemon yet");
        }
        let pid = self.pid();
        let reap = move || {
            at_lower_priority();
            let _ = waitpid(Some(pid), WaitOptions::empty());
        };
        // Without the thread, the process remains a zombie until this one ends.
        let _ = thread::Builder::new().name("reaper".to_owned()).spawn(reap);
    }
}

fn status(ended: &WaitIdStatus) -> ExitStatus {
    let code = ended.exit_status().unwrap_or_default() << 8;
    ExitStatus::from_raw(code | ended.terminating_signal().unwrap_or_default())
}

/// What the threads of a process are doing in the kernel, for the log: name, state and function of each.
fn threads(pid: u32) -> String {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return String::new() };
    let of = |task: std::fs::DirEntry| {
        let read = |name: &str| std::fs::read_to_string(task.path().join(name)).unwrap_or_default();
        // pid (name) state ...
        let stat = read("stat");
        let state = stat.rsplit_once(") ").map_or("?", |(_, rest)| rest.split(' ').next().unwrap_or_default());
        format!("{} {state} {}", read("comm").trim(), read("wchan"))
    };
    tasks.flatten().map(of).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use anyhow::anyhow;

    use super::*;

    fn start(script: &str) -> NewDaemon {
        NewDaemon::start(Command::new("sh").args(["-c", script])).unwrap()
    }

    /// The state letter of a process, `None` after it was removed.
    fn state(pid: u32) -> Option<String> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(stat.rsplit_once(") ")?.1.chars().next()?.to_string())
    }

    #[test]
    fn errors_are_explained_by_the_exit_status() {
        let explained = |script| format!("{:#}", start(script).explain(anyhow!("no answer")));
        assert_eq!(explained("exit 3"), "the new daemon has ended: exit status: 3: no answer");
        assert_eq!(explained("kill -9 $$"), "the new daemon has ended: signal: 9 (SIGKILL): no answer");
        let began = Instant::now();
        assert_eq!(explained("exec sleep 60"), "no answer");
        assert!(began.elapsed() >= EXPLAIN && began.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn waiting_does_not_remove_the_process() {
        let daemon = start("exit 0");
        while daemon.wait(Duration::from_secs(1)).is_none() {}
        assert_eq!(state(daemon.0.id()).as_deref(), Some("Z"));
        assert!(daemon.wait(Duration::ZERO).is_some_and(|status| status.success()));
    }

    #[test]
    fn a_dropped_daemon_is_killed_and_removed() {
        for script in ["exec sleep 60", "exit 1"] {
            let daemon = start(script);
            let pid = daemon.0.id();
            drop(daemon);
            let deadline = Instant::now() + Duration::from_secs(30);
            while state(pid).is_some() {
                assert!(Instant::now() < deadline, "{script}: {:?}", state(pid));
                thread::sleep(POLL);
            }
        }
    }

    #[test]
    fn a_daemon_that_has_taken_over_lives() {
        let daemon = start("exec sleep 60");
        let pid = daemon.pid();
        daemon.leave();
        assert!(waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOHANG).unwrap().is_none());
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
        waitpid(Some(pid), WaitOptions::empty()).unwrap();
    }
}
