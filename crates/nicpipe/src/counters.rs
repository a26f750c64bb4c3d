//! What happened at a pod's side of the pipeline. What happened in its order queues is in `bifrost_plb::Counters`.

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters of one pod.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct PodCounters { $($(#[$doc])* pub $name: u64),* }

        impl PodCounters {
            /// All counters with their names, in order of declaration.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Frames for the pod.
    arrived_packets,
    /// Frames put into its rings of cores.
    delivered_packets,
    /// Of these, headers only.
    delivered_header_only_packets,
    /// Frames put into its priority rings.
    delivered_priority_packets,
    /// Frames dropped: the pod is not there.
    refused_pod_down_packets,
    /// Frames dropped: the tenant exceeds its rate.
    refused_limited_packets,
    /// Frames dropped: control traffic exceeds its rate.
    refused_control_rate_packets,
    /// Frames dropped: their order queue is full.
    refused_queue_full_packets,
    /// Frames dropped: no core, or not that of their flow, has room; or the priority ring has none.
    refused_ring_full_packets,
    /// Frames dropped: the pod's buffers are too small.
    refused_too_long_packets,
    /// Frames that came back from the pod.
    returned_packets,
    /// Frames dropped that came back shorter than an Ethernet header and a trailer, or longer than the longest frame.
    returned_bad_packets,
    /// Frames that left.
    sent_packets,
}

/// Why an arriving frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its outer headers are malformed.
    Malformed,
    /// No pod has its VLAN.
    NoPod,
    /// The pod is not there.
    PodDown,
    /// The tenant exceeds its rate.
    Limited,
    /// Control traffic exceeds its rate.
    ControlRate,
    /// The order queue is full.
    QueueFull,
    /// The ring is full.
    RingFull,
    /// The pod's buffer is too small.
    TooLong,
}
