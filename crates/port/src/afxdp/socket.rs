//! AF_XDP sockets: one per receive queue and worker, over shared memory.
//!
//! The kernel has one fill ring and one completion ring per queue, however many sockets share it. The workers share
//! these two under a lock, which is taken once per batch.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::xdp::{
    SocketAddrXdp, SocketAddrXdpFlags, SocketAddrXdpWithSharedUmem, XDP_PGOFF_RX_RING, XDP_PGOFF_TX_RING,
    XDP_UMEM_PGOFF_COMPLETION_RING, XDP_UMEM_PGOFF_FILL_RING, XdpDesc, XdpDescOptions, XdpUmemReg, XdpUmemRegFlags,
};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, sockopt};

use super::ring::{Consumer, Producer};
use super::umem::{Frame, Umem};

/// How many TX entries the kernel takes in one call by default.
const DEFAULT_BUDGET: u32 = 32;
/// Sets that number; linux/if_xdp.h, since Linux 6.17.
const XDP_MAX_TX_SKB_BUDGET: libc::c_int = 9;

/// One receive queue of a device, shared by the workers.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) umem: Umem,
    shared: Mutex<Shared>,
    /// Number of RX frames, which are the chunks with the lowest numbers. The others are TX frames: as many per sender.
    frames: u32,
}

#[derive(Debug)]
struct Shared {
    fill: Producer<u64>,
    completion: Consumer<u64>,
    /// Transmitted frames by sender, until the sender collects them.
    sent: Vec<Vec<Frame>>,
}

/// One worker's socket on one queue.
#[derive(Debug)]
pub(crate) struct XdpSocket {
    // Drop order: rings before the socket, the socket before the memory.
    receive: Consumer<XdpDesc>,
    send: Option<Sender>,
    fd: OwnedFd,
    pub(crate) queue: Arc<Queue>,
}

#[derive(Debug)]
struct Sender {
    ring: Producer<XdpDesc>,
    /// Index among the queue's senders.
    number: usize,
    free: Vec<Frame>,
    /// The TX ring may hold entries that the kernel has not taken.
    unsent: bool,
}

/// A received frame.
#[derive(Debug)]
pub(crate) struct Received {
    pub(crate) frame: Frame,
    /// Its offset in the chunk.
    pub(crate) start: usize,
    pub(crate) len: usize,
}

/// Parameters that the sockets of a queue share.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueConfig {
    /// Interface index.
    pub(crate) device: u32,
    pub(crate) queue: u32,
    pub(crate) chunk_bytes: usize,
    /// RX frames, and TX frames per sender; a power of two.
    pub(crate) frames: u32,
}

impl XdpSocket {
    /// Opens the sockets of one queue for all workers; the workers in `senders` can send through it.
    pub(crate) fn open_all(config: QueueConfig, workers: u16, senders: &[u16]) -> io::Result<Vec<Self>> {
        let sockets = Self::prepare_all(config, workers, senders)?;
        Self::bind_all(&sockets, config, &mut 0)?;
        Ok(sockets)
    }

    /// The sockets of [`open_all`](Self::open_all) with their memory, not bound yet.
    pub(crate) fn prepare_all(config: QueueConfig, workers: u16, senders: &[u16]) -> io::Result<Vec<Self>> {
        let mut sockets: Vec<Self> = Vec::with_capacity(usize::from(workers));
        for worker in 0..workers {
            let number = senders.iter().position(|&s| s == worker);
            let socket = match sockets.first() {
                None => Self::first(config, senders.len(), number)?,
                Some(first) => Self::further(config, first, number)?,
            };
            sockets.push(socket);
        }
        Ok(sockets)
    }

    /// Binds prepared sockets of one queue, except the first `bound` of them, which it counts up.
    ///
    /// # Errors
    /// `EBUSY` if other sockets, which need not be in a map, use the queue; try again later.
    pub(crate) fn bind_all(sockets: &[Self], config: QueueConfig, bound: &mut usize) -> io::Result<()> {
        let Some(first) = sockets.first() else { return Ok(()) };
        for socket in sockets.iter().skip(*bound) {
            if *bound == 0 {
                let flags = SocketAddrXdpFlags::XDP_COPY | SocketAddrXdpFlags::XDP_USE_NEED_WAKEUP;
                rustix::net::bind(&socket.fd, &SocketAddrXdp::new(flags, config.device, config.queue))?;
            } else {
                let addr = SocketAddrXdp::new(SocketAddrXdpFlags::XDP_SHARED_UMEM, config.device, config.queue);
                let shared_umem_fd = first.fd.as_fd();
                rustix::net::bind(&socket.fd, &SocketAddrXdpWithSharedUmem { addr, shared_umem_fd })?;
            }
            *bound += 1;
        }
        Ok(())
    }

    fn first(config: QueueConfig, senders: usize, number: Option<usize>) -> io::Result<Self> {
        let QueueConfig { chunk_bytes, frames, .. } = config;
        let chunks = frames * (1 + senders as u32);
        let (umem, mut all) = Umem::new(chunk_bytes, chunks)?;
        let fd = socket()?;
        sockopt::set_xdp_umem_reg(
            &fd,
            XdpUmemReg {
                addr: umem.address(),
                len: umem.len() as u64,
                chunk_size: chunk_bytes as u32,
                headroom: 0,
                flags: XdpUmemRegFlags::empty(),
                tx_metadata_len: 0,
            },
        )?;
        let completions = (frames * senders.max(1) as u32).next_power_of_two();
        sockopt::set_xdp_umem_fill_ring_size(&fd, frames)?;
        sockopt::set_xdp_umem_completion_ring_size(&fd, completions)?;
        let layout = sockopt::xdp_mmap_offsets(&fd)?;
        let mut fill = Producer::map(fd.as_fd(), XDP_UMEM_PGOFF_FILL_RING, frames, &layout.fr)?;
        let completion = Consumer::map(fd.as_fd(), XDP_UMEM_PGOFF_COMPLETION_RING, completions, &layout.cr)?;
        let mut sent: Vec<Vec<Frame>> = Vec::with_capacity(senders);
        for _ in 0..senders {
            sent.push(all.split_off(all.len() - frames as usize));
        }
        // The senders' chunks were split off in reverse order. Now sender n has the chunks of its number.
        sent.reverse();
        for frame in all {
            fill.push(umem.offset_of(&frame));
        }
        fill.publish();
        let queue = Arc::new(Queue { umem, shared: Mutex::new(Shared { fill, completion, sent }), frames });
        let (receive, send) = rings(&fd, frames, number)?;
        Ok(Self { receive, send, fd, queue })
    }

    fn further(config: QueueConfig, first: &XdpSocket, number: Option<usize>) -> io::Result<Self> {
        let fd = socket()?;
        let (receive, send) = rings(&fd, config.frames, number)?;
        Ok(Self { receive, send, fd, queue: Arc::clone(&first.queue) })
    }

    /// The next received frame.
    pub(crate) fn receive(&mut self) -> Option<Received> {
        let descriptor = self.receive.pop()?;
        let (frame, start) = self.queue.umem.take_back(descriptor.addr)?;
        Some(Received { frame, start, len: descriptor.len as usize })
    }

    /// Whether received frames are waiting.
    pub(crate) fn has_received(&self) -> bool {
        self.receive.has_more()
    }

    /// Gives RX frames to the kernel, and releases the consumed entries of the RX ring.
    pub(crate) fn give_back(&mut self, frames: impl Iterator<Item = Frame>) {
        self.receive.release();
        let mut shared = self.queue.shared();
        for frame in frames {
            // The ring has room for all frames ever lent.
            shared.fill.push(self.queue.umem.offset_of(&frame));
        }
        shared.fill.publish();
        let wake = shared.fill.needs_wakeup();
        drop(shared);
        if wake {
            let _ = rustix::net::recv(&self.fd, &mut [0u8; 0], RecvFlags::DONTWAIT);
        }
    }

    /// Whether this worker can send through it.
    pub(crate) fn sends(&self) -> bool {
        self.send.is_some()
    }

    /// Queues a frame that `write` writes into a chunk; `write` returns the length, or `None` to send nothing. Returns
    /// whether a frame was free. [`flush`](Self::flush) may free frames.
    pub(crate) fn send(&mut self, write: impl FnOnce(&mut [u8]) -> Option<usize>) -> Result<bool, NoFrame> {
        let Some(sender) = &mut self.send else { return Err(NoFrame) };
        if sender.free.is_empty() {
            self.queue.take_sent(sender.number, &mut sender.free);
        }
        let mut frame = sender.free.pop().ok_or(NoFrame)?;
        let umem = &self.queue.umem;
        let len = write(umem.bytes_mut(&mut frame));
        let descriptor =
            len.map(|len| XdpDesc { addr: umem.offset_of(&frame), len: len as u32, options: XdpDescOptions::empty() });
        match descriptor {
            // A ring has as many entries as there are TX frames.
            Some(descriptor) if sender.ring.push(descriptor) => {
                sender.unsent = true;
                Ok(true)
            }
            _ => {
                sender.free.push(frame);
                Ok(false)
            }
        }
    }

    /// Makes the kernel send the queued frames; returns the number of system calls. Frames that it does not take stay
    /// queued.
    pub(crate) fn flush(&mut self) -> u64 {
        let Some(sender) = &mut self.send else { return 0 };
        if !sender.unsent {
            return 0;
        }
        sender.ring.publish();
        let mut calls = 0;
        // Each call takes a part of the entries. Stop when one takes nothing.
        let mut waiting = sender.ring.waiting();
        while waiting > 0 && sender.ring.needs_wakeup() {
            calls += 1;
            let _ = rustix::net::send(&self.fd, &[], SendFlags::DONTWAIT);
            let left = sender.ring.waiting();
            if left >= waiting {
                break;
            }
            waiting = left;
        }
        sender.unsent = sender.ring.waiting() > 0;
        calls
    }

    /// Whether frames are queued that the kernel has not taken.
    pub(crate) fn has_unsent(&self) -> bool {
        self.send.as_ref().is_some_and(|sender| sender.unsent)
    }

    /// Frames dropped by the kernel, because the ring was full or for other reasons.
    pub(crate) fn dropped(&self) -> u64 {
        sockopt::xdp_statistics(&self.fd).map_or(0, |s| s.rx_dropped + s.rx_ring_full.unwrap_or(0))
    }
}

impl AsFd for XdpSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// No TX frame is free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NoFrame;

impl Queue {
    /// Moves a sender's transmitted frames to `free`.
    fn take_sent(&self, sender: usize, free: &mut Vec<Frame>) {
        let mut shared = self.shared();
        let Shared { completion, sent, .. } = &mut *shared;
        while let Some(offset) = completion.pop() {
            let Some((frame, _)) = self.umem.take_back(offset) else { continue };
            let owner = (frame.number() / self.frames).checked_sub(1);
            if let Some(frames) = owner.and_then(|owner| sent.get_mut(owner as usize)) {
                frames.push(frame);
            }
        }
        completion.release();
        if let Some(frames) = sent.get_mut(sender) {
            free.append(frames);
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn socket() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    Ok(rustix::net::socket_with(AddressFamily::XDP, SocketType::RAW, flags, None)?)
}

/// The rings of one socket, `entries` each.
fn rings(fd: &OwnedFd, entries: u32, sender: Option<usize>) -> io::Result<(Consumer<XdpDesc>, Option<Sender>)> {
    sockopt::set_xdp_rx_ring_size(fd, entries)?;
    if sender.is_some() {
        sockopt::set_xdp_tx_ring_size(fd, entries)?;
    }
    let layout = sockopt::xdp_mmap_offsets(fd)?;
    let receive = Consumer::map(fd.as_fd(), XDP_PGOFF_RX_RING, entries, &layout.rx)?;
    let Some(number) = sender else { return Ok((receive, None)) };
    let ring = Producer::map(fd.as_fd(), XDP_PGOFF_TX_RING, entries, &layout.tx)?;
    // All frames may be in flight at once, each in an skb.
    let bytes = i32::try_from(entries * 4096).unwrap_or(i32::MAX);
    let _ = crate::udp::set_int(fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes);
    if entries > DEFAULT_BUDGET {
        let _ = crate::udp::set_int(fd, libc::SOL_XDP, XDP_MAX_TX_SKB_BUDGET, entries as i32);
    }
    Ok((receive, Some(Sender { ring, number, free: Vec::with_capacity(entries as usize), unsent: false })))
}
