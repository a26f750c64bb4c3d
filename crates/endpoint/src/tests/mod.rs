//! Two hosts and a network in virtual time.

mod hostile;
mod messages;
mod throughput;
mod world;
