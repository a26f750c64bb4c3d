//! The old daemon's side: it starts the new one, and stops when that is prepared.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bifrost_control::api::{ApiError, UpgradeReport, UpgradeSpec};
use bifrost_control::config::{PortKind, UnderlayPort};
use bifrost_control::objects::journal;
use bifrost_control::{Config, ConfigDiff, Listeners};
use bifrost_datapath::SetAside;
use bifrost_port::HostUnderlay;
use bifrost_port::udp::Sockets;
use sd_notify::NotifyState;

use super::channel::Channel;
use super::format::{Kind, WorkerState, emit_state};
use super::offer::{Descriptors, Offer};
use super::take_over::Ready;
use crate::background::in_background;
use crate::carried::Carried;
use crate::daemon::{Daemon, State};

/// How long the new daemon may take to prepare, while this one works.
const PREPARE: Duration = Duration::from_secs(30);
/// How long it may take from there, while nothing is carried.
const COMMIT: Duration = Duration::from_secs(2);
/// How long acknowledgements are waited for: some round trips. What is not acknowledged then is handed over.
const SETTLE: Duration = Duration::from_millis(2);
/// How long a new daemon that has failed may take to end, so that it can be told how.
const EXPLAIN: Duration = Duration::from_millis(100);
/// How often it is looked whether all have come.
const LOOK: Duration = Duration::from_micros(100);

/// Whether another daemon goes on with the work of this one.
#[derive(Debug)]
pub(crate) struct Progress {
    /// What runs now, as it lay there at the start: a package may have replaced it since.
    program: Option<PathBuf>,
    /// What the API listens on, once it does.
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

    /// What requests come to, and the next daemon is to have.
    pub(crate) fn set_listeners(&self, listeners: Listeners) {
        *self.listeners.lock().unwrap_or_else(PoisonError::into_inner) = Some(listeners);
    }

    /// Waits for the end of an upgrade that is going on, one way or the other; as long as the result lives none begins.
    pub(crate) fn wait(&self) -> MutexGuard<'_, ()> {
        self.one_at_a_time.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Another daemon does the work: this one has only to end.
    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    fn listeners(&self) -> Result<Listeners> {
        let listeners = self.listeners.lock().unwrap_or_else(PoisonError::into_inner);
        Ok(listeners.as_ref().context("this daemon is still starting")?.try_clone()?)
    }
}

impl Daemon {
    /// Has another program go on. If this returns without an error it does, and this process is to end.
    pub(crate) fn hand_over(&self, spec: &UpgradeSpec) -> Result<UpgradeReport, ApiError> {
        let _one = match self.progress.one_at_a_time.try_lock() {
            Ok(one) => one,
            Err(TryLockError::Poisoned(one)) => one.into_inner(),
            Err(TryLockError::WouldBlock) => {
                return Err(ApiError::conflict("an upgrade is going on").hint("wait for its end"));
            }
        };
        let program = spec.binary.clone().or_else(|| self.progress.program.clone());
        let program = program.ok_or_else(|| ApiError::bad_request("which program runs is not known").at("binary"))?;
        let refused = |error: anyhow::Error| {
            tracing::error!("not upgraded, this daemon goes on: {error:#}");
            ApiError::conflict(format!("not upgraded, the running daemon goes on: {error:#}"))
        };
        let file_crc = self.check_file().map_err(refused)?;
        // Nobody changes anything until it is over, one way or the other.
        let state = self.state();
        check_possible(&state).map_err(refused)?;
        tracing::info!(program = %program.display(), "another bifrostd prepares to go on");
        let mut command = Command::new(&program);
        command.arg("--take-over").arg("--config").arg(&self.file);
        if let Some(directory) = &self.state_directory {
            command.arg("--state").arg(directory);
        }
        let report = self.converse(&state, command, file_crc).map_err(refused)?;
        // Requests to this daemon wait until it ends: their answers would be of the past.
        std::mem::forget(state);
        self.progress.is_over.store(true, Ordering::SeqCst);
        tracing::info!("{}", report.to_string().replace('\n', "; "));
        let _ = sd_notify::notify(&[NotifyState::Custom(&format!("MAINPID={}", report.pid))]);
        // The main thread ends the process once this has been answered.
        let _ = signal_hook::low_level::raise(signal_hook::consts::SIGTERM);
        Ok(report)
    }

    /// The checksum of the configuration file, which has to be what is in force: the new daemon goes by the file.
    fn check_file(&self) -> Result<u32> {
        let text = std::fs::read(&self.file).with_context(|| format!("reading {}", self.file.display()))?;
        let file = in_background(|| Config::load(&self.file)).map_err(|errors| anyhow!("{errors}"))?;
        let state = self.state();
        let plan = state.objects.plan_file(file.into());
        let plan = plan.map_err(|errors| anyhow!("{}", ApiError::from(errors).what))?;
        let is_same = match ConfigDiff::between(&state.config, plan.config()) {
            Ok(diff) => diff.is_empty(),
            Err(needed) => bail!("a restart is needed, for these have changed: {}", needed.fields.join(", ")),
        };
        let hint = "bifrostctl reload first, and see whether it reports what cannot be brought into force";
        ensure!(is_same, "{} is not what is in force; {hint}", self.file.display());
        Ok(crc32fast::hash(&text))
    }

    fn converse(&self, state: &State, mut command: Command, file_crc: u32) -> Result<UpgradeReport> {
        let (ours, theirs) = UnixStream::pair().context("making a socket for the new daemon")?;
        let channel = Channel::new(ours);
        command.stdin(OwnedFd::from(theirs));
        // What the service manager has handed to this process is not the next one's.
        for name in ["LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"] {
            command.env_remove(name);
        }
        let began = Instant::now();
        let mut successor = Heir(command.spawn().with_context(|| format!("starting {:?}", command.get_program()))?);
        drop(command);
        let ready = self.prepare(state, &channel, file_crc).map_err(|error| successor.explain(error))?;
        let prepared = began.elapsed();
        // Dropped in this order: the new daemon is gone before this one works again.
        let mut stopped = Stopped { state, is_over: false };
        let mut successor = successor;
        let (states, stopped_at) = stop(state)?;
        let left_out: u64 = states.iter().map(|(_, aside)| aside.left_out).sum();
        let packets: u64 = states.iter().map(|(_, aside)| aside.packets.len() as u64).sum();
        let states: Vec<WorkerState> =
            states.into_iter().map(|(memory, aside)| WorkerState { memory, packets: aside.packets }).collect();
        let said = channel.send(Kind::State, &emit_state(&states), &[], COMMIT).and_then(|()| channel.receive(COMMIT));
        let taken = said.and_then(|message| Ready::of(&message)).map_err(|error| successor.explain(error))?;
        ensure!(taken.is_running, "the new daemon is out of step");
        let now = Instant::now();
        stopped.is_over = true;
        successor.leave();
        // Nothing waits for these, and nothing can go wrong any more.
        let counted = Carried::of(state).map_err(|error| anyhow!("{}", error.what));
        let told =
            counted.and_then(|counted| channel.send(Kind::Counters, &serde_json::to_vec(&counted)?, &[], COMMIT));
        if let Err(error) = told {
            tracing::warn!("the new daemon's counters begin at zero: {error:#}");
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

    /// Gives the new daemon what it needs to prepare, and waits until it has.
    fn prepare(&self, state: &State, channel: &Channel, file_crc: u32) -> Result<Ready> {
        let descriptors = state.descriptors(self.progress.listeners()?)?;
        let (ports, peers) = state.names.numbers();
        let mut offer = Offer {
            release: env!("CARGO_PKG_VERSION").to_owned(),
            file_crc,
            journal: journal::whole(state.objects.others()).collect(),
            ports,
            peers,
            instance: self.instance,
            faults: state.faults.clone(),
            next_fault: state.next_fault,
            drained: state.drained.clone(),
            health: state.health.iter().map(|((name, at), works)| (name.clone(), *at, *works)).collect(),
            shared: state.shared.holders.iter().map(|((vni, at), mac)| (vni.value(), *at, mac.0)).collect(),
            ..Offer::default()
        };
        descriptors.describe(&mut offer);
        channel.send(Kind::Offer, &serde_json::to_vec(&offer)?, &descriptors.all(), PREPARE)?;
        let ready = Ready::of(&channel.receive(PREPARE)?)?;
        ensure!(!ready.is_running, "the new daemon is out of step");
        Ok(ready)
    }
}

impl State {
    /// Copies of everything that is open.
    fn descriptors(&self, listeners: Listeners) -> Result<Descriptors> {
        let lock = self.kept.lock().context("copying a descriptor")?;
        let mut sockets: Vec<Sockets> = Vec::new();
        for of_worker in self.on_all(|worker| match worker.underlay() {
            HostUnderlay::Udp(udp) => udp.sockets(),
            HostUnderlay::Afxdp(_) => Err(std::io::ErrorKind::Unsupported.into()),
        })? {
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
                queues.insert(crate::kept::name(&port.name, queue, &config), fd.context("copying a device's queue")?);
            }
        }
        Ok(Descriptors { listeners, lock, sockets, queues })
    }
}

/// What keeps a daemon from being upgraded.
fn check_possible(state: &State) -> Result<()> {
    ensure!(!state.workers.is_empty(), "it is ending");
    ensure!(
        state.config.underlay.port == UnderlayPort::Udp,
        "with [underlay] port = \"afxdp\" it takes a restart: what the kernel has put into its rings cannot be handed over"
    );
    let machine = state.config.ports.iter().find(|port| port.kind == PortKind::VhostUser);
    if let Some(port) = machine {
        bail!("port {} is a virtual machine's: its rings are not handed over yet, and it takes a restart", port.name);
    }
    let broken = state.on_all(|worker| worker.core_mut().failed_ports())?.concat();
    if let Some(owner) = broken.first() {
        let name = state.names.port_name(*owner).unwrap_or("?");
        bail!("the device of port {name} is out of use; bifrostctl reload makes it again");
    }
    Ok(())
}

/// What a worker leaves: what its switch remembers, and what of guests is unfinished.
type Left = (Vec<u8>, SetAside);

/// Stops all workers. What each leaves, and since when nothing is carried.
fn stop(state: &State) -> Result<(Vec<Left>, Instant)> {
    state.on_all(|worker| worker.hold_guests(true))?;
    let settled = Instant::now() + SETTLE;
    while Instant::now() < settled && state.on_all(|worker| worker.unfinished_packets())?.iter().sum::<u64>() > 0 {
        std::thread::sleep(LOOK);
    }
    let stopped_at = Instant::now();
    state.on_all(|worker| worker.pause())?;
    let states = state.on_all(|worker| {
        let mut memory = Vec::new();
        let aside = worker.set_aside();
        worker.core_mut().switch_mut().carry_memory(&mut memory);
        (memory, aside)
    })?;
    Ok((states, stopped_at))
}

/// Workers that may have been stopped: they go on when this is dropped, unless another daemon does.
struct Stopped<'a> {
    state: &'a State,
    is_over: bool,
}

impl Drop for Stopped<'_> {
    fn drop(&mut self) {
        if !self.is_over && self.state.on_all(|worker| worker.resume()).is_err() {
            tracing::error!("a worker does not go on after an upgrade that has failed");
        }
    }
}

/// The new daemon's process: killed when this is dropped, unless it is to live.
struct Heir(Child);

impl Heir {
    /// It lives on; who ends first does not matter to either.
    fn leave(self) {
        std::mem::forget(self);
    }

    /// What became of it is often the better explanation.
    fn explain(&mut self, error: anyhow::Error) -> anyhow::Error {
        let deadline = Instant::now() + EXPLAIN;
        let status: Option<ExitStatus> = loop {
            match self.0.try_wait() {
                Ok(None) if Instant::now() < deadline => std::thread::sleep(Duration::from_millis(1)),
                status => break status.ok().flatten(),
            }
        };
        match status {
            Some(status) => error.context(format!("the new daemon has ended: {status}")),
            None => error,
        }
    }
}

impl Drop for Heir {
    fn drop(&mut self) {
        // Gone is as good as killed.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}
