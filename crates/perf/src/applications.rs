//! Arguments of the workloads modelled on applications.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::{Result, ensure};
use clap::{Args, Subcommand};

use crate::common::{Common, print};
use crate::link::Net;
use crate::{block, sort, stats};

/// Common arguments.
#[derive(Debug, Args)]
struct Shared {
    #[command(flatten)]
    common: Common,
    /// Use TCP instead.
    #[arg(long)]
    tcp: bool,
    /// Print one JSON object instead of text.
    #[arg(long)]
    json: bool,
}

impl Shared {
    fn net(&self) -> Result<Net> {
        ensure!(
            !self.tcp || self.common.stats.is_none(),
            "--stats cannot be combined with --tcp, which has no counters"
        );
        Ok(if self.tcp { Net::Tcp } else { Net::Messages(self.common.worker()?) })
    }

    /// The address where a server listens.
    fn at(&self) -> SocketAddr {
        SocketAddr::new(self.common.bind, self.common.port)
    }

    fn write_statistics(&self, net: &Net) -> Result<()> {
        if let Net::Messages(worker) = net {
            stats::write(worker, self.common.stats.as_deref())?;
        }
        Ok(())
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum SortCommand {
    /// Generate records, and send each to its reducer.
    Map(MapArgs),
    /// Receive records until all mappers have ended, and sort them.
    Reduce(ReduceArgs),
}

#[derive(Debug, Args)]
pub(crate) struct MapArgs {
    /// The reducers in order of their numbers, as ADDRESS:PORT,...
    #[arg(long, value_delimiter = ',', required = true)]
    reducers: Vec<SocketAddr>,
    /// Number of records, 100 bytes each.
    #[arg(long, default_value_t = 100_000)]
    records: u64,
    /// Seed of the records; give each mapper a different one.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Length of a block, bytes.
    #[arg(long, default_value_t = 65_500, value_parser = clap::value_parser!(u32).range(100..1 << 20))]
    block: u32,
    /// Blocks in flight to each reducer.
    #[arg(short = 't', long, default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=900))]
    tx_depth: u16,
    /// Start at this time, ms since 1970, together with the other mappers.
    #[arg(long, default_value_t = 0)]
    begin_ms: u64,
    #[command(flatten)]
    shared: Shared,
}

#[derive(Debug, Args)]
pub(crate) struct ReduceArgs {
    /// Number of mappers.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    mappers: u32,
    /// Number of this reducer, from 0.
    #[arg(long, default_value_t = 0)]
    number: u32,
    /// Number of reducers.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    reducers: u32,
    /// Maximum number of records, which are kept in memory.
    #[arg(long, default_value_t = 10_000_000)]
    most: u64,
    #[command(flatten)]
    shared: Shared,
}

impl SortCommand {
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Self::Map(args) => {
                let net = args.shared.net()?;
                let plan = sort::Map {
                    reducers: args.reducers,
                    records: args.records,
                    seed: args.seed,
                    block: args.block as usize / sort::RECORD * sort::RECORD,
                    depth: args.tx_depth.into(),
                    begin_ms: args.begin_ms,
                };
                let mapped = sort::map(&net, &plan)?;
                args.shared.write_statistics(&net)?;
                print(&mapped, args.shared.json)
            }
            Self::Reduce(args) => {
                ensure!(args.number < args.reducers, "--number must be below --reducers");
                let net = args.shared.net()?;
                let reducer = (args.number as usize, args.reducers as usize);
                let reduced = sort::reduce(&net, args.shared.at(), args.mappers, reducer, args.most)?;
                args.shared.write_statistics(&net)?;
                print(&reduced, args.shared.json)
            }
        }
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum BlockCommand {
    /// A back end, which keeps a disk in memory.
    Serve(ServeArgs),
    /// The front end: uses the disk, verifies what it reads, and reports.
    Run(RunArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ServeArgs {
    /// Size of the disk, MiB.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    disk_mib: u32,
    /// Exit after this number of front ends; 0: never.
    #[arg(long, default_value_t = 0)]
    clients: u32,
    #[command(flatten)]
    shared: Shared,
}

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    /// The back ends, as ADDRESS:PORT,...
    #[arg(long, value_delimiter = ',', required = true)]
    backends: Vec<SocketAddr>,
    /// Size of the disk, MiB, as at the back ends; it must be empty.
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    disk_mib: u32,
    /// Size of an operation, bytes, a multiple of 4096 up to 131,072; 0: mixed.
    #[arg(short, long, default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=131_072))]
    size: u32,
    /// Share of operations that are reads, percent.
    #[arg(long, default_value_t = 70, value_parser = clap::value_parser!(u8).range(0..=100))]
    reads: u8,
    /// Number of operations in flight.
    #[arg(short = 't', long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=256))]
    tx_depth: u16,
    /// Duration, seconds.
    #[arg(short = 'D', long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=86_400))]
    duration: u32,
    #[command(flatten)]
    shared: Shared,
}

impl BlockCommand {
    pub(crate) fn run(self) -> Result<()> {
        match self {
            Self::Serve(args) => {
                let net = args.shared.net()?;
                block::serve(&net, args.shared.at(), (args.disk_mib as usize) << 20, args.clients)?;
                args.shared.write_statistics(&net)
            }
            Self::Run(args) => {
                let size = args.size as usize;
                ensure!(size.is_multiple_of(block::UNIT), "--size must be a multiple of {}", block::UNIT);
                let load = block::Load {
                    backends: args.backends,
                    disk: (args.disk_mib as usize) << 20,
                    size: (size > 0).then_some(size),
                    reads: args.reads.into(),
                    depth: args.tx_depth.into(),
                    duration: Duration::from_secs(args.duration.into()),
                };
                let net = args.shared.net()?;
                let report = block::run(&net, &load)?;
                args.shared.write_statistics(&net)?;
                print(&report, args.shared.json)
            }
        }
    }
}
