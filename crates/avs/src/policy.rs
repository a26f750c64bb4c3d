//! Whether a packet may pass: network ACLs, which know single packets, and security groups, which know conversations.

use std::net::IpAddr;

use bifrost_nic::{L3, Parsed};
use bifrost_tables::{Classifier, Fields};
use bifrost_wire::protocol::{ICMP, ICMPV6};

use crate::description::{AclRule, BuildError, GroupId, SecurityGroup};
use crate::drop_reason::DropReason;
use crate::session::{self, Direction, Event, Key, Sessions};

/// What one direction's rules say; the same for all ports that have the same groups.
#[derive(Debug)]
pub(crate) struct GroupPolicy {
    ingress: Classifier<()>,
    /// `None`: everything may leave.
    egress: Option<Classifier<()>>,
}

impl GroupPolicy {
    /// Of a port with these groups.
    pub(crate) fn new(ids: &[GroupId], groups: &[SecurityGroup]) -> Result<Self, BuildError> {
        let mut rules: [Vec<_>; 2] = Default::default();
        for &id in ids {
            let group = groups.get(usize::from(id.0)).ok_or(BuildError::UnknownGroup(id))?;
            for rule in &group.rules {
                rules[rule.direction as usize].push((rule.pattern.clone(), ()));
            }
        }
        let [egress, ingress] = rules;
        let egress = (!egress.is_empty()).then(|| Classifier::new(egress));
        Ok(GroupPolicy { ingress: Classifier::new(ingress), egress })
    }

    fn allows(&self, direction: Direction, fields: &Fields) -> bool {
        match direction {
            Direction::Ingress => self.ingress.lookup(fields).is_some(),
            Direction::Egress => self.egress.as_ref().is_none_or(|rules| rules.lookup(fields).is_some()),
        }
    }

    /// Whether a packet of port `vnic` may pass: it belongs to a conversation that was allowed to begin, or begins one that is.
    pub(crate) fn pass(
        &self,
        sessions: &mut Sessions,
        epoch: u32,
        vnic: u16,
        direction: Direction,
        head: &[u8],
        parsed: &Parsed,
    ) -> Result<(), DropReason> {
        if !parsed.is_ip() || is_about_neighbours(head, parsed) {
            return Ok(());
        }
        let denied = match direction {
            Direction::Egress => DropReason::GroupEgress,
            Direction::Ingress => DropReason::GroupIngress,
        };
        let there = fields(parsed);
        if matches!(parsed.protocol, ICMP | ICMPV6)
            && let Some(about) = session::related(vnic, direction, head, parsed)
        {
            // An error about something that was allowed passes, and keeps nothing alive.
            let allowed = sessions.find(&about).is_some() || self.allows(direction, &there);
            return if allowed { Ok(()) } else { Err(denied) };
        }
        let key = Key::of(vnic, direction, head, parsed);
        let (event, asks) = event(head, parsed);
        if let Some(index) = sessions.find(&key) {
            let origin = sessions.origin(index);
            if sessions.begins_anew(index, event) || (asks && origin != direction) {
                sessions.remove(index);
            } else if sessions.is_of(index, epoch)
                || self.allows(origin, &if origin == direction { there } else { turned(there) })
            {
                sessions.touch(index, direction, event, epoch);
                return Ok(());
            } else {
                sessions.revoke(index);
            }
        }
        if !self.allows(direction, &there) {
            return Err(denied);
        }
        sessions.insert(key, direction, event, epoch).map_err(|_| DropReason::SessionsFull)
    }
}

/// A network's ACL: the first rule that matches decides; what none matches passes.
#[derive(Debug)]
pub(crate) struct Acl {
    rules: [Classifier<bool>; 2],
}

impl Acl {
    /// `None` without rules.
    pub(crate) fn new(rules: &[AclRule]) -> Option<Self> {
        let of = |direction| {
            let rules = rules.iter().filter(|rule| rule.direction == direction);
            Classifier::new(rules.map(|rule| (rule.pattern.clone(), rule.allow)))
        };
        (!rules.is_empty()).then(|| Acl { rules: [of(Direction::Egress), of(Direction::Ingress)] })
    }

    /// Whether a packet may pass.
    pub(crate) fn pass(&self, direction: Direction, head: &[u8], parsed: &Parsed) -> Result<(), DropReason> {
        let exempt = !parsed.is_ip() || is_about_neighbours(head, parsed);
        if exempt || *self.rules[direction as usize].lookup(&fields(parsed)).unwrap_or(&true) {
            Ok(())
        } else {
            Err(DropReason::Acl)
        }
    }
}

fn fields(parsed: &Parsed) -> Fields {
    let has_ports = matches!(parsed.protocol, bifrost_wire::protocol::TCP | bifrost_wire::protocol::UDP);
    Fields {
        src: parsed.src_ip,
        dst: parsed.dst_ip,
        protocol: parsed.protocol,
        ports: (has_ports && !parsed.is_fragment).then_some((parsed.src_port, parsed.dst_port)),
    }
}

/// The same conversation's packets in the other direction.
fn turned(fields: Fields) -> Fields {
    let Fields { src, dst, protocol, ports } = fields;
    Fields { src: dst, dst: src, protocol, ports: ports.map(|(s, d)| (d, s)) }
}

/// What a packet does to its session, and whether it is an echo request, which only the side that began may send.
fn event(head: &[u8], parsed: &Parsed) -> (Event, bool) {
    match parsed.tcp {
        Some(tcp) => (Event::Tcp(tcp.flags), false),
        None if matches!(parsed.protocol, ICMP | ICMPV6) => {
            (Event::Icmp, session::echo(head, parsed).is_some_and(|(request, _)| request))
        }
        None => (Event::Datagram, false),
    }
}

/// Router and neighbour discovery (RFC 4861), which the switch itself looks at.
fn is_about_neighbours(head: &[u8], parsed: &Parsed) -> bool {
    let kind = (parsed.kind == L3::V6 && parsed.protocol == ICMPV6 && !parsed.is_fragment)
        .then(|| head.get(usize::from(parsed.l4)))
        .flatten();
    matches!((kind, parsed.dst_ip), (Some(133..=137), IpAddr::V6(_)))
}
