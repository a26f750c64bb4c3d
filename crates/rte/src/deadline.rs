//! The owners of the engine's deadlines.

/// Owner of a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Key {
    Conn(u32),
    Peer(u32),
    /// A path of this peer opens for pacing.
    Share(u32),
}

/// All deadlines of an engine.
pub(crate) type Timers = bifrost_transport::timer::Timers<Key>;
