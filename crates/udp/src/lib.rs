//! Batches of datagrams through UDP sockets: `recvmmsg` and `sendmmsg`, with segmentation and merging by the kernel.
//!
//! No crate that does GSO and GRO also offers receive times, TTLs, several destinations in one system call and sending
//! without a copy. So this crate wraps the two system calls, behind buffers that own the memory given to the kernel.
//! The caller owns the sockets, chooses their options and handles errors.

mod control;
mod notes;
mod option;
mod receive;
mod send;

pub use notes::{Notes, datagrams};
pub use option::{set_int, set_program};
pub use receive::{RECEIVE_BUFFER_BYTES, ReceiveBuffers};
pub use send::{Outgoing, SendHeaders};
