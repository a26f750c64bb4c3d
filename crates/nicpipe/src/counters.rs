//! Counters of a pod's side of the pipeline. Those of its order queues are in `bifrost_plb::Counters`.

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
    /// Frames sent to its cores' rings.
    delivered_packets,
    /// Of these, header-only ones.
    delivered_header_only_packets,
    /// Frames sent to its priority rings.
    delivered_priority_packets,
    /// Frames dropped: the pod is down.
    refused_pod_down_packets,
    /// Frames dropped: the tenant exceeds its rate.
    refused_limited_packets,
    /// Frames dropped: control traffic exceeds its rate.
    refused_control_rate_packets,
    /// Frames dropped: their order queue is full.
    refused_queue_full_packets,
    /// Frames dropped: no core has room, or not the core of their flow; or the priority ring is full.
    refused_ring_full_packets,
    /// Frames dropped: the pod's buffers are too small.
    refused_too_long_packets,
    /// Frames that returned from the pod.
    returned_packets,
    /// Returned frames dropped: shorter than an Ethernet header and a trailer, or longer than the maximum.
    returned_bad_packets,
    /// Returned frames dropped: the source is not the pod's MAC address, or they are ARP for another's address.
    returned_wrong_address_packets,
    /// Frames that left.
    sent_packets,
}

counters! {
    /// Counters of the reliable transport with one host.
    HostCounters:
    /// Datagrams of the transport that arrived.
    rx_datagrams,
    /// New frames from the transport; they go to the pod, in the order of their flows.
    rx_frames,
    /// Frames delivered to the pod.
    delivered_frames,
    /// Frames dropped after the transport: the pod was down, or its buffers are too small.
    undelivered_frames,
    /// Frames not accepted, so that the host retransmits them: the pod has no room, or is down.
    refused_no_ring_frames,
    /// Frames not accepted, so that the host retransmits them: the host's share of the memory is used up, or too many
    /// packets before them are missing.
    refused_no_memory_frames,
    /// Frames not accepted, so that the host retransmits them: they are damaged, although their datagram is not.
    refused_damaged_frames,
    /// Frames dropped and acknowledged: the tenant exceeds its rate.
    limited_frames,
    /// Frames dropped and acknowledged: malformed.
    malformed_frames,
    /// Frames dropped and acknowledged: their addresses do not match the connection.
    wrong_address_frames,
    /// Packets dropped: the UDP checksum is wrong.
    bad_checksum_datagrams,
    /// Packets dropped: no VXLAN header.
    bad_vxlan_datagrams,
    /// Packets dropped: they violate the protocol.
    bad_packets,
    /// Frames from the pod that the transport carries, without retransmissions.
    tx_frames,
    /// Frames from the pod that leave as plain VXLAN: no connection carries them.
    plain_frames,
    /// Frames from the pod that leave as plain VXLAN: the host's share of the memory is used up.
    plain_no_memory_frames,
    /// Frames from the pod that leave as plain VXLAN: they are too long with the transport's header.
    plain_too_long_frames,
    /// Frames from the pod that leave as plain VXLAN: their checksum is wrong.
    plain_bad_checksum_frames,
    /// Frames that leave as plain VXLAN after all: their connection has ended, or they were retransmitted too often.
    surrendered_frames,
    /// Packets sent, including retransmissions and acknowledgements.
    tx_datagrams,
    /// Packets not sent: no path to the host is known.
    unsent_no_link_packets,
}

counters! {
    /// Counters of the reliable transport of one pod that do not belong to a host.
    TransportCounters:
    /// Datagrams dropped: their source is not a configured host.
    unknown_host_datagrams,
    /// Connection requests refused: for an address that is not the gateway's, or a VNI that is not configured.
    refused_requests,
}

/// Why an arriving frame is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Its outer headers are malformed.
    Malformed,
    /// Its VLAN does not belong to a pod.
    NoPod,
    /// The pod is down.
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
