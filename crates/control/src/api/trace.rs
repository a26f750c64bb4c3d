//! A packet that is only described, and what would become of it: `POST /v1/trace`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::{Deserialize, Serialize};

use super::ApiError;

/// The largest IP packet that can be described, bytes.
pub const MAX_TRACE_SIZE: u32 = 65_535;

/// A packet, by what matters of it. It comes from the guest behind a port, or from another host.
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
    /// Nobody may cut it (IPv4).
    pub dont_fragment: bool,
    /// Its time to live, or hop limit.
    pub ttl: u8,
    /// Source MAC address; none: the sender's own.
    pub from_mac: Option<String>,
    /// Destination MAC address; none: the one that the sender would find.
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
    /// Refuses what describes no packet.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self) -> Result<(), ApiError> {
        let refuse = |what: &str, at: &str| Err(ApiError::bad_request(what).at(at));
        match (&self.port, self.from_peer) {
            (None, None) | (Some(_), Some(_)) => {
                return refuse("say who sends it: a port, or a peer's address", "port");
            }
            (None, Some(_)) if self.vni.is_none() => return refuse("say in which network it arrives", "vni"),
            (None, Some(_)) if self.from.is_none() => return refuse("say which guest sent it", "from"),
            (Some(_), None) if self.vni.is_some() => return refuse("a port's network is known", "vni"),
            _ => {}
        }
        self.check_packet()
    }

    /// The same for the packet alone, without its sender.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check_packet(&self) -> Result<(), ApiError> {
        let refuse = |what: &str, at: &str| Err(ApiError::bad_request(what).at(at));
        let kinds = [self.tcp.is_some(), self.udp.is_some(), self.ping].into_iter().filter(|is| *is).count();
        if kinds != 1 {
            return refuse("say what it is, once: tcp, udp or ping", "tcp");
        }
        if !self.flags.is_empty() && self.tcp.is_none() {
            return refuse("only TCP has flags", "flags");
        }
        let Some(to) = self.to else { return refuse("say where it goes", "to") };
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

/// What would become of a packet: the answer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Trace {
    /// The packet, as it was understood.
    pub packet: String,
    /// The worker that was asked: the one that would get it.
    pub worker: u32,
    /// The decision of each stage, in order.
    pub steps: Vec<TraceStep>,
    /// What becomes of it.
    pub verdict: TraceVerdict,
    /// That in words.
    pub what: String,
    /// If it is dropped: the counter that would have counted it, as `bifrostctl drops` names it.
    pub counter: Option<String>,
    /// What to do about that; empty: nothing is known to do.
    pub advice: String,
}

/// What one stage says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TraceStep {
    /// Which: `underlay`, `parse`, `fault`, `admission`, `route`, `acl`, `group`, `limit`, `size`, `rewrite`, `transport`, `path`,
    /// `room`.
    pub stage: String,
    /// Whether the packet goes on.
    pub passes: bool,
    /// What it says, in words.
    pub what: String,
    /// The same for programs, by name; units are last in the names.
    pub details: BTreeMap<String, String>,
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TraceVerdict {
    /// It leaves for another host.
    Sent,
    /// A guest of this host is shown it.
    Delivered,
    /// The switch answers it itself.
    Answered,
    /// It goes no further.
    Dropped,
    /// Something that a newer release knows.
    #[default]
    #[serde(other)]
    Unknown,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_describes_no_packet_is_refused_by_name() {
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
