//! Fault injection for tests.

use serde::{Deserialize, Serialize};

/// Maximum delay, and maximum jitter, of a fault, µs: a delayed packet occupies a buffer.
pub const MAX_FAULT_DELAY_US: u64 = 10_000_000;

/// A fault to inject: the body of `PUT /v1/faults`. Deserializing it checks its values.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Flat", into = "Flat")]
pub struct FaultSpec {
    /// Where it applies.
    pub target: FaultTarget,
    /// Which packets it affects; the papers inject loss at the receiver.
    pub direction: Direction,
    /// Share of packets dropped, 0 to 100.
    pub loss_percent: f64,
    /// Added delay, µs, 0 to [`MAX_FAULT_DELAY_US`].
    pub delay_us: u64,
    /// Added random delay, uniform from 0 to this value, µs; without `reorder_percent` the order is kept.
    pub jitter_us: u64,
    /// Share of packets that overtake earlier ones, 0 to 100.
    pub reorder_percent: f64,
    /// Share of packets delivered twice, 0 to 100.
    pub duplicate_percent: f64,
    /// Share of packets in which one byte is changed, 0 to 100.
    pub corrupt_percent: f64,
    /// Drops everything.
    pub down: bool,
    /// Seed of the random decisions, for repeatable runs; none: the daemon picks one.
    pub seed: Option<u64>,
}

/// Where a fault applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultTarget {
    /// Between the switch and a port's vNIC.
    Port {
        /// The port's name.
        name: String,
    },
    /// On the underlay, to or from a peer.
    Peer {
        /// The peer's name.
        name: String,
        /// Only this path, 0 to 7; none: all of them.
        path: Option<u8>,
    },
}

/// Which packets a fault affects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// Received packets: at a port, from the switch to the guest; at a peer, from that peer.
    #[default]
    Rx,
    /// Sent packets: at a port, from the guest; at a peer, to that peer.
    Tx,
}

/// An active fault: an element of `GET /v1/faults`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FaultEntry {
    /// Its id, for `DELETE /v1/faults?id=…`.
    pub id: u64,
    /// What it does.
    pub spec: FaultSpec,
    /// Packets that it dropped, delayed, reordered, duplicated or corrupted.
    #[serde(default)]
    pub hits_packets: u64,
}

/// The outcome of `DELETE /v1/faults`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FaultCleared {
    /// Number of removed faults.
    pub removed: u64,
}

/// Why a [`FaultSpec`] was refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum FaultSpecError {
    /// Neither a port nor a peer, or both.
    #[error("name either a port or a peer")]
    Target,
    /// A path without a peer.
    #[error("path: needs a peer; a port has no paths")]
    PathWithoutPeer,
    /// A path number above 7.
    #[error("path: {0} is not in 0..=7")]
    Path(u8),
    /// A percentage out of range.
    #[error("{field}: {value} is not in 0..=100 percent")]
    Percent {
        /// The field.
        field: &'static str,
        /// Its value.
        value: f64,
    },
    /// A delay beyond [`MAX_FAULT_DELAY_US`].
    #[error("{field}: {value} is more than {MAX_FAULT_DELAY_US} µs")]
    Delay {
        /// The field.
        field: &'static str,
        /// Its value, µs.
        value: u64,
    },
    /// It would have no effect.
    #[error("no effect: give at least one of loss, delay, jitter, reorder, duplicate, corrupt, down")]
    NoEffect,
}

impl FaultSpec {
    /// A fault on received packets of `target`, without effects. Set its effects, then call [`check`](Self::check).
    pub fn new(target: FaultTarget) -> FaultSpec {
        FaultSpec {
            target,
            direction: Direction::Rx,
            loss_percent: 0.0,
            delay_us: 0,
            jitter_us: 0,
            reorder_percent: 0.0,
            duplicate_percent: 0.0,
            corrupt_percent: 0.0,
            down: false,
            seed: None,
        }
    }

    /// Checks the ranges, and that it has an effect.
    pub fn check(&self) -> Result<(), FaultSpecError> {
        if let FaultTarget::Peer { path: Some(path), .. } = self.target
            && path > 7
        {
            return Err(FaultSpecError::Path(path));
        }
        let percents = [
            ("loss_percent", self.loss_percent),
            ("reorder_percent", self.reorder_percent),
            ("duplicate_percent", self.duplicate_percent),
            ("corrupt_percent", self.corrupt_percent),
        ];
        for (field, value) in percents {
            // NaN is in no range.
            if !(0.0..=100.0).contains(&value) {
                return Err(FaultSpecError::Percent { field, value });
            }
        }
        for (field, value) in [("delay_us", self.delay_us), ("jitter_us", self.jitter_us)] {
            if value > MAX_FAULT_DELAY_US {
                return Err(FaultSpecError::Delay { field, value });
            }
        }
        let idle = percents.iter().all(|(_, value)| *value == 0.0) && self.delay_us == 0 && self.jitter_us == 0;
        if idle && !self.down { Err(FaultSpecError::NoEffect) } else { Ok(()) }
    }
}

impl std::fmt::Display for FaultTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            FaultTarget::Port { name } => write!(f, "port {name}"),
            FaultTarget::Peer { name, path: None } => write!(f, "peer {name}"),
            FaultTarget::Peer { name, path: Some(path) } => write!(f, "peer {name} path {path}"),
        }
    }
}

/// The JSON format of a [`FaultSpec`].
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Flat {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    port: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peer: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    path: Option<u8>,
    #[serde(default)]
    direction: Direction,
    #[serde(default)]
    loss_percent: f64,
    #[serde(default)]
    delay_us: u64,
    #[serde(default)]
    jitter_us: u64,
    #[serde(default)]
    reorder_percent: f64,
    #[serde(default)]
    duplicate_percent: f64,
    #[serde(default)]
    corrupt_percent: f64,
    #[serde(default)]
    down: bool,
    #[serde(default)]
    seed: Option<u64>,
}

impl TryFrom<Flat> for FaultSpec {
    type Error = FaultSpecError;

    fn try_from(flat: Flat) -> Result<FaultSpec, FaultSpecError> {
        let target = match (flat.port, flat.peer, flat.path) {
            (Some(_), None, Some(_)) => return Err(FaultSpecError::PathWithoutPeer),
            (Some(name), None, None) => FaultTarget::Port { name },
            (None, Some(name), path) => FaultTarget::Peer { name, path },
            (None, None, _) | (Some(_), Some(_), _) => return Err(FaultSpecError::Target),
        };
        let spec = FaultSpec {
            target,
            direction: flat.direction,
            loss_percent: flat.loss_percent,
            delay_us: flat.delay_us,
            jitter_us: flat.jitter_us,
            reorder_percent: flat.reorder_percent,
            duplicate_percent: flat.duplicate_percent,
            corrupt_percent: flat.corrupt_percent,
            down: flat.down,
            seed: flat.seed,
        };
        spec.check()?;
        Ok(spec)
    }
}

impl From<FaultSpec> for Flat {
    fn from(spec: FaultSpec) -> Flat {
        let (port, peer, path) = match spec.target {
            FaultTarget::Port { name } => (Some(name), None, None),
            FaultTarget::Peer { name, path } => (None, Some(name), path),
        };
        Flat {
            port,
            peer,
            path,
            direction: spec.direction,
            loss_percent: spec.loss_percent,
            delay_us: spec.delay_us,
            jitter_us: spec.jitter_us,
            reorder_percent: spec.reorder_percent,
            duplicate_percent: spec.duplicate_percent,
            corrupt_percent: spec.corrupt_percent,
            down: spec.down,
            seed: spec.seed,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_checked() {
        let good = [
            r#"{"port":"web1","loss_percent":1.5}"#,
            r#"{"peer":"b","path":7,"direction":"tx","down":true,"seed":3}"#,
            r#"{"peer":"b","delay_us":10,"jitter_us":3}"#,
        ];
        for text in good {
            let spec: FaultSpec = serde_json::from_str(text).unwrap();
            let again: FaultSpec = serde_json::from_str(&serde_json::to_string(&spec).unwrap()).unwrap();
            assert_eq!(spec, again);
        }
        let bad = [
            (r#"{"loss_percent":1}"#, "either a port or a peer"),
            (r#"{"port":"a","peer":"b","down":true}"#, "either a port or a peer"),
            (r#"{"port":"a","path":1,"down":true}"#, "needs a peer"),
            (r#"{"peer":"a","path":8,"down":true}"#, "8 is not in 0..=7"),
            (r#"{"port":"a","loss_percent":100.5}"#, "loss_percent: 100.5 is not in 0..=100"),
            (r#"{"port":"a","corrupt_percent":-1}"#, "corrupt_percent: -1"),
            (r#"{"port":"a","delay_us":10000001}"#, "delay_us: 10000001 is more"),
            (r#"{"port":"a"}"#, "no effect"),
            (r#"{"port":"a","los_percent":1}"#, "unknown field `los_percent`"),
        ];
        for (text, message) in bad {
            let error = serde_json::from_str::<FaultSpec>(text).unwrap_err().to_string();
            assert!(error.contains(message), "{text}: {error}");
        }
    }

    #[test]
    fn not_a_number_is_not_a_percentage() {
        let mut spec = FaultSpec::new(FaultTarget::Port { name: "a".into() });
        spec.loss_percent = f64::NAN;
        assert!(matches!(spec.check(), Err(FaultSpecError::Percent { .. })));
    }
}
