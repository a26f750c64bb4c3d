//! The API of the gateway's programs: `bifrost-nicd` and `bifrost-gw` listen on their own sockets.

use std::borrow::Cow;
use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::sessions::{from_hexadecimal, hexadecimal};
use super::{ApiError, TraceSpec};

/// Counters by name; names end in the unit.
pub type Counts = BTreeMap<Cow<'static, str>, u64>;

/// The NIC pipeline: `GET /v1/status` of `bifrost-nicd`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pipeline {
    /// How frames are received from its device and sent to it.
    pub device_mode: Cow<'static, str>,
    /// Turns of its loop.
    pub turns: u64,
    /// Of these: turns after which it slept.
    pub sleeps: u64,
    /// Counters of the device.
    pub device: Counts,
    /// Malformed frames.
    pub malformed_frames: u64,
    /// Frames to no pod.
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
    /// Time spent on them, ns.
    pub busy_ns: u64,
    /// Time spent on them, cycles of the processor's time stamp counter; 0 without one.
    pub busy_cycles: u64,
}

/// A pod as the pipeline sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipelinePod {
    /// Its name.
    pub name: String,
    /// Its number in trailers.
    pub number: u16,
    /// Its MAC address, if it shares VLANs with others.
    pub mac: Option<String>,
    /// Its own addresses, whose control traffic it gets.
    pub own: Vec<String>,
    /// Which of its interfaces are connected.
    pub interfaces_up: Vec<bool>,
    /// How its packets are spread: `plb` (by packet) or `rss` (by flow).
    pub mode: Cow<'static, str>,
    /// Whether all packets already use `mode`.
    pub settled: bool,
    /// Its order queues.
    pub queues: Vec<OrderQueue>,
    /// Counters of its packets.
    pub counters: Counts,
    /// Counters of its order queues.
    pub order: Counts,
    /// Counters of its limiter.
    pub limiter: Counts,
    /// Tenants with their own meter: they exceeded their rate.
    pub limited_vnis: Vec<u32>,
    /// Tenants that are not limited.
    pub bypassed_vnis: Vec<u32>,
    /// The tenants that send most, in samples of recent packets.
    pub top_tenants: Vec<TopTenant>,
    /// The reliable transport with hosts, if configured; up to a second old.
    pub transport: Option<GatewayTransport>,
}

/// The reliable transport between hosts and a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayTransport {
    /// Counters that belong to no single host.
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
    /// Its addresses; the first one of a family is its tunnel endpoint.
    pub addresses: Vec<String>,
    /// Its connections.
    pub connections: u32,
    /// Of these: open ones.
    pub open_connections: u32,
    /// Of these: connections that have fallen back to plain VXLAN.
    pub best_effort_connections: u32,
    /// Packets retransmitted, on existing connections.
    pub retransmitted_packets: u64,
    /// Packets that arrived more than once, on existing connections.
    pub duplicate_packets: u64,
    /// Packets given up, on existing connections.
    pub given_up_packets: u64,
    /// Frames from it that wait for earlier frames, or for the pod.
    pub held_frames: u32,
    /// Frames to it that are kept until they are acknowledged.
    pub kept_frames: u32,
    /// Maximum number of frames of either kind.
    pub share_frames: u32,
    /// Its paths; the first one is path 0.
    pub paths: Vec<GatewayPath>,
    /// Its counters.
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
    /// Smoothed round-trip time of the fabric, ns.
    pub srtt_ns: u64,
    /// Lowest recent round-trip time, ns.
    pub min_rtt_ns: u64,
    /// Loss rate, in millionths.
    pub loss_ppm: u32,
    /// Congestion window.
    pub window_packets: u32,
    /// Packets in flight.
    pub in_flight_packets: u32,
    /// Packets sent.
    pub tx_packets: u64,
    /// Packets detected as lost.
    pub lost_packets: u64,
}

/// An order queue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OrderQueue {
    /// Capacity, packets.
    pub entries: u32,
    /// Entries in use: their packets are at the pod, or wait for others.
    pub in_use: u32,
    /// Of these: packets that came back and wait for others.
    pub held: u32,
}

/// A tenant with a high packet rate.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct TopTenant {
    /// Its VNI; above 24 bits: a number that stands for an address of the Internet side.
    pub vni: u32,
    /// Its share of recent packets, percent.
    pub percent: f64,
}

/// A pod: `GET /v1/status` of `bifrost-gw`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayPod {
    /// Whether all of its interfaces are connected to their pipelines.
    pub connected: bool,
    /// Counters of each worker. `busy_ns` is its time spent on packets, `busy_cycles` the same in cycles of the time
    /// stamp counter.
    pub workers: Vec<Counts>,
    /// NAT sessions.
    pub nat_sessions: u64,
    /// Link-layer addresses of next hops; none: unresolved.
    pub neighbours: BTreeMap<String, Option<String>>,
    /// Whether it is drained: it announces no addresses.
    pub draining: bool,
    /// Whether its addresses are announced on one link at least: its workers run, the link's router answers, and it is
    /// not draining.
    pub announcing: bool,
    /// Its BGP sessions, in the order of the configuration.
    pub bgp: Vec<GatewayPeer>,
    /// Its links, in the order of the configuration.
    pub links: Vec<GatewayLink>,
    /// BGP and BFD packets dropped because their hop limit is not 255: they may come from outside of the link (RFC
    /// 5082).
    pub refused_hop_limit_packets: u64,
    /// Its tunnels to customers' networks, in the order of the configuration.
    pub tunnels: Vec<GatewayTunnel>,
}

/// A tunnel to a customer's network.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayTunnel {
    /// Its name.
    pub name: String,
    /// The VPC that it belongs to.
    pub vni: u32,
    /// The customer's router.
    pub remote: String,
    /// Whether packets to it are sent. A tunnel without keepalives is always up.
    pub up: bool,
    /// Time since a keepalive came back, ms; none without keepalives.
    pub silence_ms: Option<u64>,
}

/// A link of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayLink {
    /// The pod's addresses on it.
    pub addresses: Vec<String>,
    /// Whether it is connected to its pipeline.
    pub connected: bool,
    /// Its next hop; none: it leads only to its own prefixes.
    pub router: Option<String>,
    /// Whether the next hop answers ARP or neighbour discovery.
    pub router_answers: Option<bool>,
    /// `up`, `unwatched` (BFD is up with none of its proxies) or `down` (not connected, or the next hop does not
    /// answer).
    pub state: Cow<'static, str>,
    /// The number of the link, from 0, by which packets leave that came by this one: itself while it is as good as the
    /// others.
    pub egress: u64,
}

/// A BGP session of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct GatewayPeer {
    /// The number of its link, from 0.
    pub link: u64,
    /// The proxy's address.
    pub address: String,
    /// `idle`, `open-sent`, `open-confirm` or `established`.
    pub state: Cow<'static, str>,
    /// The state of BFD, if configured: `down`, `init` or `up`.
    pub bfd: Option<Cow<'static, str>>,
    /// Prefixes announced to it.
    pub announced: Vec<String>,
    /// Number of established sessions that have ended.
    pub ended_sessions: u64,
    /// How often BFD went from up to down.
    pub bfd_downs: u64,
}

/// A command to `bifrost-gw`: `POST /v1/command`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case", tag = "command")]
pub enum PodCommand {
    /// Withdraws the pod's routes, or announces them again. It forwards packets in either case.
    Drain {
        /// Whether to withdraw them.
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

/// A described packet: `POST /v1/trace` of `bifrost-nicd` and of `bifrost-gw`, which respond with a
/// [`Trace`](super::Trace).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GatewayTraceSpec {
    /// The pod; none: the pipeline's first. A pod ignores it.
    pub pod: Option<String>,
    /// The packet, with both of its addresses. With [`from_peer`](TraceSpec::from_peer) and a VNI it arrives in VXLAN;
    /// without them, from the Internet and without encapsulation.
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
        /// The mode.
        mode: SpreadMode,
    },
    /// Exempts a tenant from the limiter; or removes its exemption or its own meter.
    Bypass {
        /// The pod's name.
        pod: String,
        /// The tenant.
        vni: u32,
        /// Whether to exempt it.
        bypass: bool,
    },
    /// Adds a pod while the others run. It stays until it is removed, also across restarts of `bifrost-nicd` with a
    /// state directory.
    AddPod {
        /// TOML: the contents of a `[[pods]]` table of the configuration file.
        settings: String,
    },
    /// Removes an added pod. Its connections are closed, and packets that wait for it are dropped.
    RemovePod {
        /// The pod's name.
        pod: String,
    },
}

/// How a pod's packets are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpreadMode {
    /// By packet, in order.
    Plb,
    /// By flow.
    Rss,
}
