//! A worker's counters, with names, descriptions and advice: for programs, for Prometheus, and for the table in
//! `docs/RDM-LIBRARY.md`, which is generated from this file.

use std::fmt::Write;

use bifrost_rdm::Counters;
use bifrost_verbs::{RdmaCoreCounters, SoftCounters};

use crate::served::AccessCounters;

/// A monotonic counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statistic {
    /// Name: lower case, ending with the unit.
    pub name: &'static str,
    /// Value.
    pub value: u64,
    /// Description, one line.
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
        // Writing to a string cannot fail.
        let _ = write!(
            text,
            "# HELP bifrost_rdm_{name} {what}.\n# TYPE bifrost_rdm_{name} counter\nbifrost_rdm_{name}_total {value}\n"
        );
    }
    text + "# EOF\n"
}

/// Counters of the engine, of memory accesses, and of the provider.
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

const PATHS: &str = "look for losses on the path of the failed queue pair; the connection uses another one now";
const HOSTILE: &str = "the peer does not run this library, runs another version, or is hostile";

/// A new counter does not compile until it has an entry here.
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
            "SENDs that retransmit a unit",
            "the network loses packets; each connection measures its loss rate",
        ),
        counted("lost_requests", lost_requests, "Work requests considered lost", "as for `repair_requests`"),
        counted(
            "spurious_losses",
            spurious_losses,
            "Work requests considered lost that were not",
            "raise `patience`: this host or its peers are busy for longer than expected",
        ),
        counted("repeated_units", repeated_units, "Units that arrived again", "as for `spurious_losses`, at the peers"),
        counted("sent_acks", sent_acks, "ACKs sent", ""),
        counted("received_acks", received_acks, "ACKs received", ""),
        counted("sent_grants", sent_grants, "Grants sent for long messages", ""),
        counted("sent_probes", sent_probes, "Probes sent while waiting for a grant or a limit", ""),
        counted(
            "timeouts",
            timeouts,
            "Timeouts with something in flight",
            "the last packets of a message were lost, or a peer's worker is not polled often enough",
        ),
        counted("switches", switches, "Changes between UC and RC that the application asked for", ""),
        counted("lane_flips", lane_flips, "Queue pairs replaced because they failed", PATHS),
        counted(
            "lane_errors",
            lane_errors,
            "Queue pairs replaced because they were in error",
            "RC: the NIC gave up retransmitting. A link is down, or the peer has ended",
        ),
        counted("lane_timeouts", lane_timeouts, "Queue pairs replaced after three consecutive timeouts", PATHS),
        counted(
            "lane_silences",
            lane_silences,
            "RC queue pairs replaced because they delivered nothing while others did",
            PATHS,
        ),
        counted("lane_repairs", lane_repairs, "Queue pairs that were repaired", ""),
        counted("refused_requests", refused, "SENDs, WRITEs and control datagrams that violate the protocol", HOSTILE),
        counted(
            "no_room_requests",
            no_room,
            "SENDs without memory or beyond the window",
            "the peer violates the window",
        ),
    ]
}

fn of_access(counters: &AccessCounters) -> Vec<Statistic> {
    let AccessCounters { writes, written_bytes, reads, read_bytes, refused } = *counters;
    vec![
        counted("peer_writes", writes, "Peers' writes to regions", ""),
        counted("peer_written_bytes", written_bytes, "Bytes that peers wrote to regions", ""),
        counted("peer_reads", reads, "Peers' reads of regions", ""),
        counted("peer_read_bytes", read_bytes, "Bytes that peers read from regions", ""),
        counted(
            "peer_refused_accesses",
            refused,
            "Peers' accesses to regions that were refused",
            "the peer uses an old key, lacks the permission, or exceeds the region: its error says which",
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
        counted("nic_repeated_packets", repeated_packets, "RC packets retransmitted", LOSSES),
        counted("nic_received_packets", received_packets, "Packets received and used", ""),
        counted(
            "nic_bad_icrc_packets",
            bad_icrc_packets,
            "Packets with a wrong ICRC",
            "packets are corrupted or forged",
        ),
        counted("nic_malformed_packets", malformed_packets, "Datagrams that are not valid packets", HOSTILE),
        counted(
            "nic_unknown_queue_pair_packets",
            unknown_queue_pair_packets,
            "Packets without a ready queue pair",
            "a few are normal: late packets of a connection that has ended",
        ),
        counted("nic_foreign_packets", foreign_packets, "Packets from another address than the peer's", HOSTILE),
        counted("nic_bad_queue_key_packets", bad_queue_key_packets, "Datagrams with a wrong Q_Key", HOSTILE),
        counted("nic_torn_packets", torn_packets, "Packets of UC messages after a lost one", LOSSES),
        counted("nic_torn_messages", torn_messages, "UC messages that lost a packet", LOSSES),
        counted(
            "nic_no_receive_request_messages",
            no_receive_request_messages,
            "Messages without a receive request",
            "the peer violates its credits",
        ),
        counted("nic_too_long_messages", too_long_messages, "Messages longer than their receive request", HOSTILE),
        counted(
            "nic_access_denied_messages",
            access_denied_messages,
            "Messages with a wrong key, address or length",
            "a few are normal: late WRITEs for a delivered message",
        ),
        counted(
            "nic_out_of_place_packets",
            out_of_place_packets,
            "Packets out of sequence within their message",
            HOSTILE,
        ),
        counted("nic_repeated_received_packets", repeated_received_packets, "RC packets that had arrived before", ""),
        counted("nic_gap_packets", gap_packets, "RC packets after a gap", LOSSES),
        counted("nic_stray_acknowledgements", stray_acknowledgements, "Acknowledgements without an open request", ""),
        counted("nic_timeouts", timeouts, "RC timeouts", LOSSES),
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
            "Runs of packets for which the socket buffer was full",
            "raise `net.core.wmem_max`",
        ),
        counted(
            "socket_unsent_runs",
            unsent_runs,
            "Runs of packets that could not be sent for another reason",
            "check that there is a route to the peer and that the path MTU is large enough",
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
        counted("verbs_batches", batches, "Doorbells: batches posted to the RDMA NIC", ""),
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
        counted(
            "verbs_events",
            events,
            "Asynchronous events of the RDMA NIC",
            "a port may have gone down: `rdma link`",
        ),
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
        let old = "the table is outdated; run BIFROST_WRITE_DOCS=1 cargo test -p bifrost-endpoint --lib statistics";
        assert!(rest[..after] == table.join("\n"), "{old}");
    }
}
