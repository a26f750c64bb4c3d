//! What the two reliable transports have in common: `bifrost-rte`, which carries frames, and `bifrost-rdm`, which carries
//! messages over RDMA.
//!
//! No I/O, no clock, no global state: time is an argument ([`Time`](time::Time)). The protocols themselves, with their
//! windows, acknowledgements and loss detection, are in the two crates; here is what does not depend on a packet format.

#![forbid(unsafe_code)]

pub mod cc;
pub mod pool;
pub mod rtt;
pub mod time;
pub mod timer;
