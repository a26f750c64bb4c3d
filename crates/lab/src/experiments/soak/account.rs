//! The daemons' counters at the end of a soak: which packets were dropped, and whether that is explained.
//!
//! What the faults injected is explained by itself. A corrupted packet may be refused for any reason, since the byte that
//! changed may be any; all those reasons together must not count more packets than were corrupted. Duplicates and the
//! transport's own second tries account for what arrives twice or late. All other drops are unexplained.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::daemon::Daemon;

/// Counters by name.
pub(super) type Counters = BTreeMap<String, u64>;

/// Words in the names of counters of packets that did not go where they were meant to.
const LOSSES: [&str; 22] = [
    "drop",
    "refused",
    "malformed",
    "invalid",
    "unknown",
    "wrong",
    "stale",
    "stray",
    "spoofed",
    "no_page",
    "no_buffer",
    "no_space",
    "too_large",
    "too_big",
    "truncated",
    "bad_",
    "failed",
    "outside_window",
    "duplicate",
    "no_guest_buffer",
    "given_up",
    "overflow",
];
/// Beginnings of the names of counters of what faults have injected.
const INJECTED: [&str; 1] = ["fault."];
/// Words in the names of counters of packets that came twice or late, that come again, or (policy) that the switch has
/// counted under its own reason.
const REPAIRED: [&str; 9] = [
    "duplicate",
    "outside_window",
    "no_guest_buffer",
    // Of the receiver, which counts these as without a buffer of the guest, too; and of the sender, when it hears of it.
    "reorder_full",
    "overload_dropped",
    "rte.refused_packets",
    "given_up",
    "stale_setup",
    "policy_dropped",
];
/// Words in the names of counters of received packets that were refused, which corruption may cause.
const REFUSED: [&str; 12] = [
    "refused.",
    "malformed.underlay",
    "bad_checksum",
    "bad_vxlan",
    "unknown_cid",
    "unknown_path",
    "unknown_peer",
    "ack_invalid",
    "stray_setup",
    "wrong_",
    "underlay_dropped",
    "not_here",
];
/// Counters of packets that a fault has corrupted.
pub(super) const CORRUPTED: &str = "fault.corrupted_packets";

/// A daemon's counters by name.
pub(super) fn counters(daemon: &Daemon) -> Result<Counters> {
    let mut counters = Counters::new();
    let stats = daemon.control(&["stats"])?;
    for (name, value) in stats["counters"].as_object().into_iter().flatten() {
        counters.insert(name.clone(), value.as_u64().unwrap_or(0));
    }
    // Ports count their own drops.
    for port in daemon.control(&["ports"])?.as_array().into_iter().flatten() {
        for (reason, value) in port["drops_packets"].as_object().into_iter().flatten() {
            let name = format!("port.{}.dropped_{reason}_packets", port["name"].as_str().unwrap_or("?"));
            counters.insert(name, value.as_u64().unwrap_or(0));
        }
    }
    Ok(counters)
}

/// Packets that were lost inside a daemon, by the reason's counter.
pub(super) fn drops(counters: &Counters) -> Counters {
    let lost = |name: &str| INJECTED.iter().any(|start| name.starts_with(start)) || has(name, &LOSSES);
    select(counters, lost)
}

/// Those of [`drops`] that no injected fault accounts for.
pub(super) fn unexplained(drops: &Counters) -> Counters {
    let rest = select(drops, |name| !INJECTED.iter().any(|start| name.starts_with(start)) && !has(name, &REPAIRED));
    let refused = select(&rest, |name| has(name, &REFUSED));
    let corrupted = drops.get(CORRUPTED).copied().unwrap_or(0);
    let mut unexplained = select(&rest, |name| !has(name, &REFUSED));
    if refused.values().sum::<u64>() > corrupted {
        unexplained.extend(refused);
    }
    unexplained
}

fn has(name: &str, words: &[&str]) -> bool {
    words.iter().any(|word| name.contains(word))
}

/// The counters that are not zero and whose names are wanted.
fn select(counters: &Counters, wanted: impl Fn(&str) -> bool) -> Counters {
    let wanted = counters.iter().filter(|(name, value)| **value > 0 && wanted(name));
    wanted.map(|(name, value)| (name.clone(), *value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_faults_cannot_explain_remains() {
        let explained = [
            ("fault.dropped_packets", 5),
            ("fault.corrupted_packets", 5),
            ("rte.sent_packets", 100),
            ("rte.duplicate_packets", 8),
            ("rte.refused_packets", 2),
            ("drop.reorder_full_packets", 2),
            ("refused.length_packets", 2),
            ("drop.bad_checksum_frames", 3),
            ("avs.underlay_dropped_no_route_packets", 0),
        ];
        let table = [
            (vec![], vec![]),
            // One more packet was refused than corrupted: which one it was, nobody knows.
            (
                vec![("rte.unknown_cid_packets", 1)],
                vec!["drop.bad_checksum_frames", "refused.length_packets", "rte.unknown_cid_packets"],
            ),
            (vec![("rte.no_page_packets", 3)], vec!["rte.no_page_packets"]),
            (vec![("port.guest-a.dropped_spoofed_ip_packets", 1)], vec!["port.guest-a.dropped_spoofed_ip_packets"]),
        ];
        for (more, expected) in table {
            let counters: Counters =
                explained.into_iter().chain(more).map(|(name, value)| (name.to_owned(), value)).collect();
            let unexplained = unexplained(&drops(&counters));
            assert_eq!(unexplained.keys().collect::<Vec<_>>(), expected);
        }
    }
}
