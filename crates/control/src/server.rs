//! The daemon's end of the API: HTTP/1.1 with JSON over a Unix socket, on a thread of its own.
//!
//! | request | answer |
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
//! | `POST /v1/upgrade` with an [`UpgradeSpec`], from root or the daemon's own user | the [`UpgradeReport`] |
//! | `GET /v1/sessions` with a [`SessionFilter`] | a list of [`Session`] |
//! | `POST /v1/sessions/export` with a [`SessionsQuery`] | the [`PortSessions`] |
//! | `POST /v1/sessions/import` with these | the [`SessionsReport`] |
//! | `POST /v1/trace` with a [`TraceSpec`] | the [`Trace`] |
//! | `POST /v1/capture` with a [`CaptureSpec`] | a pcapng file, as long as the capture runs |
//!
//! What is counted can also be had over TCP, by `GET /metrics` in the text format of Prometheus ([`serve_with_metrics`]).
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
    LoadBalancerStatus, MirrorStatus, NatStatus, ObjectList, ObjectsDigest, ObjectsQuery, Path as ApiPath,
    PortSessions, PortStatus, ReloadReport, Route, Sample, Session, SessionFilter, SessionsQuery, SessionsReport,
    Stats, Status, Trace, TraceSpec, UpgradeReport, UpgradeSpec,
};

pub use capture::capture_response;
pub use connections::Peer;

/// How long a stop waits for requests that are being answered.
const DRAIN: Duration = Duration::from_secs(2);
/// How long to wait after a panic of the API's thread, which may come again.
const RESTART: Duration = Duration::from_secs(1);

/// A list, page by page: each is made when it is asked for, and ends with the first error. Pages may be empty.
pub type Pages<T> = Box<dyn Iterator<Item = Result<Vec<T>, ApiError>> + Send>;

/// A list of one page.
pub fn one_page<T: Send + 'static>(page: Vec<T>) -> Pages<T> {
    Box::new(std::iter::once(Ok(page)))
}

/// What answers the requests. Calls come from the server's threads, several at a time; they may block for a while.
pub trait Backend: Send + Sync + 'static {
    /// The daemon as a whole.
    fn status(&self) -> Result<Status, ApiError>;
    /// All ports.
    fn ports(&self) -> Result<Pages<PortStatus>, ApiError>;
    /// All routes.
    fn routes(&self) -> Result<Pages<Route>, ApiError>;
    /// All load balancers.
    fn load_balancers(&self) -> Result<Vec<LoadBalancerStatus>, ApiError>;
    /// All addresses outside.
    fn nat(&self) -> Result<Vec<NatStatus>, ApiError>;
    /// All mirrors.
    fn mirrors(&self) -> Result<Vec<MirrorStatus>, ApiError>;
    /// What is logged of conversations, and what became of the records.
    fn flow_log(&self) -> Result<FlowLogStatus, ApiError>;
    /// All reliable connections.
    fn conns(&self) -> Result<Pages<Conn>, ApiError>;
    /// All paths to all peers.
    fn paths(&self) -> Result<Pages<ApiPath>, ApiError>;
    /// Takes a path out of use, or back; its names are not looked up yet.
    /// [`ErrorKind::Conflict`](crate::api::ErrorKind::Conflict) if no path would be left.
    fn drain_path(&self, spec: DrainSpec, drained: bool) -> Result<DrainReport, ApiError>;
    /// All counters.
    fn stats(&self) -> Result<Stats, ApiError>;
    /// All counters and gauges, each with where it was counted.
    fn samples(&self) -> Result<Pages<Sample>, ApiError>;
    /// All faults in force.
    fn faults(&self) -> Result<Vec<FaultEntry>, ApiError>;
    /// Injects a fault; its values are in range, its names are not looked up yet.
    fn add_fault(&self, spec: FaultSpec) -> Result<FaultEntry, ApiError>;
    /// Removes one fault; [`ErrorKind::NotFound`](crate::api::ErrorKind::NotFound) if there is no such.
    fn remove_fault(&self, id: u64) -> Result<(), ApiError>;
    /// Removes all faults; how many there were.
    fn clear_faults(&self) -> Result<u64, ApiError>;
    /// Reads the configuration again and takes it over.
    fn reload(&self) -> Result<ReloadReport, ApiError>;
    /// Changes objects: all that the batch says, or nothing.
    fn apply(&self, spec: ApplySpec) -> Result<ApplyReport, ApiError>;
    /// The objects in force.
    fn objects(&self, query: ObjectsQuery) -> Result<ObjectList, ApiError>;
    /// Digests of them.
    fn object_digests(&self, query: ObjectsQuery) -> Result<Vec<ObjectsDigest>, ApiError>;
    /// Has another program go on with the daemon's work. When this returns without an error, that program answers requests from now on.
    fn upgrade(&self, _spec: UpgradeSpec) -> Result<UpgradeReport, ApiError> {
        Err(ApiError::bad_request("this daemon cannot be upgraded while it runs").hint("restart it"))
    }
    /// Sessions of security groups; names are not looked up yet.
    fn sessions(&self, _filter: SessionFilter) -> Result<Pages<Session>, ApiError> {
        Ok(one_page(Vec::new()))
    }
    /// A port's sessions, for the host to which its guest moves; its name is not looked up yet.
    fn export_sessions(&self, query: SessionsQuery) -> Result<PortSessions, ApiError> {
        Err(ApiError::not_found(format!("there is no port named {:?}", query.port)))
    }
    /// Goes on with the sessions that a port's guest had on another host.
    fn import_sessions(&self, sessions: PortSessions) -> Result<SessionsReport, ApiError> {
        Err(ApiError::not_found(format!("there is no port named {:?}", sessions.port)))
    }
    /// What would become of a packet; its description makes sense, its names are not looked up yet. Nothing changes.
    fn trace(&self, spec: TraceSpec) -> Result<Trace, ApiError>;
    /// Begins a capture; its values are in range, its names are not looked up yet. It ends when the stream is dropped.
    fn capture(&self, spec: CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError>;
}

/// A capture that runs.
pub trait CaptureStream: Send {
    /// What has come since the last call, which may be nothing; waits for a moment. `None`: it is over.
    fn next(&mut self) -> Option<Vec<u8>>;
}

/// Why the API could not be offered.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Somebody answers on the socket.
    #[error("another bifrostd is running: {0} is in use; stop that one, or set another [control].socket")]
    AlreadyRunning(PathBuf),
    /// Something that is not a socket is in the way.
    #[error("{0} exists but is not a socket; remove it, or set another [control].socket")]
    NotASocket(PathBuf),
    /// The system refused the address for metrics.
    #[error(
        "cannot listen on {address} for metrics: {source}; is [control].metrics an address of this host, and free?"
    )]
    Metrics {
        /// The address.
        address: SocketAddr,
        /// Why it failed.
        source: io::Error,
    },
    /// The system refused.
    #[error("{what} {path}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// On what.
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
    /// Another process answers on the socket: its file stays.
    is_left: Arc<AtomicBool>,
}

/// What requests come to.
#[derive(Debug)]
pub struct Listeners {
    /// The Unix socket.
    pub api: UnixListener,
    /// For metrics, if there is such an address.
    pub metrics: Option<TcpListener>,
}

impl Listeners {
    /// Copies of them, for another process that is to answer.
    ///
    /// # Errors
    /// The process has no more descriptors.
    pub fn try_clone(&self) -> io::Result<Listeners> {
        let metrics = self.metrics.as_ref().map(TcpListener::try_clone).transpose()?;
        Ok(Listeners { api: self.api.try_clone()?, metrics })
    }
}

/// Offers the API on the Unix socket `path` (mode 0660, its directory is made if need be). When this returns, requests
/// are taken. A socket that a dead daemon left is replaced; one that somebody answers on is an error.
pub fn serve(path: impl AsRef<Path>, backend: Arc<dyn Backend>) -> Result<ServerHandle, ServeError> {
    serve_with_metrics(path, None, backend)
}

/// [`serve`], and `GET /metrics` on a TCP address if there is one, for anyone who reaches it.
///
/// # Errors
/// As of [`serve`]; the address cannot be had.
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

/// [`serve_with_metrics`] on sockets of another process, which listens on `path` and is about to [leave](ServerHandle::leave).
///
/// # Errors
/// The socket at `path` is gone, or the system refused the operation.
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
        // Backend calls block; a few may at a time.
        .max_blocking_threads(4)
        .thread_name("api-call")
        .build()
        .map_err(failed("cannot start the API's runtime for"))?;
    let Listeners { api: listener, metrics } = listeners.try_clone().map_err(failed("cannot listen on"))?;
    let metrics = match metrics {
        Some(listener) => {
            let _inside = runtime.enter();
            Some(tokio::net::TcpListener::from_std(listener).map_err(failed("cannot offer metrics beside"))?)
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
            // A request that panics is answered with an error; this is for what is around requests.
            while catch_unwind(AssertUnwindSafe(|| {
                let copy = listener.try_clone().and_then(|listener| {
                    let _inside = runtime.enter();
                    tokio::net::UnixListener::from_std(listener)
                });
                match copy {
                    Ok(listener) => runtime.block_on(run(listener, Arc::clone(&backend), &mut stopped)),
                    Err(error) => tracing::error!(%error, "the API cannot listen"),
                }
            }))
            .is_err()
            {
                tracing::error!("the API's thread has panicked; it begins again");
                thread::sleep(RESTART);
            }
            // A backend call that hangs must not keep the daemon from leaving.
            runtime.shutdown_timeout(DRAIN);
            if !is_left_now.load(Ordering::Relaxed) {
                socket.remove();
            }
        })
        .map_err(failed("cannot start the API's thread for"))?;
    Ok(ServerHandle { stop: Some(stop), thread: Some(thread), socket: path.to_owned(), listeners, is_left })
}

/// Offers other requests than [`serve`]'s on a Unix socket, with the same bounds. Handlers have a [`Peer`] as an extension.
///
/// When it returns, clients can connect. The future serves them until `stopped`, and then removes the socket.
///
/// # Errors
/// As of [`serve`].
///
/// # Panics
/// It is called outside of a runtime of tokio.
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

impl ServerHandle {
    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// What requests come to.
    pub fn listeners(&self) -> &Listeners {
        &self.listeners
    }

    /// [`stop`](Self::stop), but the socket stays: another process answers on it.
    pub fn leave(mut self) {
        self.is_left.store(true, Ordering::Relaxed);
        self.finish();
    }

    /// Stops taking requests, finishes those being answered (for at most a few seconds), removes the socket.
    pub fn stop(mut self) {
        self.finish();
    }

    fn finish(&mut self) {
        if let Some(stop) = self.stop.take() {
            // The thread may have ended by itself; then there is nobody to tell.
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

async fn run(listener: tokio::net::UnixListener, backend: Arc<dyn Backend>, stopped: &mut oneshot::Receiver<()>) {
    let (tell, told) = oneshot::channel();
    let stopping = Arc::new(AtomicBool::new(false));
    let server = connections::run(listener, routes::router(backend, Arc::clone(&stopping)), told);
    tokio::pin!(server);
    tokio::select! {
        // It ends when it is told to.
        () = &mut server => return,
        _ = stopped => {}
    }
    stopping.store(true, Ordering::Relaxed);
    let _ = tell.send(());
    if tokio::time::timeout(DRAIN, server).await.is_err() {
        tracing::warn!("the API was stopped while a request was being answered");
    }
}
