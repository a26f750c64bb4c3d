//! Counters of the UDP underlay.

/// Counters of one [`UdpUnderlay`](super::UdpUnderlay), since it was opened.
///
/// A *message* is what one header of `recvmmsg`/`sendmmsg` carries: one datagram, or a run of datagrams of one lane
/// that the kernel segments or has coalesced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UdpCounters {
    /// Datagrams delivered to the worker.
    pub rx_datagrams: u64,
    /// UDP payload bytes delivered to the worker.
    pub rx_bytes: u64,
    /// Messages received, coalesced ones counted once.
    pub rx_messages: u64,
    /// System calls that returned datagrams.
    pub rx_system_calls: u64,
    /// Messages that the kernel dropped because a receive socket's buffer was full (a coalesced run counts once).
    /// Known only when the next message of that socket arrives.
    pub rx_buffer_full_messages: u64,
    /// Messages dropped because they did not fit a receive buffer.
    pub rx_truncated_messages: u64,
    /// Messages dropped because their source address could not be read.
    pub rx_bad_source_messages: u64,
    /// Receive calls that failed (a late ICMP error, or the kernel out of memory).
    pub rx_failed_calls: u64,
    /// Datagrams accepted by the kernel.
    pub tx_datagrams: u64,
    /// UDP payload bytes accepted by the kernel.
    pub tx_bytes: u64,
    /// Messages accepted by the kernel.
    pub tx_messages: u64,
    /// System calls made to send.
    pub tx_system_calls: u64,
    /// Messages of several datagrams that the kernel did not segment; their datagrams were then sent one by one.
    pub tx_gso_refused_messages: u64,
    /// Datagrams dropped: send buffer or queue full (EAGAIN, ENOBUFS, ENOMEM).
    pub tx_no_buffer_datagrams: u64,
    /// Datagrams dropped: larger than the link's MTU (EMSGSIZE). They are never fragmented.
    pub tx_too_big_datagrams: u64,
    /// Datagrams dropped: no route, or destination unreachable (ENETUNREACH, EHOSTUNREACH, ENETDOWN).
    pub tx_unreachable_datagrams: u64,
    /// Datagrams dropped: the peer's port is closed (ECONNREFUSED).
    pub tx_refused_datagrams: u64,
    /// Datagrams dropped: any other error.
    pub tx_other_error_datagrams: u64,
    /// Datagrams dropped: their lane was never registered.
    pub tx_unknown_lane_datagrams: u64,
}

impl UdpCounters {
    /// All counters by name, units last.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("rx_datagrams", self.rx_datagrams),
            ("rx_bytes", self.rx_bytes),
            ("rx_messages", self.rx_messages),
            ("rx_system_calls", self.rx_system_calls),
            ("rx_buffer_full_messages", self.rx_buffer_full_messages),
            ("rx_truncated_messages", self.rx_truncated_messages),
            ("rx_bad_source_messages", self.rx_bad_source_messages),
            ("rx_failed_calls", self.rx_failed_calls),
            ("tx_datagrams", self.tx_datagrams),
            ("tx_bytes", self.tx_bytes),
            ("tx_messages", self.tx_messages),
            ("tx_system_calls", self.tx_system_calls),
            ("tx_gso_refused_messages", self.tx_gso_refused_messages),
            ("tx_no_buffer_datagrams", self.tx_no_buffer_datagrams),
            ("tx_too_big_datagrams", self.tx_too_big_datagrams),
            ("tx_unreachable_datagrams", self.tx_unreachable_datagrams),
            ("tx_refused_datagrams", self.tx_refused_datagrams),
            ("tx_other_error_datagrams", self.tx_other_error_datagrams),
            ("tx_unknown_lane_datagrams", self.tx_unknown_lane_datagrams),
        ]
        .into_iter()
    }
}
