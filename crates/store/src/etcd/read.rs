//! Lists.

use tonic::Request;
use tonic::transport::Channel;

use super::client::{Client, Failure, MAX_MESSAGE};
use super::pb::kv_client::KvClient;
use super::{pb, range_of, revision};
use crate::{Record, Revision, Snapshot, StoreError};

/// Initial page size, keys.
const PAGE: i64 = 1000;
/// How often a list is restarted because its revision was compacted.
const TIMES: usize = 5;

/// All keys with a prefix, page by page, at the revision of the first page.
pub(super) async fn snapshot(client: &Client, prefix: &str) -> Result<Snapshot, StoreError> {
    for _ in 0..TIMES {
        match pages(client, prefix).await {
            Ok(snapshot) => return Ok(snapshot),
            Err(Failure::Store(error)) => return Err(error),
            Err(Failure::TooLarge) => {
                return Err(StoreError::Refused(format!("a value has more than {MAX_MESSAGE} bytes")));
            }
            Err(Failure::Compacted) => {}
        }
    }
    Err(StoreError::Unavailable("etcd is compacted faster than it can be listed: keep more revisions".to_owned()))
}

/// The store's newest revision.
pub(super) async fn current(client: &Client) -> Result<Revision, StoreError> {
    // Any key will do if the user has permission to read it.
    let key = client.markers.clone().into_bytes();
    let request = pb::RangeRequest { key, limit: 1, keys_only: true, ..Default::default() };
    match client.ask(request, range).await {
        Ok(answer) => Ok(revision(answer.header.as_ref())),
        Err(Failure::Store(error)) => Err(error),
        Err(Failure::Compacted | Failure::TooLarge) => {
            Err(StoreError::Refused("etcd's response does not match the request".to_owned()))
        }
    }
}

async fn pages(client: &Client, prefix: &str) -> Result<Snapshot, Failure> {
    let (key, range_end) = range_of(&format!("{}{prefix}", client.root));
    let mut request = pb::RangeRequest { key, range_end, limit: PAGE, ..Default::default() };
    let mut snapshot = Snapshot::default();
    loop {
        let page = match client.ask(request.clone(), range).await {
            Err(Failure::TooLarge) if request.limit > 1 => {
                request.limit = (request.limit / 8).max(1);
                continue;
            }
            page => page?,
        };
        if request.revision == 0 {
            snapshot.revision = revision(page.header.as_ref());
            request.revision = snapshot.revision as i64;
        }
        if let Some(last) = page.kvs.last() {
            request.key = [last.key.as_slice(), &[0]].concat();
        }
        let is_more = page.more && !page.kvs.is_empty();
        snapshot.records.extend(page.kvs.into_iter().filter_map(|kv| record(client, kv)));
        if !is_more {
            return Ok(snapshot);
        }
    }
}

pub(super) async fn range(
    channel: Channel,
    request: Request<pb::RangeRequest>,
) -> Result<pb::RangeResponse, tonic::Status> {
    let mut kv = KvClient::new(channel).max_decoding_message_size(MAX_MESSAGE);
    Ok(kv.range(request).await?.into_inner())
}

fn record(client: &Client, kv: pb::KeyValue) -> Option<Record> {
    let key = key(client, kv.key)?;
    Some(Record { key, value: kv.value, revision: kv.mod_revision.max(0) as Revision })
}

/// A key without the root, unless it is a marker. Keys that are not UTF-8 belong to others.
pub(super) fn key(client: &Client, key: Vec<u8>) -> Option<String> {
    if key.starts_with(client.markers.as_bytes()) {
        return None;
    }
    let key = match String::from_utf8(key) {
        Ok(key) => key,
        Err(error) => {
            tracing::warn!("etcd: key {:?} is not UTF-8, and left out", String::from_utf8_lossy(error.as_bytes()));
            return None;
        }
    };
    key.strip_prefix(&client.root).filter(|key| !key.is_empty()).map(str::to_owned)
}
