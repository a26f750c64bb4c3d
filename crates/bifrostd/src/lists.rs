//! Long lists, page by page: built from the workers while the API sends them, without the daemon's lock.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, PoisonError, RwLock};

use bifrost_control::api::{ApiError, Conn, ConnState, Path, PathState, PeerMode, PortFault, PortStatus, Route};
use bifrost_control::config::{Config, Port};
use bifrost_control::server::Pages;
use bifrost_datapath::{Gone, PathView, PortView, Remote};
use bifrost_port::HostUnderlay;
use bifrost_port::clock::monotonic_ns;
use bifrost_rte::{ConnSnapshot, State as RteState};

use crate::carried::Carried;
use crate::daemon::State;
use crate::names::Names;
use crate::translate;

/// Ports per page.
const PORTS: usize = 256;
/// Routes per page.
const ROUTES: usize = 4096;

/// A page, or an error.
type Page<T> = Result<Vec<T>, ApiError>;

/// The source of lists: the configuration at one moment, and handles of the workers.
#[derive(Clone)]
pub(crate) struct StateView {
    pub(crate) config: Arc<Config>,
    /// Names at the start of the list.
    pub(crate) names: Arc<Names>,
    /// Names now.
    in_force: Arc<RwLock<Arc<Names>>>,
    pub(crate) workers: Vec<Remote<HostUnderlay>>,
    /// Counters of the daemon from which this one took over.
    carried: Arc<Carried>,
}

impl StateView {
    /// The current state.
    pub(crate) fn of(state: &State) -> StateView {
        StateView {
            config: Arc::clone(&state.config),
            names: Arc::clone(state.names.now()),
            in_force: state.names.in_force(),
            workers: state.workers.iter().map(bifrost_datapath::Handle::remote).collect(),
            carried: Arc::clone(&state.carried),
        }
    }

    /// Current names. If a number changed since the start of the list, data of workers under it may be another
    /// object's.
    pub(crate) fn names_now(&self) -> Arc<Names> {
        Arc::clone(&self.in_force.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The peer with that number, if it has not changed since the start of the list.
    pub(crate) fn peer<'a>(&'a self, now: &Names, id: u32) -> Option<&'a str> {
        self.names.peer_name(id).filter(|name| now.peer(name) == Some(id))
    }

    /// The port with that number, if it has not changed since the start of the list.
    pub(crate) fn port<'a>(&'a self, now: &Names, owner: u32) -> Option<&'a str> {
        self.names.port_name(owner).filter(|name| now.port(name) == Some(owner))
    }

    /// How packets are carried to each peer that has connections, by number.
    pub(crate) fn peer_modes(&self) -> Result<HashMap<u32, PeerMode>, ApiError> {
        let mut modes = HashMap::new();
        for worker in &self.workers {
            // Report each mode once.
            let mut reported = HashMap::new();
            let news = worker.connections(move |peer, c| {
                let mode = match c.state {
                    RteState::Open => PeerMode::Bifrost,
                    RteState::Plain { .. } | RteState::BestEffort if !reported.contains_key(&peer) => PeerMode::Plain,
                    _ => return None,
                };
                (reported.insert(peer, mode) != Some(mode)).then_some((peer, mode))
            });
            for page in news {
                for (peer, mode) in page.map_err(gone)? {
                    if mode == PeerMode::Bifrost || !modes.contains_key(&peer) {
                        modes.insert(peer, mode);
                    }
                }
            }
        }
        Ok(modes)
    }

    /// Received packets that wait for earlier packets, by port.
    fn held(&self) -> Result<HashMap<u32, u64>, ApiError> {
        let mut held = HashMap::new();
        for worker in &self.workers {
            let some = |_, c: &ConnSnapshot| (c.held_packets > 0).then_some((c.owner, u64::from(c.held_packets)));
            for page in worker.connections(some) {
                page.map_err(gone)?.into_iter().for_each(|(owner, packets)| *held.entry(owner).or_default() += packets);
            }
        }
        Ok(held)
    }
}

/// All connections, worker by worker.
pub(crate) fn conns(state_view: StateView) -> Pages<Conn> {
    let state_view = Arc::new(state_view);
    let workers = state_view.workers.clone();
    Box::new(workers.into_iter().flat_map(move |worker| {
        let state_view = Arc::clone(&state_view);
        let pages: Pages<Conn> = match round_trips(&worker) {
            Err(error) => Box::new(std::iter::once(Err(error))),
            Ok(round_trips) => {
                Box::new(worker.connections(|peer, c| Some((peer, *c))).map(move |page| -> Page<Conn> {
                    let (page, now) = (page.map_err(gone)?, state_view.names_now());
                    let conns = page.iter().map(|(peer, c)| {
                        let name = state_view.peer(&now, *peer).unwrap_or("?");
                        conn(c, name, round_trips.get(peer).copied())
                    });
                    Ok(conns.collect())
                }))
            }
        };
        pages
    }))
}

/// The longest round-trip time of the selected paths to each peer, ns.
fn round_trips(worker: &Remote<HostUnderlay>) -> Result<HashMap<u32, u64>, ApiError> {
    let mut round_trips = HashMap::new();
    for page in worker.paths() {
        for path in page.map_err(gone)?.into_iter().filter(|p| p.snapshot.selected && p.snapshot.total_rtt_ns > 0) {
            let of_peer: &mut u64 = round_trips.entry(path.peer).or_default();
            *of_peer = (*of_peer).max(path.snapshot.total_rtt_ns);
        }
    }
    Ok(round_trips)
}

fn conn(c: &ConnSnapshot, peer: &str, srtt_ns: Option<u64>) -> Conn {
    Conn {
        cid: c.local_cid.0,
        peer_cid: c.peer_cid.0,
        state: match c.state {
            RteState::Opening { .. } => ConnState::Connecting,
            RteState::Open if c.is_idle => ConnState::Idle,
            RteState::Open => ConnState::Established,
            RteState::BestEffort => ConnState::Fallback,
            RteState::Plain { .. } => ConnState::Plain,
        },
        vni: c.pair.vni,
        local_mac: c.pair.local.to_string(),
        remote_mac: c.pair.remote.to_string(),
        peer: peer.to_owned(),
        version: c.version,
        in_flight_packets: u64::from(c.in_flight_packets),
        window_packets: u64::from(c.room_packets),
        waiting_packets: u64::from(c.pending_packets),
        held_packets: u64::from(c.held_packets),
        srtt_us: srtt_ns.map(us),
        rto_us: (c.rto_ns > 0).then(|| us(c.rto_ns)),
        tx_packets: c.tx_packets,
        rx_packets: c.rx_packets - c.duplicate_packets.min(c.rx_packets),
        retransmitted_packets: c.retransmitted_packets,
        duplicates_packets: c.duplicate_packets,
        given_up_packets: c.given_up_packets,
        idle_s: c.idle_ns as f64 / 1e9,
    }
}

/// All paths, worker by worker.
pub(crate) fn paths(state_view: StateView) -> Pages<Path> {
    let state_view = Arc::new(state_view);
    let workers = state_view.workers.clone();
    Box::new(workers.into_iter().flat_map(move |worker| {
        let state_view = Arc::clone(&state_view);
        worker.paths().map(move |page| -> Page<Path> {
            let (page, now) = (page.map_err(gone)?, state_view.names_now());
            // Paths to one peer are adjacent.
            let of_peers = page.chunk_by(|a, b| a.peer == b.peer);
            Ok(of_peers
                .flat_map(|paths| {
                    let total = paths.iter().map(|p| p.snapshot.recent_packets).sum::<f64>();
                    let name = state_view.peer(&now, paths[0].peer).unwrap_or("?");
                    paths.iter().map(move |p| path(p, name, total))
                })
                .collect())
        })
    }))
}

/// `total`: packets recently sent on all paths to the peer.
fn path(p: &PathView, peer: &str, total: f64) -> Path {
    let s = &p.snapshot;
    let known = |ns: u64| (ns > 0).then(|| us(ns));
    Path {
        peer: peer.to_owned(),
        path: s.path.get(),
        local: p.local,
        remote: p.remote,
        source_port: p.source_port,
        state: match (s.state, s.selected) {
            (bifrost_rte::PathState::Suspect, _) if s.is_silent => PathState::Down,
            (bifrost_rte::PathState::Suspect, _) => PathState::Suspect,
            (bifrost_rte::PathState::Usable, true) => PathState::Active,
            (bifrost_rte::PathState::Usable, false) => PathState::Standby,
        },
        drained: s.drained,
        srtt_us: known(s.srtt_ns),
        total_srtt_us: known(s.total_rtt_ns),
        min_rtt_us: known(s.min_rtt_ns),
        rttvar_us: known(s.rttvar_ns),
        loss_percent: f64::from(s.loss) * 100.0,
        share_percent: if total > 0.0 { s.recent_packets / total * 100.0 } else { 0.0 },
        cwnd_packets: f64::from(s.window_packets).min(1e9),
        in_flight_packets: u64::from(s.in_flight_packets),
        tx_packets: s.tx_packets,
        lost_packets: s.lost_packets,
        probes_packets: s.probes_sent,
        probes_lost_packets: s.probes_lost,
        ..Path::default()
    }
}

/// All ports, in the configuration's order. `waiting`: names of the ports that have no guest yet.
pub(crate) fn ports(state_view: StateView, waiting: HashSet<String>) -> Result<Pages<PortStatus>, ApiError> {
    let held = state_view.held()?;
    let mut from = 0;
    Ok(Box::new(std::iter::from_fn(move || {
        let ports = state_view.config.ports.get(from..)?;
        let ports = &ports[..ports.len().min(PORTS)];
        from += ports.len();
        if ports.is_empty() {
            return None;
        }
        Some(some_ports(&state_view, ports, &waiting, &held))
    })))
}

fn some_ports(
    state_view: &StateView,
    ports: &[Port],
    waiting: &HashSet<String>,
    held: &HashMap<u32, u64>,
) -> Page<PortStatus> {
    let mut all: Vec<PortStatus> = ports.iter().map(|port| described(port, waiting.contains(&port.name))).collect();
    let indexes = ports.iter().zip(0..).filter_map(|(port, at)| Some((state_view.names.port(&port.name)?, at)));
    let indexes: HashMap<u32, usize> = indexes.collect();
    for worker in &state_view.workers {
        for page in worker.ports_of(indexes.keys().copied().collect()) {
            let (page, now) = (page.map_err(gone)?, state_view.names_now());
            for view in page.iter().filter(|view| state_view.port(&now, view.owner).is_some()) {
                if let Some(status) = indexes.get(&view.owner).and_then(|at| all.get_mut(*at)) {
                    add(status, view);
                }
            }
        }
    }
    for status in &mut all {
        let before = |counter| state_view.carried.of_port(&status.name, counter);
        let [tx, tx_bytes, rx, rx_bytes] =
            ["port.tx_packets", "port.tx_bytes", "port.rx_packets", "port.rx_bytes"].map(before);
        (status.tx_packets, status.tx_bytes) = (status.tx_packets + tx, status.tx_bytes + tx_bytes);
        (status.rx_packets, status.rx_bytes) = (status.rx_packets + rx, status.rx_bytes + rx_bytes);
    }
    for (owner, at) in &indexes {
        all[*at].rx_held_packets = held.get(owner).copied().unwrap_or(0);
    }
    Ok(all)
}

/// The status fields that come from a port's configuration.
fn described(p: &Port, waiting: bool) -> PortStatus {
    PortStatus {
        name: p.name.clone(),
        vni: p.vni.value(),
        kind: translate::kind(p.kind).to_string(),
        mac: p.mac.to_string(),
        addresses: p.addresses.clone(),
        mtu_bytes: u32::from(p.mtu),
        netns: p.netns.as_ref().map(|n| n.display().to_string()),
        device: p.socket.as_ref().map_or_else(|| p.device.clone(), |s| s.display().to_string()),
        waiting,
        queues: p.queues as u32,
        ..PortStatus::default()
    }
}

/// Adds a worker's counters of a port.
fn add(status: &mut PortStatus, port: &PortView) {
    status.rx_packets += port.rx_packets;
    status.rx_bytes += port.rx_bytes;
    status.tx_packets += port.tx_packets;
    status.tx_bytes += port.tx_bytes;
    status.tx_held_packets += port.held_packets;
    status.tx_held_back_times += port.held_back_times;
    status.failed |= port.failed;
    status.slow_turns += port.slow_turns;
    status.rest_times += port.rest_times;
    status.fault_times = status.fault_times.max(port.fault_times);
    status.fault = status.fault.take().or_else(|| port.fault.as_ref().map(fault));
    for (name, count) in port.switch() {
        let class = name.strip_prefix("evicted_").and_then(|name| name.strip_suffix("_sessions"));
        if let Some(class) = class.filter(|_| count > 0) {
            *status.evicted_sessions.entry(class.to_owned()).or_default() += count;
        } else if name == "port_current_sessions" {
            status.sessions += count;
        }
    }
    for (reason, count) in port.drops() {
        *status.drops_packets.entry(reason).or_default() += count;
    }
}

/// A port's fault in the form of the API.
fn fault(fault: &bifrost_datapath::PortFault) -> PortFault {
    PortFault {
        stage: fault.stage.name().to_owned(),
        message: fault.panic.message.clone(),
        location: fault.panic.location.clone(),
        ago_s: monotonic_ns().saturating_sub(fault.at.0) as f64 / 1e9,
    }
}

/// All routes, then all peerings with other VPCs.
pub(crate) fn routes(config: Arc<Config>) -> Pages<Route> {
    let of_peerings = peerings(&config);
    let mut last = None;
    let of_routes = std::iter::from_fn(move || -> Option<Page<Route>> {
        let routes: Vec<_> = config.routes.after(last).take(ROUTES).collect();
        last = Some(routes.last().map(|route| (route.vni, route.prefix))?);
        Some(Ok(some_routes(&config, &routes)))
    });
    Box::new(of_routes.chain((!of_peerings.is_empty()).then_some(Ok(of_peerings))))
}

fn some_routes(config: &Config, routes: &[&bifrost_control::config::Route]) -> Vec<Route> {
    let path_mtu = config.path_mtu();
    let route = |r: &&bifrost_control::config::Route| Route {
        vni: r.vni.value(),
        prefix: r.prefix,
        peer: r.peer.clone(),
        mac: r.mac.to_string(),
        mtu_bytes: u32::from(path_mtu(r)),
        to_vni: None,
    };
    routes.iter().map(route).collect()
}

fn peerings(config: &Config) -> Vec<Route> {
    let peering = |p: &bifrost_control::config::Peering| Route {
        vni: p.vni.value(),
        prefix: p.prefix,
        peer: String::new(),
        mac: String::new(),
        mtu_bytes: 0,
        to_vni: Some(p.to_vni.value()),
    };
    config.peerings.iter().map(peering).collect()
}

pub(crate) fn gone(error: Gone) -> ApiError {
    ApiError::unavailable(error.to_string()).hint("the daemon is ending, or a worker has crashed; see its log")
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}
