//! What became of a packet, for those of its flow that come with it: a vector of them is looked up once (Triton paper, section 5.1).
//!
//! The first packet of a flow in a turn goes by a flow record or by the tables, and leaves a note; the others are about the same flow, no
//! larger, and do nothing to sessions that it has not done: they have the same decision. Packets need not lie side by side for
//! that, nor is their order changed. A note is good until time goes on or something about a session changes, whoever's it is, so
//! that it says what records and tables would.

use bifrost_nic::Parsed;
use bifrost_wire::tcp::Flags;

use crate::description::PortId;
use crate::flow::Key;
use crate::from_guest::FromGuest;
use crate::path_mtu::Frame;

/// Flows that have notes at a time, of each direction.
const NOTES: usize = 32;
/// Packets that leave notes after one was read, and of each [`PERIOD`] if none is: traffic of very many flows has no use for them.
const PATIENCE: u16 = 2 * NOTES as u16;
/// A power of two.
const PERIOD: u16 = 1024;

/// Notes about packets of both directions.
#[derive(Debug)]
pub(crate) struct Vectors {
    pub(crate) from_guests: Vector<FromGuest>,
    /// The port that packets from peers are for.
    pub(crate) from_peers: Vector<PortId>,
}

impl Vectors {
    /// No notes. `is_on`: there will be some.
    pub(crate) fn new(is_on: bool) -> Self {
        Vectors { from_guests: Vector::new(FromGuest::Answer, is_on), from_peers: Vector::new(PortId(0), is_on) }
    }

    pub(crate) fn is_on(&self) -> bool {
        self.from_guests.patience > 0
    }

    /// Takes a note of what becomes of a guest's packet, if its flow's others may be like it.
    #[inline(never)]
    pub(crate) fn note_from_guest(
        &mut self,
        generation: u64,
        frame: Frame<'_>,
        key: Option<Key>,
        decision: &FromGuest,
    ) {
        if let FromGuest::Remote { cut: None, .. } | FromGuest::Local { cut: None, .. } = decision {
            self.from_guests.note(generation, frame.parsed, frame.largest_packet(), key, decision);
        }
    }

    /// The same of a peer's packet, which is for that port.
    #[inline(never)]
    pub(crate) fn note_from_peer(&mut self, generation: u64, parsed: &Parsed, key: Option<Key>, port: PortId) {
        self.from_peers.note(generation, parsed, parsed.packet_len(), key, &port);
    }
}

/// Notes about packets of one direction. `T`: what is done with them.
#[derive(Debug)]
pub(crate) struct Vector<T> {
    notes: Box<[Note<T>; NOTES]>,
    /// Packets that nobody followed leave a note as long as this is less than `patience`; it goes down with each of them, and round.
    left: u16,
    patience: u16,
}

/// What becomes of a flow's packets.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
struct Note<T> {
    /// When it was taken; 0: never.
    generation: u64,
    flow_hash: u32,
    /// Bytes of the largest IP packet that the frame becomes.
    largest: u32,
    key: Key,
    what: T,
}

impl<T: Copy> Vector<T> {
    /// `what`: to be where there is no note.
    fn new(what: T, is_on: bool) -> Self {
        let nothing = Note { generation: 0, flow_hash: 0, largest: 0, key: Key::NONE, what };
        Vector { notes: Box::new([nothing; NOTES]), left: PATIENCE, patience: if is_on { PATIENCE } else { 0 } }
    }

    /// Whether there is a note about a packet, most probably.
    #[inline(always)]
    pub(crate) fn may_know(&self, generation: u64, parsed: &Parsed) -> bool {
        let note = &self.notes[place(parsed)];
        note.generation == generation && note.flow_hash == parsed.flow_hash
    }

    /// What became of a packet of the same flow that was at least as large. `largest`: bytes of the largest IP packet that the frame becomes.
    /// Only if there [may](Self::may_know) be a note.
    #[inline(always)]
    pub(crate) fn find(&mut self, parsed: &Parsed, largest: usize, key: Option<Key>) -> Option<&T> {
        let note = &self.notes[place(parsed)];
        if largest > note.largest as usize || !is_plain(parsed) || !key?.is(&note.key) {
            return None;
        }
        self.left = PATIENCE;
        Some(&note.what)
    }

    /// Whether a packet that nobody followed is to leave a note: notes are read, or this one is to show whether they are.
    #[inline(always)]
    pub(crate) fn is_wanted(&mut self) -> bool {
        self.left = self.left.wrapping_sub(1) % PERIOD;
        self.left < self.patience
    }

    #[inline(always)]
    fn note(&mut self, generation: u64, parsed: &Parsed, largest: usize, key: Option<Key>, what: &T) {
        if let Some(key) = key.filter(|_| is_plain(parsed)) {
            let (flow_hash, largest) = (parsed.flow_hash, largest as u32);
            self.notes[place(parsed)] = Note { generation, flow_hash, largest, key, what: *what };
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
