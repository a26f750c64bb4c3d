//! The bounded queue of questions about routes, from all workers to the daemon.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::Duration;

use bifrost_wire::Vni;

/// A question to the daemon: where an address of a network is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RouteQuestion {
    /// The network.
    pub vni: Vni,
    /// The address.
    pub address: IpAddr,
    /// When it was asked, ns on the worker's clock.
    pub asked_ns: u64,
}

/// The end of the queue for those who ask.
#[derive(Clone, Debug)]
pub struct RouteQuestions {
    sender: SyncSender<RouteQuestion>,
    room: usize,
    waiting: Arc<AtomicUsize>,
}

/// The end of the queue for the daemon.
#[derive(Debug)]
pub struct RouteQuestionQueue {
    receiver: Receiver<RouteQuestion>,
    waiting: Arc<AtomicUsize>,
}

/// A queue with room for `room` questions.
pub fn route_questions(room: usize) -> (RouteQuestions, RouteQuestionQueue) {
    let (sender, receiver) = sync_channel(room);
    let waiting = Arc::new(AtomicUsize::new(0));
    (RouteQuestions { sender, room, waiting: Arc::clone(&waiting) }, RouteQuestionQueue { receiver, waiting })
}

impl RouteQuestions {
    /// Adds a question, unless the queue is full. Returns whether it did.
    pub fn ask(&self, question: RouteQuestion) -> bool {
        // Before the daemon can count it less.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let is_asked = self.sender.try_send(question).is_ok();
        if !is_asked {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        is_asked
    }

    /// How many questions there is room for. Other workers ask at the same time.
    pub(crate) fn free(&self) -> usize {
        self.room.saturating_sub(self.waiting.load(Ordering::Relaxed))
    }
}

impl RouteQuestionQueue {
    /// The oldest question, if there is one.
    pub fn take(&self) -> Option<RouteQuestion> {
        self.receiver.try_recv().ok().inspect(|_| self.count())
    }

    /// The oldest question; waits for one, but not longer than this.
    pub fn wait(&self, longest: Duration) -> Option<RouteQuestion> {
        self.receiver.recv_timeout(longest).ok().inspect(|_| self.count())
    }

    fn count(&self) {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}
