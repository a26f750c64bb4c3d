//! Programs that restart when they have ended, as under a service manager with `Restart=always` and `RestartSec=100ms`.

use std::path::Path;

use anyhow::{Context as _, Result};
use rustix::process::{Pid, Signal, kill_process};

use crate::netns::Namespace;
use crate::process::Program;

/// Runs its arguments, and again 100 ms after each end. On SIGTERM, it ends the program and itself.
const SCRIPT: &str = "trap 'kill $child 2>/dev/null; exit 0' TERM
while :; do \"$@\" & child=$!; wait $child; sleep 0.1; done";

/// A program that restarts when it has ended. Dropping this ends it for good.
#[derive(Debug)]
pub struct Supervised(Program);

impl Supervised {
    /// Starts `program` in a namespace, with its output in `log`.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn start(namespace: &Namespace, program: &Path, arguments: &[String], log: &Path) -> Result<Self> {
        let mut command = namespace.command("sh");
        command.args(["-c", SCRIPT, "sh"]).arg(program).args(arguments).env("NO_COLOR", "1");
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        Ok(Supervised(Program::start(command, &name, log)?))
    }

    /// The PID of the current process.
    ///
    /// # Errors
    /// No process is running.
    pub fn pid(&self) -> Result<Pid> {
        let parent = self.0.pid();
        let children = std::fs::read_to_string(format!("/proc/{parent}/task/{parent}/children"))?;
        let first = children.split_whitespace().next().context("it does not run")?;
        Pid::from_raw(first.parse()?).context("a process without a number")
    }

    /// Sends SIGKILL to the current process.
    ///
    /// # Errors
    /// No process is running.
    pub fn kill(&self) -> Result<()> {
        Ok(kill_process(self.pid()?, Signal::KILL)?)
    }
}
