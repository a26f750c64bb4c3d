//! What load balancers say.

use std::net::IpAddr;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// The most backends of a load balancer.
pub const MAX_BACKENDS: usize = 256;

/// An address and port of a VPC in front of several guests of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadBalancerSpec {
    /// The subnet that its address is of. It does not change.
    pub subnet: String,
    /// The address that clients connect to. Absent: a free one of the subnet. It does not change unless it is named. Load balancers may
    /// share it, each with a port of its own.
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
