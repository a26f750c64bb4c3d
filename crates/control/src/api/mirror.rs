//! Mirrors.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// One mirror: an element of `GET /v1/mirrors`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MirrorStatus {
    /// Its name.
    pub name: String,
    /// The ports whose packets are copied.
    pub ports: Vec<String>,
    /// `both`, `egress` or `ingress`.
    pub direction: String,
    /// The VXLAN endpoint that receives the copies.
    pub target: SocketAddr,
    /// The VNI of the copies.
    pub target_vni: u32,
    /// Sampling: one of `one_in` packets is copied.
    pub one_in: u32,
    /// Longest copy of a packet, bytes.
    pub truncate_bytes: u32,
    /// Copies sent.
    pub sent_packets: u64,
    /// Copies dropped because the queue between worker and sending thread was full.
    pub missed_packets: u64,
    /// Copies that could not be sent.
    pub unsent_packets: u64,
}
