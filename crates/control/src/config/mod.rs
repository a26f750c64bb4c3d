//! The configuration file `bifrostd.toml`, parsed and validated once.
//!
//! [`Config::load`] reads a file, [`Config::parse`] a text. Either returns a configuration in which every name
//! resolves and every value is in range, or all errors at once, each with file, line and field.
//! `docs/operations/configuration.md` lists the keys with their units, ranges and defaults.

mod balancer;
mod check;
mod error;
mod flow_log;
mod metadata;
mod mirror;
mod nat;
mod object;
mod parse;
mod peering;
mod relations;
mod routes;
mod section;
mod security;
mod shared;
mod spec;
mod transport;
mod vni;

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ipnet::IpNet;

pub use balancer::{Affinity, Backend, BalancedProtocol, HealthCheck, LoadBalancer};
pub use bifrost_wire::Mac;
pub use error::{ConfigError, ConfigErrors};
pub use flow_log::{FlowLog, MAX_FLOW_LOGS, VpcFlowLog};
pub use metadata::Metadata;
pub use mirror::{MAX_MIRRORS, Mirror};
pub use nat::{FloatingIp, Nat, PortForward, SourceNat, Uplink};
pub use object::{FieldError, Kind, Object};
pub use relations::RelationError;
pub use routes::{RouteChange, RouteKey, Routes};
pub use security::{AclRule, Action, AddressSet, Direction, Remote, Rule, SecurityGroup, Sessions};
pub use transport::{Auto, CongestionControl, Transport};
pub use vni::Vni;

/// Default path of the control socket.
pub const DEFAULT_SOCKET: &str = "/run/bifrost/bifrostd.sock";

/// MAC address of the gateways of all networks. Guests cannot have it.
pub const GATEWAY_MAC: Mac = Mac([0x02, 0xbf, 0x00, 0x00, 0x00, 0x01]);

/// Maximum number of paths to one peer: the path number has 3 bits on the wire (NSDI'26 paper, appendix C).
pub const MAX_PATHS: u8 = 8;

/// Maximum number of data path loops.
pub const MAX_WORKERS: usize = 32;
/// Maximum number of queue pairs of a virtual machine's port.
pub const MAX_QUEUE_PAIRS: u64 = 16;

/// Largest configuration file, bytes.
pub const MAX_FILE_BYTES: u64 = 256 << 20;

/// Encapsulation overhead, bytes: the difference between the underlay's MTU and the guest's.
/// Outer IP header, UDP 8, VXLAN 8, BIFROST 16, inner Ethernet 14.
pub const fn overhead_bytes(outer: &IpAddr) -> u16 {
    let ip = match outer {
        IpAddr::V4(_) => 20,
        IpAddr::V6(_) => 40,
    };
    ip + 8 + 8 + 16 + 14
}

/// A checked configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// `[host]`
    pub host: Host,
    /// `[control]`
    pub control: Control,
    /// `[workers]`
    pub workers: Workers,
    /// `[underlay]`
    pub underlay: Underlay,
    /// `[transport]`
    pub transport: Transport,
    /// `[sessions]`
    pub sessions: Sessions,
    /// `[qos]`
    pub qos: Qos,
    /// `[[security_group]]`, names unique.
    pub security_groups: Vec<SecurityGroup>,
    /// `[[address_set]]`, names unique.
    pub address_sets: Vec<AddressSet>,
    /// `[[peer]]`, names and addresses unique.
    pub peers: Vec<Peer>,
    /// `[[vpc]]`, VNIs unique.
    pub vpcs: Vec<Vpc>,
    /// `[[port]]`, names unique; MACs and addresses unique in their VPC.
    pub ports: Vec<Port>,
    /// `[[route]]`, prefixes unique in their VPC.
    pub routes: Routes,
    /// Peerings with other VPCs.
    pub peerings: Vec<Peering>,
    /// `[[load_balancer]]`
    pub load_balancers: Vec<LoadBalancer>,
    /// `[[uplink]]`, `[[nat]]`, `[[floating_ip]]`, `[[port_forward]]`
    pub nat: Nat,
    /// `[[mirror]]`, names unique.
    pub mirrors: Vec<Mirror>,
    /// `[flow_log]`; none: the host logs no flows.
    pub flow_log: Option<FlowLog>,
    /// `[[vpc_flow_log]]`, names unique.
    pub flow_logs: Vec<VpcFlowLog>,
}

/// This host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Host {
    /// Its name, 1 to 63 of `[a-z0-9-.]`.
    pub name: String,
    /// Whether devices of TAP ports outlive the daemon.
    pub keep_devices: bool,
}

/// The control API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// Path of the Unix socket, absolute.
    pub socket: PathBuf,
    /// Address of the metrics for Prometheus; none: they are off.
    pub metrics: Option<SocketAddr>,
}

/// The data path loops.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workers {
    /// Number of workers, 1 to [`MAX_WORKERS`].
    pub count: usize,
    /// The CPU of each worker, `count` elements; empty: not pinned.
    pub cpus: Vec<usize>,
    /// Share of a worker's time that a port may use beyond the normal cost of its packets, percent, 0 to 100; 0:
    /// unlimited.
    pub slow_port_percent: u8,
    /// Time in each turn of a worker's loop for answering API queries, µs, 5 to 10,000.
    pub answer_us: u16,
}

/// The network between hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Underlay {
    /// This host's addresses on it, 1 to 8.
    pub addresses: Vec<IpAddr>,
    /// UDP destination port of the reliable transport.
    pub bifrost_port: u16,
    /// UDP destination port of plain VXLAN.
    pub vxlan_port: u16,
    /// Paths per peer, 1 to [`MAX_PATHS`].
    pub paths: u8,
    /// UDP source port of path 0; path i has this plus i.
    pub source_port_base: u16,
    /// MTU of its links, bytes.
    pub mtu: u16,
    /// Whether to send with UDP segmentation offload.
    pub gso: bool,
    /// How plain VXLAN chooses among paths.
    pub plain_paths: PlainPaths,
    /// Idle gap after which a plain VXLAN flow may change its path. 500 µs: LetFlow (NSDI'17).
    pub flowlet_gap: Duration,
    /// How datagrams are sent and received.
    pub port: UnderlayPort,
    /// Where the XDP program of [`UnderlayPort::Afxdp`] runs.
    pub xdp_mode: XdpMode,
    /// Frames of [`UnderlayPort::Afxdp`]: receive frames of each queue, and send frames of each worker; a power of two.
    pub xdp_frames: u32,
    /// Outer DSCP of the transport's ACKs and set-up, 0 to 63.
    pub control_dscp: u8,
}

/// How plain VXLAN chooses among paths.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlainPaths {
    /// A flow keeps its path while the path is good.
    #[default]
    Flow,
    /// Each burst of a flow takes a good path at random.
    Flowlet,
}

/// How datagrams are sent and received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnderlayPort {
    /// Through the kernel's UDP sockets.
    #[default]
    Udp,
    /// Through AF_XDP sockets, which bypass the kernel's IP stack, with UDP sockets as a fallback.
    Afxdp,
}

/// Where an XDP program runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum XdpMode {
    /// In the driver if it supports XDP, otherwise generic.
    #[default]
    Auto,
    /// In the driver only.
    Native,
    /// In the kernel's network stack, after the driver.
    Generic,
}

/// Largest [`Underlay::mtu`] with [`UnderlayPort::Afxdp`], bytes: a frame has to fit into a page.
pub const MAX_AFXDP_MTU: u16 = 3800;

/// How guests share what this host sends to other hosts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Qos {
    /// The rate of all of it, megabits (10^6) of Ethernet frames a second, 1 to 400,000; none: as fast as the links take
    /// it, without turns.
    pub link_mbit: Option<u64>,
    /// Maximum length of a port's queue in a band, as time at that rate, 1 to 1000 ms.
    pub queue: Duration,
}

impl Default for Qos {
    fn default() -> Qos {
        Qos { link_mbit: None, queue: Duration::from_millis(50) }
    }
}

/// Another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Its name.
    pub name: String,
    /// Its underlay addresses, 1 to 8. Datagrams from other addresses are not attributed to it.
    pub addresses: Vec<IpAddr>,
    /// How to send to it.
    pub transport: PeerTransport,
}

/// How to send to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerTransport {
    /// Over the reliable transport if it answers, otherwise as plain VXLAN.
    Auto,
    /// Plain VXLAN only, for example to a kernel VXLAN device.
    Plain,
}

/// One tenant network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vpc {
    /// Its VNI.
    pub vni: Vni,
    /// Which packets are carried reliably.
    pub reliability: Reliability,
    /// The order in which guests receive packets.
    pub ordering: Ordering,
    /// Its share of paths that are full, relative to other VPCs, 1 to 100.
    pub weight: u8,
    /// Addresses for which the switch answers ARP and ND, as the router.
    pub gateway: Vec<IpAddr>,
    /// Whether the switch answers DHCP requests of guests on this host, for each family with a gateway (at least one).
    /// With IPv6, it also sends unsolicited router advertisements.
    pub dhcp: bool,
    /// DHCP lease time, s.
    pub dhcp_lease_s: u32,
    /// Maximum interval between unsolicited router advertisements, s.
    pub ra_interval_s: u16,
    /// DNS servers announced to guests, of families with a gateway; at most 8.
    pub dns: Vec<IpAddr>,
    /// The DNS domain whose names the gateways resolve for guests on this host; none: the gateways are not name
    /// servers.
    pub domain: Option<String>,
    /// Prefixes in which routes are learned when a packet needs them: a client of the API answers the daemon's questions.
    /// No host bits are set. Configured routes come first.
    pub learned: Vec<IpNet>,
    /// `[[vpc.acl]]`: the first matching rule decides; packets that match no rule pass.
    pub acl: Vec<AclRule>,
}

/// Which packets of a VPC are carried reliably; others are sent as plain VXLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reliability {
    /// TCP segments.
    Tcp,
    /// Everything.
    All,
    /// Nothing.
    Off,
}

/// The order in which a receiver publishes packets of a VPC to its guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ordering {
    /// In order within each flow.
    Flow,
    /// In order within the connection, across all flows (NSDI'26 paper, section 4.2).
    Strict,
    /// In order of arrival (NSDI'26 paper, section 7.3).
    Off,
}

/// One guest's attachment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its name.
    pub name: String,
    /// The VPC.
    pub vni: Vni,
    /// The kind of its device.
    pub kind: PortKind,
    /// The guest's MAC address.
    pub mac: Mac,
    /// The guest's addresses with their subnets; other source addresses count as spoofed.
    pub addresses: Vec<IpNet>,
    /// Addresses that the guest shares with others; one guest owns each at a time (VRRP).
    pub shared: Vec<IpAddr>,
    /// The guest's documents in the metadata service; `None`: the service does not answer it.
    pub metadata: Option<Box<Metadata>>,
    /// Networks to which the guest routes, unique in the VPC; no host bits are set.
    pub routed: Vec<IpNet>,
    /// The guest's MTU, bytes.
    pub mtu: u16,
    /// The network namespace's file; none: the daemon's own namespace.
    pub netns: Option<PathBuf>,
    /// The interface's name in the namespace.
    pub device: String,
    /// Default route inside the namespace.
    pub default_gateway: Option<IpAddr>,
    /// Queues of a TAP device: 1, or one for each worker; queue pairs of vhost-user: 1 to 16.
    pub queues: usize,
    /// The vhost-user socket; none for other kinds.
    pub socket: Option<PathBuf>,
    /// Which side listens on the socket.
    pub mode: VhostMode,
    /// Whether to offer packed virtqueues to the virtual machine's driver.
    pub packed: bool,
    /// Whether only the headers of the virtual machine's packets are copied on fetch; false for TAP devices.
    pub slicing: bool,
    /// Whether to offer merged TCP segments to the virtual machine's driver.
    pub merged: bool,
    /// Names of its security groups; they exist in [`Config::security_groups`]. Empty: everything passes.
    pub security_groups: Vec<String>,
    /// Its rate limits.
    pub limits: PortLimits,
    /// The outer DSCP of the guest's packets.
    pub dscp: Dscp,
    /// Its share of what its VPC gets of paths that are full, relative to other ports, 1 to 100.
    pub weight: u8,
    /// The least that its guest may send on a full link, megabits of Ethernet frames a second, 1 to 400,000; at most
    /// [`Qos::link_mbit`] for all ports together.
    pub min_tx_mbit: Option<u64>,
    /// Bytes for packets of each band and worker beyond the receive limit, KiB, 1 to 65,536; none: they are dropped.
    pub rx_queue_kb: Option<u32>,
}

impl Port {
    /// Whether `other` is the same device for the same guest: a running port can apply all other differences.
    pub fn is_same_device(&self, other: &Port) -> bool {
        let (security_groups, routed) = (self.security_groups.clone(), self.routed.clone());
        *self
            == Port {
                security_groups,
                routed,
                shared: self.shared.clone(),
                metadata: self.metadata.clone(),
                limits: self.limits,
                dscp: self.dscp,
                weight: self.weight,
                min_tx_mbit: self.min_tx_mbit,
                rx_queue_kb: self.rx_queue_kb,
                ..other.clone()
            }
    }
}

/// How the outer DSCP of a guest's packets is chosen (RFC 2983).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dscp {
    /// A fixed value, 0 to 63.
    Fixed(u8),
    /// Copied from the inner packet, unless its DSCP is one of network control or the packet is carried reliably.
    Copied,
}

/// Rate limits of a port; none: unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortLimits {
    /// From the guest: megabits (10^6) of Ethernet frames a second, 1 to 400,000.
    pub tx_mbit: Option<u64>,
    /// From the guest: thousands of packets a second, 1 to 1,000,000; each segment of a packet to be segmented counts.
    pub tx_kpps: Option<u64>,
    /// To the guest: megabits of Ethernet frames a second, 1 to 400,000.
    pub rx_mbit: Option<u64>,
    /// To the guest: thousands of packets a second, 1 to 1,000,000.
    pub rx_kpps: Option<u64>,
}

/// The kinds of ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PortKind {
    /// A TAP device.
    Tap,
    /// A virtual machine's virtio network device.
    VhostUser,
}

/// Which side listens on a vhost-user socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VhostMode {
    /// The daemon.
    #[default]
    Server,
    /// The virtual machine's front-end; the daemon connects.
    Client,
}

/// A route to remote inner destinations.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The VPC.
    pub vni: Vni,
    /// The destinations; no host bits are set.
    pub prefix: IpNet,
    /// Name of the peer; it exists in [`Config::peers`].
    pub peer: String,
    /// The remote vNIC.
    pub mac: Mac,
    /// Path MTU, bytes, if it is below that of the underlay (see [`Config::path_mtu`]).
    pub mtu: Option<u16>,
    /// The remote vNIC's name in the VPC's domain.
    pub name: Option<Box<str>>,
    /// Security groups of the remote vNIC, for rules that name them; they exist in [`Config::security_groups`].
    pub security_groups: Box<[String]>,
    /// Addresses that the remote vNIC shares with others, as in [`Port::shared`].
    pub shared: Box<[IpAddr]>,
}

/// Lets guests of a VPC reach another VPC through both gateways; the other VPC needs a peering in return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peering {
    /// The VPC.
    pub vni: Vni,
    /// Addresses of the other VPC; no host bits are set.
    pub prefix: IpNet,
    /// The other VPC.
    pub to_vni: Vni,
}

/// One path to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathEnds {
    /// Its number, from 0.
    pub path: u8,
    /// The local underlay address.
    pub local: IpAddr,
    /// The peer's underlay address, of the same family.
    pub remote: IpAddr,
    /// UDP source port.
    pub source_port: u16,
}

impl Config {
    /// Reads and checks a file. Errors name it as `path` does.
    pub fn load(path: impl AsRef<Path>) -> Result<Config, ConfigErrors> {
        let path = path.as_ref();
        let name = path.display().to_string();
        let too_large = || ConfigErrors::of_file(&name, format!("larger than {MAX_FILE_BYTES} bytes"));
        let unreadable = |e: std::io::Error| ConfigErrors::of_file(&name, format!("cannot be read: {e}"));
        // Bound the read: the reported length of a file may be wrong (a pipe, /proc).
        let mut text = Vec::new();
        let file = std::fs::File::open(path).map_err(unreadable)?;
        std::io::Read::read_to_end(&mut std::io::Read::take(file, MAX_FILE_BYTES + 1), &mut text)
            .map_err(unreadable)?;
        if text.len() as u64 > MAX_FILE_BYTES {
            return Err(too_large());
        }
        let text = String::from_utf8(text).map_err(|e| {
            let line = 1 + e.as_bytes()[..e.utf8_error().valid_up_to()].iter().filter(|b| **b == b'\n').count();
            ConfigErrors::of_file(&name, format!("line {line} is not UTF-8 text"))
        })?;
        Config::parse(&text, &name)
    }

    /// Checks a text. Errors name the file `file_name`.
    pub fn parse(text: &str, file_name: &str) -> Result<Config, ConfigErrors> {
        parse::parse(text, file_name)
    }

    /// The peer of that name.
    pub fn peer(&self, name: &str) -> Option<&Peer> {
        self.peers.iter().find(|p| p.name == name)
    }

    /// The port of that name.
    pub fn port(&self, name: &str) -> Option<&Port> {
        self.ports.iter().find(|p| p.name == name)
    }

    /// The VPC of that number.
    pub fn vpc(&self, vni: Vni) -> Option<&Vpc> {
        self.vpcs.iter().find(|v| v.vni == vni)
    }

    /// Whether only one of several workers serves a port. This holds for ports with one queue, for virtual machines,
    /// and for uplinks, where all ports of outside addresses are allocated. In VPCs with a gateway, it also holds for
    /// ports with security groups, and for all ports if the VPC has load balancers: requests and replies have different
    /// pairs of MAC addresses there.
    pub fn is_served_by_one(&self, port: &Port) -> bool {
        let routed = || self.vpc(port.vni).is_some_and(|vpc| !vpc.gateway.is_empty());
        let one = port.kind == PortKind::VhostUser || port.queues == 1;
        let balanced = || self.load_balancers.iter().any(|balancer| balancer.vni == port.vni);
        let one = one || self.is_uplink(port);
        self.workers.count > 1 && (one || routed() && (!port.security_groups.is_empty() || balanced()))
    }

    /// Whether a port is an uplink.
    pub fn is_uplink(&self, port: &Port) -> bool {
        self.nat.uplinks.iter().any(|uplink| uplink.port == port.name)
    }

    /// Path MTU of each route, bytes: the largest IP packet of a guest on it. The route's own value or, without one,
    /// the underlay's.
    pub fn path_mtu(&self) -> impl Fn(&Route) -> u16 + '_ {
        let mtus = self.peers.iter().map(|p| (p.name.as_str(), self.underlay.guest_mtu(&p.addresses)));
        let mtus: HashMap<&str, u16> = mtus.collect();
        move |route| route.mtu.or_else(|| mtus.get(route.peer.as_str()).copied()).unwrap_or(self.underlay.mtu)
    }

    /// The paths to a peer, ordered by number.
    pub fn paths<'a>(&'a self, peer: &'a Peer) -> impl Iterator<Item = PathEnds> + 'a {
        self.underlay.paths_to(&peer.addresses)
    }
}

impl Underlay {
    /// The largest IP packet of a guest that fits the links to a host with these addresses, bytes.
    pub fn guest_mtu(&self, remote: &[IpAddr]) -> u16 {
        self.mtu.saturating_sub(remote.iter().map(overhead_bytes).max().unwrap_or(0))
    }

    /// The paths to a host with these addresses: path i runs from local address i mod n to remote address i mod m.
    /// None if there are no addresses on either side.
    pub fn paths_to<'a>(&'a self, remote: &'a [IpAddr]) -> impl Iterator<Item = PathEnds> + 'a {
        let pairs = self.addresses.iter().cycle().zip(remote.iter().cycle());
        (0..self.paths).zip(pairs).map(|(path, (local, remote))| PathEnds {
            path,
            local: *local,
            remote: *remote,
            source_port: self.source_port_base + u16::from(path),
        })
    }
}

impl Vpc {
    /// Whether the reliable transport is used at all.
    pub fn is_reliable(&self) -> bool {
        self.reliability != Reliability::Off
    }
}
