//! Memory that peers read and write.

use std::ffi::c_void;
use std::slice;
use std::time::Duration;

use bifrost_endpoint::{RemoteRegion, Rights};

use crate::handle::{EndpointHandle, RegionHandle, WorkerHandle, close, get, give, writable};
use crate::message::{bytes, room};
use crate::status::{Failed, Status, run};
use crate::{RIGHT_READ, RIGHT_WRITE};

/// Identifies a region of the peer, which sends it for example in a message.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Identifies the region, on the connection for which it was permitted.
    pub key: u64,
    /// Length of the region, bytes.
    pub len: u64,
}

/// Length of the output of `bifrost_rdm_remote_encode`, bytes.
pub const REMOTE_LEN: usize = 16;

/// Registers `len` bytes of memory, initially 0, for peers that `bifrost_rdm_region_allow` permits
/// to access it. The application is not involved in accesses, but its worker must be polled.
/// Status: `RESOURCES`.
///
/// # Safety
/// `worker` must be a worker, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_register(
    worker: *const WorkerHandle,
    len: usize,
    out: *mut *mut RegionHandle,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        writable(out)?;
        let state = worker.shared.lock()?;
        let mut memory = Vec::new();
        let none = |_| Failed(Status::Resources, format!("cannot allocate a region of {len} bytes"));
        memory.try_reserve_exact(len).map_err(none)?;
        memory.resize(len, 0);
        let region = state.worker.register(memory)?;
        // SAFETY: the caller guarantees that it is writable.
        unsafe { give(RegionHandle { shared: worker.shared.clone(), region }, out) };
        Ok(())
    })
}

/// Deregisters and frees the memory: no peer accesses it any more. Null is ignored.
///
/// # Safety
/// `region` must be null or a region that is not freed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_deregister(region: *mut RegionHandle) -> Status {
    // SAFETY: guaranteed by the caller.
    run(|| unsafe { close(region) })
}

/// Sets the permission of an endpoint's peer: `rights` is a sum of `BIFROST_RDM_RIGHT_READ` and
/// `_WRITE`, or 0 for no access. Send `remote` to the peer; it may be null if `rights` is 0.
///
/// # Safety
/// `region` must be a region, `endpoint` an endpoint, `remote` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_region_allow(
    region: *const RegionHandle,
    endpoint: *const EndpointHandle,
    rights: u32,
    remote: *mut Remote,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let (region, endpoint) = unsafe { (get(region, "region")?, get(endpoint, "endpoint")?) };
        if !std::sync::Arc::ptr_eq(&region.shared, &endpoint.shared) {
            return Err(Failed::invalid("the endpoint and the region belong to different workers"));
        }
        let rights = match rights {
            0 => None,
            RIGHT_READ => Some(Rights::Read),
            RIGHT_WRITE => Some(Rights::Write),
            BOTH => Some(Rights::ReadWrite),
            other => return Err(Failed::invalid(format!("rights must be 0 to 3, not {other}"))),
        };
        let _state = region.shared.lock()?;
        let Some(rights) = rights else {
            region.region.revoke(&endpoint.endpoint);
            return Ok(());
        };
        writable(remote)?;
        let RemoteRegion { key, len } = region.region.allow(&endpoint.endpoint, rights)?;
        // SAFETY: guaranteed by the caller.
        unsafe { remote.write(Remote { key, len }) };
        Ok(())
    })
}

/// Copies data out of a region of this end. Status: `RANGE`.
///
/// # Safety
/// `region` must be a region, `into` writable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_region_get(
    region: *const RegionHandle,
    offset: usize,
    into: *mut c_void,
    len: usize,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let region = unsafe { get(region, "region") }?;
        inside(region, offset, len)?;
        if len == 0 {
            return Ok(());
        }
        writable(into)?;
        let _state = region.shared.lock()?;
        // SAFETY: it is not null, the caller guarantees that it is writable, and `len` is at most
        // that of a vector. `read_at` writes all bytes or reads none.
        Ok(region.region.read_at(offset, unsafe { slice::from_raw_parts_mut(into.cast::<u8>(), len) })?)
    })
}

/// Copies data into a region of this end, where peers can read it. Status: `RANGE`.
///
/// # Safety
/// `region` must be a region, `data` readable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_region_put(
    region: *const RegionHandle,
    offset: usize,
    data: *const c_void,
    len: usize,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let region = unsafe { get(region, "region") }?;
        inside(region, offset, len)?;
        if len == 0 {
            return Ok(());
        }
        if data.is_null() {
            return Err(Failed::invalid("the data is null"));
        }
        let _state = region.shared.lock()?;
        // SAFETY: as in `bifrost_rdm_region_get`.
        Ok(region.region.write_at(offset, unsafe { slice::from_raw_parts(data.cast::<u8>(), len) })?)
    })
}

/// Encodes a region as 16 bytes, independent of the processor's byte order.
///
/// # Safety
/// `remote` must be readable, `bytes` writable for 16 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_remote_encode(remote: *const Remote, bytes: *mut c_void) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let Remote { key, len } = *unsafe { get(remote, "region") }?;
        writable(bytes)?;
        // SAFETY: guaranteed by the caller.
        unsafe { bytes.cast::<[u8; REMOTE_LEN]>().write_unaligned(RemoteRegion { key, len }.to_bytes()) };
        Ok(())
    })
}

/// Decodes the output of `bifrost_rdm_remote_encode`.
///
/// # Safety
/// `bytes` must be readable for 16 bytes, `remote` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_remote_decode(bytes: *const c_void, remote: *mut Remote) -> Status {
    run(|| {
        writable(remote)?;
        if bytes.is_null() {
            return Err(Failed::invalid("the bytes are null"));
        }
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { bytes.cast::<[u8; REMOTE_LEN]>().read_unaligned() };
        let RemoteRegion { key, len } = RemoteRegion::from_bytes(&bytes);
        // SAFETY: guaranteed by the caller.
        unsafe { remote.write(Remote { key, len }) };
        Ok(())
    })
}

/// Writes to a region of the peer, and waits until the write is done. The peer's application is not
/// involved. Status: `RANGE`, `FAILURE` if the peer refuses, `TIMEOUT`, `FULL`, `CLOSED`.
///
/// # Safety
/// `endpoint` must be an endpoint, `remote` readable, `data` readable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_write(
    endpoint: *const EndpointHandle,
    remote: *const Remote,
    offset: u64,
    data: *const c_void,
    len: usize,
    timeout_us: u64,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let (handle, data) = unsafe { (get(endpoint, "endpoint")?, bytes(data, len)?) };
        // SAFETY: guaranteed by the caller.
        let remote = region(unsafe { get(remote, "peer's region") }?);
        let _state = handle.shared.lock()?;
        Ok(handle.endpoint.write(&remote, offset, data, Duration::from_micros(timeout_us))?)
    })
}

/// Reads from a region of the peer. The peer's application is not involved. Status: as for
/// `bifrost_rdm_write`.
///
/// # Safety
/// `endpoint` must be an endpoint, `remote` readable, `into` writable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_read(
    endpoint: *const EndpointHandle,
    remote: *const Remote,
    offset: u64,
    into: *mut c_void,
    len: u32,
    timeout_us: u64,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        // SAFETY: guaranteed by the caller.
        let remote = region(unsafe { get(remote, "peer's region") }?);
        if len > 0 {
            writable(into)?;
        }
        let _state = handle.shared.lock()?;
        let message = handle.endpoint.read(&remote, offset, len, Duration::from_micros(timeout_us))?;
        // SAFETY: the message has `len` bytes, because other lengths are refused; the library owns
        // them, so the ranges do not overlap.
        unsafe { into.cast::<u8>().copy_from_nonoverlapping(message.as_ptr(), message.len()) };
        Ok(())
    })
}

/// Begins a write to a region of the peer; `bifrost_rdm_finish` returns an empty message once it is
/// done. Writes to one region are executed in the order in which they were begun.
///
/// # Safety
/// `endpoint` must be an endpoint, `remote` readable, `data` readable for `len` bytes, `call`
/// writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_begin_write(
    endpoint: *const EndpointHandle,
    remote: *const Remote,
    offset: u64,
    data: *const c_void,
    len: usize,
    call: *mut u32,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let (handle, data) = unsafe { (get(endpoint, "endpoint")?, bytes(data, len)?) };
        // SAFETY: guaranteed by the caller.
        let remote = region(unsafe { get(remote, "peer's region") }?);
        writable(call)?;
        let state = handle.shared.lock()?;
        room(&state, &handle.endpoint, 0)?;
        let begun = handle.endpoint.begin_write(&remote, offset, data)?;
        // SAFETY: guaranteed by the caller.
        unsafe { call.write(begun) };
        Ok(())
    })
}

/// Begins a read from a region of the peer; `bifrost_rdm_finish` returns the data. It includes all
/// writes that this end began earlier.
///
/// # Safety
/// `endpoint` must be an endpoint, `remote` readable, `call` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_begin_read(
    endpoint: *const EndpointHandle,
    remote: *const Remote,
    offset: u64,
    len: u32,
    call: *mut u32,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        // SAFETY: guaranteed by the caller.
        let remote = region(unsafe { get(remote, "peer's region") }?);
        writable(call)?;
        let state = handle.shared.lock()?;
        room(&state, &handle.endpoint, 0)?;
        let begun = handle.endpoint.begin_read(&remote, offset, len)?;
        // SAFETY: guaranteed by the caller.
        unsafe { call.write(begun) };
        Ok(())
    })
}

const BOTH: u32 = RIGHT_READ | RIGHT_WRITE;

fn region(remote: &Remote) -> RemoteRegion {
    RemoteRegion { key: remote.key, len: remote.len }
}

/// Checks that a range is inside a region, before a reference to the caller's memory is created.
fn inside(handle: &RegionHandle, offset: usize, len: usize) -> Result<(), Failed> {
    let region = handle.region.len();
    match offset.checked_add(len) {
        Some(end) if end <= region => Ok(()),
        _ => Err(Failed(
            Status::Range,
            format!("{len} bytes at offset {offset} are not inside a region of {region} bytes"),
        )),
    }
}
