//! Another program goes on with the work of a running daemon, and guests hardly notice.
//!
//! ```text
//!  old                                              new (a child of the old one)
//!   | works                                          |
//!   |-- Offer: configuration's checksum, others'  -->| reads the configuration, takes devices and sockets, builds
//!   |   objects, names, descriptors of everything    | tables, starts workers that do nothing yet
//!   |<-- Ready ------------------------------------- |
//!   | fetches nothing from guests; waits a moment    |
//!   | for acknowledgements; stops its workers        |
//!   |-- State: sessions, packets not acknowledged -->| has its workers work
//!   |<-- Running ------------------------------------|
//!   |-- Counters ----------------------------------->|
//!   | tells the service manager, answers, ends       | answers requests
//! ```
//!
//! Both have the same open files all the while, and only one works on them. Whatever goes wrong before *Running* has come (an error, a crash, silence),
//! the old daemon ends the new one, and goes on. It has kept everything; connections with traffic are set up again then.
//!
//! What is handed over, and what the new daemon learns again, is in ARCHITECTURE.md.

mod channel;
mod format;
mod hand_over;
mod offer;
mod take_over;

pub(crate) use hand_over::Progress;
pub(crate) use take_over::{Handed, Successor};
