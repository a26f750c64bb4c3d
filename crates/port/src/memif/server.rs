//! The server, for clients that may be malicious.

use std::fs;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::net::SocketAddrUnix;

use super::MemifError;
use super::message::{AddRing, Limits, Message, VERSION};
use super::ring::{Descriptor, Memory, NEXT, Ring};
use super::socket::{Channel, socket};
use crate::vhost::counter;
use crate::vhost::helper::{Foreign, Helper};
use crate::vhost::mapping::Mapping;

/// Limits of a client's regions: their number, and their total bytes.
const MAX_REGIONS: u16 = 16;
const MAX_BYTES: u64 = 1 << 32;
/// Largest ring size, as a power of two.
const MAX_LOG2_ENTRIES: u8 = 14;
/// Maximum descriptors per packet.
const MAX_PIECES: usize = 8;

/// Configuration of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerConfig {
    /// Path of the socket. A stale socket is replaced.
    pub path: PathBuf,
    /// Its name, which it sends to the client.
    pub name: String,
    /// The interface ID, which clients must request.
    pub id: u32,
    /// Rings per direction; a client must have the same number.
    pub rings: u16,
}

/// Listens for the client of one interface.
#[derive(Debug)]
pub struct Server {
    config: ServerConfig,
    listener: OwnedFd,
    helper: Helper,
    closed: AtomicBool,
    /// The connection of the current or last client.
    connection: Mutex<Option<OwnedFd>>,
}

/// A connected client, until [`wait`](Self::wait) returns.
#[derive(Debug)]
pub struct Attached {
    /// The client's name.
    pub client: String,
    /// Rings to the client, by number.
    pub to_client: Vec<ToClient>,
    /// Rings from the client, by number.
    pub from_client: Vec<FromClient>,
    channel: Channel,
}

/// A packet that is too long for the ring's buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong;

/// Why a client's packet cannot be read: its descriptors are too many, too long, or outside the memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadPacket;

impl Server {
    /// Listens.
    ///
    /// # Errors
    /// An error of the socket; or the path exists but is not a socket.
    pub fn bind(config: ServerConfig) -> io::Result<Self> {
        match fs::symlink_metadata(&config.path) {
            Ok(found) if found.file_type().is_socket() => fs::remove_file(&config.path)?,
            Ok(_) => {
                let text = format!("{} exists but is not a socket", config.path.display());
                return Err(io::Error::new(io::ErrorKind::AlreadyExists, text));
            }
            Err(_) => {}
        }
        let listener = socket()?;
        rustix::net::bind(&listener, &SocketAddrUnix::new(&config.path)?)?;
        fs::set_permissions(&config.path, fs::Permissions::from_mode(0o600))?;
        rustix::net::listen(&listener, 1)?;
        Ok(Server {
            config,
            listener,
            helper: Helper::default(),
            closed: AtomicBool::new(false),
            connection: Mutex::new(None),
        })
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.config.path
    }

    /// Closes it, from any thread: no further client is accepted, and the current one is disconnected.
    pub fn close(&self) {
        let connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        self.closed.store(true, Ordering::Release);
        // Both calls wake blocked threads; an unconnected socket has none.
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        if let Some(connection) = &*connection {
            let _ = rustix::net::shutdown(connection, rustix::net::Shutdown::Both);
        }
    }

    /// Whether it has been [closed](Self::close).
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Waits for the next client, and sets its interface up.
    ///
    /// # Errors
    /// The client violated the protocol or requires different parameters (the client was told), or the server was
    /// closed.
    pub fn accept(&self) -> Result<Attached, MemifError> {
        let fd = loop {
            match rustix::net::accept_with(&self.listener, rustix::net::SocketFlags::CLOEXEC) {
                Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
                result => break result.map_err(io::Error::from)?,
            }
        };
        {
            let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
            if self.is_closed() {
                return Err(io::Error::from(io::ErrorKind::ConnectionAborted).into());
            }
            *connection = Some(fd.try_clone()?);
        }
        let channel = Channel::new(fd)?;
        self.set_up(&channel).and_then(|mut parts| {
            channel.wait_forever()?;
            Ok(Attached {
                client: std::mem::take(&mut parts.client),
                to_client: parts.to_client.into_iter().flatten().collect(),
                from_client: parts.from_client.into_iter().flatten().collect(),
                channel,
            })
        })
    }

    fn set_up(&self, channel: &Channel) -> Result<Parts, MemifError> {
        let limits = Limits {
            region: MAX_REGIONS - 1,
            s2c_ring: self.config.rings - 1,
            c2s_ring: self.config.rings - 1,
            log2_entries: MAX_LOG2_ENTRIES,
        };
        let name = self.config.name.clone();
        channel.send(&Message::Hello { name, min_version: VERSION, max_version: VERSION, limits }, None)?;
        let mut parts = Parts {
            client: String::new(),
            regions: Vec::new(),
            bytes: 0,
            to_client: (0..self.config.rings).map(|_| None).collect(),
            from_client: (0..self.config.rings).map(|_| None).collect(),
        };
        // Each ring and region may come only once.
        for _ in 0..MAX_REGIONS + 2 * self.config.rings + 2 {
            let (message, fd) = channel.expect()?;
            let fd = fd.map(|fd| Foreign::new(fd, &self.helper));
            match self.step(&mut parts, message, fd) {
                Ok(reply) => {
                    let done = matches!(reply, Message::Connected { .. });
                    channel.send(&reply, None)?;
                    if done {
                        return Ok(parts);
                    }
                }
                Err(error) => {
                    let _ = channel.send(&Message::Disconnect { code: 1, text: error.to_string() }, None);
                    return Err(error);
                }
            }
        }
        Err(MemifError::Unexpected("too many messages in the handshake".to_owned()))
    }

    fn step(&self, parts: &mut Parts, message: Message, fd: Option<Foreign>) -> Result<Message, MemifError> {
        let refuse = |text: String| Err(MemifError::Unexpected(text));
        match message {
            Message::Init { version, .. } if version != VERSION => {
                refuse(format!("protocol version {:#x}; only 2.0 is supported", version))
            }
            Message::Init { id, .. } if id != self.config.id => {
                refuse(format!("interface {id} was requested; this is interface {}", self.config.id))
            }
            Message::Init { name, .. } => {
                parts.client = name;
                Ok(Message::Ack)
            }
            Message::AddRegion { index, bytes } => {
                if usize::from(index) != parts.regions.len() || index >= MAX_REGIONS {
                    return refuse(format!("region {index} out of order; there are {}", parts.regions.len()));
                }
                parts.bytes = parts.bytes.saturating_add(bytes);
                if bytes == 0 || parts.bytes > MAX_BYTES {
                    return refuse(format!("a region of {bytes} bytes; a client has at most {MAX_BYTES} in all"));
                }
                let file = fd.and_then(Foreign::into_memory);
                let file = file.ok_or_else(|| {
                    MemifError::Memory("the file descriptor is missing or not a memory file".to_owned())
                })?;
                if file.metadata()?.len() < bytes {
                    return Err(MemifError::Memory(format!("the file is shorter than {bytes} bytes")));
                }
                parts.regions.push(Memory::new(Mapping::new(file, 0, bytes)?));
                Ok(Message::Ack)
            }
            Message::AddRing(ring) => {
                parts.add_ring(ring, fd)?;
                Ok(Message::Ack)
            }
            Message::Connect { .. } => {
                let missing = |number: usize, there: bool| (!there).then_some(number);
                let s2c = parts.to_client.iter().enumerate().find_map(|(n, r)| missing(n, r.is_some()));
                let c2s = parts.from_client.iter().enumerate().find_map(|(n, r)| missing(n, r.is_some()));
                match s2c.or(c2s) {
                    Some(number) => {
                        refuse(format!("ring {number} is missing in one direction; each needs {}", self.config.rings))
                    }
                    None => Ok(Message::Connected { name: self.config.name.clone() }),
                }
            }
            other => refuse(format!("unexpected message: {other:?}")),
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.config.path);
    }
}

/// What a client has sent so far.
struct Parts {
    client: String,
    regions: Vec<Memory>,
    bytes: u64,
    to_client: Vec<Option<ToClient>>,
    from_client: Vec<Option<FromClient>>,
}

impl Parts {
    fn add_ring(&mut self, add: AddRing, fd: Option<Foreign>) -> Result<(), MemifError> {
        let refuse = |text: String| Err(MemifError::Unexpected(text));
        let AddRing { c2s, index, region, offset, log2_entries, private } = add;
        if private != 0 {
            return refuse(format!("{private} private bytes in front of packets; none are supported"));
        }
        let event = fd.and_then(Foreign::into_counter);
        let event = event.ok_or_else(|| MemifError::Unexpected("a ring without an event counter".to_owned()))?;
        let Some(memory) = self.regions.get(usize::from(region)) else {
            return refuse(format!("a ring in region {region}, which does not exist"));
        };
        let ring = Ring::new(memory.clone(), offset as usize, log2_entries).filter(Ring::has_cookie);
        let ring = ring.ok_or_else(|| MemifError::Memory(format!("no ring at {offset:#x} of region {region}")))?;
        let regions = self.regions.clone();
        let rings = if c2s { self.from_client.len() } else { self.to_client.len() };
        if usize::from(index) >= rings {
            return refuse(format!("ring {index}; there are {rings} per direction"));
        }
        let index = usize::from(index);
        let taken = if c2s { self.from_client[index].is_some() } else { self.to_client[index].is_some() };
        if taken {
            return refuse(format!("ring {index} twice"));
        }
        if c2s {
            let next = ring.tail();
            self.from_client[index] = Some(FromClient { ring, regions, event, next, seen: next });
        } else {
            let next = ring.tail();
            self.to_client[index] = Some(ToClient { ring, regions, event, next, seen: next, published: next });
        }
        Ok(())
    }
}

impl Attached {
    /// Waits until the client disconnects, and returns its reason.
    pub fn wait(&self) -> String {
        match self.channel.receive() {
            Ok(None) => "closed".to_owned(),
            Ok(Some((Message::Disconnect { text, .. }, _))) => format!("left: {}", text.escape_debug()),
            Ok(Some((other, _))) => format!("unexpected message: {other:?}"),
            Err(error) => error.to_string(),
        }
    }

    /// Takes the rings, for use by other threads.
    pub fn take_rings(&mut self) -> (Vec<ToClient>, Vec<FromClient>) {
        (std::mem::take(&mut self.to_client), std::mem::take(&mut self.from_client))
    }
}

/// A ring to the client: the server fills the client's buffers.
#[derive(Debug)]
pub struct ToClient {
    ring: Ring,
    regions: Vec<Memory>,
    event: OwnedFd,
    /// The next buffer.
    next: u16,
    /// The client's index when last read.
    seen: u16,
    published: u16,
}

impl ToClient {
    /// Empty buffers. 0 if a client claims more than the ring has.
    #[inline]
    pub fn room(&mut self) -> u16 {
        let room = self.seen.wrapping_sub(self.next);
        if room > 0 && room <= self.ring.entries() {
            return room;
        }
        self.seen = self.ring.head();
        let room = self.seen.wrapping_sub(self.next);
        if room <= self.ring.entries() { room } else { 0 }
    }

    /// Writes a packet, given in parts, into the next buffer; there must be [`room`](Self::room).
    ///
    /// # Errors
    /// It does not fit; nothing has changed then.
    #[inline]
    pub fn push(&mut self, parts: &[&[u8]]) -> Result<(), TooLong> {
        let buffer = self.ring.descriptor(self.next);
        let len: usize = parts.iter().map(|part| part.len()).sum();
        let memory = self.regions.get(usize::from(buffer.region)).ok_or(TooLong)?;
        if len > buffer.len as usize {
            return Err(TooLong);
        }
        let mut at = buffer.offset as usize;
        for part in parts {
            if !memory.write(at, part) {
                return Err(TooLong);
            }
            at += part.len();
        }
        self.ring.set_descriptor(self.next, Descriptor { flags: 0, len: len as u32, ..buffer });
        self.next = self.next.wrapping_add(1);
        Ok(())
    }

    /// Publishes the written packets, and wakes the client if it wants that. Returns whether it was woken.
    #[inline]
    pub fn publish(&mut self) -> bool {
        if self.next == self.published {
            return false;
        }
        self.published = self.next;
        self.ring.set_tail(self.next);
        // Never blocks, whatever the state of the event counter.
        self.ring.wants_interrupts() && counter::add(self.event.as_fd()).is_ok()
    }

    /// Whether the client's memory is gone.
    pub fn is_lost(&self) -> bool {
        self.regions.iter().any(Memory::is_lost)
    }
}

/// A ring from the client.
#[derive(Debug)]
pub struct FromClient {
    ring: Ring,
    regions: Vec<Memory>,
    event: OwnedFd,
    next: u16,
    seen: u16,
}

impl FromClient {
    /// Copies the next packet to `out` and returns its length; `None` if the ring is empty. [`release`](Self::release)
    /// returns its buffer.
    ///
    /// # Errors
    /// It cannot be read; it has been skipped.
    #[inline]
    pub fn pop(&mut self, out: &mut [u8]) -> Option<Result<usize, BadPacket>> {
        if self.next == self.seen {
            let head = self.ring.head();
            // Ignore a client that claims more than the ring has.
            if head.wrapping_sub(self.next) <= self.ring.entries() {
                self.seen = head;
            }
            if self.next == self.seen {
                return None;
            }
        }
        let (mut len, mut good) = (0usize, true);
        for piece in 0..MAX_PIECES {
            let descriptor = self.ring.descriptor(self.next);
            self.next = self.next.wrapping_add(1);
            let bytes = descriptor.len as usize;
            let room = len.checked_add(bytes).and_then(|end| out.get_mut(len..end));
            let memory = self.regions.get(usize::from(descriptor.region));
            good &= match (room, memory) {
                (Some(room), Some(memory)) => memory.read(descriptor.offset as usize, room),
                _ => false,
            };
            len = len.saturating_add(bytes);
            if descriptor.flags & NEXT == 0 {
                return Some(if good { Ok(len) } else { Err(BadPacket) });
            }
            if self.next == self.seen || piece + 1 == MAX_PIECES {
                break;
            }
        }
        Some(Err(BadPacket))
    }

    /// Returns the buffers of consumed packets to the client.
    #[inline]
    pub fn release(&mut self) {
        self.ring.set_tail(self.next);
    }

    /// Whether to request wakeups on [`event`](Self::event). After `true` the ring must be checked once more.
    pub fn want_interrupts(&self, wanted: bool) {
        self.ring.want_interrupts(wanted);
    }

    /// Becomes readable when the client wakes us. Watch it edge-triggered: reading it may block.
    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}
