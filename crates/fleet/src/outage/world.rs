//! A fleet in network namespaces: etcd of three members, a relay, and hosts with a daemon, an agent and a guest each.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use bifrost_intent::api::Status;

use crate::host::{Host, MTU, START, cable, sibling};
use crate::net::{Net, Running, remove_leftovers};
use crate::program::Api;

/// Members of etcd.
const MEMBERS: usize = 3;
const POLL: Duration = Duration::from_millis(20);

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

fn address_of(member: usize) -> String {
    format!("192.0.2.{}", 241 + member)
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
