//! Arguments that all measurements share, and how they print a report.

use std::fmt::Display;
use std::net::{IpAddr, Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result};
use bifrost_endpoint::{Choice, Order, Service, Worker, WorkerConfig};
use clap::builder::TypedValueParser;
use clap::{Args, ValueEnum};
use serde::Serialize;

/// Arguments of every client and server.
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
    pub(crate) connection: Connection,
    /// Send with the service that this file names, `uc` or `rc`, and change when it does; requires --connection both.
    #[arg(long, value_name = "FILE")]
    pub(crate) follow: Option<PathBuf>,
    /// Deliver messages in sending order, rather than as soon as each is complete.
    #[arg(long)]
    pub(crate) in_order: bool,
}

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
pub(crate) enum Connection {
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
    pub(crate) fn peer(&self, host: &str) -> Result<SocketAddr> {
        let all = (host, self.port).to_socket_addrs().with_context(|| format!("{host}: no such host"))?;
        { all }
            .find(|at| at.is_ipv4() == self.bind.is_ipv4())
            .with_context(|| format!("{host} has no address of the same family as --bind {}", self.bind))
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
