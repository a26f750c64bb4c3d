//! The decision about a frame that a peer sent.

use std::net::IpAddr;

use bifrost_nic::{L3, Parsed};
use bifrost_wire::{Mac, Vni, arp};

use crate::description::{GATEWAY_MAC, PeerId, PortId};
use crate::drop_reason::DropReason;
use crate::neighbour::{self, Neighbour};
use crate::switch::Index;
use crate::vpc::{Next, Place, VpcIndex};

/// What is to happen with a frame from the underlay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromUnderlay {
    /// It is for a port.
    Port(PortId),
    /// It is for a port whose guest is not given such large packets, and may be cut to fit
    /// ([`Segments::plan_within`](bifrost_nic::Segments)).
    Cut {
        /// The port.
        port: PortId,
        /// The largest IP packet of its guest, bytes.
        mtu: u16,
    },
    /// It is dropped, and its sender is to be told: [`Switch::answer`](crate::Switch::answer) goes back to the peer.
    Answer {
        /// The sender's network.
        vni: Vni,
    },
    /// It is dropped.
    Drop(DropReason),
}

#[inline(always)]
pub(crate) fn decide(
    index: &Index,
    vpc: Option<&VpcIndex>,
    peer: PeerId,
    head: &[u8],
    parsed: &Parsed,
) -> Result<PortId, DropReason> {
    let vpc = vpc.ok_or(DropReason::UnknownVni)?;
    let packet = Packet { index, vpc, peer, head, parsed };
    packet.admit()?;
    packet.deliver()
}

struct Packet<'a> {
    index: &'a Index,
    vpc: &'a VpcIndex,
    peer: PeerId,
    head: &'a [u8],
    parsed: &'a Parsed,
}

impl Packet<'_> {
    /// Whether the source is at the peer: by MAC address, or by route for what came through the gateway. An address
    /// that is known to be elsewhere is refused even from a MAC address that is right.
    #[inline(always)]
    fn admit(&self) -> Result<(), DropReason> {
        let p = self.parsed;
        if p.vlan.is_some() {
            return Err(DropReason::Vlan);
        }
        if p.kind == L3::Other {
            return Err(DropReason::EtherType);
        }
        let by_mac = self.vpc.place(p.src_mac) == Some(Place::Remote(self.peer));
        let by_address = self.is_at_peer(p.src_ip)?;
        if by_mac || (p.src_mac == GATEWAY_MAC && by_address) { Ok(()) } else { Err(DropReason::WrongPeer) }
    }

    /// Whether an address is at the peer; `false` when nobody is known to have it.
    fn is_at_peer(&self, addr: IpAddr) -> Result<bool, DropReason> {
        if self.vpc.is_gateway(addr) {
            return Err(DropReason::WrongPeer);
        }
        match self.vpc.owner(addr) {
            None => Ok(false),
            Some(Next::Station(station)) if station.site.place == Place::Remote(self.peer) => Ok(true),
            Some(Next::Station(_)) => Err(DropReason::WrongPeer),
            Some(Next::Network(other)) => self.is_across_at_peer(other, addr),
        }
    }

    /// Whether an address of another network, from which a way leads to the destination, is at the peer. Only through the gateways, so
    /// nobody there is a neighbour.
    #[cold]
    fn is_across_at_peer(&self, other: u32, addr: IpAddr) -> Result<bool, DropReason> {
        let across = self.index.across(self.vpc, other, self.parsed.dst_ip, addr);
        let at_peer = across.is_some_and(|(station, _)| station.site.place == Place::Remote(self.peer));
        if at_peer && self.parsed.src_mac == GATEWAY_MAC { Ok(true) } else { Err(DropReason::WrongPeer) }
    }

    #[inline(always)]
    fn deliver(&self) -> Result<PortId, DropReason> {
        let p = self.parsed;
        if p.kind == L3::Arp {
            return self.arp();
        }
        if let Some(message) = neighbour::message(self.head, p)? {
            return self.neighbour_discovery(message);
        }
        self.to_station(p.dst_mac)
    }

    fn to_station(&self, mac: Mac) -> Result<PortId, DropReason> {
        if mac.is_multicast() {
            return Err(if mac.is_broadcast() { DropReason::Broadcast } else { DropReason::Multicast });
        }
        match self.vpc.place(mac) {
            Some(Place::Local(port)) => Ok(port),
            Some(Place::Remote(_)) => Err(DropReason::NotHere),
            None => Err(DropReason::UnknownMac),
        }
    }

    /// A question, perhaps asked by broadcast, goes to the port that it is about. Peers that run this switch never send them, plain
    /// VXLAN devices do. An answer goes to nobody: what guests ask never leaves their host.
    fn arp(&self) -> Result<PortId, DropReason> {
        let packet = neighbour::arp(self.head, self.parsed)?;
        if packet.sender_mac != self.parsed.src_mac {
            return Err(DropReason::SpoofedArp);
        }
        if packet.is_gratuitous() || packet.operation == arp::Operation::Reply {
            return Err(DropReason::OwnAddress);
        }
        self.asked_about(IpAddr::V4(packet.target_ip))
    }

    /// The same for IPv6.
    fn neighbour_discovery(&self, message: Neighbour) -> Result<PortId, DropReason> {
        match message {
            Neighbour::Solicitation(s) => {
                if s.source_mac.is_some_and(|mac| mac != self.parsed.src_mac) {
                    return Err(DropReason::SpoofedNeighbour);
                }
                self.asked_about(IpAddr::V6(s.target))
            }
            Neighbour::Advertisement(a) => {
                let honest = a.target_mac.is_none_or(|mac| mac == self.parsed.src_mac) && !a.router;
                let own = honest && self.is_at_peer(IpAddr::V6(a.target)).unwrap_or(false);
                Err(if own { DropReason::OwnAddress } else { DropReason::SpoofedNeighbour })
            }
        }
    }

    fn asked_about(&self, target: IpAddr) -> Result<PortId, DropReason> {
        match self.vpc.station(target).map(|s| s.site.place) {
            Some(Place::Local(port)) => Ok(port),
            Some(Place::Remote(_)) => Err(DropReason::NotHere),
            None => Err(DropReason::UnknownNeighbour),
        }
    }
}
