//! Notifies a driver of used buffers without ever blocking the worker.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SendFlags;
use rustix::time::{ClockId, clock_gettime};

use super::counter;
use super::helper::{Foreign, Helper};
use super::mutation::mutated;

/// Maximum time that a notification may take on a worker. It wakes all threads that wait on the descriptor, and a
/// front-end can create hundreds of thousands of these.
const SLOW: Duration = Duration::from_micros(200);

/// Notifies the driver of used buffers; the front-end may replace the descriptor at any time.
#[derive(Debug, Default)]
pub(crate) struct Call {
    helper: Helper,
    to: Mutex<Option<Arc<Told>>>,
}

/// The descriptor to notify.
#[derive(Debug)]
pub(super) enum Target {
    Counter(OwnedFd),
    /// User-mode Linux uses a socket pair instead of an eventfd.
    Stream(Foreign),
}

#[derive(Debug)]
struct Told {
    target: Target,
    /// A notification by the helper is pending.
    pending: AtomicBool,
    /// The last notification took long by the clock; the next one also measures processor time.
    suspected: AtomicBool,
}

impl Target {
    /// `None` if it is neither an eventfd nor a Unix stream socket. Notifying others may block.
    pub(super) fn of(fd: Foreign) -> Option<Target> {
        if fd.is_stream() { Some(Target::Stream(fd)) } else { fd.into_counter().map(Target::Counter) }
    }
}

impl Call {
    pub(super) fn new(helper: &Helper) -> Call {
        Call { helper: helper.clone(), to: Mutex::default() }
    }

    /// Replaces the target. Call [`notify_soon`](Self::notify_soon) afterwards: buffers may have been shown while there
    /// was no target, or during the replacement.
    pub(super) fn set(&self, target: Option<Target>) {
        let told = |target| Told { target, pending: AtomicBool::default(), suspected: AtomicBool::default() };
        let now = target.map(|target| Arc::new(told(target)));
        let before = std::mem::replace(&mut *self.lock(), now);
        drop(before);
    }

    /// Makes the helper thread notify the driver.
    pub(super) fn notify_soon(&self) {
        let told = self.lock().clone();
        if let Some(told) = &told {
            self.hand_over(told);
        }
    }

    /// Never blocks. If the target is full, an earlier notification is still pending, and this one is not needed.
    pub(crate) fn notify(&self) {
        let to = match self.to.try_lock() {
            Ok(to) => to,
            Err(TryLockError::Poisoned(to)) => to.into_inner(),
            // It is being replaced; the replacing thread notifies afterwards.
            Err(TryLockError::WouldBlock) => return,
        };
        let Some(told) = &*to else { return };
        if self.helper.notifies() {
            return self.hand_over(told);
        }
        match told.tell_in_time() {
            Ok(true) => {}
            Ok(false) => {
                if self.helper.take_over_notifying() {
                    tracing::warn!(
                        "notifying a guest takes longer than {SLOW:?}; from now on a separate thread does it"
                    );
                }
            }
            Err(error) => {
                if self.helper.take_over_notifying() {
                    tracing::warn!(%error, "notifying a guest may block; a separate thread does it");
                }
                self.hand_over(told);
            }
        }
    }

    /// A duplicate of the target's descriptor, if there is a target.
    ///
    /// # Errors
    /// No file descriptor was available.
    pub(super) fn descriptor(&self) -> io::Result<Option<OwnedFd>> {
        let duplicate = |told: &Arc<Told>| match &told.target {
            Target::Counter(fd) => fd.try_clone(),
            Target::Stream(fd) => fd.as_fd().try_clone_to_owned(),
        };
        self.lock().as_ref().map(duplicate).transpose()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Told>>> {
        self.to.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hand_over(&self, told: &Arc<Told>) {
        if !told.pending.swap(true, Ordering::AcqRel) {
            let told = Arc::clone(told);
            self.helper.run(move || {
                told.pending.store(false, Ordering::Release);
                told.tell_somehow();
            });
        }
    }
}

impl Told {
    /// Notifies, and returns whether that was fast enough. If the previous notification was too slow, this one also
    /// measures whether the thread itself was busy or only preempted. That system call is too expensive for every
    /// notification.
    fn tell_in_time(&self) -> io::Result<bool> {
        let busy = self.suspected.load(Ordering::Relaxed).then(processor_time);
        let start = Instant::now();
        self.tell()?;
        let slow = start.elapsed() > SLOW;
        if slow || busy.is_some() {
            self.suspected.store(slow, Ordering::Relaxed);
        }
        Ok(!(slow && busy.is_some_and(|before| processor_time() - before > SLOW)))
    }

    /// Notifies without blocking.
    fn tell(&self) -> io::Result<()> {
        match &self.target {
            Target::Counter(fd) if mutated!(CallBlocks) => {
                let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
                Ok(())
            }
            Target::Counter(fd) => counter::add(fd.as_fd()),
            Target::Stream(fd) => {
                let wait = if mutated!(CallBlocks) { SendFlags::empty() } else { SendFlags::DONTWAIT };
                let flags = wait | SendFlags::NOSIGNAL;
                match rustix::net::send(fd, &1u64.to_ne_bytes(), flags) {
                    Ok(_) | Err(Errno::AGAIN | Errno::PIPE | Errno::CONNRESET) => Ok(()),
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// Notifies on the helper thread, which may block.
    fn tell_somehow(&self) {
        if let (Target::Counter(fd), Err(_)) = (&self.target, self.tell()) {
            let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
        }
    }
}

/// Processor time of this thread.
fn processor_time() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ThreadCPUTime)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::mpsc::channel;

    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn call(fd: OwnedFd) -> Arc<Call> {
        let helper = Helper::default();
        let call = Arc::new(Call::new(&helper));
        call.set(Some(Target::of(Foreign::new(fd, &helper)).expect("a target")));
        call.notify_soon();
        call
    }

    /// Whether `n` notifications end. They run on a separate thread, because they might not.
    fn ends(call: &Arc<Call>, n: u32) -> bool {
        let (call, (done, waits)) = (Arc::clone(call), channel());
        std::thread::spawn(move || {
            (0..n).for_each(|_| call.notify());
            let _ = done.send(());
        });
        waits.recv_timeout(PATIENCE).is_ok()
    }

    fn make_blocking(fd: &OwnedFd) {
        let flags = fcntl_getfl(fd).expect("flags");
        fcntl_setfl(fd, flags - OFlags::NONBLOCK).expect("flags");
    }

    #[test]
    fn a_full_blocking_eventfd_blocks_nobody() {
        let counter = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let theirs = counter.try_clone().expect("another descriptor");
        let call = call(counter);
        make_blocking(&theirs);
        // An earlier notification may be pending.
        rustix::io::write(&theirs, &(u64::MAX - 8).to_ne_bytes()).expect("room");
        assert!(ends(&call, 100), "a worker is blocked forever");
    }

    #[test]
    fn a_full_socket_blocks_nobody() {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        let shared = OwnedFd::from(ours.try_clone().expect("another descriptor"));
        let call = call(ours.into());
        make_blocking(&shared);
        assert!(ends(&call, 100_000), "a worker is blocked forever");
        let mut bytes = [0; 8];
        std::io::Read::read_exact(&mut &theirs, &mut bytes).expect("it was notified");
        assert_eq!(bytes, 1u64.to_ne_bytes());
        drop(theirs);
        assert!(ends(&call, 10), "blocked by a closed socket");
    }

    #[test]
    fn other_descriptors_are_not_called() {
        let helper = Helper::default();
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let datagram = std::os::unix::net::UnixDatagram::pair().expect("sockets").0;
        let others: [OwnedFd; 4] =
            [reader.into(), writer.into(), datagram.into(), std::fs::File::open("/dev/null").expect("a device").into()];
        for fd in others {
            assert!(Target::of(Foreign::new(fd, &helper)).is_none());
        }
    }

    #[test]
    fn each_notification_arrives() {
        let counter = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let theirs = counter.try_clone().expect("another descriptor");
        let read = || {
            let mut count = [0; 8];
            rustix::io::read(&theirs, &mut count).expect("it was notified");
            u64::from_ne_bytes(count)
        };
        let call = call(counter);
        assert_eq!(read(), 1, "a new target is notified at once");
        for _ in 0..5 {
            call.notify();
        }
        assert_eq!(read(), 5);
        // Also by the helper.
        assert!(call.helper.take_over_notifying());
        call.notify();
        assert!(read() >= 1);
        call.set(None);
        call.notify();
    }

    #[test]
    fn the_helper_wakes_large_crowds_of_waiters() {
        let counter = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an eventfd");
        let theirs = counter.try_clone().expect("another descriptor");
        let call = call(counter);
        let crowd = epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll");
        let mut waiting = Vec::new();
        while !call.helper.notifies() {
            assert!(waiting.len() < 15_000, "a worker wakes 15,000 waiting threads");
            for _ in 0..1000 {
                let fd = theirs.try_clone().expect("another descriptor");
                epoll::add(&crowd, &fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN).expect("watched");
                waiting.push(fd);
            }
            (0..4).for_each(|_| call.notify());
        }
    }
}
