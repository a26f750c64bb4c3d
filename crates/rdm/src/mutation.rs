//! Deliberate mistakes, to show that the checks of `bifrost-sim swarm --rdm` detect them. They exist only with the
//! feature `mutations`, which must not be enabled in anything that carries traffic; otherwise [`mutated!`] is `false`
//! at compile time.

/// Whether a deliberate mistake is enabled in a [`ConnectionConfig`](crate::ConnectionConfig): `mutated!(config,
/// LossForgotten)`.
#[cfg(any(test, feature = "mutations"))]
macro_rules! mutated {
    ($config:expr, $name:ident) => {
        $config.mutation == Some(crate::mutation::Mutation::$name)
    };
}

/// Without mutations: always `false`.
#[cfg(not(any(test, feature = "mutations")))]
macro_rules! mutated {
    ($config:expr, $name:ident) => {
        false
    };
}

pub(crate) use mutated;

/// One deliberate mistake. Each comment says what is wrong, and what it causes.
#[cfg(any(test, feature = "mutations"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Losses are not retransmitted. Shows: messages that never arrive.
    LossForgotten,
    /// No timeout. Shows: as above, once the last request is lost.
    NoTimeout,
    /// A retransmission carries the first unit of its message. Shows: wrong bytes.
    RepairFromStart,
    /// Credits are ignored. Shows: more requests open than the peer has credits.
    CreditsIgnored,
    /// Messages are begun regardless of the limit. Shows: the receiver drops them.
    LimitIgnored,
    /// The limit of an ACK is ignored. Shows: messages that are never begun.
    LimitForgotten,
    /// A message is reported while the NIC reads its buffer. Shows: a queue pair in error, because its memory is gone.
    ReportedEarly,
    /// Open requests of a failed lane are not lost. Shows: with RC, messages that never arrive.
    FailedLaneForgotten,
    /// A reset lane keeps its buffers. Shows: messages that are never reported.
    LaneKeepsBuffers,
    /// The peer is not asked to repair a lane. Shows: no progress once all have failed.
    LanesNotRepaired,
    /// A repair keeps the previous generation. Shows: the same.
    LaneGenerationKept,
    /// No probes. Shows: waiting forever for a lost grant or limit.
    NoProbes,
    /// Probes are not answered. Shows: the same.
    ProbesUnanswered,
    /// A silent peer is never considered gone. Shows: a connection that does not end.
    SilenceIgnored,
    /// Arrivals do not count as a sign of life. Shows: connections that end while data arrives.
    NeverHeard,
    /// An ACK names the number after the one that arrived. Shows: messages that never arrive.
    AckNamesNext,
    /// The base of an ACK skips missing messages. Shows: the same.
    AckHoles,
    /// Messages are delivered while one unit is missing. Shows: wrong bytes.
    DeliveredEarly,
    /// A chunk counts one unit too many. Shows: wrong bytes.
    ChunkCountsMore,
    /// Messages are delivered when complete, despite ordered delivery. Shows: reordering.
    OrderIgnored,
    /// The limit is never raised. Shows: messages that are never begun.
    LimitNotRaised,
    /// Consumed messages still count against the window. Shows: the same.
    ConsumedForgotten,
    /// Consumed messages still count against the budget. Shows: messages that are never granted.
    BudgetLeaks,
    /// Grants are not repeated. Shows: waiting forever for a lost grant.
    GrantsNotRepeated,
    /// A switch of services loses open requests without retransmitting them. Shows: messages that never arrive.
    SwitchForgetsOpen,
    /// The last unit of a lane that was left is not retransmitted. Shows: longer pauses in `bifrost-sim study
    /// rdm-upgrade`.
    TailNotRepeated,
    /// Losses of a UC lane that was left are retransmitted on the reliable lane in use. Shows: the same.
    RepairsBehindWindow,
    /// A reliable lane that has lost something waits for its NIC's timer. Shows: the same.
    StalledLaneKept,
}

#[cfg(any(test, feature = "mutations"))]
impl Mutation {
    /// All mutations that violate a guarantee, rather than only reduce speed.
    pub const ALL: [Mutation; 25] = [
        Mutation::LossForgotten,
        Mutation::NoTimeout,
        Mutation::RepairFromStart,
        Mutation::CreditsIgnored,
        Mutation::LimitIgnored,
        Mutation::LimitForgotten,
        Mutation::ReportedEarly,
        Mutation::FailedLaneForgotten,
        Mutation::LaneKeepsBuffers,
        Mutation::LanesNotRepaired,
        Mutation::LaneGenerationKept,
        Mutation::NoProbes,
        Mutation::ProbesUnanswered,
        Mutation::SilenceIgnored,
        Mutation::NeverHeard,
        Mutation::AckNamesNext,
        Mutation::AckHoles,
        Mutation::DeliveredEarly,
        Mutation::ChunkCountsMore,
        Mutation::OrderIgnored,
        Mutation::LimitNotRaised,
        Mutation::ConsumedForgotten,
        Mutation::BudgetLeaks,
        Mutation::GrantsNotRepeated,
        Mutation::SwitchForgetsOpen,
    ];
}
