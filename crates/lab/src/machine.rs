//! Virtual machines: user-mode Linux, whose real `virtio_net` driver is attached to a vhost-user port. Its root is
//! this machine's root file system, read-only. It reads the numbers of scripts to run from its console; scripts and
//! output are files in a directory of the run.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::topology::Guest;
use crate::{command, interrupt, process};

/// How long a machine may take to boot.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a machine.
const MEMORY: &str = "256M";
/// Library that user-mode Linux needs on some processors: `scripts/uml-xstate.c`.
const UML_XSTATE: &str = "/var/cache/bifrost-lab/uml-xstate.so";
/// Library that it needs with DPDK's vhost-user ports: `scripts/uml-dpdk.c`.
const UML_DPDK: &str = "/var/cache/bifrost-lab/uml-dpdk.so";

/// A running virtual machine. Dropping it ends it.
#[derive(Debug)]
pub struct Machine {
    child: Child,
    input: ChildStdin,
    name: String,
    directory: PathBuf,
    console: PathBuf,
    scripts: u32,
}

/// A script that runs in a machine.
#[derive(Debug, Clone, Copy)]
pub struct Task(u32);

impl Machine {
    /// Starts a machine for `guest`, whose vhost-user port is at `socket`. Scripts and output go to `directory`.
    /// `dpdk`: the port belongs to DPDK.
    pub fn start(guest: &Guest, socket: &Path, dpdk: bool, directory: PathBuf, logs: &Path) -> Result<Self> {
        for path in [&directory, logs] {
            fs::create_dir_all(path).with_context(|| format!("creating {}", path.display()))?;
        }
        let init = directory.join("init");
        fs::write(&init, init_script(guest, &directory)).with_context(|| format!("writing {}", init.display()))?;
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755))?;
        let console = logs.join(format!("{}.console", guest.name));
        let output = File::create(&console).with_context(|| format!("creating {}", console.display()))?;
        // Its processes end together with the lab, even after a crash.
        let mut command = guest.namespace.command("setpriv");
        command
            .env("LD_PRELOAD", if dpdk { format!("{UML_XSTATE}:{UML_DPDK}") } else { UML_XSTATE.to_owned() })
            .args(["--pdeathsig", "KILL", "linux.uml", &format!("mem={MEMORY}"), "quiet", "con=null", "con0=fd:0,fd:1"])
            .args(["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", &format!("umid={}", guest.name)])
            .arg(format!("uml_dir={}", directory.join("uml").display()))
            .arg(format!("init={}", init.display()))
            .arg(format!("virtio_uml.device={}:1", socket.display()));
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(output.try_clone()?)
            .stderr(output)
            .process_group(0)
            .spawn()
            .with_context(|| command::missing("linux.uml"))?;
        let input = child.stdin.take().context("the console has no input")?;
        Ok(Self { child, input, name: guest.name.clone(), directory, console, scripts: 0 })
    }

    /// Waits until its network is up.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        while !self.console().contains("machine: up") {
            self.check_alive()?;
            if Instant::now() > deadline {
                bail!("the machine {} does not boot; its console:\n{}", self.name, self.console());
            }
            interrupt::sleep(Duration::from_millis(20))?;
        }
        Ok(())
    }

    /// Starts a script (`sh`).
    pub fn start_script(&mut self, script: &str) -> Result<Task> {
        self.scripts += 1;
        let task = Task(self.scripts);
        fs::write(self.file(task, "sh"), script).context("writing a script")?;
        writeln!(self.input, "{}", task.0).with_context(|| format!("starting a script on {}", self.name))?;
        Ok(task)
    }

    /// Waits until a script ends successfully and returns its output.
    pub fn finish(&mut self, task: Task, timeout: Duration) -> Result<String> {
        let deadline = Instant::now() + timeout;
        let before = self.cpu_seconds()?;
        let status = loop {
            if let Ok(status) = fs::read_to_string(self.file(task, "status")) {
                break status;
            }
            self.check_alive()?;
            if Instant::now() > deadline {
                // Little processor time: it sleeps, waits for the network or has lost an interrupt. A full processor:
                // it is in a loop.
                let used = self.cpu_seconds()? - before;
                let (name, seconds) = (&self.name, timeout.as_secs_f64());
                bail!(
                    "a script in the machine {name} did not end within {seconds:.0} s; it used {used:.1} s of processor"
                );
            }
            interrupt::sleep(Duration::from_millis(5))?;
        };
        let output = String::from_utf8_lossy(&fs::read(self.file(task, "out"))?).into_owned();
        if status.trim() != "0" {
            let script = fs::read_to_string(self.file(task, "sh")).unwrap_or_default();
            bail!("a script in the machine {} failed ({}): {script}\n{output}", self.name, status.trim());
        }
        Ok(output)
    }

    /// Runs a script to completion.
    pub fn run(&mut self, script: &str, timeout: Duration) -> Result<String> {
        let task = self.start_script(script)?;
        self.finish(task, timeout)
    }

    /// Processor time that the machine has used, kernel and programs, as counted by the kernel that runs it, s.
    pub fn cpu_seconds(&self) -> Result<f64> {
        process::cpu_seconds_of_group(self.child.id())
    }

    fn check_alive(&mut self) -> Result<()> {
        match self.child.try_wait().context("asking for a machine's status")? {
            None => Ok(()),
            Some(status) => bail!("the machine {} ended ({status}); its console:\n{}", self.name, self.console()),
        }
    }

    fn console(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.console).unwrap_or_default()).into_owned()
    }

    fn file(&self, task: Task, kind: &str) -> PathBuf {
        self.directory.join(format!("{}.{kind}", task.0))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // The guest's processes are in the machine's process group and would outlive it.
        if let Some(group) = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw) {
            let _ = kill_process_group(group, Signal::KILL);
        }
        let _ = self.child.wait();
    }
}

/// The init script. It selects Cubic and disables saved TCP metrics, as in containers.
fn init_script(guest: &Guest, directory: &Path) -> String {
    format!(
        r#"#!/bin/sh
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /run
mount -t hostfs -o {directory} none /mnt
export TMPDIR=/run HOME=/run
modules=/usr/lib/uml/modules/$(uname -r)/kernel
for module in net/core/failover drivers/net/net_failover drivers/net/virtio_net; do insmod $modules/$module.ko; done
echo cubic > /proc/sys/net/ipv4/tcp_congestion_control
echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save
ip link set lo up
ip link set eth0 up
ip address add {address}/24 dev eth0
cd /run
echo "machine: up"
while read -r number; do
    (
        sh /mnt/$number.sh > /mnt/$number.out 2>&1
        echo $? > /mnt/$number.new
        mv /mnt/$number.new /mnt/$number.status
    ) < /dev/null &
done
echo o > /proc/sysrq-trigger
"#,
        directory = directory.display(),
        address = guest.address,
    )
}
