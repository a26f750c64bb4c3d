//! NAT.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// An outside address, or a port of one: an element of `GET /v1/nat`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NatStatus {
    /// The kind of translation.
    pub kind: NatKind,
    /// Name of the uplink's port.
    pub uplink: String,
    /// The VPC of the guests.
    pub vni: u32,
    /// The outside address.
    pub address: IpAddr,
    /// For a forward: `tcp` or `udp`.
    #[serde(default)]
    pub protocol: Option<String>,
    /// For a forward: the outside port.
    #[serde(default)]
    pub port: Option<u16>,
    /// The guest's address, unless guests share the outside one.
    #[serde(default)]
    pub inside: Option<IpAddr>,
    /// For a forward: the guest's port.
    #[serde(default)]
    pub inside_port: Option<u16>,
    /// Whether a port of this host has the guest's address; true if guests share the outside one.
    pub here: bool,
    /// For a shared address: the first and the last port that this host allocates.
    #[serde(default)]
    pub ports: Option<(u16, u16)>,
    /// For a shared address: TCP ports in use.
    #[serde(default)]
    pub tcp_ports: u32,
    /// For a shared address: UDP ports in use.
    #[serde(default)]
    pub udp_ports: u32,
    /// For a shared address: ICMP echo identifiers in use.
    #[serde(default)]
    pub echo_identifiers: u32,
}

/// Kinds of translation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NatKind {
    /// Guests share the address.
    Shared,
    /// The address belongs to one guest.
    Floating,
    /// A port of the address is forwarded to a guest.
    Forward,
    /// A kind of a newer release.
    #[default]
    #[serde(other)]
    Unknown,
}

impl NatKind {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            NatKind::Shared => "shared",
            NatKind::Floating => "floating",
            NatKind::Forward => "forward",
            NatKind::Unknown => "unknown",
        }
    }
}
