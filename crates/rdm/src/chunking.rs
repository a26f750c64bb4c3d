//! How much of a long message one WRITE carries (paper §3.4.1; RDM §6.3).

use bifrost_wire::rdm::UNIT;

/// What a chunk's length may depend on.
#[derive(Clone, Copy, Debug)]
pub struct View {
    /// Bytes of the congestion window.
    pub window: u32,
    /// Of these, bytes that are not in flight.
    pub free: u32,
    /// Smoothed round-trip time, ns; 0: not known.
    pub rtt_ns: u64,
    /// The smallest round-trip time lately, ns.
    pub base_rtt_ns: u64,
    /// Share of packets that is lost, 0..=1.
    pub loss: f32,
    /// Payload of a packet, bytes.
    pub mtu: u16,
}

/// Decides on the length of chunks. The engine rounds it to a multiple of the unit, and to one unit at least.
pub trait Chunking: std::fmt::Debug {
    /// Bytes that the next chunk should have.
    fn chunk(&self, view: &View) -> u32;
}

/// Always the same length: for networks without loss, where the NIC does what is needed.
#[derive(Clone, Copy, Debug)]
pub struct Fixed(
    /// Bytes.
    pub u32,
);

impl Chunking for Fixed {
    fn chunk(&self, _: &View) -> u32 {
        self.0
    }
}

/// Follows the window, the queue and the loss.
///
/// The paper's function of the queue is not published; here the length shrinks with the share that queueing has in the
/// round trip. The paper does not look at losses: with one packet in 256 lost and an MTU of 1024, a chunk of 64 KB
/// arrives whole in 78 cases of 100 and one of 4 KB in 98, so chunks are as long as [`Adaptive::lost_share`] allows.
#[derive(Clone, Copy, Debug)]
pub struct Adaptive {
    /// The longest chunk, bytes.
    pub longest: u32,
    /// The share of chunks that may be lost; the length follows.
    pub lost_share: f32,
}

impl Default for Adaptive {
    fn default() -> Self {
        Self { longest: 64 * 1024, lost_share: 0.02 }
    }
}

impl Chunking for Adaptive {
    fn chunk(&self, view: &View) -> u32 {
        // Several chunks in a window: otherwise the sender stops for each.
        let by_window = view.free.min(view.window / 4);
        let queue = view.rtt_ns.saturating_sub(view.base_rtt_ns);
        let by_load = (u64::from(self.longest) * view.base_rtt_ns.max(1) / (view.base_rtt_ns.max(1) + queue)) as u32;
        let by_loss = f32::from(view.mtu) * self.lost_share / view.loss.max(1e-6);
        let chunk = self.longest.min(by_window).min(by_loss as u32);
        if view.rtt_ns == 0 { chunk } else { chunk.min(by_load) }
    }
}

/// A multiple of the unit, and one at least.
pub(crate) fn whole_units(bytes: u32) -> u32 {
    (bytes / UNIT).max(1) * UNIT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_shrink_with_window_queue_and_loss() {
        let idle = View { window: 1 << 20, free: 1 << 20, rtt_ns: 50_000, base_rtt_ns: 50_000, loss: 0.0, mtu: 1024 };
        let chunk = |view: View| whole_units(Adaptive::default().chunk(&view)) / 1024;
        let cases = [
            ("idle", idle, 64),
            ("no sample yet", View { rtt_ns: 0, base_rtt_ns: 0, ..idle }, 64),
            ("a quarter of the window", View { window: 65_536, ..idle }, 16),
            ("what is free", View { free: 9000, ..idle }, 8),
            ("never less than a unit", View { free: 1, ..idle }, 4),
            ("as much queue as way", View { rtt_ns: 100_000, ..idle }, 32),
            ("a queue of seven ways", View { rtt_ns: 400_000, ..idle }, 8),
            ("one packet in 1024 lost", View { loss: 1.0 / 1024.0, ..idle }, 20),
            ("one in 256", View { loss: 1.0 / 256.0, ..idle }, 4),
            ("one in 256 of longer ones", View { loss: 1.0 / 256.0, mtu: 4096, ..idle }, 20),
        ];
        for (name, view, kilobytes) in cases {
            assert_eq!(chunk(view), kilobytes, "{name}");
        }
    }
}
