//! A gateway on a third host, and what it connects: two hosts with guests, an Internet server, and optionally a
//! customer's office.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Stdio};

use bifrost_control::Client;
use bifrost_control::api::{GatewayPod, GatewayTransport};

use super::office::Office;
use super::trunk::Trunk;
use crate::common::host::{Host, PATIENT, vpc};
use crate::common::{Guest, Lab, Net, Options, eventually};

const NICD: &str = r#"control = { socket = "DIR/nicd.sock" }
device = { name = "l0", mtu = 1700 }
[[pods]]
name = "vpc"
number = 1
cores = 2
timeout_us = 100000
own = [OWN]
interfaces = [{ VLAN socket = "DIR/vpc.sock" }]
"#;
const TRANSPORT: &str = r#"[pods.transport]
addresses = ["GATEWAY"]
mac = "02:00:00:00:00:fe"
vnis = [100, 200, 300]
hosts = [["HOST1"], ["HOST2"]]
initial_rto_us = 200000
rto_floor_us = 200000
"#;
const POD: &str = r#"control = { socket = "DIR/gw.sock" }
[gateway]
pod = 1
cores = 2
interfaces = ["DIR/vpc.sock"]
addresses = [OWN]
mac = "02:00:00:00:00:fe"
mtu = 1700
on_link = ["172.31.0.0/24", "fd00::/64"]
[[pools]]
name = "nat"
addresses = ["203.0.113.200"]
[[pools]]
name = "service"
vni = 300
addresses = ["100.64.1.1"]
[[tunnels]]
name = "office"
vni = 100
remote = "OFFICE"
kind = "gre"
key = 7
[[vpcs]]
vni = 100
routers = ["10.1.0.254", "fd01::fe"]
snat = "nat"
routes = [
  { prefix = "10.1.0.0/24", to = "local" },
  { prefix = "fd01::/64", to = "local" },
  { prefix = "10.50.0.0/16", to = "idc:office" },
  { prefix = "fd50::/64", to = "idc:office" },
  { prefix = "10.2.0.0/24", to = "peer:200" },
  { prefix = "0.0.0.0/0", to = "internet" },
]
hosts = [
  { address = "10.1.0.1", mac = "02:00:00:00:00:01", vtep = "HOST1" },
  { address = "fd01::1", mac = "02:00:00:00:00:01", vtep = "HOST1" },
]
[[vpcs]]
vni = 200
routes = [{ prefix = "10.2.0.0/24", to = "local" }, { prefix = "10.1.0.0/24", to = "peer:100" }]
hosts = [{ address = "10.2.0.2", mac = "02:00:00:00:00:02", vtep = "HOST2" }]
[[vpcs]]
vni = 300
routes = [{ prefix = "100.64.0.0/24", to = "local" }]
hosts = [{ address = "100.64.0.80", mac = "02:00:00:00:00:03", vtep = "HOST2" }]
[[services]]
vni = 100
address = "10.9.0.80"
protocol = 6
port = 80
backend_vni = 300
pool = "service"
backends = ["100.64.0.80:8080"]
[[internet]]
prefix = "0.0.0.0/0"
next_hop = "172.31.0.9"
"#;

/// The network between hosts and gateway.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Underlay {
    /// Whether the hosts use the transport to the gateway.
    pub(super) transport: bool,
    /// Whether the outer headers are IPv6.
    pub(super) v6: bool,
    /// The VLAN of the gateway's frames; hosts have none.
    pub(super) vlan: Option<u16>,
    /// Whether there is a customer's office.
    pub(super) office: bool,
}

impl Underlay {
    /// The address of node `n`: the hosts are 1 and 2, the gateway is 3, the office's router is 20.
    pub(super) fn address(self, n: u8) -> String {
        if self.v6 { format!("fd00::{n}") } else { format!("172.31.0.{n}") }
    }

    fn fill(self, text: &str, directory: &Path) -> String {
        let own = if self.v6 { "\"172.31.0.3\", \"fd00::3\"" } else { "\"172.31.0.3\"" };
        let vlan = self.vlan.map_or(String::new(), |vlan| format!("vlan = {vlan},"));
        text.replace("DIR", &directory.display().to_string())
            .replace("OWN", own)
            .replace("VLAN", &vlan)
            .replace("GATEWAY", &self.address(3))
            .replace("HOST1", &self.address(1))
            .replace("HOST2", &self.address(2))
            .replace("OFFICE", &self.address(20))
    }
}

/// The programs of a gateway.
struct Programs {
    nicd: Child,
    pod: Child,
}

pub(super) struct World {
    pub(super) underlay: Underlay,
    programs: Programs,
    _trunk: Option<Trunk>,
    pub(super) office: Option<Office>,
    pub(super) internet: Net,
    pub(super) lab: Lab,
}

impl Drop for World {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{:#?}\n{:#?}", self.nicd().pipeline(), self.try_pod());
            for name in ["bifrost-nicd", "bifrost-gw"] {
                let log = self.lab.hosts[2].directory.join(format!("{name}.log"));
                eprintln!("{name}: {}", std::fs::read_to_string(log).unwrap_or_default());
            }
        }
        for child in [&mut self.programs.nicd, &mut self.programs.pod] {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// A VPC whose guests send packets for other subnets to the gateway.
fn network(vni: u32, routers: &[&str]) -> (String, String) {
    let section = format!("{}gateway = {routers:?}\n", vpc(vni, "all", "flow"));
    let route = |prefix: &str| {
        let mac = "02:00:00:00:00:fe";
        format!("[[route]]\nvni = {vni}\nprefix = \"{prefix}\"\npeer = \"host-c\"\nmac = \"{mac}\"\n")
    };
    let mut routes = route("0.0.0.0/0");
    if routers.len() > 1 {
        routes += &route("::/0");
    }
    (section, routes)
}

/// Starts a program of the gateway, which is built with the workspace's tests.
fn start(host: &Host, underlay: Underlay, name: &str, config: &str) -> Child {
    let program = Path::new(env!("CARGO_BIN_EXE_bifrostd")).with_file_name(name);
    assert!(program.is_file(), "{} is missing: cargo build -p bifrost-gatewayd", program.display());
    let directory = &host.directory;
    let file = directory.join(format!("{name}.toml"));
    std::fs::write(&file, underlay.fill(config, directory)).unwrap();
    let log = File::options().create(true).append(true).open(directory.join(format!("{name}.log"))).unwrap();
    let mut command = host.net.command(program.to_str().unwrap());
    command.arg("--config").arg(file).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.spawn().unwrap()
}

fn start_nicd(host: &Host, underlay: Underlay) -> Child {
    let transport = if underlay.transport { TRANSPORT } else { "" };
    start(host, underlay, "bifrost-nicd", &format!("{NICD}{transport}"))
}

impl World {
    /// `a` is in VPC 100 on the first host; `b` in VPC 200 and `s`, a service's backend in VPC 300, are on the second;
    /// the gateway uses the third host's device.
    pub(super) fn new(underlay: Underlay) -> World {
        let networks: [(u32, &[&str]); 3] =
            [(100, &["10.1.0.254", "fd01::fe"]), (200, &["10.2.0.254"]), (300, &["100.64.0.254"])];
        let networks = networks.map(|(vni, routers)| network(vni, routers));
        let vpcs = networks.iter().map(|(section, _)| section.as_str()).collect();
        let options = Options { links: 1, v6: underlay.v6, vpcs, transport: PATIENT.to_owned(), ..Options::default() };
        let mut lab = Lab::of(3, options);
        lab.add(0, Guest::new("a", 1, &["10.1.0.1/24", "fd01::1/64"]).gateway("10.1.0.254"));
        lab.add(1, Guest::new("b", 2, &["10.2.0.2/24"]).vni(200).gateway("10.2.0.254"));
        lab.add(1, Guest::new("s", 3, &["100.64.0.80/24"]).vni(300).gateway("100.64.0.254"));
        // The peers of the first two hosts are each other, and the gateway.
        let peer = |transport: &str| format!("[\"{}\"]\ntransport = \"{transport}\"", underlay.address(3));
        for host in &mut lab.hosts[..2] {
            assert!(host.config.contains(&peer("auto")));
            if !underlay.transport {
                host.config = host.config.replace(&peer("auto"), &peer("plain"));
            }
            networks.iter().for_each(|(_, route)| host.config.push_str(route));
        }
        // Packets from the Internet are not larger than the guests' MTU.
        let internet = node(&lab, "internet", 1500);
        internet.ip(
            "addr add 172.31.0.9/24 dev l0\naddr add 198.51.100.1/32 dev lo\nroute add 203.0.113.0/24 via 172.31.0.3\n",
        );
        lab.hosts[2].net.ip("addr flush dev l0\nlink set l0 addrgenmode none\n");
        // A veth pair leaves checksums incomplete and packets unsegmented for the other kernel, unlike a NIC. The
        // gateway bypasses that kernel.
        for net in [&lab.hosts[0].net, &lab.hosts[1].net] {
            disable_offloads(net);
        }
        let trunk = underlay.vlan.map(|vlan| Trunk::start(lab.bridges.as_ref().unwrap(), vlan));
        let office = underlay.office.then(|| Office::start(node(&lab, "office", 1700), underlay));
        let host = &lab.hosts[2];
        let programs = Programs { nicd: start_nicd(host, underlay), pod: start(host, underlay, "bifrost-gw", POD) };
        lab.hosts[..2].iter_mut().for_each(|host| drop(host.start()));
        lab.net("a").ip("route add default via fd01::fe\n");
        let world = World { underlay, programs, _trunk: trunk, office, internet, lab };
        world.wait_for_neighbors();
        world
    }

    pub(super) fn wait_for_neighbors(&self) {
        let Underlay { office, .. } = self.underlay;
        let nodes = [1, 2].into_iter().chain(office.then_some(20)).map(|n| self.underlay.address(n));
        let nodes: Vec<String> = nodes.chain(["172.31.0.9".to_owned()]).collect();
        eventually(20.0, "the gateway knows its neighbors", || {
            let known = self.try_pod().unwrap_or_default().neighbours;
            nodes.iter().all(|a| known.get(a).is_some_and(Option::is_some))
        });
    }

    /// Kills and restarts both programs.
    pub(super) fn restart(&mut self) {
        self.kill_nicd();
        self.programs.pod.kill().unwrap();
        self.programs.pod.wait().unwrap();
        self.programs.pod = start(&self.lab.hosts[2], self.underlay, "bifrost-gw", POD);
        self.start_nicd();
        self.wait_for_neighbors();
    }

    pub(super) fn kill_nicd(&mut self) {
        self.programs.nicd.kill().unwrap();
        self.programs.nicd.wait().unwrap();
    }

    pub(super) fn start_nicd(&mut self) {
        self.programs.nicd = start_nicd(&self.lab.hosts[2], self.underlay);
    }

    /// Whether the pod's process still runs.
    pub(super) fn pod_lives(&mut self) -> bool {
        self.programs.pod.try_wait().unwrap().is_none()
    }

    /// Runs `nft` in the namespace of the bridge between the hosts.
    pub(super) fn bridge(&self, command: &str, input: &str) -> String {
        let arguments: Vec<&str> = command.split_whitespace().collect();
        let done = self.lab.bridges.as_ref().unwrap().run("nft", &arguments, input);
        assert!(done.status.success(), "{done:?}");
        String::from_utf8_lossy(&done.stdout).into_owned()
    }

    /// The transport of the gateway's pod.
    pub(super) fn transport(&self) -> GatewayTransport {
        self.nicd().pipeline().unwrap().pods[0].transport.clone().unwrap_or_default()
    }

    pub(super) fn pod(&self) -> GatewayPod {
        self.try_pod().unwrap()
    }

    /// The sum of a counter of the pod's workers.
    pub(super) fn count(&self, name: &str) -> u64 {
        self.pod().workers.iter().map(|worker| worker.get(name).copied().unwrap_or(0)).sum()
    }

    fn nicd(&self) -> Client {
        Client::new(self.lab.hosts[2].directory.join("nicd.sock")).unwrap()
    }

    fn try_pod(&self) -> Option<GatewayPod> {
        Client::new(self.lab.hosts[2].directory.join("gw.sock")).unwrap().gateway_pod().ok()
    }
}

/// A namespace whose `l0` is connected to the bridge between the hosts.
fn node(lab: &Lab, name: &str, mtu: u16) -> Net {
    let (net, bridges) = (Net::new(lab.tag(), name), lab.bridges.as_ref().unwrap());
    net.ip(&format!("link add l0 mtu {mtu} type veth peer name {name} netns {}\nlink set l0 up\n", bridges.name()));
    bridges.ip(&format!("link set {name} mtu 1700\nlink set {name} master b0 up\n"));
    disable_offloads(&net);
    net
}

fn disable_offloads(net: &Net) {
    let done = net.run("ethtool", &["-K", "l0", "tx", "off", "tso", "off", "gso", "off"], "");
    assert!(done.status.success(), "{done:?}");
}
