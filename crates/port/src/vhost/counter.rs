//! Adds to an eventfd without ever blocking.
//!
//! `write` to an eventfd blocks if the counter is full and `O_NONBLOCK` is clear, and both are under the control of any
//! process that shares the open file. There is no per-call flag either: eventfd does not support `RWF_NOWAIT`
//! (`EOPNOTSUPP` in Linux 6.18). The kernel itself adds to a counter by `eventfd_signal`, which takes a spin lock and
//! saturates. The oldest system call that reaches it is the completion of an asynchronous read (`io_submit(2)`,
//! `IOCB_FLAG_RESFD`): here a read of zero bytes, which completes before the system call returns.

use std::cell::OnceCell;
use std::ffi::{c_long, c_void};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::{from_mut, null_mut};
use std::sync::atomic::{AtomicU32, Ordering};

/// Adds 1 to the eventfd `fd`. A full counter stays full.
///
/// # Errors
/// Asynchronous I/O is not available to this thread (`fs.aio-max-nr` is used up, or a filter forbids it), or `fd` is
/// not an eventfd.
pub(crate) fn add(fd: BorrowedFd<'_>) -> io::Result<()> {
    CONTEXT.with(|context| match context.get_or_init(|| Context::new().ok()) {
        Some(context) => context.add(fd),
        None => Err(io::ErrorKind::Unsupported.into()),
    })
}

thread_local! {
    static CONTEXT: OnceCell<Option<Context>> = const { OnceCell::new() };
}

/// `struct iocb` (`linux/aio_abi.h`). On big-endian machines some zero fields are at other offsets.
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

/// Head of the completion ring, which the kernel maps at the context's address (`struct aio_ring` in `fs/aio.c`;
/// libaio, QEMU and fio rely on it, too).
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

/// A thread's asynchronous I/O context.
#[derive(Debug)]
struct Context {
    id: usize,
    /// The file to read.
    empty: File,
}

impl Context {
    fn new() -> io::Result<Context> {
        let empty = File::open("/dev/null")?;
        let mut id = 0usize;
        // SAFETY: the kernel may write a context's ID to `id`, which is 0 before, as required.
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
        // SAFETY: one request, which the kernel copies before it returns; it reads nothing into memory. Both
        // descriptors are open.
        check(unsafe { libc::syscall(libc::SYS_io_submit, self.id, 1 as c_long, list.as_mut_ptr()) })?;
        // Discard all completions: they are not needed.
        let ring = self.ring();
        ring.head.store(ring.tail.load(Ordering::Acquire), Ordering::Release);
        Ok(())
    }

    fn ring(&self) -> &Ring {
        // SAFETY: the kernel maps the ring there, page-aligned and writable for this process, until the context is
        // destroyed; after setup the kernel writes only the atomics.
        unsafe { &*(self.id as *const Ring) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: it is this thread's context, and there are no references to its ring.
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
        // Blocking: its front-end may make it so at any time.
        let fd = eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd");
        let read = || {
            let mut count = [0; 8];
            rustix::io::read(&fd, &mut count).expect("it is not zero");
            u64::from_ne_bytes(count)
        };
        // More than the completion ring holds.
        for _ in 0..10_000 {
            add(fd.as_fd()).expect("it counts");
        }
        assert_eq!(read(), 10_000);
        rustix::io::write(&fd, &(u64::MAX - 1).to_ne_bytes()).expect("it was empty");
        for _ in 0..3 {
            add(fd.as_fd()).expect("full, but does not block");
        }
        assert_eq!(read(), u64::MAX, "it saturates");
        let (_reader, writer) = std::io::pipe().expect("a pipe");
        assert!(add(writer.as_fd()).is_err(), "not an eventfd");
        add(fd.as_fd()).expect("still works after errors");
        assert_eq!(read(), 1);
    }
}
