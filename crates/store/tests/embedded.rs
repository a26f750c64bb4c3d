//! The embedded store against a simple model; crashes at every byte; two processes that open one directory.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::BTreeMap;
use std::path::Path;

use bifrost_store::{CommitError, Events, Revision, Store, StoreError, Txn, WatchError, Write};
use common::{Subject, run, soon, steps};
use proptest::prelude::*;

struct Embedded {
    store: Option<Store>,
    /// None: in memory.
    directory: Option<tempfile::TempDir>,
}

impl Subject for Embedded {
    fn store(&self) -> &Store {
        self.store.as_ref().unwrap()
    }

    async fn restart(&mut self) -> bool {
        let Some(directory) = &self.directory else { return false };
        self.store = None;
        self.store = Some(Store::open(directory.path()).unwrap());
        true
    }

    async fn compact(&mut self, _: Revision) -> bool {
        false
    }

    fn remembers(&self) -> bool {
        false
    }

    fn lags(&self) -> bool {
        false
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn put(key: &str, value: &[u8]) -> Write {
    Write::Put { key: key.into(), value: value.into() }
}

fn txn(writes: Vec<Write>) -> Txn {
    Txn { expect: vec![], writes }
}

fn journal(directory: &Path) -> std::path::PathBuf {
    directory.join("journal")
}

fn content(store: &Store) -> (Revision, BTreeMap<String, Vec<u8>>) {
    let snapshot = runtime().block_on(store.snapshot("")).unwrap();
    (snapshot.revision, snapshot.records.into_iter().map(|record| (record.key, record.value)).collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn in_memory_it_behaves_like_the_model(steps in steps(60)) {
        runtime().block_on(run(steps, &mut Embedded { store: Some(Store::memory()), directory: None }));
    }

    #[test]
    fn on_disk_it_behaves_like_the_model(steps in steps(60)) {
        let directory = tempfile::tempdir().unwrap();
        let store = Some(Store::open(directory.path()).unwrap());
        runtime().block_on(run(steps, &mut Embedded { store, directory: Some(directory) }));
    }

    #[test]
    fn truncated_anywhere_it_has_what_was_acknowledged_by_then(lens in prop::collection::vec(0..2000usize, 1..8), cut in 0.0..=1.0f64) {
        let directory = tempfile::tempdir().unwrap();
        let mut acknowledged = vec![(0, (0, BTreeMap::new()))];
        {
            let store = Store::open(directory.path()).unwrap();
            for (i, len) in lens.iter().enumerate() {
                let key = format!("k{}", i % 3);
                let writes = if i % 5 == 4 { vec![Write::Delete { key }] } else { vec![put(&key, &vec![i as u8; *len])] };
                runtime().block_on(store.commit(&txn(writes))).unwrap();
                acknowledged.push((std::fs::metadata(journal(directory.path())).unwrap().len(), content(&store)));
            }
        }
        let file = std::fs::OpenOptions::new().write(true).open(journal(directory.path())).unwrap();
        let len = (file.metadata().unwrap().len() as f64 * cut).round() as u64;
        file.set_len(len).unwrap();
        drop(file);
        let expected = acknowledged.iter().rev().find(|(at, _)| *at <= len).unwrap();
        let store = Store::open(directory.path()).unwrap();
        prop_assert_eq!(&content(&store), &expected.1);
        // It continues from there, and later frames are read again.
        let revision = runtime().block_on(store.commit(&txn(vec![put("k0", b"new")]))).unwrap();
        prop_assert_eq!(revision, expected.1.0 + 1);
        let before = content(&store);
        drop(store);
        prop_assert_eq!(content(&Store::open(directory.path()).unwrap()), before);
    }
}

#[test]
fn damage_in_the_middle_is_reported_with_file_and_offset_and_nothing_is_changed() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let mut ends = Vec::new();
    for i in 0..3 {
        runtime().block_on(store.commit(&txn(vec![put("k", &[i; 100])]))).unwrap();
        ends.push(std::fs::metadata(journal(directory.path())).unwrap().len());
    }
    drop(store);
    let mut bytes = std::fs::read(journal(directory.path())).unwrap();
    bytes[ends[0] as usize + 50] ^= 1;
    std::fs::write(journal(directory.path()), &bytes).unwrap();
    let error = Store::open(directory.path()).unwrap_err().to_string();
    let path = journal(directory.path()).display().to_string();
    let at = ends[0];
    assert_eq!(
        error,
        format!(
            "{path} is damaged at byte {at}: a frame has a wrong checksum. Restore it from a backup, or discard everything \
             after that offset (`truncate -s {at} {path}`)"
        )
    );
    assert_eq!(std::fs::read(journal(directory.path())).unwrap(), bytes);
    // The remedy in the error message works.
    bytes.truncate(at as usize);
    std::fs::write(journal(directory.path()), &bytes).unwrap();
    assert_eq!(content(&Store::open(directory.path()).unwrap()).0, 1);
}

#[test]
fn one_process_at_a_time() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let error = Store::open(directory.path()).unwrap_err();
    assert!(matches!(&error, StoreError::InUse(path) if path == directory.path()), "{error}");
    let other = store.clone();
    drop(store);
    Store::open(directory.path()).unwrap_err();
    drop(other);
    Store::open(directory.path()).unwrap();
}

#[test]
fn the_journal_stays_short_after_many_changes() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let mut longest = 0;
    runtime().block_on(async {
        for i in 0..200u32 {
            let value = vec![i as u8; 200_000];
            store.commit(&txn(vec![put("large", &value), put(&format!("k{i}"), b"1")])).await.unwrap();
            longest = longest.max(std::fs::metadata(journal(directory.path())).unwrap().len());
        }
    });
    assert!(longest < 6 << 20, "{longest} bytes after writing 40 MB");
    let before = content(&store);
    assert_eq!((before.0, before.1.len()), (200, 201));
    drop(store);
    assert_eq!(content(&Store::open(directory.path()).unwrap()), before);
    assert!(!directory.path().join("journal.next").exists());
}

#[test]
fn concurrent_commits_get_distinct_revisions_and_one_wins_each_race() {
    const TASKS: u64 = 64;
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let mut revisions = runtime.block_on(async {
        let mut tasks = tokio::task::JoinSet::new();
        for task in 0..TASKS {
            let store = store.clone();
            tasks.spawn(async move {
                // A counter: read it, and write it if it is unchanged.
                loop {
                    let read = store.snapshot("counter").await.unwrap();
                    let (value, last) = read.records.first().map_or((0, 0), |record| {
                        (u64::from_le_bytes(record.value.as_slice().try_into().unwrap()), record.revision)
                    });
                    let writes = vec![put("counter", &(value + 1).to_le_bytes()), put(&format!("task{task}"), b"")];
                    match store.commit(&Txn { expect: vec![("counter".into(), last)], writes }).await {
                        Ok(revision) => return revision,
                        Err(CommitError::Conflict { key }) => assert_eq!(key, "counter"),
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
        tasks.join_all().await
    });
    revisions.sort_unstable();
    assert_eq!(revisions, (1..=TASKS).collect::<Vec<_>>());
    drop(store);
    let (_, records) = content(&Store::open(directory.path()).unwrap());
    assert_eq!(records["counter"], TASKS.to_le_bytes());
    assert_eq!(records.len() as u64, TASKS + 1);
}

#[test]
fn a_watch_that_is_too_far_behind_reports_it() {
    runtime().block_on(async {
        let store = Store::memory();
        let mut behind = store.watch("k", 0).await.unwrap();
        let mut elsewhere = store.watch("other", 0).await.unwrap();
        for _ in 0..=bifrost_store::limits::RECENT_REVISIONS {
            store.commit(&txn(vec![put("k", b"")])).await.unwrap();
            // It is polled meanwhile, so it knows that nothing has changed.
            tokio::select! {
                biased;
                events = elsewhere.next() => panic!("{events:?}"),
                () = std::future::ready(()) => {}
            }
        }
        assert_eq!(behind.next().await, Err(WatchError::Compacted));
        assert_eq!(behind.next().await, Err(WatchError::Compacted));
        let revision = store.commit(&txn(vec![put("other", b"1")])).await.unwrap();
        let changes = vec![("other".to_owned(), Some(b"1".to_vec()))];
        assert_eq!(soon(elsewhere.next()).await, Ok(Events { revision, changes }));
        // A revision that does not exist belongs to another store.
        let mut beyond = store.watch("", revision + 1).await.unwrap();
        assert_eq!(beyond.next().await, Err(WatchError::Compacted));
    });
}

#[test]
fn a_watch_waits_and_ends_with_the_store() {
    runtime().block_on(async {
        let store = Store::memory();
        let mut watch = store.watch("", 0).await.unwrap();
        let task = tokio::spawn(async move { (watch.next().await, watch.next().await) });
        tokio::task::yield_now().await;
        let writes = vec![put("b", b"1"), put("a", b"2")];
        store.commit(&txn(writes)).await.unwrap();
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
        drop(store);
        let (events, end) = soon(task).await.unwrap();
        let changes = [("a", b"2"), ("b", b"1")].map(|(key, value)| (key.to_owned(), Some(value.to_vec()))).to_vec();
        assert_eq!(events, Ok(Events { revision: 1, changes }));
        assert_eq!(end, Err(WatchError::Lost(StoreError::Closed)));
    });
}

#[test]
fn too_large_transactions_are_refused_before_any_change() {
    runtime().block_on(async {
        let store = Store::memory();
        let value = vec![0; bifrost_store::limits::VALUE_BYTES + 1];
        let error = store.commit(&txn(vec![put("k", &value)])).await.unwrap_err();
        assert!(matches!(error, CommitError::Store(StoreError::Invalid(_))), "{error}");
        assert_eq!(store.snapshot("").await.unwrap().revision, 0);
    });
}
