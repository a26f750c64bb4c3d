//! Settings of the engine. Where a default is a paper's number, its source is named.

use bifrost_wire::bifrost::Psn;

use bifrost_transport::time::{MS, S, US};

/// RTOs of one packet that can be counted.
pub(crate) const MAX_RTOS: u8 = 7;
/// What a packet waits in all until the RTO after these, in first RTOs: each is twice the one before.
pub(crate) const COUNTED_RTOS: u64 = (2 << MAX_RTOS) - 1;

/// The give-up time grows with the number of paths that deliver, up to this number.
pub(crate) const GIVE_UP_PATHS: usize = 4;

/// How many times longer a packet is kept for a peer that answers and takes nothing than for a silent one: half a second with
/// the defaults.
const REFUSED_PATIENCE: u64 = 16;

/// How received packets become visible to the guest; negotiated by nobody, a local decision per VNI.
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

/// Which congestion control a new path gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CcKind {
    /// Swift (SIGCOMM'20), per path.
    #[default]
    Swift,
    /// No limit but the connection's window.
    None,
}

/// Settings of the engine. All times in nanoseconds.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Highest version offered and accepted (1..=4).
    pub version_max: u8,
    /// Packets per group before the next path is taken (NSDI'26, 4.1: 50). 1..=65535.
    pub group_packets: u16,
    /// Paths sprayed over (NSDI'26, 4.1: 4). 1..=8.
    pub spray_paths: u8,
    /// A path keeps its place unless another is faster by more than this (APNET'25, 3.2.1: 20 us).
    pub stickiness_ns: u64,
    /// RTO before the first RTT sample (NSDI'26, 4.3: 4 ms). The first REQUEST is repeated after a quarter of it.
    pub initial_rto_ns: u64,
    /// Smallest RTO, raised so far that eight RTOs, each twice the one before, reach the give-up time of one path; `None` adapts it
    /// to the measured RTT.
    pub rto_floor_ns: Option<u64>,
    /// Largest RTO, before doubling per packet.
    pub rto_ceiling_ns: u64,
    /// Longest time that a received packet waits for its ACK; `None` adapts it to the measured RTT.
    pub ack_delay_ns: Option<u64>,
    /// Received packets that trigger an ACK without waiting. 1..=256.
    pub ack_threshold: u16,
    /// First send window, packets (NSDI'26, 7.4: 512).
    pub initial_window: u16,
    /// Largest send window, packets (NSDI'26, 7.4: 4096, the largest guest ring).
    pub max_window: u16,
    /// Packets that may wait for a connection to be set up.
    pub setup_queue_packets: u16,
    /// Set-up attempts before the peer counts as plain VXLAN.
    pub setup_tries: u8,
    /// How long a peer that did not answer counts as plain VXLAN.
    pub plain_retry_ns: u64,
    /// RTOs of one packet before it is given up (NSDI'26, 7.4: 3).
    pub give_up_rtos: u8,
    /// No packet is given up before this, or before 255 times the initial RTO if that is less. `None`: `give_up_rtos` doublings of
    /// the initial RTO (28 ms with the defaults) for each path that delivers, up to four: where more deliver, another try is
    /// likelier to arrive.
    pub give_up_after_ns: Option<u64>,
    /// All paths silent for so long while packets are lost: best effort (NSDI'26, 7.2 and 7.4: about 28 ms).
    pub best_effort_after_ns: u64,
    /// A connection without traffic for so long shrinks to its minimum.
    pub idle_shrink_ns: u64,
    /// A connection without traffic for so long is forgotten. More than a second: so long a quiet peer is probed, and who has
    /// forgotten answers probes with RESET.
    pub idle_reap_ns: u64,
    /// How often an idle path of an active peer is probed.
    pub probe_interval_ns: u64,
    /// Congestion control.
    pub congestion_control: CcKind,
    /// Swift's allowance for scheduling noise of software hosts on top of the smallest RTT.
    pub swift_noise_ns: u64,
    /// A path that loses more than so many percent of its packets is taken for congested at any delay; 0: never.
    pub heavy_loss_percent: u8,
    /// Bound on connections.
    pub max_connections: u32,
    /// Bound on connections with one peer: beyond it the peer's REQUESTs are rejected, and traffic to it is plain VXLAN.
    pub max_connections_per_peer: u32,
    /// Bound on pages of 64 packets that are in flight or held, over all connections and per direction.
    pub max_pages: u32,
    /// Where both directions of every connection begin, at both ends alike: 0 (PROTOCOL §6.1). Simulations bring the wrap near.
    pub first_psn: u32,
    /// A deliberate mistake.
    #[cfg(any(test, feature = "mutations"))]
    pub mutation: Option<crate::Mutation>,
}

impl Config {
    /// No packet is given up before this while `living_paths` paths deliver, ns: with the defaults three RTOs,
    /// 4 + 8 + 16 ms (NSDI'26, 7.4), for each of them.
    pub fn give_up_ns(&self, living_paths: usize) -> u64 {
        let by_itself = || self.doublings_ns().saturating_mul(living_paths.clamp(1, GIVE_UP_PATHS) as u64);
        self.give_up_after_ns.unwrap_or_else(by_itself).min(self.initial_rto_ns.saturating_mul(COUNTED_RTOS))
    }

    /// A packet that the peer has received and not taken is not given up before the peer has taken nothing for so long, ns.
    pub(crate) fn give_up_refused_ns(&self) -> u64 {
        self.doublings_ns().saturating_mul(REFUSED_PATIENCE).max(self.give_up_ns(1))
    }

    /// What a packet waits until it is given up if its RTOs begin with the initial one, ns.
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
