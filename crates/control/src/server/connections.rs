//! Connections to the API's socket: limited in number for each user, and closed when idle.
//!
//! The socket's group may have many members, and one of them may be hostile. Connections use descriptors and threads of
//! the daemon. One user must not exhaust them for others, above all not for root, who may have to debug the daemon.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

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
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;

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
    let is_capture = Arc::new(AtomicBool::new(false));
    let router = router.layer(axum::Extension(Lasting(Arc::clone(&is_capture))));
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
    let connection = graceful.watch(connection);
    tokio::spawn(async move {
        tokio::pin!(connection);
        loop {
            // Errors of a connection are left to the client.
            let ended = tokio::time::timeout(CONNECTION_TIME, &mut connection).await;
            if ended.is_ok() || !is_capture.load(Ordering::Relaxed) {
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

/// Exempts a connection from the time limit: a capture has its own bounds.
#[derive(Clone, Debug)]
pub(super) struct Lasting(Arc<AtomicBool>);

impl Lasting {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
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
