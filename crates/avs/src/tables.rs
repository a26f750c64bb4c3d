//! The configuration from which a switch is built.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use bifrost_tables::{IpNet, Pattern};
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::{Mac, Vni};

use crate::ids::{AddressSetId, Direction, GroupId, PeerId, PortId, WorkerId};
use crate::limits::{FlowLimits, SessionLimits};

/// The gateway's MAC address. It is the same in every VPC and on every host, so that a guest that moves keeps its
/// neighbour entry. No vNIC may have it.
pub const GATEWAY_MAC: Mac = Mac::ROUTER;

/// Which packets of a VPC are carried reliably over the underlay (NSDI'26 paper, section 4.1). ARP and neighbour
/// discovery never are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reliability {
    /// TCP only.
    #[default]
    Tcp,
    /// All IP packets.
    All,
    /// No packets: plain VXLAN.
    Off,
}

/// The order in which a VPC's reliable packets are delivered to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ordering {
    /// Each flow is in order by itself.
    #[default]
    Flow,
    /// All packets between two vNICs are in the order in which they were sent.
    Strict,
    /// In order of arrival.
    Off,
}

/// A tenant's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vpc {
    /// Its identifier.
    pub vni: Vni,
    /// Which packets are carried reliably.
    pub reliability: Reliability,
    /// The order in which they are delivered.
    pub ordering: Ordering,
    /// The router's addresses in this network, which the switch itself owns. Without any there is no routing.
    pub gateways: Vec<IpAddr>,
    /// Stateless rules for every packet from and to its local vNICs. The first matching rule decides; a packet that
    /// matches none passes. ARP and valid neighbour discovery messages always pass. A fragmented packet is judged by
    /// its first fragment.
    pub acl: Vec<AclRule>,
}

/// A rule of a network's ACL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AclRule {
    /// Whether it applies to packets from guests or to guests.
    pub direction: Direction,
    /// Packets that it matches.
    pub pattern: Pattern,
    /// Whether matching packets pass.
    pub allow: bool,
    /// The rule's name in logs; `None`: the rule is not logged.
    pub log: Option<Arc<RuleName>>,
}

/// The rule of the configuration that a logged rule comes from. A rule with alternatives becomes several rules here,
/// with the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleName {
    /// The rule list that contains it.
    pub owner: RuleOwner,
    /// The direction of the packets that it matches, as seen from the guest.
    pub direction: Direction,
    /// Its number in its list, from 1.
    pub number: u32,
}

/// The rule list that contains a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleOwner {
    /// The security group of that name.
    Group(String),
    /// The ACL of a network.
    Acl(Vni),
}

/// Limits of the rule logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleLogSpec {
    /// New flows that a port's log may record, per second.
    pub records_per_s: u32,
    /// Interval between two records of a rejected flow that continues, ns. A flow without packets for this long is a
    /// new one afterwards.
    pub interval_ns: u64,
}

/// A security group: the conversations that may begin. Packets of an allowed conversation pass in both directions.
///
/// A port with groups accepts what a rule of any of its groups allows. It may send everything, unless one of the
/// groups has an egress rule, or restricts egress without having one. A port without groups passes everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecurityGroup {
    /// What it allows.
    pub rules: Vec<GroupRule>,
    /// Whether guests may begin only conversations that a rule allows, even if there is no egress rule.
    pub restricts_egress: bool,
}

impl SecurityGroup {
    /// A group with these rules; egress is restricted only if one of them is an egress rule.
    pub fn new(rules: Vec<GroupRule>) -> Self {
        SecurityGroup { rules, restricts_egress: false }
    }
}

/// A rule of a security group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRule {
    /// Whether it is about conversations that the guest begins (egress), or that others begin with it (ingress).
    pub direction: Direction,
    /// Matches the first packet of a conversation.
    pub pattern: Pattern,
    /// The other end of the conversation.
    pub remote: Remote,
    /// The rule's name in logs; `None`: the rule is not logged.
    pub log: Option<Arc<RuleName>>,
}

impl GroupRule {
    /// A rule without a restriction on the other end.
    pub fn new(direction: Direction, pattern: Pattern) -> Self {
        GroupRule { direction, pattern, remote: Remote::Anybody, log: None }
    }
}

/// The other end of the conversations that a rule applies to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remote {
    /// Any address that the pattern matches.
    #[default]
    Anybody,
    /// An address of this set.
    Set(AddressSetId),
    /// A vNIC of the same network that has this group. It is identified by its addresses, except link-local ones.
    Group(GroupId),
}

/// Addresses of a vNIC on another host that has a security group. Addresses of local vNICs are known from their
/// ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// The network.
    pub vni: Vni,
    /// The group.
    pub group: GroupId,
    /// The addresses; host bits are ignored.
    pub prefix: IpNet,
}

/// A local vNIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Port {
    /// Its number.
    pub id: PortId,
    /// Its network.
    pub vni: Vni,
    /// Its MAC address.
    pub mac: Mac,
    /// Addresses that its guest may use, in addition to the IPv6 link-local address derived from the MAC address.
    pub addresses: Vec<IpAddr>,
    /// Networks behind the guest, if it is a router: it may send from these addresses, and receives packets to them.
    /// Host bits are ignored. If an address is in prefixes of several ports or routes, the longest prefix wins.
    pub routed: Vec<IpNet>,
    /// Largest IP packet delivered to the guest, bytes; at least 68.
    pub mtu: u16,
    /// Its security groups.
    pub groups: Vec<GroupId>,
    /// The only worker that serves it. `None`: all workers of the host do; each serves the pairs of vNICs that
    /// [`worker_of_pair`](bifrost_nic::steer::worker_of_pair) assigns to it.
    pub home: Option<WorkerId>,
}

/// The DHCP lease of the guest behind a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The port.
    pub port: PortId,
    /// The guest's address.
    pub address: Ipv4Addr,
    /// Length of its subnet's prefix, 0 to 32 bits.
    pub prefix_len: u8,
    /// The network's gateway, which is also the DHCP server.
    pub gateway: Ipv4Addr,
    /// DNS servers, at most [`Lease::MAX_DNS`].
    pub dns: Vec<Ipv4Addr>,
    /// The search domain, at most 253 characters.
    pub domain: Option<String>,
    /// Interface MTU, bytes.
    pub mtu: u16,
    /// Lease time, s.
    pub seconds: u32,
}

impl Lease {
    /// Maximum number of DNS servers of a guest.
    pub const MAX_DNS: usize = 8;

    /// The subnet mask.
    pub(crate) fn mask(&self) -> Ipv4Addr {
        Ipv4Addr::from_bits(u32::MAX.checked_shl(32 - u32::from(self.prefix_len.min(32))).unwrap_or(0))
    }

    /// Whether an address is in the guest's subnet.
    pub(crate) fn is_on_link(&self, address: Ipv4Addr) -> bool {
        (address.to_bits() ^ self.address.to_bits()) & self.mask().to_bits() == 0
    }
}

/// The IPv6 settings of the guest behind a port, sent in router advertisements (solicited and unsolicited) and by
/// DHCPv6. Router and server use the link-local address of the network's gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipv6Lease {
    /// The port.
    pub port: PortId,
    /// The guest's addresses, each with the length of its subnet's prefix, 0 to 128 bits; at most
    /// [`Ipv6Lease::MAX_ADDRESSES`]. Link-local addresses are not included: a guest assigns those itself.
    pub addresses: Vec<(Ipv6Addr, u8)>,
    /// DNS servers, at most [`Lease::MAX_DNS`].
    pub dns: Vec<Ipv6Addr>,
    /// The search domain.
    pub domain: Option<String>,
    /// Interface MTU, bytes.
    pub mtu: u16,
    /// Lifetime of the addresses, s.
    pub seconds: u32,
    /// Maximum time between two unsolicited router advertisements, 4 to 1800 s (RFC 4861, section 6.2.1).
    pub interval_s: u16,
}

impl Ipv6Lease {
    /// Maximum number of addresses of a guest.
    pub const MAX_ADDRESSES: usize = 8;

    /// Lifetime of what an advertisement says, s: three intervals (RFC 4861, section 6.2.1).
    pub(crate) fn router_lifetime_s(&self) -> u16 {
        self.interval_s.saturating_mul(3)
    }

    /// The guest's addresses.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.addresses.iter().take(Self::MAX_ADDRESSES).map(|(address, _)| *address)
    }

    /// The subnets of these addresses without duplicates: prefix and length.
    pub(crate) fn subnets(&self) -> impl Iterator<Item = (Ipv6Addr, u8)> {
        let all = || self.addresses.iter().take(Self::MAX_ADDRESSES).map(|&(address, len)| subnet(address, len));
        all().enumerate().filter(move |(at, subnet)| !all().take(*at).any(|other| other == *subnet)).map(|(_, net)| net)
    }

    /// Whether an address is in one of these subnets.
    pub(crate) fn is_on_link(&self, address: Ipv6Addr) -> bool {
        self.subnets().any(|(prefix, len)| subnet(address, len).0 == prefix)
    }
}

/// The subnet of an address: the prefix with host bits zero, and its length.
fn subnet(address: Ipv6Addr, len: u8) -> (Ipv6Addr, u8) {
    let len = len.min(128);
    let mask = u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0);
    (Ipv6Addr::from_bits(address.to_bits() & mask), len)
}

/// An address that several vNICs share. One of them, on this host or another, holds it at a time, as with VRRP
/// (RFC 9568). [`Switch::take_claims`](crate::Switch::take_claims) reports which vNIC announces it. Guests reach it
/// through the gateway, which the network must have, so they do not notice when it moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedAddress {
    /// The network.
    pub vni: Vni,
    /// The address. No port, route, load balancer or gateway may have it.
    pub address: IpAddr,
    /// The vNICs that may hold it; each belongs to a port or route of the network. All of them may send from the
    /// address.
    pub vnics: Vec<Mac>,
    /// The one of `vnics` that holds the address and receives packets to it. `None`: no vNIC does.
    pub holder: Option<Mac>,
}

/// The addresses of the metadata service, as in EC2. In a network that has a port with metadata they belong to the
/// gateway.
pub const METADATA: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(169, 254, 169, 254), Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254));

/// Whether an address is one of the metadata service.
pub(crate) fn is_metadata(address: IpAddr) -> bool {
    address == IpAddr::V4(METADATA.0) || address == IpAddr::V6(METADATA.1)
}

/// The DNS names of a network. The switch resolves them for guests of this host that query the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// The network; it has at most one zone.
    pub vni: Vni,
    /// The domain, such as `vpc1.internal`, at most 253 characters. The switch is authoritative for it.
    pub domain: String,
    /// Names relative to the domain, with their addresses. A name may have several. Invalid names are skipped.
    pub names: Vec<(String, IpAddr)>,
    /// Prefixes for whose reverse lookups the switch is authoritative.
    pub subnets: Vec<IpNet>,
}

/// A route to addresses of another host's vNIC.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Route {
    /// The network.
    pub vni: Vni,
    /// The addresses; host bits are ignored.
    pub prefix: IpNet,
    /// The host.
    pub peer: PeerId,
    /// The vNIC.
    pub mac: Mac,
    /// Path MTU: the largest IP packet that the path carries, bytes; at least 68 (Triton paper, section 5.2).
    pub mtu: u16,
}

/// The difference between the routes of a network and those of an earlier configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteChanges {
    /// The network.
    pub vni: Vni,
    /// Changed prefixes with their new routes; `None`: the route was removed.
    pub routes: Vec<(IpNet, Option<Route>)>,
    /// The vNICs of all changed routes, before and after: the host of each vNIC, and the smallest path MTU of all its
    /// routes, bytes; `None`: no route leads to it any more.
    pub vnics: Vec<(Mac, Option<(PeerId, u16)>)>,
}

/// A peering from one network to another. Packets pass only if a peering in the other direction covers their source
/// address. No packet crosses more than two networks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peering {
    /// The network that has this peering.
    pub vni: Vni,
    /// Prefix of the other network's addresses; host bits are ignored.
    pub prefix: IpNet,
    /// The other network.
    pub to: Vni,
}

/// A load balancer inside a network: a virtual address and port in front of several backends. The client's host
/// rewrites the destination of requests and the source of replies. The client's own address stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBalancer {
    /// The network of its clients and backends, which needs a gateway.
    pub vni: Vni,
    /// Its virtual address. No other entity of the network may have it.
    pub address: IpAddr,
    /// Its virtual port.
    pub port: u16,
    /// The protocol that it balances.
    pub protocol: Transport,
    /// Its session affinity.
    pub affinity: Affinity,
    /// Backends, of the same address family as `address`. At most
    /// [`MAX_BACKENDS`](bifrost_tables::Maglev::MAX_BACKENDS) with a weight above 0 get connections.
    pub backends: Vec<Backend>,
}

/// A destination to which a load balancer sends connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Relative share of new connections. 0: it gets no new ones and keeps the existing ones (draining).
    pub weight: u16,
}

/// A transport protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// The IP protocol number.
    pub(crate) const fn number(self) -> u8 {
        match self {
            Transport::Tcp => TCP,
            Transport::Udp => UDP,
        }
    }
}

/// Uplinks to the outside network, and NAT.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nat {
    /// Ports that lead to the outside. Each is the only port of its network.
    pub uplinks: Vec<PortId>,
    /// Source NAT: addresses that guests share.
    pub sources: Vec<SourceNat>,
    /// Floating addresses of single guests.
    pub floating: Vec<FloatingIp>,
    /// Port forwards: ports of shared addresses that are permanently assigned to a guest.
    pub forwards: Vec<PortForward>,
}

/// Source NAT for the guests of a network. Packets for which the network has no other route go to the uplink.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceNat {
    /// The network.
    pub vni: Vni,
    /// The uplink; the network must have only one.
    pub uplink: PortId,
    /// The shared addresses, of either family.
    pub addresses: Vec<IpAddr>,
    /// First and last port of each address that this host may allocate. Hosts that share addresses use disjoint
    /// ranges, so they need not coordinate.
    pub ports: (u16, u16),
    /// Maximum number of ports that a guest holds at a time, over all protocols.
    pub per_guest: u32,
}

/// An outside address that belongs to one guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloatingIp {
    /// The guest's network.
    pub vni: Vni,
    /// The uplink.
    pub uplink: PortId,
    /// The address outside.
    pub outside: IpAddr,
    /// The guest's address, of the same family. Packets are dropped while no port of this host has it.
    pub inside: IpAddr,
}

/// A port of a shared outside address that is forwarded to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortForward {
    /// The guest's network.
    pub vni: Vni,
    /// The uplink.
    pub uplink: PortId,
    /// The protocol.
    pub protocol: Transport,
    /// Address and port outside.
    pub outside: (IpAddr, u16),
    /// Address and port of the guest, of the same family.
    pub inside: (IpAddr, u16),
}

/// The session affinity of a load balancer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Affinity {
    /// All packets of a connection go to the same backend.
    #[default]
    Connection,
    /// All connections of a client address go to the same backend, as long as the set of backends does not change.
    Client,
}

/// The workers of a host, as seen from one of them. Each has its own switch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workers {
    /// The worker that this switch belongs to.
    pub own: WorkerId,
    /// Number of workers; 0 counts as 1.
    pub count: u16,
}

/// Maximum number of flow logs of a switch.
pub const MAX_FLOW_LOGS: usize = 64;

/// What a flow log records (Triton paper, section 2.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLogSpec {
    /// Its name, unique. A log keeps its conversations when its other settings change.
    pub name: Arc<str>,
    /// Ports whose conversations are logged.
    pub ports: Vec<PortId>,
    /// Whether conversations whose packets pass are logged.
    pub accepted: bool,
    /// Whether conversations whose packets are dropped are logged.
    pub rejected: bool,
    /// Sampling: with N, one of N conversations is logged; 0 is like 1. Which ones follows from the addresses, ports
    /// and protocol, so both directions and all switches choose the same.
    pub one_in: u32,
    /// Maximum number of conversations tracked at a time. One port may use a quarter of them, or all if it is the
    /// only logged port.
    pub flows: u32,
    /// Interval between two records of a conversation that continues, ns.
    pub active_ns: u64,
    /// Idle time after which a conversation ends, ns.
    pub idle_ns: u64,
}

/// The complete configuration of a switch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Networks.
    pub vpcs: Vec<Vpc>,
    /// Local vNICs.
    pub ports: Vec<Port>,
    /// Routes to vNICs of other hosts.
    pub routes: Vec<Route>,
    /// Peerings with other networks.
    pub peerings: Vec<Peering>,
    /// Load balancers, identified by their position in this list.
    pub load_balancers: Vec<LoadBalancer>,
    /// Uplinks to the outside network, and NAT.
    pub nat: Nat,
    /// Addresses that vNICs share.
    pub shared: Vec<SharedAddress>,
    /// Ports whose guests may use the metadata service. Their networks have gateways.
    pub metadata: Vec<PortId>,
    /// DHCP leases. A guest without one gets no reply.
    pub leases: Vec<Lease>,
    /// IPv6 settings of guests. A guest without them gets no advertisements and no DHCPv6 replies.
    pub ipv6_leases: Vec<Ipv6Lease>,
    /// Networks whose routes are learned from packets, each with the prefixes in which they are.
    pub learned: Vec<(Vni, Vec<IpNet>)>,
    /// DNS zones. In other networks, DNS queries to the gateway are not answered.
    pub zones: Vec<Zone>,
    /// Security groups, identified by their position in this list.
    pub groups: Vec<SecurityGroup>,
    /// Members of the security groups on other hosts.
    pub members: Vec<Member>,
    /// Address sets for rules, identified by their position in this list. Host bits are ignored.
    pub address_sets: Vec<Vec<IpNet>>,
    /// Limits of the security groups' sessions.
    pub sessions: SessionLimits,
    /// Limits of the flow records.
    pub flows: FlowLimits,
    /// What is logged about flows, at most [`MAX_FLOW_LOGS`]; further ones are ignored.
    pub flow_logs: Vec<FlowLogSpec>,
    /// Limits of the logs of rules that have a log name; `None`: no rule is logged.
    pub rule_log: Option<RuleLogSpec>,
    /// The workers of this host.
    pub workers: Workers,
    /// A deliberate defect, to test the tests.
    #[cfg(feature = "mutations")]
    pub mutation: Option<crate::Mutation>,
}

/// Why a switch cannot be built from some [`Tables`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// Two networks with one identifier.
    #[error("VNI {0} is described twice")]
    DuplicateVni(Vni),
    /// A port or route refers to a network that is not described.
    #[error("VNI {0} is used but not described")]
    UnknownVni(Vni),
    /// A peering of a network with itself.
    #[error("VNI {0} has a peering with itself")]
    PeeringWithItself(Vni),
    /// Two ports with one number.
    #[error("port number {} is described twice", { .0.0 })]
    DuplicatePort(PortId),
    /// A port's number is too large.
    #[error("port number {} is too large: a host has at most {} ports", { .0.0 }, PortId::LIMIT)]
    PortNumber(PortId),
    /// A peer's number is too large.
    #[error("peer number {} is too large: a host has at most {} peers", { .0.0 }, PeerId::LIMIT)]
    PeerNumber(PeerId),
    /// A MAC address that no vNIC can have, or the gateway's.
    #[error("{0} cannot be the MAC address of a vNIC")]
    Mac(Mac),
    /// One MAC address in two places of a network.
    #[error("MAC address {mac} is at two places in VNI {vni}")]
    DuplicateMac {
        /// The network.
        vni: Vni,
        /// The address.
        mac: Mac,
    },
    /// One address or prefix in two places of a network; the gateway's addresses count.
    #[error("{prefix} is at two places in VNI {vni}")]
    DuplicatePrefix {
        /// The network.
        vni: Vni,
        /// The prefix.
        prefix: IpNet,
    },
    /// A shared address that is described twice, belongs to the switch itself, is in a network without a gateway, or
    /// lists a vNIC that is not in the network.
    #[error("{0} cannot be shared by these vNICs")]
    SharedAddress(IpAddr),
    /// A port with metadata does not exist, or its network has no gateway.
    #[error("port number {} has metadata, but does not exist or is in a network without a gateway", { .0.0 })]
    Metadata(PortId),
    /// A port has a security group that is not described.
    #[error("security group number {} is used but not described", { .0.0 })]
    UnknownGroup(GroupId),
    /// A rule refers to an address set that is not described.
    #[error("address set number {} is used but not described", { .0.0 })]
    UnknownSet(AddressSetId),
    /// Two load balancers with the same address, port and protocol.
    #[error("two load balancers of VNI {vni} listen at {address} port {port}")]
    DuplicateLoadBalancer {
        /// The network.
        vni: Vni,
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// A backend's address is of another family than its load balancer's.
    #[error("the backend address {0} is not of its load balancer's address family")]
    BackendFamily(IpAddr),
    /// A lease is for a port that does not exist, or is the port's second one of its family.
    #[error("port number {} has two leases of one family, or does not exist", { .0.0 })]
    Lease(PortId),
    /// A port is used as an uplink but is not listed as one.
    #[error("port number {} is used as an uplink, but is not listed as one", { .0.0 })]
    UnknownUplink(PortId),
    /// An outside address or port has two owners, or its owner's address is of another family.
    #[error("the outside address {0}, or one of its ports, has two owners, or an owner of another family")]
    OutsideAddress(IpAddr),
    /// An address that no vNIC or gateway can have.
    #[error("{0} cannot be the address of a vNIC or gateway")]
    Address(IpAddr),
}
