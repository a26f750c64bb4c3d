//! A set of packets of light guests' flows.

use crate::flows::peek;

/// Packets by flow and number.
#[derive(Debug, Default)]
pub(super) struct Seen(Vec<Vec<u64>>);

impl Seen {
    /// Adds the packet of a frame; false if it was there, `None` if it is no light guest's.
    pub(super) fn add(&mut self, frame: &[u8]) -> Option<bool> {
        let (flow, seq) = peek(frame)?;
        let (flow, word, bit) = (flow as usize, seq as usize / 64, 1 << (seq % 64));
        if self.0.len() <= flow {
            self.0.resize(flow + 1, Vec::new());
        }
        let words = &mut self.0[flow];
        if words.len() <= word {
            words.resize(word + 1, 0);
        }
        let new = words[word] & bit == 0;
        words[word] |= bit;
        Some(new)
    }

    /// Takes a packet out.
    pub(super) fn remove(&mut self, (flow, seq): (u32, u32)) {
        if let Some(word) = self.0.get_mut(flow as usize).and_then(|words| words.get_mut(seq as usize / 64)) {
            *word &= !(1 << (seq % 64));
        }
    }

    /// Whether a packet is there.
    pub(super) fn has(&self, (flow, seq): (u32, u32)) -> bool {
        self.0
            .get(flow as usize)
            .and_then(|words| words.get(seq as usize / 64))
            .is_some_and(|w| w >> (seq % 64) & 1 == 1)
    }
}
