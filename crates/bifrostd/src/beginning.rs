//! What a daemon begins with: kept objects, sockets, or what another daemon has handed over.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, anyhow, ensure};
use bifrost_control::api::FaultEntry;
use bifrost_control::config::{Config, UnderlayPort, Vni};
use bifrost_control::objects::Store;
use bifrost_datapath::PathSet;
use bifrost_port::afxdp::AfxdpUnderlay;
use bifrost_port::udp::{Sockets, UdpConfig, UdpUnderlay};
use bifrost_port::{HostUnderlay, device};
use bifrost_wire::Mac;

use crate::daemon::Names;
use crate::health::Health;
use crate::shared::Holders;
use crate::snapshot::Snapshot;
use crate::translate;
use crate::upgrade::Handed;

/// What a daemon has before it reads its configuration: nothing, or what another one has handed over.
#[derive(Default)]
pub(crate) struct Before {
    pub(crate) names: Names,
    /// The other daemon's instance.
    pub(crate) instance: u64,
    pub(crate) sockets: Option<Vec<Sockets>>,
    pub(crate) lock: Option<OwnedFd>,
    pub(crate) queues: BTreeMap<String, OwnedFd>,
    pub(crate) faults: Vec<FaultEntry>,
    pub(crate) next_fault: u64,
    pub(crate) drained: BTreeMap<String, PathSet>,
    pub(crate) health: Health,
    pub(crate) holders: Holders,
}

impl Before {
    pub(crate) fn of(handed: Option<Handed>) -> Before {
        let Some(handed) = handed else { return Before { next_fault: 1, ..Before::default() } };
        let Handed { descriptors, names, instance, faults, next_fault, drained, health, shared, others: _ } = handed;
        let health = health.into_iter().map(|(balancer, backend, works)| ((balancer, backend), works)).collect();
        let holders = shared.into_iter().filter_map(|(vni, address, mac)| Some(((Vni::new(vni)?, address), Mac(mac))));
        let holders = holders.collect();
        let (sockets, lock, queues) = (Some(descriptors.sockets), descriptors.lock, descriptors.queues);
        Before {
            names,
            instance,
            sockets,
            lock,
            queues,
            faults,
            next_fault: next_fault.max(1),
            drained,
            health,
            holders,
        }
    }
}

/// The objects of the file, and others of another daemon, all of them.
pub(crate) fn restore_handed(file: Arc<Config>, handed: &Handed) -> Result<Store> {
    let (store, left_out) = Store::restore(file, handed.others.clone());
    match left_out.first() {
        None => Ok(store),
        Some(what) => Err(anyhow!("an object of the old daemon does not fit: {what}")),
    }
}

/// The objects of the file, and what was kept of others.
pub(crate) fn restore(file: Arc<Config>, directory: Option<&Path>) -> Result<(Snapshot, Store)> {
    let Some(directory) = directory else { return Ok((Snapshot::default(), Store::new(file))) };
    let (snapshot, others) = Snapshot::open(directory, file.workers.count)?;
    let (store, left_out) = Store::restore(file, others);
    for what in left_out {
        tracing::error!("left out of what was kept: {what}");
    }
    Ok((snapshot, store))
}

/// Packets that `underlay.mtu` lets pass and a NIC does not would vanish without a trace.
pub(crate) fn warn_of_small_devices(config: &Config) {
    let devices = match device::find(&config.underlay.addresses) {
        Ok(Ok(devices)) => devices,
        // They were bound to a moment ago: nothing is known of a device that goes away.
        Ok(Err(_)) => return,
        Err(error) => return tracing::warn!(%error, "cannot ask for the MTU of the underlay's devices"),
    };
    let mtu = u32::from(config.underlay.mtu);
    for small in devices.iter().filter(|device| device.mtu < mtu) {
        tracing::warn!(
            device = small.name,
            "its MTU is {}, underlay.mtu is {mtu}: larger packets between hosts will be lost (ip link set dev {} mtu {mtu})",
            small.mtu,
            small.name,
        );
    }
}

/// The underlay of each worker, in order.
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

/// The underlay of each worker, in order, of sockets of another daemon.
pub(crate) fn adopt_underlays(config: &Config, sockets: Vec<Sockets>) -> Result<Vec<HostUnderlay>> {
    ensure!(config.underlay.port == UnderlayPort::Udp, "only UDP sockets are taken over");
    let of_worker = |(worker, sockets)| {
        let udp = UdpUnderlay::adopt(UdpConfig { worker, ..translate::udp(config) }, sockets)?;
        Ok(HostUnderlay::Udp(Box::new(udp)))
    };
    (0..).zip(sockets).map(of_worker).collect()
}
