//! Sessions: what remembers that a security group has let a conversation begin, so that its answers pass (Triton, 4).
//!
//! A session belongs to one vNIC and has both directions of one five-tuple. It is found by a hash, lives in a slab of fixed
//! bound, and costs a packet one look-up and one store: expiry is a wheel of lists by second, which looks at a session only
//! when its time may have come.
//!
//! What one guest does cannot take another guest's sessions: each vNIC has a bound of its own. At the bound the oldest
//! session that is not established makes room (a SYN flood drops itself); established ones stay, and new ones are refused.

mod key;
mod list;
mod state;
mod table;
mod wheel;

pub(crate) use key::{Key, echo, related};
pub(crate) use state::Event;
pub(crate) use table::{Handle, Planned, Sessions};

/// Which way a packet goes, seen from the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Sent by the guest.
    Egress = 0,
    /// To the guest.
    Ingress = 1,
}

/// How many sessions there may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionLimits {
    /// Of all ports of a switch together.
    pub total: u32,
    /// Of one port.
    pub per_port: u32,
}

impl Default for SessionLimits {
    /// A million, of which one port may have a tenth.
    fn default() -> Self {
        SessionLimits { total: 1 << 20, per_port: 100_000 }
    }
}

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
    /// Not established, and made room for another at a bound.
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
