//! Devices that outlive all processes that had their queues open (`TUNSETPERSIST`).
//!
//! While no process has a queue open, the kernel removes the carrier and drops the guest's packets; index, addresses
//! and routes stay.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use super::configure::{self, Link, index};
use super::statistics::DeviceStatistics;
use super::{TapConfig, TapError, TapQueue, complete, netns, open_queue, steer, sys};

/// Poll interval for a device that a process still uses.
const LOOK: Duration = Duration::from_millis(5);

/// Identity of a device, unique until the host reboots, unless a guest deletes our device and requests its index for
/// one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceId {
    /// The cookie of its network namespace (`SO_NETNS_COOKIE`), which the kernel never reuses. Inode numbers are
    /// reused.
    pub namespace: u64,
    /// Its interface index there, which survives renames.
    pub index: u32,
}

impl DeviceId {
    /// A device in the calling thread's namespace, by name.
    pub(crate) fn of(device: &str) -> io::Result<DeviceId> {
        Ok(DeviceId { namespace: sys::namespace_cookie()?, index: index(device)? })
    }
}

/// The device that this queue belongs to.
///
/// # Errors
/// The queue is not attached, or its device is gone.
pub fn identify(queue: BorrowedFd<'_>) -> io::Result<DeviceId> {
    let (device, _) = sys::attached(queue)?;
    let namespace = File::from(sys::network_namespace(queue)?);
    let id = netns::within_opened(Some((namespace, "of the device".into())), || Ok(DeviceId::of(&device)));
    id.unwrap_or_else(|error| Err(io::Error::other(error)))
}

/// Sets whether the device of this queue persists when its last queue is closed.
///
/// # Errors
/// The device is gone.
pub fn set_persistent(queue: BorrowedFd<'_>, persistent: bool) -> io::Result<()> {
    sys::set_persistent(queue, persistent)
}

/// Reattaches to a device that was created for `former` and has no queues any more. Applies only the differences in
/// `config`: the guest's own changes stay, including its name for the device. `None`: the device is gone, or in another
/// namespace. Another process may hold its queues until `deadline`, because a killed process takes a moment to end.
///
/// # Errors
/// [`TapError::Foreign`]: the device exists but cannot become what `config` says, or another process has its queues.
/// Others: see [`TapError`].
pub fn reattach(
    config: &TapConfig,
    former: &TapConfig,
    id: DeviceId,
    deadline: Instant,
) -> Result<Option<Vec<TapQueue>>, TapError> {
    config.check()?;
    let foreign = |problem: String| TapError::Foreign { device: config.device.clone(), problem };
    let attached = in_namespace(config.netns.as_deref(), id, || {
        let Some(link) = unused(config, id, deadline)? else { return Ok(None) };
        if config.queues > 1 && !link.multi_queue {
            return Err(foreign("a single-queue device cannot become a multi-queue device".to_string()));
        }
        let mut queues = Vec::new();
        for _ in 0..config.queues {
            queues.push(open_unused(config, &link, deadline)?);
            // If the device was just renamed, this name would create a new device, or open another one.
            if index(&link.name).ok() != Some(id.index) {
                return Err(foreign("its name is changing".to_string()));
            }
        }
        if let Some(first) = queues.first().filter(|_| link.multi_queue) {
            steer(config, first.as_fd(), config.queues)?;
        }
        configure::update(&link.name, former, config)?;
        Ok(Some((queues, DeviceStatistics::open(&link.name).ok())))
    })?;
    Ok(attached.map(|(queues, statistics)| complete(config, queues, statistics, Some(id))))
}

/// Removes a device in namespace `netns`, even if a process has its queues open. Returns whether it existed.
///
/// # Errors
/// The namespace cannot be entered, or the kernel refuses.
pub fn remove_device(netns: Option<&str>, id: DeviceId) -> Result<bool, TapError> {
    let removed = in_namespace(netns, id, || {
        let Some(link) = configure::look(id.index)? else { return Ok(None) };
        configure::delete(&link.name).map(Some)
    })?;
    Ok(removed.is_some())
}

/// Runs `work` in the namespace if it is still the same one.
fn in_namespace<T: Send>(
    netns: Option<&str>,
    id: DeviceId,
    work: impl FnOnce() -> Result<Option<T>, TapError> + Send,
) -> Result<Option<T>, TapError> {
    let result = netns::within(netns, || match sys::namespace_cookie() {
        Ok(namespace) if namespace == id.namespace => work(),
        _ => Ok(None),
    });
    match result {
        Err(TapError::NoNamespace { .. }) => Ok(None),
        result => result,
    }
}

/// The device once no process has a queue of it. The kernel does not report queues of single-queue devices.
fn unused(config: &TapConfig, id: DeviceId, deadline: Instant) -> Result<Option<Link>, TapError> {
    loop {
        let link = configure::look(id.index)?;
        match link {
            Some(link) if link.queues > 0 && Instant::now() < deadline => std::thread::sleep(LOOK),
            Some(link) if link.queues > 0 => return Err(in_use(config)),
            link => return Ok(link),
        }
    }
}

/// A queue of the device, once no process holds its only one.
fn open_unused(config: &TapConfig, link: &Link, deadline: Instant) -> Result<OwnedFd, TapError> {
    loop {
        match open_queue(config, &link.name, false, link.multi_queue) {
            Err(TapError::Create { source, .. }) if source.raw_os_error() == Some(libc::EBUSY) => {}
            opened => return opened,
        }
        if Instant::now() >= deadline {
            return Err(in_use(config));
        }
        std::thread::sleep(LOOK);
    }
}

fn in_use(config: &TapConfig) -> TapError {
    TapError::Foreign { device: config.device.clone(), problem: "another process has them open".to_string() }
}

/// Reconfigures an adopted device to `config`, and opens missing queues.
pub(super) fn renew(
    config: &TapConfig,
    former: &TapConfig,
    name: &str,
    queues: &mut Vec<OwnedFd>,
) -> Result<(Option<DeviceStatistics>, Option<DeviceId>), TapError> {
    let id = DeviceId::of(name).ok();
    while queues.len() < usize::from(config.queues) {
        queues.push(open_queue(config, name, false, true)?);
        let added = queues.last().map(|queue| sys::attached(queue.as_fd()));
        if DeviceId::of(name).ok() != id || !matches!(added, Some(Ok(_))) {
            let problem = "its name is changing".to_string();
            return Err(TapError::Foreign { device: config.device.clone(), problem });
        }
    }
    configure::update(name, former, config)?;
    Ok((DeviceStatistics::open(name).ok(), id))
}
