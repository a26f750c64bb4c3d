//! The command line. Options have perftest's names where it has the same ones.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Args, Parser, Subcommand};

use crate::applications::{BlockCommand, SortCommand};
use crate::common::{Common, Connection, print};
use crate::plan::{Plan, Test};
use crate::{bandwidth, latency, numbered, server, stats, tcp, upgrade};

/// Measures bandwidth and latency of messages between two hosts.
///
/// Uses the RDMA NIC that has the local address, or else RoCEv2 over UDP sockets. Start `bifrost-perf server` on one
/// host, then `bw` or `lat` with its address on the other. The server accepts one client after another.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:
  bifrost-perf server -b fd00::2
  bifrost-perf bw fd00::2 -b fd00::1 -s 1048576 -D 10     one-way bandwidth of 1 MiB messages for 10 s
  bifrost-perf lat fd00::2 -b fd00::1 -s 32768 -n 10000   latency of 10,000 calls with requests and responses of 32 KiB
  bifrost-perf lat fd00::2 --tcp -s 32768 -n 10000        the same calls over TCP
  bifrost-perf server -b fd00::2 -c both --follow FILE --in-order
  bifrost-perf upgrade fd00::2 -b fd00::1 --follow FILE   constant-rate calls; `echo rc >FILE` changes the service"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve clients over RoCEv2 and TCP until stopped.
    Server(ServerArgs),
    /// Measure bandwidth in one direction, as received by the server.
    Bw(ClientArgs),
    /// Measure latency of calls with requests and responses of the same size.
    Lat(ClientArgs),
    /// Make calls at a constant rate while a file changes the service of the running processes; report losses,
    /// reordering and throughput variation.
    Upgrade(UpgradeArgs),
    /// Distributed sort: mappers send records to reducers by key range.
    #[command(subcommand)]
    Sort(SortCommand),
    /// Block storage: a front end reads from one of several back ends, and writes to all.
    #[command(subcommand)]
    Block(BlockCommand),
}

#[derive(Debug, Args)]
struct ServerArgs {
    #[command(flatten)]
    common: Common,
    /// Exit after this number of clients; 0: never.
    #[arg(long, default_value_t = 0)]
    clients: u32,
}

#[derive(Debug, Args)]
struct ClientArgs {
    /// Server name or address.
    host: String,
    #[command(flatten)]
    common: Common,
    /// Length of a message, bytes, up to 256 MiB.
    #[arg(short, long, default_value_t = 65_536)]
    size: usize,
    /// Number of messages or calls.
    #[arg(short = 'n', long, default_value_t = 1000)]
    iters: u64,
    /// Run for this time instead of --iters, seconds.
    #[arg(short = 'D', long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Messages or calls in flight.
    #[arg(
        short = 't',
        long,
        default_value_t = 0,
        help = "Messages or calls in flight [default: 16 for bw, 1 for lat]"
    )]
    tx_depth: usize,
    /// Change to the other service at this interval, ms; requires --connection both.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    switch_every: Option<u64>,
    /// Use TCP instead.
    #[arg(long)]
    tcp: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct UpgradeArgs {
    /// Server name or address. The server needs --in-order, and --follow with the same or another file.
    host: String,
    #[command(flatten)]
    common: Common,
    /// Length of requests and responses, bytes.
    #[arg(short, long, default_value_t = 32_768, value_parser = clap::value_parser!(u32).range(numbered::SHORTEST as i64..=16 << 20))]
    size: u32,
    /// Calls per second, sent whether or not earlier ones were answered; at most 900 are in flight.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// Duration, seconds.
    #[arg(short = 'D', long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    duration: u32,
    /// Length of the windows in which throughput is measured, ms.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(100..=60_000))]
    window_ms: u32,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

/// Time limit of connecting.
const SETUP: Duration = Duration::from_secs(5);

impl Cli {
    pub(crate) fn run(self) -> Result<()> {
        match self.command {
            Command::Server(args) => {
                let worker = args.common.worker()?;
                eprintln!("{}", worker.provider());
                let at = SocketAddr::new(args.common.bind, args.common.port);
                server::run(&worker, at, args.clients, args.common.stats.as_deref())
            }
            Command::Bw(args) => args.run(Test::Bandwidth),
            Command::Lat(args) => args.run(Test::Latency),
            Command::Upgrade(args) => args.run(),
            Command::Sort(command) => command.run(),
            Command::Block(command) => command.run(),
        }
    }
}

impl ClientArgs {
    fn run(&self, test: Test) -> Result<()> {
        ensure!(self.size <= 256 << 20, "--size must be at most 256 MiB");
        ensure!(self.duration.is_none_or(|s| s.is_finite() && s > 0.0), "--duration must be greater than 0");
        let both = !self.tcp && matches!(self.common.connection, Connection::Both);
        ensure!(
            !self.tcp || self.common.stats.is_none(),
            "--stats cannot be combined with --tcp, which has no counters"
        );
        ensure!(self.switch_every.is_none() || both, "--switch-every needs --connection both");
        let default_depth = if test == Test::Bandwidth { 16 } else { 1 };
        let depth = if self.tx_depth == 0 { default_depth } else { self.tx_depth.min(1000) };
        let plan = Plan {
            test,
            size: self.size,
            depth,
            iters: if self.duration.is_some() { u64::MAX } else { self.iters.max(1) },
            seconds: self.duration.unwrap_or(f64::MAX),
            switch_every: self.switch_every.map(Duration::from_millis),
        };
        let peer = self.common.peer(&self.host)?;
        let report = if self.tcp {
            tcp::run(SocketAddr::new(peer.ip(), peer.port().wrapping_add(1)), &plan)?
        } else {
            let worker = self.common.worker()?;
            let endpoint = worker.connect(peer, SETUP)?;
            let report = match test {
                Test::Bandwidth => bandwidth::run(&worker, &endpoint, &plan)?,
                Test::Latency => latency::run(&worker, &endpoint, &plan)?,
            };
            stats::write(&worker, self.common.stats.as_deref())?;
            report
        };
        print(&report, self.json)
    }
}

impl UpgradeArgs {
    fn run(mut self) -> Result<()> {
        ensure!(self.common.follow.is_some(), "upgrade needs --follow FILE: the file selects the service");
        self.common.connection = Connection::Both;
        self.common.in_order = true;
        let load = upgrade::Load {
            size: self.size as usize,
            rate: f64::from(self.rate),
            duration: Duration::from_secs(self.duration.into()),
            window: Duration::from_millis(self.window_ms.into()),
        };
        let worker = self.common.worker()?;
        let endpoint = worker.connect(self.common.peer(&self.host)?, SETUP)?;
        let report = upgrade::run(&worker, &endpoint, &load)?;
        stats::write(&worker, self.common.stats.as_deref())?;
        print(&report, self.json)
    }
}
