//! Security groups, address sets and network ACLs.

use std::collections::HashSet;
use std::ops::RangeInclusive;

use ipnet::IpNet;
use toml::de::DeValue;

use super::check::{Checked, Seen};
use super::section::{FromValue, Section, Sink, nearest, whole_number};
use super::{Config, FlowLog};

/// Maximum number of rules of one list.
const MAX_RULES: usize = 4096;
/// Maximum number of prefixes, and of port ranges, of one rule.
const MAX_ALTERNATIVES: usize = 64;
/// Maximum number of prefixes of an address set.
const MAX_SET: usize = 65_536;

/// A security group: which connections to and from a guest are allowed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecurityGroup {
    /// Its name.
    pub name: String,
    /// Allowed connections to the guest.
    pub ingress: Vec<Rule>,
    /// Allowed connections from the guest.
    pub egress: Vec<Rule>,
    /// Whether `egress` restricts the guest; otherwise this group allows all connections from it.
    pub restricts_egress: bool,
}

/// A named set of addresses for rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressSet {
    /// Its name.
    pub name: String,
    /// Prefixes, at most 65,536; no host bits are set.
    pub addresses: Vec<IpNet>,
}

/// The match of a rule. Empty fields match everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// IP protocol numbers.
    pub protocols: Vec<u8>,
    /// Source prefixes; no host bits are set.
    pub from: Vec<IpNet>,
    /// Destination prefixes; no host bits are set.
    pub to: Vec<IpNet>,
    /// Groups and sets named in `from` or `to`; only for rules of security groups.
    pub remotes: Vec<Remote>,
    /// Destination ports of TCP or UDP.
    pub ports: Vec<RangeInclusive<u16>>,
    /// Whether packets that it accepts or rejects are logged.
    pub log: bool,
}

/// A group or a set in a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remote {
    /// Guests of the same VPC with this security group.
    Group(String),
    /// An [`AddressSet`].
    Set(String),
}

/// One rule of a network's ACL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AclRule {
    /// Direction of the packets.
    pub direction: Direction,
    /// The action.
    pub action: Action,
    /// The match.
    pub rule: Rule,
}

/// The direction of a packet, as seen from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the guest.
    Ingress,
    /// From the guest.
    Egress,
}

/// The action of an ACL rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// The packet passes.
    Allow,
    /// The packet is dropped.
    Deny,
}

/// Bounds of the session and flow tables of each worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sessions {
    /// Sessions of all ports, 1024 to 16777216.
    pub total: u32,
    /// Sessions of one port, 16 to `total`.
    pub per_port: u32,
    /// Flow records in each direction, which cache decisions, 0 to 1048576.
    pub flow_records: u32,
    /// Whether packets of a batch share lookups.
    pub vectors: bool,
}

pub(super) fn sessions(mut s: Section<'_, '_>) -> Sessions {
    let total = s.int("total", 1024..=1 << 24, 1 << 20) as u32;
    let default = u64::from(total).min(100_000);
    let sessions = Sessions {
        total,
        per_port: s.int("per_port", 16..=u64::from(total), default) as u32,
        flow_records: s.int("flow_records", 0..=1 << 20, 1 << 15) as u32,
        vectors: s.optional("vectors").unwrap_or(true),
    };
    s.finish();
    sessions
}

/// Parses the section after `name`.
pub(super) fn security_group(name: String, mut s: Section<'_, '_>) -> SecurityGroup {
    let ingress = rules(&mut s, "ingress", "from");
    let restricts_egress = s.has("egress");
    let egress = rules(&mut s, "egress", "to");
    s.finish();
    SecurityGroup { name, ingress, egress, restricts_egress }
}

/// Parses the section after `name`.
pub(super) fn address_set(name: String, mut s: Section<'_, '_>) -> AddressSet {
    let addresses = s.list("addresses", MAX_SET);
    no_host_bits(&s, "addresses", &addresses);
    s.finish();
    AddressSet { name, addresses }
}

pub(super) fn acl(s: &mut Section<'_, '_>) -> Vec<AclRule> {
    let sections = s.sections("acl");
    bounded(s, "acl", sections.len());
    let read = |mut s: Section<'_, '_>| {
        let direction =
            s.required_choice("direction", &[("ingress", Direction::Ingress), ("egress", Direction::Egress)]);
        let action = s.required_choice("action", &[("deny", Action::Deny), ("allow", Action::Allow)]);
        let (from, to) = (s.list("from", MAX_ALTERNATIVES), s.list("to", MAX_ALTERNATIVES));
        AclRule { direction, action, rule: rule(s, from, to, Vec::new()) }
    };
    sections.into_iter().map(read).collect()
}

/// Parses rules of a security group; `key` is the key of the remote end, `from` or `to`.
fn rules<'a, 'i>(s: &mut Section<'a, 'i>, list: &'static str, key: &'static str) -> Vec<Rule> {
    let sections = s.sections(list);
    bounded(s, list, sections.len());
    let read = |mut s: Section<'a, 'i>| {
        let (mut prefixes, mut remotes) = (Vec::new(), Vec::new());
        for who in s.list(key, MAX_ALTERNATIVES) {
            match who {
                Who::Prefix(prefix) => prefixes.push(prefix),
                Who::Named(remote) => remotes.push(remote),
            }
        }
        let (from, to) = if key == "from" { (prefixes, Vec::new()) } else { (Vec::new(), prefixes) };
        rule(s, from, to, remotes)
    };
    sections.into_iter().map(read).collect()
}

fn bounded(s: &Section<'_, '_>, key: &str, rules: usize) {
    if rules > MAX_RULES {
        s.error(key, format!("{rules} rules are more than {MAX_RULES}"));
    }
}

/// Reports prefixes with host bits set.
fn no_host_bits(s: &Section<'_, '_>, key: &str, prefixes: &[IpNet]) {
    if let Some(prefix) = prefixes.iter().find(|p| p.trunc() != **p).filter(|_| !s.has_failed(key)) {
        s.error(key, format!("{prefix} has host bits set; write {}", prefix.trunc()));
    }
}

fn rule(mut s: Section<'_, '_>, from: Vec<IpNet>, to: Vec<IpNet>, remotes: Vec<Remote>) -> Rule {
    no_host_bits(&s, "from", &from);
    no_host_bits(&s, "to", &to);
    let protocols = protocols(&mut s);
    let ports = port_ranges(&mut s, "ports");
    let has_ports = protocols == [TCP] || protocols == [UDP] || s.has_failed("protocol");
    if !ports.is_empty() && !has_ports {
        s.error("ports", "only \"tcp\" and \"udp\" have ports; name one of them as protocol");
    }
    let log = s.optional("log").unwrap_or(false);
    s.finish();
    Rule { protocols, from, to, remotes, ports, log }
}

/// Reports logged rules if no destination for their records is configured.
fn check_logs(config: &Config, sink: &Sink<'_>) {
    if config.flow_log.as_ref().is_some_and(FlowLog::has_rules) || sink.failed_within("flow_log") {
        return;
    }
    let fields = |list: String, rules: Vec<&Rule>| {
        let logged = rules.into_iter().enumerate().filter(|(_, rule)| rule.log);
        logged.map(|(k, _)| format!("{list}[{k}].log")).collect::<Vec<_>>()
    };
    let of_group = |(i, group): (usize, &SecurityGroup)| {
        let ingress = fields(format!("security_group[{i}].ingress"), group.ingress.iter().collect());
        [ingress, fields(format!("security_group[{i}].egress"), group.egress.iter().collect())].concat()
    };
    let of_groups = config.security_groups.iter().enumerate().flat_map(of_group);
    let acls = config.vpcs.iter().enumerate();
    let of_acls = acls.flat_map(|(i, vpc)| fields(format!("vpc[{i}].acl"), vpc.acl.iter().map(|a| &a.rule).collect()));
    for field in of_groups.chain(of_acls) {
        let message = "no destination for its records; set `rules_json` or `collector` in [flow_log]";
        sink.error(field, message);
    }
}

/// Checks that names are unique, that named groups and sets exist, and that logged rules have a destination.
pub(super) fn check(config: &Checked<'_>, sink: &Sink<'_>) {
    check_logs(config, sink);
    let mut names = Seen::new(sink);
    for (i, group) in config.security_groups.iter().enumerate() {
        names.once(format!("security_group[{i}].name"), &group.name, || format!("security group {:?}", group.name));
    }
    let mut names = Seen::new(sink);
    for (i, set) in config.address_sets.iter().enumerate() {
        names.once(format!("address_set[{i}].name"), &set.name, || format!("address set {:?}", set.name));
    }
    let groups = Names::new(sink, ("security group", "security_group"), config.security_groups.iter().map(|g| &g.name));
    let sets = Names::new(sink, ("address set", "address_set"), config.address_sets.iter().map(|s| &s.name));
    for (i, group) in config.security_groups.iter().enumerate() {
        for (list, key, rules) in [("ingress", "from", &group.ingress), ("egress", "to", &group.egress)] {
            for (k, rule) in rules.iter().enumerate() {
                let field = || format!("security_group[{i}].{list}[{k}].{key}");
                for remote in &rule.remotes {
                    match remote {
                        Remote::Group(name) => groups.check(name, field),
                        Remote::Set(name) => sets.check(name, field),
                    }
                }
            }
        }
    }
    for (i, port) in config.ports.iter().enumerate() {
        for (k, name) in port.security_groups.iter().enumerate() {
            groups.check(name, || format!("port[{i}].security_groups[{k}]"));
        }
    }
    for (i, route) in config.routes.iter().enumerate() {
        for (k, name) in route.security_groups.iter().enumerate() {
            groups.check(name, || format!("route[{i}].security_groups[{k}]"));
        }
    }
}

/// The names of one kind of object.
struct Names<'a> {
    sink: &'a Sink<'a>,
    kind: (&'static str, &'static str),
    listed: Vec<&'a str>,
    known: HashSet<&'a str>,
}

impl<'a> Names<'a> {
    /// `kind`: its description, and the section's name.
    fn new(sink: &'a Sink<'a>, kind: (&'static str, &'static str), names: impl Iterator<Item = &'a String>) -> Self {
        let listed: Vec<&str> = names.map(String::as_str).collect();
        Names { sink, kind, known: listed.iter().copied().collect(), listed }
    }

    /// Reports an unknown name.
    fn check(&self, name: &str, field: impl Fn() -> String) {
        let (words, section) = self.kind;
        if self.known.contains(name) || self.sink.failed(field()) || self.sink.failed_within(section) {
            return;
        }
        let hint = match nearest(name, &self.listed) {
            Some(name) => format!("did you mean {name:?}?"),
            None if self.listed.is_empty() => format!("add a [[{section}]]"),
            None => format!("known names: {}", self.listed.join(", ")),
        };
        self.sink.error(field(), format!("no {words} named {name:?}; {hint}"));
    }
}

/// A remote end: a prefix, `"group:NAME"` or `"set:NAME"`.
enum Who {
    Prefix(IpNet),
    Named(Remote),
}

impl FromValue for Who {
    fn placeholder() -> Self {
        Who::Prefix(IpNet::placeholder())
    }

    fn from_value(value: &DeValue<'_>) -> Result<Self, String> {
        let text = String::from_value(value)?;
        if let Some(name) = text.strip_prefix("group:") {
            return Ok(Who::Named(Remote::Group(name.to_owned())));
        }
        if let Some(name) = text.strip_prefix("set:") {
            return Ok(Who::Named(Remote::Set(name.to_owned())));
        }
        let or_names = |message| format!("{message}, nor \"group:NAME\", nor \"set:NAME\"");
        IpNet::from_value(value).map(Who::Prefix).map_err(|m| if text.contains(':') { or_names(m) } else { m })
    }
}

/// Parses the key `protocol`; empty: any.
pub(super) fn protocols(s: &mut Section<'_, '_>) -> Vec<u8> {
    s.optional::<Protocols>("protocol").map_or_else(Vec::new, |p| p.0)
}

/// Parses ports and port ranges.
pub(super) fn port_ranges(s: &mut Section<'_, '_>, key: &'static str) -> Vec<RangeInclusive<u16>> {
    s.list::<PortRange>(key, MAX_ALTERNATIVES).into_iter().map(|p| p.0).collect()
}

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

/// `"any"`, `"tcp"`, `"udp"`, `"icmp"` (ICMP and ICMPv6), or a number.
struct Protocols(Vec<u8>);

impl FromValue for Protocols {
    fn placeholder() -> Self {
        Protocols(Vec::new())
    }

    fn from_value(value: &DeValue<'_>) -> Result<Self, String> {
        if let Some(number) = whole_number(value, &(0..=255)) {
            return number.map(|n| Protocols(vec![n as u8]));
        }
        match String::from_value(value)?.as_str() {
            "any" => Ok(Protocols(Vec::new())),
            "tcp" => Ok(Protocols(vec![TCP])),
            "udp" => Ok(Protocols(vec![UDP])),
            "icmp" => Ok(Protocols(vec![ICMP, ICMPV6])),
            other => {
                Err(format!("{other:?} is not one of \"any\", \"tcp\", \"udp\", \"icmp\", or a number in 0..=255"))
            }
        }
    }
}

/// `80`, `"80"` or `"8000-8099"`.
struct PortRange(RangeInclusive<u16>);

impl FromValue for PortRange {
    fn placeholder() -> Self {
        PortRange(0..=0)
    }

    fn from_value(value: &DeValue<'_>) -> Result<Self, String> {
        if let Some(number) = whole_number(value, &(0..=65535)) {
            return number.map(|n| PortRange(n as u16..=n as u16));
        }
        let text = String::from_value(value)?;
        let wrong = || format!("{text:?} is neither a port, such as 80, nor a range, such as \"8000-8099\"");
        let (first, last) = text.split_once('-').unwrap_or((&text, &text));
        let (first, last): (u16, u16) = (first.parse().map_err(|_| wrong())?, last.parse().map_err(|_| wrong())?);
        if first > last { Err(format!("{text:?} ends before it begins")) } else { Ok(PortRange(first..=last)) }
    }
}
