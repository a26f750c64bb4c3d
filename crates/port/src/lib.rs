//! Ports: where packets enter and leave a host.
//!
//! Two small traits separate the data path from the kind of port: [`GuestPort`] towards a guest (TAP, vhost-user) and
//! [`Underlay`] towards the physical network. Buffers are named by handles; only the port that owns a buffer accesses
//! it.

pub mod afxdp;
mod bpf;
pub mod clock;
pub mod device;
pub mod guest;
mod host;
pub mod large_pages;
pub mod memif;
pub mod panics;
mod pool;
mod prefetch;
pub mod provide;
pub mod raw;
#[cfg(test)]
mod smaps;
pub mod tap;
pub mod udp;
pub mod underlay;
pub mod vhost;

pub use bifrost_nic::steer;
pub use guest::{GuestPort, KernelCounters, PlaceError, PolledPort, RxHandle, TxFrame, TxHandle};
pub use host::HostUnderlay;
pub use underlay::{Datagram, LaneId, PolledUnderlay, Service, TxBatch, Underlay};
