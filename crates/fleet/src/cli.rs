//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  bifrost-fleet run propagate --hosts 1000 --ports 100000 --rate 200
                              change ports, and measure how long the affected hosts take to receive it
  bifrost-fleet run propagate --what group --hosts 1000 --rate 1
                              change a group that all hosts have
  bifrost-fleet run cold --ports 100000 --hosts 1000
                              start a relay with a full store, and let all agents connect at once
  bifrost-fleet run failover --hosts 100 --kills 5
                              kill the relay during changes
  BIFROST_ETCD=$(scripts/install-etcd.sh) bifrost-fleet run outage --etcd 60
                              kill all members of etcd while guests of real daemons exchange packets; needs root
  bifrost-fleet run learn --routes 1000000 --used 1000
                              send to many destinations for the first time; needs root

Runs the bifrost-relay from the directory of this program, on loopback; `outage` and `learn` run bifrostd and bifrost-agent, too,
in network namespaces. The exit status is 1 if a bar is missed.";

/// Measures a relay with many simulated agents
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// Print JSON
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run an experiment
    #[command(subcommand)]
    Run(Experiment),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Experiment {
    /// Time from the request of a change until agents have it
    Propagate(Propagate),
    /// Time for a relay to start with a full store, and for all agents to reconnect
    Cold(Cold),
    /// Check that acknowledged changes reach all hosts although the relay is killed
    Failover(Failover),
    /// Check that guests lose no packet while all members of etcd are down, and that nothing is stale afterwards
    Outage(Outage),
    /// Time of the first packet to each of many destinations, and memory, in a VPC whose routes hosts learn
    Learn(Learn),
}

/// Size of a network.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Hosts, each with an agent
    #[arg(long, default_value_t = 100)]
    pub(crate) hosts: usize,
    /// Ports, spread over the hosts
    #[arg(long, default_value_t = 10_000)]
    pub(crate) ports: usize,
    /// Ports per VPC; each on a different host if there are enough hosts
    #[arg(long, default_value_t = 50)]
    pub(crate) ports_per_vpc: usize,
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Propagate {
    #[command(flatten)]
    pub(crate) size: Size,
    /// Changes per second
    #[arg(long, default_value_t = 200)]
    pub(crate) rate: u32,
    /// Duration, seconds
    #[arg(long, default_value_t = 10)]
    pub(crate) seconds: u32,
    /// Kind of change
    #[arg(long, value_enum, default_value_t = What::Port)]
    pub(crate) what: What,
}

/// Kind of change.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum What {
    /// Move a port to another host
    Port,
    /// Change a rule of a group with ports on all hosts
    Group,
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Cold {
    #[command(flatten)]
    pub(crate) size: Size,
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Failover {
    #[command(flatten)]
    pub(crate) size: Size,
    /// Changes per second
    #[arg(long, default_value_t = 100)]
    pub(crate) rate: u32,
    /// Number of times the relay is killed, every two seconds
    #[arg(long, default_value_t = 5)]
    pub(crate) kills: u32,
}

#[derive(Args, Clone, Debug)]
pub(crate) struct Outage {
    /// Time without etcd, seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(2..=3600))]
    pub(crate) etcd: u32,
    /// Hosts, each with a daemon, an agent and a guest: 2 to 16
    #[arg(long, default_value_t = 3, value_parser = hosts)]
    pub(crate) hosts: usize,
    /// The etcd program, such as `scripts/install-etcd.sh` prints
    #[arg(long, value_name = "PATH", env = "BIFROST_ETCD")]
    pub(crate) etcd_program: PathBuf,
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Learn {
    /// Routes of the VPC, about
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u32).range(2_000..=1_000_000))]
    pub(crate) routes: u32,
    /// Destinations that a guest uses
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(16..=1000))]
    pub(crate) used: u32,
    /// 20,000 routes, of which 128 are used
    #[arg(long)]
    pub(crate) quick: bool,
}

fn hosts(text: &str) -> Result<usize, String> {
    let hosts = text.parse().ok().filter(|hosts| (2..=16).contains(hosts));
    hosts.ok_or_else(|| format!("{text:?} is not a number from 2 to 16"))
}
