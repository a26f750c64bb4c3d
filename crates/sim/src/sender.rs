//! The sending half of light guests: frames and their times.

use bifrost_nic::{Offload, Segment, SegmentKind};

use crate::faults::exponential;
use crate::flows::{Addresses, Flows};
use crate::port::SimPort;
use crate::rng::Rng;
use crate::scenario::Gap;

/// Longest run of frames of one flow, if there are several.
const LONGEST_RUN: u64 = 8;

/// Traffic from one guest to another.
#[derive(Clone, Debug)]
pub(crate) struct Sender {
    pub(crate) from: u32,
    pub(crate) workload: u32,
    pub(crate) addresses: Addresses,
    /// The first flow, and the number of flows.
    pub(crate) flows: (u32, u32),
    /// Packets left to send.
    pub(crate) left: u64,
    /// Payload of a packet: minimum and maximum.
    pub(crate) size: (u32, u32),
    pub(crate) segments: u32,
    pub(crate) gap: u64,
    pub(crate) gap_kind: Gap,
    pub(crate) burst: u32,
    /// Frames of the burst left to send.
    pub(crate) burst_left: u32,
    /// The current flow, and the number of frames left in its run.
    pub(crate) run: (u32, u64),
    /// It waits for room in the ring.
    pub(crate) blocked: bool,
    pub(crate) rng: Rng,
}

/// The next action of a sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Send at this time.
    At(u64),
    /// Send when there is room.
    Blocked,
    /// Finished.
    Done,
}

impl Sender {
    /// Sends the frames that are due at `now`.
    pub(crate) fn send(&mut self, now: u64, port: &mut SimPort, flows: &mut Flows) -> Next {
        loop {
            if self.burst_left == 0 {
                self.burst_left = self.burst;
            }
            while self.burst_left > 0 && self.left > 0 {
                if port.room() == 0 {
                    self.blocked = true;
                    return Next::Blocked;
                }
                self.frame(now, port, flows);
                self.burst_left -= 1;
            }
            if self.left == 0 {
                return Next::Done;
            }
            if self.gap > 0 {
                let gap = match self.gap_kind {
                    Gap::Fixed => self.gap,
                    Gap::Poisson => exponential(&mut self.rng, self.gap),
                };
                return Next::At(now + gap);
            }
        }
    }

    fn frame(&mut self, now: u64, port: &mut SimPort, flows: &mut Flows) {
        if self.run.1 == 0 {
            let flow = self.flows.0 + self.rng.below(u64::from(self.flows.1)) as u32;
            self.run = (flow, 1 + self.rng.below(LONGEST_RUN));
        }
        self.run.1 -= 1;
        let flow = self.run.0;
        let count = u64::from(self.segments).min(self.left) as usize;
        self.left -= count as u64;
        let (low, high) = self.size;
        // Segments of a large frame have one length.
        let size = if count > 1 || low == high { high } else { low + self.rng.below(u64::from(high - low) + 1) as u32 };
        let (mut addresses, rng) = (self.addresses, &mut self.rng);
        addresses.port.0 = addresses.port.0.wrapping_add((flow - self.flows.0) as u16);
        // Guests may offload the checksums of single packets to the host or complete them themselves. For large frames
        // they must offload them.
        let partial = count > 1 || rng.next_u64() & 1 == 0;
        let offload = Offload {
            checksum: partial.then_some((34, 16)),
            segment: (count > 1).then_some(Segment { mss: size as u16, kind: SegmentKind::TcpV4 }),
        };
        port.send(offload, |out| {
            let len = count * size as usize;
            addresses.start(len, flows.next_seq(flow).wrapping_mul(high), out);
            for _ in 0..count {
                flows.send(now, flow).write(size as usize, out);
            }
            addresses.finish(partial, out);
        });
    }
}
