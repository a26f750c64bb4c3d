//! The types of the API (version 1), shared by server and client.
//!
//! Every number's unit is in its name. Receivers fill in fields that a sender of another release does not know with
//! their defaults, so that `bifrostctl` and `bifrostd` need not be upgraded together.

mod balancer;
mod capture;
mod drain;
mod error;
mod fault;
mod flow_log;
mod gateway;
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
pub use flow_log::FlowLogStatus;
pub use gateway::{
    Counts, GatewayHost, GatewayPath, GatewayPeer, GatewayPod, GatewayTraceSpec, GatewayTransport, ImportedSessions,
    OrderQueue, Pipeline, PipelineCommand, PipelinePod, PipelineStage, PodCommand, SpreadMode, TopTenant,
    TranslatedSessions,
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

/// The daemon as a whole: `GET /v1/status`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Status {
    /// `[host].name` of its configuration.
    pub host: String,
    /// The daemon's version.
    pub version: String,
    /// Process id.
    pub pid: u32,
    /// Seconds since the daemon was ready.
    pub uptime_s: f64,
    /// The configuration file in force.
    pub config_file: String,
    /// Local underlay addresses.
    pub underlay: Vec<IpAddr>,
    /// The data path loops.
    pub workers: Vec<WorkerStatus>,
    /// The configured peers.
    pub peers: Vec<PeerStatus>,
    /// How many ports there are.
    pub ports: u64,
    /// How many routes there are.
    pub routes: u64,
    /// How many reliable connections there are, in any state.
    pub conns: u64,
    /// How many injected faults are in force. Anything but 0 is a test, not production.
    pub faults: u64,
}

/// One data path loop.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct WorkerStatus {
    /// Its index, the top 8 bits of the CIDs that it owns.
    pub index: u32,
    /// The CPU it is pinned to, if it is.
    pub cpu: Option<u32>,
    /// Turns of the loop since the start.
    pub loops: u64,
    /// How often the loop found nothing to do and slept.
    pub sleeps: u64,
    /// Share of the time spent working rather than asleep or polling in vain, over the last second; 0 to 100.
    pub busy_percent: f64,
    /// Packets taken from guests.
    pub guest_tx_packets: u64,
    /// Packets given to guests.
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
    /// How packets reach it now.
    pub transport: PeerMode,
}

/// How packets reach a peer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerMode {
    /// Nothing was exchanged yet.
    #[default]
    Idle,
    /// It speaks the reliable transport.
    Bifrost,
    /// Plain VXLAN: configured so, or it did not answer connection set-up (and is tried again later).
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
    /// The VPC it belongs to.
    pub vni: u32,
    /// What kind of port: `tap` or `vhost-user`.
    pub kind: String,
    /// The guest's MAC address.
    pub mac: String,
    /// The guest's addresses.
    pub addresses: Vec<IpNet>,
    /// The guest's MTU, bytes.
    pub mtu_bytes: u32,
    /// The network namespace its device lives in; none: the daemon's own.
    pub netns: Option<String>,
    /// The interface's name in there; the socket of a vhost-user port.
    pub device: String,
    /// No guest has started on the vhost-user port, or the TAP port's network namespace is not there; it carries nothing.
    pub waiting: bool,
    /// Queues of the device.
    pub queues: u32,
    /// Its device is gone, since somebody has deleted it in there, or a fault has taken the port out of use; it carries nothing.
    pub failed: bool,
    /// The last fault of the port; it may be in use again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fault: Option<PortFault>,
    /// How often a fault has taken it out of use since it was made.
    #[serde(default)]
    pub fault_times: u64,
    /// Turns in which it kept its worker for more than a millisecond beyond what its packets need.
    #[serde(default)]
    pub slow_turns: u64,
    /// How often it had to rest for that.
    #[serde(default)]
    pub rest_times: u64,
    /// Packets given to the guest.
    pub rx_packets: u64,
    /// Bytes given to the guest, Ethernet headers included.
    pub rx_bytes: u64,
    /// Packets taken from the guest.
    pub tx_packets: u64,
    /// Bytes taken from the guest, Ethernet headers included.
    pub tx_bytes: u64,
    /// Packets of the guest that are kept until they are acknowledged (delayed release), now.
    pub tx_held_packets: u64,
    /// How often the guest's packets had to wait because it had sent what its limits let pass.
    #[serde(default)]
    pub tx_held_back_times: u64,
    /// Received packets that are placed and wait for earlier ones before the guest sees them, now.
    pub rx_held_packets: u64,
    /// Dropped packets by reason.
    pub drops_packets: BTreeMap<String, u64>,
    /// Conversations that its security groups remember, now.
    pub sessions: u64,
    /// Conversations that made room for others at a bound, by what they were worth, the least first: `unanswered` (or over), `answered` (a
    /// question and its answer, a half-open connection), `closing`, `assured` (datagrams both ways for a while), `established`.
    pub evicted_sessions: BTreeMap<String, u64>,
}

/// A panic while a port was served, which has taken it out of use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PortFault {
    /// What was being done: `fetch`, `place`, ...
    pub stage: String,
    /// The panic's message.
    pub message: String,
    /// Its place: file, line and column.
    pub location: String,
    /// How long ago, s.
    pub ago_s: f64,
}

/// One route: an element of `GET /v1/routes`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Route {
    /// The VPC.
    pub vni: u32,
    /// Inner destinations.
    pub prefix: IpNet,
    /// The host behind which they live.
    pub peer: String,
    /// The remote vNIC.
    pub mac: String,
    /// Path MTU: the largest IP packet that gets there, bytes.
    pub mtu_bytes: u32,
    /// The VPC into which it leads, of a peering: the routes there say where the destinations are, and host, vNIC and path MTU are
    /// empty here.
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
    /// Where it is in its life.
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
    /// How many packets may be in flight: fewer for a while after the peer has received some and not taken them.
    pub window_packets: u64,
    /// Packets that wait for set-up or for room in the window.
    pub waiting_packets: u64,
    /// Received packets that wait for earlier ones.
    pub held_packets: u64,
    /// Smoothed round-trip time over all paths, µs; none: not measured yet.
    pub srtt_us: Option<f64>,
    /// Time until the next unacknowledged packet counts as lost, µs; none: not measured yet.
    pub rto_us: Option<f64>,
    /// Packets sent, without retransmissions.
    pub tx_packets: u64,
    /// Packets received, without duplicates.
    pub rx_packets: u64,
    /// Packets sent again.
    pub retransmitted_packets: u64,
    /// Packets received more than once.
    pub duplicates_packets: u64,
    /// Packets that were given up after three timeouts.
    pub given_up_packets: u64,
    /// Seconds since the last packet either way.
    pub idle_s: f64,
}

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ConnState {
    /// Set-up was sent and is not answered.
    #[default]
    Connecting,
    /// Data flows.
    Established,
    /// All paths failed: packets go as plain VXLAN until one recovers (NSDI'26 paper, section 7.2).
    Fallback,
    /// The peer did not answer set-up: packets go as plain VXLAN until it is tried again.
    Plain,
    /// Nothing was sent for a while; it holds the minimum of memory.
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
    /// The operator has taken it out of use; it carries traffic only if all paths to the peer are.
    pub drained: bool,
    /// Smoothed round-trip time of the fabric alone, µs; none: not measured yet.
    pub srtt_us: Option<f64>,
    /// Smoothed round-trip time with the time spent in both endpoints, µs.
    pub total_srtt_us: Option<f64>,
    /// Lowest round-trip time seen, µs.
    pub min_rtt_us: Option<f64>,
    /// Mean deviation of the round-trip time, µs.
    pub rttvar_us: Option<f64>,
    /// Smoothed share of the packets sent on it that were lost; 0 to 100.
    pub loss_percent: f64,
    /// Its share of the packets lately sent to this peer; 0 to 100.
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
    /// Packets that the fabric marked with congestion experienced.
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
    /// It works, and others are better.
    #[default]
    Standby,
    /// It loses packets or slowed down; only probes go there.
    Suspect,
    /// Nothing comes back.
    Down,
    /// A state of a newer release.
    #[serde(other)]
    Unknown,
}

/// The daemon's counters: `GET /v1/stats`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Stats {
    /// Value by name; a name ends in its unit (`_packets`, `_bytes`, `_us`, `_count`).
    pub counters: BTreeMap<String, u64>,
}
