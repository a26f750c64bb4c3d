//! What the gateway's programs tell: `bifrost-nicd` and `bifrost-gw` answer on sockets of their own.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::sessions::{from_hexadecimal, hexadecimal};
use super::{ApiError, TraceSpec};

/// Counters by name; each name ends in its unit.
pub type Counts = BTreeMap<Cow<'static, str>, u64>;

/// The NIC pipeline: `GET /v1/status` of `bifrost-nicd`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pipeline {
    /// How frames of its device come and go.
    pub device_mode: Cow<'static, str>,
    /// Turns of its loop.
    pub turns: u64,
    /// Of these, turns after which it slept.
    pub sleeps: u64,
    /// Counters of the device.
    pub device: Counts,
    /// Frames that are malformed.
    pub malformed_frames: u64,
    /// Frames that are for no pod.
    pub no_pod_frames: u64,
    /// The stages, in order.
    pub stages: Vec<PipelineStage>,
    /// The pods, in the order of the configuration.
    pub pods: Vec<PipelinePod>,
}

/// A stage of the pipeline.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipelineStage {
    /// Its name.
    pub name: Cow<'static, str>,
    /// Packets that it handled.
    pub packets: u64,
    /// Time that this took, ns.
    pub busy_ns: u64,
    /// The same in cycles of the processor's time stamp counter; 0 where there is none.
    pub busy_cycles: u64,
}

/// A pod as the pipeline sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipelinePod {
    /// Its name.
    pub name: String,
    /// Its number, in trailers.
    pub number: u16,
    /// Its MAC address, if it shares VLANs with others.
    pub mac: Option<String>,
    /// Its own addresses: those for which it gets control traffic.
    pub own: Vec<String>,
    /// Which of its interfaces are connected.
    pub interfaces_up: Vec<bool>,
    /// By what its packets are spread: `plb` (by packet) or `rss` (by flow).
    pub mode: Cow<'static, str>,
    /// Whether all packets are already spread by `mode`.
    pub settled: bool,
    /// Its order queues.
    pub queues: Vec<OrderQueue>,
    /// Counters of its packets.
    pub counters: Counts,
    /// Counters of its order queues.
    pub order: Counts,
    /// Counters of its limiter.
    pub limiter: Counts,
    /// Tenants with a meter of their own: they exceeded their rate.
    pub limited_vnis: Vec<u32>,
    /// Tenants that are not limited.
    pub bypassed_vnis: Vec<u32>,
    /// The tenants that send most, in samples of what arrived lately.
    pub top_tenants: Vec<TopTenant>,
    /// The reliable transport with hosts, as it was within the last second, if it is configured.
    pub transport: Option<GatewayTransport>,
}

/// The reliable transport between hosts and a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayTransport {
    /// Counters of what concerns no host in particular.
    pub counters: Counts,
    /// Counters of the transport engine.
    pub engine: Counts,
    /// The hosts, in the order of the configuration.
    pub hosts: Vec<GatewayHost>,
}

/// A host that may use the transport to a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayHost {
    /// Its addresses; the first one of a family is its tunnel end point.
    pub addresses: Vec<String>,
    /// Its connections.
    pub connections: u32,
    /// Of these, open ones.
    pub open_connections: u32,
    /// Of these, connections that have fallen back to plain VXLAN.
    pub best_effort_connections: u32,
    /// Packets sent again, on connections that exist.
    pub retransmitted_packets: u64,
    /// Packets that arrived more than once, on connections that exist.
    pub duplicate_packets: u64,
    /// Packets given up, on connections that exist.
    pub given_up_packets: u64,
    /// Frames from it that wait for their turn, or for the pod.
    pub held_frames: u32,
    /// Frames to it that are kept until they are acknowledged.
    pub kept_frames: u32,
    /// Frames of either kind that it may have.
    pub share_frames: u32,
    /// Its paths; the first one is path 0.
    pub paths: Vec<GatewayPath>,
    /// What happened.
    pub counters: Counts,
}

/// A path to a host.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayPath {
    /// `usable`, or `suspect`: it lost packets and is being probed.
    pub state: Cow<'static, str>,
    /// Whether packets are sprayed over it.
    pub selected: bool,
    /// Smoothed delay of the network, ns.
    pub srtt_ns: u64,
    /// Smallest recent delay, ns.
    pub min_rtt_ns: u64,
    /// Loss rate, in millionths.
    pub loss_ppm: u32,
    /// Congestion window.
    pub window_packets: u32,
    /// Packets in flight.
    pub in_flight_packets: u32,
    /// Packets sent.
    pub tx_packets: u64,
    /// Packets found lost.
    pub lost_packets: u64,
}

/// An order queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OrderQueue {
    /// Places for packets.
    pub entries: u32,
    /// Of these, places whose packets are at the pod, or wait for others.
    pub in_use: u32,
    /// Of these, places whose packets came back and wait for others.
    pub held: u32,
}

/// A tenant that sends much.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TopTenant {
    /// Its VNI; above 24 bits: a number that stands for an address of the Internet side.
    pub vni: u32,
    /// Its share of the packets that arrived lately, percent.
    pub percent: f64,
}

/// A pod: `GET /v1/status` of `bifrost-gw`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayPod {
    /// Whether it is connected with its pipeline.
    pub connected: bool,
    /// Counters of each worker; `busy_ns` is the time that it worked on packets, `busy_cycles` the same by the time stamp counter.
    pub workers: Vec<Counts>,
    /// Sessions of translation.
    pub nat_sessions: u64,
    /// Link-layer addresses of next hops, as far as they are known.
    pub neighbours: BTreeMap<String, Option<String>>,
    /// Whether it is to announce nothing.
    pub draining: bool,
    /// Whether its addresses are announced: its workers work, its router answers, and it is not draining.
    pub announcing: bool,
    /// Its BGP sessions, in the order of the configuration.
    pub bgp: Vec<GatewayPeer>,
    /// Packets of BGP and BFD dropped: their hop limit is not 255, so that they may come from further away than the link.
    pub refused_hop_limit_packets: u64,
}

/// A BGP session of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayPeer {
    /// The proxy.
    pub address: String,
    /// `idle`, `open-sent`, `open-confirm` or `established`.
    pub state: Cow<'static, str>,
    /// The state of BFD, if there is BFD: `down`, `init` or `up`.
    pub bfd: Option<Cow<'static, str>>,
    /// What it was told.
    pub announced: Vec<String>,
    /// Sessions that were established and have ended.
    pub ended_sessions: u64,
    /// How often BFD was up and went down.
    pub bfd_downs: u64,
}

/// A command to `bifrost-gw`: `POST /v1/command`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case", tag = "command")]
pub enum PodCommand {
    /// Withdraws what the pod announces, or announces it again. It forwards what comes in either case.
    Drain {
        /// Whether it is withdrawn.
        drain: bool,
    },
    /// Asks for sessions of translation, for a pod that takes this one's place; the answer is [`TranslatedSessions`].
    ExportSessions {
        /// Those that began in this pod then or later, in seconds of its own clock; 0: all.
        #[serde(default)]
        since_s: u32,
        /// Where an earlier answer ended.
        #[serde(default)]
        from: Option<u64>,
    },
    /// Has sessions of another pod go on in this one; the answer is [`ImportedSessions`].
    ImportSessions {
        /// [`TranslatedSessions::sessions`].
        sessions: String,
    },
}

/// Sessions of translation of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TranslatedSessions {
    /// In a format that pods understand, hexadecimal.
    pub sessions: String,
    /// How many they are.
    pub count: u64,
    /// Where to go on; nothing: that was all.
    pub next: Option<u64>,
    /// The pod's clock, s.
    pub now_s: u32,
}

impl TranslatedSessions {
    /// The text of sessions in bytes.
    pub fn text(bytes: &[u8]) -> String {
        hexadecimal(bytes)
    }

    /// The bytes of such a text.
    ///
    /// # Errors
    /// It is not hexadecimal.
    pub fn bytes(text: &str) -> Result<Vec<u8>, ApiError> {
        from_hexadecimal(text, "give it as `export_sessions` has answered")
    }
}

/// What became of sessions of another pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedSessions {
    /// Sessions that go on here.
    pub taken: u64,
    /// Sessions that were here already.
    pub known: u64,
    /// Sessions that cannot go on here: another one has their port, no pool has their address, or there is no room.
    pub refused: u64,
}

/// A packet that is only described: `POST /v1/trace` of `bifrost-nicd` and of `bifrost-gw`, which answer with a [`Trace`](super::Trace).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayTraceSpec {
    /// The pod that it is for; none: the pipeline's first. A pod does not look at it.
    pub pod: Option<String>,
    /// The packet, with both of its addresses. From [`from_peer`](TraceSpec::from_peer), in VXLAN with its VNI; without these, as it is, from the Internet.
    pub packet: TraceSpec,
}

/// A command to `bifrost-nicd`: `POST /v1/command`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case", tag = "command")]
pub enum PipelineCommand {
    /// Changes how a pod's packets are spread.
    SetMode {
        /// The pod's name.
        pod: String,
        /// How.
        mode: SpreadMode,
    },
    /// Exempts a tenant from the limiter; or forgets it, exempted or limited.
    Bypass {
        /// The pod's name.
        pod: String,
        /// The tenant.
        vni: u32,
        /// Whether it is exempted.
        bypass: bool,
    },
    /// Adds a pod while the others work. It stays until it is removed, also when `bifrost-nicd` starts again, if it has a directory for that.
    AddPod {
        /// TOML: what is in a `[[pods]]` of the configuration file.
        settings: String,
    },
    /// Removes a pod that was added. Who was connected is disconnected, and what waited for the pod is dropped.
    RemovePod {
        /// The pod's name.
        pod: String,
    },
}

/// By what a pod's packets are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpreadMode {
    /// By packet, in order.
    Plb,
    /// By flow.
    Rss,
}
