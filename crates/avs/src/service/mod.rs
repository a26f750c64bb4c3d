//! Load balancers inside a network: an address and port that stand for several backends.
//!
//! The host of the client chooses. It changes the destination of what its guest sends to that of a backend, and the source of what
//! comes back to the load balancer's; the client's own address stays, so a backend sees who its clients are. Which backend a connection has
//! is remembered in a session of the client's port ([`Connection`]), so it never moves; a connection that begins goes where Maglev hashing
//! says, so hosts agree without talking to each other, and few connections would go elsewhere after a change.

mod balancer;
mod connection;

pub(crate) use balancer::Balancers;
pub(crate) use connection::{
    Connection, Mapped, Memory, Step, Translator, about_answer, back, begin_or_continue, leave_mappings, superseded,
    touch,
};
