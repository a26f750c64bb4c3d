//! The sessions of one port, for the switch of another host, to which its guest moves.
//!
//! Magic (32 bits), version (16), zero (16), the switch's time in seconds (32), then sections as [a whole switch](super) has them, of
//! which sessions are read. Two hosts' clocks are not compared: what counts is how long ago the last packet was. The reader's port takes
//! the place of the one that is named.

use std::net::IpAddr;

use super::{CarryError, Fields, SESSION_BYTES, SESSIONS, TakenOver, begin, next_section, write_session};
use crate::ids::PortId;
use crate::session::Carried;
use crate::switch::Switch;
use crate::tables::Port;

const MAGIC: u32 = u32::from_le_bytes(*b"BFse");
const VERSION: u16 = 1;
/// Bytes in front of the sections.
const HEAD_BYTES: usize = 12;

impl Switch {
    /// Appends the sessions of a port to `out`, for [`take_over_sessions`](Self::take_over_sessions). Connections through load balancers
    /// and NAT are not among them.
    pub fn carry_sessions(&self, port: PortId, out: &mut Vec<u8>) {
        out.extend(MAGIC.to_le_bytes());
        out.extend(VERSION.to_le_bytes());
        out.extend([0; 2]);
        out.extend(self.sessions.now_s().to_le_bytes());
        let sessions = self.sessions.carried_of(port);
        begin(out, SESSIONS, SESSION_BYTES, sessions.len());
        sessions.iter().for_each(|session| write_session(out, session));
    }

    /// Goes on with the sessions that a port's guest had on another host. The rules are asked again about each with its next packet. Those
    /// of addresses that the port does not have, those that there is no room for, and those that are there already are left out.
    ///
    /// # Errors
    /// The bytes are not what a switch of this or a neighbouring release writes; what was read until then is taken over.
    pub fn take_over_sessions(&mut self, now_ns: u64, port: PortId, bytes: &[u8]) -> Result<TakenOver, CarryError> {
        self.advance(now_ns);
        let (head, mut rest) = bytes.split_first_chunk::<HEAD_BYTES>().ok_or(CarryError::Truncated)?;
        let mut head = Fields(head);
        if (head.u32(), head.u16()) != (Some(MAGIC), Some(VERSION)) {
            return Err(CarryError::Foreign);
        }
        let (_zero, then_s) = (head.u16(), head.u32().ok_or(CarryError::Truncated)?);
        let (epoch, now_s) = (self.epoch.wrapping_sub(1), self.sessions.now_s());
        let mut taken = TakenOver::default();
        while let Some((kind, bytes, section)) = next_section(&mut rest)? {
            if kind != SESSIONS {
                continue;
            }
            for record in section.chunks_exact(usize::from(bytes)) {
                let session = Fields(record).session(()).map(|session: Carried<()>| Carried {
                    key: session.key.at_port(port),
                    seen_s: now_s.saturating_sub(then_s.saturating_sub(session.seen_s)),
                    answered_s: session.answered_s.wrapping_add(now_s.wrapping_sub(then_s) as u16),
                    ..session
                });
                let is_taken = session.is_some_and(|session| {
                    let (local, _) = session.key.ends();
                    self.index.port(port).is_some_and(|(of, _)| may_be_at(&of.port, local.address))
                        && self.sessions.take_over(&session, epoch)
                });
                taken.sessions += u64::from(is_taken);
                taken.left_out += u64::from(!is_taken);
            }
        }
        Ok(taken)
    }
}

fn may_be_at(port: &Port, address: IpAddr) -> bool {
    port.addresses.contains(&address) || port.routed.iter().any(|net| net.contains(&address))
}
