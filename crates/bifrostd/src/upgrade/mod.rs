//! Upgrade: another process takes over from a running daemon with hardly any interruption for guests.
//!
//! ```text
//!  old                                              new (a child of the old one)
//!   | running                                        |
//!   |-- Offer: configuration's checksum, others'  -->| reads the configuration, takes devices and sockets, builds
//!   |   objects, names, descriptors of everything    | tables, starts paused workers
//!   |<-- Ready ------------------------------------- |
//!   |-- Copies: some sessions ---------------------->| adds them to its tables
//!   |<-- Copied -------------------------------------|
//!   | and so on, until few sessions are left         |
//!   | directs AF_XDP frames to the UDP sockets       |
//!   | fetches nothing from guests; waits a moment    |
//!   | for acknowledgements; stops its workers        |
//!   |-- State: other sessions, unacknowledged ------>| resumes its workers
//!   |   packets                                      |
//!   |<-- Running ------------------------------------|
//!   | leaves its AF_XDP sockets                      | binds its own (port/src/afxdp/hand_over.rs)
//!   |-- Capture: position and connection ----------->| continues it
//!   |-- Counters ----------------------------------->|
//!   |-- Records: flow logs ------------------------->| continues them
//!   | notifies the service manager, answers, exits   | answers requests
//! ```
//!
//! Both processes have the same open files during the upgrade, and only one uses them. After any failure before
//! *Running* (an error, a crash, a timeout), the old daemon kills the new one and continues. It has kept its state;
//! connections with traffic are then set up again.
//!
//! ARCHITECTURE.md lists what is handed over, and what the new daemon learns again.

mod captures;
mod channel;
mod copy;
mod format;
mod frames;
mod hand_over;
mod machines;
mod new_daemon;
mod offer;
mod paths;
mod records;
mod take_over;
mod touch;
mod workers;

pub(crate) use frames::wait_for_queues;
pub(crate) use hand_over::Progress;
pub(crate) use offer::Descriptors;
pub(crate) use take_over::{Handed, Successor};
