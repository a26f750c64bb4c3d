//! A set of packets of light guests' flows.

use crate::flows::peek;

/// Upper bound of packet numbers. Plain VXLAN does not protect a frame's content, so its number may be corrupted.
const MOST_PACKETS: u32 = 1 << 24;

/// Packets by flow and number.
#[derive(Debug)]
pub(super) struct Seen(Vec<Vec<u64>>);

impl Seen {
    /// An empty set for these flows.
    pub(super) fn none_of(flows: u32) -> Seen {
        Seen(vec![Vec::new(); flows as usize])
    }

    /// Adds the packet of a frame; false if it was there, `None` if it is not a light guest's.
    pub(super) fn add(&mut self, frame: &[u8]) -> Option<bool> {
        let (flow, seq) = peek(frame).filter(|(_, seq)| *seq < MOST_PACKETS)?;
        let words = self.0.get_mut(flow as usize)?;
        let (word, bit) = (seq as usize / 64, 1 << (seq % 64));
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        let new = words[word] & bit == 0;
        words[word] |= bit;
        Some(new)
    }

    /// Whether such a packet can exist.
    pub(super) fn knows(&self, (flow, seq): (u32, u32)) -> bool {
        (flow as usize) < self.0.len() && seq < MOST_PACKETS
    }

    /// Removes a packet.
    pub(super) fn remove(&mut self, (flow, seq): (u32, u32)) {
        if let Some(word) = self.0.get_mut(flow as usize).and_then(|words| words.get_mut(seq as usize / 64)) {
            *word &= !(1 << (seq % 64));
        }
    }

    /// Whether the set contains a packet.
    pub(super) fn has(&self, (flow, seq): (u32, u32)) -> bool {
        self.0
            .get(flow as usize)
            .and_then(|words| words.get(seq as usize / 64))
            .is_some_and(|w| w >> (seq % 64) & 1 == 1)
    }
}
