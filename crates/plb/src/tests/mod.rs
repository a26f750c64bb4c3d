//! Tests of the balancer: against a slow oracle, by tables of cases, and by mutations.
#![allow(clippy::unwrap_used)]

mod cases;
mod mutations;
mod oracle;
mod properties;
mod vectors;
