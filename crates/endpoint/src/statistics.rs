//! What a worker has counted, with names, meanings and advice: for programs, for Prometheus, and
//! for the table in `docs/RDM-LIBRARY.md`, which is made of this.

use std::fmt::Write;

use bifrost_rdm::Counters;
use bifrost_verbs::{RdmaCoreCounters, SoftCounters};

use crate::served::AccessCounters;

/// A number that only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statistic {
    /// Its name: lower case, with the unit at the end.
    pub name: &'static str,
    /// What was counted.
    pub value: u64,
    /// What it is, in a line.
    pub what: &'static str,
    /// What to do if it grows unexpectedly; empty: nothing.
    pub advice: &'static str,
}

/// All statistics in the text format that Prometheus reads (OpenMetrics 1.0): `sent_messages`
/// becomes `bifrost_rdm_sent_messages_total`.
#[must_use]
pub fn exposition(statistics: &[Statistic]) -> String {
    let mut text = String::new();
    for Statistic { name, value, what, .. } in statistics {
        // A string takes whatever is written to it.
        let _ = write!(
            text,
            "# HELP bifrost_rdm_{name} {what}.\n# TYPE bifrost_rdm_{name} counter\nbifrost_rdm_{name}_total {value}\n"
        );
    }
    text + "# EOF\n"
}

/// Those of the engine, of accesses to memory, and of what carries the packets.
pub(crate) fn all(
    engine: &Counters,
    access: &AccessCounters,
    software: Option<(&bifrost_verbs::Counters, &SoftCounters)>,
    verbs: Option<&RdmaCoreCounters>,
) -> Vec<Statistic> {
    let mut all = of_engine(engine);
    all.extend(of_access(access));
    if let Some((nic, socket)) = software {
        all.extend(of_nic(nic));
        all.extend(of_socket(socket));
    }
    all.extend(verbs.into_iter().flat_map(of_verbs));
    all
}

const fn counted(name: &'static str, value: u64, what: &'static str, advice: &'static str) -> Statistic {
    Statistic { name, value, what, advice }
}

const PATHS: &str = "look for losses on the path that the connection had; it has another one now";
const HOSTILE: &str = "the peer is not ours, or of another version, or hostile";

/// A counter without a line here does not compile.
fn of_engine(counters: &Counters) -> Vec<Statistic> {
    let Counters {
        sent_messages,
        delivered_messages,
        delivered_bytes,
        write_requests,
        send_requests,
        repair_requests,
        lost_requests,
        spurious_losses,
        repeated_units,
        sent_acks,
        received_acks,
        sent_grants,
        sent_probes,
        timeouts,
        switches,
        lane_flips,
        lane_errors,
        lane_timeouts,
        lane_silences,
        lane_repairs,
        refused,
        no_room,
    } = *counters;
    vec![
        counted("sent_messages", sent_messages, "Messages taken from the application", ""),
        counted("delivered_messages", delivered_messages, "Messages given to the application", ""),
        counted("delivered_bytes", delivered_bytes, "Bytes given to the application", ""),
        counted("write_requests", write_requests, "RDMA WRITEs posted", ""),
        counted("send_requests", send_requests, "RDMA SENDs posted", ""),
        counted(
            "repair_requests",
            repair_requests,
            "SENDs that repeat a lost unit",
            "the network loses packets; the share of them is measured for each connection",
        ),
        counted("lost_requests", lost_requests, "Work requests that were taken to be lost", "as for `repair_requests`"),
        counted(
            "spurious_losses",
            spurious_losses,
            "Work requests that were taken to be lost and were not",
            "raise `patience`: this host or its peers are busy for longer than is expected",
        ),
        counted("repeated_units", repeated_units, "Units that arrived again", "as for `spurious_losses`, at the peers"),
        counted("sent_acks", sent_acks, "ACKs sent", ""),
        counted("received_acks", received_acks, "ACKs received", ""),
        counted("sent_grants", sent_grants, "Grants sent: long messages that were let in", ""),
        counted("sent_probes", sent_probes, "Probes sent while waiting for a grant or a limit", ""),
        counted(
            "timeouts",
            timeouts,
            "Timers that ran out with something in flight",
            "the last packets of something were lost, or a peer's worker is not polled often enough",
        ),
        counted("switches", switches, "Changes between UC and RC that the application asked for", ""),
        counted("lane_flips", lane_flips, "Changes of the queue pair in use because it failed", PATHS),
        counted(
            "lane_errors",
            lane_errors,
            "Queue pairs left because they were in error",
            "RC: the NIC gave up repeating. A link is down, or the peer has ended",
        ),
        counted("lane_timeouts", lane_timeouts, "Queue pairs left because three timers ran out in a row", PATHS),
        counted(
            "lane_silences",
            lane_silences,
            "Queue pairs of RC left because they delivered nothing while others did",
            PATHS,
        ),
        counted("lane_repairs", lane_repairs, "Queue pairs that were repaired", ""),
        counted("refused_requests", refused, "SENDs, WRITEs and control datagrams that break the protocol", HOSTILE),
        counted(
            "no_room_requests",
            no_room,
            "SENDs for which there was no memory, or no room in the window",
            "the peer does not keep to the window",
        ),
    ]
}

fn of_access(counters: &AccessCounters) -> Vec<Statistic> {
    let AccessCounters { writes, written_bytes, reads, read_bytes, refused } = *counters;
    vec![
        counted("peer_writes", writes, "Writes of peers to regions", ""),
        counted("peer_written_bytes", written_bytes, "Bytes that peers wrote to regions", ""),
        counted("peer_reads", reads, "Reads of regions by peers", ""),
        counted("peer_read_bytes", read_bytes, "Bytes that peers read from regions", ""),
        counted(
            "peer_refused_accesses",
            refused,
            "Accesses of peers to regions that were refused",
            "the peer has an old key, or not this right, or leaves the region: its error says which",
        ),
    ]
}

fn of_nic(counters: &bifrost_verbs::Counters) -> Vec<Statistic> {
    let bifrost_verbs::Counters {
        posted_requests,
        polled_completions,
        sent_packets,
        repeated_packets,
        received_packets,
        bad_icrc_packets,
        malformed_packets,
        unknown_queue_pair_packets,
        foreign_packets,
        bad_queue_key_packets,
        torn_packets,
        torn_messages,
        no_receive_request_messages,
        too_long_messages,
        access_denied_messages,
        out_of_place_packets,
        repeated_received_packets,
        gap_packets,
        stray_acknowledgements,
        timeouts,
        queue_pairs_in_error,
    } = *counters;
    const LOSSES: &str = "the network loses packets";
    vec![
        counted("nic_posted_requests", posted_requests, "Requests posted to the software NIC", ""),
        counted("nic_polled_completions", polled_completions, "Completions polled", ""),
        counted("nic_sent_packets", sent_packets, "Packets sent", ""),
        counted("nic_repeated_packets", repeated_packets, "Packets of RC sent again", LOSSES),
        counted("nic_received_packets", received_packets, "Packets received and used", ""),
        counted(
            "nic_bad_icrc_packets",
            bad_icrc_packets,
            "Packets with a wrong ICRC",
            "something on the way changes packets, or they are forged",
        ),
        counted("nic_malformed_packets", malformed_packets, "Datagrams that are no packet", HOSTILE),
        counted(
            "nic_unknown_queue_pair_packets",
            unknown_queue_pair_packets,
            "Packets for no queue pair that is ready",
            "a few are late ones of a connection that has ended",
        ),
        counted("nic_foreign_packets", foreign_packets, "Packets from another address than the peer's", HOSTILE),
        counted("nic_bad_queue_key_packets", bad_queue_key_packets, "Datagrams with another key", HOSTILE),
        counted("nic_torn_packets", torn_packets, "Packets of UC messages that had lost one before", LOSSES),
        counted("nic_torn_messages", torn_messages, "UC messages that lost a packet", LOSSES),
        counted(
            "nic_no_receive_request_messages",
            no_receive_request_messages,
            "Messages that found no receive request",
            "the peer does not keep to its credits",
        ),
        counted("nic_too_long_messages", too_long_messages, "Messages longer than their receive request", HOSTILE),
        counted(
            "nic_access_denied_messages",
            access_denied_messages,
            "Messages with a wrong key, address or length",
            "a few are late WRITEs for a message that was delivered",
        ),
        counted(
            "nic_out_of_place_packets",
            out_of_place_packets,
            "Packets that do not continue their message",
            HOSTILE,
        ),
        counted(
            "nic_repeated_received_packets",
            repeated_received_packets,
            "Packets of RC that had arrived before",
            "",
        ),
        counted("nic_gap_packets", gap_packets, "Packets of RC behind a gap", LOSSES),
        counted("nic_stray_acknowledgements", stray_acknowledgements, "Acknowledgements of nothing that is open", ""),
        counted("nic_timeouts", timeouts, "Timers of RC that ran out", LOSSES),
        counted(
            "nic_queue_pairs_in_error",
            queue_pairs_in_error,
            "Queue pairs that went into error",
            "as for `lane_errors`",
        ),
    ]
}

fn of_socket(counters: &SoftCounters) -> Vec<Statistic> {
    let SoftCounters { send_calls, receive_calls, no_room_runs, unsent_runs } = *counters;
    vec![
        counted("socket_send_calls", send_calls, "System calls that sent something", ""),
        counted("socket_receive_calls", receive_calls, "System calls that received something", ""),
        counted(
            "socket_no_room_runs",
            no_room_runs,
            "Runs of packets that the kernel had no room for",
            "raise `net.core.wmem_max`",
        ),
        counted(
            "socket_unsent_runs",
            unsent_runs,
            "Runs of packets that could not be sent for another reason",
            "is there a route to the peer, and does the path take packets of this MTU?",
        ),
    ]
}

fn of_verbs(counters: &RdmaCoreCounters) -> Vec<Statistic> {
    let RdmaCoreCounters {
        batches,
        posted_requests,
        polled_completions,
        stale_completions,
        queue_pairs_in_error,
        events,
    } = *counters;
    vec![
        counted("verbs_batches", batches, "Times that the RDMA NIC was told of requests", ""),
        counted("verbs_posted_requests", posted_requests, "Requests posted to the RDMA NIC", ""),
        counted("verbs_polled_completions", polled_completions, "Completions polled from the RDMA NIC", ""),
        counted(
            "verbs_stale_completions",
            stale_completions,
            "Completions of queue pairs that were reset meanwhile",
            "",
        ),
        counted(
            "verbs_queue_pairs_in_error",
            queue_pairs_in_error,
            "Queue pairs of the RDMA NIC that went into error",
            "as for `lane_errors`",
        ),
        counted("verbs_events", events, "Reports of the RDMA NIC", "a port may have gone down: `rdma link`"),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fs;
    use std::path::Path;

    use super::*;

    fn everything() -> Vec<Statistic> {
        let nic = bifrost_verbs::Counters::default();
        let software = Some((&nic, &SoftCounters { send_calls: 7, ..SoftCounters::default() }));
        let verbs = Some(&RdmaCoreCounters::default());
        all(&Counters { lane_timeouts: 3, ..Counters::default() }, &AccessCounters::default(), software, verbs)
    }

    #[test]
    fn names_are_unique_and_prometheus_reads_them() {
        let all = everything();
        let names: BTreeSet<&str> = all.iter().map(|statistic| statistic.name).collect();
        assert_eq!(names.len(), all.len());
        let text = exposition(&all);
        assert!(
            text.contains("\n# TYPE bifrost_rdm_lane_timeouts counter\nbifrost_rdm_lane_timeouts_total 3\n"),
            "{text}"
        );
        assert!(text.contains("\nbifrost_rdm_socket_send_calls_total 7\n") && text.ends_with("\n# EOF\n"));
        let fits = |line: &str| line.starts_with("# ") || line.split(' ').count() == 2;
        assert!(text.lines().all(fits), "{text}");
        assert!(all.iter().all(|s| s.name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_')));
    }

    #[test]
    fn the_guide_has_the_same_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/RDM-LIBRARY.md");
        let page = fs::read_to_string(&path).unwrap();
        let head = "| counter | what it is | if it grows |\n|---|---|---|\n";
        let (before, rest) = page.split_once(head).unwrap();
        let after = rest.find("\n\n").unwrap();
        let row = |s: Statistic| format!("| `{}` | {} | {} |", s.name, s.what, s.advice);
        let table: Vec<String> = everything().into_iter().map(row).collect();
        if std::env::var_os("BIFROST_WRITE_DOCS").is_some() {
            fs::write(&path, format!("{before}{head}{}{}", table.join("\n"), &rest[after..])).unwrap();
            return;
        }
        let old = "the table is old: BIFROST_WRITE_DOCS=1 cargo test -p bifrost-endpoint --lib statistics";
        assert!(rest[..after] == table.join("\n"), "{old}");
    }
}
