//! A store in etcd. Any number of processes may open it, and each sees the changes of the others.
//!
//! The etcd may have other users. Below [`EtcdOptions::markers`] each process has a few keys that tell it the outcome
//! of a transaction whose response was lost (`commit.rs`).

mod client;
mod commit;
mod read;
mod watch;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use self::client::Client;
use self::commit::Markers;
pub(crate) use self::watch::Watch;
use crate::{CommitError, Revision, Snapshot, StoreError, Txn};

/// Generated from `proto/etcd.proto`.
#[allow(missing_docs, unreachable_pub, dead_code, clippy::all, reason = "generated code")]
mod pb {
    tonic::include_proto!("etcdserverpb");
}

/// Options of an etcd store.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// Members, such as `http://192.0.2.1:2379`. One is used at a time, and the next one if it does not answer.
    pub endpoints: Vec<String>,
    /// Prefix of each key in etcd, such as `/one/`; usually empty.
    pub root: String,
    /// Prefix of the keys by which processes find out the outcome of their transactions. Lists do not contain them. A
    /// user needs permission to read and write them.
    pub markers: String,
    /// TLS files; needed for `https`.
    pub tls: Option<EtcdTls>,
    /// User, if etcd has authentication enabled without client certificates.
    pub user: Option<EtcdUser>,
    /// Timeout of a request, retries included. A watch is lost if it does not reach a member for three times as long.
    pub timeout: Duration,
}

/// Files for TLS, all PEM. They are read once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// CA certificates for the members.
    pub ca: PathBuf,
    /// Client certificate and private key, if etcd requires them.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The name in the members' certificates; None: that of the address.
    pub name: Option<String>,
}

/// A user of etcd.
#[derive(Clone, PartialEq, Eq)]
pub struct EtcdUser {
    /// Its name.
    pub name: String,
    /// Its password.
    pub password: String,
}

impl Default for EtcdOptions {
    fn default() -> EtcdOptions {
        EtcdOptions {
            endpoints: vec!["http://127.0.0.1:2379".to_owned()],
            root: String::new(),
            markers: "/bifrost/commits/".to_owned(),
            tls: None,
            user: None,
            timeout: Duration::from_secs(10),
        }
    }
}

impl std::fmt::Debug for EtcdUser {
    /// Without the password.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EtcdUser").field("name", &self.name).finish_non_exhaustive()
    }
}

/// A store in etcd.
#[derive(Clone, Debug)]
pub(crate) struct Etcd(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    client: Arc<Client>,
    markers: Markers,
}

impl Etcd {
    /// Connects, and sends one request.
    pub(crate) async fn connect(options: EtcdOptions) -> Result<Etcd, StoreError> {
        let client = Arc::new(Client::new(options)?);
        let markers = Markers::new(&client.markers);
        markers.sweep(&client).await?;
        Ok(Etcd(Arc::new(Inner { client, markers })))
    }

    pub(crate) async fn snapshot(&self, prefix: &str) -> Result<Snapshot, StoreError> {
        read::snapshot(&self.0.client, prefix).await
    }

    pub(crate) async fn commit(&self, txn: &Txn) -> Result<Revision, CommitError> {
        commit::commit(&self.0.client, &self.0.markers, txn).await
    }

    pub(crate) async fn watch(&self, prefix: &str, after: Revision) -> Result<Watch, StoreError> {
        Watch::begin(&self.0.client, prefix, after).await
    }
}

/// etcd's revisions are positive.
fn revision(header: Option<&pb::ResponseHeader>) -> Revision {
    header.map_or(0, |header| header.revision.max(0) as u64)
}

/// The first key with a prefix, and the first key after all of these.
fn range_of(prefix: &str) -> (Vec<u8>, Vec<u8>) {
    let mut end = prefix.as_bytes().to_vec();
    match end.last_mut() {
        // UTF-8 has no byte 255.
        Some(last) => *last += 1,
        // In etcd's API, the byte 0 means the first key as a start, and no end as an end.
        None => return (vec![0], vec![0]),
    }
    (prefix.as_bytes().to_vec(), end)
}
