//! Sends a packet: checks hop limit and size, translates, and prepends headers. Answers packets that cannot be
//! forwarded.

use std::net::IpAddr;

use bifrost_nic::icmp_error::{self, IcmpError};
use bifrost_nic::{Parsed, ecn};
use bifrost_wire::{gre, ip};

use crate::answer;
use crate::decision::{Change, Decision, Egress, Origin, Plan};
use crate::encap::{self, Outer};
use crate::rewrite::{self, Side};
use crate::tables::{Host, TunnelKind, Vpc};
use crate::{DropReason, Packet, Service};

impl Decision<'_> {
    /// Checks hop limit and size, translates, and prepends the headers.
    #[inline(always)]
    pub(crate) fn carry_out(
        &mut self,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        origin: Origin,
        vpc: &Vpc,
        plan: Plan,
    ) -> Result<Service, DropReason> {
        if rewrite::hop_limit(packet.bytes(), parsed) <= 1 {
            return self.refuse(packet, parsed, origin, vpc, IcmpError::HopLimit);
        }
        let overhead = match plan.egress {
            Egress::Host { host, .. } => encap::vxlan_overhead(host.vtep),
            Egress::Internet { .. } => 0,
            Egress::Tunnel(index) => {
                let tunnel = self.tables.tunnels.get(index as usize).ok_or(DropReason::NoRoute)?;
                if self.tables.watch(index).is_some_and(|watch| watch.is_down(self.context.now)) {
                    return Err(DropReason::TunnelDown);
                }
                match tunnel.kind {
                    TunnelKind::Vxlan { .. } => encap::vxlan_overhead(tunnel.remote),
                    TunnelKind::Gre { .. } => encap::gre_overhead(tunnel.remote),
                }
            }
        };
        let room = usize::from(self.tables.mtu).saturating_sub(overhead);
        let may_fragment = || answer::may_fragment(packet.bytes(), parsed) && !packet.is_header_only();
        if parsed.packet_len() > room && !may_fragment() {
            return self.refuse(packet, parsed, origin, vpc, IcmpError::TooLarge(room as u16));
        }
        self.note("size", || match parsed.packet_len() {
            len if len > room => format!("{len} bytes, fragmented to at most {room}"),
            len => format!("{len} bytes; up to {room} fit after the added headers"),
        });
        rewrite::decrement_hop_limit(packet.bytes_mut(), parsed);
        for (side, change) in [(Side::Source, plan.source), (Side::Destination, plan.destination)] {
            match change {
                None => {}
                Some(Change::Address(new)) => rewrite::set_address(packet.bytes_mut(), parsed, side, new),
                Some(Change::End(new)) => rewrite::set_end(packet.bytes_mut(), parsed, side, new),
            }
        }
        let mark = ecn::outer_of_plain(ecn::of(packet.bytes(), parsed));
        if parsed.packet_len() > room {
            return self.carry_in_fragments(packet, parsed, room as u16, &plan, mark);
        }
        packet.pull(usize::from(parsed.l3));
        self.emit(packet, plan.egress, parsed.dst_ip, parsed.flow_hash, mark)?;
        Ok(plan.service)
    }

    #[cold]
    #[inline(never)]
    fn carry_in_fragments(
        &mut self,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        room: u16,
        plan: &Plan,
        mark: u8,
    ) -> Result<Service, DropReason> {
        let (egress, to, hash) = (plan.egress, parsed.dst_ip, parsed.flow_hash);
        let emit = |decision: &mut Self, piece: &mut Packet<'_>| decision.emit(piece, egress, to, hash, mark);
        let is_fragmented = self.fragment(packet, parsed, room, emit)?;
        if is_fragmented { Ok(plan.service) } else { Err(DropReason::TooLarge) }
    }

    /// Sends an IP packet to its next hop. `destination` is any address of its family.
    #[inline(always)]
    fn emit(
        &mut self,
        packet: &mut Packet<'_>,
        egress: Egress,
        destination: IpAddr,
        flow_hash: u32,
        mark: u8,
    ) -> Result<(), DropReason> {
        let inner = ip::ethertype_of(destination);
        let tables = self.tables;
        let outer = |to: IpAddr| {
            let source = tables.vtep_like(to).ok_or(DropReason::NoHost)?;
            Ok(Outer { source, destination: to, flow_hash, ecn: mark })
        };
        self.note("egress", || match egress {
            Egress::Internet { .. } => "to the Internet".to_owned(),
            Egress::Host { vni, host } => format!("VXLAN to host {}, VNI {vni}, vNIC {}", host.vtep, host.mac),
            Egress::Tunnel(index) => format!("tunnel {index}"),
        });
        let (next_hop, ethertype) = match egress {
            Egress::Internet { next_hop } => (Some(next_hop), inner),
            Egress::Host { vni, host } => {
                encap::push_ethernet(packet, host.mac, tables.vpc_mac, inner)?;
                encap::push_vxlan(packet, vni, outer(host.vtep)?)?;
                (tables.next_hop(host.vtep), ip::ethertype_of(host.vtep))
            }
            Egress::Tunnel(index) => {
                let tunnel = *tables.tunnels.get(index as usize).ok_or(DropReason::NoRoute)?;
                match tunnel.kind {
                    TunnelKind::Vxlan { vni, mac } => {
                        encap::push_ethernet(packet, mac, tables.vpc_mac, inner)?;
                        encap::push_vxlan(packet, vni, outer(tunnel.remote)?)?;
                    }
                    TunnelKind::Gre { key } => {
                        encap::push_gre(packet, gre::Header { key, ethertype: inner }, outer(tunnel.remote)?)?;
                    }
                }
                (tables.next_hop(tunnel.remote), ip::ethertype_of(tunnel.remote))
            }
        };
        self.push_link(packet, next_hop, ethertype)
    }

    pub(crate) fn push_link(
        &mut self,
        packet: &mut Packet<'_>,
        next_hop: Option<IpAddr>,
        ethertype: u16,
    ) -> Result<(), DropReason> {
        let next_hop = next_hop.ok_or(DropReason::NoNeighbour)?;
        let Some(&mac) = self.context.neighbours.get(&next_hop) else {
            self.state.missing = Some(next_hop);
            return Err(DropReason::NoNeighbour);
        };
        self.note("link", || format!("next hop {next_hop} has {mac}"));
        encap::push_ethernet(packet, mac, self.tables.mac, ethertype)
    }

    /// Answers a packet that cannot be forwarded with an ICMP error, if that is allowed. The packet is dropped in
    /// either case.
    #[cold]
    fn refuse(
        &mut self,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        origin: Origin,
        vpc: &Vpc,
        error: IcmpError,
    ) -> Result<Service, DropReason> {
        let reason = match error {
            IcmpError::HopLimit => DropReason::HopLimit,
            IcmpError::TooLarge(_) => DropReason::TooLarge,
        };
        let silent = error != IcmpError::HopLimit && answer::may_fragment(packet.bytes(), parsed);
        if silent || !icmp_error::may_be_answered(packet.bytes(), parsed) {
            return Err(reason);
        }
        let family = |address: &&IpAddr| address.is_ipv4() == parsed.src_ip.is_ipv4();
        let own = if origin == Origin::Internet { &self.tables.vteps } else { &vpc.routers };
        let source = *own.iter().find(family).ok_or(reason)?;
        let egress = match origin {
            Origin::Internet => Egress::Internet { next_hop: self.tables.internet(parsed.src_ip).ok_or(reason)? },
            Origin::Idc(index) => Egress::Tunnel(index),
            Origin::Host { vni, vtep } => Egress::Host { vni, host: Host { vtep, mac: parsed.src_mac } },
        };
        if !self.state.answers.take(self.context.now, 1) {
            return Err(DropReason::AnswerRate);
        }
        let quoted = packet.bytes().get(usize::from(parsed.l3)..).unwrap_or_default().to_vec();
        let mut answer = Vec::new();
        icmp_error::write(error, source, parsed.src_ip, &quoted, &mut answer).ok_or(reason)?;
        replace(packet, &answer)?;
        self.emit(packet, egress, parsed.src_ip, parsed.flow_hash, ecn::NOT_ECT)?;
        // The original packet is dropped; the frame that is sent counts as an answer.
        self.state.counters.drop(reason);
        Ok(Service::Answer)
    }

    /// Sends a reply to the host that sent the request, as an inner frame.
    pub(crate) fn reply_inside(
        &mut self,
        packet: &mut Packet<'_>,
        vni: u32,
        outer: &Parsed,
        reply: &[u8],
    ) -> Result<Service, DropReason> {
        if !self.state.answers.take(self.context.now, 1) {
            return Err(DropReason::AnswerRate);
        }
        replace(packet, reply)?;
        let source = self.tables.vtep_like(outer.src_ip).ok_or(DropReason::NoHost)?;
        let (destination, flow_hash) = (outer.src_ip, outer.flow_hash);
        encap::push_vxlan(packet, vni, Outer { source, destination, flow_hash, ecn: ecn::NOT_ECT })?;
        let next_hop = self.tables.next_hop(destination);
        self.push_link(packet, next_hop, ip::ethertype_of(destination))?;
        Ok(Service::Answer)
    }
}

/// Replaces the packet by other bytes.
fn replace(packet: &mut Packet<'_>, bytes: &[u8]) -> Result<(), DropReason> {
    packet.replace(|out| {
        let Some(room) = out.get_mut(..bytes.len()) else { return 0 };
        room.copy_from_slice(bytes);
        bytes.len()
    })
}
