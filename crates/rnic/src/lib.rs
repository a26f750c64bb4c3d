//! A RoCEv2 NIC in software: queue pairs, completion queues, memory regions. No I/O, no clock, no thread.
//!
//! [`Nic::receive`] takes a received UDP payload, [`Nic::transmit`] fills a [`Burst`] with those to send,
//! [`Nic::advance`] runs the timers; `now` is an argument. Between these calls the caller posts work requests and polls
//! completions, as with verbs of hardware. IBTA chapters are those of the Architecture Specification, volume 1.
//!
//! - **UC** (IBTA 9.8): a message that lost a packet is dropped; later ones arrive.
//! - **RC** (IBTA 9.7): go-back-N, with a bounded number of retries; then the queue pair is in error.
//! - **UD** (IBTA 9.8.3): one packet, to any queue pair whose key the sender knows.
//!
//! Peers are hostile: a packet is accepted only if it comes from the address that its queue pair is connected to, and
//! writes only into a region of the queue pair's protection domain, with its key and within its bounds. All other
//! packets are counted ([`Counters`]) and dropped. Only RC answers, with a NAK, and is then in error, as the
//! specification requires.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod burst;
mod completion;
mod counters;
mod nic;
mod queue_pair;
mod region;
mod requester;
mod responder;
#[cfg(test)]
mod tests;
mod verbs;

pub use bifrost_wire::roce::{Qpn, Route, Sequence, Transport};
pub use burst::{Burst, Outgoing};
pub use completion::{Completion, CompletionKind, CqId, Status};
pub use counters::Counters;
pub use nic::{Config, Nic};
pub use region::{Access, Region};
pub use verbs::{
    Connect, Datagram, Domain, INLINE_MAX, Key, Operation, PostError, QpInit, ReceiveRequest, SendRequest, Slice,
    VerbsError,
};
