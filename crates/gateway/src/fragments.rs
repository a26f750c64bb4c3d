//! Virtual reassembly: what was decided about a packet's first fragment holds for the others, if they fit it.
//!
//! Only the first fragment shows ports, which translation, services and ACLs need. It is decided about as the whole packet would be, and leaves a record;
//! the others go by the record. Nothing is held back, and no payload is kept. What passes of a packet never overlaps (RFC 5722), so that what a receiver makes
//! of it has the header that was judged.
//!
//! A core has records of its own: the pipeline gives all fragments between two addresses to one core. Records of tenants' packets and of packets from the
//! Internet are apart, and the records of one source share few places: a source that sends many first fragments loses its own.

use std::hash::BuildHasher as _;
use std::net::IpAddr;

use bifrost_nic::{Fragment, L3, Parsed, Stretches};
use foldhash::fast::FixedState;

use crate::DropReason;
use crate::decision::Plan;
use crate::nat::INTERNET;

/// Sets of records of each side, and records of a set.
const SETS: usize = 64;
const WAYS: usize = 16;
/// How long a record holds, ns. The pieces of a packet leave together; 5 s are what 64 KB take at 100 kbit/s. Receivers wait longer
/// (RFC 791: 15 s, RFC 8200: 60 s).
const LIFETIME_NS: u64 = 5_000_000_000;

/// Packets in pieces that a core knows.
#[derive(Debug)]
pub(crate) struct Fragments {
    /// Of tenants, then of the Internet's side; a set has room only once something was in it.
    sets: [Box<[Vec<Record>]>; 2],
    hash: FixedState,
}

/// Whose packet a piece belongs to. Everybody chooses identifications, so it has all that tells senders apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    network: u32,
    identification: u32,
    /// 0 in IPv6, whose pieces belong together whatever they say.
    protocol: u8,
    source: IpAddr,
    destination: IpAddr,
}

/// A piece of a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    key: Key,
    /// Where it begins and ends in the packet's payload, bytes.
    start: u16,
    end: u16,
    more: bool,
}

/// What was decided about a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Decided {
    /// Its VPC.
    pub(crate) vni: u32,
    pub(crate) plan: Plan,
}

#[derive(Debug)]
struct Record {
    key: Key,
    decided: Decided,
    /// Bytes that the packet's payload has at least.
    least_len: u16,
    at: u64,
    passed: Stretches,
}

impl Piece {
    pub(crate) fn of(parsed: &Parsed, fragment: Fragment, network: u32) -> Self {
        let protocol = if parsed.kind == L3::V6 { 0 } else { parsed.protocol };
        let Fragment { identification, offset, more } = fragment;
        let key = Key { network, identification, protocol, source: parsed.src_ip, destination: parsed.dst_ip };
        // Both fit: the parser has seen to it.
        let end = offset.saturating_add((parsed.end - u32::from(parsed.l4)) as u16);
        Piece { key, start: offset, end, more }
    }
}

impl Fragments {
    pub(crate) fn new(seed: u64) -> Self {
        let sets = || (0..SETS).map(|_| Vec::new()).collect();
        Fragments { sets: [sets(), sets()], hash: FixedState::with_seed(seed) }
    }

    /// A first piece passes: the others may follow. The same identification again is a new packet: pieces get lost, and identifications are few.
    pub(crate) fn begin(&mut self, now: u64, piece: &Piece, decided: Decided, least_len: u16) {
        let set = self.set(&piece.key);
        set.retain(|record| record.key != piece.key && record.holds(now));
        if set.len() >= WAYS {
            // The oldest.
            set.remove(0);
        }
        let passed = Stretches::first(piece.end);
        set.push(Record { key: piece.key, decided, least_len, at: now, passed });
    }

    /// What was decided about the packet of a later piece; `None`: its first one was not seen, or nothing had to be kept.
    ///
    /// # Errors
    /// It does not fit what has passed of its packet.
    pub(crate) fn follow(&mut self, now: u64, piece: &Piece) -> Result<Option<Decided>, DropReason> {
        let set = self.set(&piece.key);
        let Some(place) = set.iter().position(|record| record.key == piece.key && record.holds(now)) else {
            return Ok(None);
        };
        let record = &mut set[place];
        let mut passed = record.passed;
        // The end is too near for what the first piece says is in the packet.
        let too_short = !piece.more && piece.end < record.least_len;
        if !passed.add(piece.start, piece.end, piece.more) || too_short {
            return Err(DropReason::FragmentMismatch);
        }
        record.passed = passed;
        let decided = record.decided;
        if passed.is_complete() {
            set.remove(place);
        }
        Ok(Some(decided))
    }

    fn set(&mut self, key: &Key) -> &mut Vec<Record> {
        let number = self.hash.hash_one((key.network, key.source)) as usize % SETS;
        &mut self.sets[usize::from(key.network == INTERNET)][number]
    }
}

impl Record {
    fn holds(&self, now: u64) -> bool {
        now.saturating_sub(self.at) < LIFETIME_NS
    }
}
