//! A point of `capacity` or `ecn`, and its results.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::options::Mode;
use crate::shape::Shape;
use crate::stats::mean;
use crate::topology::shape;
use crate::topology::{GUEST_MTU, UNDERLAY_MTU};

/// Time excluded at the start of the flows, s: connection setup and TCP slow start.
pub(super) const SETTLE_S: usize = 1;

/// The network under the flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Underneath {
    /// The links themselves, from host to host: the control.
    BareLinks,
    /// A network between guests.
    #[serde(untagged)]
    Overlay(Mode),
}

impl fmt::Display for Underneath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Underneath::BareLinks => "bare_links",
            Underneath::Overlay(mode) => mode.name(),
        })
    }
}

/// Links and load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Point {
    /// The links.
    pub shape: Shape,
    /// TCP flows of each tenant, all from the first host to the second.
    pub flows: u32,
    /// Number of tenants that share the links, each with its own VPC and guests.
    pub tenants: u8,
    /// Random loss of each link in each direction, percent.
    pub loss_percent: f64,
    /// Number of paths of the receiving host's daemon, if fewer than links.
    pub receiver_paths: Option<u8>,
    /// Queue length from which on links mark (RFC 3168), frames; `None`: they do not mark.
    pub mark_frames: Option<u32>,
    /// Whether the flows' TCP is ECN-capable.
    pub tcp_ecn: bool,
}

impl Point {
    /// Flows of one tenant between hosts that use all links, without random loss.
    pub fn new(shape: &Shape, flows: u32) -> Self {
        Self {
            shape: shape.clone(),
            flows,
            tenants: 1,
            loss_percent: 0.0,
            receiver_paths: None,
            mark_frames: None,
            tcp_ecn: false,
        }
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Point { shape, flows, tenants, loss_percent, receiver_paths, mark_frames, tcp_ecn } = self;
        write!(f, "{shape}, {flows} {}", if *flows == 1 { "flow" } else { "flows" })?;
        if *tenants > 1 {
            write!(f, " of each of {tenants} tenants")?;
        }
        if *loss_percent > 0.0 {
            write!(f, ", {loss_percent} % loss")?;
        }
        if let Some(paths) = receiver_paths {
            write!(f, ", {paths} paths at the receiver")?;
        }
        if let Some(frames) = mark_frames {
            write!(f, ", marks from {frames} frames, guests {} ECN", if *tcp_ecn { "with" } else { "without" })?;
        }
        Ok(())
    }
}

/// Counters of one link during the load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct LinkAtEnd {
    /// Its rate, Mbit/s, Ethernet headers included.
    pub limit_mbit_per_s: u32,
    /// Sending rate of the sender's end, mean, Mbit/s, Ethernet headers included.
    pub sent_mbit_per_s: f64,
    /// Frames dropped by the full queue of the sender's end.
    pub dropped_frames: u64,
    /// Frames dropped by the full queue of the receiver's end.
    pub dropped_back_frames: u64,
    /// Frames that the sender's end marked CE; null: it does not mark.
    pub marked_frames: Option<u64>,
    /// Round-trip time of the idle link, ms: the median of the probes before the load.
    pub idle_rtt_ms: Option<f64>,
    /// Round-trip time during the load, after the first second, ms: median; `None` if no probe was answered.
    pub rtt_ms_p50: Option<f64>,
    /// The same, 99th percentile.
    pub rtt_ms_p99: Option<f64>,
    /// Probes sent in that time.
    pub probes: u64,
    /// Probes without an answer.
    pub probes_lost: u64,
}

impl LinkAtEnd {
    /// Queueing delay at both ends, ms.
    pub fn waiting_ms(&self) -> Option<f64> {
        Some((self.rtt_ms_p50? - self.idle_rtt_ms?).max(0.0))
    }
}

/// A path of a daemon just before the end of the load.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PathAtEnd {
    /// The daemon's host.
    pub host: String,
    /// Its number.
    pub path: u8,
    /// Its state, as in `bifrostctl paths`.
    pub state: String,
    /// Congestion window, packets.
    pub cwnd_packets: f64,
    /// Packets not yet acknowledged.
    pub in_flight_packets: u64,
    /// Smoothed round-trip time of the fabric, µs.
    pub srtt_us: Option<f64>,
    /// Minimum round-trip time, µs.
    pub min_rtt_us: Option<f64>,
    /// Smoothed packet loss, percent.
    pub loss_percent: f64,
    /// The path's share of recent traffic to the peer, percent.
    pub share_percent: f64,
    /// Packets sent since the daemon's start.
    pub tx_packets: u64,
    /// Packets lost since then.
    pub lost_packets: u64,
    /// Packets acknowledged as CE-marked.
    pub ce_marked_packets: u64,
}

/// The result of a network at a point.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// What carried the flows.
    pub mode: Underneath,
    /// Links and load.
    #[serde(flatten)]
    pub point: Point,
    /// Number of the repetition, from 0.
    pub repetition: u32,
    /// Duration of the load, s.
    pub duration_s: f64,
    /// Goodput at the receivers in each second, of all flows, Mbit/s.
    pub goodput_by_second_mbit_per_s: Vec<f64>,
    /// Goodput after the first second, Mbit/s: of each tenant, or of each bare link.
    pub goodput_of_each_mbit_per_s: Vec<f64>,
    /// Segments that the flows' TCP retransmitted.
    pub guest_retransmits: u64,
    /// CE-marked packets that the receivers' IP stacks received.
    pub received_ce_packets: u64,
    /// The links, in their order.
    pub links: Vec<LinkAtEnd>,
    /// The paths of both hosts' daemons just before the end; empty for other networks.
    pub paths: Vec<PathAtEnd>,
}

/// Bytes of a flow's full packet, and of the frame that carries it over a link.
fn full_packet(network: Underneath) -> (f64, f64) {
    // IP and TCP headers with timestamps; the Ethernet header of the link.
    const TCP: f64 = 52.0;
    const ETHERNET: f64 = 14.0;
    let (packet, around) = match network {
        Underneath::BareLinks => (UNDERLAY_MTU, 0.0),
        // Ethernet, VXLAN, UDP, IP; and the header of the transport.
        Underneath::Overlay(mode) => (GUEST_MTU, if mode.is_reliable() { 66.0 } else { 50.0 }),
    };
    (f64::from(packet) - TCP, f64::from(packet) + around + ETHERNET)
}

impl Row {
    /// Goodput relative to the links' capacity for full packets of this network: 1 if no link was ever idle or
    /// carried a packet twice or in vain.
    pub(in super::super) fn filled(&self) -> f64 {
        let (payload, frame) = full_packet(self.mode);
        self.goodput_mbit_per_s() * frame / payload / self.limit_mbit_per_s()
    }

    /// Mean goodput after the first second, of all flows, Mbit/s.
    pub(in super::super) fn goodput_mbit_per_s(&self) -> f64 {
        mean(self.goodput_by_second_mbit_per_s.get(SETTLE_S..).unwrap_or_default())
    }

    /// The total rate of the links, Mbit/s.
    pub(in super::super) fn limit_mbit_per_s(&self) -> f64 {
        self.point.shape.total_mbit_per_s(usize::MAX)
    }

    /// Jain's fairness index of the tenants' goodput: 1 if all are equal, 1/n if one of n gets everything.
    pub(in super::super) fn fairness(&self) -> f64 {
        let each = &self.goodput_of_each_mbit_per_s;
        let (sum, squares) = (each.iter().sum::<f64>(), each.iter().map(|x| x * x).sum::<f64>());
        sum * sum / (each.len() as f64 * squares)
    }

    /// Queueing delay of the link with the longest, ms; NaN if no probe of a link was answered.
    pub(in super::super) fn waiting_ms(&self) -> f64 {
        most(self.links.iter().map(|link| link.waiting_ms().unwrap_or(f64::NAN)))
    }

    /// The same delay, as a share of the maximum delay of the link's queue.
    pub(in super::super) fn waiting_of_room(&self) -> f64 {
        let frame_bits = f64::from(UNDERLAY_MTU + shape::ETHERNET) * 8.0;
        let room_ms = |link: &LinkAtEnd| {
            f64::from(self.point.shape.queue_frames) * frame_bits / (f64::from(link.limit_mbit_per_s) * 1000.0)
        };
        let shares = self.links.iter().map(|link| link.waiting_ms().map_or(f64::NAN, |ms| ms / room_ms(link)));
        most(shares)
    }

    pub(in super::super) fn dropped_per_s(&self) -> f64 {
        let dropped: u64 = self.links.iter().map(|link| link.dropped_frames + link.dropped_back_frames).sum();
        dropped as f64 / self.duration_s
    }

    /// NaN where links do not mark.
    pub(in super::super) fn marked_per_s(&self) -> f64 {
        let marked = self.links.iter().map(|link| link.marked_frames).sum::<Option<u64>>();
        marked.map_or(f64::NAN, |frames| frames as f64 / self.duration_s)
    }

    pub(in super::super) fn received_ce_per_s(&self) -> f64 {
        self.received_ce_packets as f64 / self.duration_s
    }

    pub(in super::super) fn retransmits_per_s(&self) -> f64 {
        self.guest_retransmits as f64 / self.duration_s
    }

    pub(in super::super) fn probes_lost_percent(&self) -> f64 {
        let sum = |count: fn(&LinkAtEnd) -> u64| self.links.iter().map(count).sum::<u64>() as f64;
        100.0 * sum(|link| link.probes_lost) / sum(|link| link.probes)
    }
}

/// The maximum; NaN if one value is NaN.
fn most(values: impl Iterator<Item = f64>) -> f64 {
    values.fold(0.0, |most: f64, value| if most.is_nan() || value.is_nan() { f64::NAN } else { most.max(value) })
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let links: Vec<_> = self.links.iter().map(|link| format!("{:.0}", link.sent_mbit_per_s)).collect();
        write!(
            f,
            "{:<12} {}: {:.0} Mbit/s of {:.0}, links {}, {:.2} ms waiting, {:.0} dropped/s",
            self.mode,
            self.point,
            self.goodput_mbit_per_s(),
            self.limit_mbit_per_s(),
            links.join(" "),
            self.waiting_ms(),
            self.dropped_per_s(),
        )?;
        for path in self.paths.iter().filter(|path| path.host == "host-a") {
            write!(f, ", path {} {} cwnd {:.0}", path.path, path.state, path.cwnd_packets)?;
        }
        Ok(())
    }
}
