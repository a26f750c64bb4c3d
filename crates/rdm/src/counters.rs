//! What the engine counts.

/// Counters of an engine, of all its connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages that were taken from the application.
    pub sent_messages: u64,
    /// Messages that were given to the application.
    pub delivered_messages: u64,
    /// Their bytes.
    pub delivered_bytes: u64,
    /// WRITEs posted.
    pub write_requests: u64,
    /// SENDs posted.
    pub send_requests: u64,
    /// Of these, repetitions.
    pub repair_requests: u64,
    /// Work requests that were taken to be lost.
    pub lost_requests: u64,
    /// Of these, those that were acknowledged later.
    pub spurious_losses: u64,
    /// Units that arrived again.
    pub repeated_units: u64,
    /// ACKs sent.
    pub sent_acks: u64,
    /// ACKs received.
    pub received_acks: u64,
    /// Grants sent.
    pub sent_grants: u64,
    /// Probes sent.
    pub sent_probes: u64,
    /// Timers that ran out with something in flight.
    pub timeouts: u64,
    /// Switches from one service to the other.
    pub switches: u64,
    /// Changes of the lane in use because it failed.
    pub lane_flips: u64,
    /// Lanes that failed because their queue pair was in error.
    pub lane_errors: u64,
    /// Lanes that failed because three timers ran out in a row.
    pub lane_timeouts: u64,
    /// Reliable lanes that failed because they delivered nothing while others did.
    pub lane_silences: u64,
    /// Lanes that were repaired.
    pub lane_repairs: u64,
    /// SENDs, WRITEs and control datagrams that break the protocol, or are of no connection.
    pub refused: u64,
    /// SENDs for which there was no memory, or no room in the window.
    pub no_room: u64,
}
