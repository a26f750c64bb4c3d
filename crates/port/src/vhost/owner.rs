//! What runs the queues, for as long as the port is there.

use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::QueueOwner;
use super::dirty_log::DirtyLog;
use super::queue::VhostQueue;
use crate::panics::Panic;

/// A [`QueueOwner`] that is shared by the port's thread and the port, which may have to go while the thread does not end.
#[derive(Clone)]
pub(super) struct Owner(Arc<Mutex<State>>);

struct State {
    /// `None` once the port is gone.
    owner: Option<Box<dyn QueueOwner>>,
    running: bool,
}

impl Owner {
    pub(super) fn new(owner: Box<dyn QueueOwner>) -> Owner {
        Owner(Arc::new(Mutex::new(State { owner: Some(owner), running: false })))
    }

    pub(super) fn start(&self, queue: VhostQueue) {
        let mut state = self.state();
        state.running = true;
        if let Some(owner) = &mut state.owner {
            owner.start(queue);
        }
    }

    pub(super) fn stop(&self) {
        let mut state = self.state();
        if std::mem::take(&mut state.running)
            && let Some(owner) = &mut state.owner
        {
            owner.stop();
        }
    }

    /// Whether the queue that runs logs from now on what it writes, or no more.
    pub(super) fn log_writes(&self, log: Option<DirtyLog>) -> bool {
        self.state().owner.as_mut().is_some_and(|owner| owner.log_writes(log))
    }

    /// The guest has come from another host.
    pub(super) fn arrived(&self) {
        if let Some(owner) = &mut self.state().owner {
            owner.arrived();
        }
    }

    /// A panic was contained.
    pub(super) fn fault(&self, panic: &Panic) {
        if let Some(owner) = &mut self.state().owner {
            owner.fault(panic);
        }
    }

    /// Takes the queue back, if there is one, for good: the owner hears nothing any more. `ended`: so has the port's thread;
    /// otherwise it may be the owner that it waits for, and then that is not waited for here.
    pub(super) fn retire(&self, ended: bool) {
        if ended || self.0.try_lock().is_ok() {
            self.stop();
            self.state().owner = None;
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Debug for Owner {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        f.debug_struct("Owner").field("running", &self.state().running).finish_non_exhaustive()
    }
}
