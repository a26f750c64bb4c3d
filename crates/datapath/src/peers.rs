//! Peer hosts as the data path knows them: lanes out, addresses in.

use std::io;
use std::net::{IpAddr, SocketAddr};

use bifrost_port::{LaneId, Underlay};
use bifrost_rte::{Engine, PeerId};
use bifrost_wire::bifrost::PathId;
use foldhash::fast::RandomState;
use hashbrown::HashMap;

/// A peer host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Its number: the switch's `PeerId`.
    pub id: u16,
    /// Its underlay addresses; nothing from elsewhere is accepted.
    pub addresses: Vec<IpAddr>,
    /// (local, remote) address of each path, 1..=8.
    pub paths: Vec<(IpAddr, IpAddr)>,
    /// UDP source port of path 0; path i uses the i-th after it.
    pub source_port_base: u16,
    /// Its BIFROST port.
    pub bifrost_port: u16,
    /// Its VXLAN port.
    pub vxlan_port: u16,
    /// It speaks plain VXLAN only.
    pub plain: bool,
}

/// Why a peer could not be added.
#[derive(Debug)]
pub struct PeerError {
    /// The path.
    pub path: usize,
    /// Local and remote address.
    pub lane: (SocketAddr, SocketAddr),
    /// What went wrong.
    pub source: io::Error,
}

impl std::fmt::Display for PeerError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "path {} from {} to {}: {}", self.path, self.lane.0, self.lane.1, self.source)
    }
}

impl std::error::Error for PeerError {}

/// One peer of one worker.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) config: PeerConfig,
    /// `None` for a peer that speaks plain VXLAN only.
    pub(crate) engine: Option<PeerId>,
    pub(crate) bifrost: Vec<LaneId>,
    pub(crate) vxlan: Vec<LaneId>,
}

impl Peer {
    /// The lane of a path, or the first if the path does not exist.
    pub(crate) fn lane(&self, path: PathId) -> LaneId {
        self.bifrost.get(path.index()).copied().unwrap_or(self.bifrost[0])
    }

    /// Plain VXLAN: a flow keeps its path (RFC 7348, section 5: source port entropy), among those that the transport
    /// has found good, if it knows.
    pub(crate) fn plain_lane(&self, flow: u32, engine: &Engine) -> (u8, LaneId) {
        let good = self.engine.map_or(&[][..], |peer| engine.selected_paths(peer));
        let path = match good {
            [] => flow as usize % self.vxlan.len(),
            good => good[flow as usize % good.len()].index(),
        };
        (path as u8, self.vxlan[path])
    }
}

/// All peers of one worker.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    by_id: Vec<Option<Peer>>,
    by_address: HashMap<IpAddr, u16, RandomState>,
    by_engine: Vec<u16>,
}

impl Peers {
    pub(crate) fn add<U: Underlay>(
        &mut self,
        config: PeerConfig,
        engine: &mut Engine,
        underlay: &mut U,
    ) -> Result<(), PeerError> {
        let open = |underlay: &mut U, port: u16| {
            let lanes = config.paths.iter().enumerate().map(|(i, &(local, remote))| {
                let lane = (
                    SocketAddr::new(local, config.source_port_base.wrapping_add(i as u16)),
                    SocketAddr::new(remote, port),
                );
                underlay.lane(lane.0, lane.1).map_err(|source| PeerError { path: i, lane, source })
            });
            lanes.collect::<Result<Vec<_>, _>>()
        };
        let bifrost = open(underlay, config.bifrost_port)?;
        let vxlan = open(underlay, config.vxlan_port)?;
        if bifrost.is_empty() {
            let none = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED), 0);
            let source = io::Error::new(io::ErrorKind::InvalidInput, "a peer needs at least one path");
            return Err(PeerError { path: 0, lane: (none, none), source });
        }
        let engine_id = (!config.plain).then(|| {
            let id = engine.add_peer(config.paths.len());
            let at = usize::from(id.0);
            self.by_engine.resize(self.by_engine.len().max(at + 1), u16::MAX);
            self.by_engine[at] = config.id;
            id
        });
        for &address in &config.addresses {
            self.by_address.insert(address, config.id);
        }
        let at = usize::from(config.id);
        if self.by_id.len() <= at {
            self.by_id.resize_with(at + 1, || None);
        }
        self.by_id[at] = Some(Peer { config, engine: engine_id, bifrost, vxlan });
        Ok(())
    }

    /// Forgets a peer; its lanes stay open, for others may share them.
    pub(crate) fn remove(&mut self, id: u16) {
        self.by_address.retain(|_, peer| *peer != id);
        if let Some(slot) = self.by_id.get_mut(usize::from(id)) {
            *slot = None;
        }
    }

    pub(crate) fn get(&self, id: u16) -> Option<&Peer> {
        self.by_id.get(usize::from(id))?.as_ref()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.by_id.iter().flatten()
    }

    pub(crate) fn of_address(&self, address: IpAddr) -> Option<u16> {
        self.by_address.get(&address).copied()
    }

    pub(crate) fn of_engine(&self, id: PeerId) -> Option<&Peer> {
        self.get(*self.by_engine.get(usize::from(id.0))?)
    }
}
