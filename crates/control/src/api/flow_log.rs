//! Flow logs.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Flow logs: the answer of `GET /v1/flow-log`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlowLogStatus {
    /// Whether anything is logged.
    pub on: bool,
    /// The file for JSON lines.
    pub json: Option<String>,
    /// Who gets IPFIX.
    pub collector: Option<SocketAddr>,
    /// Names of the ports whose conversations are logged.
    pub ports: Vec<String>,
    /// Conversations that are being counted.
    pub flows: u64,
    /// Records that the workers have made since the daemon began.
    pub created_records: u64,
    /// Records that workers have lost: they were not taken in time.
    pub lost_records: u64,
    /// Packets of conversations for which a worker had no room.
    pub unlogged_packets: u64,
    /// Records written to the file.
    pub json_records: u64,
    /// Records that could not be written.
    pub json_lost_records: u64,
    /// Records sent to the collector.
    pub ipfix_records: u64,
    /// Records that could not be sent.
    pub ipfix_lost_records: u64,
    /// Messages sent to the collector, those with templates among them.
    pub ipfix_messages: u64,
    /// The file for JSON lines about rules that are logged.
    pub rules_json: Option<String>,
    /// The rules that are logged, such as `ingress rule 2 of security group web`.
    pub rules: Vec<String>,
    /// Records that the workers have made about rules.
    pub rule_created_records: u64,
    /// Packets that a logged rule was looked up for and that are in no record: beyond `rules_per_s`, or too many flows.
    pub rule_suppressed_packets: u64,
    /// Records about rules written to their file.
    pub rule_json_records: u64,
    /// Records about rules that could not be written.
    pub rule_json_lost_records: u64,
}
