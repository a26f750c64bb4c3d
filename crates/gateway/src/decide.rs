//! The forwarding decision: parses headers and looks up the tables.

use bifrost_nic::{L3, Parsed, ecn, parse};
use bifrost_tables::Fields;
use bifrost_wire::protocol::{GRE, ICMPV6, UDP};
use bifrost_wire::{Mac, ethernet, gre, tcp, vxlan};

use crate::answer;
use crate::decision::{Change, Decision, Egress, Origin, Plan, fields};
use crate::encap;
use crate::keepalive;
use crate::nat::{INTERNET, Seen};
use crate::quoted;
use crate::rewrite::{self, End};
use crate::session::Flow;
use crate::tables::{Route, Vpc, gre_key};
use crate::{DropReason, Packet, Service};

impl<'a> Decision<'a> {
    pub(crate) fn decide(&mut self, packet: &mut Packet<'_>) -> Result<Service, DropReason> {
        let outer = parse(packet.bytes(), packet.claimed_len()).map_err(|_| DropReason::OuterMalformed)?;
        if !packet.settle(outer.end as usize) {
            return Err(DropReason::OuterMalformed);
        }
        if !outer.is_ip() {
            return Err(DropReason::NotForUs);
        }
        self.note("outer", || format!("{} bytes, {} to {}", outer.packet_len(), outer.src_ip, outer.dst_ip));
        if !self.tables.vteps.contains(&outer.dst_ip) {
            return self.on_internet(packet, &outer);
        }
        if outer.is_fragment() {
            return Err(DropReason::OuterMalformed);
        }
        match outer.protocol {
            UDP if outer.dst_port == vxlan::UDP_PORT => self.on_vxlan(packet, &outer),
            GRE => self.on_gre(packet, &outer),
            _ => Err(DropReason::NotForUs),
        }
    }

    fn on_vxlan(&mut self, packet: &mut Packet<'_>, outer: &Parsed) -> Result<Service, DropReason> {
        let payload = packet.bytes().get(usize::from(outer.payload)..).unwrap_or_default();
        let (vni, _) = vxlan::parse(payload).map_err(|_| DropReason::OuterMalformed)?;
        let vni = vni.get();
        let (vni, origin) = match self.tables.tunnels_in.get(&(outer.src_ip, u64::from(vni))) {
            Some(&index) => (self.tables.tunnels[index as usize].vni, Origin::Idc(index)),
            None if self.tables.senders.contains_key(&outer.src_ip) => (vni, Origin::Host { vni, vtep: outer.src_ip }),
            None => return Err(DropReason::UnknownSender),
        };
        self.note("sender", || match origin {
            Origin::Idc(index) => format!("tunnel {index} of VPC {vni}, VXLAN from {}", outer.src_ip),
            _ => format!("host {} of VPC {vni}, VXLAN", outer.src_ip),
        });
        let mark = ecn::of(packet.bytes(), outer);
        packet.pull(usize::from(outer.payload) + vxlan::HEADER_LEN);
        let inner = parse(packet.bytes(), packet.len()).map_err(|_| DropReason::InnerMalformed)?;
        if !packet.settle(inner.end as usize) {
            return Err(DropReason::InnerMalformed);
        }
        if inner.vlan.is_some() {
            return Err(DropReason::InnerKind);
        }
        let tables = self.tables;
        let vpc = tables.vpcs.get(&vni).ok_or(DropReason::UnknownVni)?;
        if let Some(reply) = discovered(packet.bytes(), &inner, tables.vpc_mac, vpc) {
            return self.reply_inside(packet, vni, outer, &reply);
        }
        self.congestion(packet, &inner, mark)?;
        self.inside(packet, inner, vni, vpc, origin)
    }

    fn on_gre(&mut self, packet: &mut Packet<'_>, outer: &Parsed) -> Result<Service, DropReason> {
        let payload = packet.bytes().get(usize::from(outer.l4)..).unwrap_or_default();
        let (gre::Header { key, ethertype }, _) =
            gre::Header::parse(payload).map_err(|_| DropReason::OuterMalformed)?;
        let index = self.tables.tunnels_in.get(&(outer.src_ip, gre_key(key))).ok_or(DropReason::UnknownSender)?;
        let (index, vni) = (*index, self.tables.tunnels[*index as usize].vni);
        self.note("sender", || format!("tunnel {index} of VPC {vni}, GRE from {}", outer.src_ip));
        if ethertype == keepalive::PROTOCOL {
            return self.keepalive_came_back(index);
        }
        let mark = ecn::of(packet.bytes(), outer);
        packet.pull(usize::from(outer.l4) + gre::HEADER_LEN);
        // The parser needs an Ethernet header. It fits, because longer headers were just removed.
        encap::push_ethernet(packet, self.tables.mac, self.tables.mac, ethertype)?;
        let inner = parse(packet.bytes(), packet.len()).map_err(|_| DropReason::InnerMalformed)?;
        if !packet.settle(inner.end as usize) {
            return Err(DropReason::InnerMalformed);
        }
        if inner.protocol == GRE && (inner.src_ip, inner.dst_ip) == (outer.dst_ip, outer.src_ip) && !inner.is_fragment()
        {
            return self.return_keepalive(packet, &inner);
        }
        self.congestion(packet, &inner, mark)?;
        let tables = self.tables;
        let vpc = tables.vpcs.get(&vni).ok_or(DropReason::UnknownVni)?;
        self.inside(packet, inner, vni, vpc, Origin::Idc(index))
    }

    fn on_internet(&mut self, packet: &mut Packet<'_>, parsed: &Parsed) -> Result<Service, DropReason> {
        if parsed.is_fragment() {
            return self.piece_from_internet(packet, parsed);
        }
        let is_translated = || self.tables.nat_addresses.contains_key(&(INTERNET, parsed.dst_ip));
        if quoted::is_error(packet.bytes(), parsed) && is_translated() {
            return self.error_inward(packet, parsed, INTERNET, Origin::Internet);
        }
        let (_, vpc, plan) = self.plan_from_internet(packet, parsed)?;
        self.carry_out(packet, parsed, Origin::Internet, vpc, plan)
    }

    /// The action for a packet from the Internet that is not an error about a translated packet, and its VPC.
    #[inline]
    pub(crate) fn plan_from_internet(
        &mut self,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
    ) -> Result<(u32, &'a Vpc, Plan), DropReason> {
        let tables = self.tables;
        let mut destination = None;
        let (vni, private, stateful) = if let Some(&(vni, private)) = tables.eip_owners.get(&parsed.dst_ip) {
            if private != parsed.dst_ip {
                destination = Some(Change::Address(private));
            }
            if private != parsed.dst_ip && !is_later(parsed) && quoted::is_error(packet.bytes(), parsed) {
                let looked = self.quote(packet, parsed, |quoted| {
                    let private = End { address: private, ..quoted.source };
                    (quoted.source.address == parsed.dst_ip).then_some((private, quoted.destination))
                });
                // An error that cannot be parsed, such as a later fragment, is forwarded with its quoted packet
                // unchanged.
                if looked == Err(DropReason::ErrorRate) {
                    return Err(DropReason::ErrorRate);
                }
            }
            (vni, End { address: private, port: parsed.dst_port }, false)
        } else if tables.nat_addresses.contains_key(&(INTERNET, parsed.dst_ip)) {
            let inside = self.inward_of(packet, parsed, INTERNET)?;
            destination = Some(Change::End(inside.destination));
            (inside.network, inside.destination, true)
        } else {
            return Err(DropReason::NotForUs);
        };
        let vpc = tables.vpcs.get(&vni).ok_or(DropReason::UnknownVni)?;
        self.note("route", || match stateful {
            true => format!("a NAT address: to {private} in VPC {vni}"),
            false => format!("the public address of {} in VPC {vni}", private.address),
        });
        if !stateful {
            needs_first(parsed, vpc.acl.is_some())?;
            let fields = Fields { dst: private.address, ..fields(parsed) };
            self.admit(vpc, &fields)?;
        }
        self.meter(vpc, parsed)?;
        let host = *tables.hosts.get(&(vni, private.address)).ok_or(DropReason::NoHost)?;
        let egress = Egress::Host { vni, host };
        Ok((vni, vpc, Plan { service: Service::Internet, egress, source: None, destination }))
    }

    /// A packet of a VPC, from one of its hosts or from the customer's network.
    fn inside(
        &mut self,
        packet: &mut Packet<'_>,
        inner: Parsed,
        vni: u32,
        vpc: &Vpc,
        origin: Origin,
    ) -> Result<Service, DropReason> {
        let to = inner.dst_ip;
        self.note("inner", || {
            let from = End { address: inner.src_ip, port: inner.src_port };
            let to = End { address: to, port: inner.dst_port };
            format!("{} bytes, protocol {}, {from} to {to}", inner.packet_len(), inner.protocol)
        });
        if !inner.is_ip() || to.is_multicast() || to.is_unspecified() || to.is_loopback() {
            return Err(DropReason::InnerKind);
        }
        if inner.is_fragment() {
            return self.piece_inside(packet, &inner, vni, vpc, origin);
        }
        if quoted::is_error(packet.bytes(), &inner) {
            if self.tables.nat_addresses.contains_key(&(vni, to)) {
                return self.error_inward(packet, &inner, vni, origin);
            }
            if let Some(plan) = self.error_outward(packet, &inner, vni, vpc)? {
                return self.carry_out(packet, &inner, origin, vpc, plan);
            }
        }
        let plan = self.plan(packet, &inner, vni, vpc, origin)?;
        self.carry_out(packet, &inner, origin, vpc, plan)
    }

    #[inline(always)]
    pub(crate) fn plan(
        &mut self,
        packet: &Packet<'_>,
        inner: &Parsed,
        vni: u32,
        vpc: &Vpc,
        origin: Origin,
    ) -> Result<Plan, DropReason> {
        let tables = self.tables;
        let host = |vni: u32, address| {
            let host = *tables.hosts.get(&(vni, address)).ok_or(DropReason::NoHost)?;
            Ok(Egress::Host { vni, host })
        };
        let unchanged = |service, egress| Plan { service, egress, source: None, destination: None };
        let service = match tables.services.is_empty() || inner.is_fragment() {
            true => None,
            false => tables.services.get(&(vni, inner.dst_ip, inner.protocol, inner.dst_port)),
        };
        if let Some(backends) = service {
            let (source, destination) = rewrite::ends(packet.bytes(), inner).ok_or(DropReason::NatProtocol)?;
            let choice = inner.flow_hash as usize % backends.list.len().max(1);
            let &(address, port) = backends.list.get(choice).ok_or(DropReason::NoBackend)?;
            self.note("service", || {
                let backend = End { address, port };
                format!("a service with {} backends; selected: {backend} in VPC {}", backends.list.len(), backends.vni)
            });
            let flow = Flow { network: vni, protocol: inner.protocol, source, destination };
            let seen = Seen { now: self.context.now, flow, flags: flags(inner) };
            let target = Some(End { address, port });
            let outside = self.outward(seen, backends.pool, target)?;
            return Ok(Plan {
                service: Service::CloudService,
                egress: host(outside.network, outside.destination.address)?,
                source: Some(Change::End(outside.source)),
                destination: Some(Change::End(outside.destination)),
            });
        }
        if tables.nat_addresses.contains_key(&(vni, inner.dst_ip)) {
            let inside = self.inward_of(packet, inner, vni)?;
            return Ok(Plan {
                service: Service::CloudService,
                egress: host(inside.network, inside.destination.address)?,
                source: Some(Change::End(inside.source)),
                destination: Some(Change::End(inside.destination)),
            });
        }
        let route = *vpc.routes.lookup(inner.dst_ip).ok_or(DropReason::NoRoute)?;
        self.note("route", || match route {
            Route::Local => format!("{} is in this VPC", inner.dst_ip),
            Route::Peer(peer) => format!("{} is in VPC {peer}", inner.dst_ip),
            Route::Idc(index) => format!("{} is behind tunnel {index}", inner.dst_ip),
            Route::Internet => format!("{} is on the Internet", inner.dst_ip),
            Route::Blackhole => format!("a blackhole route to {}", inner.dst_ip),
        });
        match route {
            Route::Blackhole => Err(DropReason::NoRoute),
            Route::Local => {
                let service = if matches!(origin, Origin::Idc(_)) { Service::Idc } else { Service::Vpc };
                Ok(unchanged(service, host(vni, inner.dst_ip)?))
            }
            Route::Peer(peer) => Ok(unchanged(Service::Vpc, host(peer, inner.dst_ip)?)),
            Route::Idc(index) => Ok(unchanged(Service::Idc, Egress::Tunnel(index))),
            Route::Internet => {
                let translated = !tables.eips.contains_key(&(vni, inner.src_ip));
                needs_first(inner, translated || vpc.acl.is_some())?;
                self.admit(vpc, &fields(inner))?;
                let next_hop = tables.internet(inner.dst_ip).ok_or(DropReason::NoRoute)?;
                let source = if let Some(&public) = tables.eips.get(&(vni, inner.src_ip)) {
                    self.note("translation", || format!("its own public address: it leaves from {public}"));
                    (public != inner.src_ip).then_some(Change::Address(public))
                } else {
                    let pool = vpc.snat.ok_or(DropReason::NoTranslation)?;
                    let (source, destination) = rewrite::ends(packet.bytes(), inner).ok_or(DropReason::NatProtocol)?;
                    let flow = Flow { network: vni, protocol: inner.protocol, source, destination };
                    let seen = Seen { now: self.context.now, flow, flags: flags(inner) };
                    let outside = self.outward(seen, pool, None)?;
                    Some(Change::End(outside.source))
                };
                self.meter(vpc, inner)?;
                let egress = Egress::Internet { next_hop };
                Ok(Plan { service: Service::Internet, egress, source, destination: None })
            }
        }
    }

    fn inward_of(&mut self, packet: &Packet<'_>, parsed: &Parsed, network: u32) -> Result<Flow, DropReason> {
        needs_first(parsed, true)?;
        let (source, destination) = rewrite::ends(packet.bytes(), parsed).ok_or(DropReason::NatProtocol)?;
        let flow = Flow { network, protocol: parsed.protocol, source, destination };
        self.inward(Seen { now: self.context.now, flow, flags: flags(parsed) })
    }

    /// Combines the marks of both headers (RFC 6040).
    fn congestion(&self, packet: &mut Packet<'_>, inner: &Parsed, outer: u8) -> Result<(), DropReason> {
        let own = ecn::of(packet.bytes(), inner);
        let both = ecn::decapsulate(own, outer).ok_or(DropReason::NotEcnCapable)?;
        if both != own {
            ecn::set(packet.bytes_mut(), inner, both);
        }
        Ok(())
    }
}

/// The answer to ARP or a neighbour solicitation for an address of the gateway in the VPC.
fn discovered(frame: &[u8], inner: &Parsed, mac: Mac, vpc: &Vpc) -> Option<Vec<u8>> {
    const SOLICITATION: u8 = 135;
    match inner.kind {
        L3::Arp => answer::arp_reply(frame, inner, mac, &vpc.routers),
        L3::V6 if inner.protocol == ICMPV6 && frame.get(usize::from(inner.l4)) == Some(&SOLICITATION) => {
            answer::advertisement(frame, inner, mac, &vpc.routers)
        }
        _ => None,
    }
}

fn is_later(parsed: &Parsed) -> bool {
    parsed.fragment.is_some_and(|fragment| fragment.offset > 0)
}

/// If ports are needed, a later fragment needs the decision about its first one.
#[inline]
fn needs_first(parsed: &Parsed, by_ports: bool) -> Result<(), DropReason> {
    if by_ports && is_later(parsed) { Err(DropReason::FragmentWithoutFirst) } else { Ok(()) }
}

fn flags(parsed: &Parsed) -> tcp::Flags {
    parsed.tcp.map_or(tcp::Flags::default(), |tcp| tcp.flags)
}

const _: () = assert!(ethernet::HEADER_LEN <= 8 + 20, "GRE and IP leave room for Ethernet");
