//! The virtual switch: match and action.
//!
//! A [`Switch`] decides where a frame goes: [`Switch::from_guest`] for what a vNIC sends, [`Switch::from_underlay`] for
//! what a peer sent in VXLAN. It answers ARP, neighbour discovery and pings of a VPC's gateway itself, and lets nobody
//! speak with an address that is not theirs. It does no I/O, allocates nothing per packet, and what it does to a frame it
//! returns as a [`Rewrite`], to be applied to the bytes on their way out.
//!
//! # Configuration is swapped as a whole
//!
//! A switch is built from plain [`Tables`] and never edited afterwards; a reload builds the next one and swaps it in with
//! [`Switch::replace`], between two batches. So every derived index agrees with the description at all times, a reload
//! that is refused changes nothing, and there is no order of edits to get wrong. Only counters are carried over.
//!
//! # Where sessions and security groups go
//!
//! The decision about a guest's frame is made in two steps: admission (is the guest allowed to say this at all?), then a
//! lookup of the action, which depends only on the port, the destination MAC and the flow key. A session table
//! memoises the second step in front of it; security groups are asked between the two.

#![forbid(unsafe_code)]

mod answer;
mod counters;
mod description;
mod drop_reason;
mod from_guest;
mod from_underlay;
mod rewrite;
mod switch;
mod vpc;

pub use counters::{Drops, PortCounters, UnderlayCounters};
pub use description::{BuildError, GATEWAY_MAC, Ordering, PeerId, Port, PortId, Reliability, Route, Tables, Vpc};
pub use drop_reason::DropReason;
pub use from_guest::FromGuest;
pub use rewrite::Rewrite;
pub use switch::Switch;
