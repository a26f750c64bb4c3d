//! Hosts that run the daemon, and their guests.

use std::fmt::Write as _;
use std::fs::File;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bifrost_control::api::{Conn, FaultSpec, FaultTarget, PortStatus, Status, UpgradeReport, UpgradeSpec};
use bifrost_control::client::ClientError;
use bifrost_control::{Client, balance};
use bifrost_lab::standstill::Watch;

use super::manager::Manager;
use super::{Counters, Net, netns};

/// How hosts are linked, and the common part of their configurations.
#[derive(Clone, Debug)]
pub struct Options {
    /// Links between the hosts, one address each.
    pub links: usize,
    /// Queues of each link's devices.
    pub queues: usize,
    /// IPv6 underlay.
    pub v6: bool,
    pub workers: usize,
    pub paths: usize,
    /// `[[vpc]]` sections.
    pub vpcs: String,
    /// Keys of `[transport]`.
    pub transport: String,
    /// `transport` of the peers.
    pub peer: &'static str,
    /// MTU of the links, bytes.
    pub mtu: u16,
    /// Whether routes have the guests' MTU as path MTU.
    pub path_mtu: bool,
}

/// Keys of `[transport]` for tests whose guests must not lose packets. The transport gives up a packet after three
/// timeouts, which together take more than a second here. On a busy machine, a daemon may get no CPU for as long as the
/// timeouts of a fast network.
pub const PATIENT: &str = "initial_rto_us = 200000\nrto_floor_us = 200000\n";

impl Default for Options {
    fn default() -> Self {
        Options {
            links: 2,
            queues: 1,
            v6: false,
            workers: 1,
            paths: 4,
            vpcs: vpc(100, "tcp", "flow"),
            transport: String::new(),
            peer: "auto",
            mtu: 1700,
            path_mtu: false,
        }
    }
}

/// A `[[vpc]]` section.
pub fn vpc(vni: u32, reliability: &str, ordering: &str) -> String {
    format!("[[vpc]]\nvni = {vni}\nreliability = \"{reliability}\"\nordering = \"{ordering}\"\n")
}

/// A guest in its own namespace, or in an existing one.
#[derive(Clone, Debug)]
pub struct Guest {
    pub name: &'static str,
    pub vni: u32,
    pub mac: String,
    /// With prefix lengths.
    pub addresses: Vec<&'static str>,
    pub mtu: u16,
    pub gateway: Option<&'static str>,
}

impl Guest {
    /// Guest number `n`, 1..=255, of VNI 100.
    pub fn new(name: &'static str, n: u8, addresses: &[&'static str]) -> Guest {
        let mac = format!("02:00:00:00:00:{n:02x}");
        Guest { name, vni: 100, mac, addresses: addresses.to_vec(), mtu: 1500, gateway: None }
    }

    pub fn vni(self, vni: u32) -> Guest {
        Guest { vni, ..self }
    }

    pub fn gateway(self, gateway: &'static str) -> Guest {
        Guest { gateway: Some(gateway), ..self }
    }

    pub fn mtu(self, mtu: u16) -> Guest {
        Guest { mtu, ..self }
    }

    pub fn mac_bytes(&self) -> [u8; 6] {
        let mut bytes = [0; 6];
        for (to, from) in bytes.iter_mut().zip(self.mac.split(':')) {
            *to = u8::from_str_radix(from, 16).unwrap();
        }
        bytes
    }
}

/// One host.
pub struct Host {
    pub net: Net,
    pub name: &'static str,
    pub addresses: Vec<IpAddr>,
    pub client: Client,
    pub directory: PathBuf,
    /// The configuration, which [`Host::start`] and [`Host::write_config`] write to the file.
    pub config: String,
    /// Service manager that keeps the daemon's descriptors, if there is one.
    pub manager: Option<Manager>,
    child: Option<Child>,
    /// The process that has taken over from the child. The child has ended.
    successor: Option<u32>,
}

impl Host {
    pub fn config_file(&self) -> PathBuf {
        self.directory.join(format!("{}.toml", self.name))
    }

    pub fn socket(&self) -> PathBuf {
        self.directory.join(format!("{}.sock", self.name))
    }

    pub fn log_file(&self) -> PathBuf {
        self.directory.join(format!("{}.log", self.name))
    }

    /// The daemon's state directory, if the test has created it.
    pub fn state_directory(&self) -> PathBuf {
        self.directory.join(format!("{}.state", self.name))
    }

    /// The file that names the stage that is to panic, for fault injection.
    pub fn injection_file(&self) -> PathBuf {
        self.directory.join(format!("{}.inject", self.name))
    }

    pub fn write_config(&self) {
        std::fs::write(self.config_file(), &self.config).unwrap();
    }

    /// Starts the daemon without waiting for it.
    pub fn spawn(&mut self) {
        self.write_config();
        let log = File::options().create(true).append(true).open(self.log_file()).unwrap();
        let daemon = env!("CARGO_BIN_EXE_bifrostd");
        let mut command = match &self.manager {
            None => self.net.command(daemon),
            Some(manager) => {
                let [program, arguments @ ..] = Manager::program(daemon);
                let mut command = self.net.command(program);
                manager.hand_over(command.args(arguments));
                command
            }
        };
        command
            .arg("--config")
            .arg(self.config_file())
            .env("BIFROST_INJECT_PANIC", self.injection_file())
            .stdin(Stdio::null())
            .stdout(log.try_clone().unwrap())
            .stderr(log);
        if self.state_directory().is_dir() {
            command.arg("--state").arg(self.state_directory());
        }
        self.child = Some(command.spawn().unwrap());
    }

    /// Starts the daemon and waits until it responds.
    pub fn start(&mut self) -> Status {
        self.spawn();
        let deadline = std::time::Instant::now() + Duration::from_secs(20);
        loop {
            match self.client.status() {
                Ok(status) => return status,
                Err(error) => {
                    let ended = self.child.as_mut().unwrap().try_wait().unwrap();
                    let late = std::time::Instant::now() > deadline;
                    assert!(ended.is_none() && !late, "{} is not ready: {error}; {ended:?}\n{}", self.name, self.log());
                }
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.log_file()).unwrap_or_default()
    }

    pub fn pid(&self) -> u32 {
        self.successor.unwrap_or_else(|| self.child.as_ref().unwrap().id())
    }

    /// Records an upgrade that the test has started itself.
    pub fn set_successor(&mut self, pid: u32) {
        self.successor = Some(pid);
        if let Some(mut child) = self.child.take() {
            let _ = child.wait();
        }
    }

    /// Upgrades the daemon to another program, or to the same one.
    pub fn upgrade(&mut self, binary: Option<&Path>) -> Result<UpgradeReport, ClientError> {
        let before = self.pid();
        let report = self.client.upgrade(&UpgradeSpec { binary: binary.map(Path::to_owned) })?;
        self.successor = Some(report.pid);
        match self.child.take() {
            Some(mut child) => {
                let mut status = None;
                super::eventually(10.0, "the old daemon exits", || {
                    status = child.try_wait().unwrap();
                    status.is_some()
                });
                assert!(status.unwrap().success(), "{}", self.log());
            }
            None => super::eventually(10.0, "the old daemon exits", || !is_alive(before)),
        }
        Ok(report)
    }

    /// `kill -9`.
    pub fn crash(&mut self) {
        if let Some(pid) = self.successor.take() {
            // It is not a child of this process.
            let _ = rustix::process::kill_process(
                rustix::process::Pid::from_raw(pid as i32).unwrap(),
                rustix::process::Signal::KILL,
            );
            super::eventually(10.0, "the daemon exits", || !is_alive(pid));
        }
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    pub fn signal(&self, signal: rustix::process::Signal) {
        let pid = rustix::process::Pid::from_raw(self.pid() as i32).unwrap();
        rustix::process::kill_process(pid, signal).unwrap();
    }

    /// Waits until the daemon exits.
    pub fn wait(&mut self, seconds: f64) -> ExitStatus {
        let mut status = None;
        let child = self.child.as_mut().unwrap();
        super::eventually(seconds, "the daemon exits", || {
            status = child.try_wait().unwrap();
            status.is_some()
        });
        self.child = None;
        status.unwrap()
    }

    /// SIGTERM and wait.
    pub fn stop(&mut self) -> ExitStatus {
        self.signal(rustix::process::Signal::TERM);
        self.wait(5.0)
    }

    pub fn counters(&self) -> Counters {
        self.client.stats().unwrap().counters
    }

    /// A counter; 0 if it does not exist yet.
    pub fn counter(&self, name: &str) -> u64 {
        self.counters().get(name).copied().unwrap_or(0)
    }

    /// Asserts that every packet is accounted for at every stage: on each worker at any time, and between workers after
    /// a moment. Skips a daemon that does not run.
    ///
    /// Workers are asked one after the other. Where packets pass between them all the time, their numbers never match;
    /// then what had entered a moment ago must have left, and the reverse. When traffic has ended, they must match.
    pub fn assert_balanced(&self) {
        let (mut before, mut now) = (Vec::new(), Vec::new());
        for _ in 0..100 {
            let Ok(samples) = self.client.samples() else { return };
            let unexplained = balance::unexplained(&samples);
            assert!(unexplained.is_empty(), "{}: packets vanished: {unexplained:#?}\n{samples:#?}", self.name);
            before = std::mem::replace(&mut now, balance::balance(&samples));
            if now.iter().all(|account| account.unexplained() == 0) {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        now.retain(|account| account.unexplained() != 0);
        for account in &now {
            let of_it = before.iter().find(|b| (&b.stage, &b.at) == (&account.stage, &account.at));
            let passes = of_it
                .is_some_and(|b| b.entered < account.entered && b.entered <= account.left && b.left <= account.entered);
            assert!(passes, "{}: packets vanished between workers: {of_it:#?}, then {account:#?}", self.name);
        }
    }

    /// The sum of all samples of a counter, including those of ports.
    pub fn sample(&self, counter: &str) -> u64 {
        let samples = self.client.samples().unwrap();
        let mut of_it = samples.iter().filter(|sample| sample.counter == counter).peekable();
        assert!(of_it.peek().is_some(), "{} has no {counter}", self.name);
        of_it.map(|sample| sample.value).sum()
    }

    pub fn port(&self, name: &str) -> PortStatus {
        self.client.ports().unwrap().into_iter().find(|p| p.name == name).unwrap()
    }

    pub fn drops(&self, port: &str, reason: &str) -> u64 {
        self.port(port).drops_packets.get(reason).copied().unwrap_or(0)
    }

    /// The connections with `remote`.
    pub fn conns_with(&self, remote: &Guest) -> Vec<Conn> {
        self.client.conns().unwrap().into_iter().filter(|c| c.vni == remote.vni && c.remote_mac == remote.mac).collect()
    }

    /// Injects a fault at a port; returns the fault's number.
    pub fn port_fault(&self, port: &str, set: impl FnOnce(&mut FaultSpec)) -> u64 {
        self.fault(FaultTarget::Port { name: port.to_string() }, set)
    }

    /// Injects a fault on a path, or on all paths, of packets from `peer`.
    pub fn path_fault(&self, peer: &str, path: Option<u8>, set: impl FnOnce(&mut FaultSpec)) -> u64 {
        self.fault(FaultTarget::Peer { name: peer.to_string(), path }, set)
    }

    fn fault(&self, target: FaultTarget, set: impl FnOnce(&mut FaultSpec)) -> u64 {
        let mut spec = FaultSpec::new(target);
        set(&mut spec);
        self.client.add_fault(&spec).unwrap().id
    }
}

/// Whether a process still has threads. A killed one is a zombie as soon as its first thread has ended, but the others
/// may still hold its descriptors.
fn is_alive(pid: u32) -> bool {
    if std::fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|threads| threads.count() > 1) {
        return true;
    }
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
}

impl Drop for Host {
    fn drop(&mut self) {
        self.crash();
    }
}

const NAMES: [&str; 3] = ["host-a", "host-b", "host-c"];

/// Only one lab runs at a time: two daemons, the kernel's work and the load need both CPUs.
static ONE: Mutex<()> = Mutex::new(());

/// Linked hosts and their guests.
pub struct Lab {
    pub hosts: Vec<Host>,
    guests: Vec<(Guest, Net)>,
    /// Namespace of the bridges, if there are any.
    pub bridges: Option<Net>,
    tag: String,
    options: Options,
    watch: Watch,
    _one: MutexGuard<'static, ()>,
}

impl Lab {
    /// Two hosts without guests; nothing runs yet.
    pub fn new(options: Options) -> Lab {
        Lab::of(2, options)
    }

    /// Two or three hosts; with three hosts, each link is a bridge.
    pub fn of(count: usize, options: Options) -> Lab {
        // A test that panicked while it held the lock has cleaned up, too.
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let tag = netns::tag();
        let directory = netns::directory(&tag);
        std::fs::create_dir_all(&directory).unwrap();
        let names = &NAMES[..count];
        let nets: Vec<Net> = names.iter().map(|name| Net::new(&tag, name)).collect();
        let bridges = (count > 2).then(|| Net::new(&tag, "bridges"));
        let mut lines = String::new();
        for link in 0..options.links {
            let (mtu, n) = (options.mtu, options.queues);
            let what = format!("mtu {mtu} numrxqueues {n} numtxqueues {n}");
            let Some(bridges) = bridges.as_ref().map(Net::name) else {
                let (a, b) = (nets[0].name(), nets[1].name());
                let device = format!("link add l{link} netns {a} {what} type veth");
                writeln!(lines, "{device} peer name l{link} netns {b} {what}").unwrap();
                continue;
            };
            writeln!(lines, "-n {bridges} link add b{link} mtu {mtu} type bridge\n-n {bridges} link set b{link} up")
                .unwrap();
            for (i, net) in nets.iter().enumerate() {
                let device = format!("link add l{link} netns {} {what} type veth", net.name());
                writeln!(lines, "{device} peer name l{link}h{i} netns {bridges} {what}").unwrap();
                writeln!(lines, "-n {bridges} link set l{link}h{i} master b{link} up").unwrap();
            }
        }
        let lines = lines.lines().map(|line| format!("ip {line}\n")).collect::<String>();
        netns::run("sh", &["-e"], &lines);
        let address = |link: usize, host: usize| -> IpAddr {
            let text =
                if options.v6 { format!("fd00:{link}::{}", host + 1) } else { format!("172.31.{link}.{}", host + 1) };
            text.parse().unwrap()
        };
        let mut hosts = Vec::new();
        for (i, net) in nets.into_iter().enumerate() {
            let (bits, nodad) = if options.v6 { (64, " nodad") } else { (24, "") };
            let mut lines = String::new();
            for link in 0..options.links {
                write!(lines, "addr add {}/{bits} dev l{link}{nodad}\nlink set l{link} up\n", address(link, i))
                    .unwrap();
            }
            net.ip(&lines);
            let name = names[i];
            let all = |host: usize| -> Vec<IpAddr> { (0..options.links).map(|l| address(l, host)).collect() };
            let addresses = all(i);
            let others: Vec<_> =
                (0..count).filter(|other| *other != i).map(|other| (names[other], all(other))).collect();
            let client = Client::new(directory.join(format!("{name}.sock"))).unwrap();
            let config = head(&options, name, &directory, &addresses, &others);
            hosts.push(Host {
                net,
                name,
                addresses,
                client,
                directory: directory.clone(),
                config,
                manager: None,
                child: None,
                successor: None,
            });
        }
        // IPv6 needs the carrier, which appears some time after both ends of a new veth pair are up.
        for address in hosts[1].addresses.iter().filter(|a| a.is_ipv6()) {
            super::eventually(5.0, "the underlay works", || {
                super::traffic::ping(&hosts[0].net, &address.to_string(), 1, 8) == 1
            });
        }
        Lab { hosts, guests: Vec::new(), bridges, tag, options, watch: Watch::start().unwrap(), _one: one }
    }

    /// Two hosts with a guest each, running: `a` (10.0.0.1) on the first, `b` (10.0.0.2) on the second.
    pub fn running(options: Options) -> Lab {
        let mut lab = Lab::new(options);
        lab.add(0, Guest::new("a", 1, &["10.0.0.1/24"]));
        lab.add(1, Guest::new("b", 2, &["10.0.0.2/24"]));
        lab.start();
        lab
    }

    /// Whether the machine itself stood still for so long that the transport may have given up packets: it does so
    /// after 28 ms of silence, and the daemons take some time to catch up.
    pub fn stood_still(&self) -> bool {
        let seen = self.watch.seen();
        let stood = seen.iter().any(|standstill| standstill.length >= Duration::from_millis(10));
        if stood {
            eprintln!("the machine stood still: {:?}", seen.iter().map(|s| s.length).collect::<Vec<_>>());
        }
        stood
    }

    /// Asserts that no packet was given up, unless the machine stood still.
    pub fn assert_nothing_given_up(&self) {
        for host in &self.hosts {
            let given_up = host.counter("rte.given_up_packets");
            assert!(given_up == 0 || self.stood_still(), "{} gave up {given_up} packets", host.name);
        }
    }

    /// Adds a guest to a host, and routes to it on the other hosts.
    pub fn add(&mut self, host: usize, guest: Guest) {
        let net = Net::new(&self.tag, guest.name);
        let section = section(&guest, net.name());
        self.hosts[host].config.push_str(&section);
        let mut routes = routes(&guest, self.hosts[host].name);
        if self.options.path_mtu {
            routes = routes.replace("[[route]]", &format!("[[route]]\nmtu = {}", guest.mtu));
        }
        self.add_routes(host, &routes);
        self.guests.push((guest, net));
    }

    /// Adds a virtual machine's port to a host, and routes to it on the other hosts. `mode` is the port's.
    pub fn add_machine(&mut self, host: usize, guest: &Guest, mode: &str) {
        let socket = self.machine_socket(guest.name);
        let section = format!(
            "[[port]]\nname = \"{}\"\nkind = \"vhost-user\"\nmode = \"{mode}\"\nsocket = \"{}\"\nvni = {}\nmac = \"{}\"\naddresses = {:?}\nmtu = {}\n",
            guest.name,
            socket.display(),
            guest.vni,
            guest.mac,
            guest.addresses,
            guest.mtu,
        );
        self.hosts[host].config.push_str(&section);
        let routes = routes(guest, self.hosts[host].name);
        self.add_routes(host, &routes);
    }

    /// Adds routes to the configurations of all hosts but one.
    fn add_routes(&mut self, host: usize, routes: &str) {
        for (_, other) in self.hosts.iter_mut().enumerate().filter(|(i, _)| *i != host) {
            other.config.push_str(routes);
        }
    }

    /// The socket of a virtual machine's port.
    pub fn machine_socket(&self, guest: &str) -> PathBuf {
        netns::directory(&self.tag).join(format!("{guest}.vhost"))
    }

    pub fn start(&mut self) {
        for host in &mut self.hosts {
            host.spawn();
        }
        for host in &mut self.hosts {
            host.client.wait_ready(Duration::from_secs(20)).unwrap_or_else(|e| {
                panic!("{} is not ready: {e}\n{}", host.name, std::fs::read_to_string(host.log_file()).unwrap())
            });
        }
        // Wait for the guests' kernels, which send IPv6 packets when their devices appear.
        std::thread::sleep(Duration::from_millis(20));
    }

    pub fn net(&self, guest: &str) -> &Net {
        &self.guests.iter().find(|(g, _)| g.name == guest).unwrap().1
    }

    /// Deletes a guest's namespace, as when a container stops.
    pub fn delete_net(&self, guest: &str) {
        netns::run("ip", &["netns", "del", self.net(guest).name()], "");
    }

    /// Creates a namespace with the name of a guest's former one, as when a container restarts.
    pub fn make_net(&mut self, guest: &str) {
        let (_, net) = self.guests.iter_mut().find(|(g, _)| g.name == guest).unwrap();
        // Dropping the former one would delete the new one, which has the same name.
        std::mem::forget(std::mem::replace(net, Net::new(&self.tag, guest)));
    }

    pub fn guest(&self, guest: &str) -> &Guest {
        &self.guests.iter().find(|(g, _)| g.name == guest).unwrap().0
    }

    pub fn tag(&self) -> &str {
        &self.tag
    }

    pub fn options(&self) -> &Options {
        &self.options
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.stood_still();
        }
        for host in self
            .hosts
            .iter()
            .filter(|host| (host.child.is_some() || host.successor.is_some()) && !std::thread::panicking())
        {
            host.assert_balanced();
        }
        for host in &mut self.hosts {
            if std::thread::panicking() {
                let counters = host.client.stats().map(|s| s.counters).unwrap_or_default();
                let counters: Counters = counters.into_iter().filter(|(_, v)| *v > 0).collect();
                let conns = host.client.conns().unwrap_or_default();
                eprintln!("==== {}: {counters:#?}\n{conns:#?}\n{}", host.name, host.log());
            }
            host.crash();
        }
        if !std::thread::panicking() {
            let _ = std::fs::remove_dir_all(netns::directory(&self.tag));
        }
    }
}

/// A `[[port]]` section.
pub fn section(guest: &Guest, netns: &str) -> String {
    let gateway = guest.gateway.map(|g| format!("default_gateway = \"{g}\"\n")).unwrap_or_default();
    format!(
        "[[port]]\nname = \"{}\"\nvni = {}\nmac = \"{}\"\naddresses = {:?}\nmtu = {}\nnetns = \"{netns}\"\ndevice = \"eth0\"\n{gateway}",
        guest.name, guest.vni, guest.mac, guest.addresses, guest.mtu,
    )
}

/// `[[route]]` sections to all addresses of a guest.
pub fn routes(guest: &Guest, host: &str) -> String {
    let mut text = String::new();
    for address in &guest.addresses {
        let address = address.split('/').next().unwrap();
        let bits = if address.contains(':') { 128 } else { 32 };
        write!(
            text,
            "[[route]]\nvni = {}\nprefix = \"{address}/{bits}\"\npeer = \"{host}\"\nmac = \"{}\"\n",
            guest.vni, guest.mac
        )
        .unwrap();
    }
    text
}

fn head(
    options: &Options,
    name: &str,
    directory: &std::path::Path,
    own: &[IpAddr],
    others: &[(&str, Vec<IpAddr>)],
) -> String {
    let quoted = |list: &[IpAddr]| format!("{:?}", list.iter().map(IpAddr::to_string).collect::<Vec<_>>());
    let peer = |(peer, addresses): &(&str, Vec<IpAddr>)| {
        let transport = options.peer;
        format!("[[peer]]\nname = \"{peer}\"\naddresses = {}\ntransport = \"{transport}\"\n", quoted(addresses))
    };
    format!(
        "[host]\nname = \"{name}\"\n[control]\nsocket = \"{}\"\n[workers]\ncount = {}\n\
         [underlay]\naddresses = {}\npaths = {}\nmtu = {}\n[transport]\n{}\n{}{}",
        directory.join(format!("{name}.sock")).display(),
        options.workers,
        quoted(own),
        options.paths,
        options.mtu,
        options.transport,
        others.iter().map(peer).collect::<String>(),
        options.vpcs,
    )
}
