//! Flow logs.

use std::net::SocketAddr;

use serde::{Deserialize, Serialize};

/// Flow logs: the response of `GET /v1/flow-log`. Unless noted, numbers are of all logs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FlowLogStatus {
    /// Whether the host's flow log, `[flow_log]`, is on.
    pub on: bool,
    /// The JSON Lines file of the host's flow log.
    pub json: Option<String>,
    /// The IPFIX collector of the host's flow log.
    pub collector: Option<SocketAddr>,
    /// Names of the ports whose flows the host's flow log has.
    pub ports: Vec<String>,
    /// The other flow logs, `[[vpc_flow_log]]`, by name.
    pub logs: Vec<VpcFlowLogStatus>,
    /// Flows that are being counted.
    pub flows: u64,
    /// Records created by workers since the start of the daemon.
    pub created_records: u64,
    /// Records lost because they were not collected from workers in time.
    pub lost_records: u64,
    /// Packets of flows that are not logged because a worker's table was full.
    pub unlogged_packets: u64,
    /// Packets of flows that sampling leaves out.
    pub unsampled_packets: u64,
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

/// One of `[[vpc_flow_log]]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct VpcFlowLogStatus {
    /// Its name.
    pub name: String,
    /// Names of the ports whose flows are logged.
    pub ports: Vec<String>,
    /// The JSON Lines file.
    pub json: Option<String>,
    /// The IPFIX collector.
    pub collector: Option<SocketAddr>,
    /// Sampling: with N, one of N flows is logged; with 0 and 1, all are.
    pub one_in: u32,
    /// Records written to the file.
    pub json_records: u64,
    /// Records that could not be written.
    pub json_lost_records: u64,
    /// Records sent to the collector.
    pub ipfix_records: u64,
    /// Records that could not be sent.
    pub ipfix_lost_records: u64,
}
