//! Parses every packet header once into typed values, and emits it.
//!
//! Nothing here allocates on its own, does I/O, reads a clock or keeps state: parsers take a slice and return small
//! `Copy` values (plus offsets where something follows), emitters fill arrays or slices that the caller owns. All input
//! is treated as hostile: for any byte string a parser returns a value or a reason, and never panics.
//!
//! [`bifrost`] is the format of the reliable transport, specified in `docs/PROTOCOL.md`, and [`rdm`] that of messages
//! over RDMA, specified in `docs/RDM.md`; the other modules follow the standards that they cite. [`pcapng`] writes
//! packets to capture files.

#![no_std]
#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

extern crate alloc;

pub mod arp;
pub mod bifrost;
pub mod checksum;
pub mod ethernet;
pub mod gre;
pub mod icmp;
pub mod ip;
pub mod ipv4;
pub mod ipv6;
pub mod mac;
pub mod malformed;
pub mod pcapng;
pub mod protocol;
pub mod rdm;
pub mod roce;
pub mod tcp;
pub mod udp;
pub mod virtio_net;
pub mod vxlan;

pub use mac::Mac;
pub use malformed::Malformed;
pub use vxlan::Vni;
