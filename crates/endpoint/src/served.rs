//! Accesses of peers to this host's memory: executed, and waiting to be answered.

use std::collections::VecDeque;

use bifrost_rdm::{Class, ConnectionId, MessageId};
use bifrost_wire::rdm::Access;

use crate::regions::{Denial, Regions};

/// What peers have done with this host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCounters {
    /// Writes that were executed.
    pub writes: u64,
    /// Bytes of them.
    pub written_bytes: u64,
    /// Reads that were answered with bytes.
    pub reads: u64,
    /// Bytes of them.
    pub read_bytes: u64,
    /// Accesses that were refused: by their form, key, right, offset or length.
    pub refused: u64,
}

/// What an access is to be answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It is done.
    Done,
    /// The bytes that are there when the answer is made.
    Bytes(Access),
    /// It may not.
    Denied(Denial),
}

/// An access that waits for its answer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) call: u32,
    /// Length of the message, bytes: it counts as read by the application once it is answered.
    pub(crate) len: u32,
    pub(crate) answer: Answer,
}

/// A connection's.
#[derive(Debug, Default)]
struct Queue {
    id: Option<ConnectionId>,
    waiting: VecDeque<Waiting>,
    /// Answers that have not arrived, with their bytes.
    open: VecDeque<(MessageId, u32)>,
    open_bytes: u64,
}

/// All regions, and the accesses to them.
#[derive(Debug, Default)]
pub(crate) struct Served {
    pub(crate) regions: Regions,
    pub(crate) counters: AccessCounters,
    queues: Vec<Queue>,
    /// Connections with accesses that wait.
    pub(crate) due: VecDeque<ConnectionId>,
}

/// Bytes of answers that may be open on a connection, unless it is one.
const OPEN_BYTES: u64 = 4 << 20;

impl Served {
    /// Executes an access; its answer waits. As many wait as the connection's window has messages.
    pub(crate) fn execute(&mut self, from: ConnectionId, class: Class, call: u32, message: &[u8]) {
        let answer = match Access::parse(class, message) {
            Err(_) => Answer::Denied(Denial::Malformed),
            Ok((access, data)) if class == Class::Write => {
                match self.regions.write(from, access.key, access.offset, data) {
                    Ok(()) => {
                        self.counters.writes += 1;
                        self.counters.written_bytes += data.len() as u64;
                        Answer::Done
                    }
                    Err(denial) => Answer::Denied(denial),
                }
            }
            Ok((access, _)) => Answer::Bytes(access),
        };
        let len = message.len() as u32;
        let queue = self.queue(from);
        queue.waiting.push_back(Waiting { call, len, answer });
        if queue.waiting.len() == 1 {
            self.due.push_back(from);
        }
    }

    /// The next access of a connection that may be answered now, its right looked at.
    pub(crate) fn next(&mut self, connection: ConnectionId) -> Option<Waiting> {
        let queue = self.queues.get_mut(connection.index()).filter(|queue| queue.id == Some(connection))?;
        let mut waiting = *queue.waiting.front()?;
        if let Answer::Bytes(Access { key, offset, length }) = waiting.answer {
            let fits = queue.open.is_empty() || queue.open_bytes + u64::from(length) <= OPEN_BYTES;
            match self.regions.read(connection, key, offset, length) {
                Ok(_) if fits => {}
                Ok(_) => return None,
                Err(denial) => waiting.answer = Answer::Denied(denial),
            }
        }
        Some(waiting)
    }

    /// The access of [`Served::next`] was answered with a message.
    pub(crate) fn answered(&mut self, connection: ConnectionId, waiting: &Waiting, message: MessageId) {
        let bytes = match waiting.answer {
            Answer::Bytes(access) => {
                self.counters.reads += 1;
                self.counters.read_bytes += u64::from(access.length);
                access.length
            }
            Answer::Denied(_) => {
                self.counters.refused += 1;
                0
            }
            Answer::Done => 0,
        };
        let queue = self.queue(connection);
        queue.waiting.pop_front();
        queue.open.push_back((message, bytes));
        queue.open_bytes += u64::from(bytes);
    }

    /// A message has arrived, which may have been an answer.
    pub(crate) fn on_sent(&mut self, connection: ConnectionId, message: MessageId) {
        let queue = self.queues.get_mut(connection.index()).filter(|queue| queue.id == Some(connection));
        let Some(queue) = queue else { return };
        let Some(at) = queue.open.iter().position(|(open, _)| *open == message) else { return };
        let bytes = queue.open.remove(at).map_or(0, |(_, bytes)| bytes);
        queue.open_bytes -= u64::from(bytes);
    }

    /// Answers that have not arrived.
    pub(crate) fn open(&self, connection: ConnectionId) -> usize {
        let queue = self.queues.get(connection.index()).filter(|queue| queue.id == Some(connection));
        queue.map_or(0, |queue| queue.open.len())
    }

    /// Whether accesses of a connection wait.
    pub(crate) fn waits(&self, connection: ConnectionId) -> bool {
        let queue = self.queues.get(connection.index()).filter(|queue| queue.id == Some(connection));
        queue.is_some_and(|queue| !queue.waiting.is_empty())
    }

    /// A connection has ended.
    pub(crate) fn forget(&mut self, connection: ConnectionId) {
        if let Some(queue) = self.queues.get_mut(connection.index()) {
            *queue = Queue::default();
        }
        self.due.retain(|due| *due != connection);
        self.regions.forget(connection);
    }

    fn queue(&mut self, connection: ConnectionId) -> &mut Queue {
        if self.queues.len() <= connection.index() {
            self.queues.resize_with(connection.index() + 1, Queue::default);
        }
        let queue = &mut self.queues[connection.index()];
        queue.id = Some(connection);
        queue
    }
}

#[cfg(test)]
mod tests {
    use bifrost_rdm::Engine;

    use super::*;
    use crate::regions::Rights;

    #[test]
    fn a_connection_that_has_ended_is_let_in_nowhere_and_nothing_of_it_waits() {
        let mut served = Served::default();
        let connection = Engine::connection_of(1 << 32);
        let key = served.regions.register(vec![0; 8]).unwrap();
        let read = Access { key, offset: 0, length: 8 };
        assert!(served.regions.allow(key, connection, Rights::Read));
        served.execute(connection, Class::Read, 1, &read.emit());
        assert_eq!(served.next(connection).map(|waiting| waiting.answer), Some(Answer::Bytes(read)));
        served.forget(connection);
        assert!(served.next(connection).is_none() && served.due.is_empty());
        // Connections' names wrap: a later one may have the same.
        served.execute(connection, Class::Read, 1, &read.emit());
        assert_eq!(served.next(connection).map(|waiting| waiting.answer), Some(Answer::Denied(Denial::Key)));
    }
}
