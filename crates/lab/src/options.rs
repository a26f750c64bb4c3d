//! Options of a run, shared by the command line and the experiments.

use std::fmt;
use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::shape::Shape;

/// The network under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Mode {
    /// Linux's own VXLAN device and bridge; guests depend on TCP alone.
    KernelVxlan,
    /// Like `kernel_vxlan`, but the guests' TCP uses BBR instead of Cubic.
    KernelBbr,
    /// Like `kernel_vxlan`, but the guests use Multipath TCP (RFC 8684): a subflow for each path.
    Mptcp,
    /// Open vSwitch's userspace datapath with a VXLAN tunnel over one path.
    OpenVswitch,
    /// `bifrostd` with reliability off: plain VXLAN through the same switch.
    Off,
    /// Like `off`, with `plain_paths = "flowlet"`: each burst of a flow takes a random path.
    Flowlet,
    /// Like `off`, with an agent on each host that probes the paths every second and drains bad ones.
    ProbeSwitch,
    /// `bifrostd` with the transport of NSDI'26, as far as settings allow: one order for all flows of two guests, RTO
    /// from 4 ms.
    Strict,
    /// `bifrostd` with the BIFROST transport under the guests' TCP.
    Bifrost,
    /// Like `bifrost`, with AF_XDP sockets on the underlay instead of the kernel's UDP: `port = "afxdp"`.
    BifrostXdp,
}

impl Mode {
    /// All modes, in the order of reports.
    pub const ALL: [Mode; 10] = [
        Mode::KernelVxlan,
        Mode::KernelBbr,
        Mode::Mptcp,
        Mode::OpenVswitch,
        Mode::Off,
        Mode::Flowlet,
        Mode::ProbeSwitch,
        Mode::Strict,
        Mode::Bifrost,
        Mode::BifrostXdp,
    ];
    /// The modes that most experiments compare; a quick run compares fewer.
    pub const USUAL: [Mode; 3] = [Mode::KernelVxlan, Mode::Off, Mode::Bifrost];
    /// The modes in which packets can be lost on the wire.
    pub const TRANSPORTS: [Mode; 8] = [
        Mode::KernelVxlan,
        Mode::KernelBbr,
        Mode::Mptcp,
        Mode::Off,
        Mode::Flowlet,
        Mode::ProbeSwitch,
        Mode::Strict,
        Mode::Bifrost,
    ];
    /// One mode for each switch.
    pub const SWITCHES: [Mode; 4] = [Mode::KernelVxlan, Mode::OpenVswitch, Mode::Off, Mode::Bifrost];

    /// `modes` and AF_XDP, for experiments without loss on the wire.
    pub fn with_af_xdp(modes: &[Mode]) -> Vec<Mode> {
        [modes, &[Mode::BifrostXdp]].concat()
    }

    /// The name in `results.json`.
    pub fn name(self) -> &'static str {
        match self {
            Mode::KernelVxlan => "kernel_vxlan",
            Mode::KernelBbr => "kernel_bbr",
            Mode::Mptcp => "mptcp",
            Mode::OpenVswitch => "open_vswitch",
            Mode::Off => "off",
            Mode::Flowlet => "flowlet",
            Mode::ProbeSwitch => "probe_switch",
            Mode::Strict => "strict",
            Mode::Bifrost => "bifrost",
            Mode::BifrostXdp => "bifrost_xdp",
        }
    }

    /// Whether Linux's own VXLAN device joins the guests.
    pub fn is_kernel_vxlan(self) -> bool {
        matches!(self, Mode::KernelVxlan | Mode::KernelBbr | Mode::Mptcp)
    }

    /// Whether `bifrostd` joins the guests.
    pub fn is_bifrostd(self) -> bool {
        matches!(self, Mode::Off | Mode::Flowlet | Mode::ProbeSwitch) || self.is_reliable()
    }

    /// Whether nftables can drop its packets on the underlay links. Some ports take packets before nftables sees
    /// them.
    pub fn loses_on_the_wire(self) -> bool {
        Mode::TRANSPORTS.contains(&self)
    }

    /// Whether lost packets are retransmitted below the guests' TCP.
    pub fn is_reliable(self) -> bool {
        matches!(self, Mode::Strict | Mode::Bifrost | Mode::BifrostXdp)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Where packets are dropped, and by what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Injector {
    /// nftables at the ingress of every underlay link of both hosts: it may drop any packet, in either direction.
    Wire,
    /// Between switch and guest, at the receiver of either direction: `bifrostctl fault`, or nftables with a kernel
    /// VXLAN.
    Vnic,
}

impl Injector {
    /// The name in `results.json`.
    pub fn name(self) -> &'static str {
        match self {
            Injector::Wire => "wire",
            Injector::Vnic => "vnic",
        }
    }
}

/// A Redis command under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Op {
    /// `GET`
    Get,
    /// `SET`
    Set,
}

impl Op {
    /// The name in `results.json` and on `redis-benchmark`'s command line.
    pub fn name(self) -> &'static str {
        match self {
            Op::Get => "get",
            Op::Set => "set",
        }
    }
}

/// Applications of the experiment `applications`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum App {
    /// PostgreSQL, with the client `pgbench`.
    #[value(alias = "pg")]
    Postgresql,
    /// MariaDB, with the client `sysbench`.
    Mariadb,
    /// memcached.
    Memcached,
    /// HTTP/2: `nginx`, with the client `h2load`.
    Http2,
    /// Requests and responses over QUIC.
    Quic,
    /// Requests and responses over plain UDP.
    Udp,
}

impl App {
    /// The name in `results.json`.
    pub fn name(self) -> &'static str {
        match self {
            App::Postgresql => "postgresql",
            App::Mariadb => "mariadb",
            App::Memcached => "memcached",
            App::Http2 => "http2",
            App::Quic => "quic",
            App::Udp => "udp",
        }
    }

    /// Whether it runs on TCP, which `reliability = "tcp"` carries reliably.
    pub fn is_tcp(self) -> bool {
        !matches!(self, App::Quic | App::Udp)
    }
}

/// How the hosts are cabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Cabling {
    /// Separate links between the hosts, each with its own subnet and addresses.
    Paths,
    /// A router between the hosts with several links to each host; it selects a link by the hash of addresses and
    /// ports.
    Fabric,
}

/// The kind of guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum Guests {
    /// A network namespace, joined by a TAP device, or by a veth with a kernel VXLAN.
    #[default]
    Container,
    /// User-mode Linux with its own virtio_net driver, joined by vhost-user.
    Vm,
}

impl Guests {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Guests::Container => "container",
            Guests::Vm => "vm",
        }
    }
}

/// Options of `bifrost-lab run`.
#[derive(Debug, Clone, PartialEq, Args, Serialize, Deserialize)]
pub struct Options {
    /// Fewer points, shorter measurements, one repetition: minutes instead of a quarter of an hour
    #[arg(long)]
    pub quick: bool,

    /// Repeat every point this often; reports and checks use medians [default: 3; with --quick: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repetitions: Option<u32>,

    /// Networks to compare, separated by commas [default: the experiment's own]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "MODE")]
    pub modes: Vec<Mode>,

    /// Compare all networks that the experiment supports, not only its default ones (with `all`: some four hours)
    #[arg(long, conflicts_with = "modes")]
    #[serde(skip)]
    pub every_mode: bool,

    /// Where packets are dropped, separated by commas (redis-loss)
    #[arg(long, value_enum, value_delimiter = ',', value_name = "INJECTOR",
          default_values_t = [Injector::Wire, Injector::Vnic])]
    pub injectors: Vec<Injector>,

    /// Loss rates in percent, separated by commas [default: the experiment's own]
    #[arg(long, value_delimiter = ',', value_name = "PERCENT", value_parser = percent)]
    pub losses: Option<Vec<f64>>,

    /// Redis commands to measure, separated by commas (redis-loss)
    #[arg(long, value_enum, value_delimiter = ',', value_name = "OP", default_values_t = [Op::Get, Op::Set])]
    pub ops: Vec<Op>,

    /// Programs to run, separated by commas (applications)
    #[arg(long, value_enum, value_delimiter = ',', value_name = "APP",
          default_values_t = [App::Postgresql, App::Mariadb, App::Memcached, App::Http2, App::Quic, App::Udp])]
    #[serde(default)]
    pub apps: Vec<App>,

    /// Seconds each point (or each phase) lasts [default: the experiment's own]
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    pub seconds: Option<f64>,

    /// Redis connections
    #[arg(long, default_value_t = 50, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub clients: u32,

    /// Underlay links between the hosts
    #[arg(long, default_value_t = 4, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=8))]
    pub paths: u8,

    /// The kind of guests [default: container; granularity: vm]
    #[arg(long, value_enum, value_name = "GUESTS")]
    #[serde(default)]
    pub guests: Option<Guests>,

    /// Links and their queues, separated by commas: Mbit/s of each link, then frames of its queue, such as 4x100@50
    /// or 100/100/100/20@50 (capacity) [default: the experiment's own]
    #[arg(long, value_delimiter = ',', value_name = "SHAPE")]
    #[serde(default)]
    pub shapes: Option<Vec<Shape>>,

    /// Numbers of concurrent TCP flows, separated by commas (capacity) [default: the experiment's own]
    #[arg(long, value_delimiter = ',', value_name = "N", value_parser = clap::value_parser!(u32).range(1..=64))]
    #[serde(default)]
    pub flows: Option<Vec<u32>>,

    /// Routes of the host whose objects change (apply), or of the VPC (learn: 2000 to 1000000) [default: 1000000; with
    /// --quick: 100000]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    #[serde(default)]
    pub routes: Option<u32>,

    /// Destinations that a guest sends to for the first time (learn) [default: 1000; with --quick: 200]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(16..=1000))]
    #[serde(default)]
    pub used: Option<u32>,

    /// How the hosts are cabled
    #[arg(long, value_enum, default_value_t = Cabling::Paths, value_name = "CABLING")]
    pub cabling: Cabling,

    /// Let several packets cross an underlay link as one buffer (TSO, GSO and GRO on). One drop may then lose up to
    /// 64 KB instead of one packet
    #[arg(long)]
    pub wire_offload: bool,
    /// Let the hosts share all processors. By default each host, with its guest, has its own processor, because hosts
    /// in a rack do not compete for processors
    #[arg(long)]
    pub share_processors: bool,

    /// Seed of all random choices that the lab itself makes
    #[arg(long, default_value_t = 1, value_name = "SEED")]
    pub seed: u64,

    /// Only faults whose description contains one of these words, separated by commas, such as corrupt or "path 2"
    /// (soak)
    #[arg(long, value_delimiter = ',', value_name = "WORD")]
    pub faults: Vec<String>,

    /// Directory of bifrostd and bifrostctl [default: the directory of bifrost-lab]
    #[arg(long, value_name = "DIR", env = "BIFROST_BIN_DIR")]
    #[serde(skip)]
    pub bin_dir: Option<PathBuf>,
}

impl Default for Options {
    /// The options of a command line without arguments.
    fn default() -> Self {
        #[derive(Parser)]
        struct Line {
            #[command(flatten)]
            options: Options,
        }
        Line::parse_from(["run"]).options
    }
}

impl Options {
    /// The options as arguments, without those that are the same in `usual`.
    pub fn arguments(&self, usual: &Options) -> String {
        let fields = |options: &Options| match serde_json::to_value(options) {
            Ok(Value::Object(fields)) => fields,
            other => unreachable!("options are an object of JSON: {other:?}"),
        };
        let usual = fields(usual);
        let is_other = |(name, value): &(String, Value)| usual.get(name) != Some(value) && !value.is_null();
        let argument = |(name, value): (String, Value)| match value {
            Value::Bool(_) => format!(" --{}", name.replace('_', "-")),
            value => format!(" --{} {}", name.replace('_', "-"), word(&value)),
        };
        fields(self).into_iter().filter(is_other).map(argument).collect()
    }
}

/// A value, formatted for the command line.
fn word(value: &Value) -> String {
    match value {
        Value::String(text) if text.contains(' ') => format!("'{text}'"),
        Value::String(text) => text.clone(),
        Value::Array(values) => values.iter().map(word).collect::<Vec<_>>().join(","),
        other => other.to_string(),
    }
}

fn percent(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.0..=100.0).contains(&value) => Ok(value),
        _ => Err("use a percentage from 0 to 100".to_owned()),
    }
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(value) if (0.1..=86_400.0).contains(&value) => Ok(value),
        _ => Err("use a number of seconds from 0.1 to 86400".to_owned()),
    }
}
