//! The command line. Options have perftest's names where it has the same ones.

use std::fmt::Display;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use bifrost_endpoint::{Choice, Order, Service, Worker, WorkerConfig};
use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;

use crate::applications::{BlockCommand, SortCommand};
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

#[derive(Clone, Debug, Args)]
pub(crate) struct Common {
    /// Local address; a server also listens there. IPv6 is faster: see docs/RDM.md, section 11.2.
    #[arg(short, long, default_value_t = IpAddr::V6(Ipv6Addr::LOCALHOST))]
    pub(crate) bind: IpAddr,
    /// TCP port of the server for connection setup. --tcp uses the next port.
    #[arg(short, long, default_value_t = 18_515)]
    pub(crate) port: u16,
    /// NIC type: the RDMA NIC that has the local address, or software. The report's first line shows which is used.
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    provider: Provider,
    /// UDP port of RoCEv2; 0: any free port. Peers learn it at setup. RDMA NICs require 4791.
    #[arg(long, default_value_t = 4791)]
    roce_port: u16,
    /// Payload of a packet, bytes; must be equal at both ends.
    #[arg(short, long, default_value_t = 1024, value_parser = clap::builder::PossibleValuesParser::new(["256", "512", "1024", "2048", "4096"])
        .map(|text| text.parse::<u16>().unwrap_or(1024)))]
    mtu: u16,
    /// Longest RDMA WRITE, bytes. If a peer uses the kernel's soft-RoCE with UC: 4096, with --mtu 4096.
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(4096..=65_536))]
    chunk: u32,
    /// Poll for packets this long before sleeping, us. Larger values are faster if a processor is free; otherwise 0 is.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    spin: u64,
    /// Write counters to this file in Prometheus's text format, at the end, and on a server after each client; `-`:
    /// standard output.
    #[arg(long, value_name = "FILE")]
    pub(crate) stats: Option<PathBuf>,
    /// Transport service; must be equal at both ends.
    #[arg(short, long, value_enum, default_value_t = Connection::Uc, ignore_case = true)]
    connection: Connection,
    /// Send with the service that this file names, `uc` or `rc`, and change when it does; requires --connection both.
    #[arg(long, value_name = "FILE")]
    follow: Option<PathBuf>,
    /// Deliver messages in sending order, rather than as soon as each is complete.
    #[arg(long)]
    in_order: bool,
}

use clap::builder::TypedValueParser;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Provider {
    /// The RDMA NIC if one is usable, otherwise software.
    Auto,
    /// The RDMA NIC.
    Verbs,
    /// RoCEv2 over UDP sockets.
    Soft,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Connection {
    /// Unreliable connections: software retransmits.
    Uc,
    /// Reliable connections: the NIC retransmits, with software as a fallback.
    Rc,
    /// Both in one connection: first UC; --switch-every or --follow changes the service.
    Both,
}

impl Common {
    pub(crate) fn worker(&self) -> Result<Worker> {
        let mut config = WorkerConfig::new(self.bind);
        config.provider = match self.provider {
            Provider::Auto => Choice::Auto,
            Provider::Verbs => Choice::Verbs,
            Provider::Soft => Choice::Soft,
        };
        config.port = self.roce_port;
        config.chunk = self.chunk;
        config.mtu = self.mtu;
        config.order = if self.in_order { Order::Sent } else { Order::Complete };
        config.spin = Duration::from_micros(self.spin);
        config.service = match self.connection {
            Connection::Uc => Service::Uc,
            Connection::Rc => Service::Rc,
            Connection::Both => Service::Both,
        };
        let worker = Worker::new(config)?;
        if let Some(path) = &self.follow {
            worker.follow(path)?;
        }
        Ok(worker)
    }

    /// The server's address, of the same family as --bind.
    fn peer(&self, host: &str) -> Result<SocketAddr> {
        let all = (host, self.port).to_socket_addrs().with_context(|| format!("{host}: no such host"))?;
        { all }
            .find(|at| at.is_ipv4() == self.bind.is_ipv4())
            .with_context(|| format!("{host} has no address of the same family as --bind {}", self.bind))
    }
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

/// Prints a report, as text or as JSON.
pub(crate) fn print(report: &(impl Display + Serialize), json: bool) -> Result<()> {
    if json {
        println!("{}", serde_json::to_string(report)?);
    } else {
        print!("{report}");
    }
    Ok(())
}
