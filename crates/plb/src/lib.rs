//! Packet-level load balancing (PLB) for a gateway pod, without I/O: *Albatross*, SIGCOMM'25, section 4.1.
//!
//! A [`Balancer`] belongs to one pod. [`Balancer::dispatch`] sprays packets over the pod's cores and gives each a
//! sequence number (PSN) in one of the pod's order queues. The PSN travels with the packet in a [`Trailer`]
//! (docs/GATEWAY-TRAILER.md). The pod sends the packet back, [`Balancer::returned`] checks the trailer, and
//! [`Balancer::release`] lets packets leave in their original order.
//!
//! The caller owns the packets: the balancer holds a handle `T` for each, and returns each handle exactly once.
//! Time (`now`, ns on any monotonic clock) is an argument. Nothing allocates after [`Balancer::new`].
//!
//! # A hostile pod
//!
//! A pod can write anything anywhere into its memory at any time. So the caller copies the trailer once and passes it
//! by value. The balancer records the order, the time and the payload slot of each packet, and checks the claims of a
//! trailer against this record. A pod can delay, drop or reorder its own packets; it cannot hold more than the
//! configured memory or reach another pod's packets.

#![forbid(unsafe_code)]

mod balancer;
mod config;
mod cores;
mod counters;
mod mutation;
mod payload;
mod queue;
mod trailer;

#[cfg(test)]
mod tests;

pub use balancer::{Balancer, Dispatch, Egress, Mode, Order, Refused};
pub use config::{Config, ConfigError, LegalCheck};
pub use cores::Cores;
pub use counters::{Counters, DropReason};
#[cfg(any(test, feature = "mutations"))]
pub use mutation::Mutation;
pub use trailer::{NO_PAYLOAD, TRAILER_LEN, Trailer, TrailerError};
