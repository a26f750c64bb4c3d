//! The virtual switch (`avs`).

use super::Kind::Drop;
use super::{Chapter, Family, count, gauge, reasons};

pub(super) const CHAPTER: Chapter = Chapter {
    title: "Virtual switch",
    entries: &[
        count("avs.to_remote_packets", "from the guest, to another host", ""),
        count("avs.to_local_packets", "from the guest, to another port of this host", ""),
        count(
            "avs.answered_packets",
            "from the guest, answered by the switch: ARP, neighbour and router discovery, DHCP, ping",
            "",
        ),
        count("avs.advertised_packets", "router advertisements for the guest that it had not asked for", ""),
        count("avs.from_underlay_packets", "from the underlay, to the guest", ""),
        count(
            "avs.fragmented_packets",
            "packets larger than their way allows, from the guest or for it, that were cut to fit",
            "many: a route or a guest has a wrong `mtu`",
        ),
        count(
            "avs.too_big_packets",
            "the same, but not to be cut: their sender was told how large they may be",
            "many: a guest lets no ICMP in",
        ),
        count(
            "avs.underlay_too_big_answered_packets",
            "packets from other hosts, larger than the guest is given; their sender was told",
            "say `mtu` in the route on the sending host",
        ),
        count("avs.underlay_accepted_packets", "from the underlay, given to a port", ""),
        count(
            "avs.underlay_ingress_dropped_packets",
            "from the underlay, kept from ports by ACLs, security groups and their MTU",
            "",
        ),
        gauge("avs.current_sessions", "conversations that security groups remember", "at `sessions.total` it is full"),
        gauge("avs.established_sessions", "of these: with packets both ways, and not ended", ""),
        count("avs.created_sessions", "conversations that began", ""),
        count("avs.expired_sessions", "conversations that ended by their timeout", ""),
        count(
            "avs.evicted_sessions",
            "conversations that made room for others at a bound of `[sessions]`",
            "which port, and what was lost, is in `avs.evicted_*_sessions`",
        ),
        count("avs.revoked_sessions", "conversations that ended because a reload changed the rules", ""),
        gauge("avs.port_current_sessions", "conversations that security groups remember of a port", ""),
        count(
            "avs.evicted_unanswered_sessions",
            "of a port, evicted at a bound: conversations that nobody had answered, or that were over",
            "a scan, a flood of SYNs or datagrams, or many short connections: harmless to others",
        ),
        count(
            "avs.evicted_answered_sessions",
            "of a port, evicted at a bound: single exchanges of datagrams, such as DNS, and half-open connections",
            "many exchanges at once: raise `sessions.per_port` if answers are lost",
        ),
        count(
            "avs.evicted_closing_sessions",
            "of a port, evicted at a bound: connections that one side had closed",
            "clients that vanish; raise `sessions.per_port` if half-closed connections break",
        ),
        count(
            "avs.evicted_assured_sessions",
            "of a port, evicted at a bound: exchanges of datagrams that went on for a while",
            "raise `sessions.per_port`, or find out who opens so many conversations",
        ),
        count(
            "avs.evicted_established_sessions",
            "of a port, evicted at a bound: established TCP connections, those silent longest of the source with most",
            "raise `sessions.per_port`, or find out who opens so many connections",
        ),
        gauge(
            "avs.nat_current_mappings",
            "ports of shared outside addresses that are in use",
            "`bifrostctl nat` has them by address",
        ),
        count("avs.nat_created_mappings", "ports of shared outside addresses that were given out", ""),
        count(
            "avs.nat_expired_mappings",
            "of these: came back, since the last conversation was over for long enough",
            "",
        ),
        gauge(
            "avs.balanced_current_sessions",
            "connections of guests through load balancers, and with the outside",
            "at `sessions.total` it is full",
        ),
        gauge("avs.balanced_established_sessions", "of these: with packets both ways, and not ended", ""),
        count(
            "avs.balanced_created_sessions",
            "connections through load balancers, and with the outside, that began",
            "",
        ),
        count(
            "avs.balanced_expired_sessions",
            "connections through load balancers, and with the outside, that ended by their timeout",
            "",
        ),
        count(
            "avs.balanced_evicted_sessions",
            "connections through load balancers, and with the outside, that made room for others at a bound of `[sessions]`",
            "raise `sessions.per_port` or `sessions.total`, or find out who opens so many connections",
        ),
        count(
            "avs.balanced_revoked_sessions",
            "always 0: a connection that loses its backend is dropped, see `backend_gone`",
            "",
        ),
        count(
            "avs.fragment_created_records",
            "first fragments that were allowed to pass where rules look at ports; the others of their packets follow them",
            "",
        ),
        count(
            "avs.fragment_evicted_records",
            "of these: made room for others before their packet was complete",
            "more packets in pieces at a time than a port has room for (64 each way), or a flood of first fragments",
        ),
        count("mirror.sent_packets", "copies of packets that were sent to targets of mirrors", ""),
        count(
            "mirror.missed_packets",
            "copies of packets that found no room between a worker and the thread that sends them",
            "mirror less: a filter, `one_in`, `truncate`",
        ),
        count(
            "mirror.unsent_packets",
            "copies of packets that could not be sent",
            "is there a route to the target, and do its links carry that much? The log has the reason",
        ),
        gauge(
            "avs.flow_log_current_flows",
            "conversations that flow logs count",
            "at `flow_log.flows` a worker logs no others",
        ),
        count("avs.flow_log_created_records", "records of flow logs", ""),
        count(
            "avs.flow_log_lost_records",
            "records of flow logs that nobody has taken in time",
            "connections of the same addresses and ports that end faster than the daemon's thread gets to run",
        ),
        count(
            "avs.flow_log_unlogged_packets",
            "packets of conversations that are not logged, for want of room: a port has a quarter of `flow_log.flows`",
            "a scan or a flood; or raise `flow_log.flows`",
        ),
        count("flow_log.json_records", "records written to `flow_log.json`", ""),
        count(
            "flow_log.json_lost_records",
            "records that could not be written to `flow_log.json`",
            "the log says why: no space, no directory, no permission",
        ),
        count("flow_log.ipfix_records", "records sent to `flow_log.collector`", ""),
        count(
            "flow_log.ipfix_lost_records",
            "records that could not be sent to `flow_log.collector`",
            "the log says why: no route, nobody listens, or a full queue",
        ),
        count("flow_log.ipfix_messages", "messages to `flow_log.collector`, those with templates among them", ""),
        count("avs.rule_log_created_records", "records of rules with `log = true`", ""),
        count(
            "avs.rule_log_suppressed_packets",
            "packets that a rule with `log = true` accepted or rejected, and that are in no record: the port has begun \
             `flow_log.rules_per_s` records in this second, or 1024 flows are being told of",
            "a scan or a flood; or raise `flow_log.rules_per_s`",
        ),
        count("flow_log.rule_json_records", "records written to `flow_log.rules_json`", ""),
        count(
            "flow_log.rule_json_lost_records",
            "records that could not be written to `flow_log.rules_json`",
            "the log says why: no space, no directory, no permission",
        ),
        count("avs.flow_found_packets", "packets whose flow was remembered, so that no table was asked", ""),
        count(
            "avs.flow_batched_packets",
            "packets that nobody looked up, for others of their flow came with them and went the same way",
            "",
        ),
        count("avs.flow_created_records", "flows that were remembered, in networks with an ACL or security groups", ""),
        count(
            "avs.flow_collision_packets",
            "packets whose flow was not remembered, since others have its place",
            "nearly as many as packets found: more flows than `sessions.flow_records`",
        ),
    ],
    families: &[
        Family {
            prefix: "avs.dropped_",
            suffix: "_packets",
            kind: Drop,
            what: "frames from the guest",
            advice: "`bifrostctl capture --at drop --port NAME` shows them",
            reasons: reasons::SWITCH,
        },
        Family {
            prefix: "avs.ingress_dropped_",
            suffix: "_packets",
            kind: Drop,
            what: "frames from other hosts, kept from the guest",
            advice: "`bifrostctl capture --at drop --port NAME` shows them",
            reasons: reasons::SWITCH,
        },
        Family {
            prefix: "avs.underlay_dropped_",
            suffix: "_packets",
            kind: Drop,
            what: "frames from peers",
            advice: "`bifrostctl capture --at drop` shows them",
            reasons: reasons::SWITCH,
        },
    ],
};
