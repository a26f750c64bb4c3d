//! ICMP: the messages that a switch reads or sends itself.

pub mod v4;
pub mod v6;
