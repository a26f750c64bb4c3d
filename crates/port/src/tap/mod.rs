//! A TAP device in a container's network namespace, one [`TapQueue`] per worker.
//!
//! The guest's kernel hands over packets with partial checksums and unsegmented (virtio headers say so), and accepts
//! merged packets. The device exists while a process has one of its queues open, unless it is
//! [persistent](set_persistent). The next daemon [adopts](adopt()) queues that another process holds, and
//! [reattaches](reattach()) to a device without queues.

mod adopt;
mod configure;
mod counters;
mod netns;
mod persist;
mod queue;
mod requeued;
mod statistics;
mod steering;
mod sys;
mod writer;

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

pub use adopt::{adopt, is_multi_queue, remove, take_over};
pub use counters::TapCounters;
pub use netns::{NamespaceId, namespace};
pub use persist::{DeviceId, identify, reattach, remove_device, set_persistent};
pub use queue::{PoolSizes, TapQueue};
pub use requeued::{Requeued, frame};
use statistics::DeviceStatistics;
pub use steering::Steering;

/// Length of an Ethernet header with one VLAN tag, bytes.
const ETHERNET: usize = 18;

/// How to create a TAP device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapConfig {
    /// Interface name, 1..=15 bytes.
    pub device: String,
    /// Network namespace in which the guest sees the device: a name under /run/netns, or a path (with a slash). `None`:
    /// the daemon's own.
    pub netns: Option<String>,
    /// The guest's MAC address.
    pub mac: [u8; 6],
    /// The guest's addresses and prefix lengths.
    pub addresses: Vec<(IpAddr, u8)>,
    /// The guest's MTU, bytes, 68..=65521.
    pub mtu: u16,
    /// Default route, if any.
    pub default_gateway: Option<IpAddr>,
    /// Queues, 1..=32: one per worker.
    pub queues: u16,
    /// Queue length in the kernel, packets per queue, until they are fetched; default 4096.
    pub tx_queue_packets: u32,
    /// Buffers of each queue.
    pub pools: PoolSizes,
}

/// Why a TAP device cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum TapError {
    /// The configuration is invalid.
    #[error("TAP device {device:?}: {problem}")]
    Config {
        /// Interface name.
        device: String,
        /// What is wrong with it.
        problem: String,
    },
    /// The named namespace does not exist.
    #[error("no network namespace {netns:?} (looked for {path}); create it (ip netns add) or correct port.netns")]
    NoNamespace {
        /// As configured.
        netns: String,
        /// Where it was looked for.
        path: PathBuf,
    },
    /// The namespace exists but cannot be entered.
    #[error("cannot enter network namespace {path}: {source}; it needs CAP_SYS_ADMIN and the file of a namespace")]
    Enter {
        /// The namespace's file.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// The TAP driver cannot be opened.
    #[error("cannot open {}: {source}; load the tun module, or give the daemon this device node", sys::TUN_DEVICE)]
    NoDriver {
        /// The kernel's error.
        source: io::Error,
    },
    /// The kernel did not create the device.
    #[error("cannot create TAP device {device} {place}: {source}; {hint}")]
    Create {
        /// Interface name.
        device: String,
        /// The namespace, for the message.
        place: String,
        /// The kernel's error.
        source: io::Error,
        /// What to do.
        hint: &'static str,
    },
    /// The device was created but could not be configured.
    #[error("TAP device {device}: cannot {step}: {source}")]
    Configure {
        /// Interface name.
        device: String,
        /// The failed step.
        step: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The queues to adopt do not belong to the configured device.
    #[error("TAP device {device}: cannot take over its queues: {problem}")]
    Foreign {
        /// Interface name.
        device: String,
        /// How they differ.
        problem: String,
    },
    /// Cannot start a thread to work in the namespace.
    #[error("cannot start a thread to enter a network namespace: {0}")]
    Thread(io::Error),
}

/// Creates a TAP device, configures it, brings it up, and returns its queues in worker order.
///
/// # Errors
/// See [`TapError`]. A partly created device is removed.
pub fn create(config: &TapConfig) -> Result<Vec<TapQueue>, TapError> {
    config.check()?;
    let (queues, statistics, id) = netns::within(config.netns.as_deref(), || {
        let open = |queue| open_queue(config, &config.device, queue == 0, config.queues > 1);
        let queues: Vec<OwnedFd> = (0..config.queues).map(open).collect::<Result<_, _>>()?;
        // The kernel sends the first packets, such as neighbour solicitations, as soon as the device is up.
        if let [first, _, ..] = &queues[..] {
            steer(config, first.as_fd(), config.queues)?;
        }
        configure::configure(config)?;
        // A port works without the kernel's counters.
        Ok((queues, DeviceStatistics::open(&config.device).ok(), DeviceId::of(&config.device).ok()))
    })?;
    Ok(complete(config, queues, statistics, id))
}

/// Distributes the guest's packets over the first `queues` queues of the device of `queue`.
fn steer(config: &TapConfig, queue: BorrowedFd<'_>, queues: u16) -> Result<(), TapError> {
    let attached = Steering::load(queues).and_then(|steering| steering.attach(queue));
    attached.map_err(|source| TapError::Configure {
        device: config.device.clone(),
        step: "attach the program that chooses its queue (this needs CAP_BPF and CAP_NET_ADMIN)".into(),
        source,
    })
}

/// The queues of a configured device.
fn complete(
    config: &TapConfig,
    queues: Vec<OwnedFd>,
    statistics: Option<DeviceStatistics>,
    id: Option<DeviceId>,
) -> Vec<TapQueue> {
    let max_frame = usize::from(config.mtu) + ETHERNET;
    let mut queues: Vec<TapQueue> = queues.into_iter().map(|fd| TapQueue::new(fd, config.pools, max_frame)).collect();
    if let Some(first) = queues.first_mut() {
        first.statistics = statistics.map(Arc::new);
        first.device = id;
    }
    queues
}

/// Opens a queue of the device `name`: the first queue of a new device, or a further one. `multi`: the device can have
/// several.
fn open_queue(config: &TapConfig, name: &str, first: bool, multi: bool) -> Result<OwnedFd, TapError> {
    let failed = |source: io::Error| TapError::Create {
        device: config.device.clone(),
        place: config.netns.as_ref().map_or_else(|| "here".into(), |n| format!("in network namespace {n}")),
        hint: match source.raw_os_error() {
            Some(libc::EBUSY | libc::EEXIST) => {
                "an interface of this name exists; choose another or remove it (ip link del)"
            }
            Some(libc::EPERM) => "it needs CAP_NET_ADMIN in that namespace",
            _ => "check port.device and port.queues",
        },
        source,
    };
    let fd = sys::open_tun().map_err(|source| TapError::NoDriver { source })?;
    sys::attach(fd.as_fd(), name, first, multi).map_err(failed)?;
    sys::set_virtio_header(fd.as_fd(), queue::VIRTIO).map_err(failed)?;
    sys::set_offload(fd.as_fd()).map_err(failed)?;
    Ok(fd)
}

impl Default for TapConfig {
    fn default() -> Self {
        Self {
            device: String::new(),
            netns: None,
            mac: [0; 6],
            addresses: Vec::new(),
            mtu: 1500,
            default_gateway: None,
            queues: 1,
            tx_queue_packets: 4096,
            pools: PoolSizes::default(),
        }
    }
}

impl TapConfig {
    fn check(&self) -> Result<(), TapError> {
        let printable = |b: u8| b.is_ascii_graphic() && !matches!(b, b'/' | b'%' | b':');
        let problem = if self.device.is_empty() || self.device.len() > 15 || !self.device.bytes().all(printable) {
            "an interface name has 1 to 15 printable characters, none of them '/', ':' or '%'".to_string()
        } else if matches!(self.device.as_str(), "." | "..") {
            "this is not a valid interface name".to_string()
        } else if !(68..=65_521).contains(&self.mtu) {
            format!("MTU {}; give 68 to 65521", self.mtu)
        } else if !(1..=32).contains(&self.queues) {
            format!("{} queues; give 1 to 32", self.queues)
        } else if self.mac[0] & 1 != 0 || self.mac == [0; 6] {
            "its MAC address is not a unicast address (group bit set, or all zeros)".to_string()
        } else if let Some((a, p)) = self.addresses.iter().find(|(a, p)| *p > if a.is_ipv4() { 32 } else { 128 }) {
            format!("address {a}/{p}: the prefix is too long")
        } else if self.pools.heads == 0 || self.pools.spills == 0 || self.pools.slots == 0 {
            "each pool needs at least one buffer".to_string()
        } else {
            return Ok(());
        };
        Err(TapError::Config { device: self.device.clone(), problem })
    }
}
