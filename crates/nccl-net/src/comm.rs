//! A connection in one direction, as NCCL uses it.

use std::collections::VecDeque;
use std::slice;

use bifrost_endpoint::{Endpoint, Error};

use crate::fail::Fail;
use crate::frame::{self, Frame, GROUP_MAX, Group, HEADER, PIECE, SIZE_MAX, Wanted};
use crate::receiving::{Receiving, Target};
use crate::requests::{Requests, State};
use crate::sending::Sending;

/// Limit of bytes copied from the application that have not arrived; a single message is always
/// allowed.
const OPEN_BYTES: usize = 8 << 20;

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Comm {
    endpoint: Endpoint,
    role: Role,
    requests: Requests,
    /// Why the connection is no longer usable.
    failed: Option<String>,
    /// Length of each message that has not arrived, oldest first.
    open: VecDeque<usize>,
    open_bytes: usize,
}

#[derive(Debug)]
enum Role {
    /// With the requests that have data to copy, in order.
    Send(Sending, VecDeque<u8>),
    Receive(Receiving),
}

/// Sizes of a completed request: one per receive, and their number.
pub(crate) type Sizes = ([u64; GROUP_MAX], usize);

impl Comm {
    /// Creates the sending end, which identifies itself to the other end.
    pub(crate) fn sender(endpoint: Endpoint, nonce: u64) -> Result<Self, Fail> {
        let mut comm = Self::new(endpoint, Role::Send(Sending::default(), VecDeque::new()));
        comm.post(&frame::hello(nonce))?;
        Ok(comm)
    }

    /// Creates the receiving end.
    pub(crate) fn receiver(endpoint: Endpoint) -> Self {
        Self::new(endpoint, Role::Receive(Receiving::default()))
    }

    fn new(endpoint: Endpoint, role: Role) -> Self {
        Self { endpoint, role, requests: Requests::default(), failed: None, open: VecDeque::new(), open_bytes: 0 }
    }

    /// Whether this is the sending end.
    pub(crate) fn is_sender(&self) -> bool {
        matches!(self.role, Role::Send(..))
    }

    /// Whether all sent data has arrived, or the connection has failed.
    pub(crate) fn is_flushed(&self) -> bool {
        let waits = matches!(&self.role, Role::Send(_, queue) if !queue.is_empty());
        self.failed.is_some() || (!waits && self.endpoint.open_messages() == 0)
    }

    /// Begins a send if the peer has a receive with this tag. Returns the request's slot and
    /// generation.
    ///
    /// # Safety
    /// `data` must be readable for `size` bytes until the request is done or the connection is
    /// closed.
    pub(crate) unsafe fn send(&mut self, data: *const u8, size: u64, tag: i32) -> Result<Option<(u8, u16)>, Fail> {
        self.check()?;
        if size > SIZE_MAX {
            return Err(Fail::Argument(format!("{size} bytes exceed the longest send")));
        }
        if !self.requests.has_room() {
            return Ok(None);
        }
        let Role::Send(sending, queue) = &mut self.role else {
            return Err(Fail::Usage("isend on a receiving connection".to_owned()));
        };
        let Some(found) = sending.take(tag, size) else { return Ok(None) };
        let state = State::Sending { data, size: found.size, offset: 0, group: found.group, index: found.index };
        let Some((slot, generation)) = self.requests.open(state) else { return Ok(None) };
        queue.push_back(slot);
        self.push()?;
        Ok(Some((slot, generation)))
    }

    /// Begins to receive a group, and informs the peer. Returns the request's slot and generation.
    pub(crate) fn receive(&mut self, targets: &[Target], tags: &[i32]) -> Result<Option<(u8, u16)>, Fail> {
        self.check()?;
        if !self.requests.has_room() || self.endpoint.is_full() {
            return Ok(None);
        }
        let Role::Receive(receiving) = &mut self.role else {
            return Err(Fail::Usage("irecv on a sending connection".to_owned()));
        };
        let mut group = Group { number: receiving.next(), count: targets.len() as u8, ..Group::default() };
        for (wanted, (target, tag)) in group.wanted.iter_mut().zip(targets.iter().zip(tags)) {
            *wanted = Wanted { tag: *tag, size: target.size() as u64 };
        }
        let state = State::Receiving { count: targets.len() as u8 };
        let Some((slot, generation)) = self.requests.open(state) else { return Ok(None) };
        receiving.post(slot, targets);
        let mut message = [0; HEADER + GROUP_MAX * 16];
        let len = frame::receive_len(group.count);
        frame::receive(&group, &mut message[..len]);
        self.post(&message[..len])?;
        Ok(Some((slot, generation)))
    }

    /// Returns the sizes of a request and releases it, if it is done.
    pub(crate) fn test(&mut self, slot: u8, generation: u16) -> Result<Option<Sizes>, Fail> {
        let state = self.requests.get(slot, generation);
        match state.ok_or_else(|| Fail::Argument("unknown request".to_owned()))? {
            State::Done { sizes, count } => {
                self.requests.close(slot);
                Ok(Some((sizes, count.into())))
            }
            _ => self.check().map(|()| None),
        }
    }

    /// Handles what has arrived, and sends what may be sent.
    pub(crate) fn progress(&mut self) {
        if self.failed.is_some() {
            return;
        }
        let progressed = self.pull().and_then(|()| self.push());
        if let Err(error) = progressed {
            self.failed.get_or_insert(error.to_string());
        }
    }

    fn pull(&mut self) -> Result<(), Fail> {
        while let Some(message) = self.endpoint.next_queued().map_err(remote)? {
            match (&mut self.role, Frame::parse(&message)) {
                (Role::Send(sending, _), Some(Frame::Receive(group))) => sending.post(group).map_err(broken)?,
                (Role::Receive(receiving), Some(Frame::Data(data))) => {
                    if let Some(complete) = receiving.arrived(&data).map_err(broken)?
                        && let Some(state) = self.requests.state_mut(complete.request)
                        && let State::Receiving { count } = *state
                    {
                        *state = State::Done { sizes: complete.sizes, count };
                    }
                }
                _ => return Err(broken("the peer sent an unexpected message")),
            }
        }
        Ok(())
    }

    /// Copies data from the application, as far as it may be sent.
    fn push(&mut self) -> Result<(), Fail> {
        let Role::Send(_, queue) = &mut self.role else { return Ok(()) };
        while self.open.len() > self.endpoint.open_messages() {
            self.open_bytes -= self.open.pop_front().unwrap_or(0);
        }
        while let Some(slot) = queue.front().copied() {
            if self.endpoint.is_full() || (self.open_bytes >= OPEN_BYTES && !self.open.is_empty()) {
                break;
            }
            let Some(State::Sending { data, size, offset, group, index }) = self.requests.state_mut(slot) else {
                queue.pop_front();
                continue;
            };
            let len = (*size - *offset).min(PIECE as u64) as usize;
            let mut message = self.endpoint.buffer(HEADER + len);
            message[..HEADER].copy_from_slice(&frame::data(*group, *index, *offset, *size));
            if len > 0 {
                // SAFETY: the caller of `send` guarantees that the bytes are readable until the
                // request is done.
                let bytes = unsafe { slice::from_raw_parts(data.add(*offset as usize), len) };
                message[HEADER..].copy_from_slice(bytes);
            }
            self.endpoint.send(message).map_err(remote)?;
            self.open.push_back(len);
            self.open_bytes += len;
            *offset += len as u64;
            if *offset == *size {
                let mut sizes = [0; GROUP_MAX];
                sizes[0] = *size;
                if let Some(state) = self.requests.state_mut(slot) {
                    *state = State::Done { sizes, count: 1 };
                }
                queue.pop_front();
            }
        }
        Ok(())
    }

    fn post(&mut self, message: &[u8]) -> Result<(), Fail> {
        let mut memory = self.endpoint.buffer(message.len());
        memory.copy_from_slice(message);
        self.endpoint.send(memory).map_err(remote)?;
        if self.is_sender() {
            self.open.push_back(0);
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Fail> {
        self.failed.as_ref().map_or(Ok(()), |why| Err(Fail::Remote(why.clone())))
    }
}

fn remote(error: Error) -> Fail {
    Fail::Remote(error.to_string())
}

fn broken(why: &'static str) -> Fail {
    Fail::Remote(why.to_owned())
}
