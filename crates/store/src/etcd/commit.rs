//! Transactions, each committed at most once, even if a response is lost.
//!
//! Each transaction also writes a *marker*: a key that only this process writes, and only for one transaction at a
//! time. The transaction is conditional on the marker's last revision, which this process knows. So it may be sent any
//! number of times: at most one attempt can succeed, however late it arrives, and the marker tells whether one did. If
//! the transaction is given up while an attempt may still be in flight, a *fence*, another value of the marker, ensures
//! that the attempt fails.

use std::sync::{Mutex, PoisonError};

use tokio::sync::Semaphore;
use tokio::time::{Duration, Instant};
use tonic::Request;
use tonic::transport::Channel;

use super::client::{Client, Failure, MAX_MESSAGE, Verdict, told};
use super::pb::compare::{CompareResult, CompareTarget, TargetUnion};
use super::pb::kv_client::KvClient;
use super::pb::request_op::Request as Op;
use super::pb::response_op::Response;
use super::read::range;
use super::{pb, range_of, revision};
use crate::{CommitError, Revision, StoreError, Txn, Write};

/// Maximum number of concurrent transactions. Others wait.
const AT_ONCE: usize = 64;
/// Value of a marker after a transaction.
const MADE: &[u8] = b"1";
/// Value of a marker after a fence.
const FENCED: &[u8] = b"0";
/// Markers whose last change is this many revisions ago belong to processes that have ended, or can be swept safely.
const OLD: i64 = 1_000_000;
/// Maximum number of old markers removed when a process starts.
const SWEPT: i64 = 100;
/// An existing marker is not swept within this time, because that many revisions take longer.
const NOT_SWEPT: Duration = Duration::from_secs(60);

/// Markers that no transaction uses at the moment.
#[derive(Debug)]
pub(super) struct Markers {
    prefix: String,
    free: Mutex<Vec<Marker>>,
    at_once: Semaphore,
}

/// A key of this process, and the revision of its last change; 0: it does not exist.
#[derive(Clone, Debug)]
struct Marker {
    key: Vec<u8>,
    revision: i64,
}

/// Meaning of a response.
enum Outcome {
    Made(Revision),
    /// The first key whose revision differs from the expected one.
    Conflict(String),
    Fenced(Revision),
    /// The marker was swept: no transaction that compares it can succeed any more.
    Swept,
    /// An invalid response.
    Nonsense,
}

/// Commits a transaction.
pub(super) async fn commit(client: &Client, markers: &Markers, txn: &Txn) -> Result<Revision, CommitError> {
    if txn.writes.is_empty() {
        return look(client, txn).await;
    }
    // It is never closed.
    let _permit = markers.at_once.acquire().await;
    let mut marker = markers.take();
    let mut attempts = client.attempts();
    let begin = Instant::now();
    // Whether an attempt may have succeeded, or still be in flight.
    let mut is_unsure = false;
    loop {
        let request = request(client, &marker, Some(txn));
        match client.attempt(request, make).await {
            Ok(answer) => match outcome(&answer, &marker, txn) {
                Outcome::Made(made) => {
                    markers.give(marker, made);
                    return Ok(made);
                }
                Outcome::Conflict(key) if !is_unsure => {
                    let revision = marker.revision as u64;
                    markers.give(marker, revision);
                    return Err(CommitError::Conflict { key });
                }
                Outcome::Conflict(key) => return fence(client, markers, marker, CommitError::Conflict { key }).await,
                // A successful attempt would have left the marker, unless that was long ago.
                Outcome::Swept if begin.elapsed() < NOT_SWEPT => (marker, is_unsure) = (markers.fresh(), false),
                Outcome::Swept | Outcome::Fenced(_) | Outcome::Nonsense => {
                    return Err(CommitError::Unknown("its marker was changed by another process".to_owned()));
                }
            },
            Err((Verdict::Again { is_sent }, status)) => {
                is_unsure |= is_sent;
                if !attempts.pause().await {
                    let why = told(&status);
                    return Err(if is_unsure {
                        CommitError::Unknown(why)
                    } else {
                        StoreError::Unavailable(why).into()
                    });
                }
            }
            Err((Verdict::Token, status)) => {
                if !attempts.pause().await {
                    let why = told(&status);
                    return Err(if is_unsure { CommitError::Unknown(why) } else { StoreError::Refused(why).into() });
                }
            }
            Err((Verdict::Final(error), _)) if is_unsure => {
                return fence(client, markers, marker, error.into()).await;
            }
            Err((Verdict::Final(error), _)) => {
                let revision = marker.revision as u64;
                markers.give(marker, revision);
                return Err(error.into());
            }
            Err((Verdict::Compacted | Verdict::TooLarge, status)) => return Err(CommitError::Unknown(told(&status))),
        }
    }
}

impl Markers {
    /// Markers below a prefix.
    pub(super) fn new(prefix: &str) -> Markers {
        Markers { prefix: prefix.to_owned(), free: Mutex::default(), at_once: Semaphore::new(AT_ONCE) }
    }

    /// Removes some old markers.
    pub(super) async fn sweep(&self, client: &Client) -> Result<(), StoreError> {
        let (key, range_end) = range_of(&self.prefix);
        let under = |limit, max_mod_revision| pb::RangeRequest {
            key: key.clone(),
            range_end: range_end.clone(),
            limit,
            keys_only: true,
            max_mod_revision,
            ..Default::default()
        };
        let now = failed(client.ask(under(1, 0), range).await)?;
        let before = now.header.map_or(0, |header| header.revision) - OLD;
        if before <= 0 {
            return Ok(());
        }
        let old = failed(client.ask(under(SWEPT, before), range).await)?;
        let compare = old.kvs.iter().map(|kv| compare(&kv.key, kv.mod_revision)).collect();
        let success =
            old.kvs.iter().map(|kv| op(Op::RequestDeleteRange(pb::DeleteRangeRequest { key: kv.key.clone() })));
        let request = pb::TxnRequest { compare, success: success.collect(), failure: Vec::new() };
        if !old.kvs.is_empty()
            && let Err((_, status)) = client.attempt(request, make).await
        {
            // The next process removes them.
            tracing::debug!("etcd: cannot remove old markers: {}", told(&status));
        }
        Ok(())
    }

    fn take(&self) -> Marker {
        let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        free.unwrap_or_else(|| self.fresh())
    }

    fn fresh(&self) -> Marker {
        Marker { key: format!("{}{:032x}", self.prefix, fastrand::u128(..)).into_bytes(), revision: 0 }
    }

    /// Call when the state of the marker is known. Otherwise it is never used again.
    fn give(&self, mut marker: Marker, revision: Revision) {
        marker.revision = revision as i64;
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(marker);
    }
}

/// A transaction that changes nothing: whether its conditions hold.
async fn look(client: &Client, txn: &Txn) -> Result<Revision, CommitError> {
    let compare = txn.expect.iter().map(|(key, revision)| compare(&under(client, key), *revision as i64)).collect();
    let request = pb::TxnRequest { compare, success: Vec::new(), failure: expected(client, txn) };
    let answer = failed(client.ask(request, make).await)?;
    if answer.succeeded {
        return Ok(revision(answer.header.as_ref()));
    }
    match unexpected(&answer.responses, txn) {
        Some(key) => Err(CommitError::Conflict { key }),
        None => Err(StoreError::Refused("etcd reports a conflict, but all keys are as expected".to_owned()).into()),
    }
}

/// Ensures that a given-up transaction cannot succeed any more, or finds out that it did.
async fn fence(
    client: &Client,
    markers: &Markers,
    marker: Marker,
    error: CommitError,
) -> Result<Revision, CommitError> {
    // It may be sent any number of times, like a transaction.
    let answer = match client.ask(request(client, &marker, None), make).await {
        Ok(answer) => answer,
        Err(Failure::Store(error)) => return Err(CommitError::Unknown(error.to_string())),
        Err(_) => return Err(CommitError::Unknown("etcd's answer is too large".to_owned())),
    };
    match outcome(&answer, &marker, &Txn::default()) {
        Outcome::Made(made) if !answer.succeeded => {
            markers.give(marker, made);
            Ok(made)
        }
        Outcome::Made(fenced) | Outcome::Fenced(fenced) => {
            markers.give(marker, fenced);
            Err(error)
        }
        _ => Err(CommitError::Unknown("its marker was changed by another process".to_owned())),
    }
}

/// A transaction with its marker; without one: a fence.
fn request(client: &Client, marker: &Marker, txn: Option<&Txn>) -> pb::TxnRequest {
    let mut compare = vec![self::compare(&marker.key, marker.revision)];
    let value = if txn.is_some() { MADE } else { FENCED };
    let mut success = vec![op(Op::RequestPut(pb::PutRequest { key: marker.key.clone(), value: value.to_vec() }))];
    let mut failure = vec![op(Op::RequestRange(pb::RangeRequest { key: marker.key.clone(), ..Default::default() }))];
    if let Some(txn) = txn {
        compare.extend(txn.expect.iter().map(|(key, revision)| self::compare(&under(client, key), *revision as i64)));
        success.extend(txn.writes.iter().map(|write| {
            let key = under(client, write.key());
            op(match write {
                Write::Put { value, .. } => Op::RequestPut(pb::PutRequest { key, value: value.clone() }),
                Write::Delete { .. } => Op::RequestDeleteRange(pb::DeleteRangeRequest { key }),
            })
        }));
        failure.extend(expected(client, txn));
    }
    pb::TxnRequest { compare, success, failure }
}

/// Meaning of a response to [`request`]. A fence that succeeded is [`Outcome::Made`], too.
fn outcome(answer: &pb::TxnResponse, marker: &Marker, txn: &Txn) -> Outcome {
    if answer.succeeded {
        return Outcome::Made(revision(answer.header.as_ref()));
    }
    let Some((first, rest)) = answer.responses.split_first() else { return Outcome::Nonsense };
    let Some(Response::ResponseRange(found)) = &first.response else { return Outcome::Nonsense };
    match found.kvs.first() {
        None if marker.revision != 0 => Outcome::Swept,
        Some(kv) if kv.mod_revision != marker.revision && kv.value == MADE => {
            Outcome::Made(kv.mod_revision.max(0) as u64)
        }
        Some(kv) if kv.mod_revision != marker.revision => Outcome::Fenced(kv.mod_revision.max(0) as u64),
        _ => unexpected(rest, txn).map_or(Outcome::Nonsense, Outcome::Conflict),
    }
}

/// The first key whose revision differs from the expected one.
fn unexpected(found: &[pb::ResponseOp], txn: &Txn) -> Option<String> {
    let differs = |(found, (_, expected)): &(&pb::ResponseOp, &(String, Revision))| {
        let Some(Response::ResponseRange(range)) = &found.response else { return false };
        range.kvs.first().map_or(0, |kv| kv.mod_revision) != *expected as i64
    };
    found.iter().zip(&txn.expect).find(differs).map(|(_, (key, _))| key.clone())
}

/// Reads the keys with expected revisions.
fn expected(client: &Client, txn: &Txn) -> Vec<pb::RequestOp> {
    let look = |key: &String| pb::RangeRequest { key: under(client, key), keys_only: true, ..Default::default() };
    txn.expect.iter().map(|(key, _)| op(Op::RequestRange(look(key)))).collect()
}

fn compare(key: &[u8], revision: i64) -> pb::Compare {
    pb::Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Mod.into(),
        key: key.to_vec(),
        target_union: Some(TargetUnion::ModRevision(revision)),
    }
}

fn op(op: Op) -> pb::RequestOp {
    pb::RequestOp { request: Some(op) }
}

fn under(client: &Client, key: &str) -> Vec<u8> {
    format!("{}{key}", client.root).into_bytes()
}

async fn make(channel: Channel, request: Request<pb::TxnRequest>) -> Result<pb::TxnResponse, tonic::Status> {
    let mut kv = KvClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    Ok(kv.txn(request).await?.into_inner())
}

fn failed<T>(result: Result<T, Failure>) -> Result<T, StoreError> {
    result.map_err(|failure| match failure {
        Failure::Store(error) => error,
        Failure::Compacted | Failure::TooLarge => {
            StoreError::Refused("etcd's response does not match the request".to_owned())
        }
    })
}
