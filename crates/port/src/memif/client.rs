//! The client: it owns the memory, and forwards packets in place.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::PathBuf;

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::MemifError;
use super::message::{AddRing, Message, VERSION};
use super::ring::{self, Descriptor, Memory, Ring};
use super::socket::Channel;
use crate::prefetch::{LINE, prefetch_to_write};
use crate::vhost::mapping::Mapping;

/// Configuration of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClientConfig {
    /// Path of the server's socket.
    pub path: PathBuf,
    /// The client's name, which it sends to the server.
    pub name: String,
    /// The interface ID.
    pub id: u32,
    /// Queues: each has a ring per direction.
    pub queues: u16,
    /// Ring size as a power of two: at most 14.
    pub log2_entries: u8,
    /// Headroom in front of each received packet, bytes.
    pub headroom: usize,
    /// Longest packet, bytes.
    pub longest: usize,
}

/// An interface.
#[derive(Debug)]
pub struct Client {
    channel: Channel,
    queues: Vec<Queue>,
    memory: File,
}

impl Client {
    /// Connects to a server.
    ///
    /// # Errors
    /// No server listens, or the server requires different parameters.
    pub fn connect(config: &ClientConfig) -> Result<Self, MemifError> {
        let channel = Channel::connect(&config.path)?;
        let limits = match channel.expect()?.0 {
            Message::Hello { min_version, max_version, limits, .. }
                if (min_version..=max_version).contains(&VERSION) =>
            {
                limits
            }
            other => return Err(MemifError::Unexpected(format!("expected a hello of version 2.0, got {other:?}"))),
        };
        let most = u32::from(limits.s2c_ring.min(limits.c2s_ring)) + 1;
        if u32::from(config.queues) > most || config.log2_entries > limits.log2_entries.min(14) {
            let text = format!("the server offers {most} queues of 2^{} entries", limits.log2_entries);
            return Err(MemifError::Unexpected(text));
        }
        let layout = Layout::of(config);
        let file = layout.file()?;
        let step = |message: &Message, fd: Option<BorrowedFd<'_>>| -> Result<Message, MemifError> {
            channel.send(message, fd)?;
            Ok(channel.expect()?.0)
        };
        let acknowledged = |reply: Message| match reply {
            Message::Ack => Ok(()),
            other => Err(MemifError::Unexpected(format!("expected an acknowledgment, got {other:?}"))),
        };
        let name = config.name.clone();
        acknowledged(step(&Message::Init { version: VERSION, id: config.id, name: name.clone() }, None)?)?;
        let bytes = layout.bytes() as u64;
        let region = Message::AddRegion { index: 0, bytes };
        let memory = Memory::new(Mapping::new(file.try_clone()?, 0, bytes)?);
        let mut queues = Vec::with_capacity(config.queues.into());
        for number in 0..config.queues {
            queues.push(Queue::new(&memory, &layout, number)?);
        }
        acknowledged(step(&region, Some(file.as_fd()))?)?;
        for (queue, number) in queues.iter().zip(0..) {
            for c2s in [true, false] {
                let offset = layout.ring(number, c2s) as u32;
                let log2_entries = config.log2_entries;
                let ring = AddRing { c2s, index: number, region: 0, offset, log2_entries, private: 0 };
                let event = if c2s { &queue.to_server } else { &queue.from_server };
                acknowledged(step(&Message::AddRing(ring), Some(event.as_fd()))?)?;
            }
        }
        match step(&Message::Connect { name }, None)? {
            Message::Connected { .. } => {}
            other => return Err(MemifError::Unexpected(format!("expected a connected message, got {other:?}"))),
        }
        channel.wait_forever()?;
        Ok(Client { channel, queues, memory: file })
    }

    /// The memory that it shares with the server: rings, then buffers. A malicious client may write anywhere in it.
    pub fn memory(&self) -> &File {
        &self.memory
    }

    /// Takes the queues, for use by other threads.
    pub fn take_queues(&mut self) -> Vec<Queue> {
        std::mem::take(&mut self.queues)
    }

    /// Waits until the server disconnects, and returns its reason.
    pub fn wait(&self) -> String {
        match self.channel.receive() {
            Ok(None) => "the server closed the interface".to_owned(),
            Ok(Some((Message::Disconnect { text, .. }, _))) => format!("the server disconnected: {text}"),
            Ok(Some((other, _))) => format!("unexpected message: {other:?}"),
            Err(error) => error.to_string(),
        }
    }

    /// Makes [`wait`](Self::wait) return.
    pub fn close(&self) {
        let _ = self.channel.send(&Message::Disconnect { code: 0, text: "stopped".to_owned() }, None);
        let _ = rustix::net::shutdown(&self.channel, rustix::net::Shutdown::Both);
    }
}

/// Layout of the memory: first all rings, then the buffers of each.
struct Layout {
    queues: usize,
    log2_entries: u8,
    headroom: usize,
    buffer: usize,
}

impl Layout {
    fn of(config: &ClientConfig) -> Self {
        Layout {
            queues: config.queues.into(),
            log2_entries: config.log2_entries,
            headroom: config.headroom,
            buffer: (config.headroom + config.longest).next_multiple_of(64),
        }
    }

    fn ring(&self, queue: u16, c2s: bool) -> usize {
        let number = 2 * usize::from(queue) + usize::from(!c2s);
        number * ring::bytes(self.log2_entries).next_multiple_of(64)
    }

    fn buffers(&self, queue: u16, c2s: bool) -> usize {
        let number = 2 * usize::from(queue) + usize::from(!c2s);
        let rings = self.ring(self.queues as u16, true).next_multiple_of(4096);
        rings + number * (self.buffer << self.log2_entries)
    }

    fn bytes(&self) -> usize {
        self.buffers(self.queues as u16, true)
    }

    fn file(&self) -> io::Result<File> {
        if u32::try_from(self.bytes()).is_err() {
            return Err(io::Error::other("rings and buffers take more than 4 GiB"));
        }
        let fd = memfd_create("memif", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, self.bytes() as u64)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK)?;
        Ok(fd.into())
    }
}

/// A queue: it sends packets to the server in the buffers in which they were received.
#[derive(Debug)]
pub struct Queue {
    memory: Memory,
    receive: Ring,
    send: Ring,
    /// Offset of each slot's buffer.
    receive_buffers: Box<[u32]>,
    send_buffers: Box<[u32]>,
    headroom: usize,
    buffer: usize,
    /// The next packet to receive, and the server's index when last read.
    next: u16,
    arrived: u16,
    /// The next slot to send from; the server may take slots below `published`.
    sent: u16,
    published: u16,
    /// The server's index of consumed slots.
    taken: u16,
    from_server: OwnedFd,
    to_server: OwnedFd,
}

/// A received packet.
#[derive(Debug)]
pub struct Received<'a> {
    /// Its whole buffer.
    pub buffer: &'a mut [u8],
    /// Offset of the packet in it.
    pub start: usize,
    /// Length of the packet, bytes.
    pub len: usize,
}

impl Queue {
    fn new(memory: &Memory, layout: &Layout, number: u16) -> io::Result<Self> {
        let entries = 1u16 << layout.log2_entries;
        let ring = |c2s| {
            let ring = Ring::new(memory.clone(), layout.ring(number, c2s), layout.log2_entries);
            let ring = ring.ok_or_else(|| io::Error::other("a ring outside its memory"))?;
            ring.initialise();
            Ok::<Ring, io::Error>(ring)
        };
        let (send, receive) = (ring(true)?, ring(false)?);
        let places = |c2s| -> Box<[u32]> {
            let first = layout.buffers(number, c2s);
            (0..usize::from(entries)).map(|n| (first + n * layout.buffer) as u32).collect()
        };
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let queue = Queue {
            memory: memory.clone(),
            receive,
            send,
            receive_buffers: places(false),
            send_buffers: places(true),
            headroom: layout.headroom,
            buffer: layout.buffer,
            next: 0,
            arrived: 0,
            sent: 0,
            published: 0,
            taken: 0,
            from_server: event()?,
            to_server: event()?,
        };
        for slot in 0..entries {
            queue.offer(slot);
        }
        // The server owns all buffers.
        queue.receive.set_head(entries);
        Ok(queue)
    }

    /// Writes the descriptor of an empty buffer.
    fn offer(&self, slot: u16) {
        let at = self.receive_buffers[usize::from(slot & (self.receive.entries() - 1))];
        let len = (self.buffer - self.headroom) as u32;
        let offset = at + self.headroom as u32;
        self.receive.set_descriptor(slot, Descriptor { flags: 0, region: 0, len, offset });
    }

    /// Received packets that can be sent back at once.
    #[inline]
    pub fn available(&mut self) -> u16 {
        self.arrived = self.receive.tail();
        self.arrived.wrapping_sub(self.next).min(self.room())
    }

    /// Packets that can be sent.
    #[inline]
    pub fn room(&mut self) -> u16 {
        let entries = self.send.entries();
        self.taken = self.send.tail();
        entries.saturating_sub(self.sent.wrapping_sub(self.taken))
    }

    /// The next packet. It must be [sent](Self::send_received) back before the next call. At least one must be
    /// [`available`](Self::available).
    #[inline]
    pub fn received(&mut self) -> Option<Received<'_>> {
        if self.next == self.arrived {
            return None;
        }
        let index = usize::from(self.next & (self.receive.entries() - 1));
        let len = (self.receive.descriptor(self.next).len as usize).min(self.buffer - self.headroom);
        let (start, buffer) = (self.headroom, self.bytes(self.receive_buffers[index]));
        Some(Received { buffer, start, len })
    }

    /// The packet after the next `ahead` ones, without consuming it; `None` if fewer are
    /// [`available`](Self::available).
    #[inline]
    pub fn waiting(&mut self, ahead: u16) -> Option<&[u8]> {
        if ahead >= self.arrived.wrapping_sub(self.next) {
            return None;
        }
        let slot = self.next.wrapping_add(ahead);
        let index = usize::from(slot & (self.receive.entries() - 1));
        let len = (self.receive.descriptor(slot).len as usize).min(self.buffer - self.headroom);
        let start = self.headroom;
        self.bytes(self.receive_buffers[index]).get(start..start + len)
    }

    /// Prefetches the descriptors of the next `count` packets for writing, in both rings.
    ///
    /// The server wrote or read the lines that this and [`fetch_packet`](Self::fetch_packet) prefetch. They are
    /// prefetched for writing. After a prefetch for reading, the first write to each line would wait for the other
    /// processor again, and so would the stores after it, because stores become visible in order.
    #[inline]
    pub fn fetch_descriptors(&self, count: u16) {
        self.receive.fetch_ahead(self.next, count);
        self.send.fetch_ahead(self.sent, count);
    }

    /// Prefetches the first `head` bytes and the last byte of the packet after the next `ahead` ones, for writing. Does
    /// nothing if fewer are [`available`](Self::available).
    #[inline]
    pub fn fetch_packet(&mut self, ahead: u16, head: usize) {
        let Some(packet) = self.waiting(ahead) else { return };
        packet.iter().step_by(LINE).take(head.div_ceil(LINE)).chain(packet.last()).for_each(|at| prefetch_to_write(at));
    }

    /// Sends `len` bytes from `start` on of the buffer that [`received`](Self::received) returned: the buffer is
    /// swapped with that of the slot that it is sent from.
    #[inline]
    pub fn send_received(&mut self, start: usize, len: usize) {
        let mask = self.send.entries() - 1;
        let (from, to) = (usize::from(self.next & mask), usize::from(self.sent & mask));
        std::mem::swap(&mut self.receive_buffers[from], &mut self.send_buffers[to]);
        self.put(start, len);
        self.offer(self.next);
        self.next = self.next.wrapping_add(1);
    }

    /// Sends a packet that `write` writes; `write` returns the length. There must be [`room`](Self::room).
    pub fn send(&mut self, write: impl FnOnce(&mut [u8]) -> usize) {
        let index = usize::from(self.sent & (self.send.entries() - 1));
        let len = write(self.bytes(self.send_buffers[index])).min(self.buffer);
        self.put(0, len);
    }

    fn put(&mut self, start: usize, len: usize) {
        let at = self.send_buffers[usize::from(self.sent & (self.send.entries() - 1))];
        let start = start.min(self.buffer);
        let len = len.min(self.buffer - start) as u32;
        self.send.set_descriptor(self.sent, Descriptor { flags: 0, region: 0, len, offset: at + start as u32 });
        self.sent = self.sent.wrapping_add(1);
    }

    /// Publishes sent packets and empty buffers to the server.
    #[inline]
    pub fn publish(&mut self) {
        self.receive.set_head(self.next.wrapping_add(self.receive.entries()));
        if self.published == self.sent {
            return;
        }
        self.published = self.sent;
        self.send.set_head(self.sent);
        if self.send.wants_interrupts() {
            let _ = rustix::io::write(&self.to_server, &1u64.to_ne_bytes());
        }
    }

    /// Whether to request wakeups on [`event`](Self::event). After `true` the queue must be checked once more.
    pub fn want_interrupts(&self, wanted: bool) {
        self.receive.want_interrupts(wanted);
    }

    /// Becomes readable when the server wakes us.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.from_server.as_fd()
    }

    /// Makes [`event`](Self::event) unreadable again.
    pub fn clear_event(&self) {
        let _ = rustix::io::read(&self.from_server, &mut [0; 8]);
    }

    /// The descriptor number, for descriptor tables.
    pub fn event_number(&self) -> i32 {
        self.from_server.as_raw_fd()
    }

    #[cfg(test)]
    pub(super) fn raw_send_ring(&self) -> &Ring {
        &self.send
    }

    #[cfg(test)]
    pub(super) fn raw_receive_ring(&self) -> &Ring {
        &self.receive
    }

    fn bytes(&mut self, at: u32) -> &mut [u8] {
        let Some(start) = self.memory.at(at as usize, self.buffer) else { return &mut [] };
        // SAFETY: inside the mapping, as just checked. The buffer belongs to this queue alone (`Layout::buffers`) and
        // to one slot of it; the server, which this end trusts, does not touch buffers not lent to it; `&mut self`
        // excludes all other access while the slice lives.
        unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), self.buffer) }
    }
}
