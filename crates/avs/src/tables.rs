//! What a switch is built from.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use bifrost_tables::{IpNet, Pattern};
use bifrost_wire::protocol::{TCP, UDP};
use bifrost_wire::{Mac, Vni};

use crate::ids::{AddressSetId, Direction, GroupId, PeerId, PortId, WorkerId};
use crate::limits::{FlowLimits, SessionLimits};

/// The gateway's MAC address, the same in every VPC and on every host, so that a guest that moves keeps its neighbour
/// entry. No vNIC may have it.
pub const GATEWAY_MAC: Mac = Mac::ROUTER;

/// Which packets of a VPC cross the underlay reliably (NSDI'26 paper, section 4.1). ARP and neighbour discovery never do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reliability {
    /// TCP only.
    #[default]
    Tcp,
    /// All IP packets.
    All,
    /// None: plain VXLAN.
    Off,
}

/// In which order a VPC's reliable packets are shown to the guest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ordering {
    /// Each flow in order of its own.
    #[default]
    Flow,
    /// All packets between two vNICs in the order of sending.
    Strict,
    /// As they arrive.
    Off,
}

/// A tenant's network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vpc {
    /// Its identifier.
    pub vni: Vni,
    /// Which packets are reliable.
    pub reliability: Reliability,
    /// In which order they are shown.
    pub ordering: Ordering,
    /// Addresses that the switch itself has, as router; without any there is no routing.
    pub gateways: Vec<IpAddr>,
    /// Stateless rules for every packet from and to its local vNICs: the first that matches decides, and what none matches
    /// passes. ARP and valid messages of neighbour discovery always pass. A packet in pieces is judged by its first fragment.
    pub acl: Vec<AclRule>,
}

/// A rule of a network's ACL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AclRule {
    /// Packets from guests, or to guests.
    pub direction: Direction,
    /// Which.
    pub pattern: Pattern,
    /// Whether they pass.
    pub allow: bool,
    /// What logs call it; `None`: it is not logged.
    pub log: Option<Arc<RuleName>>,
}

/// Which rule of the configuration a logged rule is. A rule that names alternatives is several here, of one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RuleName {
    /// Where it is.
    pub owner: RuleOwner,
    /// Which packets it is about, seen from the guest.
    pub direction: Direction,
    /// Its number in its list, from 1.
    pub number: u32,
}

/// Where a rule is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RuleOwner {
    /// In the security group of that name.
    Group(String),
    /// In the ACL of a network.
    Acl(Vni),
}

/// Bounds of the logs of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RuleLogSpec {
    /// Flows of which a port's log begins to tell, each second.
    pub records_per_s: u32,
    /// A rejected flow that goes on has a record after so long, and one of which nothing was heard for so long is another one afterwards, ns.
    pub interval_ns: u64,
}

/// A security group: conversations that may begin. What belongs to one that was allowed to begin passes, in both directions.
///
/// A port with groups lets in what a rule of any of them allows. It lets out everything, unless one of them has a rule about
/// that, or restricts it without one. A port without groups lets everything pass.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SecurityGroup {
    /// What it allows.
    pub rules: Vec<GroupRule>,
    /// Whether its ports' guests may begin only what a rule allows, even if no rule is about that.
    pub restricts_egress: bool,
}

impl SecurityGroup {
    /// With these rules, and what follows from them.
    pub fn new(rules: Vec<GroupRule>) -> Self {
        SecurityGroup { rules, restricts_egress: false }
    }
}

/// A rule of a security group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRule {
    /// Conversations that the guest begins, or others with it.
    pub direction: Direction,
    /// Of their first packet.
    pub pattern: Pattern,
    /// Who is at the other end.
    pub remote: Remote,
    /// What logs call it; `None`: it is not logged.
    pub log: Option<Arc<RuleName>>,
}

impl GroupRule {
    /// About anybody.
    pub fn new(direction: Direction, pattern: Pattern) -> Self {
        GroupRule { direction, pattern, remote: Remote::Anybody, log: None }
    }
}

/// The other end of conversations that a rule is about.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Remote {
    /// Anybody that the pattern allows.
    #[default]
    Anybody,
    /// One of a set of addresses.
    Set(AddressSetId),
    /// A vNIC of the same network that has the group: by its addresses, but for link-local ones.
    Group(GroupId),
}

/// Addresses of another host's vNIC that has a security group. Those of local vNICs are known from their ports.
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
    /// Its name.
    pub id: PortId,
    /// Its network.
    pub vni: Vni,
    /// Its MAC address.
    pub mac: Mac,
    /// Addresses that its guest may use, besides the IPv6 link-local one that follows from the MAC address.
    pub addresses: Vec<IpAddr>,
    /// Networks behind its guest, which routes: it may send from their addresses, and gets what is for them. Host bits are ignored; where
    /// two ports or routes have an address, it belongs to the one with the longer prefix.
    pub routed: Vec<IpNet>,
    /// Largest IP packet that its guest is given, bytes, 68 and more.
    pub mtu: u16,
    /// Its security groups.
    pub groups: Vec<GroupId>,
    /// The worker that alone serves it. `None`: all of the host's workers do, each of them the pairs of vNICs that
    /// [`worker_of_pair`](bifrost_nic::steer::worker_of_pair) gives it.
    pub home: Option<WorkerId>,
}

/// What the switch tells the guest behind a port that asks by DHCP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lease {
    /// The port.
    pub port: PortId,
    /// The guest's address.
    pub address: Ipv4Addr,
    /// Its subnet, 0 to 32 bits.
    pub prefix_len: u8,
    /// The network's gateway, which is the router and the DHCP server.
    pub gateway: Ipv4Addr,
    /// DNS servers, at most [`Lease::MAX_DNS`].
    pub dns: Vec<Ipv4Addr>,
    /// The domain in which it looks for names first, at most 253 characters.
    pub domain: Option<String>,
    /// Interface MTU, bytes.
    pub mtu: u16,
    /// How long the guest may use the address without asking again, s.
    pub seconds: u32,
}

impl Lease {
    /// DNS servers of a guest, at most.
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

/// What the switch tells the guest behind a port about IPv6: by router advertisements, asked for or not, and by DHCPv6. The router and
/// the server have the link-local address of the network's gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ipv6Lease {
    /// The port.
    pub port: PortId,
    /// The guest's addresses, each with the length of its subnet's prefix, 0 to 128 bits; at most [`Ipv6Lease::MAX_ADDRESSES`]. Without
    /// link-local ones: those a guest has by itself.
    pub addresses: Vec<(Ipv6Addr, u8)>,
    /// DNS servers, at most [`Lease::MAX_DNS`].
    pub dns: Vec<Ipv6Addr>,
    /// The domain in which names are searched.
    pub domain: Option<String>,
    /// Interface MTU, bytes.
    pub mtu: u16,
    /// How long the guest may use an address without asking again, s.
    pub seconds: u32,
    /// Time from one advertisement that nobody has asked for to the next, at most, 4 to 1800 s (RFC 4861, section 6.2.1).
    pub interval_s: u16,
}

impl Ipv6Lease {
    /// Addresses of a guest, at most.
    pub const MAX_ADDRESSES: usize = 8;

    /// How long a guest may rely on what an advertisement says, s: that of three intervals (RFC 4861, section 6.2.1).
    pub(crate) fn router_lifetime_s(&self) -> u16 {
        self.interval_s.saturating_mul(3)
    }

    /// The guest's addresses.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = Ipv6Addr> {
        self.addresses.iter().take(Self::MAX_ADDRESSES).map(|(address, _)| *address)
    }

    /// The subnets of these addresses, each once: prefix and length.
    pub(crate) fn subnets(&self) -> impl Iterator<Item = (Ipv6Addr, u8)> {
        let all = || self.addresses.iter().take(Self::MAX_ADDRESSES).map(|&(address, len)| subnet(address, len));
        all().enumerate().filter(move |(at, subnet)| !all().take(*at).any(|other| other == *subnet)).map(|(_, net)| net)
    }

    /// Whether an address is in one of these subnets.
    pub(crate) fn is_on_link(&self, address: Ipv6Addr) -> bool {
        self.subnets().any(|(prefix, len)| subnet(address, len).0 == prefix)
    }
}

/// The subnet of an address, whose host bits are zero, and the length of its prefix.
fn subnet(address: Ipv6Addr, len: u8) -> (Ipv6Addr, u8) {
    let len = len.min(128);
    let mask = u128::MAX.checked_shl(128 - u32::from(len)).unwrap_or(0);
    (Ipv6Addr::from_bits(address.to_bits() & mask), len)
}

/// An address that several vNICs share: one of them holds it at a time, on this host or another, as with VRRP
/// (RFC 9568). [`Switch::take_claims`](crate::Switch::take_claims) says which of them announces it. Guests reach it
/// through the gateway, which its network must have, so they need not learn when it moves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedAddress {
    /// The network.
    pub vni: Vni,
    /// The address. It belongs to no port, route, load balancer or gateway.
    pub address: IpAddr,
    /// The vNICs that may hold it, of ports and routes of that network. Each may send from the address.
    pub vnics: Vec<Mac>,
    /// The one of `vnics` that holds it, and receives what is sent to it. `None`: no vNIC does.
    pub holder: Option<Mac>,
}

/// The addresses of the metadata service, as in EC2. In networks with a port that has metadata they belong to the
/// gateway.
pub const METADATA: (Ipv4Addr, Ipv6Addr) =
    (Ipv4Addr::new(169, 254, 169, 254), Ipv6Addr::new(0xfd00, 0xec2, 0, 0, 0, 0, 0, 0x254));

/// Whether guests ask for metadata at an address.
pub(crate) fn is_metadata(address: IpAddr) -> bool {
    address == IpAddr::V4(METADATA.0) || address == IpAddr::V6(METADATA.1)
}

/// Names of a network's guests, which the switch tells guests of this host that ask its gateways by DNS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// The network; it has one zone at most.
    pub vni: Vni,
    /// The domain, such as `vpc1.internal`, of at most 253 characters; the switch knows all names in it.
    pub domain: String,
    /// Names without the domain, and addresses. A name may have several. What is not a name is left out.
    pub names: Vec<(String, IpAddr)>,
    /// Prefixes of which the switch knows all addresses that have names.
    pub subnets: Vec<IpNet>,
}

/// Where addresses of other hosts' vNICs are.
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
    /// Path MTU: the largest IP packet that gets there, bytes, 68 and more (Triton paper, section 5.2).
    pub mtu: u16,
}

/// How the routes of a network differ from those of a former configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RouteChanges {
    /// The network.
    pub vni: Vni,
    /// Prefixes and their new routes; `None`: there is none any more.
    pub routes: Vec<(IpNet, Option<Route>)>,
    /// The vNICs of all changed routes, before and after: the host of each one, and the smallest path MTU of all its
    /// routes, bytes; `None`: no route leads to it any more.
    pub vnics: Vec<(Mac, Option<(PeerId, u16)>)>,
}

/// A peering from a network to another one. Packets pass if there is a peering back as well: with their source's address, from that
/// network into this one. No packet goes through more than two networks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peering {
    /// The network.
    pub vni: Vni,
    /// Addresses of the other one; host bits are ignored.
    pub prefix: IpNet,
    /// The other network.
    pub to: Vni,
}

/// A load balancer inside a network: an address and port that stand for several backends. The host of a client changes the destination
/// of what it sends, and the source of the answers; the client's own address stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoadBalancer {
    /// The network of its clients and backends, which needs a gateway.
    pub vni: Vni,
    /// Where it listens. Nobody else has the address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// What it balances.
    pub protocol: Transport,
    /// What stays together.
    pub affinity: Affinity,
    /// Of the same family as `address`; at most [`MAX_BACKENDS`](bifrost_tables::Maglev::MAX_BACKENDS) with a weight get connections.
    pub backends: Vec<Backend>,
}

/// One of several places to which connections go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backend {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Its share of the connections that begin, relative to the others'. 0: it gets none, and keeps those that it has.
    pub weight: u16,
}

/// A protocol with ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP.
    Tcp,
    /// UDP.
    Udp,
}

impl Transport {
    /// The IP protocol's number.
    pub(crate) const fn number(self) -> u8 {
        match self {
            Transport::Tcp => TCP,
            Transport::Udp => UDP,
        }
    }
}

/// Uplinks to the outside, and NAT.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Nat {
    /// Ports behind which the outside is. Each is alone in its network.
    pub uplinks: Vec<PortId>,
    /// Addresses that guests share.
    pub sources: Vec<SourceNat>,
    /// Addresses of single guests.
    pub floating: Vec<FloatingIp>,
    /// Ports of shared addresses that are a guest's for good.
    pub forwards: Vec<PortForward>,
}

/// Addresses that the guests of a network share when they talk to the outside. What has no other route in that network goes there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceNat {
    /// The network.
    pub vni: Vni,
    /// The uplink, the same for all of the network.
    pub uplink: PortId,
    /// The addresses, of either family.
    pub addresses: Vec<IpAddr>,
    /// Of each address the first and the last port that this host gives out, so that hosts which share addresses need not agree on each.
    pub ports: (u16, u16),
    /// Ports that one guest gets at a time, at most, over all protocols.
    pub per_guest: u32,
}

/// An outside address of one guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FloatingIp {
    /// The guest's network.
    pub vni: Vni,
    /// The uplink.
    pub uplink: PortId,
    /// The address outside.
    pub outside: IpAddr,
    /// The guest's address, of the same family. While no port of this host has it, nothing gets through.
    pub inside: IpAddr,
}

/// A port of a shared outside address that leads to a guest.
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

/// What a load balancer keeps together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Affinity {
    /// The packets of a connection.
    #[default]
    Connection,
    /// All connections of a client's address, as long as the backends stay the same.
    Client,
}

/// A host's workers, seen from one of them; each has a switch of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Workers {
    /// The one whose switch it is.
    pub own: WorkerId,
    /// How many there are; 0 is 1.
    pub count: u16,
}

/// Which conversations are logged (Triton paper, section 2.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLogSpec {
    /// Conversations of these ports.
    pub ports: Vec<PortId>,
    /// Those whose packets pass.
    pub accepted: bool,
    /// Those whose packets are dropped.
    pub rejected: bool,
    /// Conversations that are counted at a time, at most; a port may have a quarter of them, or all if it is alone.
    pub flows: u32,
    /// Of a conversation that goes on there is a record after so long, ns.
    pub active_ns: u64,
    /// A conversation ends when nothing was heard of it for so long, ns.
    pub idle_ns: u64,
}

/// Everything a switch knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// Networks.
    pub vpcs: Vec<Vpc>,
    /// Local vNICs.
    pub ports: Vec<Port>,
    /// Remote vNICs.
    pub routes: Vec<Route>,
    /// Peerings with other networks.
    pub peerings: Vec<Peering>,
    /// Load balancers, each named by its place here.
    pub load_balancers: Vec<LoadBalancer>,
    /// Uplinks to the outside.
    pub nat: Nat,
    /// Addresses that vNICs share.
    pub shared: Vec<SharedAddress>,
    /// Ports whose guests may ask for metadata; their networks have gateways.
    pub metadata: Vec<PortId>,
    /// What guests are told that ask by DHCP; the others are not answered.
    pub leases: Vec<Lease>,
    /// What guests are told about IPv6; the others are not.
    pub ipv6_leases: Vec<Ipv6Lease>,
    /// What guests are told that ask by DNS; in other networks they are not answered.
    pub zones: Vec<Zone>,
    /// Security groups, each named by its place here.
    pub groups: Vec<SecurityGroup>,
    /// Who else has them, on other hosts.
    pub members: Vec<Member>,
    /// Sets of addresses for rules, each named by its place here; host bits are ignored.
    pub address_sets: Vec<Vec<IpNet>>,
    /// Bounds of what security groups remember.
    pub sessions: SessionLimits,
    /// Bounds of what is remembered about flows.
    pub flows: FlowLimits,
    /// Which conversations are logged.
    pub flow_log: Option<FlowLogSpec>,
    /// How rules are logged that have a name for logs; `None`: they are not.
    pub rule_log: Option<RuleLogSpec>,
    /// Who else has such a switch.
    pub workers: Workers,
    /// A deliberate mistake, for tests of tests.
    #[cfg(feature = "mutations")]
    pub mutation: Option<crate::Mutation>,
}

/// Why a switch cannot be built from some [`Tables`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// Two networks with one identifier.
    #[error("VNI {0} is described twice")]
    DuplicateVni(Vni),
    /// A port or route in a network that is not described.
    #[error("VNI {0} is used but not described")]
    UnknownVni(Vni),
    /// A peering of a network with itself.
    #[error("VNI {0} has a peering with itself")]
    PeeringWithItself(Vni),
    /// Two ports with one name.
    #[error("port number {} is described twice", .0.0)]
    DuplicatePort(PortId),
    /// A vNIC's MAC address that no station can have, or the gateway's.
    #[error("{0} cannot be the MAC address of a vNIC")]
    Mac(Mac),
    /// One MAC address at two places in a network.
    #[error("MAC address {mac} is at two places in VNI {vni}")]
    DuplicateMac {
        /// The network.
        vni: Vni,
        /// The address.
        mac: Mac,
    },
    /// One address or prefix at two places in a network, the gateway included.
    #[error("{prefix} is at two places in VNI {vni}")]
    DuplicatePrefix {
        /// The network.
        vni: Vni,
        /// The prefix.
        prefix: IpNet,
    },
    /// A shared address in a network without a gateway, described twice, the switch's own, or of a vNIC that is not in
    /// the network.
    #[error("{0} cannot be shared by these vNICs")]
    SharedAddress(IpAddr),
    /// A port with metadata does not exist, or its network has no gateway.
    #[error("port number {} has metadata, but does not exist or is in a network without a gateway", .0.0)]
    Metadata(PortId),
    /// A port has a security group that is not described.
    #[error("security group number {} is used but not described", .0.0)]
    UnknownGroup(GroupId),
    /// A rule is about a set of addresses that is not described.
    #[error("address set number {} is used but not described", .0.0)]
    UnknownSet(AddressSetId),
    /// Two load balancers at one place.
    #[error("two load balancers of VNI {vni} listen at {address} port {port}")]
    DuplicateLoadBalancer {
        /// The network.
        vni: Vni,
        /// The address.
        address: IpAddr,
        /// The port.
        port: u16,
    },
    /// A load balancer and its backend are of two families.
    #[error("{0} is of another family than the load balancer whose backend it is")]
    BackendFamily(IpAddr),
    /// A guest is to be told an address of one family by a port that does not exist, or twice.
    #[error("port number {} has two leases of one family, or does not exist", .0.0)]
    Lease(PortId),
    /// A port that is named as an uplink, and is none.
    #[error("port number {} is used as an uplink, but is none", .0.0)]
    UnknownUplink(PortId),
    /// An outside address or port of two owners, or of another family than its owner.
    #[error("the outside address {0}, or one of its ports, has two owners or one of another family")]
    OutsideAddress(IpAddr),
    /// An address that no vNIC or gateway can have.
    #[error("{0} cannot be the address of a vNIC or gateway")]
    Address(IpAddr),
}
