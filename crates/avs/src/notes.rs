//! Notes: the verdict on a packet, reused for packets of the same flow in the same turn, so that a vector of packets
//! is looked up once (Triton paper, section 5.1).
//!
//! The first packet of a flow in a turn uses a flow record or the tables, and leaves a note. Later packets of the
//! flow that are no larger, and have no effect on sessions that the first one did not have, get the same verdict.
//! They need not be adjacent, and are not reordered. A note is valid until time advances or any session changes, so
//! it always agrees with the records and the tables.

use bifrost_nic::Parsed;
use bifrost_wire::tcp::Flags;

use crate::drop_reason::DropReason;
use crate::flow::Key;
use crate::verdict::Verdict;

/// Number of notes per direction.
const NOTES: usize = 32;
/// Packets that leave notes after a note was last used, and in each [`PERIOD`] if none is used: traffic with very
/// many flows does not benefit from notes.
const PATIENCE: u16 = 2 * NOTES as u16;
/// In packets; a power of two.
const PERIOD: u16 = 1024;

/// The notes of both directions.
#[derive(Debug)]
pub(crate) struct Notes {
    pub(crate) from_guests: Direction,
    pub(crate) from_peers: Direction,
}

impl Notes {
    /// Creates empty notes. `is_on`: whether notes will be taken.
    pub(crate) fn new(is_on: bool) -> Self {
        Notes { from_guests: Direction::new(is_on), from_peers: Direction::new(is_on) }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.from_guests.patience > 0
    }
}

/// The notes of one direction.
#[derive(Debug)]
pub(crate) struct Direction {
    notes: Box<[Note; NOTES]>,
    /// A packet without a note leaves one while this is below `patience`. Each such packet decrements it, modulo
    /// [`PERIOD`].
    left: u16,
    patience: u16,
}

/// Identifies a note until the next one is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoteId(usize);

/// The verdict on a flow's packets.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Note {
    /// The generation in which it was taken; 0: never.
    generation: u64,
    flow_hash: u32,
    /// Largest IP packet that the frame becomes, bytes.
    largest: u32,
    key: Key,
    verdict: Verdict,
}

impl Direction {
    fn new(is_on: bool) -> Self {
        let verdict = Verdict::drop(DropReason::UnknownPort);
        let nothing = Note { generation: 0, flow_hash: 0, largest: 0, key: Key::NONE, verdict };
        Direction { notes: Box::new([nothing; NOTES]), left: PATIENCE, patience: if is_on { PATIENCE } else { 0 } }
    }

    /// Whether there is probably a note about a packet.
    #[inline(always)]
    pub(crate) fn may_know(&self, generation: u64, parsed: &Parsed) -> bool {
        let note = &self.notes[place(parsed)];
        note.generation == generation && note.flow_hash == parsed.flow_hash
    }

    /// The note of the packet's flow, if that was taken for a packet at least as large. `largest`: largest IP packet
    /// that the frame becomes, bytes. Call this only if there [may](Self::may_know) be a note.
    #[inline(always)]
    pub(crate) fn find(&mut self, parsed: &Parsed, largest: usize, key: Option<Key>) -> Option<NoteId> {
        let at = place(parsed);
        let note = &self.notes[at];
        if largest > note.largest as usize || !is_plain(parsed) || !key?.is(&note.key) {
            return None;
        }
        self.left = PATIENCE;
        Some(NoteId(at))
    }

    /// The verdict in a note.
    #[inline(always)]
    pub(crate) fn verdict(&self, NoteId(at): NoteId) -> &Verdict {
        &self.notes[at % NOTES].verdict
    }

    /// Whether a packet without a note should leave one: because notes are in use, or to probe whether they would be.
    #[inline(always)]
    pub(crate) fn is_wanted(&mut self) -> bool {
        self.left = self.left.wrapping_sub(1) % PERIOD;
        self.left < self.patience
    }

    /// Takes a note of a verdict, if later packets of the flow can reuse it.
    #[inline(never)]
    pub(crate) fn take(
        &mut self,
        generation: u64,
        parsed: &Parsed,
        largest: usize,
        key: Option<Key>,
        verdict: &Verdict,
    ) {
        let is_repeatable = verdict.passes() && verdict.fragment_to.is_none() && is_plain(parsed);
        if let Some(key) = key.filter(|_| is_repeatable) {
            let (flow_hash, largest) = (parsed.flow_hash, largest as u32);
            self.notes[place(parsed)] = Note { generation, flow_hash, largest, key, verdict: *verdict };
        }
    }
}

#[inline(always)]
fn place(parsed: &Parsed) -> usize {
    parsed.flow_hash as usize % NOTES
}

/// Whether a packet has no special effect on its session: it neither begins nor ends a connection.
#[inline(always)]
fn is_plain(parsed: &Parsed) -> bool {
    const LOOKED_AT: Flags = Flags::SYN.with(Flags::FIN).with(Flags::RST).with(Flags::ACK);
    parsed.tcp.is_none_or(|tcp| tcp.flags.0 & LOOKED_AT.0 == Flags::ACK.0)
}
