//! Memory that peers may read and write without the application (RDM §5.8).

use bifrost_rdm::{Class, ConnectionId, SendError};
use bifrost_verbs::Provider;
use bifrost_wire::rdm::{Access, MAX_MESSAGE};

use super::{Host, HostError};
use crate::regions::{Denial, Rights};
use crate::served::{AccessCounters, Answer};

/// The longest write, bytes: the longest message without the access header.
pub const MAX_ACCESS: u32 = MAX_MESSAGE - Access::LEN as u32;

impl<P: Provider> Host<P> {
    /// Registers memory, which peers can then be permitted to access. Returns its key.
    ///
    /// # Errors
    /// When there are 65,536 regions.
    pub fn register_memory(&mut self, memory: Vec<u8>) -> Result<u64, HostError> {
        self.served.regions.register(memory).map_err(|_| HostError::Regions)
    }

    /// Deregisters memory: no peer accesses it any more.
    pub fn deregister_memory(&mut self, key: u64) -> Option<Vec<u8>> {
        self.served.regions.deregister(key)
    }

    /// Permits the peer of a connection to access a region. Returns whether both exist.
    pub fn allow(&mut self, key: u64, connection: ConnectionId, rights: Rights) -> bool {
        self.bound(connection).is_some() && self.served.regions.allow(key, connection, rights)
    }

    /// Withdraws the permission of the peer of a connection.
    pub fn revoke(&mut self, key: u64, connection: ConnectionId) {
        self.served.regions.revoke(key, connection);
    }

    /// Contents of a region.
    pub fn memory(&self, key: u64) -> Option<&[u8]> {
        self.served.regions.bytes(key)
    }

    /// Contents of a region, mutable.
    pub fn memory_mut(&mut self, key: u64) -> Option<&mut [u8]> {
        self.served.regions.bytes_mut(key)
    }

    /// Counters of peers' accesses to this host's memory.
    pub fn access_counters(&self) -> &AccessCounters {
        &self.served.counters
    }

    /// Writes to a region of the peer. The answer is a [`Class::Response`] or a [`Class::Failure`], with the number of
    /// the call.
    ///
    /// # Errors
    /// A [`SendError`].
    pub fn write_remote(
        &mut self,
        now_ns: u64,
        connection: ConnectionId,
        call: u32,
        (key, offset): (u64, u64),
        data: &[u8],
    ) -> Result<(), SendError> {
        let length = u32::try_from(data.len()).ok().filter(|len| *len <= MAX_ACCESS).ok_or(SendError::TooLong)?;
        let mut message = self.buffers.vector(connection, data.len() + Access::LEN);
        message[..Access::LEN].copy_from_slice(&Access { key, offset, length }.emit());
        message[Access::LEN..].copy_from_slice(data);
        self.send_or_recycle(now_ns, connection, Class::Write, call, message)
    }

    /// Reads from a region of the peer. The answer is a [`Class::Response`] with the bytes, or a [`Class::Failure`].
    ///
    /// # Errors
    /// A [`SendError`].
    pub fn read_remote(
        &mut self,
        now_ns: u64,
        connection: ConnectionId,
        call: u32,
        (key, offset): (u64, u64),
        length: u32,
    ) -> Result<(), SendError> {
        let mut message = self.buffers.vector(connection, Access::LEN);
        message.copy_from_slice(&Access { key, offset, length }.emit());
        self.send_or_recycle(now_ns, connection, Class::Read, call, message)
    }

    /// Sends answers that are due. Returns whether there were any.
    pub(super) fn answer(&mut self, now_ns: u64) -> bool {
        let mut any = false;
        for _ in 0..self.served.due.len() {
            let Some(connection) = self.served.due.pop_front() else { break };
            while self.answer_one(now_ns, connection) {
                any = true;
            }
            if self.served.waits(connection) {
                self.served.due.push_back(connection);
            }
        }
        any
    }

    fn answer_one(&mut self, now_ns: u64, connection: ConnectionId) -> bool {
        if self.engine.is_full(connection) {
            return false;
        }
        let Some(mut waiting) = self.served.next(connection) else { return false };
        loop {
            let (class, data) = match waiting.answer {
                Answer::Done => (Class::Response, Vec::new()),
                Answer::Denied(denial) => (Class::Failure, denial.to_string().into_bytes()),
                Answer::Bytes(access) => {
                    let mut data = self.buffers.vector(connection, access.length as usize);
                    let read = self.served.regions.read(connection, access.key, access.offset, access.length);
                    if let Ok(bytes) = read {
                        data.copy_from_slice(bytes);
                    }
                    (Class::Response, data)
                }
            };
            match self.send(now_ns, connection, class, waiting.call, data) {
                Ok(message) => {
                    self.served.answered(connection, &waiting, message);
                    self.consumed_bytes(now_ns, connection, waiting.len, Vec::new());
                    return true;
                }
                Err((SendError::TooLong, data)) if matches!(waiting.answer, Answer::Bytes(_)) => {
                    self.buffers.recycle(connection, data);
                    waiting.answer = Answer::Denied(Denial::TooLong);
                }
                Err((SendError::Full, data)) => {
                    self.buffers.recycle(connection, data);
                    return false;
                }
                // The connection has ended, or its peer does not accept a message as long as the reason.
                Err(_) => {
                    self.served.forget(connection);
                    return false;
                }
            }
        }
    }

    fn send_or_recycle(
        &mut self,
        now_ns: u64,
        connection: ConnectionId,
        class: Class,
        call: u32,
        message: Vec<u8>,
    ) -> Result<(), SendError> {
        match self.send(now_ns, connection, class, call, message) {
            Ok(_) => Ok(()),
            Err((error, message)) => {
                self.buffers.recycle(connection, message);
                Err(error)
            }
        }
    }
}
