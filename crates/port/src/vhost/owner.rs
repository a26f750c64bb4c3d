//! The owner of a port's queues.

use std::fmt::{self, Debug, Formatter};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::QueueOwner;
use super::dirty_log::DirtyLog;
use super::queue::VhostQueue;
use crate::panics::Panic;

/// A [`QueueOwner`] shared by the port's thread and the port, which may be dropped while the thread hangs.
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

    /// Makes the running queue start or stop logging its writes; returns whether that was possible.
    pub(super) fn log_writes(&self, log: Option<DirtyLog>) -> bool {
        self.state().owner.as_mut().is_some_and(|owner| owner.log_writes(log))
    }

    /// The guest has migrated here.
    pub(super) fn arrived(&self) {
        if let Some(owner) = &mut self.state().owner {
            owner.arrived();
        }
    }

    /// Reports a contained panic.
    pub(super) fn fault(&self, panic: &Panic) {
        if let Some(owner) = &mut self.state().owner {
            owner.fault(panic);
        }
    }

    /// Takes the queue back, if there is one, and drops the owner. `ended`: the port's thread has ended; otherwise it
    /// may be waiting for the owner, in which case this does nothing.
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
