//! A relay, and a `bifrostd` without a data path.

pub mod daemon;
pub mod relay;
