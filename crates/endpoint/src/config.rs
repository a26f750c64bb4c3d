//! Settings of a worker.

use std::net::IpAddr;
use std::time::Duration;

use bifrost_rdm::{Order, Service};
use bifrost_verbs::Choice;
use bifrost_wire::rdm::MAX_MESSAGE;

/// Settings of a worker.
#[derive(Clone, Copy, Debug)]
pub struct WorkerConfig {
    /// The address of its packets. An RDMA NIC is found by it.
    pub address: IpAddr,
    /// An RDMA NIC, software, or what suits.
    pub provider: Choice,
    /// The UDP port for RoCEv2: 4791, or another if several processes share the address; 0: any. Peers are told. An RDMA NIC
    /// has 4791, and so must its peers.
    pub port: u16,
    /// Who repeats what is lost.
    pub service: Service,
    /// Payload of a packet, bytes: 256, 512, 1024, 2048 or 4096. The way must take 86 bytes more over IPv6.
    pub mtu: u16,
    /// In which order messages are delivered.
    pub order: Order,
    /// The longest WRITE of a piece of a long message, bytes: 4096 to 65,536. The kernel's soft-RoCE wants 4096 and an MTU of 4096 if
    /// it receives by UC ([`bifrost_verbs::RdmaCore::is_soft_roce`]).
    pub chunk: u32,
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
