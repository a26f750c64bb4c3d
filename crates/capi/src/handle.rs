//! What the opaque pointers point to, and the lock that lets one thread at a time in.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use bifrost_endpoint::{Endpoint, Listener, Region, Worker};

use crate::held::Held;
use crate::status::{Failed, Status};

/// Looks after connections. Opaque.
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

/// A socket where connections are set up. Opaque.
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

/// What a worker and its handles share.
#[derive(Debug)]
pub(crate) struct Shared {
    state: Mutex<State>,
}

/// What is behind the lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) worker: Worker,
    pub(crate) held: Held,
    /// The copy of the worker's descriptor that was given out.
    pub(crate) descriptor: Option<OwnedFd>,
}

// SAFETY: what is not `Send` in here are counted references (`Rc`) to one worker. All of them are
// in `State` or in handles of this `Shared`; they are cloned, used and dropped only while the lock
// is held (`Shared::lock`, and `close` for handles), so by one thread at a time, with the lock's
// ordering in between. The last drop of a `Shared` is alone.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub(crate) fn new(worker: Worker) -> Arc<Self> {
        Arc::new(Self { state: Mutex::new(State { worker, held: Held::default(), descriptor: None }) })
    }

    /// The worker, for this thread alone.
    pub(crate) fn lock(&self) -> Result<MutexGuard<'_, State>, Failed> {
        match self.state.try_lock() {
            Ok(state) => Ok(state),
            Err(TryLockError::WouldBlock) => {
                Err(Failed(Status::Busy, "another thread is in a call of this worker".into()))
            }
            Err(TryLockError::Poisoned(_)) => {
                Err(Failed(Status::Broken, "an earlier call of this worker panicked".into()))
            }
        }
    }
}

/// A handle that belongs to a worker.
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

/// A reference to a handle.
///
/// # Safety
/// A pointer that is not null must be one that the library has given, and not taken back.
pub(crate) unsafe fn get<'a, T>(pointer: *const T, what: &str) -> Result<&'a T, Failed> {
    // SAFETY: the caller's.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failed::invalid(format!("the {what} is null")))
}

/// Takes a handle back; null is none. If the worker is busy, it stays.
///
/// # Safety
/// As for [`get`]; the pointer must not be used afterwards if this is `Ok`.
pub(crate) unsafe fn close<T: Handle>(pointer: *mut T) -> Result<(), Failed> {
    // SAFETY: the caller's.
    let Some(handle) = (unsafe { pointer.as_ref() }) else { return Ok(()) };
    let shared = handle.shared().clone();
    let state = shared.lock()?;
    // SAFETY: the pointer is of `give`, and was not taken back.
    drop(unsafe { Box::from_raw(pointer) });
    drop(state);
    Ok(())
}

/// Gives a handle out.
///
/// # Safety
/// `out` must be writable.
pub(crate) unsafe fn give<T>(handle: T, out: *mut *mut T) {
    // SAFETY: the caller's; callers have asked `writable` before.
    unsafe { out.write(Box::into_raw(Box::new(handle))) };
}

/// Whether there is a place for a result.
pub(crate) fn writable<T>(out: *mut T) -> Result<(), Failed> {
    if out.is_null() { Err(Failed::invalid("there is no place for the result: the pointer is null")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use bifrost_endpoint::WorkerConfig;

    use super::*;

    #[test]
    fn a_worker_that_panicked_is_not_used_again() {
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
