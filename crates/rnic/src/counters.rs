//! What the NIC counts.

/// Counters of a NIC, since it was made. Every packet that comes in and is not used has its reason here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Send and receive requests that were posted.
    pub posted_requests: u64,
    /// Completions that were polled.
    pub polled_completions: u64,
    /// Packets that left.
    pub sent_packets: u64,
    /// Packets of RC that left again.
    pub repeated_packets: u64,
    /// Packets that were used.
    pub received_packets: u64,
    /// The ICRC is wrong.
    pub bad_icrc_packets: u64,
    /// The bytes are no packet, or of an operation that is not supported.
    pub malformed_packets: u64,
    /// No queue pair of that number and service is ready.
    pub unknown_queue_pair_packets: u64,
    /// Not from the address that the queue pair is connected to.
    pub foreign_packets: u64,
    /// UD: not the queue pair's key.
    pub bad_queue_key_packets: u64,
    /// Parts of UC messages whose begin, or a part before, is missing.
    pub torn_packets: u64,
    /// UC messages that were begun and lost a packet.
    pub torn_messages: u64,
    /// Messages that found no receive request.
    pub no_receive_request_messages: u64,
    /// Messages that are longer than the receive request's memory.
    pub too_long_messages: u64,
    /// Messages with a wrong key, address or length of memory.
    pub access_denied_messages: u64,
    /// Packets that do not continue the message that was begun, or with a payload that is not what their place asks for.
    pub out_of_place_packets: u64,
    /// RC: packets that had arrived before.
    pub repeated_received_packets: u64,
    /// RC: packets behind a gap.
    pub gap_packets: u64,
    /// RC: acknowledgements of nothing that is open.
    pub stray_acknowledgements: u64,
    /// RC: timers that ran out.
    pub timeouts: u64,
    /// Queue pairs that went into error.
    pub queue_pairs_in_error: u64,
}
