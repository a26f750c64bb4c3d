//! The command line.

use std::path::PathBuf;

use crate::capture::{self, CaptureArgs};
use crate::drops::DropsArgs;
use crate::fleet::FleetArgs;
use crate::gw::{self, GwArgs};
use crate::objects::{self, ApplyArgs, ObjectCommand, ObjectsArgs};
use crate::sessions::{self, SessionsCommand};
use crate::trace::{self, TraceArgs};
use bifrost_control::api::{Direction, DrainSpec, FaultSpec, FaultSpecError, FaultTarget};
use bifrost_control::config::DEFAULT_SOCKET;
use clap::{ArgGroup, Args, Parser, Subcommand, ValueEnum};

/// Looks into a running bifrostd, the virtual switch of this host.
#[derive(Debug, Parser)]
#[command(version, max_term_width = 100, after_help = EXAMPLES)]
pub(crate) struct Cli {
    /// The daemon's control socket, as its configuration has it
    #[arg(long, value_name = "PATH", global = true, env = "BIFROST_SOCKET", default_value = DEFAULT_SOCKET)]
    pub(crate) socket: PathBuf,
    /// Print JSON, as the API gives it; errors too, on stderr
    #[arg(long, global = true)]
    pub(crate) json: bool,
    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  bifrostctl status                                    is it running, how busy, with which peers
  bifrostctl paths                                     round-trip time, loss and share of every path
  bifrostctl top                                       the same, live, with the connections
  bifrostctl drops                                     everything that was dropped: why, where, what to do
  bifrostctl drops --watch 2                           the same every 2 seconds, and how fast it grows
  bifrostctl stats --nonzero rte                       what the transport has counted
  bifrostctl --json conns | jq '.[] | select(.retransmitted_packets > 0)'
  bifrostctl capture -w out.pcapng --at drop           the packets that were, and the reason of each
  bifrostctl trace --port web1 --to 10.0.0.2 --tcp 40000:6379
                                                       what would become of that packet, and by which rules
  bifrostctl path drain --peer host-b --path 1         nothing new leaves on it, for its cable is to be touched
  bifrostctl fault add --peer host-b --path 1 --loss 10
  bifrostctl fault clear

`bifrostctl help COMMAND` explains a command.";

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// The daemon: version, uptime, workers, peers, faults in force
    Status,
    /// The guests' ports: addresses, traffic, drops by reason
    ///
    /// `rx` is towards the guest, `tx` from the guest. `HELD` are the guest's packets that are kept until the other
    /// side acknowledges them.
    Ports,
    /// The VPC routes: which destinations live behind which peer
    Routes,
    /// The learned routes: addresses that guests have used, in VPCs whose routes are not all sent to the host
    Learned,
    /// The load balancers: where they listen, their backends and which of them work
    LoadBalancers,
    /// NAT: addresses outside, whose they are, and how many of their ports are in use
    Nat,
    /// Mirrors: whose packets are copied, where to, and what was lost
    Mirrors,
    /// Flow logs: what is logged, where to, and what was lost
    FlowLog,
    /// The reliable connections, one for each pair of vNICs
    Conns,
    /// The paths to every peer: state, round-trip time, loss, share of the traffic
    Paths,
    /// Take a path out of use before its cable is touched, and back
    #[command(subcommand, after_help = PATH_EXAMPLES)]
    Path(PathCommand),
    /// The daemon's counters; each name ends in its unit
    Stats(StatsArgs),
    /// What was dropped: reason, place, rate, what it means and what to do
    ///
    /// Rates are since the start, or over the interval of `--watch`. docs/COUNTERS.md explains all counters.
    Drops(DropsArgs),
    /// Have the daemon read its configuration again, as SIGHUP does
    ///
    /// The file is checked as a whole first; if anything is wrong nothing changes. Ports that did not change lose no
    /// packet. Underlay, workers and control socket only change by a restart.
    Reload,
    /// Have another program go on with the daemon's work, such as the one that a package has just installed
    ///
    /// The new daemon prepares while the running one works; then that one stops for some milliseconds, hands over, and ends. Containers' TCP
    /// connections go on. If anything goes wrong the running daemon goes on, and says what it was. Only for root.
    Upgrade(UpgradeArgs),
    /// Change ports, routes and other objects, all that a file says or nothing
    ///
    /// FILE has tables as the configuration file does, such as [[port]] and [[route]], or is a batch as POST /v1/apply takes it (JSON). What it
    /// does not name stays. Objects of the configuration file belong to the owner `file`, and change there only.
    #[command(after_help = objects::APPLY_EXAMPLES)]
    Apply(ApplyArgs),
    /// The objects in force: whose they are, their versions, and what they say
    #[command(after_help = objects::LIST_EXAMPLES)]
    Objects(ObjectsArgs),
    /// Add, change or delete one port
    #[command(subcommand, after_help = objects::CHANGE_EXAMPLES)]
    Port(ObjectCommand),
    /// Add, change or delete one route; its key is VNI/PREFIX
    #[command(subcommand, after_help = objects::CHANGE_EXAMPLES)]
    Route(ObjectCommand),
    /// Add, change or delete one security group
    #[command(subcommand, after_help = objects::CHANGE_EXAMPLES)]
    Sg(ObjectCommand),
    /// Sessions of security groups: list them, or take a port's along when its guest moves to another host
    #[command(subcommand, after_help = sessions::EXAMPLES)]
    Sessions(SessionsCommand),
    /// Break the network on purpose, to see what happens
    #[command(subcommand, after_help = FAULT_EXAMPLES)]
    Fault(FaultCommand),
    /// Capture packets at every stage of the daemon, for Wireshark
    ///
    /// The result is a pcapng file with an interface for each stage and worker; every packet has a comment: what was done with
    /// it, port, peer, network, path, PSN, connection and flow. The capture ends by itself; one at a time can run.
    #[command(after_help = capture::EXAMPLES)]
    Capture(CaptureArgs),
    /// What would become of a packet, stage by stage, without sending it
    ///
    /// The packet is described: who sends it, where it goes, and what it is. Every stage's decision is shown, with the rule or route
    /// that decides, and in the end the counter that would count it if it is dropped.
    #[command(after_help = trace::EXAMPLES)]
    Trace(TraceArgs),
    /// A gateway: its pods, order queues, limiter, and the time of its stages
    ///
    /// A gateway is bifrost-nicd and a bifrost-gw behind it, which have control sockets of their own.
    #[command(after_help = gw::EXAMPLES)]
    Gw(GwArgs),
    /// A network of many hosts: what it is to be, and what its hosts have
    ///
    /// This talks with bifrost-relay, which keeps the objects and gives each host what concerns it.
    Fleet(FleetArgs),
    /// A live view of paths and connections; q quits
    Top(TopArgs),
}

#[derive(Debug, Args)]
pub(crate) struct UpgradeArgs {
    /// The program; by default the one that lies where the running one was started from
    #[arg(long, value_name = "PATH")]
    pub(crate) binary: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct StatsArgs {
    /// Only counters whose name contains this
    pub(crate) pattern: Option<String>,
    /// Only counters that are not 0
    #[arg(long)]
    pub(crate) nonzero: bool,
}

#[derive(Debug, Args)]
pub(crate) struct TopArgs {
    /// Milliseconds between two samples
    #[arg(long, value_name = "MS", default_value_t = 500, value_parser = clap::value_parser!(u64).range(50..=60_000))]
    pub(crate) interval_ms: u64,
    /// End after this many samples
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    pub(crate) count: Option<u64>,
}

const PATH_EXAMPLES: &str = "\
Examples:
  bifrostctl path drain --peer host-b --path 2          nothing new leaves on path 2; then the same on host-b
  bifrostctl paths                                      path 2 is `drained`, its FLIGHT goes to 0
  bifrostctl path restore --peer host-b --path 2        the cable is back, its probes return";

#[derive(Debug, Subcommand)]
pub(crate) enum PathCommand {
    /// Take a path out of use: nothing new is sent on it
    ///
    /// What is in flight on it ends normally, and no packet is lost. Probes go on, and what the peer still sends on it
    /// is acknowledged on it: drain it on both hosts before the cable is pulled. It stays out of use until it is
    /// restored, the daemon restarts, or a reload changes the peer. The last path in use cannot be drained.
    #[command(after_help = PATH_EXAMPLES)]
    Drain(PathArgs),
    /// Take a drained path into use again
    ///
    /// The transport takes it as soon as it is good; flows of plain VXLAN come back after a pause of their own.
    #[command(after_help = PATH_EXAMPLES)]
    Restore(PathArgs),
}

#[derive(Debug, Args)]
pub(crate) struct PathArgs {
    /// The host at its other end
    #[arg(long, value_name = "NAME")]
    peer: String,
    /// Which path to that host, as `bifrostctl paths` numbers them
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=7))]
    path: u8,
}

impl From<PathArgs> for DrainSpec {
    fn from(PathArgs { peer, path }: PathArgs) -> DrainSpec {
        DrainSpec { peer, path }
    }
}

const FAULT_EXAMPLES: &str = "\
Examples:
  bifrostctl fault add --port web1 --loss 1               1 % of what web1 should receive is dropped before its vNIC
  bifrostctl fault add --peer host-b --path 2 --down      path 2 from host-b is dead
  bifrostctl fault add --peer host-b --delay-us 500 --jitter-us 200
  bifrostctl fault add --peer host-b --direction tx --duplicate 5 --corrupt 0.1 --seed 7
  bifrostctl fault list
  bifrostctl fault clear --id 3
  bifrostctl fault clear";

#[derive(Debug, Subcommand)]
pub(crate) enum FaultCommand {
    /// The faults in force, and how many packets each has hit
    List,
    /// Remove one fault, or all of them
    Clear {
        /// Only this one
        #[arg(long, value_name = "N")]
        id: Option<u64>,
    },
    /// Inject a fault at a port, or on the paths to a peer
    #[command(after_help = FAULT_EXAMPLES)]
    Add(FaultArgs),
}

#[derive(Debug, Args)]
#[command(group = ArgGroup::new("where").required(true).args(["port", "peer"]))]
#[command(group = ArgGroup::new("effect").required(true).multiple(true)
    .args(["loss", "delay_us", "jitter_us", "reorder", "duplicate", "corrupt", "down"]))]
pub(crate) struct FaultArgs {
    /// Between the switch and this port's vNIC
    #[arg(long, value_name = "NAME")]
    port: Option<String>,
    /// On the underlay, between this host and that peer
    #[arg(long, value_name = "NAME")]
    peer: Option<String>,
    /// Only this path to the peer, 0 to 7
    #[arg(long, value_name = "N", requires = "peer", conflicts_with = "port",
        value_parser = clap::value_parser!(u8).range(0..=7))]
    path: Option<u8>,
    /// Packets received (at a port: towards the guest) or sent (from the guest)
    #[arg(long, value_enum, default_value_t = FaultDirection::Rx)]
    direction: FaultDirection,
    /// Drop this share of packets, percent
    #[arg(long, value_name = "PCT", value_parser = percent)]
    loss: Option<f64>,
    /// Delay every packet, microseconds
    #[arg(long, value_name = "N")]
    delay_us: Option<u64>,
    /// Delay every packet by a further random time up to this, microseconds
    #[arg(long, value_name = "N")]
    jitter_us: Option<u64>,
    /// Let this share of packets overtake those before, percent
    #[arg(long, value_name = "PCT", value_parser = percent)]
    reorder: Option<f64>,
    /// Deliver this share of packets twice, percent
    #[arg(long, value_name = "PCT", value_parser = percent)]
    duplicate: Option<f64>,
    /// Change a byte in this share of packets, percent
    #[arg(long, value_name = "PCT", value_parser = percent)]
    corrupt: Option<f64>,
    /// Drop everything
    #[arg(long)]
    down: bool,
    /// Seed of the random decisions, to repeat a run
    #[arg(long, value_name = "N")]
    seed: Option<u64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FaultDirection {
    Rx,
    Tx,
}

impl FaultArgs {
    /// The fault as the API takes it.
    pub(crate) fn spec(self) -> Result<FaultSpec, FaultSpecError> {
        let target = match (self.port, self.peer) {
            (Some(name), None) => FaultTarget::Port { name },
            (None, Some(name)) => FaultTarget::Peer { name, path: self.path },
            _ => return Err(FaultSpecError::Target),
        };
        let spec = FaultSpec {
            direction: match self.direction {
                FaultDirection::Rx => Direction::Rx,
                FaultDirection::Tx => Direction::Tx,
            },
            loss_percent: self.loss.unwrap_or(0.0),
            delay_us: self.delay_us.unwrap_or(0),
            jitter_us: self.jitter_us.unwrap_or(0),
            reorder_percent: self.reorder.unwrap_or(0.0),
            duplicate_percent: self.duplicate.unwrap_or(0.0),
            corrupt_percent: self.corrupt.unwrap_or(0.0),
            down: self.down,
            seed: self.seed,
            ..FaultSpec::new(target)
        };
        spec.check()?;
        Ok(spec)
    }
}

fn percent(text: &str) -> Result<f64, String> {
    let value: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    if (0.0..=100.0).contains(&value) { Ok(value) } else { Err("not in 0 to 100 percent".to_owned()) }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        Cli::command().debug_assert();
    }

    fn fault(args: &str) -> Result<FaultSpec, String> {
        let words = ["bifrostctl", "fault", "add"].into_iter().chain(args.split_whitespace());
        let cli = Cli::try_parse_from(words).map_err(|e| e.to_string())?;
        match cli.command {
            Command::Fault(FaultCommand::Add(args)) => args.spec().map_err(|e| e.to_string()),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn faults() {
        let spec = fault("--peer b --path 3 --direction tx --loss 1.5 --delay-us 10 --jitter-us 2 --reorder 3 --duplicate 4 --corrupt 5 --down --seed 9").unwrap();
        let expected = FaultSpec {
            target: FaultTarget::Peer { name: "b".into(), path: Some(3) },
            direction: Direction::Tx,
            loss_percent: 1.5,
            delay_us: 10,
            jitter_us: 2,
            reorder_percent: 3.0,
            duplicate_percent: 4.0,
            corrupt_percent: 5.0,
            down: true,
            seed: Some(9),
        };
        assert_eq!(spec, expected);
        assert_eq!(fault("--port web1 --loss 1").unwrap().direction, Direction::Rx);
        let refused = [
            ("--loss 1", "--port <NAME>|--peer <NAME>"),
            ("--port a --peer b --loss 1", "cannot be used with"),
            ("--port a --path 1 --loss 1", "cannot be used with"),
            ("--port a", "--loss <PCT>|"),
            ("--peer a --path 8 --loss 1", "8 is not in 0..=7"),
            ("--peer a --loss 101", "not in 0 to 100 percent"),
            ("--peer a --loss NaN", "not in 0 to 100 percent"),
            ("--peer a --loss x", "not a number"),
            ("--peer a --loss 0", "no effect"),
            ("--peer a --delay-us 10000001", "10000001 is more than"),
        ];
        for (args, message) in refused {
            let error = fault(args).unwrap_err();
            assert!(error.contains(message), "{args}: {error}");
        }
    }
}
