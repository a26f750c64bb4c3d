//! NAT: guests of networks with private addresses reach the outside through an uplink port.
//!
//! A **floating address** belongs to one guest: only addresses are translated, in any IP packet, and there is no
//! state. Other guests share addresses: each of their ends (address and port, or the identifier of an echo request)
//! is mapped to an end of a shared address, either dynamically, while it has connections
//! ([`mapping`](crate::mapping); RFC 4787, RFC 5382, RFC 5508), or permanently, by a **forward**. The mapping is
//! independent of the destination, and any outside address may send through it; the guest's security groups restrict
//! which ones may.
//!
//! All NAT happens at the worker that serves the uplink: guests' packets are handed to it, so ports are allocated in
//! one place. A packet from a guest to the outside address of another guest of this host is turned around without
//! leaving the host (RFC 4787, REQ-9).

mod decide;
mod uplink;

pub(crate) use decide::{Arrival, Departure, Guests, arrive, depart, forwards, moved, turn_round};
pub(crate) use uplink::{Source, Uplink};
