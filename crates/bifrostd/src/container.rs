//! A container's port: its device is in the container's network namespace, and comes and goes with that.
//!
//! While there is no namespace, the port is there without a device, as a virtual machine's while no machine runs: other hosts are not
//! told that nobody is here, which they would believe for a while. What it counts begins with its device. What tells is the
//! namespace's file, looked at a few times a second: nothing announces that something is mounted there.

use anyhow::{Context, Result};
use bifrost_control::config::{Port, PortKind};
use bifrost_datapath::{Device, Worker};
use bifrost_port::HostUnderlay;
use bifrost_port::tap::{self, NamespaceId};
use bifrost_port::vhost::Unplugged;

use crate::daemon::State;
use crate::kept::Held;
use crate::translate;

/// Where the device of a TAP port with a network namespace is.
#[derive(Debug)]
pub(crate) struct Container {
    netns: String,
    /// What the device was made in; `None` while the port waits for a namespace of that name.
    made_in: Option<NamespaceId>,
    /// Attempts in a row that have failed.
    failures: u32,
}

/// A device that no worker has any more.
#[must_use]
pub(crate) struct GivenUp {
    queues: Vec<Device>,
    kept: Option<Held>,
}

impl GivenUp {
    /// Has the kernel remove the device.
    pub(crate) fn remove(self) {
        drop(self.queues);
        if let Some(kept) = self.kept {
            kept.remove();
        }
    }
}

impl Container {
    /// Whether there is no namespace, or no device in it yet.
    pub(crate) fn is_waiting(&self) -> bool {
        self.made_in.is_none()
    }
}

/// Whether the device of a changed port may be changed in its place.
pub(crate) fn may_have_same_tap(old: &Port, new: &Port) -> bool {
    let of = |port: &Port| (port.kind, port.netns.clone(), port.device.clone());
    new.kind == PortKind::Tap && of(old) == of(new)
}

impl State {
    /// Gives the TAP port `port`, number `owner`, its device; the workers have empty ports for it. Without its namespace, it waits.
    ///
    /// # Errors
    /// There is a namespace, and no device can be made in it.
    pub(crate) fn open_container(&mut self, port: &Port, owner: u16) -> Result<()> {
        let tap = translate::tap(&self.config, port);
        let Some(netns) = tap.netns.clone() else { return self.plug(port, owner) };
        // Asked before: if it is replaced meanwhile, the next look finds another one.
        let found = tap::namespace(&netns).with_context(|| format!("looking for network namespace {netns}"))?;
        if found.is_some() {
            self.plug(port, owner)?;
        } else {
            tracing::warn!(
                port = port.name,
                netns,
                "waits for its network namespace (ip netns add, or correct port.netns)"
            );
        }
        self.containers.insert(port.name.clone(), Container { netns, made_in: found, failures: 0 });
        Ok(())
    }

    /// Takes a port from the workers, to be added again with the same device.
    ///
    /// # Errors
    /// A worker does not answer.
    pub(crate) fn set_port_aside(&mut self, name: &str, owner: u16) -> Result<()> {
        self.forget_carried(name);
        let devices: Vec<Device> =
            self.on_all(move |worker| worker.remove_port(owner))?.into_iter().flatten().collect();
        let queues = devices.iter().map(|device| device.fd().try_clone_to_owned()).collect::<std::io::Result<_>>();
        if self.kept.set_aside(name, queues.unwrap_or_default()) {
            return Ok(());
        }
        let kept = self.kept.give_up(name);
        drop(devices);
        if let Some(device) = kept {
            device.remove();
        }
        Ok(())
    }

    /// Recreates devices that somebody has deleted.
    ///
    /// # Errors
    /// What keeps one from being made; the others are.
    pub(crate) fn mend_containers(&mut self) -> Result<()> {
        let failed: Vec<u16> = self.on_all(|worker| worker.core_mut().failed_ports())?.concat();
        let mut result = Ok(());
        let of_taps = self.config.ports.iter().filter(|port| port.kind == PortKind::Tap);
        let numbered = of_taps.filter_map(|port| Some((self.names.port(&port.name)?, port.clone())));
        let gone: Vec<_> = numbered.filter(|(owner, _)| failed.contains(owner)).collect();
        for (owner, port) in gone {
            tracing::info!(port = port.name, "its device was gone");
            let made = self.unplug(&port, owner).and_then(|device| {
                device.remove();
                self.plug(&port, owner)
            });
            result = result.and(made);
        }
        result
    }

    /// Makes and gives up devices as namespaces have come and gone. The kernel takes its time to remove devices: that is for
    /// the caller to do.
    #[must_use]
    pub(crate) fn follow_namespaces(&mut self) -> Vec<GivenUp> {
        let mut given_up = Vec::new();
        let look = |(name, container): (&String, &Container)| {
            // What cannot be looked at is left as it is.
            let found = tap::namespace(&container.netns).ok()?;
            (found != container.made_in).then(|| (name.clone(), found))
        };
        let changed: Vec<_> = self.containers.iter().filter_map(look).collect();
        for (name, found) in changed {
            let Some(owner) = self.names.port(&name) else { continue };
            let Some(port) = self.config.ports.iter().find(|port| port.name == name).cloned() else { continue };
            let Some(mut container) = self.containers.remove(&name) else { continue };
            let netns = &container.netns;
            if container.made_in.take().is_some() {
                tracing::info!(port = name, netns, "its network namespace is gone");
                match self.unplug(&port, owner) {
                    Ok(device) => given_up.push(device),
                    Err(error) => tracing::error!(port = name, "giving up its device: {error:#}"),
                }
            }
            let made = found.map(|_| self.plug(&port, owner));
            match made {
                None => container.failures = 0,
                Some(Ok(())) => {
                    tracing::info!(port = name, netns, "its network namespace is there");
                    (container.made_in, container.failures) = (found, 0);
                }
                Some(Err(error)) => {
                    // Workers that have their queue already would keep the device, and its name taken.
                    given_up.extend(self.unplug(&port, owner));
                    container.failures = container.failures.saturating_add(1);
                    // Not the first one: a name is there a moment before its namespace is.
                    if container.failures == 2 {
                        tracing::warn!("{error:#}; it is tried again");
                    }
                }
            }
            self.containers.insert(name, container);
        }
        given_up
    }

    /// Makes the device, or takes over the one that outlived an earlier daemon, and gives each worker that serves it its queue.
    fn plug(&mut self, port: &Port, owner: u16) -> Result<()> {
        let queues = self.kept.open(&port.name, &translate::tap(&self.config, port));
        let queues = queues.with_context(|| format!("port {}", port.name))?;
        let devices: Vec<Device> = queues.into_iter().map(|queue| Box::new(queue) as Device).collect();
        if let Some(waiting) = &mut self.not_served {
            waiting.push((port.clone(), owner, devices));
            return Ok(());
        }
        self.change_devices(port, owner, devices.into_iter()).map(drop)
    }

    /// Gives workers the devices that were opened before they knew all peers.
    ///
    /// # Errors
    /// A worker cannot serve one.
    pub(crate) fn serve_devices(&mut self) -> Result<()> {
        for (port, owner, devices) in self.not_served.take().unwrap_or_default() {
            drop(self.change_devices(&port, owner, devices.into_iter())?);
        }
        Ok(())
    }

    /// Takes the device from the workers.
    fn unplug(&mut self, port: &Port, owner: u16) -> Result<GivenUp> {
        self.forget_carried(&port.name);
        let kept = self.kept.give_up(&port.name);
        let serving = self.serving(port, owner).iter();
        let empty: Vec<Device> =
            serving.map(|_| Ok(Box::new(Unplugged::new()?) as Device)).collect::<std::io::Result<_>>()?;
        Ok(GivenUp { queues: self.change_devices(port, owner, empty.into_iter())?, kept })
    }

    /// Puts other devices behind a port, one for each worker that serves it, and returns those that were there. The port is a new one, so that
    /// its counters go with those of the device.
    fn change_devices(&self, port: &Port, owner: u16, devices: impl Iterator<Item = Device>) -> Result<Vec<Device>> {
        let mut former = Vec::new();
        for (worker, device) in self.serving(port, owner).iter().zip(devices) {
            let config = self.port_config(port, owner, device)?;
            // In one go: no packet finds the port gone.
            let change = move |w: &mut Worker<HostUnderlay>| (w.remove_port(owner), w.add_port(config));
            let (old, added) = worker.run(change)?;
            former.extend(old);
            added.with_context(|| format!("port {}", port.name))?;
        }
        self.set_limits(port)?;
        Ok(former)
    }
}
