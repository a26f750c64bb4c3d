//! The API server: HTTP/1.1 with JSON over a Unix socket, on its own thread.
//!
//! | request | response |
//! |---|---|
//! | `GET /v1/status` | [`Status`] |
//! | `GET /v1/ports`, `/v1/routes`, `/v1/conns`, `/v1/paths` | a list of [`PortStatus`], [`Route`], [`Conn`], [`Path`](ApiPath) |
//! | `GET /v1/load-balancers` | a list of [`LoadBalancerStatus`] |
//! | `GET /v1/nat` | a list of [`NatStatus`] |
//! | `GET /v1/mirrors` | a list of [`MirrorStatus`] |
//! | `POST /v1/paths/drain`, `/v1/paths/restore` with a [`DrainSpec`] | the [`DrainReport`] |
//! | `GET /v1/stats` | [`Stats`] |
//! | `GET /v1/samples` | a list of [`Sample`] |
//! | `GET /v1/drops` | [`Drops`](crate::api::Drops) |
//! | `GET /v1/faults` | a list of [`FaultEntry`] |
//! | `PUT /v1/faults` with a [`FaultSpec`] | the [`FaultEntry`] made |
//! | `DELETE /v1/faults`, `DELETE /v1/faults?id=3` | [`FaultCleared`](crate::api::FaultCleared) |
//! | `POST /v1/reload` | [`ReloadReport`] |
//! | `POST /v1/apply` with an [`ApplySpec`] | the [`ApplyReport`] |
//! | `GET /v1/objects` with an [`ObjectsQuery`] | an [`ObjectList`]; with `?digest` a list of [`ObjectsDigest`] |
//! | `GET /v1/learned` | a list of [`LearnedRoute`] |
//! | `GET /v1/learned/questions` with a [`QuestionsQuery`](crate::api::QuestionsQuery) | a list of [`RouteQuestion`], as soon as there is one |
//! | `POST /v1/learned` with a [`LearnSpec`] | the [`LearnReport`] |
//! | `POST /v1/upgrade` with an [`UpgradeSpec`], from root or the daemon's own user | the [`UpgradeReport`] |
//! | `GET /v1/sessions` with a [`SessionFilter`] | a list of [`Session`] |
//! | `POST /v1/sessions/export` with a [`SessionsQuery`] | the [`PortSessions`] |
//! | `POST /v1/sessions/import` with [`PortSessions`] | the [`SessionsReport`] |
//! | `POST /v1/trace` with a [`TraceSpec`] | the [`Trace`] |
//! | `POST /v1/capture` with a [`CaptureSpec`] | a pcapng file, streamed while the capture runs |
//!
//! Counters are also served over TCP, by `GET /metrics` in the text format of Prometheus ([`serve_with_metrics`]).
//!
//! Errors are `{"error": {"what", "where", "hint"}}` with a 4xx or 5xx status.

mod capture;
mod connections;
mod exposition;
mod failure;
mod list;
pub mod metrics;
mod routes;
mod socket;
pub mod web;

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use tokio::sync::oneshot;

use crate::api::{
    ApiError, ApplyReport, ApplySpec, CaptureSpec, Conn, DrainReport, DrainSpec, FaultEntry, FaultSpec, FlowLogStatus,
    LearnReport, LearnSpec, LearnedRoute, LoadBalancerStatus, MirrorStatus, NatStatus, ObjectList, ObjectsDigest,
    ObjectsQuery, Path as ApiPath, PortSessions, PortStatus, ReloadReport, Route, RouteQuestion, Sample, Session,
    SessionFilter, SessionsQuery, SessionsReport, Stats, Status, Trace, TraceSpec, UpgradeReport, UpgradeSpec,
};

pub use capture::{Continued, capture_response, continue_capture};
pub use connections::Peer;

/// How long a stop waits for requests in progress.
const DRAIN: Duration = Duration::from_secs(2);
/// The same if another process has taken over: only the answer to the request for that is still sent. Others cannot be
/// answered, and their clients repeat them.
const LEAVE: Duration = Duration::from_millis(500);
/// Delay before a restart after a panic of the API's thread, which may recur.
const RESTART: Duration = Duration::from_secs(1);

/// A list in pages, each built on demand. It ends with the first error. Pages may be empty.
pub type Pages<T> = Box<dyn Iterator<Item = Result<Vec<T>, ApiError>> + Send>;

/// A list of one page.
pub fn one_page<T: Send + 'static>(page: Vec<T>) -> Pages<T> {
    Box::new(std::iter::once(Ok(page)))
}

/// Answers requests. The server's threads call it concurrently; calls may block for a while.
pub trait Backend: Send + Sync + 'static {
    /// The daemon's status.
    fn status(&self) -> Result<Status, ApiError>;
    /// All ports.
    fn ports(&self) -> Result<Pages<PortStatus>, ApiError>;
    /// All routes.
    fn routes(&self) -> Result<Pages<Route>, ApiError>;
    /// All load balancers.
    fn load_balancers(&self) -> Result<Vec<LoadBalancerStatus>, ApiError>;
    /// All outside addresses.
    fn nat(&self) -> Result<Vec<NatStatus>, ApiError>;
    /// All mirrors.
    fn mirrors(&self) -> Result<Vec<MirrorStatus>, ApiError>;
    /// Status of the flow logs.
    fn flow_log(&self) -> Result<FlowLogStatus, ApiError>;
    /// All reliable connections.
    fn conns(&self) -> Result<Pages<Conn>, ApiError>;
    /// All paths to all peers.
    fn paths(&self) -> Result<Pages<ApiPath>, ApiError>;
    /// Drains or restores a path. Its names are not resolved yet.
    /// [`ErrorKind::Conflict`](crate::api::ErrorKind::Conflict) if no path would be left.
    fn drain_path(&self, spec: DrainSpec, drained: bool) -> Result<DrainReport, ApiError>;
    /// All counters.
    fn stats(&self) -> Result<Stats, ApiError>;
    /// All counters and gauges, each with its worker, port, peer or path.
    fn samples(&self) -> Result<Pages<Sample>, ApiError>;
    /// All active faults.
    fn faults(&self) -> Result<Vec<FaultEntry>, ApiError>;
    /// Injects a fault. Its values are in range; its names are not resolved yet.
    fn add_fault(&self, spec: FaultSpec) -> Result<FaultEntry, ApiError>;
    /// Removes one fault; [`ErrorKind::NotFound`](crate::api::ErrorKind::NotFound) if it does not exist.
    fn remove_fault(&self, id: u64) -> Result<(), ApiError>;
    /// Removes all faults; returns their number.
    fn clear_faults(&self) -> Result<u64, ApiError>;
    /// Reloads the configuration.
    fn reload(&self) -> Result<ReloadReport, ApiError>;
    /// Applies a batch of object changes: all of them, or none.
    fn apply(&self, spec: ApplySpec) -> Result<ApplyReport, ApiError>;
    /// The objects in force.
    fn objects(&self, query: ObjectsQuery) -> Result<ObjectList, ApiError>;
    /// Digests of the objects in force.
    fn object_digests(&self, query: ObjectsQuery) -> Result<Vec<ObjectsDigest>, ApiError>;
    /// All learned routes.
    fn learned(&self) -> Result<Pages<LearnedRoute>, ApiError> {
        Ok(one_page(Vec::new()))
    }
    /// Questions about routes, as soon as there is one, or none after a time. Each is returned once.
    fn route_questions(&self, _wait: Duration) -> Result<Vec<RouteQuestion>, ApiError> {
        Ok(Vec::new())
    }
    /// Takes over answers; their number is within its bound.
    fn learn(&self, _spec: LearnSpec) -> Result<LearnReport, ApiError> {
        Ok(LearnReport::default())
    }
    /// Replaces the running daemon by another program. After success, the other program answers requests.
    fn upgrade(&self, _spec: UpgradeSpec) -> Result<UpgradeReport, ApiError> {
        Err(ApiError::bad_request("this daemon cannot be upgraded while it runs").hint("restart it"))
    }
    /// Sessions of security groups. Names are not resolved yet.
    fn sessions(&self, _filter: SessionFilter) -> Result<Pages<Session>, ApiError> {
        Ok(one_page(Vec::new()))
    }
    /// Exports a port's sessions for the host to which its guest moves. Its name is not resolved yet.
    fn export_sessions(&self, query: SessionsQuery) -> Result<PortSessions, ApiError> {
        Err(ApiError::not_found(format!("there is no port named {:?}", query.port)))
    }
    /// Imports the sessions that a port's guest had on another host.
    fn import_sessions(&self, sessions: PortSessions) -> Result<SessionsReport, ApiError> {
        Err(ApiError::not_found(format!("there is no port named {:?}", sessions.port)))
    }
    /// Traces a described packet, without side effects. The description is valid; its names are not resolved yet.
    fn trace(&self, spec: TraceSpec) -> Result<Trace, ApiError>;
    /// Starts a capture, which ends when the stream is dropped. Its values are in range; its names are not resolved
    /// yet.
    fn capture(&self, spec: CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError>;
}

/// A running capture.
pub trait CaptureStream: Send {
    /// Waits a moment, and returns the data since the last call, possibly none. `None`: the capture has ended.
    fn next(&mut self) -> Option<Vec<u8>>;
    /// Whether another process is to continue this capture: what `next` has returned is the last data of this one.
    fn is_leaving(&self) -> bool {
        false
    }
    /// Leaves the capture to another process, with the connection to which everything has been written: an HTTP/1.1
    /// response in chunks, without the last one ([`continue_capture`]). `None`: the connection cannot be continued.
    fn leave(&mut self, _connection: Option<OwnedFd>) {}
}

/// Why the server could not start.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Another process listens on the socket.
    #[error("another bifrostd is running: {0} is in use; stop that one, or set another [control].socket")]
    AlreadyRunning(PathBuf),
    /// The path exists but is not a socket.
    #[error("{0} exists but is not a socket; remove it, or set another [control].socket")]
    NotASocket(PathBuf),
    /// Cannot listen on the address for metrics.
    #[error(
        "cannot listen on {address} for metrics: {source}; is [control].metrics an address of this host, and free?"
    )]
    Metrics {
        /// The address.
        address: SocketAddr,
        /// Why it failed.
        source: io::Error,
    },
    /// A system call failed.
    #[error("{what} {path}: {source}")]
    Io {
        /// The failed operation.
        what: &'static str,
        /// Its path.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// A running server. Dropping it stops it, as [`stop`](Self::stop) does.
#[derive(Debug)]
pub struct ServerHandle {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
    socket: PathBuf,
    listeners: Listeners,
    /// Another process listens on the socket: do not remove its file.
    is_left: Arc<AtomicBool>,
}

/// The sockets that accept requests.
#[derive(Debug)]
pub struct Listeners {
    /// The Unix socket.
    pub api: UnixListener,
    /// The TCP socket for metrics, if configured.
    pub metrics: Option<TcpListener>,
}

impl Listeners {
    /// Duplicates them for another process.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn try_clone(&self) -> io::Result<Listeners> {
        let metrics = self.metrics.as_ref().map(TcpListener::try_clone).transpose()?;
        Ok(Listeners { api: self.api.try_clone()?, metrics })
    }
}

/// Serves the API on the Unix socket `path` (mode 0660); creates its directory if necessary. Clients can connect when
/// this returns. A stale socket of a dead daemon is replaced; a socket on which a process listens is an error.
pub fn serve(path: impl AsRef<Path>, backend: Arc<dyn Backend>) -> Result<ServerHandle, ServeError> {
    serve_with_metrics(path, None, backend)
}

/// [`serve`], and `GET /metrics` on a TCP address if there is one, without access control.
///
/// # Errors
/// Those of [`serve`]; or the address is not available.
pub fn serve_with_metrics(
    path: impl AsRef<Path>,
    metrics: Option<SocketAddr>,
    backend: Arc<dyn Backend>,
) -> Result<ServerHandle, ServeError> {
    let path = path.as_ref();
    let (socket, api) = socket::bind(path)?;
    let bind = |address| metrics::bind(address).map_err(|source| ServeError::Metrics { address, source });
    let metrics = metrics.map(bind).transpose()?;
    answer(path, socket, Listeners { api, metrics }, backend)
}

/// [`serve_with_metrics`] on sockets of another process, which listens on `path` and is about to
/// [leave](ServerHandle::leave).
///
/// # Errors
/// The socket at `path` is gone, or a system call failed.
pub fn serve_handed(
    path: impl AsRef<Path>,
    listeners: Listeners,
    backend: Arc<dyn Backend>,
) -> Result<ServerHandle, ServeError> {
    let path = path.as_ref();
    answer(path, socket::adopt(path)?, listeners, backend)
}

fn answer(
    path: &Path,
    socket: socket::BoundSocket,
    listeners: Listeners,
    backend: Arc<dyn Backend>,
) -> Result<ServerHandle, ServeError> {
    let failed = |what| move |source| ServeError::Io { what, path: path.to_owned(), source };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .enable_time()
        // Backend calls block; a few may run at a time, and one that waits for questions.
        .max_blocking_threads(5)
        .thread_name("api-call")
        .build()
        .map_err(failed("cannot start the API's runtime for"))?;
    let Listeners { api: listener, metrics } = listeners.try_clone().map_err(failed("cannot listen on"))?;
    let metrics = match metrics {
        Some(listener) => {
            let _inside = runtime.enter();
            Some(tokio::net::TcpListener::from_std(listener).map_err(failed("cannot serve metrics beside"))?)
        }
        None => None,
    };
    let is_left = Arc::new(AtomicBool::new(false));
    let is_left_now = Arc::clone(&is_left);
    let (stop, stopped) = oneshot::channel();
    let thread = thread::Builder::new()
        .name("api".to_owned())
        .spawn(move || {
            if let Some(listener) = metrics {
                runtime.spawn(metrics::run(listener, metrics::of_backend(Arc::clone(&backend))));
            }
            let mut stopped = stopped;
            // A panic in a request handler is answered with an error. This catches panics outside of handlers.
            while catch_unwind(AssertUnwindSafe(|| {
                let copy = listener.try_clone().and_then(|listener| {
                    let _inside = runtime.enter();
                    tokio::net::UnixListener::from_std(listener)
                });
                match copy {
                    Ok(listener) => runtime.block_on(run(listener, Arc::clone(&backend), &mut stopped, &is_left_now)),
                    Err(error) => tracing::error!(%error, "the API cannot listen"),
                }
            }))
            .is_err()
            {
                tracing::error!("the API's thread panicked and restarts");
                thread::sleep(RESTART);
            }
            if is_left_now.load(Ordering::Relaxed) {
                runtime.shutdown_background();
            } else {
                // A backend call that hangs must not keep the daemon from exiting.
                runtime.shutdown_timeout(DRAIN);
                socket.remove();
            }
        })
        .map_err(failed("cannot start the API's thread for"))?;
    Ok(ServerHandle { stop: Some(stop), thread: Some(thread), socket: path.to_owned(), listeners, is_left })
}

/// Serves another API on a Unix socket, with the bounds of [`serve`]. Handlers get a [`Peer`] as an extension.
///
/// Clients can connect when this returns. The future serves them until `stopped`, and then removes the socket.
///
/// # Errors
/// Those of [`serve`].
///
/// # Panics
/// When called outside of a tokio runtime.
pub fn serve_router(
    path: &Path,
    router: axum::Router,
    most_bytes: usize,
    stopped: oneshot::Receiver<()>,
) -> Result<impl Future<Output = ()> + Send + use<>, ServeError> {
    let (socket, listener) = socket::bind(path)?;
    let listener = tokio::net::UnixListener::from_std(listener);
    let listener = listener.map_err(|source| ServeError::Io { what: "cannot listen on", path: path.into(), source })?;
    let body = move |request, next| connections::whole_body(request, next, most_bytes);
    Ok(async move {
        connections::run(listener, router.layer(axum::middleware::from_fn(body)), stopped).await;
        socket.remove();
    })
}

/// Serves an API on one connection that somebody else has accepted, such as one of TLS: with the bounds of [`serve`] for the time that
/// requests and the connection may take, and of `most_bytes` for the body of a request.
pub async fn serve_connection<S>(stream: S, router: axum::Router, most_bytes: usize)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    let body = move |request, next| connections::whole_body(request, next, most_bytes);
    connections::one(stream, router.layer(axum::middleware::from_fn(body))).await;
}

impl ServerHandle {
    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// The sockets that accept requests.
    pub fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// [`stop`](Self::stop) without removing the socket, on which another process listens. Requests in progress that
    /// are not answered at once end without an answer.
    pub fn leave(mut self) {
        self.is_left.store(true, Ordering::Relaxed);
        self.finish();
    }

    /// Stops accepting requests, finishes those in progress (for at most a few seconds), and removes the socket.
    pub fn stop(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        if let Some(stop) = self.stop.take() {
            // Fails if the thread has already ended.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the API's thread panicked");
        }
    }
}

impl Drop for ServerHandle {
    fn drop(&mut self) {
        self.finish();
    }
}

async fn run(
    listener: tokio::net::UnixListener,
    backend: Arc<dyn Backend>,
    stopped: &mut oneshot::Receiver<()>,
    is_left: &AtomicBool,
) {
    let (stop_server, server_stopped) = oneshot::channel();
    let stopping = Arc::new(AtomicBool::new(false));
    let server = connections::run(listener, routes::router(backend, Arc::clone(&stopping)), server_stopped);
    tokio::pin!(server);
    tokio::select! {
        () = &mut server => return,
        _ = stopped => {}
    }
    stopping.store(true, Ordering::Relaxed);
    let _ = stop_server.send(());
    let is_left = is_left.load(Ordering::Relaxed);
    let drain = if is_left { LEAVE } else { DRAIN };
    if tokio::time::timeout(drain, server).await.is_err() && !is_left {
        tracing::warn!("the API was stopped while a request was in progress");
    }
}
