//! Pods in containers that announce their addresses: a switch (FRR or BIRD; the kernel forwards), hosts behind it, BGP
//! proxies (FRR), and `bifrost-nicd` with pods that `bifrostctl gw pod` creates.

use std::net::Ipv4Addr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::frr::Frr;
use super::openings::Openings;
use super::probes::Probes;
use super::programs;
use super::streams::Streams;
use super::supervised::Supervised;
use super::switch::{self, Switch};
use super::until::until;
use crate::command;
use crate::lab::Lab;
use crate::netns::Namespace;
use crate::state::PODMAN;

/// File name of the pods' template.
const TEMPLATE_FILE: &str = "pods.toml";
/// The address that pods announce.
const VIP: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
/// A server in the Internet. Guests reach it by NAT to an address that pods also announce.
const OUTSIDE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);

/// Settings of a network.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Number of BGP proxies of the server.
    pub proxies: usize,
    /// Whether BGP and BFD use the priority ring.
    pub priority: bool,
    /// Maximum number of packets per second that a pod processes; 0: no limit.
    pub pod_packets_per_second: u32,
    /// The switch's BGP daemon.
    pub switch: switch::Daemon,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { proxies: 1, priority: true, pod_packets_per_second: 0, switch: switch::Daemon::Frr }
    }
}

/// The network. Dropping it ends all programs and removes everything.
#[derive(Debug)]
pub struct Fabric {
    // The order matters: containers and programs end before their namespaces are deleted.
    podman: Podman,
    daemon: Switch,
    frrs: Vec<Frr>,
    nicd: Supervised,
    ctl: PathBuf,
    directory: PathBuf,
    switch: Namespace,
    hosts: [Namespace; 2],
    /// Hosts whose kernels have the guests' addresses.
    guests: [Namespace; 2],
    outside: Namespace,
    _proxies: Vec<Namespace>,
    _gateway: Namespace,
}

/// Podman with separate storage. Dropping it removes the containers.
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
        // Sets limits that do not exceed those of a container that runs the lab.
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
        let podman = Podman(directory.join(PODMAN));
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
    /// Builds the network, without pods.
    ///
    /// # Errors
    /// A program is missing, or FRR does not start.
    pub fn start(lab: &Lab, label: &str, settings: Settings) -> Result<Self> {
        let pod = lab.binaries.gateway("bifrost-gw")?;
        let directory = lab.run.directory().join(label);
        std::fs::create_dir_all(&directory)?;
        let podman = Podman::start(&directory, pod)?;
        let create = |name: &str| Namespace::create(format!("{}-{label}-{name}", lab.run.id()));
        let (switch, gateway) = (create("switch")?, create("gateway")?);
        let proxies =
            (0..settings.proxies).map(|number| create(&format!("proxy{number}"))).collect::<Result<Vec<_>>>()?;
        let hosts = [create("a")?, create("b")?];
        let guests = [create("c")?, create("d")?];
        let outside = create("e")?;
        switch
            .ip_batch("link add br0 type bridge mcast_snooping 0\nlink set br0 up\naddr add 10.1.0.254/24 dev br0\n")?;
        switch.write_sysctls(&[
            ("net/ipv4/ip_forward", "1"),
            ("net/ipv4/conf/all/rp_filter", "0"),
            ("net/ipv4/fib_multipath_hash_policy", "1"),
        ])?;
        let mut ends = vec![
            (&gateway, "gw0", "to-gateway".to_owned()),
            (&hosts[0], "u0", "to-a".to_owned()),
            (&hosts[1], "u0", "to-b".to_owned()),
            (&guests[0], "u0", "to-c".to_owned()),
            (&guests[1], "u0", "to-d".to_owned()),
            (&outside, "u0", "to-e".to_owned()),
        ];
        ends.extend(proxies.iter().enumerate().map(|(number, proxy)| (proxy, "u0", format!("to-proxy{number}"))));
        for (end, device, port) in &ends {
            let name = switch.name();
            end.ip_batch(&format!(
                "link add {device} mtu 1600 type veth peer name {port} mtu 1600 netns {name}\n\
                 link set {device} up addrgenmode none\n"
            ))?;
            switch.ip_batch(&format!("link set {port} up\n"))?;
            // The gateway drops packets with incomplete checksums.
            for (namespace, device) in [(*end, *device), (&switch, port)] {
                namespace.run("ethtool", &["-K", device, "tx", "off"], "")?;
            }
        }
        switch.ip_batch(
            "link set to-gateway master br0\n\
             addr add 10.2.0.254/24 dev to-a\naddr add 10.3.0.254/24 dev to-b\n\
             addr add 10.4.0.254/24 dev to-c\naddr add 10.5.0.254/24 dev to-d\n\
             addr add 10.6.0.254/24 dev to-e\nroute add 198.51.100.0/24 via 10.6.0.9\n",
        )?;
        outside.ip_batch(&format!(
            "addr add 10.6.0.9/24 dev u0\naddr add {OUTSIDE}/32 dev lo\nroute add default via 10.6.0.254\n"
        ))?;
        for (number, proxy) in proxies.iter().enumerate() {
            switch.ip_batch(&format!("link set to-proxy{number} master br0\n"))?;
            proxy.ip_batch(&format!("addr add {}/24 dev u0\n", proxy_address(number)))?;
        }
        hosts[0].ip_batch("addr add 10.2.0.11/24 dev u0\nroute add default via 10.2.0.254\n")?;
        hosts[1].ip_batch("addr add 10.3.0.12/24 dev u0\nroute add default via 10.3.0.254\n")?;
        for (number, guest) in guests.iter().enumerate() {
            guest.ip_batch(&host_of_guest(number))?;
            guest.run("ethtool", &["-K", "vx0", "tx", "off"], "")?;
        }
        let logs = lab.logs(label);
        let socket = directory.join("nicd.sock");
        let text = format!(
            "pods_directory = {:?}\ncontrol = {{ socket = {socket:?} }}\n\
             device = {{ name = \"gw0\", mtu = 1600, mode = \"packet\", frames = 16384 }}\n",
            directory.join("nicd"),
        );
        let file = directory.join("nicd.toml");
        std::fs::write(&file, text)?;
        let arguments = ["--config".to_owned(), file.display().to_string()];
        let nicd = lab.binaries.gateway("bifrost-nicd")?;
        let nicd = Supervised::start(&gateway, nicd, &arguments, &logs.join("bifrost-nicd.log"))?;
        until("the pipeline answers", || Ok(programs::state(&socket).ok()))?;
        std::fs::write(directory.join(TEMPLATE_FILE), template(settings))?;
        let ctl = lab.binaries.bifrostctl.clone();
        let config = |end: &str, daemon: &str, proxies: &[Ipv4Addr]| configuration(&ctl, end, daemon, proxies);
        let all: Vec<Ipv4Addr> = (0..settings.proxies).map(proxy_address).collect();
        let text = config("switch", settings.switch.name(), &all)?;
        let daemon = Switch::start(settings.switch, &switch, &directory.join("switch"), "switch", text, &logs)?;
        let start_proxy = |(number, (namespace, address)): (usize, (&Namespace, &Ipv4Addr))| {
            let name = format!("proxy-{number}");
            let text = config("proxy", "frr", &[*address])?;
            Frr::start(namespace, &directory.join(&name), &name, &[text], &logs)
        };
        let frrs = proxies.iter().zip(&all).enumerate().map(start_proxy).collect::<Result<Vec<_>>>()?;
        Ok(Fabric {
            podman,
            daemon,
            frrs,
            nicd,
            ctl,
            directory,
            switch,
            hosts,
            guests,
            outside,
            _proxies: proxies,
            _gateway: gateway,
        })
    }

    /// The daemon of the switch.
    pub fn switch(&self) -> &Switch {
        &self.daemon
    }

    /// FRR of a proxy.
    pub fn proxy(&self, number: usize) -> &Frr {
        &self.frrs[number]
    }

    /// The process of `bifrost-nicd`, which restarts when it has ended.
    pub fn pipeline(&self) -> &Supervised {
        &self.nicd
    }

    /// The state of a pod.
    ///
    /// # Errors
    /// The pod does not answer.
    pub fn pod_state(&self, pod: &str) -> Result<Value> {
        programs::state(&self.directory.join("pods").join(pod).join("gw.sock"))
    }

    /// Runs `bifrostctl gw pod`. All pods have the same template.
    ///
    /// # Errors
    /// Those of the command.
    pub fn pod(&self, words: &[&str]) -> Result<Value> {
        let template = self.directory.join(TEMPLATE_FILE).display().to_string();
        let needed = ["create", "scale", "migrate"].contains(&words[0]);
        let more: &[&str] = if needed { &["--template", &template] } else { &[] };
        Ok(serde_json::from_str(&self.tool(&[words, more].concat())?)?)
    }

    /// Replaces the pods of a service by those of a template with an insignificant difference.
    ///
    /// # Errors
    /// Those of `bifrostctl gw pod upgrade`.
    pub fn upgrade(&self, service: &str, watch_seconds: &str) -> Result<Value> {
        let (old, new) = (self.directory.join(TEMPLATE_FILE), self.directory.join("upgraded.toml"));
        std::fs::write(&new, std::fs::read_to_string(old)?.replace("memory_mib = 256", "memory_mib = 260"))?;
        let new = new.display().to_string();
        let words = ["upgrade", service, "--template", &new, "--watch-seconds", watch_seconds];
        Ok(serde_json::from_str(&self.tool(&words)?)?)
    }

    /// Scales a service to the number of pods that its load needs, for some seconds.
    ///
    /// # Errors
    /// Those of `bifrostctl gw pod autoscale`.
    pub fn autoscale(&self, service: &str, seconds: u32) -> Result<()> {
        let (template, looks) = (self.directory.join(TEMPLATE_FILE).display().to_string(), seconds.to_string());
        let words = ["autoscale", service, "--template", &template, "--looks", &looks, "--out-after", "1"];
        self.tool(&[&words[..], &["--high", "50", "--low", "1", "--max", "3"]].concat()).map(drop)
    }

    fn tool(&self, words: &[&str]) -> Result<String> {
        let path = |name: &str| self.directory.join(name).display().to_string();
        let (nicd, pods, podman) = (path("nicd.sock"), path("pods"), self.podman.0.display().to_string());
        let all = ["--json", "gw", "--nicd", &nicd, "pod", "--podman", &podman, "--directory", &pods];
        command::run(&self.ctl.display().to_string(), &[&all[..], words].concat())
    }

    /// Sends a signal to the process of a pod's container.
    ///
    /// # Errors
    /// There is no such process.
    pub fn signal(&self, pod: &str, signal: Signal) -> Result<()> {
        let pid = self.podman.run(&["inspect", "--format", "{{.State.Pid}}", &format!("bifrost-gw-{pod}")])?;
        let pid = Pid::from_raw(pid.trim().parse()?).context("the container does not run")?;
        Ok(kill_process(pid, signal)?)
    }

    /// Number of pods to which the switch sends packets.
    ///
    /// # Errors
    /// The kernel's routes cannot be read.
    pub fn next_hops(&self) -> Result<usize> {
        let routes = command::run("ip", &["-n", self.switch.name(), "-j", "route"])?;
        let routes: Value = serde_json::from_str(&routes)?;
        let routes = routes.as_array().context("a list of routes")?;
        let found = routes.iter().find(|route| route["dst"] == VIP.to_string());
        Ok(found.map_or(0, |route| route["nexthops"].as_array().map_or(1, Vec::len)))
    }

    /// Waits until the switch sends packets to this number of pods. Returns how long that took.
    ///
    /// # Errors
    /// Timeout.
    pub fn until_next_hops(&self, count: usize) -> Result<Duration> {
        let began = Instant::now();
        until("the switch has the pods' routes", || Ok((self.next_hops()? == count).then_some(())))?;
        Ok(began.elapsed())
    }

    /// Waits until BFD is up with a pod.
    ///
    /// # Errors
    /// Timeout.
    pub fn until_watched(&self, pod: &str) -> Result<()> {
        until("BFD is up", || {
            let state = self.pod_state(pod)?;
            let peers = state["bgp"].as_array();
            Ok(peers.is_some_and(|peers| peers.iter().all(|peer| peer["bfd"] == "up")).then_some(()))
        })
    }

    /// Sends `per_second` probes from one host through the pods to the other, until they are stopped.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn probe(&self, per_second: u32) -> Result<Probes> {
        Probes::start(&self.hosts, VIP, per_second)
    }

    /// Opens TCP streams from one guest through the pods to the other.
    ///
    /// # Errors
    /// A stream cannot be opened.
    pub fn stream(&self) -> Result<Streams<'_>> {
        Streams::start(&self.guests[0], &self.guests[1], guest_address(1))
    }

    /// Like [`stream`](Self::stream), from the other guest through NAT to a server in the Internet.
    ///
    /// # Errors
    /// A stream cannot be opened.
    pub fn stream_outside(&self) -> Result<Streams<'_>> {
        Streams::start(&self.guests[1], &self.outside, OUTSIDE)
    }

    /// Opens connections from a guest to a server in the Internet, one after the other, until they are stopped.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn open_outside(&self) -> Result<Openings> {
        Openings::start(&self.guests[0], &self.outside, OUTSIDE)
    }
}

/// The output of `bifrostctl gw bgp config` for an end of the sessions between proxies and switch.
fn configuration(ctl: &Path, end: &str, daemon: &str, proxies: &[Ipv4Addr]) -> Result<String> {
    let proxies: Vec<String> = proxies.iter().map(Ipv4Addr::to_string).collect();
    let proxies = proxies.join(",");
    let site = "--asn 64512 --pods 10.1.0.0/24 --switch-asn 65000 --switch 10.1.0.254 --vips 10.0.0.0/24";
    let words = ["gw", "bgp", "config", end, "--daemon", daemon, "--proxy", &proxies].into_iter();
    command::run(&ctl.display().to_string(), &words.chain(site.split(' ')).collect::<Vec<_>>())
}

/// The address of a proxy on the link.
fn proxy_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 1, 0, 2 + number as u8)
}

/// The address of a guest, which its host's kernel has.
fn guest_address(number: usize) -> Ipv4Addr {
    Ipv4Addr::new(192, 168, 0, 3 + number as u8)
}

/// Commands of `ip -batch` for a host whose kernel sends a guest's packets to the pods.
fn host_of_guest(number: usize) -> String {
    let (network, own, other) = (4 + number, guest_address(number), guest_address(1 - number));
    let local = format!("10.{network}.0.{}", 13 + number);
    format!(
        "addr add {local}/24 dev u0\nroute add default via 10.{network}.0.254\n\
         link add vx0 mtu 1500 address 02:00:00:00:01:{mac:02x} type vxlan id 100 local {local} remote {VIP} \
         dstport 4789 nolearning\n\
         link set vx0 up addrgenmode none\naddr add {own}/24 dev vx0\n\
         neigh add {other} lladdr 02:00:00:00:00:01 dev vx0\n\
         neigh add {ROUTER} lladdr 02:00:00:00:00:01 dev vx0\nroute add 198.51.100.0/24 via {ROUTER} dev vx0\n",
        mac = own.octets()[3],
    )
}

/// The template of all pods.
fn template(settings: Settings) -> String {
    let Settings { proxies, priority, pod_packets_per_second, .. } = settings;
    let peers: Vec<String> = (0..proxies).map(|number| format!("\"{}\"", proxy_address(number))).collect();
    let tests = format!("packets_per_second = {pod_packets_per_second}, control_with_data = {}", !priority);
    // Under overload, the ring has less room than an order queue, so that the ring fills first.
    let ring = if pod_packets_per_second > 0 { "256" } else { "4096" };
    TEMPLATE
        .replace("PEERS", &peers.join(", "))
        .replace("PRIORITY", &priority.to_string())
        .replace("TESTS", &tests)
        .replace("RING", ring)
}

/// The gateway's address in the guests' network.
const ROUTER: Ipv4Addr = Ipv4Addr::new(192, 168, 0, 254);

const TEMPLATE: &str = r#"tests = { TESTS }
[pod]
cores = 1
memory_mib = 256
links = ["10.1.0.11", "10.1.0.12", "10.1.0.13", "10.1.0.14", "10.1.0.15"]
pipeline = { timeout_us = 1000000, priority = PRIORITY }
[gateway]
addresses = ["10.0.0.1"]
on_link = ["10.1.0.0/24"]
router = "10.1.0.254"
sessions = 1024
ring_entries = RING
[bgp]
asn = 64512
peers = [PEERS]
announce = ["10.0.0.1/32", "10.0.0.200/32"]
bfd = { interval_ms = 50, multiplier = 3 }
[[pools]]
name = "nat"
addresses = ["10.0.0.200"]
[[internet]]
prefix = "0.0.0.0/0"
next_hop = "10.1.0.254"
[[vpcs]]
vni = 100
routers = ["192.168.0.254"]
snat = "nat"
routes = [{ prefix = "192.168.0.0/24", to = "local" }, { prefix = "0.0.0.0/0", to = "internet" }]
hosts = [
  { address = "192.168.0.1", mac = "02:00:00:00:01:01", vtep = "10.2.0.11" },
  { address = "192.168.0.2", mac = "02:00:00:00:01:02", vtep = "10.3.0.12" },
  { address = "192.168.0.3", mac = "02:00:00:00:01:03", vtep = "10.4.0.13" },
  { address = "192.168.0.4", mac = "02:00:00:00:01:04", vtep = "10.5.0.14" },
]
"#;
