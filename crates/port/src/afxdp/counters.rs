//! Counters of the AF_XDP underlay, apart from those of its UDP sockets.

/// Counters of one [`AfxdpUnderlay`](super::AfxdpUnderlay) since it was opened. Traffic through its UDP sockets is
/// counted in [`UdpCounters`](crate::udp::UdpCounters).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AfxdpCounters {
    /// Datagrams delivered to the worker.
    pub rx_datagrams: u64,
    /// UDP payload bytes delivered to the worker.
    pub rx_bytes: u64,
    /// Datagrams whose outer headers were parsed in user space because the XDP program could not write its note.
    pub rx_parsed_datagrams: u64,
    /// Datagrams received through the UDP sockets: fragments, IP options, extension headers, queues without a socket.
    pub rx_fallback_datagrams: u64,
    /// Frames dropped: not of a kind that the XDP program redirects.
    pub rx_malformed_frames: u64,
    /// Frames dropped: wrong outer IPv4 or UDP checksum.
    pub rx_bad_checksum_frames: u64,
    /// Frames dropped by the kernel: the receive ring was full, or the fill ring empty.
    pub rx_dropped_frames: u64,
    /// Datagrams handed to the kernel in frames.
    pub tx_datagrams: u64,
    /// UDP payload bytes handed to the kernel in frames.
    pub tx_bytes: u64,
    /// System calls made to send frames.
    pub tx_system_calls: u64,
    /// Datagrams handed to the UDP sockets: next hop not resolved yet, another device, or too large. Occasionally one
    /// takes this path so that the kernel probes a neighbour again.
    pub tx_fallback_datagrams: u64,
    /// Datagrams dropped: all TX frames are in flight.
    pub tx_no_frame_datagrams: u64,
}

impl AfxdpCounters {
    /// All counters by name, units last.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("rx_datagrams", self.rx_datagrams),
            ("rx_bytes", self.rx_bytes),
            ("rx_parsed_datagrams", self.rx_parsed_datagrams),
            ("rx_fallback_datagrams", self.rx_fallback_datagrams),
            ("rx_malformed_frames", self.rx_malformed_frames),
            ("rx_bad_checksum_frames", self.rx_bad_checksum_frames),
            ("rx_dropped_frames", self.rx_dropped_frames),
            ("tx_datagrams", self.tx_datagrams),
            ("tx_bytes", self.tx_bytes),
            ("tx_system_calls", self.tx_system_calls),
            ("tx_fallback_datagrams", self.tx_fallback_datagrams),
            ("tx_no_frame_datagrams", self.tx_no_frame_datagrams),
        ]
        .into_iter()
    }
}
