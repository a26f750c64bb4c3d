//! Models around the gateway's real components: cores of a pod in virtual time, and caches.

pub(super) mod cache;
pub(super) mod load;
pub(super) mod pod;

/// One of the paper's services.
pub(super) struct Service {
    /// Its name there.
    pub(super) name: &'static str,
    /// Rate of 88 data cores, packets per second (Albatross, SIGCOMM'25, table 3).
    pub(super) paper_pps: f64,
}

/// Data cores of the paper's server.
const PAPER_CORES: f64 = 88.0;

impl Service {
    /// Mean processing time per packet, ns.
    pub(super) fn mean_ns(&self) -> f64 {
        1e9 * PAPER_CORES / self.paper_pps
    }
}

/// Table 3 of the paper.
pub(super) const SERVICES: [Service; 4] = [
    Service { name: "VPC-VPC", paper_pps: 128.8e6 },
    Service { name: "VPC-Internet", paper_pps: 81.6e6 },
    Service { name: "VPC-IDC", paper_pps: 119.4e6 },
    Service { name: "VPC-CloudService", paper_pps: 126.3e6 },
];

/// Order queues of a pod: 1 to 8, in proportion to its cores (Albatross, 4.1).
pub(super) fn order_queues(cores: u16) -> u8 {
    cores.div_ceil(6).clamp(1, 8) as u8
}
