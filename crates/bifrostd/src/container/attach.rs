//! Creates and removes the devices of containers as their network namespaces come and go.

use anyhow::{Context, Result};
use bifrost_control::config::{Port, PortKind};
use bifrost_datapath::{Device, Worker};
use bifrost_port::HostUnderlay;
use bifrost_port::tap::{self};
use bifrost_port::vhost::Unplugged;

use super::Container;
use crate::daemon::State;
use crate::removal::Released;
use crate::translate;

impl State {
    /// Opens the device of the TAP port `port`, number `owner`, for which the workers have empty ports. Without its
    /// namespace, the port waits.
    ///
    /// # Errors
    /// The namespace exists, but no device can be created in it.
    pub(crate) fn open_container(&mut self, port: &Port, owner: u32) -> Result<()> {
        let tap = translate::tap(&self.config, port);
        let Some(netns) = tap.netns.clone() else { return self.plug(port, owner) };
        // Read before the device is created: if the namespace is replaced in between, the next poll sees another one.
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

    /// Removes a port from the workers and keeps its device, so that the port can be added again with it.
    ///
    /// # Errors
    /// A worker does not answer.
    pub(crate) fn set_port_aside(&mut self, name: &str, owner: u32) -> Result<()> {
        self.forget_carried(name);
        let devices: Vec<Device> =
            self.on_all(move |worker| worker.remove_port(owner))?.into_iter().flatten().collect();
        let queues = devices.iter().map(|device| device.fd().try_clone_to_owned()).collect::<std::io::Result<_>>();
        if self.kept.set_aside(name, queues.unwrap_or_default()) {
            return Ok(());
        }
        let kept = self.kept.release(name);
        self.removal.push(Released { queues: devices, kept });
        Ok(())
    }

    /// Recreates devices that were deleted by others.
    ///
    /// # Errors
    /// The first device that cannot be created; the others are.
    pub(crate) fn repair_containers(&mut self) -> Result<()> {
        let failed: Vec<u32> = self.on_all(|worker| worker.core_mut().failed_ports())?.concat();
        let mut result = Ok(());
        let of_taps = self.config.ports.iter().filter(|port| port.kind == PortKind::Tap);
        let numbered = of_taps.filter_map(|port| Some((self.names.port(&port.name)?, port.clone())));
        let gone: Vec<_> = numbered.filter(|(owner, _)| failed.contains(owner)).collect();
        for (owner, port) in gone {
            tracing::info!(port = port.name, "its device was deleted; recreating it");
            let made = self.unplug(&port, owner).and_then(|()| self.plug(&port, owner));
            result = result.and(made);
        }
        result
    }

    /// Creates and removes devices as namespaces have appeared and disappeared.
    pub(crate) fn follow_namespaces(&mut self) {
        let changed_namespace = |(name, container): (&String, &Container)| {
            // After an error nothing changes.
            let found = tap::namespace(&container.netns).ok()?;
            (found != container.made_in).then(|| (name.clone(), found))
        };
        let changed: Vec<_> = self.containers.iter().filter_map(changed_namespace).collect();
        for (name, found) in changed {
            let Some(owner) = self.names.port(&name) else { continue };
            let Some(port) = self.config.ports.iter().find(|port| port.name == name).cloned() else { continue };
            let Some(mut container) = self.containers.remove(&name) else { continue };
            let netns = &container.netns;
            if container.made_in.take().is_some() {
                tracing::info!(port = name, netns, "its network namespace has disappeared");
                if let Err(error) = self.unplug(&port, owner) {
                    tracing::error!(port = name, "cannot release its device: {error:#}");
                }
            }
            let made = found.map(|_| self.plug(&port, owner));
            match made {
                None => container.failures = 0,
                Some(Ok(())) => {
                    tracing::info!(port = name, netns, "its network namespace has appeared");
                    (container.made_in, container.failures) = (found, 0);
                }
                Some(Err(error)) => {
                    // Workers that already have their queue would keep the device alive and its name in use.
                    let _ = self.unplug(&port, owner);
                    container.failures = container.failures.saturating_add(1);
                    // Not for the first failure: the name exists shortly before its namespace does.
                    if container.failures == 2 {
                        tracing::warn!("{error:#}; retrying");
                    }
                }
            }
            self.containers.insert(name, container);
        }
    }

    /// Creates the device, or takes over that of an earlier daemon, and gives each worker that serves the port its
    /// queue.
    fn plug(&mut self, port: &Port, owner: u32) -> Result<()> {
        let tap = translate::tap(&self.config, port);
        // One of them may have its name.
        let is_pending = self.removal.is_pending();
        let opened = self.kept.open(&port.name, &tap).or_else(|error| {
            if !is_pending {
                return Err(error);
            }
            self.removal.wait();
            self.kept.open(&port.name, &tap)
        });
        let queues = opened.with_context(|| format!("port {}", port.name))?;
        let devices: Vec<Device> = queues.into_iter().map(|queue| Box::new(queue) as Device).collect();
        if let Some(waiting) = &mut self.not_served {
            waiting.push((port.clone(), owner, devices));
            return Ok(());
        }
        self.change_devices(port, owner, devices.into_iter()).map(drop)
    }

    /// Gives workers the devices that were opened before all peers were known.
    ///
    /// # Errors
    /// A worker cannot serve one.
    pub(crate) fn serve_devices(&mut self) -> Result<()> {
        for (port, owner, devices) in self.not_served.take().unwrap_or_default() {
            drop(self.change_devices(&port, owner, devices.into_iter())?);
        }
        Ok(())
    }

    /// Removes the device.
    fn unplug(&mut self, port: &Port, owner: u32) -> Result<()> {
        self.forget_carried(&port.name);
        let kept = self.kept.release(&port.name);
        let serving = self.serving(port, owner).iter();
        let empty: Vec<Device> =
            serving.map(|_| Ok(Box::new(Unplugged::new()?) as Device)).collect::<std::io::Result<_>>()?;
        let queues = self.change_devices(port, owner, empty.into_iter())?;
        self.removal.push(Released { queues, kept });
        Ok(())
    }

    /// Replaces the devices of a port, one for each worker that serves it, and returns the former ones. The port is
    /// recreated, so that its counters start with those of the device.
    fn change_devices(&self, port: &Port, owner: u32, devices: impl Iterator<Item = Device>) -> Result<Vec<Device>> {
        let mut former = Vec::new();
        for (worker, device) in self.serving(port, owner).iter().zip(devices) {
            let config = self.port_config(port, owner, device)?;
            // In one step, so that no packet arrives while the port does not exist.
            let change = move |w: &mut Worker<HostUnderlay>| (w.remove_port(owner), w.add_port(config));
            let (old, added) = worker.run(change)?;
            former.extend(old);
            added.with_context(|| format!("port {}", port.name))?;
        }
        self.set_qos(port)?;
        Ok(former)
    }
}
