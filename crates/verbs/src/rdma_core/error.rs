//! Why a NIC cannot be used, and what to do about it.

use std::io;
use std::net::IpAddr;

/// Why there is no NIC with verbs for an address.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The kernel has no device.
    #[error(
        "this host has no RDMA device: /sys/class/infiniband_verbs has none. Load the NIC's driver; for soft-RoCE: rdma link \
         add rxe0 type rxe netdev DEVICE"
    )]
    NoDevice,
    /// The library is not installed.
    #[error("cannot load libibverbs: {0}. Install rdma-core (Debian: libibverbs1 and ibverbs-providers)")]
    Library(String),
    /// The library is too old.
    #[error("libibverbs has no {0}: version 32 of rdma-core or a later one is needed")]
    Symbol(&'static str),
    /// The kernel has a device, but the library has no driver for it.
    #[error("libibverbs has no driver for the RDMA devices of this host (Debian: install ibverbs-providers)")]
    NoDriver,
    /// A device cannot be opened.
    #[error(
        "cannot open the RDMA device {0}: {text}. Processes need to read and write /dev/infiniband/uverbs*",
        text = io::Error::from_raw_os_error(*.1)
    )]
    Open(String, i32),
    /// No port has the address.
    #[error("no RDMA device has {0} as a RoCE v2 address; there are: {1}")]
    NoAddress(IpAddr, String),
    /// The port is down.
    #[error("port {1} of the RDMA device {0} is not active: ip link set its network device up, and look at its cable")]
    Down(String, u8),
    /// A library function failed.
    #[error("{0}: {text}", text = io::Error::from_raw_os_error(*.1))]
    Call(&'static str, i32),
}
