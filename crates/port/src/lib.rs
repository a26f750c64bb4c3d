//! Where packets enter and leave a host.
//!
//! Two small traits separate the data path from the kind of port: [`GuestPort`] towards a guest (TAP today, vhost-user
//! next) and [`Underlay`] towards the physical network. Buffers are named by handles; only the port that owns a buffer
//! opens it.

pub mod clock;
pub mod guest;
mod pool;
pub mod steer;
pub mod tap;
pub mod udp;
pub mod underlay;

pub use guest::{GuestPort, PlaceError, RxHandle, TxFrame, TxHandle};
pub use underlay::{Datagram, LaneId, Service, TxBatch, Underlay};
