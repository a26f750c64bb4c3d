//! Devices of TAP ports that outlive the daemon, with their index, addresses and routes, however it ended.
//!
//! There are two mechanisms, which complement each other. The service manager holds the queues while the daemon is not
//! running (`sd_notify(3)`, `FDSTORE=1`): the carrier stays, and packets from the guest wait. And devices are
//! persistent: they also exist after the service was stopped, and without a service manager; [`crate::devices`] records
//! them.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use bifrost_port::PolledPort as _;
use bifrost_port::tap::{self, DeviceId, Requeued, TapConfig, TapError, TapQueue};
use sd_notify::NotifyState;

use crate::devices::{Devices, Record};

/// How long after the start other processes may hold queues of our devices: a killed daemon takes a moment to end.
const PATIENCE: Duration = Duration::from_secs(1);

/// Devices that outlive the daemon.
#[derive(Debug)]
pub(crate) struct Kept {
    /// Descriptors from the service manager that no port has taken yet, by their names.
    found: BTreeMap<String, OwnedFd>,
    /// Devices in use, by port.
    held: BTreeMap<String, Held>,
    /// Whether there is a service manager.
    manager: bool,
    /// Whether devices are to outlive the daemon.
    keep: bool,
    /// Records of persistent devices; `None` if devices are not to be kept, and were not before.
    devices: Option<Devices>,
    /// New devices that are not persistent yet, so that they disappear if the daemon cannot start.
    fresh: Option<BTreeMap<String, (DeviceId, TapConfig)>>,
    deadline: Instant,
    /// Whether another daemon still uses the devices: none may be removed or recreated.
    is_shared: bool,
    /// Devices with another number of queues than in that daemon, with their ports.
    requeued: Vec<(String, Requeued)>,
    /// What the service manager is told when that daemon no longer uses them: queues to hold, and queues to release.
    to_hold: Vec<(String, OwnedFd)>,
    to_release: Vec<String>,
}

/// A device that exists until it is removed.
#[derive(Debug)]
#[must_use]
pub(crate) struct Held {
    /// The service manager's names for its queues.
    names: Vec<String>,
    queue: OwnedFd,
}

impl Kept {
    /// Takes the descriptors from the service manager. Call it once, before the process opens descriptors by number.
    pub(crate) fn take() -> Kept {
        let mut found = BTreeMap::new();
        match sd_notify::listen_fds_with_names() {
            Ok(fds) => {
                for (fd, name) in fds {
                    // SAFETY: the service manager opened these for this process alone (LISTEN_PID), and no other code
                    // takes them.
                    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                    // Child processes must not inherit them. This cannot fail for an open descriptor.
                    let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
                    found.insert(name, fd);
                }
            }
            Err(error) => tracing::warn!(%error, "cannot read the descriptors from the service manager"),
        }
        Kept { found, ..Kept::nothing() }
    }

    /// No devices of an earlier daemon.
    pub(crate) fn nothing() -> Kept {
        Kept {
            found: BTreeMap::new(),
            held: BTreeMap::new(),
            manager: std::env::var_os("NOTIFY_SOCKET").is_some(),
            keep: true,
            devices: None,
            fresh: Some(BTreeMap::new()),
            deadline: Instant::now() + PATIENCE,
            is_shared: false,
            requeued: Vec::new(),
            to_hold: Vec::new(),
            to_release: Vec::new(),
        }
    }

    /// [`remember`](Self::remember), with what a running daemon has handed over: its `lock` of the records, and its
    /// devices' `queues` by name. Both daemons use them until [`started`](Self::started).
    ///
    /// # Errors
    /// They cannot be read.
    pub(crate) fn remember_handed(
        &mut self,
        directory: &Path,
        keep: bool,
        lock: Option<OwnedFd>,
        queues: BTreeMap<String, OwnedFd>,
    ) -> Result<()> {
        (self.keep, self.is_shared) = (keep, true);
        self.devices = lock.map(|lock| Devices::open_locked(directory, lock.into())).transpose()?;
        self.found.extend(queues);
        Ok(())
    }

    /// A duplicate of the records' lock, for another daemon.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub(crate) fn lock(&self) -> std::io::Result<Option<OwnedFd>> {
        self.devices.as_ref().map(Devices::lock).transpose()
    }

    /// Opens the records of persistent devices in `directory`. Without `keep`, the devices of this daemon end with it;
    /// those of an earlier daemon are reused for the last time.
    ///
    /// # Errors
    /// Another daemon holds the lock, or the records cannot be read or written.
    pub(crate) fn remember(&mut self, directory: &Path, keep: bool) -> Result<()> {
        self.keep = keep;
        self.devices = (keep || directory.exists()).then(|| Devices::open(directory)).transpose()?;
        self.deadline = Instant::now() + PATIENCE;
        Ok(())
    }

    /// The queues of a port's device, in worker order. The device is that of an earlier daemon, changed to `config`, or
    /// otherwise a new one. It is to outlive this daemon, too.
    ///
    /// # Errors
    /// The device cannot be created.
    pub(crate) fn open(&mut self, port: &str, config: &TapConfig) -> Result<Vec<TapQueue>, TapError> {
        let names: Vec<String> = (0..config.queues).map(|queue| name(port, queue, config)).collect();
        let record = self.devices.as_ref().and_then(|devices| devices.get(port)).cloned();
        // All queues that the other daemon uses; one that nobody reads would keep its packets.
        let handed = self.take_handed(port, if self.is_shared { u16::MAX } else { config.queues });
        let mut stored: Vec<String> = handed.iter().map(|(name, _)| name.clone()).collect();
        let mut queues = None;
        if !handed.is_empty() && self.is_shared {
            let (taken, requeued) = tap::take_over(config, handed.into_iter().map(|(_, queue)| queue).collect())?;
            self.requeued.extend(requeued.map(|requeued| (port.to_owned(), requeued)));
            self.to_release.extend(stored.split_off(stored.len().min(taken.len())));
            queues = Some(taken);
        } else if !handed.is_empty() {
            queues = adopt(port, config, record.as_ref(), handed, &names);
            if queues.is_none() {
                stored.drain(..).for_each(|name| forget(&name));
            }
        }
        if let (None, Some(record), false) = (&queues, &record, self.is_shared) {
            queues = self.reattach(port, config, record);
        }
        let is_new = queues.is_none();
        let queues = match queues {
            Some(queues) => {
                tracing::info!(port, "takes over its device");
                queues
            }
            None => {
                if let Some(devices) = &mut self.devices {
                    devices.forget(port);
                }
                tap::create(config)?
            }
        };
        if !self.keep {
            stored.drain(..).for_each(|name| forget(&name));
        } else if self.manager {
            for (queue, name) in queues.iter().zip(&names).skip(stored.len()) {
                if !self.is_shared {
                    hold(name, queue.fd());
                } else if let Ok(queue) = queue.fd().try_clone_to_owned() {
                    self.to_hold.push((name.clone(), queue));
                }
            }
            stored.extend(names.into_iter().skip(stored.len()));
        }
        let Some(first) = queues.first() else { return Ok(queues) };
        if self.keep
            && let Ok(queue) = first.fd().try_clone_to_owned()
        {
            self.held.insert(port.to_owned(), Held { names: stored, queue });
        }
        match (first.device(), &mut self.fresh) {
            (Some(id), Some(fresh)) if is_new => {
                fresh.insert(port.to_owned(), (id, config.clone()));
            }
            (Some(id), _) => self.persist(port, id, config, first.fd()),
            (None, _) => tracing::warn!(port, "the kernel does not identify its device; it will end with the daemon"),
        }
        Ok(queues)
    }

    /// Keeps a port's device as if an earlier daemon had left it, with its `queues` in worker order. The same port can
    /// then [open](Kept::open) it with other parameters. `false`: there is nothing to keep.
    pub(crate) fn set_aside(&mut self, port: &str, queues: Vec<OwnedFd>) -> bool {
        let recorded = self.devices.as_ref().is_some_and(|devices| devices.get(port).is_some());
        let Some(held) = self.held.remove(port).filter(|_| recorded && !queues.is_empty()) else { return false };
        // Without a service manager these names are only used here.
        let names = (0..).map(|queue| held.names.get(queue).cloned().unwrap_or(format!("tap.{queue}.00000000.{port}")));
        self.found.extend(names.zip(queues));
        true
    }

    /// Call when the daemon has started: from now on its devices outlive it.
    pub(crate) fn started(&mut self) {
        self.is_shared = false;
        self.to_release.drain(..).for_each(|name| forget(&name));
        self.to_hold.drain(..).for_each(|(name, queue)| hold(&name, queue.as_fd()));
        for (port, (id, config)) in self.fresh.take().unwrap_or_default() {
            if let Some(held) = self.held.remove(&port) {
                self.persist(&port, id, &config, held.queue.as_fd());
                self.held.insert(port, held);
            }
        }
    }

    /// The name of a port's queue: the service manager's, which may be of an earlier configuration, or otherwise that of
    /// this one.
    pub(crate) fn queue_name(&self, port: &str, queue: u16, config: &TapConfig) -> String {
        let held = self.held.get(port).and_then(|held| held.names.get(usize::from(queue)));
        held.cloned().unwrap_or_else(|| name(port, queue, config))
    }

    /// Takes the devices with another number of queues than in the daemon that hands over, with their ports.
    pub(crate) fn take_requeued(&mut self) -> Vec<(String, Requeued)> {
        std::mem::take(&mut self.requeued)
    }

    /// Makes the service manager release a port's device, which exists until it is [removed](Held::remove).
    pub(crate) fn release(&mut self, port: &str) -> Option<Held> {
        let held = self.held.remove(port).or_else(|| {
            let (names, queues): (Vec<_>, Vec<_>) = self.take_handed(port, u16::MAX).into_iter().unzip();
            Some(Held { names, queue: queues.into_iter().next()? })
        })?;
        held.names.iter().for_each(|name| forget(name));
        // In this order: if the daemon is killed in between, only a record without a device remains.
        let _ = tap::set_persistent(held.queue.as_fd(), false);
        if let Some(devices) = &mut self.devices {
            devices.forget(port);
        }
        if let Some(fresh) = &mut self.fresh {
            fresh.remove(port);
        }
        Some(held)
    }

    /// Removes devices of earlier daemons that no port has taken over. `ports` are all TAP ports, including those
    /// without a device.
    pub(crate) fn remove_rest<'a>(&mut self, ports: impl Iterator<Item = &'a str>) {
        if self.is_shared {
            return;
        }
        for (name, queue) in std::mem::take(&mut self.found) {
            forget(&name);
            if port_of(&name).is_some() {
                Held { names: Vec::new(), queue }.remove();
            }
        }
        let ports: std::collections::HashSet<&str> = ports.collect();
        let Some(devices) = &mut self.devices else { return };
        for port in devices.ports().iter().filter(|port| !ports.contains(port.as_str())) {
            remove_recorded(devices, port);
        }
    }

    /// The queues of a port's device from the service manager: the first ones in worker order, up to the given number.
    /// The service manager is asked to release the others.
    fn take_handed(&mut self, port: &str, queues: u16) -> Vec<(String, OwnedFd)> {
        let of_port: Vec<_> = self.found.extract_if(.., |name, _| port_of(name) == Some(port)).collect();
        let mut handed: Vec<_> = of_port.into_iter().map(|(name, fd)| (queue_of(&name), name, fd)).collect();
        handed.sort_by(|a, b| (a.0, &a.1).cmp(&(b.0, &b.1)));
        let mut taken = Vec::new();
        for (queue, name, fd) in handed {
            if queue == Some(taken.len() as u16) && taken.len() < usize::from(queues) {
                taken.push((name, fd));
            } else {
                forget(&name);
            }
        }
        taken
    }

    /// Reattaches to the recorded device, or removes it if that fails.
    fn reattach(&self, port: &str, config: &TapConfig, record: &Record) -> Option<Vec<TapQueue>> {
        let former = record.config();
        let problem = if (&former.netns, &former.device) == (&config.netns, &config.device) {
            match tap::reattach(config, &former, record.id(), self.deadline) {
                Ok(Some(queues)) => return Some(queues),
                Ok(None) => "its device no longer exists".to_owned(),
                Err(error) => error.to_string(),
            }
        } else {
            "its device has another name or network namespace".to_owned()
        };
        tracing::warn!(port, problem, "creating a new device");
        if let Err(error) = tap::remove_device(former.netns.as_deref(), record.id()) {
            tracing::warn!(port, %error, "a device remains");
        }
        None
    }

    /// Makes a device outlive the daemon, or end with it, as configured.
    fn persist(&mut self, port: &str, id: DeviceId, config: &TapConfig, queue: BorrowedFd<'_>) {
        let Some(devices) = &mut self.devices else { return };
        let done = if self.keep {
            // Never persistent without a record.
            let noted = devices.set(port, id, config);
            noted.and_then(|()| Ok(tap::set_persistent(queue, true)?))
        } else {
            let done = tap::set_persistent(queue, false);
            devices.forget(port);
            done.map_err(anyhow::Error::from)
        };
        if let Err(error) = done {
            tracing::warn!(port, "its device may not outlive the daemon: {error:#}");
        }
    }
}

/// Takes over queues from the service manager; `None` if that is not possible, and the device is removed.
fn adopt(
    port: &str,
    config: &TapConfig,
    record: Option<&Record>,
    handed: Vec<(String, OwnedFd)>,
    names: &[String],
) -> Option<Vec<TapQueue>> {
    let id = handed.first().and_then(|(_, queue)| tap::identify(queue.as_fd()).ok());
    let former = match record.filter(|record| Some(record.id()) == id) {
        Some(record) => Some(record.config()),
        // Without a record, the names show whether the parameters are the same.
        None => handed.iter().zip(names).all(|((found, _), name)| found == name).then(|| config.clone()),
    };
    let queues: Vec<OwnedFd> = handed.into_iter().map(|(_, queue)| queue).collect();
    let first = queues.first().map(OwnedFd::try_clone);
    let problem = match former.map(|former| tap::adopt(config, &former, queues)) {
        Some(Ok(queues)) => return Some(queues),
        Some(Err(error)) => error.to_string(),
        None => "it has other parameters".to_owned(),
    };
    tracing::warn!(port, problem, "discarding its queues from the service manager");
    if let Some(Ok(queue)) = first {
        Held { names: Vec::new(), queue }.remove();
    }
    None
}

/// Removes a device that no daemon uses, with its record. `false`: the device still exists.
fn remove_recorded(devices: &mut Devices, port: &str) -> bool {
    let Some(record) = devices.get(port) else { return true };
    match tap::remove_device(record.config().netns.as_deref(), record.id()) {
        Ok(was_there) => {
            if was_there {
                tracing::info!(port, "removed the device of an earlier daemon");
            }
            devices.forget(port);
            true
        }
        Err(error) => {
            tracing::warn!(port, %error, "cannot remove the device of an earlier daemon");
            false
        }
    }
}

/// Removes the persistent devices that a daemon has left behind.
///
/// # Errors
/// A running daemon uses them, or a device cannot be removed.
pub(crate) fn remove_all(directory: &Path) -> Result<()> {
    if !directory.exists() {
        return Ok(());
    }
    let mut devices = Devices::open(directory)?;
    let left = devices.ports().into_iter().filter(|port| !remove_recorded(&mut devices, port)).count();
    devices.remove_directory();
    anyhow::ensure!(left == 0, "{left} devices could not be removed");
    Ok(())
}

impl Held {
    /// Removes the device, which the kernel takes long for.
    pub(crate) fn remove(self) {
        if let Err(error) = tap::remove(self.queue.as_fd()) {
            tracing::warn!(%error, "a device remains");
        }
    }
}

/// The number of a queue from its name.
fn queue_of(name: &str) -> Option<u16> {
    name.strip_prefix("tap.")?.split('.').next()?.parse().ok()
}

/// The service manager's name for a queue. It contains a checksum of all parameters of the device. At most 255
/// characters, no colon.
fn name(port: &str, queue: u16, config: &TapConfig) -> String {
    let TapConfig { device, netns, mac, addresses, mtu, default_gateway, queues, tx_queue_packets, pools: _ } = config;
    let all = format!("{device} {netns:?} {mac:?} {addresses:?} {mtu} {default_gateway:?} {queues} {tx_queue_packets}");
    format!("tap.{queue}.{:08x}.{port}", crc32fast::hash(all.as_bytes()))
}

/// The port of a queue from its name.
fn port_of(name: &str) -> Option<&str> {
    name.strip_prefix("tap.")?.splitn(3, '.').nth(2)
}

/// The ports whose devices have a single queue, and can have no more, of handed queues by name.
pub(crate) fn single_queue(queues: &BTreeMap<String, OwnedFd>) -> impl Iterator<Item = &str> {
    let is_single = |queue: &OwnedFd| tap::is_multi_queue(queue.as_fd()).is_ok_and(|is_multi| !is_multi);
    queues.iter().filter(move |(_, queue)| is_single(queue)).filter_map(|(name, _)| port_of(name))
}

/// Makes the service manager hold a queue.
fn hold(name: &str, queue: BorrowedFd<'_>) {
    let state = [NotifyState::FdStore, NotifyState::FdName(name)];
    if let Err(error) = sd_notify::notify_with_fds(&state, &[queue]) {
        tracing::warn!(name, %error, "the service manager cannot keep a device over a restart");
    }
}

fn forget(name: &str) {
    let state = [NotifyState::FdStoreRemove, NotifyState::FdName(name)];
    if let Err(error) = sd_notify::notify(&state) {
        tracing::warn!(name, %error, "cannot ask the service manager to release a device");
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn the_name_of_a_queue_identifies_its_port_and_device() {
        let config = TapConfig { device: "eth0".into(), netns: Some("a".into()), ..TapConfig::default() };
        let first = name("db.1", 0, &config);
        assert_eq!(port_of(&first), Some("db.1"));
        assert!(first.len() <= 255 && !first.contains(':'), "{first}");
        for other in [
            TapConfig { device: "eth1".into(), ..config.clone() },
            TapConfig { netns: None, ..config.clone() },
            TapConfig { mac: [2, 0, 0, 0, 0, 1], ..config.clone() },
            TapConfig { addresses: vec![(IpAddr::from([10, 0, 0, 1]), 24)], ..config.clone() },
            TapConfig { mtu: 1400, ..config.clone() },
            TapConfig { default_gateway: Some(IpAddr::from([10, 0, 0, 1])), ..config.clone() },
            TapConfig { queues: 2, ..config.clone() },
        ] {
            assert_ne!(name("db.1", 0, &other), first, "{other:?}");
        }
        assert_ne!(name("db.1", 1, &config), first);
        for name in ["", "tap", "tap.0", "tap.0.00000000", "socket.0.00000000.a"] {
            assert_eq!(port_of(name), None, "{name}");
        }
        assert_eq!(queue_of(&name("db.1", 31, &config)), Some(31));
        for name in ["", "tap", "tap.", "tap.x.00000000.a", "tap.-1.00000000.a", "tap.65536.00000000.a"] {
            assert_eq!(queue_of(name), None, "{name}");
        }
    }
}
