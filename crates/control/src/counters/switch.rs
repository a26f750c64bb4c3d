//! The virtual switch (`avs`).

use super::Kind::Drop;
use super::{Chapter, Family, count, drop, gauge, reasons};

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
        count(
            "avs.copied_packets",
            "from the guest, VRRP to its group: each vNIC that shares an address gets a copy",
            "",
        ),
        count("avs.to_host_packets", "from the guest, to the metadata service of this host", ""),
        count(
            "avs.asked_packets",
            "from the guest, to an address whose route must be learned; again if it is switched again",
            "",
        ),
        count("avs.advertised_packets", "unsolicited router advertisements to the guest", ""),
        count("avs.from_underlay_packets", "from the underlay, to the guest", ""),
        count(
            "avs.fragmented_packets",
            "packets from or to the guest that exceeded the path MTU and were fragmented",
            "many: the `mtu` of a route or a guest is wrong",
        ),
        count(
            "avs.too_big_packets",
            "the same with DF: the sender got an ICMP error with the MTU",
            "many: a guest blocks ICMP",
        ),
        count(
            "avs.underlay_too_big_answered_packets",
            "packets from other hosts that exceeded the guest's MTU; the sender got an ICMP error",
            "set `mtu` in the route on the sending host",
        ),
        count("avs.underlay_accepted_packets", "from the underlay, delivered to a port", ""),
        count(
            "avs.underlay_ingress_dropped_packets",
            "from the underlay, dropped by ACLs, security groups or the port's MTU",
            "",
        ),
        gauge(
            "learned.routes",
            "routes of VPCs that learn them, learned and in use",
            "`bifrostctl learned` lists them",
        ),
        count("learned.learned_routes", "answers with a route", ""),
        count("learned.negative_answers", "answers that nobody has the address; each holds for a second", ""),
        count("learned.withdrawn_answers", "answers that were withdrawn", ""),
        count(
            "learned.unsuitable_answers",
            "answers that do not suit the configuration, such as those for a VPC that has just been removed",
            "",
        ),
        count(
            "learned.unknown_peer_answers",
            "answers with a host that is not configured yet; the agent repeats them",
            "constantly: `bifrostctl fleet why` of the host",
        ),
        count(
            "learned.full_routes",
            "routes that were not taken: the VPC has 16,384, and the last eviction was less than a second ago",
            "guests of this VPC use more destinations than fit at once, or one scans the network",
        ),
        count("learned.evicted_routes", "routes evicted at that bound, those idle for longest", ""),
        count("learned.expired_routes", "routes forgotten because no packet has used them for five minutes", ""),
        gauge("avs.current_sessions", "sessions of security groups", "at `sessions.total` the table is full"),
        gauge("avs.established_sessions", "of these: with packets in both directions, and not closed", ""),
        count("avs.created_sessions", "sessions created", ""),
        count("avs.expired_sessions", "sessions that timed out", ""),
        count(
            "avs.evicted_sessions",
            "sessions evicted at a bound of `[sessions]`",
            "`avs.evicted_*_sessions` names the ports and the kinds of sessions",
        ),
        count("avs.revoked_sessions", "sessions removed because a reload changed the rules", ""),
        gauge("avs.port_current_sessions", "sessions of a port's security groups", ""),
        count(
            "avs.evicted_unanswered_sessions",
            "of a port, evicted at a bound: unanswered or closed sessions",
            "a scan, a flood of SYNs or datagrams, or many short connections: harmless to others",
        ),
        count(
            "avs.evicted_answered_sessions",
            "of a port, evicted at a bound: single request-response exchanges, such as DNS, and half-open connections",
            "many exchanges at once: raise `sessions.per_port` if answers get lost",
        ),
        count(
            "avs.evicted_closing_sessions",
            "of a port, evicted at a bound: half-closed connections",
            "clients that vanish; raise `sessions.per_port` if half-closed connections break",
        ),
        count(
            "avs.evicted_assured_sessions",
            "of a port, evicted at a bound: longer datagram exchanges",
            "raise `sessions.per_port`, or find out which guest opens these sessions",
        ),
        count(
            "avs.evicted_established_sessions",
            "of a port, evicted at a bound: established TCP connections, the longest idle ones of the source with most",
            "raise `sessions.per_port`, or find out which guest opens these connections",
        ),
        gauge(
            "avs.nat_current_mappings",
            "ports in use of shared outside addresses",
            "`bifrostctl nat` lists them by address",
        ),
        count("avs.nat_created_mappings", "ports of shared outside addresses allocated", ""),
        count("avs.nat_expired_mappings", "of these: released some time after their last session ended", ""),
        gauge(
            "avs.balanced_current_sessions",
            "connections of guests through load balancers, and with the outside",
            "at `sessions.total` the table is full",
        ),
        gauge("avs.balanced_established_sessions", "of these: with packets in both directions, and not closed", ""),
        count("avs.balanced_created_sessions", "connections through load balancers, and with the outside, created", ""),
        count(
            "avs.balanced_expired_sessions",
            "connections through load balancers, and with the outside, that timed out",
            "",
        ),
        count(
            "avs.balanced_evicted_sessions",
            "connections through load balancers, and with the outside, evicted at a bound of `[sessions]`",
            "raise `sessions.per_port` or `sessions.total`, or find out which guest opens these connections",
        ),
        count(
            "avs.balanced_revoked_sessions",
            "always 0: a connection that loses its backend is dropped, see `backend_gone`",
            "",
        ),
        count(
            "avs.fragment_created_records",
            "first fragments accepted where rules match ports; the later fragments follow them",
            "",
        ),
        count(
            "avs.fragment_evicted_records",
            "of these: evicted before their packet was complete",
            "more fragmented packets at a time than a port's records (64 per direction), or a flood of first fragments",
        ),
        count("metadata.answered_requests", "requests for metadata that got a document", ""),
        count(
            "metadata.refused_requests",
            "requests for metadata that got an error: no such document, or not a plain GET",
            "a guest that expects other documents; see operations/guests.md",
        ),
        count(
            "metadata.expired_connections",
            "connections to the metadata service ended after 10 s",
            "a guest that opens connections without sending requests",
        ),
        drop(
            "metadata.refused_packets",
            "packets to the metadata service above its limits: more than 256 guests at a time, or too many packets of one",
            "many guests start at once; they retry",
        ),
        count("mirror.sent_packets", "copies of packets sent to mirror targets", ""),
        count(
            "mirror.missed_packets",
            "copies of packets dropped because the queue to the sending thread was full",
            "mirror less: a filter, `one_in`, `truncate`",
        ),
        count(
            "mirror.unsent_packets",
            "copies of packets that could not be sent",
            "the log has the reason: is there a route to the target, and enough bandwidth?",
        ),
        gauge(
            "avs.flow_log_current_flows",
            "flows counted by flow logs",
            "at `flow_log.flows` a worker logs no further flows",
        ),
        count("avs.flow_log_created_records", "records of flow logs", ""),
        count(
            "avs.flow_log_lost_records",
            "records of flow logs that were not collected in time",
            "connections with equal addresses and ports that end faster than the daemon's thread runs",
        ),
        count(
            "avs.flow_log_unlogged_packets",
            "packets of flows that are not logged because the table is full; a port gets a quarter of `flow_log.flows`",
            "a scan or a flood; or raise `flow_log.flows`",
        ),
        count(
            "avs.flow_log_unsampled_packets",
            "packets of flows that are not logged because of sampling (`one_in`)",
            "",
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
            "the log says why: no route, no listener, or a full queue",
        ),
        count("flow_log.ipfix_messages", "messages to `flow_log.collector`, including templates", ""),
        count("avs.rule_log_created_records", "records of rules with `log = true`", ""),
        count(
            "avs.rule_log_suppressed_packets",
            "packets that a rule with `log = true` accepted or rejected, without a record: the port has reached \
             `flow_log.rules_per_s` in this second, or 1024 flows are being logged",
            "a scan or a flood; or raise `flow_log.rules_per_s`",
        ),
        count("flow_log.rule_json_records", "records written to `flow_log.rules_json`", ""),
        count(
            "flow_log.rule_json_lost_records",
            "records that could not be written to `flow_log.rules_json`",
            "the log says why: no space, no directory, no permission",
        ),
        count("avs.flow_found_packets", "packets with a flow record, which need no further lookups", ""),
        count(
            "avs.flow_batched_packets",
            "packets that used the decision about an earlier packet of their flow in the same turn",
            "",
        ),
        count("avs.flow_created_records", "flow records created, in networks with an ACL or security groups", ""),
        count(
            "avs.flow_collision_packets",
            "packets whose flow got no record because its set was full",
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
            what: "frames from other hosts, dropped before the guest",
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
