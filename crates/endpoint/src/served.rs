//! Execution of peers' accesses to this host's memory, and their answers.

use std::collections::VecDeque;

use bifrost_rdm::{Class, ConnectionId, MessageId};
use bifrost_wire::rdm::Access;

use crate::regions::{Denial, Regions};

/// Counters of peers' accesses to this host's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AccessCounters {
    /// Writes executed.
    pub writes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Reads answered with data.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Accesses refused because of format, key, permission, offset or length.
    pub refused: u64,
}

/// The answer to an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The access is done.
    Done,
    /// The bytes in the region when the answer is sent.
    Bytes(Access),
    /// The access is refused.
    Denied(Denial),
}

/// An executed access whose answer is not yet sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) call: u32,
    /// Length of the message, bytes: it counts as consumed once it is answered.
    pub(crate) len: u32,
    pub(crate) answer: Answer,
}

/// Accesses of one connection.
#[derive(Debug, Default)]
struct Queue {
    id: Option<ConnectionId>,
    waiting: VecDeque<Waiting>,
    /// Answers that have not arrived, and their lengths in bytes.
    open: VecDeque<(MessageId, u32)>,
    open_bytes: u64,
}

/// All regions, and the accesses to them.
#[derive(Debug, Default)]
pub(crate) struct Served {
    pub(crate) regions: Regions,
    pub(crate) counters: AccessCounters,
    queues: Vec<Queue>,
    /// Connections with answers to send.
    pub(crate) due: VecDeque<ConnectionId>,
}

/// Limit of answers in flight on a connection, bytes; a single answer is always allowed.
const OPEN_BYTES: u64 = 4 << 20;

impl Served {
    /// Executes an access and queues its answer. The connection's window bounds the queue.
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

    /// The next access of a connection that may be answered now, after a check of its permission.
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

    /// Records the message that answers the access returned by [`Served::next`].
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

    /// A message has arrived, which may be an answer.
    pub(crate) fn on_sent(&mut self, connection: ConnectionId, message: MessageId) {
        let queue = self.queues.get_mut(connection.index()).filter(|queue| queue.id == Some(connection));
        let Some(queue) = queue else { return };
        let Some(at) = queue.open.iter().position(|(open, _)| *open == message) else { return };
        let bytes = queue.open.remove(at).map_or(0, |(_, bytes)| bytes);
        queue.open_bytes -= u64::from(bytes);
    }

    /// Answers that have not arrived yet.
    pub(crate) fn open(&self, connection: ConnectionId) -> usize {
        let queue = self.queues.get(connection.index()).filter(|queue| queue.id == Some(connection));
        queue.map_or(0, |queue| queue.open.len())
    }

    /// Whether a connection has answers to send.
    pub(crate) fn waits(&self, connection: ConnectionId) -> bool {
        let queue = self.queues.get(connection.index()).filter(|queue| queue.id == Some(connection));
        queue.is_some_and(|queue| !queue.waiting.is_empty())
    }

    /// Removes everything of a connection that has ended.
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
    fn the_end_of_a_connection_removes_its_permissions_and_its_queue() {
        let mut served = Served::default();
        let connection = Engine::connection_of(1 << 32);
        let key = served.regions.register(vec![0; 8]).unwrap();
        let read = Access { key, offset: 0, length: 8 };
        assert!(served.regions.allow(key, connection, Rights::Read));
        served.execute(connection, Class::Read, 1, &read.emit());
        assert_eq!(served.next(connection).map(|waiting| waiting.answer), Some(Answer::Bytes(read)));
        served.forget(connection);
        assert!(served.next(connection).is_none() && served.due.is_empty());
        // Identifiers of connections wrap, so a later connection may have the same one.
        served.execute(connection, Class::Read, 1, &read.emit());
        assert_eq!(served.next(connection).map(|waiting| waiting.answer), Some(Answer::Denied(Denial::Key)));
    }
}
