//! A host in a network namespace: a daemon and an agent as programs, and a namespace for its guest.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use bifrost_control::Client;
use bifrost_control::api::ObjectsQuery;
use bifrost_control::config::{Kind, Object};
use serde_json::Value;

use crate::agents::Has;
use crate::net::{Net, Running};

/// How long a program may take to be ready.
pub(crate) const START: Duration = Duration::from_secs(60);
/// MTU of the network between hosts, bytes: guests have 1500.
pub(crate) const MTU: u32 = 1700;
/// The relay that agents follow.
pub(crate) const RELAY: &str = "192.0.2.254";

/// A host.
#[derive(Debug)]
pub(crate) struct Host {
    name: String,
    directory: PathBuf,
    agent: Option<Running>,
    daemon: Running,
    net: Net,
    /// The namespace of its guest.
    pub(crate) guest: Net,
}

impl Host {
    /// Starts its daemon.
    pub(crate) fn start(n: usize, directory: &Path, switch: &Net) -> Result<Host> {
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
        let host = Host { name, directory, agent: None, daemon, net, guest };
        host.client()?.wait_ready(START).with_context(|| format!("bifrostd of {} does not start", host.name))?;
        Ok(host)
    }

    pub(crate) fn start_agent(&mut self) -> Result<()> {
        let mut command = self.net.command(&sibling("bifrost-agent")?);
        command.args(["--host", &self.name, "--relay", &format!("http://{RELAY}:4790"), "--insecure", "--socket"]);
        command.arg(self.directory.join("daemon.sock"));
        self.agent = Some(Running::start(command, &self.directory.join("agent.log"))?);
        Ok(())
    }

    /// The processes of its daemon and agent.
    pub(crate) fn pids(&self) -> [u32; 2] {
        [self.daemon.pid(), self.agent.as_ref().map_or(0, Running::pid)]
    }

    /// `kill -9`.
    pub(crate) fn kill_agent(&mut self) {
        self.agent = None;
    }

    pub(crate) fn client(&self) -> Result<Client> {
        Ok(Client::new(self.directory.join("daemon.sock"))?)
    }

    /// Objects in force that it should not have, or not like this, and those that are missing.
    pub(crate) fn differences(&self, wanted: &Has) -> Result<Vec<String>> {
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
pub(crate) fn underlay(n: usize) -> String {
    format!("192.0.2.{}", 1 + n)
}

/// A namespace with a device `up0` on the switch.
pub(crate) fn cable(name: &str, switch: &Net) -> Result<Net> {
    let net = Net::create(name)?;
    switch.ip(&format!(
        "link add {name} mtu {MTU} type veth peer name up0 mtu {MTU} netns {}\nlink set {name} master br0 up\n",
        net.name()
    ))?;
    net.ip("link set up0 up\n")?;
    Ok(net)
}

/// Another program, built beside this one.
pub(crate) fn sibling(name: &str) -> Result<PathBuf> {
    let program = std::env::current_exe()?.with_file_name(name);
    let build = "cargo build --release -p bifrost-relay -p bifrostd -p bifrost-agent -p bifrost-fleet";
    ensure!(program.exists(), "{} does not exist; build it with `{build}`", program.display());
    Ok(program)
}
