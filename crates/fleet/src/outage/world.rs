//! A fleet in network namespaces: etcd of three members, a relay, and hosts with a daemon, an agent and a guest each.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use bifrost_control::Client;
use bifrost_control::api::ObjectsQuery;
use bifrost_control::config::{Kind, Object};
use bifrost_intent::api::Status;
use serde_json::Value;

use super::net::{Net, Running, remove_leftovers};
use crate::agents::Has;
use crate::program::Api;

/// Members of etcd.
const MEMBERS: usize = 3;
/// How long a program may take to be ready.
const START: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(20);
/// MTU of the network between hosts, bytes: guests have 1500.
const MTU: u32 = 1700;

/// Everything that runs. It ends when this is dropped.
#[derive(Debug)]
pub(super) struct World {
    pub(super) hosts: Vec<Host>,
    _relay: Running,
    members: Vec<Option<Running>>,
    /// Of etcd's members.
    etcd: Net,
    program: PathBuf,
    directory: tempfile::TempDir,
    _nets: [Net; 2],
}

/// A host.
#[derive(Debug)]
pub(super) struct Host {
    name: String,
    directory: PathBuf,
    agent: Option<Running>,
    _daemon: Running,
    net: Net,
    /// The namespace of its guest.
    pub(super) guest: Net,
}

impl World {
    /// Starts everything but the agents. `program` is etcd.
    pub(super) fn start(hosts: usize, program: &Path) -> Result<World> {
        remove_leftovers();
        let directory = tempfile::tempdir()?;
        let switch = Net::create("sw")?;
        switch.ip(&format!("link add br0 type bridge\nlink set br0 mtu {MTU} up\n"))?;
        let etcd = cable("et", &switch)?;
        for member in 0..MEMBERS {
            etcd.ip(&format!("addr add {}/24 dev up0\n", address_of(member)))?;
        }
        let relay = cable("re", &switch)?;
        relay.ip("addr add 192.0.2.254/24 dev up0\n")?;
        let mut command = relay.command(&sibling("bifrost-relay")?);
        let endpoints: Vec<String> = (0..MEMBERS).map(|member| format!("http://{}:2379", address_of(member))).collect();
        command.args([
            "--insecure",
            "--listen",
            "192.0.2.254:4790",
            "--store",
            &format!("etcd:{}", endpoints.join(",")),
        ]);
        command.arg("--socket").arg(directory.path().join("relay.sock"));
        let mut members = Vec::new();
        for member in 0..MEMBERS {
            members.push(Some(start_member(&etcd, program, directory.path(), member)?));
        }
        let started = Running::start(command, &directory.path().join("relay.log"))?;
        let mut world = World {
            hosts: Vec::new(),
            _relay: started,
            members,
            etcd,
            program: program.to_owned(),
            directory,
            _nets: [switch, relay],
        };
        for n in 0..hosts {
            let host = Host::start(n, world.directory.path(), &world._nets[0])?;
            world.hosts.push(host);
        }
        world.wait_ready()?;
        Ok(world)
    }

    /// The relay's API.
    pub(super) fn api(&self) -> Api {
        Api::at(&self.directory.path().join("relay.sock"))
    }

    /// `kill -9` of all members of etcd.
    pub(super) fn kill_etcd(&mut self) {
        self.members.iter_mut().for_each(|member| *member = None);
    }

    /// Starts them again.
    pub(super) fn start_etcd(&mut self) -> Result<()> {
        for (member, running) in self.members.iter_mut().enumerate() {
            *running = Some(start_member(&self.etcd, &self.program, self.directory.path(), member)?);
        }
        Ok(())
    }

    fn wait_ready(&self) -> Result<()> {
        let begin = Instant::now();
        loop {
            match self.api().get::<Status>("/v1/status") {
                Ok(status) if status.in_sync => return Ok(()),
                Ok(_) | Err(_) if begin.elapsed() < START => std::thread::sleep(POLL),
                Ok(_) => anyhow::bail!("the relay does not follow etcd after {START:?}"),
                Err(error) => return Err(error.context("the relay does not answer")),
            }
        }
    }
}

impl Host {
    fn start(n: usize, directory: &Path, switch: &Net) -> Result<Host> {
        let name = format!("h{n}");
        let directory = directory.join(&name);
        std::fs::create_dir_all(directory.join("state"))?;
        let (net, guest) = (cable(&name, switch)?, Net::create(&format!("g{n}"))?);
        let address = underlay(n);
        net.ip(&format!("addr add {address}/24 dev up0\n"))?;
        let config = directory.join("bifrostd.toml");
        let socket = directory.join("daemon.sock");
        std::fs::write(
            &config,
            format!(
                "[host]\nname = \"{name}\"\n[control]\nsocket = {:?}\n[underlay]\naddresses = [\"{address}\"]\nmtu = {MTU}\n",
                socket.display().to_string()
            ),
        )?;
        let mut command = net.command(&sibling("bifrostd")?);
        command.arg("--config").arg(&config).arg("--state").arg(directory.join("state"));
        let daemon = Running::start(command, &directory.join("daemon.log"))?;
        let host = Host { name, directory, agent: None, _daemon: daemon, net, guest };
        host.client()?.wait_ready(START).with_context(|| format!("bifrostd of {} does not start", host.name))?;
        Ok(host)
    }

    pub(super) fn start_agent(&mut self) -> Result<()> {
        let mut command = self.net.command(&sibling("bifrost-agent")?);
        command.args(["--host", &self.name, "--relay", "http://192.0.2.254:4790", "--insecure", "--socket"]);
        command.arg(self.directory.join("daemon.sock"));
        self.agent = Some(Running::start(command, &self.directory.join("agent.log"))?);
        Ok(())
    }

    /// `kill -9`.
    pub(super) fn kill_agent(&mut self) {
        self.agent = None;
    }

    fn client(&self) -> Result<Client> {
        Ok(Client::new(self.directory.join("daemon.sock"))?)
    }

    /// Objects in force that it should not have, or not like this, and those that are missing.
    pub(super) fn differences(&self, wanted: &Has) -> Result<Vec<String>> {
        let mut different = Vec::new();
        let mut there: BTreeMap<(String, String), Value> = BTreeMap::new();
        let mut query = ObjectsQuery { owner: Some("fleet".into()), ..ObjectsQuery::default() };
        loop {
            let page = self.client()?.objects(&query)?;
            there.extend(page.objects.into_iter().map(|one| ((one.kind.name().to_owned(), one.key), one.spec)));
            query.from = page.next;
            if query.from.is_none() {
                break;
            }
        }
        for ((kind, key), spec) in wanted {
            let has = there.remove(&(kind.clone(), key.clone()));
            if has.as_ref() != Some(&in_full(kind, spec)?) {
                different.push(format!("{kind} {key}: {}", if has.is_some() { "another version" } else { "missing" }));
            }
        }
        different.extend(there.into_keys().map(|(kind, key)| format!("{kind} {key}: stale")));
        Ok(different)
    }
}

/// An object's spec as a daemon tells it.
fn in_full(kind: &str, spec: &[u8]) -> Result<Value> {
    let known = Kind::of_name(kind).with_context(|| format!("an object of kind {kind}"))?;
    let object = Object::parse(known, &serde_json::from_slice(spec)?, 1);
    Ok(object.map_err(|errors| anyhow::anyhow!("a {kind} that bifrostd refuses: {errors:?}"))?.spec())
}

/// The underlay's address of a host.
pub(super) fn underlay(n: usize) -> String {
    format!("192.0.2.{}", 1 + n)
}

fn address_of(member: usize) -> String {
    format!("192.0.2.{}", 241 + member)
}

/// A namespace with a device `up0` on the switch.
fn cable(name: &str, switch: &Net) -> Result<Net> {
    let net = Net::create(name)?;
    switch.ip(&format!(
        "link add {name} mtu {MTU} type veth peer name up0 mtu {MTU} netns {}\nlink set {name} master br0 up\n",
        net.name()
    ))?;
    net.ip("link set up0 up\n")?;
    Ok(net)
}

fn start_member(net: &Net, program: &Path, directory: &Path, member: usize) -> Result<Running> {
    let peer = |member| format!("http://{}:2380", address_of(member));
    let client = format!("http://{}:2379", address_of(member));
    let all: Vec<_> = (0..MEMBERS).map(|member| format!("m{member}={}", peer(member))).collect();
    let mut command = net.command(program);
    command.args([
        format!("--name=m{member}"),
        format!("--data-dir={}", directory.join(format!("m{member}")).display()),
        format!("--listen-peer-urls={}", peer(member)),
        format!("--initial-advertise-peer-urls={}", peer(member)),
        format!("--listen-client-urls={client}"),
        format!("--advertise-client-urls={client}"),
        format!("--initial-cluster={}", all.join(",")),
        "--max-txn-ops=1025".to_owned(),
        "--max-request-bytes=6291456".to_owned(),
        "--log-level=error".to_owned(),
    ]);
    Running::start(command, &directory.join(format!("m{member}.log")))
}

/// Another program, built beside this one.
fn sibling(name: &str) -> Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name(name);
    let build = "cargo build --release -p bifrost-relay -p bifrostd -p bifrost-agent -p bifrost-fleet";
    ensure!(program.exists(), "{} does not exist; build it with `{build}`", program.display());
    Ok(program)
}
