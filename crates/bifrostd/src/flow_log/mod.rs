//! Flow logs: fetches records from the workers, and writes them to files and collectors.
//!
//! This runs on its own thread, so that neither a slow disk nor the network delays a worker. Each poll scans a bounded
//! part of a worker's flows.

pub(crate) mod configured;
mod entry;
pub(crate) mod export;
mod file;
pub(crate) mod handed;
mod ipfix;
mod rules;

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, UdpSocket};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bifrost_avs::{Direction, FlowRecord, PortId, RuleRecord};
use bifrost_control::config::{Config, FlowLog};
use serde::Serialize;

use self::configured::{HOST, wanted};
use self::entry::Entry;
use self::file::LogFile;
use self::ipfix::Exporter;
pub(crate) use self::rules::logged as logged_rules;
use crate::names::Names;

/// Polling interval; each poll scans a part of the flows.
const TICK: Duration = Duration::from_millis(100);
/// Number of parts in which a worker's flows are scanned, one part each tick.
const PARTS: usize = 8;
/// Pause after a panic, which may recur.
const AFTER_PANIC: Duration = Duration::from_secs(1);
/// Minimum interval between warnings.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Counters of exported records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Counters {
    /// Written to the file.
    pub(crate) json_records: u64,
    /// Not written to the file.
    pub(crate) json_lost_records: u64,
    /// Sent to the collector.
    pub(crate) ipfix_records: u64,
    /// Not sent to the collector.
    pub(crate) ipfix_lost_records: u64,
    /// Messages to the collector, including those with templates.
    pub(crate) ipfix_messages: u64,
    /// Records about rules, written to their file.
    pub(crate) rule_json_records: u64,
    /// Records about rules, not written to their file.
    pub(crate) rule_json_lost_records: u64,
}

impl Counters {
    /// Every counter by name.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("json_records", self.json_records),
            ("json_lost_records", self.json_lost_records),
            ("ipfix_records", self.ipfix_records),
            ("ipfix_lost_records", self.ipfix_lost_records),
            ("ipfix_messages", self.ipfix_messages),
            ("rule_json_records", self.rule_json_records),
            ("rule_json_lost_records", self.rule_json_lost_records),
        ]
        .into_iter()
    }

    fn add(&mut self, other: &Counters) {
        self.json_records += other.json_records;
        self.json_lost_records += other.json_lost_records;
        self.ipfix_records += other.ipfix_records;
        self.ipfix_lost_records += other.ipfix_lost_records;
        self.ipfix_messages += other.ipfix_messages;
        self.rule_json_records += other.rule_json_records;
        self.rule_json_lost_records += other.rule_json_lost_records;
    }
}

/// Where records go, and how many there were. A thread that has locked the daemon's state may wait for this, but not
/// the other way round.
#[derive(Default)]
pub(crate) struct Exports {
    writing: Mutex<Writing>,
    counted: Mutex<Counted>,
}

/// Counters of exported records.
#[derive(Default)]
struct Counted {
    all: Counters,
    /// Of each log, by name.
    logs: BTreeMap<String, Counters>,
}

/// Locked from the time at which records leave a worker until they are written.
#[derive(Default)]
struct Writing {
    /// Names of ports, including removed ones, which may still have records.
    names: BTreeMap<PortId, String>,
    /// By the log's name; the host's flow log has none.
    outputs: BTreeMap<String, Outputs>,
}

impl Exports {
    /// The counters now.
    pub(crate) fn counters(&self) -> Counters {
        self.counted().all
    }

    /// The counters of one log.
    pub(crate) fn counters_of(&self, log: &str) -> Counters {
        self.counted().logs.get(log).copied().unwrap_or_default()
    }

    fn counted(&self) -> MutexGuard<'_, Counted> {
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writing(&self) -> MutexGuard<'_, Writing> {
        self.writing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, log: &str, counted: &Counters) {
        let mut all = self.counted();
        all.all.add(counted);
        match all.logs.get_mut(log) {
            Some(of_log) => of_log.add(counted),
            None => _ = all.logs.insert(log.to_owned(), *counted),
        }
    }

    /// Forgets the counters of logs that are gone.
    fn forget(&self, is_gone: impl Fn(&str) -> bool) {
        self.counted().logs.retain(|log, _| !is_gone(log));
    }
}

impl Writing {
    /// Opens the destinations of logs that are new or have changed. Others stay, and so do those of former logs.
    fn open(&mut self, config: &Config) {
        for (name, log) in wanted(config) {
            if self.outputs.get(name).is_none_or(|open| open.spec != *log) {
                self.outputs.insert(name.to_owned(), Outputs::new(name, log.clone()));
            }
        }
    }

    /// Opens the destinations of logs that have none, without those that have changed.
    fn open_missing(&mut self, config: &Config) {
        for (name, log) in wanted(config) {
            let outputs = self.outputs.entry(name.to_owned());
            outputs.or_insert_with(|| Outputs::new(name, log.clone()));
        }
    }

    /// Writes records to the destinations of their logs, and the templates that are due.
    fn export(&mut self, exports: &Exports, records: Records, now_ns: u64) {
        let mut of_logs = records.by_log();
        for (name, outputs) in &mut self.outputs {
            let of_log = of_logs.remove(name.as_str()).unwrap_or_default();
            exports.add(name, &outputs.export(&of_log, &self.names, now_ns));
        }
    }

    fn name_ports(&mut self, config: &Config, names: &Names) {
        for port in &config.ports {
            if let Some(id) = names.port(&port.name) {
                self.names.insert(PortId(id), port.name.clone());
            }
        }
    }
}

/// Records from workers.
#[derive(Default)]
struct Records {
    flows: Vec<FlowRecord>,
    rules: Vec<RuleRecord>,
}

impl Records {
    fn is_empty(&self) -> bool {
        self.flows.is_empty() && self.rules.is_empty()
    }

    fn add(&mut self, other: Records) {
        self.flows.extend(other.flows);
        self.rules.extend(other.rules);
    }

    /// The records of each log. Rules are logged by the host's.
    fn by_log(self) -> BTreeMap<Arc<str>, Records> {
        let mut logs: BTreeMap<Arc<str>, Records> = BTreeMap::new();
        for record in self.flows {
            logs.entry(Arc::clone(&record.log)).or_default().flows.push(record);
        }
        if !self.rules.is_empty() {
            logs.entry(HOST.into()).or_default().rules = self.rules;
        }
        logs
    }
}

/// Where records of a log go.
struct Outputs {
    /// The log's name.
    name: String,
    spec: FlowLog,
    file: Option<LogFile>,
    rules_file: Option<LogFile>,
    collector: Option<Collector>,
    last_warning: Option<Instant>,
}

impl Outputs {
    fn new(name: &str, spec: FlowLog) -> Self {
        let most_bytes = spec.json_bytes;
        let file = |path: &Option<PathBuf>| path.clone().map(|path| LogFile::new(path, most_bytes));
        let (file, rules_file) = (file(&spec.json), file(&spec.rules_json));
        let exporter = || Exporter::new(spec.domain, spec.enterprise);
        let collector = spec.collector.map(|_| Collector { socket: None, exporter: exporter(), templates_sent: None });
        Outputs { name: name.to_owned(), spec, file, rules_file, collector, last_warning: None }
    }

    fn export(&mut self, records: &Records, names: &BTreeMap<PortId, String>, now_ns: u64) -> Counters {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let now_ms = now.as_millis() as u64;
        let wall_ms = |at_ns: u64| now_ms.saturating_sub(now_ns.saturating_sub(at_ns) / 1_000_000);
        let name = |port| names.get(port).map_or("", String::as_str);
        let entries = records.flows.iter().map(|record| {
            let (start_ms, end_ms) = (wall_ms(record.start_ns), wall_ms(record.end_ns));
            Entry { record, port: name(&record.port), start_ms, end_ms }
        });
        let entries: Vec<Entry<'_>> = entries.collect();
        let rules = records.rules.iter().map(|record| {
            let (start_ms, end_ms) = (wall_ms(record.start_ns), wall_ms(record.end_ns));
            rules::Entry { record, port: name(&record.port), start_ms, end_ms }
        });
        let rules: Vec<rules::Entry<'_>> = rules.collect();
        let mut counted = Counters::default();
        let count = entries.len() as u64;
        if let Some(file) = self.file.as_mut().filter(|_| count > 0) {
            let log = Some(self.name.as_str()).filter(|name| *name != HOST);
            match file.write(entries.iter().map(|entry| Line::of(log, self.spec.one_in, entry))) {
                Ok(()) => counted.json_records = count,
                Err(error) => {
                    counted.json_lost_records = count;
                    warn(&mut self.last_warning, &format!("{}: {error}", file.path.display()));
                }
            }
        }
        if let Some(file) = self.rules_file.as_mut().filter(|_| !rules.is_empty()) {
            match file.write(rules.iter().map(rules::Line::of)) {
                Ok(()) => counted.rule_json_records = rules.len() as u64,
                Err(error) => {
                    counted.rule_json_lost_records = rules.len() as u64;
                    warn(&mut self.last_warning, &format!("{}: {error}", file.path.display()));
                }
            }
        }
        if let Some(collector) = &mut self.collector {
            let now_s = now.as_secs() as u32;
            if let Err(error) = collector.send(&self.spec, (&entries, &rules), now_s, &mut counted) {
                warn(&mut self.last_warning, &format!("the IPFIX collector: {error}"));
            }
            counted.ipfix_lost_records = count + rules.len() as u64 - counted.ipfix_records;
        }
        counted
    }
}

fn warn(last: &mut Option<Instant>, what: &str) {
    if last.is_none_or(|last| last.elapsed() >= WARN_INTERVAL) {
        *last = Some(Instant::now());
        tracing::warn!("flow records are lost: {what}");
    }
}

/// A record as JSON.
#[derive(Serialize)]
struct Line<'a> {
    /// The log's name; the host's has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    log: Option<&'a str>,
    /// Milliseconds since 1970.
    start_ms: u64,
    end_ms: u64,
    port: &'a str,
    vni: u32,
    /// `egress`: the guest sent the first packet; `ingress`: the other end.
    direction: &'static str,
    source: IpAddr,
    source_port: u16,
    destination: IpAddr,
    destination_port: u16,
    protocol: u8,
    packets: u64,
    bytes: u64,
    tcp_flags: u8,
    reverse_packets: u64,
    reverse_bytes: u64,
    reverse_tcp_flags: u8,
    action: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'static str>,
    end: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    handshake_us: Option<u64>,
    /// Sampling: the log has one of this many flows; absent: it has all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    one_in: Option<u32>,
}

impl<'a> Line<'a> {
    fn of(log: Option<&'a str>, one_in: u32, entry: &Entry<'a>) -> Self {
        let record = entry.record;
        let local = (record.local, record.local_port, record.sent);
        let remote = (record.remote, record.remote_port, record.received);
        let (direction, from, to) = match record.origin {
            Direction::Egress => ("egress", local, remote),
            Direction::Ingress => ("ingress", remote, local),
        };
        let ((source, source_port, there), (destination, destination_port, back)) = (from, to);
        Line {
            log,
            start_ms: entry.start_ms,
            end_ms: entry.end_ms,
            port: entry.port,
            vni: record.vni.get(),
            direction,
            source,
            source_port,
            destination,
            destination_port,
            protocol: record.protocol,
            packets: there.packets,
            bytes: there.bytes,
            tcp_flags: there.tcp_flags,
            reverse_packets: back.packets,
            reverse_bytes: back.bytes,
            reverse_tcp_flags: back.tcp_flags,
            action: if record.rejected.is_some() { "rejected" } else { "accepted" },
            reason: record.rejected.map(|reason| reason.name()),
            end: record.end.name(),
            handshake_us: record.handshake_ns.map(|ns| ns / 1000),
            one_in: Some(one_in).filter(|one_in| *one_in > 1),
        }
    }
}

/// An IPFIX collector.
struct Collector {
    socket: Option<UdpSocket>,
    exporter: Exporter,
    /// When the templates were last sent.
    templates_sent: Option<Instant>,
}

impl Collector {
    fn send(
        &mut self,
        spec: &FlowLog,
        (entries, rules): (&[Entry<'_>], &[rules::Entry<'_>]),
        now_s: u32,
        counted: &mut Counters,
    ) -> std::io::Result<()> {
        let Some(address) = spec.collector else { return Ok(()) };
        if self.socket.is_none() {
            let any: IpAddr =
                if address.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
            let socket = UdpSocket::bind((any, 0))?;
            socket.connect(address)?;
            // Records that do not fit into a full queue are counted as lost; sending never blocks.
            socket.set_nonblocking(true)?;
            self.socket = Some(socket);
        }
        let Some(socket) = &self.socket else { return Ok(()) };
        // Over UDP, a template may be lost, and the collector may restart (RFC 7011, section 8.1).
        if self.templates_sent.is_none_or(|templates_sent| templates_sent.elapsed() >= spec.template_interval) {
            socket.send(&self.exporter.templates(now_s))?;
            counted.ipfix_messages += 1;
            self.templates_sent = Some(Instant::now());
        }
        let mut result = Ok(());
        let mut messages = self.exporter.records(entries, now_s);
        messages.extend(self.exporter.rules(rules, now_s));
        for (message, count) in messages {
            match socket.send(&message) {
                Ok(_) => {
                    counted.ipfix_messages += 1;
                    counted.ipfix_records += count as u64;
                }
                // If no collector listens, the ICMP error is reported for the next message.
                Err(error) => result = Err(error),
            }
        }
        result
    }
}
