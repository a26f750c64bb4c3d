//! The virtual switch: match and action.
//!
//! A [`Switch`] decides where a frame goes: [`Switch::from_guest`] for what a vNIC sends, [`Switch::from_underlay`] for
//! what a peer sent in VXLAN. Both return a [`Verdict`]. The switch answers ARP, neighbor discovery, DHCP and pings of a VPC's gateway
//! itself, is the router that advertises itself to guests, and lets nobody use an address that is not theirs. It does no I/O and allocates nothing per packet. What it changes in a frame
//! it returns as a [`Rewrite`], to be applied to the bytes when they leave.
//!
//! # One pipeline
//!
//! Decisions are made in stages: may the sender say this, where does it go, may it pass, does it fit. `pipeline/mod.rs` has their order,
//! and each stage is a file beside it. A packet that is larger than the path MTU is fragmented, or its sender gets an ICMP error.
//!
//! # Configuration is swapped as a whole
//!
//! A switch is built from plain [`Tables`] and never edited afterwards; a reload builds the next one and swaps it in with
//! [`Switch::replace`], between two batches, or [`Switch::take_over`], if it was built elsewhere. So every derived index agrees with the description at all times, a reload
//! that is refused changes nothing, and there is no order of edits to get wrong. Only counters are carried over.
//!
//! # Decided, or only told
//!
//! [`Switch::trace_from_guest`] and [`Switch::trace_from_underlay`] tell what would become of a packet, and why, and change nothing.
//! They run the same pipeline, which is generic over what follows from its judgements.
//!
//! # Who may talk to whom
//!
//! Admission is about addresses: nobody speaks with one that is not theirs. Then comes where a packet goes, and last whether it
//! may: network ACLs look at each packet by itself, security groups let conversations begin and remember them
//! as sessions. Only ports with groups have sessions; to others they cost a look at an `Option`.
//!
//! # Packets in fragments
//!
//! Rules that look at more than addresses judge the first fragment as they would the whole packet; the others pass if it did, and fit
//! it. Nothing is held back: a fragment that comes before its first is dropped.
//!
//! # Several workers
//!
//! Each worker of a host has a switch of its own, and they share nothing. What security groups remember about a port is with one of
//! them for each pair of vNICs, so what one guest sends to another of its host may have to go on to the receiver's worker:
//! the sender's switch judges what leaves, the receiver's what may come in ([`Switch::from_worker`]).
//!
//! # What is asked once
//!
//! In networks with rules, what becomes of a packet is kept for the next ones of its flow. They get the same decision, and their
//! sessions and counters take the same steps, without a walk through the tables. Those that come in the same turn, in any network,
//! are not even looked up.

#![forbid(unsafe_code)]

mod acl;
mod addresses;
mod advertiser;
mod answer;
mod cache;
mod carry;
mod changes;
mod counters;
mod dhcp;
mod dhcpv6;
mod dns;
mod drop_reason;
mod effects;
mod fields;
mod flow;
mod flow_log;
mod fragments;
mod frame;
mod groups;
mod ids;
mod index;
mod limits;
mod listed;
mod location;
mod mapping;
mod members;
mod mutation;
mod nat;
mod notes;
mod path_mtu;
mod pipeline;
mod port_state;
mod prepared;
mod resolution;
mod rewrite;
mod router;
mod rule_log;
mod rule_logs;
mod service;
mod session;
mod shared;
mod switch;
mod tables;
mod trace;
mod verdict;
mod vpc;

pub use bifrost_tables::Pattern;
pub use cache::VECTOR;
pub use carry::{CarryError, Copying, MovingSession, TakenOver, read_moving_sessions, write_moving_sessions};
pub use counters::{Drops, PortCounters, UnderlayCounters};
pub use dhcp::SERVER_PORT as DHCP_SERVER_PORT;
pub use dhcpv6::SERVER_PORT as DHCPV6_SERVER_PORT;
pub use dns::SERVER_PORT as DNS_SERVER_PORT;
pub use drop_reason::DropReason;
pub use flow::FlowCounters;
pub use flow_log::{FlowEnd, FlowLogCounters, FlowRecord, Traffic};
pub use fragments::FragmentCounters;
pub use groups::Permission;
pub use ids::{AddressSetId, Direction, GroupId, LoadBalancerId, PeerId, PortId, UplinkId, WorkerId};
pub use limits::{FlowLimits, SessionLimits};
pub use listed::SessionView;
pub use mapping::NatCounters;
#[cfg(feature = "mutations")]
pub use mutation::Mutation;
pub use prepared::{Former, Merged, Prepared};
pub use rewrite::Rewrite;
pub use rule_log::{RuleLogCounters, RuleRecord};
pub use session::{Class, PortSessions, SessionCounters};
pub use shared::{Claim, Statement, announcement};
pub use switch::Switch;
pub use tables::{
    AclRule, Affinity, Backend, BuildError, FloatingIp, FlowLogSpec, GATEWAY_MAC, GroupRule, Ipv6Lease, Lease,
    LoadBalancer, METADATA, Member, Nat, Ordering, Peering, Port, PortForward, Reliability, Remote, Route,
    RouteChanges, RuleLogSpec, RuleName, RuleOwner, SecurityGroup, SharedAddress, SourceNat, Tables, Transport, Vpc,
    Workers, Zone,
};
pub use trace::{By, Check, GuestTrace, Hop, UnderlayTrace, WorkerTrace};
pub use verdict::{Action, Verdict};
