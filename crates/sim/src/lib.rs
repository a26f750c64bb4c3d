//! A deterministic world in virtual time.
//!
//! Links, switches and guests are models. Hosts run the daemon's own data path ([`bifrost_datapath::Core`]) with its
//! parser, switch and transport. A [`Scenario`] and a seed decide everything:
//!
//! ```
//! let scenario = bifrost_sim::Scenario::parse("example", r#"
//!     duration = "1s"
//!     [topology]
//!     kind = "parallel"
//!     hosts = 2
//!     paths = 4
//!     link = { delay = "10us", loss = 0.01 }
//!     [[workloads]]
//!     kind = "packets"
//!     from = [0]
//!     to = [1]
//!     packets = 1000
//! "#)?;
//! let mut world = bifrost_sim::World::new(&scenario, 7)?;
//! world.run();
//! assert!(world.violations.is_empty());
//! # Ok::<(), bifrost_sim::ScenarioError>(())
//! ```

#![forbid(unsafe_code)]

mod build;
mod checker;
pub mod checkers;
#[cfg(test)]
mod containment_tests;
mod faults;
mod flows;
mod host;
mod link;
mod network;
mod packet;
mod port;
pub mod rdma;
mod report;
mod rng;
pub mod scenario;
mod sender;
mod statistics;
pub mod study;
pub mod swarm;
mod tcp;
mod trace;
mod underlay;
mod units;
mod violation;
mod world;

pub use build::Guest;
pub use checker::{Checker, Wire};
pub use faults::Action;
pub use flows::{Flow, Flows, Receipt, Record};
pub use host::Host;
pub use link::{DropReason, Fate, Link, LinkConfig, LinkPatch};
pub use network::{Network, Node};
pub use packet::{BIFROST_PORT, Packet, VXLAN_PORT};
pub use port::{Misuse, SimPort};
pub use report::{Distribution, HostReport, LinkReport, PathReport, Report, WorkloadReport};
pub use rng::{Rng, mix};
pub use scenario::{Scenario, ScenarioError};
pub use statistics::Statistics;
pub use tcp::{Conn, Conns};
pub use trace::Trace;
pub use underlay::{Lane, SimUnderlay};
pub use units::{Bytes, Ns, Rate};
pub use violation::{Kind, Violation, Violations};
pub use world::World;
