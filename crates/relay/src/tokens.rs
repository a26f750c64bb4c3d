//! Tokens with which hosts get their first certificates: in the store, so that any relay takes them.
//!
//! A host has one at a time, and the store only its secret's digest. A token is used up by the first key that comes with it. The same key
//! may come again, for an answer may be lost.

use bifrost_relay_api::enroll::{DIGEST, SECRET, digest, hex};
use bifrost_store::{CommitError, Record, Store, StoreError, Txn, Write};
use serde::{Deserialize, Serialize};

/// Everything of this in the store. It is no intent, and no backup needs it.
const PREFIX: &str = "/bifrost/enrollment/v1/";
/// How many tokens that have expired are removed at a time.
const MAX_SWEPT: usize = 100;
/// How often it is tried again, because somebody else has written the record.
const TRIES: usize = 3;

/// A token.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct TokenRecord {
    /// The digest of its secret.
    secret: String,
    /// When it expires, milliseconds since 1970.
    until_ms: u64,
    /// The digest of the key that has used it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
}

/// Why a token is not taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotTaken {
    /// The same for all reasons, so that nobody learns which hosts have tokens.
    #[error(
        "the token is not valid: it was replaced, used or has expired; \
         `bifrostctl fleet host enroll` makes another"
    )]
    Invalid,
    #[error("the store does not answer: {0}")]
    Store(#[from] StoreError),
    #[error("the store does not say whether it has it: {0}")]
    Unknown(String),
    #[error("others have written at the same time; try again")]
    Busy,
}

/// Keeps a host's new token, in place of an earlier one, until a time.
pub(crate) async fn put(
    store: &Store,
    host: &str,
    secret: &[u8; SECRET],
    until_ms: u64,
    now_ms: u64,
) -> Result<(), NotTaken> {
    let key = key(host);
    let all = store.snapshot(PREFIX).await?;
    let is_over = |record: &&Record| read(&record.value).is_none_or(|token| token.until_ms <= now_ms);
    let expired = all.records.iter().filter(|record| record.key != key).filter(is_over).take(MAX_SWEPT);
    let mut txn = Txn::default();
    for Record { key, revision, .. } in expired {
        txn.expect.push((key.clone(), *revision));
        txn.writes.push(Write::Delete { key: key.clone() });
    }
    let record = TokenRecord { secret: hex(&digest(secret)), until_ms, key: None };
    let put = write(key, &record);
    txn.writes.push(put.clone());
    match store.commit(&txn).await {
        // Another relay has swept the same records: the token itself depends on nothing.
        Err(CommitError::Conflict { .. }) => commit(store, Txn { expect: Vec::new(), writes: vec![put] }).await,
        result => settle(result),
    }
}

/// Uses up a host's token for a key.
pub(crate) async fn redeem(
    store: &Store,
    host: &str,
    secret: &[u8; SECRET],
    of_key: &[u8; DIGEST],
    now_ms: u64,
) -> Result<(), NotTaken> {
    let (name, of_key) = (key(host), hex(of_key));
    for _ in 0..TRIES {
        let all = store.snapshot(&name).await?;
        let found = all.records.iter().find(|record| record.key == name);
        let (record, revision) = found.and_then(|r| Some((read(&r.value)?, r.revision))).ok_or(NotTaken::Invalid)?;
        // Of digests: how long this takes says nothing of the secret.
        if record.secret != hex(&digest(secret)) || record.until_ms <= now_ms {
            return Err(NotTaken::Invalid);
        }
        match &record.key {
            Some(known) if *known == of_key => return Ok(()),
            Some(_) => return Err(NotTaken::Invalid),
            None => {}
        }
        let used = TokenRecord { key: Some(of_key.clone()), ..record };
        let txn = Txn { expect: vec![(name.clone(), revision)], writes: vec![write(name.clone(), &used)] };
        match store.commit(&txn).await {
            Err(CommitError::Conflict { .. }) => {}
            result => return settle(result),
        }
    }
    Err(NotTaken::Busy)
}

async fn commit(store: &Store, txn: Txn) -> Result<(), NotTaken> {
    settle(store.commit(&txn).await)
}

fn settle(result: Result<u64, CommitError>) -> Result<(), NotTaken> {
    match result {
        Ok(_) => Ok(()),
        Err(CommitError::Conflict { .. }) => Err(NotTaken::Busy),
        Err(CommitError::Store(error)) => Err(NotTaken::Store(error)),
        Err(CommitError::Unknown(error)) => Err(NotTaken::Unknown(error.to_string())),
    }
}

fn key(host: &str) -> String {
    format!("{PREFIX}{host}")
}

fn read(value: &[u8]) -> Option<TokenRecord> {
    serde_json::from_slice(value).ok()
}

fn write(key: String, record: &TokenRecord) -> Write {
    // Texts and a number: JSON has them all.
    Write::Put { key, value: serde_json::to_vec(record).unwrap_or_default() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET_1: [u8; SECRET] = [1; SECRET];
    const KEY: [u8; DIGEST] = [7; DIGEST];
    const OTHER_KEY: [u8; DIGEST] = [8; DIGEST];

    #[tokio::test]
    async fn a_token_is_of_one_host_one_key_and_some_time() {
        let store = Store::memory();
        put(&store, "h1", &SECRET_1, 1000, 0).await.unwrap();
        let redeem = async |host: &str, secret: &[u8; SECRET], key: &[u8; DIGEST], now: u64| {
            redeem(&store, host, secret, key, now).await.is_ok()
        };
        assert!(!redeem("h2", &SECRET_1, &KEY, 0).await, "another host's");
        assert!(!redeem("h", &SECRET_1, &KEY, 0).await, "a name that another begins with");
        assert!(!redeem("h1", &[2; SECRET], &KEY, 0).await, "another secret");
        assert!(!redeem("h1", &SECRET_1, &KEY, 1000).await, "it has expired");
        assert!(redeem("h1", &SECRET_1, &KEY, 999).await);
        assert!(redeem("h1", &SECRET_1, &KEY, 999).await, "the answer may have been lost");
        assert!(!redeem("h1", &SECRET_1, &OTHER_KEY, 999).await, "it was used");
        // A new one takes the place of the old one.
        put(&store, "h1", &[3; SECRET], 3000, 0).await.unwrap();
        assert!(!redeem("h1", &SECRET_1, &KEY, 0).await);
        assert!(redeem("h1", &[3; SECRET], &OTHER_KEY, 0).await);
        let text = format!("{:?}", store.snapshot("").await.unwrap());
        assert!(!text.contains(&hex(&[3; SECRET])), "the store does not have the secret");
    }

    #[tokio::test]
    async fn expired_tokens_are_removed() {
        let store = Store::memory();
        for n in 0..3 {
            put(&store, &format!("h{n}"), &SECRET_1, 1000 + n, 0).await.unwrap();
        }
        put(&store, "new", &SECRET_1, 9000, 1001).await.unwrap();
        let left = store.snapshot(PREFIX).await.unwrap().records;
        let left: Vec<_> = left.iter().map(|record| record.key.trim_start_matches(PREFIX)).collect();
        assert_eq!(left, ["h2", "new"]);
    }
}
