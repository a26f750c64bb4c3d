//! Counters and gauges in the text format that Prometheus reads (OpenMetrics 1.0).

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use bifrost_relay_api::traces::Traces;

use crate::audit::Audit;
use crate::relay::Relay;

/// The format's media type.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// All of them.
pub(crate) fn text(relay: &Relay) -> Result<String, fmt::Error> {
    let mut registry = Registry::with_prefix("bifrost_relay");
    let mut gauge = |name: &str, help: &str, value: u64| {
        registry.register(name, help, ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX)));
    };
    let position = *relay.position().borrow();
    gauge("in_sync", "1 if the relay follows the store", position.in_sync.into());
    gauge("revision", "The store's revision that the relay has", position.revision);
    let (hosts, objects, unreadable, backlog) = relay.with(|fleet| {
        (fleet.host_counts(true), fleet.len() as u64, fleet.unreadable().count() as u64, fleet.backlog() as u64)
    });
    gauge("hosts_known", "Hosts that are known", hosts.known);
    gauge("hosts_connected", "Hosts whose agent is connected to this relay", hosts.connected);
    gauge("hosts_in_sync", "Hosts connected to this relay on which everything is in force", hosts.in_sync);
    gauge("hosts_dead", "Hosts that are taken for dead: nobody hears of their agents. See --dead-after-s", hosts.dead);
    let vanished = relay.with(|fleet| fleet.frozen()).map_or(0, |frozen| frozen.vanished);
    gauge("hosts_vanished", "Hosts that have vanished together, too many to take them for dead; 0: none", vanished);
    gauge("objects", "Objects in the store", objects);
    gauge("unreadable_records", "Records that the relay does not understand. See bifrostctl fleet status", unreadable);
    gauge("backlog_changes", "Changes that wait to be sent to hosts", backlog);
    let resolved = relay.with(|fleet| fleet.resolved());
    gauge("learned_routes", "Routes that hosts learn when they need them", resolved.routes);
    gauge("remembered_answers", "Answers about routes that are corrected when they change", resolved.remembered);
    gauge("agents_without_learning", "Agents that are to learn routes, and cannot. Upgrade them", resolved.unable);
    let mut counter = |name: &str, help: &str, value: &AtomicU64| {
        registry.register(name, help, ConstCounter::new(value.load(Ordering::Relaxed)));
    };
    let counts = &relay.counts;
    counter("batches_made", "Batches of changes that were made", &counts.commits);
    counter("batches_refused", "Batches of changes that were refused", &counts.refused);
    counter("batches_forbidden", "Batches that those who asked may not make. See --roles", &counts.forbidden);
    counter("conflicts", "Commits that were planned again, because another relay was first", &counts.conflicts);
    counter("store_losses", "How often the store was lost", &counts.store_losses);
    counter("hosts_enrolled", "First certificates that hosts got for tokens", &counts.enrolled);
    counter("certificates_renewed", "Further certificates that hosts got", &counts.renewed);
    counter("certificates_refused", "Requests for certificates that were refused", &counts.certificates_refused);
    let mut counter = |name: &str, help: &str, value: u64| registry.register(name, help, ConstCounter::new(value));
    counter("questions", "Questions of agents about routes", resolved.asked);
    counter("questions_refused", "Questions about routes that are not the host's or not learned", resolved.refused);
    counter("negative_answers", "Answers that nobody has the address", resolved.negative);
    counter("corrected_answers", "Answers about routes that have changed", resolved.corrected);
    counter("forgotten_answers", "Answers that were withdrawn because a host has too many", resolved.forgotten);
    let (written, lost) = relay.audit().map_or((0, 0), Audit::counts);
    counter("audit_lines", "Lines that were written to the audit log", written);
    counter("audit_lines_lost", "Lines that could not be written to the audit log", lost);
    let (sent, dropped) = relay.traces().map_or((0, 0), Traces::counts);
    counter("spans_sent", "Spans of traces that the collector has taken. See --traces", sent);
    counter("spans_dropped", "Spans that the collector did not take, or that came too fast for it", dropped);
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use bifrost_store::Store;

    use super::*;

    #[test]
    fn what_alerts_and_dashboards_ask_for_is_there() {
        let relay = Relay::new("r".into(), "memory".into(), Store::memory(), None, None);
        let text = text(&relay).unwrap();
        let names: Vec<_> = text.lines().filter_map(|line| line.split([' ', '{']).next()).collect();
        let packaging = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging");
        let mut asked = 0;
        for file in ["prometheus/bifrost.rules.yml", "grafana/bifrost-fleet.json"] {
            let text = std::fs::read_to_string(packaging.join(file)).unwrap();
            let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
            for word in words.filter(|word| word.starts_with("bifrost_relay_")) {
                asked += 1;
                assert!(names.contains(&word), "{file}: {word}");
            }
        }
        assert!(asked > 5, "{asked}");
    }
}
