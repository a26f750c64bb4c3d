//! The decision about a frame that a guest sent.

use std::net::IpAddr;

use bifrost_nic::{L3, Parsed};
use bifrost_wire::protocol::{ICMPV6, TCP, UDP};
use bifrost_wire::{Mac, Vni, arp};

use crate::answer;
use crate::description::{GATEWAY_MAC, Ordering, PeerId, Port, PortId, Reliability};
use crate::drop_reason::DropReason;
use crate::neighbour::{self, Neighbour};
use crate::path_mtu::Frame;
use crate::rewrite::Rewrite;
use crate::switch::Index;
use crate::vpc::{Place, Site, VpcIndex, is_host, link_local};

/// What is to happen with a frame from a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FromGuest {
    /// It goes to another host.
    Remote {
        /// The network of the receiving vNIC.
        vni: Vni,
        /// The host.
        peer: PeerId,
        /// The sending vNIC.
        local: Mac,
        /// The receiving vNIC: with `vni` and `local` this names the transport's connection.
        remote: Mac,
        /// To be applied to every frame that leaves.
        rewrite: Option<Rewrite>,
        /// Whether the transport carries it, or plain VXLAN.
        reliable: bool,
        /// In which order the receiver shows it; the network's policy.
        ordering: Ordering,
        /// The path MTU, bytes, if the packet has to be cut to fit it ([`Segments::plan_within`](bifrost_nic::Segments)).
        cut: Option<u16>,
    },
    /// It goes to another port of this host.
    Local {
        /// The port.
        port: PortId,
        /// To be applied to every frame that is delivered.
        rewrite: Option<Rewrite>,
        /// As for [`Self::Remote`].
        cut: Option<u16>,
        /// The other worker of this host that serves the port, and is to judge whether the frame may come in
        /// ([`Switch::from_neighbour`](crate::Switch::from_neighbour)). `None`: that is done.
        worker: Option<u16>,
    },
    /// The switch answers itself: give [`Switch::answer`](crate::Switch::answer) to the guest, and drop the frame.
    Answer,
    /// It is dropped.
    Drop(DropReason),
}

/// Decides; `answer` receives the frame in the case of [`FromGuest::Answer`].
#[inline(always)]
pub(crate) fn decide(
    index: &Index,
    id: PortId,
    frame: Frame<'_>,
    answer: &mut Vec<u8>,
) -> Result<FromGuest, DropReason> {
    let packet = Packet::of(index, id, frame)?;
    packet.admit()?;
    packet.act(answer)
}

/// The first half of the decision: whether the guest may say this at all.
pub(crate) fn admit(index: &Index, id: PortId, frame: Frame<'_>) -> Result<(), DropReason> {
    Packet::of(index, id, frame)?.admit()
}

struct Packet<'a> {
    index: &'a Index,
    port: &'a Port,
    vpc: &'a VpcIndex,
    head: &'a [u8],
    parsed: &'a Parsed,
    /// Bytes of the largest IP packet that it becomes.
    largest: usize,
}

impl<'a> Packet<'a> {
    #[inline(always)]
    fn of(index: &'a Index, id: PortId, frame: Frame<'a>) -> Result<Self, DropReason> {
        let (port, vpc) = index.port(id).ok_or(DropReason::UnknownPort)?;
        let Frame { head, parsed, .. } = frame;
        Ok(Packet { index, port: &port.port, vpc, head, parsed, largest: frame.largest_packet() })
    }

    /// Whether the guest may send this at all.
    #[inline(always)]
    fn admit(&self) -> Result<(), DropReason> {
        let p = self.parsed;
        if p.src_mac != self.port.mac {
            return Err(DropReason::SpoofedMac);
        }
        if p.vlan.is_some() {
            return Err(DropReason::Vlan);
        }
        match p.kind {
            // Looked at in full below.
            L3::Arp => Ok(()),
            L3::Other => Err(DropReason::EtherType),
            L3::V4 | L3::V6 if self.is_own(p.src_ip) || self.has_no_address_yet() => Ok(()),
            L3::V4 | L3::V6 => Err(DropReason::SpoofedIp),
        }
    }

    fn is_own(&self, addr: IpAddr) -> bool {
        self.port.addresses.contains(&addr) || addr == IpAddr::V6(link_local(self.port.mac))
    }

    /// What a guest may say before it has an address: DHCP, duplicate address detection and joining the groups for it.
    fn has_no_address_yet(&self) -> bool {
        let p = self.parsed;
        let allowed = match p.kind {
            L3::V4 => p.protocol == UDP && (p.src_port, p.dst_port) == (68, 67),
            _ => p.protocol == ICMPV6,
        };
        p.src_ip.is_unspecified() && p.dst_mac.is_multicast() && allowed
    }

    #[inline(always)]
    fn act(&self, answer: &mut Vec<u8>) -> Result<FromGuest, DropReason> {
        let p = self.parsed;
        if p.kind == L3::Arp {
            return self.arp(answer);
        }
        if let Some(message) = neighbour::message(self.head, p)? {
            return self.neighbour_discovery(message, answer);
        }
        if p.dst_mac.is_multicast() {
            return Err(if p.dst_mac.is_broadcast() { DropReason::Broadcast } else { DropReason::Multicast });
        }
        if p.dst_mac == GATEWAY_MAC && self.vpc.has_gateway() {
            return self.through_gateway(answer);
        }
        self.switched(self.is_reliable())
    }

    fn is_reliable(&self) -> bool {
        match self.vpc.reliability {
            Reliability::Tcp => self.parsed.protocol == TCP,
            Reliability::All => true,
            Reliability::Off => false,
        }
    }

    /// Unchanged, to the vNIC that has the destination MAC address.
    #[inline(always)]
    fn switched(&self, reliable: bool) -> Result<FromGuest, DropReason> {
        let site = self.vpc.site(self.parsed.dst_mac).ok_or(DropReason::UnknownMac)?;
        self.forward(self.vpc.vni, self.parsed.dst_mac, site, None, reliable)
    }

    #[inline(always)]
    fn forward(
        &self,
        vni: Vni,
        remote: Mac,
        site: Site,
        rewrite: Option<Rewrite>,
        reliable: bool,
    ) -> Result<FromGuest, DropReason> {
        let cut = (self.largest > usize::from(site.mtu)).then_some(site.mtu);
        match site.place {
            Place::Local(port) if port == self.port.id => Err(DropReason::Loop),
            Place::Local(port) => {
                let worker = self.index.other_worker(port, self.port.mac);
                Ok(FromGuest::Local { port, rewrite, cut, worker })
            }
            Place::Remote(peer) => Ok(FromGuest::Remote {
                vni,
                peer,
                local: self.port.mac,
                remote,
                rewrite,
                reliable,
                ordering: self.vpc.ordering,
                cut,
            }),
        }
    }

    fn arp(&self, answer: &mut Vec<u8>) -> Result<FromGuest, DropReason> {
        let packet = neighbour::arp(self.head, self.parsed)?;
        let request = packet.operation == arp::Operation::Request;
        let probe = request && packet.sender_ip.is_unspecified();
        if packet.sender_mac != self.port.mac || !(probe || self.is_own(IpAddr::V4(packet.sender_ip))) {
            return Err(DropReason::SpoofedArp);
        }
        if self.is_own(IpAddr::V4(packet.target_ip)) {
            return Err(DropReason::OwnAddress);
        }
        if !request {
            return if self.parsed.dst_mac.is_multicast() { Err(DropReason::Broadcast) } else { self.to_who_asked() };
        }
        let mac = self.vpc.neighbour(IpAddr::V4(packet.target_ip)).ok_or(DropReason::UnknownNeighbour)?;
        answer::arp_reply(&packet, mac, answer);
        Ok(FromGuest::Answer)
    }

    fn neighbour_discovery(&self, message: Neighbour, answer: &mut Vec<u8>) -> Result<FromGuest, DropReason> {
        match message {
            Neighbour::Solicitation(solicitation) => {
                if solicitation.source_mac.is_some_and(|mac| mac != self.port.mac) {
                    return Err(DropReason::SpoofedNeighbour);
                }
                let target = IpAddr::V6(solicitation.target);
                if self.is_own(target) {
                    return Err(DropReason::OwnAddress);
                }
                let mac = self.vpc.neighbour(target).ok_or(DropReason::UnknownNeighbour)?;
                answer::advertisement(&solicitation, mac, self.parsed, answer);
                Ok(FromGuest::Answer)
            }
            Neighbour::Advertisement(a) => {
                let own = self.is_own(IpAddr::V6(a.target)) && a.target_mac.is_none_or(|mac| mac == self.port.mac);
                if !own || a.router {
                    return Err(DropReason::SpoofedNeighbour);
                }
                if self.parsed.dst_mac.is_multicast() {
                    return Err(DropReason::OwnAddress);
                }
                self.to_who_asked()
            }
        }
    }

    /// An answer about the guest's own address, to somebody on a network without this switch. Nobody of this host has asked, for the
    /// switch answers them itself.
    fn to_who_asked(&self) -> Result<FromGuest, DropReason> {
        match self.switched(false)? {
            FromGuest::Local { .. } => Err(DropReason::OwnAddress),
            decision => Ok(decision),
        }
    }

    /// One hop: to the gateway itself, or through it.
    fn through_gateway(&self, answer: &mut Vec<u8>) -> Result<FromGuest, DropReason> {
        let p = self.parsed;
        if self.vpc.is_gateway(p.dst_ip) {
            answer::echo_reply(self.head, p, answer).ok_or(DropReason::GatewayService)?;
            return Ok(FromGuest::Answer);
        }
        if !is_routable(p.src_ip) || !is_routable(p.dst_ip) {
            return Err(DropReason::NotRoutable);
        }
        let v6 = p.kind == L3::V6;
        // A head without the byte counts as expired; the parser saw it, so this does not happen.
        let ttl = self.head.get(usize::from(p.l3) + if v6 { 7 } else { 8 }).copied().unwrap_or(0);
        if ttl <= 1 {
            return Err(DropReason::TtlExpired);
        }
        let (station, vpc) = self.index.next_hop(self.vpc, p.src_ip, p.dst_ip).ok_or(DropReason::NoRoute)?;
        // A connection of the transport is named by two vNICs of one network.
        let reliable = vpc.vni == self.vpc.vni && self.is_reliable();
        let rewrite = Rewrite { destination: station.mac, source: GATEWAY_MAC, l3: p.l3, v6 };
        self.forward(vpc.vni, station.mac, station.site, Some(rewrite), reliable)
    }
}

/// Whether a router may pass on packets from or to the address (RFC 4291, section 2.5; RFC 3927, section 7).
fn is_routable(addr: IpAddr) -> bool {
    let link_local = match addr {
        IpAddr::V4(a) => a.is_link_local(),
        IpAddr::V6(a) => a.is_unicast_link_local(),
    };
    is_host(addr) && !link_local
}
