//! A blocking client of the API, for programs and tests.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::UnixStream;
use tokio::runtime::Runtime;

use crate::api::{
    ApiError, ApplyReport, ApplySpec, CaptureSpec, Conn, DrainReport, DrainSpec, Drops, ErrorBody, FaultCleared,
    FaultEntry, FaultSpec, FlowLogStatus, GatewayPod, GatewayTraceSpec, LearnReport, LearnSpec, LearnedRoute,
    LoadBalancerStatus, MirrorStatus, NatStatus, ObjectList, ObjectsDigest, ObjectsQuery, Path as ApiPath, Pipeline,
    PipelineCommand, PodCommand, PortSessions, PortStatus, ReloadReport, Route, RouteQuestion, Sample, Session,
    SessionFilter, SessionsQuery, SessionsReport, Stats, Status, Trace, TraceSpec, UpgradeReport, UpgradeSpec,
};

/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of a reload.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a service manager may take to restart a daemon that has ended during an upgrade.
const RESTART: Duration = Duration::from_secs(1);
/// Timeout of a streamed response beyond the requested duration.
const STREAM_SLACK: Duration = Duration::from_secs(15);
/// Largest response, bytes: some hundred thousand connections.
const MAX_BODY: usize = 256 << 20;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// No process listens on the socket.
    #[error("bifrostd is not running: no process listens on {}", .0.display())]
    NotRunning(PathBuf),
    /// The socket exists, but this user may not connect to it.
    #[error("not allowed to connect to {}; run as root or as a member of the socket's group", .0.display())]
    NotAllowed(PathBuf),
    /// The daemon refused the request.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// The request timed out.
    #[error("bifrostd did not answer on {} within {} s", path.display(), after.as_secs())]
    Timeout {
        /// The socket.
        path: PathBuf,
        /// The timeout.
        after: Duration,
    },
    /// The daemon closed the connection without an answer.
    #[error("bifrostd closed the connection to {} without an answer; was it stopped or upgraded?", .0.display())]
    Closed(PathBuf),
    /// The result could not be written.
    #[error("cannot write the result: {0}")]
    Output(io::Error),
    /// This release cannot parse the response.
    #[error("cannot parse bifrostd's response: {0}; do bifrostctl and bifrostd have the same version?")]
    Protocol(String),
    /// A system call failed.
    #[error("cannot communicate with {}: {source}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// A client of one daemon. It connects for every request, so that the daemon may restart in between.
/// Its calls block; do not call them inside an asynchronous runtime.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    /// None: connects to the socket.
    connector: Option<Box<dyn Connect>>,
    runtime: Runtime,
}

/// A connection to a daemon that is not on this machine.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

/// A connection that is being made.
pub type Connecting<'a> = Pin<Box<dyn Future<Output = io::Result<Box<dyn Stream>>> + Send + 'a>>;

/// Connects to a daemon otherwise than by a Unix socket.
pub trait Connect: std::fmt::Debug + Send + Sync {
    /// One connection.
    fn connect(&self) -> Connecting<'_>;
}

impl Client {
    /// A client of the daemon on this socket. Does not connect yet.
    pub fn new(socket: impl AsRef<Path>) -> Result<Client, ClientError> {
        let socket = socket.as_ref().to_owned();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|source| ClientError::Io { path: socket.clone(), source })?;
        Ok(Client { socket, connector: None, runtime })
    }

    /// A client of a daemon that is reached otherwise; errors name it by `name`. Does not connect yet.
    ///
    /// # Errors
    /// The process is out of file descriptors.
    pub fn over(name: impl AsRef<Path>, connector: Box<dyn Connect>) -> Result<Client, ClientError> {
        Ok(Client { connector: Some(connector), ..Client::new(name)? })
    }

    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Sends a GET request to a daemon with another API.
    pub fn get<T: DeserializeOwned>(&self, target: &str, after: Duration) -> Result<T, ClientError> {
        self.request(Method::GET, target, None::<&()>, after)
    }

    /// Sends a POST request to a daemon with another API.
    pub fn post<T: DeserializeOwned>(
        &self,
        target: &str,
        body: &impl Serialize,
        after: Duration,
    ) -> Result<T, ClientError> {
        self.request(Method::POST, target, Some(body), after)
    }

    /// The daemon's status.
    pub fn status(&self) -> Result<Status, ClientError> {
        self.fetch("/v1/status")
    }

    /// All ports.
    pub fn ports(&self) -> Result<Vec<PortStatus>, ClientError> {
        self.fetch("/v1/ports")
    }

    /// All routes.
    pub fn routes(&self) -> Result<Vec<Route>, ClientError> {
        self.fetch("/v1/routes")
    }

    /// All load balancers.
    pub fn load_balancers(&self) -> Result<Vec<LoadBalancerStatus>, ClientError> {
        self.fetch("/v1/load-balancers")
    }

    /// All outside addresses.
    pub fn nat(&self) -> Result<Vec<NatStatus>, ClientError> {
        self.fetch("/v1/nat")
    }

    /// All mirrors.
    pub fn mirrors(&self) -> Result<Vec<MirrorStatus>, ClientError> {
        self.fetch("/v1/mirrors")
    }

    /// Status of the flow logs.
    pub fn flow_log(&self) -> Result<FlowLogStatus, ClientError> {
        self.fetch("/v1/flow-log")
    }

    /// All reliable connections.
    pub fn conns(&self) -> Result<Vec<Conn>, ClientError> {
        self.fetch("/v1/conns")
    }

    /// All paths to all peers.
    pub fn paths(&self) -> Result<Vec<ApiPath>, ClientError> {
        self.fetch("/v1/paths")
    }

    /// Drains a path (`drained`), or restores it.
    pub fn drain_path(&self, spec: &DrainSpec, drained: bool) -> Result<DrainReport, ClientError> {
        let target = if drained { "/v1/paths/drain" } else { "/v1/paths/restore" };
        self.request(Method::POST, target, Some(spec), TIMEOUT)
    }

    /// All counters.
    pub fn stats(&self) -> Result<Stats, ClientError> {
        self.fetch("/v1/stats")
    }

    /// All counters and gauges, each with its worker, port, peer or path.
    pub fn samples(&self) -> Result<Vec<Sample>, ClientError> {
        self.fetch("/v1/samples")
    }

    /// Drop counters that are not 0, with explanations.
    pub fn drops(&self) -> Result<Drops, ClientError> {
        self.fetch("/v1/drops")
    }

    /// All active faults.
    pub fn faults(&self) -> Result<Vec<FaultEntry>, ClientError> {
        self.fetch("/v1/faults")
    }

    /// Injects a fault.
    pub fn add_fault(&self, spec: &FaultSpec) -> Result<FaultEntry, ClientError> {
        self.request(Method::PUT, "/v1/faults", Some(spec), TIMEOUT)
    }

    /// Removes one fault.
    pub fn remove_fault(&self, id: u64) -> Result<FaultCleared, ClientError> {
        self.request(Method::DELETE, &format!("/v1/faults?id={id}"), None::<&()>, TIMEOUT)
    }

    /// Removes all faults.
    pub fn clear_faults(&self) -> Result<FaultCleared, ClientError> {
        self.request(Method::DELETE, "/v1/faults", None::<&()>, TIMEOUT)
    }

    /// Makes the daemon reload its configuration.
    pub fn reload(&self) -> Result<ReloadReport, ClientError> {
        self.request(Method::POST, "/v1/reload", None::<&()>, RELOAD_TIMEOUT)
    }

    /// Sessions of security groups.
    pub fn sessions(&self, filter: &SessionFilter) -> Result<Vec<Session>, ClientError> {
        self.fetch(&with_query("/v1/sessions", filter.pairs()))
    }

    /// Exports a port's sessions for the host to which its guest moves.
    pub fn export_sessions(&self, port: &str) -> Result<PortSessions, ClientError> {
        let query = SessionsQuery { port: port.to_owned() };
        self.request(Method::POST, "/v1/sessions/export", Some(&query), RELOAD_TIMEOUT)
    }

    /// Imports the sessions that a port's guest had on another host.
    pub fn import_sessions(&self, sessions: &PortSessions) -> Result<SessionsReport, ClientError> {
        self.request(Method::POST, "/v1/sessions/import", Some(sessions), RELOAD_TIMEOUT)
    }

    /// Replaces the running daemon by another program; returns once the new one answers.
    ///
    /// # Errors
    /// The upgrade failed and the running daemon continues, or the new one does not answer.
    pub fn upgrade(&self, spec: &UpgradeSpec) -> Result<UpgradeReport, ClientError> {
        let report: UpgradeReport = self.request(Method::POST, "/v1/upgrade", Some(spec), RELOAD_TIMEOUT)?;
        let began = Instant::now();
        loop {
            let patience = match self.status() {
                Ok(status) if status.pid == report.pid => return Ok(report),
                // The new daemon has the listening socket, so it has ended. A service manager may restart it.
                Err(ClientError::NotRunning(_)) => RESTART,
                // The old daemon still answers requests that it accepted before.
                _ => TIMEOUT,
            };
            if began.elapsed() >= patience {
                return self.status().map(|_| report);
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Applies a batch of object changes: all of them, or none.
    pub fn apply(&self, spec: &ApplySpec) -> Result<ApplyReport, ClientError> {
        self.request(Method::POST, "/v1/apply", Some(spec), RELOAD_TIMEOUT)
    }

    /// One page of the objects in force.
    pub fn objects(&self, query: &ObjectsQuery) -> Result<ObjectList, ClientError> {
        self.fetch(&objects_target(query))
    }

    /// Digests of the objects in force.
    pub fn object_digests(&self, query: &ObjectsQuery) -> Result<Vec<ObjectsDigest>, ClientError> {
        self.fetch(&objects_target(&ObjectsQuery { digest: Some(String::new()), ..query.clone() }))
    }

    /// All learned routes.
    pub fn learned(&self) -> Result<Vec<LearnedRoute>, ClientError> {
        self.fetch("/v1/learned")
    }

    /// Questions about routes, as soon as there is one, or none after at most `wait`.
    pub fn route_questions(&self, wait: Duration) -> Result<Vec<RouteQuestion>, ClientError> {
        let target = format!("/v1/learned/questions?wait_ms={}", wait.as_millis());
        self.request(Method::GET, &target, None::<&()>, TIMEOUT + wait)
    }

    /// Answers questions about routes, or changes earlier answers.
    pub fn learn(&self, spec: &LearnSpec) -> Result<LearnReport, ClientError> {
        self.request(Method::POST, "/v1/learned", Some(spec), TIMEOUT)
    }

    /// Traces a described packet.
    pub fn trace(&self, spec: &TraceSpec) -> Result<Trace, ClientError> {
        self.request(Method::POST, "/v1/trace", Some(spec), TIMEOUT)
    }

    /// Status of the gateway's NIC pipeline; connects to the socket of `bifrost-nicd`.
    pub fn pipeline(&self) -> Result<Pipeline, ClientError> {
        self.fetch("/v1/status")
    }

    /// Sends a command to the gateway's NIC pipeline; connects to the socket of `bifrost-nicd`.
    pub fn command_pipeline(&self, command: &PipelineCommand) -> Result<serde_json::Value, ClientError> {
        self.request(Method::POST, "/v1/command", Some(command), TIMEOUT)
    }

    /// Sends a command to a gateway pod; connects to the socket of `bifrost-gw`.
    pub fn command_pod(&self, command: &PodCommand) -> Result<serde_json::Value, ClientError> {
        self.request(Method::POST, "/v1/command", Some(command), TIMEOUT)
    }

    /// Status of a gateway pod; connects to the socket of `bifrost-gw`.
    pub fn gateway_pod(&self) -> Result<GatewayPod, ClientError> {
        self.fetch("/v1/status")
    }

    /// Traces a described packet in a gateway program; connects to the socket of `bifrost-nicd` or `bifrost-gw`.
    pub fn trace_gateway(&self, spec: &GatewayTraceSpec) -> Result<Trace, ClientError> {
        self.request(Method::POST, "/v1/trace", Some(spec), TIMEOUT)
    }

    /// Captures packets into `out`, as a pcapng file, until the capture ends or `out` returns an error.
    pub fn capture(&self, spec: &CaptureSpec, out: &mut dyn Write) -> Result<(), ClientError> {
        let body = serde_json::to_vec(spec).map_err(|e| ClientError::Protocol(e.to_string()))?;
        let after = Duration::from_secs(spec.seconds).saturating_add(STREAM_SLACK);
        let exchange = async { tokio::time::timeout(after, self.stream("/v1/capture", body, out)).await };
        self.runtime
            .block_on(exchange)
            .unwrap_or_else(|_| Err(ClientError::Timeout { path: self.socket.clone(), after }))
    }

    /// Waits until the daemon answers, for at most `limit`.
    pub fn wait_ready(&self, limit: Duration) -> Result<Status, ClientError> {
        let deadline = std::time::Instant::now() + limit;
        loop {
            match self.status() {
                Err(ClientError::NotRunning(_)) if std::time::Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                result => return result,
            }
        }
    }

    fn fetch<T: DeserializeOwned>(&self, target: &str) -> Result<T, ClientError> {
        self.request(Method::GET, target, None::<&()>, TIMEOUT)
    }

    fn request<T: DeserializeOwned>(
        &self,
        method: Method,
        target: &str,
        body: Option<&impl Serialize>,
        after: Duration,
    ) -> Result<T, ClientError> {
        let body = match body {
            Some(body) => serde_json::to_vec(body).map_err(|e| ClientError::Protocol(e.to_string()))?,
            None => Vec::new(),
        };
        let exchange = async {
            let answer = self.exchange(method.clone(), target, body.clone()).await;
            match answer {
                // The daemon has ended; another one may have taken over.
                Err(ClientError::Closed(_)) if method == Method::GET => self.exchange(method, target, body).await,
                answer => answer,
            }
        };
        let exchange = async { tokio::time::timeout(after, exchange).await };
        let (status, body) = match self.runtime.block_on(exchange) {
            Ok(result) => result?,
            Err(_) => return Err(ClientError::Timeout { path: self.socket.clone(), after }),
        };
        let protocol =
            |e: serde_json::Error| ClientError::Protocol(format!("{e} in the response to {target} ({status})"));
        if status.is_success() {
            serde_json::from_slice(&body).map_err(protocol)
        } else {
            let error: ErrorBody = serde_json::from_slice(&body).map_err(protocol)?;
            Err(error.into_error(status.as_u16()).into())
        }
    }

    async fn exchange(&self, method: Method, target: &str, body: Vec<u8>) -> Result<(StatusCode, Bytes), ClientError> {
        let read = async |response: Response<Incoming>| {
            let status = response.status();
            Ok((status, whole(response.into_body()).await?))
        };
        self.ask(request(method, target, body)?, read).await
    }

    async fn stream(&self, target: &str, body: Vec<u8>, out: &mut dyn Write) -> Result<(), ClientError> {
        let read = async |response: Response<Incoming>| {
            let status = response.status();
            let mut body = response.into_body();
            if !status.is_success() {
                let error: ErrorBody = serde_json::from_slice(&whole(body).await?)
                    .map_err(|e| ClientError::Protocol(format!("{e} ({status})")))?;
                return Err(error.into_error(status.as_u16()).into());
            }
            while let Some(frame) = body.frame().await {
                let frame = frame.map_err(|e| self.http_error(e))?;
                let Some(data) = frame.data_ref() else { continue };
                match out.write_all(data).and_then(|()| out.flush()) {
                    Ok(()) => {}
                    Err(e) if e.kind() == io::ErrorKind::BrokenPipe => return Ok(()),
                    Err(source) => return Err(ClientError::Output(source)),
                }
            }
            Ok(())
        };
        self.ask(request(Method::POST, target, body)?, read).await
    }

    /// Sends a request, and reads the response with `read`.
    async fn ask<T>(
        &self,
        request: Request<Full<Bytes>>,
        read: impl AsyncFnOnce(Response<Incoming>) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let stream: Box<dyn Stream> = match &self.connector {
            Some(connector) => connector.connect().await.map_err(|e| self.connect_error(e))?,
            None => Box::new(UnixStream::connect(&self.socket).await.map_err(|e| self.connect_error(e))?),
        };
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.http_error(e))?;
        let answer = async { read(sender.send_request(request).await.map_err(|e| self.http_error(e))?).await };
        tokio::pin!(answer);
        let connection = async {
            // The response also reports errors of the connection.
            let _ = connection.await;
        };
        tokio::pin!(connection);
        tokio::select! {
            biased;
            answer = &mut answer => answer,
            () = &mut connection => answer.await,
        }
    }

    fn connect_error(&self, source: io::Error) -> ClientError {
        let path = self.socket.clone();
        match source.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ClientError::NotRunning(path),
            io::ErrorKind::PermissionDenied => ClientError::NotAllowed(path),
            _ => ClientError::Io { path, source },
        }
    }

    fn http_error(&self, e: hyper::Error) -> ClientError {
        let path = self.socket.clone();
        if e.is_incomplete_message() || e.is_canceled() || e.is_closed() {
            return ClientError::Closed(path);
        }
        // The cause says more: with TLS, why the other end refuses.
        let cause = std::error::Error::source(&e).map(ToString::to_string);
        ClientError::Io { path, source: cause.map_or_else(|| io::Error::other(e), io::Error::other) }
    }
}

/// Path and query of a request for objects.
fn objects_target(query: &ObjectsQuery) -> String {
    let pairs = [
        ("kind", query.kind.map(|kind| kind.to_string())),
        ("key", query.key.clone()),
        ("owner", query.owner.clone()),
        ("vni", query.vni.map(|vni| vni.to_string())),
        ("from", query.from.clone()),
        ("limit", query.limit.map(|limit| limit.to_string())),
        ("digest", query.digest.clone()),
    ];
    with_query("/v1/objects", pairs)
}

/// A path with a query of the pairs that have a value.
fn with_query(path: &str, pairs: impl IntoIterator<Item = (&'static str, Option<String>)>) -> String {
    let escaped = |text: &str| {
        let escape = |byte: u8| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'/' | b':' => char::from(byte).to_string(),
            byte => format!("%{byte:02X}"),
        };
        text.bytes().map(escape).collect::<String>()
    };
    let pairs = pairs.into_iter().filter_map(|(name, value)| Some(format!("{name}={}", escaped(&value?))));
    format!("{path}?{}", pairs.collect::<Vec<_>>().join("&"))
}

/// Reads a body of at most [`MAX_BODY`] bytes.
async fn whole(body: Incoming) -> Result<Bytes, ClientError> {
    let body = Limited::new(body, MAX_BODY).collect().await;
    Ok(body.map_err(|e| ClientError::Protocol(e.to_string()))?.to_bytes())
}

fn request(method: Method, target: &str, body: Vec<u8>) -> Result<Request<Full<Bytes>>, ClientError> {
    Request::builder()
        .method(method)
        .uri(target)
        .header("host", "bifrostd")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|e| ClientError::Protocol(e.to_string()))
}
