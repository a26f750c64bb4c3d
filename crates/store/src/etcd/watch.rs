//! Watches. A watch that loses its member continues with another from the same revision.

use std::collections::VecDeque;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tonic::metadata::MetadataValue;
use tonic::{Status, Streaming};

use super::client::{Client, MAX_MESSAGE, Verdict, judge, told};
use super::pb::event::EventType;
use super::pb::watch_client::WatchClient;
use super::pb::watch_request::RequestUnion;
use super::{pb, range_of, read, revision};
use crate::{Events, Revision, StoreError, WatchError};

/// Interval for asking a member for its progress. It must answer before the next request.
const PROGRESS: Duration = Duration::from_secs(4);
/// Timeout for starting a watch.
const BEGIN: Duration = Duration::from_secs(3);

type Connecting = Pin<Box<dyn Future<Output = Result<Live, End>> + Send>>;

/// Changes below a prefix.
pub(crate) struct Watch {
    client: Arc<Client>,
    prefix: String,
    /// Reported up to this revision.
    after: Revision,
    /// Received up to this revision, or there was nothing to receive.
    received: Revision,
    pending: VecDeque<Events>,
    connection: Connection,
}

enum Connection {
    /// It continues to be established if a future of [`Watch::next`] is dropped.
    Connecting(Connecting),
    Live(Box<Live>),
    Ended(WatchError),
}

/// A stream from a member.
struct Live {
    member: usize,
    responses: Streaming<pb::WatchResponse>,
    requests: mpsc::Sender<pb::WatchRequest>,
    /// The received part of a fragmented response.
    piece: Vec<pb::Event>,
    /// When to ask for progress.
    ask_at: Instant,
    is_asked: bool,
}

/// Why there is no stream.
#[derive(Clone)]
enum End {
    Watch(WatchError),
    Store(StoreError),
}

impl Watch {
    pub(super) async fn begin(client: &Arc<Client>, prefix: &str, after: Revision) -> Result<Watch, StoreError> {
        let prefix = format!("{}{prefix}", client.root);
        let connection = match connect(client.clone(), prefix.clone(), after, client.timeout).await {
            Ok(live) => Connection::Live(Box::new(live)),
            Err(End::Watch(error)) => Connection::Ended(error),
            Err(End::Store(error)) => return Err(error),
        };
        let (client, pending) = (client.clone(), VecDeque::new());
        Ok(Watch { client, prefix, after, received: after, pending, connection })
    }

    pub(crate) async fn next(&mut self) -> Result<Events, WatchError> {
        loop {
            if let Some(events) = self.pending.pop_front() {
                self.after = events.revision;
                return Ok(events);
            }
            self.after = self.after.max(self.received);
            match &mut self.connection {
                Connection::Ended(error) => return Err(error.clone()),
                Connection::Connecting(connecting) => {
                    self.connection = match connecting.await {
                        Ok(live) => Connection::Live(Box::new(live)),
                        Err(End::Watch(error)) => Connection::Ended(error),
                        Err(End::Store(error)) => Connection::Ended(WatchError::Lost(error)),
                    };
                }
                Connection::Live(live) => match live.receive().await {
                    Ok(response) => self.take(response),
                    Err(status) => self.lose(&status),
                },
            }
        }
    }

    pub(crate) fn revision(&self) -> Revision {
        self.after
    }

    fn take(&mut self, response: pb::WatchResponse) {
        if response.canceled {
            match ended(&response) {
                Ok(error) => self.connection = Connection::Ended(error),
                Err(status) => self.lose(&status),
            }
            return;
        }
        let Connection::Live(live) = &mut self.connection else { return };
        let is_progress =
            response.events.is_empty() && live.piece.is_empty() && !response.created && !response.fragment;
        if is_progress {
            self.received = self.received.max(revision(response.header.as_ref()));
        }
        live.piece.extend(response.events);
        if response.fragment {
            return;
        }
        let before = self.received;
        for event in std::mem::take(&mut live.piece) {
            let Some(kv) = event.kv else { continue };
            let at = kv.mod_revision.max(0) as u64;
            // A member that takes over does not repeat revisions; if one did, they are reported once.
            if at <= before {
                continue;
            }
            self.received = self.received.max(at);
            let Some(key) = read::key(&self.client, kv.key) else { continue };
            let value = (event.r#type != i32::from(EventType::Delete)).then_some(kv.value);
            match self.pending.back_mut().filter(|events| events.revision == at) {
                Some(events) => events.changes.push((key, value)),
                None => self.pending.push_back(Events { revision: at, changes: vec![(key, value)] }),
            }
        }
        for events in &mut self.pending {
            events.changes.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        }
    }

    /// The stream has ended: starts another one from the same revision.
    fn lose(&mut self, status: &Status) {
        match judge(status) {
            Verdict::Token => self.client.forget_token(),
            Verdict::Final(error) => return self.connection = Connection::Ended(WatchError::Lost(error)),
            Verdict::Compacted => return self.connection = Connection::Ended(WatchError::Compacted),
            Verdict::Again { .. } | Verdict::TooLarge => {
                if let Connection::Live(live) = &self.connection {
                    self.client.pass_over(live.member);
                }
            }
        }
        tracing::debug!("etcd: a watch continues with another member: {}", told(status));
        let patience = self.client.timeout * 3;
        let connecting = connect(self.client.clone(), self.prefix.clone(), self.received, patience);
        self.connection = Connection::Connecting(Box::pin(connecting));
    }
}

impl Live {
    /// The next response. A silent member is asked for progress; if it does not answer, it is lost.
    async fn receive(&mut self) -> Result<pb::WatchResponse, Status> {
        loop {
            let message = match tokio::time::timeout_at(self.ask_at, self.responses.message()).await {
                Ok(message) => message?,
                Err(_) if self.is_asked => return Err(Status::unavailable("the member does not answer")),
                Err(_) => {
                    let request = RequestUnion::ProgressRequest(pb::WatchProgressRequest {});
                    let request = pb::WatchRequest { request_union: Some(request) };
                    self.requests
                        .try_send(request)
                        .map_err(|_| Status::unavailable("the member accepts no requests"))?;
                    self.is_asked = true;
                    self.ask_at = Instant::now() + PROGRESS;
                    continue;
                }
            };
            // It is asked even if it sends much, which may all be old.
            if self.is_asked {
                self.is_asked = false;
                self.ask_at = Instant::now() + PROGRESS;
            }
            return message.ok_or_else(|| Status::unavailable("the member has ended the watch"));
        }
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").field("prefix", &self.prefix).field("after", &self.after).finish_non_exhaustive()
    }
}

/// Starts a stream with the current member, or the next one, within a timeout.
async fn connect(client: Arc<Client>, prefix: String, after: Revision, patience: Duration) -> Result<Live, End> {
    let end = Instant::now() + patience;
    let mut attempts = client.attempts();
    loop {
        let (member, channel) = client.member();
        let opened = tokio::time::timeout(BEGIN, open(&client, channel, &prefix, after)).await;
        let status = match opened {
            Ok(Ok((responses, requests))) => {
                let ask_at = Instant::now() + PROGRESS;
                return Ok(Live { member, responses, requests, piece: Vec::new(), ask_at, is_asked: false });
            }
            Ok(Err(Opened::Ended(error))) => return Err(End::Watch(error)),
            Ok(Err(Opened::Status(status))) => status,
            Err(_) => Status::deadline_exceeded("no answer in time"),
        };
        match judge(&status) {
            Verdict::Token => client.forget_token(),
            Verdict::Final(error) => return Err(End::Store(error)),
            Verdict::Compacted => return Err(End::Watch(WatchError::Compacted)),
            Verdict::Again { .. } | Verdict::TooLarge => client.pass_over(member),
        }
        if !attempts.pause().await {
            if Instant::now() >= end {
                return Err(End::Store(StoreError::Unavailable(told(&status))));
            }
            attempts = client.attempts();
        }
    }
}

enum Opened {
    Ended(WatchError),
    Status(Status),
}

/// Starts a stream, and waits until the member has confirmed it.
async fn open(
    client: &Client,
    channel: tonic::transport::Channel,
    prefix: &str,
    after: Revision,
) -> Result<(Streaming<pb::WatchResponse>, mpsc::Sender<pb::WatchRequest>), Opened> {
    let (key, range_end) = range_of(prefix);
    let create = pb::WatchCreateRequest {
        key,
        range_end,
        start_revision: after.saturating_add(1).min(i64::MAX as u64) as i64,
        // One revision may be larger than a message.
        fragment: true,
    };
    let (requests, outgoing) = mpsc::channel(4);
    let create = pb::WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    // The channel has room.
    let _ = requests.try_send(create);
    let outgoing = tokio_stream::wrappers::ReceiverStream::new(outgoing);
    let mut request = client.request(&channel, outgoing).await.map_err(Opened::Status)?;
    // A member that has lost its leader ends the watch.
    request.metadata_mut().insert("hasleader", MetadataValue::from_static("true"));
    let mut watch = WatchClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    let mut responses = watch.watch(request).await.map_err(Opened::Status)?.into_inner();
    loop {
        let response = responses.message().await.map_err(Opened::Status)?;
        let response = response.ok_or_else(|| Opened::Status(Status::unavailable("the member has ended the watch")))?;
        if response.canceled {
            return Err(ended(&response).map_or_else(Opened::Status, Opened::Ended));
        }
        if response.created {
            // A member may be behind. A store that is behind was restored from a backup: its next revisions differ from
            // those of the old store.
            if revision(response.header.as_ref()) < after && is_ahead(client, after).await? {
                return Err(Opened::Ended(WatchError::Compacted));
            }
            return Ok((responses, requests));
        }
    }
}

/// Whether the store has not reached a revision yet.
async fn is_ahead(client: &Client, after: Revision) -> Result<bool, Opened> {
    let now = read::current(client).await.map_err(|error| Opened::Status(Status::unavailable(error.to_string())))?;
    Ok(now < after)
}

/// Meaning of a watch that the member has cancelled: an end, or a failure to be judged.
fn ended(response: &pb::WatchResponse) -> Result<WatchError, Status> {
    let reason = response.cancel_reason.as_str();
    if response.compact_revision > 0 || reason.contains("compacted") {
        return Ok(WatchError::Compacted);
    }
    if reason.contains("permission denied") {
        return Ok(WatchError::Lost(StoreError::Refused(reason.to_owned())));
    }
    if reason.contains("invalid auth token") || reason.contains("is old") {
        return Err(Status::unauthenticated(reason));
    }
    Err(Status::unavailable(reason))
}
