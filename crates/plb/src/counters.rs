//! Counters by reason. Units are in the names.

use crate::TrailerError;

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one balancer.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Counters { $($(#[$doc])* pub $name: u64),* }

        impl Counters {
            /// All counters with their names, in order of declaration.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Packets dispatched to a core with an entry in an order queue.
    dispatched_packets,
    /// Packets dispatched to a core by their flow, without an entry in an order queue.
    dispatched_unordered_packets,
    /// Packets refused because their order queue was full.
    refused_queue_full_packets,
    /// Packets refused because no payload slot was free.
    refused_no_payload_slot_packets,
    /// Packets refused because no core had room, or not the core of their flow.
    refused_no_room_packets,
    /// Packets that left in order (reorder check, case 4).
    sent_in_order_packets,
    /// Packets that left without an order: originated by the pod, or dispatched by flow.
    sent_unordered_packets,
    /// Packets that returned after their entry was released, and left at once (legal check: invalid).
    sent_late_packets,
    /// Packets that passed the legal check with the entry of another, and left when that was detected (reorder check,
    /// case 3).
    sent_alias_packets,
    /// Entries released because the pod dropped the packet.
    dropped_by_pod_packets,
    /// Drop flags for an entry that was released already, or without an entry.
    dropped_by_pod_late_packets,
    /// Entries released because their packet took longer than the timeout (reorder check, case 1).
    timed_out_packets,
    /// Timeouts that delayed packets behind them: head-of-line blocking.
    timed_out_blocking_packets,
    /// Entries released without waiting, at the end of a change to dispatch by flow.
    abandoned_packets,
    /// Late packets whose PSN equals that of a waiting packet in its low bits only, which `LowBits` would accept.
    aliases_packets,
    /// Returned packets whose payload slot was not the recorded one; the recorded one was used.
    payload_mismatch_packets,
    /// Returned packets dropped: no valid trailer.
    dropped_malformed_packets,
    /// Returned packets dropped: the trailer names another pod.
    dropped_wrong_pod_packets,
    /// Returned packets dropped: the trailer names an order queue that the pod does not have.
    dropped_no_such_queue_packets,
    /// Returned packets dropped: the packet of that entry has been returned, or dropped by the pod, before.
    dropped_duplicate_packets,
    /// Returned headers dropped: their payload was freed before they arrived.
    dropped_payload_gone_packets,
    /// Held packets dropped: another took their entry (`LowBits` only).
    dropped_replaced_packets,
    /// Held packets dropped because the balancer was cleared.
    dropped_cleared_packets,
}

/// Why a returned packet is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// The pod set the drop flag.
    ByPod,
    /// No valid trailer.
    Malformed(TrailerError),
    /// The trailer names another pod.
    WrongPod(u16),
    /// The trailer names an order queue that the pod does not have.
    NoSuchQueue(u8),
    /// The packet of that entry has been returned, or dropped by the pod, before.
    Duplicate,
    /// A header whose payload was freed before it arrived.
    PayloadGone,
    /// Another packet took its entry ([`LegalCheck::LowBits`](crate::LegalCheck::LowBits) only).
    Replaced,
    /// The balancer was cleared.
    Cleared,
}
