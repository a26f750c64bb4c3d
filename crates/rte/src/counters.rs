//! Counters by reason, with units in their names.

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
    /// Data packets retransmitted, for any reason.
    retransmitted_packets,
    /// Losses detected because a later packet on the same path arrived.
    lost_same_path_packets,
    /// Losses detected by time after a later packet on another path arrived (RFC 8985).
    lost_by_time_packets,
    /// Losses attributed to a path's queue: it stood, and the path delivered meanwhile.
    congestion_lost_packets,
    /// Tail probes sent.
    tail_probe_packets,
    /// Retransmission timeouts.
    timeout_packets,
    /// Second copies of retransmissions on another path.
    copied_packets,
    /// Retransmissions that turned out to be unnecessary.
    spurious_packets,
    /// Packets that arrived but that the peer did not take: no room, a rate limit, or damage.
    refused_packets,
    /// Retransmissions deferred because the peer has no room.
    deferred_packets,
    /// Packets sent and then given up, after repeated timeouts or with their connection, and sent once more as plain
    /// VXLAN.
    given_up_packets,
    /// Packets in flight when their connection was set up again: they are sent again, and counted as sent again.
    restarted_packets,
    /// Packets given up because their contents were gone before transmission.
    withdrawn_packets,
    /// Packets sent as plain VXLAN because no connection could carry them; not sent otherwise in the life of their
    /// connection.
    plain_packets,
    /// Data packets accepted.
    received_packets,
    /// Data packets that were already present.
    duplicate_packets,
    /// Data packets with a PSN outside the window.
    outside_window_packets,
    /// Data packets that could not be placed (guest without buffers, injected loss); they are retransmitted.
    no_guest_buffer_packets,
    /// Data packets with damaged contents in an intact datagram; they are retransmitted.
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
    /// ACKs received and processed.
    acks_received_packets,
    /// ACKs for packets that were never sent.
    ack_invalid_packets,
    /// Packets with an unknown CID.
    unknown_cid_packets,
    /// Packets from another peer than the connection's.
    wrong_peer_packets,
    /// Packets with another VNI than the connection's.
    wrong_vni_packets,
    /// Packets of another version than the connection's.
    wrong_version_packets,
    /// ACKs of packets on a path that this host does not have.
    unknown_path_packets,
    /// RESETs sent.
    resets_sent_packets,
    /// RESETs suppressed by the rate limit.
    resets_suppressed_packets,
    /// RESETs that matched a connection.
    resets_received_packets,
    /// RESETs, RESPONSEs and REJECTs that matched nothing.
    stray_setup_packets,
    /// REQUESTs older than the last one accepted from the peer.
    stale_setup_packets,
    /// REQUESTs sent.
    requests_sent_packets,
    /// REJECTs sent: no common version.
    rejected_version_packets,
    /// REJECTs sent: the vNIC is not on this host.
    rejected_vnic_packets,
    /// REJECTs sent: no resources.
    rejected_resources_packets,
    /// REJECTs sent: policy.
    rejected_policy_packets,
    /// REJECTs received.
    rejects_received_packets,
    /// Connections that became usable.
    opened_connections,
    /// Connections that were restarted (peer restarted or forgot).
    restarted_connections,
    /// Connections forgotten after idling.
    reaped_connections,
    /// Connections dropped after a panic while they, or their port, were being processed.
    faulted_connections,
    /// Set-ups without an answer.
    unanswered_connections,
    /// Connections that fell back to best effort.
    best_effort_connections,
    /// Connections that recovered from best effort.
    recovered_connections,
    /// SKIPs sent.
    skips_sent_packets,
    /// SKIPs received and processed.
    skips_received_packets,
    /// Probes sent.
    probes_sent_packets,
    /// Probes that did not return in time.
    probes_lost_packets,
    /// Paths that became suspect.
    suspect_paths,
    /// Paths that became usable again.
    recovered_paths,
    /// Send attempts that found the window closed.
    blocked_packets,
}
