//! Open vSwitch in a host's namespace, with its userspace datapath: a database server, the switch, and their
//! configuration.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::netns::Namespace;
use crate::process::{self, Program};
use crate::{command, interrupt};

/// Also the path in Debian's package.
const SCHEMA: &str = "/usr/share/openvswitch/vswitch.ovsschema";
/// Makes the C library allocate from 2 MiB pages where the kernel has them (`madvise`), as `bifrostd` does itself.
/// Open vSwitch's flows and conversations are thousands of small allocations.
const LARGE_PAGES: (&str, &str) = ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1");
/// Time to start.
const PATIENCE: Duration = Duration::from_secs(20);

/// The thread that forwards packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Datapath {
    /// The main thread, over the kernel's devices: Debian's build without DPDK.
    Userspace,
    /// DPDK on one processor. Its packet buffers are on small pages, like those of `bifrostd` and of all guests here.
    Dpdk {
        /// The processor.
        processor: usize,
        /// Maximum sleep when idle, µs, for processors that are shared. 0: busy polling.
        max_sleep_us: u32,
    },
}

impl Datapath {
    fn program(self) -> &'static str {
        match self {
            Datapath::Userspace => "/usr/lib/openvswitch-switch/ovs-vswitchd",
            Datapath::Dpdk { .. } => "/usr/lib/openvswitch-switch-dpdk/ovs-vswitchd-dpdk",
        }
    }
}

/// A running Open vSwitch. Dropping it ends its processes.
#[derive(Debug)]
pub struct OpenVswitch {
    // The order matters: the switch ends before its database.
    switch: Program,
    _database: Program,
    directory: PathBuf,
}

impl OpenVswitch {
    /// Starts it in `host`. Sockets (including those of vhost-user ports) and the database go to `directory`, output
    /// to `logs`.
    ///
    /// # Errors
    /// A program is missing, or does not listen in time.
    pub fn start(host: &Namespace, datapath: Datapath, directory: PathBuf, logs: &Path) -> Result<Self> {
        std::fs::create_dir_all(&directory).with_context(|| format!("creating {}", directory.display()))?;
        let path = |name: &str| directory.join(name).display().to_string();
        let (file, socket) = (path("conf.db"), path("db.sock"));
        command::run("ovsdb-tool", &["create", &file, SCHEMA])?;
        let mut command = host.command("ovsdb-server");
        command.arg(&file).arg(format!("--remote=punix:{socket}")).arg(format!("--unixctl={}", path("db.ctl")));
        let mut database = Program::start(command, "ovsdb-server", &logs.join("ovsdb-server.log"))?;
        wait_for(&mut database, Path::new(&socket))?;
        if let Datapath::Dpdk { processor, max_sleep_us } = datapath {
            let mask = 1u64 << processor;
            let settings = [
                "other_config:dpdk-init=true".to_owned(),
                "other_config:dpdk-extra=--no-huge --legacy-mem --no-pci --no-shconf -m 2048".to_owned(),
                format!("other_config:pmd-cpu-mask={mask:#x}"),
                format!("other_config:dpdk-lcore-mask={mask:#x}"),
                format!("other_config:pmd-maxsleep={max_sleep_us}"),
            ];
            let database = format!("--db=unix:{socket}");
            let mut all = vec![database.as_str(), "--no-wait", "--timeout=10", "set", "Open_vSwitch", "."];
            all.extend(settings.iter().map(String::as_str));
            command::run("ovs-vsctl", &all)?;
        }
        let mut command = host.command(datapath.program());
        // The directory for sockets of bridges.
        command.env("OVS_RUNDIR", &directory).env(LARGE_PAGES.0, LARGE_PAGES.1);
        command.arg(format!("unix:{socket}")).arg(format!("--unixctl={}", path("switch.ctl")));
        let mut switch = Program::start(command, "ovs-vswitchd", &logs.join("ovs-vswitchd.log"))?;
        wait_for(&mut switch, &directory.join("switch.ctl"))?;
        Ok(Self { switch, _database: database, directory })
    }

    /// Runs `ovs-vsctl` with the words of `arguments`, and waits until the switch has applied the change.
    ///
    /// # Errors
    /// The error of `ovs-vsctl`.
    pub fn configure(&self, arguments: &str) -> Result<()> {
        let database = format!("--db=unix:{}", self.directory.join("db.sock").display());
        let mut all = vec![database.as_str(), "--timeout=60"];
        all.extend(arguments.split_whitespace());
        command::run("ovs-vsctl", &all)?;
        Ok(())
    }

    /// The socket of the vhost-user port `port`.
    pub fn socket(&self, port: &str) -> PathBuf {
        self.directory.join(port)
    }

    /// Processor time that the switch has used so far, s.
    ///
    /// # Errors
    /// The switch has ended.
    pub fn cpu_seconds(&self) -> Result<f64> {
        process::cpu_seconds_of_group(self.switch.pid())
    }

    /// Stops (`still`) or continues the switch.
    ///
    /// # Errors
    /// The switch has ended.
    pub fn freeze(&self, still: bool) -> Result<()> {
        process::freeze(self.switch.pid(), still)
    }

    /// Runs `ovs-appctl` with `arguments`.
    ///
    /// # Errors
    /// The error of `ovs-appctl`.
    pub fn tell(&self, arguments: &[&str]) -> Result<String> {
        let target = self.directory.join("switch.ctl").display().to_string();
        command::run("ovs-appctl", &[&["-t", &target], arguments].concat())
    }

    /// Adds an OpenFlow group to `bridge`.
    ///
    /// # Errors
    /// The error of `ovs-ofctl`.
    pub fn add_group(&self, bridge: &str, group: &str) -> Result<()> {
        command::run("ovs-ofctl", &["-O", "OpenFlow13", "add-group", &self.management(bridge), group])?;
        Ok(())
    }

    /// Replaces the flows of `bridge` atomically by `flows`, one per line.
    ///
    /// # Errors
    /// The error of `ovs-ofctl`.
    pub fn replace_flows(&self, bridge: &str, flows: &str) -> Result<()> {
        let arguments = ["-O", "OpenFlow13", "--bundle", "replace-flows", &self.management(bridge), "-"];
        command::run_with_input("ovs-ofctl", &arguments, flows)?;
        Ok(())
    }

    /// The address for OpenFlow of `bridge`.
    fn management(&self, bridge: &str) -> String {
        format!("unix:{}", self.directory.join(format!("{bridge}.mgmt")).display())
    }

    /// Returns an error if the switch has ended.
    ///
    /// # Errors
    /// The switch has ended; the error contains its output.
    pub fn check_alive(&mut self) -> Result<()> {
        match self.switch.try_wait()? {
            None => Ok(()),
            Some(status) => bail!("ovs-vswitchd ended ({status}): {}", self.switch.output()?),
        }
    }
}

fn wait_for(program: &mut Program, socket: &Path) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while !socket.exists() {
        if let Some(status) = program.try_wait()? {
            bail!("Open vSwitch ended ({status}): {}", program.output()?);
        }
        if Instant::now() > deadline {
            bail!("Open vSwitch does not listen at {}: {}", socket.display(), program.output()?);
        }
        interrupt::sleep(Duration::from_millis(20))?;
    }
    Ok(())
}
