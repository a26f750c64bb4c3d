//! Classification of packets: Albatross's `pkt_dir`, which each pod programs for itself.

use std::net::IpAddr;

use bifrost_nic::L3;
use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};

use crate::Arrival;

/// Class of a packet: how it gets to a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// Over the priority ring, without an entry in an order queue.
    Priority,
    /// To the core of its flow, without an entry.
    Rss,
    /// To any core, with the order restored.
    Plb,
}

/// Conditions of a class. `None` matches everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// EtherType after the tags.
    pub ethertype: Option<u16>,
    /// Protocol number of the outer packet.
    pub protocol: Option<u8>,
    /// Source or destination port of the outer packet.
    pub port: Option<u16>,
    /// Destination of the outer packet.
    pub destination: Option<IpAddr>,
    /// VNI.
    pub vni: Option<u32>,
    /// The class of matching packets.
    pub class: Class,
}

/// The rules of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// The pod's own addresses: BGP, BFD and ICMP to them are control traffic, but not if they only pass through the
    /// gateway.
    pub own: Vec<IpAddr>,
    /// The first match counts; a packet without a match is sprayed. ARP, neighbour discovery, and control traffic to
    /// `own` come before all rules.
    pub list: Vec<Rule>,
    /// Control traffic shares the rings of cores with all other packets, by flow: to test what the priority ring is
    /// for. The pod must look for it there.
    pub control_with_data: bool,
}

const BGP: u16 = 179;
/// RFC 5881, section 4; RFC 5883, section 5.
const BFD: [u16; 3] = [3784, 3785, 4784];
/// Message types of neighbour discovery (RFC 4861).
const DISCOVERY: std::ops::RangeInclusive<u8> = 133..=137;

impl Rules {
    /// The class of a packet.
    #[inline]
    pub fn class(&self, arrival: &Arrival, frame: &[u8]) -> Class {
        if self.is_control(arrival, frame) {
            return if self.control_with_data { Class::Rss } else { Class::Priority };
        }
        self.list.iter().find(|rule| rule.fits(arrival)).map_or(Class::Plb, |rule| rule.class)
    }

    fn is_control(&self, arrival: &Arrival, frame: &[u8]) -> bool {
        let outer = &arrival.outer;
        // A tunnel is not control traffic, and nearly everything is a tunnel.
        if arrival.vni.is_some() {
            return false;
        }
        if outer.kind == L3::Arp {
            return true;
        }
        let (tcp, udp) = (outer.protocol == TCP, outer.protocol == UDP);
        let port = |ports: &[u16]| ports.contains(&outer.src_port) || ports.contains(&outer.dst_port);
        match outer.protocol {
            ICMPV6 if frame.get(usize::from(outer.l4)).is_some_and(|kind| DISCOVERY.contains(kind)) => {
                outer.dst_ip.is_multicast() || self.own.contains(&outer.dst_ip)
            }
            ICMP | ICMPV6 => self.own.contains(&outer.dst_ip),
            _ => ((tcp && port(&[BGP])) || (udp && port(&BFD))) && self.own.contains(&outer.dst_ip),
        }
    }
}

impl Rule {
    fn fits(&self, arrival: &Arrival) -> bool {
        let outer = &arrival.outer;
        self.ethertype.is_none_or(|e| e == outer.ethertype)
            && self.protocol.is_none_or(|p| p == outer.protocol)
            && self.port.is_none_or(|p| p == outer.src_port || p == outer.dst_port)
            && self.destination.is_none_or(|d| d == outer.dst_ip)
            && self.vni.is_none_or(|v| Some(v) == arrival.vni)
    }
}
