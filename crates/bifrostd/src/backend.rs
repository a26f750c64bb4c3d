//! What the API asks, answered from the workers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Instant;

use bifrost_control::api::{
    ApiError, ApplyReport, ApplySpec, BackendHealth, BackendStatus, CaptureSpec, Conn, ConnState, DrainReport,
    DrainSpec, FaultEntry, FaultSpec, FlowLogStatus, LoadBalancerStatus, MirrorStatus, NatStatus, ObjectList,
    ObjectsDigest, ObjectsQuery, Path, PathState, PeerMode, PeerStatus, PortFault, PortStatus, ReloadReport, Route,
    Sample, Stats, Status, Trace, TraceSpec, WorkerStatus,
};
use bifrost_control::config::{self, Affinity, BalancedProtocol, Config, LoadBalancer, PeerTransport, PortKind};
use bifrost_control::server::{Backend, CaptureStream};
use bifrost_datapath::WorkerView;
use bifrost_port::HostUnderlay;
use bifrost_port::afxdp::AfxdpCounters;
use bifrost_port::clock::monotonic_ns;
use bifrost_rte::State as RteState;

use crate::background::in_background;
use crate::container::Container;
use crate::daemon::{Daemon, State};
use crate::flow_log;
use crate::health::Health;
use crate::mirror;
use crate::nat;
use crate::samples;
use crate::translate;
use crate::trim::trim;

/// Faults in force at a time.
const MAX_FAULTS: usize = 256;

fn backend_status(health: &Health, balancer: &LoadBalancer, backend: &config::Backend) -> BackendStatus {
    let config::Backend { address, port, weight } = *backend;
    let known = health.get(&(balancer.name.clone(), SocketAddr::new(address, port)));
    let health = match (weight, &balancer.check, known) {
        (0, ..) => BackendHealth::Draining,
        (_, None, _) => BackendHealth::Unchecked,
        (_, Some(_), Some(false)) => BackendHealth::Down,
        (_, Some(_), _) => BackendHealth::Up,
    };
    BackendStatus { address, port, weight, health }
}

impl Backend for Daemon {
    fn status(&self) -> Result<Status, ApiError> {
        let mut state = self.state();
        let views = views(&state, true)?;
        let workers = workers(&mut state, &views);
        let config = &state.config;
        let peers = config.peers.iter().map(|p| PeerStatus {
            name: p.name.clone(),
            addresses: p.addresses.clone(),
            transport: peer_mode(&state, &views, p),
        });
        Ok(Status {
            host: config.host.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            config_file: self.file.display().to_string(),
            underlay: config.underlay.addresses.clone(),
            workers,
            peers: peers.collect(),
            ports: config.ports.len() as u64,
            routes: config.routes.len() as u64,
            conns: views.iter().map(|v| v.connections.len() as u64).sum(),
            faults: state.faults.len() as u64,
        })
    }

    fn ports(&self) -> Result<Vec<PortStatus>, ApiError> {
        let state = self.state();
        let views = views(&state, true)?;
        let ports = state.config.ports.iter().map(|p| {
            let owner = state.names.port(&p.name);
            let mut status = PortStatus {
                name: p.name.clone(),
                vni: p.vni.value(),
                kind: translate::kind(p.kind).to_string(),
                mac: p.mac.to_string(),
                addresses: p.addresses.clone(),
                mtu_bytes: u32::from(p.mtu),
                netns: p.netns.as_ref().map(|n| n.display().to_string()),
                device: p.socket.as_ref().map_or_else(|| p.device.clone(), |s| s.display().to_string()),
                waiting: state.machines.get(&p.name).is_some_and(|m| !m.is_running())
                    || state.containers.get(&p.name).is_some_and(Container::is_waiting),
                queues: p.queues as u32,
                ..PortStatus::default()
            };
            for view in &views {
                for port in view.ports.iter().filter(|v| Some(v.owner) == owner) {
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
                    status.fault = status.fault.or_else(|| port.fault.as_ref().map(fault));
                    for (name, count) in &port.switch {
                        let class = name.strip_prefix("evicted_").and_then(|name| name.strip_suffix("_sessions"));
                        if let Some(class) = class.filter(|_| *count > 0) {
                            *status.evicted_sessions.entry(class.to_owned()).or_default() += count;
                        } else if *name == "port_current_sessions" {
                            status.sessions += count;
                        }
                    }
                    for (reason, count) in &port.drops {
                        *status.drops_packets.entry(reason.clone()).or_default() += count;
                    }
                }
                let conns = view.connections.iter().filter(|(_, c)| Some(c.owner) == owner);
                status.rx_held_packets += conns.map(|(_, c)| u64::from(c.held_packets)).sum::<u64>();
            }
            status
        });
        Ok(ports.collect())
    }

    fn routes(&self) -> Result<Vec<Route>, ApiError> {
        let state = self.state();
        let path_mtu = state.config.path_mtu();
        let routes = state.config.routes.iter().map(|r| Route {
            vni: r.vni.value(),
            prefix: r.prefix,
            peer: r.peer.clone(),
            mac: r.mac.to_string(),
            mtu_bytes: u32::from(path_mtu(r)),
            to_vni: None,
        });
        let peerings = state.config.peerings.iter().map(|p| Route {
            vni: p.vni.value(),
            prefix: p.prefix,
            peer: String::new(),
            mac: String::new(),
            mtu_bytes: 0,
            to_vni: Some(p.to_vni.value()),
        });
        Ok(routes.chain(peerings).collect())
    }

    fn load_balancers(&self) -> Result<Vec<LoadBalancerStatus>, ApiError> {
        let state = self.state();
        let status = |b: &LoadBalancer| LoadBalancerStatus {
            name: b.name.clone(),
            vni: b.vni.value(),
            address: b.address,
            port: b.port,
            protocol: if b.protocol == BalancedProtocol::Tcp { "tcp" } else { "udp" }.to_owned(),
            affinity: if b.affinity == Affinity::Client { "client" } else { "connection" }.to_owned(),
            backends: b.backends.iter().map(|backend| backend_status(&state.health, b, backend)).collect(),
        };
        Ok(state.config.load_balancers.iter().map(status).collect())
    }

    fn nat(&self) -> Result<Vec<NatStatus>, ApiError> {
        let state = self.state();
        let mut shared = Vec::new();
        for source in &state.config.nat.sources {
            let uplink = state.names.port(&source.uplink).map(bifrost_avs::PortId);
            let uplink = uplink.ok_or_else(|| ApiError::internal(format!("no port named {:?}", source.uplink)))?;
            shared.extend(source.addresses.iter().map(|address| (uplink, *address)));
        }
        let asked = shared.clone();
        let used = state.on_all(move |worker| {
            let switch = worker.core_mut().switch_mut();
            asked.iter().map(|(uplink, address)| switch.nat_ports(*uplink, *address)).collect::<Vec<_>>()
        });
        let used = used.map_err(gone)?;
        // Only the worker of an uplink gives its ports out.
        let mut sums = (0..shared.len())
            .map(|at| used.iter().fold([0; 3], |sum, of| std::array::from_fn(|kind| sum[kind] + of[at][kind])));
        Ok(nat::status(&state.config, &mut sums))
    }

    fn mirrors(&self) -> Result<Vec<MirrorStatus>, ApiError> {
        let state = self.state();
        Ok(mirror::status(&state.config, &state.mirrored))
    }

    fn flow_log(&self) -> Result<FlowLogStatus, ApiError> {
        let state = self.state();
        let workers = state.on_all(|worker| {
            let switch = worker.core_mut().switch_mut();
            (switch.flow_log_counters(), switch.rule_log_counters())
        });
        let (flows, rules): (Vec<_>, Vec<_>) = workers.map_err(gone)?.into_iter().unzip();
        let sum = |count: fn(&bifrost_avs::FlowLogCounters) -> u64| flows.iter().map(count).sum();
        let sum_rules = |count: fn(&bifrost_avs::RuleLogCounters) -> u64| rules.iter().map(count).sum();
        let log = state.config.flow_log.as_ref();
        let done = state.flow_log;
        Ok(FlowLogStatus {
            on: log.is_some(),
            json: log.and_then(|log| log.json.as_ref()).map(|path| path.display().to_string()),
            collector: log.and_then(|log| log.collector),
            ports: log
                .filter(|log| log.has_flows())
                .map_or_else(Vec::new, |log| flow_log::ports(&state.config, log).map(str::to_owned).collect()),
            flows: sum(|c| c.current_flows),
            created_records: sum(|c| c.created_records),
            lost_records: sum(|c| c.lost_records),
            unlogged_packets: sum(|c| c.unlogged_packets),
            json_records: done.json_records,
            json_lost_records: done.json_lost_records,
            ipfix_records: done.ipfix_records,
            ipfix_lost_records: done.ipfix_lost_records,
            ipfix_messages: done.ipfix_messages,
            rules_json: log.and_then(|log| log.rules_json.as_ref()).map(|path| path.display().to_string()),
            rules: if log.is_some() { flow_log::logged_rules(&state.config) } else { Vec::new() },
            rule_created_records: sum_rules(|c| c.created_records),
            rule_suppressed_packets: sum_rules(|c| c.suppressed_packets),
            rule_json_records: done.rule_json_records,
            rule_json_lost_records: done.rule_json_lost_records,
        })
    }

    fn conns(&self) -> Result<Vec<Conn>, ApiError> {
        let state = self.state();
        let mut conns = Vec::new();
        for view in views(&state, true)? {
            for (peer, c) in &view.connections {
                let srtt = view.paths.iter().filter(|p| p.peer == *peer && p.snapshot.selected);
                let srtt_ns = srtt.map(|p| p.snapshot.total_rtt_ns).filter(|ns| *ns > 0).max();
                conns.push(Conn {
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
                    peer: state.names.peer_name(*peer).unwrap_or("?").to_string(),
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
                });
            }
        }
        Ok(conns)
    }

    fn paths(&self) -> Result<Vec<Path>, ApiError> {
        let state = self.state();
        let mut paths = Vec::new();
        for view in views(&state, false)? {
            let recent = |peer: u16| {
                let of_peer = view.paths.iter().filter(move |p| p.peer == peer);
                of_peer.map(|p| p.snapshot.recent_packets).sum::<f64>()
            };
            for p in &view.paths {
                let s = &p.snapshot;
                let known = |ns: u64| (ns > 0).then(|| us(ns));
                paths.push(Path {
                    peer: state.names.peer_name(p.peer).unwrap_or("?").to_string(),
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
                    share_percent: match recent(p.peer) {
                        total if total > 0.0 => s.recent_packets / total * 100.0,
                        _ => 0.0,
                    },
                    cwnd_packets: f64::from(s.window_packets).min(1e9),
                    in_flight_packets: u64::from(s.in_flight_packets),
                    tx_packets: s.tx_packets,
                    lost_packets: s.lost_packets,
                    probes_packets: s.probes_sent,
                    probes_lost_packets: s.probes_lost,
                    ..Path::default()
                });
            }
        }
        Ok(paths)
    }

    fn drain_path(&self, DrainSpec { peer, path }: DrainSpec, drained: bool) -> Result<DrainReport, ApiError> {
        let mut state = self.state();
        let of_peer = state.config.peers.iter().find(|p| p.name == peer);
        let (Some(of_peer), Some(id)) = (of_peer, state.names.peer(&peer)) else {
            return Err(unknown_peer(&state, &peer).at("peer"));
        };
        let paths = state.config.paths(of_peer).count() as u8;
        if path >= paths {
            return Err(ApiError::not_found(format!("no path {path} to {peer}"))
                .at("path")
                .hint(format!("it has {paths}, numbered from 0: see bifrostctl paths")));
        }
        let before = state.drained.get(&peer).copied().unwrap_or(0);
        let after = if drained { before | 1 << path } else { before & !(1 << path) };
        let in_use_paths: Vec<u8> = (0..paths).filter(|path| after >> path & 1 == 0).collect();
        if in_use_paths.is_empty() {
            return Err(ApiError::conflict(format!("path {path} is the last one in use to {peer}"))
                .at("path")
                .hint(format!("restore another first; to leave {peer} altogether, remove its routes and reload")));
        }
        state.on_all(move |worker| worker.core_mut().drain_paths(id, after)).map_err(gone)?;
        state.drained.insert(peer.clone(), after);
        let changed = before != after;
        if changed {
            tracing::info!(peer, path, drained, "a path is taken out of use, or back");
        }
        Ok(DrainReport { peer, path, drained, changed, in_use_paths })
    }

    fn stats(&self) -> Result<Stats, ApiError> {
        let state = self.state();
        let mut counters: BTreeMap<String, u64> = BTreeMap::new();
        for view in views(&state, false)? {
            for (name, value) in view.counters {
                *counters.entry(name).or_default() += value;
            }
            for port in view.ports {
                let config = state.config.ports.iter().find(|p| state.names.port(&p.name) == Some(port.owner));
                let group = if config.is_some_and(|p| p.kind == PortKind::VhostUser) { "vhost" } else { "tap" };
                for (name, value) in port.counters {
                    *counters.entry(format!("{group}.{name}")).or_default() += value;
                }
            }
        }
        let of_underlay = |worker: &mut bifrost_datapath::Worker<HostUnderlay>| {
            let underlay = worker.underlay();
            (*underlay.udp_counters(), underlay.afxdp_counters())
        };
        for (udp, afxdp) in state.on_all(of_underlay).map_err(gone)? {
            for (name, value) in udp.iter() {
                *counters.entry(format!("udp.{name}")).or_default() += value;
            }
            for (name, value) in afxdp.iter().flat_map(AfxdpCounters::iter) {
                *counters.entry(format!("afxdp.{name}")).or_default() += value;
            }
        }
        Ok(Stats { counters })
    }

    fn samples(&self) -> Result<Vec<Sample>, ApiError> {
        samples::of(&self.state()).map_err(gone)
    }

    fn faults(&self) -> Result<Vec<FaultEntry>, ApiError> {
        let state = self.state();
        let views = views(&state, false)?;
        let mut faults = state.faults.clone();
        for fault in &mut faults {
            let hits = views.iter().flat_map(|v| &v.faults).filter(|(f, _)| u64::from(f.id) == fault.id);
            fault.hits_packets = hits.map(|(_, hits)| hits).sum();
        }
        Ok(faults)
    }

    fn add_fault(&self, spec: FaultSpec) -> Result<FaultEntry, ApiError> {
        use bifrost_control::api::{Direction, FaultTarget};
        let mut state = self.state();
        let at_guest = matches!(spec.target, FaultTarget::Port { .. }) && spec.direction == Direction::Tx;
        let more = spec.delay_us + spec.jitter_us > 0
            || spec.reorder_percent + spec.duplicate_percent + spec.corrupt_percent > 0.0;
        if at_guest && more {
            return Err(ApiError::bad_request("packets from a guest can only be dropped")
                .at("direction")
                .hint("use loss or down, or inject the fault on the underlay: --peer NAME --direction tx"));
        }
        if state.faults.len() >= MAX_FAULTS {
            return Err(ApiError::conflict(format!("there are {MAX_FAULTS} faults already"))
                .hint("each packet is held against each of them; remove some: bifrostctl fault clear"));
        }
        let id = state.next_fault;
        let fault = translate::fault(id as u32, &spec, &state.names).ok_or_else(|| unknown_target(&state, &spec))?;
        state.next_fault += 1;
        let seed = spec.seed;
        state.on_all(move |worker| worker.core_mut().faults_mut().set(fault, seed)).map_err(gone)?;
        let entry = FaultEntry { id, spec, hits_packets: 0 };
        state.faults.push(entry.clone());
        tracing::warn!(id, "a fault is injected");
        Ok(entry)
    }

    fn remove_fault(&self, id: u64) -> Result<(), ApiError> {
        let mut state = self.state();
        let before = state.faults.len();
        state.faults.retain(|f| f.id != id);
        if state.faults.len() == before {
            return Err(ApiError::not_found(format!("no fault {id}")).hint("see bifrostctl fault list"));
        }
        state.on_all(move |worker| worker.core_mut().faults_mut().clear(Some(id as u32))).map_err(gone)?;
        Ok(())
    }

    fn clear_faults(&self) -> Result<u64, ApiError> {
        let mut state = self.state();
        let count = state.faults.len() as u64;
        state.faults.clear();
        state.on_all(|worker| worker.core_mut().faults_mut().clear(None)).map_err(gone)?;
        Ok(count)
    }

    fn reload(&self) -> Result<ReloadReport, ApiError> {
        let config = in_background(|| Config::load(&self.file)).map_err(|errors| {
            ApiError::bad_request(errors.to_string()).at(self.file.display().to_string()).hint("nothing was changed")
        })?;
        let mut state = self.state();
        let diff = state.apply_file(config)?;
        drop(state);
        Ok(in_background(move || {
            let report = diff.report();
            drop(diff);
            trim();
            report
        }))
    }

    fn apply(&self, spec: ApplySpec) -> Result<ApplyReport, ApiError> {
        self.state().apply(&spec)
    }

    fn objects(&self, query: ObjectsQuery) -> Result<ObjectList, ApiError> {
        // Apart from the lock: there may be very many.
        let objects = self.state().objects.clone();
        Ok(in_background(|| objects.list(&query)))
    }

    fn object_digests(&self, query: ObjectsQuery) -> Result<Vec<ObjectsDigest>, ApiError> {
        let objects = self.state().objects.clone();
        Ok(in_background(|| objects.digests(&query)))
    }

    fn trace(&self, spec: TraceSpec) -> Result<Trace, ApiError> {
        self.trace_packet(&spec)
    }

    fn capture(&self, spec: CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        self.begin_capture(&spec)
    }
}

fn views(state: &State, connections: bool) -> Result<Vec<WorkerView>, ApiError> {
    state.on_all(move |worker| worker.view(connections)).map_err(gone)
}

fn workers(state: &mut State, views: &[WorkerView]) -> Vec<WorkerStatus> {
    let now = Instant::now();
    let cpus = state.config.workers.cpus.clone();
    let status = views.iter().enumerate().map(|(i, view)| {
        let (at, busy_ns, percent) = &mut state.busy[i];
        let elapsed = now.duration_since(*at).as_nanos() as f64;
        // Asked again too soon, the last answer is the better one.
        if elapsed > 1e8 {
            *percent = (view.busy_ns - *busy_ns) as f64 / elapsed * 100.0;
            (*at, *busy_ns) = (now, view.busy_ns);
        }
        WorkerStatus {
            index: i as u32,
            cpu: cpus.get(i).map(|c| *c as u32),
            loops: view.loops,
            sleeps: view.loops - view.busy_loops.min(view.loops),
            busy_percent: percent.min(100.0),
            guest_tx_packets: view.ports.iter().map(|p| p.tx_packets).sum(),
            guest_rx_packets: view.ports.iter().map(|p| p.rx_packets).sum(),
            underlay_tx_packets: view.underlay_packets.1,
            underlay_rx_packets: view.underlay_packets.0,
        }
    });
    status.collect()
}

fn peer_mode(state: &State, views: &[WorkerView], peer: &bifrost_control::config::Peer) -> PeerMode {
    if peer.transport == PeerTransport::Plain {
        return PeerMode::Plain;
    }
    let id = state.names.peer(&peer.name);
    let states = views.iter().flat_map(|v| &v.connections).filter(|(p, _)| Some(*p) == id).map(|(_, c)| c.state);
    states.fold(PeerMode::Idle, |mode, state| match state {
        RteState::Open => PeerMode::Bifrost,
        RteState::Plain { .. } | RteState::BestEffort if mode != PeerMode::Bifrost => PeerMode::Plain,
        _ => mode,
    })
}

fn unknown_target(state: &State, spec: &FaultSpec) -> ApiError {
    use bifrost_control::api::FaultTarget;
    match &spec.target {
        FaultTarget::Port { name } => unknown("port", name, state.config.ports.iter().map(|p| &*p.name)),
        FaultTarget::Peer { name, .. } => unknown_peer(state, name),
    }
}

fn unknown_peer(state: &State, name: &str) -> ApiError {
    unknown("peer", name, state.config.peers.iter().map(|p| &*p.name))
}

fn unknown<'a>(what: &str, name: &str, known: impl Iterator<Item = &'a str>) -> ApiError {
    let known: Vec<_> = known.collect();
    ApiError::not_found(format!("no {what} named {name:?}")).hint(format!("there are: {}", known.join(", ")))
}

fn gone(error: anyhow::Error) -> ApiError {
    ApiError::unavailable(error.to_string()).hint("the daemon is ending, or a worker has crashed; see its log")
}

/// A port's fault, as the API shows it.
fn fault(fault: &bifrost_datapath::PortFault) -> PortFault {
    PortFault {
        stage: fault.stage.name().to_owned(),
        message: fault.panic.message.clone(),
        location: fault.panic.location.clone(),
        ago_s: monotonic_ns().saturating_sub(fault.at.0) as f64 / 1e9,
    }
}

fn us(ns: u64) -> f64 {
    ns as f64 / 1000.0
}
