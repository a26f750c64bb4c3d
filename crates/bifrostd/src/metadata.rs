//! The metadata service of this host's guests (`[port.metadata]`): workers pass guests' packets for it to this thread,
//! which answers them.
//!
//! `bifrost-metadata` implements HTTP and TCP. A guest is identified by the port from which its frames come. The queue
//! from the workers is bounded, and they never wait for this thread.

pub(crate) mod service;

use std::time::Duration;

use bifrost_control::config::{Config, Port};
use bifrost_metadata::Documents;
use bifrost_port::clock;

/// Most frames that wait for this thread.
const QUEUE: usize = 1024;
/// Most frames that are processed before the answers leave.
const BATCH: usize = 64;
/// Pause after a panic, which may recur.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// Longest sleep.
const LONGEST_MS: u64 = 10_000;

fn now_ms() -> u64 {
    clock::monotonic_ns() / 1_000_000
}

/// The metadata of a port's guest.
fn documents(port: &Port, domain: Option<&str>) -> Documents {
    let Some(metadata) = &port.metadata else { return Documents::default() };
    let name = &metadata.hostname;
    Documents {
        instance_id: metadata.instance_id.clone(),
        hostname: domain.map_or(name.clone(), |domain| format!("{name}.{domain}")),
        mac: port.mac.to_string(),
        addresses: port.addresses.iter().map(|net| net.addr()).collect(),
        mtu: port.mtu,
        public_keys: metadata.public_keys.clone(),
        user_data: metadata.user_data.clone().map(String::into_bytes),
    }
}

/// The ports whose guests have metadata.
pub(crate) fn ports(config: &Config) -> impl Iterator<Item = &Port> {
    config.ports.iter().filter(|port| port.metadata.is_some())
}
