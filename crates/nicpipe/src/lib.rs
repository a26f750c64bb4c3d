//! The pipeline between the wire and gateway pods (*Albatross*, SIGCOMM'25, figures 1 and A.1), without I/O.
//!
//! ```text
//!  wire -> parse -> pod by VLAN -> class -> limiter -> dispatch -> ring of a core        (Pipeline::arrive)
//!  wire <- deparse <------ reorder <---------- legal check <------ ring of a core        (Pipeline::take_back, release)
//! ```
//!
//! A [`Pipeline`] has one [`Pod`] for each pod, distinguished by the VLAN tags of frames: a tag is a virtual function.
//! The pod's [`Rules`] classify arriving frames: control traffic goes to separate rings, ahead of everything; flows
//! that must stay on one core are dispatched by flow; all other packets are sprayed. A tenant that exceeds its rate is
//! limited here, before it costs a core anything. The limiter uses the times at which packets arrived: a pipeline that
//! was delayed finds many of them at once, which is not their sender's fault.
//!
//! A pod's memory is hostile. What it returns is copied once, into this side's memory, and checked there; order,
//! payload and timeout of each packet are recorded here. `bifrost_plb` describes what a pod can still do: nothing to
//! other pods.
//!
//! The caller provides rings, behind [`Rings`], and frames, clocks and threads.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod buffers;
mod config;
mod counters;
mod explain;
mod mutation;
mod parse;
mod pipeline;
mod pod;
mod reliable;
mod rules;
#[cfg(test)]
mod tests;

pub use bifrost_plb::Mode;
pub use config::{ConfigError, PipelineConfig, PodConfig};
pub use counters::{HostCounters, PodCounters, Refusal, TransportCounters};
pub use explain::Explained;
pub use parse::{Arrival, Flow, look};
pub use pipeline::{Links, Pipeline, Place};
pub use pod::{Leaving, Pod, Ring, Rings};
pub use reliable::{HostState, Reliable, ReliableConfig, ReliableError};
pub use rules::{Class, Rule, Rules};
