//! Virtual reassembly: later fragments of a packet pass if its first fragment passed and they fit it.
//!
//! Only the first fragment has the ports. It is judged as the whole packet would be, and creates a record; later
//! fragments are judged by the record. Nothing is buffered. The fragments of a packet that pass never overlap
//! (RFC 5722), so the packet that a receiver reassembles always has the header that was judged.
//!
//! Each port has its own records for each direction, so no guest takes records from another. If all of them are in
//! use, the vNIC with the most records loses its oldest: one sender cannot evict the others.

use std::net::IpAddr;

use bifrost_nic::{Fragment, L3, Parsed, Stretches};
use bifrost_wire::Mac;

use crate::drop_reason::DropReason;
use crate::ids::{Direction, PortId};
use crate::mutation::mutated;

/// Records per port and direction.
const RECORDS: usize = 64;
/// Lifetime of a record, ns. The fragments of a packet are sent together; 64 KB take 5 s at 100 kbit/s. Receivers
/// wait longer (RFC 791: 15 s, RFC 8200: 60 s), so no fragment passes that a receiver would no longer reassemble.
const LIFETIME_NS: u64 = 5_000_000_000;

/// The fragment records of one switch.
#[derive(Debug, Default)]
pub(crate) struct Fragments {
    /// Indexed by port number, then by direction.
    ports: Vec<[Records; 2]>,
    counters: FragmentCounters,
    #[cfg(feature = "mutations")]
    pub(crate) mutation: Option<crate::Mutation>,
}

/// Counters of fragmented packets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FragmentCounters {
    /// Records of first fragments created, in total.
    pub created_records: u64,
    /// Records that were evicted before their packet was complete.
    pub evicted_records: u64,
}

impl FragmentCounters {
    /// Every counter by name; names end in their unit.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let Self { created_records, evicted_records } = *self;
        [("fragment_created_records", created_records), ("fragment_evicted_records", evicted_records)].into_iter()
    }
}

/// The current time, and the epoch of the current configuration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moment {
    pub(crate) now_ns: u64,
    pub(crate) epoch: u32,
}

/// A fragment of a packet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    key: Key,
    /// Valid for the first fragment only; in IPv6 the protocol of the others has no meaning.
    protocol: u8,
    /// First and last (exclusive) byte in the packet's payload.
    start: u16,
    end: u16,
    more: bool,
}

/// Identifies the packet that a fragment belongs to. Senders choose identifications freely, so the key includes
/// everything that distinguishes senders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Key {
    identification: u32,
    /// 0 in IPv6, where the protocol is not part of the key (RFC 8200, section 4.5).
    protocol: u8,
    /// Two vNICs may use the same address if no route covers it. For routed packets this is the gateway's address;
    /// their source addresses are covered by routes.
    sender: Mac,
    src: IpAddr,
    dst: IpAddr,
}

/// What the first fragment of a packet determines about the others.
#[derive(Clone, Copy, Debug)]
pub(crate) struct First {
    /// A number that identifies the sending vNIC.
    pub(crate) sender: u64,
    /// Minimum length of the packet's payload, bytes.
    pub(crate) least_len: u16,
}

impl Piece {
    pub(crate) fn of(parsed: &Parsed, fragment: Fragment) -> Self {
        let protocol = if parsed.kind == L3::V6 { 0 } else { parsed.protocol };
        let (src, dst) = (parsed.src_ip, parsed.dst_ip);
        let identification = fragment.identification;
        Piece {
            key: Key { identification, protocol, sender: parsed.src_mac, src, dst },
            protocol: parsed.protocol,
            start: fragment.offset,
            // Both fit in 16 bits: the parser has checked it.
            end: fragment.offset.saturating_add((parsed.end - u32::from(parsed.l4)) as u16),
            more: fragment.more,
        }
    }
}

/// Records of one port and direction, oldest first.
#[derive(Debug, Default)]
struct Records(Vec<Record>);

/// A packet whose first fragment has passed.
#[derive(Clone, Copy, Debug)]
struct Record {
    key: Key,
    protocol: u8,
    first: First,
    born: Born,
    seen: Stretches,
}

#[derive(Clone, Copy, Debug)]
struct Born {
    at_ns: u64,
    epoch: u32,
}

impl Fragments {
    pub(crate) fn counters(&self) -> &FragmentCounters {
        &self.counters
    }

    /// Forgets all fragments from and to a port.
    pub(crate) fn forget_port(&mut self, port: PortId) {
        if let Some(records) = self.ports.get_mut(port.place()) {
            *records = Default::default();
        }
    }

    /// Checks that a first fragment can begin a packet: there must be no record of another protocol with the same
    /// key, because the fragments could be mixed up. The same identification with the same protocol is a new packet,
    /// even if the old one is not complete: some fragments were lost, and there are few identifications.
    pub(crate) fn check_first(
        &self,
        (port, direction): (PortId, Direction),
        piece: &Piece,
        now: Moment,
    ) -> Result<(), DropReason> {
        let known = self.find(port, direction, piece, now).map(|(_, record)| record.protocol);
        let other = known.is_some_and(|protocol| protocol != piece.protocol);
        if other { Err(DropReason::FragmentMismatch) } else { Ok(()) }
    }

    /// Creates a record for a first fragment that passes.
    pub(crate) fn begin(&mut self, (port, direction): (PortId, Direction), piece: &Piece, first: First, now: Moment) {
        let at = port.place();
        if self.ports.len() <= at {
            self.ports.resize_with(at + 1, Default::default);
        }
        let Records(records) = &mut self.ports[at][direction as usize];
        records.retain(|record| record.key != piece.key);
        if records.len() >= RECORDS {
            records.retain(|record| record.holds(now));
        }
        if records.len() >= RECORDS {
            records.remove(victim(records, first.sender));
            self.counters.evicted_records += 1;
        }
        self.counters.created_records += 1;
        let born = Born { at_ns: now.now_ns, epoch: now.epoch };
        let seen = Stretches::first(piece.end);
        records.push(Record { key: piece.key, protocol: piece.protocol, first, born, seen });
    }

    /// Checks whether a later fragment may pass.
    ///
    /// # Errors
    /// [`DropReason::FragmentWithoutFirst`], [`DropReason::FragmentMismatch`].
    pub(crate) fn check_later(
        &self,
        (port, direction): (PortId, Direction),
        piece: &Piece,
        now: Moment,
    ) -> Result<(), DropReason> {
        let (_, record) = self.find(port, direction, piece, now).ok_or(DropReason::FragmentWithoutFirst)?;
        self.after(record, piece).map(|_| ())
    }

    /// The same, and records that the fragment passes.
    pub(crate) fn follow(
        &mut self,
        (port, direction): (PortId, Direction),
        piece: &Piece,
        now: Moment,
    ) -> Result<(), DropReason> {
        if mutated!(self, FragmentWithoutFirst) && self.find(port, direction, piece, now).is_none() {
            return Ok(());
        }
        let (place, record) = self.find(port, direction, piece, now).ok_or(DropReason::FragmentWithoutFirst)?;
        let seen = self.after(record, piece)?;
        let Records(records) = &mut self.ports[port.place()][direction as usize];
        if seen.is_complete() {
            records.remove(place);
        } else {
            records[place].seen = seen;
        }
        Ok(())
    }

    fn find(&self, port: PortId, direction: Direction, piece: &Piece, now: Moment) -> Option<(usize, &Record)> {
        let Records(records) = &self.ports.get(port.place())?[direction as usize];
        let is_of = |record: &Record| {
            record.key == piece.key
                || (mutated!(self, FragmentOfAnybody) && record.key.identification == piece.key.identification)
        };
        records.iter().enumerate().find(|(_, record)| is_of(record) && record.holds(now))
    }

    /// The received ranges of a packet, including this later fragment.
    fn after(&self, record: &Record, piece: &Piece) -> Result<Stretches, DropReason> {
        if mutated!(self, FragmentOverlap) {
            return Ok(record.seen);
        }
        let mut seen = record.seen;
        let fits = seen.add(piece.start, piece.end, piece.more);
        // The packet ends before the minimum length that its first fragment implies.
        let too_short = !piece.more && piece.end < record.first.least_len;
        if fits && !too_short { Ok(seen) } else { Err(DropReason::FragmentMismatch) }
    }
}

impl Record {
    fn holds(&self, now: Moment) -> bool {
        self.born.epoch == now.epoch && now.now_ns.saturating_sub(self.born.at_ns) < LIFETIME_NS
    }
}

/// The record to evict for a new one of `sender`: the oldest of the sender that would then have the most.
fn victim(records: &[Record], sender: u64) -> usize {
    let mut most = (0, 0);
    for (place, record) in records.iter().enumerate() {
        let of = record.first.sender;
        let count = records.iter().filter(|r| r.first.sender == of).count() + usize::from(of == sender);
        if count > most.1 {
            most = (place, count);
        }
    }
    most.0
}

#[cfg(test)]
mod tests {
    use super::*;

    const HERE: (PortId, Direction) = (PortId(3), Direction::Ingress);
    const NOW: Moment = Moment { now_ns: 1_000_000_000_000, epoch: 1 };

    fn piece(sender: u8, identification: u32, start: u16, end: u16, more: bool) -> Piece {
        let src = IpAddr::from([10, 0, 0, sender]);
        let dst = IpAddr::from([10, 0, 0, 9]);
        let key = Key { identification, protocol: 17, sender: Mac([2, 0, 0, 0, 0, sender]), src, dst };
        Piece { key, protocol: 17, start, end, more }
    }

    fn first(sender: u8) -> First {
        First { sender: u64::from(sender), least_len: 100 }
    }

    fn begun() -> Fragments {
        let mut fragments = Fragments::default();
        fragments.begin(HERE, &piece(1, 7, 0, 800, true), first(1), NOW);
        fragments
    }

    const UNKNOWN: Result<(), DropReason> = Err(DropReason::FragmentWithoutFirst);
    const MISMATCH: Result<(), DropReason> = Err(DropReason::FragmentMismatch);

    #[test]
    fn only_fragments_of_the_same_packet_pass() {
        let mut fragments = begun();
        let good = piece(1, 7, 800, 1000, false);
        let mut cases = vec![
            ("another identification", HERE, piece(1, 8, 800, 1000, false)),
            ("another sender", HERE, piece(2, 7, 800, 1000, false)),
            ("another port", (PortId(2), Direction::Ingress), good),
            ("the other direction", (PortId(3), Direction::Egress), good),
        ];
        let mut other = good;
        other.key.dst = IpAddr::from([10, 0, 0, 8]);
        cases.push(("another destination", HERE, other));
        other = good;
        other.key.sender = Mac([2, 0, 0, 0, 0, 5]);
        cases.push(("another vNIC with the same address", HERE, other));
        other = good;
        other.key.protocol = 6;
        cases.push(("another protocol", HERE, other));
        for (name, at, piece) in cases {
            assert_eq!(fragments.check_later(at, &piece, NOW), UNKNOWN, "{name}");
            assert_eq!(fragments.follow(at, &piece, NOW), UNKNOWN, "{name}");
        }
        assert_eq!(fragments.check_later(HERE, &good, NOW), Ok(()));
        assert_eq!(fragments.follow(HERE, &good, NOW), Ok(()));
        assert_eq!(fragments.follow(HERE, &good, NOW), UNKNOWN, "the packet is complete");
    }

    #[test]
    fn records_expire_with_time_and_configuration() {
        let late = Moment { now_ns: NOW.now_ns + LIFETIME_NS, ..NOW };
        let just = Moment { now_ns: late.now_ns - 1, ..NOW };
        let other = Moment { epoch: 2, ..NOW };
        let mut fragments = begun();
        for (now, expected) in [(late, UNKNOWN), (other, UNKNOWN), (just, Ok(()))] {
            assert_eq!(fragments.check_later(HERE, &piece(1, 7, 800, 1000, false), now), expected);
        }
        fragments.forget_port(HERE.0);
        assert_eq!(fragments.check_later(HERE, &piece(1, 7, 800, 1000, false), NOW), UNKNOWN);
    }

    #[test]
    fn fragments_that_do_not_fit_are_rejected() {
        // Earlier fragments, then the fragment under test: start, end, more.
        type Given = (u16, u16, bool);
        let cases: &[(&str, &[Given], Given, bool)] = &[
            ("the next", &[], (800, 1600, true), true),
            ("with a gap", &[], (1600, 2400, true), true),
            ("into a gap", &[(1600, 2400, true)], (800, 1600, true), true),
            ("over the first", &[], (8, 16, true), false),
            ("over its end", &[], (792, 1600, true), false),
            ("twice", &[(800, 1600, true)], (800, 1600, true), false),
            ("over the beginning of a later one", &[(1600, 2400, true)], (800, 1608, true), false),
            ("around a later one", &[(1600, 2400, true)], (800, 3200, true), false),
            ("behind the last", &[(1600, 2404, false)], (2408, 2416, true), false),
            ("beyond the last, from a gap", &[(1600, 2404, false)], (800, 2408, true), false),
            ("a second last", &[(1600, 2404, false)], (800, 1600, false), false),
            ("a last one before others", &[(1600, 2400, true)], (800, 1600, false), false),
            ("into the last gap", &[(1600, 2404, false)], (800, 1600, true), true),
        ];
        for (name, before, (start, end, more), fits) in cases {
            let mut fragments = begun();
            for &(start, end, more) in *before {
                assert_eq!(fragments.follow(HERE, &piece(1, 7, start, end, more), NOW), Ok(()), "{name}");
            }
            let piece = piece(1, 7, *start, *end, *more);
            let expected = if *fits { Ok(()) } else { MISMATCH };
            assert_eq!(fragments.check_later(HERE, &piece, NOW), expected, "{name}");
            assert_eq!(fragments.follow(HERE, &piece, NOW), expected, "{name}");
        }
        // A UDP datagram whose length field is larger than the packet.
        let mut fragments = Fragments::default();
        let longer = First { sender: 1, least_len: 1000 };
        fragments.begin(HERE, &piece(1, 7, 0, 800, true), longer, NOW);
        assert_eq!(fragments.follow(HERE, &piece(1, 7, 800, 999, false), NOW), MISMATCH);
        assert_eq!(fragments.follow(HERE, &piece(1, 7, 800, 1000, false), NOW), Ok(()));
    }

    #[test]
    fn gaps_are_bounded() {
        let mut fragments = begun();
        let far = |n: u16| piece(1, 7, 800 + n * 16, 808 + n * 16, true);
        for n in 1..Stretches::MOST as u16 {
            assert_eq!(fragments.follow(HERE, &far(n), NOW), Ok(()));
        }
        assert_eq!(fragments.follow(HERE, &far(20), NOW), MISMATCH);
        // Closing one gap makes room for another.
        assert_eq!(fragments.follow(HERE, &piece(1, 7, 800, 816, true), NOW), Ok(()));
        assert_eq!(fragments.follow(HERE, &far(20), NOW), Ok(()));
    }

    #[test]
    fn a_reused_identification_begins_a_new_packet() {
        let mut fragments = begun();
        assert_eq!(fragments.follow(HERE, &piece(1, 7, 1600, 2400, true), NOW), Ok(()));
        let again = piece(1, 7, 0, 400, true);
        assert_eq!(fragments.check_first(HERE, &again, NOW), Ok(()));
        fragments.begin(HERE, &again, first(1), NOW);
        assert_eq!(fragments.follow(HERE, &piece(1, 7, 400, 2400, false), NOW), Ok(()));
        // Not with another protocol, where the key does not include it: IPv6.
        let mut fragments = begun();
        assert_eq!(fragments.check_first(HERE, &Piece { protocol: 6, ..again }, NOW), MISMATCH);
        assert_eq!(fragments.counters().evicted_records, 0);
        fragments.begin(HERE, &again, first(1), NOW);
        assert_eq!(fragments.ports[3][1].0.len(), 1);
    }

    #[test]
    fn no_sender_evicts_the_others() {
        let mut fragments = Fragments::default();
        // A few records of senders 2 and 3, then a flood from sender 1.
        for (sender, id) in [(2, 1), (3, 2), (2, 3)] {
            fragments.begin(HERE, &piece(sender, id, 0, 800, true), first(sender), NOW);
        }
        for id in 0..1000 {
            fragments.begin(HERE, &piece(1, 100 + id, 0, 800, true), first(1), NOW);
        }
        let later = |sender, id| piece(sender, id, 800, 1000, false);
        for (sender, id) in [(2, 1), (3, 2), (2, 3), (1, 1099), (1, 1100 - 61)] {
            assert_eq!(fragments.check_later(HERE, &later(sender, id), NOW), Ok(()), "{sender} {id}");
        }
        assert_eq!(fragments.check_later(HERE, &later(1, 1100 - 62), NOW), UNKNOWN, "its own oldest");
        assert_eq!(fragments.counters().evicted_records, 1003 - RECORDS as u64);
        assert_eq!(fragments.counters().created_records, 1003);
        // A new sender evicts from the one with the most records, and expired records go first.
        fragments.begin(HERE, &piece(4, 5, 0, 800, true), first(4), NOW);
        assert_eq!(fragments.check_later(HERE, &later(4, 5), NOW), Ok(()));
        assert_eq!(fragments.check_later(HERE, &later(3, 2), NOW), Ok(()));
        let late = Moment { now_ns: NOW.now_ns + LIFETIME_NS, ..NOW };
        let before = fragments.counters().evicted_records;
        fragments.begin(HERE, &piece(5, 5, 0, 800, true), first(5), late);
        assert_eq!((fragments.counters().evicted_records, fragments.ports[3][1].0.len()), (before, 1));
    }
}
