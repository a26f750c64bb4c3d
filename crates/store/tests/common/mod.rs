//! A simple model of a store, and random operations to compare a real store with it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use bifrost_store::{CommitError, Events, Record, Revision, Store, Txn, Watch, WatchError, Write};
use proptest::prelude::*;

const KEYS: [&str; 7] = ["a", "a/", "a/1", "a/2", "ab", "b/1", "ü/1"];
const PREFIXES: [&str; 6] = ["", "a", "a/", "b", "nothing", "ü"];
/// Timeout for expected events.
const SOON: Duration = Duration::from_secs(60);

/// One operation.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    Commit {
        /// Keys by number, and their new values; None: deleted.
        writes: BTreeMap<usize, Option<u8>>,
        /// Keys by number, and the expected age of their last change, in changes; mostly 0, which is right.
        expect: BTreeMap<usize, usize>,
    },
    Snapshot(usize),
    /// A new watch of this prefix, from this many revisions ago.
    Watch(usize, usize),
    /// Reads all pending events of the watches.
    Drain,
    Restart,
    /// Forgets the history before this many revisions ago.
    Compact(usize),
}

/// A store under test.
#[allow(async_fn_in_trait, reason = "only for tests")]
pub(crate) trait Subject {
    fn store(&self) -> &Store;
    /// Restarts it. False: it cannot be restarted.
    async fn restart(&mut self) -> bool;
    /// Forgets the history before this revision. False: it cannot be told to.
    async fn compact(&mut self, revision: Revision) -> bool;
    /// Whether watches and history survive a restart.
    fn remembers(&self) -> bool;
    /// Whether a watch knows only of changes below its prefix, and now and then of the others. When it starts, or
    /// continues after a restart, the changes after the last one that it knows may have been forgotten.
    fn lags(&self) -> bool;
}

#[derive(Default)]
struct Model {
    /// The store's revisions after each transaction; the first is 0.
    revisions: Vec<Revision>,
    /// Values, and the index into `revisions` of their last change.
    records: BTreeMap<String, (Vec<u8>, usize)>,
    /// The changes of each transaction.
    changes: Vec<BTreeMap<String, Option<Vec<u8>>>>,
    /// Watches from before this index must report that it is forgotten.
    forgotten: usize,
    watches: Vec<(Watch, &'static str, usize)>,
    /// Whether a watch without changes may not know the newest revision yet.
    lags: bool,
}

pub(crate) fn steps(count: usize) -> impl Strategy<Value = Vec<Step>> {
    let key = 0..KEYS.len();
    let writes = prop::collection::btree_map(key.clone(), prop::option::weighted(0.7, any::<u8>()), 0..4);
    let ago = prop_oneof![8 => Just(0usize), 1 => Just(1usize), 1 => Just(usize::MAX)];
    let expect = prop::collection::btree_map(key, ago, 0..4);
    let step = prop_oneof![
        10 => (writes, expect).prop_map(|(writes, expect)| Step::Commit { writes, expect }),
        2 => (0..PREFIXES.len()).prop_map(Step::Snapshot),
        2 => (0..PREFIXES.len(), 0..8usize).prop_map(|(prefix, ago)| Step::Watch(prefix, ago)),
        2 => Just(Step::Drain),
        1 => Just(Step::Restart),
        1 => (0..4usize).prop_map(Step::Compact),
    ];
    prop::collection::vec(step, 1..count)
}

/// Executes all steps, and compares the store with the model.
pub(crate) async fn run(steps: Vec<Step>, subject: &mut impl Subject) {
    let first = subject.store().snapshot("").await.unwrap();
    assert_eq!(first.records, []);
    let mut model = Model {
        revisions: vec![first.revision],
        changes: vec![BTreeMap::new()],
        lags: subject.lags(),
        ..Model::default()
    };
    for step in steps {
        match step {
            Step::Commit { writes, expect } => model.commit(subject.store(), &writes, &expect).await,
            Step::Snapshot(prefix) => model.compare(subject.store(), PREFIXES[prefix]).await,
            Step::Watch(prefix, ago) => {
                let from = model.newest().saturating_sub(ago);
                let watch = subject.store().watch(PREFIXES[prefix], model.revisions[from]).await.unwrap();
                model.watches.push((watch, PREFIXES[prefix], from));
            }
            Step::Drain => model.drain().await,
            Step::Restart => {
                if subject.restart().await && !subject.remembers() {
                    let newest = model.newest();
                    let forgotten = std::mem::replace(&mut model.forgotten, newest);
                    for (watch, _, at) in &mut model.watches {
                        // It may first report what it already knew.
                        let last = async {
                            loop {
                                if let Err(error) = watch.next().await {
                                    break error;
                                }
                            }
                        };
                        match soon(last).await {
                            WatchError::Lost(_) => assert!(*at >= forgotten),
                            WatchError::Compacted => assert!(*at < forgotten),
                        }
                    }
                    model.watches.clear();
                }
            }
            Step::Compact(ago) => {
                // Watches that are behind may or may not report an error.
                model.drain().await;
                let at = model.newest().saturating_sub(ago);
                if at > model.forgotten && subject.compact(model.revisions[at]).await {
                    model.forgotten = at;
                }
            }
        }
    }
    model.drain().await;
    for prefix in PREFIXES {
        model.compare(subject.store(), prefix).await;
    }
}

impl Model {
    fn newest(&self) -> usize {
        self.revisions.len() - 1
    }

    async fn commit(&mut self, store: &Store, writes: &BTreeMap<usize, Option<u8>>, expect: &BTreeMap<usize, usize>) {
        let mut txn = Txn::default();
        let mut wrong = BTreeSet::new();
        for (key, ago) in expect {
            let key = KEYS[*key];
            let last = self.records.get(key).map_or(0, |(_, index)| self.revisions[*index]);
            let expected = if *ago == 0 { last } else { last.saturating_sub(*ago as u64) };
            if expected != last {
                wrong.insert(key.to_owned());
            }
            txn.expect.push((key.to_owned(), expected));
        }
        let mut changes = BTreeMap::new();
        for (key, value) in writes {
            let key = KEYS[*key].to_owned();
            // Lengths depend on the value, so that they differ much.
            let value = value.map(|value| vec![value; usize::from(value) * usize::from(value % 16)]);
            txn.writes.push(match value.clone() {
                Some(value) => Write::Put { key: key.clone(), value },
                None => Write::Delete { key: key.clone() },
            });
            if value.is_some() || self.records.contains_key(&key) {
                changes.insert(key, value);
            }
        }
        match store.commit(&txn).await {
            Err(CommitError::Conflict { key }) => assert!(wrong.contains(&key), "{key} was as expected: {txn:?}"),
            Err(error) => panic!("{error}"),
            Ok(revision) => {
                assert!(wrong.is_empty(), "not as expected: {wrong:?}");
                if changes.is_empty() {
                    assert!(revision >= self.revisions[self.newest()]);
                    return;
                }
                assert!(revision > self.revisions[self.newest()]);
                self.revisions.push(revision);
                for (key, value) in &changes {
                    match value {
                        Some(value) => drop(self.records.insert(key.clone(), (value.clone(), self.newest()))),
                        None => drop(self.records.remove(key)),
                    }
                }
                self.changes.push(changes);
            }
        }
    }

    async fn compare(&self, store: &Store, prefix: &str) {
        let snapshot = store.snapshot(prefix).await.unwrap();
        assert!(snapshot.revision >= self.revisions[self.newest()]);
        let under = self.records.iter().filter(|(key, _)| key.starts_with(prefix));
        let expected = under.map(|(key, (value, index))| Record {
            key: key.clone(),
            value: value.clone(),
            revision: self.revisions[*index],
        });
        assert_eq!(snapshot.records, expected.collect::<Vec<_>>(), "under {prefix:?}");
    }

    async fn drain(&mut self) {
        'watches: for (mut watch, prefix, mut at) in std::mem::take(&mut self.watches) {
            if at < self.forgotten {
                assert_eq!(soon(watch.next()).await, Err(WatchError::Compacted), "from {at}, under {prefix:?}");
                continue;
            }
            while at < self.newest() {
                at += 1;
                let under = self.changes[at].iter().filter(|(key, _)| key.starts_with(prefix));
                let changes: Vec<_> = under.map(|(key, value)| (key.clone(), value.clone())).collect();
                if !changes.is_empty() {
                    let expected = Events { revision: self.revisions[at], changes };
                    let knew = watch.revision();
                    let next = soon(watch.next()).await;
                    if self.may_have_lost(knew, &next) {
                        continue 'watches;
                    }
                    assert_eq!(next, Ok(expected), "under {prefix:?}");
                    assert_eq!(watch.revision(), self.revisions[at]);
                }
            }
            // And nothing else.
            let knew = watch.revision();
            if let Ok(more) = tokio::time::timeout(Duration::from_millis(1), watch.next()).await {
                assert!(self.may_have_lost(knew, &more), "{more:?}");
                continue;
            }
            self.watches.push((watch, prefix, at));
        }
    }

    /// Whether a watch that knew everything up to `knew` may report that the next changes are forgotten.
    fn may_have_lost(&self, knew: Revision, next: &Result<Events, WatchError>) -> bool {
        self.lags && *next == Err(WatchError::Compacted) && knew < self.revisions[self.forgotten]
    }
}

/// Awaits an event that must happen soon.
pub(crate) async fn soon<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(SOON, what).await.expect("it takes too long")
}
