//! The new daemon's side: it prepares, waits for the old daemon to stop, and takes over.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail, ensure};
use bifrost_avs::Distribution;
use bifrost_control::api::{FaultEntry, Sample};
use bifrost_control::objects::{Objects, journal, with_workers};
use bifrost_port::clock::monotonic_ns;
use bifrost_port::provide::{self, Pause};
use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use super::channel::{Channel, Message};
use super::format::{HandedState, Kind, WorkerState, parse_state};
use super::offer::{Descriptors, Offer};
use super::paths::OfPeers;
use super::records;
use super::touch;
use crate::carried::Carried;
use crate::daemon::{Daemon, State};
use crate::names::Names;

/// Timeout for each step of the old daemon: it sends the offer at once, and later needs some milliseconds.
const PATIENCE: Duration = Duration::from_secs(10);
/// Timeout for the next memory of the tables, which takes milliseconds.
const MEMORY: Duration = Duration::from_secs(1);
/// How long the old daemon may take to end before its sockets that are not needed are closed anyway.
const OLD_ENDS: Duration = Duration::from_secs(10);
/// How long these may hold datagrams then.
const RETIRE: Duration = Duration::from_secs(1);
/// Maximum number of workers of a daemon.
const MAX_WORKERS: usize = 32;
/// Polling interval for both.
const RETIRE_POLL: Duration = Duration::from_millis(2);
/// Timeout for its counters, while requests wait.
const COUNTERS: Duration = Duration::from_secs(2);

/// The body of the new daemon's answers `Ready` and `Running`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub(super) struct Ready {
    /// Its version and process ID.
    pub(super) release: String,
    pub(super) pid: u32,
    /// Sessions taken over, and packets and sessions left out.
    pub(super) sessions: u64,
    pub(super) left_out: u64,
    /// It takes copies of sessions while the old daemon is running.
    pub(super) takes_copies: bool,
    /// It takes flow logs after the counters.
    pub(super) takes_records: bool,
    /// It takes the running capture before the counters.
    pub(super) takes_capture: bool,
    #[serde(skip)]
    pub(super) is_running: bool,
}

impl Ready {
    /// # Errors
    /// The new daemon has failed, or the message is not an answer.
    pub(super) fn of(Message { kind, body, .. }: &Message) -> Result<Ready> {
        let is_running = match kind {
            Kind::Ready => false,
            Kind::Running => true,
            Kind::Failed => bail!("the new daemon reports: {}", String::from_utf8_lossy(body).escape_debug()),
            other => bail!("the new daemon answers with {other:?}"),
        };
        let ready: Ready = serde_json::from_slice(body).context("reading the new daemon's answer")?;
        Ok(Ready { is_running, ..ready })
    }
}

/// A new daemon that is about to take over from its parent.
#[derive(Debug)]
pub(crate) struct Successor {
    channel: Channel,
    /// The old daemon sends flow logs after its counters.
    gets_records: Cell<bool>,
    /// The old daemon's local addresses.
    addresses: RefCell<Vec<IpAddr>>,
    /// The old daemon's process.
    parent: Option<Pid>,
    /// The old daemon's running capture.
    capture: RefCell<Option<serde_json::Value>>,
    /// The old daemon's number of workers.
    workers: Cell<usize>,
}

/// State from the old daemon for the start of the new one.
#[derive(Debug)]
pub(crate) struct Handed {
    pub(crate) descriptors: Descriptors,
    pub(crate) others: Objects,
    pub(crate) names: Names,
    pub(crate) instance: u64,
    pub(crate) faults: Vec<FaultEntry>,
    pub(crate) next_fault: u64,
    pub(crate) drained: BTreeMap<String, u8>,
    pub(crate) health: Vec<(String, SocketAddr, bool)>,
    pub(crate) shared: Vec<(u32, IpAddr, [u8; 6])>,
    pub(super) touched: touch::Buffers,
    pub(super) paths: OfPeers,
}

impl Handed {
    /// Buffers of ports that the old daemon has used, and what it knows of paths.
    pub(crate) fn learned(&self) -> (touch::Buffers, OfPeers) {
        (self.touched.clone(), self.paths.clone())
    }
}

impl Successor {
    /// Takes the socket to the parent, which is this process's standard input.
    ///
    /// # Errors
    /// Standard input is not a stream socket.
    pub(crate) fn of_stdin() -> Result<Successor> {
        let stdin = std::io::stdin().as_fd().try_clone_to_owned().context("taking standard input")?;
        let kind = rustix::net::sockopt::socket_type(&stdin);
        let hint = "--take-over is for `bifrostctl upgrade`, which starts it";
        ensure!(matches!(kind, Ok(rustix::net::SocketType::STREAM)), "standard input is not a daemon's socket; {hint}");
        fault("begin");
        Ok(Successor {
            channel: Channel::new(UnixStream::from(stdin)),
            gets_records: Cell::new(false),
            capture: RefCell::default(),
            addresses: RefCell::default(),
            workers: Cell::default(),
            parent: rustix::process::getppid(),
        })
    }

    /// Receives the old daemon's offer. `file_crc`: checksum of the configuration file; `workers`: the number of
    /// workers that it configures.
    ///
    /// # Errors
    /// The offer does not arrive, is invalid, or is for another configuration.
    pub(crate) fn offer(&self, file_crc: u32, workers: usize) -> Result<Handed> {
        let Message { kind, body, descriptors } = self.channel.receive(PATIENCE)?;
        ensure!(kind == Kind::Offer, "expected an offer of the old daemon, got {kind:?}");
        let offer: Offer = serde_json::from_slice(&body).context("reading the old daemon's offer")?;
        ensure!(offer.file_crc == file_crc, "the configuration file has changed during the upgrade");
        let former = offer.sockets.len();
        ensure!((1..=MAX_WORKERS).contains(&former), "the old daemon has {former} workers");
        self.workers.set(former);
        let descriptors = Descriptors::of(&offer, descriptors)?;
        let loaded = journal::read(offer.journal.as_bytes(), former).context("reading the objects of other owners")?;
        if let Some(what) = loaded.not_understood.first() {
            bail!("unknown object of the old daemon: {what}");
        }
        let Offer {
            ports,
            peers,
            instance,
            faults,
            next_fault,
            drained,
            health,
            shared,
            release,
            sends_records,
            capture,
            addresses,
            touched,
            paths,
            ..
        } = offer;
        tracing::info!(release, "preparing to take over from another bifrostd");
        let names = Names::of_numbers(ports, peers);
        self.gets_records.set(sends_records && !is_older());
        *self.addresses.borrow_mut() = addresses;
        *self.capture.borrow_mut() = capture.filter(|_| !is_older());
        fault("offered");
        let others = with_workers(loaded.objects, former, workers);
        Ok(Handed { descriptors, others, names, instance, faults, next_fault, drained, health, shared, touched, paths })
    }

    /// Prepares buffers and paths as the old daemon has used them ([`Handed::learned`]), reports that this daemon is
    /// prepared, waits until the old one has stopped, and resumes the workers. When this returns, this daemon has taken
    /// over. Drop the returned value once guests' packets are less urgent than the memory of the tables.
    ///
    /// # Errors
    /// The old daemon continues; this one must exit.
    pub(crate) fn complete(&self, daemon: &Daemon, (touched, paths): &(touch::Buffers, OfPeers)) -> Result<Pause> {
        let mut state = daemon.state();
        state.touch_buffers(touched)?;
        state.resume_paths(paths)?;
        let queues = state.prepare_queues()?;
        let former = self.workers.get();
        let recounted = former != state.workers.len();
        let mut distribution = recounted.then(|| Distribution::new(former, state.workers.len()));
        let capture = self.capture.take().and_then(|spec| daemon.prepare_capture(&state, spec));
        drop(state);
        fault("prepared");
        let release = env!("CARGO_PKG_VERSION").to_owned();
        let pid = std::process::id();
        let takes_records = !is_older();
        let takes_capture = capture.is_some();
        let mut ready = Ready { release, pid, takes_copies: true, takes_records, takes_capture, ..Ready::default() };
        self.channel.send(Kind::Ready, &serde_json::to_vec(&ready)?, &[], PATIENCE)?;
        let mut state = daemon.state();
        let body = self.copies(&state, distribution.as_mut())?;
        // The copies have what they need.
        let paused = provide::pause();
        fault("stopped");
        let addresses = self.addresses.borrow();
        let readdressed = !addresses.is_empty() && *addresses != state.config.underlay.addresses;
        let HandedState { workers, positions } = parse_state(&body, former)?;
        let workers = state.distribute(distribution.as_mut(), workers)?;
        (ready.sessions, ready.left_out) = state.take_over_workers(workers)?;
        ready.left_out += distribution.map_or(0, |distribution| distribution.left_out());
        state.begin_machines(positions);
        fault("taken");
        for begun in state.on_all(move |worker| worker.underlay_mut().begin(readdressed))? {
            begun?;
        }
        ready.left_out += state.begin_queues(&queues)?;
        drop(queues);
        fault("begun");
        state.on_all(|worker| worker.resume())?;
        let resumed_ns = monotonic_ns();
        fault("working");
        self.channel.send(Kind::Running, &serde_json::to_vec(&ready)?, &[], PATIENCE)?;
        state.machines.values().for_each(|machine| machine.port().own());
        state.own_frames();
        if let Some(capture) = capture
            && let Err(error) = daemon.continue_capture(&self.channel, capture, resumed_ns)
        {
            tracing::warn!("the capture of the old daemon ends: {error:#}");
        }
        match self.counters() {
            Ok(carried) => state.carried = carried.into(),
            Err(error) => tracing::warn!("counters start at zero: {error:#}"),
        }
        if self.gets_records.get()
            && let Err(error) = records::receive(&self.channel, &state)
        {
            tracing::warn!("flow records of the old daemon are lost: {error:#}");
        }
        state.retire_sockets(self.parent);
        Ok(paused)
    }

    /// Takes copies of sessions until the old daemon has stopped. Returns the body of its last message, the state.
    fn copies(&self, state: &State, mut distribution: Option<&mut Distribution>) -> Result<Vec<u8>> {
        let former = self.workers.get();
        loop {
            let Message { kind, body, .. } = self.channel.receive(PATIENCE)?;
            match kind {
                Kind::State => return Ok(body),
                Kind::Copies => {
                    let workers = parse_state(&body, former)?.workers;
                    state.take_copies(state.distribute(distribution.as_deref_mut(), workers)?)?;
                }
                other => bail!("expected the state of the old daemon, got {other:?}"),
            }
            fault("copied");
            self.channel.send(Kind::Copied, &[], &[], PATIENCE)?;
        }
    }

    /// Receives the old daemon's counters.
    fn counters(&self) -> Result<Carried> {
        let Message { kind, body, .. } = self.channel.receive(COUNTERS)?;
        ensure!(kind == Kind::Counters, "expected the counters of the old daemon, got {kind:?}");
        let counters: Vec<Sample> = serde_json::from_slice(&body).context("reading the old daemon's counters")?;
        Ok(Carried::from_handed(counters))
    }

    /// Reports to the old daemon why this one ends.
    pub(crate) fn fail(&self, error: &anyhow::Error) {
        // The old daemon notices the end anyway.
        let _ = self.channel.send(Kind::Failed, format!("{error:#}").as_bytes(), &[], Duration::from_secs(1));
    }
}

impl State {
    /// Closes sockets of the old daemon that the configuration no longer needs, once that daemon's process has ended and
    /// what they hold has been received.
    fn retire_sockets(&self, parent: Option<Pid>) {
        let workers: Vec<_> = self.workers.iter().map(bifrost_datapath::Handle::remote).collect();
        let retire = move || {
            let deadline = Instant::now() + OLD_ENDS;
            while rustix::process::getppid() == parent && Instant::now() < deadline {
                std::thread::sleep(RETIRE_POLL);
            }
            let deadline = Instant::now() + RETIRE;
            for worker in workers {
                loop {
                    let is_last = Instant::now() >= deadline;
                    match worker.run(move |worker| worker.underlay_mut().close_retired(is_last)) {
                        Ok(false) if !is_last => std::thread::sleep(RETIRE_POLL),
                        _ => break,
                    }
                }
            }
        };
        // Without the thread, they stay open.
        let _ = std::thread::Builder::new().name("retired".to_owned()).spawn(retire);
    }

    /// Adds copies of another daemon's sessions to the tables of the workers, which have not begun, and waits until
    /// their next memory is provided: a worker that takes over meanwhile would wait for that.
    fn take_copies(&self, states: Vec<WorkerState>) -> Result<()> {
        for (worker, WorkerState { memory, .. }) in self.workers.iter().zip(states) {
            let take = move |worker: &mut bifrost_datapath::Worker<_>| {
                let taken = worker.core_mut().switch_mut().take_over_copies(monotonic_ns(), &memory);
                // Not only when it carries packets.
                worker.provide();
                taken
            };
            worker.run(take)?.map_err(|error| anyhow!("{error}"))?;
        }
        // Without the memory, guests wait longer; nothing else depends on it.
        let _ = provide::wait(MEMORY);
        Ok(())
    }

    /// Restores the state of another daemon's workers. Returns the number of sessions taken over, and of sessions and
    /// packets left out.
    fn take_over_workers(&self, states: Vec<WorkerState>) -> Result<(u64, u64)> {
        let (mut sessions, mut left_out) = (0, 0);
        for (worker, WorkerState { memory, packets }) in self.workers.iter().zip(states) {
            let taken = worker.run(move |worker| {
                let taken = worker.core_mut().switch_mut().take_over_memory(monotonic_ns(), &memory);
                let refused = packets.into_iter().map(|(owner, packet)| worker.put_in_front(owner, packet));
                (taken, refused.filter(|is_taken| !is_taken).count() as u64)
            })?;
            let (taken, refused) = taken;
            let taken = taken.map_err(|error| anyhow!("{error}"))?;
            sessions += taken.sessions;
            left_out += taken.left_out + refused;
        }
        Ok((sessions, left_out))
    }
}

/// Fails at this step if a test's environment variable names it: exits (`exit`), aborts (`kill`), or hangs (`hang`).
#[cfg(debug_assertions)]
fn fault(step: &str) {
    let Ok(wanted) = std::env::var("BIFROST_UPGRADE_FAULT") else { return };
    match wanted.split_once(' ') {
        Some(("exit", at)) if at == step => std::process::exit(7),
        Some(("kill", at)) if at == step => std::process::abort(),
        Some(("hang", at)) if at == step => std::thread::sleep(Duration::from_secs(120)),
        _ => {}
    }
}

#[cfg(not(debug_assertions))]
fn fault(_step: &str) {}

/// Whether a test wants this daemon to behave like one that does not take over flow logs.
pub(super) fn is_older() -> bool {
    cfg!(debug_assertions) && std::env::var("BIFROST_UPGRADE_FAULT").is_ok_and(|fault| fault == "older")
}
