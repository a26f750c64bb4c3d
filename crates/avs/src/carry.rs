//! Serialized conversations of a switch, for the switch of another process that continues them: sessions, translated
//! connections, and NAT mappings.
//!
//! The format is a sequence of sections. A section has its kind (16 bits), the bytes per record (16), the number of
//! records (32), and the records. All numbers are little-endian. A later release may append fields to records, and add
//! kinds of sections: a reader ignores fields and kinds that it does not know. So neighbouring releases read each
//! other's data, in both directions. Ports and load balancers are identified by their numbers, so both switches must be
//! built from the same tables.
//!
//! There are two methods. [`Switch::carry_memory`] writes everything at once, while no packets flow. With
//! [`Switch::start_copying`], most is copied while packets flow, and only later changes are written after packets have
//! stopped.
//!
//! Between different numbers of workers, only the latter is possible (`distribute.rs`).
//!
//! What flow logs count has a format of its own (`flow_log.rs`), because no packet waits for it. The state of
//! fragmented packets and flow records is not carried over: guests do not notice. The daemon carries the counters over.

mod copies;
mod copying;
mod distribute;
mod flow_log;
mod port;

pub use copying::Copying;
pub use distribute::Distribution;
pub use flow_log::{read_handed_flows, write_handed_flows};
pub use port::{MovingSession, read_moving_sessions, write_moving_sessions};

use std::net::{IpAddr, Ipv6Addr};

use crate::copies::TakenOver;
use crate::ids::{Direction, LoadBalancerId, PortId};
use crate::mapping::{Inside, Outside, Pair};
use crate::rewrite::{Endpoint, Translation};
use crate::service::{Connection, Translator};
use crate::session::{Carried, Key, State};
use crate::switch::Switch;

/// Kinds of sections. Mappings precede the connections that hold them.
const MAPPINGS: u16 = 1;
const SESSIONS: u16 = 2;
const CONNECTIONS: u16 = 3;
/// Bytes per record of these sections.
const MAPPING_BYTES: usize = 44;
const SESSION_BYTES: usize = 49;
const CONNECTION_BYTES: usize = SESSION_BYTES + 128;
/// Bytes appended to mappings and connections: the upper halves of the numbers of the guest's port and of the uplink. An
/// earlier release does not write them; it has no ports with such numbers.
const UPPER_BYTES: usize = 4;
/// Kinds of sections with copies. Each record begins with its place in the other switch.
const CONNECTIONS_GONE: u16 = 16;
const MAPPINGS_GONE: u16 = 17;
const SESSIONS_GONE: u16 = 18;
const MAPPINGS_AT: u16 = 19;
const CONNECTIONS_AT: u16 = 20;
const SESSIONS_AT: u16 = 21;
/// Bytes of a place.
const PLACE_BYTES: usize = 4;
/// Bytes of a section's header.
const HEAD_BYTES: usize = 8;
/// In place of a mapping's number: the connection holds no mapping.
const NONE: u32 = u32::MAX;

/// Why the data of another switch was not, or not completely, taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CarryError {
    /// Magic number or version is wrong.
    #[error("not session data of a switch, or an unknown version of it")]
    Foreign,
    /// A section claims to be longer than the data.
    #[error("the session data of the other switch ends in the middle of a section")]
    Truncated,
    /// Records are shorter than this release requires.
    #[error("records of kind {kind} have {bytes} bytes, but this release requires {needed}")]
    Short {
        /// Kind of the section.
        kind: u16,
        /// Bytes per record.
        bytes: u16,
        /// Minimum number of bytes per record.
        needed: u16,
    },
}

impl Switch {
    /// Appends all conversations of this switch to `out`, for [`take_over_memory`](Self::take_over_memory).
    pub fn carry_memory(&mut self, out: &mut Vec<u8>) {
        self.leave_mappings();
        let mappings = self.mappings.carried();
        let mut places = vec![NONE; mappings.iter().map(|(index, _)| *index as usize + 1).max().unwrap_or(0)];
        begin(out, MAPPINGS, MAPPING_BYTES + UPPER_BYTES, mappings.len());
        for (place, (index, pair)) in (0..).zip(&mappings) {
            places[*index as usize] = place;
            write_mapping(out, pair, true);
        }
        let sessions = self.sessions.carried();
        begin(out, SESSIONS, SESSION_BYTES, sessions.len());
        sessions.iter().for_each(|session| write_session(out, session));
        let connections = self.connections.carried();
        begin(out, CONNECTIONS, CONNECTION_BYTES + UPPER_BYTES, connections.len());
        for connection in &connections {
            write_session(out, connection);
            let place = |mapping: u32| places.get(mapping as usize).copied().unwrap_or(NONE);
            write_connection(out, &connection.payload, place);
        }
    }

    /// Continues the conversations that another switch with the same tables had at `now_ns` or before. Both switches
    /// must use the same clock. The next packet of each conversation is checked against the rules. Existing
    /// conversations stay.
    ///
    /// # Errors
    /// The bytes are not what a switch of this or a neighbouring release writes. Records before the error are taken
    /// over.
    pub fn take_over_memory(&mut self, now_ns: u64, bytes: &[u8]) -> Result<TakenOver, CarryError> {
        self.advance(now_ns);
        // Not the current configuration, so the next packet of each conversation is checked against the rules.
        let epoch = self.epoch.wrapping_sub(1);
        let mut taken = TakenOver::default();
        let mut mappings: Vec<Option<u32>> = Vec::new();
        let result = self.read_memory(bytes, epoch, &mut mappings, &mut taken);
        let copied = self.copies.take().map(|copies| self.finish_copies(*copies, &mut mappings)).unwrap_or_default();
        // Each mapping counts one conversation too many, so that it did not end before its conversations were read.
        let now_s = self.connections.now_s();
        self.mappings.advance(now_s);
        mappings.into_iter().flatten().for_each(|mapping| self.mappings.leave(mapping));
        result.map(|()| taken.and(copied))
    }

    fn read_memory(
        &mut self,
        mut rest: &[u8],
        epoch: u32,
        mappings: &mut Vec<Option<u32>>,
        taken: &mut TakenOver,
    ) -> Result<(), CarryError> {
        while let Some((kind, bytes, section)) = next_section(&mut rest)? {
            for record in section.chunks_exact(usize::from(bytes)) {
                let mut fields = Fields(record);
                let is_taken = match kind {
                    CONNECTIONS_GONE..=SESSIONS_AT => {
                        self.read_copy(kind, &mut fields, epoch);
                        continue;
                    }
                    MAPPINGS => {
                        let mapping = self.read_mapping(&mut fields, epoch);
                        mappings.push(mapping);
                        taken.mappings += u64::from(mapping.is_some());
                        mapping.is_some()
                    }
                    SESSIONS => self.read_session(&mut fields, epoch).is_some(),
                    _ => {
                        let mapping_at = |place: u32| *mappings.get(place as usize)?;
                        self.read_connection(&mut fields, epoch, mapping_at).is_some()
                    }
                };
                taken.sessions += u64::from(is_taken && kind != MAPPINGS);
                taken.left_out += u64::from(!is_taken);
            }
        }
        Ok(())
    }

    fn read_mapping(&mut self, fields: &mut Fields<'_>, epoch: u32) -> Option<u32> {
        let ((guest, uplink), protocol) = (fields.ports(MAPPING_BYTES)?, fields.u8()?);
        let (inside, outside) = (fields.endpoint()?, fields.endpoint()?);
        let pair = Pair {
            inside: Inside { guest, protocol, end: inside },
            outside: Outside { uplink, protocol, end: outside },
        };
        self.has_port(guest)?;
        self.has_port(uplink)?;
        let is_replaced = fields.flag()?;
        if is_replaced { self.mappings.begin_replaced(pair, epoch) } else { self.mappings.begin(pair, epoch) }
    }

    /// Returns the session's place in this switch.
    fn read_session(&mut self, fields: &mut Fields<'_>, epoch: u32) -> Option<u32> {
        let session = fields.session(())?;
        self.has_port(session.key.port())?;
        self.sessions.take_over(&session, epoch)
    }

    /// Returns the connection's place in this switch. `mapping_at` finds the mapping for a number in a record.
    fn read_connection(
        &mut self,
        fields: &mut Fields<'_>,
        epoch: u32,
        mapping_at: impl Fn(u32) -> Option<u32>,
    ) -> Option<u32> {
        let mut session = fields.connection()?;
        let by = match session.payload.by {
            by @ Translator::Balancer(_) => by,
            Translator::Nat { guest, uplink, mapping } => {
                self.has_port(guest)?;
                self.has_port(uplink)?;
                // Without its mapping, the connection would get another outside end, so skip it.
                let mapping = if let Some(place) = mapping { Some(mapping_at(place)?) } else { None };
                Translator::Nat { guest, uplink, mapping }
            }
        };
        session.payload.by = by;
        self.has_port(session.key.port())?;
        let (.., reply, _) = session.payload.parts();
        self.has_port(reply.port())?;
        let at = self.connections.take_over(&session, epoch)?;
        if let Translator::Nat { mapping: Some(mapping), .. } = by {
            self.mappings.join(mapping, epoch);
        }
        Some(at)
    }

    fn has_port(&self, port: PortId) -> Option<()> {
        self.index.port(port).map(drop)
    }
}

/// A section: its kind, the bytes per record, the records.
type Section<'a> = (u16, u16, &'a [u8]);

/// The next section of a known kind.
fn next_section<'a>(rest: &mut &'a [u8]) -> Result<Option<Section<'a>>, CarryError> {
    while !rest.is_empty() {
        let (head, behind) = rest.split_first_chunk::<HEAD_BYTES>().ok_or(CarryError::Truncated)?;
        let [k0, k1, b0, b1, c0, c1, c2, c3] = *head;
        let (kind, bytes) = (u16::from_le_bytes([k0, k1]), u16::from_le_bytes([b0, b1]));
        let count = u32::from_le_bytes([c0, c1, c2, c3]) as usize;
        let len = count.checked_mul(usize::from(bytes)).ok_or(CarryError::Truncated)?;
        let (section, behind) = behind.split_at_checked(len).ok_or(CarryError::Truncated)?;
        *rest = behind;
        let needed = match kind {
            MAPPINGS => MAPPING_BYTES,
            SESSIONS => SESSION_BYTES,
            CONNECTIONS => CONNECTION_BYTES,
            CONNECTIONS_GONE..=SESSIONS_GONE => PLACE_BYTES,
            MAPPINGS_AT => PLACE_BYTES + MAPPING_BYTES,
            CONNECTIONS_AT => PLACE_BYTES + CONNECTION_BYTES,
            SESSIONS_AT => PLACE_BYTES + SESSION_BYTES,
            _ => continue,
        };
        if usize::from(bytes) < needed {
            return Err(CarryError::Short { kind, bytes, needed: needed as u16 });
        }
        return Ok(Some((kind, bytes, section)));
    }
    Ok(None)
}

fn begin(out: &mut Vec<u8>, kind: u16, bytes: usize, count: usize) {
    // There are at most 2^20 records of each kind.
    out.reserve(HEAD_BYTES + bytes * count);
    out.extend(kind.to_le_bytes());
    out.extend((bytes as u16).to_le_bytes());
    out.extend((count as u32).to_le_bytes());
}

fn write_mapping(out: &mut Vec<u8>, Pair { inside, outside }: &Pair, is_in_force: bool) {
    write_ports(out, [inside.guest, outside.uplink], 0);
    out.push(inside.protocol);
    write_endpoint(out, inside.end);
    write_endpoint(out, outside.end);
    out.push(u8::from(!is_in_force));
    write_ports(out, [inside.guest, outside.uplink], 16);
}

fn write_session<T>(out: &mut Vec<u8>, session: &Carried<T>) {
    write_key(out, session.key);
    out.push(session.origin as u8);
    out.push(session.state.code());
    out.extend(session.seen_s.to_le_bytes());
    out.extend(session.answered_s.to_le_bytes());
    out.push(session.heard);
}

/// `place` returns the number that identifies a mapping in records.
fn write_connection(out: &mut Vec<u8>, connection: &Connection, place: impl Fn(u32) -> u32) {
    match connection.by {
        Translator::Balancer(LoadBalancerId(number)) => {
            out.push(0);
            out.extend(number.to_le_bytes());
            out.extend([0; 6]);
        }
        Translator::Nat { guest, uplink, mapping } => {
            out.push(1);
            write_ports(out, [guest, uplink], 0);
            out.extend(mapping.map_or(NONE, place).to_le_bytes());
        }
    }
    let (known, sent, reply, is_hairpin) = connection.parts();
    for translation in [known, sent] {
        write_endpoint(out, translation.source);
        write_endpoint(out, translation.destination);
        out.push(u8::from(translation.is_with_ports()));
    }
    write_key(out, reply);
    out.push(u8::from(is_hairpin));
    match connection.by {
        Translator::Balancer(_) => out.extend([0; UPPER_BYTES]),
        Translator::Nat { guest, uplink, .. } => write_ports(out, [guest, uplink], 16),
    }
}

/// One half of the number of each port: 16 bits, from bit `shift` on.
fn write_ports(out: &mut Vec<u8>, ports: [PortId; 2], shift: u32) {
    ports.into_iter().for_each(|port| out.extend(((port.0 >> shift) as u16).to_le_bytes()));
}

fn write_key(out: &mut Vec<u8>, key: Key) {
    key.to_words().into_iter().for_each(|word| out.extend(word.to_le_bytes()));
}

/// 19 bytes: the family, the address (IPv4 as an IPv4-mapped IPv6 address), the port.
fn write_endpoint(out: &mut Vec<u8>, end: Endpoint) {
    let (family, address) = match end.address {
        IpAddr::V4(address) => (4, address.to_ipv6_mapped()),
        IpAddr::V6(address) => (6, address),
    };
    out.push(family);
    out.extend(address.octets());
    out.extend(end.port.to_le_bytes());
}

/// The unread rest of a record. Methods return `None` if the record ends or the value is invalid.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (first, rest) = self.0.split_first_chunk::<N>()?;
        self.0 = rest;
        Some(*first)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take::<1>().map(|[byte]| byte)
    }

    fn u16(&mut self) -> Option<u16> {
        self.take().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn flag(&mut self) -> Option<bool> {
        self.u8().filter(|byte| *byte < 2).map(|byte| byte == 1)
    }

    /// The numbers of two ports: their lower halves are next, their upper halves `upper_at` bytes from here, if the
    /// record has them.
    fn ports(&mut self, upper_at: usize) -> Option<(PortId, PortId)> {
        let mut upper = Fields(self.0.get(upper_at..).unwrap_or_default());
        let mut port = |fields: &mut Self| {
            let (lower, upper) = (fields.u16()?, upper.u16().unwrap_or(0));
            Some(PortId(u32::from(upper) << 16 | u32::from(lower)))
        };
        Some((port(self)?, port(self)?))
    }

    fn key(&mut self) -> Option<Key> {
        let mut words = [0; 5];
        for word in &mut words {
            *word = u64::from_le_bytes(self.take()?);
        }
        Key::of_words(words)
    }

    fn endpoint(&mut self) -> Option<Endpoint> {
        let (family, address, port) = (self.u8()?, Ipv6Addr::from(self.take::<16>()?), self.u16()?);
        let address = match family {
            4 => IpAddr::V4(address.to_ipv4_mapped()?),
            6 => IpAddr::V6(address),
            _ => return None,
        };
        Some(Endpoint { address, port })
    }

    fn translation(&mut self) -> Option<Translation> {
        let (source, destination) = (self.endpoint()?, self.endpoint()?);
        Some(Translation::carried(source, destination, self.flag()?))
    }

    fn session<T>(&mut self, payload: T) -> Option<Carried<T>> {
        let key = self.key()?;
        let origin = if self.flag()? { Direction::Ingress } else { Direction::Egress };
        let state = State::of_code(self.u8()?)?;
        let (seen_s, answered_s, heard) = (self.u32()?, self.u16()?, self.u8()?);
        Some(Carried { key, origin, state, seen_s, answered_s, heard, payload })
    }

    /// A translated connection; instead of its mapping, it has the number that identifies the mapping in records.
    fn connection(&mut self) -> Option<Carried<Connection>> {
        let Carried { key, origin, state, seen_s, answered_s, heard, payload: () } = self.session(())?;
        let by = match self.u8()? {
            0 => {
                let number = self.u16()?;
                self.take::<6>()?;
                Translator::Balancer(LoadBalancerId(number))
            }
            1 => {
                let ((guest, uplink), place) = (self.ports(CONNECTION_BYTES - SESSION_BYTES - 1)?, self.u32()?);
                Translator::Nat { guest, uplink, mapping: Some(place).filter(|place| *place != NONE) }
            }
            _ => return None,
        };
        let (known, sent) = (self.translation()?, self.translation()?);
        let (reply, is_hairpin) = (self.key()?, self.flag()?);
        let payload = Connection::of_parts(by, (known, sent, reply, is_hairpin));
        Some(Carried { key, origin, state, seen_s, answered_s, heard, payload })
    }
}
