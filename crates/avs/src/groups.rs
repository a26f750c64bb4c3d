//! Security groups: which conversations may begin, and which packets belong to an allowed one.

use std::collections::BTreeMap;
use std::sync::Arc;

use bifrost_nic::Parsed;
use bifrost_tables::{Classifier, Fields, Pattern};
use bifrost_wire::Vni;
use bifrost_wire::protocol::{ICMP, ICMPV6};

use crate::acl::Logs;
use crate::drop_reason::DropReason;
use crate::fields::{fields, reversed};
use crate::ids::{Direction, GroupId, PortId};
use crate::members::{AddressSet, Members};
use crate::session::{self, Event, Key, Planned, Quote, Sessions};
use crate::tables::{BuildError, GroupRule, Remote};

/// The rules of a combination of security groups. Ports with the same groups share it.
#[derive(Clone, Debug)]
pub(crate) struct GroupPolicy {
    ingress: Rules,
    /// `None`: egress is not restricted.
    egress: Option<Rules>,
    /// The rules' names in logs; `None`: no rule is logged.
    pub(crate) logs: Option<Box<Logs>>,
}

/// The rules of one direction, grouped by the other end that they apply to, so that each address set is stored once,
/// no matter how many rules use it.
#[derive(Clone, Debug)]
struct Rules {
    direction: Direction,
    /// The value of a rule is its index among all rules of the direction. Without a set, the rules apply to any
    /// address.
    parts: Vec<(Option<Arc<AddressSet>>, Classifier<usize>)>,
}

impl Rules {
    fn new(
        direction: Direction,
        rules: &[&GroupRule],
        vni: Vni,
        members: &mut Members<'_>,
    ) -> Result<Self, BuildError> {
        let mut by_remote: BTreeMap<Remote, Vec<(Pattern, usize)>> = BTreeMap::new();
        for (place, rule) in rules.iter().enumerate() {
            by_remote.entry(rule.remote).or_default().push((rule.pattern.clone(), place));
        }
        let part = |(remote, rules)| Ok((members.set(vni, remote)?, Classifier::new(rules)));
        Ok(Rules { direction, parts: by_remote.into_iter().map(part).collect::<Result<_, BuildError>>()? })
    }

    /// The index of the first rule that allows a conversation.
    fn first(&self, fields: &Fields) -> Option<usize> {
        let remote = match self.direction {
            Direction::Ingress => fields.src,
            Direction::Egress => fields.dst,
        };
        let is_about = |set: &Option<Arc<AddressSet>>| set.as_ref().is_none_or(|set| set.contains(remote));
        let parts = self.parts.iter().filter(|(set, _)| is_about(set));
        parts.filter_map(|(_, rules)| rules.lookup(fields).copied()).min()
    }
}

impl GroupPolicy {
    /// The policy for ports of the network `vni` with these groups.
    pub(crate) fn new(vni: Vni, ids: &[GroupId], members: &mut Members<'_>) -> Result<Self, BuildError> {
        let mut rules: [Vec<_>; 2] = Default::default();
        let mut restricts_egress = false;
        for &id in ids {
            let group = members.group(id)?;
            group.rules.iter().for_each(|rule| rules[rule.direction as usize].push(rule));
            restricts_egress |= group.restricts_egress;
        }
        let is_logged = rules.iter().flatten().any(|rule| rule.log.is_some());
        let names = |rules: &Vec<&GroupRule>| rules.iter().map(|rule| rule.log.clone()).collect();
        let logs = is_logged.then(|| Box::new([names(&rules[0]), names(&rules[1])]));
        let [egress, ingress] = rules;
        let is_restricted = restricts_egress || !egress.is_empty();
        Ok(GroupPolicy {
            ingress: Rules::new(Direction::Ingress, &ingress, vni, members)?,
            egress: is_restricted.then(|| Rules::new(Direction::Egress, &egress, vni, members)).transpose()?,
            logs,
        })
    }

    /// The rules' decision about a conversation that begins with such a packet.
    fn permission(&self, direction: Direction, fields: &Fields) -> Permission {
        let rules = match direction {
            Direction::Ingress => &self.ingress,
            Direction::Egress => match &self.egress {
                Some(rules) => rules,
                None => return Permission::Unrestricted,
            },
        };
        rules.first(fields).map_or(Permission::None, Permission::Rule)
    }

    /// Decides whether a packet of `port` may pass: it belongs to an allowed conversation, or begins one that is
    /// allowed.
    #[inline(always)]
    pub(crate) fn judge(
        &self,
        Memory { sessions, after, epoch }: Memory<'_>,
        port: PortId,
        direction: Direction,
        head: &[u8],
        parsed: &Parsed,
        about: About,
    ) -> Judgement {
        let there = match about {
            About::Resolution => return Judgement::Exempt,
            About::Packets => fields(parsed),
            About::Error(quote) => {
                let there = fields(parsed);
                // An error about an allowed packet passes; it neither begins a conversation nor keeps one alive.
                let known = quote.is_some_and(|quote| sessions.find_after(&quote.key, after).is_some());
                let permission = if known { Permission::Unrestricted } else { self.permission(direction, &there) };
                return Judgement::Related { known, permission };
            }
        };
        let key = Key::of(port, direction, head, parsed);
        let (event, asks) = event(head, parsed);
        let mut ends = None;
        if let Some(index) = sessions.find_after(&key, after) {
            let origin = sessions.origin(index);
            if sessions.begins_anew(index, event) || (asks && origin != direction) {
                ends = Some((index, Why::Over));
            } else if sessions.is_of(index, epoch)
                || self.permission(origin, &if origin == direction { there } else { reversed(there) }).is_given()
            {
                return Judgement::Continues { index, event };
            } else {
                ends = Some((index, Why::Revoked));
            }
        }
        Judgement::Begins { key, event, ends, permission: self.permission(direction, &there) }
    }
}

/// The kinds of packets that rules treat differently.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum About {
    /// An ordinary packet between guests.
    Packets,
    /// ARP or neighbor discovery, which is exempt from the rules.
    Resolution,
    /// An ICMP error. The quote is present if it is valid for this error: sent by the node that the error goes to.
    Error(Option<Quote>),
}

/// The sessions, as a decision sees them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Memory<'a> {
    pub(crate) sessions: &'a Sessions,
    /// Changes that earlier steps of a trace have planned.
    pub(crate) after: &'a Planned,
    /// The epoch of the configuration.
    pub(crate) epoch: u32,
}

/// The decision of a port's security groups about a conversation that begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// Allowed: the direction is not restricted.
    Unrestricted,
    /// Allowed by the rule with this index among the rules of the port's groups for the direction, in the order of
    /// the groups.
    Rule(usize),
    /// Not allowed.
    None,
}

impl Permission {
    fn is_given(self) -> bool {
        self != Permission::None
    }
}

/// Why a session ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Why {
    /// The packet begins another conversation with the same key.
    Over,
    /// The rules no longer allow it.
    Revoked,
}

/// The decision of a port's security groups about a packet. Nothing has been changed yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Judgement {
    /// The rules do not apply to such packets.
    Exempt,
    /// An ICMP error about a conversation.
    Related {
        /// Whether the conversation has a session.
        known: bool,
        /// The decision of the rules if it has none.
        permission: Permission,
    },
    /// The packet belongs to a session.
    Continues { index: u32, event: Event },
    /// The packet begins a session, if that is permitted. `ends`: the session with the same key that it replaces.
    Begins { key: Key, event: Event, ends: Option<(u32, Why)>, permission: Permission },
}

impl Judgement {
    /// Applies the decision to the sessions.
    #[inline(always)]
    pub(crate) fn apply(self, sessions: &mut Sessions, direction: Direction, epoch: u32) -> Result<(), DropReason> {
        match self {
            Judgement::Exempt => Ok(()),
            Judgement::Related { permission, .. } => given(permission, direction),
            Judgement::Continues { index, event } => {
                sessions.touch(index, direction, event, epoch);
                Ok(())
            }
            Judgement::Begins { key, event, ends, permission } => {
                let takes_place = ends.is_some();
                match ends {
                    Some((index, Why::Over)) => sessions.remove(index),
                    Some((index, Why::Revoked)) => sessions.revoke(index),
                    None => {}
                }
                given(permission, direction)?;
                sessions.insert(key, direction, event, epoch, takes_place).map_err(|_| DropReason::SessionsFull)
            }
        }
    }

    /// Returns what [`apply`](Self::apply) would return, and adds what it would do to the plan.
    pub(crate) fn foresee(
        &self,
        sessions: &Sessions,
        direction: Direction,
        plan: &mut Planned,
    ) -> Result<(), DropReason> {
        match self {
            Judgement::Exempt | Judgement::Continues { .. } => Ok(()),
            Judgement::Related { permission, .. } => given(*permission, direction),
            Judgement::Begins { key, ends, permission, .. } => {
                if let Some((index, _)) = ends {
                    plan.end(*index);
                }
                given(*permission, direction)?;
                if ends.is_some() {
                    return Ok(());
                }
                sessions.plan_insert(key, direction, plan).map_err(|_| DropReason::SessionsFull)
            }
        }
    }
}

fn given(permission: Permission, direction: Direction) -> Result<(), DropReason> {
    match (permission.is_given(), direction) {
        (true, _) => Ok(()),
        (false, Direction::Egress) => Err(DropReason::GroupEgress),
        (false, Direction::Ingress) => Err(DropReason::GroupIngress),
    }
}

/// The event that a TCP or UDP packet is for its session.
#[inline(always)]
pub(crate) fn event_of(parsed: &Parsed) -> Event {
    parsed.tcp.map_or(Event::Datagram, |tcp| Event::Tcp(tcp.flags))
}

/// The event that a packet is for its session, and whether it is an echo request, which only the originator may send.
#[inline(always)]
fn event(head: &[u8], parsed: &Parsed) -> (Event, bool) {
    match parsed.tcp {
        Some(tcp) => (Event::Tcp(tcp.flags), false),
        None if matches!(parsed.protocol, ICMP | ICMPV6) => {
            (Event::Icmp, session::echo(head, parsed).is_some_and(|(request, _)| request))
        }
        None => (Event::Datagram, false),
    }
}
