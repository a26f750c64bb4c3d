//! What load balancers, uplinks, NAT, route tables, mirrors and flow logs say.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use bifrost_wire::Mac;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// What hosts call the port of their uplink; no object of a project has a name without a dot there.
pub const UPLINK: &str = "fleet-uplink";
/// The most backends of a load balancer.
pub const MAX_BACKENDS: usize = 256;
/// The most routes of a table.
pub const MAX_ROUTES: usize = 256;
/// The most guests of a mirror.
pub const MAX_MIRRORED: usize = 256;
/// The most guests of a flow log.
pub const MAX_LOGGED: usize = 256;
/// The most conversations that a worker of a host counts for a flow log.
pub const MAX_FLOWS: u64 = 16_384;
/// The largest file of a flow log on a host, MB; a second one holds older records.
pub const MAX_JSON_MB: u64 = 1000;
/// The most addresses of a NAT gateway.
pub const MAX_POOL: usize = 256;

/// An address and port of a VPC in front of several guests of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadBalancerSpec {
    /// The subnet that its address is of. It does not change.
    pub subnet: String,
    /// The address that clients connect to. Absent: a free one of the subnet. It does not change
    /// unless it is named. Load balancers may share it, each with a port of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// Where connections go, 1 to [`MAX_BACKENDS`].
    pub backends: Vec<BackendSpec>,
    /// All other keys of `[[load_balancer]]`: `port`, `protocol`, `affinity`, and `check` without `from`.
    #[serde(flatten)]
    pub settings: Map<String, Value>,
}

/// Where connections go: a guest of the VPC, or an address.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BackendSpec {
    /// The name of a port of the project: its first address of the load balancer's family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
    /// An address, in place of that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// The port to connect to. Absent: the load balancer's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// Its share of new connections, 0 to 1000. Absent: 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub weight: Option<u16>,
}

impl LoadBalancerSpec {
    /// What tells it from others of its address: protocol and port, as far as they are named.
    pub(crate) fn listener(&self) -> (&str, u64) {
        let protocol = self.settings.get("protocol").and_then(Value::as_str).unwrap_or("tcp");
        (protocol, self.settings.get("port").and_then(Value::as_u64).unwrap_or(0))
    }
}

/// A host's port to the outside: an interface whose kernel routes between it and the physical network.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct UplinkSpec {
    /// Addresses of the interface, with their prefixes.
    pub addresses: Vec<IpNet>,
    /// The network identifier that stands for the outside on this host; no packet between hosts has
    /// it. Absent: 4,095. No VPC has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vni: Option<u32>,
    /// The MAC address of the interface. Absent: one that follows from the host's first address.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "super::mac_text")]
    pub mac: Option<Mac>,
    /// Other keys of `[[port]]`: `device`, `netns`, `mtu`, `default_gateway`.
    #[serde(flatten)]
    pub settings: Map<String, Value>,
}

/// How the guests of a VPC reach the outside. Each host with a port of the VPC and an uplink has a
/// block of ports of one address.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NatGatewaySpec {
    /// The VPC's name. It has one gateway, and does not change.
    pub vpc: String,
    /// The addresses that guests have outside, 1 to [`MAX_POOL`] of one family. Nothing else has them.
    pub addresses: Vec<IpAddr>,
    /// How many ports of an address a host gets, 64 to 64,512. Absent: all, from 1,024 on, so that
    /// each host has an address of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports_per_host: Option<u32>,
    /// The most ports that one guest has at a time. Absent: half of its host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ports_per_guest: Option<u32>,
    /// Which host has which ports. It is filled in: a host that gets its first port of the VPC gets
    /// the first free block, and keeps it until the gateway is changed, or others need it, while
    /// the host has no such port.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub blocks: BTreeMap<String, Block>,
}

/// The ports that a host uses of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Block {
    /// The address.
    pub address: IpAddr,
    /// The first and the last port.
    pub ports: [u16; 2],
}

/// An outside address of one guest.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FloatingIpSpec {
    /// The name of a port of the project. Its host has to have an uplink.
    pub guest: String,
    /// The address outside. Absent: the first free one of `pool`. It does not change unless it is named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address: Option<IpAddr>,
    /// An address set of the project, from which the address is taken if it is not named.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pool: Option<String>,
    /// Which of the guest's addresses. Absent: the first of the family.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub inside: Option<IpAddr>,
}

/// Ways of a VPC to networks behind its guests, beside what ports say themselves (`routed`).
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteTableSpec {
    /// The VPC's name. It may have several tables, and does not change.
    pub vpc: String,
    /// At most [`MAX_ROUTES`]. The longest prefix counts, of all tables and ports; each is there once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub routes: Vec<RouteToSpec>,
}

/// A network behind a guest.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteToSpec {
    /// Which addresses; no host bits are set.
    pub prefix: IpNet,
    /// The name of a port of the VPC. Its guest routes.
    pub guest: String,
}

/// Copies of the packets of a VPC, or of some guests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct MirrorSpec {
    /// The VPC's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vpc: Option<String>,
    /// In place of that, names of ports of the project, at most [`MAX_MIRRORED`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guests: Vec<String>,
    /// All other keys of `[[mirror]]`: `target`, `target_vni`, `direction`, `protocol`, `prefixes`,
    /// `l4_ports`, `one_in`, `truncate`.
    #[serde(flatten)]
    pub settings: Map<String, Value>,
}

/// Records of the conversations of a VPC, or of some guests.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct FlowLogSpec {
    /// The VPC's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vpc: Option<String>,
    /// In place of that, names of ports of the project, at most [`MAX_LOGGED`].
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub guests: Vec<String>,
    /// Whether each host writes records to a file of its own, `/var/log/bifrost/PROJECT.NAME.jsonl`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub json: bool,
    /// All other keys of `[[vpc_flow_log]]`: `collector`, `record`, `one_in`, `active_timeout_s`, `idle_timeout_s`,
    /// `json_mb` (at most [`MAX_JSON_MB`]), `flows` (at most [`MAX_FLOWS`]), `template_interval_s`, `domain`, `enterprise`.
    #[serde(flatten)]
    pub settings: Map<String, Value>,
}

impl UplinkSpec {
    const VNI: u32 = 4095;

    pub(crate) fn vni(&self) -> u32 {
        self.vni.unwrap_or(UplinkSpec::VNI)
    }

    /// The interface, as ports have it.
    pub(crate) fn attachment(&self) -> Option<String> {
        super::interface(&self.settings, Some(UPLINK))
    }
}

impl NatGatewaySpec {
    /// The first port that hosts get (RFC 4787, REQ-3: not a well-known one).
    const FIRST_PORT: u32 = 1024;
    /// How many ports of an address hosts get.
    pub(crate) const PORTS: u32 = 0x1_0000 - NatGatewaySpec::FIRST_PORT;

    /// All blocks that hosts can have, in order.
    pub(crate) fn all_blocks(&self) -> impl Iterator<Item = Block> {
        let size = self.ports_per_host.unwrap_or(NatGatewaySpec::PORTS).clamp(1, NatGatewaySpec::PORTS);
        self.addresses.iter().flat_map(move |address| {
            (0..NatGatewaySpec::PORTS / size).map(move |n| {
                let first = NatGatewaySpec::FIRST_PORT + n * size;
                // At most 65,535.
                Block { address: *address, ports: [first as u16, (first + size - 1) as u16] }
            })
        })
    }

    /// What it is the way to.
    pub(crate) fn default_route(&self) -> Option<IpNet> {
        let whole = match self.addresses.first()? {
            IpAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            IpAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        IpNet::new(whole, 0).ok()
    }

    /// Whether a block is one of them.
    pub(crate) fn has_block(&self, block: &Block) -> bool {
        self.addresses.contains(&block.address) && {
            let size = self.ports_per_host.unwrap_or(NatGatewaySpec::PORTS).clamp(1, NatGatewaySpec::PORTS);
            let [first, last] = block.ports.map(u32::from);
            first >= NatGatewaySpec::FIRST_PORT
                && (first - NatGatewaySpec::FIRST_PORT).is_multiple_of(size)
                && last == first + size - 1
        }
    }
}
