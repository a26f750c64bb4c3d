//! Deliberate mistakes, to show that tests detect them. They exist only in this crate's tests and with the feature
//! `mutations`, which no production build may enable; otherwise [`mutated!`] is `false` at compile time.

/// Whether a deliberate mistake is enabled in a [`Config`](crate::Config): `mutated!(config, SkipWait)`.
#[cfg(any(test, feature = "mutations"))]
macro_rules! mutated {
    ($config:expr, $name:ident) => {
        $config.mutation == Some(crate::mutation::Mutation::$name)
    };
}

/// Without mutations nothing is mutated.
#[cfg(not(any(test, feature = "mutations")))]
macro_rules! mutated {
    ($config:expr, $name:ident) => {{
        let _ = &$config;
        false
    }};
}

pub(crate) use mutated;

/// One deliberate mistake. Each comment describes the wrong behaviour.
#[cfg(any(test, feature = "mutations"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Pointers have as many bits as an index: a full queue looks empty.
    PointersWithoutWrap,
    /// A queue accepts one packet less than it has entries.
    QueueOneShort,
    /// `Full` compares the low bits only.
    LowBitsAlways,
    /// A packet behind the tail passes the legal check.
    TailUnchecked,
    /// A second packet for an entry replaces the first one, whose handle is lost.
    DuplicateTakesPlace,
    /// The drop flag is ignored.
    DropFlagIgnored,
    /// A drop flag releases the packet that was returned before it.
    DropFlagAfterReturn,
    /// A packet in another's entry leaves as if it were in order.
    AliasInOrder,
    /// The head of a queue is not waited for.
    SkipWait,
    /// An entry never times out.
    NoTimeout,
    /// An entry times out when its packet has taken exactly the timeout.
    TimeoutEarly,
    /// The payload slot of the trailer is used, not the recorded one.
    PayloadOfClaim,
    /// A late header gets the payload in its slot, even if another owns it.
    PayloadOfAnybody,
    /// A payload slot is not freed when its packet leaves.
    PayloadLeak,
    /// The payload of an entry that times out is freed at once.
    PayloadFreedAtTimeout,
    /// A trailer with another pod's number is accepted.
    PodUnchecked,
    /// A change to dispatch by flow does not wait until sprayed packets are out.
    FallbackWithoutDrain,
    /// A change back to spraying does not wait until packets without an order are out.
    ReturnWithoutSettling,
    /// Spraying omits one core.
    CoreLeftOut,
}

#[cfg(any(test, feature = "mutations"))]
impl Mutation {
    /// Every mutation.
    pub const ALL: [Mutation; 19] = [
        Mutation::PointersWithoutWrap,
        Mutation::QueueOneShort,
        Mutation::LowBitsAlways,
        Mutation::TailUnchecked,
        Mutation::DuplicateTakesPlace,
        Mutation::DropFlagIgnored,
        Mutation::DropFlagAfterReturn,
        Mutation::AliasInOrder,
        Mutation::SkipWait,
        Mutation::NoTimeout,
        Mutation::TimeoutEarly,
        Mutation::PayloadOfClaim,
        Mutation::PayloadOfAnybody,
        Mutation::PayloadLeak,
        Mutation::PayloadFreedAtTimeout,
        Mutation::PodUnchecked,
        Mutation::FallbackWithoutDrain,
        Mutation::ReturnWithoutSettling,
        Mutation::CoreLeftOut,
    ];
}
