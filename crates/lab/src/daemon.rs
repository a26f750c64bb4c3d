//! `bifrostd` and `bifrostctl`, as the lab runs them.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};

use crate::command;
use crate::interrupt;
use crate::options::{Guests, Options};
use crate::process;
use crate::state::Run;
use crate::topology::{Guest, Host, Topology};

/// The VNI of the guests' network.
pub const VNI: u32 = 100;

/// How long a daemon may take until it answers on its control socket.
const START_TIMEOUT: Duration = Duration::from_secs(10);

/// Ports on which the lab's programs listen: iperf3, redis-server.
pub(crate) const LISTENING: [u16; 2] = [5201, 6379];

/// The value of `vpc.reliability`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reliability {
    /// Plain VXLAN.
    Off,
    /// The BIFROST transport for TCP.
    Tcp,
}

/// Settings of the daemons.
#[derive(Debug, Clone, Default)]
pub struct Settings {
    /// The kind of guests.
    pub guests: Guests,
    /// `vpc.ordering`; `None`: the default.
    pub ordering: Option<&'static str>,
    /// `transport.group_packets`; `None`: the default.
    pub group_packets: Option<u32>,
    /// `transport.bundle_bytes`; `None`: the default.
    pub bundle_bytes: Option<u32>,
    /// `transport.rto_floor_us`; `None`: the default.
    pub rto_floor_us: Option<u32>,
    /// `transport.congestion_control`; `None`: the default.
    pub congestion_control: Option<&'static str>,
    /// `underlay.plain_paths = "flowlet"`.
    pub flowlets: bool,
    /// `underlay.port = "afxdp"`.
    pub af_xdp: bool,
    /// `workers.count`; `None`: one.
    pub workers: Option<u8>,
    /// Lets several packets cross a link as one buffer, like `--wire-offload`.
    pub wire_offload: bool,
    /// The guests' MTU, bytes; `None`: [`GUEST_MTU`](crate::topology::GUEST_MTU).
    pub guest_mtu: Option<u32>,
    /// `port.slicing` of virtual machines; `None`: the default.
    pub slicing: Option<bool>,
    /// Whether guests have a security group that allows traffic from their own network to the ports of the lab's
    /// programs.
    pub security_groups: bool,
    /// Whether a kernel VXLAN device hashes each flow onto its own link.
    pub spread_flows: bool,
    /// `underlay.paths` of each host, in the hosts' order; hosts without an entry get one path per link.
    pub paths: Vec<u8>,
    /// Text to append to each host's configuration, in the hosts' order.
    pub more: Vec<String>,
}

impl Settings {
    /// Fills in NSDI'26's values, where they differ from the defaults, for settings that are not chosen: one order
    /// for all traffic between two guests (4.2), a minimum retransmission timeout of 4 ms (4.3), and one datagram per
    /// packet.
    pub fn or_as_in_the_paper(&self) -> Self {
        let mut settings = self.clone();
        settings.ordering.get_or_insert("strict");
        settings.rto_floor_us.get_or_insert(4000);
        settings.bundle_bytes.get_or_insert(0);
        settings
    }

    /// The table `[transport]`; empty if all settings have their defaults.
    fn transport(&self) -> String {
        let keys = [
            ("group_packets", self.group_packets.map(|n| n.to_string())),
            ("bundle_bytes", self.bundle_bytes.map(|n| n.to_string())),
            ("rto_floor_us", self.rto_floor_us.map(|n| n.to_string())),
            ("congestion_control", self.congestion_control.map(|name| format!("\"{name}\""))),
        ];
        let lines: String = keys.iter().filter_map(|(key, n)| Some(format!("{key} = {}\n", n.as_ref()?))).collect();
        if lines.is_empty() { lines } else { format!("[transport]\n{lines}\n") }
    }
}

/// The paths of the daemon and its tool.
#[derive(Debug, Clone)]
pub struct Binaries {
    pub(crate) bifrostd: PathBuf,
    pub(crate) bifrostctl: PathBuf,
    /// `bifrost-nicd` and `bifrost-gw`.
    pub(crate) gateway: [PathBuf; 2],
    pub(crate) perf: PathBuf,
    pub(crate) cni: PathBuf,
    /// `bifrost-fleet`, and what it runs beside `bifrostd`: `bifrost-relay` and `bifrost-agent`.
    pub(crate) fleet: [PathBuf; 3],
}

impl Binaries {
    /// The path of a gateway program or of `bifrostd`, by name.
    ///
    /// # Errors
    /// The program does not exist.
    pub(crate) fn gateway(&self, name: &str) -> Result<&Path> {
        let path = self.gateway.iter().chain([&self.bifrostd]).find(|path| path.ends_with(name));
        built(path.with_context(|| format!("{name} is not known"))?)
    }

    /// `bifrost-perf`.
    ///
    /// # Errors
    /// The program does not exist.
    pub(crate) fn perf(&self) -> Result<&Path> {
        built(&self.perf)
    }

    /// `bifrost-cni`.
    ///
    /// # Errors
    /// The program does not exist.
    pub(crate) fn cni(&self) -> Result<&Path> {
        built(&self.cni)
    }

    /// `bifrost-fleet`, which finds the programs that it runs in its own directory.
    ///
    /// # Errors
    /// It or one of these programs does not exist.
    pub(crate) fn fleet(&self) -> Result<&Path> {
        self.fleet.iter().chain([&self.bifrostd]).try_for_each(|program| built(program).map(drop))?;
        Ok(&self.fleet[0])
    }

    /// Finds them in `--bin-dir`, or next to the lab's own executable.
    ///
    /// # Errors
    /// A mode of `options` needs a program that does not exist.
    pub fn find(options: &Options) -> Result<Self> {
        let directory = match &options.bin_dir {
            Some(directory) => directory.clone(),
            None => {
                let own = std::env::current_exe().context("finding the lab's own executable")?;
                own.parent().map(Path::to_path_buf).ok_or_else(|| anyhow!("{} has no directory", own.display()))?
            }
        };
        let program = |name: &str| directory.join(name);
        let found = Self {
            bifrostd: program("bifrostd"),
            bifrostctl: program("bifrostctl"),
            gateway: [program("bifrost-nicd"), program("bifrost-gw")],
            perf: program("bifrost-perf"),
            cni: program("bifrost-cni"),
            fleet: [program("bifrost-fleet"), program("bifrost-relay"), program("bifrost-agent")],
        };
        if options.modes.iter().any(|mode| mode.is_bifrostd()) {
            for program in [&found.bifrostd, &found.bifrostctl] {
                if !program.is_file() {
                    bail!(
                        "{} does not exist: build the workspace (`cargo build --release`), give its directory with \
                         --bin-dir, or run with --modes kernel_vxlan",
                        program.display()
                    );
                }
            }
        }
        Ok(found)
    }
}

/// An error that says what to do if `program` does not exist.
fn built(program: &Path) -> Result<&Path> {
    if !program.is_file() {
        bail!(
            "{} is missing: build the workspace (`cargo build --release`), or give its directory with --bin-dir",
            program.display()
        );
    }
    Ok(program)
}

/// One running `bifrostd`. Dropping it ends the process.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    /// The process that has taken over from the child, by an upgrade. It is not a child of this process.
    successor: Option<u32>,
    port: String,
    log: PathBuf,
    remote: Remote,
}

/// A handle for requests to a daemon, which may outlive the daemon.
#[derive(Debug, Clone)]
pub struct Remote {
    host: String,
    socket: PathBuf,
    bifrostctl: PathBuf,
}

impl Remote {
    /// The daemon's control socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// Runs `bifrostctl --json` with `arguments` against the daemon.
    ///
    /// # Errors
    /// The daemon does not answer, or refuses the command.
    pub fn control(&self, arguments: &[&str]) -> Result<Value> {
        let program = self.bifrostctl.to_string_lossy();
        let socket = self.socket.to_string_lossy();
        let mut all = vec!["--socket", &*socket, "--json"];
        all.extend_from_slice(arguments);
        let output = command::run(&program, &all).with_context(|| format!("asking bifrostd on {}", self.host))?;
        if output.trim().is_empty() {
            return Ok(Value::Null);
        }
        serde_json::from_str(&output)
            .with_context(|| format!("`bifrostctl {}` printed no JSON: {output}", all.join(" ")))
    }

    /// Sends a request directly to the daemon's API, as an agent does, without starting a program. Returns the answer.
    ///
    /// # Errors
    /// The daemon does not answer, or refuses the request.
    pub fn post(&self, target: &str, body: &Value) -> Result<Value> {
        let body = body.to_string();
        let request = format!(
            "POST {target} HTTP/1.1\r\nhost: bifrostd\r\nconnection: close\r\ncontent-type: application/json\r\n\
             content-length: {}\r\n\r\n{body}",
            body.len()
        );
        let mut answer = String::new();
        UnixStream::connect(&self.socket)
            .and_then(|mut stream| {
                stream.set_read_timeout(Some(START_TIMEOUT))?;
                stream.write_all(request.as_bytes())?;
                stream.read_to_string(&mut answer)
            })
            .with_context(|| format!("asking bifrostd on {} for {target}", self.host))?;
        ensure!(answer.starts_with("HTTP/1.1 200"), "bifrostd on {} refuses {target}: {answer}", self.host);
        let text = answer.split_once("\r\n\r\n").map_or("", |(_, text)| text);
        serde_json::from_str(text).with_context(|| format!("{target}: the answer is no JSON: {text}"))
    }
}

impl Daemon {
    /// Starts a daemon on every host and waits until all of them answer.
    pub fn start_all(
        run: &Run,
        topology: &Topology,
        reliability: Reliability,
        settings: &Settings,
        binaries: &Binaries,
        logs: &Path,
    ) -> Result<Vec<Self>> {
        let mut daemons = Vec::new();
        for host in &topology.hosts {
            daemons.push(Self::start(run, topology, host, reliability, settings, binaries, logs)?);
        }
        for daemon in &mut daemons {
            daemon.wait_until_ready()?;
        }
        Ok(daemons)
    }

    /// The process id.
    pub fn pid(&self) -> u32 {
        self.successor.unwrap_or_else(|| self.child.id())
    }

    /// The host's name.
    pub fn host(&self) -> &str {
        &self.remote.host
    }

    /// The name of the guest's port in the daemon.
    pub fn port(&self) -> &str {
        &self.port
    }

    /// Another handle for requests, for use by another thread.
    pub fn remote(&self) -> Remote {
        self.remote.clone()
    }

    /// Runs `bifrostctl --json` with `arguments` against this daemon.
    pub fn control(&self, arguments: &[&str]) -> Result<Value> {
        self.remote.control(arguments)
    }

    /// [`Remote::post`] to this daemon.
    ///
    /// # Errors
    /// Those of [`Remote::post`].
    pub fn post(&self, target: &str, body: &Value) -> Result<Value> {
        self.remote.post(target, body)
    }

    /// A counter of `bifrostctl stats`; 0 if it does not exist yet.
    pub fn counter(&self, name: &str) -> Result<u64> {
        let stats = self.control(&["stats"])?;
        Ok(stats.get("counters").and_then(|c| c.get(name)).and_then(Value::as_u64).unwrap_or(0))
    }

    /// Changes the configuration file, and makes the daemon reload it. Returns when the change is in force.
    ///
    /// # Errors
    /// The file cannot be read or written, or the daemon refuses it.
    pub fn reconfigure(&self, change: impl FnOnce(String) -> String) -> Result<()> {
        let file = self.log.with_extension("toml");
        let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        fs::write(&file, change(text)).with_context(|| format!("writing {}", file.display()))?;
        self.control(&["reload"]).map(drop)
    }

    /// Processor time that the process has used, s.
    ///
    /// # Errors
    /// `/proc` cannot be read.
    pub fn cpu_seconds(&self) -> Result<f64> {
        // A successor is in the same group.
        process::cpu_seconds_of_group(self.child.id())
    }

    /// Resident memory, KiB.
    ///
    /// # Errors
    /// The process has ended.
    pub fn memory_kib(&self) -> Result<f64> {
        let path = format!("/proc/{}/status", self.pid());
        let text = fs::read_to_string(&path).with_context(|| format!("reading {path}"))?;
        let line = text.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
        line.trim().trim_end_matches(" kB").parse().context("VmRSS is not a number")
    }

    /// An error if the process has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        let status = match self.successor {
            Some(successor) if process::is_alive(successor) => return Ok(()),
            Some(_) => "after an upgrade".to_owned(),
            None => match self.child.try_wait().context("asking for the daemon's status")? {
                None => return Ok(()),
                Some(status) => status.to_string(),
            },
        };
        bail!(
            "bifrostd on {} ended ({status}); the end of its log, {}:\n{}",
            self.remote.host,
            self.log.display(),
            self.log_tail()
        )
    }

    fn start(
        run: &Run,
        topology: &Topology,
        host: &Host,
        reliability: Reliability,
        settings: &Settings,
        binaries: &Binaries,
        logs: &Path,
    ) -> Result<Self> {
        fs::create_dir_all(logs).with_context(|| format!("creating {}", logs.display()))?;
        let socket = run.directory().join(format!("{}.sock", host.name));
        let config = logs.join(format!("{}.toml", host.name));
        fs::write(&config, configuration(run, topology, host, reliability, settings, &socket))
            .with_context(|| format!("writing {}", config.display()))?;
        let log = logs.join(format!("{}.log", host.name));
        Ok(Self {
            child: spawn(host, binaries, &log)?,
            successor: None,
            port: host.guest.name.clone(),
            log,
            remote: Remote { host: host.name.clone(), socket, bifrostctl: binaries.bifrostctl.clone() },
        })
    }

    /// Kills the process: peers are not notified, and nothing is cleaned up.
    ///
    /// # Errors
    /// The system refuses to signal or to reap the process.
    pub fn kill(&mut self) -> Result<()> {
        if let Some(successor) = self.successor.take() {
            return process::kill(successor);
        }
        self.child.kill().context("killing a daemon")?;
        self.child.wait().context("waiting for a daemon's end").map(drop)
    }

    /// Waits for the end of the program, and restarts it on `host` with the same configuration. It may not be ready
    /// yet.
    ///
    /// # Errors
    /// It does not end, or the program is missing.
    pub fn start_again(&mut self, host: &Host, binaries: &Binaries) -> Result<()> {
        // A daemon that another one has replaced still has its sockets while it exits.
        process::wait_for_end(self.pid(), START_TIMEOUT)?;
        self.child = spawn(host, binaries, &self.log)?;
        self.successor = None;
        Ok(())
    }

    /// Upgrades the daemon, to the same program. Returns the daemon's report.
    ///
    /// # Errors
    /// The upgrade fails. Then the process continues, unless the new one was killed after it had taken over.
    pub fn upgrade(&mut self) -> Result<Value> {
        let report = self.post("/v1/upgrade", &json!({}))?;
        let pid = report.get("pid").and_then(Value::as_u64).and_then(|pid| u32::try_from(pid).ok());
        let pid = pid.context("the report of an upgrade has no process id")?;
        let former = self.pid();
        if self.successor.replace(pid).is_none() {
            let status = self.child.wait().context("waiting for the end of the former daemon")?;
            ensure!(status.success(), "the former daemon on {} ended with {status}", self.remote.host);
        } else {
            process::wait_for_end(former, START_TIMEOUT)?;
        }
        Ok(report)
    }

    /// Waits until the daemon answers.
    ///
    /// # Errors
    /// The daemon has ended, or does not answer in time.
    pub fn wait_until_ready(&mut self) -> Result<()> {
        let deadline = Instant::now() + START_TIMEOUT;
        loop {
            self.check_alive()?;
            match status_over(&self.remote.socket) {
                Ok(()) => return Ok(()),
                Err(error) if Instant::now() > deadline => {
                    let message =
                        format!("bifrostd on {} does not answer; its log ends:\n{}", self.remote.host, self.log_tail());
                    return Err(error.context(message));
                }
                Err(_) => interrupt::sleep(Duration::from_millis(20))?,
            }
        }
    }

    fn log_tail(&self) -> String {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<_> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }
}

impl Drop for Daemon {
    /// Ends the process after saving its counters next to its log, as `<host>.stats.json` and so on.
    fn drop(&mut self) {
        if self.check_alive().is_ok() {
            for what in ["stats", "paths", "conns", "ports"] {
                if let Ok(answer) = self.control(&[what]) {
                    let file = self.log.with_extension(format!("{what}.json"));
                    // These files are logs, not results: a full disk must not end the experiment.
                    let _ = fs::write(file, format!("{answer:#}\n"));
                }
            }
        }
        match self.successor {
            Some(successor) => process::end_other(successor),
            None => process::end(&mut self.child),
        }
    }
}

/// Starts the program in the host's namespace. Its configuration is written next to its log.
fn spawn(host: &Host, binaries: &Binaries, log: &Path) -> Result<Child> {
    let file = File::options().create(true).append(true).open(log);
    let file = file.with_context(|| format!("opening {}", log.display()))?;
    let mut command = host.namespace.command(&binaries.bifrostd);
    command.arg("--config").arg(log.with_extension("toml"));
    command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file).process_group(0);
    command.spawn().with_context(|| command::missing("bifrostd"))
}

/// Sends `GET /v1/status` over the socket.
fn status_over(socket: &Path) -> Result<()> {
    let mut stream = UnixStream::connect(socket).with_context(|| format!("connecting to {}", socket.display()))?;
    stream.set_read_timeout(Some(Duration::from_secs(1)))?;
    stream.write_all(b"GET /v1/status HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut answer = [0; 12];
    stream.read_exact(&mut answer)?;
    if answer != *b"HTTP/1.1 200" {
        bail!("the control socket answered {:?}", String::from_utf8_lossy(&answer));
    }
    Ok(())
}

/// The socket of a virtual machine's port.
pub fn machine_socket(run: &Run, guest: &Guest) -> PathBuf {
    run.directory().join(format!("{}.vhost", guest.name))
}

/// The daemon's configuration for `host`.
fn configuration(
    run: &Run,
    topology: &Topology,
    host: &Host,
    reliability: Reliability,
    settings: &Settings,
    socket: &Path,
) -> String {
    let flowlets = if settings.flowlets { "plain_paths = \"flowlet\"\n" } else { "" };
    let underlay_port = if settings.af_xdp { "port = \"afxdp\"\n" } else { "" };
    let transport = settings.transport();
    let ordering = settings.ordering.map(|o| format!("ordering = \"{o}\"\n")).unwrap_or_default();
    let reliability = match reliability {
        Reliability::Off => "off",
        Reliability::Tcp => "tcp",
    };
    let number = topology.hosts.iter().position(|other| other.name == host.name);
    let guest = &host.guest;
    let (group, groups) = if settings.security_groups {
        let ports = LISTENING.map(|port| port.to_string()).join(", ");
        let group = format!(
            "[[security_group]]\nname = \"lab\"\n\
             ingress = [{{ protocol = \"tcp\", ports = [{ports}], from = [\"10.0.0.0/24\"] }}, {{ protocol = \"icmp\" \
             }}]\n\n"
        );
        (group, "security_groups = [\"lab\"]\n")
    } else {
        (String::new(), "")
    };
    let device = match settings.guests {
        Guests::Container => {
            format!("kind = \"tap\"\nnetns = \"{}\"\ndevice = \"eth0\"\n", guest.namespace.name())
        }
        Guests::Vm => {
            let slicing = settings.slicing.map(|on| format!("slicing = {on}\n")).unwrap_or_default();
            format!("kind = \"vhost-user\"\nsocket = \"{}\"\n{slicing}", machine_socket(run, guest).display())
        }
    };
    let mut text = format!(
        "# Written by bifrost-lab.\n\
         [host]\nname = \"{name}\"\n\n\
         [control]\nsocket = \"{socket}\"\n\n\
         [workers]\ncount = {workers}\n\n\
         [underlay]\naddresses = {addresses:?}\npaths = {paths}\nmtu = {underlay_mtu}\n{underlay_port}{flowlets}\n\
         {group}{transport}[[vpc]]\nvni = {VNI}\nreliability = \"{reliability}\"\n{ordering}\n\
         [[port]]\nname = \"{port}\"\nvni = {VNI}\nmac = \"{mac}\"\naddresses = [\"{address}/24\"]\n\
         mtu = {guest_mtu}\n{groups}{device}",
        name = host.name,
        workers = settings.workers.unwrap_or(1),
        socket = socket.display(),
        addresses = host.underlay.iter().map(ToString::to_string).collect::<Vec<_>>(),
        paths = number.and_then(|number| settings.paths.get(number)).unwrap_or(&topology.plan.paths),
        underlay_mtu = topology.plan.underlay_mtu(),
        guest_mtu = topology.plan.guest_mtu,
        port = guest.name,
        mac = guest.mac,
        address = guest.address,
    );
    for other in topology.hosts.iter().filter(|other| other.name != host.name) {
        text += &format!(
            "\n[[peer]]\nname = \"{name}\"\naddresses = {addresses:?}\n\n\
             [[route]]\nvni = {VNI}\nprefix = \"{prefix}/32\"\npeer = \"{name}\"\nmac = \"{mac}\"\n",
            name = other.name,
            addresses = other.underlay.iter().map(ToString::to_string).collect::<Vec<_>>(),
            prefix = other.guest.address,
            mac = other.guest.mac,
        );
    }
    if let Some(more) = number.and_then(|number| settings.more.get(number)) {
        text = text + "\n" + more;
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_of_an_experiment_override_those_of_the_paper() {
        let paper = Settings::default().or_as_in_the_paper();
        assert_eq!(
            (paper.ordering, paper.transport().as_str()),
            (Some("strict"), "[transport]\nbundle_bytes = 0\nrto_floor_us = 4000\n\n")
        );
        let chosen =
            Settings { ordering: Some("off"), group_packets: Some(1), ..Settings::default() }.or_as_in_the_paper();
        let transport = "[transport]\ngroup_packets = 1\nbundle_bytes = 0\nrto_floor_us = 4000\n\n";
        assert_eq!((chosen.ordering, chosen.transport().as_str()), (Some("off"), transport));
        assert_eq!(Settings::default().transport(), "");
    }
}
