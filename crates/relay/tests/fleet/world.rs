//! Hosts with a daemon and an agent each, joined by a bridge, and relays on it: one with a directory, or several with an etcd.

use std::fs::{File, Permissions};
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::api::{ObjectsQuery, UpgradeSpec};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::etcd::Etcd;
use crate::netns::{self, Net};

/// Six programs and the work of several kernels are all that two processors carry.
static ONE: Mutex<()> = Mutex::new(());

pub(crate) struct World {
    hosts: Vec<Host>,
    relays: Vec<Relay>,
    pub(crate) etcd: Option<Etcd>,
    _switch: Net,
    tag: String,
    directory: PathBuf,
    /// More arguments of relays.
    arguments: Vec<String>,
    /// The collector of traces.
    traces: Option<String>,
    _one: MutexGuard<'static, ()>,
}

pub(crate) struct Host {
    name: String,
    address: String,
    net: Net,
    directory: PathBuf,
    /// Where its agent serves metrics.
    metrics: Option<String>,
    daemon: Option<Running>,
    /// The daemon that has taken over from that one.
    successor: Option<Pid>,
    agent: Option<Running>,
}

struct Relay {
    net: Net,
    address: String,
    tool: Tool,
    log: PathBuf,
    program: Option<Running>,
}

/// `bifrostctl fleet`, which asks one relay.
#[derive(Clone)]
pub(crate) struct Tool {
    socket: PathBuf,
}

/// A program, which ends with this.
pub(crate) struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl World {
    /// Hosts h1, h2, ... with addresses 192.0.2.1, ..., and a relay that keeps objects in a directory; nothing runs yet.
    pub(crate) fn new(hosts: usize) -> World {
        World::with(hosts, 1, false)
    }

    /// The same with several relays, and an etcd of three members that runs.
    pub(crate) fn in_etcd(hosts: usize, relays: usize) -> World {
        World::with(hosts, relays, true)
    }

    fn with(hosts: usize, relays: usize, is_in_etcd: bool) -> World {
        // A test that failed has cleaned up, too.
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let tag = netns::tag();
        let directory = netns::directory(&tag);
        std::fs::create_dir_all(&directory).unwrap();
        let switch = Net::new(&tag, "sw");
        switch.ip("link add br0 type bridge\nlink set br0 mtu 1700 up\n");
        let hosts: Vec<Host> = (1..=hosts).map(|n| Host::new(n, &tag, &directory, &switch)).collect();
        let relays: Vec<Relay> = (1..=relays).map(|n| Relay::new(n, &tag, &directory, &switch)).collect();
        let names = hosts.iter().map(|host| host.name.as_str());
        certify(&directory, names.chain(relays.iter().map(|relay| relay.address.as_str())));
        let etcd = is_in_etcd.then(|| Etcd::start(cable(&tag, "et", &switch), &directory));
        World { hosts, relays, etcd, _switch: switch, tag, directory, arguments: Vec::new(), traces: None, _one: one }
    }

    pub(crate) fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    pub(crate) fn hosts_mut(&mut self) -> &mut [Host] {
        &mut self.hosts
    }

    /// Where its files are.
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// A command that runs beside the first relay.
    pub(crate) fn command_beside_relay(&self, program: &str) -> Command {
        self.relays[0].net.command(program)
    }

    /// A socket beside the first relay, which hosts reach.
    pub(crate) fn collector(&self, port: u16) -> UdpSocket {
        let Relay { net, address, .. } = &self.relays[0];
        let at = format!("{address}:{port}");
        let socket = net.enter(move || UdpSocket::bind(at).unwrap());
        socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        socket
    }

    /// A listener beside the first relay, which gets traces of relays and agents that are started from now on.
    pub(crate) fn trace(&mut self) -> TcpListener {
        let Relay { net, address, .. } = &self.relays[0];
        let at = format!("{address}:4317");
        self.traces = Some(format!("http://{at}"));
        net.enter(move || TcpListener::bind(at).unwrap())
    }

    /// An address beside the first relay, to which relays and agents that are started from now on send traces.
    pub(crate) fn trace_to(&mut self) -> String {
        let to = self.beside_relay(4317);
        self.traces = Some(format!("http://{to}"));
        to
    }

    /// An address beside the first relay.
    pub(crate) fn beside_relay(&self, port: u16) -> String {
        format!("{}:{port}", self.relays[0].address)
    }

    /// Daemons and agents that are started from now on serve metrics, as relays do. Where all of them are.
    pub(crate) fn expose_metrics(&mut self) -> Vec<String> {
        let mut targets: Vec<String> = self.relays.iter().map(|relay| format!("{}:9790", relay.address)).collect();
        for host in &mut self.hosts {
            let [daemon, agent] = [9795, 9791].map(|port| format!("{}:{port}", host.address));
            let file = host.directory.join("bifrostd.toml");
            let config = std::fs::read_to_string(&file).unwrap();
            std::fs::write(&file, config.replacen("[control]\n", &format!("[control]\nmetrics = {daemon:?}\n"), 1))
                .unwrap();
            host.metrics = Some(agent.clone());
            targets.extend([daemon, agent]);
        }
        targets
    }

    /// A program beside the first relay, with its log in the directory of all files.
    pub(crate) fn run_beside_relay(&self, program: &str, arguments: &[&str], log: &str) -> Running {
        let mut command = self.relays[0].net.command(program);
        command.args(arguments);
        spawn(command, &self.directory.join(log))
    }

    /// Waits until somebody beside the first relay listens.
    pub(crate) fn wait_for_listener(&self, address: &str, log: &str) {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            let at = address.to_owned();
            if self.relays[0].net.enter(move || TcpStream::connect(at).is_ok()) {
                return;
            }
            let log = || std::fs::read_to_string(self.directory.join(log)).unwrap_or_default();
            assert!(Instant::now() < deadline, "nobody listens at {address}\n{}", log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// The body of what a server beside the first relay answers.
    pub(crate) fn http_get(&self, address: &str, target: &str) -> String {
        let (address, target) = (address.to_owned(), target.to_owned());
        self.relays[0].net.enter(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
            write!(stream, "GET {target} HTTP/1.0\r\nHost: test\r\n\r\n").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            let (_, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer to {target}: {text}"));
            body.to_owned()
        })
    }

    /// A namespace for a guest.
    pub(crate) fn guest(&self, role: &str) -> Net {
        Net::new(&self.tag, role)
    }

    pub(crate) fn run_all(&mut self) {
        for relay in 0..self.relays.len() {
            self.start_relay_of(relay);
        }
        self.start_daemons();
        for host in 0..self.hosts.len() {
            self.start_agent(host);
        }
    }

    pub(crate) fn start_daemons(&mut self) {
        self.hosts.iter_mut().for_each(Host::start_daemon);
    }

    pub(crate) fn start_relay(&mut self) {
        self.start_relay_of(0);
    }

    pub(crate) fn start_relay_of(&mut self, number: usize) {
        let file = |name: &str| self.directory.join(name).display().to_string();
        let relay = &self.relays[number];
        let store = match &self.etcd {
            Some(etcd) => format!("etcd:{}", etcd.endpoints()),
            None => format!("file:{}", file("store")),
        };
        let mut command = relay.net.command(env!("CARGO_BIN_EXE_bifrost-relay"));
        command.args(["--store", &store, "--listen", &format!("{}:4790", relay.address)]);
        let (certificate, key) = (file(&format!("{}.pem", relay.address)), file(&format!("{}.key", relay.address)));
        command.args(["--ca", &file("ca.pem"), "--cert", &certificate, "--key", &key]);
        command.args(&self.arguments).args(["--console", &format!("{}:4791", relay.address)]);
        command.envs(self.traces.iter().map(|to| ("BIFROST_TRACES", to)));
        command.args(["--metrics", &format!("{}:9790", relay.address)]).arg("--socket").arg(&relay.tool.socket);
        self.relays[number].program = Some(spawn(command, &self.relays[number].log));
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.relays[number].tool.json("status").is_none_or(|status| status["in_sync"] == false) {
            assert!(Instant::now() < deadline, "relay {number} is not ready\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Relays that are started from now on get these arguments, too.
    pub(crate) fn argue(&mut self, arguments: &[&str]) {
        self.arguments.extend(arguments.iter().map(|argument| (*argument).to_owned()));
    }

    /// Relays that are started from now on give hosts certificates, which are valid for some seconds.
    pub(crate) fn give_certificates(&mut self, lifetime_s: u32) {
        let (key, address) = (self.directory.join("ca.key").display().to_string(), &self.relays[0].address);
        let arguments = ["--ca-key", &key, "--enroll", &format!("{address}:4792")];
        self.arguments = arguments.map(str::to_owned).to_vec();
        self.arguments.extend(["--host-lifetime-s".to_owned(), lifetime_s.to_string()]);
    }

    /// The agent of a host, with a certificate that it gets and keeps in a directory. Where its log is.
    pub(crate) fn start_agent_enrolling(&mut self, host: usize, directory: &str, token: &str) -> PathBuf {
        let address = &self.relays[0].address;
        let host = &mut self.hosts[host];
        let log = host.directory.join(format!("{directory}.log"));
        let identity = host.directory.join(directory).display().to_string();
        let (relay, enroll) = (format!("https://{address}:4790"), format!("https://{address}:4792"));
        let arguments = ["--relay", &relay, "--identity", &identity, "--enroll", &enroll].map(str::to_owned);
        let mut command = host.agent(&arguments);
        command.env("BIFROST_TOKEN", token);
        host.agent = Some(spawn(command, &log));
        log
    }

    /// What Prometheus would read of a relay.
    pub(crate) fn metrics(&self, relay: usize) -> String {
        let Relay { net, address, .. } = &self.relays[relay];
        let address = format!("{address}:9790");
        net.enter(move || {
            let mut stream = TcpStream::connect(address).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: relay\r\nConnection: close\r\n\r\n").unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        })
    }

    /// `kill -9`.
    pub(crate) fn kill_relay(&mut self) {
        self.kill_relay_of(0);
    }

    pub(crate) fn kill_relay_of(&mut self, number: usize) {
        self.relays[number].program = None;
    }

    /// Whether packets of a relay reach a member of etcd; those to hosts do in any case.
    pub(crate) fn join(&self, relay: usize, member: usize, is_joined: bool) {
        let what = if is_joined { "del" } else { "add" };
        self.relays[relay].net.ip(&format!("route {what} blackhole {}/32\n", Etcd::address(member)));
    }

    /// What asks a relay.
    pub(crate) fn tool(&self, relay: usize) -> Tool {
        self.relays[relay].tool.clone()
    }

    pub(crate) fn start_agent(&mut self, host: usize) {
        self.start_agent_with(host, 0);
    }

    /// The agent of a host, with a relay that it tries first.
    pub(crate) fn start_agent_with(&mut self, host: usize, relay: usize) {
        let mut relays: Vec<_> = self.relays.iter().map(|relay| format!("https://{}:4790", relay.address)).collect();
        relays.rotate_left(relay);
        let host = &mut self.hosts[host];
        let tls = tls(&self.directory, &relays.join(","), &host.name);
        let mut command = host.agent(&tls);
        command.envs(self.traces.iter().map(|to| ("BIFROST_TRACES", to)));
        host.agent = Some(spawn(command, &host.directory.join("agent.log")));
    }

    /// The agent of a host, which says that it is this host and has the certificate of another. Where its log is.
    pub(crate) fn start_agent_as(&mut self, host: usize, certificate: &str) -> PathBuf {
        let relay = format!("https://{}:4790", self.relays[0].address);
        let host = &mut self.hosts[host];
        let log = host.directory.join("wrong.log");
        host.agent = Some(spawn(host.agent(&tls(&self.directory, &relay, certificate)), &log));
        log
    }

    pub(crate) fn start_agent_without_tls(&mut self, host: usize) -> PathBuf {
        let relay = format!("http://{}:4790", self.relays[0].address);
        let host = &mut self.hosts[host];
        let log = host.directory.join("plain.log");
        let arguments = ["--relay", &relay, "--insecure"].map(str::to_owned);
        host.agent = Some(spawn(host.agent(&arguments), &log));
        log
    }

    /// Has `bifrostctl fleet` do something.
    pub(crate) fn fleet(&self, command: &str) -> String {
        let result = self.relays[0].tool.run(command);
        result.unwrap_or_else(|error| panic!("{command}: {error}\n{}", self.logs()))
    }

    /// What the first relay answers.
    pub(crate) fn get(&self, target: &str) -> Value {
        Client::new(&self.relays[0].tool.socket).unwrap().get(target, Duration::from_secs(20)).unwrap()
    }

    pub(crate) fn fleet_json(&self, command: &str) -> Value {
        serde_json::from_str(&self.fleet(&format!("--json {command}"))).unwrap()
    }

    /// Has the objects as a file says, on all hosts.
    pub(crate) fn apply(&self, yaml: &str) {
        let file = self.directory.join("network.yaml");
        std::fs::write(&file, yaml).unwrap();
        self.fleet(&format!("apply -f {} --wait 20", file.display()));
    }

    /// What all programs have said.
    pub(crate) fn logs(&self) -> String {
        let mut files: Vec<_> = self.relays.iter().map(|relay| relay.log.clone()).collect();
        for host in &self.hosts {
            files.extend(["agent.log", "daemon.log"].map(|file| host.directory.join(file)));
        }
        let read =
            |file: &PathBuf| format!("== {}\n{}", file.display(), std::fs::read_to_string(file).unwrap_or_default());
        files.iter().map(read).collect()
    }
}

impl Drop for World {
    fn drop(&mut self) {
        self.hosts.clear();
        self.relays.clear();
        self.etcd = None;
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl Host {
    fn new(number: usize, tag: &str, directory: &Path, switch: &Net) -> Host {
        let name = format!("h{number}");
        let net = cable(tag, &name, switch);
        let address = format!("192.0.2.{number}");
        net.ip(&format!("addr add {address}/24 dev up0\n"));
        let directory = directory.join(&name);
        std::fs::create_dir_all(&directory).unwrap();
        let socket = directory.join("daemon.sock");
        let config = format!(
            "[host]\nname = \"{name}\"\n[control]\nsocket = \"{}\"\n[underlay]\naddresses = [\"{address}\"]\n\
             mtu = 1700\n",
            socket.display()
        );
        std::fs::write(directory.join("bifrostd.toml"), config).unwrap();
        Host { name, address, net, directory, metrics: None, daemon: None, successor: None, agent: None }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn client(&self) -> Client {
        Client::new(self.directory.join("daemon.sock")).unwrap()
    }

    pub(crate) fn start_daemon(&mut self) {
        std::fs::create_dir_all(self.directory.join("state")).unwrap();
        let mut command = self.net.command(&sibling("bifrostd"));
        command.arg("--config").arg(self.directory.join("bifrostd.toml"));
        command.arg("--state").arg(self.directory.join("state"));
        self.daemon = Some(spawn(command, &self.directory.join("daemon.log")));
        self.client().wait_ready(Duration::from_secs(20)).unwrap();
    }

    /// `kill -9`.
    pub(crate) fn kill_daemon(&mut self) {
        self.daemon = None;
    }

    /// Has the daemon make way for another process of the same program.
    pub(crate) fn upgrade_daemon(&mut self) {
        let report = self.client().upgrade(&UpgradeSpec::default()).unwrap();
        self.successor = Pid::from_raw(report.pid.cast_signed());
        let mut daemon = self.daemon.take().unwrap();
        assert!(daemon.0.wait().unwrap().success());
    }

    /// What `bifrostd` keeps over a restart.
    pub(crate) fn lose_state(&mut self) {
        std::fs::remove_dir_all(self.directory.join("state")).unwrap();
    }

    /// `kill -9`.
    pub(crate) fn kill_agent(&mut self) {
        self.agent = None;
    }

    /// Has the agent stand still, or go on.
    pub(crate) fn halt_agent(&self, is_halted: bool) {
        let pid = Pid::from_child(&self.agent.as_ref().unwrap().0);
        kill_process(pid, if is_halted { Signal::STOP } else { Signal::CONT }).unwrap();
    }

    /// A file of its directory.
    pub(crate) fn file(&self, name: &str) -> String {
        std::fs::read_to_string(self.directory.join(name)).unwrap_or_default()
    }

    /// What the agent has brought.
    pub(crate) fn objects(&self) -> Vec<String> {
        let query = ObjectsQuery { owner: Some("fleet".into()), ..ObjectsQuery::default() };
        let objects = self.client().objects(&query).unwrap().objects;
        objects.into_iter().map(|object| format!("{} {}", object.kind, object.key)).collect()
    }

    /// What these objects say.
    pub(crate) fn specs(&self) -> Vec<Value> {
        let query = ObjectsQuery { owner: Some("fleet".into()), ..ObjectsQuery::default() };
        self.client().objects(&query).unwrap().objects.into_iter().map(|object| json!(object.spec)).collect()
    }

    fn agent(&self, arguments: &[String]) -> Command {
        let mut command = self.net.command(&sibling("bifrost-agent"));
        command.args(["--host", &self.name, "--socket"]).arg(self.directory.join("daemon.sock")).args(arguments);
        command.envs(self.metrics.iter().map(|at| ("BIFROST_AGENT_METRICS", at)));
        command
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        if let Some(pid) = self.successor {
            let _ = kill_process(pid, Signal::KILL);
        }
    }
}

impl Relay {
    fn new(number: usize, tag: &str, directory: &Path, switch: &Net) -> Relay {
        let net = cable(tag, &format!("r{number}"), switch);
        let address = format!("192.0.2.{}", 255 - number);
        net.ip(&format!("addr add {address}/24 dev up0\n"));
        let tool = Tool { socket: directory.join(format!("relay{number}.sock")) };
        Relay { net, address, tool, log: directory.join(format!("relay{number}.log")), program: None }
    }
}

impl Tool {
    pub(crate) fn run(&self, command: &str) -> Result<String, String> {
        let mut tool = Command::new(sibling("bifrostctl"));
        tool.args(["fleet", "--relay"]).arg(&self.socket).args(command.split(' '));
        let output =
            tool.output().unwrap_or_else(|e| panic!("cannot run {tool:?}: {e}; cargo build --workspace --bins"));
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout).unwrap()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    /// What a command answers, if it does.
    pub(crate) fn json(&self, command: &str) -> Option<Value> {
        self.run(&format!("--json {command}")).ok().and_then(|text| serde_json::from_str(&text).ok())
    }
}

/// A namespace with a device `up0` on the switch.
fn cable(tag: &str, name: &str, switch: &Net) -> Net {
    let net = Net::new(tag, name);
    switch.ip(&format!("link add {name} mtu 1700 type veth peer name up0 mtu 1700 netns {}\n", net.name()));
    switch.ip(&format!("link set {name} master br0 up\n"));
    net.ip("link set up0 up\n");
    net
}

/// How an agent is to find and to trust relays, with the certificate of a host.
fn tls(directory: &Path, relays: &str, certificate: &str) -> Vec<String> {
    let file = |name: &str| directory.join(name).display().to_string();
    let (pem, key) = (file(&format!("{certificate}.pem")), file(&format!("{certificate}.key")));
    ["--relay", relays, "--ca", &file("ca.pem"), "--cert", &pem, "--key", &key].map(str::to_owned).to_vec()
}

/// An authority, and what it has signed: for relays their addresses, for hosts their names.
fn certify<'n>(directory: &Path, names: impl Iterator<Item = &'n str>) {
    let write = |name: &str, text: String| std::fs::write(directory.join(name), text).unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    write("ca.pem", authority.pem());
    write("ca.key", authority.key().serialize_pem());
    std::fs::set_permissions(directory.join("ca.key"), Permissions::from_mode(0o600)).unwrap();
    for name in names {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
        write(&format!("{name}.pem"), certificate.pem());
        write(&format!("{name}.key"), key.serialize_pem());
    }
}

/// Another program of the workspace, built with this one.
fn sibling(name: &str) -> String {
    Path::new(env!("CARGO_BIN_EXE_bifrost-relay")).with_file_name(name).display().to_string()
}

pub(crate) fn spawn(mut command: Command, log: &Path) -> Running {
    let log = File::options().create(true).append(true).open(log).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    Running(command.spawn().unwrap_or_else(|e| panic!("cannot run {command:?}: {e}; cargo build --workspace --bins")))
}
