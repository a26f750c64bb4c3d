//! What became of a packet, for those of its flow that come with it: a vector of them is looked up once (Triton paper, section 5.1).
//!
//! The first packet of a flow in a turn goes by a flow record or by the tables, and leaves a note; the others are about the same flow, no
//! larger, and do nothing to sessions that it has not done: they have the same verdict. Packets need not lie side by side for
//! that, nor is their order changed. A note is good until time goes on or something about a session changes, whichever session it is, so
//! that it says what records and tables would.

use bifrost_nic::Parsed;
use bifrost_wire::tcp::Flags;

use crate::drop_reason::DropReason;
use crate::flow::Key;
use crate::verdict::Verdict;

/// Flows that have notes at a time, of each direction.
const NOTES: usize = 32;
/// Packets that leave notes after one was read, and of each [`PERIOD`] if none is: traffic of very many flows has no use for them.
const PATIENCE: u16 = 2 * NOTES as u16;
/// A power of two.
const PERIOD: u16 = 1024;

/// Notes about packets of both directions.
#[derive(Debug)]
pub(crate) struct Notes {
    pub(crate) from_guests: Direction,
    pub(crate) from_peers: Direction,
}

impl Notes {
    /// No notes. `is_on`: there will be some.
    pub(crate) fn new(is_on: bool) -> Self {
        Notes { from_guests: Direction::new(is_on), from_peers: Direction::new(is_on) }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.from_guests.patience > 0
    }
}

/// Notes about packets of one direction.
#[derive(Debug)]
pub(crate) struct Direction {
    notes: Box<[Note; NOTES]>,
    /// Packets that nobody followed leave a note as long as this is less than `patience`; it goes down with each of them, and round.
    left: u16,
    patience: u16,
}

/// Names a note, until the next one is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoteId(usize);

/// What becomes of a flow's packets.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Note {
    /// When it was taken; 0: never.
    generation: u64,
    flow_hash: u32,
    /// Bytes of the largest IP packet that the frame becomes.
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

    /// Whether there is a note about a packet, most probably.
    #[inline(always)]
    pub(crate) fn may_know(&self, generation: u64, parsed: &Parsed) -> bool {
        let note = &self.notes[place(parsed)];
        note.generation == generation && note.flow_hash == parsed.flow_hash
    }

    /// The note about a packet of the same flow that was at least as large. `largest`: bytes of the largest IP packet that the frame
    /// becomes. Only if there [may](Self::may_know) be a note.
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

    /// What a note says.
    #[inline(always)]
    pub(crate) fn verdict(&self, NoteId(at): NoteId) -> &Verdict {
        &self.notes[at % NOTES].verdict
    }

    /// Whether a packet that nobody followed is to leave a note: notes are read, or this one is to show whether they are.
    #[inline(always)]
    pub(crate) fn is_wanted(&mut self) -> bool {
        self.left = self.left.wrapping_sub(1) % PERIOD;
        self.left < self.patience
    }

    /// Takes a note of what becomes of a packet, if others of its flow may be like it.
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

/// Whether a packet does to its session what each of its kind does: no beginning and no end of a connection.
#[inline(always)]
fn is_plain(parsed: &Parsed) -> bool {
    const LOOKED_AT: Flags = Flags::SYN.with(Flags::FIN).with(Flags::RST).with(Flags::ACK);
    parsed.tcp.is_none_or(|tcp| tcp.flags.0 & LOOKED_AT.0 == Flags::ACK.0)
}
