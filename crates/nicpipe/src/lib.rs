//! The pipeline in front of gateway pods and behind them (*Albatross*, SIGCOMM'25, figures 1 and A.1), without I/O.
//!
//! ```text
//!  wire -> parse -> pod by VLAN -> class -> limiter -> dispatch -> ring of a core        (Pipeline::arrive)
//!  wire <- deparse <------ reorder <---------- legal check <------ ring of a core        (Pipeline::take_back, release)
//! ```
//!
//! A [`Pipeline`] has one [`Pod`] for each pod, told apart by the VLAN tags of frames: a tag is a virtual function. What arrives is classified by the
//! pod's [`Rules`]: control traffic goes to rings of its own, ahead of everything; flows that must stay on one core are dispatched by flow; all else is
//! sprayed. A tenant that sends too much is stopped here, before it costs a core anything, and by the time at which its packets arrived: a pipeline that
//! was kept from running finds many of them at once, which is not their sender's fault.
//!
//! A pod's memory is hostile. What it returns is copied once, into this side's own memory, and checked there; order, payload and timeout of each packet
//! are on record here. See `bifrost_plb` for what a pod can then still do: nothing to anybody else.
//!
//! Rings are the caller's, behind [`Rings`]; so are frames, clocks and threads.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod buffers;
mod config;
mod counters;
mod explain;
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
