//! Initial state of a daemon: objects from disk and new sockets, or what another daemon has handed over.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow};
use bifrost_control::api::FaultEntry;
use bifrost_control::config::{Config, UnderlayPort, Vni};
use bifrost_control::objects::Store;
use bifrost_datapath::PathSet;
use bifrost_port::afxdp::{AfxdpUnderlay, HandedDevice, WaitingSockets};
use bifrost_port::udp::{Sockets, UdpUnderlay};
use bifrost_port::vhost::HandedPort;
use bifrost_port::{HostUnderlay, device};
use bifrost_wire::Mac;

use crate::health::Health;
use crate::names::Names;
use crate::shared::Holders;
use crate::snapshot::Snapshot;
use crate::translate;
use crate::upgrade::{Descriptors, Handed};

/// State inherited from another daemon; empty after a normal start.
#[derive(Default)]
pub(crate) struct Inherited {
    pub(crate) names: Names,
    /// The other daemon's instance.
    pub(crate) instance: u64,
    pub(crate) sockets: Option<Vec<Sockets>>,
    pub(crate) lock: Option<OwnedFd>,
    pub(crate) queues: BTreeMap<String, OwnedFd>,
    pub(crate) machines: BTreeMap<String, HandedPort>,
    pub(crate) frames: Vec<HandedDevice>,
    pub(crate) faults: Vec<FaultEntry>,
    pub(crate) next_fault: u64,
    pub(crate) drained: BTreeMap<String, PathSet>,
    pub(crate) health: Health,
    pub(crate) holders: Holders,
}

impl Inherited {
    pub(crate) fn of(handed: Option<Handed>) -> Inherited {
        let Some(handed) = handed else { return Inherited { next_fault: 1, ..Inherited::default() } };
        let Handed { descriptors, names, instance, faults, next_fault, drained, health, shared, others: _, .. } =
            handed;
        let health = health.into_iter().map(|(balancer, backend, works)| ((balancer, backend), works)).collect();
        let holders = shared.into_iter().filter_map(|(vni, address, mac)| Some(((Vni::new(vni)?, address), Mac(mac))));
        let holders = holders.collect();
        let Descriptors { listeners: _, lock, sockets, queues, machines, frames } = descriptors;
        Inherited {
            names,
            instance,
            sockets: Some(sockets),
            lock,
            queues,
            machines,
            frames,
            faults,
            next_fault: next_fault.max(1),
            drained,
            health,
            holders,
        }
    }
}

/// The objects of the file, and all objects of other owners that the old daemon handed over.
pub(crate) fn restore_handed(file: Arc<Config>, handed: &Handed) -> Result<Store> {
    let (store, left_out) = Store::restore(file, handed.others.clone());
    match left_out.first() {
        None => Ok(store),
        Some(what) => Err(anyhow!("an object of the old daemon does not fit the configuration: {what}")),
    }
}

/// The objects of the file, and those of other owners from the journal.
pub(crate) fn restore(file: Arc<Config>, directory: Option<&Path>) -> Result<(Snapshot, Store)> {
    let Some(directory) = directory else { return Ok((Snapshot::default(), Store::new(file))) };
    let (snapshot, others) = Snapshot::open(directory, file.workers.count)?;
    let (store, left_out) = Store::restore(file, others);
    for what in left_out {
        tracing::error!("an object from the journal is left out: {what}");
    }
    Ok((snapshot, store))
}

/// Packets up to `underlay.mtu` that exceed a NIC's MTU would be lost without a trace.
pub(crate) fn warn_of_small_devices(config: &Config) {
    let devices = match device::find(&config.underlay.addresses) {
        Ok(Ok(devices)) => devices,
        // The addresses were bound a moment ago: the device is disappearing.
        Ok(Err(_)) => return,
        Err(error) => return tracing::warn!(%error, "cannot read the MTU of the underlay's devices"),
    };
    let mtu = u32::from(config.underlay.mtu);
    for small in devices.iter().filter(|device| device.mtu < mtu) {
        tracing::warn!(
            device = small.name,
            "MTU {}, underlay.mtu {mtu}: larger packets between hosts will be lost (ip link set dev {} mtu {mtu})",
            small.mtu,
            small.name,
        );
    }
}

/// The underlays of the workers, in order.
pub(crate) fn open_underlays(config: &Config) -> Result<Vec<HostUnderlay>> {
    Ok(match config.underlay.port {
        UnderlayPort::Udp => {
            let all = UdpUnderlay::open_all(&translate::udp(config))?;
            all.into_iter().map(|udp| HostUnderlay::Udp(Box::new(udp))).collect()
        }
        UnderlayPort::Afxdp => {
            let all = AfxdpUnderlay::open_all(&translate::afxdp(config))?;
            all.into_iter().map(|afxdp| HostUnderlay::Afxdp(Box::new(afxdp))).collect()
        }
    })
}

/// The underlays of the workers, in order, on sockets of another daemon, whose configuration may differ, also in the
/// number of workers; and AF_XDP sockets that wait until that daemon has closed its own.
pub(crate) fn adopt_underlays(
    config: &Config,
    sockets: Vec<Sockets>,
    frames: Vec<HandedDevice>,
) -> Result<(Vec<HostUnderlay>, Option<WaitingSockets>)> {
    match config.underlay.port {
        // The other daemon's XDP programs are detached when it ends.
        UnderlayPort::Udp => {
            drop(frames);
            let all = UdpUnderlay::adopt_all(&translate::udp(config), sockets)?;
            Ok((all.into_iter().map(|udp| HostUnderlay::Udp(Box::new(udp))).collect(), None))
        }
        UnderlayPort::Afxdp => {
            let (all, waiting) = AfxdpUnderlay::adopt_all(&translate::afxdp(config), sockets, frames)?;
            let all = all.into_iter().map(|afxdp| HostUnderlay::Afxdp(Box::new(afxdp))).collect();
            Ok((all, Some(waiting)))
        }
    }
}
