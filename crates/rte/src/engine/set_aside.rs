//! Before another process goes on with this engine's guests and sockets: what connections hold goes back to where it can be taken from.
//!
//! Connections themselves are not handed over. Their peers learn from a RESET or a REQUEST that they begin again (PROTOCOL §4.6), and send what was
//! not acknowledged once more.

use super::Engine;
use crate::conn::State;
use crate::output::Output;
use bifrost_transport::time::Time;

impl Engine {
    /// Packets that are sent and not acknowledged, or wait to be sent.
    pub fn unfinished_packets(&self) -> u64 {
        let active = self.conns.iter().flatten().filter_map(|conn| conn.active.as_ref());
        active.map(|active| u64::from(active.send.outstanding()) + active.waiting() as u64).sum()
    }

    /// Has the next [`flush_acks`](Self::flush_acks) tell peers of all that has arrived, however recently: what is acknowledged does not come again.
    pub fn acknowledge_all(&mut self) {
        for index in 0..self.conns.len() as u32 {
            let owes = |active: &crate::conn::Active| active.ack.deadline != Time::NEVER || active.ack.packets > 0;
            if self.conn(index).and_then(|conn| conn.active.as_deref()).is_some_and(owes) {
                self.ack_soon(index);
            }
        }
    }

    /// Every connection with traffic starts over: what is held for guests is to be shown, as it was acknowledged, and what is not
    /// acknowledged waits to be sent again ([`waiting_buffers`](Self::waiting_buffers)). If nobody else goes on with it, carrying out `out` has
    /// the peers do the same.
    pub fn start_all_over(&mut self, now: Time, out: &mut Output) {
        for index in 0..self.conns.len() as u32 {
            let Some(conn) = self.conn(index) else { continue };
            if conn.active.is_some() && matches!(conn.state, State::Open | State::BestEffort) {
                self.counters.restarted_connections += 1;
                self.reopen(now, index, false, out);
            }
        }
    }

    /// What waits to be sent, connection by connection, in order: port and buffer, which may come several times.
    pub fn waiting_buffers(&self) -> impl Iterator<Item = (u16, u32)> {
        let active = self.conns.iter().flatten().filter_map(|conn| Some((conn.owner, conn.active.as_ref()?)));
        active.flat_map(|(owner, active)| active.pending.iter().map(move |pending| (owner, pending.handle)))
    }
}
