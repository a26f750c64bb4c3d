//! Deliberate mistakes, to show that tests notice them. They exist in this crate's own tests and with the feature
//! `mutations` only, which nothing that carries traffic may turn on; otherwise [`mutated!`] is `false` at compile time.

/// Whether a deliberate mistake is switched on in a [`Config`](crate::Config): `mutated!(config, LeakHandle)`.
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
    /// ACKs are built as soon as a packet is placed. Shows: an ACK in [`Output`](crate::Output) before
    /// [`Engine::flush_acks`](crate::Engine::flush_acks); loss when a host dies between the two.
    AckBeforePublication,
    /// A packet that found no room in the guest is acknowledged. Shows: it never arrives.
    AckUnplaced,
    /// The base of an ACK jumps over holes. Shows: what is missing is released, and never arrives.
    AckHoles,
    /// The bits of an ACK are shifted by one. Shows: as [`AckHoles`](Self::AckHoles).
    AckBitsShifted,
    /// A sender does not take the base of an ACK for an acknowledgement. Shows: what arrived is sent again, given up.
    AckBaseIgnored,
    /// The ACK timer is never armed. Shows: senders ask with tail probes where nothing was lost.
    AckTimerNotArmed,
    /// Packets outside the receive window are taken. Shows: ancient duplicates are placed, pages run out.
    ReceiveWindowUnchecked,
    /// A packet that is present is taken again. Shows: the guest sees it twice.
    DuplicatesForgotten,
    /// One packet in 16 does not wait for its flow's predecessor. Shows: a flow out of order.
    PublishEarly,
    /// What is held below a SKIP is not shown. Shows: handles that are never published.
    SkipForgetsHeld,
    /// One handle in 64 is not released. Shows: buffers that never come back.
    LeakHandle,
    /// One handle in 64 is released to another port. Shows: there.
    WrongOwner,
    /// Handles are released when they are sent. Shows: released twice, or sent after release.
    ReleaseBeforeAck,
    /// Acknowledged PSNs are compared as plain numbers. Shows: across the wrap of PSNs nothing is released
    /// ([`Config::first_psn`](crate::Config::first_psn) brings it near).
    PsnWrapForgotten,
    /// A timeout sends nothing again. Shows: no progress once a tail and its probe are lost.
    TimeoutSendsNothing,
    /// A retransmission claims that it waits for the packet just before it. Shows: a flow out of order.
    RetransmissionDistance,
    /// The loss timer is armed once and then not again until something arrives. Shows: no progress.
    LossTimerNotRearmed,
    /// Packets are never given up. Shows: buffers held forever once a peer is gone.
    NeverGiveUp,
    /// Packets are given up at the first timeout. Shows: given up before 28 ms, lost although a path works.
    GiveUpAtOnce,
    /// What is given up is not said. Shows: the receiver waits forever.
    GiveUpSilently,
    /// A restarted connection forgets what it holds for the guest. Shows: acknowledged packets never seen.
    RestartForgetsReceived,
    /// A restarted connection forgets what is in flight. Shows: never seen, never released.
    RestartForgetsSent,
    /// CIDs of a former life of a connection are accepted. Shows: old packets take the places of new ones.
    StaleCidAccepted,
    /// The connection's send window is not looked at. Shows: more in flight than the guest's ring has.
    SendWindowIgnored,
    /// A connection that ends forgets what waits for it. Shows: buffers that never come back.
    EndForgetsWaiting,
    /// Best effort never ends. Shows: probes return and traffic stays plain.
    BestEffortForEver,
    /// Acknowledged retransmissions stay counted as in flight on their path. Shows: a drained path that is not empty.
    InFlightLeaks,
    /// A sender does not listen to what the peer has received and not taken. Shows: damage that one guest does to its own
    /// packets, or a guest that takes none, makes paths suspect that others use.
    RefusalsIgnored,
}

#[cfg(any(test, feature = "mutations"))]
impl Mutation {
    /// Every mutation.
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
