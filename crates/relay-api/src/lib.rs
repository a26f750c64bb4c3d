//! What relays and agents say to each other (docs/FLEET.md): the messages, their limits, and the certificates of both ends.
//!
//! [`pb`] is what is made of `proto/relay.proto`. What comes from the other end is hostile until it was checked: [`FromAgent`] and
//! [`ToAgent`] are messages whose numbers, sizes and names are within the limits of [`limits`]; everything that they hold is bounded.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod checked;
pub mod enroll;
pub mod limits;
pub mod names;
mod pieces;
pub mod tls;
pub mod traces;

pub use checked::{
    Answer, Answered, Change, FromAgent, Hello, ImpairedPeer, Invalid, PathHealth, Problem, Question, Report, ToAgent,
    Welcome, agree,
};
pub use pieces::pieces;

/// As it is on the wire, unchecked: messages, and tonic's client and server.
#[allow(missing_docs, unreachable_pub, clippy::all, reason = "it is made by a program")]
pub mod pb {
    tonic::include_proto!("bifrost.relay.v1");
}
