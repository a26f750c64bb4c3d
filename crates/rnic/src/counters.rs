//! Counters of the NIC.

/// Counters of a NIC since it was created. Each received packet that is dropped is counted with its reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Posted send and receive requests.
    pub posted_requests: u64,
    /// Polled completions.
    pub polled_completions: u64,
    /// Packets sent.
    pub sent_packets: u64,
    /// RC packets retransmitted.
    pub repeated_packets: u64,
    /// Packets accepted.
    pub received_packets: u64,
    /// The ICRC is wrong.
    pub bad_icrc_packets: u64,
    /// Not a valid packet, or an unsupported operation.
    pub malformed_packets: u64,
    /// No queue pair of that number and service is ready.
    pub unknown_queue_pair_packets: u64,
    /// The source is not the address that the queue pair is connected to.
    pub foreign_packets: u64,
    /// UD: the key does not match the queue pair's.
    pub bad_queue_key_packets: u64,
    /// Parts of UC messages whose start, or an earlier part, is missing.
    pub torn_packets: u64,
    /// UC messages that were started and lost a packet.
    pub torn_messages: u64,
    /// Messages without a receive request.
    pub no_receive_request_messages: u64,
    /// Messages that are longer than the receive request's memory.
    pub too_long_messages: u64,
    /// Messages with a wrong key, address or length of memory.
    pub access_denied_messages: u64,
    /// Packets that do not continue the current message, or whose payload length does not match their position.
    pub out_of_place_packets: u64,
    /// RC: duplicate packets.
    pub repeated_received_packets: u64,
    /// RC: packets behind a gap.
    pub gap_packets: u64,
    /// RC: acknowledgements of packets that are not in flight.
    pub stray_acknowledgements: u64,
    /// RC: timeouts.
    pub timeouts: u64,
    /// Queue pairs that entered the error state.
    pub queue_pairs_in_error: u64,
}
