//! Limits the data in flight to this host (RDM §5.6) by granting messages of all connections in turn.
//!
//! A thousand senders that begin at once fill any buffer within the first round trip, before their windows can react.
//! Only the receiver knows all of them, and each long message needs its grant. So it grants only as much as keeps its
//! link busy. A granted sender that sends slowly, or not at all, is charged only what it sends, so that it does not
//! delay others.

use std::collections::VecDeque;

use bifrost_transport::time::US;

use crate::NEVER;
use crate::output::ConnectionId;

/// Largest charge of a message, bytes: its sender's window keeps it from sending more at once.
const CHARGE_MAX: u32 = 256 * 1024;
/// Interval at which charges are adjusted while connections wait, ns.
const ADJUST_NS: u64 = 100 * US;

/// Bounds of the time after which a granted sender is charged only what it sends, ns.
const PATIENCE_NS: (u64, u64) = (200 * US, 20_000 * US);

/// Use of the host's budget, and the connections that wait for it.
#[derive(Debug)]
pub(crate) struct Inbound {
    budget: u64,
    charged: u64,
    /// Connections with announced messages.
    pub(crate) waiting: VecDeque<ConnectionId>,
    /// Connections that use the budget.
    pub(crate) charging: VecDeque<ConnectionId>,
    /// When charges are adjusted next.
    adjust_ns: u64,
    /// From a grant to its first data, smoothed, ns: a round trip including all queues.
    first_ns: u64,
}

impl Inbound {
    pub(crate) fn new(budget: u64) -> Self {
        Self { budget, charged: 0, waiting: VecDeque::new(), charging: VecDeque::new(), adjust_ns: NEVER, first_ns: 0 }
    }

    /// Charge of a message of `len` bytes.
    pub(crate) fn charge_of(len: u32) -> u32 {
        len.min(CHARGE_MAX)
    }

    /// Whether a message of `len` bytes may be granted; any may if nothing else is in flight.
    pub(crate) fn has_room(&self, len: u32) -> bool {
        self.charged == 0 || self.charged + u64::from(Self::charge_of(len)) <= self.budget
    }

    /// Records the time from a grant to its first data.
    pub(crate) fn record_first_data(&mut self, after_ns: u64) {
        self.first_ns = (7 * self.first_ns + after_ns) / 8;
    }

    /// How long a granted sender is charged in full, ns. It must exceed the queueing delay: otherwise there would be
    /// more grants, and so a longer queue.
    pub(crate) fn patience_ns(&self) -> u64 {
        (4 * self.first_ns).clamp(PATIENCE_NS.0, PATIENCE_NS.1)
    }

    pub(crate) fn charge(&mut self, bytes: u64) {
        self.charged += bytes;
    }

    pub(crate) fn release(&mut self, bytes: u64) {
        self.charged = self.charged.saturating_sub(bytes);
    }

    /// When charges are adjusted next, ns.
    pub(crate) fn deadline(&self) -> u64 {
        if self.waiting.is_empty() { NEVER } else { self.adjust_ns }
    }

    /// Whether charges must be adjusted now.
    pub(crate) fn is_due(&mut self, now: u64) -> bool {
        if self.waiting.is_empty() {
            self.adjust_ns = NEVER;
            return false;
        }
        let due = self.adjust_ns <= now;
        if due || self.adjust_ns == NEVER {
            self.adjust_ns = now + ADJUST_NS;
        }
        due
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv6Addr};

    use bifrost_wire::rdm::{Class, Control, Immediate, MessageId, SendHeader, SendKind, Service, Tag};

    use super::*;
    use crate::{
        Adaptive, Arrival, BufferId, CloseReason, Config, ConnectionConfig, Engine, Memory, Output, Unlimited, Work,
    };

    struct Buffers(u32);

    impl Memory for Buffers {
        fn allocate(&mut self, _: ConnectionId, _: u32, _: bool) -> Option<(BufferId, u64, u32)> {
            self.0 += 1;
            Some((BufferId(self.0), u64::from(self.0) << 32, self.0))
        }
    }

    struct Receiver {
        engine: Engine,
        buffers: Buffers,
        out: Output,
        now: u64,
    }

    impl Receiver {
        fn open(&mut self, peer: u32) -> ConnectionId {
            let (id, _) = self.engine.reserve().unwrap();
            let address = IpAddr::V6(Ipv6Addr::LOCALHOST);
            let config = ConnectionConfig::new(Service::Uc, 1024);
            let (chunking, congestion) = (Box::new(Adaptive::default()), Box::new(Unlimited));
            self.engine.open(0, id, (address, peer), Tag(peer), config, chunking, congestion).unwrap();
            id
        }

        fn announce(&mut self, id: ConnectionId, message: u32, length: u32) {
            let header = SendHeader {
                kind: SendKind::Announce,
                hint: true,
                class: Class::Message,
                message: MessageId(message),
                global: u64::from(message),
                length,
                offset: 0,
                call: 0,
            };
            let head = header.emit();
            let arrival = Arrival::Send { head: &head, len: head.len() as u32 };
            self.engine.on_arrival(self.now, id, arrival, self.now, &mut self.buffers, &mut self.out);
        }

        fn write(&mut self, id: ConnectionId, message: u32, offset: u32, len: u32) {
            let immediate = Immediate::new(MessageId(message), offset, false).bits();
            let arrival = Arrival::Write { immediate, len };
            self.engine.on_arrival(self.now, id, arrival, self.now, &mut self.buffers, &mut self.out);
        }

        /// Lets time pass. The engine returns its next deadline, so a wait is as many turns as there are deadlines.
        fn wait(&mut self, ns: u64) {
            let until = self.now + ns;
            while self.now < until {
                self.now = self.engine.next_deadline().clamp(self.now + 1, until);
                self.engine.turn(self.now, &mut self.buffers, &mut self.out);
            }
        }

        /// Grants since the last call, with the peer's tag.
        fn grants(&mut self) -> Vec<(u32, u32)> {
            let work = std::mem::take(&mut self.out.work);
            let grant = |work: Work| match work {
                Work::Control { control: Control::Grant(grant), .. } => Some((grant.tag.0, grant.message.0)),
                _ => None,
            };
            work.into_iter().filter_map(grant).collect()
        }
    }

    const KB: u32 = 1024;

    fn receiver(inbound: u64) -> Receiver {
        let engine = Engine::new(Config { inbound, ..Config::new(8, 1) });
        Receiver { engine, buffers: Buffers(0), out: Output::new(), now: 1_000 }
    }

    #[test]
    fn the_budget_is_granted_in_turn() {
        let mut receiver = receiver(300 * 1024);
        let ids = [1, 2, 3].map(|peer| receiver.open(peer));
        // The first connection has two messages; the second must wait until the others have one each.
        receiver.announce(ids[0], 0, 200 * KB);
        receiver.announce(ids[0], 1, 200 * KB);
        receiver.announce(ids[1], 0, 200 * KB);
        receiver.announce(ids[2], 0, 50 * KB);
        assert_eq!(receiver.grants(), [(1, 0)]);
        receiver.write(ids[0], 0, 0, 64 * KB);
        assert_eq!(receiver.grants(), [], "136 and 200 are more than 300");
        receiver.write(ids[0], 0, 64 * KB, 64 * KB);
        assert_eq!(receiver.grants(), [(1, 1)], "it asked before the others");
        receiver.write(ids[0], 0, 128 * KB, 72 * KB);
        receiver.write(ids[0], 1, 0, 128 * KB);
        assert_eq!(receiver.grants(), [(2, 0)]);
        receiver.write(ids[0], 1, 128 * KB, 64 * KB);
        assert_eq!(receiver.grants(), [(3, 0)]);
    }

    #[test]
    fn a_silent_sender_does_not_delay_others() {
        let mut receiver = receiver(300 * 1024);
        let ids = [1, 2, 3, 4].map(|peer| receiver.open(peer));
        receiver.announce(ids[0], 0, 256 * KB);
        receiver.announce(ids[1], 0, 256 * KB);
        receiver.announce(ids[2], 0, 256 * KB);
        assert_eq!(receiver.grants(), [(1, 0)]);
        receiver.wait(ADJUST_NS);
        assert_eq!(receiver.grants(), [], "it has not had enough time");
        // A sender is charged twice what it has sent, so a slow one leaves room for another.
        receiver.write(ids[0], 0, 0, 4 * KB);
        receiver.wait(3 * ADJUST_NS);
        assert_eq!(receiver.grants(), [(2, 0)]);
        receiver.wait(5 * ADJUST_NS);
        assert_eq!(receiver.grants(), [(2, 0), (3, 0)], "the first of these is repeated: it may have been lost");
        receiver.announce(ids[3], 0, 256 * KB);
        assert_eq!(receiver.grants(), []);
        receiver.engine.close(ids[2], CloseReason::Done, &mut receiver.out, |_| {});
        receiver.write(ids[0], 0, 4 * KB, 4 * KB);
        assert_eq!(receiver.grants(), [(4, 0)], "the end of a connection frees its budget");
    }

    #[test]
    fn one_message_is_always_granted() {
        let mut receiver = receiver(1);
        let ids = [1, 2].map(|peer| receiver.open(peer));
        receiver.announce(ids[0], 0, 1 << 28);
        receiver.announce(ids[1], 0, 64 * KB);
        assert_eq!(receiver.grants(), [(1, 0)]);
        receiver.engine.close(ids[0], CloseReason::Done, &mut receiver.out, |_| {});
        receiver.wait(3 * ADJUST_NS);
        assert_eq!(receiver.grants(), [(2, 0)]);
    }
}
