//! Packet processing of a gateway: four services at a cloud's edge (*Albatross*, SIGCOMM'25, table 2), without I/O.
//!
//! | service | in | out |
//! |---|---|---|
//! | VPC-VPC | VXLAN from a host | VXLAN to the host of the destination, in the same VPC or in a peered one |
//! | VPC-Internet | VXLAN from a host, or IP from the Internet | IP to the next hop, or VXLAN; 1:1 (EIP) and many-to-one (SNAT) translation |
//! | VPC-IDC | VXLAN from a host, or VXLAN or GRE from a customer's router | the other of the two |
//! | VPC-CloudService | VXLAN from a host | VXLAN to a backend in the service's network; and back |
//!
//! A [`Core`] belongs to one core of a pod and shares no state with other cores, except the [`Nat`]. So packets of a
//! flow may be sprayed over the cores. [`Core::process`] rewrites a [`Packet`] in place: headers grow and shrink in
//! front of the payload, which is neither moved nor read. Checksums are updated incrementally (RFC 1624). A packet may
//! therefore come without its payload.
//!
//! Every packet that is not forwarded is counted with a [`DropReason`].

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod ahead;
mod answer;
mod core;
mod counters;
mod decide;
mod decision;
mod encap;
mod fragments;
mod handover;
mod icmp;
mod keepalive;
mod nat;
mod packet;
mod pieces;
mod quoted;
mod rewrite;
mod send;
mod session;
mod shared;
mod tables;
mod trace;

#[cfg(test)]
mod tests;

pub use crate::core::{Core, Verdict};
pub use ahead::{Ahead, VECTOR};
pub use counters::{Counters, DropReason, Service};
pub use decision::Context;
pub use handover::{BadSessions, Export, Imported};
pub use keepalive::{Keepalive, Keepalives, TunnelState};
pub use nat::{INTERNET, Nat, NatConfig};
pub use packet::{HEADROOM, Packet};
pub use tables::{Backends, Host, Metered, NextHop, Route, Tables, Tunnel, TunnelKind, Vpc};
pub use trace::{Step, trace};
