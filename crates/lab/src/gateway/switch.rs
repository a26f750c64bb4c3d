//! The BGP daemon of a switch, whose kernel forwards: FRR or BIRD.

use std::fmt;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Serialize};

use super::bird::Bird;
use super::frr::Frr;
use crate::command;
use crate::netns::Namespace;

/// The program that a switch runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Daemon {
    /// FRR: bgpd, bfdd, and zebra, which configures the kernel.
    #[default]
    Frr,
    /// BIRD 2.
    Bird,
}

impl Daemon {
    /// All of them, in the order of reports.
    pub const ALL: [Daemon; 2] = [Daemon::Frr, Daemon::Bird];

    /// The name, as in `bifrostctl gw bgp config --daemon`.
    pub fn name(self) -> &'static str {
        match self {
            Daemon::Frr => "frr",
            Daemon::Bird => "bird",
        }
    }

    /// The protocol of its routes in the kernel.
    fn protocol(self) -> &'static str {
        match self {
            Daemon::Frr => "bgp",
            Daemon::Bird => "bird",
        }
    }
}

impl fmt::Display for Daemon {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Daemon::Frr => "FRR",
            Daemon::Bird => "BIRD",
        })
    }
}

/// The running daemon of a switch. Dropping it ends it.
#[derive(Debug)]
pub enum Switch {
    /// See [`Frr`].
    Frr(Frr),
    /// See [`Bird`].
    Bird(Bird),
}

impl Switch {
    /// Starts a daemon in the switch's namespace, with a configuration for it.
    ///
    /// # Errors
    /// A program is missing, or does not start.
    pub fn start(
        daemon: Daemon,
        namespace: &Namespace,
        directory: &Path,
        name: &str,
        configuration: String,
        logs: &Path,
    ) -> Result<Self> {
        match daemon {
            Daemon::Frr => Frr::start(namespace, directory, name, &[configuration], logs).map(Switch::Frr),
            Daemon::Bird => Bird::start(namespace, directory, name, &configuration, logs).map(Switch::Bird),
        }
    }

    /// Number of peers with an established session.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn sessions(&self) -> Result<usize> {
        match self {
            Switch::Frr(frr) => frr.sessions(),
            Switch::Bird(bird) => bird.sessions(),
        }
    }

    /// Number of its paths to a prefix.
    ///
    /// # Errors
    /// The daemon does not answer.
    pub fn paths(&self, prefix: &str) -> Result<usize> {
        match self {
            Switch::Frr(frr) => {
                let route = frr.show(&format!("bgp ipv4 unicast {prefix}"))?;
                Ok(route["paths"].as_array().map_or(0, Vec::len))
            }
            Switch::Bird(bird) => bird.paths(prefix),
        }
    }

    /// Number of prefixes that it has learned by BGP and that are in the kernel of its namespace, below `10.0.0.0/16`.
    ///
    /// # Errors
    /// The daemon or the kernel does not answer.
    pub fn routes(&self, namespace: &Namespace) -> Result<usize> {
        let daemon = match self {
            Switch::Frr(_) => Daemon::Frr,
            Switch::Bird(_) => Daemon::Bird,
        };
        let routes = command::run("ip", &["-n", namespace.name(), "route", "show", "proto", daemon.protocol()])?;
        let installed = routes.lines().filter(|line| line.starts_with("10.0.")).count();
        let known = match self {
            Switch::Frr(frr) => {
                let all = frr.show("bgp ipv4 unicast")?;
                all["routes"].as_object().context("a table of routes")?.len()
            }
            // BIRD's own table is read as well, because its routes in the kernel outlive it.
            Switch::Bird(bird) => bird.networks()?,
        };
        Ok(installed.min(known))
    }

    /// Sends SIGKILL to the BGP daemon and to the program that holds its routes.
    ///
    /// # Errors
    /// A program is not running.
    pub fn kill(&self) -> Result<()> {
        match self {
            Switch::Frr(frr) => frr.kill(&["zebra", "bgpd"]),
            Switch::Bird(bird) => bird.kill(),
        }
    }

    /// Sends SIGKILL to the BGP daemon.
    ///
    /// # Errors
    /// The daemon is not running.
    pub fn kill_bgp(&self) -> Result<()> {
        match self {
            Switch::Frr(frr) => frr.kill(&["bgpd"]),
            Switch::Bird(bird) => bird.kill(),
        }
    }
}
