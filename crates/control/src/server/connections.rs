//! Connections to the API's socket: limited in number for each user, and closed when idle.
//!
//! The socket's group may have many members, and one of them may be hostile. Connections use descriptors and threads of
//! the daemon. One user must not exhaust them for others, above all not for root, who may have to debug the daemon.

use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::os::fd::{AsFd as _, OwnedFd};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::{Notify, oneshot};

/// Concurrent connections of one user, and of all users except root.
const OF_ONE_USER: usize = 32;
const OF_ALL_USERS: usize = 128;
/// How long a connection may take to send the head of a request: the first one, and the next one after an answer.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long the body of a request may take to arrive.
const BODY_TIME: Duration = Duration::from_secs(10);
/// How long a connection without a capture may last: a reload may take a minute.
const CONNECTION_TIME: Duration = Duration::from_secs(120);
/// Delay after a failed accept, for example when the process is out of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
/// Polling interval while chunks of a capture are written.
const FLUSH_POLL: Duration = Duration::from_micros(500);
const ROOT: u32 = 0;

/// The client of a connection (`SO_PEERCRED`, unix(7)). Request handlers get it as an extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The process id in the daemon's PID namespace; none: the process is not visible there.
    pub pid: Option<i32>,
}

/// Open connections by user.
#[derive(Debug, Default)]
pub(super) struct Users(Mutex<HashMap<u32, usize>>);

/// A connection's slot among those of its user; released on drop.
#[derive(Debug)]
struct Slot {
    users: Arc<Users>,
    user: u32,
}

impl Users {
    /// `None`: the user, or all users together, have too many connections. Root always gets a slot.
    fn enter(self: &Arc<Self>, user: u32) -> Option<Slot> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = users.iter().filter(|(user, _)| **user != ROOT).map(|(_, n)| n).sum();
        let own = users.get(&user).copied().unwrap_or(0);
        if user != ROOT && (own >= OF_ONE_USER || all >= OF_ALL_USERS) {
            return None;
        }
        users.insert(user, own + 1);
        Some(Slot { users: Arc::clone(self), user })
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut users = self.users.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = users.get_mut(&self.user) {
            *own -= 1;
            if *own == 0 {
                users.remove(&self.user);
            }
        }
    }
}

/// Serves connections until `stopped`; then finishes the requests in progress.
pub(super) async fn run(listener: UnixListener, router: Router, mut stopped: oneshot::Receiver<()>) {
    let (users, graceful) = (Arc::new(Users::default()), GracefulShutdown::new());
    loop {
        let stream = tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(_) => {
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            },
            _ = &mut stopped => break,
        };
        // Excess connections are closed without a response: an attacker would not read it, and keep the connection
        // open.
        let Ok(peer) = stream.peer_cred() else { continue };
        let peer = Peer { uid: peer.uid(), gid: peer.gid(), pid: peer.pid() };
        let Some(slot) = users.enter(peer.uid) else { continue };
        converse(stream, router.clone().layer(axum::Extension(peer)), slot, &graceful);
    }
    graceful.shutdown().await;
}

/// Serves one connection in its own task.
fn converse(stream: UnixStream, router: Router, slot: Slot, graceful: &GracefulShutdown) {
    let lasting = Lasting::default();
    let router = router.layer(axum::Extension(lasting.clone()));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(Watched { stream, lasting: lasting.clone() }), TowerToHyperService::new(router));
    let connection = graceful.watch(connection);
    tokio::spawn(async move {
        tokio::pin!(connection);
        loop {
            let ended = tokio::select! {
                // Errors of a connection are left to the client.
                ended = tokio::time::timeout(CONNECTION_TIME, &mut connection) => ended.is_ok(),
                () = lasting.0.left.notified() => true,
            };
            if ended || !lasting.0.is_capture.load(Ordering::Relaxed) {
                break;
            }
        }
        drop(slot);
    });
}

/// Serves one connection of any kind, until it ends or has lasted for long.
pub(super) async fn one<S>(stream: S, router: Router)
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    // Errors of a connection are left to the client.
    let _ = tokio::time::timeout(CONNECTION_TIME, connection).await;
}

/// The connection of a capture: it is exempt from the time limit, because a capture has its own bounds, and another
/// process can continue it.
#[derive(Clone, Debug, Default)]
pub(super) struct Lasting(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    is_capture: AtomicBool,
    /// Chunks of the body that the server has taken, and those of them that it has written to the socket.
    taken: AtomicU64,
    written: AtomicU64,
    /// A duplicate of the socket.
    socket: Mutex<Option<OwnedFd>>,
    /// Another process continues: the server forgets the connection.
    left: Notify,
}

impl Lasting {
    /// The next response is a capture.
    pub(super) fn set(&self) {
        self.0.is_capture.store(true, Ordering::Relaxed);
        // An earlier response on this connection may have been one, too.
        self.0.taken.store(0, Ordering::Relaxed);
        self.0.written.store(0, Ordering::Relaxed);
    }

    /// The server has taken another chunk of the body.
    pub(super) fn taken(&self) {
        self.0.taken.fetch_add(1, Ordering::Relaxed);
    }

    /// The server has written everything that it has taken.
    fn flushed(&self, stream: &UnixStream) {
        let Shared { is_capture, taken, written, socket, .. } = &*self.0;
        if !is_capture.load(Ordering::Relaxed) {
            return;
        }
        let mut socket = socket.lock().unwrap_or_else(PoisonError::into_inner);
        if socket.is_none() {
            // Without it, the capture ends with an upgrade.
            *socket = stream.as_fd().try_clone_to_owned().ok();
        }
        drop(socket);
        written.store(taken.load(Ordering::Relaxed), Ordering::Release);
    }

    /// Takes the socket from the server when `chunks` chunks have been written to it. `None`: they are not before the
    /// deadline.
    pub(super) fn leave(&self, chunks: u64, deadline: Instant) -> Option<OwnedFd> {
        while self.0.written.load(Ordering::Acquire) != chunks {
            if Instant::now() >= deadline {
                return None;
            }
            std::thread::sleep(FLUSH_POLL);
        }
        let socket = self.0.socket.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.0.left.notify_one();
        socket
    }
}

/// A connection that notices when the server has written everything: the server then flushes it.
#[derive(Debug)]
struct Watched {
    stream: UnixStream,
    lasting: Lasting,
}

impl AsyncRead for Watched {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl AsyncWrite for Watched {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        if matches!(flushed, Poll::Ready(Ok(()))) {
            self.lasting.flushed(&self.stream);
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// Reads the whole body of a request, of at most `most` bytes and within a time limit, before the handler runs.
pub(super) async fn whole_body(request: Request, next: Next, most: usize) -> Response {
    let (parts, body) = request.into_parts();
    let refuse = |status: StatusCode| (status, [(header::CONNECTION, "close")]).into_response();
    match tokio::time::timeout(BODY_TIME, axum::body::to_bytes(body, most)).await {
        Ok(Ok(body)) => next.run(Request::from_parts(parts, Body::from(body))).await,
        Ok(Err(_)) => refuse(StatusCode::PAYLOAD_TOO_LARGE),
        Err(_) => refuse(StatusCode::REQUEST_TIMEOUT),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_cannot_exhaust_the_connections_of_others() {
        let users = Arc::new(Users::default());
        let enter = |user, wanted: usize| (0..wanted).filter_map(|_| users.enter(user)).collect::<Vec<_>>();
        let greedy = enter(1000, 500);
        assert_eq!((greedy.len(), enter(1001, 5).len()), (OF_ONE_USER, 5));
        let crowd: Vec<_> = (1001..1100).flat_map(|user| enter(user, 500)).collect();
        assert_eq!(greedy.len() + crowd.len(), OF_ALL_USERS);
        assert_eq!(enter(ROOT, 500).len(), 500, "root is not limited");
        assert_eq!(enter(2000, 1).len(), 0);
        drop(greedy);
        assert_eq!(enter(2000, 500).len(), OF_ONE_USER);
        drop(crowd);
        assert!(users.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty());
    }
}
