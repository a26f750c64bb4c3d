//! The other end of the API: a blocking client for programs and tests.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::UnixStream;
use tokio::runtime::Runtime;

use crate::api::{
    ApiError, ApplyReport, ApplySpec, CaptureSpec, Conn, DrainReport, DrainSpec, Drops, ErrorBody, FaultCleared,
    FaultEntry, FaultSpec, FlowLogStatus, GatewayPod, GatewayTraceSpec, LoadBalancerStatus, MirrorStatus, NatStatus,
    ObjectList, ObjectsDigest, ObjectsQuery, Path as ApiPath, Pipeline, PipelineCommand, PodCommand, PortSessions,
    PortStatus, ReloadReport, Route, Sample, Session, SessionFilter, SessionsQuery, SessionsReport, Stats, Status,
    Trace, TraceSpec, UpgradeReport, UpgradeSpec,
};

/// How long an answer may take.
const TIMEOUT: Duration = Duration::from_secs(10);
/// How long a reload may take.
const RELOAD_TIMEOUT: Duration = Duration::from_secs(60);
/// How long a service manager may take to restart a daemon that has ended during an upgrade.
const RESTART: Duration = Duration::from_secs(1);
/// How long an answer that comes in pieces may take beyond the time that was asked for.
const STREAM_SLACK: Duration = Duration::from_secs(15);
/// The largest answer, bytes: some hundred thousand connections.
const MAX_BODY: usize = 256 << 20;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody listens on the socket.
    #[error("bifrostd is not running: nobody answers on {}", .0.display())]
    NotRunning(PathBuf),
    /// The socket is there, and not for this user.
    #[error("not allowed to connect to {}; run as root or as a member of the socket's group", .0.display())]
    NotAllowed(PathBuf),
    /// The daemon refused the request.
    #[error(transparent)]
    Api(#[from] ApiError),
    /// No answer in time.
    #[error("bifrostd did not answer on {} within {} s", path.display(), after.as_secs())]
    Timeout {
        /// The socket.
        path: PathBuf,
        /// How long was waited.
        after: Duration,
    },
    /// What came cannot be written.
    #[error("cannot write the result: {0}")]
    Output(io::Error),
    /// The answer is none that this release understands.
    #[error("bifrostd's answer is not understood: {0}; do bifrostctl and bifrostd have the same version?")]
    Protocol(String),
    /// The system refused.
    #[error("cannot talk to {}: {source}", path.display())]
    Io {
        /// The socket.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// A client of one daemon. It connects for every request, so that a daemon may restart between two of them.
/// Its calls block, and must not be made inside an asynchronous runtime.
#[derive(Debug)]
pub struct Client {
    socket: PathBuf,
    runtime: Runtime,
}

impl Client {
    /// A client of the daemon on that socket. Nothing is sent yet.
    pub fn new(socket: impl AsRef<Path>) -> Result<Client, ClientError> {
        let socket = socket.as_ref().to_owned();
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_io()
            .enable_time()
            .build()
            .map_err(|source| ClientError::Io { path: socket.clone(), source })?;
        Ok(Client { socket, runtime })
    }

    /// The socket's path.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Asks for something that this client has no method for, of a daemon with an API of its own.
    pub fn get<T: DeserializeOwned>(&self, target: &str, after: Duration) -> Result<T, ClientError> {
        self.request(Method::GET, target, None::<&()>, after)
    }

    /// Sends something that this client has no method for, to a daemon with an API of its own.
    pub fn post<T: DeserializeOwned>(
        &self,
        target: &str,
        body: &impl Serialize,
        after: Duration,
    ) -> Result<T, ClientError> {
        self.request(Method::POST, target, Some(body), after)
    }

    /// The daemon as a whole.
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

    /// All addresses outside.
    pub fn nat(&self) -> Result<Vec<NatStatus>, ClientError> {
        self.fetch("/v1/nat")
    }

    /// All mirrors.
    pub fn mirrors(&self) -> Result<Vec<MirrorStatus>, ClientError> {
        self.fetch("/v1/mirrors")
    }

    /// What is logged of conversations, and what became of the records.
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

    /// Takes a path out of use (`drained`), or back.
    pub fn drain_path(&self, spec: &DrainSpec, drained: bool) -> Result<DrainReport, ClientError> {
        let target = if drained { "/v1/paths/drain" } else { "/v1/paths/restore" };
        self.request(Method::POST, target, Some(spec), TIMEOUT)
    }

    /// All counters.
    pub fn stats(&self) -> Result<Stats, ClientError> {
        self.fetch("/v1/stats")
    }

    /// All counters and gauges, each with where it was counted.
    pub fn samples(&self) -> Result<Vec<Sample>, ClientError> {
        self.fetch("/v1/samples")
    }

    /// What was dropped, where, and what that means.
    pub fn drops(&self) -> Result<Drops, ClientError> {
        self.fetch("/v1/drops")
    }

    /// All faults in force.
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

    /// Has the daemon read its configuration again.
    pub fn reload(&self) -> Result<ReloadReport, ClientError> {
        self.request(Method::POST, "/v1/reload", None::<&()>, RELOAD_TIMEOUT)
    }

    /// Sessions of security groups.
    pub fn sessions(&self, filter: &SessionFilter) -> Result<Vec<Session>, ClientError> {
        self.fetch(&with_query("/v1/sessions", filter.pairs()))
    }

    /// A port's sessions, for the host to which its guest moves.
    pub fn export_sessions(&self, port: &str) -> Result<PortSessions, ClientError> {
        let query = SessionsQuery { port: port.to_owned() };
        self.request(Method::POST, "/v1/sessions/export", Some(&query), RELOAD_TIMEOUT)
    }

    /// Goes on with the sessions that a port's guest had on another host.
    pub fn import_sessions(&self, sessions: &PortSessions) -> Result<SessionsReport, ClientError> {
        self.request(Method::POST, "/v1/sessions/import", Some(sessions), RELOAD_TIMEOUT)
    }

    /// Has another program take over the daemon's work; returns once that one answers.
    ///
    /// # Errors
    /// The running daemon continues, and the error says why; or the new one took over, and does not answer.
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

    /// Changes objects: all that the batch says, or nothing.
    pub fn apply(&self, spec: &ApplySpec) -> Result<ApplyReport, ClientError> {
        self.request(Method::POST, "/v1/apply", Some(spec), RELOAD_TIMEOUT)
    }

    /// The objects in force, as far as one answer has them.
    pub fn objects(&self, query: &ObjectsQuery) -> Result<ObjectList, ClientError> {
        self.fetch(&objects_target(query))
    }

    /// Digests of the objects in force.
    pub fn object_digests(&self, query: &ObjectsQuery) -> Result<Vec<ObjectsDigest>, ClientError> {
        self.fetch(&objects_target(&ObjectsQuery { digest: Some(String::new()), ..query.clone() }))
    }

    /// What would become of a packet.
    pub fn trace(&self, spec: &TraceSpec) -> Result<Trace, ClientError> {
        self.request(Method::POST, "/v1/trace", Some(spec), TIMEOUT)
    }

    /// The gateway's NIC pipeline; the socket is that of `bifrost-nicd`.
    pub fn pipeline(&self) -> Result<Pipeline, ClientError> {
        self.fetch("/v1/status")
    }

    /// Gives the gateway's NIC pipeline a command; the socket is that of `bifrost-nicd`.
    pub fn command_pipeline(&self, command: &PipelineCommand) -> Result<serde_json::Value, ClientError> {
        self.request(Method::POST, "/v1/command", Some(command), TIMEOUT)
    }

    /// Gives a gateway pod a command; the socket is that of `bifrost-gw`.
    pub fn command_pod(&self, command: &PodCommand) -> Result<serde_json::Value, ClientError> {
        self.request(Method::POST, "/v1/command", Some(command), TIMEOUT)
    }

    /// A gateway pod; the socket is that of `bifrost-gw`.
    pub fn gateway_pod(&self) -> Result<GatewayPod, ClientError> {
        self.fetch("/v1/status")
    }

    /// What one of a gateway's programs would do with a packet; the socket is that of `bifrost-nicd` or `bifrost-gw`.
    pub fn trace_gateway(&self, spec: &GatewayTraceSpec) -> Result<Trace, ClientError> {
        self.request(Method::POST, "/v1/trace", Some(spec), TIMEOUT)
    }

    /// Captures packets into `out`, as a pcapng file, until the capture is over or `out` takes no more.
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
        let exchange = async { tokio::time::timeout(after, self.exchange(method, target, body)).await };
        let (status, body) = match self.runtime.block_on(exchange) {
            Ok(result) => result?,
            Err(_) => return Err(ClientError::Timeout { path: self.socket.clone(), after }),
        };
        let protocol =
            |e: serde_json::Error| ClientError::Protocol(format!("{e} in the answer to {target} ({status})"));
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

    /// Sends a request, and has its answer read.
    async fn ask<T>(
        &self,
        request: Request<Full<Bytes>>,
        read: impl AsyncFnOnce(Response<Incoming>) -> Result<T, ClientError>,
    ) -> Result<T, ClientError> {
        let stream = UnixStream::connect(&self.socket).await.map_err(|e| self.connect_error(e))?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|e| self.http_error(e))?;
        let answer = async { read(sender.send_request(request).await.map_err(|e| self.http_error(e))?).await };
        tokio::pin!(answer);
        let connection = async {
            // How it ended is told by the answer, too.
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
        ClientError::Io { path: self.socket.clone(), source: io::Error::other(e) }
    }
}

/// Path and query that ask for objects.
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

/// A path, and what of a query is there.
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

/// A body, as long as one may be.
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
