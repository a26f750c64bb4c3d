//! Who may talk to whom: security groups and network ACLs.

use std::ops::RangeInclusive;

use ipnet::IpNet;
use toml::de::DeValue;

use super::section::{FromValue, Section, whole_number};

/// Most rules of one list.
const MAX_RULES: usize = 4096;
/// Most prefixes, and most port ranges, of one rule.
const MAX_ALTERNATIVES: usize = 64;

/// Conversations that may begin with a guest, and that it may begin itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecurityGroup {
    /// Its name.
    pub name: String,
    /// What others may begin.
    pub ingress: Vec<Rule>,
    /// What the guest may begin; empty: everything.
    pub egress: Vec<Rule>,
}

/// Which packets. What is empty or `None` matches everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rule {
    /// The protocols: numbers of the IP header.
    pub protocols: Vec<u8>,
    /// Source prefixes; no host bits are set.
    pub from: Vec<IpNet>,
    /// Destination prefixes; no host bits are set.
    pub to: Vec<IpNet>,
    /// Destination ports of TCP or UDP.
    pub ports: Vec<RangeInclusive<u16>>,
}

/// One rule of a network's ACL.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AclRule {
    /// Packets from guests, or to guests.
    pub direction: Direction,
    /// Whether they pass.
    pub action: Action,
    /// Which.
    pub rule: Rule,
}

/// Which way a packet goes, seen from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// To the guest.
    Ingress,
    /// From the guest.
    Egress,
}

/// What becomes of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It passes.
    Allow,
    /// It is dropped.
    Deny,
}

/// How many conversations and flows are remembered, of each worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sessions {
    /// Of all ports, 1024 to 16777216.
    pub total: u32,
    /// Of one port, 16 to `total`.
    pub per_port: u32,
    /// Flows in each direction whose packets need not be judged again, 0 to 1048576.
    pub flow_records: u32,
    /// Whether what packets that come together have in common is looked up once.
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

/// `name` has been read.
pub(super) fn security_group(name: String, mut s: Section<'_, '_>) -> SecurityGroup {
    let ingress = rules(&mut s, "ingress", |s| s.list("from", MAX_ALTERNATIVES), |_| Vec::new());
    let egress = rules(&mut s, "egress", |_| Vec::new(), |s| s.list("to", MAX_ALTERNATIVES));
    s.finish();
    SecurityGroup { name, ingress, egress }
}

pub(super) fn acl(s: &mut Section<'_, '_>) -> Vec<AclRule> {
    let sections = s.sections("acl");
    bounded(s, "acl", sections.len());
    let read = |mut s: Section<'_, '_>| {
        let direction =
            s.required_choice("direction", &[("ingress", Direction::Ingress), ("egress", Direction::Egress)]);
        let action = s.required_choice("action", &[("deny", Action::Deny), ("allow", Action::Allow)]);
        let (from, to) = (s.list("from", MAX_ALTERNATIVES), s.list("to", MAX_ALTERNATIVES));
        AclRule { direction, action, rule: rule(s, from, to) }
    };
    sections.into_iter().map(read).collect()
}

fn rules<'a, 'i>(
    s: &mut Section<'a, 'i>,
    key: &'static str,
    from: impl Fn(&mut Section<'a, 'i>) -> Vec<IpNet>,
    to: impl Fn(&mut Section<'a, 'i>) -> Vec<IpNet>,
) -> Vec<Rule> {
    let sections = s.sections(key);
    bounded(s, key, sections.len());
    let read = |mut s: Section<'a, 'i>| {
        let (from, to) = (from(&mut s), to(&mut s));
        rule(s, from, to)
    };
    sections.into_iter().map(read).collect()
}

fn bounded(s: &Section<'_, '_>, key: &str, rules: usize) {
    if rules > MAX_RULES {
        s.error(key, format!("{rules} rules are more than {MAX_RULES}"));
    }
}

fn rule(mut s: Section<'_, '_>, from: Vec<IpNet>, to: Vec<IpNet>) -> Rule {
    for (key, prefixes) in [("from", &from), ("to", &to)] {
        if let Some(prefix) = prefixes.iter().find(|p| p.trunc() != **p).filter(|_| !s.has_failed(key)) {
            s.error(key, format!("{prefix} has host bits set; write {}", prefix.trunc()));
        }
    }
    let protocols = protocols(&mut s);
    let ports = port_ranges(&mut s, "ports");
    let has_ports = protocols == [TCP] || protocols == [UDP] || s.has_failed("protocol");
    if !ports.is_empty() && !has_ports {
        s.error("ports", "only \"tcp\" and \"udp\" have ports; name one of them as protocol");
    }
    s.finish();
    Rule { protocols, from, to, ports }
}

/// The key `protocol`; empty: any.
pub(super) fn protocols(s: &mut Section<'_, '_>) -> Vec<u8> {
    s.optional::<Protocols>("protocol").map_or_else(Vec::new, |p| p.0)
}

/// Ports and ranges of ports.
pub(super) fn port_ranges(s: &mut Section<'_, '_>, key: &'static str) -> Vec<RangeInclusive<u16>> {
    s.list::<PortRange>(key, MAX_ALTERNATIVES).into_iter().map(|p| p.0).collect()
}

const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;

/// `"any"`, `"tcp"`, `"udp"`, `"icmp"` (of both families), or a number.
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
