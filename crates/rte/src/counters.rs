//! What happened, by reason. Units are in the names.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one engine.
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
    /// Data packets sent for the first time.
    sent_packets,
    /// Data packets sent again, for whatever reason.
    retransmitted_packets,
    /// Losses found because a later packet of the same path arrived.
    lost_same_path_packets,
    /// Losses found by time after a later packet of another path arrived (RFC 8985).
    lost_by_time_packets,
    /// Losses that a path's queue is to blame for: it stood, and the path delivered meanwhile.
    congestion_lost_packets,
    /// Tail probes sent.
    tail_probe_packets,
    /// Retransmission timeouts.
    timeout_packets,
    /// Second copies of retransmissions on another path.
    copied_packets,
    /// Retransmissions that turned out to be unnecessary.
    spurious_packets,
    /// Packets that arrived and were not taken by the peer: for lack of room, for a rate limit, or because they were damaged.
    refused_packets,
    /// Retransmissions put off because the peer has no room.
    deferred_packets,
    /// Packets that were sent and are given up, after repeated timeouts or with their connection, and sent as plain VXLAN once more.
    given_up_packets,
    /// Packets that were out when their connection was set up again: they are sent once more, and count as sent once more.
    restarted_packets,
    /// Packets given up because what they were to consist of was gone when they were to leave.
    withdrawn_packets,
    /// Packets sent as plain VXLAN because no connection could carry them; never sent otherwise in the life of their connection.
    plain_packets,
    /// Data packets accepted.
    received_packets,
    /// Data packets that were present already.
    duplicate_packets,
    /// Data packets whose PSN lies outside the window.
    outside_window_packets,
    /// Data packets that had no place (guest without buffers, injected loss); they come again.
    no_guest_buffer_packets,
    /// Data packets whose content was damaged although the datagram was not; they come again.
    damaged_packets,
    /// Data packets refused because the page pool is exhausted.
    no_page_packets,
    /// Data packets that arrived behind a gap.
    out_of_order_packets,
    /// Packets acknowledged without being shown (policy).
    policy_dropped_packets,
    /// Packets reported as dropped by a rate limit.
    rate_limited_packets,
    /// ACKs sent.
    acks_sent_packets,
    /// ACKs received and used.
    acks_received_packets,
    /// ACKs for packets that were never sent.
    ack_invalid_packets,
    /// Packets with a CID that nobody owns.
    unknown_cid_packets,
    /// Packets from another peer than the connection's.
    wrong_peer_packets,
    /// Packets with another VNI than the connection's.
    wrong_vni_packets,
    /// Packets of another version than the connection's.
    wrong_version_packets,
    /// Packets on a path that the peer does not have.
    unknown_path_packets,
    /// RESETs sent.
    resets_sent_packets,
    /// RESETs not sent because of their rate limit.
    resets_suppressed_packets,
    /// RESETs that named a connection here.
    resets_received_packets,
    /// RESETs, RESPONSEs and REJECTs that fit nothing here.
    stray_setup_packets,
    /// REQUESTs older than what is known of the peer.
    stale_setup_packets,
    /// REQUESTs sent.
    requests_sent_packets,
    /// REJECTs sent because no version fits.
    rejected_version_packets,
    /// REJECTs sent for a vNIC that is not here.
    rejected_vnic_packets,
    /// REJECTs sent for lack of room.
    rejected_resources_packets,
    /// REJECTs sent because of policy.
    rejected_policy_packets,
    /// REJECTs received.
    rejects_received_packets,
    /// Connections that became usable.
    opened_connections,
    /// Connections that were restarted (peer restarted or forgot).
    restarted_connections,
    /// Connections forgotten for idleness.
    reaped_connections,
    /// Connections dropped because a panic came while they, or their port, were worked on.
    faulted_connections,
    /// Set-ups that nobody answered.
    unanswered_connections,
    /// Connections that fell back to best effort.
    best_effort_connections,
    /// Connections that came back from best effort.
    recovered_connections,
    /// SKIPs sent.
    skips_sent_packets,
    /// SKIPs received and used.
    skips_received_packets,
    /// Probes sent.
    probes_sent_packets,
    /// Probes that did not return in time.
    probes_lost_packets,
    /// Paths that became suspect.
    suspect_paths,
    /// Paths that were taken back.
    recovered_paths,
    /// Send attempts that found the window closed.
    blocked_packets,
}
