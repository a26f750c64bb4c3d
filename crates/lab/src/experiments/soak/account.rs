//! The daemons' counters at the end of a soak: which packets were dropped, and whether the faults explain it.
//!
//! Injected drops are explained. A corrupted packet may be refused for any reason, because any byte may have changed;
//! all these reasons together must not count more packets than were corrupted. Duplicates and retransmissions by the
//! transport explain duplicate and late packets. All other drops are unexplained.

use std::collections::BTreeMap;

use anyhow::Result;

use crate::daemon::Daemon;

/// Counters by name.
pub(super) type Counters = BTreeMap<String, u64>;

/// Substrings of counter names of packets that were not delivered.
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
/// Prefixes of counter names of injected faults.
const INJECTED: [&str; 1] = ["fault."];
/// Substrings of counter names of packets that were duplicate or late, that are retransmitted, or (policy) that the
/// switch also counts by its own reason.
const REPAIRED: [&str; 9] = [
    "duplicate",
    "outside_window",
    "no_guest_buffer",
    // The receiver, which also counts these as `no_guest_buffer`; and the sender, when it is notified.
    "reorder_full",
    "overload_dropped",
    "rte.refused_packets",
    "given_up",
    "stale_setup",
    "policy_dropped",
];
/// Substrings of counter names of received packets that were refused, possibly because of corruption.
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
/// Counter of packets that a fault has corrupted.
pub(super) const CORRUPTED: &str = "fault.corrupted_packets";

/// Reads a daemon's counters.
pub(super) fn counters(daemon: &Daemon) -> Result<Counters> {
    let mut counters = Counters::new();
    let stats = daemon.control(&["stats"])?;
    for (name, value) in stats["counters"].as_object().into_iter().flatten() {
        counters.insert(name.clone(), value.as_u64().unwrap_or(0));
    }
    // Ports have their own drop counters.
    for port in daemon.control(&["ports"])?.as_array().into_iter().flatten() {
        for (reason, value) in port["drops_packets"].as_object().into_iter().flatten() {
            let name = format!("port.{}.dropped_{reason}_packets", port["name"].as_str().unwrap_or("?"));
            counters.insert(name, value.as_u64().unwrap_or(0));
        }
    }
    Ok(counters)
}

/// Packets lost inside a daemon, by the counter of the reason.
pub(super) fn drops(counters: &Counters) -> Counters {
    let lost = |name: &str| INJECTED.iter().any(|start| name.starts_with(start)) || has(name, &LOSSES);
    select(counters, lost)
}

/// The part of [`drops`] that no injected fault explains.
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

/// The non-zero counters whose names are `wanted`.
fn select(counters: &Counters, wanted: impl Fn(&str) -> bool) -> Counters {
    let wanted = counters.iter().filter(|(name, value)| **value > 0 && wanted(name));
    wanted.map(|(name, value)| (name.clone(), *value)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drops_explained_by_faults_are_removed() {
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
            // One more packet was refused than corrupted; it is not known which.
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
