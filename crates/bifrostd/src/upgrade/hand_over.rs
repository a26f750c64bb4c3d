//! The old daemon's side: it starts the new daemon, and stops when that is prepared.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bifrost_control::api::{ApiError, UpgradeReport, UpgradeSpec};
use bifrost_control::config::PortKind;
use bifrost_control::objects::{Store, journal, with_workers};
use bifrost_control::{Config, ConfigDiff, Listeners};
use bifrost_datapath::SetAside;
use bifrost_port::HostUnderlay;
use bifrost_port::clock::monotonic_ns;
use bifrost_port::udp::Sockets;
use bifrost_port::vhost::HandedPort;
use sd_notify::NotifyState;

use super::captures;
use super::channel::Channel;
use super::format::{HandedState, Kind, WorkerState, emit_state};
use super::frames;
use super::new_daemon::NewDaemon;
use super::offer::{Descriptors, Offer};
use super::records;
use super::take_over::{Ready, is_older};
use super::workers::Steered;
use crate::background::{at_lower_priority, in_background};
use crate::daemon::{Daemon, State};

/// Timeout for the new daemon's preparation, while this one is running.
const PREPARE: Duration = Duration::from_secs(30);
/// Timeout for the rest, while no packets are carried.
const COMMIT: Duration = Duration::from_secs(2);
/// How long to wait for acknowledgements: some round trips. Packets that are unacknowledged then are handed over.
const SETTLE: Duration = Duration::from_millis(2);
/// Polling interval for acknowledgements.
const POLL: Duration = Duration::from_micros(100);

/// Progress of an upgrade.
#[derive(Debug)]
pub(crate) struct Progress {
    /// Path of this program at its start: a package may have replaced the file since.
    program: Option<PathBuf>,
    /// The API's listeners, once they exist.
    listeners: Mutex<Option<Listeners>>,
    one_at_a_time: Mutex<()>,
    is_over: AtomicBool,
}

impl Progress {
    pub(crate) fn new() -> Progress {
        let program = std::env::current_exe().ok();
        let (listeners, one_at_a_time) = (Mutex::new(None), Mutex::new(()));
        Progress { program, listeners, one_at_a_time, is_over: AtomicBool::new(false) }
    }

    /// Sets the API's listeners, for the next daemon.
    pub(crate) fn set_listeners(&self, listeners: Listeners) {
        *self.listeners.lock().unwrap_or_else(PoisonError::into_inner) = Some(listeners);
    }

    /// Waits for the end of a running upgrade. No upgrade starts while the result lives.
    pub(crate) fn wait(&self) -> MutexGuard<'_, ()> {
        self.one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another daemon has taken over, so that this one must exit.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn listeners(&self) -> Result<Listeners> {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(listeners.as_ref().context("this daemon is still starting")?.try_clone()?)
    }
}

/// The configuration of the new daemon.
struct Next {
    config: Arc<Config>,
    /// CRC-32 of its file.
    file_crc: u32,
}

impl Daemon {
    /// Hands over to another program. After a return without an error, that program has taken over, and this process
    /// must exit.
    pub(crate) fn hand_over(&self, spec: &UpgradeSpec) -> Result<UpgradeReport, ApiError> {
        let _one = match self.progress.one_at_a_time.try_lock() {
            Ok(one) => one,
            Err(TryLockError::Poisoned(one)) => one.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(ApiError::conflict("an upgrade is running").hint("wait until it ends"));
            }
        };
        let program = spec.binary.clone().or_else(|| self.progress.program.clone());
        let program =
            program.ok_or_else(|| ApiError::bad_request("the path of the running program is unknown").at("binary"))?;
        let refused = |error: anyhow::Error| {
            tracing::error!("not upgraded, this daemon continues: {error:#}");
            ApiError::conflict(format!("not upgraded, the running daemon continues: {error:#}"))
        };
        let next = self.check_file().map_err(refused)?;
        // The lock prevents changes until the upgrade has ended.
        let state = self.state();
        state.removal.wait();
        check_possible(&state).map_err(refused)?;
        tracing::info!(program = %program.display(), "another bifrostd prepares to take over");
        let mut command = Command::new(&program);
        command.arg("--take-over").arg("--config").arg(&self.file);
        if let Some(directory) = &self.state_directory {
            command.arg("--state").arg(directory);
        }
        let report = self.negotiate(&state, command, &next).map_err(refused)?;
        // Keep the lock: requests to this daemon wait until it ends, because its state is stale now.
        std::mem::forget(state);
        self.progress.is_over.store(true, Ordering::SeqCst);
        tracing::info!("{}", report.to_string().replace('\n', "; "));
        let _ = sd_notify::notify(&[NotifyState::Custom(&format!("MAINPID={}", report.pid))]);
        // The main thread ends the process after the answer has been sent.
        let _ = signal_hook::low_level::raise(signal_hook::consts::SIGTERM);
        Ok(report)
    }

    /// The next configuration. The file must match the configuration in force, except for what the new
    /// daemon sets up itself, because it reads the file.
    fn check_file(&self) -> Result<Next> {
        let text = std::fs::read(&self.file).with_context(|| format!("reading {}", self.file.display()))?;
        let file = in_background(|| Config::load(&self.file)).map_err(|errors| anyhow!("{errors}"))?;
        let state = self.state();
        let config = state.next_config(file.into())?;
        let is_same = match ConfigDiff::suits_upgrade(&state.config, &config) {
            Ok(is_same) => is_same,
            Err(needed) => bail!("a restart is needed, because these have changed: {}", needed.fields.join(", ")),
        };
        let hint = "run bifrostctl reload first, and see whether it reports errors; if [underlay] or [workers] differ, too, \
                    undo the other changes, and reload them after the upgrade";
        ensure!(is_same, "{} differs from the configuration in force; {hint}", self.file.display());
        Ok(Next { config, file_crc: crc32fast::hash(&text) })
    }

    fn negotiate(&self, state: &State, mut command: Command, next: &Next) -> Result<UpgradeReport> {
        // Before the new daemon starts, which waits for the offer: a front-end may take a while.
        let (mut held, machines) = state.hold_machines()?;
        let (ours, theirs) = UnixStream::pair().context("making a socket for the new daemon")?;
        let channel = Channel::new(ours);
        command.stdin(OwnedFd::from(theirs));
        // The descriptors from the service manager are for this process only.
        for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(name);
        }
        let began = Instant::now();
        let started = NewDaemon::start(&mut command);
        let successor = started.with_context(|| format!("starting {:?}", command.get_program()))?;
        drop(command);
        let ready = self.prepare(state, &channel, next, machines).map_err(|error| successor.explain(error))?;
        let copies = if ready.takes_copies {
            Some(state.copy(&channel).map_err(|error| successor.explain(error))?)
        } else {
            None
        };
        let recounted = state.workers.len() != next.config.workers.count;
        let queues = recounted.then(|| state.own_queues()).transpose()?;
        // Not a part of the time that guests are held.
        let mut detour = state.detour()?;
        let prepared = began.elapsed();
        // Drop order: the new daemon is killed before this one resumes.
        let readdressed = state.config.underlay.addresses != next.config.underlay.addresses;
        let mut stopped = Stopped { state, readdressed, queues, is_over: false };
        let successor = successor;
        let (states, stopped_at) = stop(state, copies.is_some())?;
        let stopped_ns = monotonic_ns().saturating_sub(u64::try_from(stopped_at.elapsed().as_nanos())?);
        let left_out: u64 = states.iter().map(|(_, aside)| aside.left_out).sum();
        let packets: u64 = states.iter().map(|(_, aside)| aside.packets.len() as u64).sum();
        let of_worker = |(memory, aside): Left| WorkerState { memory, packets: aside.packets };
        let workers = states.into_iter().map(of_worker).collect();
        let handed = HandedState { workers, positions: state.leave_machines()? };
        let answer =
            channel.send(Kind::State, &emit_state(&handed)?, &[], COMMIT).and_then(|()| channel.receive(COMMIT));
        let taken = answer.and_then(|message| Ready::of(&message)).map_err(|error| successor.explain(error))?;
        ensure!(taken.is_running, "unexpected answer of the new daemon");
        let now = Instant::now();
        stopped.is_over = true;
        held.is_over = true;
        detour.is_over = true;
        successor.leave();
        state.leave_frames();
        // Nothing depends on the rest, and the upgrade can no longer fail. This process ends, and guests' packets wait.
        at_lower_priority();
        let takes_records = ready.takes_records && !is_older();
        if ready.takes_capture
            && let Err(error) = captures::send(&channel, self, stopped_ns)
        {
            tracing::warn!("the running capture ends: {error:#}");
        }
        let records = state.hand_over_flow_logs(takes_records).inspect_err(|error| {
            tracing::warn!("flow records are lost: {error:#}");
        });
        let counted = crate::samples::to_carry(state).map_err(|error| anyhow!("{}", error.what));
        let sent =
            counted.and_then(|counted| channel.send(Kind::Counters, &serde_json::to_vec(&counted)?, &[], COMMIT));
        if let Err(error) = sent {
            tracing::warn!("the new daemon's counters start at zero: {error:#}");
        }
        if takes_records && let Err(error) = records::send(&channel, records.unwrap_or_default()) {
            tracing::warn!("flow records are lost: {error:#}");
        }
        Ok(UpgradeReport {
            pid: taken.pid,
            version: ready.release,
            former_version: env!("CARGO_PKG_VERSION").to_owned(),
            prepared_us: micros(prepared),
            held_us: micros(now - (began + prepared)),
            stopped_us: micros(now - stopped_at),
            sessions: taken.sessions,
            packets,
            left_out: left_out + taken.left_out,
        })
    }

    /// Sends the offer to the new daemon, and waits until it is prepared.
    fn prepare(
        &self,
        state: &State,
        channel: &Channel,
        next: &Next,
        machines: BTreeMap<String, HandedPort>,
    ) -> Result<Ready> {
        let descriptors = state.descriptors(self.progress.listeners()?, machines)?;
        let (ports, peers) = state.names.numbers();
        let mut offer = Offer {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            file_crc: next.file_crc,
            addresses: state.config.underlay.addresses.clone(),
            journal: journal::whole(state.objects.others()).collect(),
            ports,
            peers,
            instance: self.instance,
            faults: state.faults.clone(),
            next_fault: state.next_fault,
            capture: self.capturing.spec().filter(|_| !is_older()).map(serde_json::to_value).transpose()?,
            sends_records: !is_older(),
            drained: state.leave_drained(&next.config),
            health: state.health.iter().map(|((name, at), works)| (name.clone(), *at, *works)).collect(),
            touched: state.touched_buffers()?,
            paths: state.leave_paths()?,
            shared: state.shared.holders.iter().map(|((vni, at), mac)| (vni.value(), *at, mac.0)).collect(),
            ..Offer::default()
        };
        descriptors.describe(&mut offer);
        channel.send(Kind::Offer, &serde_json::to_vec(&offer)?, &descriptors.all(), PREPARE)?;
        let ready = Ready::of(&channel.receive(PREPARE)?)?;
        ensure!(!ready.is_running, "unexpected answer of the new daemon");
        Ok(ready)
    }
}

impl State {
    /// All objects and settings with another file.
    fn next_config(&self, file: Arc<Config>) -> Result<Arc<Config>> {
        let (former, workers) = (self.config.workers.count, file.workers.count);
        if former == workers {
            let plan = self.objects.plan_file(file);
            let plan = plan.map_err(|errors| anyhow!("{}", ApiError::from(errors).what))?;
            return Ok(self.as_devices_allow(Arc::clone(plan.config())));
        }
        // Other owners' ports have other numbers of queues then.
        let others = with_workers(self.objects.others().clone(), former, workers);
        let (store, left_out) = Store::restore(file, others);
        match left_out.first() {
            None => Ok(Arc::clone(store.config())),
            Some(what) => bail!("an object does not fit the file: {what}"),
        }
    }

    /// Duplicates of all open descriptors.
    fn descriptors(&self, listeners: Listeners, machines: BTreeMap<String, HandedPort>) -> Result<Descriptors> {
        let lock = self.kept.lock().context("copying a descriptor")?;
        let mut sockets: Vec<Sockets> = Vec::new();
        for of_worker in self.on_all(|worker| worker.underlay().sockets())? {
            sockets.push(of_worker.context("copying the underlay's sockets")?);
        }
        let mut queues = BTreeMap::new();
        for port in self.config.ports.iter().filter(|port| port.kind == PortKind::Tap) {
            let Some(owner) = self.names.port(&port.name) else { continue };
            if self.containers.get(&port.name).is_some_and(crate::container::Container::is_waiting) {
                continue;
            }
            let of_worker = move |worker: &mut bifrost_datapath::Worker<HostUnderlay>| {
                worker.core_mut().device(owner).map(|device| device.fd().try_clone_to_owned())
            };
            let config = crate::translate::tap(&self.config, port);
            for (queue, worker) in (0..).zip(self.serving(port, owner)) {
                let Some(fd) = worker.run(of_worker)? else { continue };
                let name = self.kept.queue_name(&port.name, queue, &config);
                queues.insert(name, fd.context("copying a device's queue")?);
            }
        }
        let frames = self.frames()?;
        Ok(Descriptors { listeners, lock, sockets, queues, machines, frames })
    }
}

/// Fails if the daemon cannot be upgraded.
fn check_possible(state: &State) -> Result<()> {
    ensure!(!state.workers.is_empty(), "the daemon is stopping");
    let broken = state.on_all(|worker| worker.core_mut().failed_ports())?.concat();
    if let Some(owner) = broken.first() {
        let name = state.names.port_name(*owner).unwrap_or("?");
        bail!("the device of port {name} has failed; bifrostctl reload recreates it");
    }
    Ok(())
}

/// State of a stopped worker: the memory of its switch, and guests' unfinished packets.
type Left = (Vec<u8>, SetAside);

/// Stops all workers. Returns their state, and the time since which no packets are carried.
/// `is_copied`: only changes since then are part of the state.
fn stop(state: &State, is_copied: bool) -> Result<(Vec<Left>, Instant)> {
    state.on_all(|worker| worker.hold_guests(true))?;
    let settled = Instant::now() + SETTLE;
    while Instant::now() < settled && state.on_all(|worker| worker.unfinished_packets())?.iter().sum::<u64>() > 0 {
        std::thread::sleep(POLL);
    }
    let stopped_at = Instant::now();
    state.on_all(|worker| worker.pause())?;
    let states = state.on_all(move |worker| {
        let mut memory = Vec::new();
        let aside = worker.set_aside();
        frames::finish_sending(worker);
        let switch = worker.core_mut().switch_mut();
        if is_copied {
            switch.copy_rest(&mut memory);
        } else {
            switch.carry_memory(&mut memory);
        }
        (memory, aside)
    })?;
    Ok((states, stopped_at))
}

/// Workers that may have been stopped: dropping this resumes them, unless another daemon has taken over.
struct Stopped<'a> {
    state: &'a State,
    /// The new daemon has other local addresses, and may have begun to receive.
    readdressed: bool,
    /// The new daemon has another number of workers, and may have begun to steer packets to them.
    queues: Option<Vec<Steered>>,
    is_over: bool,
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        if let Some(queues) = &self.queues
            && let Err(error) = self.state.begin_queues(queues)
        {
            tracing::error!("packets of guests may be delivered to the wrong worker after a failed upgrade: {error:#}");
        }
        let (readdressed, recounted) = (self.readdressed, self.queues.is_some());
        let resume = move |worker: &mut bifrost_datapath::Worker<HostUnderlay>| {
            let resumed = worker.underlay_mut().resume(readdressed, recounted);
            worker.resume();
            resumed
        };
        match self.state.on_all(resume).map(|all| all.into_iter().collect::<Result<Vec<()>, _>>()) {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => tracing::error!(%error, "a socket may miss datagrams after a failed upgrade"),
            Err(_) => tracing::error!("a worker cannot be resumed after a failed upgrade"),
        }
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
