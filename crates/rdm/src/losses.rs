//! How many packets are lost: what chunking and congestion control go by.

/// The share of packets that was lost lately.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Losses {
    packets: f32,
    lost: f32,
}

/// Packets of which half of the weight remains after as many more.
const MEMORY_PACKETS: f32 = 16_384.0;

impl Default for Losses {
    /// One packet in 2048: before anything is known, chunks are long, but not the longest.
    fn default() -> Self {
        Self { packets: 1024.0, lost: 0.5 }
    }
}

impl Losses {
    pub(crate) fn delivered(&mut self, packets: u32) {
        self.add(packets, 0.0);
    }

    /// A work request of that many packets did not arrive: one of them is taken to be lost, for one is enough.
    pub(crate) fn lost(&mut self, packets: u32) {
        self.add(packets, 1.0);
    }

    /// Packets lost of those sent, 0..=1.
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
