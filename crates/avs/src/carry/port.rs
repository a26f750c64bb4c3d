//! The sessions of one port, for the switch of the host to which its guest moves.
//!
//! Magic (32 bits), version (16), zero (16), then the sections of [a whole switch](super), of which only sessions are
//! read. Times are ages, not clock readings, because the clocks of two hosts differ. The reader's port replaces the one
//! in the records.
//!
//! A switch exports and imports sessions one by one, so that packets do not wait for many of them.

use std::net::IpAddr;

use super::{CarryError, Fields, SESSION_BYTES, SESSIONS, begin, next_section, write_session};
use crate::ids::PortId;
use crate::session::Carried;
use crate::switch::Switch;
use crate::tables::Port;

const MAGIC: u32 = u32::from_le_bytes(*b"BFse");
const VERSION: u16 = 1;
/// Bytes in front of the sections.
const HEAD_BYTES: usize = 8;

/// A session on its way to another host, with ages instead of times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MovingSession(Carried<()>);

/// Sessions in the format of this module, those idle for the longest time first.
pub fn write_moving_sessions(mut sessions: Vec<MovingSession>) -> Vec<u8> {
    sessions.sort_by_key(|session| std::cmp::Reverse(session.0.seen_s));
    let mut out = Vec::new();
    out.extend(MAGIC.to_le_bytes());
    out.extend(VERSION.to_le_bytes());
    out.extend([0; 2]);
    begin(&mut out, SESSIONS, SESSION_BYTES, sessions.len());
    sessions.iter().for_each(|session| write_session(&mut out, &session.0));
    out
}

/// The sessions that another host has written, and the number of invalid records.
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
        if kind != SESSIONS {
            continue;
        }
        for record in section.chunks_exact(usize::from(bytes)) {
            match Fields(record).session(()) {
                Some(session) => sessions.push(MovingSession(session)),
                None => left_out += 1,
            }
        }
    }
    Ok((sessions, left_out))
}

impl Switch {
    /// The session at a [place](Self::session_places), if it belongs to that port. Connections through load balancers
    /// and NAT are not included.
    pub fn moving_session_at(&self, port: PortId, place: u32) -> Option<MovingSession> {
        let session = self.sessions.at(place).filter(|session| session.key.port() == port)?;
        let now_s = self.sessions.now_s();
        Some(MovingSession(Carried {
            seen_s: now_s.saturating_sub(session.seen_s),
            answered_s: (now_s as u16).wrapping_sub(session.answered_s),
            ..session
        }))
    }

    /// Adds a session that a port's guest had on another host. Its next packet is checked against the rules. Returns
    /// false if the port does not have its address, the table is full, or the session exists already. Call
    /// [`advance`](Self::advance) first.
    pub fn take_over_session(&mut self, port: PortId, MovingSession(session): &MovingSession) -> bool {
        let now_s = self.sessions.now_s();
        let session = Carried {
            key: session.key.at_port(port),
            seen_s: now_s.saturating_sub(session.seen_s),
            answered_s: (now_s as u16).wrapping_sub(session.answered_s),
            ..*session
        };
        let (local, _) = session.key.ends();
        self.index.port(port).is_some_and(|(of, _)| may_be_at(&of.port, local.address))
            && self.sessions.take_over(&session, self.epoch.wrapping_sub(1)).is_some()
    }
}

fn may_be_at(port: &Port, address: IpAddr) -> bool {
    port.addresses.contains(&address) || port.routed.iter().any(|net| net.contains(&address))
}
