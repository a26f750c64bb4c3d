//! `bifrostctl gw`: looks into a gateway, which is `bifrost-nicd` and a pod behind it.

mod bird;
mod cost;
mod frr;
mod pod;
mod template;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};

use bifrost_control::Client;
use bifrost_control::api::{
    Counts, GatewayPod, GatewayTraceSpec, GatewayTransport, GatewayTunnel, Pipeline, PipelineCommand, PipelinePod,
    PipelineStage, SpreadMode, Trace, TraceSpec, TraceVerdict,
};
use bifrost_control::client::ClientError;
use clap::{Args, Subcommand, ValueEnum};

use crate::capture::CaptureWhat;
use crate::failure::Failure;
use crate::output::Output;
use crate::table::{Column, Number, Text, listing};

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
        GwCommand::Pods => out.print(&pipeline(socket)?.pods, |pods| self::pods(pods)),
        GwCommand::Pod(pod) => pod::run(pod, sockets, out),
        GwCommand::Bgp(command) => out.print(&command.text()?, |text| text.trim_end().to_owned()),
        GwCommand::Cost(args) => cost::run(&args, out),
        GwCommand::Queues => out.print(&pipeline(socket)?.pods, |pods| queues(pods)),
        GwCommand::Limiter => out.print(&pipeline(socket)?.pods, |pods| limiter(pods)),
        GwCommand::Hosts => out.print(&transports(pipeline(socket)?.pods), hosts),
        GwCommand::Tunnels => out.print(&pod_of(&gw)?.tunnels, |tunnels| self::tunnels(tunnels)),
        GwCommand::Stages => {
            let pipeline = pipeline(socket)?;
            let pod = pod_of(&gw)?;
            let both = serde_json::json!({ "pipeline": pipeline.stages, "workers": pod.workers });
            out.print(&both, |_| format!("{}\n\n{}", stages(&pipeline.stages), workers(&pod)))
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
            out.print(&both, |_| traced(&first, second.as_ref()))
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

/// What both programs say, stage by stage; x marks where the packet ends.
fn traced(pipeline: &Trace, pod: Option<&Trace>) -> String {
    let mut out = String::new();
    for (name, trace) in [("pipeline", Some(pipeline)), ("pod", pod)] {
        let Some(trace) = trace else { continue };
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name}:");
        for step in &trace.steps {
            let mark = if step.passes { ' ' } else { 'x' };
            let _ = writeln!(out, "{mark} {:<12}{}", step.stage, step.what);
        }
        let counter = trace.counter.as_ref().map_or(String::new(), |counter| format!("; counted by {counter}"));
        let _ = writeln!(out, "  -> {}{counter}", trace.what);
    }
    out.trim_end().to_owned()
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

fn get(counts: &Counts, name: &str) -> u64 {
    counts.get(name).copied().unwrap_or(0)
}

fn pods(pods: &[PipelinePod]) -> String {
    const COLUMNS: [Column; 9] = [
        Text("POD"),
        Text("INTERFACES"),
        Text("MODE"),
        Number("ARRIVED"),
        Number("DELIVERED"),
        Number("SENT"),
        Number("LIMITED"),
        Number("NO ROOM"),
        Number("REFUSED OTHERWISE"),
    ];
    let rows = pods.iter().map(|pod| {
        let refused = pod.counters.iter().filter(|(name, _)| name.starts_with("refused_"));
        let all: u64 = refused.map(|(_, value)| value).sum();
        let limited = get(&pod.counters, "refused_limited_packets");
        let full = get(&pod.counters, "refused_ring_full_packets") + get(&pod.counters, "refused_queue_full_packets");
        let up = pod.interfaces_up.iter().filter(|up| **up).count();
        let settling = if pod.settled { "" } else { ", settling" };
        vec![
            pod.name.clone(),
            format!("{up} of {} up", pod.interfaces_up.len()),
            format!("{}{settling}", pod.mode),
            get(&pod.counters, "arrived_packets").to_string(),
            (get(&pod.counters, "delivered_packets") + get(&pod.counters, "delivered_priority_packets")).to_string(),
            get(&pod.counters, "sent_packets").to_string(),
            limited.to_string(),
            full.to_string(),
            all.saturating_sub(limited + full).to_string(),
        ]
    });
    listing(&COLUMNS, rows, "no pods")
}

fn queues(pods: &[PipelinePod]) -> String {
    const DEPTHS: [Column; 5] = [Text("POD"), Number("QUEUE"), Number("PLACES"), Number("IN USE"), Number("HELD")];
    const ORDER: [Column; 7] = [
        Text("POD"),
        Number("IN ORDER"),
        Number("TIMEOUTS"),
        Number("LATE"),
        Number("ALIASES"),
        Number("DROPPED BY POD"),
        Number("BAD"),
    ];
    let depths = pods.iter().flat_map(|pod| {
        pod.queues.iter().enumerate().map(|(number, queue)| {
            let numbers = [number as u64, queue.entries.into(), queue.in_use.into(), queue.held.into()];
            [pod.name.clone()].into_iter().chain(numbers.map(|n| n.to_string())).collect()
        })
    });
    let order = pods.iter().map(|pod| {
        // A pod also returns packets that have no place, such as those of BGP, with the drop flag: nothing is wrong.
        let by_pod = ["dropped_by_pod_packets", "dropped_by_pod_late_packets"];
        let dropped = pod.order.iter().filter(|(name, _)| name.starts_with("dropped_"));
        let bad: u64 = dropped.filter(|(name, _)| !by_pod.contains(&name.as_ref())).map(|(_, value)| value).sum();
        let names = ["sent_in_order_packets", "timed_out_packets", "sent_late_packets", "aliases_packets"];
        let numbers = names.map(|name| get(&pod.order, name));
        let by_pod = by_pod.map(|name| get(&pod.order, name)).iter().sum();
        let numbers = numbers.into_iter().chain([by_pod, bad]).map(|number: u64| number.to_string());
        [pod.name.clone()].into_iter().chain(numbers).collect()
    });
    format!("{}\n\n{}", listing(&DEPTHS, depths, "no order queues"), listing(&ORDER, order, "no pods"))
}

/// The transports of pods that have one, by the pod's name.
fn transports(pods: Vec<PipelinePod>) -> BTreeMap<String, GatewayTransport> {
    pods.into_iter().filter_map(|pod| Some((pod.name, pod.transport?))).collect()
}

fn hosts(pods: &BTreeMap<String, GatewayTransport>) -> String {
    const HOSTS: [Column; 9] = [
        Text("POD"),
        Text("HOST"),
        Number("CONNECTIONS"),
        Number("OPEN"),
        Number("BEST EFFORT"),
        Number("FROM HOST"),
        Number("TO HOST"),
        Number("RETRANSMITTED"),
        Number("PLAIN"),
    ];
    const PATHS: [Column; 10] = [
        Text("POD"),
        Text("HOST"),
        Number("PATH"),
        Text("STATE"),
        Number("RTT US"),
        Number("MIN US"),
        Number("LOSS %"),
        Number("WINDOW"),
        Number("IN FLIGHT"),
        Number("LOST"),
    ];
    let all = || pods.iter().flat_map(|(pod, transport)| transport.hosts.iter().map(move |host| (pod, host)));
    let rows = all().map(|(pod, host)| {
        let plain =
            host.counters.iter().filter(|(name, _)| name.starts_with("plain_") || *name == "surrendered_frames");
        let numbers = [
            host.connections.into(),
            host.open_connections.into(),
            host.best_effort_connections.into(),
            get(&host.counters, "rx_frames"),
            get(&host.counters, "tx_frames"),
            host.retransmitted_packets,
            plain.map(|(_, value)| value).sum(),
        ];
        let names = [pod.clone(), host.addresses.join(", ")];
        names.into_iter().chain(numbers.map(|number: u64| number.to_string())).collect()
    });
    let paths = all().flat_map(|(pod, host)| {
        host.paths.iter().enumerate().map(move |(number, path)| {
            let us = |ns: u64| format!("{:.1}", ns as f64 / 1000.0);
            vec![
                pod.clone(),
                host.addresses.first().cloned().unwrap_or_default(),
                number.to_string(),
                path.state.to_string(),
                us(path.srtt_ns),
                us(path.min_rtt_ns),
                format!("{:.2}", f64::from(path.loss_ppm) / 10_000.0),
                path.window_packets.to_string(),
                path.in_flight_packets.to_string(),
                path.lost_packets.to_string(),
            ]
        })
    });
    format!("{}\n\n{}", listing(&HOSTS, rows, "no pod has a transport"), listing(&PATHS, paths, "no paths"))
}

fn tunnels(tunnels: &[GatewayTunnel]) -> String {
    const COLUMNS: [Column; 5] = [Text("TUNNEL"), Number("VNI"), Text("REMOTE"), Text("STATE"), Number("SILENT S")];
    let rows = tunnels.iter().map(|GatewayTunnel { name, vni, remote, up, silence_ms }| {
        let state = if *up { "up" } else { "down" };
        let silence = silence_ms.map_or("-".to_owned(), |ms| format!("{:.1}", ms as f64 / 1000.0));
        vec![name.clone(), vni.to_string(), remote.clone(), state.to_owned(), silence]
    });
    listing(&COLUMNS, rows, "no tunnels")
}

fn limiter(pods: &[PipelinePod]) -> String {
    let mut out = String::new();
    for pod in pods {
        let of = |name: &str| get(&pod.limiter, name);
        // Writing to a string cannot fail.
        let _ = writeln!(
            out,
            "{}: {} packets passed the first stage, {} the second; dropped: {} by the second stage, {} by tenants' own meters",
            pod.name,
            of("color_packets"),
            of("meter_packets"),
            of("dropped_meter_packets"),
            of("dropped_pre_meter_packets"),
        );
        for vni in &pod.limited_vnis {
            let _ = writeln!(
                out,
                "  limited   {}: its packets were found among those that the second stage dropped",
                tenant(*vni)
            );
        }
        for vni in &pod.bypassed_vnis {
            let _ = writeln!(out, "  exempted  {}", tenant(*vni));
        }
        for top in &pod.top_tenants {
            let _ = writeln!(out, "  {:>5.1} %   {}", top.percent, tenant(top.vni));
        }
    }
    out.trim_end().to_owned()
}

fn tenant(vni: u32) -> String {
    if vni < FIRST_ADDRESS { format!("VNI {vni}") } else { format!("an address of the Internet side ({vni:#x})") }
}

fn stages(stages: &[PipelineStage]) -> String {
    const COLUMNS: [Column; 4] = [Text("STAGE"), Number("PACKETS"), Number("NS/PACKET"), Number("CYCLES/PACKET")];
    let rows = stages.iter().map(|PipelineStage { name, packets, busy_ns, busy_cycles }| {
        vec![name.to_string(), packets.to_string(), each(*busy_ns, *packets), each(*busy_cycles, *packets)]
    });
    listing(&COLUMNS, rows, "no stages")
}

fn workers(pod: &GatewayPod) -> String {
    const COLUMNS: [Column; 10] = [
        Number("WORKER"),
        Number("PACKETS"),
        Number("NS/PACKET"),
        Number("CYCLES/PACKET"),
        Number("VPC"),
        Number("INTERNET"),
        Number("IDC"),
        Number("CLOUD SERVICE"),
        Number("ANSWERED"),
        Number("DROPPED"),
    ];
    let rows = pod.workers.iter().enumerate().map(|(number, counts)| {
        let forwarded = ["vpc", "internet", "idc", "cloud_service", "answer"];
        let forwarded = forwarded.map(|name| get(counts, &format!("forwarded_{name}_packets")).to_string());
        let dropped: u64 = counts.iter().filter(|(name, _)| name.starts_with("dropped_")).map(|(_, value)| value).sum();
        let packets = get(counts, "packets");
        let [ns, cycles] = ["busy_ns", "busy_cycles"].map(|name| each(get(counts, name), packets));
        [number.to_string(), packets.to_string(), ns, cycles]
            .into_iter()
            .chain(forwarded)
            .chain([dropped.to_string()])
            .collect()
    });
    listing(&COLUMNS, rows, "no workers")
}

/// How much each packet took; "-" if there was none, or it is not known.
fn each(total: u64, packets: u64) -> String {
    if packets == 0 || total == 0 { "-".to_owned() } else { format!("{:.0}", total as f64 / packets as f64) }
}

#[cfg(test)]
mod tests {
    use bifrost_control::api::{GatewayHost, GatewayPath, OrderQueue, TopTenant};

    use super::*;

    fn counts(list: &[(&'static str, u64)]) -> Counts {
        list.iter().map(|(name, value)| ((*name).into(), *value)).collect()
    }

    fn pod() -> PipelinePod {
        PipelinePod {
            name: "vpc".to_owned(),
            interfaces_up: vec![true, false],
            mode: "rss".into(),
            queues: vec![OrderQueue { entries: 4096, in_use: 17, held: 3 }],
            counters: counts(&[
                ("arrived_packets", 100),
                ("delivered_packets", 60),
                ("delivered_priority_packets", 5),
                ("refused_limited_packets", 20),
                ("refused_ring_full_packets", 8),
                ("refused_queue_full_packets", 1),
                ("refused_too_long_packets", 6),
                ("sent_packets", 64),
            ]),
            order: counts(&[
                ("sent_in_order_packets", 50),
                ("timed_out_packets", 2),
                ("sent_late_packets", 1),
                ("dropped_by_pod_packets", 4),
                ("dropped_by_pod_late_packets", 30),
                ("dropped_duplicate_packets", 6),
                ("dropped_malformed_packets", 1),
            ]),
            limiter: counts(&[("color_packets", 80), ("dropped_meter_packets", 9)]),
            limited_vnis: vec![7],
            bypassed_vnis: vec![8],
            top_tenants: vec![
                TopTenant { vni: 7, percent: 61.25 },
                TopTenant { vni: FIRST_ADDRESS + 10, percent: 3.0 },
            ],
            ..PipelinePod::default()
        }
    }

    /// The words of each line.
    fn words(text: &str) -> Vec<Vec<&str>> {
        text.lines().map(|line| line.split_whitespace().collect()).collect()
    }

    #[test]
    fn pods_and_queues() {
        let text = pods(&[pod()]);
        assert_eq!(
            words(&text)[1],
            ["vpc", "1", "of", "2", "up", "rss,", "settling", "100", "65", "64", "20", "9", "6"]
        );
        let text = queues(&[pod()]);
        assert_eq!(words(&text)[1], ["vpc", "0", "4096", "17", "3"]);
        assert_eq!(words(&text)[4], ["vpc", "50", "2", "1", "0", "34", "7"]);
        assert_eq!(pods(&[]), "no pods");
    }

    #[test]
    fn hosts_and_their_paths() {
        let path = GatewayPath {
            state: "usable".into(),
            srtt_ns: 123_400,
            min_rtt_ns: 99_000,
            loss_ppm: 12_300,
            window_packets: 64,
            in_flight_packets: 3,
            lost_packets: 8,
            ..GatewayPath::default()
        };
        let host = GatewayHost {
            addresses: vec!["10.0.0.11".to_owned()],
            connections: 3,
            open_connections: 2,
            best_effort_connections: 1,
            retransmitted_packets: 9,
            paths: vec![path],
            counters: counts(&[
                ("rx_frames", 50),
                ("tx_frames", 40),
                ("plain_frames", 4),
                ("plain_too_long_frames", 2),
                ("surrendered_frames", 1),
            ]),
            ..GatewayHost::default()
        };
        let transport = Some(GatewayTransport { hosts: vec![host], ..GatewayTransport::default() });
        let text = hosts(&transports(vec![pod(), PipelinePod { name: "b".to_owned(), transport, ..pod() }]));
        assert_eq!(words(&text)[1], ["b", "10.0.0.11", "3", "2", "1", "50", "40", "9", "7"]);
        assert_eq!(words(&text)[4], ["b", "10.0.0.11", "0", "usable", "123.4", "99.0", "1.23", "64", "3", "8"]);
        assert!(hosts(&transports(vec![pod()])).starts_with("no pod has a transport"));
    }

    #[test]
    fn tunnels_that_are_down() {
        let tunnel = |name: &str, up, silence_ms| GatewayTunnel {
            name: name.to_owned(),
            vni: 100,
            remote: "198.51.100.9".to_owned(),
            up,
            silence_ms,
        };
        let text = tunnels(&[tunnel("office", false, Some(31_250)), tunnel("plain", true, None)]);
        assert_eq!(words(&text)[1], ["office", "100", "198.51.100.9", "down", "31.2"]);
        assert_eq!(words(&text)[2], ["plain", "100", "198.51.100.9", "up", "-"]);
    }

    #[test]
    fn who_is_limited() {
        let text = limiter(&[pod()]);
        for part in [
            "80 packets passed the first stage",
            "limited   VNI 7: ",
            "exempted  VNI 8",
            " 61.2 %   VNI 7",
            "Internet side (0x100000a)",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }

    #[test]
    fn a_trace_ends_where_the_packet_does() {
        let step = |stage: &str, passes| bifrost_control::api::TraceStep {
            stage: stage.to_owned(),
            passes,
            what: "so".to_owned(),
            ..Default::default()
        };
        let trace = |steps, what: &str, counter: Option<&str>| Trace {
            steps,
            what: what.to_owned(),
            counter: counter.map(ToOwned::to_owned),
            ..Trace::default()
        };
        let pipeline = trace(vec![step("parse", true)], "it goes to pod vpc", None);
        let pod = trace(vec![step("acl", false)], "the pod drops it", Some("dropped_acl_packets"));
        assert_eq!(
            traced(&pipeline, Some(&pod)),
            "pipeline:\n  parse       so\n  -> it goes to pod vpc\npod:\nx acl         so\n  -> the pod drops it; counted by \
             dropped_acl_packets"
        );
        assert!(!traced(&pipeline, None).contains("pod:"));
    }

    #[test]
    fn time_of_stages() {
        let stage = |name: &'static str, packets, busy_ns, busy_cycles| PipelineStage {
            name: name.into(),
            packets,
            busy_ns,
            busy_cycles,
        };
        let text = stages(&[stage("receive", 10, 1234, 2618), stage("send", 0, 0, 0), stage("other", 1, 5, 0)]);
        let expected = [["receive", "10", "123", "262"], ["send", "0", "-", "-"], ["other", "1", "5", "-"]];
        assert_eq!(words(&text)[1..], expected, "another architecture counts no cycles");
        let worker = counts(&[
            ("packets", 4),
            ("busy_ns", 2000),
            ("busy_cycles", 4004),
            ("forwarded_internet_packets", 3),
            ("dropped_acl_packets", 1),
        ]);
        let text = workers(&GatewayPod { workers: vec![worker], ..GatewayPod::default() });
        assert_eq!(words(&text)[1], ["0", "4", "500", "1001", "0", "3", "0", "0", "0", "1"]);
    }
}
