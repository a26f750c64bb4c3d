//! Counters of a vhost-user port and its queues.

use std::sync::atomic::{AtomicU64, Ordering};

use bifrost_nic::Malformed;

use super::ring::{BadChain, Broken};

/// Counters of a port's front-ends since it was opened.
#[derive(Debug, Default)]
pub(super) struct FrontEndCounters {
    pub(super) connections: AtomicU64,
    pub(super) messages: AtomicU64,
    pub(super) refused_messages: AtomicU64,
}

impl FrontEndCounters {
    /// Counters by name.
    pub(super) fn values(&self) -> [(&'static str, u64); 3] {
        [("connections", &self.connections), ("messages", &self.messages), ("refused_messages", &self.refused_messages)]
            .map(|(name, value)| (name, value.load(Ordering::Relaxed)))
    }
}

/// Counters of a [`VhostQueue`](super::VhostQueue), since it was started. "tx" is what the guest sends, "rx" what it
/// receives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VhostCounters {
    /// Descriptors read of the guest's TX buffers, including refused ones.
    pub tx_descriptors: u64,
    /// Packets fetched from the guest; a packet to be segmented counts once.
    pub tx_packets: u64,
    /// Bytes of these, Ethernet header included.
    pub tx_bytes: u64,
    /// Packets dropped because their virtio header does not fit the frame, by [`Malformed::index`].
    pub tx_malformed_packets: [u64; Malformed::ALL.len()],
    /// Packets dropped because they are too short for a virtio header, or memory was lost.
    pub tx_bad_buffer_packets: u64,
    /// Packets dropped because of bad descriptors, by reason.
    pub(crate) tx_bad_chain_packets: [u64; BadChain::NAMES.len()],
    /// Packets whose buffer the guest reused while it was in flight.
    pub tx_reused_buffer_packets: u64,
    /// Packets moved out of a ring with in-order buffers, because others were waiting behind them.
    pub tx_moved_packets: u64,
    /// Notifications of completed transmissions.
    pub tx_notifications: u64,
    /// Descriptors read of the guest's RX buffers, including refused ones.
    pub rx_descriptors: u64,
    /// Packets made visible to the guest.
    pub rx_packets: u64,
    /// Bytes of these.
    pub rx_bytes: u64,
    /// Merged frames in these.
    pub rx_merged_frames: u64,
    /// Frames that had to wait for the guest's buffers when they were to be shown.
    pub rx_deferred_frames: u64,
    /// RX buffers that they used.
    pub rx_buffers: u64,
    /// Notifications of received packets.
    pub rx_notifications: u64,
    /// Frames that could not be placed: no empty buffer in the guest's ring.
    pub rx_no_buffer_frames: u64,
    /// Frames that could not be placed: longer than the guest's MTU or its buffers.
    pub rx_too_large_frames: u64,
    /// Frames placed, then discarded by the data path.
    pub rx_discarded_frames: u64,
    /// RX buffers returned empty because of bad descriptors, by reason.
    pub(crate) rx_bad_chain_buffers: [u64; BadChain::NAMES.len()],
    /// Rings taken out of use because the driver violated the ring format.
    pub broken_rings: u64,
    /// The same by reason.
    pub(crate) broken_for_rings: [u64; Broken::NAMES.len()],
}

impl BadChain {
    /// By number.
    pub(crate) const NAMES: [&str; 6] = ["link", "indirect", "direction", "address", "length", "pieces"];
}

impl Broken {
    /// By number.
    pub(crate) const NAMES: [&str; 7] =
        ["available", "head", "twice", "memory", "bad_buffers", "chain_length", "records"];
}

impl VhostCounters {
    /// Counts a ring taken out of use.
    pub(crate) fn broken(&mut self, reason: Broken) {
        self.broken_rings += 1;
        self.broken_for_rings[reason as usize] += 1;
    }

    /// Adds the counters of another queue pair of the same device.
    pub(crate) fn add(&mut self, other: &VhostCounters) {
        // Names all fields, so that none is forgotten.
        let VhostCounters {
            tx_descriptors,
            rx_descriptors,
            tx_packets,
            tx_bytes,
            tx_malformed_packets,
            tx_bad_buffer_packets,
            tx_bad_chain_packets,
            tx_reused_buffer_packets,
            tx_moved_packets,
            tx_notifications,
            rx_packets,
            rx_bytes,
            rx_merged_frames,
            rx_deferred_frames,
            rx_buffers,
            rx_notifications,
            rx_no_buffer_frames,
            rx_too_large_frames,
            rx_discarded_frames,
            rx_bad_chain_buffers,
            broken_rings,
            broken_for_rings,
        } = other;
        for (sum, more) in [
            (&mut self.tx_descriptors, tx_descriptors),
            (&mut self.rx_descriptors, rx_descriptors),
            (&mut self.tx_packets, tx_packets),
            (&mut self.tx_bytes, tx_bytes),
            (&mut self.tx_bad_buffer_packets, tx_bad_buffer_packets),
            (&mut self.tx_reused_buffer_packets, tx_reused_buffer_packets),
            (&mut self.tx_moved_packets, tx_moved_packets),
            (&mut self.tx_notifications, tx_notifications),
            (&mut self.rx_packets, rx_packets),
            (&mut self.rx_bytes, rx_bytes),
            (&mut self.rx_merged_frames, rx_merged_frames),
            (&mut self.rx_deferred_frames, rx_deferred_frames),
            (&mut self.rx_buffers, rx_buffers),
            (&mut self.rx_notifications, rx_notifications),
            (&mut self.rx_no_buffer_frames, rx_no_buffer_frames),
            (&mut self.rx_too_large_frames, rx_too_large_frames),
            (&mut self.rx_discarded_frames, rx_discarded_frames),
            (&mut self.broken_rings, broken_rings),
        ] {
            *sum += more;
        }
        let reasons = [
            (&mut self.tx_malformed_packets[..], &tx_malformed_packets[..]),
            (&mut self.tx_bad_chain_packets[..], &tx_bad_chain_packets[..]),
            (&mut self.rx_bad_chain_buffers[..], &rx_bad_chain_buffers[..]),
            (&mut self.broken_for_rings[..], &broken_for_rings[..]),
        ];
        for (sums, more) in reasons {
            sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
        }
    }

    /// All counters by name, units last.
    pub fn iter(&self) -> impl Iterator<Item = (String, u64)> {
        let plain = [
            ("tx_descriptors", self.tx_descriptors),
            ("rx_descriptors", self.rx_descriptors),
            ("tx_packets", self.tx_packets),
            ("tx_bytes", self.tx_bytes),
            ("tx_bad_buffer_packets", self.tx_bad_buffer_packets),
            ("tx_reused_buffer_packets", self.tx_reused_buffer_packets),
            ("tx_moved_packets", self.tx_moved_packets),
            ("tx_notifications", self.tx_notifications),
            ("rx_packets", self.rx_packets),
            ("rx_bytes", self.rx_bytes),
            ("rx_merged_frames", self.rx_merged_frames),
            ("rx_deferred_frames", self.rx_deferred_frames),
            ("rx_buffers", self.rx_buffers),
            ("rx_notifications", self.rx_notifications),
            ("rx_no_buffer_frames", self.rx_no_buffer_frames),
            ("rx_too_large_frames", self.rx_too_large_frames),
            ("rx_discarded_frames", self.rx_discarded_frames),
            ("broken_rings", self.broken_rings),
        ];
        let malformed = Malformed::ALL
            .iter()
            .map(|m| (format!("tx_malformed_{}_packets", m.name()), self.tx_malformed_packets[m.index()]));
        let tx_chains =
            BadChain::NAMES.iter().zip(self.tx_bad_chain_packets).map(|(n, c)| (format!("tx_bad_{n}_packets"), c));
        let rx_chains =
            BadChain::NAMES.iter().zip(self.rx_bad_chain_buffers).map(|(n, c)| (format!("rx_bad_{n}_buffers"), c));
        let broken = Broken::NAMES.iter().zip(self.broken_for_rings).map(|(n, c)| (format!("broken_{n}_rings"), c));
        let plain = plain.into_iter().map(|(name, value)| (name.to_string(), value));
        plain.chain(malformed).chain(tx_chains).chain(rx_chains).chain(broken)
    }
}
