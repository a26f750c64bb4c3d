//! Batches of datagrams through UDP sockets: `recvmmsg` and `sendmmsg`, with segmentation and merging by the kernel.
//!
//! Of the crates that do GSO and GRO, none gives receive times, TTLs, several destinations in a system call and sending
//! without a copy, so the two system calls are wrapped here, behind buffers that own what the kernel is given. The
//! caller owns the sockets and decides what its options are and what an error means.

mod control;
mod notes;
mod option;
mod receive;
mod send;

pub use notes::{Notes, datagrams};
pub use option::{set_int, set_program};
pub use receive::{RECEIVE_BUFFER_BYTES, ReceiveBuffers};
pub use send::{Outgoing, SendHeaders};
