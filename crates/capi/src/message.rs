//! Messages and calls.

use std::ffi::{CStr, c_char, c_void};
use std::slice;
use std::time::{Duration, Instant};

use bifrost_endpoint::{Endpoint, Error, Message};

use crate::connection::left;
use crate::handle::{EndpointHandle, State, WorkerHandle, get, writable};
use crate::held::{Kept, Received};
use crate::status::{Failed, Status, run};

/// The longest message, bytes.
pub const MAX_MESSAGE: usize = 256 << 20;

/// Sends a message. If 1024 are open, waits up to `timeout_us` until one has arrived. The data is
/// copied. The message is in flight when this returns, and has arrived when
/// `bifrost_rdm_open_messages` no longer counts it. Status: `FULL`, `TOO_LONG`, `CLOSED`.
///
/// # Safety
/// `endpoint` must be an endpoint, `data` readable for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_send(
    endpoint: *const EndpointHandle,
    data: *const c_void,
    len: usize,
    timeout_us: u64,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let (handle, data) = unsafe { (get(endpoint, "endpoint")?, bytes(data, len)?) };
        let state = handle.shared.lock()?;
        room(&state, &handle.endpoint, timeout_us)?;
        handle.endpoint.send(copy(&handle.endpoint, data))?;
        Ok(())
    })
}

/// Number of messages that were sent and have not yet arrived.
///
/// # Safety
/// `endpoint` must be an endpoint, `count` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_open_messages(endpoint: *const EndpointHandle, count: *mut usize) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        writable(count)?;
        let _state = handle.shared.lock()?;
        // SAFETY: guaranteed by the caller.
        unsafe { count.write(handle.endpoint.open_messages()) };
        Ok(())
    })
}

/// Waits until all sent messages have arrived. Status: `TIMEOUT`, `CLOSED`.
///
/// # Safety
/// `endpoint` must be an endpoint.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_flush(endpoint: *const EndpointHandle, timeout_us: u64) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        let _state = handle.shared.lock()?;
        Ok(handle.endpoint.flush(Duration::from_micros(timeout_us))?)
    })
}

/// Waits for the next message; a timeout of 0 does not wait. Status: `TIMEOUT`, `CLOSED`.
///
/// # Safety
/// `endpoint` must be an endpoint, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_recv(
    endpoint: *const EndpointHandle,
    timeout_us: u64,
    out: *mut Received,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        writable(out)?;
        let mut state = handle.shared.lock()?;
        let message = handle.endpoint.recv(Duration::from_micros(timeout_us))?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.write(state.held.keep(Kept::Message(message))) };
        Ok(())
    })
}

/// Releases a message: its data becomes invalid, and the connection can receive another one. Sets
/// its `token` to 0; a message whose token is 0 is ignored.
///
/// # Safety
/// `worker` must be the worker of the message, `message` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_release(worker: *const WorkerHandle, message: *mut Received) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let (worker, message) = unsafe { (get(worker, "worker")?, message.as_mut()) };
        let Some(message) = message.filter(|message| message.token != 0) else { return Ok(()) };
        worker.shared.lock()?.held.release(message.token)?;
        *message = Received { data: std::ptr::null(), len: 0, token: 0 };
        Ok(())
    })
}

/// Sends a request, and waits for the response. Status: `FAILURE` if the peer refuses, with its
/// text; `TIMEOUT`, `FULL`, `TOO_LONG`, `CLOSED`.
///
/// # Safety
/// `endpoint` must be an endpoint, `data` readable for `len` bytes, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_call(
    endpoint: *const EndpointHandle,
    data: *const c_void,
    len: usize,
    timeout_us: u64,
    out: *mut Received,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let (handle, data) = unsafe { (get(endpoint, "endpoint")?, bytes(data, len)?) };
        writable(out)?;
        let mut state = handle.shared.lock()?;
        let message = handle.endpoint.call(copy(&handle.endpoint, data), Duration::from_micros(timeout_us))?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.write(state.held.keep(Kept::Message(message))) };
        Ok(())
    })
}

/// Begins a call; `bifrost_rdm_finish` returns the response. Several may be open.
///
/// # Safety
/// `endpoint` must be an endpoint, `data` readable for `len` bytes, `call` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_begin_call(
    endpoint: *const EndpointHandle,
    data: *const c_void,
    len: usize,
    call: *mut u32,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let (handle, data) = unsafe { (get(endpoint, "endpoint")?, bytes(data, len)?) };
        writable(call)?;
        let _state = handle.shared.lock()?;
        let begun = handle.endpoint.begin_call(copy(&handle.endpoint, data))?;
        // SAFETY: guaranteed by the caller.
        unsafe { call.write(begun) };
        Ok(())
    })
}

/// Waits for the response to a call, write or read; a timeout of 0 does not wait. After `TIMEOUT`
/// it is still open, otherwise not.
///
/// # Safety
/// `endpoint` must be an endpoint, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_finish(
    endpoint: *const EndpointHandle,
    call: u32,
    timeout_us: u64,
    out: *mut Received,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        writable(out)?;
        let mut state = handle.shared.lock()?;
        let message = finish(&state, &handle.endpoint, call, timeout_us)?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.write(state.held.keep(Kept::Message(message))) };
        Ok(())
    })
}

/// Discards the response to a call, write or read. The operation itself may still happen.
///
/// # Safety
/// `endpoint` must be an endpoint.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_forget(endpoint: *const EndpointHandle, call: u32) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        let _state = handle.shared.lock()?;
        handle.endpoint.forget(call);
        Ok(())
    })
}

/// Waits for the next request; a timeout of 0 does not wait. Answer it with `bifrost_rdm_respond`
/// or `bifrost_rdm_refuse`, then release it with `bifrost_rdm_release`. Status: `TIMEOUT`,
/// `CLOSED`.
///
/// # Safety
/// `endpoint` must be an endpoint, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_next_request(
    endpoint: *const EndpointHandle,
    timeout_us: u64,
    out: *mut Received,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let handle = unsafe { get(endpoint, "endpoint") }?;
        writable(out)?;
        let mut state = handle.shared.lock()?;
        let request = handle.endpoint.next_request(Duration::from_micros(timeout_us))?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.write(state.held.keep(Kept::Request(request, endpoint as usize))) };
        Ok(())
    })
}

/// Answers a request. Status: `FULL`, `TOO_LONG`, `CLOSED`.
///
/// # Safety
/// `endpoint` must be the endpoint of the request, `request` readable, `data` readable for `len`
/// bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_respond(
    endpoint: *const EndpointHandle,
    request: *const Received,
    data: *const c_void,
    len: usize,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let (handle, data) = unsafe { (get(endpoint, "endpoint")?, bytes(data, len)?) };
        // SAFETY: guaranteed by the caller.
        let token = unsafe { get(request, "request") }?.token;
        let state = handle.shared.lock()?;
        let request = state.held.request(token, endpoint as usize)?;
        handle.endpoint.respond(request, copy(&handle.endpoint, data))?;
        Ok(())
    })
}

/// Refuses a request, with a reason.
///
/// # Safety
/// `endpoint` must be the endpoint of the request, `request` readable, `reason` a null-terminated
/// string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_refuse(
    endpoint: *const EndpointHandle,
    request: *const Received,
    reason: *const c_char,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let (handle, token) = unsafe { (get(endpoint, "endpoint")?, get(request, "request")?.token) };
        if reason.is_null() {
            return Err(Failed::invalid("the reason is null"));
        }
        // SAFETY: guaranteed by the caller.
        let reason = unsafe { CStr::from_ptr(reason) }.to_string_lossy();
        let state = handle.shared.lock()?;
        let request = state.held.request(token, endpoint as usize)?;
        handle.endpoint.refuse(request, &reason)?;
        Ok(())
    })
}

/// The data that the caller passed.
///
/// # Safety
/// `data` must be null or readable for `len` bytes, for as long as the reference is used.
pub(crate) unsafe fn bytes<'a>(data: *const c_void, len: usize) -> Result<&'a [u8], Failed> {
    if len == 0 {
        return Ok(&[]);
    }
    if data.is_null() {
        return Err(Failed::invalid("the data is null"));
    }
    if len > MAX_MESSAGE {
        return Err(Failed(Status::TooLong, format!("{len} bytes exceed the longest message, {MAX_MESSAGE}")));
    }
    // SAFETY: it is not null, and the caller guarantees that it is readable.
    Ok(unsafe { slice::from_raw_parts(data.cast(), len) })
}

/// Waits until another message may be sent.
pub(crate) fn room(state: &State, endpoint: &Endpoint, timeout_us: u64) -> Result<(), Failed> {
    let until = Instant::now() + Duration::from_micros(timeout_us);
    while endpoint.is_full() {
        match endpoint.flush(Duration::ZERO) {
            Ok(()) | Err(Error::Timeout(_)) => {}
            Err(error) => return Err(error.into()),
        }
        if !endpoint.is_full() {
            break;
        }
        let Some(left) = left(until) else {
            return Err(Failed(Status::Full, format!("1024 messages to {} are open", endpoint.peer())));
        };
        state.worker.wait(left)?;
    }
    Ok(())
}

/// Copies data to memory that the connection reuses.
fn copy(endpoint: &Endpoint, data: &[u8]) -> Vec<u8> {
    let mut memory = endpoint.buffer(data.len());
    memory.copy_from_slice(data);
    memory
}

fn finish(state: &State, endpoint: &Endpoint, call: u32, timeout_us: u64) -> Result<Message, Failed> {
    let until = Instant::now() + Duration::from_micros(timeout_us);
    if !endpoint.is_open(call) {
        return Err(Failed::invalid(format!("call {call} is not open on this connection")));
    }
    state.worker.poll()?;
    loop {
        if let Some(message) = endpoint.try_response(call).inspect_err(|_| endpoint.forget(call))? {
            return Ok(message);
        }
        match left(until) {
            Some(left) => state.worker.wait(left)?,
            None => return Err(Error::Timeout(endpoint.peer()).into()),
        };
    }
}
