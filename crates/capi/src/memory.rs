//! Memory that peers read and write.

use std::ffi::c_void;
use std::slice;
use std::time::Duration;

use bifrost_endpoint::{RemoteRegion, Rights};

use crate::handle::{EndpointHandle, RegionHandle, WorkerHandle, close, get, give, writable};
use crate::message::{bytes, room};
use crate::status::{Failed, Status, run};
use crate::{RIGHT_READ, RIGHT_WRITE};

/// What names a region of the peer. The peer tells it, in a message for instance.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// Names the region, on the connection for which it was allowed.
    pub key: u64,
    /// Its bytes.
    pub len: u64,
}

/// Bytes of what `bifrost_rdm_remote_encode` writes.
pub const REMOTE_LEN: usize = 16;

/// Registers `len` bytes of memory, all 0, for peers to read and write: `bifrost_rdm_region_allow`
/// lets them in. Peers need nothing of this application but that its worker is polled. Status:
/// `RESOURCES`.
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
        // SAFETY: the caller's.
        let worker = unsafe { get(worker, "worker") }?;
        writable(out)?;
        let state = worker.shared.lock()?;
        let mut memory = Vec::new();
        let none = |_| Failed(Status::Resources, format!("there is no memory for a region of {len} bytes"));
        memory.try_reserve_exact(len).map_err(none)?;
        memory.resize(len, 0);
        let region = state.worker.register(memory)?;
        // SAFETY: it is writable.
        unsafe { give(RegionHandle { shared: worker.shared.clone(), region }, out) };
        Ok(())
    })
}

/// Takes the memory back: no peer reads or writes it any more. Null is nothing to take back.
///
/// # Safety
/// `region` must be null or a region that was not taken back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_deregister(region: *mut RegionHandle) -> Status {
    // SAFETY: the caller's.
    run(|| unsafe { close(region) })
}

/// Lets the peer of an endpoint in, or changes what it may do: `rights` is a sum of
/// `BIFROST_RDM_RIGHT_READ` and `_WRITE`, or 0: nothing any more. `remote` is what the peer must
/// know; it may be null if `rights` is 0.
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
        // SAFETY: the caller's.
        let (region, endpoint) = unsafe { (get(region, "region")?, get(endpoint, "endpoint")?) };
        if !std::sync::Arc::ptr_eq(&region.shared, &endpoint.shared) {
            return Err(Failed::invalid("the endpoint and the region are of different workers"));
        }
        let rights = match rights {
            0 => None,
            RIGHT_READ => Some(Rights::Read),
            RIGHT_WRITE => Some(Rights::Write),
            BOTH => Some(Rights::ReadWrite),
            other => return Err(Failed::invalid(format!("rights {other}: 0 to 3 are known"))),
        };
        let _state = region.shared.lock()?;
        let Some(rights) = rights else {
            region.region.revoke(&endpoint.endpoint);
            return Ok(());
        };
        writable(remote)?;
        let RemoteRegion { key, len } = region.region.allow(&endpoint.endpoint, rights)?;
        // SAFETY: the caller's.
        unsafe { remote.write(Remote { key, len }) };
        Ok(())
    })
}

/// Copies bytes of this end's region out, as peers have left them. Status: `RANGE`.
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
        // SAFETY: the caller's.
        let region = unsafe { get(region, "region") }?;
        inside(region, offset, len)?;
        if len == 0 {
            return Ok(());
        }
        writable(into)?;
        let _state = region.shared.lock()?;
        // SAFETY: it is not null, the caller says that it is writable, and `len` is at most that of
        // a vector. All bytes are written before they are read: by `read_at`, or not at all.
        Ok(region.region.read_at(offset, unsafe { slice::from_raw_parts_mut(into.cast::<u8>(), len) })?)
    })
}

/// Copies bytes into this end's region: peers read them from now on. Status: `RANGE`.
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
        // SAFETY: the caller's.
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

/// Writes what the peer must know into 16 bytes, in an order that does not depend on the processor.
///
/// # Safety
/// `remote` must be readable, `bytes` writable for 16 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_remote_encode(remote: *const Remote, bytes: *mut c_void) -> Status {
    run(|| {
        // SAFETY: the caller's.
        let Remote { key, len } = *unsafe { get(remote, "region") }?;
        writable(bytes)?;
        // SAFETY: the caller's.
        unsafe { bytes.cast::<[u8; REMOTE_LEN]>().write_unaligned(RemoteRegion { key, len }.to_bytes()) };
        Ok(())
    })
}

/// Reads what `bifrost_rdm_remote_encode` wrote.
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
        // SAFETY: the caller's.
        let bytes = unsafe { bytes.cast::<[u8; REMOTE_LEN]>().read_unaligned() };
        let RemoteRegion { key, len } = RemoteRegion::from_bytes(&bytes);
        // SAFETY: the caller's.
        unsafe { remote.write(Remote { key, len }) };
        Ok(())
    })
}

/// Writes to a region of the peer, and waits until the bytes are there. The peer's application has
/// nothing to do with it. Status: `RANGE`, `FAILURE` when the peer refuses, `TIMEOUT`, `FULL`,
/// `CLOSED`.
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
        // SAFETY: the caller's.
        let (handle, data) = unsafe { (get(endpoint, "endpoint")?, bytes(data, len)?) };
        // SAFETY: the caller's.
        let remote = region(unsafe { get(remote, "peer's region") }?);
        let _state = handle.shared.lock()?;
        Ok(handle.endpoint.write(&remote, offset, data, Duration::from_micros(timeout_us))?)
    })
}

/// Reads from a region of the peer. The peer's application has nothing to do with it. Status: as
/// for `bifrost_rdm_write`.
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
        // SAFETY: the caller's.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        // SAFETY: the caller's.
        let remote = region(unsafe { get(remote, "peer's region") }?);
        if len > 0 {
            writable(into)?;
        }
        let _state = handle.shared.lock()?;
        let message = handle.endpoint.read(&remote, offset, len, Duration::from_micros(timeout_us))?;
        // SAFETY: the message has `len` bytes, or it would have been refused; they are the
        // library's, so they do not overlap.
        unsafe { into.cast::<u8>().copy_from_nonoverlapping(message.as_ptr(), message.len()) };
        Ok(())
    })
}

/// Begins to write to a region of the peer; `bifrost_rdm_finish` has an empty message once the
/// bytes are there. Writes to one region take place in the order in which they were begun.
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
        // SAFETY: the caller's.
        let (handle, data) = unsafe { (get(endpoint, "endpoint")?, bytes(data, len)?) };
        // SAFETY: the caller's.
        let remote = region(unsafe { get(remote, "peer's region") }?);
        writable(call)?;
        let state = handle.shared.lock()?;
        room(&state, &handle.endpoint, 0)?;
        let begun = handle.endpoint.begin_write(&remote, offset, data)?;
        // SAFETY: the caller's.
        unsafe { call.write(begun) };
        Ok(())
    })
}

/// Begins to read from a region of the peer; `bifrost_rdm_finish` has the bytes. It sees writes of
/// this end that were begun before.
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
        // SAFETY: the caller's.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        // SAFETY: the caller's.
        let remote = region(unsafe { get(remote, "peer's region") }?);
        writable(call)?;
        let state = handle.shared.lock()?;
        room(&state, &handle.endpoint, 0)?;
        let begun = handle.endpoint.begin_read(&remote, offset, len)?;
        // SAFETY: the caller's.
        unsafe { call.write(begun) };
        Ok(())
    })
}

const BOTH: u32 = RIGHT_READ | RIGHT_WRITE;

fn region(remote: &Remote) -> RemoteRegion {
    RemoteRegion { key: remote.key, len: remote.len }
}

/// Whether bytes are inside of a region, before a reference to as many of the caller's is made.
fn inside(handle: &RegionHandle, offset: usize, len: usize) -> Result<(), Failed> {
    let region = handle.region.len();
    match offset.checked_add(len) {
        Some(end) if end <= region => Ok(()),
        _ => {
            Err(Failed(Status::Range, format!("{len} bytes at {offset} are not inside of a region of {region} bytes")))
        }
    }
}
