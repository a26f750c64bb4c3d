//! Counters with their worker, port, peer or path, and drop counters with explanations.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::balance::{self, Balance};
use crate::counters::{self, Kind};

/// A counter or gauge of one worker, port, peer or path: an element of `GET /v1/samples`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Sample {
    /// Its name, which ends in its unit; [`counters`] describes it.
    pub counter: String,
    /// Where it was counted.
    #[serde(flatten)]
    pub at: Place,
    /// The value.
    pub value: u64,
}

/// Where something was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(default)]
pub struct Place {
    /// The worker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker: Option<u32>,
    /// The port, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<String>,
    /// The peer, by name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peer: Option<String>,
    /// The path to the peer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<u8>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [
            self.port.as_ref().map(|port| format!("port {port}")),
            self.peer.as_ref().map(|peer| format!("peer {peer}")),
            self.path.map(|path| format!("path {path}")),
            self.worker.map(|worker| format!("worker {worker}")),
        ];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(", "))
    }
}

/// Drops since the start: `GET /v1/drops`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Drops {
    /// Time since the daemon was ready, s.
    pub uptime_s: f64,
    /// Drop counters that are not 0, by name and place.
    pub drops: Vec<DropCount>,
    /// Balances that are not 0: packets that vanished without being counted, which is a defect.
    pub unexplained: Vec<Balance>,
}

/// Drops for one reason at one place.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct DropCount {
    /// The counter.
    pub counter: String,
    /// Where it was counted.
    #[serde(flatten)]
    pub at: Place,
    /// Its value, in the counter's unit, since the start.
    pub count: u64,
    /// Description, one line.
    pub what: String,
    /// What to do.
    pub advice: String,
}

impl Drops {
    /// Selects the drop counters that are not 0 from samples.
    pub fn of(uptime_s: f64, samples: &[Sample]) -> Drops {
        let explained = samples.iter().filter(|s| s.value > 0).filter_map(|sample| {
            let meaning = counters::meaning(&sample.counter).filter(|m| m.kind == Kind::Drop)?;
            Some(DropCount {
                counter: sample.counter.clone(),
                at: sample.at.clone(),
                count: sample.value,
                what: meaning.what.into_owned(),
                advice: meaning.advice.to_owned(),
            })
        });
        let mut drops: Vec<DropCount> = explained.collect();
        drops.sort_by(|a, b| (&a.counter, &a.at).cmp(&(&b.counter, &b.at)));
        Drops { uptime_s, drops, unexplained: balance::unexplained(samples) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(counter: &str, at: Place, value: u64) -> Sample {
        Sample { counter: counter.into(), at, value }
    }

    #[test]
    fn only_drops_are_selected_and_they_are_explained_and_sorted() {
        let port = |name: &str| Place { worker: Some(1), port: Some(name.into()), ..Place::default() };
        let drops = Drops::of(
            2.5,
            &[
                sample("port.tx_packets", port("a"), 7),
                sample("drop.no_buffer_packets", Place { worker: Some(0), ..Place::default() }, 3),
                sample("avs.dropped_acl_packets", port("b"), 2),
                sample("avs.dropped_acl_packets", port("a"), 1),
                sample("avs.dropped_vlan_packets", port("a"), 0),
                sample("drop.of_another_release_packets", port("a"), 9),
            ],
        );
        let seen: Vec<_> = drops.drops.iter().map(|d| (d.counter.as_str(), d.at.to_string(), d.count)).collect();
        assert_eq!(
            seen,
            [
                ("avs.dropped_acl_packets", "port a, worker 1".to_owned(), 1),
                ("avs.dropped_acl_packets", "port b, worker 1".to_owned(), 2),
                ("drop.no_buffer_packets", "worker 0".to_owned(), 3),
            ]
        );
        assert!(drops.drops[0].what.contains("ACL") && drops.drops[0].advice.contains("[[vpc.acl]]"));
    }

    #[test]
    fn a_place_is_part_of_its_sample() {
        let sample = sample("path.tx_packets", Place { peer: Some("b".into()), path: Some(1), ..Place::default() }, 4);
        let text = serde_json::to_string(&sample).unwrap();
        assert_eq!(text, r#"{"counter":"path.tx_packets","peer":"b","path":1,"value":4}"#);
        assert_eq!(serde_json::from_str::<Sample>(&text).unwrap(), sample);
    }
}
