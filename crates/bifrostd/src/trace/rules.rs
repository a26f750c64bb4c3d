//! Maps a rule of the switch to its rule in the configuration, which may have become several rules.

use bifrost_avs::Direction;
use bifrost_control::config::{self, Action, Config, Port, Rule};

use crate::translate;

/// The ACL rule of a port's VPC that a switch's rule belongs to. `index`: of that rule among those of the direction.
pub(crate) fn of_acl(config: &Config, port: &Port, direction: Direction, index: usize) -> Option<String> {
    let rules = &config.vpc(port.vni)?.acl;
    let wanted = match direction {
        Direction::Ingress => config::Direction::Ingress,
        Direction::Egress => config::Direction::Egress,
    };
    let of_direction = rules.iter().enumerate().filter(|(_, rule)| rule.direction == wanted);
    let sizes = of_direction.map(|(number, rule)| (number, translate::patterns(&rule.rule).len()));
    let number = nth(sizes, index)?;
    let rule = rules.get(number)?;
    let action = if rule.action == Action::Allow { "allow" } else { "deny" };
    Some(format!("[[vpc.acl]] {} of VNI {} ({action}{})", number + 1, port.vni.value(), words(&rule.rule)))
}

/// The same for the rules of a port's security groups.
pub(crate) fn of_group(config: &Config, port: &Port, direction: Direction, index: usize) -> Option<String> {
    let groups = port.security_groups.iter().filter_map(|name| config.security_groups.iter().find(|g| g.name == *name));
    let (list, all): (_, Vec<_>) = match direction {
        Direction::Ingress => ("ingress", groups.map(|g| (g, &g.ingress)).collect()),
        Direction::Egress => ("egress", groups.map(|g| (g, &g.egress)).collect()),
    };
    let every =
        || all.iter().flat_map(|(group, rules)| rules.iter().enumerate().map(move |(n, rule)| (group, n, rule)));
    let sizes = every().enumerate().map(|(at, (_, _, rule))| (at, translate::alternatives(config, rule).len()));
    let at = nth(sizes, index)?;
    let (group, number, rule) = every().nth(at)?;
    Some(format!("{list} rule {} of security group {} ({})", number + 1, group.name, words(rule).trim_start()))
}

/// The number of the rule that the alternative at `index` belongs to. `rules`: each rule's number and its count of
/// alternatives.
fn nth(rules: impl Iterator<Item = (usize, usize)>, index: usize) -> Option<usize> {
    let mut first = 0;
    for (number, alternatives) in rules {
        first += alternatives;
        if index < first {
            return Some(number);
        }
    }
    None
}

/// A rule's conditions, each after a space.
fn words(rule: &Rule) -> String {
    let protocol = |number: &u8| match number {
        1 => " icmp".to_owned(),
        6 => " tcp".to_owned(),
        17 => " udp".to_owned(),
        58 => " icmpv6".to_owned(),
        n => format!(" protocol {n}"),
    };
    let mut text: String = rule.protocols.iter().map(protocol).collect();
    text.extend(rule.from.iter().map(|net| format!(" from {net}")));
    text.extend(rule.to.iter().map(|net| format!(" to {net}")));
    text.extend(rule.remotes.iter().map(|remote| match remote {
        config::Remote::Group(name) => format!(" group:{name}"),
        config::Remote::Set(name) => format!(" set:{name}"),
    }));
    text.extend(rule.ports.iter().map(|ports| match (ports.start(), ports.end()) {
        (first, last) if first == last => format!(" port {first}"),
        (first, last) => format!(" ports {first}-{last}"),
    }));
    if text.is_empty() { " everything".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alternatives_belong_to_their_rule() {
        let rule = |protocols: &[u8], ports: &[std::ops::RangeInclusive<u16>]| Rule {
            protocols: protocols.to_vec(),
            from: vec![],
            to: vec![],
            remotes: vec![],
            ports: ports.to_vec(),
            log: false,
        };
        let rules = [rule(&[6, 17], &[1..=1, 2..=9]), rule(&[], &[]), rule(&[6], &[22..=22])];
        let sizes = || rules.iter().map(|rule| translate::patterns(rule).len());
        let found: Vec<_> = (0..7).map(|index| nth(sizes().enumerate(), index)).collect();
        assert_eq!(found, [Some(0), Some(0), Some(0), Some(0), Some(1), Some(2), None]);
        assert_eq!(words(&rules[0]), " tcp udp port 1 ports 2-9");
        assert_eq!(words(&rules[1]), " everything");
    }
}
