//! One core of a pod: what becomes of a packet.

use std::net::IpAddr;
use std::sync::Arc;

use bifrost_nic::icmp_error::{self, IcmpError};
use bifrost_nic::{L3, Parsed, ecn, parse};
use bifrost_tables::{ExactMap, Fields, TokenBucket, exact_map};
use bifrost_wire::protocol::{ICMPV6, UDP};
use bifrost_wire::{Mac, ethernet, tcp, vxlan};

use crate::answer;
use crate::encap::{self, Outer};
use crate::nat::{Cache, Flow, INTERNET, Nat, Seen};
use crate::quoted::{self, Quoted};
use crate::rewrite::{self, End, Side};
use crate::tables::{Host, Route, Tables, TunnelKind, Vpc, gre_key};
use crate::{Counters, DropReason, Packet, Service};

/// ICMP errors and other answers a second, and at once, of one core.
const ANSWERS_PER_SECOND: u64 = 1000;
const ANSWERS_AT_ONCE: u64 = 100;
/// ICMP errors that one core looks into, a second, and at once: each takes a lock.
const ERRORS_PER_SECOND: u64 = 1000;
const ERRORS_AT_ONCE: u64 = 100;

/// What a decision needs besides tables.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// On any monotonic clock, ns.
    pub now: u64,
    /// Link-layer addresses of next hops.
    pub neighbours: &'a ExactMap<IpAddr, Mac>,
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It leaves, as the packet is now.
    Forward(Service),
    /// An answer leaves in its place. It is whole, even if the packet came without its payload.
    Answer,
    /// It is dropped.
    Drop(DropReason),
}

/// Where a packet came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// A host of a VPC, through VXLAN.
    Host {
        vni: u32,
        vtep: IpAddr,
    },
    /// A customer's network, through this tunnel.
    Idc(u32),
    Internet,
}

/// Where a packet leaves to.
#[derive(Clone, Copy, Debug)]
enum Egress {
    Host { vni: u32, host: Host },
    Tunnel(u32),
    Internet { next_hop: IpAddr },
}

/// What an end is replaced by.
#[derive(Clone, Copy, Debug)]
enum Change {
    Address(IpAddr),
    End(End),
}

/// What is to be done with a packet.
#[derive(Clone, Copy, Debug)]
struct Plan {
    service: Service,
    egress: Egress,
    source: Option<Change>,
    destination: Option<Change>,
}

/// One core. See the [crate].
#[derive(Debug)]
pub struct Core {
    tables: Arc<Tables>,
    nat: Arc<Nat>,
    sessions: Cache,
    /// This core's share of each VPC's rate: packets are sprayed evenly.
    meters: ExactMap<u32, TokenBucket>,
    answers: TokenBucket,
    errors: TokenBucket,
    missing: Option<IpAddr>,
    counters: Counters,
}

impl Core {
    /// One of `cores` that share the work; `seed` is that of its cache of sessions.
    pub fn new(tables: Arc<Tables>, nat: Arc<Nat>, cores: u16, seed: u64) -> Self {
        let mut meters = exact_map(seed);
        let share = |rate: u64| rate.div_ceil(u64::from(cores.max(1)));
        for (vni, vpc) in &tables.vpcs {
            if let Some(rate) = vpc.meter {
                meters.insert(*vni, TokenBucket::new(share(rate.per_second), share(rate.burst).max(65_535)));
            }
        }
        Core {
            sessions: nat.cache(seed),
            tables,
            nat,
            meters,
            answers: TokenBucket::new(ANSWERS_PER_SECOND, ANSWERS_AT_ONCE),
            errors: TokenBucket::new(ERRORS_PER_SECOND, ERRORS_AT_ONCE),
            missing: None,
            counters: Counters::default(),
        }
    }

    /// What happened so far.
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The next hop whose link-layer address was missing last; once.
    pub fn take_missing(&mut self) -> Option<IpAddr> {
        self.missing.take()
    }

    /// Decides about a packet and rewrites it. A dropped packet may be rewritten in part.
    pub fn process(&mut self, context: Context<'_>, packet: &mut Packet<'_>) -> Verdict {
        match self.decide(context, packet) {
            Ok(service) => {
                self.counters.forward(service);
                if service == Service::Answer { Verdict::Answer } else { Verdict::Forward(service) }
            }
            Err(reason) => {
                self.counters.drop(reason);
                Verdict::Drop(reason)
            }
        }
    }

    fn decide(&mut self, context: Context<'_>, packet: &mut Packet<'_>) -> Result<Service, DropReason> {
        let outer = parse(packet.bytes(), packet.claimed_len()).map_err(|_| DropReason::OuterMalformed)?;
        if !packet.settle(outer.end as usize) {
            return Err(DropReason::OuterMalformed);
        }
        if !outer.is_ip() {
            return Err(DropReason::NotForUs);
        }
        if !self.tables.vteps.contains(&outer.dst_ip) {
            return self.on_internet(context, packet, &outer);
        }
        if outer.is_fragment() {
            return Err(DropReason::OuterMalformed);
        }
        match outer.protocol {
            UDP if outer.dst_port == vxlan::UDP_PORT => self.on_vxlan(context, packet, &outer),
            encap::GRE => self.on_gre(context, packet, &outer),
            _ => Err(DropReason::NotForUs),
        }
    }

    fn on_vxlan(
        &mut self,
        context: Context<'_>,
        packet: &mut Packet<'_>,
        outer: &Parsed,
    ) -> Result<Service, DropReason> {
        let payload = packet.bytes().get(usize::from(outer.payload)..).unwrap_or_default();
        let (vni, _) = vxlan::parse(payload).map_err(|_| DropReason::OuterMalformed)?;
        let vni = vni.get();
        let (vni, origin) = match self.tables.tunnels_in.get(&(outer.src_ip, u64::from(vni))) {
            Some(&place) => (self.tables.tunnels[place as usize].vni, Origin::Idc(place)),
            None if self.tables.senders.contains_key(&outer.src_ip) => (vni, Origin::Host { vni, vtep: outer.src_ip }),
            None => return Err(DropReason::UnknownSender),
        };
        let mark = ecn::of(packet.bytes(), outer);
        packet.pull(usize::from(outer.payload) + vxlan::HEADER_LEN);
        let inner = parse(packet.bytes(), packet.len()).map_err(|_| DropReason::InnerMalformed)?;
        if !packet.settle(inner.end as usize) {
            return Err(DropReason::InnerMalformed);
        }
        if inner.vlan.is_some() {
            return Err(DropReason::InnerKind);
        }
        let tables = Arc::clone(&self.tables);
        let vpc = tables.vpcs.get(&vni).ok_or(DropReason::UnknownVni)?;
        if let Some(reply) = discovered(packet.bytes(), &inner, tables.mac, vpc) {
            return self.reply_inside(context, packet, vni, outer, &reply);
        }
        self.congestion(packet, &inner, mark)?;
        self.inside(context, packet, inner, vni, vpc, origin)
    }

    fn on_gre(&mut self, context: Context<'_>, packet: &mut Packet<'_>, outer: &Parsed) -> Result<Service, DropReason> {
        let header = packet.bytes().get(usize::from(outer.l4)..).unwrap_or_default();
        let (key, ethertype, len) = encap::parse_gre(header).ok_or(DropReason::OuterMalformed)?;
        let place = self.tables.tunnels_in.get(&(outer.src_ip, gre_key(key))).ok_or(DropReason::UnknownSender)?;
        let (place, vni) = (*place, self.tables.tunnels[*place as usize].vni);
        let mark = ecn::of(packet.bytes(), outer);
        packet.pull(usize::from(outer.l4) + len);
        // The parser wants Ethernet in front, for which there is room: more was just taken away.
        encap::push_ethernet(packet, self.tables.mac, self.tables.mac, ethertype)?;
        let inner = parse(packet.bytes(), packet.len()).map_err(|_| DropReason::InnerMalformed)?;
        if !packet.settle(inner.end as usize) {
            return Err(DropReason::InnerMalformed);
        }
        self.congestion(packet, &inner, mark)?;
        let tables = Arc::clone(&self.tables);
        let vpc = tables.vpcs.get(&vni).ok_or(DropReason::UnknownVni)?;
        self.inside(context, packet, inner, vni, vpc, Origin::Idc(place))
    }

    fn on_internet(
        &mut self,
        context: Context<'_>,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
    ) -> Result<Service, DropReason> {
        let tables = Arc::clone(&self.tables);
        let mut destination = None;
        let (vni, private, stateful) = if let Some(&(vni, private)) = tables.eip_owners.get(&parsed.dst_ip) {
            if private != parsed.dst_ip {
                destination = Some(Change::Address(private));
            }
            if private != parsed.dst_ip && quoted::is_error(packet.bytes(), parsed) {
                let looked = self.quote(context.now, packet, parsed, |quoted| {
                    let private = End { address: private, ..quoted.source };
                    (quoted.source.address == parsed.dst_ip).then_some((private, quoted.destination))
                });
                // What cannot be read, such as a later fragment, goes on with what it quotes as it is.
                if looked == Err(DropReason::ErrorRate) {
                    return Err(DropReason::ErrorRate);
                }
            }
            (vni, End { address: private, port: parsed.dst_port }, false)
        } else if tables.nat_addresses.contains_key(&(INTERNET, parsed.dst_ip)) {
            if quoted::is_error(packet.bytes(), parsed) {
                return self.error_inward(context, packet, parsed, INTERNET, Origin::Internet);
            }
            let inside = self.inward(context.now, packet, parsed, INTERNET)?;
            destination = Some(Change::End(inside.destination));
            (inside.network, inside.destination, true)
        } else {
            return Err(DropReason::NotForUs);
        };
        let vpc = tables.vpcs.get(&vni).ok_or(DropReason::UnknownVni)?;
        if !stateful {
            let fields = Fields { dst: private.address, ..fields(parsed) };
            admit(vpc, &fields)?;
        }
        self.meter(context.now, vni, parsed)?;
        let host = *tables.hosts.get(&(vni, private.address)).ok_or(DropReason::NoHost)?;
        let egress = Egress::Host { vni, host };
        let plan = Plan { service: Service::Internet, egress, source: None, destination };
        self.carry_out(context, packet, parsed, Origin::Internet, vpc, plan)
    }

    /// A packet of a VPC, from one of its hosts or from the customer's network.
    fn inside(
        &mut self,
        context: Context<'_>,
        packet: &mut Packet<'_>,
        inner: Parsed,
        vni: u32,
        vpc: &Vpc,
        origin: Origin,
    ) -> Result<Service, DropReason> {
        let to = inner.dst_ip;
        if !inner.is_ip() || to.is_multicast() || to.is_unspecified() || to.is_loopback() {
            return Err(DropReason::InnerKind);
        }
        if quoted::is_error(packet.bytes(), &inner) {
            if self.tables.nat_addresses.contains_key(&(vni, to)) {
                return self.error_inward(context, packet, &inner, vni, origin);
            }
            if let Some(plan) = self.error_outward(context.now, packet, &inner, vni, vpc)? {
                return self.carry_out(context, packet, &inner, origin, vpc, plan);
            }
        }
        let plan = self.plan(context.now, packet, &inner, vni, vpc, origin)?;
        self.carry_out(context, packet, &inner, origin, vpc, plan)
    }

    /// An ICMP error to an address of translation: it goes to whose packet it quotes.
    #[cold]
    fn error_inward(
        &mut self,
        context: Context<'_>,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        network: u32,
        origin: Origin,
    ) -> Result<Service, DropReason> {
        let nat = Arc::clone(&self.nat);
        let mut inside = None;
        self.quote(context.now, packet, parsed, |quoted| {
            let answers = nat.known_inward(&quoted.answers(network))?;
            inside = Some(answers);
            Some((answers.destination, answers.source))
        })?;
        let Flow { network: vni, source, destination, .. } = inside.ok_or(DropReason::NatNoSession)?;
        let tables = Arc::clone(&self.tables);
        let vpc = tables.vpcs.get(&vni).ok_or(DropReason::UnknownVni)?;
        let host = *tables.hosts.get(&(vni, destination.address)).ok_or(DropReason::NoHost)?;
        // A service's network is not shown to its clients; routers of the Internet are.
        let (service, source) = match network {
            INTERNET => (Service::Internet, None),
            _ => (Service::CloudService, Some(Change::Address(source.address))),
        };
        if network == INTERNET {
            self.meter(context.now, vni, parsed)?;
        }
        let destination = Some(Change::Address(destination.address));
        let plan = Plan { service, egress: Egress::Host { vni, host }, source, destination };
        self.carry_out(context, packet, parsed, origin, vpc, plan)
    }

    /// An ICMP error of a VPC about a translated packet. `None`: the packet that it quotes was not translated, or only its address, which is
    /// done then.
    #[cold]
    fn error_outward(
        &mut self,
        now: u64,
        packet: &mut Packet<'_>,
        inner: &Parsed,
        vni: u32,
        vpc: &Vpc,
    ) -> Result<Option<Plan>, DropReason> {
        let (tables, nat) = (Arc::clone(&self.tables), Arc::clone(&self.nat));
        let to_internet = vpc.routes.lookup(inner.dst_ip) == Some(&Route::Internet);
        if !to_internet && tables.services.is_empty() {
            return Ok(None);
        }
        let mut outside = None;
        let looked = self.quote(now, packet, inner, |quoted| {
            if let Some(flow) = nat.known_outward(&quoted.answers(vni)) {
                outside = Some(flow);
                return Some((flow.destination, flow.source));
            }
            let public = tables.eips.get(&(vni, quoted.destination.address)).filter(|_| to_internet);
            let destination =
                public.map_or(quoted.destination, |public| End { address: *public, ..quoted.destination });
            Some((quoted.source, destination))
        });
        match looked {
            // What cannot be read goes on as it is, unless it would have to be translated.
            Err(DropReason::NatProtocol) if tables.eips.contains_key(&(vni, inner.src_ip)) => {}
            Err(reason) if to_internet => return Err(reason),
            _ => {}
        }
        let Some(Flow { network, source, destination, .. }) = outside else { return Ok(None) };
        let source = Some(Change::Address(source.address));
        if network == INTERNET {
            admit(vpc, &fields(inner))?;
            let next_hop = tables.internet(inner.dst_ip).ok_or(DropReason::NoRoute)?;
            self.meter(now, vni, inner)?;
            let egress = Egress::Internet { next_hop };
            return Ok(Some(Plan { service: Service::Internet, egress, source, destination: None }));
        }
        let host = *tables.hosts.get(&(network, destination.address)).ok_or(DropReason::NoHost)?;
        let egress = Egress::Host { vni: network, host };
        let destination = Some(Change::Address(destination.address));
        Ok(Some(Plan { service: Service::CloudService, egress, source, destination }))
    }

    /// Replaces the ends of the packet that an ICMP error quotes by those that `ends` knows for it.
    fn quote(
        &mut self,
        now: u64,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        ends: impl FnOnce(&Quoted) -> Option<(End, End)>,
    ) -> Result<(), DropReason> {
        if !self.errors.take(now, 1) {
            return Err(DropReason::ErrorRate);
        }
        let quoted = quoted::read(packet, parsed)?;
        let (source, destination) = ends(&quoted).ok_or(DropReason::NatNoSession)?;
        if (source, destination) != (quoted.source, quoted.destination) {
            quoted::translate(packet, parsed, &quoted, source, destination);
        }
        Ok(())
    }

    fn plan(
        &mut self,
        now: u64,
        packet: &Packet<'_>,
        inner: &Parsed,
        vni: u32,
        vpc: &Vpc,
        origin: Origin,
    ) -> Result<Plan, DropReason> {
        let tables = Arc::clone(&self.tables);
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
            let flow = Flow { network: vni, protocol: inner.protocol, source, destination };
            let seen = Seen { now, flow, flags: flags(inner) };
            let target = Some(End { address, port });
            let outside = self.nat.outward(&mut self.sessions, seen, backends.pool, target)?;
            return Ok(Plan {
                service: Service::CloudService,
                egress: host(outside.network, outside.destination.address)?,
                source: Some(Change::End(outside.source)),
                destination: Some(Change::End(outside.destination)),
            });
        }
        if tables.nat_addresses.contains_key(&(vni, inner.dst_ip)) {
            let inside = self.inward(now, packet, inner, vni)?;
            return Ok(Plan {
                service: Service::CloudService,
                egress: host(inside.network, inside.destination.address)?,
                source: Some(Change::End(inside.source)),
                destination: Some(Change::End(inside.destination)),
            });
        }
        match *vpc.routes.lookup(inner.dst_ip).ok_or(DropReason::NoRoute)? {
            Route::Blackhole => Err(DropReason::NoRoute),
            Route::Local => {
                let service = if matches!(origin, Origin::Idc(_)) { Service::Idc } else { Service::Vpc };
                Ok(unchanged(service, host(vni, inner.dst_ip)?))
            }
            Route::Peer(peer) => Ok(unchanged(Service::Vpc, host(peer, inner.dst_ip)?)),
            Route::Idc(place) => Ok(unchanged(Service::Idc, Egress::Tunnel(place))),
            Route::Internet => {
                admit(vpc, &fields(inner))?;
                let next_hop = tables.internet(inner.dst_ip).ok_or(DropReason::NoRoute)?;
                let source = if let Some(&public) = tables.eips.get(&(vni, inner.src_ip)) {
                    (public != inner.src_ip).then_some(Change::Address(public))
                } else {
                    let pool = vpc.snat.ok_or(DropReason::NoTranslation)?;
                    let (source, destination) = rewrite::ends(packet.bytes(), inner).ok_or(DropReason::NatProtocol)?;
                    let flow = Flow { network: vni, protocol: inner.protocol, source, destination };
                    let seen = Seen { now, flow, flags: flags(inner) };
                    let outside = self.nat.outward(&mut self.sessions, seen, pool, None)?;
                    Some(Change::End(outside.source))
                };
                self.meter(now, vni, inner)?;
                let egress = Egress::Internet { next_hop };
                Ok(Plan { service: Service::Internet, egress, source, destination: None })
            }
        }
    }

    fn inward(&mut self, now: u64, packet: &Packet<'_>, parsed: &Parsed, network: u32) -> Result<Flow, DropReason> {
        let (source, destination) = rewrite::ends(packet.bytes(), parsed).ok_or(DropReason::NatProtocol)?;
        let flow = Flow { network, protocol: parsed.protocol, source, destination };
        self.nat.inward(&mut self.sessions, Seen { now, flow, flags: flags(parsed) })
    }

    fn meter(&mut self, now: u64, vni: u32, parsed: &Parsed) -> Result<(), DropReason> {
        let Some(meter) = self.meters.get_mut(&vni) else { return Ok(()) };
        if meter.take(now, parsed.packet_len() as u64) { Ok(()) } else { Err(DropReason::Meter) }
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

    /// Checks hop limit and size, translates, and puts the headers in front.
    fn carry_out(
        &mut self,
        context: Context<'_>,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        origin: Origin,
        vpc: &Vpc,
        plan: Plan,
    ) -> Result<Service, DropReason> {
        if rewrite::hop_limit(packet.bytes(), parsed) <= 1 {
            return self.refuse(context, packet, parsed, origin, vpc, IcmpError::HopLimit);
        }
        let overhead = match plan.egress {
            Egress::Host { host, .. } => encap::vxlan_overhead(host.vtep),
            Egress::Internet { .. } => 0,
            Egress::Tunnel(place) => {
                let tunnel = self.tables.tunnels.get(place as usize).ok_or(DropReason::NoRoute)?;
                match tunnel.kind {
                    TunnelKind::Vxlan { .. } => encap::vxlan_overhead(tunnel.remote),
                    TunnelKind::Gre { .. } => encap::gre_overhead(tunnel.remote),
                }
            }
        };
        let room = usize::from(self.tables.mtu).saturating_sub(overhead);
        if parsed.packet_len() > room {
            return self.refuse(context, packet, parsed, origin, vpc, IcmpError::TooLarge(room as u16));
        }
        rewrite::decrement_hop_limit(packet.bytes_mut(), parsed);
        for (side, change) in [(Side::Source, plan.source), (Side::Destination, plan.destination)] {
            match change {
                None => {}
                Some(Change::Address(new)) => rewrite::set_address(packet.bytes_mut(), parsed, side, new),
                Some(Change::End(new)) => rewrite::set_end(packet.bytes_mut(), parsed, side, new),
            }
        }
        let mark = ecn::outer_of_plain(ecn::of(packet.bytes(), parsed));
        packet.pull(usize::from(parsed.l3));
        self.emit(context, packet, plan.egress, parsed.dst_ip, parsed.flow_hash, mark)?;
        Ok(plan.service)
    }

    /// Sends an IP packet on its way. `destination` is any address of its family.
    fn emit(
        &mut self,
        context: Context<'_>,
        packet: &mut Packet<'_>,
        egress: Egress,
        destination: IpAddr,
        flow_hash: u32,
        mark: u8,
    ) -> Result<(), DropReason> {
        let inner = encap::ethertype_of(destination);
        let tables = Arc::clone(&self.tables);
        let outer = |to: IpAddr| {
            let source = tables.vtep_like(to).ok_or(DropReason::NoHost)?;
            Ok(Outer { source, destination: to, flow_hash, ecn: mark })
        };
        let (next_hop, ethertype) = match egress {
            Egress::Internet { next_hop } => (Some(next_hop), inner),
            Egress::Host { vni, host } => {
                encap::push_ethernet(packet, host.mac, tables.mac, inner)?;
                encap::push_vxlan(packet, vni, outer(host.vtep)?)?;
                (tables.next_hop(host.vtep), encap::ethertype_of(host.vtep))
            }
            Egress::Tunnel(place) => {
                let tunnel = *tables.tunnels.get(place as usize).ok_or(DropReason::NoRoute)?;
                match tunnel.kind {
                    TunnelKind::Vxlan { vni, mac } => {
                        encap::push_ethernet(packet, mac, tables.mac, inner)?;
                        encap::push_vxlan(packet, vni, outer(tunnel.remote)?)?;
                    }
                    TunnelKind::Gre { key } => encap::push_gre(packet, key, inner, outer(tunnel.remote)?)?,
                }
                (tables.next_hop(tunnel.remote), encap::ethertype_of(tunnel.remote))
            }
        };
        self.push_link(context, packet, next_hop, ethertype)
    }

    fn push_link(
        &mut self,
        context: Context<'_>,
        packet: &mut Packet<'_>,
        next_hop: Option<IpAddr>,
        ethertype: u16,
    ) -> Result<(), DropReason> {
        let next_hop = next_hop.ok_or(DropReason::NoNeighbour)?;
        let Some(&mac) = context.neighbours.get(&next_hop) else {
            self.missing = Some(next_hop);
            return Err(DropReason::NoNeighbour);
        };
        encap::push_ethernet(packet, mac, self.tables.mac, ethertype)
    }

    /// Answers a packet that cannot go on with an ICMP error, if that is allowed; the packet is dropped then, too, but not silently.
    #[cold]
    fn refuse(
        &mut self,
        context: Context<'_>,
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
            Origin::Idc(place) => Egress::Tunnel(place),
            Origin::Host { vni, vtep } => Egress::Host { vni, host: Host { vtep, mac: parsed.src_mac } },
        };
        if !self.answers.take(context.now, 1) {
            return Err(DropReason::AnswerRate);
        }
        let quoted = packet.bytes().get(usize::from(parsed.l3)..).unwrap_or_default().to_vec();
        let mut answer = Vec::new();
        icmp_error::write(error, source, parsed.src_ip, &quoted, &mut answer).ok_or(reason)?;
        replace(packet, &answer)?;
        self.emit(context, packet, egress, parsed.src_ip, parsed.flow_hash, ecn::NOT_ECT)?;
        // The packet is gone; what leaves is counted as an answer.
        self.counters.drop(reason);
        Ok(Service::Answer)
    }

    /// Sends an inner frame back to the host that asked.
    fn reply_inside(
        &mut self,
        context: Context<'_>,
        packet: &mut Packet<'_>,
        vni: u32,
        outer: &Parsed,
        reply: &[u8],
    ) -> Result<Service, DropReason> {
        if !self.answers.take(context.now, 1) {
            return Err(DropReason::AnswerRate);
        }
        replace(packet, reply)?;
        let source = self.tables.vtep_like(outer.src_ip).ok_or(DropReason::NoHost)?;
        let (destination, flow_hash) = (outer.src_ip, outer.flow_hash);
        encap::push_vxlan(packet, vni, Outer { source, destination, flow_hash, ecn: ecn::NOT_ECT })?;
        let next_hop = self.tables.next_hop(destination);
        self.push_link(context, packet, next_hop, encap::ethertype_of(destination))?;
        Ok(Service::Answer)
    }
}

/// Puts other bytes in a packet's place.
fn replace(packet: &mut Packet<'_>, bytes: &[u8]) -> Result<(), DropReason> {
    packet.replace(|out| {
        let Some(room) = out.get_mut(..bytes.len()) else { return 0 };
        room.copy_from_slice(bytes);
        bytes.len()
    })
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

fn flags(parsed: &Parsed) -> tcp::Flags {
    parsed.tcp.map_or(tcp::Flags::default(), |tcp| tcp.flags)
}

fn fields(parsed: &Parsed) -> Fields {
    let has_ports = !parsed.is_fragment() && usize::from(parsed.payload) > usize::from(parsed.l4);
    let ports = has_ports.then_some((parsed.src_port, parsed.dst_port));
    Fields { src: parsed.src_ip, dst: parsed.dst_ip, protocol: parsed.protocol, ports }
}

/// Whether the VPC's ACL lets a packet pass.
fn admit(vpc: &Vpc, fields: &Fields) -> Result<(), DropReason> {
    match &vpc.acl {
        Some(acl) if !acl.lookup(fields).copied().unwrap_or(false) => Err(DropReason::Acl),
        _ => Ok(()),
    }
}

const _: () = assert!(ethernet::HEADER_LEN <= 8 + 20, "GRE and IP leave room for Ethernet");
