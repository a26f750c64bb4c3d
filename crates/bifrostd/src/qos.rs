//! What ports' guests get of the links, translated for the data path.

use std::net::IpAddr;

use bifrost_control::Config;
use bifrost_control::config;
use bifrost_datapath::{Guarantee, Limits, LinkRate, Marking, Rate, Weight};

/// The outer DSCP of packets from a port's guest.
pub(crate) fn marking(dscp: config::Dscp) -> Marking {
    match dscp {
        config::Dscp::Fixed(dscp) => Marking::Fixed(dscp),
        config::Dscp::Copied => Marking::Copied,
    }
}

/// What a port's guest gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortQos {
    pub(crate) limits: config::PortLimits,
    pub(crate) dscp: config::Dscp,
    /// The weights of its VPC and of the port.
    pub(crate) weights: [Weight; 2],
    pub(crate) min_tx_mbit: Option<u64>,
    pub(crate) rx_queue_kb: Option<u32>,
}

impl PortQos {
    pub(crate) fn of(config: &Config, port: &config::Port) -> PortQos {
        let vpc = config.vpc(port.vni).map_or(1, |vpc| vpc.weight);
        let weights = [vpc, port.weight].map(Weight::new);
        let &config::Port { limits, dscp, min_tx_mbit, rx_queue_kb, .. } = port;
        PortQos { limits, dscp, weights, min_tx_mbit, rx_queue_kb }
    }

    /// The least that the guest may send on a full link.
    pub(crate) fn guarantee(&self) -> Option<Guarantee> {
        self.min_tx_mbit.map(|mbit| Guarantee::new(mbit * BYTES_PER_MBIT))
    }
}

/// Bytes in a megabit.
const BYTES_PER_MBIT: u64 = 1_000_000 / 8;

/// The rate to other hosts.
pub(crate) fn link_rate(config: &Config) -> Option<LinkRate> {
    let queue_ns = u64::try_from(config.qos.queue.as_nanos()).unwrap_or(u64::MAX);
    let v6 = config.underlay.addresses.iter().any(IpAddr::is_ipv6);
    config.qos.link_mbit.map(|mbit| LinkRate::new(mbit * BYTES_PER_MBIT, queue_ns, v6))
}

/// The rate limits of a port.
pub(crate) fn limits(limits: &config::PortLimits) -> Limits {
    let rate = |mbit: Option<u64>, kpps: Option<u64>| Rate {
        bytes: mbit.map(|mbit| mbit * BYTES_PER_MBIT),
        packets: kpps.map(|kpps| kpps * 1000),
    };
    Limits::new(rate(limits.tx_mbit, limits.tx_kpps), rate(limits.rx_mbit, limits.rx_kpps))
}
