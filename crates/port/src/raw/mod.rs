//! Whole Ethernet frames from and to a network device that is ours alone: past the kernel's stack, tags and all.
//!
//! [`RawDevice`] takes every frame that arrives, over AF_XDP sockets or, where there are none or frames are too long for them, an AF_PACKET socket. The
//! kernel sees the frames of an AF_PACKET device, too: give such a device no addresses.

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

/// A time of arrival that is longer ago is not believed, ns.
const OLDEST_NS: u64 = 1_000_000_000;

/// Frames in a batch at most.
pub const RAW_BATCH: usize = 64;

/// How frames are had.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RawMode {
    /// AF_XDP if that can be had, otherwise AF_PACKET.
    #[default]
    Auto,
    /// AF_XDP in the driver.
    XdpNative,
    /// AF_XDP behind the driver, which any device can do.
    XdpGeneric,
    /// AF_PACKET.
    Packet,
}

/// How to open a [`RawDevice`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawConfig {
    /// The device's name.
    pub device: String,
    /// How frames are had.
    pub mode: RawMode,
    /// Bytes of the longest frame, tags included: 64 to 9216.
    pub longest: usize,
    /// Frames that are held for receiving, and for sending: a power of two, 64 to 16384.
    pub frames: u32,
}

/// Why a device could not be opened.
#[derive(Debug, Error)]
pub enum RawError {
    /// There is none of that name.
    #[error("no network device {0:?}")]
    NoDevice(String),
    /// Settings that make no sense.
    #[error("{0}")]
    Config(String),
    /// The kernel refused.
    #[error("{device}: {what}: {source}")]
    Open {
        /// The device.
        device: String,
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: io::Error,
    },
}

/// What happened at a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RawCounters {
    /// Frames received.
    pub rx_frames: u64,
    /// Bytes of them.
    pub rx_bytes: u64,
    /// Frames dropped because they are longer than allowed.
    pub rx_too_long_frames: u64,
    /// Frames dropped because their checksums are left for a device to be finished: the other end is on this machine, and must finish them itself.
    pub rx_open_checksum_frames: u64,
    /// Frames that the kernel dropped for want of room.
    pub rx_dropped_frames: u64,
    /// Frames sent.
    pub tx_frames: u64,
    /// Bytes of them.
    pub tx_bytes: u64,
    /// Frames not sent: longer than allowed.
    pub tx_too_long_frames: u64,
    /// Frames not sent: no room, or the kernel refused.
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
    /// There is no such device, or the kernel refuses.
    pub fn open(config: &RawConfig) -> Result<Self, RawError> {
        if !(64..=9216).contains(&config.longest) {
            return Err(RawError::Config(format!("frames of {} bytes; 64 to 9216 can be had", config.longest)));
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
                Err(error) => tracing::info!(%error, "no AF_XDP; AF_PACKET instead"),
            },
            RawMode::XdpNative | RawMode::XdpGeneric if !fits => {
                let text = format!("AF_XDP takes frames of at most {} bytes, not {}", xdp::LONGEST, config.longest);
                return Err(RawError::Config(text));
            }
            RawMode::XdpNative | RawMode::XdpGeneric => return XdpDevice::open(config, index).map(RawDevice::Xdp),
        }
        PacketDevice::open(config, index).map(RawDevice::Packet)
    }

    /// How frames are had: "xdp-native", "xdp-generic" or "packet".
    pub fn mode(&self) -> &'static str {
        match self {
            RawDevice::Xdp(device) if device.is_native() => "xdp-native",
            RawDevice::Xdp(_) => "xdp-generic",
            RawDevice::Packet(_) => "packet",
        }
    }

    /// Receives up to [`RAW_BATCH`] frames without waiting; those of the last batch are gone.
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

    /// When a frame of the last batch arrived at the device, on the monotonic clock, ns, as far as the kernel says so; never later
    /// than `now`, and at most a second before it. How long it then waited for this thread does not count.
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

    /// Sends a frame, in parts, with the next [`flush`](Self::flush) or before.
    #[inline]
    pub fn send(&mut self, parts: &[&[u8]]) {
        match self {
            RawDevice::Xdp(device) => device.send(parts),
            RawDevice::Packet(device) => device.send(parts),
        }
    }

    /// Has the kernel send.
    #[inline]
    pub fn flush(&mut self) {
        match self {
            RawDevice::Xdp(device) => device.flush(),
            RawDevice::Packet(device) => device.flush(),
        }
    }

    /// To wait for.
    pub fn fds(&self) -> Vec<BorrowedFd<'_>> {
        match self {
            RawDevice::Xdp(device) => device.fds(),
            RawDevice::Packet(device) => device.fds(),
        }
    }

    /// What happened since this was opened, which takes a system call for each queue.
    pub fn counters(&mut self) -> RawCounters {
        match self {
            RawDevice::Xdp(device) => device.counters(),
            RawDevice::Packet(device) => device.counters(),
        }
    }
}

/// The number of a device.
fn index_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    // SAFETY: a string that ends with 0, and lives through the call.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    (index != 0).then_some(index)
}

fn open_error(device: &str, what: &'static str) -> impl FnOnce(io::Error) -> RawError {
    let device = device.to_owned();
    move |source| RawError::Open { device, what, source }
}
