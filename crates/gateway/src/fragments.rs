//! Virtual reassembly: the decision about a packet's first fragment applies to the others, if they fit it.
//!
//! Only the first fragment contains ports, which translation, services and ACLs need. It is processed as the whole
//! packet would be, and leaves a record; the others follow the record. No fragment is held back, and no payload is
//! stored. Fragments that pass never overlap (RFC 5722), so the packet that a receiver reassembles has the header that
//! was checked.
//!
//! A core has its own records: the pipeline gives all fragments between two addresses to one core. Records of tenants'
//! packets and of packets from the Internet are separate, and all records of one source share a few entries: a source
//! that sends many first fragments evicts only its own.

use std::hash::BuildHasher as _;
use std::net::IpAddr;

use bifrost_nic::{Fragment, L3, Parsed, Stretches};
use foldhash::fast::FixedState;

use crate::DropReason;
use crate::decision::Plan;
use crate::nat::INTERNET;

/// Sets of records per side, and records per set.
const SETS: usize = 64;
const WAYS: usize = 16;
/// How long a record is valid, ns. The fragments of a packet leave together; 5 s are what 64 KB take at 100 kbit/s.
/// Receivers wait longer (RFC 791: 15 s, RFC 8200: 60 s).
const LIFETIME_NS: u64 = 5_000_000_000;

/// Fragmented packets that a core knows.
#[derive(Debug)]
pub(crate) struct Fragments {
    /// Of tenants, then of the Internet's side; a set is allocated when it is first used.
    sets: [Box<[Vec<Record>]>; 2],
    hash: FixedState,
}

/// Identifies the packet of a fragment. Senders choose identifications freely, so the key has everything that
/// distinguishes senders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    network: u32,
    identification: u32,
    /// 0 in IPv6, whose fragments belong together whatever their next header.
    protocol: u8,
    source: IpAddr,
    destination: IpAddr,
}

/// A fragment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    key: Key,
    /// Its start and end in the packet's payload, bytes.
    start: u16,
    end: u16,
    more: bool,
}

/// The decision about a packet.
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
    /// Minimum length of the packet's payload, bytes.
    least_len: u16,
    at: u64,
    passed: Stretches,
}

impl Piece {
    pub(crate) fn of(parsed: &Parsed, fragment: Fragment, network: u32) -> Self {
        let protocol = if parsed.kind == L3::V6 { 0 } else { parsed.protocol };
        let Fragment { identification, offset, more } = fragment;
        let key = Key { network, identification, protocol, source: parsed.src_ip, destination: parsed.dst_ip };
        // Both fit: the parser has checked that.
        let end = offset.saturating_add((parsed.end - u32::from(parsed.l4)) as u16);
        Piece { key, start: offset, end, more }
    }
}

impl Fragments {
    pub(crate) fn new(seed: u64) -> Self {
        let sets = || (0..SETS).map(|_| Vec::new()).collect();
        Fragments { sets: [sets(), sets()], hash: FixedState::with_seed(seed) }
    }

    /// A first fragment passes: the others may follow. A repeated identification means a new packet: fragments get
    /// lost, and identifications are few.
    pub(crate) fn begin(&mut self, now: u64, piece: &Piece, decided: Decided, least_len: u16) {
        let set = self.set(&piece.key);
        set.retain(|record| record.key != piece.key && record.holds(now));
        if set.len() >= WAYS {
            // Evict the oldest.
            set.remove(0);
        }
        let passed = Stretches::first(piece.end);
        set.push(Record { key: piece.key, decided, least_len, at: now, passed });
    }

    /// The decision about the packet of a later fragment; `None` if its first one was not seen, or needed no record.
    ///
    /// # Errors
    /// It does not fit the earlier fragments of its packet.
    pub(crate) fn follow(&mut self, now: u64, piece: &Piece) -> Result<Option<Decided>, DropReason> {
        let set = self.set(&piece.key);
        let Some(index) = set.iter().position(|record| record.key == piece.key && record.holds(now)) else {
            return Ok(None);
        };
        let record = &mut set[index];
        let mut passed = record.passed;
        // The end is before the minimum length that the first fragment announced.
        let too_short = !piece.more && piece.end < record.least_len;
        if !passed.add(piece.start, piece.end, piece.more) || too_short {
            return Err(DropReason::FragmentMismatch);
        }
        record.passed = passed;
        let decided = record.decided;
        if passed.is_complete() {
            set.remove(index);
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
