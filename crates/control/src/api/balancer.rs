//! Load balancers.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};

/// One load balancer: an element of `GET /v1/load-balancers`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LoadBalancerStatus {
    /// Its name.
    pub name: String,
    /// The VPC.
    pub vni: u32,
    /// The address that clients connect to.
    pub address: IpAddr,
    /// The port that clients connect to.
    pub port: u16,
    /// `tcp` or `udp`.
    pub protocol: String,
    /// `connection` or `client`: which packets go to the same backend.
    pub affinity: String,
    /// Its backends.
    pub backends: Vec<BackendStatus>,
}

/// One backend of a load balancer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackendStatus {
    /// Its address.
    pub address: IpAddr,
    /// Its port.
    pub port: u16,
    /// Its share of new connections, relative to the others'.
    pub weight: u16,
    /// Whether it takes new connections.
    pub health: BackendHealth,
}

/// Whether a backend takes new connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum BackendHealth {
    /// Without a health check: it takes new connections.
    Unchecked,
    /// Healthy.
    Up,
    /// Its health check fails: it keeps its connections and gets no others.
    Down,
    /// Its weight is 0: it keeps its connections and gets no others.
    Draining,
    /// A state of a newer release.
    #[default]
    #[serde(other)]
    Unknown,
}

impl BackendHealth {
    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            BackendHealth::Unchecked => "unchecked",
            BackendHealth::Up => "up",
            BackendHealth::Down => "down",
            BackendHealth::Draining => "draining",
            BackendHealth::Unknown => "unknown",
        }
    }
}
