//! Packet-level load balancing (PLB) for a gateway pod, without I/O: *Albatross*, SIGCOMM'25, section 4.1.
//!
//! A [`Balancer`] belongs to one pod. [`Balancer::dispatch`] sprays packets over the pod's cores and numbers them for one of the
//! pod's order queues. The number travels with the packet in a [`Trailer`] (docs/GATEWAY-TRAILER.md). The pod sends the packet
//! back, [`Balancer::returned`] checks the trailer, and [`Balancer::release`] lets packets leave in the order in which they came.
//!
//! The packets themselves are the caller's: the balancer holds a handle `T` for each, and gives each handle back exactly once.
//! Time (`now`, ns on any monotonic clock) is an argument. Nothing allocates after [`Balancer::new`].
//!
//! # A hostile pod
//!
//! A pod can write anything anywhere into its memory at any time. So the caller copies the trailer once and passes it by value.
//! The order, the time and the payload slot of each packet are kept here, and a trailer is only a claim that is checked against
//! them. A pod can delay, drop or mix up its own packets; it can neither hold more than the configured memory nor reach another
//! pod's packets.

#![forbid(unsafe_code)]

mod balancer;
mod config;
mod counters;
mod mutation;
mod payload;
mod queue;
mod trailer;

#[cfg(test)]
mod tests;

pub use balancer::{Balancer, Dispatch, Egress, Mode, Order, Refused};
pub use config::{Config, ConfigError, LegalCheck};
pub use counters::{Counters, DropReason};
#[cfg(any(test, feature = "mutations"))]
pub use mutation::Mutation;
pub use trailer::{NO_PAYLOAD, TRAILER_LEN, Trailer, TrailerError};
