//! Pods in containers that announce themselves: a switch (FRR, and the kernel forwards), two hosts behind it, a BGP proxy
//! (FRR), and `bifrost-nicd` with the pods that `bifrostctl gw pod` makes.

use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::frames::{self, Inner};
use super::programs::Daemon;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::process::Program;
use crate::{command, interrupt};

/// How long a step may take.
const PATIENCE: Duration = Duration::from_secs(30);
/// What pods announce.
const VIP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const FRR: &str = "/usr/lib/frr";
/// Flows of probes: the switch spreads them.
const FLOWS: usize = 64;
/// Of the receiver's socket, bytes.
const BUFFER: usize = 32 << 20;

/// The network. Dropping it ends and removes all of it.
#[derive(Debug)]
pub struct Fabric {
    // The order matters: containers and programs end before their namespaces go.
    podman: Podman,
    programs: Vec<Program>,
    _nicd: Daemon,
    ctl: PathBuf,
    directory: PathBuf,
    switch: Namespace,
    hosts: [Namespace; 2],
    _others: [Namespace; 2],
}

/// Podman with a storage of its own. Dropping it removes the containers.
#[derive(Debug)]
struct Podman(PathBuf);

impl Drop for Podman {
    fn drop(&mut self) {
        let _ = self.run(&["rm", "--force", "--all", "--time", "0"]);
    }
}

impl Podman {
    fn start(directory: &Path, pod: &Path) -> Result<Self> {
        let at = |name: &str| directory.join(name).display().to_string();
        // Without limits of its own, which a container that runs the lab may not raise.
        let settings = "[containers]\ndefault_ulimits = [\"nofile=1024:1024\", \"nproc=1024:1024\"]\n\
                        [engine]\ncgroup_manager = \"cgroupfs\"\nevents_logger = \"file\"\nruntime = \"runc\"\n";
        std::fs::write(at("containers.conf"), settings)?;
        let script = format!(
            "#!/bin/sh\nexport CONTAINERS_CONF={}\n\
             exec podman --storage-driver vfs --root {} --runroot {} --tmpdir {} \"$@\"\n",
            at("containers.conf"),
            at("podman-root"),
            at("podman-run"),
            at("podman-tmp"),
        );
        let podman = Podman(directory.join("podman"));
        std::fs::write(&podman.0, script)?;
        std::fs::set_permissions(&podman.0, std::fs::Permissions::from_mode(0o755))?;
        let script = directory.join("gw-image.sh");
        std::fs::write(&script, include_str!("../../../../scripts/gw-image.sh"))?;
        let built = std::process::Command::new("sh").arg(&script).arg(pod).env("PODMAN", &podman.0).output();
        let built = built.with_context(|| format!("running {}", script.display()))?;
        let errors = String::from_utf8_lossy(&built.stderr);
        ensure!(built.status.success(), "the image cannot be built: {errors}");
        Ok(podman)
    }

    fn run(&self, arguments: &[&str]) -> Result<String> {
        command::run(&self.0.display().to_string(), arguments)
    }
}

impl Fabric {
    /// Builds it, without any pod.
    ///
    /// # Errors
    /// A program is missing, or FRR does not start.
    pub fn start(lab: &Lab, label: &str) -> Result<Self> {
        let pod = lab.binaries.gateway("bifrost-gw")?;
        let directory = lab.run.directory().join(label);
        std::fs::create_dir_all(&directory)?;
        let podman = Podman::start(&directory, pod)?;
        let create = |name: &str| Namespace::create(format!("{}-{label}-{name}", lab.run.id()));
        let (switch, gateway, proxy) = (create("switch")?, create("gateway")?, create("proxy")?);
        let hosts = [create("a")?, create("b")?];
        switch
            .ip_batch("link add br0 type bridge mcast_snooping 0\nlink set br0 up\naddr add 10.1.0.254/24 dev br0\n")?;
        switch.write_sysctls(&[
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/fib_multipath_hash_policy", "1"),
        ])?;
        let ends = [
            (&gateway, "gw0", "to-gateway"),
            (&proxy, "u0", "to-proxy"),
            (&hosts[0], "u0", "to-a"),
            (&hosts[1], "u0", "to-b"),
        ];
        for (end, device, port) in ends {
            let name = switch.name();
            end.ip_batch(&format!(
                "link add {device} mtu 1600 type veth peer name {port} mtu 1600 netns {name}\n\
                 link set {device} up addrgenmode none\n"
            ))?;
            switch.ip_batch(&format!("link set {port} up\n"))?;
            // The gateway takes no packet whose checksum is not finished.
            for (namespace, device) in [(end, device), (&switch, port)] {
                namespace.run("ethtool", &["-K", device, "tx", "off"], "")?;
            }
        }
        switch.ip_batch(
            "link set to-gateway master br0\nlink set to-proxy master br0\n\
             addr add 10.2.0.254/24 dev to-a\naddr add 10.3.0.254/24 dev to-b\n",
        )?;
        proxy.ip_batch("addr add 10.1.0.2/24 dev u0\n")?;
        hosts[0].ip_batch("addr add 10.2.0.11/24 dev u0\nroute add default via 10.2.0.254\n")?;
        hosts[1].ip_batch("addr add 10.3.0.12/24 dev u0\nroute add default via 10.3.0.254\n")?;
        let logs = lab.logs(label);
        let socket = directory.join("nicd.sock");
        let text = format!(
            "pods_directory = {:?}\ncontrol = {{ socket = {socket:?} }}\n\
             device = {{ name = \"gw0\", mtu = 1600, mode = \"packet\", frames = 16384 }}\n",
            directory.join("nicd"),
        );
        let nicd = Daemon::start(lab, &gateway, "bifrost-nicd", &text, socket, &logs)?;
        std::fs::write(directory.join("pods.toml"), TEMPLATE)?;
        let mut fabric = Fabric {
            podman,
            programs: Vec::new(),
            _nicd: nicd,
            ctl: lab.binaries.bifrostctl.clone(),
            directory,
            switch,
            hosts,
            _others: [gateway, proxy],
        };
        for end in ["switch", "proxy"] {
            fabric.start_frr(end, &logs)?;
        }
        Ok(fabric)
    }

    fn start_frr(&mut self, end: &str, logs: &Path) -> Result<()> {
        let namespace = if end == "switch" { &self.switch } else { &self._others[1] };
        let directory = self.directory.join(end);
        std::fs::create_dir(&directory)?;
        // FRR's programs become another user.
        std::fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o777))?;
        let at = |name: &str| directory.join(name).display().to_string();
        std::fs::write(at("empty"), "")?;
        for daemon in ["zebra", "bfdd", "bgpd"] {
            let mut command = namespace.command(format!("{FRR}/{daemon}"));
            command.args(["-f", &at("empty"), "-z", &at("zserv.api"), "-i", &at(&format!("{daemon}.pid"))]);
            command.args(["--vty_socket", &at(""), "-P", "0"]);
            if daemon == "bfdd" {
                command.args(["--bfdctl", &at("bfdd.sock")]);
            }
            let log = logs.join(format!("{end}-{daemon}.log"));
            self.programs.push(Program::start(command, daemon, &log)?);
            let vty = directory.join(format!("{daemon}.vty"));
            until("FRR starts", || Ok(vty.exists().then_some(())))?;
        }
        let site =
            "--asn 64512 --proxy 10.1.0.2 --pods 10.1.0.0/24 --switch-asn 65000 --switch 10.1.0.254 --vips 10.0.0.0/24";
        let arguments: Vec<&str> = ["gw", "bgp", "config", end].into_iter().chain(site.split(' ')).collect();
        std::fs::write(at("frr.conf"), command::run(&self.ctl.display().to_string(), &arguments)?)?;
        command::run("vtysh", &["--vty_socket", &directory.display().to_string(), "-f", &at("frr.conf")])?;
        Ok(())
    }

    /// `bifrostctl gw pod`; pods have one template.
    ///
    /// # Errors
    /// What it says.
    pub fn pod(&self, words: &[&str]) -> Result<Value> {
        let path = |name: &str| self.directory.join(name).display().to_string();
        let (nicd, pods, podman) = (path("nicd.sock"), path("pods"), self.podman.0.display().to_string());
        let all = ["--json", "gw", "--nicd", &nicd, "pod", "--podman", &podman, "--directory", &pods];
        let mut all: Vec<&str> = all.into_iter().chain(words.iter().copied()).collect();
        let template = path("pods.toml");
        if ["create", "scale", "migrate"].contains(&words[0]) {
            all.extend(["--template", &template]);
        }
        Ok(serde_json::from_str(&command::run(&self.ctl.display().to_string(), &all)?)?)
    }

    /// Sends a signal to the process of a pod's container.
    ///
    /// # Errors
    /// There is none.
    pub fn signal(&self, pod: &str, signal: Signal) -> Result<()> {
        let pid = self.podman.run(&["inspect", "--format", "{{.State.Pid}}", &format!("bifrost-gw-{pod}")])?;
        let pid = Pid::from_raw(pid.trim().parse()?).context("the container does not run")?;
        Ok(kill_process(pid, signal)?)
    }

    /// How many pods the switch sends packets to.
    ///
    /// # Errors
    /// The kernel does not say.
    pub fn next_hops(&self) -> Result<usize> {
        let routes = command::run("ip", &["-n", self.switch.name(), "-j", "route"])?;
        let routes: Value = serde_json::from_str(&routes)?;
        let routes = routes.as_array().context("a list of routes")?;
        let found = routes.iter().find(|route| route["dst"] == VIP.to_string());
        Ok(found.map_or(0, |route| route["nexthops"].as_array().map_or(1, Vec::len)))
    }

    /// Waits until the switch sends packets to as many pods, and says how long it took.
    ///
    /// # Errors
    /// It does not come to that.
    pub fn until_next_hops(&self, count: usize) -> Result<Duration> {
        let began = Instant::now();
        until("the switch has the pods' routes", || Ok((self.next_hops()? == count).then_some(())))?;
        Ok(began.elapsed())
    }

    /// Waits until BFD watches a pod.
    ///
    /// # Errors
    /// It does not come to that.
    pub fn until_watched(&self, pod: &str) -> Result<()> {
        let config = self.directory.join("pods").join(pod).join("gw.toml").display().to_string();
        let program = self.ctl.with_file_name("bifrost-gw").display().to_string();
        until("BFD is up", || {
            let state: Value = serde_json::from_str(&command::run(&program, &["--config", &config, "--json"])?)?;
            Ok((state["bgp"][0]["bfd"] == "up").then_some(()))
        })
    }

    /// Sends `per_second` probes from one host through the pods to the other, until they are stopped.
    ///
    /// # Errors
    /// The system's.
    pub fn probe(&self, per_second: u32) -> Result<Probes> {
        let open = |host: &Namespace, address: &'static str| {
            host.enter(move || UdpSocket::bind(address).with_context(|| format!("opening {address}")))
        };
        let sockets = (0..FLOWS).map(|_| open(&self.hosts[0], "10.2.0.11:0")).collect::<Result<Vec<_>>>()?;
        let receiver = open(&self.hosts[1], "10.3.0.12:4789")?;
        rustix::net::sockopt::set_socket_recv_buffer_size_force(&receiver, BUFFER)?;
        receiver.set_read_timeout(Some(Duration::from_secs(1)))?;
        let (stop, sent) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU32::new(0)));
        let (stopping, count) = (Arc::clone(&stop), Arc::clone(&sent));
        let send = move || {
            let began = Instant::now();
            for number in 0u32.. {
                if stopping.load(Ordering::Relaxed) {
                    return;
                }
                let (source, destination) = ([192, 168, 0, 1].into(), [192, 168, 0, 2].into());
                let inner = Inner { vni: 100, source, destination, ports: (number as u16, 9) };
                let Ok(headers) = frames::headers(&inner, 4) else { return };
                // What is in front is the kernel's.
                const OUTER: usize = 42;
                let packet = [&headers[OUTER..], &number.to_be_bytes()[..]].concat();
                // While no pod announces the address there is nowhere to send to.
                let _ = sockets[number as usize % FLOWS].send_to(&packet, (VIP, 4789));
                count.store(number + 1, Ordering::Relaxed);
                let due = began + Duration::from_secs(1) * (number + 1) / per_second;
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
        };
        let first = Arc::new(AtomicBool::new(false));
        let (seen, ended) = (Arc::clone(&first), Arc::clone(&stop));
        let receive = move || {
            let (mut received, mut buffer) = (0, [0; 2048]);
            loop {
                match receiver.recv(&mut buffer) {
                    Ok(_) => {
                        received += 1;
                        seen.store(true, Ordering::Relaxed);
                    }
                    // Nothing has come for a while.
                    Err(_) if ended.load(Ordering::Relaxed) => return received,
                    Err(_) => {}
                }
            }
        };
        Ok(Probes { stop, sent, first, sender: std::thread::spawn(send), receiver: std::thread::spawn(receive) })
    }
}

/// Probes under way.
#[derive(Debug)]
pub struct Probes {
    stop: Arc<AtomicBool>,
    sent: Arc<AtomicU32>,
    first: Arc<AtomicBool>,
    sender: JoinHandle<()>,
    receiver: JoinHandle<u32>,
}

impl Probes {
    /// Whether one has come.
    pub fn has_come(&self) -> bool {
        self.first.load(Ordering::Relaxed)
    }

    /// How many were sent, and how many of these came.
    ///
    /// # Errors
    /// A panic.
    pub fn stop(self) -> Result<(u32, u32)> {
        self.stop.store(true, Ordering::Relaxed);
        self.sender.join().map_err(|_| anyhow!("the sender panicked"))?;
        let received = self.receiver.join().map_err(|_| anyhow!("the receiver panicked"))?;
        Ok((self.sent.load(Ordering::Relaxed), received))
    }
}

/// Waits until `is` finds something.
///
/// # Errors
/// It does not.
pub fn until<T>(what: &str, mut is: impl FnMut() -> Result<Option<T>>) -> Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(found) = is()? {
            return Ok(found);
        }
        if Instant::now() > deadline {
            bail!("{what}: not within {PATIENCE:?}");
        }
        interrupt::sleep(Duration::from_millis(2))?;
    }
}

const TEMPLATE: &str = r#"[pod]
cores = 1
memory_mib = 256
links = ["10.1.0.11", "10.1.0.12", "10.1.0.13", "10.1.0.14"]
pipeline = { timeout_us = 1000000 }
[gateway]
addresses = ["10.0.0.1"]
on_link = ["10.1.0.0/24"]
router = "10.1.0.254"
sessions = 1024
ring_entries = 4096
[bgp]
asn = 64512
peers = ["10.1.0.2"]
bfd = { interval_ms = 50, multiplier = 3 }
[[vpcs]]
vni = 100
routes = [{ prefix = "192.168.0.0/24", to = "local" }]
hosts = [
  { address = "192.168.0.1", mac = "02:00:00:00:01:01", vtep = "10.2.0.11" },
  { address = "192.168.0.2", mac = "02:00:00:00:01:02", vtep = "10.3.0.12" },
]
"#;
