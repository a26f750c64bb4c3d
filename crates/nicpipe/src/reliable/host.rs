//! A host: its addresses, its links, its buffers.

use std::net::IpAddr;

use bifrost_rte::PeerId;
use bifrost_wire::bifrost::PathId;

use super::outer::Link;
use super::{HostState, ReliableError};
use crate::HostCounters;

/// A host.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) engine: PeerId,
    addresses: Vec<IpAddr>,
    /// The link on which each address was last seen, or the pod last sent to it.
    links: Vec<Option<Link>>,
    /// The address of each path.
    paths: Vec<u8>,
    /// Buffers in use for it, per direction.
    pub(super) held: u32,
    pub(super) kept: u32,
    pub(super) counters: HostCounters,
}

impl Host {
    /// # Errors
    /// Its addresses are invalid.
    pub(super) fn new(
        addresses: Vec<IpAddr>,
        own: &[IpAddr],
        paths: u8,
        engine: PeerId,
    ) -> Result<Self, ReliableError> {
        if !(1..=PathId::MAX).contains(&addresses.len()) {
            return Err(ReliableError::Addresses(engine.0 as usize + 1));
        }
        if let Some(alone) = addresses.iter().find(|a| !own.iter().any(|own| own.is_ipv4() == a.is_ipv4())) {
            return Err(ReliableError::Family(*alone));
        }
        // PROTOCOL §12.1: path i goes to address i mod m.
        let paths = (0..paths).map(|path| path % addresses.len() as u8).collect();
        let links = vec![None; addresses.len()];
        Ok(Host { engine, addresses, links, paths, held: 0, kept: 0, counters: HostCounters::default() })
    }

    pub(super) fn learn(&mut self, address: u8, link: Link) {
        if let Some(known) = self.links.get_mut(usize::from(address)) {
            *known = Some(link);
        }
    }

    /// Address and link of a path. If nothing has arrived from an address, its path tries the next hop of another
    /// address. The host may have more paths than the gateway: answers to packets on those share the gateway's.
    pub(super) fn path(&self, path: PathId) -> Option<(IpAddr, Link)> {
        let index = usize::from(*self.paths.get(path.index() % self.paths.len().max(1))?);
        Some((*self.addresses.get(index)?, self.link(index)?))
    }

    /// The tunnel endpoint of a family, which identifies the host to the pod.
    pub(super) fn vtep(&self, v4: bool) -> Option<(IpAddr, Option<Link>)> {
        let index = self.addresses.iter().position(|address| address.is_ipv4() == v4)?;
        Some((self.addresses[index], self.link(index)))
    }

    /// The tunnel endpoint for plain VXLAN.
    pub(super) fn first(&self) -> Option<(IpAddr, Link)> {
        Some((*self.addresses.first()?, self.link(0)?))
    }

    fn link(&self, index: usize) -> Option<Link> {
        self.links.get(index).copied().flatten().or_else(|| self.links.iter().copied().flatten().next())
    }

    pub(super) fn state(&self, share_frames: u32) -> HostState {
        HostState {
            addresses: self.addresses.clone(),
            connections: 0,
            open_connections: 0,
            best_effort_connections: 0,
            retransmitted_packets: 0,
            duplicate_packets: 0,
            given_up_packets: 0,
            held_frames: self.held,
            kept_frames: self.kept,
            share_frames,
            paths: Vec::new(),
            counters: self.counters,
        }
    }
}
