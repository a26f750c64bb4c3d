//! The end of the protocol with agents (docs/FLEET.md): a stream for each host.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bifrost_intent::api::{HostProblem, ImpairedPeer, PathHealth};
use bifrost_intent::{Item, ItemId};
use bifrost_relay_api::limits::{KEEP_ALIVE_TIMEOUT_S, LEARNING};
use bifrost_relay_api::{Change, FromAgent, ToAgent, Welcome, agree, pb, pieces, tls};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::CertificateDer;
use tonic::transport::server::TlsConnectInfo;
use tonic::{Request, Response, Status, Streaming};

use crate::feed::Next;
use crate::fleet::{Attached, Report};
use crate::quiet::{Link, Speaking};
use crate::relay::{Relay, now_ms};

/// How long an agent may take to say who it is.
const HELLO_TIME: Duration = Duration::from_secs(KEEP_ALIVE_TIMEOUT_S);
/// How long an agent waits for a relay that does not follow its store. Those that wait are served as soon as it does;
/// those that were refused may be in a pause. It is shorter than agents wait for an answer.
const HOLD_TIME: Duration = Duration::from_secs(8);
/// How long an agent may take to read a piece.
const READ_TIME: Duration = Duration::from_secs(60);
/// Pieces that are made before they are read.
const AHEAD: usize = 2;

/// What agents speak with.
#[derive(Debug)]
pub(crate) struct Agents {
    pub(crate) relay: Arc<Relay>,
    /// Whether agents show certificates; otherwise an agent is believed whose host it is.
    pub(crate) is_secure: bool,
}

type Certificates = Option<Arc<Vec<CertificateDer<'static>>>>;
type Messages = Pin<Box<dyn Stream<Item = Result<pb::ToAgent, Status>> + Send>>;

#[tonic::async_trait]
impl pb::relay_server::Relay for Agents {
    type FollowStream = Messages;

    async fn follow(&self, request: Request<Streaming<pb::FromAgent>>) -> Result<Response<Messages>, Status> {
        let (link, certificates) = of_connection(&request)?;
        let mut incoming = request.into_inner();
        let hello = tokio::time::timeout(HELLO_TIME, incoming.message()).await;
        let hello = hello.map_err(|_| Status::deadline_exceeded("no Hello came"))??;
        let hello = match hello.map(FromAgent::try_from) {
            Some(Ok(FromAgent::Hello(hello))) => hello,
            Some(Err(error)) => return Err(Status::invalid_argument(error.to_string())),
            Some(Ok(FromAgent::Report(_) | FromAgent::Resolve(_))) | None => {
                return Err(Status::invalid_argument("the first message is Hello"));
            }
        };
        if self.is_secure && !certificates.is_some_and(|all| tls::is_of_host(&all, &hello.host)) {
            let what = format!("the certificate is not that of host {:?}: it has no such DNS name", hello.host);
            return Err(Status::permission_denied(what));
        }
        let version = agree(hello.versions).map_err(|error| Status::failed_precondition(error.to_string()))?;
        // What is not known must not be taken for what is to go.
        let mut position = self.relay.position();
        let follows = tokio::time::timeout(HOLD_TIME, position.wait_for(|position| position.in_sync)).await;
        if !follows.is_ok_and(|follows| follows.is_ok()) {
            return Err(Status::unavailable("the relay does not follow its store now; try another, or again soon"));
        }
        let restored = self.relay.catch_up(hello.revision).await.map_err(|e| Status::unavailable(e.to_string()))?;
        if restored {
            tracing::warn!(host = hello.host, "the agent had a later revision: the store was restored from a backup");
        }
        let can_learn = version >= LEARNING;
        let attached = self.relay.update(|fleet| fleet.attach(&hello.host, &hello.software, can_learn, now_ms()));
        let attached = attached.map_err(Status::not_found)?;
        if attached.misses_learning {
            tracing::warn!(
                host = hello.host,
                software = hello.software,
                "this agent cannot learn routes, but a VPC of its host does: new destinations will not be reached; upgrade it"
            );
        }
        let speaking = link.speaks();
        tracing::info!(host = hello.host, software = hello.software, "an agent has connected");
        let welcome = Welcome { version, relay: self.relay.name().to_owned(), restored };
        let (send, receive) = mpsc::channel(AHEAD);
        tokio::spawn(converse(Arc::clone(&self.relay), hello.host, welcome, attached, incoming, send, speaking));
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }
}

/// What is known of the connection of a request: with TLS, whose it is.
fn of_connection(request: &Request<Streaming<pb::FromAgent>>) -> Result<(Link, Certificates), Status> {
    let extensions = request.extensions();
    if let Some(tls) = extensions.get::<TlsConnectInfo<Link>>() {
        return Ok((tls.get_ref().clone(), tls.peer_certs()));
    }
    let link = extensions.get::<Link>().cloned().ok_or_else(|| Status::internal("a connection of another server"))?;
    Ok((link, None))
}

/// One agent, from the first message to the last.
async fn converse(
    relay: Arc<Relay>,
    host: String,
    welcome: Welcome,
    attached: Attached,
    incoming: Streaming<pb::FromAgent>,
    send: mpsc::Sender<Result<pb::ToAgent, Status>>,
    speaking: Speaking,
) {
    let number = attached.number;
    let ended = tokio::select! {
        ended = speak(welcome, attached, &send) => ended,
        ended = listen(&relay, &host, number, incoming) => ended,
    };
    relay.update(|fleet| fleet.detach(&host, number, now_ms()));
    // What the agent had learned is forgotten.
    relay.correct().await;
    tracing::info!(host, "the agent's connection has ended: {}", ended.message());
    // Who has gone does not read it.
    let _ = send.try_send(Err(ended));
    drop(speaking);
}

/// Sends everything, and then what changes; gives why that ended.
async fn speak(welcome: Welcome, attached: Attached, send: &mpsc::Sender<Result<pb::ToAgent, Status>>) -> Status {
    let Attached { feed, all, revision, .. } = attached;
    if let Err(ended) = put(send, ToAgent::Welcome(welcome)).await {
        return ended;
    }
    let (mut changes, mut revision) = (all, revision);
    loop {
        for piece in pieces(changes.into_iter().map(change)) {
            if let Err(ended) = put(send, ToAgent::Changes(piece)).await {
                return ended;
            }
        }
        if let Err(ended) = put(send, ToAgent::InSync(revision)).await {
            return ended;
        }
        (changes, revision) = loop {
            match feed.next().await {
                Next::Changes(next, at) => break (next, at),
                Next::Answers(answers) => {
                    if let Err(ended) = put(send, ToAgent::Answers(answers)).await {
                        return ended;
                    }
                }
                Next::End(why) => return Status::aborted(why),
            }
        };
    }
}

async fn put(send: &mpsc::Sender<Result<pb::ToAgent, Status>>, message: ToAgent) -> Result<(), Status> {
    match tokio::time::timeout(READ_TIME, send.send(Ok(message.into()))).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(_)) => Err(Status::cancelled("the agent has gone")),
        Err(_) => Err(Status::deadline_exceeded("the agent has read nothing for a minute")),
    }
}

/// Takes what the agent reports; gives why that ended.
async fn listen(relay: &Relay, host: &str, number: u64, mut incoming: Streaming<pb::FromAgent>) -> Status {
    loop {
        let message = match incoming.message().await {
            Ok(Some(message)) => message,
            Ok(None) => return Status::ok("the agent has said goodbye"),
            Err(error) => return error,
        };
        match FromAgent::try_from(message) {
            Ok(FromAgent::Report(report)) => {
                let problem = |p: bifrost_relay_api::Problem| HostProblem { kind: p.kind, key: p.key, what: p.what };
                let report = Report {
                    revision: report.revision,
                    objects: report.objects,
                    problems: report.problems.into_iter().map(problem).collect(),
                    more_problems: report.more_problems,
                    paths: health(report.paths),
                };
                relay.update(|fleet| fleet.report(host, number, report));
            }
            Ok(FromAgent::Resolve(questions)) => {
                if !relay.update(|fleet| fleet.resolve(host, number, &questions)) {
                    return Status::invalid_argument("Resolve is of a later version than the one that is spoken");
                }
            }
            Ok(FromAgent::Hello(_)) => return Status::invalid_argument("Hello comes once"),
            Err(error) => return Status::invalid_argument(error.to_string()),
        }
    }
}

fn health(health: bifrost_relay_api::PathHealth) -> PathHealth {
    let peer = |p: bifrost_relay_api::ImpairedPeer| ImpairedPeer { peer: p.peer, paths: p.paths, working: p.working };
    let impaired = health.impaired.into_iter().map(peer).collect();
    PathHealth { peers: health.peers, impaired, more_impaired: health.more_impaired }
}

fn change((ItemId { kind, key }, item): (ItemId, Option<Item>)) -> Change {
    let committed_ms = item.as_ref().map_or(0, |item| item.committed_ms);
    let spec = item.map(|item| item.spec.as_bytes().to_vec().into());
    Change { kind: kind.name().to_owned(), key, spec, committed_ms }
}
