//! `[flow_log]`: which flows are logged, and where.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::section::{Section, Sink};
use super::{Config, Port, Vni};

/// Maximum number of entries of a list.
const MAX_LIST: usize = 4096;

/// Settings of flow logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLog {
    /// File for flow records, one JSON object per line; none: no file.
    pub json: Option<PathBuf>,
    /// File for records of logged rules, one JSON object per line; none: no file.
    pub rules_json: Option<PathBuf>,
    /// IPFIX collector over UDP (RFC 7011); none: no IPFIX.
    pub collector: Option<SocketAddr>,
    /// Ports of these VPCs are logged.
    pub vpcs: Vec<Vni>,
    /// These ports are logged as well. If both lists are empty: all ports.
    pub ports: Vec<String>,
    /// Whether flows whose packets pass are logged.
    pub accepted: bool,
    /// Whether flows whose packets are dropped are logged.
    pub rejected: bool,
    /// Interval between records of a flow that continues.
    pub active_timeout: Duration,
    /// Idle time after which a flow has ended.
    pub idle_timeout: Duration,
    /// New flows for which logged rules create records, for each port and worker, per second.
    pub rules_per_s: u32,
    /// Interval between records of a rejected flow that continues.
    pub rules_interval: Duration,
    /// Maximum number of flows that a worker counts at a time.
    pub flows: u32,
    /// Interval between IPFIX templates.
    pub template_interval: Duration,
    /// Observation domain of the messages.
    pub domain: u32,
    /// Private enterprise number of the fields without an IANA number; 32473 is reserved for examples (RFC 5612).
    pub enterprise: u32,
}

impl FlowLog {
    /// Whether a port's flows are logged.
    pub fn has(&self, port: &Port) -> bool {
        let all = self.vpcs.is_empty() && self.ports.is_empty();
        all || self.vpcs.contains(&port.vni) || self.ports.contains(&port.name)
    }

    /// Whether flow records are logged, independently of rules.
    pub fn has_flows(&self) -> bool {
        (self.accepted || self.rejected) && (self.json.is_some() || self.collector.is_some())
    }

    /// Whether records of rules have a destination.
    pub fn has_rules(&self) -> bool {
        self.rules_json.is_some() || self.collector.is_some()
    }
}

/// Parses `[flow_log]`.
pub(super) fn flow_log(mut s: Section<'_, '_>) -> FlowLog {
    let json: Option<String> = s.optional("json");
    let rules_json: Option<String> = s.optional("rules_json");
    for (key, file) in [("json", &json), ("rules_json", &rules_json)] {
        if let Some(file) = file.as_ref().filter(|file| !file.starts_with('/')) {
            s.error(key, format!("{file:?} is not an absolute path"));
        }
    }
    if json.is_some() && json == rules_json {
        s.error("rules_json", "is the same file as `json`; name another one");
    }
    let collector: Option<String> = s.optional("collector");
    let collector = collector.and_then(|text| {
        let address = text.parse::<SocketAddr>().ok().filter(|address| address.port() > 0);
        if address.is_none() && !s.has_failed("collector") {
            s.error("collector", format!("{text:?} is not an address with a port, such as 192.0.2.9:4739"));
        }
        address
    });
    let has_failed = ["json", "rules_json", "collector"].into_iter().any(|key| s.has_failed(key));
    if json.is_none() && rules_json.is_none() && collector.is_none() && !has_failed {
        s.error("json", "missing: name a file (json, rules_json), an IPFIX collector (collector), or both");
    }
    let (all, accepted, rejected) = (("all", (true, true)), ("accepted", (true, false)), ("rejected", (false, true)));
    let (accepted, rejected) = s.choice("record", &[all, accepted, rejected, ("rules", (false, false))]);
    if json.is_some() && !accepted && !rejected {
        s.error("json", "stays empty with `record = \"rules\"`; rules are logged in `rules_json`");
    }
    let vpcs = s.int_list("vpcs", MAX_LIST, 1..=u64::from(Vni::MAX));
    // In range, or 1 after a reported error.
    let vpcs = vpcs.into_iter().map(|vni| Vni::new(vni as u32).unwrap_or(Vni::MIN)).collect();
    let log = FlowLog {
        json: json.map(PathBuf::from),
        rules_json: rules_json.map(PathBuf::from),
        collector,
        vpcs,
        ports: s.list("ports", MAX_LIST),
        accepted,
        rejected,
        active_timeout: Duration::from_secs(s.int("active_timeout_s", 1..=3600, 60)),
        idle_timeout: Duration::from_secs(s.int("idle_timeout_s", 1..=600, 15)),
        rules_per_s: s.int("rules_per_s", 1..=100_000, 100) as u32,
        rules_interval: Duration::from_secs(s.int("rules_interval_s", 1..=3600, 10)),
        flows: s.int("flows", 64..=1 << 20, 1 << 16) as u32,
        template_interval: Duration::from_secs(s.int("template_interval_s", 1..=3600, 60)),
        domain: s.int("domain", 0..=u64::from(u32::MAX), 1) as u32,
        enterprise: s.int("enterprise", 1..=u64::from(u32::MAX), 32_473) as u32,
    };
    s.finish();
    log
}

/// Checks its relations to other objects.
pub(super) fn check(config: &Config, sink: &Sink<'_>) {
    let Some(log) = &config.flow_log else { return };
    for (i, vni) in log.vpcs.iter().enumerate() {
        let field = format!("flow_log.vpcs[{i}]");
        if config.vpc(*vni).is_none() && !sink.failed_within("vpc") && !sink.failed(&field) {
            sink.error(field, format!("there is no [[vpc]] with vni = {vni}"));
        }
    }
    for (i, name) in log.ports.iter().enumerate() {
        let field = format!("flow_log.ports[{i}]");
        if config.port(name).is_none() && !sink.failed_within("port") && !sink.failed(&field) {
            sink.error(field, format!("no port named {name:?}"));
        }
    }
}
