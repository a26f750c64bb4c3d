//! Handover of NAT sessions to another pod, which replaces this one.
//!
//! Both pods forward for a while, so sessions that start in either are copied to the other. A repeated copy of a
//! session updates only its marks and the time of its last packet.
//!
//! **Format.** The first byte is the version, 1. Then sessions, all numbers big endian:
//!
//! | bytes | content |
//! |---:|---|
//! | 1 | bit 0: the flow inside is IPv6; bit 1: the flow outside is |
//! | 1 | protocol |
//! | 1 | marks: 1 a packet came from the outside, 2 FIN from the inside, 4 FIN from the outside, 8 RST |
//! | 4 | time since the last packet, s |
//! | 4 | VNI of the inside |
//! | 4 | network of the outside: a VNI, or `0xffffffff`, the Internet |
//! | 4 × (4 or 16, and 2) | address and port of source and destination: inside, then outside |

use std::net::IpAddr;

use bifrost_wire::protocol::{ICMP, ICMPV6, TCP, UDP};

use crate::nat::{Nat, lock};
use crate::rewrite::End;
use crate::session::{self, Flow, MARKS};
use crate::shared::Side;

const VERSION: u8 = 1;
const INSIDE_IS_V6: u8 = 1;
const OUTSIDE_IS_V6: u8 = 2;
/// VNIs have 24 bits.
const VNI_MAX: u32 = 0xff_ffff;
/// Number of sessions after which an export ends; the next one continues there. They take less than a megabyte.
const PAGE: usize = 8192;
/// Number of sessions that are read under one lock. Meanwhile no new sessions start in their part.
const UNDER_LOCK: usize = 256;

/// Exported sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Export {
    /// The sessions, in the format that [`Nat::import`] reads.
    pub bytes: Vec<u8>,
    /// Their number.
    pub sessions: usize,
    /// Where the next export continues; `None`: there are no more sessions.
    pub next: Option<u64>,
}

/// The result of an import.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Imported {
    /// Number of sessions that were added.
    pub taken: usize,
    /// Number of sessions that existed already.
    pub known: usize,
    /// Number of sessions that cannot be added: another session uses their port, no pool has their address, or there is
    /// no room.
    pub refused: usize,
}

/// The bytes are not exported sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadSessions;

/// The exported fields of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Record {
    inside: Flow,
    outside: Flow,
    idle_s: u32,
    marks: u8,
}

impl Nat {
    /// Exports sessions that started here at `since_s` (whole seconds of `now`) or later; 0: all sessions. Continues at
    /// `from`, the end of an earlier export. Sessions that start or end meanwhile may be missing; all others are
    /// included. Reads 256 sessions at a time under a lock.
    pub fn export(&self, now: u64, since_s: u32, from: Option<u64>) -> Export {
        let now_s = seconds(now);
        let (mut number, mut below) = from.map_or((0, usize::MAX), |at| ((at >> 32) as usize, at as u32 as usize));
        let mut export = Export { bytes: vec![VERSION], ..Export::default() };
        while let Some(part) = self.parts.get(number) {
            if export.sessions >= PAGE {
                export.next = Some((number as u64) << 32 | below.min(u32::MAX as usize) as u64);
                return export;
            }
            let part = lock(part);
            // In descending order: when the last session moves to the position of one that ended, it is exported twice
            // rather than not at all.
            let end = below.min(part.sessions.len());
            let first = end.saturating_sub(UNDER_LOCK);
            for entry in part.sessions[first..end].iter().rev().filter(|entry| entry.began_s >= since_s) {
                let (seen_s, marks) = self.noted(*entry);
                let inside = self.shared.flow_at(entry.inside);
                let Some(outside) = self.shared.look(Side::Inside, &inside) else { continue };
                if !session::is_over(inside.protocol, marks, seen_s, now_s) {
                    let idle_s = now_s.saturating_sub(seen_s);
                    Record { inside, outside, idle_s, marks }.write(&mut export.bytes);
                    export.sessions += 1;
                }
            }
            (number, below) = if first == 0 { (number + 1, usize::MAX) } else { (number, first) };
        }
        export
    }

    /// Adds sessions of another pod, with their addresses and ports.
    ///
    /// # Errors
    /// The bytes were not produced by [`Nat::export`]. Sessions before the error are added.
    pub fn import(&self, now: u64, bytes: &[u8]) -> Result<Imported, BadSessions> {
        let mut imported = Imported::default();
        let mut rest = bytes.strip_prefix(&[VERSION]).ok_or(BadSessions)?;
        while !rest.is_empty() {
            let record = Record::read(&mut rest).ok_or(BadSessions)?;
            *match self.take_over(seconds(now), &record) {
                Some(true) => &mut imported.taken,
                Some(false) => &mut imported.known,
                None => &mut imported.refused,
            } += 1;
        }
        Ok(imported)
    }

    /// Adds a session. Returns whether it is new here; `None`: it cannot be added.
    fn take_over(&self, now_s: u32, record: &Record) -> Option<bool> {
        let Record { inside, outside, idle_s, marks } = record;
        let End { address, port } = outside.source;
        let pools = &self.config.pools;
        let is_ours = pools.iter().any(|(network, all)| *network == outside.network && all.contains(&address));
        if !is_ours || !record.is_sound() {
            return None;
        }
        // A session starts under the lock of its flow's part, and uses a port of the part in whose block the port is.
        let (here, there) = (self.part_of(inside), self.part_of_port(port)?);
        let mut locks = [here.min(there), here.max(there)].map(Some);
        if here == there {
            locks[1] = None;
        }
        let mut locks = locks.map(|number| number.map(|number| lock(&self.parts[number])));
        let part = locks[usize::from(here > there)].as_deref_mut()?;
        let seen_s = now_s.saturating_sub(*idle_s);
        match self.shared.find(Side::Inside, inside, seen_s, *marks) {
            Some(known) if known == *outside => return Some(false),
            Some(_) => return None,
            None => {}
        }
        if self.shared.look(Side::Outside, &outside.reversed()).is_some() {
            return None;
        }
        self.clear(part, inside.network, now_s);
        self.start(part, inside, outside, (seen_s, *marks), 0).ok()?;
        Some(true)
    }
}

impl Record {
    /// Whether a pod can have such a session.
    fn is_sound(&self) -> bool {
        let Record { inside, outside, .. } = self;
        let fits = |address: IpAddr| match inside.protocol {
            TCP | UDP => true,
            ICMP => address.is_ipv4(),
            ICMPV6 => address.is_ipv6(),
            _ => false,
        };
        inside.network <= VNI_MAX && fits(inside.source.address) && fits(outside.source.address)
    }

    fn write(&self, out: &mut Vec<u8>) {
        let Record { inside, outside, idle_s, marks } = self;
        let bit = |flow: &Flow, bit| if flow.source.address.is_ipv6() { bit } else { 0 };
        out.extend([bit(inside, INSIDE_IS_V6) | bit(outside, OUTSIDE_IS_V6), inside.protocol, *marks]);
        [*idle_s, inside.network, outside.network].iter().for_each(|number| out.extend(number.to_be_bytes()));
        for End { address, port } in [inside.source, inside.destination, outside.source, outside.destination] {
            match address {
                IpAddr::V4(address) => out.extend(address.octets()),
                IpAddr::V6(address) => out.extend(address.octets()),
            }
            out.extend(port.to_be_bytes());
        }
    }

    /// Parses the first record and removes it from `from`; `None`: it is invalid.
    fn read(from: &mut &[u8]) -> Option<Self> {
        let [kind, protocol, marks] = take(from)?;
        if kind & !(INSIDE_IS_V6 | OUTSIDE_IS_V6) != 0 || marks & !MARKS != 0 {
            return None;
        }
        let mut number = || take(from).map(u32::from_be_bytes);
        let (idle_s, vni, network) = (number()?, number()?, number()?);
        let mut flow = |network, is_v6| {
            let mut end = || {
                let address = if is_v6 { IpAddr::from(take::<16>(from)?) } else { IpAddr::from(take::<4>(from)?) };
                Some(End { address, port: u16::from_be_bytes(take(from)?) })
            };
            let (source, destination) = (end()?, end()?);
            Some(Flow { network, protocol, source, destination })
        };
        let inside = flow(vni, kind & INSIDE_IS_V6 != 0)?;
        let outside = flow(network, kind & OUTSIDE_IS_V6 != 0)?;
        Some(Record { inside, outside, idle_s, marks })
    }
}

fn take<const N: usize>(from: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = from.split_first_chunk()?;
    *from = rest;
    Some(*first)
}

fn seconds(now: u64) -> u32 {
    (now / 1_000_000_000) as u32
}
