//! Errors of opening the AF_XDP underlay, and how to fix them.

use std::io;
use std::net::IpAddr;

use crate::udp::UdpError;

/// Why an [`AfxdpUnderlay`](super::AfxdpUnderlay) could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum AfxdpError {
    /// The configuration is invalid.
    #[error("underlay: {0}")]
    Config(String),
    /// The UDP sockets of the underlay could not be opened.
    #[error(transparent)]
    Udp(#[from] UdpError),
    /// No device has this local address.
    #[error("no interface has the address {0}; add it or correct underlay.addresses")]
    NoDevice(IpAddr),
    /// The XDP program cannot be loaded or attached.
    #[error("cannot attach an XDP program to {device}: {source}; {}", hint(source))]
    Attach {
        /// The device.
        device: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// A socket cannot be opened.
    #[error("cannot open an AF_XDP socket on queue {queue} of {device}: {source}; {}", hint(source))]
    Socket {
        /// The device.
        device: String,
        /// Its receive queue.
        queue: u32,
        /// The kernel's error.
        source: io::Error,
    },
    /// What another process has handed over does not fit.
    #[error("AF_XDP devices that were handed over: {0}; a restart is needed")]
    HandedOver(String),
    /// The kernel does not list its devices, or a thread cannot be started.
    #[error("cannot ask the kernel for the devices of the underlay: {0}")]
    Netlink(io::Error),
}

fn hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => "it needs CAP_NET_ADMIN, CAP_NET_RAW and CAP_BPF",
        Some(libc::EAFNOSUPPORT | libc::EPROTONOSUPPORT) => "this kernel has no AF_XDP sockets (CONFIG_XDP_SOCKETS)",
        Some(libc::EBUSY) => "another program uses it",
        Some(libc::ENOBUFS | libc::ENOMEM) => "memory must be locked for it; raise the limit (LimitMEMLOCK)",
        Some(libc::EOPNOTSUPP) => "the device does not support this; try underlay.xdp_mode = \"generic\"",
        Some(libc::ERANGE | libc::E2BIG) => "the device's MTU is too large for XDP in its driver",
        _ => "underlay.port = \"udp\" works on any device",
    }
}
