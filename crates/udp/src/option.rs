//! Socket options that no crate in use offers.

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd};

/// Sets an integer socket option.
///
/// # Errors
/// The kernel's error.
pub fn set_int(socket: &impl AsFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    set(socket, level, name, &value)
}

/// Attaches a classic BPF program: `SO_ATTACH_FILTER` or `SO_ATTACH_REUSEPORT_CBPF`.
///
/// # Errors
/// If it has more than 65,535 instructions, or the kernel's error.
pub fn set_program(socket: &impl AsFd, name: i32, program: &[libc::sock_filter]) -> io::Result<()> {
    let len = u16::try_from(program.len()).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // The kernel reads the instructions and keeps a copy; it does not write through this pointer.
    let program = libc::sock_fprog { len, filter: program.as_ptr().cast_mut() };
    set(socket, libc::SOL_SOCKET, name, &program)
}

fn set<T>(socket: &impl AsFd, level: i32, name: i32, value: &T) -> io::Result<()> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes at `value`, which lives through the call; T is an `int` or a
    // `sock_fprog` whose pointer is to a live slice of `len` instructions (see the callers above).
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(value).cast(),
            size_of::<T>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
