//! Traces a described packet through the data path: `POST /v1/trace`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::ApiError;

/// The largest IP packet that can be described, bytes.
pub const MAX_TRACE_SIZE: u32 = 65_535;

/// The description of a packet, which comes from a port's guest or from another host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TraceSpec {
    /// The port whose guest sends it.
    pub port: Option<String>,
    /// Or the underlay address from which it arrives, in VXLAN.
    pub from_peer: Option<IpAddr>,
    /// The network in which it arrives from there.
    pub vni: Option<u32>,
    /// Its source address; none: the first one of the port that is of the destination's family.
    pub from: Option<IpAddr>,
    /// Its destination address.
    pub to: Option<IpAddr>,
    /// Source and destination port of a TCP segment.
    pub tcp: Option<(u16, u16)>,
    /// Flags of the segment: `fin`, `syn`, `rst`, `psh`, `ack`; none: `syn` alone.
    pub flags: Vec<String>,
    /// Source and destination port of a UDP datagram.
    pub udp: Option<(u16, u16)>,
    /// Or an ICMP echo request.
    pub ping: bool,
    /// Bytes of the IP packet, up to [`MAX_TRACE_SIZE`]; none: the headers alone.
    pub size_bytes: Option<u32>,
    /// The DF flag (IPv4).
    pub dont_fragment: bool,
    /// TTL, or hop limit.
    pub ttl: u8,
    /// Source MAC address; none: the sender's own.
    pub from_mac: Option<String>,
    /// Destination MAC address; none: the one that the sender would resolve.
    pub to_mac: Option<String>,
}

impl Default for TraceSpec {
    fn default() -> Self {
        TraceSpec {
            port: None,
            from_peer: None,
            vni: None,
            from: None,
            to: None,
            tcp: None,
            flags: Vec::new(),
            udp: None,
            ping: false,
            size_bytes: None,
            dont_fragment: false,
            ttl: 64,
            from_mac: None,
            to_mac: None,
        }
    }
}

impl TraceSpec {
    /// Checks that it describes a packet.
    ///
    /// # Errors
    /// The first error found.
    pub fn check(&self) -> Result<(), ApiError> {
        let refuse = |what: &str, at: &str| Err(ApiError::bad_request(what).at(at));
        match (&self.port, self.from_peer) {
            (None, None) | (Some(_), Some(_)) => {
                return refuse("name the sender: a port, or a peer's address", "port");
            }
            (None, Some(_)) if self.vni.is_none() => return refuse("missing: the VNI in which it arrives", "vni"),
            (None, Some(_)) if self.from.is_none() => return refuse("missing: the guest's address", "from"),
            (Some(_), None) if self.vni.is_some() => {
                return refuse("not allowed with a port, whose VNI is known", "vni");
            }
            _ => {}
        }
        self.check_packet()
    }

    /// Checks the packet alone, without its sender.
    ///
    /// # Errors
    /// The first error found.
    pub fn check_packet(&self) -> Result<(), ApiError> {
        let refuse = |what: &str, at: &str| Err(ApiError::bad_request(what).at(at));
        let kinds = [self.tcp.is_some(), self.udp.is_some(), self.ping].into_iter().filter(|is| *is).count();
        if kinds != 1 {
            return refuse("name exactly one of tcp, udp and ping", "tcp");
        }
        if !self.flags.is_empty() && self.tcp.is_none() {
            return refuse("only TCP has flags", "flags");
        }
        let Some(to) = self.to else { return refuse("missing: the destination address", "to") };
        if self.from.is_some_and(|from| from.is_ipv4() != to.is_ipv4()) {
            return refuse("source and destination are of different families", "from");
        }
        if self.dont_fragment && to.is_ipv6() {
            return refuse("IPv6 has no such flag: routers do not fragment IPv6 packets", "dont_fragment");
        }
        match self.size_bytes {
            Some(size) if size > MAX_TRACE_SIZE => refuse("an IP packet has at most 65535 bytes", "size_bytes"),
            _ => Ok(()),
        }
    }
}

/// The result of a trace.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trace {
    /// The packet, in words.
    pub packet: String,
    /// The worker that would process it.
    pub worker: u32,
    /// The decision of each stage, in order.
    pub steps: Vec<TraceStep>,
    /// The verdict.
    pub verdict: TraceVerdict,
    /// The verdict in words.
    pub what: String,
    /// For a drop: the counter that would count it, as named by `bifrostctl drops`.
    pub counter: Option<String>,
    /// What to do about the drop; empty: no advice.
    pub advice: String,
}

/// The decision of a stage.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceStep {
    /// The stage: `underlay`, `parse`, `fault`, `admission`, `route`, `acl`, `group`, `limit`, `size`, `rewrite`,
    /// `transport`, `path`, `room`.
    pub stage: String,
    /// Whether the packet passes.
    pub passes: bool,
    /// The decision in words.
    pub what: String,
    /// Details for programs, by name; names end in the unit.
    pub details: BTreeMap<String, String>,
}

/// The verdict on a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TraceVerdict {
    /// Sent to another host.
    Sent,
    /// Delivered to a guest of this host.
    Delivered,
    /// Answered by the switch.
    Answered,
    /// Dropped.
    Dropped,
    /// A verdict of a newer release.
    #[default]
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_descriptions_are_refused_with_the_field() {
        let to = Some("10.0.0.2".parse().unwrap());
        let good = TraceSpec { port: Some("web1".into()), to, ping: true, ..TraceSpec::default() };
        assert_eq!(good.check(), Ok(()));
        let peer = TraceSpec { port: None, from_peer: to, vni: Some(1), from: to, ..good.clone() };
        assert_eq!(peer.check(), Ok(()));
        let v6 = Some("fd00::1".parse().unwrap());
        let wrong = [
            (TraceSpec { port: None, ..good.clone() }, "port"),
            (TraceSpec { from_peer: to, ..good.clone() }, "port"),
            (TraceSpec { vni: Some(1), ..good.clone() }, "vni"),
            (TraceSpec { vni: None, ..peer.clone() }, "vni"),
            (TraceSpec { from: None, ..peer }, "from"),
            (TraceSpec { ping: false, ..good.clone() }, "tcp"),
            (TraceSpec { udp: Some((1, 2)), ..good.clone() }, "tcp"),
            (TraceSpec { flags: vec!["syn".into()], ..good.clone() }, "flags"),
            (TraceSpec { to: None, ..good.clone() }, "to"),
            (TraceSpec { from: v6, ..good.clone() }, "from"),
            (TraceSpec { to: v6, dont_fragment: true, ..good.clone() }, "dont_fragment"),
            (TraceSpec { size_bytes: Some(65_536), ..good }, "size_bytes"),
        ];
        for (spec, name) in wrong {
            assert_eq!(spec.check().unwrap_err().location, name, "{spec:?}");
        }
    }
}
