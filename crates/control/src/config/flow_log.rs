//! `[flow_log]` and `[[vpc_flow_log]]`: which flows are logged, and where.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::section::{Section, Sink};
use super::{Config, Port, Vni};

/// Maximum number of `[[vpc_flow_log]]`: the data path keeps them and `[flow_log]` in a 64-bit mask.
pub const MAX_FLOW_LOGS: usize = 63;
/// Maximum number of entries of a list.
const MAX_LIST: usize = 4096;
/// Default of `flows`: of `[flow_log]`, and of each `[[vpc_flow_log]]`, of which there may be many.
const FLOWS: u64 = 1 << 16;
pub(super) const FLOWS_OF_VPC: u64 = 1 << 13;
/// Bytes of a unit of `json_mb`.
pub(super) const MEGABYTE: u64 = 1_000_000;
/// Defaults of other keys.
pub(super) const JSON_MB: u64 = 64;
pub(super) const ACTIVE_S: u64 = 60;
pub(super) const IDLE_S: u64 = 15;
pub(super) const TEMPLATES_S: u64 = 60;
pub(super) const DOMAIN: u64 = 1;
pub(super) const ENTERPRISE: u64 = 32_473;

/// A flow log beside `[flow_log]`, with settings of its own. It does not log rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VpcFlowLog {
    /// Its name.
    pub name: String,
    /// Its settings; those about rules have no effect.
    pub log: FlowLog,
}

/// Settings of flow logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FlowLog {
    /// File for flow records, one JSON object per line; none: no file.
    pub json: Option<PathBuf>,
    /// Size from which the file is renamed to one with `.1` at its end, which replaces an earlier one, bytes; none: it
    /// is never renamed.
    pub json_bytes: Option<u64>,
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
    /// Sampling: one of `one_in` flows is logged.
    pub one_in: u32,
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
    let rules_json = file(&mut s, "rules_json");
    let records = [ALL, ACCEPTED, REJECTED, ("rules", (false, false))];
    let log = settings(&mut s, &["json", "rules_json", "collector"], &records, FLOWS);
    if log.json.is_some() && log.json == rules_json {
        s.error("rules_json", "is the same file as `json`; name another one");
    }
    if log.json.is_some() && !log.accepted && !log.rejected {
        s.error("json", "stays empty with `record = \"rules\"`; rules are logged in `rules_json`");
    }
    let rules_per_s = s.int("rules_per_s", 1..=100_000, 100) as u32;
    let rules_interval = Duration::from_secs(s.int("rules_interval_s", 1..=3600, 10));
    s.finish();
    FlowLog { rules_json, rules_per_s, rules_interval, ..log }
}

/// Parses a `[[vpc_flow_log]]` after `name`.
pub(super) fn vpc_flow_log(name: String, mut s: Section<'_, '_>) -> VpcFlowLog {
    let log = settings(&mut s, &["json", "collector"], &[ALL, ACCEPTED, REJECTED], FLOWS_OF_VPC);
    let json_bytes = s.int("json_mb", 1..=1_000_000, JSON_MB) * MEGABYTE;
    s.finish();
    VpcFlowLog { name, log: FlowLog { json_bytes: Some(json_bytes), ..log } }
}

/// Choices of `record`: accepted and rejected flows.
const ALL: (&str, (bool, bool)) = ("all", (true, true));
const ACCEPTED: (&str, (bool, bool)) = ("accepted", (true, false));
const REJECTED: (&str, (bool, bool)) = ("rejected", (false, true));

/// The keys that both have. One of `destinations` is needed.
fn settings(
    s: &mut Section<'_, '_>,
    destinations: &[&'static str],
    records: &[(&str, (bool, bool))],
    flows: u64,
) -> FlowLog {
    let json = file(s, "json");
    let collector: Option<String> = s.optional("collector");
    let collector = collector.and_then(|text| {
        let address = text.parse::<SocketAddr>().ok().filter(|address| address.port() > 0);
        if address.is_none() && !s.has_failed("collector") {
            s.error("collector", format!("{text:?} is not an address with a port, such as 192.0.2.9:4739"));
        }
        address
    });
    if !destinations.iter().any(|key| s.has(key) || s.has_failed(key)) {
        let files: Vec<&str> = destinations.iter().copied().filter(|key| *key != "collector").collect();
        let files = files.join(", ");
        s.error("json", format!("missing: name a file ({files}), an IPFIX collector (collector), or both"));
    }
    let (accepted, rejected) = s.choice("record", records);
    let vpcs = s.int_list("vpcs", MAX_LIST, 1..=u64::from(Vni::MAX));
    // In range, or 1 after a reported error.
    let vpcs = vpcs.into_iter().map(|vni| Vni::new(vni as u32).unwrap_or(Vni::MIN)).collect();
    FlowLog {
        json,
        json_bytes: None,
        rules_json: None,
        collector,
        vpcs,
        ports: s.list("ports", MAX_LIST),
        accepted,
        rejected,
        one_in: s.int("one_in", 1..=1_000_000, 1) as u32,
        active_timeout: Duration::from_secs(s.int("active_timeout_s", 1..=3600, ACTIVE_S)),
        idle_timeout: Duration::from_secs(s.int("idle_timeout_s", 1..=600, IDLE_S)),
        rules_per_s: 0,
        rules_interval: Duration::ZERO,
        flows: s.int("flows", 64..=1 << 20, flows) as u32,
        template_interval: Duration::from_secs(s.int("template_interval_s", 1..=3600, TEMPLATES_S)),
        domain: s.int("domain", 0..=u64::from(u32::MAX), DOMAIN) as u32,
        enterprise: s.int("enterprise", 1..=u64::from(u32::MAX), ENTERPRISE) as u32,
    }
}

/// The file for records that a key names.
fn file(s: &mut Section<'_, '_>, key: &'static str) -> Option<PathBuf> {
    let file: String = s.optional(key)?;
    if !file.starts_with('/') {
        s.error(key, format!("{file:?} is not an absolute path"));
    }
    Some(PathBuf::from(file))
}

/// Checks relations to other objects.
pub(super) fn check(config: &Config, sink: &Sink<'_>) {
    if let Some(log) = &config.flow_log {
        check_scope(config, sink, log, "flow_log");
    }
    let count = config.flow_logs.len();
    if count > MAX_FLOW_LOGS {
        return sink.error("vpc_flow_log", format!("{count} are more than {MAX_FLOW_LOGS}"));
    }
    let mut names = HashSet::new();
    for (i, log) in config.flow_logs.iter().enumerate() {
        let at = format!("vpc_flow_log[{i}]");
        let field = format!("{at}.name");
        if !names.insert(&log.name) && !sink.failed(&field) {
            sink.error(field, format!("flow log {:?} is defined twice", log.name));
        }
        check_scope(config, sink, &log.log, &at);
    }
}

fn check_scope(config: &Config, sink: &Sink<'_>, log: &FlowLog, at: &str) {
    for (i, vni) in log.vpcs.iter().enumerate() {
        let field = format!("{at}.vpcs[{i}]");
        if config.vpc(*vni).is_none() && !sink.failed_within("vpc") && !sink.failed(&field) {
            sink.error(field, format!("there is no [[vpc]] with vni = {vni}"));
        }
    }
    for (i, name) in log.ports.iter().enumerate() {
        let field = format!("{at}.ports[{i}]");
        if config.port(name).is_none() && !sink.failed_within("port") && !sink.failed(&field) {
            sink.error(field, format!("no port named {name:?}"));
        }
    }
}
