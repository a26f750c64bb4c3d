//! Waiting tasks.

use std::task::Waker;

/// Wakers of tasks, without duplicates.
#[derive(Debug, Default)]
pub(crate) struct Wakers(Vec<Waker>);

impl Wakers {
    /// Adds a waiting task, unless it is already waiting.
    pub(crate) fn add(&mut self, waker: &Waker) {
        if !self.0.iter().any(|known| known.will_wake(waker)) {
            self.0.push(waker.clone());
        }
    }

    /// Wakes all tasks.
    pub(crate) fn wake(&mut self) {
        self.0.drain(..).for_each(Waker::wake);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
