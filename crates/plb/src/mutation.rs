//! Deliberate mistakes, to show that tests notice them. They exist in this crate's own tests and with the feature `mutations` only,
//! which nothing that carries traffic may turn on; otherwise [`mutated!`] is `false` at compile time.

/// Whether a deliberate mistake is switched on in a [`Config`](crate::Config): `mutated!(config, SkipWait)`.
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

/// One deliberate mistake. Each comment says what is wrong.
#[cfg(any(test, feature = "mutations"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// Pointers have as many bits as an index: a full queue looks empty.
    PointersWithoutWrap,
    /// A queue takes one packet less than it has entries.
    QueueOneShort,
    /// `Full` compares the low bits only.
    LowBitsAlways,
    /// A packet behind the tail passes the legal check.
    TailUnchecked,
    /// A second packet for a place takes it, and the first one's handle is lost.
    DuplicateTakesPlace,
    /// The drop flag is not looked at.
    DropFlagIgnored,
    /// A drop flag releases the packet that was returned before it.
    DropFlagAfterReturn,
    /// A packet in another's place leaves as if it were in order.
    AliasInOrder,
    /// The head of a queue is not waited for.
    SkipWait,
    /// A place is never given up.
    NoTimeout,
    /// A place is given up when its packet has taken exactly the timeout.
    TimeoutEarly,
    /// The payload slot is the one that the trailer names, not the one of record.
    PayloadOfClaim,
    /// A late header gets the payload in its slot, no matter whose it is.
    PayloadOfAnybody,
    /// A payload slot is not freed when its packet leaves.
    PayloadLeak,
    /// The payload of a place that is given up is freed at once.
    PayloadFreedAtTimeout,
    /// A trailer with another pod's number is taken.
    PodUnchecked,
    /// A change to dispatch by flow does not wait until sprayed packets are out.
    FallbackWithoutDrain,
    /// A change back to spraying does not wait until packets without an order are out.
    ReturnWithoutSettling,
    /// Spraying leaves one core out.
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
