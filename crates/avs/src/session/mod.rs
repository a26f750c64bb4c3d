//! Sessions: what remembers that a security group has let a conversation begin, so that its answers pass (Triton, 4).
//!
//! A session belongs to one vNIC and has both directions of one five-tuple. It is found by a hash, lives in a slab of fixed
//! bound, and costs a packet one look-up and one store: expiry is a wheel of lists by second, which looks at a session only
//! when its time may have come.
//!
//! A conversation that is allowed can always begin. Each vNIC has a bound of its own; there, the least valuable of its sessions
//! makes room. So a flood takes its own sessions: those of its class, then of its source ([`queue`]). At the bound of all vNICs the one
//! with most sessions gives, so none that has no more than its share ([`rank`]).

mod carry;
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
    /// Sessions now.
    pub current: u64,
    /// Of these: with packets in both directions, and not ended.
    pub established: u64,
    /// Begun, ever.
    pub created: u64,
    /// Ended by their timeout.
    pub expired: u64,
    /// Made room for another at a bound.
    pub evicted: u64,
    /// No longer allowed after a change of rules.
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

/// Sessions of one port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortSessions {
    /// Now.
    pub current: u32,
    /// Made room for others at a bound, by [`Class`].
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
