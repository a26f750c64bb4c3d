//! Flow logs.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Flow logs: the response of `GET /v1/flow-log`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlowLogStatus {
    /// Whether flow logs are on.
    pub on: bool,
    /// The JSON Lines file for flows.
    pub json: Option<String>,
    /// The IPFIX collector.
    pub collector: Option<SocketAddr>,
    /// Names of the ports whose flows are logged.
    pub ports: Vec<String>,
    /// Flows that are being counted.
    pub flows: u64,
    /// Records created by workers since the start of the daemon.
    pub created_records: u64,
    /// Records lost because they were not collected from workers in time.
    pub lost_records: u64,
    /// Packets of flows that are not logged because a worker's table was full.
    pub unlogged_packets: u64,
    /// Records written to the file.
    pub json_records: u64,
    /// Records that could not be written.
    pub json_lost_records: u64,
    /// Records sent to the collector.
    pub ipfix_records: u64,
    /// Records that could not be sent.
    pub ipfix_lost_records: u64,
    /// Messages sent to the collector, including templates.
    pub ipfix_messages: u64,
    /// The JSON Lines file for logged rules.
    pub rules_json: Option<String>,
    /// The logged rules, such as `ingress rule 2 of security group web`.
    pub rules: Vec<String>,
    /// Rule records created by workers.
    pub rule_created_records: u64,
    /// Packets that matched a logged rule without a record: beyond `rules_per_s`, or too many flows.
    pub rule_suppressed_packets: u64,
    /// Rule records written to their file.
    pub rule_json_records: u64,
    /// Rule records that could not be written.
    pub rule_json_lost_records: u64,
}
