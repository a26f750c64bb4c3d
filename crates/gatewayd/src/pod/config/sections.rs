//! The sections of the configuration file, unchecked.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use ipnet::IpNet;
use serde::Deserialize;
use toml::Spanned;

use super::{Tests, bgp, links};

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct File {
    pub(super) control: Control,
    pub(super) gateway: Gateway,
    #[serde(default)]
    pub(super) tests: Tests,
    #[serde(default)]
    pub(super) vpcs: Vec<VpcSection>,
    #[serde(default)]
    pub(super) tunnels: Vec<TunnelSection>,
    #[serde(default)]
    pub(super) services: Vec<ServiceSection>,
    #[serde(default)]
    pub(super) pools: Vec<Pool>,
    #[serde(default)]
    pub(super) internet: Vec<InternetRoute>,
    pub(super) bgp: Option<bgp::Section>,
    #[serde(default)]
    pub(super) links: Vec<Spanned<links::Section>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Control {
    pub(super) socket: Spanned<PathBuf>,
    pub(super) metrics: Option<SocketAddr>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Gateway {
    pub(super) pod: u16,
    pub(super) cores: Spanned<u16>,
    #[serde(default)]
    pub(super) processors: Vec<usize>,
    #[serde(default = "default_spin")]
    pub(super) spin_us: u64,
    pub(super) interfaces: Option<Spanned<Vec<Spanned<PathBuf>>>>,
    pub(super) addresses: Spanned<Vec<IpAddr>>,
    pub(super) link_addresses: Option<Spanned<Vec<IpAddr>>>,
    pub(super) mac: Spanned<String>,
    /// The MAC address in VPCs; by default `mac`.
    pub(super) vpc_mac: Option<Spanned<String>>,
    #[serde(default = "default_mtu")]
    pub(super) mtu: Spanned<u16>,
    pub(super) on_link: Option<Spanned<Vec<IpNet>>>,
    pub(super) router: Option<Spanned<IpAddr>>,
    pub(super) sessions: Option<Spanned<u32>>,
    /// An option of older versions, which is an error now: the number of sessions per core.
    pub(super) sessions_per_core: Option<Spanned<u32>>,
    #[serde(default = "default_ring_entries")]
    pub(super) ring_entries: Spanned<u16>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct VpcSection {
    pub(super) vni: Spanned<u32>,
    #[serde(default)]
    pub(super) routers: Vec<IpAddr>,
    pub(super) snat: Option<Spanned<String>>,
    pub(super) internet_bytes_per_second: Option<u64>,
    #[serde(default)]
    pub(super) routes: Vec<RouteSection>,
    #[serde(default)]
    pub(super) hosts: Vec<HostSection>,
    #[serde(default)]
    pub(super) eips: Vec<EipSection>,
    pub(super) acl: Option<Vec<AclRule>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RouteSection {
    pub(super) prefix: Spanned<IpNet>,
    pub(super) to: Spanned<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct HostSection {
    pub(super) address: IpAddr,
    pub(super) mac: Spanned<String>,
    pub(super) vtep: IpAddr,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EipSection {
    pub(super) private: IpAddr,
    pub(super) public: Spanned<IpAddr>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AclRule {
    pub(super) from: Option<IpNet>,
    pub(super) to: Option<IpNet>,
    pub(super) protocol: Option<u8>,
    pub(super) from_port: Option<u16>,
    pub(super) to_port: Option<u16>,
    pub(super) allow: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TunnelSection {
    pub(super) name: Spanned<String>,
    pub(super) vni: u32,
    pub(super) remote: IpAddr,
    pub(super) kind: TunnelName,
    pub(super) remote_vni: Option<u32>,
    pub(super) remote_mac: Option<Spanned<String>>,
    pub(super) key: Option<u32>,
    pub(super) keepalive: Option<Spanned<KeepaliveSection>>,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KeepaliveSection {
    pub(super) interval_s: u16,
    #[serde(default = "default_retries")]
    pub(super) retries: u8,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub(super) enum TunnelName {
    Vxlan,
    Gre,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ServiceSection {
    pub(super) vni: u32,
    pub(super) address: IpAddr,
    pub(super) protocol: Spanned<u8>,
    pub(super) port: u16,
    pub(super) backend_vni: u32,
    pub(super) pool: Spanned<String>,
    pub(super) backends: Spanned<Vec<SocketAddr>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Pool {
    pub(super) name: Spanned<String>,
    /// Default: the Internet.
    pub(super) vni: Option<u32>,
    pub(super) addresses: Spanned<Vec<IpAddr>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct InternetRoute {
    pub(super) prefix: Spanned<IpNet>,
    pub(super) next_hop: IpAddr,
}

fn default_mtu() -> Spanned<u16> {
    Spanned::new(0..0, 1600)
}

fn default_spin() -> u64 {
    20
}

fn default_retries() -> u8 {
    3
}

fn default_ring_entries() -> Spanned<u16> {
    Spanned::new(0..0, 1024)
}
