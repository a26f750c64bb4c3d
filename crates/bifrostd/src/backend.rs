//! API requests, answered from the state of the workers.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bifrost_control::api::{
    ApiError, ApplyReport, ApplySpec, BackendHealth, BackendStatus, CaptureSpec, Conn, DrainReport, DrainSpec,
    FaultEntry, FaultSpec, FlowLogStatus, LearnReport, LearnSpec, LearnedRoute, LoadBalancerStatus, MirrorStatus,
    NatStatus, ObjectList, ObjectsDigest, ObjectsQuery, Path, PeerMode, PeerStatus, PortSessions, PortStatus,
    ReloadReport, Route, RouteQuestion, Sample, Session, SessionFilter, SessionsQuery, SessionsReport, Stats, Status,
    Trace, TraceSpec, UpgradeReport, UpgradeSpec, WorkerStatus,
};
use bifrost_control::config::{self, Affinity, BalancedProtocol, Config, LoadBalancer, PeerTransport};
use bifrost_control::server::{Backend, CaptureStream, Pages, one_page};
use bifrost_datapath::Totals;

use crate::background::in_background;
use crate::daemon::{Daemon, State};
use crate::flow_log;
use crate::health::Health;
use crate::lists::{self, StateView};
use crate::mirror;
use crate::nat;
use crate::samples;
use crate::sessions;
use crate::translate;
use crate::trim::trim;

/// Most faults in force at a time.
const MAX_FAULTS: usize = 256;

/// `is_checked`: whether this host checks the balancer's backends.
fn backend_status(
    health: &Health,
    balancer: &LoadBalancer,
    is_checked: bool,
    backend: &config::Backend,
) -> BackendStatus {
    let config::Backend { address, port, weight } = *backend;
    let known = health.get(&(balancer.name.clone(), SocketAddr::new(address, port)));
    let health = match (weight, is_checked, known) {
        (0, ..) => BackendHealth::Draining,
        (_, false, _) => BackendHealth::Unchecked,
        (_, true, Some(false)) => BackendHealth::Down,
        (_, true, _) => BackendHealth::Up,
    };
    BackendStatus { address, port, weight, health }
}

impl Backend for Daemon {
    fn status(&self) -> Result<Status, ApiError> {
        let (state_view, faults) = {
            let state = self.state();
            (StateView::of(&state), state.faults.len() as u64)
        };
        let mut views = Vec::new();
        for worker in &state_view.workers {
            let totals = worker.ask(|worker| worker.totals()).map_err(lists::gone)?;
            let mut guests = (0, 0);
            for page in worker.traffic() {
                for (tx, rx) in page.map_err(lists::gone)? {
                    guests = (guests.0 + tx, guests.1 + rx);
                }
            }
            views.push(WorkerView { totals, guests });
        }
        let modes = state_view.peer_modes()?;
        let config = &state_view.config;
        let peers = config.peers.iter().map(|p| PeerStatus {
            name: p.name.clone(),
            addresses: p.addresses.clone(),
            transport: match state_view.names.peer(&p.name) {
                _ if p.transport == PeerTransport::Plain => PeerMode::Plain,
                Some(id) => modes.get(&id).copied().unwrap_or_default(),
                None => PeerMode::Idle,
            },
        });
        Ok(Status {
            host: config.host.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_string(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs_f64(),
            config_file: self.file.display().to_string(),
            underlay: config.underlay.addresses.clone(),
            workers: workers(&mut self.state(), &views),
            peers: peers.collect(),
            ports: config.ports.len() as u64,
            routes: config.routes.len() as u64,
            conns: views.iter().map(|v| v.totals.connections as u64).sum(),
            faults,
        })
    }

    fn ports(&self) -> Result<Pages<PortStatus>, ApiError> {
        let (state_view, waiting) = {
            let state = self.state();
            let machines = state.machines.iter().filter(|(_, m)| !m.is_running()).map(|(name, _)| name);
            let containers = state.containers.iter().filter(|(_, c)| c.is_waiting()).map(|(name, _)| name);
            (StateView::of(&state), machines.chain(containers).cloned().collect())
        };
        lists::ports(state_view, waiting)
    }

    fn routes(&self) -> Result<Pages<Route>, ApiError> {
        let config = Arc::clone(&self.state().config);
        Ok(lists::routes(config))
    }

    fn load_balancers(&self) -> Result<Vec<LoadBalancerStatus>, ApiError> {
        let state = self.state();
        let is_checked = |b: &LoadBalancer| state.config.ports.iter().any(|port| b.asks_from(port));
        let backends = |b: &LoadBalancer| {
            let is_checked = is_checked(b);
            b.backends.iter().map(|backend| backend_status(&state.health, b, is_checked, backend)).collect()
        };
        let status = |b: &LoadBalancer| LoadBalancerStatus {
            name: b.name.clone(),
            vni: b.vni.value(),
            address: b.address,
            port: b.port,
            protocol: if b.protocol == BalancedProtocol::Tcp { "tcp" } else { "udp" }.to_owned(),
            affinity: if b.affinity == Affinity::Client { "client" } else { "connection" }.to_owned(),
            backends: backends(b),
        };
        Ok(state.config.load_balancers.iter().map(status).collect())
    }

    fn nat(&self) -> Result<Vec<NatStatus>, ApiError> {
        let state_view = StateView::of(&self.state());
        let mut shared = Vec::new();
        for source in &state_view.config.nat.sources {
            let uplink = state_view.names.port(&source.uplink).map(bifrost_avs::PortId);
            let uplink = uplink.ok_or_else(|| ApiError::internal(format!("no port named {:?}", source.uplink)))?;
            shared.extend(source.addresses.iter().map(|address| (uplink, *address)));
        }
        let mut used = vec![[0; 3]; shared.len()];
        for worker in &state_view.workers {
            let addresses = shared.clone();
            let pages = worker.each(addresses.len() as u32, move |core, at| {
                let (uplink, address) = addresses[at as usize];
                core.switch().nat_ports(uplink, address)
            });
            let mut next = 0..used.len();
            for page in pages {
                for (ports, at) in page.map_err(lists::gone)?.into_iter().zip(next.by_ref()) {
                    (0..3).for_each(|kind| used[at][kind] += ports[kind]);
                }
            }
        }
        // Only the worker that serves an uplink allocates its ports.
        Ok(nat::status(&state_view.config, &mut used.into_iter()))
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
        let done = state.flow_log.counters();
        Ok(FlowLogStatus {
            on: log.is_some(),
            json: log.and_then(|log| log.json.as_ref()).map(|path| path.display().to_string()),
            collector: log.and_then(|log| log.collector),
            ports: log.filter(|log| log.has_flows()).map_or_else(Vec::new, |log| {
                flow_log::configured::ports(&state.config, log).map(str::to_owned).collect()
            }),
            logs: state.config.flow_logs.iter().map(|log| flow_log::export::status(&state, log)).collect(),
            flows: sum(|c| c.current_flows),
            created_records: sum(|c| c.created_records),
            lost_records: sum(|c| c.lost_records),
            unlogged_packets: sum(|c| c.unlogged_packets),
            unsampled_packets: sum(|c| c.unsampled_packets),
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

    fn conns(&self) -> Result<Pages<Conn>, ApiError> {
        let state_view = StateView::of(&self.state());
        Ok(lists::conns(state_view))
    }

    fn paths(&self) -> Result<Pages<Path>, ApiError> {
        let state_view = StateView::of(&self.state());
        Ok(lists::paths(state_view))
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
                .hint(format!("the peer has {paths} paths, numbered from 0; see bifrostctl paths")));
        }
        let before = state.drained.get(&peer).copied().unwrap_or(0);
        let after = if drained { before | 1 << path } else { before & !(1 << path) };
        let in_use_paths: Vec<u8> = (0..paths).filter(|path| after >> path & 1 == 0).collect();
        if in_use_paths.is_empty() {
            return Err(ApiError::conflict(format!("path {path} is the last path in use to {peer}"))
                .at("path")
                .hint(format!("restore another path first; to stop using {peer}, remove its routes and reload")));
        }
        state.on_all(move |worker| worker.core_mut().drain_paths(id, after)).map_err(gone)?;
        state.drained.insert(peer.clone(), after);
        let changed = before != after;
        if changed {
            tracing::info!(peer, path, drained, "a path was drained or restored");
        }
        Ok(DrainReport { peer, path, drained, changed, in_use_paths })
    }

    fn stats(&self) -> Result<Stats, ApiError> {
        let pages = samples::sums(&self.state());
        let mut counters: BTreeMap<String, u64> = BTreeMap::new();
        for page in pages {
            for (name, value) in page? {
                *counters.entry(name).or_default() += value;
            }
        }
        Ok(Stats { counters })
    }

    fn samples(&self) -> Result<Pages<Sample>, ApiError> {
        Ok(samples::of(&self.state()))
    }

    fn faults(&self) -> Result<Vec<FaultEntry>, ApiError> {
        let state = self.state();
        let hits = state.on_all(|worker| worker.core_mut().faults_mut().iter().copied().collect::<Vec<_>>());
        let hits = hits.map_err(gone)?;
        let mut faults = state.faults.clone();
        for fault in &mut faults {
            let of_it = hits.iter().flatten().filter(|(f, _)| u64::from(f.id) == fault.id);
            fault.hits_packets = of_it.map(|(_, hits)| hits).sum();
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
            return Err(ApiError::conflict(format!("{MAX_FAULTS} faults are already in force"))
                .hint("every packet is compared with every fault; remove some: bifrostctl fault clear"));
        }
        let id = state.next_fault;
        let fault = translate::fault(id as u32, &spec, &state.names).ok_or_else(|| unknown_target(&state, &spec))?;
        state.next_fault += 1;
        let seed = spec.seed;
        state.on_all(move |worker| worker.core_mut().faults_mut().set(fault, seed)).map_err(gone)?;
        let entry = FaultEntry { id, spec, hits_packets: 0 };
        state.faults.push(entry.clone());
        tracing::warn!(id, "fault injected");
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
        let removal = state.removal.clone();
        drop(state);
        removal.wait();
        Ok(in_background(move || {
            let report = diff.report();
            drop(diff);
            trim();
            report
        }))
    }

    fn upgrade(&self, spec: UpgradeSpec) -> Result<UpgradeReport, ApiError> {
        self.hand_over(&spec)
    }

    fn apply(&self, spec: ApplySpec) -> Result<ApplyReport, ApiError> {
        let mut state = self.state();
        let (report, removal) = (state.apply(&spec), state.removal.clone());
        drop(state);
        // After an error, devices that were created for the batch are gone before its sender reads that nothing changed.
        if spec.wait_for_devices || report.is_err() {
            removal.wait();
        }
        report
    }

    fn learned(&self) -> Result<Pages<LearnedRoute>, ApiError> {
        Ok(one_page(self.state().learned.list()))
    }

    fn route_questions(&self, wait: Duration) -> Result<Vec<RouteQuestion>, ApiError> {
        self.questions.take(wait)
    }

    fn learn(&self, spec: LearnSpec) -> Result<LearnReport, ApiError> {
        self.state().learn(&spec).map_err(gone)
    }

    fn objects(&self, query: ObjectsQuery) -> Result<ObjectList, ApiError> {
        // Without the lock: the list may be very long.
        let objects = self.state().objects.clone();
        in_background(|| objects.list(&query))
    }

    fn object_digests(&self, query: ObjectsQuery) -> Result<Vec<ObjectsDigest>, ApiError> {
        let objects = self.state().objects.clone();
        Ok(in_background(|| objects.digests(&query)))
    }

    fn sessions(&self, filter: SessionFilter) -> Result<Pages<Session>, ApiError> {
        let state_view = StateView::of(&self.state());
        sessions::list(state_view, &filter)
    }

    fn export_sessions(&self, query: SessionsQuery) -> Result<PortSessions, ApiError> {
        let holders = self.state().holders_of_sessions(&query.port)?;
        let exported = holders.export(query.port)?;
        // The number may belong to another port by now.
        let now = self.state().holders_of_sessions(&exported.port)?.port;
        let changed = || ApiError::conflict("the port changed during the export").at("port").hint("try again");
        if now == holders.port { Ok(exported) } else { Err(changed()) }
    }

    fn import_sessions(&self, sessions: PortSessions) -> Result<SessionsReport, ApiError> {
        let bytes = sessions.bytes()?;
        self.state().holders_of_sessions(&sessions.port)?.import(&bytes)
    }

    fn trace(&self, spec: TraceSpec) -> Result<Trace, ApiError> {
        self.trace_packet(&spec)
    }

    fn capture(&self, spec: CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError> {
        self.start_capture(&spec)
    }
}

/// Data of a worker for the status.
struct WorkerView {
    totals: Totals,
    /// Packets from and to guests.
    guests: (u64, u64),
}

fn workers(state: &mut State, views: &[WorkerView]) -> Vec<WorkerStatus> {
    let now = Instant::now();
    let cpus = state.config.workers.cpus.clone();
    let status = views.iter().zip(&mut state.busy).enumerate().map(|(i, (WorkerView { totals, guests }, busy))| {
        let own = &totals.own;
        let (at, busy_ns, percent) = busy;
        let elapsed = now.duration_since(*at).as_nanos() as f64;
        // For intervals under 100 ms the former value is more precise.
        if elapsed > 1e8 {
            *percent = own.busy_ns.saturating_sub(*busy_ns) as f64 / elapsed * 100.0;
            (*at, *busy_ns) = (now, own.busy_ns);
        }
        WorkerStatus {
            index: i as u32,
            cpu: cpus.get(i).map(|c| *c as u32),
            loops: own.loops,
            sleeps: own.loops - own.busy_loops.min(own.loops),
            busy_percent: percent.min(100.0),
            guest_tx_packets: guests.0,
            guest_rx_packets: guests.1,
            underlay_tx_packets: own.underlay_tx_packets,
            underlay_rx_packets: own.underlay_rx_packets,
        }
    });
    status.collect()
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
