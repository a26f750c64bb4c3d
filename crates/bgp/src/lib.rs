//! BGP (RFC 4271) and BFD (RFC 5880, 5881) of a gateway pod, without I/O, clock or threads.
//!
//! A pod announces a few addresses to a proxy over iBGP, and needs no routes from it: [`Speaker`] sends routes, and of
//! the received messages it only processes those that the session needs. The caller provides the connection. [`Bfd`]
//! detects within a fraction of a second that the other end is gone.
//!
//! The crate `rustbgpd-wire` parses and emits the messages.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bfd;
mod speaker;
mod update;

pub use bfd::{Bfd, BfdConfig, BfdError, BfdState, LEN as BFD_LEN, PORT as BFD_PORT};
pub use speaker::{Event, Speaker, SpeakerConfig, State};
