//! The store against a plain oracle, over restarts, and with files that were cut or damaged.

use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;

use crate::{CommitError, Events, MAX_TXN, MAX_VALUE, OpenError, Revision, Store, Txn, WatchError, Write};

fn wait<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap().block_on(future)
}

fn put(key: &str, value: &[u8]) -> Write {
    Write::Put { key: key.to_owned(), value: value.to_vec() }
}

fn txn(expect: &[(&str, Revision)], writes: Vec<Write>) -> Txn {
    Txn { expect: expect.iter().map(|(key, revision)| ((*key).to_owned(), *revision)).collect(), writes }
}

fn all(store: &Store) -> (Revision, Vec<(String, Vec<u8>, Revision)>) {
    let snapshot = wait(store.snapshot("")).unwrap();
    (snapshot.revision, snapshot.records.into_iter().map(|r| (r.key, r.value, r.revision)).collect())
}

#[test]
fn transactions_are_made_only_as_expected() {
    let store = Store::memory();
    assert_eq!(wait(store.commit(&txn(&[("a", 0)], vec![put("a", b"1"), put("b", b"2")]))), Ok(1));
    let conflict = |key: &str| Err(CommitError::Conflict { key: key.to_owned() });
    assert_eq!(wait(store.commit(&txn(&[("a", 0)], vec![put("a", b"3")]))), conflict("a"));
    assert_eq!(wait(store.commit(&txn(&[("a", 1), ("c", 1)], vec![put("a", b"3")]))), conflict("c"));
    assert_eq!(wait(store.commit(&txn(&[("a", 1)], vec![Write::Delete { key: "a".into() }]))), Ok(2));
    assert_eq!(wait(store.commit(&txn(&[("a", 0), ("b", 1)], vec![put("b", b"4")]))), Ok(3));
    assert_eq!(all(&store), (3, vec![("b".into(), b"4".to_vec(), 3)]));
    let prefixed = wait(store.snapshot("c")).unwrap();
    assert_eq!((prefixed.revision, prefixed.records.len()), (3, 0));
}

#[test]
fn what_is_too_much_is_refused() {
    let store = Store::memory();
    let refused = |txn: Txn| matches!(wait(store.commit(&txn)), Err(CommitError::Store(_)));
    assert!(refused(txn(&[], vec![put("a", &vec![0; MAX_VALUE + 1])])));
    assert!(refused(txn(&[], vec![put("", b"")])));
    assert!(refused(txn(&[], vec![put(&"a".repeat(1025), b"")])));
    assert!(refused(txn(&[], vec![put("a", b""), Write::Delete { key: "a".into() }])));
    assert!(refused(txn(&[], (0..=MAX_TXN).map(|n| put(&n.to_string(), b"")).collect())));
    assert_eq!(all(&store).0, 0);
}

#[test]
fn a_watch_brings_each_transaction_as_a_whole() {
    let store = Store::memory();
    wait(async {
        store.commit(&txn(&[], vec![put("a/1", b"1")])).await.unwrap();
        let mut watch = store.watch("a/", 1).await.unwrap();
        store
            .commit(&txn(&[], vec![put("a/2", b"2"), put("b/1", b"x"), Write::Delete { key: "a/1".into() }]))
            .await
            .unwrap();
        store.commit(&txn(&[], vec![put("b/2", b"x")])).await.unwrap();
        let events = watch.next().await.unwrap();
        let changes = vec![("a/2".to_owned(), Some(b"2".to_vec())), ("a/1".to_owned(), None)];
        assert_eq!(events, Events { revision: 2, changes });
        // What comes while it waits.
        let waiting = tokio::spawn(async move { watch.next().await });
        tokio::task::yield_now().await;
        store.commit(&txn(&[], vec![put("a/3", b"3")])).await.unwrap();
        assert_eq!(waiting.await.unwrap().unwrap().revision, 4);
        // From the beginning.
        let mut watch = store.watch("a/", 0).await.unwrap();
        assert_eq!(watch.next().await.unwrap().revision, 1);
    });
}

#[test]
fn a_watch_of_what_is_no_longer_kept_says_so() {
    let store = Store::memory();
    wait(async {
        for n in 0..super::KEPT_TRANSACTIONS + 5 {
            store.commit(&txn(&[], vec![put("a", n.to_string().as_bytes())])).await.unwrap();
        }
        assert_eq!(store.watch("a", 4).await.unwrap().next().await, Err(WatchError::Compacted));
        assert_eq!(store.watch("a", 5).await.unwrap().next().await.unwrap().revision, 6);
    });
    // Over a restart nothing is kept but what there is.
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    wait(store.commit(&txn(&[], vec![put("a", b"1")]))).unwrap();
    drop(store);
    let store = Store::open(directory.path()).unwrap();
    assert_eq!(wait(async { store.watch("a", 0).await.unwrap().next().await }), Err(WatchError::Compacted));
}

#[test]
fn only_one_process_has_it_open() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    assert!(matches!(Store::open(directory.path()), Err(OpenError::InUse)));
    drop(store);
    Store::open(directory.path()).unwrap();
}

#[test]
fn damage_is_told_with_its_line() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    for n in 0..3u8 {
        wait(store.commit(&txn(&[], vec![put("key", &[b'a' + n])]))).unwrap();
    }
    drop(store);
    let path = directory.path().join("journal");
    let good = std::fs::read_to_string(&path).unwrap();
    let lines: Vec<&str> = good.lines().collect();
    assert_eq!(lines.len(), 4, "{good}");
    let joined = |lines: &[&str]| lines.join("\n") + "\n";
    let cases = [
        (good.replacen("\"a\"", "\"x\"", 1), 2, "its checksum is not that of its text"),
        (joined(&[lines[0], lines[2], lines[3]]), 2, "does not follow the line before it"),
        (joined(&[lines[1], lines[0], lines[2], lines[3]]), 1, "does not follow the line before it"),
        (joined(&[lines[0], "", lines[1], lines[2]]), 2, "is not whole"),
        (joined(&["deadbeef {}", lines[0]]), 1, "its checksum is not that of its text"),
    ];
    for (text, line, expected) in cases {
        std::fs::write(&path, text).unwrap();
        match Store::open(directory.path()) {
            Err(OpenError::Damaged { line: at, what, .. }) => assert_eq!((at, &*what), (line, expected)),
            other => panic!("{other:?} instead of {expected}"),
        }
    }
    std::fs::write(&path, &good).unwrap();
    assert_eq!(all(&Store::open(directory.path()).unwrap()).0, 3);
}

#[test]
fn a_journal_does_not_grow_forever() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).unwrap();
    let length = |directory: &Path| std::fs::metadata(directory.join("journal")).unwrap().len();
    let mut longest = 0;
    for n in 0..60u8 {
        wait(store.commit(&txn(&[], vec![put("key", &vec![n; 200_000])]))).unwrap();
        longest = longest.max(length(directory.path()));
    }
    // 60 values of 200,000 bytes, control characters in six bytes each.
    assert!(length(directory.path()) < 8 << 20 && longest < 10 << 20, "{longest}");
    let before = all(&store);
    drop(store);
    assert_eq!(all(&Store::open(directory.path()).unwrap()), before);
}

/// Expectations, and whether they hold; writes.
type Step = (Vec<(u8, bool)>, Vec<(u8, Option<Vec<u8>>)>);

/// A transaction of a few keys, with expectations that mostly hold.
fn transaction() -> impl Strategy<Value = Step> {
    let expect = prop::collection::vec((0..6u8, prop::bool::weighted(0.9)), 0..3);
    let value = prop::option::weighted(0.7, prop::collection::vec(any::<u8>(), 0..8));
    let writes = prop::collection::btree_map(0..6u8, value, 0..4);
    (expect, writes.prop_map(|writes| writes.into_iter().collect()))
}

type Oracle = BTreeMap<String, (Vec<u8>, Revision)>;

fn key(n: u8) -> String {
    format!("key{n}")
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

    /// Whatever is written, over restarts: what is there is what the oracle has; and a file that was cut at any byte has what was
    /// acknowledged until then.
    #[test]
    fn it_is_what_a_plain_map_is(steps in prop::collection::vec((transaction(), prop::bool::weighted(0.1)), 1..40), cut in any::<prop::sample::Index>()) {
        let directory = tempfile::tempdir().unwrap();
        let mut store = Store::open(directory.path()).unwrap();
        let (mut oracle, mut revision): (Oracle, Revision) = (Oracle::new(), 0);
        // What there was when the file had so many bytes.
        let mut history = Vec::new();
        let path = directory.path().join("journal");
        for ((expect, writes), restart) in steps {
            let has = |n: u8| oracle.get(&key(n)).map_or(0, |(_, revision)| *revision);
            let expect: Vec<_> = expect.iter().map(|(n, holds)| (key(*n), has(*n) + u64::from(!holds))).collect();
            let holds = expect.iter().all(|(key, revision)| oracle.get(key).map_or(0, |(_, r)| *r) == *revision);
            let writes: Vec<Write> = writes.into_iter().map(|(n, value)| match value {
                Some(value) => Write::Put { key: key(n), value },
                None => Write::Delete { key: key(n) },
            }).collect();
            let made = wait(store.commit(&Txn { expect, writes: writes.clone() }));
            if holds {
                revision += 1;
                prop_assert_eq!(made, Ok(revision));
                for write in writes {
                    match write {
                        Write::Put { key, value } => drop(oracle.insert(key, (value, revision))),
                        Write::Delete { key } => drop(oracle.remove(&key)),
                    }
                }
            } else {
                let is_conflict = matches!(made, Err(CommitError::Conflict { .. }));
                prop_assert!(is_conflict);
            }
            if restart {
                drop(store);
                store = Store::open(directory.path()).unwrap();
            }
            let wanted = oracle.iter().map(|(key, (value, r))| (key.clone(), value.clone(), *r)).collect::<Vec<_>>();
            prop_assert_eq!(all(&store), (revision, wanted.clone()));
            history.push((std::fs::metadata(&path).unwrap().len(), revision, wanted));
        }
        drop(store);
        let whole = std::fs::read(&path).unwrap();
        let base = whole.iter().position(|byte| *byte == b'\n').unwrap() + 1;
        let length = base + cut.index(whole.len() - base + 1);
        std::fs::write(&path, &whole[..length]).unwrap();
        let expected = history.iter().rev().find(|(bytes, ..)| *bytes <= length as u64);
        let expected = expected.map_or((0, Vec::new()), |(_, revision, all)| (*revision, all.clone()));
        let store = Store::open(directory.path()).unwrap();
        prop_assert_eq!(all(&store), expected.clone());
        // It goes on from there.
        prop_assert_eq!(wait(store.commit(&txn(&[], vec![put("more", b"1")]))), Ok(expected.0 + 1));
    }
}
