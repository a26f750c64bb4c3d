//! How a thread of a pod gets the queues of interfaces, and returns them: connections come and go while it runs.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bifrost_port::memif::Queue;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

/// A queue of a connected interface.
#[derive(Debug)]
pub(super) struct Attached {
    pub(super) interface: usize,
    /// The link that the interface belongs to.
    pub(super) link: usize,
    pub(super) queue: Queue,
}

/// A change of an interface.
#[derive(Debug)]
enum Change {
    Attach(Attached),
    Detach { interface: usize },
}

/// The changes that a thread has not seen yet.
#[derive(Debug)]
pub(super) struct Mailbox {
    /// A hint for threads that poll.
    waiting: AtomicBool,
    changes: Mutex<Vec<Change>>,
    event: OwnedFd,
}

impl Mailbox {
    pub(super) fn new() -> io::Result<Self> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Mailbox { waiting: AtomicBool::new(false), changes: Mutex::default(), event })
    }

    /// An interface has connected.
    pub(super) fn attach(&self, attached: Attached) {
        self.put(Change::Attach(attached));
    }

    /// A connection is gone. The memory of its queue stays valid until the thread has applied this.
    pub(super) fn detach(&self, interface: usize) {
        self.put(Change::Detach { interface });
    }

    /// Wakes the thread.
    pub(super) fn wake(&self) {
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Applies pending changes to a thread's queues. Returns whether there were any.
    #[inline]
    pub(super) fn apply(&self, queues: &mut Vec<Attached>) -> bool {
        self.waiting.load(Ordering::Relaxed) && self.apply_all(queues)
    }

    #[cold]
    fn apply_all(&self, queues: &mut Vec<Attached>) -> bool {
        let mut changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        self.waiting.store(false, Ordering::Relaxed);
        for change in changes.drain(..) {
            match change {
                Change::Attach(attached) => queues.push(attached),
                Change::Detach { interface } => queues.retain(|attached| attached.interface != interface),
            }
        }
        true
    }

    fn put(&self, change: Change) {
        let mut changes = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        changes.push(change);
        self.waiting.store(true, Ordering::Relaxed);
        drop(changes);
        self.wake();
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// Sleeps until a packet or a change arrives, or for at most `at_most`.
pub(super) fn wait(mailbox: &Mailbox, queues: &[Attached], at_most: Duration) {
    let events = queues.iter().map(|attached| attached.queue.event()).chain([mailbox.event()]);
    let events: Vec<BorrowedFd<'_>> = events.collect();
    let mut fds: Vec<PollFd<'_>> = events.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    let at_most = Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() };
    let _ = poll(&mut fds, Some(&at_most));
    queues.iter().for_each(|attached| attached.queue.clear_event());
    let _ = rustix::io::read(&mailbox.event, &mut [0; 8]);
}
