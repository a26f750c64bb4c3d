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

/// What a worker has counted, of all its connections.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Messages that were taken from the application.
    pub sent_messages: u64,
    /// Messages that were given to the application.
    pub delivered_messages: u64,
    /// Their bytes.
    pub delivered_bytes: u64,
    /// Work requests that were taken to be lost.
    pub lost_requests: u64,
    /// Pieces that were sent again.
    pub repaired: u64,
    /// Timers that ran out with something in flight.
    pub timeouts: u64,
    /// Changes of the queue pair in use because it failed.
    pub lane_flips: u64,
    /// What peers sent and may not.
    pub refused: u64,
    /// Writes of peers to regions that were executed.
    pub peer_writes: u64,
    /// Reads of regions by peers that were answered.
    pub peer_reads: u64,
    /// Accesses of peers to regions that were refused.
    pub peer_refused: u64,
    /// Packets that the sockets had no room for, in runs.
    pub no_room_runs: u64,
}

/// The version of the interface that the library has: `BIFROST_RDM_ABI` of its header.
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

/// Makes a worker whose packets have the address `address`, such as "fd00::1" or "10.0.0.1".
/// Without `config`: the defaults.
///
/// Status: `BIND` when the address or the port cannot be bound; `RESOURCES`.
///
/// # Safety
/// `address` must be a text that ends with 0, `config` null or a structure, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_worker_new(
    address: *const c_char,
    config: *const Config,
    out: *mut *mut WorkerHandle,
) -> Status {
    run(|| {
        writable(out)?;
        // SAFETY: the caller's.
        let address = unsafe { ip(address) }?;
        // SAFETY: the caller's.
        let config = match unsafe { config.as_ref() } {
            None => Config::new(),
            Some(config) if config.size as usize != size_of::<Config>() => {
                return Err(Failed::invalid("config.size is that of no version: call bifrost_rdm_config_init first"));
            }
            Some(config) => *config,
        };
        let worker = Worker::new(config.worker(address)?)?;
        // SAFETY: it is writable.
        unsafe { give(WorkerHandle { shared: Shared::new(worker) }, out) };
        Ok(())
    })
}

/// Frees a worker. Its endpoints, listeners and regions stay until they are closed themselves;
/// messages that came in do not. Null is nothing to free.
///
/// # Safety
/// `worker` must be null or a worker that is not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_worker_free(worker: *mut WorkerHandle) -> Status {
    // SAFETY: the caller's.
    run(|| unsafe { close(worker) })
}

/// Writes what carries the packets, in words, into `text`, which has room for `size` bytes; what
/// does not fit is left out, and the last byte is 0.
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
        // SAFETY: the caller's.
        let worker = unsafe { get(worker, "worker") }?;
        writable(text)?;
        let provider = worker.shared.lock()?.worker.provider();
        // SAFETY: the caller's.
        unsafe { write_text(&provider, text, size) }
    })
}

/// Does what there is to do, without waiting. `busy`, unless it is null: 1 if there was something,
/// 0 if not.
///
/// # Safety
/// `worker` must be a worker, `busy` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_poll(worker: *const WorkerHandle, busy: *mut i32) -> Status {
    run(|| {
        // SAFETY: the caller's.
        let worker = unsafe { get(worker, "worker") }?;
        let any = worker.shared.lock()?.worker.poll()?;
        if !busy.is_null() {
            // SAFETY: the caller's.
            unsafe { busy.write(any.into()) };
        }
        Ok(())
    })
}

/// Does what there is to do, and waits for something if there is nothing. Status: `TIMEOUT`.
///
/// # Safety
/// `worker` must be a worker.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_wait(worker: *const WorkerHandle, timeout_us: u64) -> Status {
    run(|| {
        // SAFETY: the caller's.
        let worker = unsafe { get(worker, "worker") }?;
        match worker.shared.lock()?.worker.wait(Duration::from_micros(timeout_us))? {
            true => Ok(()),
            false => Err(Failed(Status::Timeout, "nothing happened in time".to_owned())),
        }
    })
}

/// Has a file choose the service: what this end sends on all connections of the worker, those that
/// are made later, too, goes by `uc` or `rc`, as the file says. It is read now and every 100 ms
/// while the worker is called: replace the file to move running processes. The worker needs
/// `BIFROST_RDM_SERVICE_BOTH`. Status: `INVALID` if it has not, or the file cannot be read or says
/// something else; if that happens later, the service stays. Since version 2.
///
/// # Safety
/// `worker` must be a worker, `path` a text that ends with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_follow(worker: *const WorkerHandle, path: *const c_char) -> Status {
    run(|| {
        // SAFETY: the caller's.
        let worker = unsafe { get(worker, "worker") }?;
        if path.is_null() {
            return Err(Failed::invalid("the path is null"));
        }
        // SAFETY: the caller's.
        let path = OsStr::from_bytes(unsafe { CStr::from_ptr(path) }.to_bytes());
        worker.shared.lock()?.worker.follow(path)?;
        Ok(())
    })
}

/// The descriptor on which packets come in, for poll(2) or epoll(7). When it is readable, and when
/// `due_us` of `bifrost_rdm_due` are over, call `bifrost_rdm_poll` until there is nothing to do. It
/// is the library's, and closed with the worker.
///
/// # Safety
/// `worker` must be a worker, `descriptor` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_descriptor(worker: *const WorkerHandle, descriptor: *mut i32) -> Status {
    run(|| {
        // SAFETY: the caller's.
        let worker = unsafe { get(worker, "worker") }?;
        writable(descriptor)?;
        let mut state = worker.shared.lock()?;
        let made = match state.descriptor.take() {
            Some(made) => made,
            None => state.worker.descriptor()?,
        };
        // SAFETY: the caller's.
        unsafe { descriptor.write(state.descriptor.insert(made).as_raw_fd()) };
        Ok(())
    })
}

/// For how long the worker has nothing to do if no packet comes, us, at most 100,000.
///
/// # Safety
/// `worker` must be a worker, `due_us` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_due(worker: *const WorkerHandle, due_us: *mut u64) -> Status {
    run(|| {
        // SAFETY: the caller's.
        let worker = unsafe { get(worker, "worker") }?;
        writable(due_us)?;
        let due = worker.shared.lock()?.worker.due();
        // Rounded up: a caller that comes back too soon finds nothing to do.
        let us = due.as_nanos().div_ceil(1000) as u64;
        // SAFETY: the caller's.
        unsafe { due_us.write(us) };
        Ok(())
    })
}

/// What the worker has counted. `size`: bytes of the structure, as the caller knows it; later
/// versions of it are longer.
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
        // SAFETY: the caller's.
        let worker = unsafe { get(worker, "worker") }?;
        writable(counters)?;
        if size != size_of::<Counters>() {
            return Err(Failed::invalid("the size is that of no version of bifrost_rdm_counters_data"));
        }
        let counted = count(&worker.shared.lock()?.worker);
        // SAFETY: the caller's.
        unsafe { counters.write(counted) };
        Ok(())
    })
}

/// Writes all that the worker has counted into `text`, in the text format that Prometheus reads. It has
/// room for `size` bytes; what does not fit is left out, and the last byte is 0. `needed`, unless it is
/// null: how much room the whole text needs. With a size of 0 nothing is written, and `text` may be
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
        // SAFETY: the caller's.
        let worker = unsafe { get(worker, "worker") }?;
        let counted = exposition(&worker.shared.lock()?.worker.statistics());
        if !needed.is_null() {
            // SAFETY: the caller's.
            unsafe { needed.write(counted.len() + 1) };
        }
        if size == 0 {
            return Ok(());
        }
        writable(text)?;
        // SAFETY: the caller's.
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

/// An address.
///
/// # Safety
/// `text` must be null or end with 0.
pub(crate) unsafe fn ip(text: *const c_char) -> Result<IpAddr, Failed> {
    if text.is_null() {
        return Err(Failed::invalid("the address is null"));
    }
    // SAFETY: the caller's.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    text.parse().map_err(|_| Failed::invalid(format!("{text:?} is not an IPv4 or IPv6 address")))
}

/// An address and a port.
///
/// # Safety
/// As for [`ip`].
pub(crate) unsafe fn socket(address: *const c_char, port: u16) -> Result<SocketAddr, Failed> {
    // SAFETY: the caller's.
    Ok(SocketAddr::new(unsafe { ip(address) }?, port))
}

/// Writes a text that ends with 0, as much of it as fits.
///
/// # Safety
/// `into` must be writable for `size` bytes.
pub(crate) unsafe fn write_text(text: &str, into: *mut c_char, size: usize) -> Result<(), Failed> {
    let room = size.checked_sub(1).ok_or_else(|| Failed::invalid("there is no room for a text"))?;
    let mut len = text.len().min(room);
    while !text.is_char_boundary(len) {
        len -= 1;
    }
    // SAFETY: `len` + 1 are at most `size`; the two do not overlap, for the text is the library's.
    unsafe {
        into.copy_from_nonoverlapping(text.as_ptr().cast(), len);
        into.add(len).write(0);
    }
    Ok(())
}
