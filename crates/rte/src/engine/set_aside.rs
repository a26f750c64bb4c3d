//! Prepares the handover of this engine's guests and sockets to another process: returns what connections hold to where
//! it can be taken from.
//!
//! Connections are not handed over. Their peers learn from a RESET or a REQUEST that they restart (PROTOCOL §4.6), and
//! retransmit what was not acknowledged.

use super::Engine;
use crate::conn::State;
use crate::output::Output;
use bifrost_transport::time::Time;

impl Engine {
    /// Packets sent and not acknowledged, or waiting to be sent.
    pub fn unfinished_packets(&self) -> u64 {
        let active = self.conns.iter().flatten().filter_map(|conn| conn.active.as_ref());
        active.map(|active| u64::from(active.send.outstanding()) + active.waiting() as u64).sum()
    }

    /// Makes the next [`flush_acks`](Self::flush_acks) acknowledge everything that has arrived, even just now:
    /// acknowledged packets are not retransmitted.
    pub fn acknowledge_all(&mut self) {
        for index in 0..self.conns.len() as u32 {
            let owes = |active: &crate::conn::Active| active.ack.deadline != Time::NEVER || active.ack.packets > 0;
            if self.conn(index).and_then(|conn| conn.active.as_deref()).is_some_and(owes) {
                self.ack_soon(index);
            }
        }
    }

    /// Restarts every connection with traffic. Packets held for guests are shown, because they were acknowledged;
    /// unacknowledged packets wait to be sent again ([`waiting_buffers`](Self::waiting_buffers)). If no other process
    /// takes over, processing `out` makes the peers restart, too.
    pub fn start_all_over(&mut self, now: Time, out: &mut Output) {
        for index in 0..self.conns.len() as u32 {
            let Some(conn) = self.conn(index) else { continue };
            if conn.active.is_some() && matches!(conn.state, State::Open | State::BestEffort) {
                self.counters.restarted_connections += 1;
                self.reopen(now, index, false, out);
            }
        }
    }

    /// Segments that wait to be sent, by connection, in order: port and buffer, which may occur several times.
    pub fn waiting_buffers(&self) -> impl Iterator<Item = (u32, u32)> {
        let active = self.conns.iter().flatten().filter_map(|conn| Some((conn.owner, conn.active.as_ref()?)));
        active.flat_map(|(owner, active)| active.pending.iter().map(move |pending| (owner, pending.handle)))
    }
}
