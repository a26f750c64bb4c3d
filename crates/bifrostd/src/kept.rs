//! Queues of TAP devices that the service manager holds while the daemon is away (`sd_notify(3)`, `FDSTORE=1`).
//!
//! A device exists as long as somebody holds its queues. So containers keep theirs, with its index, routes and the packets that
//! wait in it, however the daemon ended; the next one takes it over. Without a service manager, or one that keeps nothing
//! (`FileDescriptorStoreMax=` of the unit), a device ends with the daemon.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, FromRawFd as _, OwnedFd};

use bifrost_port::PolledPort as _;
use bifrost_port::tap::{self, TapConfig, TapError, TapQueue};
use sd_notify::NotifyState;

/// What the service manager holds for us.
#[derive(Debug, Default)]
pub(crate) struct Kept {
    /// What it handed to this process and no port has taken yet, by its name for it.
    found: BTreeMap<String, OwnedFd>,
    /// Devices in use, by port.
    held: BTreeMap<String, Held>,
    manager: bool,
}

/// A device that is there until it is removed: the service manager has its queues open, too.
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
        let manager = std::env::var_os("NOTIFY_SOCKET").is_some();
        let mut kept = Kept { manager, ..Kept::default() };
        match sd_notify::listen_fds_with_names() {
            Ok(fds) => {
                for (fd, name) in fds {
                    // SAFETY: the service manager opened these for this process alone (LISTEN_PID), and this is the only
                    // place that asks for them.
                    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
                    kept.found.insert(name, fd);
                }
            }
            Err(error) => tracing::warn!(%error, "what the service manager hands over cannot be read"),
        }
        kept
    }

    /// The queues of a port's device, in worker order: of one that has outlived an earlier daemon if it was made for the same
    /// configuration, otherwise of a new one. The service manager is asked to hold them.
    ///
    /// # Errors
    /// No device can be made.
    pub(crate) fn open(&mut self, port: &str, config: &TapConfig) -> Result<Vec<TapQueue>, TapError> {
        let names: Vec<String> = (0..config.queues).map(|queue| name(port, queue, config)).collect();
        let found: Vec<OwnedFd> = names.iter().filter_map(|name| self.found.remove(name)).collect();
        self.remove_found(|name| port_of(name) == Some(port));
        let held = found.first().map(|queue| queue.try_clone());
        let adopted = (!found.is_empty()).then(|| tap::adopt(config, found));
        let (queues, kept) = match (adopted, held) {
            (Some(Ok(queues)), _) => {
                tracing::info!(port, "takes over its device");
                (queues, true)
            }
            (Some(Err(error)), held) => {
                tracing::warn!(port, %error, "makes a new device");
                names.iter().for_each(|name| forget(name));
                if let Some(Ok(queue)) = held {
                    Held { names: Vec::new(), queue }.remove();
                }
                (tap::create(config)?, false)
            }
            (None, _) => (tap::create(config)?, false),
        };
        if self.manager {
            for (queue, name) in queues.iter().zip(&names).filter(|_| !kept) {
                let state = [NotifyState::FdStore, NotifyState::FdName(name)];
                if let Err(error) = sd_notify::notify_with_fds(&state, &[queue.fd()]) {
                    tracing::warn!(port, %error, "the service manager does not keep its device over a restart");
                }
            }
            if let Some(queue) = queues.first().and_then(|queue| queue.fd().try_clone_to_owned().ok()) {
                self.held.insert(port.to_owned(), Held { names, queue });
            }
        }
        Ok(queues)
    }

    /// Has the service manager let go of a port's device, which exists until it is [removed](Held::remove).
    pub(crate) fn give_up(&mut self, port: &str) -> Option<Held> {
        let held = self.held.remove(port)?;
        held.names.iter().for_each(|name| forget(name));
        Some(held)
    }

    /// Removes devices of earlier daemons that no port has taken over.
    pub(crate) fn remove_rest(&mut self) {
        self.remove_found(|_| true);
    }

    fn remove_found(&mut self, which: impl Fn(&str) -> bool) {
        for (name, queue) in self.found.extract_if(.., |name, _| which(name)) {
            forget(&name);
            if port_of(&name).is_some() {
                Held { names: Vec::new(), queue }.remove();
            }
        }
    }
}

impl Held {
    /// Removes the device. The kernel takes its time for that.
    pub(crate) fn remove(self) {
        if let Err(error) = tap::remove(self.queue.as_fd()) {
            tracing::warn!(%error, "a device stays behind");
        }
    }
}

/// The service manager's name for a queue: all that a device depends on is in it, as a checksum. 255 characters at most, no colon.
fn name(port: &str, queue: u16, config: &TapConfig) -> String {
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
    }
}
