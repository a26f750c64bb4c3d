//! The virtual switch: match and action.
//!
//! A [`Switch`] decides where a frame goes: [`Switch::from_guest`] for frames from a vNIC,
//! [`Switch::from_underlay`] for frames that a peer sent in VXLAN. Both return a [`Verdict`]. The switch
//! itself replies to ARP, neighbor discovery, DHCP, and pings of a VPC's gateway; it sends router
//! advertisements to guests; and it drops packets with spoofed addresses. It does no I/O and does not
//! allocate per packet. Header changes are returned as a [`Rewrite`], which the caller applies to the bytes
//! when the frame leaves.
//!
//! # One pipeline
//!
//! A packet passes through stages: may the sender send this, where does it go, may it pass, does it fit.
//! `pipeline/mod.rs` defines their order; each stage is a file in the same directory. A packet larger than
//! the path MTU is fragmented, or its sender gets an ICMP error.
//!
//! # Configuration is swapped as a whole
//!
//! A switch is built from plain [`Tables`] and never edited afterwards. A reload builds a new switch and
//! swaps it in between two batches, with [`Switch::replace`], or with [`Switch::take_over`] if the indexes
//! were built elsewhere. Derived indexes therefore always match the configuration, a rejected reload changes
//! nothing, and there is no order of edits to get wrong. Only counters and sessions are carried over.
//!
//! # Decide or trace
//!
//! [`Switch::trace_from_guest`] and [`Switch::trace_from_underlay`] report what would happen to a packet, and
//! why, without changing any state. They run the same pipeline, which is generic over the side effects of its
//! decisions.
//!
//! # Who may talk to whom
//!
//! Admission is about addresses: no sender may use an address that is not its own. The next stages route the
//! packet, and then filter it: network ACLs judge each packet by itself; security groups decide whether a
//! conversation may begin, and track it as a session. Only ports with security groups have sessions; for
//! other ports the check of an `Option` is the only cost.
//!
//! # Fragments
//!
//! Rules that match more than addresses judge the first fragment as they would judge the whole packet. Later
//! fragments pass if the first one passed and they fit it. Nothing is buffered: a fragment that arrives
//! before its first fragment is dropped.
//!
//! # Several workers
//!
//! Each worker of a host has its own switch, and workers share nothing. For each pair of vNICs, one worker
//! holds the security-group sessions of a port. A packet between two guests of one host may therefore be
//! handed over to the receiver's worker: the sender's switch applies the egress rules, the receiver's switch
//! the ingress rules ([`Switch::from_worker`]).
//!
//! # Caching
//!
//! In networks with rules, the decision about a packet is cached for later packets of its flow. These get the
//! same verdict and update the same sessions and counters, without a walk through the tables. Packets of a
//! flow that arrive in the same turn, in any network, skip even the cache lookup.

#![forbid(unsafe_code)]

mod acl;
mod addresses;
mod advertiser;
mod answer;
mod cache;
mod carry;
mod changes;
mod copies;
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
mod learned;
mod limits;
mod listed;
mod location;
mod mapping;
mod members;
mod memory;
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
pub use carry::{
    CarryError, Copying, Distribution, MovingSession, read_handed_flows, read_moving_sessions, write_handed_flows,
    write_moving_sessions,
};
pub use copies::TakenOver;
pub use counters::{Drops, PortCounters, UnderlayCounters};
pub use dhcp::SERVER_PORT as DHCP_SERVER_PORT;
pub use dhcpv6::SERVER_PORT as DHCPV6_SERVER_PORT;
pub use dns::SERVER_PORT as DNS_SERVER_PORT;
pub use drop_reason::DropReason;
pub use flow::FlowCounters;
pub use flow_log::{FlowEnd, FlowLogCounters, FlowRecord, HandedFlow, Traffic};
pub use fragments::FragmentCounters;
pub use groups::Permission;
pub use ids::{AddressSetId, Direction, GroupId, LoadBalancerId, PeerId, PortId, UplinkId, WorkerId};
pub use learned::{LearnedAnswer, LearnedChange};
pub use limits::{FlowLimits, SessionLimits};
pub use listed::SessionView;
pub use mapping::NatCounters;
pub use memory::Extent;
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
    LoadBalancer, MAX_FLOW_LOGS, METADATA, Member, Nat, Ordering, Peering, Port, PortForward, Reliability, Remote,
    Route, RouteChanges, RuleLogSpec, RuleName, RuleOwner, SecurityGroup, SharedAddress, SourceNat, Tables, Transport,
    Vpc, Workers, Zone,
};
pub use trace::{By, Check, GuestTrace, Hop, UnderlayTrace, WorkerTrace};
pub use verdict::{Action, Verdict};
