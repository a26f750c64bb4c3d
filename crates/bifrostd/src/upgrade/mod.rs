//! Upgrade: another process takes over from a running daemon with hardly any interruption for guests.
//!
//! ```text
//!  old                                              new (a child of the old one)
//!   | running                                        |
//!   |-- Offer: configuration's checksum, others'  -->| reads the configuration, takes devices and sockets, builds
//!   |   objects, names, descriptors of everything    | tables, starts paused workers
//!   |<-- Ready ------------------------------------- |
//!   | fetches nothing from guests; waits a moment    |
//!   | for acknowledgements; stops its workers        |
//!   |-- State: sessions, packets not acknowledged -->| resumes its workers
//!   |<-- Running ------------------------------------|
//!   |-- Counters ----------------------------------->|
//!   | notifies the service manager, answers, exits   | answers requests
//! ```
//!
//! Both processes have the same open files during the upgrade, and only one uses them. After any failure before
//! *Running* (an error, a crash, a timeout), the old daemon kills the new one and continues. It has kept its state;
//! connections with traffic are then set up again.
//!
//! ARCHITECTURE.md lists what is handed over, and what the new daemon learns again.

mod channel;
mod format;
mod hand_over;
mod offer;
mod take_over;

pub(crate) use hand_over::Progress;
pub(crate) use take_over::{Handed, Successor};
