//! Two hosts and a network in virtual time.

mod hostile;
mod memory;
mod messages;
mod throughput;
mod world;
