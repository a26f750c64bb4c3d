//! Mutations (deliberate mistakes), to show that tests detect them. They exist only in this crate's tests and with the
//! feature `mutations`, which must not be enabled in anything that carries traffic; otherwise [`mutated!`] is `false`
//! at compile time.

/// Whether a mutation is enabled in a [`Config`](crate::Config): `mutated!(config, LeakHandle)`.
#[cfg(any(test, feature = "mutations"))]
macro_rules! mutated {
    ($config:expr, $name:ident) => {
        $config.mutation == Some(crate::mutation::Mutation::$name)
    };
}

/// Without the feature, no mutation is enabled.
#[cfg(not(any(test, feature = "mutations")))]
macro_rules! mutated {
    ($config:expr, $name:ident) => {
        false
    };
}

pub(crate) use mutated;

/// One mutation. Each comment states the mistake, and its symptom.
#[cfg(any(test, feature = "mutations"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutation {
    /// ACKs are built as soon as a packet is placed. Symptom: an ACK in [`Output`](crate::Output) before
    /// [`Engine::flush_acks`](crate::Engine::flush_acks); loss when a host dies between the two.
    AckBeforePublication,
    /// A packet that the guest had no room for is acknowledged. Symptom: it never arrives.
    AckUnplaced,
    /// The base of an ACK skips holes. Symptom: missing packets are released, and never arrive.
    AckHoles,
    /// The bits of an ACK are shifted by one. Symptom: as [`AckHoles`](Self::AckHoles).
    AckBitsShifted,
    /// A sender ignores the base of an ACK. Symptom: packets that arrived are retransmitted or given up.
    AckBaseIgnored,
    /// The ACK timer is never armed. Symptom: senders send tail probes without losses.
    AckTimerNotArmed,
    /// Packets outside the receive window are accepted. Symptom: old duplicates are placed, pages run out.
    ReceiveWindowUnchecked,
    /// A packet that is present is accepted again. Symptom: the guest sees it twice.
    DuplicatesForgotten,
    /// One packet in 16 does not wait for its flow's predecessor. Symptom: a flow out of order.
    PublishEarly,
    /// Packets held below a SKIP are not shown. Symptom: handles that are never published.
    SkipForgetsHeld,
    /// One handle in 64 is not released. Symptom: buffers are leaked.
    LeakHandle,
    /// One handle in 64 is released to another port. Symptom: there.
    WrongOwner,
    /// Handles are released when they are sent. Symptom: released twice, or sent after release.
    ReleaseBeforeAck,
    /// Acknowledged PSNs are compared as plain numbers. Symptom: nothing is released across the wrap of PSNs
    /// ([`Config::first_psn`](crate::Config::first_psn) brings it near).
    PsnWrapForgotten,
    /// A timeout retransmits nothing. Symptom: no progress once a tail and its probe are lost.
    TimeoutSendsNothing,
    /// A retransmission claims to wait for the packet just before it. Symptom: a flow out of order.
    RetransmissionDistance,
    /// The loss timer is armed once and then not again until something arrives. Symptom: no progress.
    LossTimerNotRearmed,
    /// Packets are never given up. Symptom: buffers held forever once a peer is gone.
    NeverGiveUp,
    /// Packets are given up at the first timeout. Symptom: given up before 28 ms, lost although a path works.
    GiveUpAtOnce,
    /// Given-up packets are not announced by SKIP. Symptom: the receiver waits forever.
    GiveUpSilently,
    /// A restarted connection forgets the packets held for the guest. Symptom: acknowledged packets never seen.
    RestartForgetsReceived,
    /// A restarted connection forgets packets in flight. Symptom: never seen, never released.
    RestartForgetsSent,
    /// CIDs of a former life of a connection are accepted. Symptom: old packets replace new ones.
    StaleCidAccepted,
    /// The connection's send window is ignored. Symptom: more in flight than the guest's ring has.
    SendWindowIgnored,
    /// A connection that ends forgets its waiting packets. Symptom: buffers are leaked.
    EndForgetsWaiting,
    /// Best effort never ends. Symptom: probes return and traffic stays plain.
    BestEffortForEver,
    /// Acknowledged retransmissions stay counted as in flight on their path. Symptom: a drained path that is not empty.
    InFlightLeaks,
    /// A sender ignores reports of packets that were received and not taken. Symptom: damage that a guest does to its
    /// own packets, or a guest that takes none, makes shared paths suspect.
    RefusalsIgnored,
}

#[cfg(any(test, feature = "mutations"))]
impl Mutation {
    /// All mutations.
    pub const ALL: [Mutation; 28] = [
        Mutation::AckBeforePublication,
        Mutation::AckUnplaced,
        Mutation::AckHoles,
        Mutation::AckBitsShifted,
        Mutation::AckBaseIgnored,
        Mutation::AckTimerNotArmed,
        Mutation::ReceiveWindowUnchecked,
        Mutation::DuplicatesForgotten,
        Mutation::PublishEarly,
        Mutation::SkipForgetsHeld,
        Mutation::LeakHandle,
        Mutation::WrongOwner,
        Mutation::ReleaseBeforeAck,
        Mutation::PsnWrapForgotten,
        Mutation::TimeoutSendsNothing,
        Mutation::RetransmissionDistance,
        Mutation::LossTimerNotRearmed,
        Mutation::NeverGiveUp,
        Mutation::GiveUpAtOnce,
        Mutation::GiveUpSilently,
        Mutation::RestartForgetsReceived,
        Mutation::RestartForgetsSent,
        Mutation::StaleCidAccepted,
        Mutation::SendWindowIgnored,
        Mutation::EndForgetsWaiting,
        Mutation::BestEffortForEver,
        Mutation::InFlightLeaks,
        Mutation::RefusalsIgnored,
    ];
}
