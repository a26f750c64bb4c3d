//! Frames over AF_XDP sockets, one for each queue of the device.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use super::program::{Redirect, STAMP_BYTES, stamp};
use super::{RAW_BATCH, RawConfig, RawCounters, RawError, RawMode, open_error};
use crate::afxdp::{NoFrame, QueueConfig, Received, XdpSocket};
use crate::bpf::{self, XdpMode};

/// Chunks have 4 KiB; the kernel reserves 256 bytes.
const CHUNK: usize = 4096;
/// Longest frame, bytes.
pub(super) const LONGEST: usize = CHUNK - 256;
/// Maximum queues used per device.
const MAX_QUEUES: u32 = 64;

/// A frame of the batch.
#[derive(Debug)]
struct Arrived {
    queue: usize,
    received: Received,
    /// Arrival time, ns; 0: unknown.
    at: u64,
}

/// A device over AF_XDP.
#[derive(Debug)]
pub struct XdpDevice {
    /// By queue.
    sockets: Vec<XdpSocket>,
    arrived: Vec<Arrived>,
    /// The queue to poll first, and the queue to send through.
    turn: usize,
    longest: usize,
    counters: RawCounters,
    program: Redirect,
}

impl XdpDevice {
    pub(super) fn open(config: &RawConfig, device: u32) -> Result<Self, RawError> {
        let modes: &[XdpMode] = match config.mode {
            RawMode::XdpNative => &[XdpMode::Native],
            RawMode::XdpGeneric => &[XdpMode::Generic],
            RawMode::Auto | RawMode::Packet => &[XdpMode::Native, XdpMode::Generic],
        };
        let queues = queues(&config.device).clamp(1, MAX_QUEUES);
        let program =
            Redirect::attach(device, queues, modes).map_err(open_error(&config.device, "attaching an XDP program"))?;
        let mut sockets = Vec::new();
        for queue in 0..queues {
            let of_queue = QueueConfig { device, queue, chunk_bytes: CHUNK, frames: config.frames };
            let opened = XdpSocket::open_all(of_queue, 1, &[0])
                .map_err(open_error(&config.device, "opening an AF_XDP socket"))?;
            for socket in &opened {
                bpf::set_socket(program.sockets.as_fd(), queue, socket.as_fd())
                    .map_err(open_error(&config.device, "entering an AF_XDP socket"))?;
            }
            sockets.extend(opened);
        }
        Ok(XdpDevice {
            sockets,
            arrived: Vec::with_capacity(RAW_BATCH),
            turn: 0,
            longest: config.longest,
            counters: RawCounters::default(),
            program,
        })
    }

    pub(super) fn is_native(&self) -> bool {
        self.program.native
    }

    pub(super) fn receive(&mut self) -> usize {
        for queue in 0..self.sockets.len() {
            let socket = &mut self.sockets[queue];
            if self.arrived.iter().any(|a| a.queue == queue) {
                let mine = self.arrived.extract_if(.., |a| a.queue == queue);
                socket.give_back(mine.map(|a| a.received.frame));
            }
            // Frames that the kernel did not take last time.
            socket.flush();
        }
        self.turn = (self.turn + 1) % self.sockets.len();
        for n in 0..self.sockets.len() {
            let queue = (self.turn + n) % self.sockets.len();
            let mut long = Vec::new();
            while self.arrived.len() < RAW_BATCH {
                let Some(mut received) = self.sockets[queue].receive() else { break };
                let at = arrived_at(&self.sockets[queue], &mut received);
                if received.len > self.longest {
                    self.counters.rx_too_long_frames += 1;
                    long.push(received.frame);
                    continue;
                }
                self.counters.rx_bytes += received.len as u64;
                self.arrived.push(Arrived { queue, received, at });
            }
            if !long.is_empty() {
                self.sockets[queue].give_back(long.into_iter());
            }
        }
        self.counters.rx_frames += self.arrived.len() as u64;
        self.arrived.len()
    }

    pub(super) fn frame(&self, index: usize) -> &[u8] {
        let Some(Arrived { queue, received, .. }) = self.arrived.get(index) else { return &[] };
        self.sockets[*queue].queue.umem.bytes(&received.frame, received.start, received.len)
    }

    pub(super) fn arrived_at(&self, index: usize) -> u64 {
        self.arrived.get(index).map_or(0, |arrived| arrived.at)
    }

    pub(super) fn send(&mut self, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len > self.longest {
            self.counters.tx_too_long_frames += 1;
            return;
        }
        // A queue preserves order; flows need one queue, so all frames use the same.
        let socket = &mut self.sockets[0];
        let write = |frame: &mut [u8]| {
            let mut at = 0;
            for part in parts {
                frame.get_mut(at..at + part.len())?.copy_from_slice(part);
                at += part.len();
            }
            Some(at)
        };
        let mut result = socket.send(write);
        if result == Err(NoFrame) {
            socket.flush();
            result = socket.send(write);
        }
        match result {
            Ok(true) => {
                self.counters.tx_frames += 1;
                self.counters.tx_bytes += len as u64;
            }
            Ok(false) | Err(NoFrame) => self.counters.tx_dropped_frames += 1,
        }
    }

    pub(super) fn flush(&mut self) {
        self.sockets[0].flush();
    }

    pub(super) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        self.sockets.iter().map(|socket| socket.as_fd()).collect()
    }

    pub(super) fn counters(&mut self) -> RawCounters {
        let rx_dropped_frames = self.sockets.iter().map(XdpSocket::dropped).sum();
        RawCounters { rx_dropped_frames, ..self.counters }
    }
}

/// Reads the program's timestamp in front of the frame. It is valid for this frame only: the next one in the chunk may
/// have none.
fn arrived_at(socket: &XdpSocket, received: &mut Received) -> u64 {
    let Some(before) = received.start.checked_sub(STAMP_BYTES) else { return 0 };
    let umem = &socket.queue.umem;
    let at = stamp(umem.bytes(&received.frame, before, STAMP_BYTES));
    if let Some(magic) = umem.bytes_mut(&mut received.frame).get_mut(before..before + 4) {
        magic.fill(0);
    }
    at.unwrap_or(0)
}

/// Receive queues of a device; 1 if the kernel does not report them.
fn queues(device: &str) -> u32 {
    let count = |dir: io::Result<std::fs::ReadDir>| {
        dir.map(|dir| dir.flatten().filter(|e| e.file_name().to_string_lossy().starts_with("rx-")).count() as u32)
    };
    count(std::fs::read_dir(format!("/sys/class/net/{device}/queues"))).unwrap_or(1)
}
