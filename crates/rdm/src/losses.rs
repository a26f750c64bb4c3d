//! Packet loss rate, for chunking and congestion control.

/// The recent share of lost packets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Losses {
    packets: f32,
    lost: f32,
}

/// Both sums are halved when there are more packets than this.
const MEMORY_PACKETS: f32 = 16_384.0;

impl Default for Losses {
    /// One packet in 2048: before the first measurement, chunks are long, but not the longest.
    fn default() -> Self {
        Self { packets: 1024.0, lost: 0.5 }
    }
}

impl Losses {
    pub(crate) fn delivered(&mut self, packets: u32) {
        self.add(packets, 0.0);
    }

    /// A work request of this number of packets did not arrive: one of them counts as lost, because one is enough.
    pub(crate) fn lost(&mut self, packets: u32) {
        self.add(packets, 1.0);
    }

    /// Share of packets lost, 0..=1.
    pub(crate) fn rate(&self) -> f32 {
        self.lost / self.packets
    }

    fn add(&mut self, packets: u32, lost: f32) {
        self.packets += packets as f32;
        self.lost += lost;
        if self.packets > MEMORY_PACKETS {
            self.packets /= 2.0;
            self.lost /= 2.0;
        }
    }
}
