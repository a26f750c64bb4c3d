//! The types of the API (version 1), shared by server and client.
//!
//! The name of every number includes its unit. Missing fields get their defaults, so that `bifrostctl` and `bifrostd`
//! of different releases work together.

mod balancer;
mod capture;
mod drain;
mod error;
mod fault;
mod flow_log;
mod gateway;
mod learned;
mod mirror;
mod nat;
mod objects;
mod report;
mod sample;
mod sessions;
mod trace;
mod upgrade;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

pub use balancer::{BackendHealth, BackendStatus, LoadBalancerStatus};
pub use capture::{CaptureSpec, MAX_CAPTURE_SECONDS, MAX_SNAPLEN};
pub use drain::{DrainReport, DrainSpec};
pub(crate) use error::ErrorBody;
pub use error::{ApiError, ErrorKind};
pub use fault::{Direction, FaultCleared, FaultEntry, FaultSpec, FaultSpecError, FaultTarget, MAX_FAULT_DELAY_US};
pub use flow_log::{FlowLogStatus, VpcFlowLogStatus};
pub use gateway::{
    Counts, GatewayHost, GatewayLink, GatewayPath, GatewayPeer, GatewayPod, GatewayTraceSpec, GatewayTransport,
    GatewayTunnel, ImportedSessions, OrderQueue, Pipeline, PipelineCommand, PipelinePod, PipelineStage, PodCommand,
    SpreadMode, TopTenant, TranslatedSessions,
};
pub use learned::{
    LearnReport, LearnSpec, LearnedRoute, MAX_ANSWERS, MAX_LEARN_BYTES, MAX_QUESTION_WAIT_MS, QuestionsQuery,
    RouteAnswer, RouteQuestion, RouteTo,
};
pub use mirror::MirrorStatus;
pub use nat::{NatKind, NatStatus};
pub use objects::{
    ApplyItem, ApplyOp, ApplyReport, ApplySpec, FILE_OWNER, MAX_APPLY_BYTES, MAX_APPLY_ITEMS, MAX_LISTED_OBJECTS,
    ObjectEntry, ObjectList, ObjectsDigest, ObjectsQuery,
};
pub use report::{Changed, ReloadReport};
pub use sample::{DropCount, Drops, Place, Sample};
pub use sessions::{
    MAX_SESSIONS_BYTES, PROTOCOLS, PortSessions, Session, SessionFilter, SessionState, SessionsQuery, SessionsReport,
};
pub use trace::{MAX_TRACE_SIZE, Trace, TraceSpec, TraceStep, TraceVerdict};
pub use upgrade::{UpgradeReport, UpgradeSpec};

/// The daemon's status: `GET /v1/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// `[host].name` of its configuration.
    pub host: String,
    /// The daemon's version.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Time since the daemon was ready, s.
    pub uptime_s: f64,
    /// The configuration file in force.
    pub config_file: String,
    /// Local underlay addresses.
    pub underlay: Vec<IpAddr>,
    /// The data path loops.
    pub workers: Vec<WorkerStatus>,
    /// The configured peers.
    pub peers: Vec<PeerStatus>,
    /// Number of ports.
    pub ports: u64,
    /// Number of routes.
    pub routes: u64,
    /// Number of reliable connections, in any state.
    pub conns: u64,
    /// Number of active injected faults. Above 0: a test, not production.
    pub faults: u64,
}

/// One data path loop.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerStatus {
    /// Its index: the top 8 bits of the CIDs that it owns.
    pub index: u32,
    /// The CPU to which it is pinned, if any.
    pub cpu: Option<u32>,
    /// Turns of the loop since the start.
    pub loops: u64,
    /// How often the loop was idle and slept.
    pub sleeps: u64,
    /// Share of the last second spent on turns with work, without sleeping and idle polling; 0 to 100.
    pub busy_percent: f64,
    /// Packets fetched from guests.
    pub guest_tx_packets: u64,
    /// Packets delivered to guests.
    pub guest_rx_packets: u64,
    /// Datagrams sent on the underlay.
    pub underlay_tx_packets: u64,
    /// Datagrams received from the underlay.
    pub underlay_rx_packets: u64,
}

/// One configured peer.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PeerStatus {
    /// Its name.
    pub name: String,
    /// Its underlay addresses.
    pub addresses: Vec<IpAddr>,
    /// How packets are sent to it now.
    pub transport: PeerMode,
}

/// How packets are sent to a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerMode {
    /// No packets were exchanged yet.
    #[default]
    Idle,
    /// It speaks the reliable transport.
    Bifrost,
    /// Plain VXLAN: configured, or the peer did not answer connection set-up (which is retried later).
    Plain,
    /// A mode of a newer release.
    #[serde(other)]
    Unknown,
}

/// One port: an element of `GET /v1/ports`. `rx` is towards the guest, `tx` from the guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PortStatus {
    /// Its name.
    pub name: String,
    /// The VNI of its VPC.
    pub vni: u32,
    /// The kind of port: `tap` or `vhost-user`.
    pub kind: String,
    /// The guest's MAC address.
    pub mac: String,
    /// The guest's addresses.
    pub addresses: Vec<IpNet>,
    /// The guest's MTU, bytes.
    pub mtu_bytes: u32,
    /// The network namespace of its device; none: the daemon's own.
    pub netns: Option<String>,
    /// The interface's name in the namespace, or the socket of a vhost-user port.
    pub device: String,
    /// No guest has started on the vhost-user port, or the TAP port's network namespace does not exist; it carries no
    /// packets.
    pub waiting: bool,
    /// Queues of the device.
    pub queues: u32,
    /// Its device was deleted, or a fault has taken the port out of use; it carries no packets.
    pub failed: bool,
    /// The last fault of the port, which may be in use again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<PortFault>,
    /// How often a fault has taken it out of use since it was created.
    #[serde(default)]
    pub fault_times: u64,
    /// Turns in which it occupied its worker for more than a millisecond beyond the normal cost of its packets.
    #[serde(default)]
    pub slow_turns: u64,
    /// How often it was paused because of slow turns.
    #[serde(default)]
    pub rest_times: u64,
    /// Packets delivered to the guest.
    pub rx_packets: u64,
    /// Bytes delivered to the guest, Ethernet headers included.
    pub rx_bytes: u64,
    /// Packets fetched from the guest.
    pub tx_packets: u64,
    /// Bytes fetched from the guest, Ethernet headers included.
    pub tx_bytes: u64,
    /// Packets of the guest that are held until they are acknowledged (delayed release), now.
    pub tx_held_packets: u64,
    /// How often a rate limit delayed the guest's packets.
    #[serde(default)]
    pub tx_held_back_times: u64,
    /// Received packets that are placed, but not published to the guest until earlier ones arrive, now.
    pub rx_held_packets: u64,
    /// Dropped packets by reason.
    pub drops_packets: BTreeMap<String, u64>,
    /// Sessions of its security groups, now.
    pub sessions: u64,
    /// Sessions evicted at a bound, by state, in order of eviction: `unanswered` (or closed), `answered` (a single
    /// request and response, or a half-open connection), `closing`, `assured` (longer datagram exchanges),
    /// `established`.
    pub evicted_sessions: BTreeMap<String, u64>,
}

/// A panic while a port was served, which took it out of use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PortFault {
    /// The stage: `fetch`, `place`, ...
    pub stage: String,
    /// The panic's message.
    pub message: String,
    /// Its location: file, line and column.
    pub location: String,
    /// Time since the panic, s.
    pub ago_s: f64,
}

/// One route: an element of `GET /v1/routes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Route {
    /// The VPC.
    pub vni: u32,
    /// Inner destinations.
    pub prefix: IpNet,
    /// The peer that hosts them.
    pub peer: String,
    /// The remote vNIC.
    pub mac: String,
    /// Path MTU: the largest IP packet on the route, bytes.
    pub mtu_bytes: u32,
    /// For a peering: the VNI of the other VPC, whose routes apply. Peer, MAC address and path MTU are empty then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to_vni: Option<u32>,
}

/// One reliable connection of a vNIC pair: an element of `GET /v1/conns`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Conn {
    /// Our CID; its top 8 bits are the worker that owns it.
    pub cid: u32,
    /// The peer's CID; 0: not known yet.
    pub peer_cid: u32,
    /// Its state.
    pub state: ConnState,
    /// The VPC.
    pub vni: u32,
    /// The local vNIC.
    pub local_mac: String,
    /// The remote vNIC.
    pub remote_mac: String,
    /// The host of the remote vNIC.
    pub peer: String,
    /// The negotiated protocol version; 0: not negotiated yet.
    pub version: u8,
    /// Packets sent and not acknowledged.
    pub in_flight_packets: u64,
    /// The window: packets that may be in flight. It shrinks for a while after the peer has refused packets.
    pub window_packets: u64,
    /// Packets waiting for set-up or for the window.
    pub waiting_packets: u64,
    /// Received packets waiting for earlier ones.
    pub held_packets: u64,
    /// Smoothed round-trip time over all paths, µs; none: not measured yet.
    pub srtt_us: Option<f64>,
    /// Time until the next unacknowledged packet counts as lost, µs; none: not measured yet.
    pub rto_us: Option<f64>,
    /// Packets sent, without retransmissions.
    pub tx_packets: u64,
    /// Packets received, without duplicates.
    pub rx_packets: u64,
    /// Packets retransmitted.
    pub retransmitted_packets: u64,
    /// Packets received more than once.
    pub duplicates_packets: u64,
    /// Packets given up after three timeouts.
    pub given_up_packets: u64,
    /// Time since the last packet in either direction, s.
    pub idle_s: f64,
}

/// The state of a connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConnState {
    /// A connection request was sent and is not answered yet.
    #[default]
    Connecting,
    /// Data flows.
    Established,
    /// All paths failed: packets are sent as plain VXLAN until one recovers (NSDI'26 paper, section 7.2).
    Fallback,
    /// The peer did not answer set-up: packets are sent as plain VXLAN until set-up is retried.
    Plain,
    /// Idle for a while; it uses a minimum of memory.
    Idle,
    /// A state of a newer release.
    #[serde(other)]
    Unknown,
}

/// One path to one peer: an element of `GET /v1/paths`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Path {
    /// The peer.
    pub peer: String,
    /// Its number, 0 to 7.
    pub path: u8,
    /// Local underlay address.
    pub local: IpAddr,
    /// The peer's underlay address.
    pub remote: IpAddr,
    /// UDP source port.
    pub source_port: u16,
    /// Whether it carries traffic.
    pub state: PathState,
    /// The operator has drained it; it carries traffic only if all paths to the peer are drained.
    pub drained: bool,
    /// Smoothed round-trip time of the fabric alone, µs; none: not measured yet.
    pub srtt_us: Option<f64>,
    /// Smoothed round-trip time including the time in both endpoints, µs.
    pub total_srtt_us: Option<f64>,
    /// Lowest round-trip time seen, µs.
    pub min_rtt_us: Option<f64>,
    /// Mean deviation of the round-trip time, µs.
    pub rttvar_us: Option<f64>,
    /// Smoothed share of the packets sent on it that were lost; 0 to 100.
    pub loss_percent: f64,
    /// Its share of the packets recently sent to this peer; 0 to 100.
    pub share_percent: f64,
    /// Congestion window, packets.
    pub cwnd_packets: f64,
    /// Packets sent on it and not acknowledged.
    pub in_flight_packets: u64,
    /// Packets sent on it, retransmissions included.
    pub tx_packets: u64,
    /// Packets received on it.
    pub rx_packets: u64,
    /// Packets sent on it that were lost.
    pub lost_packets: u64,
    /// Packets that the fabric marked ECN CE.
    pub ce_marked_packets: u64,
    /// Probes sent.
    pub probes_packets: u64,
    /// Probes that were not answered.
    pub probes_lost_packets: u64,
}

impl Default for Path {
    fn default() -> Path {
        let unspecified = IpAddr::V4(Ipv4Addr::UNSPECIFIED);
        Path {
            peer: String::new(),
            path: 0,
            local: unspecified,
            remote: unspecified,
            source_port: 0,
            state: PathState::default(),
            drained: false,
            srtt_us: None,
            total_srtt_us: None,
            min_rtt_us: None,
            rttvar_us: None,
            loss_percent: 0.0,
            share_percent: 0.0,
            cwnd_packets: 0.0,
            in_flight_packets: 0,
            tx_packets: 0,
            rx_packets: 0,
            lost_packets: 0,
            ce_marked_packets: 0,
            probes_packets: 0,
            probes_lost_packets: 0,
        }
    }
}

/// Whether a path carries traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PathState {
    /// It carries traffic.
    Active,
    /// It works, but other paths are better.
    #[default]
    Standby,
    /// It loses packets or became slow; only probes are sent on it.
    Suspect,
    /// No packets come back.
    Down,
    /// A state of a newer release.
    #[serde(other)]
    Unknown,
}

/// The daemon's counters: `GET /v1/stats`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Values by name; names end in the unit (`_packets`, `_bytes`, `_us`, `_count`).
    pub counters: BTreeMap<String, u64>,
}
