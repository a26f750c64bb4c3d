//! The objects behind the opaque pointers, and the lock that admits one thread at a time.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use bifrost_endpoint::{Endpoint, Listener, Region, Worker};

use crate::held::Held;
use crate::status::{Failed, Status};

/// Drives connections. Opaque.
#[derive(Debug)]
pub struct WorkerHandle {
    pub(crate) shared: Arc<Shared>,
}

/// One end of a connection. Opaque.
#[derive(Debug)]
pub struct EndpointHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) endpoint: Endpoint,
}

/// A socket on which peers set up connections. Opaque.
#[derive(Debug)]
pub struct ListenerHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) listener: Listener,
}

/// Memory that peers may read and write. Opaque.
#[derive(Debug)]
pub struct RegionHandle {
    pub(crate) shared: Arc<Shared>,
    pub(crate) region: Region,
}

/// State shared by a worker and its handles.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
}

/// The state that the lock protects.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) worker: Worker,
    pub(crate) held: Held,
    /// The copy of the worker's descriptor that the application has.
    pub(crate) descriptor: Option<OwnedFd>,
}

// SAFETY: the contents that are not `Send` are counted references (`Rc`) to one worker. All of them
// are in `State` or in handles of this `Shared`. They are cloned, used and dropped only while the
// lock is held (`Shared::lock`, and `close` for handles), so by one thread at a time, ordered by
// the lock. The last drop of a `Shared` has no concurrent users.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(crate) fn new(worker: Worker) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { worker, held: Held::default(), descriptor: None }) })
    }

    /// Locks the worker for this thread.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, State>, Failed> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::WouldBlock) => Err(Failed(Status::Busy, "another thread is calling this worker".into())),
            Err(TryLockError::Poisoned(_)) => {
                Err(Failed(Status::Broken, "an earlier call of this worker panicked".into()))
            }
        }
    }
}

/// A handle of an object that belongs to a worker.
pub(crate) trait Handle {
    fn shared(&self) -> &Arc<Shared>;
}

macro_rules! handles {
    ($($handle:ty),*) => {
        $(impl Handle for $handle {
            fn shared(&self) -> &Arc<Shared> {
                &self.shared
            }
        })*
    };
}

handles!(WorkerHandle, EndpointHandle, ListenerHandle, RegionHandle);

/// Converts a pointer to a reference.
///
/// # Safety
/// A pointer that is not null must have been returned by the library, and not yet freed.
pub(crate) unsafe fn get<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failed> {
    // SAFETY: guaranteed by the caller.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failed::invalid(format!("the {what} is null")))
}

/// Frees a handle, unless the worker is busy; null is ignored.
///
/// # Safety
/// As for [`get`]; the pointer must not be used after `Ok`.
pub(crate) unsafe fn close<T: Handle>(pointer: *mut T) -> Result<(), Failed> {
    // SAFETY: guaranteed by the caller.
    let Some(handle) = (unsafe { pointer.as_ref() }) else { return Ok(()) };
    let shared = handle.shared().clone();
    let state = shared.lock()?;
    // SAFETY: the pointer was returned by `give`, and is not yet freed.
    drop(unsafe { Box::from_raw(pointer) });
    drop(state);
    Ok(())
}

/// Returns a handle to the application.
///
/// # Safety
/// `out` must be writable.
pub(crate) unsafe fn give<T>(handle: T, out: *mut *mut T) {
    // SAFETY: guaranteed by the caller; callers have checked it with `writable`.
    unsafe { out.write(Box::into_raw(Box::new(handle))) };
}

/// Checks that a pointer for a result is not null.
pub(crate) fn writable<T>(out: *mut T) -> Result<(), Failed> {
    if out.is_null() { Err(Failed::invalid("the pointer for the result is null")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use bifrost_endpoint::WorkerConfig;

    use super::*;

    #[test]
    fn a_worker_is_unusable_after_a_panic() {
        let config = WorkerConfig { port: 0, ..WorkerConfig::new(std::net::Ipv6Addr::LOCALHOST.into()) };
        let Ok(worker) = Worker::new(config) else { panic!("no worker") };
        let shared = Shared::new(worker);
        assert!(shared.lock().is_ok());
        let held = shared.lock();
        assert!(matches!(shared.lock(), Err(Failed(Status::Busy, _))));
        drop(held);
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            let _state = shared.lock();
            panic!("for the test");
        }));
        assert!(panicked.is_err());
        assert!(matches!(shared.lock(), Err(Failed(Status::Broken, _))));
    }
}
