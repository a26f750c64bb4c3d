//! Devices of TAP ports that outlive the daemon, with their index, addresses and routes, however it ended.
//!
//! Twice, for each way has what the other lacks. A service manager holds queues while the daemon is away (`sd_notify(3)`, `FDSTORE=1`):
//! the carrier stays, and what the guest sends waits. And devices are persistent, so that they are there, too, after the service was
//! stopped, and without a service manager; [`crate::devices`] notes which.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Result;
use bifrost_port::PolledPort as _;
use bifrost_port::tap::{self, DeviceId, TapConfig, TapError, TapQueue};
use sd_notify::NotifyState;

use crate::devices::{Devices, Record};

/// How long after the start other processes may have queues of our devices: a daemon that was killed takes a moment to end.
const PATIENCE: Duration = Duration::from_secs(1);

/// What outlives the daemon.
#[derive(Debug)]
pub(crate) struct Kept {
    /// What the service manager handed to this process and no port has taken yet, by its name for it.
    found: BTreeMap<String, OwnedFd>,
    /// Devices in use, by port.
    held: BTreeMap<String, Held>,
    /// There is a service manager.
    manager: bool,
    /// Devices are to outlive the daemon.
    keep: bool,
    /// Which persistent devices there are; `None`: nothing is to be kept, and nothing was.
    devices: Option<Devices>,
    /// Devices that are new and not persistent yet: those of a daemon that cannot start go with it.
    fresh: Option<BTreeMap<String, (DeviceId, TapConfig)>>,
    deadline: Instant,
    /// Another daemon still uses the devices: none of them may be removed, or made again.
    is_shared: bool,
}

/// A device that is there until it is removed.
#[derive(Debug)]
#[must_use]
pub(crate) struct Held {
    /// The manager's names for its queues.
    names: Vec<String>,
    queue: OwnedFd,
}

impl Kept {
    /// Takes what the service manager has handed over. To be called once, before the process opens anything by number.
    pub(crate) fn take() -> Kept {
        let mut found = BTreeMap::new();
        match sd_notify::listen_fds_with_names() {
            Ok(fds) => {
                for (fd, name) in fds {
                    // SAFETY: the service manager opened these for this process alone (LISTEN_PID), and this is the only
                    // place that asks for them.
                    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                    // Nor are they for programs that this one starts. It cannot fail for an open descriptor.
                    let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
                    found.insert(name, fd);
                }
            }
            Err(error) => tracing::warn!(%error, "what the service manager hands over cannot be read"),
        }
        Kept { found, ..Kept::nothing() }
    }

    /// Nothing has outlived a daemon.
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
        }
    }

    /// [`remember`](Self::remember), with what a daemon that runs has handed over: its `lock` of the records, and its devices' `queues` by name. Until
    /// [`started`](Self::started) both have them.
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

    /// A copy of the lock of the records, for another daemon.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub(crate) fn lock(&self) -> std::io::Result<Option<OwnedFd>> {
        self.devices.as_ref().map(Devices::lock).transpose()
    }

    /// Takes the records of persistent devices in `directory`. Without `keep` the devices of this daemon are to end with it; those of
    /// an earlier one are taken up for the last time.
    ///
    /// # Errors
    /// Another daemon has them, or they cannot be read or written.
    pub(crate) fn remember(&mut self, directory: &Path, keep: bool) -> Result<()> {
        self.keep = keep;
        self.devices = (keep || directory.exists()).then(|| Devices::open(directory)).transpose()?;
        self.deadline = Instant::now() + PATIENCE;
        Ok(())
    }

    /// The queues of a port's device, in worker order: of the one that has outlived an earlier daemon, made what `config` says, or
    /// otherwise of a new one. This one is to outlive the daemon, too.
    ///
    /// # Errors
    /// No device can be made.
    pub(crate) fn open(&mut self, port: &str, config: &TapConfig) -> Result<Vec<TapQueue>, TapError> {
        let names: Vec<String> = (0..config.queues).map(|queue| name(port, queue, config)).collect();
        let record = self.devices.as_ref().and_then(|devices| devices.get(port)).cloned();
        let handed = self.take_handed(port, config.queues);
        let mut stored: Vec<String> = handed.iter().map(|(name, _)| name.clone()).collect();
        let mut queues = None;
        if !handed.is_empty() && self.is_shared {
            queues = Some(tap::adopt(config, config, handed.into_iter().map(|(_, queue)| queue).collect())?);
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
                let state = [NotifyState::FdStore, NotifyState::FdName(name)];
                if let Err(error) = sd_notify::notify_with_fds(&state, &[queue.fd()]) {
                    tracing::warn!(port, %error, "the service manager does not keep its device over a restart");
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
            (None, _) => tracing::warn!(port, "the kernel does not say which device it is: it ends with the daemon"),
        }
        Ok(queues)
    }

    /// Keeps a port's device as if an earlier daemon had left it, with its `queues` in worker order, for the same port to
    /// [open](Kept::open) it as something else. `false`: there is nothing to keep.
    pub(crate) fn set_aside(&mut self, port: &str, queues: Vec<OwnedFd>) -> bool {
        let recorded = self.devices.as_ref().is_some_and(|devices| devices.get(port).is_some());
        let Some(held) = self.held.remove(port).filter(|_| recorded && !queues.is_empty()) else { return false };
        // Without a service manager nobody else knows these names.
        let names = (0..).map(|queue| held.names.get(queue).cloned().unwrap_or(format!("tap.{queue}.00000000.{port}")));
        self.found.extend(names.zip(queues));
        true
    }

    /// The daemon has started: from now on its devices outlive it.
    pub(crate) fn started(&mut self) {
        self.is_shared = false;
        for (port, (id, config)) in self.fresh.take().unwrap_or_default() {
            if let Some(held) = self.held.remove(&port) {
                self.persist(&port, id, &config, held.queue.as_fd());
                self.held.insert(port, held);
            }
        }
    }

    /// Has the service manager let go of a port's device, which exists until it is [removed](Held::remove).
    pub(crate) fn give_up(&mut self, port: &str) -> Option<Held> {
        let held = self.held.remove(port).or_else(|| {
            let (names, queues): (Vec<_>, Vec<_>) = self.take_handed(port, u16::MAX).into_iter().unzip();
            Some(Held { names, queue: queues.into_iter().next()? })
        })?;
        held.names.iter().for_each(|name| forget(name));
        // In this order: were the daemon killed in between, the next one would find a record of nothing.
        let _ = tap::set_persistent(held.queue.as_fd(), false);
        if let Some(devices) = &mut self.devices {
            devices.forget(port);
        }
        if let Some(fresh) = &mut self.fresh {
            fresh.remove(port);
        }
        Some(held)
    }

    /// Removes devices of earlier daemons that no port has taken over; `ports` are the TAP ports that there are, maybe without a device.
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

    /// What the service manager has handed over of a port's device: its first queues in worker order, up to the given number. It is asked to let
    /// go of the others.
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

    /// Takes up the device that is recorded. If that cannot be, it is removed.
    fn reattach(&self, port: &str, config: &TapConfig, record: &Record) -> Option<Vec<TapQueue>> {
        let former = record.config();
        let problem = if (&former.netns, &former.device) == (&config.netns, &config.device) {
            match tap::reattach(config, &former, record.id(), self.deadline) {
                Ok(Some(queues)) => return Some(queues),
                Ok(None) => "its device is gone".to_owned(),
                Err(error) => error.to_string(),
            }
        } else {
            "its device has another name, or is elsewhere".to_owned()
        };
        tracing::warn!(port, problem, "makes a new device");
        if let Err(error) = tap::remove_device(former.netns.as_deref(), record.id()) {
            tracing::warn!(port, %error, "a device stays behind");
        }
        None
    }

    /// Has a device outlive the daemon, or end with it, as is configured.
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

/// Takes over what the service manager has held; `None`: that is not possible, and the device is gone.
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
        // Without a record the names tell whether it was made of the same.
        None => handed.iter().zip(names).all(|((found, _), name)| found == name).then(|| config.clone()),
    };
    let queues: Vec<OwnedFd> = handed.into_iter().map(|(_, queue)| queue).collect();
    let first = queues.first().map(OwnedFd::try_clone);
    let problem = match former.map(|former| tap::adopt(config, &former, queues)) {
        Some(Ok(queues)) => return Some(queues),
        Some(Err(error)) => error.to_string(),
        None => "it was made of something else".to_owned(),
    };
    tracing::warn!(port, problem, "does not take over what the service manager has held");
    if let Some(Ok(queue)) = first {
        Held { names: Vec::new(), queue }.remove();
    }
    None
}

/// Removes a device that no daemon uses, with its record. `false`: it is still there.
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
            tracing::warn!(port, %error, "the device of an earlier daemon stays behind");
            false
        }
    }
}

/// Removes the persistent devices that a daemon has left behind.
///
/// # Errors
/// A daemon runs that has them, or one cannot be removed.
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
    /// Removes the device. The kernel takes its time for that.
    pub(crate) fn remove(self) {
        if let Err(error) = tap::remove(self.queue.as_fd()) {
            tracing::warn!(%error, "a device stays behind");
        }
    }
}

/// The number of a queue.
fn queue_of(name: &str) -> Option<u16> {
    name.strip_prefix("tap.")?.split('.').next()?.parse().ok()
}

/// The service manager's name for a queue: all that a new device depends on is in it, as a checksum. 255 characters at most, no colon.
pub(crate) fn name(port: &str, queue: u16, config: &TapConfig) -> String {
    let TapConfig { device, netns, mac, addresses, mtu, default_gateway, queues, tx_queue_packets, pools: _ } = config;
    let all = format!("{device} {netns:?} {mac:?} {addresses:?} {mtu} {default_gateway:?} {queues} {tx_queue_packets}");
    format!("tap.{queue}.{:08x}.{port}", crc32fast::hash(all.as_bytes()))
}

/// Whose queue it is.
fn port_of(name: &str) -> Option<&str> {
    name.strip_prefix("tap.")?.splitn(3, '.').nth(2)
}

fn forget(name: &str) {
    let state = [NotifyState::FdStoreRemove, NotifyState::FdName(name)];
    if let Err(error) = sd_notify::notify(&state) {
        tracing::warn!(name, %error, "the service manager cannot be asked to let go of a device");
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn the_name_of_a_queue_says_whose_it_is_and_changes_with_its_device() {
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
