//! Engine configuration. Defaults taken from a paper name their source.

use bifrost_wire::bifrost::Psn;

use bifrost_transport::time::{MS, S, US};

/// Maximum RTOs counted per packet.
pub(crate) const MAX_RTOS: u8 = 7;
/// Total wait of a packet after that many RTOs, in initial RTOs: each is twice the previous one.
pub(crate) const COUNTED_RTOS: u64 = (2 << MAX_RTOS) - 1;

/// The give-up time grows with the number of paths that deliver, up to this number.
pub(crate) const GIVE_UP_PATHS: usize = 4;

/// Factor by which a packet is kept longer for a peer that answers but takes nothing than for a silent one: half a
/// second with the defaults.
const REFUSED_PATIENCE: u64 = 16;

/// When received packets become visible to the guest. A local decision per VNI, not negotiated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Ordering {
    /// As soon as the packet's own flow predecessor is visible (version 2); no head-of-line blocking between flows.
    #[default]
    Flow,
    /// In PSN order, as in the NSDI'26 paper, section 4.2.
    Strict,
    /// As they arrive (NSDI'26, section 7.3).
    Off,
}

/// Congestion control of a new path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CcKind {
    /// Swift (SIGCOMM'20), per path.
    #[default]
    Swift,
    /// No limit except the connection's window.
    None,
}

/// Engine configuration. All times in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Highest version offered and accepted (1..=4).
    pub version_max: u8,
    /// Packets per group before switching to the next path (NSDI'26, 4.1: 50). 1..=65535.
    pub group_packets: u16,
    /// Paths sprayed over (NSDI'26, 4.1: 4). 1..=8.
    pub spray_paths: u8,
    /// A path stays selected unless another is faster by more than this (APNET'25, 3.2.1: 20 us).
    pub stickiness_ns: u64,
    /// RTO before the first RTT sample (NSDI'26, 4.3: 4 ms). The first REQUEST is repeated after a quarter of it.
    pub initial_rto_ns: u64,
    /// Minimum RTO, raised so that eight RTOs, each twice the previous one, reach the give-up time of one path. `None`
    /// adapts it to the measured RTT.
    pub rto_floor_ns: Option<u64>,
    /// Maximum RTO, before doubling per packet.
    pub rto_ceiling_ns: u64,
    /// Maximum delay of the ACK of a received packet; `None` adapts it to the measured RTT.
    pub ack_delay_ns: Option<u64>,
    /// Received packets that trigger an immediate ACK. 1..=256.
    pub ack_threshold: u16,
    /// Initial send window, packets (NSDI'26, 7.4: 512).
    pub initial_window: u16,
    /// Maximum send window, packets (NSDI'26, 7.4: 4096, the largest guest ring).
    pub max_window: u16,
    /// Maximum packets that wait for connection set-up.
    pub setup_queue_packets: u16,
    /// Set-up attempts before the peer becomes plain (VXLAN only).
    pub setup_tries: u8,
    /// How long a peer that did not answer stays plain.
    pub plain_retry_ns: u64,
    /// RTOs of one packet before it is given up (NSDI'26, 7.4: 3).
    pub give_up_rtos: u8,
    /// No packet is given up before this, or before 255 times the initial RTO if that is less. `None`: `give_up_rtos`
    /// doublings of the initial RTO (28 ms with the defaults) per path that delivers, up to four paths: with more
    /// paths, another attempt is more likely to arrive.
    pub give_up_after_ns: Option<u64>,
    /// Best effort after all paths have been silent for this long while packets are lost (NSDI'26, 7.2 and 7.4: about
    /// 28 ms).
    pub best_effort_after_ns: u64,
    /// A connection without traffic for this long shrinks to its minimum.
    pub idle_shrink_ns: u64,
    /// A connection without traffic for this long is forgotten. More than a second: a quiet peer is probed for that
    /// long, and a peer that has forgotten the connection answers probes with RESET.
    pub idle_reap_ns: u64,
    /// Probe interval of an idle path to an active peer.
    pub probe_interval_ns: u64,
    /// Congestion control.
    pub congestion_control: CcKind,
    /// Swift's allowance for scheduling noise of software hosts, added to the smallest RTT.
    pub swift_noise_ns: u64,
    /// A path that loses more than this percentage of its packets is treated as congested at any delay; 0: never.
    pub heavy_loss_percent: u8,
    /// Maximum connections.
    pub max_connections: u32,
    /// Maximum connections with one peer: above it the peer's REQUESTs are rejected, and traffic to it is plain VXLAN.
    pub max_connections_per_peer: u32,
    /// Maximum pages of 64 packets in flight or held, over all connections, per direction.
    pub max_pages: u32,
    /// Initial PSN of both directions of every connection, equal at both ends: 0 (PROTOCOL §6.1). Simulations set it
    /// near the wrap.
    pub first_psn: u32,
    /// The enabled mutation.
    #[cfg(any(test, feature = "mutations"))]
    pub mutation: Option<crate::Mutation>,
}

impl Config {
    /// Minimum age at which a packet is given up while `living_paths` paths deliver, ns: with the defaults three RTOs,
    /// 4 + 8 + 16 ms (NSDI'26, 7.4), per path.
    pub fn give_up_ns(&self, living_paths: usize) -> u64 {
        let by_itself = || self.doublings_ns().saturating_mul(living_paths.clamp(1, GIVE_UP_PATHS) as u64);
        self.give_up_after_ns.unwrap_or_else(by_itself).min(self.initial_rto_ns.saturating_mul(COUNTED_RTOS))
    }

    /// A packet that the peer received but did not take is given up only after the peer has taken nothing for this
    /// long, ns.
    pub(crate) fn give_up_refused_ns(&self) -> u64 {
        self.doublings_ns().saturating_mul(REFUSED_PATIENCE).max(self.give_up_ns(1))
    }

    /// Total wait of a packet until it is given up if its RTOs start with the initial one, ns.
    fn doublings_ns(&self) -> u64 {
        self.initial_rto_ns.saturating_mul((1u64 << self.give_up_rtos.min(MAX_RTOS)) - 1)
    }

    /// The first PSN of either direction of a connection (PROTOCOL §6.1).
    pub(crate) fn first_psn(&self) -> Psn {
        Psn(self.first_psn)
    }
}

impl Default for Config {
    fn default() -> Self {
        Config {
            version_max: 4,
            group_packets: 50,
            spray_paths: 4,
            stickiness_ns: 20 * US,
            initial_rto_ns: 4 * MS,
            rto_floor_ns: None,
            rto_ceiling_ns: 50 * MS,
            ack_delay_ns: None,
            ack_threshold: 32,
            initial_window: 512,
            max_window: 4096,
            setup_queue_packets: 256,
            setup_tries: 7,
            plain_retry_ns: 30 * S,
            give_up_rtos: 3,
            give_up_after_ns: None,
            best_effort_after_ns: 28 * MS,
            idle_shrink_ns: S,
            idle_reap_ns: 60 * S,
            probe_interval_ns: 100 * MS,
            congestion_control: CcKind::Swift,
            swift_noise_ns: MS,
            heavy_loss_percent: 0,
            max_connections: 1 << 20,
            max_connections_per_peer: u32::MAX,
            max_pages: 1 << 18,
            first_psn: 0,
            #[cfg(any(test, feature = "mutations"))]
            mutation: None,
        }
    }
}
