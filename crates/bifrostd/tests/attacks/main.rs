//! Attacks on everything that a guest, its front-end or a peer can reach, with another tenant's Redis beside each: it must not notice.
//! SECURITY.md lists them. Each test has the machine to itself: what is compared are latencies. Needs root.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

#[path = "../common/mod.rs"]
mod common;

mod backend;
mod damage;
mod forged;
mod policy;
mod rings;
mod sessions;
