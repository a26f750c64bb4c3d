//! Two hosts and a network in virtual time.

mod hostile;
mod memory;
mod messages;
mod switching;
mod throughput;
mod world;
