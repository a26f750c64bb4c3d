//! Connections: listening, accepting, connecting, closing.

use std::ffi::c_char;
use std::time::{Duration, Instant};

use bifrost_endpoint::Service;

use crate::handle::{EndpointHandle, ListenerHandle, WorkerHandle, close, get, give, writable};
use crate::status::{Failed, Status, run};
use crate::worker::{socket, write_text};
use crate::{SERVICE_RC, SERVICE_UC};

/// Measurements of a connection.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Measured {
    /// Smoothed round trip, ns.
    pub rtt_ns: u64,
    /// Smallest round trip, ns.
    pub min_rtt_ns: u64,
    /// Congestion window, bytes.
    pub window_bytes: u32,
    /// Share of packets lost, 0 to 1.
    pub loss: f32,
    /// Queue pair in use.
    pub lane: u32,
}

/// Interval of checks whether a peer has connected or answered.
const LOOK_EVERY: Duration = Duration::from_millis(1);

/// Listens for peers over TCP. Port 0: any free port. Status: `BIND`.
///
/// # Safety
/// `worker` must be a worker, `address` a null-terminated string, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_listen(
    worker: *const WorkerHandle,
    address: *const c_char,
    port: u16,
    out: *mut *mut ListenerHandle,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        writable(out)?;
        // SAFETY: guaranteed by the caller.
        let at = unsafe { socket(address, port) }?;
        let listener = worker.shared.lock()?.worker.listen(at)?;
        // SAFETY: the caller guarantees that it is writable.
        unsafe { give(ListenerHandle { shared: worker.shared.clone(), listener }, out) };
        Ok(())
    })
}

/// The port on which the listener listens.
///
/// # Safety
/// `listener` must be a listener, `port` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_listener_port(listener: *const ListenerHandle, port: *mut u16) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let listener = unsafe { get(listener, "listener") }?;
        writable(port)?;
        let at = listener.listener.local_addr().map_err(|error| Failed(Status::System, error.to_string()))?;
        // SAFETY: guaranteed by the caller.
        unsafe { port.write(at.port()) };
        Ok(())
    })
}

/// Stops listening. Accepted connections stay. Null is ignored.
///
/// # Safety
/// `listener` must be null or a listener that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_listener_close(listener: *mut ListenerHandle) -> Status {
    // SAFETY: guaranteed by the caller.
    run(|| unsafe { close(listener) })
}

/// Waits for a peer to connect. Peers with incompatible settings are refused without ending the
/// wait. Status: `TIMEOUT`.
///
/// # Safety
/// `listener` must be a listener, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_accept(
    listener: *mut ListenerHandle,
    timeout_us: u64,
    out: *mut *mut EndpointHandle,
) -> Status {
    run(|| {
        writable(out)?;
        // SAFETY: guaranteed by the caller.
        let shared = unsafe { get(listener, "listener") }?.shared.clone();
        let state = shared.lock()?;
        // SAFETY: guaranteed by the caller; the lock excludes other threads, so this is the only
        // reference to the listener's contents.
        let listener = unsafe { &mut (*listener).listener };
        let endpoint = state.worker.accept(listener, Duration::from_micros(timeout_us))?;
        // SAFETY: the caller guarantees that it is writable.
        unsafe { give(EndpointHandle { shared: shared.clone(), endpoint }, out) };
        Ok(())
    })
}

/// Connects to a listening peer. Other connections of the worker continue meanwhile. Status:
/// `UNREACHABLE`, `REFUSED`, `TIMEOUT`, `RESOURCES`.
///
/// # Safety
/// `worker` must be a worker, `address` a null-terminated string, `out` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_connect(
    worker: *const WorkerHandle,
    address: *const c_char,
    port: u16,
    timeout_us: u64,
    out: *mut *mut EndpointHandle,
) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let worker = unsafe { get(worker, "worker") }?;
        writable(out)?;
        // SAFETY: guaranteed by the caller.
        let peer = unsafe { socket(address, port) }?;
        let state = worker.shared.lock()?;
        let mut connecting = state.worker.begin_connect(peer, Duration::from_micros(timeout_us))?;
        let endpoint = loop {
            if let Some(endpoint) = connecting.try_finish()? {
                break endpoint;
            }
            state.worker.wait(LOOK_EVERY)?;
        };
        // SAFETY: the caller guarantees that it is writable.
        unsafe { give(EndpointHandle { shared: worker.shared.clone(), endpoint }, out) };
        Ok(())
    })
}

/// Closes a connection. Messages that have not arrived are lost; `bifrost_rdm_flush` waits for
/// them. Null is ignored.
///
/// # Safety
/// `endpoint` must be null or an endpoint that is not closed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_close(endpoint: *mut EndpointHandle) -> Status {
    // SAFETY: guaranteed by the caller.
    run(|| unsafe { close(endpoint) })
}

/// Writes the peer's address, such as `[fd00::2]:7000`, into `text`, which has `size` bytes; it is
/// truncated if necessary, and always null-terminated.
///
/// # Safety
/// `endpoint` must be an endpoint, `text` writable for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_peer(endpoint: *const EndpointHandle, text: *mut c_char, size: usize) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let endpoint = unsafe { get(endpoint, "endpoint") }?;
        writable(text)?;
        // SAFETY: guaranteed by the caller.
        unsafe { write_text(&endpoint.endpoint.peer().to_string(), text, size) }
    })
}

/// Returns measurements of a connection. Status: `CLOSED`.
///
/// # Safety
/// `endpoint` must be an endpoint, `measured` writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_measured(endpoint: *const EndpointHandle, measured: *mut Measured) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let endpoint = unsafe { get(endpoint, "endpoint") }?;
        writable(measured)?;
        let _state = endpoint.shared.lock()?;
        let (rtt_ns, min_rtt_ns, window_bytes, loss, lane) = endpoint
            .endpoint
            .measured()
            .ok_or_else(|| Failed(Status::Closed, "the connection has ended".to_owned()))?;
        // SAFETY: guaranteed by the caller.
        unsafe { measured.write(Measured { rtt_ns, min_rtt_ns, window_bytes, loss, lane: lane.into() }) };
        Ok(())
    })
}

/// Sends on queue pairs of `BIFROST_RDM_SERVICE_RC` or `_UC` from now on, on a connection that has
/// both. Status: `UNSUPPORTED` if it does not.
///
/// # Safety
/// `endpoint` must be an endpoint.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bifrost_rdm_switch(endpoint: *const EndpointHandle, service: u32) -> Status {
    run(|| {
        // SAFETY: guaranteed by the caller.
        let endpoint = unsafe { get(endpoint, "endpoint") }?;
        let service = match service {
            SERVICE_RC => Service::Rc,
            SERVICE_UC => Service::Uc,
            other => return Err(Failed::invalid(format!("{other} is neither 1 (RC) nor 2 (UC)"))),
        };
        let _state = endpoint.shared.lock()?;
        Ok(endpoint.endpoint.switch(service)?)
    })
}

/// Remaining time until `until`.
pub(crate) fn left(until: Instant) -> Option<Duration> {
    Some(until.saturating_duration_since(Instant::now())).filter(|left| !left.is_zero())
}
