//! The daemon: workers, devices, and the configuration in force.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use bifrost_avs::{Prepared, Switch};
use bifrost_control::api::FaultEntry;
use bifrost_control::config::{Config, Kind, Port, PortKind};
use bifrost_control::diff::ConfigDiff;
use bifrost_control::objects::Store;
use bifrost_control::server::Continued;
use bifrost_datapath::{CoreConfig, Device, Handle, PathSet, PortConfig, Pulse, PulseWatch, RouteQuestions};
use bifrost_port::afxdp::WaitingSockets;
use bifrost_port::vhost::{HandedPort, Unplugged};
use bifrost_port::{HostUnderlay, panics};
use bifrost_wire::Vni;

use crate::background::here_or_in_background;
use crate::beginning::{Inherited, adopt_underlays, open_underlays, restore, restore_handed, warn_of_small_devices};
use crate::capture::one::Capturing;
use crate::carried::Carried;
use crate::container::{Container, may_keep_tap};
use crate::devices;
use crate::flow_log;
use crate::health::Health;
use crate::kept::{self, Kept};
use crate::learning::{Learned, Questions};
use crate::machine::Machine;
use crate::mirror;
use crate::moves::Departed;
use crate::names::{Names, NamesInForce};
use crate::qos::{self, PortQos};
use crate::queues::{with_one_queue, with_several};
use crate::removal::{Released, Removal};
use crate::shared::{Holders, Shared};
use crate::snapshot::Snapshot;
use crate::tables;
use crate::translate;
use crate::upgrade::{Handed, Progress};

/// Poll interval for containers' network namespaces: a poll costs a system call for each port.
const NAMESPACE_POLL: Duration = Duration::from_millis(250);
/// Pause after a panic, which may recur.
const AFTER_PANIC: Duration = Duration::from_secs(10);

/// A running daemon. All changes go through one lock; the data path never waits for it.
pub(crate) struct Daemon {
    pub(crate) file: PathBuf,
    /// Directory of the objects' journal.
    pub(crate) state_directory: Option<PathBuf>,
    pub(crate) progress: Progress,
    /// Identifies this start of the daemon; a later start has a larger number (PROTOCOL §4.6).
    pub(crate) instance: u64,
    pub(crate) started: Instant,
    /// The running capture.
    pub(crate) capturing: Arc<Capturing>,
    /// A capture that another daemon has begun.
    pub(crate) continued: Mutex<Option<Continued>>,
    /// Questions of the workers about routes.
    pub(crate) questions: Questions,
    /// Progress of the workers, readable without the lock.
    pulses: Vec<Arc<Pulse>>,
    state: Mutex<State>,
}

/// The mutable part of a daemon.
pub(crate) struct State {
    /// The configuration in force: all objects and settings without those that could not be applied.
    pub(crate) config: Arc<Config>,
    /// Owners and versions of the objects.
    pub(crate) objects: Store,
    /// Journal of the objects that are not in the file.
    pub(crate) snapshot: Snapshot,
    pub(crate) names: NamesInForce,
    /// The switches' tables, as of the first worker.
    pub(crate) tables: Prepared,
    /// When the configuration last changed them.
    pub(crate) tables_changed: Instant,
    /// Sockets of virtual machines, by port name. Dropped before the workers.
    pub(crate) machines: BTreeMap<String, Machine>,
    /// State of another daemon's machines whose ports do not exist yet.
    pub(crate) handed_machines: BTreeMap<String, HandedPort>,
    /// AF_XDP sockets that wait until another daemon has closed its own.
    pub(crate) waiting_frames: Option<WaitingSockets>,
    /// Devices of TAP ports with a network namespace, by port name.
    pub(crate) containers: BTreeMap<String, Container>,
    /// TAP devices that outlive the daemon.
    pub(crate) kept: Kept,
    /// Ports whose devices have fewer queues than configured, one.
    pub(crate) single_queue: BTreeSet<String>,
    /// Devices that are being removed.
    pub(crate) removal: Removal,
    /// Open devices that no worker serves yet, with their ports and port numbers; `None` once the daemon has started.
    pub(crate) not_served: Option<Vec<(Port, u32, Vec<Device>)>>,
    pub(crate) workers: Vec<Handle<HostUnderlay>>,
    pub(crate) faults: Vec<FaultEntry>,
    /// Paths that the operator has taken out of use, by peer: bit i is path i.
    pub(crate) drained: BTreeMap<String, PathSet>,
    pub(crate) next_fault: u64,
    /// Of each worker: time of the last query, busy time until then in ns, busy share in percent.
    pub(crate) busy: Vec<(Instant, u64, f64)>,
    /// Health of load balancers' backends.
    pub(crate) health: Health,
    /// Holders of shared addresses.
    pub(crate) shared: Shared,
    /// Exported flow records.
    pub(crate) flow_log: Arc<flow_log::Exports>,
    /// Routes that were learned.
    pub(crate) learned: Learned,
    /// Ports that have gone from VPCs whose routes are learned.
    pub(crate) departed: Departed,
    /// Where to ask for routes.
    pub(crate) route_questions: RouteQuestions,
    /// Counters of the metadata service.
    pub(crate) metadata: bifrost_metadata::Counters,
    /// Counters of mirrored packets.
    pub(crate) mirrored: mirror::Counted,
    /// Counters of the daemon from which this one took over.
    pub(crate) carried: Arc<Carried>,
}

/// Result of a change of the configuration.
pub(crate) struct Taken {
    pub(crate) diff: ConfigDiff,
    /// Objects that could not be applied: they are not in the configuration in force.
    pub(crate) failures: Vec<Failure>,
}

/// An object that could not be applied.
pub(crate) struct Failure {
    /// Kind and name; `None` if it is not a single object.
    pub(crate) object: Option<(Kind, String)>,
    pub(crate) error: String,
}

impl Failure {
    /// A port or peer that could not be applied.
    pub(crate) fn of(kind: Kind, name: &str, error: &anyhow::Error) -> Failure {
        Failure { object: Some((kind, name.to_owned())), error: format!("{error:#}") }
    }
}

impl Daemon {
    /// Opens sockets and devices, or takes over those that are `kept`, and starts the workers. With state that another
    /// daemon has `handed` over, the workers are paused, and that daemon keeps working until
    /// [`Successor::complete`](crate::upgrade::Successor::complete); call [`settle`](Self::settle) after that.
    ///
    /// # Errors
    /// Something cannot be opened; nothing new is left behind.
    pub(crate) fn start(
        file: PathBuf,
        config: Config,
        directory: Option<&Path>,
        mut kept: Kept,
        handed: Option<Handed>,
    ) -> Result<Daemon> {
        let is_handed = handed.is_some();
        let (snapshot, objects) = match &handed {
            None => restore(Arc::new(config), directory)?,
            Some(handed) => (Snapshot::default(), restore_handed(Arc::new(config), handed)?),
        };
        let config = Arc::clone(objects.config());
        let Inherited {
            names: former,
            instance: before,
            sockets,
            lock,
            queues,
            machines: handed_machines,
            frames,
            faults,
            next_fault,
            drained,
            health,
            holders,
        } = Inherited::of(handed);
        let single_queue = with_several(&config, kept::single_queue(&queues));
        for port in &single_queue {
            tracing::warn!(port, "one worker serves it: its device has a single queue, and cannot have more");
        }
        let config = with_one_queue(config, &single_queue);
        let mut names = NamesInForce::default();
        names.set(former.next(&config)?);
        let shared = Shared::of(&config, holders);
        let tables = tables::build(&config, &names, &health, &shared.holders)?;
        let (underlays, waiting_frames) = match sockets {
            None => (open_underlays(&config)?, None),
            Some(sockets) => adopt_underlays(&config, sockets, frames)?,
        };
        warn_of_small_devices(&config);
        // After the sockets, so that a second daemon fails with the error about the socket.
        let records = devices::directory(&config.control.socket);
        if is_handed {
            kept.remember_handed(&records, config.host.keep_devices, lock, queues)?;
        } else {
            kept.remember(&records, config.host.keep_devices)?;
        }
        let instance = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64);
        // Larger even if the clock was set back.
        let instance = instance.max(before + 1);
        let mut workers = Vec::new();
        for (index, underlay) in underlays.into_iter().enumerate() {
            let worker = CoreConfig {
                index: index as u8,
                transport: translate::transport(&config),
                instance,
                salt: random()?,
                plain_paths: translate::plain_paths(&config),
                bundle_bytes: translate::bundle_bytes(&config),
                control_dscp: config.underlay.control_dscp,
                slow_port_percent: config.workers.slow_port_percent,
                answer_us: config.workers.answer_us,
            };
            let secret = u64::from(random()?) << 32 | u64::from(random()?);
            let switch = Switch::new(tables.of_worker(bifrost_avs::WorkerId(index as u16)), secret);
            let cpu = config.workers.cpus.get(index).copied();
            let start = if is_handed { bifrost_datapath::start_paused } else { bifrost_datapath::start };
            workers.push(start(worker, underlay, switch, cpu).context("starting a worker")?);
        }
        bifrost_datapath::join(&workers)?;
        let now = Instant::now();
        let busy = vec![(now, 0, 0.0); workers.len()];
        let (machines, containers) = (BTreeMap::new(), BTreeMap::new());
        let flow_log = Arc::default();
        let mirrored = mirror::Counted::default();
        let questions = Questions::new();
        let mut state = State {
            config,
            objects,
            snapshot,
            names,
            tables,
            tables_changed: now,
            machines,
            handed_machines,
            waiting_frames,
            containers,
            kept,
            single_queue,
            removal: Removal::default(),
            not_served: Some(Vec::new()),
            workers,
            faults,
            drained,
            next_fault,
            busy,
            health,
            shared,
            flow_log,
            mirrored,
            learned: Learned::default(),
            departed: Departed::default(),
            route_questions: questions.sender(),
            metadata: bifrost_metadata::Counters::default(),
            carried: Arc::default(),
        };
        state.set_mirrors()?;
        state.set_link_rate()?;
        let sender = questions.sender();
        state.on_all(move |worker| worker.core_mut().set_route_questions(sender.clone()))?;
        // Ports before peers: a peer whose packets arrive before the ports exist would be notified that their vNICs are
        // not on this host, and would cache that.
        let config = Arc::clone(&state.config);
        for port in &config.ports {
            match state.add_port(port) {
                // An error in the file stops the start. An error in another owner's object must not, because it cannot
                // be corrected before the daemon runs.
                Err(error) if state.objects.is_other(Kind::Port, &port.name) => {
                    tracing::error!("not applied; retried with the next change: {error:#}");
                    Arc::make_mut(&mut state.config).ports.retain(|p| p.name != port.name);
                }
                result => result?,
            }
        }
        let taps = config.ports.iter().filter(|port| port.kind == PortKind::Tap);
        state.kept.remove_rest(taps.map(|port| &*port.name));
        for peer in &state.config.peers {
            state.set_peer(peer)?;
        }
        state.restore_operator_state()?;
        // Only now can packets leave that waited in devices of an earlier daemon.
        state.serve_devices()?;
        if !is_handed {
            state.kept.started();
        }
        let pulses = state.workers.iter().map(Handle::pulse).collect();
        let (state_directory, progress) = (directory.map(Path::to_owned), Progress::new());
        let state = Mutex::new(state);
        let (capturing, continued) = (Arc::default(), Mutex::default());
        Ok(Daemon {
            file,
            state_directory,
            progress,
            instance,
            started: now,
            capturing,
            continued,
            questions,
            pulses,
            state,
        })
    }

    /// Called when the former daemon has ended or will: records, devices and the journal now belong to this daemon
    /// alone.
    pub(crate) fn settle(&self) {
        let mut state = self.state();
        state.kept.started();
        let Some(directory) = &self.state_directory else { return };
        match Snapshot::open(directory, state.workers.len()) {
            Ok((mut snapshot, objects)) => {
                // With another number of workers, ports have other numbers of queues.
                if objects != *state.objects.others()
                    && let Err(error) = snapshot.rewrite(state.objects.others())
                {
                    tracing::error!("objects with other settings may not survive a restart: {error:#}");
                }
                state.snapshot = snapshot;
            }
            Err(error) => tracing::error!("objects that are applied from now on will not survive a restart: {error:#}"),
        }
    }

    /// Locks the state. After a panic during a change, the state is used as it is.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Creates and removes containers' devices as their network namespaces appear and disappear, and logs stuck
    /// workers, until the daemon ends.
    pub(crate) fn follow_namespaces(&self) {
        let mut watches: Vec<PulseWatch> = self.pulses.iter().map(|_| PulseWatch::default()).collect();
        loop {
            std::thread::sleep(NAMESPACE_POLL);
            // Before taking the lock: its holder may be waiting for this very worker.
            for (worker, (pulse, watch)) in self.pulses.iter().zip(&mut watches).enumerate() {
                if let Some((stage, port)) = watch.look(pulse, Instant::now()) {
                    tracing::error!(
                        worker,
                        port,
                        stage = stage.name(),
                        "a worker has been at one step for more than a second"
                    );
                }
            }
            let poll = || {
                let mut state = self.state();
                if state.workers.is_empty() {
                    return false;
                }
                state.follow_namespaces();
                true
            };
            match panics::contain(poll) {
                Ok(true) => {}
                Ok(false) => return,
                Err(panic) => {
                    tracing::error!(%panic, "panic while polling network namespaces; retrying");
                    std::thread::sleep(AFTER_PANIC);
                }
            }
        }
    }

    /// Stops the workers. Devices that are not kept disappear with them.
    pub(crate) fn stop(&self) {
        self.end_continued_capture();
        let mut state = self.state();
        state.machines.clear();
        state.containers.clear();
        state.waiting_frames = None;
        state.workers.clear();
    }
}

impl State {
    /// Applies the differences to `config`; none of them if it contradicts itself or needs a restart. `is_small`: few
    /// objects differ.
    pub(crate) fn take_over(&mut self, config: Arc<Config>, is_small: bool) -> Result<Taken> {
        let single_queue = self.still_single(&config);
        let config = self.as_devices_allow(config);
        // Build the tables first, and outside of the workers: a contradiction then changes nothing, and no worker waits
        // while tables grow.
        let (diff, names, tables) = here_or_in_background(is_small, || {
            let diff = ConfigDiff::between(&self.config, &config).map_err(|e| {
                anyhow!("needs a restart, because these cannot change at run time: {}", e.fields.join(", "))
            })?;
            let names = self.names.next(&config)?;
            let (health, holders) = (&self.health, &self.shared.holders);
            let tables = tables::after(&self.tables, &diff, &config, &names, health, holders)?;
            anyhow::Ok((diff, names, tables))
        })?;
        if diff.transport.is_some() {
            tracing::warn!("changed [transport] settings apply after the next upgrade or restart");
        }
        // The data path stores VNI and MAC with a port, and its device stores addresses and MTU. A port with changes in
        // these is recreated, with the same device if that is kept; so is a port that other workers are to serve, for
        // example after a change of its VPC.
        let old_ports: BTreeMap<&str, &Port> = self.config.ports.iter().map(|port| (&*port.name, port)).collect();
        let pairs = config.ports.iter().filter_map(|new| Some((*old_ports.get(&*new.name)?, new)));
        let is_kept = |old: &Port, new: &Port| {
            old.is_same_device(new) && self.config.is_served_by_one(old) == config.is_served_by_one(new)
        };
        let (kept, remade): (Vec<_>, Vec<_>) =
            pairs.map(|(old, new)| (old.clone(), new.clone())).partition(|(old, new)| is_kept(old, new));
        self.note_departures(&diff)?;
        for (port, next) in
            diff.ports.removed.iter().map(|old| (old, None)).chain(remade.iter().map(|(old, new)| (old, Some(new))))
        {
            if let Some(owner) = self.names.port(&port.name) {
                self.machines.remove(&port.name);
                self.containers.remove(&port.name);
                match next.filter(|next| may_keep_tap(port, next)) {
                    Some(_) => self.set_port_aside(&port.name, owner)?,
                    None => self.remove_port(&port.name, owner)?,
                }
            }
        }
        self.forget_learned(&diff, &config)?;
        for peer in &diff.peers.removed {
            if let Some(id) = self.names.peer(&peer.name) {
                self.on_all(move |worker| worker.remove_peer(id))?;
            }
        }
        self.single_queue = single_queue;
        let policies = self.changed_policies(&config, &kept, &names);
        let has_changed = |(old, new): &&(Port, Port)| PortQos::of(&self.config, old) != PortQos::of(&config, new);
        let changed_qos: Vec<Port> = kept.iter().filter(has_changed).map(|(_, new)| new.clone()).collect();
        let before = std::mem::replace(&mut self.config, config);
        self.names.set(names);
        self.shared = Shared::of(&self.config, std::mem::take(&mut self.shared.holders));
        // Peers before routes that refer to them, and the switch before ports that it must know. An object that fails
        // is removed from the configuration in force, so that the next reload retries it and it does not block the
        // others.
        let mut failures = Vec::new();
        let changed_peers = diff.peers.removed.iter().chain(diff.peers.changed.iter().map(|c| &c.old));
        for peer in changed_peers.filter(|peer| self.drained.remove(&peer.name).is_some()) {
            tracing::warn!(peer = peer.name, "the peer has changed; none of its paths is drained any more");
        }
        for peer in diff.peers.added.iter().chain(diff.peers.changed.iter().map(|c| &c.new)) {
            if let Err(error) = self.set_peer(peer) {
                failures.push(Failure::of(Kind::Peer, &peer.name, &error));
                Arc::make_mut(&mut self.config).peers.retain(|p| p.name != peer.name);
            }
        }
        let former = self.install(tables)?;
        here_or_in_background(is_small, move || drop((former, before)));
        if !diff.mirrors.is_empty() || !diff.ports.is_empty() {
            self.set_mirrors()?;
        }
        if diff.qos.is_some() {
            self.set_link_rate()?;
        }
        for port in &changed_qos {
            self.set_qos(port)?;
        }
        for port in diff.ports.added.iter().chain(remade.iter().map(|(_, new)| new)) {
            if let Err(error) = self.add_port(port) {
                failures.push(Failure::of(Kind::Port, &port.name, &error));
                Arc::make_mut(&mut self.config).ports.retain(|p| p.name != port.name);
            }
        }
        if let Err(error) = self.repair_containers() {
            failures.push(Failure { object: None, error: format!("{error:#}") });
        }
        self.note_arrivals(&diff)?;
        if !policies.is_empty() {
            self.on_all(move |worker| {
                for (owner, (ordering, reliable)) in &policies {
                    worker.core_mut().set_policy(*owner, *ordering, *reliable);
                }
            })?;
        }
        Ok(Taken { diff, failures })
    }

    /// The new policies of `kept` ports whose VPC's policy has changed, by port number.
    fn changed_policies(&self, config: &Config, kept: &[(Port, Port)], names: &Names) -> Vec<(u32, translate::Policy)> {
        let of = |config: &Config| -> HashMap<_, _> {
            config.vpcs.iter().map(|vpc| (vpc.vni, translate::policy(vpc))).collect()
        };
        let (before, after) = (of(&self.config), of(config));
        let changed = kept.iter().filter_map(|(old, new)| {
            let policy = after.get(&new.vni).filter(|policy| before.get(&old.vni) != Some(policy))?;
            Some((names.port(&new.name)?, *policy))
        });
        changed.collect()
    }

    /// Tells workers which packets to mirror. Earlier copies that were not sent yet are lost.
    fn set_mirrors(&self) -> Result<()> {
        let specs = mirror::specs(&self.config, &self.names);
        self.on_all(move |worker| worker.core_mut().set_mirrors(specs.clone(), mirror::COPIES_BYTES))?;
        Ok(())
    }

    /// Records changes of backends' health; the switches use them for new connections.
    pub(crate) fn set_health(&mut self, changes: Health) -> Result<()> {
        self.health.extend(changes);
        let config = &self.config;
        self.health.retain(|(name, backend), _| {
            let balancer = config.load_balancers.iter().find(|b| b.name == *name && b.check.is_some());
            let is_it = |b: &bifrost_control::config::Backend| (b.address, b.port) == (backend.ip(), backend.port());
            balancer.is_some_and(|balancer| balancer.backends.iter().any(is_it))
        });
        self.rebuild()
    }

    /// Records the holders of shared addresses. Returns whether any has changed.
    pub(crate) fn set_holders(&mut self, holders: Holders) -> Result<bool> {
        if self.shared.holders == holders {
            return Ok(false);
        }
        self.shared.holders = holders;
        self.rebuild()?;
        Ok(true)
    }

    /// Runs `work` on every worker, in order.
    pub(crate) fn on_all<T: Send + 'static>(
        &self,
        work: impl Fn(&mut bifrost_datapath::Worker<HostUnderlay>) -> T + Clone + Send + 'static,
    ) -> Result<Vec<T>> {
        self.workers
            .iter()
            .map(|worker| {
                let work = work.clone();
                worker.run(move |w| work(w)).map_err(anyhow::Error::from)
            })
            .collect()
    }

    /// Forgets counters carried from an earlier daemon: the port has a new device.
    pub(crate) fn forget_carried(&mut self, port: &str) {
        Arc::make_mut(&mut self.carried).forget(port);
    }

    /// Restores injected faults and drained paths of the former daemon.
    fn restore_operator_state(&self) -> Result<()> {
        for entry in &self.faults {
            let Some(fault) = translate::fault(entry.id as u32, &entry.spec, &self.names) else { continue };
            let seed = entry.spec.seed;
            self.on_all(move |worker| worker.core_mut().faults_mut().set(fault, seed))?;
        }
        for (peer, &paths) in &self.drained {
            let Some(id) = self.names.peer(peer) else { continue };
            self.on_all(move |worker| worker.core_mut().drain_paths(id, paths))?;
        }
        Ok(())
    }

    fn set_peer(&self, peer: &bifrost_control::config::Peer) -> Result<()> {
        let id = self.names.peer(&peer.name).ok_or_else(|| anyhow!("peer {} has no number", peer.name))?;
        let config = translate::peer(&self.config, peer, id);
        for result in self.on_all(move |worker| worker.set_peer(config.clone()).map_err(|e| e.to_string()))? {
            result.map_err(|e| anyhow!("peer {}: {e}", peer.name))?;
        }
        Ok(())
    }

    /// Sets the rate to other hosts, which the workers share.
    fn set_link_rate(&self) -> Result<()> {
        let link = qos::link_rate(&self.config);
        self.on_all(move |worker| worker.core_mut().set_link_rate(link.clone()))?;
        Ok(())
    }

    /// Sets a port's limits and guarantee, which the workers that serve it share, the DSCP of its guest's packets, and
    /// its share of full paths.
    pub(crate) fn set_qos(&self, port: &Port) -> Result<()> {
        let owner = self.names.port(&port.name).ok_or_else(|| anyhow!("port {} has no number", port.name))?;
        let of = PortQos::of(&self.config, port);
        let (limits, marking, guarantee) = (qos::limits(&of.limits), qos::marking(of.dscp), of.guarantee());
        let [vpc, weight] = of.weights;
        let rx_queue = of.rx_queue_kb.map(|kb| kb as usize * 1024);
        self.on_all(move |worker| {
            let core = worker.core_mut();
            core.set_limits(owner, limits.clone());
            core.set_marking(owner, marking);
            core.set_weights(owner, vpc, weight);
            core.set_guarantee(owner, guarantee.clone());
            core.set_rx_queue(owner, rx_queue);
        })?;
        Ok(())
    }

    /// The workers that serve port number `owner`, in order.
    pub(crate) fn serving(&self, port: &Port, owner: u32) -> &[Handle<HostUnderlay>] {
        match translate::home(&self.config, port, owner).map(usize::from) {
            Some(home) => self.workers.get(home..=home).unwrap_or_default(),
            None => &self.workers,
        }
    }

    /// The configuration of a worker's port with this `device`.
    pub(crate) fn port_config(&self, port: &Port, owner: u32, device: Device) -> Result<PortConfig<Device>> {
        let vni = Vni::new(port.vni.value()).ok_or_else(|| anyhow!("port {}: bad VNI", port.name))?;
        let vpc = self.config.vpc(port.vni).ok_or_else(|| anyhow!("port {}: no such VPC", port.name))?;
        let (ordering, reliable) = translate::policy(vpc);
        Ok(PortConfig { owner, vni, mac: port.mac, ordering, reliable, port: device })
    }

    fn add_port(&mut self, port: &Port) -> Result<()> {
        let owner = self.names.port(&port.name).ok_or_else(|| anyhow!("port {} has no number", port.name))?;
        for worker in self.serving(port, owner) {
            let config = self.port_config(port, owner, Box::new(Unplugged::new()?))?;
            worker.run(move |w| w.add_port(config))?.with_context(|| format!("port {}", port.name))?;
        }
        let opened = self.set_qos(port).and_then(|()| match port.kind {
            PortKind::VhostUser => self.open_machine(port, owner),
            PortKind::Tap => self.open_container(port, owner),
        });
        if opened.is_err() {
            self.remove_port(&port.name, owner)?;
        }
        opened
    }

    fn remove_port(&mut self, name: &str, owner: u32) -> Result<()> {
        self.forget_carried(name);
        let kept = self.kept.release(name);
        let removed = self.on_all(move |worker| worker.remove_port(owner))?;
        self.removal.push(Released { queues: removed.into_iter().flatten().collect(), kept });
        Ok(())
    }

    fn open_machine(&mut self, port: &Port, owner: u32) -> Result<()> {
        let handed = self.handed_machines.remove(&port.name);
        let worker = self.serving(port, owner).first().ok_or_else(|| anyhow!("no workers"))?;
        let config = translate::vhost(port, &self.config);
        let machine = match handed {
            None => Machine::open(config, owner, worker),
            Some(handed) => Machine::adopt(config, owner, worker, handed),
        };
        self.machines.insert(port.name.clone(), machine.with_context(|| format!("port {}", port.name))?);
        Ok(())
    }
}

/// A random number from the kernel.
pub(crate) fn random() -> Result<u32> {
    let mut bytes = [0u8; 4];
    let mut file = std::fs::File::open("/dev/urandom").context("opening /dev/urandom")?;
    std::io::Read::read_exact(&mut file, &mut bytes).context("reading /dev/urandom")?;
    Ok(u32::from_ne_bytes(bytes))
}
