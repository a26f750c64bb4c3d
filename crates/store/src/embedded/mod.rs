//! The embedded store: owned by one process, in memory, or with a journal on disk.

mod file;
mod journal;
mod state;

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use tokio::sync::{mpsc, oneshot, watch};

use self::file::Journal;
use self::journal::Frame;
use self::state::{Next, State};
use crate::{CommitError, Events, Revision, Snapshot, StoreError, Txn, WatchError};

/// Maximum number of transactions that wait for the disk. Further callers wait for room.
const QUEUE: usize = 1024;
/// Maximum number of transactions in a frame.
const TOGETHER: usize = 256;

/// An embedded store.
#[derive(Clone, Debug)]
pub(crate) struct Embedded(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    /// None for a store in memory only.
    writer: Option<Writer>,
}

/// The thread that writes the journal. Others only read the resulting state.
#[derive(Debug)]
struct Writer {
    queue: Option<mpsc::Sender<Request>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Arc<Mutex<State>>,
    /// Notifies watches of new revisions. They end when it is dropped.
    changed: watch::Sender<Revision>,
}

struct Request {
    txn: Txn,
    answer: oneshot::Sender<Result<Revision, CommitError>>,
}

/// A watch of an embedded store. It stores only a revision, and reads the store's recent changes.
#[derive(Debug)]
pub(crate) struct Watch {
    state: Arc<Mutex<State>>,
    changed: watch::Receiver<Revision>,
    prefix: String,
    after: Revision,
}

impl Embedded {
    pub(crate) fn memory() -> Embedded {
        Embedded(Arc::new(Inner { shared: Arc::new(Shared::new(State::default())), writer: None }))
    }

    pub(crate) fn open(directory: &Path) -> Result<Embedded, StoreError> {
        let (journal, state) = Journal::open(directory)?;
        let shared = Arc::new(Shared::new(state));
        let (queue, requests) = mpsc::channel(QUEUE);
        let of_thread = shared.clone();
        let thread = std::thread::Builder::new()
            .name("store-journal".to_owned())
            .spawn(move || write(journal, &of_thread, requests))
            .map_err(|error| {
                let (doing, path) = ("starting a thread for", directory.to_owned());
                StoreError::Io { doing, path, why: error.to_string() }
            })?;
        let writer = Writer { queue: Some(queue), thread: Some(thread) };
        Ok(Embedded(Arc::new(Inner { shared, writer: Some(writer) })))
    }

    pub(crate) fn snapshot(&self, prefix: &str) -> Snapshot {
        self.0.shared.state().snapshot(prefix)
    }

    pub(crate) async fn commit(&self, txn: &Txn) -> Result<Revision, CommitError> {
        let Some(writer) = &self.0.writer else { return self.0.shared.commit(txn) };
        let gone = || CommitError::Unknown("the thread that writes the journal has ended".to_owned());
        let queue = writer.queue.as_ref().ok_or_else(gone)?;
        let (answer, answered) = oneshot::channel();
        queue.send(Request { txn: txn.clone(), answer }).await.map_err(|_| gone())?;
        answered.await.map_err(|_| gone())?
    }

    pub(crate) fn watch(&self, prefix: &str, after: Revision) -> Watch {
        let shared = &self.0.shared;
        let changed = shared.changed.subscribe();
        Watch { state: shared.state.clone(), changed, prefix: prefix.to_owned(), after }
    }
}

impl Watch {
    pub(crate) async fn next(&mut self) -> Result<Events, WatchError> {
        loop {
            // First, so that changes after the check below are noticed.
            self.changed.mark_unchanged();
            match lock(&self.state).next(&self.prefix, self.after) {
                Next::Events(events) => {
                    self.after = events.revision;
                    return Ok(events);
                }
                Next::Nothing(revision) => self.after = revision,
                Next::Compacted => return Err(WatchError::Compacted),
            }
            self.changed.changed().await.map_err(|_| WatchError::Lost(StoreError::Closed))?;
        }
    }

    pub(crate) fn revision(&self) -> Revision {
        self.after
    }
}

impl Shared {
    fn new(state: State) -> Shared {
        let changed = watch::Sender::new(state.revision());
        Shared { state: Arc::new(Mutex::new(state)), changed }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn commit(&self, txn: &Txn) -> Result<Revision, CommitError> {
        let mut state = self.state();
        let mut ahead = state.ahead();
        let planned = state.plan(&mut ahead, txn)?;
        let revision = planned.revision;
        state.apply(planned);
        drop(state);
        self.changed.send_replace(revision);
        Ok(revision)
    }
}

impl Drop for Writer {
    /// Waits until the directory may be opened again.
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take() {
            // It ends when its queue closes; a panic of it was logged.
            let _ = thread.join();
        }
    }
}

/// The writer thread: takes all waiting transactions, and writes them together.
fn write(mut journal: Journal, shared: &Shared, mut requests: mpsc::Receiver<Request>) {
    let mut batch = Vec::new();
    while requests.blocking_recv_many(&mut batch, TOGETHER) > 0 {
        let mut rest = batch.drain(..).peekable();
        while rest.peek().is_some() {
            write_frame(&mut journal, shared, &mut rest);
        }
        drop(rest);
        if journal.is_rewriting_due() {
            // Values are shared, so readers continue meanwhile.
            let copy = {
                let state = shared.state();
                State::with(state.records().clone(), state.revision())
            };
            if let Err(error) = journal.rewrite(&copy) {
                // The existing journal stays valid, only longer.
                tracing::error!("{error}");
                journal.put_off();
            }
        }
    }
}

/// Takes the transactions that fit a frame, writes it, and answers.
fn write_frame(journal: &mut Journal, shared: &Shared, requests: &mut impl Iterator<Item = Request>) {
    let (frame, done) = {
        let state = shared.state();
        let mut ahead = state.ahead();
        let mut frame = Frame::new(state.revision());
        let mut done = Vec::new();
        while !frame.is_full()
            && let Some(Request { txn, answer }) = requests.next()
        {
            match state.plan(&mut ahead, &txn) {
                Ok(planned) => {
                    frame.add(&planned);
                    done.push((planned, answer));
                }
                // The transaction was compared with changes that are not on disk yet. If the write fails, the conflict
                // is reported wrongly, but without harm: the caller lists again.
                Err(error) => drop(answer.send(Err(error))),
            }
        }
        (frame.encode(), done)
    };
    // Only this thread changes the state; readers see the old one until the disk has the new one.
    if let Some(Err(error)) = frame.map(|frame| journal.append(&frame)) {
        tracing::error!("{error}");
        for (_, answer) in done {
            drop(answer.send(Err(error.clone())));
        }
        return;
    }
    let mut answers = Vec::with_capacity(done.len());
    let mut state = shared.state();
    for (planned, answer) in done {
        answers.push((planned.revision, answer));
        state.apply(planned);
    }
    let revision = state.revision();
    drop(state);
    shared.changed.send_replace(revision);
    for (revision, answer) in answers {
        drop(answer.send(Ok(revision)));
    }
}

/// A panic elsewhere while it was locked has left no partial change: all code that may panic runs before the first
/// change.
fn lock(state: &Mutex<State>) -> MutexGuard<'_, State> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}
