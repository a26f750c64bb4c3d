//! Peer hosts as the data path sees them: lanes for sending, addresses for receiving.

use std::io;
use std::net::{IpAddr, SocketAddr};

use bifrost_port::{LaneId, Underlay};
use bifrost_rte::{Engine, PathSnapshot, PeerId, Time};
use bifrost_tables::{AfterGap, Move, PathSet, Resilient};
use bifrost_wire::bifrost::PathId;
use foldhash::fast::RandomState;
use hashbrown::HashMap;

/// A peer host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerConfig {
    /// Its number: the switch's `PeerId`.
    pub id: u32,
    /// Its underlay addresses; packets from other addresses are not accepted.
    pub addresses: Vec<IpAddr>,
    /// (local, remote) address of each path, 1..=8.
    pub paths: Vec<(IpAddr, IpAddr)>,
    /// UDP source port of path 0; path i uses this port plus i.
    pub source_port_base: u16,
    /// Its BIFROST port.
    pub bifrost_port: u16,
    /// Its VXLAN port.
    pub vxlan_port: u16,
    /// It supports only plain VXLAN.
    pub plain: bool,
}

/// How paths to a peer are chosen for plain VXLAN.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainPaths {
    /// What happens to flows that were idle for at least the gap.
    pub after_gap: AfterGap,
    /// The gap, ns.
    pub gap_ns: u64,
}

impl Default for PlainPaths {
    /// A flow keeps its path; 500 µs, as in LetFlow (NSDI'17, section 4).
    fn default() -> Self {
        PlainPaths { after_gap: AfterGap::Home, gap_ns: 500_000 }
    }
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
    /// `None` for a peer that supports only plain VXLAN.
    pub(crate) engine: Option<PeerId>,
    pub(crate) bifrost: Vec<LaneId>,
    pub(crate) vxlan: Vec<LaneId>,
    /// Selects the path of a flow as plain VXLAN (RFC 7348, section 5: source port entropy).
    plain: Resilient,
    /// Paths that the operator has taken out of use.
    drained: PathSet,
}

impl Peer {
    /// The lane of a path. The peer may have more paths than this host: answers to packets on those share this host's
    /// lanes.
    pub(crate) fn lane(&self, path: PathId) -> LaneId {
        let own = self.bifrost.get(path.index()).copied();
        own.unwrap_or_else(|| self.bifrost[path.index() % self.bifrost.len()])
    }

    /// The paths to a peer that the transport does not know; empty if it does.
    pub(crate) fn unmeasured(&self) -> impl Iterator<Item = PathSnapshot> + use<> {
        let (drained, all) = (self.drained, self.all_paths());
        let good = open_paths(drained, all);
        let paths = if self.engine.is_none() { all } else { 0 };
        PathId::all().filter(move |path| contains(paths, *path)).map(move |path| PathSnapshot {
            selected: contains(good, path),
            drained: contains(drained, path),
            ..PathSnapshot::unmeasured(path)
        })
    }

    fn all_paths(&self) -> PathSet {
        PathSet::MAX >> (PathId::MAX - self.vxlan.len())
    }

    /// Paths for plain VXLAN: those that the transport sprays over, if it knows the peer. Drained paths are excluded,
    /// unless all are drained.
    fn good(&self, engine: &Engine) -> PathSet {
        match self.engine {
            Some(peer) => engine.selected_paths(peer).iter().fold(0, |set, path| set | 1 << path.get()),
            None => open_paths(self.drained, self.all_paths()),
        }
    }

    /// Whether the operator has taken a path out of use.
    pub(crate) fn is_drained(&self, path: PathId) -> bool {
        contains(self.drained, path)
    }

    /// The paths that the next packet of a flow may take as plain VXLAN: one, or all from which one is drawn.
    pub(crate) fn plain_paths(&self, flow: u32, engine: &Engine, now: Time) -> impl Iterator<Item = PathId> + use<> {
        let good = self.good(engine);
        let paths = self.plain.foresee(flow, good, now.0).map_or(good, |path| 1 << path);
        PathId::all().filter(move |path| contains(paths, *path))
    }
}

fn contains(set: PathSet, path: PathId) -> bool {
    set >> path.get() & 1 == 1
}

/// The paths that are not drained, or all if all are drained.
fn open_paths(drained: PathSet, all: PathSet) -> PathSet {
    if drained & all == all { all } else { all & !drained }
}

/// All peers of one worker.
#[derive(Debug)]
pub(crate) struct Peers {
    plain_paths: PlainPaths,
    by_id: Vec<Option<Peer>>,
    by_address: HashMap<IpAddr, u32, RandomState>,
    by_engine: Vec<u32>,
}

impl Peers {
    pub(crate) fn new(plain_paths: PlainPaths) -> Self {
        Peers { plain_paths, by_id: Vec::new(), by_address: HashMap::default(), by_engine: Vec::new() }
    }

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
            let at = id.0 as usize;
            self.by_engine.resize(self.by_engine.len().max(at + 1), u32::MAX);
            self.by_engine[at] = config.id;
            id
        });
        for &address in &config.addresses {
            self.by_address.insert(address, config.id);
        }
        let at = config.id as usize;
        if self.by_id.len() <= at {
            self.by_id.resize_with(at + 1, || None);
        }
        let PlainPaths { after_gap, gap_ns } = self.plain_paths;
        let plain = Resilient::new(vxlan.len(), after_gap, gap_ns, u64::from(config.id));
        self.by_id[at] = Some(Peer { config, engine: engine_id, bifrost, vxlan, plain, drained: 0 });
        Ok(())
    }

    /// Forgets a peer; its lanes stay open, because others may share them.
    pub(crate) fn remove(&mut self, id: u32) {
        self.by_address.retain(|_, peer| *peer != id);
        if let Some(slot) = self.by_id.get_mut(id as usize) {
            *slot = None;
        }
    }

    /// Takes exactly these paths of a peer out of use; returns whether the peer is known.
    pub(crate) fn drain(&mut self, id: u32, paths: PathSet, engine: &mut Engine, now: Time) -> bool {
        let Some(peer) = self.by_id.get_mut(id as usize).and_then(Option::as_mut) else { return false };
        peer.drained = paths;
        if let Some(peer) = peer.engine {
            engine.drain_paths(now, peer, paths);
        }
        true
    }

    /// Path and lane for the next packet of a flow as plain VXLAN, and whether the flow moves to another path.
    #[inline]
    pub(crate) fn plain_lane(
        &mut self,
        id: u32,
        flow: u32,
        engine: &mut Engine,
        now: Time,
    ) -> Option<(u8, LaneId, Option<Move>)> {
        let peer = self.by_id.get_mut(id as usize)?.as_mut()?;
        if let Some(peer) = peer.engine {
            engine.note_plain(now, peer);
        }
        let choice = peer.plain.choose(flow, peer.good(engine), now.0);
        Some((choice.path, peer.vxlan[usize::from(choice.path)], choice.moved))
    }

    /// The peer and the path of a lane of the transport.
    pub(crate) fn path_of(&self, lane: LaneId) -> Option<(u32, PathId)> {
        self.iter().find_map(|peer| {
            let path = peer.bifrost.iter().position(|l| *l == lane)?;
            Some((peer.config.id, PathId::masked(path as u8)))
        })
    }

    pub(crate) fn get(&self, id: u32) -> Option<&Peer> {
        self.by_id.get(id as usize)?.as_ref()
    }

    /// Upper bound of the peers' numbers, exclusive.
    pub(crate) fn places(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Peer> {
        self.by_id.iter().flatten()
    }

    pub(crate) fn of_address(&self, address: IpAddr) -> Option<u32> {
        self.by_address.get(&address).copied()
    }

    pub(crate) fn of_engine(&self, id: PeerId) -> Option<&Peer> {
        self.get(*self.by_engine.get(id.0 as usize)?)
    }
}
