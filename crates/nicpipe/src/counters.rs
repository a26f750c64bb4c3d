//! What happened at a pod's side of the pipeline. What happened in its order queues is in `bifrost_plb::Counters`.

macro_rules! counters {
    ($(#[$of:meta])* $group:ident: $($(#[$doc:meta])* $name:ident),* $(,)?) => {
        $(#[$of])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $group { $($(#[$doc])* pub $name: u64),* }

        impl $group {
            /// All counters with their names, in order of declaration.
            pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
                [$((stringify!($name), self.$name)),*].into_iter()
            }
        }
    };
}

counters! {
    /// Counters of one pod.
    PodCounters:
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
    /// Frames dropped that came back with another source than the pod's MAC address, or as ARP of another's address.
    returned_wrong_address_packets,
    /// Frames that left.
    sent_packets,
}

counters! {
    /// Counters of the reliable transport with one host.
    HostCounters:
    /// Datagrams of the transport that arrived.
    rx_datagrams,
    /// Frames that the transport has brought, each once; they go to the pod, in the order of their flows.
    rx_frames,
    /// Frames handed to the pod.
    delivered_frames,
    /// Frames dropped behind the transport: the pod was gone, or its buffers are too small.
    undelivered_frames,
    /// Frames refused that come again: the pod has no room, or is not there.
    refused_no_ring_frames,
    /// Frames refused that come again: the host's share of the memory is used up, or too much is missing before them.
    refused_no_memory_frames,
    /// Frames refused that come again: they are damaged, although their datagram is not.
    refused_damaged_frames,
    /// Frames dropped and acknowledged: the tenant exceeds its rate.
    limited_frames,
    /// Frames dropped and acknowledged: malformed.
    malformed_frames,
    /// Frames dropped and acknowledged: their addresses are not those of the connection.
    wrong_address_frames,
    /// Packets dropped: the UDP checksum is wrong.
    bad_checksum_datagrams,
    /// Packets dropped: no VXLAN header.
    bad_vxlan_datagrams,
    /// Packets dropped: not as the protocol says.
    bad_packets,
    /// Frames from the pod that the transport carries, repetitions not counted.
    tx_frames,
    /// Frames from the pod that leave as plain VXLAN: no connection carries them.
    plain_frames,
    /// Frames from the pod that leave as plain VXLAN: the host's share of the memory is used up.
    plain_no_memory_frames,
    /// Frames from the pod that leave as plain VXLAN: with the transport's header they are too long.
    plain_too_long_frames,
    /// Frames from the pod that leave as plain VXLAN: their checksum is wrong.
    plain_bad_checksum_frames,
    /// Frames that leave as plain VXLAN after all: their connection has ended, or they were repeated too often.
    surrendered_frames,
    /// Packets that left, repetitions and acknowledgements included.
    tx_datagrams,
    /// Packets not sent: nothing is known of the way to the host.
    unsent_no_link_packets,
}

counters! {
    /// Counters of the reliable transport of one pod, with nobody in particular.
    TransportCounters:
    /// Datagrams dropped: from an address that no configured host has.
    unknown_host_datagrams,
    /// Connection requests refused: for another address than the gateway's, or a VNI that is not configured.
    refused_requests,
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
