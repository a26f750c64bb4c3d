//! A thread that runs the turns of a core, and sleeps in between. [`Core::turn`] describes a turn.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, sync_channel};

use bifrost_avs::Switch;
use bifrost_port::clock::{monotonic_ns, thread_ns};
use bifrost_port::panics::{self, Panic};
use bifrost_port::vhost::Unplugged;
use bifrost_port::{PolledPort, PolledUnderlay, provide};
use bifrost_rte::Time;
use rustix::event::{PollFd, PollFlags, Timespec, epoll};

use crate::contain::{PortFault, Recovery};
use crate::core::{Core, CoreConfig};
use crate::peers::{PeerConfig, PeerError};
use crate::ports::PortConfig;
use crate::provision::Provision;
use crate::pulse::Pulse;
use crate::share::Share;
use crate::snapshot::Totals;
use crate::watchdog::WatchdogConfig;
use crate::yielding::Yielding;

/// Tokens of the epoll set: ports by number, then these.
const UNDERLAY_TOKEN: u64 = 1 << 32;
const WAKE_TOKEN: u64 = 1 << 33;

/// How often the worker looks for memory that will be needed. A table cannot outgrow a large page in this time.
const PROVIDE_EVERY_NS: u64 = 1_000_000;

/// A guest's device, of whatever kind.
pub type Device = Box<dyn PolledPort + Send>;

/// One core, its underlay, and what wakes it.
pub struct Worker<U> {
    pub(crate) core: Core<Device>,
    pub(crate) underlay: U,
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
    letters: Letters<U>,
    /// Time per turn for questions, ns.
    answer_ns: u64,
    /// Unanswered questions, answered in turn.
    questions: VecDeque<Question<U>>,
    /// The last turn had no time for all of them.
    has_questions: bool,
    /// All workers of this host in order, if there are several.
    pub(crate) others: Vec<Mailbox<U>>,
    yielding: Yielding,
    pulse: Arc<Pulse>,
    provision: Provision,
    /// When it looks again.
    next_look: Time,
    /// Replaces the device of a port that a fault takes out of use: there may be no free descriptors then.
    spare: Option<Device>,
    /// Only commands are run, because another process has taken over, or is about to hand over.
    pub(crate) paused: bool,
    stopping: bool,
}

impl<U> Worker<U> {
    /// Ends the loop after this turn.
    pub(crate) fn order_stop(&mut self) {
        self.stopping = true;
    }
}

impl<U: PolledUnderlay> Worker<U> {
    /// A worker without ports and peers; `wake` is an eventfd that announces `letters`.
    pub(crate) fn new(
        config: CoreConfig,
        underlay: U,
        switch: Switch,
        wake: Arc<OwnedFd>,
        letters: Letters<U>,
    ) -> io::Result<Self> {
        let (clock, share_percent) = (monotonic_ns, config.slow_port_percent);
        let answer_ns = u64::from(config.answer_us) * 1000;
        let mut core = Core::new(config, switch);
        core.switch.make_first_room();
        let mut provision = Provision::default();
        provision.look(core.switch.memory(), |range| {
            provide::now(range);
            true
        });
        let pulse = core.pulse();
        core.watch_time(WatchdogConfig { clock, processor_time: thread_ns, share_percent });
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in underlay.fds() {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(UNDERLAY_TOKEN), epoll::EventFlags::IN)?;
        }
        epoll::add(&epoll, wake.as_fd(), epoll::EventData::new_u64(WAKE_TOKEN), epoll::EventFlags::IN)?;
        Ok(Worker {
            core,
            underlay,
            epoll,
            wake,
            letters,
            answer_ns,
            questions: VecDeque::new(),
            has_questions: false,
            others: Vec::new(),
            yielding: Yielding::default(),
            pulse,
            provision,
            next_look: Time(0),
            spare: Some(unplugged()?),
            paused: false,
            stopping: false,
        })
    }

    /// Works until it is told to stop.
    pub(crate) fn run(mut self) {
        // Timers of microseconds: the default slack of 50 us would be most of an ACK delay.
        let _ = rustix::thread::set_current_timer_slack(std::num::NonZeroU64::new(1));
        while !self.stopping {
            if self.paused {
                self.rest();
                continue;
            }
            let busy = self.contained(Worker::turn).unwrap_or(true);
            if busy {
                self.yield_processor();
            }
            self.wait(busy);
        }
    }

    pub(crate) fn turn(&mut self) -> bool {
        let started = monotonic_ns();
        self.core.begin_turn(Time(started));
        let others = &self.others;
        let hand_over = |core: &mut Core<Device>| Self::hand_over(core, others);
        let busy = if self.core.is_captured() {
            self.core.turn_captured(Time(started), &mut self.underlay, hand_over)
        } else {
            self.core.turn(Time(started), &mut self.underlay, hand_over)
        };
        // Packets from guests here to guests that other workers serve.
        Self::hand_over(&mut self.core, &self.others);
        while let Some(owner) = self.core.take_rewatched() {
            self.rewatch(owner);
        }
        if busy {
            let ended = monotonic_ns();
            self.core.counters.busy_ns += ended - started;
            self.core.end_turn(Time(started), Time(ended));
            if Time(ended) >= self.next_look {
                self.next_look = Time(ended + PROVIDE_EVERY_NS);
                self.provide();
            }
        } else {
            self.core.end_idle_turn();
        }
        busy
    }

    /// Has another thread make the kernel provide the memory that tables need next. A worker that carries packets does it
    /// by itself.
    pub fn provide(&mut self) {
        self.provision.look(self.core.switch.memory(), provide::later);
    }

    /// Runs `work`. After a panic in it, either everything is usable again except what it was done for, or the process
    /// ends; then the service manager restarts it, and virtual machines keep their rings.
    fn contained<T>(&mut self, work: impl FnOnce(&mut Self) -> T) -> Option<T> {
        let panic = match panics::contain(|| work(self)) {
            Ok(result) => return Some(result),
            Err(panic) => panic,
        };
        match panics::contain(|| self.recover(panic)) {
            Ok(true) => None,
            Ok(false) => end("repeated panics that no port has caused"),
            Err(second) => end(&format!("a panic during the recovery from another one: {second}")),
        }
    }

    /// Returns whether the worker can continue.
    fn recover(&mut self, panic: Panic) -> bool {
        let spare = &mut self.spare;
        let recovery = self.core.recover(panic, || spare.take().map_or_else(unplugged, Ok));
        self.spare = self.spare.take().or_else(|| unplugged().ok());
        match recovery {
            Recovery::Dropped => true,
            Recovery::Hopeless => false,
            Recovery::PortOut(owner, fault) => {
                self.forget_broken(owner);
                // The port's other queues are served by other workers.
                let own = usize::from(self.core.siblings.index);
                for (_, other) in self.others.iter().enumerate().filter(|(index, _)| *index != own) {
                    let fault = fault.clone();
                    let _ = other.send(Box::new(move |worker| worker.take_out(owner, fault)));
                }
                true
            }
        }
    }

    /// [`Core::take_out`].
    fn take_out(&mut self, owner: u32, fault: PortFault) {
        match self.spare.take().map_or_else(unplugged, Ok) {
            Ok(device) => {
                self.core.take_out(owner, fault, device);
                self.forget_broken(owner);
                self.spare = unplugged().ok();
            }
            Err(error) => tracing::error!(port = owner, %error, "a queue of a port cannot be taken out of use"),
        }
    }

    /// Stops waiting for events of a device that a fault has put aside.
    fn forget_broken(&mut self, owner: u32) {
        if let Some(device) = self.core.broken_device(owner) {
            let _ = epoll::delete(&self.epoll, device.fd());
        }
    }

    /// Lets guests' threads on this processor respond to the packets published in this turn.
    fn yield_processor(&mut self) {
        let from = monotonic_ns();
        if self.yielding.is_due(from) {
            rustix::thread::sched_yield();
            self.yielding.yielded(from, monotonic_ns());
        }
    }

    /// Watches a port's descriptor only while that is useful.
    fn rewatch(&self, owner: u32) {
        let Some(device) = self.core.device(owner) else { return };
        let flags = if self.core.is_watched(owner) { interest(device) } else { epoll::EventFlags::empty() };
        // Fails if the device is gone; then nothing wakes the worker for it, which is intended.
        let _ = epoll::modify(&self.epoll, device.fd(), epoll::EventData::new_u64(u64::from(owner)), flags);
    }

    /// Sleeps until a descriptor is ready or a timer is due; only polls while there is more work.
    fn wait(&mut self, busy: bool) {
        let timeout_ns = match self.core.next_deadline() {
            _ if self.has_questions || busy && self.core.has_more() => Some(0),
            Some(at) => Some(at.since(Time(monotonic_ns()))),
            None => None,
        };
        let timeout = timeout_ns.map(|ns| Timespec {
            tv_sec: i64::try_from(ns / 1_000_000_000).unwrap_or(i64::MAX),
            tv_nsec: (ns % 1_000_000_000) as _,
        });
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        self.pulse.rest();
        let waited = epoll::wait(&self.epoll, &mut events, timeout.as_ref());
        self.pulse.wake();
        let Ok((ready, _)) = waited else { return };
        let mut woken = false;
        for event in ready.iter() {
            match event.data.u64() {
                UNDERLAY_TOKEN => self.core.on_underlay_readable(),
                WAKE_TOKEN => woken = true,
                owner => self.core.on_port_readable(owner as u32),
            }
        }
        if woken {
            self.obey();
        }
        if woken || self.has_questions {
            self.answer();
        }
    }

    /// Waits for commands and questions only.
    fn rest(&mut self) {
        let wake = Arc::clone(&self.wake);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        self.pulse.rest();
        let mut fds = [PollFd::new(&*wake, PollFlags::IN)];
        let _ = rustix::event::poll(&mut fds, self.has_questions.then_some(&now));
        self.pulse.wake();
        self.obey();
        self.answer();
    }

    /// Runs the commands that other threads have sent.
    fn obey(&mut self) {
        let mut count = [0u8; 8];
        let _ = rustix::io::read(self.wake.as_fd(), &mut count);
        loop {
            match self.letters.commands.try_recv() {
                Ok(command) => {
                    self.core.begin_command();
                    let _ = self.contained(command);
                }
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.stopping = true;
                    return;
                }
            }
        }
    }

    /// Answers questions of other threads as far as the turn has time for them. Each is a small piece of work.
    fn answer(&mut self) {
        let share = Share::new(&monotonic_ns, self.answer_ns);
        self.questions.extend(self.letters.questions.try_iter());
        self.has_questions = false;
        while let Some(mut question) = self.questions.pop_front() {
            self.core.begin_command();
            // After a panic in a question, the asking thread learns that there is no answer.
            if self.contained(|worker| question(worker, &share)) == Some(false) {
                self.questions.push_back(question);
            }
            if share.is_used_up() {
                self.has_questions = !self.questions.is_empty();
                return;
            }
        }
    }

    /// What other threads may see of its work.
    pub(crate) fn pulse(&self) -> Arc<Pulse> {
        Arc::clone(&self.pulse)
    }

    /// The core that this worker owns.
    pub fn core_mut(&mut self) -> &mut Core<Device> {
        &mut self.core
    }

    /// The underlay.
    pub fn underlay(&self) -> &U {
        &self.underlay
    }

    /// The underlay. See [`change_underlay`](Self::change_underlay) for changes of its descriptors.
    pub fn underlay_mut(&mut self) -> &mut U {
        &mut self.underlay
    }

    /// Changes the underlay, and watches its descriptors of afterwards.
    ///
    /// # Errors
    /// A descriptor cannot be watched.
    pub fn change_underlay<T>(&mut self, change: impl FnOnce(&mut U) -> T) -> io::Result<T> {
        let result = change(&mut self.underlay);
        for fd in self.underlay.fds() {
            let data = epoll::EventData::new_u64(UNDERLAY_TOKEN);
            match epoll::add(&self.epoll, fd, data, epoll::EventFlags::IN) {
                // It is watched already.
                Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        self.core.on_underlay_readable();
        Ok(result)
    }

    /// Counters of the whole worker.
    pub fn totals(&self) -> Totals {
        self.core.totals()
    }

    /// Adds a port; its number must be free.
    ///
    /// # Errors
    /// The number is taken, or the device's descriptor cannot be watched.
    pub fn add_port(&mut self, config: PortConfig<Device>) -> io::Result<()> {
        let owner = config.owner;
        self.core.add_port(config)?;
        let Some(device) = self.core.device(owner) else { return Ok(()) };
        let data = epoll::EventData::new_u64(u64::from(owner));
        if let Err(error) = epoll::add(&self.epoll, device.fd(), data, interest(device)) {
            self.core.remove_port(owner);
            return Err(error.into());
        }
        Ok(())
    }

    /// [`Core::swap_device`]; the new device is watched.
    ///
    /// # Errors
    /// There is no such port, or the device's descriptor cannot be watched.
    pub fn swap_device(&mut self, owner: u32, device: Device) -> io::Result<Device> {
        if let Some(old) = self.core.device(owner) {
            let _ = epoll::delete(&self.epoll, old.fd());
        }
        let old = self.core.swap_device(owner, device).map_err(|_| io::ErrorKind::NotFound)?;
        if let Some(device) = self.core.device(owner) {
            epoll::add(&self.epoll, device.fd(), epoll::EventData::new_u64(u64::from(owner)), interest(device))?;
        }
        Ok(old)
    }

    /// Removes a port with its connections and buffers. The caller drops the device: the kernel takes tens of
    /// milliseconds to remove a network interface, which would stop all other ports of this worker.
    #[must_use]
    pub fn remove_port(&mut self, owner: u32) -> Option<Device> {
        let device = self.core.remove_port(owner)?;
        let _ = epoll::delete(&self.epoll, device.fd());
        Some(device)
    }

    /// [`Core::set_peer`].
    pub fn set_peer(&mut self, config: PeerConfig) -> Result<(), PeerError> {
        self.core.set_peer(config, &mut self.underlay)
    }

    /// [`Core::remove_peer`].
    pub fn remove_peer(&mut self, id: u32) {
        self.core.remove_peer(id, &mut self.underlay);
    }
}

/// A command for a worker.
pub(crate) type Command<U> = Box<dyn FnOnce(&mut Worker<U>) + Send>;

/// A question about a worker's state. Commands come first; questions wait for turns that have time for them. It is
/// called until it returns true, which means that it is answered.
pub(crate) type Question<U> = Box<dyn FnMut(&mut Worker<U>, &Share<'_>) -> bool + Send>;

/// The worker's ends of the channels.
pub(crate) struct Letters<U> {
    pub(crate) commands: Receiver<Command<U>>,
    pub(crate) questions: Receiver<Question<U>>,
}

/// Where other threads leave commands and questions for a worker.
pub(crate) struct Mailbox<U> {
    commands: Sender<Command<U>>,
    questions: Sender<Question<U>>,
    wake: Arc<OwnedFd>,
    /// Packets handed over by other workers that are not processed yet.
    waiting: Arc<AtomicUsize>,
}

impl<U> Mailbox<U> {
    pub(crate) fn new(commands: Sender<Command<U>>, questions: Sender<Question<U>>, wake: Arc<OwnedFd>) -> Self {
        Mailbox { commands, questions, wake, waiting: Arc::default() }
    }

    /// Packets handed over by other workers that are not processed yet.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    /// More of them are about to be sent.
    pub(crate) fn add_waiting(&self, count: usize) {
        self.waiting.fetch_add(count, Ordering::Relaxed);
    }

    /// Some of them have been processed.
    pub(crate) fn remove_waiting(&self, count: usize) {
        self.waiting.fetch_sub(count, Ordering::Relaxed);
    }

    /// Sends a command and waits for its result.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Worker<U>) -> T + Send + 'static,
    ) -> Result<T, Gone>
    where
        U: 'static,
    {
        let (reply, result) = sync_channel(1);
        let command: Command<U> = Box::new(move |worker| {
            let _ = reply.send(work(worker));
        });
        self.send(command)?;
        result.recv().map_err(|_| Gone)
    }

    /// Asks a question and waits for its answer: `answer` is called in one turn after the other, until it returns one.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        mut answer: impl FnMut(&mut Worker<U>, &Share<'_>) -> Option<T> + Send + 'static,
    ) -> Result<T, Gone>
    where
        U: 'static,
    {
        let (reply, result) = sync_channel(1);
        let question: Question<U> = Box::new(move |worker, share| match answer(worker, share) {
            Some(answer) => {
                let _ = reply.send(answer);
                true
            }
            None => false,
        });
        self.questions.send(question).map_err(|_| Gone)?;
        self.wake()?;
        result.recv().map_err(|_| Gone)
    }

    /// Sends a command, to be run between two batches.
    pub(crate) fn send(&self, command: Command<U>) -> Result<(), Gone> {
        self.commands.send(command).map_err(|_| Gone)?;
        self.wake()
    }

    fn wake(&self) -> Result<(), Gone> {
        rustix::io::write(&*self.wake, &1u64.to_ne_bytes()).map(drop).map_err(|_| Gone)
    }
}

impl<U> Clone for Mailbox<U> {
    fn clone(&self) -> Self {
        Mailbox {
            commands: self.commands.clone(),
            questions: self.questions.clone(),
            wake: Arc::clone(&self.wake),
            waiting: Arc::clone(&self.waiting),
        }
    }
}

/// The worker's thread has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gone;

impl std::fmt::Display for Gone {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the worker has ended, or failed at this: see the log")
    }
}

impl std::error::Error for Gone {}

/// A device without a guest.
fn unplugged() -> io::Result<Device> {
    Ok(Box::new(Unplugged::new()?))
}

/// Ends the process at once.
fn end(why: &str) -> ! {
    tracing::error!(why, "the daemon ends, so that the service manager restarts it");
    std::process::abort()
}

/// The events for which a device is watched.
fn interest(device: &Device) -> epoll::EventFlags {
    let edge = if device.is_edge_triggered() { epoll::EventFlags::ET } else { epoll::EventFlags::empty() };
    epoll::EventFlags::IN | edge
}
