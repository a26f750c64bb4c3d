//! Removes devices in the background. The kernel waits for grace periods of RCU before a device is gone, tens of
//! milliseconds, in which no other change should have to wait.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use bifrost_datapath::Device;
use bifrost_port::panics;

use crate::background::at_lower_priority;
use crate::kept::Held;

/// A device that no worker serves any more.
#[must_use]
pub(crate) struct Released {
    pub(crate) queues: Vec<Device>,
    pub(crate) kept: Option<Held>,
}

/// Devices that are being removed, in order. The kernel removes those that are left when the process ends.
#[derive(Clone, Default)]
pub(crate) struct Removal(Arc<Shared>);

#[derive(Default)]
struct Shared {
    progress: Mutex<Progress>,
    changed: Condvar,
}

#[derive(Default)]
struct Progress {
    waiting: VecDeque<Released>,
    /// Number of devices so far, and how many of them are gone. While they differ, a thread removes devices.
    all: u64,
    gone: u64,
}

impl Removal {
    /// Has a device removed.
    pub(crate) fn push(&self, device: Released) {
        if device.queues.is_empty() && device.kept.is_none() {
            return;
        }
        let mut progress = self.0.progress();
        let is_idle = progress.all == progress.gone;
        progress.waiting.push_back(device);
        progress.all += 1;
        drop(progress);
        if !is_idle {
            return;
        }
        let shared = Arc::clone(&self.0);
        let in_background = move || {
            at_lower_priority();
            shared.remove_all();
        };
        if let Err(error) = thread::Builder::new().name("removal".into()).spawn(in_background) {
            tracing::warn!(%error, "cannot start a thread to remove a device; other changes wait for it");
            self.0.remove_all();
        }
    }

    /// Whether a device that is being removed may still exist.
    pub(crate) fn is_pending(&self) -> bool {
        let progress = self.0.progress();
        progress.all != progress.gone
    }

    /// Waits until the devices that were pushed so far are gone.
    pub(crate) fn wait(&self) {
        let progress = self.0.progress();
        let all = progress.all;
        let gone = self.0.changed.wait_while(progress, |progress| progress.gone < all);
        drop(gone.unwrap_or_else(PoisonError::into_inner));
    }
}

impl Shared {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Removes devices until none is left.
    fn remove_all(&self) {
        loop {
            let next = self.progress().waiting.pop_front();
            if let Some(device) = next
                && let Err(panic) = panics::contain(|| device.remove())
            {
                tracing::error!(%panic, "panic while removing a device; it may remain");
            }
            let mut progress = self.progress();
            progress.gone += 1;
            self.changed.notify_all();
            if progress.gone == progress.all {
                return;
            }
        }
    }
}

impl Released {
    fn remove(self) {
        drop(self.queues);
        if let Some(kept) = self.kept {
            kept.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use bifrost_port::vhost::Unplugged;

    use super::*;

    fn device() -> Released {
        Released { queues: vec![Box::new(Unplugged::new().unwrap())], kept: None }
    }

    #[test]
    fn waiting_ends_when_all_devices_are_gone() {
        let removal = Removal::default();
        removal.wait();
        let waited = AtomicU32::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..100 {
                        removal.push(device());
                    }
                    removal.wait();
                    waited.fetch_add(1, Ordering::Relaxed);
                });
            }
        });
        removal.wait();
        assert_eq!((waited.into_inner(), removal.is_pending()), (4, false));
    }

    #[test]
    fn nothing_to_remove_starts_no_thread() {
        let removal = Removal::default();
        removal.push(Released { queues: Vec::new(), kept: None });
        assert!(!removal.is_pending());
        removal.push(device());
        for _ in 0..1000 {
            if !removal.is_pending() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
        panic!("the device is never removed");
    }
}
