//! Routes that are learned when a packet needs them.

use std::net::IpAddr;

use bifrost_wire::Mac;
use ipnet::IpNet;
use serde::{Deserialize, Serialize};

/// Most answers of a [`LearnSpec`].
pub const MAX_ANSWERS: usize = 1000;
/// Largest [`LearnSpec`], bytes.
pub const MAX_LEARN_BYTES: usize = 512 << 10;
/// Longest time that `GET /v1/learned/questions` waits for a question, ms.
pub const MAX_QUESTION_WAIT_MS: u64 = 500;

/// The query of `GET /v1/learned/questions`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct QuestionsQuery {
    /// How long to wait for the first question, ms; at most [`MAX_QUESTION_WAIT_MS`].
    pub wait_ms: u64,
}

/// A question: where an address is. An element of `GET /v1/learned/questions`, which returns each question once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct RouteQuestion {
    /// The VPC.
    pub vni: u32,
    /// The address.
    pub address: IpAddr,
}

/// An answer, asked for or not. It replaces what was learned about the range or parts of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteAnswer {
    /// The VPC.
    pub vni: u32,
    /// The addresses.
    pub range: IpNet,
    /// The host and the vNIC that have them. Absent: nobody has; this is not asked again for a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub route: Option<RouteTo>,
    /// Whether the range is only forgotten, and asked for again when a packet needs it. Then there is no `route`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub withdrawn: bool,
}

/// Where a learned route leads to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteTo {
    /// Name of the peer.
    pub peer: String,
    /// The vNIC.
    #[serde(with = "mac_text")]
    pub mac: Mac,
}

/// The body of `POST /v1/learned`: answers, at most [`MAX_ANSWERS`], which are taken over together and in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LearnSpec {
    /// The answers.
    pub answers: Vec<RouteAnswer>,
}

/// The result of `POST /v1/learned`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LearnReport {
    /// Answers that were taken over.
    pub taken: u64,
    /// Answers that do not suit the configuration: the VPC does not exist, or the range is not to be learned.
    pub unsuitable: u64,
    /// Routes without room: the VPC has as many as it may have.
    pub full: u64,
    /// Positions of answers whose peer is not configured, or not yet. What was known of the range is forgotten.
    pub unknown_peers: Vec<u64>,
}

/// A learned route: an element of `GET /v1/learned`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LearnedRoute {
    /// The VPC.
    pub vni: u32,
    /// The addresses.
    pub range: IpNet,
    /// Name of the peer.
    pub peer: String,
    /// The vNIC.
    #[serde(with = "mac_text")]
    pub mac: Mac,
    /// Seconds since it was learned.
    pub age_s: f64,
    /// Seconds since a packet has last used it, as far as known.
    pub idle_s: f64,
}

mod mac_text {
    use bifrost_wire::Mac;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(super) fn serialize<S: Serializer>(mac: &Mac, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(mac)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Mac, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong = |_| serde::de::Error::custom(format!("{text:?} is not a MAC address, such as 02:00:00:00:00:01"));
        text.parse().map_err(wrong)
    }
}
