//! The daemons' counters at the end of a soak: which packets were dropped, and whether that is explained.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::daemon::Daemon;

/// Words in the names of counters of packets that did not go where they were meant to.
const LOSSES: [&str; 10] =
    ["drop", "refused", "malformed", "invalid", "unknown", "wrong", "stale", "spoofed", "no_page", "outside_window"];
/// Words in the names of those that the injected faults account for: what was injected, what corruption and
/// duplication make of a packet, and what the transport sends again by itself.
const EXPLAINED: [&str; 12] = [
    "fault",
    "inject",
    "corrupt",
    "checksum",
    "malformed",
    "invalid",
    "duplicate",
    "outside_window",
    "stale",
    "unknown_version",
    "wrong_version",
    "not_placed",
];

/// A daemon's counters by name.
pub(super) fn counters(daemon: &Daemon) -> Result<BTreeMap<String, u64>> {
    let mut counters = BTreeMap::new();
    let stats = daemon.control(&["stats"])?;
    for (name, value) in stats["counters"].as_object().into_iter().flatten() {
        counters.insert(name.clone(), value.as_u64().unwrap_or(0));
    }
    // Ports count their own drops.
    for port in daemon.control(&["ports"])?.as_array().into_iter().flatten() {
        for (reason, value) in port["drops_packets"].as_object().into_iter().flatten() {
            let name = format!("port_{}_dropped_{reason}_packets", port["name"].as_str().unwrap_or("?"));
            counters.insert(name, value.as_u64().unwrap_or(0));
        }
    }
    Ok(counters)
}

/// Packets that were lost inside a daemon, by the reason's counter.
pub(super) fn drops(counters: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let lost = |name: &str| LOSSES.iter().any(|word| name.contains(word));
    counters
        .iter()
        .filter(|(name, value)| **value > 0 && lost(name))
        .map(|(name, value)| (name.clone(), *value))
        .collect()
}

/// Those of [`drops`] that no injected fault accounts for.
pub(super) fn unexplained(drops: &BTreeMap<String, u64>) -> BTreeMap<String, u64> {
    let explained = |name: &str| EXPLAINED.iter().any(|word| name.contains(word));
    drops.iter().filter(|(name, _)| !explained(name)).map(|(name, value)| (name.clone(), *value)).collect()
}

/// The sum of the counters whose name ends with `suffix`; `None` if there is none.
pub(super) fn sum(counters: &BTreeMap<String, u64>, suffix: &str) -> Option<u64> {
    let found: Vec<u64> = counters.iter().filter(|(name, _)| name.ends_with(suffix)).map(|(_, value)| *value).collect();
    if found.is_empty() { None } else { Some(found.iter().sum()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_faults_cannot_explain_remains() {
        let table = [
            ("avs_dropped_spoofed_ip_packets", 1),
            ("fault_dropped_packets", 5),
            ("rte_sent_packets", 100),
            ("udp_dropped_malformed_packets", 2),
            ("avs_dropped_no_route_packets", 0),
            ("rte_no_page_packets", 3),
        ];
        let counters = table.iter().map(|(name, value)| (name.to_string(), *value)).collect();
        let names = |map: &BTreeMap<String, u64>| map.keys().cloned().collect::<Vec<_>>();
        let drops = drops(&counters);
        assert_eq!(drops.len(), 4);
        assert_eq!(names(&unexplained(&drops)), ["avs_dropped_spoofed_ip_packets", "rte_no_page_packets"]);
        assert_eq!((sum(&counters, "sent_packets"), sum(&counters, "nothing")), (Some(100), None));
    }
}
