//! Hosts with a daemon and an agent each, joined by a bridge, and a relay on it.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bifrost_control::Client;
use bifrost_control::api::ObjectsQuery;
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::Value;

use crate::netns::{self, Net};

/// Where the relay is.
const RELAY: &str = "192.0.2.254";

/// Six programs and the work of several kernels are all that two processors carry.
static ONE: Mutex<()> = Mutex::new(());

pub(crate) struct World {
    hosts: Vec<Host>,
    relay: Option<Running>,
    switch: Net,
    tag: String,
    directory: PathBuf,
    _one: MutexGuard<'static, ()>,
}

pub(crate) struct Host {
    name: String,
    net: Net,
    directory: PathBuf,
    daemon: Option<Running>,
    agent: Option<Running>,
}

/// A program, which ends with this.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl World {
    /// Hosts h1, h2, ... with addresses 192.0.2.1, ...; nothing runs yet.
    pub(crate) fn new(hosts: usize) -> World {
        // A test that failed has cleaned up, too.
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let tag = netns::tag();
        let directory = netns::directory(&tag);
        std::fs::create_dir_all(&directory).unwrap();
        let switch = Net::new(&tag, "sw");
        switch.ip(&format!("link add br0 type bridge\nlink set br0 mtu 1700 up\naddr add {RELAY}/24 dev br0\n"));
        let hosts: Vec<Host> = (1..=hosts).map(|n| Host::new(n, &tag, &directory, &switch)).collect();
        certify(&directory, hosts.iter().map(|host| host.name.as_str()));
        World { hosts, relay: None, switch, tag, directory, _one: one }
    }

    pub(crate) fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    pub(crate) fn hosts_mut(&mut self) -> &mut [Host] {
        &mut self.hosts
    }

    /// A namespace for a guest.
    pub(crate) fn guest(&self, role: &str) -> Net {
        Net::new(&self.tag, role)
    }

    pub(crate) fn run_all(&mut self) {
        self.start_relay();
        self.start_daemons();
        self.hosts.iter_mut().for_each(Host::start_agent);
    }

    pub(crate) fn start_daemons(&mut self) {
        self.hosts.iter_mut().for_each(Host::start_daemon);
    }

    pub(crate) fn start_relay(&mut self) {
        let file = |name: &str| self.directory.join(name).display().to_string();
        let mut command = self.switch.command(env!("CARGO_BIN_EXE_bifrost-relay"));
        command.args(["--store", &format!("file:{}", file("store")), "--listen", &format!("{RELAY}:4790")]);
        command.args(["--ca", &file("ca.pem"), "--cert", &file("relay.pem"), "--key", &file("relay.key")]);
        command.args(["--socket", &file("relay.sock")]);
        self.relay = Some(spawn(command, &self.directory.join("relay.log")));
        let deadline = Instant::now() + Duration::from_secs(20);
        while self.try_fleet("status").is_err() {
            assert!(Instant::now() < deadline, "the relay is not ready\n{}", self.logs());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// `kill -9`.
    pub(crate) fn kill_relay(&mut self) {
        self.relay = None;
    }

    /// The agent of a host, which says that it is this host and has the certificate of another. Where its log is.
    pub(crate) fn start_agent_as(&mut self, host: usize, certificate: &str) -> PathBuf {
        let host = &mut self.hosts[host];
        let log = host.directory.join("wrong.log");
        host.agent = Some(spawn(host.agent(&tls(&self.directory, certificate)), &log));
        log
    }

    pub(crate) fn start_agent_without_tls(&mut self, host: usize) -> PathBuf {
        let host = &mut self.hosts[host];
        let log = host.directory.join("plain.log");
        let arguments = ["--relay", &format!("http://{RELAY}:4790"), "--insecure"].map(str::to_owned);
        host.agent = Some(spawn(host.agent(&arguments), &log));
        log
    }

    /// Has `bifrostctl fleet` do something.
    pub(crate) fn fleet(&self, command: &str) -> String {
        self.try_fleet(command).unwrap_or_else(|error| panic!("{command}: {error}\n{}", self.logs()))
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

    fn try_fleet(&self, command: &str) -> Result<String, String> {
        let mut tool = Command::new(sibling("bifrostctl"));
        tool.args(["fleet", "--relay"]).arg(self.directory.join("relay.sock")).args(command.split(' '));
        let output =
            tool.output().unwrap_or_else(|e| panic!("cannot run {tool:?}: {e}; cargo build --workspace --bins"));
        match output.status.success() {
            true => Ok(String::from_utf8(output.stdout).unwrap()),
            false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
        }
    }

    /// What all programs have said.
    pub(crate) fn logs(&self) -> String {
        let mut files = vec![self.directory.join("relay.log")];
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
        self.relay = None;
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

impl Host {
    fn new(number: usize, tag: &str, directory: &Path, switch: &Net) -> Host {
        let name = format!("h{number}");
        let net = Net::new(tag, &name);
        switch.ip(&format!("link add {name} mtu 1700 type veth peer name up0 mtu 1700 netns {}\n", net.name()));
        switch.ip(&format!("link set {name} master br0 up\n"));
        net.ip(&format!("addr add 192.0.2.{number}/24 dev up0\nlink set up0 up\n"));
        let directory = directory.join(&name);
        std::fs::create_dir_all(directory.join("state")).unwrap();
        let socket = directory.join("daemon.sock");
        let config = format!(
            "[host]\nname = \"{name}\"\n[control]\nsocket = \"{}\"\n[underlay]\naddresses = [\"192.0.2.{number}\"]\n\
             mtu = 1700\n",
            socket.display()
        );
        std::fs::write(directory.join("bifrostd.toml"), config).unwrap();
        Host { name, net, directory, daemon: None, agent: None }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    fn client(&self) -> Client {
        Client::new(self.directory.join("daemon.sock")).unwrap()
    }

    pub(crate) fn start_daemon(&mut self) {
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

    pub(crate) fn start_agent(&mut self) {
        let tls = tls(self.directory.parent().unwrap(), &self.name);
        self.agent = Some(spawn(self.agent(&tls), &self.directory.join("agent.log")));
    }

    /// `kill -9`.
    pub(crate) fn kill_agent(&mut self) {
        self.agent = None;
    }

    /// What the agent has brought.
    pub(crate) fn objects(&self) -> Vec<String> {
        let query = ObjectsQuery { owner: Some("fleet".into()), ..ObjectsQuery::default() };
        let objects = self.client().objects(&query).unwrap().objects;
        objects.into_iter().map(|object| format!("{} {}", object.kind, object.key)).collect()
    }

    fn agent(&self, arguments: &[String]) -> Command {
        let mut command = self.net.command(&sibling("bifrost-agent"));
        command.args(["--host", &self.name, "--socket"]).arg(self.directory.join("daemon.sock")).args(arguments);
        command
    }
}

/// How an agent is to find and to trust the relay, with the certificate of a host.
fn tls(directory: &Path, certificate: &str) -> Vec<String> {
    let file = |name: &str| directory.join(name).display().to_string();
    let (pem, key) = (file(&format!("{certificate}.pem")), file(&format!("{certificate}.key")));
    let relay = format!("https://{RELAY}:4790");
    ["--relay", &relay, "--ca", &file("ca.pem"), "--cert", &pem, "--key", &key].map(str::to_owned).to_vec()
}

/// An authority, and what it has signed: for the relay its address, for hosts their names.
fn certify<'n>(directory: &Path, hosts: impl Iterator<Item = &'n str>) {
    let write = |name: &str, text: String| std::fs::write(directory.join(name), text).unwrap();
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    write("ca.pem", authority.pem());
    for (file, name) in hosts.map(|name| (name, name)).chain([("relay", RELAY)]) {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![name.to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
        write(&format!("{file}.pem"), certificate.pem());
        write(&format!("{file}.key"), key.serialize_pem());
    }
}

/// Another program of the workspace, built with this one.
fn sibling(name: &str) -> String {
    Path::new(env!("CARGO_BIN_EXE_bifrost-relay")).with_file_name(name).display().to_string()
}

fn spawn(mut command: Command, log: &Path) -> Running {
    let log = File::options().create(true).append(true).open(log).unwrap();
    command.stdin(Stdio::null()).stdout(log.try_clone().unwrap()).stderr(log);
    Running(command.spawn().unwrap_or_else(|e| panic!("cannot run {command:?}: {e}; cargo build --workspace --bins")))
}
