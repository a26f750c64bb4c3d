//! Session table: records the conversations that a security group has allowed, so that replies pass (Triton paper,
//! section 4).
//!
//! A session belongs to one vNIC and covers both directions of one five-tuple. Sessions are stored in a slab of bounded
//! size and looked up by hash. A packet costs one lookup and one store. Expiry uses a timer wheel with one list per
//! second, which visits a session only when it may have timed out.
//!
//! An allowed conversation can always begin. Each vNIC has a limit; at the limit, a new session evicts the least
//! valuable one of the vNIC. So a flood evicts sessions of its own class, and then of its own source ([`queue`]). At
//! the limit of all vNICs together, the vNIC with the most sessions loses one, so no vNIC loses sessions while it has
//! no more than its share ([`rank`]).

mod carry;
mod entry;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod fairness;
mod index;
mod key;
mod list;
mod queue;
mod rank;
mod state;
mod table;
mod wheel;

pub(crate) use carry::Carried;
pub(crate) use key::{Key, Quote, echo, error};
pub use state::Class;
pub(crate) use state::{Event, State};
pub(crate) use table::{Handle, Payload, Planned, Sessions};

/// Counters of sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionCounters {
    /// Current sessions.
    pub current: u64,
    /// Current sessions with packets in both directions that are not closed.
    pub established: u64,
    /// Sessions ever created.
    pub created: u64,
    /// Sessions ended by their timeout.
    pub expired: u64,
    /// Sessions evicted by new ones at a limit.
    pub evicted: u64,
    /// Sessions ended because changed rules no longer allow them.
    pub revoked: u64,
}

impl SessionCounters {
    /// Every counter by name; names end in their unit.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("current_sessions", self.current),
            ("established_sessions", self.established),
            ("created_sessions", self.created),
            ("expired_sessions", self.expired),
            ("evicted_sessions", self.evicted),
            ("revoked_sessions", self.revoked),
        ]
        .into_iter()
    }
}

/// Counters of one port's sessions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortSessions {
    /// Current sessions.
    pub current: u32,
    /// Sessions evicted by new ones at a limit, by [`Class`].
    pub evicted: [u64; Class::ALL.len()],
}

impl PortSessions {
    /// Every counter by name; names end in their unit.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let [unanswered, answered, closing, assured, established] = self.evicted;
        [
            ("port_current_sessions", u64::from(self.current)),
            ("evicted_unanswered_sessions", unanswered),
            ("evicted_answered_sessions", answered),
            ("evicted_closing_sessions", closing),
            ("evicted_assured_sessions", assured),
            ("evicted_established_sessions", established),
        ]
        .into_iter()
    }
}
