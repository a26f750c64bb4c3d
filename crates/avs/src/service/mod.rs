//! Load balancers inside a network: an address and port that stand for several backends.
//!
//! The client's host chooses the backend. It rewrites the destination of the guest's packets to the backend, and the
//! source of replies to the load balancer. The client's own address stays, so a backend sees its clients. A session
//! of the client's port ([`Connection`]) stores the backend of a connection, so an existing connection never moves. A
//! new connection goes where Maglev hashing says: hosts agree without communicating, and a change of the backends
//! affects few connections.

mod balancer;
mod connection;

pub(crate) use balancer::Balancers;
pub(crate) use connection::{
    Connection, Mapped, Memory, Step, Translator, about_answer, back, begin_or_continue, leave_mappings, moved,
    superseded, touch,
};
