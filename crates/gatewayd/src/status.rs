//! The status server of a program: JSON over a Unix socket, and counters for Prometheus over TCP.
//!
//! | request | answer |
//! |---|---|
//! | `GET /v1/status` | the state as JSON |
//! | `POST /v1/command` with a JSON object | what became of it |
//! | `POST /v1/trace` with a described packet | what each stage would decide about it |
//! | `POST /v1/capture` with what to capture | a pcapng file, as long as the capture runs |
//! | `GET /metrics` (also over TCP, and there nothing else) | counters, in the text format of OpenMetrics |

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Extension, Json, Router};
use bifrost_control::api::{ApiError, CaptureSpec, GatewayTraceSpec, Trace};
use bifrost_control::server::{CaptureStream, capture_response};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of TCP connections, and maximum duration of one.
const MAX_CONNECTIONS: usize = 8;
const CONNECTION_TIME: Duration = Duration::from_secs(20);

/// A value with labels. The names of counters end with their units.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sample {
    /// Its name.
    pub name: String,
    /// Labels that say what was counted.
    pub labels: Vec<(&'static str, String)>,
    /// Its value.
    pub value: u64,
    /// Whether it may decrease.
    pub gauge: bool,
}

/// The source of the answers. It is called on the server's threads.
pub trait Source: Send + Sync + 'static {
    /// The state.
    fn status(&self) -> serde_json::Value;
    /// The counters.
    fn samples(&self) -> Vec<Sample>;
    /// Executes a command.
    ///
    /// # Errors
    /// The reason why it cannot be executed.
    fn command(&self, command: serde_json::Value) -> Result<serde_json::Value, ApiError>;
    /// The decisions about a described packet.
    ///
    /// # Errors
    /// The description is invalid, or the decisions cannot be determined.
    fn trace(&self, spec: &GatewayTraceSpec) -> Result<Trace, ApiError>;
    /// Starts a capture, which ends when the stream is dropped.
    ///
    /// # Errors
    /// The request is invalid, or another capture is running.
    fn capture(&self, spec: &CaptureSpec) -> Result<Box<dyn CaptureStream>, ApiError>;
}

/// The running server. It ends when this is dropped.
#[derive(Debug)]
pub struct StatusServer {
    path: PathBuf,
    stopping: Arc<AtomicBool>,
    _runtime: tokio::runtime::Runtime,
}

impl StatusServer {
    /// Listens on a socket, replacing one that was left behind, and on an address for metrics.
    ///
    /// # Errors
    /// Those of the operating system.
    pub fn start(path: &Path, metrics: Option<SocketAddr>, source: Arc<dyn Source>) -> io::Result<Self> {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).thread_name("status").enable_all().build()?;
        let entered = runtime.enter();
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            let text = format!("{} is in use: another one runs", path.display());
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        if std::fs::symlink_metadata(path).is_ok_and(|m| !m.is_file() && !m.is_dir()) {
            std::fs::remove_file(path)?;
        }
        let unix = UnixListener::bind(path)?;
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
        let stopping = Arc::new(AtomicBool::new(false));
        let api = Router::new()
            .route("/v1/status", get(status))
            .route("/v1/command", post(command))
            .route("/v1/trace", post(trace))
            .route("/v1/capture", post(capture))
            .route("/metrics", get(expose))
            .layer(Extension(Arc::clone(&stopping)))
            .with_state(Arc::clone(&source));
        runtime.spawn(async move { axum::serve(unix, api).await });
        if let Some(address) = metrics {
            let listener = std::net::TcpListener::bind(address)?;
            listener.set_nonblocking(true)?;
            let listener = TcpListener::from_std(listener)?;
            let limited = Limited { listener, places: Arc::new(Semaphore::new(MAX_CONNECTIONS)) };
            let only = Router::new().route("/metrics", get(expose)).with_state(source);
            runtime.spawn(async move { axum::serve(limited, only).await });
        }
        drop(entered);
        Ok(StatusServer { path: path.to_owned(), stopping, _runtime: runtime })
    }
}

impl Drop for StatusServer {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Relaxed);
        let _ = std::fs::remove_file(&self.path);
    }
}

type Shared = State<Arc<dyn Source>>;

async fn status(State(source): Shared) -> Json<serde_json::Value> {
    Json(source.status())
}

async fn command(State(source): Shared, Json(command): Json<serde_json::Value>) -> Response {
    answer(move || source.command(command)).await
}

async fn trace(State(source): Shared, Json(spec): Json<GatewayTraceSpec>) -> Response {
    answer(move || source.trace(&spec)).await
}

async fn capture(
    State(source): Shared,
    Extension(stopping): Extension<Arc<AtomicBool>>,
    Json(spec): Json<CaptureSpec>,
) -> Response {
    match wait(move || source.capture(&spec)).await {
        Ok(stream) => capture_response(stream, stopping),
        Err(error) => failure(error),
    }
}

/// The result of `work`, or its error.
async fn answer<T: Serialize + Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Response {
    match wait(work).await {
        Ok(done) => (StatusCode::OK, Json(done)).into_response(),
        Err(error) => failure(error),
    }
}

/// The result of `work`, which runs on a thread that may block.
async fn wait<T: Send + 'static>(work: impl FnOnce() -> Result<T, ApiError> + Send + 'static) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| Err(ApiError::internal("the command failed").hint("see the log")))
}

fn failure(error: ApiError) -> Response {
    let ApiError { kind, what, location, hint } = error;
    let status = StatusCode::from_u16(kind.status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let error = serde_json::json!({ "error": { "what": what, "where": location, "hint": hint } });
    (status, Json(error)).into_response()
}

async fn expose(State(source): Shared) -> impl IntoResponse {
    const FORMAT: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, FORMAT)], exposition(source.samples()))
}

/// Samples in the text format.
fn exposition(samples: Vec<Sample>) -> String {
    let mut families: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
    for sample in samples {
        families.entry(sample.name.clone()).or_default().push(sample);
    }
    let mut registry = Registry::with_prefix("bifrost");
    registry.register_collector(Box::new(Families(families)));
    let mut out = String::new();
    // Writing to a string cannot fail.
    let _ = text::encode(&mut out, &registry);
    out
}

#[derive(Debug)]
struct Families(BTreeMap<String, Vec<Sample>>);

impl Collector for Families {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, samples) in &self.0 {
            let gauge = samples.iter().all(|sample| sample.gauge);
            let kind = if gauge { MetricType::Gauge } else { MetricType::Counter };
            let help = name.replace('_', " ");
            let mut family = encoder.encode_descriptor(name, &help, None, kind)?;
            for Sample { labels, value, .. } in samples {
                let mut metric = family.encode_family(labels)?;
                if gauge {
                    metric.encode_gauge(value)?;
                } else {
                    metric.encode_counter::<NoLabelSet, u64, u64>(value, None)?;
                }
            }
        }
        Ok(())
    }
}

/// A listener with a limited number of connections.
struct Limited {
    listener: TcpListener,
    places: Arc<Semaphore>,
}

impl axum::serve::Listener for Limited {
    type Io = Timed;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Timed, SocketAddr) {
        loop {
            let place = Arc::clone(&self.places).acquire_owned().await.ok();
            match self.listener.accept().await {
                Ok((stream, address)) => {
                    let end = Box::pin(tokio::time::sleep(CONNECTION_TIME));
                    return (Timed { stream, end, _place: place }, address);
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// A connection that is closed after a fixed time, whatever the other side does.
struct Timed {
    stream: TcpStream,
    end: Pin<Box<tokio::time::Sleep>>,
    _place: Option<OwnedSemaphorePermit>,
}

impl AsyncRead for Timed {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.end.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.end.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_labels() {
        let sample = |name: &str, pod: &str, gauge| Sample {
            name: name.to_owned(),
            labels: vec![("pod", pod.to_owned())],
            value: 7,
            gauge,
        };
        let text = exposition(vec![sample("nicd_sent_packets", "a", false), sample("nicd_up", "b", true)]);
        for line in [
            "# TYPE bifrost_nicd_sent_packets counter",
            "bifrost_nicd_sent_packets_total{pod=\"a\"} 7",
            "# TYPE bifrost_nicd_up gauge",
            "bifrost_nicd_up{pod=\"b\"} 7",
        ] {
            assert!(text.lines().any(|l| l == line), "{line}\n{text}");
        }
    }
}
