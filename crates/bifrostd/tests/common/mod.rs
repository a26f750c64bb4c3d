//! Shared by the tests of the whole daemon: namespaces, hosts, guests, traffic.
//!
//! Everything is in network namespaces `be<pid>x<n>-<role>` and directories `/tmp/bifrost-e2e-<pid>x<n>`: tests may run
//! in parallel, repeatedly, and after a crashed run.

pub mod front_end;
pub mod host;
pub mod machine;
pub mod manager;
pub mod netns;
pub mod packets;
pub mod raw;
pub mod tenants;
pub mod traffic;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

pub use host::{Guest, Lab, Options};
pub use netns::Net;

/// Counters by name.
pub type Counters = BTreeMap<String, u64>;

/// Waits until `what` holds, for at most `seconds`.
pub fn eventually(seconds: f64, what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs_f64(seconds);
    while !holds() {
        assert!(Instant::now() < deadline, "not within {seconds} s: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The increase of counters between two readings, for those counters for which `counts` is true.
pub fn growth(before: &Counters, after: &Counters, counts: impl Fn(&str) -> bool) -> Counters {
    let grown = |name: &str, value: u64| value - before.get(name).copied().unwrap_or(0);
    after.iter().filter(|(n, _)| counts(n)).map(|(n, v)| (n.clone(), grown(n, *v))).filter(|(_, g)| *g > 0).collect()
}
