//! Workers.

use std::ffi::{CStr, OsStr, c_char};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use bifrost_endpoint::{Worker, exposition};

use crate::config::Config;
use crate::handle::{Shared, WorkerHandle, close, get, give, writable};
use crate::status::{Failed, Status, run};

/// Counters of a worker, over all its connections.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages accepted from the application.
    pub sent_messages: u64,
    /// Messages delivered to the application.
    pub delivered_messages: u64,
    /// Bytes delivered to the application.
    pub delivered_bytes: u64,
    /// Work requests considered lost.
    pub lost_requests: u64,
    /// Units retransmitted.
    pub repaired: u64,
    /// Timeouts with requests in flight.
    pub timeouts: u64,
    /// Changes of the queue pair in use because of a failure.
    pub lane_flips: u64,
    /// SENDs, WRITEs and control datagrams that violate the protocol.
    pub refused: u64,
    /// Peers' writes to regions that were executed.
    pub peer_writes: u64,
    /// Peers' reads of regions that were answered.
    pub peer_reads: u64,
    /// Peers' accesses to regions that were refused.
    pub peer_refused: u64,
    /// Runs of packets for which the socket buffer was full.
    pub no_room_runs: u64,
}

/// The library's version of the interface; compare with `BIFROST_RDM_ABI` of the header.
#[unsafe(no_mangle)]
pub extern "C" fn bifrost_rdm_abi() -> u32 {
    crate::ABI
}

/// The library's version, such as "0.1.0".
#[unsafe(no_mangle)]
pub extern "C" fn bifrost_rdm_version() -> *const c_char {
    const VERSION: &CStr = match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
        Ok(version) => version,
        Err(_) => c"",
    };
    VERSION.as_ptr()
}

/// Creates a worker with the address `address`, such as "fd00::1" or "10.0.0.1". `config` may be
/// null for the defaults.
///
/// Status: `BIND` if the address or the port cannot be bound; `RESOURCES`.
///
/// # Safety
/// `address` must be a null-terminated string, `config` null or a structure, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_worker_new(
    address: *const c_char,
    config: *const Config,
    out: *mut *mut WorkerHandle,
) -> Status {
    run(|| {
        writable(out)?;
        // SAFETY: guaranteed by the caller.
        let address = unsafe { ip(address) }?;
        // SAFETY: guaranteed by the caller.
        let config = match unsafe { config.as_ref() } {
            None => Config::new(),
            Some(config) if config.size as usize != size_of::<Config>() => {
                return Err(Failed::invalid("config.size matches no version; call bifrost_rdm_config_init first"));
            }
            Some(config) => *config,
        };
        let worker = Worker::new(config.worker(address)?)?;
        // SAFETY: the caller guarantees that it is writable.
        unsafe { give(WorkerHandle { shared: Shared::new(worker) }, out) };
        Ok(())
    })
}

/// Frees a worker. Its endpoints, listeners and regions stay until they are closed; received
/// messages do not. Null is ignored.
///
/// # Safety
/// `worker` must be null or a worker that is not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_worker_free(worker: *mut WorkerHandle) -> Status {
    // SAFETY: guaranteed by the caller.
    run(|| unsafe { close(worker) })
}

/// Describes what carries the packets, in `text`, which has `size` bytes; it is truncated if
/// necessary, and always null-terminated.
///
/// # Safety
/// `worker` must be a worker, `text` writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_worker_provider(
    worker: *const WorkerHandle,
    text: *mut c_char,
    size: usize,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        writable(text)?;
        let provider = worker.shared.lock()?.worker.provider();
        // SAFETY: guaranteed by the caller.
        unsafe { write_text(&provider, text, size) }
    })
}

/// Handles whatever is due, without waiting. Sets `busy`, unless it is null, to 1 if there was
/// anything, otherwise to 0.
///
/// # Safety
/// `worker` must be a worker, `busy` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_poll(worker: *const WorkerHandle, busy: *mut i32) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        let any = worker.shared.lock()?.worker.poll()?;
        if !busy.is_null() {
            // SAFETY: guaranteed by the caller.
            unsafe { busy.write(any.into()) };
        }
        Ok(())
    })
}

/// Handles whatever is due; if nothing is, waits. Status: `TIMEOUT`.
///
/// # Safety
/// `worker` must be a worker.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_wait(worker: *const WorkerHandle, timeout_us: u64) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        match worker.shared.lock()?.worker.wait(Duration::from_micros(timeout_us))? {
            true => Ok(()),
            false => Err(Failed(Status::Timeout, "timeout: nothing happened".to_owned())),
        }
    })
}

/// Follows a file that selects the service on which this end sends, `uc` or `rc`, for all present
/// and later connections of the worker. It is read now and every 100 ms while the worker is called:
/// replace the file to move running processes. The worker needs `BIFROST_RDM_SERVICE_BOTH`. Status:
/// `INVALID` if it does not have it, or the file cannot be read or has other content; if that
/// happens later, the service is unchanged. Since version 2.
///
/// # Safety
/// `worker` must be a worker, `path` a null-terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_follow(worker: *const WorkerHandle, path: *const c_char) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        if path.is_null() {
            return Err(Failed::invalid("the path is null"));
        }
        // SAFETY: guaranteed by the caller.
        let path = OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes());
        worker.shared.lock()?.worker.follow(path)?;
        Ok(())
    })
}

/// The descriptor that is readable when packets arrive, for poll(2) or epoll(7). When it is
/// readable, and when `due_us` of `bifrost_rdm_due` have passed, call `bifrost_rdm_poll` until it
/// is no longer busy. The library owns it and closes it with the worker.
///
/// # Safety
/// `worker` must be a worker, `descriptor` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_descriptor(worker: *const WorkerHandle, descriptor: *mut i32) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        writable(descriptor)?;
        let mut state = worker.shared.lock()?;
        let made = match state.descriptor.take() {
            Some(made) => made,
            None => state.worker.descriptor()?,
        };
        // SAFETY: guaranteed by the caller.
        unsafe { descriptor.write(state.descriptor.insert(made).as_raw_fd()) };
        Ok(())
    })
}

/// How long the worker can be idle if no packet arrives, us, at most 100,000.
///
/// # Safety
/// `worker` must be a worker, `due_us` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_due(worker: *const WorkerHandle, due_us: *mut u64) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        writable(due_us)?;
        let due = worker.shared.lock()?.worker.due();
        // Rounded up, because a caller that returns too early would find nothing due.
        let us = due.as_nanos().div_ceil(1000) as u64;
        // SAFETY: guaranteed by the caller.
        unsafe { due_us.write(us) };
        Ok(())
    })
}

/// Returns the worker's counters. `size`: size of the structure as the caller knows it, bytes;
/// later versions are longer.
///
/// # Safety
/// `worker` must be a worker, `counters` writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_counters(
    worker: *const WorkerHandle,
    counters: *mut Counters,
    size: usize,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        writable(counters)?;
        if size != size_of::<Counters>() {
            return Err(Failed::invalid("the size matches no version of bifrost_rdm_counters_data"));
        }
        let counted = count(&worker.shared.lock()?.worker);
        // SAFETY: guaranteed by the caller.
        unsafe { counters.write(counted) };
        Ok(())
    })
}

/// Writes all counters of the worker into `text`, in Prometheus's text format. `text` has `size`
/// bytes; it is truncated if necessary, and always null-terminated. Sets `needed`, unless it is
/// null, to the size of the whole text. With a size of 0 nothing is written, and `text` may be
/// null.
///
/// # Safety
/// `worker` must be a worker, `text` writable for `size` bytes, `needed` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_statistics(
    worker: *const WorkerHandle,
    text: *mut c_char,
    size: usize,
    needed: *mut usize,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        let counted = exposition(&worker.shared.lock()?.worker.statistics());
        if !needed.is_null() {
            // SAFETY: guaranteed by the caller.
            unsafe { needed.write(counted.len() + 1) };
        }
        if size == 0 {
            return Ok(());
        }
        writable(text)?;
        // SAFETY: guaranteed by the caller.
        unsafe { write_text(&counted, text, size) }
    })
}

fn count(worker: &Worker) -> Counters {
    let engine = worker.counters();
    let access = worker.access_counters();
    let (_, socket) = worker.nic_counters();
    Counters {
        sent_messages: engine.sent_messages,
        delivered_messages: engine.delivered_messages,
        delivered_bytes: engine.delivered_bytes,
        lost_requests: engine.lost_requests,
        repaired: engine.repair_requests,
        timeouts: engine.timeouts,
        lane_flips: engine.lane_flips,
        refused: engine.refused,
        peer_writes: access.writes,
        peer_reads: access.reads,
        peer_refused: access.refused,
        no_room_runs: socket.no_room_runs,
    }
}

/// Parses an address.
///
/// # Safety
/// `text` must be null or null-terminated.
pub(crate) unsafe fn ip(text: *const c_char) -> Result<IpAddr, Failed> {
    if text.is_null() {
        return Err(Failed::invalid("the address is null"));
    }
    // SAFETY: guaranteed by the caller.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    text.parse().map_err(|_| Failed::invalid(format!("{text:?} is not an IPv4 or IPv6 address")))
}

/// Combines an address and a port.
///
/// # Safety
/// As for [`ip`].
pub(crate) unsafe fn socket(address: *const c_char, port: u16) -> Result<SocketAddr, Failed> {
    // SAFETY: guaranteed by the caller.
    Ok(SocketAddr::new(unsafe { ip(address) }?, port))
}

/// Writes a null-terminated string, truncated to fit.
///
/// # Safety
/// `into` must be writable for `size` bytes.
pub(crate) unsafe fn write_text(text: &str, into: *mut c_char, size: usize) -> Result<(), Failed> {
    let room = size.checked_sub(1).ok_or_else(|| Failed::invalid("the size of the text is 0"))?;
    let mut len = text.len().min(room);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    // SAFETY: `len` + 1 is at most `size`; the ranges do not overlap, because the library owns the
    // text.
    unsafe {
        into.copy_from_nonoverlapping(text.as_ptr().cast(), len);
        into.add(len).write(0);
    }
    Ok(())
}
