//! ICMP errors about translated packets (RFC 5508): the quoted packet is translated, too.

use bifrost_nic::Parsed;

use crate::decision::{Change, Decision, Egress, Origin, Plan, fields};
use crate::nat::INTERNET;
use crate::quoted::{self, Quoted};
use crate::rewrite::End;
use crate::session::Flow;
use crate::tables::{Route, Vpc};
use crate::{DropReason, Packet, Service};

impl Decision<'_> {
    /// An ICMP error to a NAT address: it goes to the sender of the packet that it quotes.
    #[cold]
    pub(crate) fn error_inward(
        &mut self,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        network: u32,
        origin: Origin,
    ) -> Result<Service, DropReason> {
        let nat = self.nat;
        let mut inside = None;
        self.quote(packet, parsed, |quoted| {
            let answers = nat.known_inward(&quoted.answers(network))?;
            inside = Some(answers);
            Some((answers.destination, answers.source))
        })?;
        let Flow { network: vni, source, destination, .. } = inside.ok_or(DropReason::NatNoSession)?;
        let tables = self.tables;
        let vpc = tables.vpcs.get(&vni).ok_or(DropReason::UnknownVni)?;
        let host = *tables.hosts.get(&(vni, destination.address)).ok_or(DropReason::NoHost)?;
        // The backends of a service are hidden from its clients; routers of the Internet are not.
        let (service, source) = match network {
            INTERNET => (Service::Internet, None),
            _ => (Service::CloudService, Some(Change::Address(source.address))),
        };
        if network == INTERNET {
            self.meter(vpc, parsed)?;
        }
        let destination = Some(Change::Address(destination.address));
        let plan = Plan { service, egress: Egress::Host { vni, host }, source, destination };
        self.carry_out(packet, parsed, origin, vpc, plan)
    }

    /// An ICMP error of a VPC about a translated packet. `None`: the quoted packet was not translated, or only its
    /// address was; that is translated here.
    #[cold]
    pub(crate) fn error_outward(
        &mut self,
        packet: &mut Packet<'_>,
        inner: &Parsed,
        vni: u32,
        vpc: &Vpc,
    ) -> Result<Option<Plan>, DropReason> {
        let (tables, nat) = (self.tables, self.nat);
        let to_internet = vpc.routes.lookup(inner.dst_ip) == Some(&Route::Internet);
        if !to_internet && tables.services.is_empty() {
            return Ok(None);
        }
        let mut outside = None;
        let looked = self.quote(packet, inner, |quoted| {
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
            // An error that cannot be parsed is forwarded unchanged, unless it would have to be translated.
            Err(DropReason::NatProtocol) if tables.eips.contains_key(&(vni, inner.src_ip)) => {}
            Err(reason) if to_internet => return Err(reason),
            _ => {}
        }
        let Some(Flow { network, source, destination, .. }) = outside else { return Ok(None) };
        let source = Some(Change::Address(source.address));
        if network == INTERNET {
            self.admit(vpc, &fields(inner))?;
            let next_hop = tables.internet(inner.dst_ip).ok_or(DropReason::NoRoute)?;
            self.meter(vpc, inner)?;
            let egress = Egress::Internet { next_hop };
            return Ok(Some(Plan { service: Service::Internet, egress, source, destination: None }));
        }
        let host = *tables.hosts.get(&(network, destination.address)).ok_or(DropReason::NoHost)?;
        let egress = Egress::Host { vni: network, host };
        let destination = Some(Change::Address(destination.address));
        Ok(Some(Plan { service: Service::CloudService, egress, source, destination }))
    }

    /// Replaces the addresses and ports of the packet that an ICMP error quotes by those that `ends` returns.
    pub(crate) fn quote(
        &mut self,
        packet: &mut Packet<'_>,
        parsed: &Parsed,
        ends: impl FnOnce(&Quoted) -> Option<(End, End)>,
    ) -> Result<(), DropReason> {
        if !self.state.errors.take(self.context.now, 1) {
            return Err(DropReason::ErrorRate);
        }
        let quoted = quoted::read(packet, parsed)?;
        let (source, destination) = ends(&quoted).ok_or(DropReason::NatNoSession)?;
        if (source, destination) != (quoted.source, quoted.destination) {
            quoted::translate(packet, parsed, &quoted, source, destination);
        }
        Ok(())
    }
}
