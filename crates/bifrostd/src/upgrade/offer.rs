//! The state that the new daemon needs to prepare, while the old one is running.

use std::collections::{BTreeMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use anyhow::{Context as _, Result, ensure};
use bifrost_control::Listeners;
use bifrost_control::api::FaultEntry;
use bifrost_port::afxdp::HandedDevice;
use bifrost_port::udp::Sockets;
use bifrost_port::vhost::HandedPort;
use serde::{Deserialize, Serialize};

use super::frames::DeviceDescription;
use super::machines::{self, Description};
use super::paths::OfPeers;
use super::touch;

/// The body of an offer. It also tells which descriptors follow, in the order of [`Descriptors`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Offer {
    /// The old daemon's version.
    pub(crate) release: String,
    /// CRC-32 of the configuration file that is in force.
    pub(crate) file_crc: u32,
    /// The objects that are not in the file, as a journal.
    pub(crate) journal: String,
    /// The numbers of ports and peers.
    pub(crate) ports: BTreeMap<String, u32>,
    pub(crate) peers: BTreeMap<String, u32>,
    /// Instance that the old daemon announces to peers; the new daemon's must be larger.
    pub(crate) instance: u64,
    /// Injected faults, and the number of the next one.
    pub(crate) faults: Vec<FaultEntry>,
    pub(crate) next_fault: u64,
    /// Drained paths, by peer.
    pub(crate) drained: BTreeMap<String, u8>,
    /// Health of load balancers' backends: balancer, backend, whether it is healthy.
    pub(crate) health: Vec<(String, SocketAddr, bool)>,
    /// Holders of shared addresses: VNI, address, MAC address.
    pub(crate) shared: Vec<(u32, IpAddr, [u8; 6])>,
    /// The request of the running capture, which follows before the counters if the new daemon takes it. Another release
    /// may not know all of it.
    pub(crate) capture: Option<serde_json::Value>,
    /// Whether flow logs follow the counters, if the new daemon takes them.
    pub(crate) sends_records: bool,
    /// Whether there is a listener for metrics, and a lock of the devices' records.
    pub(crate) has_metrics: bool,
    pub(crate) has_lock: bool,
    /// The underlay's local addresses. Empty: those of the configuration file.
    pub(crate) addresses: Vec<IpAddr>,
    /// By worker: number of receive sockets and of transmit sockets.
    pub(crate) sockets: Vec<(usize, usize)>,
    /// Queues of devices, by their names for the service manager.
    pub(crate) queues: Vec<String>,
    /// Virtual machines' ports.
    pub(super) machines: BTreeMap<String, Description>,
    /// Buffers of ports that were in use.
    pub(super) touched: touch::Buffers,
    /// What the transport knows of paths.
    pub(super) paths: OfPeers,
    /// The underlay's devices with AF_XDP sockets.
    pub(super) frames: Vec<DeviceDescription>,
}

/// The descriptors that follow an [`Offer`].
#[derive(Debug)]
pub(crate) struct Descriptors {
    pub(crate) listeners: Listeners,
    /// Lock of the devices' records.
    pub(crate) lock: Option<OwnedFd>,
    pub(crate) sockets: Vec<Sockets>,
    pub(crate) queues: BTreeMap<String, OwnedFd>,
    /// Virtual machines' ports.
    pub(crate) machines: BTreeMap<String, HandedPort>,
    /// The underlay's devices with AF_XDP sockets.
    pub(crate) frames: Vec<HandedDevice>,
}

impl Descriptors {
    /// All descriptors, in sending order.
    pub(super) fn all(&self) -> Vec<BorrowedFd<'_>> {
        let Listeners { api, metrics } = &self.listeners;
        let mut all = vec![api.as_fd()];
        all.extend(metrics.iter().map(std::os::fd::AsFd::as_fd));
        all.extend(self.lock.iter().map(std::os::fd::AsFd::as_fd));
        for sockets in &self.sockets {
            all.extend(sockets.receive.iter().chain(&sockets.transmit).map(std::os::fd::AsFd::as_fd));
        }
        all.extend(self.queues.values().map(std::os::fd::AsFd::as_fd));
        all.extend(self.machines.values().flat_map(machines::descriptors));
        all.extend(self.frames.iter().map(|device| device.link.as_fd()));
        all
    }

    /// Describes the descriptors in an offer.
    pub(super) fn describe(&self, offer: &mut Offer) {
        offer.has_metrics = self.listeners.metrics.is_some();
        offer.has_lock = self.lock.is_some();
        offer.sockets = self.sockets.iter().map(|s| (s.receive.len(), s.transmit.len())).collect();
        offer.queues = self.queues.keys().cloned().collect();
        offer.machines = self.machines.iter().map(|(name, port)| (name.clone(), Description::of(port))).collect();
        offer.frames = self.frames.iter().map(DeviceDescription::of).collect();
    }

    /// Assigns received descriptors according to an offer.
    ///
    /// # Errors
    /// There are fewer or more than the offer says.
    pub(super) fn of(offer: &Offer, descriptors: Vec<OwnedFd>) -> Result<Descriptors> {
        let mut rest = VecDeque::from(descriptors);
        let mut next = || rest.pop_front().context("the offer has fewer descriptors than it says");
        let api = next()?.into();
        let metrics = offer.has_metrics.then(&mut next).transpose()?.map(Into::into);
        let lock = offer.has_lock.then(&mut next).transpose()?;
        let mut several = |count: usize| (0..count).map(|_| next()).collect::<Result<Vec<_>>>();
        let of_worker = |&(receive, transmit): &(usize, usize)| {
            Ok(Sockets { receive: several(receive)?, transmit: several(transmit)? })
        };
        let sockets = offer.sockets.iter().map(of_worker).collect::<Result<_>>()?;
        let queues = offer.queues.iter().map(|name| Ok((name.clone(), next()?))).collect::<Result<_>>()?;
        let taken = |(name, port): (&String, &Description)| Ok((name.clone(), port.take(&mut next)?));
        let machines = offer.machines.iter().map(taken).collect::<Result<_>>()?;
        let frames = offer.frames.iter().map(|device| Ok(device.take(next()?))).collect::<Result<_>>()?;
        ensure!(rest.is_empty(), "the offer has {} descriptors more than it says", rest.len());
        Ok(Descriptors { listeners: Listeners { api, metrics }, lock, sockets, queues, machines, frames })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(count: usize) -> Vec<OwnedFd> {
        (0..count).map(|_| std::fs::File::open("/dev/null").unwrap().into()).collect()
    }

    #[test]
    fn descriptors_are_assigned_as_the_offer_says() {
        let mut offer = Offer {
            has_lock: true,
            sockets: vec![(2, 3), (2, 0)],
            queues: vec!["a".to_owned(), "b".to_owned()],
            frames: vec![DeviceDescription { device: 3, queues: 2, native: true }],
            ..Offer::default()
        };
        let all = Descriptors::of(&offer, files(12)).unwrap();
        assert_eq!((all.sockets[0].transmit.len(), all.queues.len(), all.all().len()), (3, 2, 12));
        let before = offer.clone();
        all.describe(&mut offer);
        assert_eq!(offer, before);
        for count in [0, 1, 10, 11, 13] {
            assert!(Descriptors::of(&offer, files(count)).is_err(), "{count}");
        }
        // An absurd number is an error, without an allocation of that size.
        offer.sockets = vec![(usize::MAX, usize::MAX)];
        assert!(Descriptors::of(&offer, files(11)).is_err());
    }

    #[test]
    fn unknown_fields_of_an_offer_are_ignored() {
        let later = "{\"release\": \"9.9\", \"file_crc\": 7, \"something\": [1], \"sockets\": [[1, 2]]}";
        let offer: Offer = serde_json::from_str(later).unwrap();
        assert_eq!((offer.file_crc, offer.sockets, offer.next_fault), (7, vec![(1, 2)], 0));
    }
}
