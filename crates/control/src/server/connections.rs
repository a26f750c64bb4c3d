//! Connections of the API's socket: few at a time for each user, and none for long that asks or reads nothing.
//!
//! Members of the socket's group may be many, or one of them may be hostile. Connections are descriptors and threads of the daemon,
//! and one user's must leave room for others': above all for root, who may have to find out what is going on.

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
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;

/// Connections of one user, and of all but root, at a time.
const OF_ONE_USER: usize = 32;
const OF_ALL_USERS: usize = 128;
/// How long a connection may take to send the head of a request: the first one, and the next one after an answer.
const HEAD_TIME: Duration = Duration::from_secs(10);
/// How long a request's body may take to come.
const BODY_TIME: Duration = Duration::from_secs(10);
/// How long a connection may last but for a capture: a reload may take a minute.
const CONNECTION_TIME: Duration = Duration::from_secs(120);
/// After which the listener is tried again when it fails, such as for want of descriptors.
const PAUSE: Duration = Duration::from_millis(100);
const ROOT: u32 = 0;

/// Who made a connection (`SO_PEERCRED`, unix(7)). Handlers of requests have it as an extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// The user.
    pub uid: u32,
    /// The group.
    pub gid: u32,
    /// The process, as this one's PID namespace numbers it; none: it is of no process there.
    pub pid: Option<i32>,
}

/// Connections there are, by user.
#[derive(Debug, Default)]
pub(super) struct Users(Mutex<HashMap<u32, usize>>);

/// The place of a connection among those of its user; given back on drop.
#[derive(Debug)]
struct Place {
    users: Arc<Users>,
    user: u32,
}

impl Users {
    /// `None`: the user, or all of them, have too many. Root always has one.
    fn enter(self: &Arc<Self>, user: u32) -> Option<Place> {
        let mut users = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = users.iter().filter(|(user, _)| **user != ROOT).map(|(_, n)| n).sum();
        let own = users.get(&user).copied().unwrap_or(0);
        if user != ROOT && (own >= OF_ONE_USER || all >= OF_ALL_USERS) {
            return None;
        }
        users.insert(user, own + 1);
        Some(Place { users: Arc::clone(self), user })
    }
}

impl Drop for Place {
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

/// Answers until `stopped`; then finishes what is being answered.
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
        // A user with too many connections is cut off without an answer: waiting until it is read is what an attacker wants.
        let Ok(peer) = stream.peer_cred() else { continue };
        let peer = Peer { uid: peer.uid(), gid: peer.gid(), pid: peer.pid() };
        let Some(place) = users.enter(peer.uid) else { continue };
        converse(stream, router.clone().layer(axum::Extension(peer)), place, &graceful);
    }
    graceful.shutdown().await;
}

/// Serves one connection, on a task of its own.
fn converse(stream: UnixStream, router: Router, place: Place, graceful: &GracefulShutdown) {
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
            // Whatever goes wrong on a connection is the other side's affair.
            let ended = tokio::time::timeout(CONNECTION_TIME, &mut connection).await;
            if ended.is_ok() || !is_capture.load(Ordering::Relaxed) {
                break;
            }
        }
        drop(place);
    });
}

/// A connection that may last: a capture has bounds of its own.
#[derive(Clone, Debug)]
pub(super) struct Lasting(Arc<AtomicBool>);

impl Lasting {
    pub(super) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Has the whole body of a request before anything looks at it: soon, and no longer than `most` bytes.
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
    fn nobody_takes_the_places_of_others() {
        let users = Arc::new(Users::default());
        let enter = |user, wanted: usize| (0..wanted).filter_map(|_| users.enter(user)).collect::<Vec<_>>();
        let greedy = enter(1000, 500);
        assert_eq!((greedy.len(), enter(1001, 5).len()), (OF_ONE_USER, 5));
        let crowd: Vec<_> = (1001..1100).flat_map(|user| enter(user, 500)).collect();
        assert_eq!(greedy.len() + crowd.len(), OF_ALL_USERS);
        assert_eq!(enter(ROOT, 500).len(), 500, "root is not kept out");
        assert_eq!(enter(2000, 1).len(), 0);
        drop(greedy);
        assert_eq!(enter(2000, 500).len(), OF_ONE_USER);
        drop(crowd);
        assert!(users.0.lock().unwrap_or_else(PoisonError::into_inner).is_empty());
    }
}
