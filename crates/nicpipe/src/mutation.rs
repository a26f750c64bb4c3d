//! Deliberate mistakes, to show that this crate's tests detect them. They exist only in those tests; otherwise
//! [`mutated!`] is `false` at compile time.

/// Whether a deliberate mistake is made in this thread: `mutated!(LimiterSkipped)`.
#[cfg(test)]
macro_rules! mutated {
    ($name:ident) => {
        crate::mutation::is_on(crate::mutation::Mutation::$name)
    };
}

/// Without mutations nothing is mutated.
#[cfg(not(test))]
macro_rules! mutated {
    ($name:ident) => {{ false }};
}

pub(crate) use mutated;

/// One deliberate mistake. Each comment describes the wrong behaviour.
#[cfg(test)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// A frame of an unknown VLAN belongs to the first pod.
    VlanIgnored,
    /// The pod gets the tag of its VLAN.
    TagNotRemoved,
    /// A frame leaves without the tag of its VLAN.
    TagNotRestored,
    /// Frames longer than the buffers arrive.
    LengthUnchecked,
    /// Tenants may send any rate.
    LimiterSkipped,
    /// Rates are those of the pipeline's clock, not of the wire.
    LimitedByClock,
    /// Control traffic has no rate.
    ControlUnlimited,
    /// Control traffic shares the rings of cores.
    ControlWithData,
    /// Fragments of a packet go to any core.
    FragmentsSprayed,
    /// A full ring is written to.
    RoomUnchecked,
    /// A packet that does not fit the pod's buffer keeps its place in the order queue.
    PlaceKept,
    /// The length of a payload that stays in the pipeline is not recorded.
    PayloadLengthLost,
    /// What is shorter than an Ethernet header leaves.
    ShortFramesLeave,
    /// A pod of a shared VLAN may use any source address.
    SourceUnchecked,
    /// Packets of a pod without a client keep their places.
    DownPodKeepsPlaces,
    /// A packet that leaves keeps its buffer.
    BufferLeak,
}

#[cfg(test)]
impl Mutation {
    /// Every mutation.
    pub(crate) const ALL: [Mutation; 16] = [
        Mutation::VlanIgnored,
        Mutation::TagNotRemoved,
        Mutation::TagNotRestored,
        Mutation::LengthUnchecked,
        Mutation::LimiterSkipped,
        Mutation::LimitedByClock,
        Mutation::ControlUnlimited,
        Mutation::ControlWithData,
        Mutation::FragmentsSprayed,
        Mutation::RoomUnchecked,
        Mutation::PlaceKept,
        Mutation::PayloadLengthLost,
        Mutation::ShortFramesLeave,
        Mutation::SourceUnchecked,
        Mutation::DownPodKeepsPlaces,
        Mutation::BufferLeak,
    ];
}

#[cfg(test)]
thread_local! {
    static ON: std::cell::Cell<Option<Mutation>> = const { std::cell::Cell::new(None) };
}

/// Makes a mistake in this thread, instead of the previous one.
#[cfg(test)]
pub(crate) fn set(mutation: Option<Mutation>) {
    ON.set(mutation);
}

#[cfg(test)]
pub(crate) fn is_on(mutation: Mutation) -> bool {
    ON.get() == Some(mutation)
}
