//! Network namespaces: created by `ip netns`, entered by a thread or a program.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use rustix::process::nice;
use rustix::thread::{CpuSet, LinkNameSpaceType, move_into_link_name_space, sched_setaffinity};
use socket2::Protocol;

use crate::command;

/// Priority of processes on a dedicated processor: real hosts do not share theirs with other work of the machine. It
/// is not higher, because interrupt threads must run, too.
const NICENESS: i32 = -10;

/// A named network namespace that is deleted when the value is dropped.
#[derive(Debug)]
pub struct Namespace {
    name: String,
    /// The processor of programs and threads inside; `None`: any.
    processor: Option<usize>,
    /// Whether programs inside use Multipath TCP.
    multipath_tcp: bool,
}

impl Namespace {
    /// Creates the namespace `name`, with loopback up and IPv6 off (the lab uses IPv4; without IPv6's chatter packet
    /// counts are exact).
    pub fn create(name: String) -> Result<Self> {
        command::run("ip", &["netns", "add", &name])?;
        let namespace = Self { name, processor: None, multipath_tcp: false };
        namespace
            .write_sysctls(&[("net/ipv6/conf/all/disable_ipv6", "1"), ("net/ipv6/conf/default/disable_ipv6", "1")])?;
        namespace.ip_batch("link set lo up\n")?;
        Ok(namespace)
    }

    /// The processor that the namespace is pinned to.
    pub fn processor(&self) -> Option<usize> {
        self.processor
    }

    /// Pins everything that is started inside from now on to one processor, with raised priority.
    pub fn pin(&mut self, processor: usize) {
        self.processor = Some(processor);
    }

    /// Makes every program that is started inside from now on use Multipath TCP where it asks for TCP. The lab's own
    /// sockets must use [`Namespace::stream_protocol`].
    pub fn use_multipath_tcp(&mut self) {
        self.multipath_tcp = true;
    }

    /// The protocol of the lab's own stream sockets inside.
    pub fn stream_protocol(&self) -> Protocol {
        if self.multipath_tcp { Protocol::MPTCP } else { Protocol::TCP }
    }

    /// The name of the file under `/run/netns`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs a batch of `ip` commands inside the namespace.
    pub fn ip_batch(&self, lines: &str) -> Result<()> {
        command::run_with_input("ip", &["-n", &self.name, "-batch", "-"], lines)
            .with_context(|| format!("configuring namespace {} with:\n{lines}", self.name))?;
        Ok(())
    }

    /// Runs a program to completion inside the namespace and returns its standard output.
    pub fn run(&self, program: &str, arguments: &[&str], input: &str) -> Result<String> {
        let mut all = vec!["netns", "exec", &self.name, program];
        all.extend_from_slice(arguments);
        command::run_with_input("ip", &all, input)
    }

    /// A command that runs `program` inside the namespace; the process id is that of the program.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = match self.processor {
            Some(cpu) => {
                let mut command = Command::new("nice");
                command.args(["-n", &NICENESS.to_string(), "taskset", "-c", &cpu.to_string(), "ip"]);
                command
            }
            None => Command::new("ip"),
        };
        command.args(["netns", "exec", &self.name]);
        if self.multipath_tcp {
            command.args(["mptcpize", "run"]);
        }
        command.arg(program);
        command
    }

    /// Sets sysctls, named by their path under `/proc/sys`.
    pub fn write_sysctls(&self, settings: &[(&str, &str)]) -> Result<()> {
        let settings: Vec<_> = settings.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
        self.enter(move || {
            for (key, value) in settings {
                let path = format!("/proc/sys/{key}");
                std::fs::write(&path, value).with_context(|| format!("writing {path}"))?;
            }
            Ok(())
        })
    }

    /// Runs `work` on a thread inside the namespace; sockets created there stay in the namespace.
    pub fn enter<T: Send + 'static>(&self, work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
        self.spawn(work)?.join().map_err(|_| anyhow!("a thread in namespace {} panicked", self.name))?
    }

    /// Like [`Namespace::enter`], but does not wait for the end.
    pub fn spawn<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T> + Send + 'static,
    ) -> Result<std::thread::JoinHandle<Result<T>>> {
        let path = PathBuf::from("/run/netns").join(&self.name);
        let file = File::open(&path).with_context(|| format!("opening namespace {}", path.display()))?;
        let name = self.name.clone();
        let cpu = self.processor;
        std::thread::Builder::new()
            .name("lab-netns".to_owned())
            .spawn(move || {
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                    .with_context(|| format!("entering namespace {name} (the lab needs root)"))?;
                if let Some(cpu) = cpu {
                    let mut set = CpuSet::new();
                    set.set(cpu);
                    sched_setaffinity(None, &set).with_context(|| format!("choosing processor {cpu}"))?;
                    // On Linux the priority belongs to the thread.
                    nice(NICENESS).context("raising the priority of a thread")?;
                }
                work()
            })
            .context("starting a thread")
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        if let Err(error) = command::run("ip", &["netns", "del", &self.name]) {
            eprintln!("warning: namespace {} is left behind (`bifrost-lab clean` removes it): {error:#}", self.name);
        }
    }
}
