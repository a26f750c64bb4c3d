//! NAT: guests of networks with private addresses talk to the outside, behind an uplink port.
//!
//! A **floating address** is one guest's alone: only addresses change, in any IP packet, and nothing is remembered. Other guests share
//! addresses: each of their ends (address and port, or the identifier of an echo request) gets an end of such an address as long as it
//! talks to somebody ([`mapping`](crate::mapping); RFC 4787, RFC 5382, RFC 5508), or for good, by a **forward**. The mapping is the same
//! for all destinations, and every address outside may answer through it: the guest's security groups say which may.
//!
//! All of it happens where the uplink is served: a guest's packets are handed to the worker of the uplink, so its ports are given out in
//! one place. What one guest of the host sends to the outside address of another comes back without leaving the host (RFC 4787, REQ-9).

mod decide;
mod uplink;

pub(crate) use decide::{Arrival, Departure, Guests, arrive, depart, turn_round};
pub(crate) use uplink::{Source, Uplink};
