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
    /// Dispatch and order queues. [`payload_slots`](plb::Config::payload_slots) is for header-only packets.
    pub balancer: plb::Config,
    /// Its interfaces, 1 to 4: the VLAN of each, or `None` for frames without a tag.
    pub interfaces: Vec<Option<u16>>,
    /// Its MAC address. Pods with one share VLANs: frames reach them by destination address, and leave them only with
    /// this source address. `None`: the pod gets all frames of its VLANs.
    pub mac: Option<Mac>,
    /// Rules for the class of each packet.
    pub rules: Rules,
    /// Rate limits of tenants, in packets.
    pub limiter: LimiterConfig,
    /// Rate limit of control packets for the priority rings.
    pub control: Rate,
    /// Minimum payload, bytes, for header-only delivery; `None`: packets are always delivered whole.
    pub header_only_from: Option<u16>,
    /// The reliable transport with hosts, if used.
    pub reliable: Option<ReliableConfig>,
}

/// Settings of a [`Pipeline`](crate::Pipeline).
#[derive(Clone, Debug)]
pub struct PipelineConfig {
    /// The pods.
    pub pods: Vec<PodConfig>,
    /// Maximum length of a frame, bytes.
    pub longest: usize,
    /// Secret seed: tenants that know it could choose flows that share an order queue, or a core.
    pub seed: u64,
}

/// Invalid settings.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// The balancer's settings are invalid.
    #[error("pod {0}: {1}")]
    Balancer(String, plb::ConfigError),
    /// No interfaces, or too many.
    #[error("pod {0}: {1} interfaces; a pod has 1 to 4")]
    Interfaces(String, usize),
    /// Two interfaces have the same VLAN.
    #[error("pod {pod}: {}: another interface has it, too; pods share a VLAN if each has a mac", text(*.vlan))]
    Vlan {
        /// The second one's pod.
        pod: String,
        /// The VLAN.
        vlan: Option<u16>,
    },
    /// Two pods of a VLAN have the same MAC address.
    #[error("pod {pod}: {mac}: another pod has this MAC address, too")]
    Mac {
        /// The second pod.
        pod: String,
        /// The address.
        mac: Mac,
    },
    /// Multicast, or zero.
    #[error("pod {0}: {1} is not a unicast MAC address")]
    NoStation(String, Mac),
    /// Out of range.
    #[error("pod {0}: VLAN {1}; VLANs are 1 to 4094")]
    NoVlan(String, u16),
    /// Two pods have the same number.
    #[error("pod {0}: number {1} is another pod's, too")]
    Number(String, u16),
    /// Header-only delivery without payload slots.
    #[error("pod {0}: header-only delivery, but no payload slots")]
    PayloadSlots(String),
    /// The transport's settings are invalid.
    #[error("pod {0}: {1}")]
    Reliable(String, ReliableError),
}

fn text(vlan: Option<u16>) -> String {
    vlan.map_or_else(|| "untagged".to_owned(), |vlan| format!("VLAN {vlan}"))
}
