//! One run-to-completion loop per core; the only crate that connects the others.
//!
//! A [`Worker`] owns everything it uses: its transport engine, its switch, its queue of every guest port, its sockets.
//! Nothing is shared between workers and nothing is locked. Other threads talk to a worker by sending it closures
//! ([`Handle::run`]), which it runs between two batches.
//!
//! The stages of a packet, by file:
//!
//! * out: `guest.rs` fetches, parses, asks the switch and hands packets to the transport; `emit.rs` segments,
//!   encapsulates and sends them (`bundle.rs`: several in one datagram); `egress.rs` says whose packet goes next, if
//!   the host sends at a given rate;
//! * in: `underlay.rs` decapsulates, asks the transport, verifies and places packets (`pressure.rs`: whose, under
//!   overload); `turn.rs` publishes, then acknowledges.
//!
//! All of that is in [`Core`], which does no I/O of its own and reads no clock: [`Core::turn`] moves packets through
//! all stages, over any [`Underlay`](bifrost_port::Underlay) and [`GuestPort`](bifrost_port::GuestPort). A [`Worker`]
//! runs its turns on a thread, and waits for events in between.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod budget;
mod bundle;
pub mod capture;
mod changes;
mod contain;
mod copies;
mod core;
mod counters;
mod delayed;
mod deliver;
mod departure;
mod egress;
mod emit;
pub mod fault;
mod guest;
mod hand_over;
mod handle;
mod host;
mod kept;
mod learning;
mod limits;
mod lists;
mod lost;
mod moved;
mod peers;
mod ports;
mod pressure;
mod provision;
mod pulse;
mod questions;
mod refusal;
mod rx_queue;
mod set_aside;
mod share;
mod siblings;
mod snapshot;
mod stage;
pub mod trace;
mod turn;
mod underlay;
mod unsent;
mod waiting;
mod watchdog;
mod work;
mod worker;
mod yielding;

pub use crate::core::{Core, CoreConfig};
pub use bifrost_nic::dscp::Marking;
pub use bifrost_rte::{Estimate, PathEstimate, Weight};
pub use bifrost_tables::{AfterGap, PathSet};
pub use contain::{PortFault, Recovery};
pub use counters::{Counters, OutboundCounters};
pub use egress::{Guarantee, LinkRate};
pub use handle::{Handle, Remote, join, start, start_paused};
pub use host::{HostFrame, HostQueue};
pub use limits::{Limit, Limits, Rate};
pub use lists::Pages;
pub use moved::Moved;
pub use peers::{PeerConfig, PeerError, PlainPaths};
pub use ports::PortConfig;
pub use pulse::{Pulse, PulseWatch};
pub use questions::{RouteQuestion, RouteQuestionQueue, RouteQuestions, route_questions};
pub use set_aside::SetAside;
pub use share::Share;
pub use snapshot::{PathView, PortView, Totals};
pub use stage::Stage;
pub use watchdog::{LONG_TURN_NS, WatchdogConfig};
#[cfg(debug_assertions)]
pub use work::{Effect, Injection, Of};
pub use worker::{Device, Gone, Worker};
