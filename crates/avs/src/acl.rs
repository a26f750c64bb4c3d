//! Network ACLs: whether a single packet may pass.

use std::sync::Arc;

use bifrost_nic::{L3, Parsed};
use bifrost_tables::{Classifier, Pattern};

use crate::fields::fields;
use crate::ids::Direction;
use crate::tables::{AclRule, RuleName};

/// A network's ACL: the first matching rule decides; a packet that matches none passes.
#[derive(Clone, Debug)]
pub(crate) struct Acl {
    rules: [Classifier<bool>; 2],
    /// Whether rules of a direction match fields that only the first fragment has: ports, and in IPv6 the protocol.
    looks_at_ports: [bool; 2],
    looks_at_protocols: [bool; 2],
    /// The rules' names in logs; `None`: no rule is logged.
    pub(crate) logs: Option<Box<Logs>>,
}

/// The rules' names in logs, by direction and index.
pub(crate) type Logs = [Vec<Option<Arc<RuleName>>>; 2];

impl Acl {
    /// `None`: there are no rules.
    pub(crate) fn new(rules: &[AclRule]) -> Option<Self> {
        let of = |direction| {
            let rules = rules.iter().filter(|rule| rule.direction == direction);
            Classifier::new(rules.map(|rule| (rule.pattern.clone(), rule.allow)))
        };
        let any = |is: fn(&Pattern) -> bool| {
            [Direction::Egress, Direction::Ingress]
                .map(|direction| rules.iter().any(|rule| rule.direction == direction && is(&rule.pattern)))
        };
        (!rules.is_empty()).then(|| Acl {
            rules: [of(Direction::Egress), of(Direction::Ingress)],
            looks_at_ports: any(|p| [&p.src_ports, &p.dst_ports].into_iter().any(|ports| *ports != (0..=u16::MAX))),
            looks_at_protocols: any(|p| p.protocol.is_some()),
            logs: rules.iter().any(|rule| rule.log.is_some()).then(|| {
                let of = |direction| rules.iter().filter(move |rule| rule.direction == direction);
                Box::new([Direction::Egress, Direction::Ingress].map(|d| of(d).map(|rule| rule.log.clone()).collect()))
            }),
        })
    }

    /// Whether it matches fields that later fragments do not have.
    pub(crate) fn needs_first(&self, direction: Direction, parsed: &Parsed) -> bool {
        let at = direction as usize;
        self.looks_at_ports[at] || (self.looks_at_protocols[at] && parsed.kind == L3::V6)
    }

    /// The rule that decides, by its index among those of the direction, and whether it lets the packet pass. `None`:
    /// no rule matches, so the packet passes.
    #[inline(always)]
    pub(crate) fn judge(&self, direction: Direction, parsed: &Parsed) -> Option<(usize, bool)> {
        self.rules[direction as usize].first(&fields(parsed)).map(|(rule, allow)| (rule, *allow))
    }
}
