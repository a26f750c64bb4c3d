//! Bodies of API requests and responses: a parsed value survives serialising and parsing.

use bifrost_control::api::{Conn, FaultCleared, FaultEntry, FaultSpec, PortStatus, ReloadReport, Stats, Status};
use serde::{Serialize, de::DeserializeOwned};

pub(crate) fn run(bytes: &[u8]) {
    if let Ok(spec) = serde_json::from_slice::<FaultSpec>(bytes) {
        assert_eq!(spec.check(), Ok(()), "what is received has been checked");
    }
    again::<FaultSpec>(bytes);
    again::<FaultEntry>(bytes);
    again::<FaultCleared>(bytes);
    again::<ReloadReport>(bytes);
    again::<Status>(bytes);
    again::<Stats>(bytes);
    again::<Conn>(bytes);
    again::<PortStatus>(bytes);
}

fn again<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
    let Ok(value) = serde_json::from_slice::<T>(bytes) else { return };
    let text = serde_json::to_vec(&value).unwrap_or_else(|e| panic!("cannot be written: {e}"));
    match serde_json::from_slice::<T>(&text) {
        Ok(second) => assert_eq!(second, value),
        Err(e) => panic!("cannot be read again: {e}: {}", String::from_utf8_lossy(&text)),
    }
}
