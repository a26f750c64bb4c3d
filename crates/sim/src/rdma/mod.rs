//! A second world: hosts with RDMA NICs and a network of switches, in virtual time.
//!
//! NICs are the software NIC itself (`bifrost-rnic`), used by a [`Node`]: the message engine with its NIC
//! ([`MessageNode`]), or a baseline ([`PlainRc`], [`RcMesh`], [`Uccl`]). Links, switches and the costs of hosts are
//! models. A seed decides everything.

mod dcqcn;
mod fabric;
mod hops;
mod machine;
mod mesh;
mod messages;
mod plain_rc;
mod rc_mesh;
pub mod swarm;
mod uccl;
mod world;

pub use dcqcn::DcqcnConfig;
pub use fabric::{Counts, Fabric, Mark, Pause, Topology, Trouble};
pub use machine::{Machine, MachineCounts};
pub use mesh::{Mesh, MeshHost, Stack};
pub use messages::{Load, MessageNode, MessageOptions, connect};
pub use plain_rc::PlainRc;
pub use rc_mesh::RcMesh;
pub use uccl::Uccl;
pub use world::{AROUND, Node, RdmaWorld, nic};
