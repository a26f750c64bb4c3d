//! `GET /metrics` over TCP, for Prometheus; read-only.
//!
//! There is no access control. The server handles a few connections at a time, each for one request of bounded size and
//! time; others wait in the listener's queue.

use std::convert::Infallible;
use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{ALLOW, CONTENT_TYPE};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;

use super::Backend;
use super::exposition::{CONTENT_TYPE as FORMAT, exposition};

/// Returns the counters in the text format of Prometheus (OpenMetrics 1.0), or an error message. It may block.
pub type Source = Arc<dyn Fn() -> Result<String, String> + Send + Sync>;

/// Concurrent connections.
const MAX_CONNECTIONS: usize = 8;
/// Largest head of a request, bytes.
const MAX_HEAD: usize = 16 << 10;
/// How long the head of a request may take to arrive.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// How long a connection may last.
const CONNECTION_TIME: Duration = Duration::from_secs(20);
/// Delay after a failed accept, for example when the process is out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// The counters of a backend.
pub(super) fn of_backend(backend: Arc<dyn Backend>) -> Source {
    Arc::new(move || {
        let pages = backend.samples().and_then(Iterator::collect::<Result<Vec<_>, _>>);
        exposition(pages.map_err(|e| e.to_string())?.concat()).map_err(|e| e.to_string())
    })
}

/// Opens a nonblocking listener.
///
/// # Errors
/// The address is not one of this host, or is in use.
pub fn bind(address: SocketAddr) -> io::Result<StdListener> {
    let listener = StdListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves requests until the future is dropped.
pub async fn run(listener: TcpListener, source: Source) {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        // The semaphore is never closed, so this does not fail.
        let Ok(slot) = Arc::clone(&slots).acquire_owned().await else { return };
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(PAUSE).await;
            continue;
        };
        let source = Arc::clone(&source);
        tokio::spawn(async move {
            // Errors of a connection are left to the client.
            let _ = tokio::time::timeout(CONNECTION_TIME, converse(stream, source)).await;
            drop(slot);
        });
    }
}

/// Serves one request on one connection.
async fn converse(stream: TcpStream, source: Source) -> hyper::Result<()> {
    let service = service_fn(move |request| answer(request, Arc::clone(&source)));
    http1::Builder::new()
        .keep_alive(false)
        .max_buf_size(MAX_HEAD)
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(stream), service)
        .await
}

async fn answer(request: Request<Incoming>, source: Source) -> Result<Response<Full<Bytes>>, Infallible> {
    if request.uri().path() != "/metrics" {
        return Ok(respond(StatusCode::NOT_FOUND, "text/plain", "not found; use /metrics\n".to_owned()));
    }
    if request.method() != Method::GET {
        let mut response = respond(StatusCode::METHOD_NOT_ALLOWED, "text/plain", "GET only\n".to_owned());
        response.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET"));
        return Ok(response);
    }
    // Querying the workers blocks.
    let text = tokio::task::spawn_blocking(move || source());
    Ok(match text.await {
        Ok(Ok(text)) => respond(StatusCode::OK, FORMAT, text),
        Ok(Err(error)) => respond(StatusCode::SERVICE_UNAVAILABLE, "text/plain", error + "\n"),
        Err(_) => respond(StatusCode::INTERNAL_SERVER_ERROR, "text/plain", "see the daemon's log\n".to_owned()),
    })
}

fn respond(status: StatusCode, kind: &'static str, text: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(text)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    response
}
