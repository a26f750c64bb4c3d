//! The daemon as a whole: real programs and kernels in network namespaces. Needs root.

#![allow(clippy::unwrap_used, unreachable_pub, dead_code)]

#[path = "../common/mod.rs"]
mod common;
#[path = "../../../agent/tests/common/relay.rs"]
mod relay;

mod advertisements;
mod afxdp;
mod afxdp_upgrade;
mod balancing;
mod bundles;
mod capture;
mod classes;
mod cloud_gateway;
mod cni;
mod connectivity;
mod containers;
mod containment;
mod crowding;
mod dhcp;
mod dns;
mod drain;
mod ecn;
mod faults;
mod fleet;
mod flow_log;
mod gateway;
mod homes;
mod hostile;
mod interop;
mod isolation;
mod kept;
mod limits;
mod machine_upgrade;
mod machines;
mod many_connections;
mod many_routes;
mod metadata;
mod migration;
mod mirror;
mod moving;
mod mtu;
mod nat;
mod objects;
mod peering;
mod persistent;
mod qos;
mod reload;
mod restart;
mod routers;
mod rule_log;
mod security;
mod see;
mod shared;
mod startup;
mod trace;
mod upgrade;
mod upgrade_capture;
mod upgrade_records;
mod upgrade_underlay;
mod upgrade_workers;
mod user_space;
mod versions;
mod waiting;
mod weights;
mod workers;
