//! `[transport]`: the settings of the reliable transport, each with its default and that default's source.

use std::time::Duration;

/// Settings of the reliable transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Packets that take the same path before the next one is chosen, 1 to 4096. 50: NSDI'26 paper, section 4.1.
    pub group_packets: u16,
    /// Longest datagram in which packets leave together, bytes behind its UDP header, 0 (never) to 8952; no more than `underlay.mtu` lets
    /// pass. 1452: what fits an MTU of 1500, over IPv6 too.
    pub bundle_bytes: u16,
    /// Paths that carry traffic at once, 1 to the underlay's paths. 4: NSDI'26 paper, section 4.1.
    pub spray_paths: u8,
    /// A path is kept while the better one gains less than this. 20 µs: APNET'25 paper, section 3.2.1.
    pub stickiness: Duration,
    /// Retransmission timeout before anything was measured. 4 ms: NSDI'26 paper, section 4.3.
    pub initial_rto: Duration,
    /// Lowest retransmission timeout.
    pub rto_floor: Auto<Duration>,
    /// Longest wait before an ACK is sent; at most 65535 µs, for set-up carries it in 16 bits.
    pub ack_delay: Auto<Duration>,
    /// Published packets after which an ACK is sent at once, 1 to 256 (what one bitmap reports).
    pub ack_threshold: u16,
    /// How long a packet without acknowledgement is sent again before it is given up, 1 ms to 1 s, at most 255 times `initial_rto`.
    /// [`Auto::Auto`]: 28 ms (NSDI'26 paper, section 7.4) for each path that delivers, up to four.
    pub give_up: Auto<Duration>,
    /// Packets in flight per connection at first. 512: NSDI'26 paper, section 7.4.
    pub initial_window: u16,
    /// Most packets in flight per connection, at most 4096, the default: the largest guest ring (section 7.4).
    pub max_window: u16,
    /// Unanswered set-ups after which a peer gets plain VXLAN, 1 to 20.
    pub setup_tries: u8,
    /// After how long such a peer is tried again.
    pub plain_retry: Duration,
    /// After how long without packets a connection is removed.
    pub idle_reap: Duration,
    /// How often an idle path is probed.
    pub probe_interval: Duration,
    /// What bounds the packets in flight on a path.
    pub congestion_control: CongestionControl,
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
        }
    }
}

/// A setting that may be left to the transport's own measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auto<T> {
    /// It follows what is measured.
    Auto,
    /// It is this.
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

/// The congestion controls; `CC Type` names them on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CongestionControl {
    /// Swift, per path (SIGCOMM 2020).
    Swift,
    /// The connection's window alone.
    None,
}
