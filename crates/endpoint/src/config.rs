//! Settings of a worker.

use std::net::IpAddr;
use std::time::Duration;

use bifrost_rdm::{Order, Service};
use bifrost_verbs::Choice;
use bifrost_wire::rdm::MAX_MESSAGE;

/// Settings of a worker.
#[derive(Clone, Copy, Debug)]
pub struct WorkerConfig {
    /// The worker's address. It also selects the RDMA NIC.
    pub address: IpAddr,
    /// An RDMA NIC, the software NIC, or whichever is available.
    pub provider: Choice,
    /// The UDP port for RoCEv2: 4791, or another one if several processes share the address; 0: any. Peers learn it at
    /// setup. An RDMA NIC requires 4791, at both ends.
    pub port: u16,
    /// Whether this library or the NIC retransmits.
    pub service: Service,
    /// Payload of a packet, bytes: 256, 512, 1024, 2048 or 4096. Over IPv6 the path MTU must be 86 bytes larger.
    pub mtu: u16,
    /// The order in which messages are delivered.
    pub order: Order,
    /// The longest WRITE of a chunk of a long message, bytes: 4096 to 65,536. The kernel's soft-RoCE requires 4096 and
    /// an MTU of 4096 to receive with UC ([`bifrost_verbs::RdmaCore::is_soft_roce`]).
    pub chunk: u32,
    /// Messages accepted before the application reads them, 1..=1024.
    pub window: u16,
    /// The longest message accepted, bytes, up to 256 MiB.
    pub longest: u32,
    /// Target queueing delay of congestion control. Software NICs alone add hundreds of microseconds.
    pub queue: Duration,
    /// Added to the time within which a response is expected.
    pub patience: Duration,
    /// How long to poll for packets before sleeping.
    pub spin: Duration,
    /// Maximum number of connections.
    pub connections: u32,
}

impl WorkerConfig {
    /// Settings for a host with or without an RDMA NIC.
    #[must_use]
    pub const fn new(address: IpAddr) -> Self {
        Self {
            address,
            provider: Choice::Auto,
            port: bifrost_wire::roce::UDP_PORT,
            service: Service::Uc,
            mtu: 1024,
            order: Order::Sent,
            chunk: 64 * 1024,
            window: 256,
            longest: MAX_MESSAGE,
            queue: Duration::from_micros(500),
            patience: Duration::from_micros(500),
            spin: Duration::from_micros(30),
            connections: 256,
        }
    }
}
