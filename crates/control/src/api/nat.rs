//! NAT.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// One address outside, or one port of it: an element of `GET /v1/nat`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NatStatus {
    /// What kind of translation.
    pub kind: NatKind,
    /// Name of the uplink's port.
    pub uplink: String,
    /// The VPC of the guests.
    pub vni: u32,
    /// The address outside.
    pub address: IpAddr,
    /// Of a forward: `tcp` or `udp`.
    #[serde(default)]
    pub protocol: Option<String>,
    /// Of a forward: the port outside.
    #[serde(default)]
    pub port: Option<u16>,
    /// The guest's address, if it is one guest's.
    #[serde(default)]
    pub inside: Option<IpAddr>,
    /// Of a forward: the guest's port.
    #[serde(default)]
    pub inside_port: Option<u16>,
    /// Whether a port of this host has the guest's address; always, if guests share the outside one.
    pub here: bool,
    /// Of a shared address: the first and the last port that this host gives out.
    #[serde(default)]
    pub ports: Option<(u16, u16)>,
    /// Of a shared address: ports in use.
    #[serde(default)]
    pub tcp_ports: u32,
    /// The same of UDP.
    #[serde(default)]
    pub udp_ports: u32,
    /// Identifiers of echo requests in use.
    #[serde(default)]
    pub echo_identifiers: u32,
}

/// Kinds of translation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NatKind {
    /// Guests share the address.
    Shared,
    /// It is one guest's alone.
    Floating,
    /// A port of it leads to a guest.
    Forward,
    /// One of a newer release.
    #[default]
    #[serde(other)]
    Unknown,
}

impl NatKind {
    /// In a word.
    pub const fn name(self) -> &'static str {
        match self {
            NatKind::Shared => "shared",
            NatKind::Floating => "floating",
            NatKind::Forward => "forward",
            NatKind::Unknown => "unknown",
        }
    }
}
