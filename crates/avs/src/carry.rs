//! What a switch remembers of conversations, for another process's switch to go on with: sessions, connections that are translated, and the
//! outside ends of guests.
//!
//! Sections follow one another: kind (16 bits), bytes of a record (16), number of records (32), the records; all numbers little-endian. A
//! later release may add fields at the end of records, and kinds: a reader takes of each record what it knows, and passes over kinds that it does
//! not know. So neighbouring releases read each other, in both directions. Ports and load balancers are named by their numbers: both
//! switches have to be built from the same tables.
//!
//! There are two ways. [`Switch::carry_memory`] writes all at once, while no packets flow. With [`Switch::start_copying`],
//! most of it is copied while packets flow, and only what has changed since is written when they have stopped.
//!
//! Packets in fragments, flow records and what flow logs count are not carried: guests do not notice. Counters are for the daemon to carry.

mod copies;
mod copying;
mod port;

pub(crate) use copies::Copies;
pub use copying::Copying;
pub use port::{MovingSession, read_moving_sessions, write_moving_sessions};

use std::net::{IpAddr, Ipv6Addr};

use crate::ids::{Direction, LoadBalancerId, PortId};
use crate::mapping::{Inside, Outside, Pair};
use crate::rewrite::{Endpoint, Translation};
use crate::service::{Connection, Translator};
use crate::session::{Carried, Key, State};
use crate::switch::Switch;

/// Kinds of sections. Mappings come before the connections that hold them.
const MAPPINGS: u16 = 1;
const SESSIONS: u16 = 2;
const CONNECTIONS: u16 = 3;
/// Bytes of their records.
const MAPPING_BYTES: usize = 44;
const SESSION_BYTES: usize = 49;
const CONNECTION_BYTES: usize = SESSION_BYTES + 128;
/// Kinds of sections with copies. The first number of each record is the place at which the other switch has it.
const CONNECTIONS_GONE: u16 = 16;
const MAPPINGS_GONE: u16 = 17;
const SESSIONS_GONE: u16 = 18;
const MAPPINGS_AT: u16 = 19;
const CONNECTIONS_AT: u16 = 20;
const SESSIONS_AT: u16 = 21;
/// Bytes of a place.
const PLACE_BYTES: usize = 4;
/// Bytes in front of a section's records.
const HEAD_BYTES: usize = 8;
/// Instead of a mapping's place in its section: none.
const NONE: u32 = u32::MAX;

/// Why nothing, or not all, was taken over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CarryError {
    /// It does not begin as it should.
    #[error("that is not what a switch remembers, or of a version that is not known here")]
    Foreign,
    /// A section says that it is longer than what there is.
    #[error("what the other switch remembers ends in the middle of a section")]
    Truncated,
    /// Records are shorter than this release needs them.
    #[error("records of kind {kind} have {bytes} bytes, and this release needs {needed}")]
    Short {
        /// The section's kind.
        kind: u16,
        /// Their length.
        bytes: u16,
        /// What it has to be.
        needed: u16,
    },
}

/// What was taken over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TakenOver {
    /// Sessions and connections.
    pub sessions: u64,
    /// Outside ends.
    pub mappings: u64,
    /// Records that make no sense here: their port is gone, or there is no room.
    pub left_out: u64,
}

impl TakenOver {
    fn and(self, other: TakenOver) -> TakenOver {
        TakenOver {
            sessions: self.sessions + other.sessions,
            mappings: self.mappings + other.mappings,
            left_out: self.left_out + other.left_out,
        }
    }
}

impl Switch {
    /// Appends what this switch remembers of conversations to `out`, for [`take_over_memory`](Self::take_over_memory).
    pub fn carry_memory(&mut self, out: &mut Vec<u8>) {
        self.leave_mappings();
        let mappings = self.mappings.carried();
        let mut places = vec![NONE; mappings.iter().map(|(index, _)| *index as usize + 1).max().unwrap_or(0)];
        begin(out, MAPPINGS, MAPPING_BYTES, mappings.len());
        for (place, (index, pair)) in (0..).zip(&mappings) {
            places[*index as usize] = place;
            write_mapping(out, pair, true);
        }
        let sessions = self.sessions.carried();
        begin(out, SESSIONS, SESSION_BYTES, sessions.len());
        sessions.iter().for_each(|session| write_session(out, session));
        let connections = self.connections.carried();
        begin(out, CONNECTIONS, CONNECTION_BYTES, connections.len());
        for connection in &connections {
            write_session(out, connection);
            let place = |mapping: u32| places.get(mapping as usize).copied().unwrap_or(NONE);
            write_connection(out, &connection.payload, place);
        }
    }

    /// Goes on with what another switch of the same tables remembered at `now_ns` or before; both have the same clock. The rules are asked again
    /// about each conversation with its next packet. What is there already stays.
    ///
    /// # Errors
    /// The bytes are not what a switch of this or a neighbouring release writes; what was read until then is taken over.
    pub fn take_over_memory(&mut self, now_ns: u64, bytes: &[u8]) -> Result<TakenOver, CarryError> {
        self.advance(now_ns);
        // No configuration of this switch: what it says is asked again.
        let epoch = self.epoch.wrapping_sub(1);
        let mut taken = TakenOver::default();
        let mut mappings: Vec<Option<u32>> = Vec::new();
        let result = self.read_memory(bytes, epoch, &mut mappings, &mut taken);
        let copied = self.copies.take().map(|copies| self.finish_copies(*copies, &mut mappings)).unwrap_or_default();
        // Each had one conversation too many, so that none ended before its conversations came.
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
        let (guest, uplink, protocol) = (fields.port()?, fields.port()?, fields.u8()?);
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

    /// Returns the session's place here.
    fn read_session(&mut self, fields: &mut Fields<'_>, epoch: u32) -> Option<u32> {
        let session = fields.session(())?;
        self.has_port(session.key.port())?;
        self.sessions.take_over(&session, epoch)
    }

    /// Returns the connection's place here. `mapping_at`: the mapping that a number in a record means.
    fn read_connection(
        &mut self,
        fields: &mut Fields<'_>,
        epoch: u32,
        mapping_at: impl Fn(u32) -> Option<u32>,
    ) -> Option<u32> {
        let session = fields.session(())?;
        let by = match fields.u8()? {
            0 => {
                let number = fields.u16()?;
                fields.take::<6>()?;
                Translator::Balancer(LoadBalancerId(number))
            }
            1 => {
                let (guest, uplink, place) = (fields.port()?, fields.port()?, fields.u32()?);
                self.has_port(guest)?;
                self.has_port(uplink)?;
                // One whose mapping could not be had would be seen as somebody else.
                let mapping = if place == NONE { None } else { Some(mapping_at(place)?) };
                Translator::Nat { guest, uplink, mapping }
            }
            _ => return None,
        };
        let (known, sent) = (fields.translation()?, fields.translation()?);
        let (reply, is_hairpin) = (fields.key()?, fields.flag()?);
        self.has_port(session.key.port())?;
        self.has_port(reply.port())?;
        let payload = Connection::of_parts(by, (known, sent, reply, is_hairpin));
        let Carried { key, origin, state, seen_s, answered_s, heard, payload: () } = session;
        let session = Carried { key, origin, state, seen_s, answered_s, heard, payload };
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

/// A section: its kind, the bytes of a record, the records.
type Section<'a> = (u16, u16, &'a [u8]);

/// The next section that is known here.
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
    // Of each kind there are 2^20 at most.
    out.reserve(HEAD_BYTES + bytes * count);
    out.extend(kind.to_le_bytes());
    out.extend((bytes as u16).to_le_bytes());
    out.extend((count as u32).to_le_bytes());
}

fn write_mapping(out: &mut Vec<u8>, Pair { inside, outside }: &Pair, is_in_force: bool) {
    out.extend(inside.guest.0.to_le_bytes());
    out.extend(outside.uplink.0.to_le_bytes());
    out.push(inside.protocol);
    write_endpoint(out, inside.end);
    write_endpoint(out, outside.end);
    out.push(u8::from(!is_in_force));
}

fn write_session<T>(out: &mut Vec<u8>, session: &Carried<T>) {
    write_key(out, session.key);
    out.push(session.origin as u8);
    out.push(session.state.code());
    out.extend(session.seen_s.to_le_bytes());
    out.extend(session.answered_s.to_le_bytes());
    out.push(session.heard);
}

/// `place`: the number by which records name a mapping.
fn write_connection(out: &mut Vec<u8>, connection: &Connection, place: impl Fn(u32) -> u32) {
    match connection.by {
        Translator::Balancer(LoadBalancerId(number)) => {
            out.push(0);
            out.extend(number.to_le_bytes());
            out.extend([0; 6]);
        }
        Translator::Nat { guest, uplink, mapping } => {
            out.push(1);
            out.extend(guest.0.to_le_bytes());
            out.extend(uplink.0.to_le_bytes());
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
}

fn write_key(out: &mut Vec<u8>, key: Key) {
    key.to_words().into_iter().for_each(|word| out.extend(word.to_le_bytes()));
}

/// 19 bytes: the family, the address (of IPv4 the mapped one of IPv6), the port.
fn write_endpoint(out: &mut Vec<u8>, end: Endpoint) {
    let (family, address) = match end.address {
        IpAddr::V4(address) => (4, address.to_ipv6_mapped()),
        IpAddr::V6(address) => (6, address),
    };
    out.push(family);
    out.extend(address.octets());
    out.extend(end.port.to_le_bytes());
}

/// What is left of a record; `None`: it ends, or has no such value.
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

    fn port(&mut self) -> Option<PortId> {
        self.u16().map(PortId)
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
}
