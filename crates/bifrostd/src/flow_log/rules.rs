//! Records about logged rules, for the file and the collector.

use std::net::IpAddr;

use bifrost_avs::{Direction, RuleName, RuleOwner, RuleRecord};
use bifrost_control::config::{self, Config};
use serde::Serialize;

use crate::translate;

/// A record with the port's name and wall-clock times.
#[derive(Clone, Copy)]
pub(super) struct Entry<'a> {
    pub(super) record: &'a RuleRecord,
    /// The port's name.
    pub(super) port: &'a str,
    /// Milliseconds since 1970.
    pub(super) start_ms: u64,
    pub(super) end_ms: u64,
}

impl Entry<'_> {
    /// Address and port of the packets' source and destination.
    pub(super) fn ends(&self) -> [(IpAddr, u16); 2] {
        let record = self.record;
        let (local, remote) = ((record.local, record.local_port), (record.remote, record.remote_port));
        if record.direction == Direction::Egress { [local, remote] } else { [remote, local] }
    }
}

/// The text for a rule, as in `bifrostctl trace`.
pub(super) fn words(rule: &RuleName) -> String {
    let RuleName { owner, direction, number } = rule;
    match owner {
        RuleOwner::Group(group) => format!("{} rule {number} of security group {group}", word(*direction)),
        RuleOwner::Acl(vni) => format!("[[vpc.acl]] {number} of VNI {}", vni.get()),
    }
}

fn word(direction: Direction) -> &'static str {
    if direction == Direction::Egress { "egress" } else { "ingress" }
}

/// The texts of all logged rules.
pub(crate) fn logged(config: &Config) -> Vec<String> {
    let all = |rules: &[config::Rule], name: &dyn Fn(usize) -> Option<RuleName>| {
        let logged = rules.iter().enumerate().filter(|(_, rule)| rule.log);
        logged.filter_map(|(n, _)| name(n)).map(|name| words(&name)).collect::<Vec<_>>()
    };
    let groups = config.security_groups.iter().flat_map(|group| {
        let of = |direction| move |n| Some(translate::group_rule(group, direction, n));
        let ingress = all(&group.ingress, &of(Direction::Ingress));
        [ingress, all(&group.egress, &of(Direction::Egress))].concat()
    });
    let acls = config.vpcs.iter().flat_map(|vpc| {
        let rules: Vec<config::Rule> = vpc.acl.iter().map(|of| of.rule.clone()).collect();
        all(&rules, &|n| translate::acl_rule(vpc, n))
    });
    groups.chain(acls).collect()
}

/// A record as JSON.
#[derive(Serialize)]
pub(super) struct Line<'a> {
    /// Milliseconds since 1970.
    start_ms: u64,
    end_ms: u64,
    port: &'a str,
    vni: u32,
    /// See [`words`].
    rule: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    security_group: Option<&'a str>,
    /// The rule's number in its list, from 1.
    rule_number: u32,
    action: &'static str,
    /// `egress`: the guest sent the packets; `ingress`: they were addressed to it.
    direction: &'static str,
    source: IpAddr,
    source_port: u16,
    destination: IpAddr,
    destination_port: u16,
    protocol: u8,
    packets: u64,
    bytes: u64,
}

impl<'a> Line<'a> {
    pub(super) fn of(entry: &Entry<'a>) -> Self {
        let record = entry.record;
        let [(source, source_port), (destination, destination_port)] = entry.ends();
        Line {
            start_ms: entry.start_ms,
            end_ms: entry.end_ms,
            port: entry.port,
            vni: record.vni.get(),
            rule: words(&record.rule),
            security_group: match &record.rule.owner {
                RuleOwner::Group(group) => Some(group),
                RuleOwner::Acl(_) => None,
            },
            rule_number: record.rule.number,
            action: if record.accepted { "accepted" } else { "rejected" },
            direction: word(record.direction),
            source,
            source_port,
            destination,
            destination_port,
            protocol: record.protocol,
            packets: record.packets,
            bytes: record.bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bifrost_avs::PortId;
    use bifrost_wire::Vni;

    use super::*;

    #[test]
    fn a_line_names_the_rule_and_the_packets_source() {
        let (owner, direction) = (RuleOwner::Group("web".into()), Direction::Ingress);
        let record = RuleRecord {
            rule: Arc::new(RuleName { owner, direction, number: 2 }),
            port: PortId(3),
            vni: Vni::new(100).unwrap(),
            direction,
            accepted: true,
            local: IpAddr::from([10, 0, 0, 1]),
            local_port: 80,
            remote: IpAddr::from([10, 0, 0, 2]),
            remote_port: 5000,
            protocol: 6,
            packets: 1,
            bytes: 60,
            start_ns: 0,
            end_ns: 0,
        };
        let entry = Entry { record: &record, port: "web1", start_ms: 7, end_ms: 8 };
        let expected = "{\"start_ms\":7,\"end_ms\":8,\"port\":\"web1\",\"vni\":100,\
                        \"rule\":\"ingress rule 2 of security group web\",\"security_group\":\"web\",\"rule_number\":2,\
                        \"action\":\"accepted\",\"direction\":\"ingress\",\"source\":\"10.0.0.2\",\"source_port\":5000,\
                        \"destination\":\"10.0.0.1\",\"destination_port\":80,\"protocol\":6,\"packets\":1,\"bytes\":60}";
        assert_eq!(serde_json::to_string(&Line::of(&entry)).unwrap(), expected);
        let acl = RuleName { owner: RuleOwner::Acl(record.vni), direction, number: 3 };
        assert_eq!(words(&acl), "[[vpc.acl]] 3 of VNI 100");
    }
}
