//! FRR in a namespace: zebra, bgpd and bfdd, each of which restarts with its configuration when it has ended.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde_json::Value;

use super::supervised::Supervised;
use super::until::until;
use crate::command;
use crate::netns::Namespace;

const PROGRAMS: &str = "/usr/lib/frr";
/// Start of bfdd's part in a configuration.
const BFD: &str = "\nbfd\n";

/// A running FRR. Dropping it ends it.
#[derive(Debug)]
pub struct Frr {
    daemons: Vec<(&'static str, Supervised)>,
    directory: PathBuf,
}

impl Frr {
    /// Starts FRR with configurations like the outputs of `bifrostctl gw bgp config`, concatenated.
    ///
    /// # Errors
    /// A program is missing, or does not start.
    pub fn start(
        namespace: &Namespace,
        directory: &Path,
        name: &str,
        configurations: &[String],
        logs: &Path,
    ) -> Result<Self> {
        std::fs::create_dir(directory)?;
        // FRR's programs run as another user.
        std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o777))?;
        let at = |name: &str| directory.join(name).display().to_string();
        let (mut bgp, mut bfd) = (String::new(), String::new());
        for text in configurations {
            let (first, second) = text.split_once(BFD).context("a configuration without BFD")?;
            bgp += first;
            bgp.push('\n');
            bfd = format!("bfd\n{second}");
        }
        let mut daemons = Vec::new();
        for (daemon, configuration) in [("zebra", ""), ("bfdd", &bfd), ("bgpd", &bgp)] {
            let file = at(&format!("{daemon}.conf"));
            std::fs::write(&file, configuration)?;
            let socket = at("zserv.api");
            let pid = at(&format!("{daemon}.pid"));
            let vty = at("");
            let mut arguments = vec!["-f", &file, "-z", &socket, "-i", &pid, "--vty_socket", &vty, "-P", "0"];
            let bfdctl = at("bfdd.sock");
            if daemon == "bfdd" {
                arguments.extend(["--bfdctl", &bfdctl]);
            }
            let arguments: Vec<String> = arguments.into_iter().map(str::to_owned).collect();
            let log = logs.join(format!("{name}-{daemon}.log"));
            daemons.push((daemon, Supervised::start(namespace, &Path::new(PROGRAMS).join(daemon), &arguments, &log)?));
            let vty = directory.join(format!("{daemon}.vty"));
            until("FRR starts", || Ok(vty.exists().then_some(())))?;
        }
        Ok(Frr { daemons, directory: directory.to_owned() })
    }

    /// Sends SIGKILL to some of its daemons.
    ///
    /// # Errors
    /// A daemon is not running.
    pub fn kill(&self, names: &[&str]) -> Result<()> {
        self.daemons.iter().filter(|(name, _)| names.contains(name)).try_for_each(|(_, daemon)| daemon.kill())
    }

    /// The output of a `show ... json` command.
    ///
    /// # Errors
    /// FRR does not answer.
    pub fn show(&self, what: &str) -> Result<Value> {
        let directory = self.directory.display().to_string();
        let text = command::run("vtysh", &["--vty_socket", &directory, "-c", &format!("show {what} json")])?;
        serde_json::from_str(&text).with_context(|| format!("show {what}: {text}"))
    }

    /// Number of peers with an established session.
    ///
    /// # Errors
    /// FRR does not answer.
    pub fn sessions(&self) -> Result<usize> {
        let summary = self.show("bgp ipv4 unicast summary")?;
        let peers = summary["peers"].as_object();
        Ok(peers.into_iter().flatten().filter(|(_, peer)| peer["state"] == "Established").count())
    }
}
