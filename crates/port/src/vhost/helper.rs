//! Descriptors received from a front-end, and the thread for system calls on them that may block.
//!
//! A front-end may send a descriptor of any kind and keeps the same open file, so it may change the file's status flags
//! at any time: `O_NONBLOCK` guarantees nothing. Even `close` may block: on a TCP socket with `SO_LINGER`, on a file of
//! a FUSE file system that the front-end serves itself, and on a Unix socket with such descriptors in its queue. So may
//! `fstat` on FUSE. Therefore a descriptor stays [`Foreign`] until a call that cannot block has verified its kind. Only
//! two kinds are ever converted. All others are closed on the port's own [`Helper`] thread, for which no other thread
//! waits.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::net::{AddressFamily, SocketType, sockopt};

use super::mutation::mutated;
use crate::panics;

/// Stack size of the thread, bytes: its call depth is small.
const STACK: usize = 128 << 10;

type Job = Box<dyn FnOnce() + Send>;

/// A port's thread for system calls that may block. It starts with the first job, and ends after the last one once all
/// handles are dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct Helper(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    jobs: Mutex<Option<Sender<Job>>>,
    waiting: Arc<AtomicUsize>,
    notifies: AtomicBool,
}

impl Helper {
    /// Queues `job` after all others.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut jobs = self.0.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        if jobs.is_none() {
            match start(&self.0.waiting) {
                Ok(sender) => *jobs = Some(sender),
                // A leaked descriptor does less harm than one whose `close` blocks.
                Err(error) => {
                    tracing::error!(%error, "no thread for a vhost-user port: a descriptor stays open");
                    std::mem::forget(job);
                    return;
                }
            }
        }
        if let Some(sender) = &*jobs {
            self.0.waiting.fetch_add(1, Ordering::Relaxed);
            // The receiver lives as long as the sender.
            let _ = sender.send(Box::new(job));
        }
    }

    /// Number of pending jobs.
    pub(super) fn waiting(&self) -> usize {
        self.0.waiting.load(Ordering::Relaxed)
    }

    /// Whether this thread notifies the port's guest, because that took a worker too long.
    pub(super) fn notifies(&self) -> bool {
        self.0.notifies.load(Ordering::Relaxed)
    }

    /// From now on this thread notifies the port's guest. Returns whether this is new.
    pub(super) fn take_over_notifying(&self) -> bool {
        !self.0.notifies.swap(true, Ordering::Relaxed)
    }
}

fn start(waiting: &Arc<AtomicUsize>) -> std::io::Result<Sender<Job>> {
    let (sender, jobs): (_, Receiver<Job>) = channel();
    let waiting = Arc::clone(waiting);
    std::thread::Builder::new().name("vhost-helper".into()).stack_size(STACK).spawn(move || {
        for job in jobs {
            if let Err(panic) = panics::contain(job) {
                tracing::error!(%panic, "a job of a vhost-user port panicked; the others continue");
            }
            waiting.fetch_sub(1, Ordering::Relaxed);
        }
    })?;
    Ok(sender)
}

/// A descriptor of any kind whose open file the front-end shares. Dropping it never blocks.
#[derive(Debug)]
pub(crate) struct Foreign {
    /// `Some` until it is dropped or converted.
    fd: Option<OwnedFd>,
    helper: Helper,
}

impl Foreign {
    pub(crate) fn new(fd: impl Into<OwnedFd>, helper: &Helper) -> Foreign {
        Foreign { fd: Some(fd.into()), helper: helper.clone() }
    }

    /// Converts it to an eventfd. Any thread may watch and close it; reading and writing may block.
    pub(crate) fn into_counter(mut self) -> Option<OwnedFd> {
        self.fd.take_if(|fd| is_counter(fd))
    }

    /// Converts it to a file if it is memory: a memfd, or a file on tmpfs or hugetlbfs. Accesses to its pages, and
    /// calls on it, do not wait for another process or a disk.
    pub(crate) fn into_memory(mut self) -> Option<File> {
        self.fd.take_if(|fd| is_memory(fd) || mutated!(AnyFileMapped)).map(File::from)
    }

    /// Whether it is a Unix stream socket.
    pub(super) fn is_stream(&self) -> bool {
        self.fd.as_ref().is_some_and(|fd| {
            sockopt::socket_domain(fd) == Ok(AddressFamily::UNIX) && sockopt::socket_type(fd) == Ok(SocketType::STREAM)
        })
    }

    /// The descriptor, valid while this exists.
    #[allow(clippy::expect_used)]
    fn fd(&self) -> &OwnedFd {
        self.fd.as_ref().expect("only drop and conversion take it")
    }
}

impl AsFd for Foreign {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd().as_fd()
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        // Closing an eventfd or memory does not block.
        let may_block = |fd: &OwnedFd| !mutated!(ClosedInPlace) && !is_counter(fd) && !is_memory(fd);
        if let Some(fd) = self.fd.take().filter(may_block) {
            self.helper.run(move || drop(fd));
        }
    }
}

/// A file's name cannot look like this: it would start with a slash.
fn is_counter(fd: &OwnedFd) -> bool {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    std::fs::read_link(path).is_ok_and(|to| to.as_os_str() == "anon_inode:[eventfd]")
}

/// The kernel supports seals only on files of shared memory (`fcntl(2)`, `F_GET_SEALS`), and does not call a file
/// system for them.
fn is_memory(fd: &OwnedFd) -> bool {
    rustix::fs::fcntl_get_seals(fd).is_ok()
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::{Duration, Instant};

    use rustix::event::{EventfdFlags, eventfd};
    use rustix::fs::{MemfdFlags, memfd_create};

    use super::*;

    /// A TCP socket with `SO_LINGER` and unread bytes: closing it takes `seconds`.
    pub(in super::super) fn lingering(seconds: u64) -> (OwnedFd, std::net::TcpStream) {
        use std::io::Write;
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a listener");
        let mut stream = std::net::TcpStream::connect(listener.local_addr().expect("its address")).expect("connects");
        let (other, _) = listener.accept().expect("accepts");
        stream.set_nonblocking(true).expect("a flag");
        while stream.write(&[0; 1 << 16]).is_ok() {}
        stream.set_nonblocking(false).expect("a flag");
        socket2::SockRef::from(&stream).set_linger(Some(Duration::from_secs(seconds))).expect("an option");
        (stream.into(), other)
    }

    #[test]
    fn only_eventfds_and_memory_are_converted() {
        let helper = Helper::default();
        let directory = tempfile::tempdir().expect("a directory");
        let (one, other) = std::os::unix::net::UnixStream::pair().expect("sockets");
        let (datagram, _) = std::os::unix::net::UnixDatagram::pair().expect("sockets");
        let (reader, writer) = std::io::pipe().expect("a pipe");
        let named = directory.path().join("anon_inode:[eventfd]");
        let event = || eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let memfd = || memfd_create("anon_inode:[eventfd]", MemfdFlags::CLOEXEC).expect("a memfd");
        let shm = || tempfile::tempfile_in("/dev/shm").expect("a file on tmpfs").into();
        let epoll = || rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC).expect("an epoll");
        let disk = || File::create(&named).expect("a file").into();
        let path =
            || rustix::fs::open("/dev/shm", rustix::fs::OFlags::PATH, rustix::fs::Mode::empty()).expect("a path");
        let null = || File::open("/dev/null").expect("a device").into();
        type Maker<'a> = &'a dyn Fn() -> OwnedFd;
        let makers: [(&str, [bool; 3], Maker<'_>); 12] = [
            ("eventfd", [true, false, false], &event),
            ("memfd", [false, true, false], &memfd),
            ("tmpfs", [false, true, false], &shm),
            ("epoll", [false; 3], &epoll),
            ("file", [false; 3], &disk),
            ("path", [false; 3], &path),
            ("device", [false; 3], &null),
            ("stream", [false, false, true], &|| one.try_clone().expect("again").into()),
            ("other stream", [false, false, true], &|| other.try_clone().expect("again").into()),
            ("datagram", [false; 3], &|| datagram.try_clone().expect("again").into()),
            ("pipe", [false; 3], &|| reader.try_clone().expect("again").into()),
            ("pipe", [false; 3], &|| writer.try_clone().expect("again").into()),
        ];
        for (name, expected, make) in makers {
            let got = [
                Foreign::new(make(), &helper).into_counter().is_some(),
                Foreign::new(make(), &helper).into_memory().is_some(),
                Foreign::new(make(), &helper).is_stream(),
            ];
            assert_eq!(got, expected, "{name}");
        }
        let tcp = lingering(0).0;
        assert!(!Foreign::new(tcp, &helper).is_stream());
    }

    #[test]
    fn dropping_never_blocks() {
        let helper = Helper::default();
        let start = Instant::now();
        let (slow, _other) = lingering(2);
        drop(Foreign::new(slow, &helper));
        let (one, other) = std::os::unix::net::UnixStream::pair().expect("sockets");
        drop(Foreign::new(one, &helper));
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        assert_eq!(helper.waiting(), 2, "the first one blocks only the helper thread");
        drop(helper);
        // All are closed in the end, although the last handle is dropped.
        other.set_read_timeout(Some(Duration::from_secs(20))).expect("an option");
        assert_eq!(std::io::Read::read(&mut &other, &mut [0]).expect("no timeout"), 0);
    }
}
