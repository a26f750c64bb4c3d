//! Deliberate mistakes, to show that the checks of `bifrost-sim swarm --rdm` notice them. They exist with the feature
//! `mutations` only, which nothing that carries traffic may turn on; otherwise [`mutated!`] is `false` at compile time.

/// Whether a deliberate mistake is switched on in a [`ConnectionConfig`](crate::ConnectionConfig):
/// `mutated!(config, LossForgotten)`.
#[cfg(any(test, feature = "mutations"))]
macro_rules! mutated {
    ($config:expr, $name:ident) => {
        $config.mutation == Some(crate::mutation::Mutation::$name)
    };
}

/// Without mutations nothing is mutated.
#[cfg(not(any(test, feature = "mutations")))]
macro_rules! mutated {
    ($config:expr, $name:ident) => {
        false
    };
}

pub(crate) use mutated;

/// One deliberate mistake. Each comment says what is wrong, and how it shows.
#[cfg(any(test, feature = "mutations"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// What was lost is not repeated. Shows: messages that never arrive.
    LossForgotten,
    /// No timeout. Shows: as above, once the last request is lost.
    NoTimeout,
    /// A repetition carries the first unit of its message. Shows: other bytes.
    RepairFromStart,
    /// Credits are not looked at. Shows: more requests open than the peer has room for.
    CreditsIgnored,
    /// Messages are begun whatever the limit. Shows: the receiver has no room.
    LimitIgnored,
    /// The limit of an ACK is not taken. Shows: messages that are never begun.
    LimitForgotten,
    /// A message is reported while the NIC reads its buffer. Shows: a queue pair in error, without its memory.
    ReportedEarly,
    /// What was open on a lane that failed is not lost. Shows: with RC, messages that never arrive.
    FailedLaneForgotten,
    /// The NIC is taken to read buffers for a lane that was reset. Shows: messages that are never reported.
    LaneKeepsBuffers,
    /// The peer is not asked to repair a lane. Shows: no progress once all have failed.
    LanesNotRepaired,
    /// A repair keeps the generation of the last. Shows: the same.
    LaneGenerationKept,
    /// No probes. Shows: a lost grant or limit that is waited for forever.
    NoProbes,
    /// Probes are not answered. Shows: the same.
    ProbesUnanswered,
    /// A peer is never taken to be gone. Shows: a connection that does not end.
    SilenceIgnored,
    /// What the peer sends is no sign of life. Shows: connections that end while data comes in.
    NeverHeard,
    /// An ACK names the number after the one that arrived. Shows: messages that never arrive.
    AckNamesNext,
    /// The base of an ACK jumps over what is missing. Shows: the same.
    AckHoles,
    /// Messages are delivered when one unit is missing. Shows: other bytes.
    DeliveredEarly,
    /// A chunk counts for one unit more than it has. Shows: other bytes.
    ChunkCountsMore,
    /// Messages are delivered when complete, whatever was agreed. Shows: reordered.
    OrderIgnored,
    /// The limit is not raised. Shows: messages that are never begun.
    LimitNotRaised,
    /// What the application has consumed still counts against the window. Shows: the same.
    ConsumedForgotten,
    /// What the application has consumed still counts against the budget. Shows: messages that are never granted.
    BudgetLeaks,
    /// Grants are not repeated. Shows: a lost grant that is waited for forever.
    GrantsNotRepeated,
    /// A switch of services takes what is open to be lost, and does not repeat it. Shows: messages that never arrive.
    SwitchForgetsOpen,
    /// The last unit of a lane that was left is not sent again. Shows: longer pauses in `bifrost-sim study rdm-upgrade`.
    TailNotRepeated,
    /// What a lane of UC that was left has lost goes by the reliable lane in use. Shows: the same.
    RepairsBehindWindow,
    /// A reliable lane that has lost something waits for its NIC's timer. Shows: the same.
    StalledLaneKept,
}

#[cfg(any(test, feature = "mutations"))]
impl Mutation {
    /// Every mutation that breaks what was promised, and not only how fast it is.
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
