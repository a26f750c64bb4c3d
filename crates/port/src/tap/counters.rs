//! Counters of a TAP queue.

use bifrost_nic::Malformed;

/// Counters of one [`TapQueue`](super::TapQueue) since it was created. "tx" is what the guest sends, "rx" what it
/// receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TapCounters {
    /// Packets fetched from the guest; a packet to be segmented counts once.
    pub tx_packets: u64,
    /// Bytes of these, Ethernet header included.
    pub tx_bytes: u64,
    /// Packets in these that needed a 64 KiB buffer.
    pub tx_large_packets: u64,
    /// Fetches that stopped because all buffers held uncompleted packets.
    pub tx_no_buffer_pauses: u64,
    /// Packets dropped because their virtio header does not fit the frame, by [`Malformed::index`].
    pub tx_malformed_packets: [u64; Malformed::ALL.len()],
    /// Frames made visible to the guest.
    pub rx_frames: u64,
    /// Bytes of these as received, Ethernet headers included.
    pub rx_bytes: u64,
    /// Packets written to the guest: frames after merging.
    pub rx_packets: u64,
    /// Frames that could not be placed: all buffers in use.
    pub rx_no_buffer_frames: u64,
    /// Frames that could not be placed: longer than the guest's MTU.
    pub rx_too_large_frames: u64,
    /// Frames placed, then discarded by the data path.
    pub rx_discarded_frames: u64,
    /// Packets that the kernel did not accept at once (EAGAIN, ENOBUFS, ENOMEM); they are written later.
    pub rx_deferred_packets: u64,
    /// Frames dropped because the guest's interface is down or gone (EIO, EBADFD).
    pub rx_device_down_frames: u64,
    /// Frames dropped because the kernel refused them (EINVAL).
    pub rx_refused_frames: u64,
    /// Frames dropped for any other error.
    pub rx_other_error_frames: u64,
}

// `Default` is not derived for arrays beyond 32 elements.
const _: () = assert!(Malformed::ALL.len() <= 32);

impl TapCounters {
    /// All counters by name, units last.
    pub fn iter(&self) -> impl Iterator<Item = (String, u64)> {
        let plain = [
            ("tx_packets", self.tx_packets),
            ("tx_bytes", self.tx_bytes),
            ("tx_large_packets", self.tx_large_packets),
            ("tx_no_buffer_pauses", self.tx_no_buffer_pauses),
            ("rx_frames", self.rx_frames),
            ("rx_bytes", self.rx_bytes),
            ("rx_packets", self.rx_packets),
            ("rx_no_buffer_frames", self.rx_no_buffer_frames),
            ("rx_too_large_frames", self.rx_too_large_frames),
            ("rx_discarded_frames", self.rx_discarded_frames),
            ("rx_deferred_packets", self.rx_deferred_packets),
            ("rx_device_down_frames", self.rx_device_down_frames),
            ("rx_refused_frames", self.rx_refused_frames),
            ("rx_other_error_frames", self.rx_other_error_frames),
        ];
        let malformed = Malformed::ALL
            .iter()
            .map(|m| (format!("tx_malformed_{}_packets", m.name()), self.tx_malformed_packets[m.index()]));
        plain.into_iter().map(|(name, value)| (name.to_string(), value)).chain(malformed)
    }
}
