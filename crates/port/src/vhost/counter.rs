//! Adds to an event counter without ever blocking.
//!
//! `write` on an eventfd blocks when the counter is full and `O_NONBLOCK` is clear, and both are in the hands of anyone who shares
//! the open file. There is no per-call flag either: eventfd knows no `RWF_NOWAIT` (`EOPNOTSUPP` in Linux 6.18). The kernel
//! itself adds to a counter by `eventfd_signal`, which takes a spin lock and saturates. The oldest interface that leads
//! there is the completion of an asynchronous read (`io_submit(2)`, `IOCB_FLAG_RESFD`): here one of no bytes, which is complete when
//! the system call returns.

use std::cell::OnceCell;
use std::ffi::{c_long, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{from_mut, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

/// Adds 1 to the event counter `fd`. A counter that is full stays so.
///
/// # Errors
/// The kernel has no asynchronous I/O for this thread (`fs.aio-max-nr` is used up, or a filter forbids it), or `fd` is no event
/// counter.
pub(crate) fn add(fd: BorrowedFd<'_>) -> io::Result<()> {
    CONTEXT.with(|context| match context.get_or_init(|| Context::new().ok()) {
        Some(context) => context.add(fd),
        None => Err(io::ErrorKind::Unsupported.into()),
    })
}

thread_local! {
    static CONTEXT: OnceCell<Option<Context>> = const { OnceCell::new() };
}

/// `struct iocb` (`linux/aio_abi.h`). Fields that are zero here have other places where bytes are in another order.
#[repr(C)]
#[derive(Default)]
struct Request {
    data: u64,
    key_and_flags: u64,
    opcode: u16,
    priority: i16,
    file: u32,
    buffer: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    notified: u32,
}

const _: () = assert!(size_of::<Request>() == 64);

/// `IOCB_CMD_PREAD`.
const READ: u16 = 0;
/// `IOCB_FLAG_RESFD`.
const NOTIFY: u32 = 1;

/// The head of the ring of completions, which the kernel maps at the context's address (`struct aio_ring` in `fs/aio.c`; libaio,
/// QEMU and fio rely on it, too).
#[repr(C)]
struct Ring {
    id: u32,
    size: u32,
    head: AtomicU32,
    tail: AtomicU32,
    magic: u32,
    compatible: u32,
    incompatible: u32,
}

const MAGIC: u32 = 0xa10a_10a1;

/// A thread's context of asynchronous I/O.
#[derive(Debug)]
struct Context {
    id: usize,
    /// What is read.
    empty: File,
}

impl Context {
    fn new() -> io::Result<Context> {
        let empty = File::open("/dev/null")?;
        let mut id = 0usize;
        // SAFETY: `id` is where the kernel may write a context's number, and 0 before, as it must be.
        check(unsafe { libc::syscall(libc::SYS_io_setup, 1 as c_long, from_mut(&mut id)) })?;
        let context = Context { id, empty };
        let ring = context.ring();
        if ring.magic == MAGIC && ring.incompatible == 0 { Ok(context) } else { Err(io::ErrorKind::Unsupported.into()) }
    }

    fn add(&self, fd: BorrowedFd<'_>) -> io::Result<()> {
        let mut request = Request {
            opcode: READ,
            file: self.empty.as_raw_fd() as u32,
            flags: NOTIFY,
            notified: fd.as_raw_fd() as u32,
            ..Request::default()
        };
        let mut list = [from_mut(&mut request)];
        // SAFETY: one request, which the kernel copies before it returns; it reads nothing into memory. Both descriptors are
        // open.
        check(unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1 as c_long, list.as_mut_ptr()) })?;
        // Nobody wants to see completions: they have been seen.
        let ring = self.ring();
        ring.head.store(ring.tail.load(Ordering::Acquire), Ordering::Release);
        Ok(())
    }

    fn ring(&self) -> &Ring {
        // SAFETY: the kernel has mapped the ring there, page-aligned, to be read and written by this process, until the context is
        // destroyed; it writes to the atomics alone once the ring is there.
        unsafe { &*(self.id as *const Ring) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it is this thread's context, and nobody has a reference to its ring.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.id, null_mut::<c_void>()) };
    }
}

fn check(result: c_long) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::{EventfdFlags, eventfd};

    use super::*;

    #[test]
    fn a_counter_counts_and_never_blocks() {
        // Blocking, as its front-end may make it at any time.
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("an event counter");
        let read = || {
            let mut count = [0; 8];
            rustix::io::read(&fd, &mut count).expect("it is not zero");
            u64::from_ne_bytes(count)
        };
        // More than the ring of completions has room for.
        for _ in 0..10_000 {
            add(fd.as_fd()).expect("it counts");
        }
        assert_eq!(read(), 10_000);
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).expect("it was empty");
        for _ in 0..3 {
            add(fd.as_fd()).expect("it is full, and blocks nobody");
        }
        assert_eq!(read(), u64::MAX, "it saturates");
        let (_reader, writer) = std::io::pipe().expect("a pipe");
        assert!(add(writer.as_fd()).is_err(), "no event counter");
        add(fd.as_fd()).expect("errors change nothing");
        assert_eq!(read(), 1);
    }
}
