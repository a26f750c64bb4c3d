//! `[transport]`: settings of the reliable transport, with the sources of their defaults.

use std::time::Duration;

/// Settings of the reliable transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Packets sent on a path before the next path is chosen, 1 to 4096. 50: NSDI'26 paper, section 4.1.
    pub group_packets: u16,
    /// Longest UDP payload that bundles several packets, bytes, 0 (never) to 8952; limited by `underlay.mtu`. 1452:
    /// fits an MTU of 1500, with IPv6 too.
    pub bundle_bytes: u16,
    /// Paths that carry traffic at once, 1 to the underlay's paths. 4: NSDI'26 paper, section 4.1.
    pub spray_paths: u8,
    /// A path is kept while another one is better by less than this. 20 µs: APNET'25 paper, section 3.2.1.
    pub stickiness: Duration,
    /// Retransmission timeout before the first measurement. 4 ms: NSDI'26 paper, section 4.3.
    pub initial_rto: Duration,
    /// Lowest retransmission timeout.
    pub rto_floor: Auto<Duration>,
    /// Maximum delay of an ACK; at most 65535 µs, because set-up packets carry it in 16 bits.
    pub ack_delay: Auto<Duration>,
    /// Published packets after which an ACK is sent at once, 1 to 256 (the size of a bitmap).
    pub ack_threshold: u16,
    /// How long an unacknowledged packet is retransmitted before it is given up, 1 ms to 1 s, at most 255 times
    /// `initial_rto`. [`Auto::Auto`]: 28 ms (NSDI'26 paper, section 7.4) for each path that delivers, up to four.
    pub give_up: Auto<Duration>,
    /// Initial window of a connection, packets in flight. 512: NSDI'26 paper, section 7.4.
    pub initial_window: u16,
    /// Maximum window of a connection, packets in flight, at most 4096 (the default): the largest guest ring (section
    /// 7.4).
    pub max_window: u16,
    /// Unanswered connection requests after which a peer gets plain VXLAN, 1 to 20.
    pub setup_tries: u8,
    /// Time after which such a peer is tried again.
    pub plain_retry: Duration,
    /// Idle time after which a connection is removed.
    pub idle_reap: Duration,
    /// Probe interval of idle paths.
    pub probe_interval: Duration,
    /// How packets in flight on a path are bounded.
    pub congestion_control: CongestionControl,
    /// Highest version of the protocol that is offered and accepted, 1 to 4 (PROTOCOL, section 5).
    pub version_max: u8,
}

impl Default for Transport {
    fn default() -> Transport {
        Transport {
            group_packets: 50,
            bundle_bytes: 1452,
            spray_paths: 4,
            stickiness: Duration::from_micros(20),
            initial_rto: Duration::from_micros(4000),
            rto_floor: Auto::Auto,
            ack_delay: Auto::Auto,
            ack_threshold: 32,
            give_up: Auto::Auto,
            initial_window: 512,
            max_window: 4096,
            setup_tries: 7,
            plain_retry: Duration::from_secs(30),
            idle_reap: Duration::from_secs(60),
            probe_interval: Duration::from_millis(100),
            congestion_control: CongestionControl::Swift,
            version_max: 4,
        }
    }
}

/// A setting that the transport can derive from its measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auto<T> {
    /// Derived from measurements.
    Auto,
    /// A fixed value.
    Fixed(T),
}

impl<T> Auto<T> {
    /// The fixed value, if there is one.
    pub fn fixed(self) -> Option<T> {
        match self {
            Auto::Auto => None,
            Auto::Fixed(value) => Some(value),
        }
    }
}

/// Congestion control algorithms; `CC Type` on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CongestionControl {
    /// Swift, per path (SIGCOMM 2020).
    Swift,
    /// Only the connection's window.
    None,
}
