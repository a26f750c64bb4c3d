//! The running capture, of which there is at most one, and how an upgrade takes it.

use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bifrost_control::api::CaptureSpec;
use bifrost_control::capture::CapturePosition;

/// The capture that is running, if one is.
#[derive(Debug, Default)]
pub(crate) struct Capturing {
    phase: Mutex<Phase>,
    changed: Condvar,
}

#[derive(Debug, Default)]
enum Phase {
    #[default]
    None,
    Running(CaptureSpec),
    /// Another daemon is to continue it.
    Wanted,
    /// Another daemon can continue it.
    Left(Left),
}

/// A capture that another daemon can continue.
#[derive(Debug)]
pub(crate) struct Left {
    /// The connection to the client.
    pub(crate) connection: OwnedFd,
    pub(crate) position: CapturePosition,
}

impl Capturing {
    /// A capture begins. `false`: another one is running.
    pub(super) fn begin(&self, spec: CaptureSpec) -> bool {
        let mut phase = self.phase();
        let is_free = matches!(*phase, Phase::None);
        if is_free {
            *phase = Phase::Running(spec);
        }
        is_free
    }

    /// The capture has ended, or another daemon has it.
    pub(super) fn end(&self) {
        let mut phase = self.phase();
        if matches!(*phase, Phase::Running(_) | Phase::Wanted) {
            *phase = Phase::None;
        }
        self.changed.notify_all();
    }

    /// Waits for this time; returns at once, with `true`, if another daemon is to continue the capture.
    pub(super) fn rest(&self, time: Duration) -> bool {
        let (phase, _) = self
            .changed
            .wait_timeout_while(self.phase(), time, |phase| matches!(phase, Phase::Running(_)))
            .unwrap_or_else(PoisonError::into_inner);
        matches!(*phase, Phase::Wanted)
    }

    /// Leaves the capture to another daemon that waits for it.
    pub(super) fn leave(&self, left: Option<Left>) {
        let mut phase = self.phase();
        if matches!(*phase, Phase::Wanted) {
            *phase = left.map_or(Phase::None, Phase::Left);
        }
        self.changed.notify_all();
    }

    /// What is being captured.
    pub(crate) fn spec(&self) -> Option<CaptureSpec> {
        match &*self.phase() {
            Phase::Running(spec) => Some(spec.clone()),
            _ => None,
        }
    }

    /// Takes the capture for another daemon, after the workers have stopped. `None`: it has ended, or its reader does not
    /// take what was captured so far.
    pub(crate) fn take(&self, patience: Duration) -> Option<Left> {
        let deadline = Instant::now() + patience;
        let mut phase = self.phase();
        if !matches!(*phase, Phase::Running(_)) {
            return None;
        }
        *phase = Phase::Wanted;
        self.changed.notify_all();
        while matches!(*phase, Phase::Wanted) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            phase = self.changed.wait_timeout(phase, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        match std::mem::take(&mut *phase) {
            Phase::Left(left) => Some(left),
            _ => None,
        }
    }

    fn phase(&self) -> MutexGuard<'_, Phase> {
        self.phase.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    const LONG: Duration = Duration::from_secs(10);
    const SHORT: Duration = Duration::from_millis(20);

    fn left() -> Option<Left> {
        let connection = std::fs::File::open("/dev/null").unwrap().into();
        Some(Left { connection, position: CapturePosition::default() })
    }

    #[test]
    fn there_is_one_capture_until_it_ends() {
        let one = Capturing::default();
        assert!(one.spec().is_none() && one.take(LONG).is_none());
        assert!(one.begin(CaptureSpec::default()) && !one.begin(CaptureSpec::default()));
        assert!(one.spec().is_some() && !one.rest(SHORT));
        one.end();
        assert!(one.begin(CaptureSpec::default()));
    }

    #[test]
    fn another_daemon_gets_it_from_the_thread_that_writes_it() {
        let one = Arc::new(Capturing::default());
        assert!(one.begin(CaptureSpec::default()));
        let writer = std::thread::spawn({
            let one = Arc::clone(&one);
            move || {
                assert!(one.rest(LONG));
                one.leave(left());
                one.end();
            }
        });
        assert!(one.take(LONG).is_some());
        writer.join().unwrap();
        // It ends meanwhile, or its reader takes nothing: there is nothing to continue, also not later.
        for is_late in [false, true] {
            let one = Arc::new(Capturing::default());
            assert!(one.begin(CaptureSpec::default()));
            let writer = (!is_late).then(|| {
                let one = Arc::clone(&one);
                std::thread::spawn(move || {
                    assert!(one.rest(LONG));
                    one.end();
                })
            });
            assert!(one.take(if is_late { SHORT } else { LONG }).is_none());
            writer.into_iter().for_each(|writer| writer.join().unwrap());
            one.leave(left());
            assert!(one.begin(CaptureSpec::default()));
        }
    }
}
