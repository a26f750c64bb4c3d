//! Counters of the engine.

/// Totals over all connections of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages accepted from the application.
    pub sent_messages: u64,
    /// Messages delivered to the application.
    pub delivered_messages: u64,
    /// Bytes delivered to the application.
    pub delivered_bytes: u64,
    /// WRITEs posted.
    pub write_requests: u64,
    /// SENDs posted.
    pub send_requests: u64,
    /// SENDs that were retransmissions.
    pub repair_requests: u64,
    /// Work requests considered lost.
    pub lost_requests: u64,
    /// Lost work requests that were acknowledged later.
    pub spurious_losses: u64,
    /// Units that arrived more than once.
    pub repeated_units: u64,
    /// ACKs sent.
    pub sent_acks: u64,
    /// ACKs received.
    pub received_acks: u64,
    /// Grants sent.
    pub sent_grants: u64,
    /// Probes sent.
    pub sent_probes: u64,
    /// Timeouts with requests in flight.
    pub timeouts: u64,
    /// Switches between services.
    pub switches: u64,
    /// Changes of the lane in use because of a failure.
    pub lane_flips: u64,
    /// Lanes that failed because of a queue pair in error.
    pub lane_errors: u64,
    /// Lanes that failed after three consecutive timeouts.
    pub lane_timeouts: u64,
    /// Reliable lanes that failed because they delivered nothing while other lanes did.
    pub lane_silences: u64,
    /// Lanes repaired.
    pub lane_repairs: u64,
    /// SENDs, WRITEs and control datagrams that violate the protocol, or belong to no connection.
    pub refused: u64,
    /// SENDs dropped because memory or window were exhausted.
    pub no_room: u64,
}
