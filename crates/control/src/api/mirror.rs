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
    /// Who gets the copies.
    pub target: SocketAddr,
    /// In this VNI.
    pub target_vni: u32,
    /// One packet of so many is copied.
    pub one_in: u32,
    /// Bytes of a packet that are copied.
    pub truncate_bytes: u32,
    /// Copies that were sent.
    pub sent_packets: u64,
    /// Copies that found no room between worker and sender.
    pub missed_packets: u64,
    /// Copies that could not be sent.
    pub unsent_packets: u64,
}
