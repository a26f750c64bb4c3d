//! Raw Ethernet frames, VLAN tags included, from and to a network device that we own exclusively, bypassing the
//! kernel's stack.
//!
//! [`RawDevice`] receives every frame, over AF_XDP sockets, or over an AF_PACKET socket where AF_XDP is missing or
//! frames are too long for it. The kernel also sees the frames of an AF_PACKET device: assign no addresses to such a
//! device.

mod packet;
mod program;
#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests;
mod xdp;

use std::ffi::CString;
use std::io;
use std::os::fd::BorrowedFd;

use thiserror::Error;

use packet::PacketDevice;
use xdp::XdpDevice;

/// Older arrival timestamps are ignored, ns.
const OLDEST_NS: u64 = 1_000_000_000;

/// Maximum frames per batch.
pub const RAW_BATCH: usize = 64;

/// How frames are received and sent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RawMode {
    /// AF_XDP if available, otherwise AF_PACKET.
    #[default]
    Auto,
    /// AF_XDP in the driver.
    XdpNative,
    /// Generic AF_XDP: after the driver, on any device.
    XdpGeneric,
    /// AF_PACKET.
    Packet,
}

/// How to open a [`RawDevice`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawConfig {
    /// The device's name.
    pub device: String,
    /// How frames are received and sent.
    pub mode: RawMode,
    /// Longest frame, bytes, tags included: 64 to 9216.
    pub longest: usize,
    /// Frame buffers for receiving, and for sending: a power of two, 64 to 16384.
    pub frames: u32,
}

/// Why a device cannot be opened.
#[derive(Debug, Error)]
pub enum RawError {
    /// No device has this name.
    #[error("no network device {0:?}")]
    NoDevice(String),
    /// Invalid settings.
    #[error("{0}")]
    Config(String),
    /// The kernel refused.
    #[error("{device}: {what}: {source}")]
    Open {
        /// The device.
        device: String,
        /// The failed step.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
}

/// Counters of a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawCounters {
    /// Frames received.
    pub rx_frames: u64,
    /// Bytes in these.
    pub rx_bytes: u64,
    /// Frames dropped: longer than allowed.
    pub rx_too_long_frames: u64,
    /// Frames dropped: incomplete checksums. The sender is on this machine and left them to a device; it must compute
    /// them itself.
    pub rx_open_checksum_frames: u64,
    /// Frames dropped by the kernel: no room.
    pub rx_dropped_frames: u64,
    /// Frames sent.
    pub tx_frames: u64,
    /// Bytes in these.
    pub tx_bytes: u64,
    /// Frames not sent: longer than allowed.
    pub tx_too_long_frames: u64,
    /// Frames not sent: no room, or the kernel refused them.
    pub tx_dropped_frames: u64,
}

impl RawCounters {
    /// All counters with their names.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        [
            ("rx_frames", self.rx_frames),
            ("rx_bytes", self.rx_bytes),
            ("rx_too_long_frames", self.rx_too_long_frames),
            ("rx_open_checksum_frames", self.rx_open_checksum_frames),
            ("rx_dropped_frames", self.rx_dropped_frames),
            ("tx_frames", self.tx_frames),
            ("tx_bytes", self.tx_bytes),
            ("tx_too_long_frames", self.tx_too_long_frames),
            ("tx_dropped_frames", self.tx_dropped_frames),
        ]
        .into_iter()
    }
}

/// A device.
#[derive(Debug)]
pub enum RawDevice {
    /// Over AF_XDP.
    Xdp(XdpDevice),
    /// Over AF_PACKET.
    Packet(PacketDevice),
}

impl RawDevice {
    /// Opens a device. Needs CAP_NET_RAW, and CAP_NET_ADMIN and CAP_BPF for AF_XDP.
    ///
    /// # Errors
    /// The device does not exist, or the kernel refuses.
    pub fn open(config: &RawConfig) -> Result<Self, RawError> {
        if !(64..=9216).contains(&config.longest) {
            return Err(RawError::Config(format!("frames of {} bytes; give 64 to 9216", config.longest)));
        }
        if !config.frames.is_power_of_two() || !(64..=16_384).contains(&config.frames) {
            return Err(RawError::Config(format!("{} frames; give a power of two, 64 to 16384", config.frames)));
        }
        let index = index_of(&config.device).ok_or_else(|| RawError::NoDevice(config.device.clone()))?;
        let fits = config.longest <= xdp::LONGEST;
        match config.mode {
            RawMode::Packet => {}
            RawMode::Auto if !fits => {
                tracing::info!(device = config.device, longest = config.longest, "frames too long for AF_XDP");
            }
            RawMode::Auto => match XdpDevice::open(config, index) {
                Ok(device) => return Ok(RawDevice::Xdp(device)),
                Err(error) => tracing::info!(%error, "AF_XDP is not available; using AF_PACKET"),
            },
            RawMode::XdpNative | RawMode::XdpGeneric if !fits => {
                let text = format!("AF_XDP takes frames of at most {} bytes, not {}", xdp::LONGEST, config.longest);
                return Err(RawError::Config(text));
            }
            RawMode::XdpNative | RawMode::XdpGeneric => return XdpDevice::open(config, index).map(RawDevice::Xdp),
        }
        PacketDevice::open(config, index).map(RawDevice::Packet)
    }

    /// The mode in use: "xdp-native", "xdp-generic" or "packet".
    pub fn mode(&self) -> &'static str {
        match self {
            RawDevice::Xdp(device) if device.is_native() => "xdp-native",
            RawDevice::Xdp(_) => "xdp-generic",
            RawDevice::Packet(_) => "packet",
        }
    }

    /// Receives up to [`RAW_BATCH`] frames without waiting; invalidates the last batch.
    ///
    /// # Errors
    /// The device is gone, or down.
    #[inline]
    pub fn receive(&mut self) -> io::Result<usize> {
        match self {
            RawDevice::Xdp(device) => Ok(device.receive()),
            RawDevice::Packet(device) => device.receive(),
        }
    }

    /// A frame of the last batch.
    #[inline]
    pub fn frame(&self, index: usize) -> &[u8] {
        match self {
            RawDevice::Xdp(device) => device.frame(index),
            RawDevice::Packet(device) => device.frame(index),
        }
    }

    /// Arrival time of a frame of the last batch at the device, monotonic clock, ns, as precise as the kernel reports
    /// it. Never later than `now`, and at most a second before it. Excludes the time that the frame then waited for
    /// this thread.
    #[inline]
    pub fn arrived_at(&self, index: usize, now: u64) -> u64 {
        let at = match self {
            RawDevice::Xdp(device) => device.arrived_at(index),
            RawDevice::Packet(device) => device.arrived_at(index),
        };
        match now.checked_sub(at) {
            Some(age) if age <= OLDEST_NS => at,
            _ => now,
        }
    }

    /// Queues a frame, given in parts. It is sent with the next [`flush`](Self::flush) at the latest.
    #[inline]
    pub fn send(&mut self, parts: &[&[u8]]) {
        match self {
            RawDevice::Xdp(device) => device.send(parts),
            RawDevice::Packet(device) => device.send(parts),
        }
    }

    /// Makes the kernel send the queued frames.
    #[inline]
    pub fn flush(&mut self) {
        match self {
            RawDevice::Xdp(device) => device.flush(),
            RawDevice::Packet(device) => device.flush(),
        }
    }

    /// Descriptor to wait on.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            RawDevice::Xdp(device) => device.fds(),
            RawDevice::Packet(device) => device.fds(),
        }
    }

    /// Counters since it was opened. Takes a system call per queue.
    pub fn counters(&mut self) -> RawCounters {
        match self {
            RawDevice::Xdp(device) => device.counters(),
            RawDevice::Packet(device) => device.counters(),
        }
    }
}

/// The interface index of a device.
fn index_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // SAFETY: a NUL-terminated string that lives through the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}

fn open_error(device: &str, what: &'static str) -> impl FnOnce(io::Error) -> RawError {
    let device = device.to_owned();
    move |source| RawError::Open { device, what, source }
}
