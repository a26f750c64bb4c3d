//! The store in a real etcd: against the simple model, and while networks and members fail. Needs etcd and etcdctl:
//! `BIFROST_ETCD=$(scripts/install-etcd.sh) cargo test -p bifrost-store --test etcd -- --ignored`.

#![allow(clippy::unwrap_used)]

mod cluster;
#[path = "../common/mod.rs"]
mod common;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use bifrost_store::{
    CommitError, EtcdOptions, EtcdTls, EtcdUser, Events, Revision, Store, StoreError, Txn, WatchError, Write, limits,
};
use cluster::{Cluster, Network, Proxy, connect};
use common::{Subject, run, soon, steps};
use proptest::test_runner::{Config, TestRunner};

struct InEtcd<'a> {
    store: Store,
    cluster: &'a RefCell<Cluster>,
}

impl Subject for InEtcd<'_> {
    fn store(&self) -> &Store {
        &self.store
    }

    async fn restart(&mut self) -> bool {
        self.cluster.borrow_mut().kill(0);
        self.cluster.borrow_mut().start_again(0);
        true
    }

    async fn compact(&mut self, revision: Revision) -> bool {
        // etcd keeps the revision that it is given; the next one must exist.
        self.cluster.borrow().ctl(&["put", "/elsewhere", ""]);
        self.cluster.borrow().ctl(&["compaction", &(revision + 1).to_string()]);
        true
    }

    fn remembers(&self) -> bool {
        true
    }

    fn lags(&self) -> bool {
        true
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

fn put(key: &str, value: &[u8]) -> Write {
    Write::Put { key: key.into(), value: value.into() }
}

fn txn(expect: &[(&str, Revision)], writes: Vec<Write>) -> Txn {
    Txn { expect: expect.iter().map(|(key, revision)| ((*key).to_owned(), *revision)).collect(), writes }
}

#[test]
#[ignore = "needs BIFROST_ETCD"]
fn it_behaves_like_the_model() {
    let runtime = runtime();
    let cluster = RefCell::new(Cluster::start(1, &[]));
    let case = RefCell::new(0);
    let config = Config { cases: 12, max_shrink_iters: 20, failure_persistence: None, ..Config::default() };
    let result = TestRunner::new(config).run(&steps(40), |steps| {
        *case.borrow_mut() += 1;
        runtime.block_on(async {
            let options = cluster.borrow().options(&format!("/{}/", case.borrow()));
            let store = connect(options).await;
            run(steps, &mut InEtcd { store, cluster: &cluster }).await;
        });
        Ok(())
    });
    result.unwrap();
}

#[test]
#[ignore = "needs BIFROST_ETCD"]
fn the_outcome_of_a_lost_response_is_found_and_nothing_is_committed_twice() {
    let cluster = Cluster::start(1, &[]);
    runtime().block_on(async {
        let direct = cluster.store("").await;
        let proxy = Proxy::start(cluster.address()).await;
        let store = connect(EtcdOptions { endpoints: vec![proxy.endpoint.clone()], ..EtcdOptions::default() }).await;
        let mut watch = direct.watch("", 0).await.unwrap();
        for round in 0..5u8 {
            // An existing connection.
            let first = store.commit(&txn(&[], vec![put("first", &[round])])).await.unwrap();
            assert_eq!(soon(watch.next()).await.unwrap().revision, first);
            proxy.set(Network::LosesAnswers).await;
            // With a condition, a second commit would be a conflict. Without one, it would be committed twice.
            let key = format!("k{round}");
            let expect: &[(&str, Revision)] = if round % 2 == 0 { &[(&key, 0)] } else { &[] };
            let revision = store.commit(&txn(expect, vec![put(&key, &[round])])).await.unwrap();
            let changes = vec![(key, Some(vec![round]))];
            assert_eq!(soon(watch.next()).await, Ok(Events { revision, changes }));
            // A conflict whose response is lost stays a conflict.
            proxy.set(Network::LosesAnswers).await;
            let conflict = store.commit(&txn(&[("first", first + 1)], vec![put("first", b"wrong")])).await;
            assert!(matches!(conflict, Err(CommitError::Conflict { key }) if key == "first"));
        }
        assert!(
            tokio::time::timeout(Duration::from_millis(100), watch.next()).await.is_err(),
            "nothing was committed twice"
        );
        // No member is reachable: the transaction was not committed, and the store knows.
        proxy.set(Network::Down).await;
        let options = EtcdOptions {
            endpoints: vec![proxy.endpoint.clone()],
            timeout: Duration::from_millis(500),
            ..EtcdOptions::default()
        };
        let error = Store::etcd(options).await.unwrap_err();
        assert!(matches!(error, StoreError::Unavailable(_)), "{error}");
    });
}

#[test]
#[ignore = "needs BIFROST_ETCD"]
fn a_disconnected_watch_continues_or_reports_that_it_cannot() {
    let cluster = Cluster::start(1, &[]);
    runtime().block_on(async {
        let direct = cluster.store("").await;
        let proxy = Proxy::start(cluster.address()).await;
        let store = connect(EtcdOptions { endpoints: vec![proxy.endpoint.clone()], ..EtcdOptions::default() }).await;
        let mut watch = store.watch("a", 0).await.unwrap();
        let first = direct.commit(&txn(&[], vec![put("a", b"1")])).await.unwrap();
        assert_eq!(soon(watch.next()).await.unwrap().revision, first);
        // Changes during the outage are reported afterwards.
        proxy.set(Network::Down).await;
        let second = direct.commit(&txn(&[], vec![put("a", b"2"), put("b", b"2")])).await.unwrap();
        assert!(tokio::time::timeout(Duration::from_millis(100), watch.next()).await.is_err());
        proxy.set(Network::Good).await;
        let events = Events { revision: second, changes: vec![("a".to_owned(), Some(b"2".to_vec()))] };
        assert_eq!(soon(watch.next()).await, Ok(events));
        // No changes under its prefix for a while: it learns the progress, so that a compaction does not matter.
        let other = direct.commit(&txn(&[], vec![put("b", b"3")])).await.unwrap();
        let begin = Instant::now();
        while watch.revision() < other {
            assert!(begin.elapsed() < Duration::from_secs(30), "{} of {other}", watch.revision());
            assert!(tokio::time::timeout(Duration::from_millis(100), watch.next()).await.is_err());
            // The next call reports the progress.
        }
        proxy.set(Network::Down).await;
        assert!(tokio::time::timeout(Duration::from_millis(100), watch.next()).await.is_err());
        cluster.ctl(&["compaction", &other.to_string()]);
        proxy.set(Network::Good).await;
        let fourth = direct.commit(&txn(&[], vec![put("a", b"4")])).await.unwrap();
        assert_eq!(soon(watch.next()).await.unwrap().revision, fourth);
        // Changes that are compacted during an outage are lost, and the watch reports that.
        proxy.set(Network::Down).await;
        assert!(tokio::time::timeout(Duration::from_millis(100), watch.next()).await.is_err());
        direct.commit(&txn(&[], vec![put("a", b"5")])).await.unwrap();
        let sixth = direct.commit(&txn(&[], vec![put("a", b"6")])).await.unwrap();
        cluster.ctl(&["compaction", &sixth.to_string()]);
        proxy.set(Network::Good).await;
        assert_eq!(soon(watch.next()).await, Err(WatchError::Compacted));
        assert_eq!(watch.next().await, Err(WatchError::Compacted));
    });
}

#[test]
#[ignore = "needs BIFROST_ETCD"]
fn killed_or_stopped_members_cost_time_but_no_transaction() {
    let mut cluster = Cluster::start(3, &[]);
    runtime().block_on(async {
        let store = cluster.store("").await;
        let mut watch = store.watch("", 0).await.unwrap();
        let (end, mut ended) = tokio::sync::watch::channel(false);
        let of_writer = store.clone();
        let writer = tokio::spawn(async move {
            let (mut made, mut unknown) = (BTreeMap::new(), Vec::new());
            for i in 0.. {
                let key = format!("k{i:06}");
                match of_writer.commit(&txn(&[(&key, 0)], vec![put(&key, b"")])).await {
                    Ok(revision) => drop(made.insert(key, revision)),
                    Err(CommitError::Unknown(_)) => unknown.push(key),
                    Err(CommitError::Store(StoreError::Unavailable(_))) => {}
                    Err(error) => panic!("{key}: {error}"),
                }
                if *ended.borrow_and_update() {
                    break;
                }
            }
            (made, unknown)
        });
        // One of them is the leader.
        for member in 0..3 {
            tokio::time::sleep(Duration::from_millis(500)).await;
            cluster.kill(member);
            tokio::time::sleep(Duration::from_millis(1500)).await;
            cluster.start_again(member);
            tokio::time::sleep(Duration::from_millis(1000)).await;
        }
        for member in 0..3 {
            cluster.stop(member, true);
            let begin = Instant::now();
            // The rest continues, whichever it was.
            soon(async { while store.commit(&txn(&[], vec![put("other", &[member as u8])])).await.is_err() {} }).await;
            assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
            cluster.stop(member, false);
        }
        end.send_replace(true);
        let (made, unknown) = soon(writer).await.unwrap();
        assert!(made.len() > 100, "{} transactions", made.len());
        assert_eq!(unknown, [] as [String; 0], "each outcome was found in time");
        let there: BTreeMap<String, Revision> = store
            .snapshot("k")
            .await
            .unwrap()
            .records
            .into_iter()
            .map(|record| (record.key, record.revision))
            .collect();
        assert_eq!(there, made);
        // And the watch has reported each once, in order.
        let mut told = BTreeMap::new();
        let mut last = 0;
        while told.len() < made.len() {
            let Events { revision, changes } = soon(watch.next()).await.unwrap();
            assert!(revision > last);
            last = revision;
            told.extend(changes.into_iter().filter(|(key, _)| key.starts_with('k')).map(|(key, _)| (key, revision)));
        }
        assert_eq!(told, made);
    });
}

#[test]
#[ignore = "needs BIFROST_ETCD"]
fn the_largest_transactions_and_lists_are_accepted() {
    let cluster = Cluster::start(1, &[]);
    runtime().block_on(async {
        let store = cluster.store("").await;
        let mut watch = store.watch("", 0).await.unwrap();
        let keys: Vec<_> = (0..limits::TXN_WRITES).map(|i| format!("k{i:04}")).collect();
        let expect: Vec<_> = keys.iter().map(|key| (key.as_str(), 0)).collect();
        let len = limits::TXN_BYTES / limits::TXN_WRITES - 2 * keys[0].len();
        let writes: Vec<_> = keys.iter().map(|key| put(key, &vec![7; len])).collect();
        let revision = store.commit(&txn(&expect, writes)).await.unwrap();
        let events = soon(watch.next()).await.unwrap();
        assert_eq!((events.revision, events.changes.len()), (revision, limits::TXN_WRITES));
        // The error names the last of many keys.
        let conflict = store.commit(&txn(&[("new", 0), ("k1000", 1)], vec![put("new", b"")])).await;
        assert!(matches!(conflict, Err(CommitError::Conflict { key }) if key == "k1000"));
        // More than a message: pages become smaller.
        for i in 0..40 {
            store.commit(&txn(&[], vec![put(&format!("large{i}"), &vec![i; limits::VALUE_BYTES])])).await.unwrap();
        }
        let snapshot = store.snapshot("").await.unwrap();
        assert_eq!(snapshot.records.len(), limits::TXN_WRITES + 40);
        assert!(snapshot.records.is_sorted_by(|a, b| a.key < b.key));
        assert_eq!(store.snapshot("large").await.unwrap().records.len(), 40);
    });
}

#[test]
#[ignore = "needs BIFROST_ETCD"]
fn errors_name_the_etcd_option_to_raise() {
    let cluster = Cluster::start(1, &["--max-txn-ops=128", "--max-request-bytes=1572864"]);
    runtime().block_on(async {
        let store = cluster.store("").await;
        let many = (0..200).map(|i| put(&format!("{i}"), b"")).collect();
        let error = store.commit(&txn(&[], many)).await.unwrap_err().to_string();
        assert!(error.contains("--max-txn-ops=1025"), "{error}");
        let large = ["a", "b"].map(|key| put(key, &vec![0; limits::VALUE_BYTES])).to_vec();
        let error = store.commit(&txn(&[], large)).await.unwrap_err().to_string();
        assert!(error.contains("--max-request-bytes=6291456"), "{error}");
        assert_eq!(store.snapshot("").await.unwrap().records, []);
    });
}

#[test]
#[ignore = "needs BIFROST_ETCD"]
fn users_and_certificates() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    let authority = rcgen::KeyPair::generate().unwrap();
    let mut parameters = rcgen::CertificateParams::new(vec![]).unwrap();
    parameters.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    let ca = parameters.self_signed(&authority).unwrap();
    let issuer = rcgen::Issuer::from_params(&parameters, &authority);
    std::fs::write(file("ca"), ca.pem()).unwrap();
    for (name, host) in [("server", "etcd.example"), ("client", "relay.example")] {
        let key = rcgen::KeyPair::generate().unwrap();
        let certificate =
            rcgen::CertificateParams::new(vec![host.to_owned()]).unwrap().signed_by(&key, &issuer).unwrap();
        std::fs::write(file(name), certificate.pem()).unwrap();
        std::fs::write(file(&format!("{name}.key")), key.serialize_pem()).unwrap();
    }
    let path = |name: &str| file(name).display().to_string();
    let arguments = [
        format!("--cert-file={}", path("server")),
        format!("--key-file={}", path("server.key")),
        "--client-cert-auth".to_owned(),
        format!("--trusted-ca-file={}", path("ca")),
    ];
    let mut cluster = Cluster::start(1, &arguments.each_ref().map(String::as_str));
    let identity = Some((file("client"), file("client.key")));
    let tls = Some(EtcdTls { ca: file("ca"), identity, name: Some("etcd.example".to_owned()) });
    let plain = EtcdOptions { tls: tls.clone(), ..cluster.options("/bifrost/") };
    let (ca, cert, key) = (path("ca"), path("client"), path("client.key"));
    let tls_arguments = [format!("--cacert={ca}"), format!("--cert={cert}"), format!("--key={key}")];
    runtime().block_on(async {
        connect(plain.clone()).await;
        let ctl = |arguments: &[&str]| {
            let all: Vec<&str> =
                tls_arguments.iter().map(String::as_str).chain(["--insecure-skip-tls-verify"]).collect();
            cluster.ctl(&[all.as_slice(), arguments].concat());
        };
        ctl(&["user", "add", "root:secret"]);
        ctl(&["user", "grant-role", "root", "root"]);
        ctl(&["role", "add", "relay"]);
        ctl(&["role", "grant-permission", "relay", "--prefix=true", "readwrite", "/bifrost/"]);
        ctl(&["user", "add", "relay:secret"]);
        ctl(&["user", "grant-role", "relay", "relay"]);
        ctl(&["auth", "enable"]);
        let user = |name: &str, password: &str| Some(EtcdUser { name: name.to_owned(), password: password.to_owned() });
        let error = Store::etcd(EtcdOptions { user: user("relay", "wrong"), ..plain.clone() }).await.unwrap_err();
        assert!(matches!(&error, StoreError::Refused(what) if what.contains("authentication failed")), "{error}");
        let untrusted = EtcdTls { name: Some("other.example".to_owned()), ..tls.clone().unwrap() };
        let timeout = Duration::from_secs(1);
        let options = EtcdOptions { tls: Some(untrusted), user: user("relay", "secret"), timeout, ..plain.clone() };
        let error = Store::etcd(options).await.unwrap_err().to_string();
        assert!(error.contains("not valid for name"), "{error}");
        // Keys outside the role are refused, at once.
        let options = EtcdOptions { user: user("relay", "secret"), ..plain };
        let elsewhere = Store::etcd(EtcdOptions { root: "/elsewhere/".to_owned(), ..options.clone() }).await.unwrap();
        let error = elsewhere.snapshot("").await.unwrap_err();
        assert!(matches!(error, StoreError::Refused(_)), "{error}");
        let error = elsewhere.commit(&txn(&[], vec![put("k", b"")])).await.unwrap_err();
        assert!(matches!(error, CommitError::Store(StoreError::Refused(_))), "{error}");
        let store = Store::etcd(options).await.unwrap();
        let mut watch = store.watch("", 0).await.unwrap();
        let first = store.commit(&txn(&[], vec![put("k", b"1")])).await.unwrap();
        assert_eq!(soon(watch.next()).await.unwrap().revision, first);
        // A restarted member knows no tokens: the store authenticates again.
        cluster.kill(0);
        cluster.start_again(0);
        let second = store.commit(&txn(&[("k", first)], vec![put("k", b"2")])).await.unwrap();
        assert_eq!(soon(watch.next()).await.unwrap().revision, second);
    });
}
