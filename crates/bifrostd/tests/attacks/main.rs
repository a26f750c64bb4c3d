//! Attacks on everything that a guest, its front-end or a peer can reach. During each attack, another tenant uses a
//! Redis server, whose latency must not be affected. SECURITY.md lists the attacks. The tests run one at a time,
//! because they compare latencies, and `cargo test` leaves them out unless it is told `--test attacks`. Needs root.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

#[path = "../common/mod.rs"]
mod common;

mod backend;
mod compared;
mod damage;
mod forged;
mod policy;
mod rings;
mod sessions;
