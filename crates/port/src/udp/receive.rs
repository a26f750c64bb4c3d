//! Receiving: one batch from all sockets; coalesced runs are split into datagrams again.

use std::io;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bifrost_udp::{ReceiveBuffers, datagrams};
use rustix::event::{Timespec, epoll};
use socket2::Socket;

use super::UdpCounters;
use crate::clock::RealtimeOffset;
use crate::underlay::{Datagram, Service};

/// Maximum sockets polled per batch; the rest wait for the next.
const MAX_READY: usize = 32;

/// The receive sockets of an underlay and the last batch received.
pub(crate) struct Receiver {
    sockets: Vec<Source>,
    /// The sockets behind these, if any, are only open until what they hold has been received.
    own: usize,
    epoll: OwnedFd,
    /// Indexes of the readable sockets.
    ready: Vec<u32>,
    buffers: ReceiveBuffers,
    messages: Vec<Received>,
    datagrams: Vec<Part>,
    /// Which of the ready sockets to read first, so that a busy one does not starve the others.
    turn: usize,
    /// The clocks, read after the batch.
    clock: RealtimeOffset,
}

struct Source {
    socket: Socket,
    service: Service,
    /// The kernel's count of datagrams dropped at this socket, as last seen. `None`: unknown, because another process
    /// handed the socket over.
    dropped: Option<u32>,
}

/// Properties shared by a message's datagrams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Received {
    buffer: u32,
    source: SocketAddr,
    service: Service,
    ecn: u8,
    ttl: u8,
    /// CLOCK_REALTIME, 0 when unknown.
    rx_time_ns: u64,
}

/// One datagram inside a message.
#[derive(Clone, Copy, Debug)]
struct Part {
    message: u32,
    start: u32,
    len: u32,
}

impl Receiver {
    /// `dropped`: the kernel's drops at each socket so far. `retired`: further sockets, which are only open until they
    /// are [empty](Self::close_retired).
    pub(crate) fn new(
        sockets: Vec<(Socket, Service)>,
        retired: Vec<(Socket, Service)>,
        messages: usize,
        dropped: Option<u32>,
    ) -> io::Result<Self> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let own = sockets.len();
        let sockets: Vec<_> = sockets.into_iter().chain(retired).collect();
        for (i, (socket, _)) in sockets.iter().enumerate() {
            epoll::add(&epoll, socket, epoll::EventData::new_u64(i as u64), epoll::EventFlags::IN)?;
        }
        Ok(Self {
            sockets: sockets.into_iter().map(|(socket, service)| Source { socket, service, dropped }).collect(),
            own,
            epoll,
            ready: Vec::with_capacity(MAX_READY),
            buffers: ReceiveBuffers::new(messages),
            messages: Vec::with_capacity(messages),
            datagrams: Vec::with_capacity(messages * 64),
            turn: 0,
            clock: RealtimeOffset::sample(),
        })
    }

    /// Duplicates of its socket descriptors.
    pub(crate) fn sockets(&self) -> io::Result<Vec<OwnedFd>> {
        self.own().map(|socket| socket.as_fd().try_clone_to_owned()).collect()
    }

    /// The sockets, in order, without those that are retired.
    pub(crate) fn own(&self) -> impl Iterator<Item = &Socket> {
        self.sockets[..self.own].iter().map(|source| &source.socket)
    }

    /// The retired sockets.
    pub(crate) fn retired(&self) -> impl Iterator<Item = &Socket> {
        self.sockets[self.own..].iter().map(|source| &source.socket)
    }

    /// Closes retired sockets that hold nothing, from the last one on; all of them if `all`. Returns whether none is
    /// left.
    pub(crate) fn close_retired(&mut self, all: bool) -> bool {
        while self.sockets.len() > self.own {
            let Some(last) = self.sockets.last() else { break };
            let mut byte = [MaybeUninit::uninit()];
            let is_empty = last.socket.peek(&mut byte).is_err_and(|e| e.kind() == io::ErrorKind::WouldBlock);
            if !is_empty && !all {
                return false;
            }
            // Another process may still have the socket, which would stay in the set.
            let _ = epoll::delete(&self.epoll, &last.socket);
            self.sockets.pop();
        }
        true
    }

    pub(crate) fn receive(&mut self, counters: &mut UdpCounters) -> io::Result<usize> {
        self.messages.clear();
        self.datagrams.clear();
        self.ready.clear();
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let mut events = [const { MaybeUninit::<epoll::Event>::uninit() }; MAX_READY];
        match epoll::wait(&self.epoll, &mut events, Some(&now)) {
            Ok((ready, _)) => self.ready.extend(ready.iter().map(|event| event.data.u64() as u32)),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        self.turn = self.turn.wrapping_add(1);
        let mut used = 0;
        for n in 0..self.ready.len() {
            let index = self.ready[(n + self.turn) % self.ready.len()];
            let Some(source) = self.sockets.get_mut(index as usize) else { continue };
            let count = match self.buffers.receive(source.socket.as_fd(), used) {
                Ok(count) => count,
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => 0,
                Err(_) => {
                    counters.rx_failed_calls += 1;
                    0
                }
            };
            counters.rx_system_calls += u64::from(count > 0);
            for buffer in used..used + count {
                let notes = self.buffers.notes(buffer);
                if let Some(dropped) = notes.dropped {
                    let before = source.dropped.replace(dropped).unwrap_or(dropped);
                    counters.rx_buffer_full_messages += u64::from(dropped.wrapping_sub(before));
                }
                if self.buffers.truncated(buffer) {
                    counters.rx_truncated_messages += 1;
                    continue;
                }
                let Some(address) = self.buffers.source(buffer) else {
                    counters.rx_bad_source_messages += 1;
                    continue;
                };
                let len = self.buffers.payload(buffer).len();
                let message = self.messages.len() as u32;
                self.messages.push(Received {
                    buffer: buffer as u32,
                    source: address,
                    service: source.service,
                    ecn: notes.ecn,
                    ttl: notes.ttl,
                    rx_time_ns: notes.rx_time_ns,
                });
                let parts = datagrams(len as u32, notes.segment);
                self.datagrams.extend(parts.map(|(start, len)| Part { message, start, len }));
                counters.rx_messages += 1;
                counters.rx_bytes += len as u64;
            }
            used += count;
            if used == self.buffers.capacity() {
                break;
            }
        }
        counters.rx_datagrams += self.datagrams.len() as u64;
        if !self.datagrams.is_empty() {
            self.clock = RealtimeOffset::sample();
        }
        Ok(self.datagrams.len())
    }

    pub(crate) fn datagram(&self, index: usize) -> Datagram<'_> {
        let part = self.datagrams[index];
        let message = &self.messages[part.message as usize];
        Datagram {
            payload: self.buffers.part(message.buffer as usize, part.start as usize, part.len as usize),
            source: message.source,
            service: message.service,
            ecn: message.ecn,
            ttl: message.ttl,
            rx_time_ns: self.clock.to_monotonic(message.rx_time_ns),
        }
    }

    /// When the last batch was complete, monotonic clock, ns.
    pub(crate) fn received_at_ns(&self) -> u64 {
        self.clock.to_monotonic(0)
    }

    /// Readable when any receive socket is.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}
