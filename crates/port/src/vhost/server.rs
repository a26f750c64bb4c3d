//! A vhost-user port's socket and the thread that answers on it.

use std::fs::Permissions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::comeback::Comeback;
use super::device::VhostDevice;
use super::messages::Failure;
use super::{Mode, QueueOwner, VhostConfig, record};
use crate::panics;

/// Who may connect: the owner and the group. Without this the umask decides, and a careful one leaves the group nothing.
const SOCKET_MODE: u32 = 0o660;
/// How long to wait before the front-end's socket is tried again.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };

/// A vhost-user port that serves its socket until it is dropped.
#[derive(Debug)]
pub struct VhostPort {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    /// The socket, if it was made here.
    socket: Option<PathBuf>,
    record: Option<(PathBuf, u16)>,
}

/// What the thread and its owner share.
#[derive(Debug)]
struct Shared {
    wake: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    stopping: bool,
    /// The next daemon needs the record.
    keeps_record: bool,
    /// The connection being served.
    connection: Option<UnixStream>,
}

/// Why a vhost-user port could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum VhostError {
    /// Something else is there.
    #[error("vhost-user socket {path}: {problem}")]
    Path {
        /// As configured.
        path: PathBuf,
        /// What is wrong.
        problem: &'static str,
    },
    /// The kernel made no such socket.
    #[error("vhost-user socket {path}: cannot listen: {source}; its directory must exist and be writable")]
    Listen {
        /// As configured.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// No thread or descriptor could be had.
    #[error("cannot start the thread of a vhost-user port: {0}")]
    Thread(#[from] io::Error),
}

impl VhostPort {
    /// Opens the socket, or starts looking for it, and serves whoever is at its other end, one after the other.
    ///
    /// # Errors
    /// See [`VhostError`].
    pub fn open(config: VhostConfig, owner: Box<dyn QueueOwner>) -> Result<VhostPort, VhostError> {
        let listener = match config.mode {
            Mode::Server => Some(listen(&config.socket)?),
            Mode::Client => None,
        };
        let (socket, record) = (
            listener.is_some().then(|| config.socket.clone()),
            config.record.clone().map(|path| (path, config.queues)),
        );
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?;
        let shared = Arc::new(Shared { wake, state: Mutex::default() });
        let theirs = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("vhost-user".into()).spawn(move || match listener {
            Some(listener) => theirs.serve(&config, owner, || theirs.accept(&listener)),
            None => theirs.serve(&config, owner, || theirs.connect(&config.socket)),
        })?;
        Ok(VhostPort { shared, thread: Some(thread), socket, record })
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
        if let Some(connection) = &state.connection {
            let _ = connection.shutdown(std::net::Shutdown::Both);
        }
        drop(state);
        let _ = rustix::io::write(&self.shared.wake, &1u64.to_ne_bytes());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        if let Some(path) = &self.socket {
            let _ = std::fs::remove_file(path);
        }
        if let Some((path, queues)) = self.record.as_ref().filter(|_| !self.shared.state().keeps_record) {
            record::remove(path, *queues);
        }
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves connections until the port is dropped.
    fn serve(&self, config: &VhostConfig, owner: Box<dyn QueueOwner>, mut next: impl FnMut() -> Option<UnixStream>) {
        let mut device = VhostDevice::new(config.clone(), owner);
        let mut comeback = Comeback::default();
        loop {
            self.wait_until(comeback.next(Instant::now()));
            let stream = match panics::contain(&mut next) {
                Ok(Some(stream)) => stream,
                Ok(None) => break,
                Err(panic) => {
                    tracing::error!(port = config.name, %panic, "waiting for a front-end has failed; it is tried again");
                    comeback.fault(Instant::now());
                    continue;
                }
            };
            let Ok(connection) = stream.try_clone() else { continue };
            {
                let mut state = self.state();
                if state.stopping {
                    break;
                }
                state.connection = Some(connection);
            }
            tracing::info!(port = config.name, "a vhost-user front-end has connected");
            let end = panics::contain(|| {
                device.meet(&stream);
                loop {
                    if let Err(end) = device.serve(&stream) {
                        return end;
                    }
                }
            });
            let faulted = end.is_err() || device.has_faulted();
            match &end {
                Ok(_) if faulted => {
                    tracing::error!(port = config.name, "the front-end is disconnected after a fault in its queue");
                }
                Ok(Failure::Closed) => tracing::info!(port = config.name, "the front-end has gone"),
                Ok(error) => tracing::warn!(port = config.name, %error, "the front-end is disconnected"),
                Err(panic) => {
                    tracing::error!(port = config.name, %panic, "a panic at a message: the front-end is disconnected")
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
            let reset = end.map(drop).and_then(|()| panics::contain(|| device.reset()));
            if let Err(panic) = reset {
                device = device.rebuild(&panic);
            }
            // Only now: a front-end that learns of the end must not find the old device.
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }

    /// Waits for that moment, or for the end.
    fn wait_until(&self, at: Option<Instant>) {
        while let Some(left) =
            at.and_then(|at| at.checked_duration_since(Instant::now())).filter(|left| !left.is_zero())
        {
            if self.state().stopping {
                return;
            }
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
            let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&timeout));
        }
    }

    /// The next front-end that connects; `None` at the end.
    fn accept(&self, listener: &UnixListener) -> Option<UnixStream> {
        loop {
            let mut fds = [PollFd::new(listener, PollFlags::IN), PollFd::new(&self.wake, PollFlags::IN)];
            let _ = poll(&mut fds, None);
            if self.state().stopping {
                return None;
            }
            if let Ok((stream, _)) = listener.accept()
                && stream.set_nonblocking(false).is_ok()
            {
                return Some(stream);
            }
        }
    }

    /// A connection to a front-end that listens; `None` at the end.
    fn connect(&self, path: &Path) -> Option<UnixStream> {
        loop {
            if self.state().stopping {
                return None;
            }
            if let Ok(stream) = UnixStream::connect(path) {
                return Some(stream);
            }
            let _ = poll(&mut [PollFd::new(&self.wake, PollFlags::IN)], Some(&RETRY));
        }
    }
}

/// Makes the socket, in the place of one that nobody serves any more.
fn listen(path: &Path) -> Result<UnixListener, VhostError> {
    let bad = |problem| VhostError::Path { path: path.to_owned(), problem };
    let failed = |source| VhostError::Listen { path: path.to_owned(), source };
    if let Ok(there) = std::fs::symlink_metadata(path) {
        if !there.file_type().is_socket() {
            return Err(bad("something that is no socket is there; remove it or correct port.socket"));
        }
        if UnixStream::connect(path).is_ok() {
            return Err(bad("somebody else listens there; stop it or correct port.socket"));
        }
        std::fs::remove_file(path).map_err(failed)?;
    }
    let listener = UnixListener::bind(path).map_err(failed)?;
    std::fs::set_permissions(path, Permissions::from_mode(SOCKET_MODE)).map_err(failed)?;
    listener.set_nonblocking(true).map_err(failed)?;
    Ok(listener)
}
