//! Settings.

use bifrost_plb as plb;
use bifrost_tables::{LimiterConfig, Rate};
use bifrost_wire::Mac;
use thiserror::Error;

use crate::{ReliableConfig, ReliableError, Rules};

/// Settings of a [`Pod`](crate::Pod).
#[derive(Clone, Debug)]
pub struct PodConfig {
    /// Its name, in counters and errors.
    pub name: String,
    /// Dispatch and order queues. [`payload_slots`](plb::Config::payload_slots) is for packets that are delivered as headers only.
    pub balancer: plb::Config,
    /// Its interfaces, 1 to 4: the VLAN of each, or `None` for frames without a tag.
    pub interfaces: Vec<Option<u16>>,
    /// Its MAC address. Pods with one share VLANs: frames find them by their destination, and leave them only with this source.
    /// `None`: all frames of its VLANs are the pod's.
    pub mac: Option<Mac>,
    /// The class of each packet.
    pub rules: Rules,
    /// What tenants may send, in packets.
    pub limiter: LimiterConfig,
    /// Control packets over the priority rings.
    pub control: Rate,
    /// Smallest payload, bytes, of packets that are delivered as headers only; `None`: no packet is.
    pub header_only_from: Option<u16>,
    /// The reliable transport with hosts, if it is spoken.
    pub reliable: Option<ReliableConfig>,
}

/// Settings of a [`Pipeline`](crate::Pipeline).
#[derive(Clone, Debug)]
pub struct PipelineConfig {
    /// The pods.
    pub pods: Vec<PodConfig>,
    /// Bytes of the longest frame.
    pub longest: usize,
    /// Secret: tenants that know it could choose flows that share an order queue, or a core.
    pub seed: u64,
}

/// Settings that do not fit together.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// Of the balancer.
    #[error("pod {0}: {1}")]
    Balancer(String, plb::ConfigError),
    /// None, or too many.
    #[error("pod {0}: {1} interfaces; a pod has 1 to 4")]
    Interfaces(String, usize),
    /// Two interfaces have it.
    #[error("pod {pod}: {}: another interface has it, too; pods share a VLAN if each has a mac", text(*.vlan))]
    Vlan {
        /// The second one's pod.
        pod: String,
        /// The VLAN.
        vlan: Option<u16>,
    },
    /// Two pods of a VLAN have it.
    #[error("pod {pod}: {mac}: another pod has this MAC address, too")]
    Mac {
        /// The second one.
        pod: String,
        /// The address.
        mac: Mac,
    },
    /// Of a group, or zero.
    #[error("pod {0}: {1} is not the address of one station")]
    NoStation(String, Mac),
    /// Beyond 12 bits.
    #[error("pod {0}: VLAN {1}; VLANs are 1 to 4094")]
    NoVlan(String, u16),
    /// Two pods have it.
    #[error("pod {0}: number {1} is another pod's, too")]
    Number(String, u16),
    /// Headers only without payload slots.
    #[error("pod {0}: headers only, but no payload slots")]
    PayloadSlots(String),
    /// Of the transport.
    #[error("pod {0}: {1}")]
    Reliable(String, ReliableError),
}

fn text(vlan: Option<u16>) -> String {
    vlan.map_or_else(|| "untagged".to_owned(), |vlan| format!("VLAN {vlan}"))
}
