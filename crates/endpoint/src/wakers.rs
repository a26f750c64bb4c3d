//! Tasks that wait for something.

use std::task::Waker;

/// Wakers of tasks, each once.
#[derive(Debug, Default)]
pub(crate) struct Wakers(Vec<Waker>);

impl Wakers {
    /// Another task waits, unless it is one of those that do already.
    pub(crate) fn add(&mut self, waker: &Waker) {
        if !self.0.iter().any(|known| known.will_wake(waker)) {
            self.0.push(waker.clone());
        }
    }

    /// Wakes all.
    pub(crate) fn wake(&mut self) {
        self.0.drain(..).for_each(Waker::wake);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
