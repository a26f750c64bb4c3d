//! A vhost-user port and the thread that serves its socket.

mod hand_over;
#[cfg(test)]
mod hand_over_tests;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};

use super::comeback::Comeback;
use super::counters::FrontEndCounters;
use super::device::VhostDevice;
use super::helper::{Foreign, Helper};
use super::messages::Failure;
use super::owner::Owner;
use super::pace::Pace;
use super::socket::{self, Listening};
use super::{Mode, QueueOwner, VhostConfig, record};
use crate::panics;
use hand_over::Command;
pub use hand_over::HandedPort;

/// Retry interval for the front-end's socket.
const RETRY: Duration = Duration::from_millis(200);
/// How long the thread may take to end. It takes longer only if one of its system calls hangs.
const PATIENCE: Duration = Duration::from_secs(10);
/// Cost of a connection, in messages.
const CONNECTION: u32 = 50;
/// Maximum descriptors of a port that wait to be closed. Above it, no further front-end is served.
const MAX_CLOSING: usize = 512;

/// A vhost-user port that serves its socket until it is dropped.
#[derive(Debug)]
pub struct VhostPort {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The socket, if this side created it.
    socket: Option<Listening>,
    record: Option<(PathBuf, u16)>,
}

/// State shared by the thread and its port.
#[derive(Debug)]
struct Shared {
    /// Readable when the port stops.
    wake: OwnedFd,
    /// Readable when there are commands.
    commands: OwnedFd,
    command_added: Condvar,
    helper: Helper,
    owner: Owner,
    counters: FrontEndCounters,
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Debug, Default)]
struct State {
    stopping: bool,
    /// Whether the thread has ended.
    ended: bool,
    /// Whether the next daemon needs the record.
    keeps_record: bool,
    /// The connection being served.
    connection: Option<Arc<Foreign>>,
    /// Another process has the socket and the connection, too: dropping the port leaves both alone.
    is_shared: bool,
    /// The thread handles no messages and connections, but waits for commands.
    is_waiting: bool,
    commands: VecDeque<Command>,
}

/// What the thread waits for.
enum Next {
    Stream(Arc<Foreign>),
    /// There are commands.
    Commands,
    /// The port stops.
    Stop,
}

/// Why a vhost-user port cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum VhostError {
    /// Something else is at the path.
    #[error("vhost-user socket {path}: {problem}")]
    Path {
        /// As configured.
        path: PathBuf,
        /// What is wrong.
        problem: &'static str,
    },
    /// The kernel did not create the socket.
    #[error("vhost-user socket {path}: cannot listen: {source}; its directory must exist and be writable")]
    Listen {
        /// As configured.
        path: PathBuf,
        /// The kernel's error.
        source: io::Error,
    },
    /// No thread or file descriptor was available.
    #[error("cannot start the thread of a vhost-user port: {0}")]
    Thread(#[from] io::Error),
    /// The state of another process's port is not valid for this one.
    #[error("the handed-over state of a vhost-user port is invalid: {0}")]
    Handed(&'static str),
}

impl VhostPort {
    /// Opens the socket, or starts connecting to it, and serves front-ends one after the other.
    ///
    /// # Errors
    /// See [`VhostError`].
    pub fn open(config: VhostConfig, owner: Box<dyn QueueOwner>) -> Result<VhostPort, VhostError> {
        let listener = match config.mode {
            Mode::Server => Some(socket::listen(&config.socket)?),
            Mode::Client => None,
        };
        let (listener, socket) = listener.unzip();
        let shared = Arc::new(Shared::new(owner)?);
        // Closing it also closes connections that wait to be accepted, and their data.
        let listener = listener.map(|listener| Foreign::new(listener, &shared.helper));
        VhostPort::run(shared, config, listener, socket, None)
    }

    /// Starts the thread. `adopted`: the device of another process, and its connection.
    fn run(
        shared: Arc<Shared>,
        config: VhostConfig,
        listener: Option<Foreign>,
        socket: Option<Listening>,
        adopted: Option<(VhostDevice, Option<Arc<Foreign>>)>,
    ) -> Result<VhostPort, VhostError> {
        let record = config.record.clone().map(|path| (path, config.queues));
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("vhost-user".into()).spawn(move || {
            let _end = End(&theirs);
            theirs.serve(&config, listener.as_ref(), adopted);
        })?;
        Ok(VhostPort { shared, thread: Some(thread), socket, record })
    }

    /// Counters of its front-ends since it was opened, by name; `waiting_descriptors` are yet to be closed.
    pub fn counters(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let waiting = ("waiting_descriptors", self.shared.helper.waiting() as u64);
        self.shared.counters.values().into_iter().chain([waiting])
    }

    /// Whether a front-end is connected.
    pub fn is_connected(&self) -> bool {
        self.shared.state().connection.is_some()
    }
}

impl Drop for VhostPort {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.stopping = true;
        let is_shared = state.is_shared;
        if let Some(connection) = state.connection.as_ref().filter(|_| !is_shared) {
            let _ = shutdown(connection, Shutdown::Both);
        }
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        self.shared.command_added.notify_all();
        let waited = self.shared.ended.wait_timeout_while(state, PATIENCE, |state| !state.ended);
        let (state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let (ended, keeps_record) = (state.ended, state.keeps_record);
        drop(state);
        match self.thread.take() {
            Some(thread) if ended => drop(thread.join()),
            _ => tracing::error!("the thread of a vhost-user port hangs in a system call and is abandoned"),
        }
        self.shared.owner.retire(ended);
        if is_shared {
            return;
        }
        if let Some(socket) = &self.socket {
            socket.remove();
        }
        if let Some((path, queues)) = self.record.as_ref().filter(|_| ended && !keeps_record) {
            record::remove(path, *queues);
        }
    }
}

/// Signals the end of the thread, on any exit path.
struct End<'a>(&'a Shared);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.state().ended = true;
        self.0.ended.notify_all();
    }
}

impl Shared {
    fn new(owner: Box<dyn QueueOwner>) -> io::Result<Shared> {
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        Ok(Shared {
            wake: event()?,
            commands: event()?,
            command_added: Condvar::new(),
            helper: Helper::default(),
            owner: Owner::new(owner),
            counters: FrontEndCounters::default(),
            state: Mutex::default(),
            ended: Condvar::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves connections until the port is dropped, first the adopted one.
    fn serve(
        &self,
        config: &VhostConfig,
        listener: Option<&Foreign>,
        adopted: Option<(VhostDevice, Option<Arc<Foreign>>)>,
    ) {
        let new = || VhostDevice::new(config.clone(), self.owner.clone(), self.helper.clone());
        let (mut device, mut adopted) = adopted.unwrap_or_else(|| (new(), None));
        let mut pace = Pace::new(config.message_rate, Instant::now());
        let mut comeback = Comeback::default();
        loop {
            if adopted.is_none() {
                self.wait_until(comeback.next(Instant::now()));
                self.run_commands(&mut device, listener, None);
            }
            let is_adopted = adopted.is_some();
            let next = match adopted.take() {
                Some(stream) => Ok(Next::Stream(stream)),
                None => panics::contain(|| match listener {
                    Some(listener) => self.accept(listener),
                    None => self.connect(&config.socket),
                }),
            };
            let stream = match next {
                Ok(Next::Stream(stream)) => stream,
                Ok(Next::Commands) => continue,
                Ok(Next::Stop) => break,
                Err(panic) => {
                    tracing::error!(port = config.name, %panic, "waiting for a front-end failed; retrying");
                    comeback.fault(Instant::now());
                    continue;
                }
            };
            {
                let mut state = self.state();
                if state.stopping {
                    break;
                }
                state.connection = Some(Arc::clone(&stream));
            }
            if !is_adopted {
                self.counters.connections.fetch_add(1, Ordering::Relaxed);
                tracing::info!(port = config.name, "a vhost-user front-end connected");
            }
            let end = panics::contain(|| {
                if !is_adopted {
                    device.meet(&stream);
                }
                loop {
                    while self.has_commands(&stream) && !self.state().stopping {
                        self.run_commands(&mut device, listener, Some(&stream));
                    }
                    if self.state().stopping {
                        return Failure::Closed;
                    }
                    let served = device.serve(&stream);
                    let is_message = matches!(served, Ok(()) | Err(Failure::Message { .. }));
                    self.counters.messages.fetch_add(is_message.into(), Ordering::Relaxed);
                    if let Err(end) = served {
                        let is_refused = matches!(end, Failure::Message { .. });
                        self.counters.refused_messages.fetch_add(is_refused.into(), Ordering::Relaxed);
                        return end;
                    }
                    if !self.wait(pace.spend(device.take_cost(), Instant::now())) {
                        return Failure::Closed;
                    }
                }
            });
            let faulted = end.is_err() || device.has_faulted();
            match &end {
                Ok(_) if faulted => {
                    tracing::error!(port = config.name, "disconnecting the front-end after a fault in its queue");
                }
                Ok(Failure::Closed) => tracing::info!(port = config.name, "the front-end disconnected"),
                Ok(error) => tracing::warn!(port = config.name, %error, "disconnecting the front-end"),
                Err(panic) => {
                    tracing::error!(port = config.name, %panic, "message handler panic; disconnecting the front-end")
                }
            }
            {
                let mut state = self.state();
                state.connection = None;
                state.keeps_record = state.stopping && device.needs_record();
            }
            if faulted {
                comeback.fault(Instant::now());
            }
            let is_shared = self.state().is_shared;
            let reset = end.map(drop).and_then(|()| {
                panics::contain(|| {
                    if is_shared {
                        device.leave();
                    }
                    device.reset();
                })
            });
            if let Err(panic) = reset {
                device = device.rebuild(&panic);
            }
            // Only now: a front-end that sees the disconnection must not find the old device. Closing its descriptors
            // may take a while.
            if !is_shared {
                let _ = shutdown(&stream, Shutdown::Both);
            }
            drop(stream);
            let mut wait = pace.spend(device.take_cost() + CONNECTION, Instant::now());
            while self.wait(wait) && self.helper.waiting() > MAX_CLOSING {
                wait = RETRY;
            }
        }
    }

    /// Waits until then, or until the port stops.
    fn wait_until(&self, at: Option<Instant>) {
        while let Some(left) = at.and_then(|at| at.checked_duration_since(Instant::now()))
            && !left.is_zero()
            && self.wait(left)
        {}
    }

    /// Waits this long; `false`: the port stops.
    fn wait(&self, time: Duration) -> bool {
        if !time.is_zero() {
            let time = Timespec::try_from(time).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
            let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&time));
        }
        !self.state().stopping
    }

    /// Waits for a message, for commands, or for the end of the port; returns whether there are commands.
    fn has_commands(&self, stream: &Foreign) -> bool {
        if self.state().is_waiting {
            return true;
        }
        let fds = [stream.as_fd(), self.commands.as_fd(), self.wake.as_fd()];
        let mut fds = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
        let _ = poll(&mut fds, None);
        !fds[1].revents().is_empty()
    }

    /// The next front-end that connects.
    fn accept(&self, listener: &Foreign) -> Next {
        loop {
            let [of_listener, wake, commands] = [listener.as_fd(), self.wake.as_fd(), self.commands.as_fd()];
            let mut fds = [of_listener, wake, commands].map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN));
            let _ = poll(&mut fds, None);
            if self.state().stopping {
                return Next::Stop;
            }
            if !fds[2].revents().is_empty() {
                return Next::Commands;
            }
            if let Ok(stream) = accept_with(listener, SocketFlags::CLOEXEC) {
                return Next::Stream(Arc::new(Foreign::new(stream, &self.helper)));
            }
        }
    }

    /// A connection to a listening front-end.
    fn connect(&self, path: &Path) -> Next {
        if self.state().stopping {
            return Next::Stop;
        }
        if let Ok(stream) = socket::dial(path) {
            return Next::Stream(Arc::new(Foreign::new(stream, &self.helper)));
        }
        let retry = Timespec::try_from(RETRY).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        let mut fds = [PollFd::new(&self.wake, PollFlags::IN), PollFd::new(&self.commands, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&retry));
        // Also without any: the caller tries again.
        Next::Commands
    }
}
