//! What the AF_XDP underlay counts, beside what its UDP sockets do.

/// Counters of one [`AfxdpUnderlay`](super::AfxdpUnderlay), since it was opened. What goes through its UDP sockets is counted
/// there, as [`UdpCounters`](crate::udp::UdpCounters).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AfxdpCounters {
    /// Datagrams handed up.
    pub rx_datagrams: u64,
    /// UDP payload bytes delivered to the worker.
    pub rx_bytes: u64,
    /// Datagrams whose outer headers were parsed here, as the XDP program could not leave a note.
    pub rx_parsed_datagrams: u64,
    /// Datagrams that came through the UDP sockets: fragments, options, extension headers, queues without a socket.
    pub rx_fallback_datagrams: u64,
    /// Frames dropped: not what the program lets through.
    pub rx_malformed_frames: u64,
    /// Frames dropped: wrong outer IPv4 or UDP checksum.
    pub rx_bad_checksum_frames: u64,
    /// Frames dropped by the kernel: no room in the receive ring, or no frame to receive into.
    pub rx_dropped_frames: u64,
    /// Datagrams given to the kernel in frames.
    pub tx_datagrams: u64,
    /// UDP payload bytes given to the kernel in frames.
    pub tx_bytes: u64,
    /// System calls made to send frames.
    pub tx_system_calls: u64,
    /// Datagrams given to the UDP sockets: no neighbour known yet, another device, too large; one now and then has the kernel
    /// ask again whether a neighbour is there.
    pub tx_fallback_datagrams: u64,
    /// Datagrams dropped: all frames are on their way.
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
