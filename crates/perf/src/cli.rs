//! The command line: option names are perftest's, where there is one.

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
/// An RDMA NIC that has the local address is used; without one, packets are RoCEv2 over UDP sockets. Start `bifrost-perf server` on one host, then `bw` or `lat`
/// with its address on the other; the server takes one client after the other.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Examples:
  bifrost-perf server -b fd00::2
  bifrost-perf bw fd00::2 -b fd00::1 -s 1048576 -D 10     one-way bandwidth of 1 MiB messages for 10 s
  bifrost-perf lat fd00::2 -b fd00::1 -s 32768 -n 10000   times of 10,000 calls of 32 KiB, answered with as much
  bifrost-perf lat fd00::2 --tcp -s 32768 -n 10000        the same calls over TCP
  bifrost-perf server -b fd00::2 -c both --follow FILE --in-order
  bifrost-perf upgrade fd00::2 -b fd00::1 --follow FILE   calls at a steady rate, while `echo rc >FILE` changes their service"
)]
pub(crate) struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Answers clients, over RoCEv2 and over TCP, until it is stopped.
    Server(ServerArgs),
    /// Bandwidth in one direction: what the server has received in a second.
    Bw(ClientArgs),
    /// Latency of calls: a request and a response of the same size.
    Lat(ClientArgs),
    /// Calls at a steady rate, while a file has running processes change their service: what is lost or out of order, and how
    /// throughput deviates.
    Upgrade(UpgradeArgs),
    /// A distributed sort: mappers send records to the reducers that have their keys.
    #[command(subcommand)]
    Sort(SortCommand),
    /// Block storage: a front end that reads one of several back ends, and writes all.
    #[command(subcommand)]
    Block(BlockCommand),
}

#[derive(Debug, Args)]
struct ServerArgs {
    #[command(flatten)]
    common: Common,
    /// End after that many clients; 0: never.
    #[arg(long, default_value_t = 0)]
    clients: u32,
}

#[derive(Debug, Args)]
struct ClientArgs {
    /// The server: a name or an address.
    host: String,
    #[command(flatten)]
    common: Common,
    /// Bytes of a message, up to 256 MiB.
    #[arg(short, long, default_value_t = 65_536)]
    size: usize,
    /// Messages or calls that are measured.
    #[arg(short = 'n', long, default_value_t = 1000)]
    iters: u64,
    /// Run for that many seconds, instead of --iters.
    #[arg(short = 'D', long, value_name = "SECONDS")]
    duration: Option<f64>,
    /// Messages, or calls, that are open at once.
    #[arg(
        short = 't',
        long,
        default_value_t = 0,
        help = "Messages, or calls, open at once [default: 16 for bw, 1 for lat]"
    )]
    tx_depth: usize,
    /// Use the other service every that many ms: needs --connection both.
    #[arg(long, value_name = "MS", value_parser = clap::value_parser!(u64).range(1..=3_600_000))]
    switch_every: Option<u64>,
    /// Over TCP instead.
    #[arg(long)]
    tcp: bool,
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
struct UpgradeArgs {
    /// The server: a name or an address. It has the same --follow, or another file, and --in-order.
    host: String,
    #[command(flatten)]
    common: Common,
    /// Bytes of a request, and of its response.
    #[arg(short, long, default_value_t = 32_768, value_parser = clap::value_parser!(u32).range(numbered::SHORTEST as i64..=16 << 20))]
    size: u32,
    /// Calls a second that are begun, whether earlier ones are answered or not; 900 are open at most.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// Seconds.
    #[arg(short = 'D', long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    duration: u32,
    /// Length of the windows in which throughput is measured, ms.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(100..=60_000))]
    window_ms: u32,
    /// One JSON object instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Debug, Args)]
pub(crate) struct Common {
    /// The local address to bind; for a server also where it listens. IPv6 is faster: see docs/RDM.md.
    #[arg(short, long, default_value_t = IpAddr::V6(Ipv6Addr::LOCALHOST))]
    pub(crate) bind: IpAddr,
    /// TCP port of the server, where connections are set up. The next one is for --tcp.
    #[arg(short, long, default_value_t = 18_515)]
    pub(crate) port: u16,
    /// What carries packets: the RDMA NIC that has the local address, or software. The first line of the report says what it is.
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    provider: Provider,
    /// UDP port of RoCEv2; 0: any that is free. Peers tell each other. RDMA NICs have 4791.
    #[arg(long, default_value_t = 4791)]
    roce_port: u16,
    /// Payload of a packet, bytes; both ends need the same.
    #[arg(short, long, default_value_t = 1024, value_parser = clap::builder::PossibleValuesParser::new(["256", "512", "1024", "2048", "4096"])
        .map(|text| text.parse::<u16>().unwrap_or(1024)))]
    mtu: u16,
    /// The longest piece of a message that is written at once, bytes. To the kernel's soft-RoCE, which needs it with UC: 4096, with --mtu 4096.
    #[arg(long, default_value_t = 65_536, value_parser = clap::value_parser!(u32).range(4096..=65_536))]
    chunk: u32,
    /// Look for packets that long before sleeping, us. With a processor to spare, more is faster; without one, 0 is.
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    spin: u64,
    /// Write what was counted into that file, as Prometheus reads it: at the end, and on a server when a client has gone;
    /// `-`: standard output.
    #[arg(long, value_name = "FILE")]
    pub(crate) stats: Option<PathBuf>,
    /// Transport service; both ends need the same.
    #[arg(short, long, value_enum, default_value_t = Connection::Uc, ignore_case = true)]
    connection: Connection,
    /// Send by the service that a file says, `uc` or `rc`, and change when it says the other one: needs --connection both.
    #[arg(long, value_name = "FILE")]
    follow: Option<PathBuf>,
    /// Deliver messages in the order in which they were sent, and not as they are complete.
    #[arg(long)]
    in_order: bool,
}

use clap::builder::TypedValueParser;

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Provider {
    /// The RDMA NIC if there is one that can be used, or software.
    Auto,
    /// The RDMA NIC.
    Verbs,
    /// RoCEv2 over UDP sockets.
    Soft,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Connection {
    /// Unreliable connections: software repeats what is lost.
    Uc,
    /// Reliable connections: the NIC repeats, and software behind it.
    Rc,
    /// Both in one connection: unreliable at first, and --switch-every or --follow changes that.
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

    /// The server's address, of the family of --bind.
    fn peer(&self, host: &str) -> Result<SocketAddr> {
        let all = (host, self.port).to_socket_addrs().with_context(|| format!("{host}: no such host"))?;
        { all }
            .find(|at| at.is_ipv4() == self.bind.is_ipv4())
            .with_context(|| format!("{host} has no address of the family of {} (--bind)", self.bind))
    }
}

/// How long it may take to connect.
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
        ensure!(self.size <= 256 << 20, "messages have at most 256 MiB");
        ensure!(self.duration.is_none_or(|s| s.is_finite() && s > 0.0), "--duration must be more than 0");
        let both = !self.tcp && matches!(self.common.connection, Connection::Both);
        ensure!(!self.tcp || self.common.stats.is_none(), "--stats has nothing to say about --tcp");
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
        ensure!(self.common.follow.is_some(), "upgrade needs --follow: the file that says when to change");
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
