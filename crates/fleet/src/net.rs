//! Network namespaces, and programs in them.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::AsFd as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;

use anyhow::{Context as _, Result, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Prefix of all names; the process ID follows.
const PREFIX: &str = "bfleet";

/// A network namespace; deleted on drop.
#[derive(Debug)]
pub(crate) struct Net(String);

impl Net {
    pub(crate) fn create(role: &str) -> Result<Net> {
        let name = format!("{PREFIX}{}-{role}", std::process::id());
        run(Command::new("ip").args(["netns", "add", &name]), "").context("network namespaces need root")?;
        let net = Net(name);
        net.ip("link set lo up\n")?;
        Ok(net)
    }

    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// Runs lines of `ip` commands.
    pub(crate) fn ip(&self, lines: &str) -> Result<()> {
        run(Command::new("ip").args(["-n", &self.0, "-batch", "-"]), lines)
    }

    /// A command in the namespace, which is killed when the calling thread ends.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "nsenter"]).arg(format!("--net=/run/netns/{}", self.0)).arg(program);
        command
    }

    /// Starts `work` on a thread in the namespace; its sockets stay there.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<JoinHandle<Result<T>>> {
        let file = File::open(format!("/run/netns/{}", self.0))?;
        Ok(std::thread::spawn(move || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
            work()
        }))
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ = Command::new("ip").args(["netns", "del", &self.0]).stderr(Stdio::null()).status();
    }
}

/// Removes namespaces of runs that were killed. Their programs have ended with them.
pub(crate) fn remove_leftovers() {
    for entry in std::fs::read_dir("/run/netns").into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let of_run = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next()?.parse::<u32>().ok());
        if of_run.is_some_and(|pid| !Path::new(&format!("/proc/{pid}")).exists()) {
            let _ = Command::new("ip").args(["netns", "del", &name]).stderr(Stdio::null()).status();
        }
    }
}

/// Runs a program that must succeed.
fn run(command: &mut Command, input: &str) -> Result<()> {
    command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = command.spawn().with_context(|| format!("cannot run {command:?}"))?;
    if let Some(mut stdin) = child.stdin.take() {
        stdin.write_all(input.as_bytes())?;
    }
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "{command:?}: {}\n{input}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// A program, which is killed when this is dropped.
#[derive(Debug)]
pub(crate) struct Running(Child);

impl Running {
    /// Starts a program whose output goes to a file.
    pub(crate) fn start(mut command: Command, log: &Path) -> Result<Running> {
        let log = File::options().create(true).append(true).open(log)?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        Ok(Running(command.spawn().with_context(|| format!("cannot run {command:?}"))?))
    }
}

impl Running {
    /// Its process.
    pub(crate) fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
