//! Three members of etcd, each at an address of its own.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::netns::Net;
use crate::world::{Running, spawn};

const MEMBERS: usize = 3;
/// How long a cluster may take to be there.
const START: Duration = Duration::from_secs(30);

pub(crate) struct Etcd {
    members: [Option<Running>; MEMBERS],
    directory: PathBuf,
    net: Net,
}

impl Etcd {
    /// The address of a member.
    pub(crate) fn address(member: usize) -> String {
        format!("192.0.2.{}", 241 + member)
    }

    /// A cluster that takes writes.
    pub(crate) fn start(net: Net, directory: &Path) -> Etcd {
        for member in 0..MEMBERS {
            net.ip(&format!("addr add {}/24 dev up0\n", Etcd::address(member)));
        }
        let mut etcd = Etcd { members: [None, None, None], directory: directory.join("etcd"), net };
        std::fs::create_dir_all(&etcd.directory).unwrap();
        etcd.start_all();
        etcd
    }

    /// All members, separated by commas.
    pub(crate) fn endpoints(&self) -> String {
        let url = |member| format!("http://{}:2379", Etcd::address(member));
        (0..MEMBERS).map(url).collect::<Vec<_>>().join(",")
    }

    /// Starts a member. It need not be there yet.
    pub(crate) fn start_member(&mut self, member: usize) {
        let peer = |member| format!("http://{}:2380", Etcd::address(member));
        let client = format!("http://{}:2379", Etcd::address(member));
        let all: Vec<_> = (0..MEMBERS).map(|member| format!("m{member}={}", peer(member))).collect();
        let mut command = self.net.command(&program("etcd"));
        command.args([
            format!("--name=m{member}"),
            format!("--data-dir={}", self.directory.join(format!("m{member}")).display()),
            format!("--listen-peer-urls={}", peer(member)),
            format!("--initial-advertise-peer-urls={}", peer(member)),
            format!("--listen-client-urls={client}"),
            format!("--advertise-client-urls={client}"),
            format!("--initial-cluster={}", all.join(",")),
            "--max-txn-ops=1025".to_owned(),
            "--max-request-bytes=6291456".to_owned(),
            "--log-level=error".to_owned(),
            // It is the process that is killed, and not the host.
            "--unsafe-no-fsync".to_owned(),
        ]);
        self.members[member] = Some(spawn(command, &self.directory.join(format!("m{member}.log"))));
    }

    pub(crate) fn start_all(&mut self) {
        (0..MEMBERS).filter(|member| self.members[*member].is_none()).collect::<Vec<_>>().into_iter().for_each(
            |member| {
                self.start_member(member);
            },
        );
        self.ctl("put /tests/started 1");
    }

    /// `kill -9`.
    pub(crate) fn kill(&mut self, member: usize) {
        self.members[member] = None;
    }

    pub(crate) fn kill_all(&mut self) {
        (0..MEMBERS).for_each(|member| self.kill(member));
    }

    /// The member that leads.
    pub(crate) fn leader(&self) -> usize {
        let status: Value = serde_json::from_str(&self.ctl("endpoint status -w json")).unwrap();
        let leads = |one: &Value| one["Status"]["leader"] == one["Status"]["header"]["member_id"];
        status.as_array().unwrap().iter().position(leads).unwrap()
    }

    /// The store's revision.
    pub(crate) fn revision(&self) -> u64 {
        let answer: Value = serde_json::from_str(&self.ctl("get /tests/started -w json")).unwrap();
        answer["header"]["revision"].as_u64().unwrap()
    }

    /// Copies what the members keep, or puts the copy back. None may run.
    pub(crate) fn copy(&self, is_restore: bool) {
        assert!(self.members.iter().all(Option::is_none));
        for member in 0..MEMBERS {
            let [kept, copy] = [format!("m{member}"), format!("backup{member}")].map(|name| self.directory.join(name));
            let (from, to) = if is_restore { (copy, kept) } else { (kept, copy) };
            let _ = std::fs::remove_dir_all(&to);
            assert!(Command::new("cp").arg("-a").args([from, to]).status().unwrap().success());
        }
    }

    /// `etcdctl`, tried until the cluster is there.
    pub(crate) fn ctl(&self, command: &str) -> String {
        let begin = Instant::now();
        loop {
            let mut tool = self.net.command(&program("etcdctl"));
            let output =
                tool.arg(format!("--endpoints={}", self.endpoints())).args(command.split(' ')).output().unwrap();
            if output.status.success() {
                return String::from_utf8(output.stdout).unwrap();
            }
            assert!(begin.elapsed() < START, "etcdctl {command}: {}", String::from_utf8_lossy(&output.stderr));
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// The program, or the one beside it.
fn program(name: &str) -> String {
    let etcd =
        std::env::var_os("BIFROST_ETCD").expect("set BIFROST_ETCD, as by `BIFROST_ETCD=$(scripts/install-etcd.sh)`");
    Path::new(&etcd).with_file_name(name).display().to_string()
}
