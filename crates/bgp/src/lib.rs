//! BGP (RFC 4271) and BFD (RFC 5880, 5881) of a gateway pod, without I/O, clock or threads.
//!
//! A pod announces a few addresses to a proxy over iBGP, and wants no route back: [`Speaker`] sends, and reads no more of what comes than the
//! session needs. Its bytes go over whatever connection the caller has. [`Bfd`] tells both ends within a fraction of a second that the other
//! one is gone.
//!
//! The messages are read and written by the crate `rustbgpd-wire`.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bfd;
mod speaker;
mod update;

pub use bfd::{Bfd, BfdConfig, BfdError, BfdState, LEN as BFD_LEN, PORT as BFD_PORT};
pub use speaker::{Event, Speaker, SpeakerConfig, State};
