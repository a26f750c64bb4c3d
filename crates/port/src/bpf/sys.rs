//! The `bpf` system call: programs and socket maps.

use std::io;
use std::mem::size_of_val;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use super::{Instruction, ProgramKind};

// linux/bpf.h.
const BPF_MAP_CREATE: libc::c_long = 0;
const BPF_MAP_UPDATE_ELEM: libc::c_long = 2;
const BPF_MAP_DELETE_ELEM: libc::c_long = 3;
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_TYPE_SOCKET_FILTER: u32 = 1;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;

/// Size of the verifier's log, bytes; the reason is at its end.
const LOG_BYTES: usize = 1 << 16;

/// The part of `union bpf_attr` that loads a program.
#[repr(C)]
struct LoadProgram {
    program_type: u32,
    instruction_count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
}

/// The part that creates a map.
#[repr(C)]
struct CreateMap {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    flags: u32,
}

/// The part that sets an element of a map.
#[repr(C)]
struct UpdateElement {
    map: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

/// The part that removes an element from a map.
#[repr(C)]
struct DeleteElement {
    map: u32,
    padding: u32,
    key: u64,
}

/// Loads a program. If the verifier rejects it, the error contains the verifier's log.
pub(crate) fn load_program(kind: ProgramKind, instructions: &[Instruction], name: &str) -> io::Result<OwnedFd> {
    let mut attributes = LoadProgram {
        program_type: match kind {
            ProgramKind::SocketFilter => BPF_PROG_TYPE_SOCKET_FILTER,
            ProgramKind::Xdp => BPF_PROG_TYPE_XDP,
        },
        instruction_count: instructions.len() as u32,
        instructions: instructions.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log: 0,
        kernel_version: 0,
        flags: 0,
        name: [0; 16],
    };
    for (to, from) in attributes.name.iter_mut().take(15).zip(name.bytes()) {
        *to = from;
    }
    // SAFETY: the kernel reads through `attributes` `instruction_count` instructions and a terminated string; all live
    // through the call.
    match unsafe { descriptor(BPF_PROG_LOAD, &attributes) } {
        Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EINVAL)) => {
            let mut log = vec![0u8; LOG_BYTES];
            (attributes.log_level, attributes.log_size, attributes.log) =
                (1, LOG_BYTES as u32, log.as_mut_ptr() as u64);
            // SAFETY: as above; the kernel writes up to `log_size` bytes to `log`, which lives through the call.
            let again = unsafe { descriptor(BPF_PROG_LOAD, &attributes) };
            let end = log.iter().position(|&b| b == 0).unwrap_or(log.len());
            let text = String::from_utf8_lossy(&log[..end]);
            let tail: Vec<&str> = text.lines().rev().take(4).collect();
            again.map_err(|e| {
                if tail.is_empty() { e } else { io::Error::new(e.kind(), format!("{e}: {}", tail.join("; "))) }
            })
        }
        result => result,
    }
}

/// Creates a map of AF_XDP sockets (`BPF_MAP_TYPE_XSKMAP`), indexed from 0.
pub(crate) fn create_socket_map(entries: u32) -> io::Result<OwnedFd> {
    let attributes =
        CreateMap { map_type: BPF_MAP_TYPE_XSKMAP, key_size: 4, value_size: 4, max_entries: entries, flags: 0 };
    // SAFETY: these attributes have no pointers.
    unsafe { descriptor(BPF_MAP_CREATE, &attributes) }
}

/// Adds a socket to a map; closing the socket removes it.
pub(crate) fn set_socket(map: BorrowedFd<'_>, index: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
    let descriptor = socket.as_raw_fd() as u32;
    let attributes = UpdateElement {
        map: map.as_raw_fd() as u32,
        padding: 0,
        key: &raw const index as u64,
        value: &raw const descriptor as u64,
        flags: 0,
    };
    // SAFETY: key and value point at four bytes each, the sizes of such a map, which live through the call.
    unsafe { call(BPF_MAP_UPDATE_ELEM, &attributes) }.map(drop)
}

/// Removes a socket from a map; does nothing if there is none.
pub(crate) fn remove_socket(map: BorrowedFd<'_>, index: u32) -> io::Result<()> {
    let attributes = DeleteElement { map: map.as_raw_fd() as u32, padding: 0, key: &raw const index as u64 };
    // SAFETY: the key points at four bytes, the size of such a map's, which live through the call.
    match unsafe { call(BPF_MAP_DELETE_ELEM, &attributes) } {
        Err(error) if error.raw_os_error() != Some(libc::ENOENT) => Err(error),
        _ => Ok(()),
    }
}

/// # Safety
/// `attributes` must be those of a `command` that returns a descriptor; pointers in them must be valid for it.
pub(super) unsafe fn descriptor<T>(command: libc::c_long, attributes: &T) -> io::Result<OwnedFd> {
    // SAFETY: as the caller promises.
    let fd = unsafe { call(command, attributes) }?;
    // SAFETY: the call just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// # Safety
/// `attributes` must be those of `command`; pointers in them must be valid for it.
pub(super) unsafe fn call<T>(command: libc::c_long, attributes: &T) -> io::Result<libc::c_int> {
    // SAFETY: the kernel reads `attributes`, of the stated size, which live through the call; the caller promises the
    // rest.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, command, std::ptr::from_ref(attributes), size_of_val(attributes)) };
    libc::c_int::try_from(result).ok().filter(|&n| n >= 0).ok_or_else(io::Error::last_os_error)
}

/// The result of a program's test run.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct TestRun {
    /// Its return value.
    pub(crate) verdict: u32,
    /// The frame afterwards, with the metadata in front of it.
    pub(crate) data: Vec<u8>,
}

/// Runs an XDP program on a frame, without a device (`BPF_PROG_TEST_RUN`).
#[cfg(test)]
pub(crate) fn test_run(program: BorrowedFd<'_>, frame: &[u8]) -> io::Result<TestRun> {
    const BPF_PROG_TEST_RUN: libc::c_long = 10;
    #[repr(C)]
    struct Run {
        program: u32,
        verdict: u32,
        size_in: u32,
        size_out: u32,
        data_in: u64,
        data_out: u64,
        repeat: u32,
        duration: u32,
    }
    let mut data = vec![0u8; frame.len() + 256];
    let mut attributes = Run {
        program: program.as_raw_fd() as u32,
        verdict: 0,
        size_in: frame.len() as u32,
        size_out: data.len() as u32,
        data_in: frame.as_ptr() as u64,
        data_out: data.as_mut_ptr() as u64,
        repeat: 1,
        duration: 0,
    };
    // SAFETY: the kernel reads `size_in` bytes of `frame`, writes at most `size_out` bytes to `data`, and its results
    // into `attributes`, which is borrowed mutably here; all live through the call.
    let result =
        unsafe { libc::syscall(libc::SYS_bpf, BPF_PROG_TEST_RUN, &raw mut attributes, std::mem::size_of::<Run>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    data.truncate(attributes.size_out as usize);
    Ok(TestRun { verdict: attributes.verdict, data })
}
