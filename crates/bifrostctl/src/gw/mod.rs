//! `bifrostctl gw`: looks into a gateway, which is `bifrost-nicd` and a pod behind it.

mod bird;
mod cost;
mod frr;
mod pod;
mod show;
mod template;

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use bifrost_control::Client;
use bifrost_control::api::{
    GatewayPod, GatewayTraceSpec, Pipeline, PipelineCommand, SpreadMode, TraceSpec, TraceVerdict,
};
use bifrost_control::client::ClientError;
use clap::{Args, Subcommand, ValueEnum};

use crate::capture::CaptureWhat;
use crate::failure::Failure;
use crate::output::Output;

const NICD: &str = "/run/bifrost/nicd.sock";
const GW: &str = "/run/bifrost/gw.sock";
/// What stands for an address of the Internet side among tenants.
const FIRST_ADDRESS: u32 = 1 << 24;

pub(crate) const EXAMPLES: &str = "\
Examples:
  bifrostctl gw pods                                   which pods are there, what they get, what is refused
  bifrostctl gw pod create vpc-1 --template vpc.toml --cpus 2-3
      one more pod, in a container; `list` shows all, `delete` removes one
  bifrostctl gw pod scale vpc 4 --template vpc.toml    four pods: vpc-1, vpc-2 and so on
  bifrostctl gw bgp config proxy --asn 64512 --proxy 10.1.0.2 --pods 10.1.0.0/24 --vips 10.0.0.0/24 \\
      --switch-asn 65000 --switch 10.1.0.254
      FRR's configuration of the proxy through which pods announce themselves; `config switch` is the other end
  bifrostctl gw cost                                   what gateways cost as pods on servers, and as devices
  bifrostctl gw queues                                 how full the order queues are, timeouts, what left out of order
  bifrostctl gw limiter                                who is limited, and who sends most
  bifrostctl gw hosts                                  hosts that use the reliable transport: connections, repairs, paths
  bifrostctl gw tunnels                                tunnels to customers' networks: which are up, by their keepalives
  bifrostctl gw stages                                 packets, time and cycles of each stage, and of each worker of a pod
  bifrostctl gw trace --host 10.0.0.11 --vni 100 --from 192.168.0.1 --to 198.51.100.1 --tcp 40000:443
      may that vNIC open a connection, and what becomes of the packet in the pipeline and in the pod?
  bifrostctl gw trace --from 198.51.100.1 --to 203.0.113.2 --udp 53:5353
      the same for a packet from the Internet
  bifrostctl gw capture -w out.pcapng --at drop        what the pod drops, and why
  bifrostctl gw capture -w out.pcapng --filter 'vni 100 and host 198.51.100.1' --seconds 10
      packets of that conversation as they came and as they left, before and after translation
  bifrostctl gw mode --pod vpc rss                     spread by flow, without reordering any; `plb` goes back
  bifrostctl gw bypass --pod vpc --vni 7               do not limit that tenant; --forget: limit it again
  bifrostctl --json gw queues | jq '.[].order.timed_out_packets'";

#[derive(Debug, Args)]
pub(crate) struct GwArgs {
    /// The control socket of bifrost-nicd; `gw pod` takes one for each pipeline that pods are behind
    #[arg(long, value_name = "PATH", global = true, default_value = NICD)]
    nicd: Vec<PathBuf>,
    /// The control socket of bifrost-gw
    #[arg(long, value_name = "PATH", global = true, default_value = GW)]
    gw: PathBuf,
    #[command(subcommand)]
    command: GwCommand,
}

#[derive(Debug, Subcommand)]
enum GwCommand {
    /// The pods behind the pipeline: interfaces, how packets are spread, what was delivered, sent and refused
    Pods,
    /// Pods in containers: create, list, scale, delete
    ///
    /// A pod is a container of Podman, with processors and memory of its own, and an entry of bifrost-nicd, which gives it queues, order queues and a limiter of its own. Which
    /// pods there are is what these two say.
    Pod(pod::PodArgs),
    /// BGP between pods, the proxy of their server, and the switch
    #[command(subcommand)]
    Bgp(frr::BgpCommand),
    /// What the gateways of a zone cost in devices, money and power, with pods and without
    ///
    /// It computes Fig. 15 and Table 6 of Albatross (SIGCOMM'25) from inputs, which are the paper's unless you change them. Prices are multiples of that of a physical gateway.
    /// CHANGE is against the zone as it is today; SWITCH SESSIONS are the BGP sessions of a switch all of whose servers are such devices. Gateways of a cluster are on devices
    /// of their own. `no BGP proxies` has only as many pods a server as the switch has sessions for. No program needs to run.
    #[command(after_help = cost::EXAMPLES)]
    Cost(cost::CostArgs),
    /// The order queues: depth, timeouts, packets that left late, aliases, drops
    ///
    /// A timeout is a packet whose place was given up: it took longer than `timeout_us`. `LATE` are those that came back after
    /// that and left at once, possibly behind later ones; `ALIASES` those whose number fits another's place.
    Queues,
    /// The limiter: who is limited and why, who is exempted, who sends most
    Limiter,
    /// The reliable transport with hosts: connections, packets that were repaired, and each path with its delay, loss and window
    ///
    /// `PLAIN` are frames to the host that left as plain VXLAN, whatever the reason; `--json` has one counter for each reason.
    Hosts,
    /// The pod's tunnels to customers' networks, and whether their keepalives come back
    ///
    /// A tunnel without keepalives counts as up, and its `SILENT` is `-`. A pod drops packets to a tunnel that is down.
    Tunnels,
    /// Packets, time and cycles of each stage of the pipeline, and of each worker of the pod
    ///
    /// Cycles are those of the processor's time stamp counter, which runs at a constant rate whatever the processor's clock does.
    Stages,
    /// What would become of a packet that is only described: each stage of the pipeline and of the pod
    ///
    /// Nothing is sent and nothing changes: no session begins, no limit is used up. Both programs judge the packet by the code that judges others.
    Trace(TraceArgs),
    /// See the packets of a pod in Wireshark: as they came, as they left, and what was dropped
    ///
    /// The result is a pcapng file with an interface for each stage and thread of the pod; every packet has a comment: the service, or the reason of the
    /// drop, and the VNI. Stages (--at) are rx (as the pipeline gave it to the pod), tx (as the pod returned it) and drop. The filter is that of
    /// `bifrostctl capture`. It looks at tenants' packets, inside VXLAN; what passes as it came or as it left is captured at both places, so that a translated packet is
    /// found by either address. Of packets whose payload stays in the pipeline only headers are seen. The capture ends by itself; one at a time can run.
    Capture(CaptureWhat),
    /// Change how a pod's packets are spread
    Mode(ModeArgs),
    /// Exempt a tenant from the limiter, or forget it
    Bypass(BypassArgs),
}

#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("what").required(true).args(["tcp", "udp", "ping"]))]
struct TraceArgs {
    /// The pod that it is for; by default the first one
    #[arg(long, value_name = "NAME")]
    pod: Option<String>,
    /// The host that sends it, in VXLAN; without one it comes from the Internet
    #[arg(long, value_name = "ADDRESS", requires = "vni")]
    host: Option<IpAddr>,
    /// The VNI in which the host sends it
    #[arg(long, value_name = "N", requires = "host", value_parser = clap::value_parser!(u32).range(..i64::from(FIRST_ADDRESS)))]
    vni: Option<u32>,
    /// Its source address
    #[arg(long, value_name = "ADDRESS")]
    from: IpAddr,
    /// Its destination address
    #[arg(long, value_name = "ADDRESS")]
    to: IpAddr,
    /// A TCP segment, from and to these ports
    #[arg(long, value_name = "FROM:TO", value_parser = crate::trace::ports)]
    tcp: Option<(u16, u16)>,
    /// A UDP datagram, from and to these ports
    #[arg(long, value_name = "FROM:TO", value_parser = crate::trace::ports)]
    udp: Option<(u16, u16)>,
    /// An ICMP echo request
    #[arg(long)]
    ping: bool,
    /// Flags of the segment, comma-separated: fin, syn, rst, psh, ack; by default syn, which opens a connection
    #[arg(long, value_name = "FLAGS", value_delimiter = ',', requires = "tcp")]
    flags: Vec<String>,
    /// Bytes of the IP packet, at most 9000; by default the headers alone
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(20..=9000))]
    size: Option<u32>,
    /// Nobody may cut it (IPv4)
    #[arg(long)]
    df: bool,
    /// Its time to live, or hop limit
    #[arg(long, value_name = "N", default_value_t = 64)]
    ttl: u8,
}

#[derive(Debug, Args)]
struct ModeArgs {
    /// The pod's name
    #[arg(long, value_name = "NAME")]
    pod: String,
    /// By packet, in order (plb); by flow (rss)
    mode: ModeName,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum ModeName {
    Plb,
    Rss,
}

#[derive(Debug, Args)]
struct BypassArgs {
    /// The pod's name
    #[arg(long, value_name = "NAME")]
    pod: String,
    /// The tenant
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(..i64::from(FIRST_ADDRESS)))]
    vni: u32,
    /// Forget the tenant, exempted or limited
    #[arg(long)]
    forget: bool,
}

/// Asks, and prints the answer.
pub(crate) fn run(args: GwArgs, out: Output) -> Result<(), Failure> {
    let GwArgs { nicd: sockets, gw, command } = args;
    let (first, several) = (sockets.first().cloned().unwrap_or_else(|| NICD.into()), sockets.len() > 1);
    let socket = &first;
    let nicd = || Client::new(socket);
    if several && !matches!(command, GwCommand::Pod(_)) {
        return Err(Failure::Usage {
            what: "this command asks one pipeline".to_owned(),
            location: "--nicd".to_owned(),
            hint: "give --nicd once; `gw pod` takes one for each pipeline",
        });
    }
    match command {
        GwCommand::Pods => out.print(&pipeline(socket)?.pods, |pods| show::pods(pods)),
        GwCommand::Pod(pod) => pod::run(pod, sockets, out),
        GwCommand::Bgp(command) => out.print(&command.text()?, |text| text.trim_end().to_owned()),
        GwCommand::Cost(args) => cost::run(&args, out),
        GwCommand::Queues => out.print(&pipeline(socket)?.pods, |pods| show::queues(pods)),
        GwCommand::Limiter => out.print(&pipeline(socket)?.pods, |pods| show::limiter(pods)),
        GwCommand::Hosts => out.print(&show::transports(pipeline(socket)?.pods), show::hosts),
        GwCommand::Tunnels => out.print(&pod_of(&gw)?.tunnels, |tunnels| show::tunnels(tunnels)),
        GwCommand::Stages => {
            let pipeline = pipeline(socket)?;
            let pod = pod_of(&gw)?;
            let both = serde_json::json!({ "pipeline": pipeline.stages, "workers": pod.workers });
            out.print(&both, |_| format!("{}\n\n{}", show::stages(&pipeline.stages), show::workers(&pod)))
        }
        GwCommand::Trace(trace) => {
            let spec = trace.spec();
            let first = nicd()?.trace_gateway(&spec).map_err(|error| known("bifrost-nicd", socket, error))?;
            // What the pipeline drops gets to no pod.
            let second = match first.verdict {
                TraceVerdict::Dropped => None,
                _ => {
                    let pod = Client::new(&gw)?.trace_gateway(&spec);
                    Some(pod.map_err(|error| known("bifrost-gw", &gw, error))?)
                }
            };
            let both = serde_json::json!({ "pipeline": first, "pod": second });
            out.print(&both, |_| show::traced(&first, second.as_ref()))
        }
        GwCommand::Capture(what) => what.capture(&Client::new(&gw)?, None).map_err(|failure| match failure {
            Failure::Client(error) => known("bifrost-gw", &gw, error),
            other => other,
        }),
        GwCommand::Mode(ModeArgs { pod, mode }) => {
            let mode = if matches!(mode, ModeName::Plb) { SpreadMode::Plb } else { SpreadMode::Rss };
            let command = PipelineCommand::SetMode { pod, mode };
            let done = nicd()?.command_pipeline(&command).map_err(|error| known("bifrost-nicd", socket, error))?;
            out.print(&done, |_| "changed; `bifrostctl gw pods` shows when it is settled".to_owned())
        }
        GwCommand::Bypass(BypassArgs { pod, vni, forget }) => {
            let command = PipelineCommand::Bypass { pod, vni, bypass: !forget };
            let done = nicd()?.command_pipeline(&command).map_err(|error| known("bifrost-nicd", socket, error))?;
            out.print(&done, |_| format!("VNI {vni} is {}", if forget { "limited like others" } else { "not limited" }))
        }
    }
}

impl TraceArgs {
    fn spec(self) -> GatewayTraceSpec {
        let packet = TraceSpec {
            from_peer: self.host,
            vni: self.vni,
            from: Some(self.from),
            to: Some(self.to),
            tcp: self.tcp,
            flags: self.flags,
            udp: self.udp,
            ping: self.ping,
            size_bytes: self.size,
            dont_fragment: self.df,
            ttl: self.ttl,
            ..TraceSpec::default()
        };
        GatewayTraceSpec { pod: self.pod, packet }
    }
}

fn pipeline(socket: &Path) -> Result<Pipeline, Failure> {
    Client::new(socket)?.pipeline().map_err(|error| known("bifrost-nicd", socket, error))
}

fn pod_of(socket: &Path) -> Result<GatewayPod, Failure> {
    Client::new(socket)?.gateway_pod().map_err(|error| known("bifrost-gw", socket, error))
}

/// Which program does not answer.
fn known(program: &'static str, socket: &Path, error: ClientError) -> Failure {
    match error {
        ClientError::NotRunning(_) => Failure::NoGateway { program, socket: socket.to_owned() },
        error => error.into(),
    }
}
