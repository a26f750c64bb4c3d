//! The daemon: workers, devices, and the configuration in force.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, anyhow};
use bifrost_avs::{Prepared, Switch};
use bifrost_control::api::FaultEntry;
use bifrost_control::config::{Config, Kind, Port, PortKind};
use bifrost_control::diff::ConfigDiff;
use bifrost_control::objects::Store;
use bifrost_datapath::{CoreConfig, Device, Handle, PathSet, PortConfig, Pulse, PulseWatch};
use bifrost_port::vhost::Unplugged;
use bifrost_port::{HostUnderlay, panics};
use bifrost_wire::Vni;

use crate::apply::failure;
use crate::background::in_background;
use crate::beginning::{Before, adopt_underlays, open_underlays, restore, restore_handed, warn_of_small_devices};
use crate::carried::Carried;
use crate::container::{Container, GivenUp, may_have_same_tap};
use crate::devices;
use crate::flow_log;
use crate::health::Health;
use crate::kept::Kept;
use crate::machine::Machine;
use crate::mirror;
use crate::shared::{Holders, Shared};
use crate::snapshot::Snapshot;
use crate::translate;
use crate::upgrade::{Handed, Progress};

/// How often containers' network namespaces are looked for: a look costs a system call for each port.
const LOOK_FOR_NAMESPACES: Duration = Duration::from_millis(250);
/// How long that is put off after a panic in it, which may come again.
const AFTER_PANIC: Duration = Duration::from_secs(10);

/// A running daemon. All changes go through one lock; the data path never waits for it.
pub(crate) struct Daemon {
    pub(crate) file: PathBuf,
    /// Where objects are kept.
    pub(crate) state_directory: Option<PathBuf>,
    pub(crate) progress: Progress,
    /// Names this start among all of the host's; later ones are larger (PROTOCOL §4.6).
    pub(crate) instance: u64,
    pub(crate) started: Instant,
    /// Somebody captures packets.
    pub(crate) capturing: Arc<AtomicBool>,
    /// What can be seen of the workers without the lock.
    pulses: Vec<Arc<Pulse>>,
    state: Mutex<State>,
}

/// What changes.
pub(crate) struct State {
    /// What is in force: all objects and settings, but for what could not be brought into force.
    pub(crate) config: Arc<Config>,
    /// Whose objects these are, and which versions.
    pub(crate) objects: Store,
    /// Where the objects are kept that are not the file's.
    pub(crate) snapshot: Snapshot,
    pub(crate) names: NamesInForce,
    /// Sockets of virtual machines, by port name. Dropped before the workers.
    pub(crate) machines: BTreeMap<String, Machine>,
    /// Where the devices of TAP ports are that have a network namespace, by port name.
    pub(crate) containers: BTreeMap<String, Container>,
    /// TAP devices that outlive the daemon.
    pub(crate) kept: Kept,
    /// Devices that are open, and that no worker serves yet, with their ports and the ports' numbers; `None` once the daemon has started.
    pub(crate) not_served: Option<Vec<(Port, u16, Vec<Device>)>>,
    pub(crate) workers: Vec<Handle<HostUnderlay>>,
    pub(crate) faults: Vec<FaultEntry>,
    /// Paths that the operator has taken out of use, by peer: bit i is path i.
    pub(crate) drained: BTreeMap<String, PathSet>,
    pub(crate) next_fault: u64,
    /// Busy time of each worker when it was last asked, with the time of asking.
    pub(crate) busy: Vec<(Instant, u64, f64)>,
    /// What is known of load balancers' backends.
    pub(crate) health: Health,
    /// What is known of addresses that guests share.
    pub(crate) shared: Shared,
    /// What was done with flow records.
    pub(crate) flow_log: flow_log::Counters,
    /// What the metadata service has done.
    pub(crate) metadata: bifrost_metadata::Counters,
    /// What became of mirrored packets.
    pub(crate) mirrored: mirror::Counted,
    /// What an earlier daemon has counted.
    pub(crate) carried: Arc<Carried>,
}

/// What was taken over.
pub(crate) struct Taken {
    pub(crate) diff: ConfigDiff,
    /// What was not: it is not in the configuration in force.
    pub(crate) failures: Vec<Failure>,
}

/// Something that could not be brought into force.
pub(crate) struct Failure {
    /// Kind and name; none: no single object.
    pub(crate) object: Option<(Kind, String)>,
    pub(crate) error: String,
}

/// Numbers of ports and peers; a name keeps its number while it exists.
#[derive(Clone, Debug, Default)]
pub(crate) struct Names {
    ports: BTreeMap<String, u16>,
    peers: BTreeMap<String, u16>,
    /// The other way round.
    of_ports: HashMap<u16, String>,
    of_peers: HashMap<u16, String>,
}

/// The numbers in force, which lists look at without the daemon's lock.
#[derive(Debug, Default)]
pub(crate) struct NamesInForce {
    now: Arc<Names>,
    shared: Arc<RwLock<Arc<Names>>>,
}

impl NamesInForce {
    /// These from now on. What they no longer name is gone from the workers, and what is new is not there yet.
    fn set(&mut self, names: Names) {
        self.now = Arc::new(names);
        *self.shared.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&self.now);
    }

    /// Those of this moment.
    pub(crate) fn now(&self) -> &Arc<Names> {
        &self.now
    }

    /// Those in force, whenever that is looked at.
    pub(crate) fn in_force(&self) -> Arc<RwLock<Arc<Names>>> {
        Arc::clone(&self.shared)
    }
}

impl std::ops::Deref for NamesInForce {
    type Target = Names;

    fn deref(&self) -> &Names {
        &self.now
    }
}

impl Names {
    /// Of these numbers, of which each is given once; others are left out.
    pub(crate) fn of_numbers(ports: BTreeMap<String, u16>, peers: BTreeMap<String, u16>) -> Names {
        let once = |numbers: BTreeMap<String, u16>| {
            let mut given = HashSet::new();
            numbers.into_iter().filter(|(_, number)| given.insert(*number)).collect::<BTreeMap<_, _>>()
        };
        Names { ports: once(ports), peers: once(peers), ..Names::default() }
    }

    /// The numbers of ports and peers.
    pub(crate) fn numbers(&self) -> (BTreeMap<String, u16>, BTreeMap<String, u16>) {
        (self.ports.clone(), self.peers.clone())
    }

    pub(crate) fn port(&self, name: &str) -> Option<u16> {
        self.ports.get(name).copied()
    }

    pub(crate) fn peer(&self, name: &str) -> Option<u16> {
        self.peers.get(name).copied()
    }

    pub(crate) fn peer_name(&self, id: u16) -> Option<&str> {
        self.of_peers.get(&id).map(String::as_str)
    }

    pub(crate) fn port_name(&self, owner: u16) -> Option<&str> {
        self.of_ports.get(&owner).map(String::as_str)
    }

    /// The names of `config`, with numbers of these where they have one.
    fn next(&self, config: &Config) -> Names {
        let port_names: Vec<&str> = config.ports.iter().map(|p| p.name.as_str()).collect();
        let peer_names: Vec<&str> = config.peers.iter().map(|p| p.name.as_str()).collect();
        let (ports, peers) = (number(&self.ports, &port_names), number(&self.peers, &peer_names));
        let of = |names: &BTreeMap<String, u16>| names.iter().map(|(name, number)| (*number, name.clone())).collect();
        Names { of_ports: of(&ports), of_peers: of(&peers), ports, peers }
    }
}

fn number(old: &BTreeMap<String, u16>, names: &[&str]) -> BTreeMap<String, u16> {
    let mut new: BTreeMap<String, u16> =
        names.iter().filter_map(|n| old.get(*n).map(|id| ((*n).to_string(), *id))).collect();
    let taken: HashSet<u16> = old.values().copied().collect();
    let mut free = 0u16;
    for name in names {
        if !new.contains_key(*name) {
            while taken.contains(&free) {
                free += 1;
            }
            new.insert((*name).to_string(), free);
            free = free.saturating_add(1);
        }
    }
    new
}

impl Daemon {
    /// Opens sockets and devices, or takes over those that are `kept`, and starts the workers. With what another daemon has `handed` over, that one
    /// works until [`Successor::go_on`](crate::upgrade::Successor::go_on): workers do nothing, and [`settle`](Self::settle) is to be called after that.
    ///
    /// # Errors
    /// Something cannot be opened; nothing is left behind then that was not there before.
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
        let Before {
            names: former,
            instance: before,
            sockets,
            lock,
            queues,
            faults,
            next_fault,
            drained,
            health,
            holders,
        } = Before::of(handed);
        let mut names = NamesInForce::default();
        names.set(former.next(&config));
        let shared = Shared::of(&config, holders);
        let mut tables = translate::tables(&config, &names, &health, &shared.holders);
        let underlays = match sockets {
            None => open_underlays(&config)?,
            Some(sockets) => adopt_underlays(&config, sockets)?,
        };
        warn_of_small_devices(&config);
        // After the sockets: a second daemon is told about those.
        let records = devices::directory(&config.control.socket);
        if is_handed {
            kept.remember_handed(&records, config.host.keep_devices, lock, queues)?;
        } else {
            kept.remember(&records, config.host.keep_devices)?;
        }
        let instance = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64);
        // Also if the clock has been set back.
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
            tables.workers.own = bifrost_avs::WorkerId(index as u16);
            let switch = Switch::build(&tables, secret).context("building the switch")?;
            let cpu = config.workers.cpus.get(index).copied();
            let start = if is_handed { bifrost_datapath::start_paused } else { bifrost_datapath::start };
            workers.push(start(worker, underlay, switch, cpu).context("starting a worker")?);
        }
        bifrost_datapath::join(&workers)?;
        let now = Instant::now();
        let busy = vec![(now, 0, 0.0); workers.len()];
        let (machines, containers) = (BTreeMap::new(), BTreeMap::new());
        let flow_log = flow_log::Counters::default();
        let mirrored = mirror::Counted::default();
        let mut state = State {
            config,
            objects,
            snapshot,
            names,
            machines,
            containers,
            kept,
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
            metadata: bifrost_metadata::Counters::default(),
            carried: Arc::default(),
        };
        state.set_mirrors()?;
        // Ports first: a peer that is heard before them would be told that their vNICs are not here, and believe it for
        // a while.
        let config = Arc::clone(&state.config);
        for port in &config.ports {
            match state.add_port(port) {
                // An error of the file's; others' objects come from a file that nobody edits.
                Err(error) if state.objects.is_other(Kind::Port, &port.name) => {
                    tracing::error!("not in force, and tried again with the next change: {error:#}");
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
        state.set_again()?;
        // What waits in devices that have outlived a daemon can leave only now.
        state.serve_devices()?;
        if !is_handed {
            state.kept.started();
        }
        let pulses = state.workers.iter().map(Handle::pulse).collect();
        let (state_directory, progress) = (directory.map(Path::to_owned), Progress::new());
        let state = Mutex::new(state);
        Ok(Daemon { file, state_directory, progress, instance, started: now, capturing: Arc::default(), pulses, state })
    }

    /// The daemon that had this one's work before has ended, or will: what both had is this one's now.
    pub(crate) fn settle(&self) {
        let mut state = self.state();
        state.kept.started();
        let Some(directory) = &self.state_directory else { return };
        match Snapshot::open(directory, state.workers.len()) {
            Ok((snapshot, _)) => state.snapshot = snapshot,
            Err(error) => tracing::error!("objects that are applied from now on do not outlive the daemon: {error:#}"),
        }
    }

    /// The state; changes that panicked half-way are seen as they are.
    pub(crate) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Has containers' devices come and go with their network namespaces, and says where a worker does not get on, until the daemon ends.
    pub(crate) fn follow_namespaces(&self) {
        let mut watches: Vec<PulseWatch> = self.pulses.iter().map(|_| PulseWatch::default()).collect();
        loop {
            std::thread::sleep(LOOK_FOR_NAMESPACES);
            // Before the lock: its holder may be waiting for just this worker.
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
            let look = || {
                let mut state = self.state();
                if state.workers.is_empty() {
                    return false;
                }
                let given_up = state.follow_namespaces();
                // The lock first, for dropping them takes long.
                drop(state);
                given_up.into_iter().for_each(GivenUp::remove);
                true
            };
            match panics::contain(look) {
                Ok(true) => {}
                Ok(false) => return,
                Err(panic) => {
                    tracing::error!(%panic, "looking for network namespaces has failed; it is tried again");
                    std::thread::sleep(AFTER_PANIC);
                }
            }
        }
    }

    /// Ends the workers; devices vanish with them if they are not to be kept.
    pub(crate) fn stop(&self) {
        let mut state = self.state();
        state.machines.clear();
        state.containers.clear();
        state.workers.clear();
    }
}

impl State {
    /// Takes over what differs; nothing of it if it contradicts itself or needs a restart.
    pub(crate) fn take_over(&mut self, config: Arc<Config>) -> Result<Taken> {
        // Built here and first, so that a contradiction changes nothing, and no worker waits while tables grow.
        let workers = self.workers.len() as u16;
        let (diff, names, prepared) = in_background(|| {
            let diff = ConfigDiff::between(&self.config, &config).map_err(|e| {
                anyhow!("needs a restart, for these cannot change while running: {}", e.fields.join(", "))
            })?;
            let names = self.names.next(&config);
            let mut tables = translate::tables(&config, &names, &self.health, &self.shared.holders);
            let of_worker = |own| {
                tables.workers.own = bifrost_avs::WorkerId(own);
                Prepared::build(&tables)
            };
            let prepared = (0..workers).map(of_worker).collect::<std::result::Result<Vec<_>, _>>();
            anyhow::Ok((diff, names, prepared.context("building the switch")?))
        })?;
        if diff.transport.is_some() {
            tracing::warn!("changed [transport] settings apply to connections after the next restart");
        }
        // The data path keeps VNI and MAC with a port, its device addresses and MTU: where these changed the port is recreated, with the same device
        // if that is kept. So it is where other workers are to serve it, for which its network may be the reason.
        let old_ports: BTreeMap<&str, &Port> = self.config.ports.iter().map(|port| (&*port.name, port)).collect();
        let pairs = config.ports.iter().filter_map(|new| Some((*old_ports.get(&*new.name)?, new)));
        let is_kept = |old: &Port, new: &Port| {
            old.is_same_device(new) && self.config.is_served_by_one(old) == config.is_served_by_one(new)
        };
        let (kept, remade): (Vec<_>, Vec<_>) =
            pairs.map(|(old, new)| (old.clone(), new.clone())).partition(|(old, new)| is_kept(old, new));
        self.note_gone(&diff)?;
        for (port, next) in
            diff.ports.removed.iter().map(|old| (old, None)).chain(remade.iter().map(|(old, new)| (old, Some(new))))
        {
            if let Some(owner) = self.names.port(&port.name) {
                self.machines.remove(&port.name);
                self.containers.remove(&port.name);
                match next.filter(|next| may_have_same_tap(port, next)) {
                    Some(_) => self.set_port_aside(&port.name, owner)?,
                    None => self.remove_port(&port.name, owner)?,
                }
            }
        }
        for peer in &diff.peers.removed {
            if let Some(id) = self.names.peer(&peer.name) {
                self.on_all(move |worker| worker.remove_peer(id))?;
            }
        }
        let policies = self.changed_policies(&config, &kept, &names);
        let before = std::mem::replace(&mut self.config, config);
        self.names.set(names);
        self.shared = Shared::of(&self.config, std::mem::take(&mut self.shared.holders));
        // Peers before routes that name them, the switch before ports that it must know. What fails is taken out of the
        // configuration in force, so that the next reload tries it again, and does not keep the rest from working.
        let mut failures = Vec::new();
        let changed_peers = diff.peers.removed.iter().chain(diff.peers.changed.iter().map(|c| &c.old));
        for peer in changed_peers.filter(|peer| self.drained.remove(&peer.name).is_some()) {
            tracing::warn!(peer = peer.name, "the peer has changed: none of its paths is drained any more");
        }
        for peer in diff.peers.added.iter().chain(diff.peers.changed.iter().map(|c| &c.new)) {
            if let Err(error) = self.set_peer(peer) {
                failures.push(failure(Kind::Peer, &peer.name, &error));
                Arc::make_mut(&mut self.config).peers.retain(|p| p.name != peer.name);
            }
        }
        let mut former = Vec::new();
        for (worker, prepared) in self.workers.iter().zip(prepared) {
            former.push(worker.run(move |w| w.core_mut().switch_mut().take_over(prepared))?);
        }
        in_background(move || drop((former, before)));
        if !diff.mirrors.is_empty() || !diff.ports.is_empty() {
            self.set_mirrors()?;
        }
        for (_, port) in kept.iter().filter(|(old, new)| (old.limits, old.dscp) != (new.limits, new.dscp)) {
            self.set_limits(port)?;
        }
        for port in diff.ports.added.iter().chain(remade.iter().map(|(_, new)| new)) {
            if let Err(error) = self.add_port(port) {
                failures.push(failure(Kind::Port, &port.name, &error));
                Arc::make_mut(&mut self.config).ports.retain(|p| p.name != port.name);
            }
        }
        if let Err(error) = self.mend_containers() {
            failures.push(Failure { object: None, error: format!("{error:#}") });
        }
        self.note_came(&diff)?;
        if !policies.is_empty() {
            self.on_all(move |worker| {
                for (owner, (ordering, reliable)) in &policies {
                    worker.core_mut().set_policy(*owner, *ordering, *reliable);
                }
            })?;
        }
        Ok(Taken { diff, failures })
    }

    /// By number, those of the ports that are kept as they are whose network is to treat their packets otherwise, and how.
    fn changed_policies(&self, config: &Config, kept: &[(Port, Port)], names: &Names) -> Vec<(u16, translate::Policy)> {
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

    /// Has workers copy what mirrors want. What was copied before and has not been sent is lost.
    fn set_mirrors(&self) -> Result<()> {
        let specs = mirror::specs(&self.config, &self.names);
        self.on_all(move |worker| worker.core_mut().set_mirrors(specs.clone(), mirror::COPIES_BYTES))?;
        Ok(())
    }

    /// Backends work, or do not: the switches' next connections go by that.
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

    /// vNICs have taken addresses that they share. Returns whether that is news.
    pub(crate) fn set_holders(&mut self, holders: Holders) -> Result<bool> {
        if self.shared.holders == holders {
            return Ok(false);
        }
        self.shared.holders = holders;
        self.rebuild()?;
        Ok(true)
    }

    /// Has the switches go by what is known now, with the configuration in force.
    fn rebuild(&mut self) -> Result<()> {
        let workers = self.workers.len() as u16;
        let prepared = in_background(|| {
            let mut tables = translate::tables(&self.config, &self.names, &self.health, &self.shared.holders);
            let of_worker = |own| {
                tables.workers.own = bifrost_avs::WorkerId(own);
                Prepared::build(&tables)
            };
            (0..workers).map(of_worker).collect::<std::result::Result<Vec<_>, _>>()
        });
        let mut former = Vec::new();
        for (worker, prepared) in self.workers.iter().zip(prepared.context("building the switch")?) {
            former.push(worker.run(move |w| w.core_mut().switch_mut().take_over(prepared))?);
        }
        in_background(move || drop(former));
        Ok(())
    }

    /// Runs something on every worker, in order.
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

    /// A port's device is another one from now on: what an earlier daemon has counted of it is of the past.
    pub(crate) fn forget_carried(&mut self, port: &str) {
        Arc::make_mut(&mut self.carried).forget(port);
    }

    /// Faults and drained paths that another daemon had.
    fn set_again(&self) -> Result<()> {
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

    /// Gives a port its limits, which the workers that serve it share, and the DSCP of what its guest sends.
    pub(crate) fn set_limits(&self, port: &Port) -> Result<()> {
        let owner = self.names.port(&port.name).ok_or_else(|| anyhow!("port {} has no number", port.name))?;
        let (limits, marking) = (translate::limits(&port.limits), translate::marking(port.dscp));
        self.on_all(move |worker| {
            worker.core_mut().set_limits(owner, limits.clone());
            worker.core_mut().set_marking(owner, marking);
        })?;
        Ok(())
    }

    /// The workers that serve port number `owner`, in order.
    pub(crate) fn serving(&self, port: &Port, owner: u16) -> &[Handle<HostUnderlay>] {
        match translate::home(&self.config, port, owner).map(usize::from) {
            Some(home) => self.workers.get(home..=home).unwrap_or_default(),
            None => &self.workers,
        }
    }

    /// The port of a worker that has `device`.
    pub(crate) fn port_config(&self, port: &Port, owner: u16, device: Device) -> Result<PortConfig<Device>> {
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
        let opened = self.set_limits(port).and_then(|()| match port.kind {
            PortKind::VhostUser => self.open_machine(port, owner),
            PortKind::Tap => self.open_container(port, owner),
        });
        if opened.is_err() {
            self.remove_port(&port.name, owner)?;
        }
        opened
    }

    fn remove_port(&mut self, name: &str, owner: u16) -> Result<()> {
        self.forget_carried(name);
        let kept = self.kept.give_up(name);
        drop(self.on_all(move |worker| worker.remove_port(owner))?);
        if let Some(device) = kept {
            device.remove();
        }
        Ok(())
    }

    fn open_machine(&mut self, port: &Port, owner: u16) -> Result<()> {
        let worker = self.serving(port, owner).first().ok_or_else(|| anyhow!("there are no workers"))?;
        let machine = Machine::open(translate::vhost(port, &self.config), owner, worker);
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

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn names_keep_their_numbers_and_new_ones_take_free_ones() {
        let first = number(&Default::default(), &["a", "b", "c"]);
        assert_eq!((first["a"], first["b"], first["c"]), (0, 1, 2));
        let second = number(&first, &["c", "d", "a"]);
        assert_eq!((second["a"], second["c"]), (0, 2));
        assert_eq!(second["d"], 3, "the number of one that goes away is not reused in the same step");
        let third = number(&second, &["e"]);
        assert_eq!(third["e"], 1);
    }
}
