//! The command line.

use clap::{Args, Parser, Subcommand};

const EXAMPLES: &str = "\
Examples:
  bifrost-fleet run propagate --hosts 1000 --ports 100000 --rate 200
                              changes of ports, and how long they take to reach the hosts that they concern
  bifrost-fleet run propagate --what group --hosts 1000 --rate 1
                              changes of a group that all hosts have
  bifrost-fleet run cold --ports 100000 --hosts 1000
                              a relay starts with all of that in its store, and all agents connect at once
  bifrost-fleet run failover --hosts 100 --kills 5
                              the relay is killed while changes are made

It runs the bifrost-relay beside it in its own directory, on loopback. A bar that is missed makes the exit status 1.";

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
    /// How long changes take from their request until agents have them
    Propagate(Propagate),
    /// How long a relay takes to start with a full store, and all agents to connect again
    Cold(Cold),
    /// Whether what was acknowledged is everywhere although the relay is killed
    Failover(Failover),
}

/// A network of many hosts.
#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Size {
    /// Hosts, each with an agent
    #[arg(long, default_value_t = 100)]
    pub(crate) hosts: usize,
    /// Ports, spread over the hosts
    #[arg(long, default_value_t = 10_000)]
    pub(crate) ports: usize,
    /// Ports of a VPC; each is on a host of its own as far as there are enough hosts
    #[arg(long, default_value_t = 50)]
    pub(crate) ports_per_vpc: usize,
}

#[derive(Args, Clone, Copy, Debug)]
pub(crate) struct Propagate {
    #[command(flatten)]
    pub(crate) size: Size,
    /// Changes a second
    #[arg(long, default_value_t = 200)]
    pub(crate) rate: u32,
    /// For how long, seconds
    #[arg(long, default_value_t = 10)]
    pub(crate) seconds: u32,
    /// What is changed
    #[arg(long, value_enum, default_value_t = What::Port)]
    pub(crate) what: What,
}

/// What is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum What {
    /// A port moves to another host
    Port,
    /// A group of ports on all hosts gets another rule
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
    /// Changes a second
    #[arg(long, default_value_t = 100)]
    pub(crate) rate: u32,
    /// How often the relay is killed, every two seconds
    #[arg(long, default_value_t = 5)]
    pub(crate) kills: u32,
}
