//! The conversations of one port, for the switch of the host to which its guest moves: sessions of security groups,
//! and connections through load balancers and port forwards.
//!
//! Magic (32 bits), version (16), zero (16), then the sections of [a whole switch](super), of which only sessions and
//! connections are read; an earlier release reads only sessions. Times are ages, not clock readings, because the clocks
//! of two hosts differ. The reader's port replaces the one in the records. Numbers of load balancers, uplinks and
//! mappings mean nothing on another host: the reader finds the load balancer by its address and port, and the port
//! forward by its two ends. What else a connection has follows from its ends.
//!
//! Connections through source NAT stay behind: their outside ports belong to a block of the old host, and packets to
//! these ports still come there.
//!
//! A switch exports and imports conversations one by one, so that packets do not wait for many of them.

use std::net::IpAddr;

use super::{
    CONNECTION_BYTES, CONNECTIONS, CarryError, Fields, NONE, SESSION_BYTES, SESSIONS, UPPER_BYTES, begin, next_section,
    write_connection, write_session,
};
use crate::ids::PortId;
use crate::nat;
use crate::service::{self, Connection, Translator};
use crate::session::Carried;
use crate::switch::Switch;
use crate::tables::Port;

const MAGIC: u32 = u32::from_le_bytes(*b"BFse");
const VERSION: u16 = 1;
/// Bytes in front of the sections.
const HEAD_BYTES: usize = 8;

/// A conversation on its way to another host, with ages instead of times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovingSession(Moving);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Moving {
    Session(Carried<()>),
    Connection(Carried<Connection>),
}

impl MovingSession {
    /// Whether the worker that serves the uplink has it, instead of the one that serves the guest.
    pub fn is_at_uplink(&self) -> bool {
        match self.0 {
            Moving::Session(_) => false,
            Moving::Connection(connection) => matches!(connection.payload.by, Translator::Nat { .. }),
        }
    }
}

/// Conversations in the format of this module, those idle for the longest time first.
pub fn write_moving_sessions(all: Vec<MovingSession>) -> Vec<u8> {
    let (mut sessions, mut connections) = (Vec::new(), Vec::new());
    for MovingSession(moving) in all {
        match moving {
            Moving::Session(session) => sessions.push(session),
            Moving::Connection(connection) => connections.push(connection),
        }
    }
    sessions.sort_by_key(|session| std::cmp::Reverse(session.seen_s));
    connections.sort_by_key(|connection| std::cmp::Reverse(connection.seen_s));
    let mut out = Vec::new();
    out.extend(MAGIC.to_le_bytes());
    out.extend(VERSION.to_le_bytes());
    out.extend([0; 2]);
    begin(&mut out, SESSIONS, SESSION_BYTES, sessions.len());
    sessions.iter().for_each(|session| write_session(&mut out, session));
    if !connections.is_empty() {
        begin(&mut out, CONNECTIONS, CONNECTION_BYTES + UPPER_BYTES, connections.len());
    }
    for connection in &connections {
        write_session(&mut out, connection);
        write_connection(&mut out, &connection.payload, |_| NONE);
    }
    out
}

/// The conversations that another host has written, and the number of invalid records.
///
/// # Errors
/// The bytes are not what this or a neighbouring release writes.
pub fn read_moving_sessions(bytes: &[u8]) -> Result<(Vec<MovingSession>, u64), CarryError> {
    let (head, mut rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(CarryError::Truncated)?;
    let mut head = Fields(head);
    if (head.u32(), head.u16()) != (Some(MAGIC), Some(VERSION)) {
        return Err(CarryError::Foreign);
    }
    let (mut sessions, mut left_out) = (Vec::new(), 0);
    while let Some((kind, bytes, section)) = next_section(&mut rest)? {
        if kind != SESSIONS && kind != CONNECTIONS {
            continue;
        }
        for record in section.chunks_exact(usize::from(bytes)) {
            let mut fields = Fields(record);
            let moving = match kind {
                SESSIONS => fields.session(()).map(Moving::Session),
                _ => fields.connection().map(Moving::Connection),
            };
            match moving {
                Some(moving) => sessions.push(MovingSession(moving)),
                None => left_out += 1,
            }
        }
    }
    Ok((sessions, left_out))
}

impl Switch {
    /// Number of positions that a conversation of a port may have ([`moving_session_at`](Self::moving_session_at));
    /// they count from 0.
    pub fn moving_places(&self) -> u32 {
        2 * self.sessions.places().max(self.connections.places())
    }

    /// The conversation at a position, if it belongs to that port. It keeps its position.
    pub fn moving_session_at(&self, port: PortId, place: u32) -> Option<MovingSession> {
        // Alternating, because both tables may grow.
        let moving = if place.is_multiple_of(2) {
            Moving::Session(self.aged(self.sessions.at(place / 2)?, port)?)
        } else {
            let connection = self.connections.at(place / 2)?;
            let is_moving = !matches!(connection.payload.by, Translator::Nat { mapping: Some(_), .. });
            Moving::Connection(self.aged(connection, port).filter(|_| is_moving)?)
        };
        Some(MovingSession(moving))
    }

    /// Adds a conversation that a port's guest had on another host. Its next packet is checked against the rules.
    /// Returns false if the port does not have its address, the table is full, the conversation exists already, or the
    /// load balancer or port forward does not exist here. Call [`advance`](Self::advance) first.
    pub fn take_over_session(&mut self, port: PortId, MovingSession(moving): &MovingSession) -> bool {
        // Not the current configuration, so that the next packet is checked against the rules.
        let epoch = self.epoch.wrapping_sub(1);
        match moving {
            Moving::Session(session) => {
                let taken = self.here(session, port).and_then(|session| self.sessions.take_over(&session, epoch));
                taken.is_some()
            }
            Moving::Connection(connection) => {
                let here = self.here(connection, port).and_then(|connection| self.translated_here(connection, port));
                here.and_then(|connection| self.connections.take_over(&connection, epoch)).is_some()
            }
        }
    }

    /// A conversation of this switch with ages, if it belongs to that port.
    fn aged<T>(&self, session: Carried<T>, port: PortId) -> Option<Carried<T>> {
        let now_s = self.sessions.now_s();
        (session.key.port() == port).then_some(Carried {
            seen_s: now_s.saturating_sub(session.seen_s),
            answered_s: (now_s as u16).wrapping_sub(session.answered_s),
            ..session
        })
    }

    /// A conversation with ages as one of a port of this switch, if the port has its address.
    fn here<T: Copy>(&self, session: &Carried<T>, port: PortId) -> Option<Carried<T>> {
        let now_s = self.sessions.now_s();
        let session = Carried {
            key: session.key.at_port(port),
            seen_s: now_s.saturating_sub(session.seen_s),
            answered_s: (now_s as u16).wrapping_sub(session.answered_s),
            ..*session
        };
        let (local, _) = session.key.ends();
        self.index.port(port).is_some_and(|(of, _)| may_be_at(&of.port, local.address)).then_some(session)
    }

    /// A connection with what translates it on this host.
    fn translated_here(&self, mut connection: Carried<Connection>, guest: PortId) -> Option<Carried<Connection>> {
        let (port, vpc) = self.index.port(guest)?;
        connection.payload = match connection.payload.by {
            Translator::Balancer(_) => {
                service::moved(vpc.balancers.as_deref()?, &port.port, connection.key, connection.payload)?
            }
            Translator::Nat { .. } => {
                let uplink = self.index.uplinks().find(|uplink| {
                    self.index.is_own(uplink.port) && nat::forwards(uplink, vpc.id, connection.key, &connection.payload)
                })?;
                nat::moved(uplink, guest, connection.key, connection.payload)?
            }
        };
        Some(connection)
    }
}

fn may_be_at(port: &Port, address: IpAddr) -> bool {
    port.addresses.contains(&address) || port.routed.iter().any(|net| net.contains(&address))
}
