//! Settings of a worker.

use std::net::IpAddr;
use std::time::Duration;

use bifrost_rdm::{Order, Service};
use bifrost_wire::rdm::MAX_MESSAGE;

/// Settings of a worker.
#[derive(Clone, Copy, Debug)]
pub struct WorkerConfig {
    /// The address of its packets.
    pub address: IpAddr,
    /// The UDP port for RoCEv2: 4791, or another if several processes share the address; 0: any. Peers are told.
    pub port: u16,
    /// Who repeats what is lost.
    pub service: Service,
    /// Payload of a packet, bytes: 256, 512, 1024, 2048 or 4096. The way must take 86 bytes more over IPv6.
    pub mtu: u16,
    /// In which order messages are delivered.
    pub order: Order,
    /// Messages that are taken ahead of the application, 1..=1024.
    pub window: u16,
    /// The longest message that is taken, bytes, up to 256 MiB.
    pub longest: u32,
    /// Queueing that congestion control aims at. Hosts in software add hundreds of microseconds by themselves.
    pub queue: Duration,
    /// Added to the time within which an answer is expected.
    pub patience: Duration,
    /// For how long to look for packets before sleeping.
    pub spin: Duration,
    /// Connections, at most.
    pub connections: u32,
}

impl WorkerConfig {
    /// Settings for a host without an RDMA NIC.
    #[must_use]
    pub const fn new(address: IpAddr) -> Self {
        Self {
            address,
            port: bifrost_wire::roce::UDP_PORT,
            service: Service::Uc,
            mtu: 1024,
            order: Order::Sent,
            window: 256,
            longest: MAX_MESSAGE,
            queue: Duration::from_micros(500),
            patience: Duration::from_micros(500),
            spin: Duration::from_micros(30),
            connections: 256,
        }
    }
}
