//! Programs that run in the background: started with their output in a file, awaited, and ended by process id.

use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};

use crate::netns::Namespace;
use crate::{command, interrupt};

/// How long a program may take to end after SIGTERM, before SIGKILL.
const END_TIMEOUT: Duration = Duration::from_secs(3);
/// The kernel's ticks in `/proc/<pid>/stat`, Hz (`USER_HZ`; the same on all machines that the lab supports).
const TICKS_PER_SECOND: f64 = 100.0;

/// A running program with its output in a file. Dropping it ends the program.
#[derive(Debug)]
pub struct Program {
    child: Child,
    name: String,
    output: PathBuf,
}

impl Program {
    /// Starts `command` with standard output and error in `output`.
    pub fn start(mut command: Command, name: &str, output: &Path) -> Result<Self> {
        if let Some(directory) = output.parent() {
            std::fs::create_dir_all(directory).with_context(|| format!("creating {}", directory.display()))?;
        }
        let file = File::create(output).with_context(|| format!("creating {}", output.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .process_group(0)
            .spawn()
            .with_context(|| command::missing(name))?;
        Ok(Self { child, name: name.to_owned(), output: output.to_path_buf() })
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What the program has printed so far.
    pub fn output(&self) -> Result<String> {
        let bytes = std::fs::read(&self.output).with_context(|| format!("reading {}", self.output.display()))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The program's status if it has ended.
    pub fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("waiting for {}", self.name))
    }

    /// An error if the program has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        match self.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("{} ended ({status}): {}", self.name, self.output()?),
        }
    }

    /// Calls `probe` in `namespace` until it succeeds: the server is ready then.
    ///
    /// # Errors
    /// The program ends, or is not ready within `timeout`.
    pub fn wait_until_ready(
        &mut self,
        namespace: &Namespace,
        timeout: Duration,
        probe: impl Fn() -> Result<()> + Copy + Send + 'static,
    ) -> Result<()> {
        let deadline = Instant::now() + timeout;
        loop {
            self.check_alive()?;
            match namespace.enter(probe) {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > deadline => {
                    let message = format!("{} does not answer; it printed: {}", self.name, self.output()?);
                    return Err(error.context(message));
                }
                Err(_) => interrupt::sleep(Duration::from_millis(20))?,
            }
        }
    }

    /// Waits until the program exits successfully and returns its output; ends it and fails after `timeout`.
    pub fn finish(self, timeout: Duration) -> Result<String> {
        let name = self.name.clone();
        let (status, output) = self.wait(timeout)?;
        if !status.success() {
            bail!("{name} failed ({status}): {}", tail(&output));
        }
        Ok(output)
    }

    /// Waits until the program exits, and returns its status and output; ends it and fails after `timeout`.
    pub fn wait(mut self, timeout: Duration) -> Result<(ExitStatus, String)> {
        let deadline = Instant::now() + timeout;
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok((status, self.output()?));
            }
            if Instant::now() > deadline {
                bail!(
                    "{} did not end within {:.0} s; its output is in {}",
                    self.name,
                    timeout.as_secs_f64(),
                    self.output.display()
                );
            }
            interrupt::check()?;
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// The last lines of what a program has printed.
pub(crate) fn tail(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}

/// Ends a child: SIGTERM first, SIGKILL if it does not react.
pub fn end(child: &mut Child) {
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    if let Some(pid) = i32::try_from(child.id()).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, Signal::TERM);
    }
    let deadline = Instant::now() + END_TIMEOUT;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > deadline {
            let _ = child.kill();
            let _ = child.wait();
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process that is not a child of this one exists, and has not ended.
pub(crate) fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    let is_zombie = |stat: String| stat_fields(&stat).is_some_and(|(_, fields)| fields.first() == Some(&"Z"));
    // The first thread of a process that exits may be a zombie while others still hold its sockets.
    let threads = || fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count);
    stat.is_ok_and(|stat| !is_zombie(stat) || threads() > 1)
}

/// Waits for the end of a process that is not a child of this one, also of its last thread.
///
/// Looking into `/proc` would disturb what is measured: while another process removes the ended one, the kernel waits
/// for those that look, without sleeping.
///
/// # Errors
/// It does not end in time.
pub(crate) fn wait_for_end(pid: u32, timeout: Duration) -> Result<()> {
    let process = match Pid::from_raw(pid.cast_signed()).map(|pid| pidfd_open(pid, PidfdFlags::empty())) {
        Some(Ok(process)) => process,
        Some(Err(Errno::SRCH)) => return Ok(()),
        Some(Err(error)) => return Err(error).with_context(|| format!("watching process {pid}")),
        None => bail!("{pid} is not a process id"),
    };
    let mut ended = [PollFd::new(&process, PollFlags::IN)];
    let timeout = Timespec::try_from(timeout).context("the timeout is too long")?;
    match poll(&mut ended, Some(&timeout)) {
        Ok(0) => bail!("process {pid} does not end; its threads: {}", threads(pid)),
        Ok(_) => Ok(()),
        Err(error) => Err(error).with_context(|| format!("waiting for the end of process {pid}")),
    }
}

/// What the threads of a process are doing: name, state, and function of the kernel of each.
fn threads(pid: u32) -> String {
    let Ok(tasks) = fs::read_dir(format!("/proc/{pid}/task")) else { return String::new() };
    let of = |task: fs::DirEntry| {
        let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let stat = read("stat");
        let state = stat_fields(&stat).and_then(|(_, fields)| fields.first().copied()).unwrap_or("?");
        format!("{} {state} {}", read("comm").trim(), read("wchan"))
    };
    tasks.flatten().map(of).collect::<Vec<_>>().join(", ")
}

/// Kills a process that is not a child of this one, and waits for its end.
///
/// # Errors
/// It does not end.
pub(crate) fn kill(pid: u32) -> Result<()> {
    signal(pid, Signal::KILL);
    wait_for_end(pid, END_TIMEOUT)
}

/// [`end`] for a process that is not a child of this one.
pub(crate) fn end_other(pid: u32) {
    signal(pid, Signal::TERM);
    if wait_for_end(pid, END_TIMEOUT).is_err() {
        let _ = kill(pid);
    }
}

fn signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

/// Processor time that the processes of `group` have used, as this machine's kernel counts it, s.
///
/// # Errors
/// `/proc` cannot be read.
pub fn cpu_seconds_of_group(group: u32) -> Result<f64> {
    let mut ticks = 0;
    for entry in fs::read_dir("/proc").context("reading /proc")? {
        let Ok(stat) = fs::read_to_string(entry?.path().join("stat")) else { continue };
        ticks += ticks_in_group(&stat, group).unwrap_or(0);
    }
    Ok(ticks as f64 / TICKS_PER_SECOND)
}

/// Stops (`still`) or continues a process.
///
/// # Errors
/// The process does not exist.
pub fn freeze(pid: u32, still: bool) -> Result<()> {
    let signal = if still { Signal::STOP } else { Signal::CONT };
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).context("not a process id")?;
    kill_process(pid, signal).context("signalling a process")
}

/// Splits a line of `/proc/<pid>/stat` into the name and the fields after it: state, parent, group, ... Fields 11 to
/// 14 are its own time in user space and in the kernel, and that of its children. The name is in parentheses and may
/// contain any character.
pub(crate) fn stat_fields(stat: &str) -> Option<(&str, Vec<&str>)> {
    let (start, rest) = stat.rsplit_once(") ")?;
    Some((start.split_once('(')?.1, rest.split_whitespace().collect()))
}

/// Processor time in a line of `/proc/<pid>/stat`, including children that have ended; `None` for another group.
fn ticks_in_group(stat: &str, group: u32) -> Option<u64> {
    let (_, fields) = stat_fields(stat)?;
    let of_group = fields.get(2)?.parse() == Ok(group);
    of_group.then(|| fields.iter().skip(11).take(4).filter_map(|field| field.parse::<u64>().ok()).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_told_with_the_last_lines_of_the_output() {
        let directory = tempfile::tempdir().unwrap();
        let start = || {
            let mut command = Command::new("sh");
            command.args(["-c", "seq 101 120; exit 3"]);
            Program::start(command, "sequence", &directory.path().join("output")).unwrap()
        };
        let (status, output) = start().wait(Duration::from_secs(10)).unwrap();
        assert_eq!((status.code(), output.lines().count()), (Some(3), 20));
        let error = start().finish(Duration::from_secs(10)).unwrap_err().to_string();
        assert!(error.starts_with("sequence failed") && error.contains(": 111\n"), "{error}");
        assert!(error.ends_with("\n120") && !error.contains("110"), "{error}");
    }

    #[test]
    fn processor_time_of_a_group_includes_its_children() {
        let stat = "41 (a) S 1 (b) S 1 40 40 0 -1 4194304 9 9 9 9 100 20 3 4 20 0 2 0 77 1 1\n";
        for (stat, group, ticks) in [(stat, 40, Some(127)), (stat, 41, None), ("41 (a) Z 1", 40, None), ("", 40, None)]
        {
            assert_eq!(ticks_in_group(stat, group), ticks, "{stat} of {group}");
        }
        let own = rustix::process::getpgrp().as_raw_nonzero().get() as u32;
        let before = cpu_seconds_of_group(own).unwrap();
        let end = Instant::now() + Duration::from_secs(5);
        while cpu_seconds_of_group(own).unwrap() <= before {
            assert!(Instant::now() < end, "processor time stays at {before} s");
        }
    }
}
