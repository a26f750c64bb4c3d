//! A store in etcd. Any number of processes may have it, and each sees what the others do.
//!
//! Others may use the same etcd. Below [`EtcdOptions::markers`] each process has a few keys by which it finds out what became of a
//! transaction whose answer was lost (`commit.rs`).

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

/// What is made of `proto/etcd.proto`.
#[allow(missing_docs, unreachable_pub, dead_code, clippy::all, reason = "it is made by a program")]
mod pb {
    tonic::include_proto!("etcdserverpb");
}

/// Which etcd, and how.
#[derive(Clone, Debug)]
pub struct EtcdOptions {
    /// Members, such as `http://192.0.2.1:2379`. One is used at a time, and the next when it does not answer.
    pub endpoints: Vec<String>,
    /// What comes before each key in etcd, such as `/one/`; mostly nothing.
    pub root: String,
    /// What the keys begin with by which processes find out what became of their transactions. They are not shown. A user needs the permission
    /// to read and write them.
    pub markers: String,
    /// Needed for `https`.
    pub tls: Option<EtcdTls>,
    /// If etcd has authentication enabled, and not by certificates.
    pub user: Option<EtcdUser>,
    /// How long a request may take, with all that is tried again. A watch that does not reach a member for three times as long is lost.
    pub timeout: Duration,
}

/// Files for TLS, all PEM. They are read once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// Certificates of those who may vouch for members.
    pub ca: PathBuf,
    /// This end's certificate and private key, if etcd asks for one.
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
    /// Connects, and asks once.
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

/// The first key that begins with a prefix, and the end of those: the first key after them.
fn range_of(prefix: &str) -> (Vec<u8>, Vec<u8>) {
    let mut end = prefix.as_bytes().to_vec();
    match end.last_mut() {
        // UTF-8 has no byte 255.
        Some(last) => *last += 1,
        // The byte 0 means the first key here, and no end there.
        None => return (vec![0], vec![0]),
    }
    (prefix.as_bytes().to_vec(), end)
}
