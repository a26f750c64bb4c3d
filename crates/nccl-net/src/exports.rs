//! The function tables that NCCL looks up, and their functions.

use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice;

use crate::fail::Fail;
use crate::ffi::{
    HANDLE_LEN, INTERNAL_ERROR, LOG_WARN, Logger, NetV8, NetV9, NetV10, NetV11, NetV12, Out, P, PTR_HOST, Properties,
    Result as Code, SUCCESS,
};
use crate::frame::{GROUP_MAX, SIZE_MAX};
use crate::hub::Handle;
use crate::plugin::{self, log, plugin};
use crate::receiving::Target;
use crate::token::{Kind, Token};

/// The plugin's name (`NCCL_NET`).
const NAME: *const c_char = c"Bifrost".as_ptr();
/// Maximum number of connections of a process, as reported to NCCL.
const COMMS_MAX: c_int = 65_536;

macro_rules! net {
    ($symbol:ident, $version:ident, $init:ident, $listen:ident, $connect:ident, $isend:ident, $irecv:ident
     $(, $field:ident: $value:expr)*) => {
        /// The function table of this version.
        #[unsafe(no_mangle)]
        #[allow(non_upper_case_globals)]
        pub static $symbol: $version = $version {
            name: NAME,
            init: $init,
            devices,
            get_properties,
            listen: $listen,
            connect: $connect,
            accept,
            reg_mr,
            reg_mr_dma_buf: None,
            dereg_mr,
            isend: $isend,
            irecv: $irecv,
            iflush,
            test,
            close_send,
            close_recv,
            close_listen,
            get_device_mr: None,
            irecv_consumed: None,
            $($field: $value,)*
        };
    };
}

net!(ncclNetPlugin_v8, NetV8, init, listen, connect, isend_int, irecv_int);
net!(ncclNetPlugin_v9, NetV9, init, listen, connect, isend, irecv, make_v_device: None);
net!(ncclNetPlugin_v10, NetV10, init_v10, listen, connect_v10, isend_v10, irecv_v10, make_v_device: None);
net!(ncclNetPlugin_v11, NetV11, init_v11, listen_v11, connect_v11, isend_v10, irecv_v10,
    make_v_device: None, finalize: finalize, set_net_attr: None);
net!(ncclNetPlugin_v12, NetV12, init_v11, listen_v11, connect_v11, isend_v10, irecv_v10,
    make_v_device: None, finalize: finalize, set_net_attr: None);

/// Runs a call, logs its error, and returns its status. Panics do not leave it.
fn run(name: &str, what: impl FnOnce() -> Result<(), Fail>) -> Code {
    match catch_unwind(AssertUnwindSafe(what)) {
        Ok(Ok(())) => SUCCESS,
        Ok(Err(fail)) => {
            // NCCL's log is a function of NCCL, which does not unwind.
            log(LOG_WARN, &format!("{name}: {fail}"));
            fail.code()
        }
        Err(_) => {
            log(LOG_WARN, &format!("{name}: the plugin panicked; see standard error"));
            INTERNAL_ERROR
        }
    }
}

/// Writes a result for the caller.
///
/// # Safety
/// `out` must be null or writable.
unsafe fn put<T>(out: *mut T, value: T) -> Result<(), Fail> {
    if out.is_null() {
        return Err(Fail::Argument("the pointer for the result is null".to_owned()));
    }
    // SAFETY: guaranteed by the caller.
    unsafe { out.write(value) };
    Ok(())
}

/// A slice of the caller's values.
///
/// # Safety
/// `values` must be null or readable for `count` values, while the slice is used.
unsafe fn list<'a, T>(values: *const T, count: usize) -> Result<&'a [T], Fail> {
    if values.is_null() {
        return Err(Fail::Argument("a list is null".to_owned()));
    }
    // SAFETY: guaranteed by the caller.
    Ok(unsafe { slice::from_raw_parts(values, count) })
}

fn pointer(token: Token) -> P {
    std::ptr::without_provenance_mut(token.number() as usize)
}

fn token(pointer: P, kinds: &[Kind]) -> Result<Token, Fail> {
    let unknown = || Fail::Argument("the pointer is not from this plugin, or of the wrong kind".to_owned());
    Token::of(pointer.addr() as u64, kinds).ok_or_else(unknown)
}

unsafe extern "C" fn init(logger: Option<Logger>) -> Code {
    run("init", || plugin::init(logger))
}

unsafe extern "C" fn init_v10(logger: Option<Logger>, _profiler: P) -> Code {
    run("init", || plugin::init(logger))
}

unsafe extern "C" fn init_v11(ctx: Out, _comm: u64, _config: P, logger: Option<Logger>, _profiler: P) -> Code {
    run("init", || {
        plugin::init(logger)?;
        // SAFETY: guaranteed by NCCL.
        unsafe { put(ctx, pointer(Token::new(Kind::Context, 0, 0))) }
    })
}

unsafe extern "C" fn finalize(_ctx: P) -> Code {
    SUCCESS
}

unsafe extern "C" fn devices(count: *mut c_int) -> Code {
    // SAFETY: guaranteed by NCCL.
    run("devices", || unsafe { put(count, plugin()?.devices.len() as c_int) })
}

unsafe extern "C" fn get_properties<T: From<Properties>>(device: c_int, properties: *mut T) -> Code {
    run("getProperties", || {
        let known = plugin()?.device(device)?;
        let reported = Properties {
            name: known.name.as_ptr().cast_mut(),
            pci_path: known.pci_path.as_ref().map_or(std::ptr::null_mut(), |path| path.as_ptr().cast_mut()),
            guid: known.guid,
            speed_mbps: known.speed_mbps,
            max_comms: COMMS_MAX,
            max_recvs: GROUP_MAX as c_int,
            max_bytes: SIZE_MAX as usize,
            device,
        };
        // SAFETY: guaranteed by NCCL.
        unsafe { put(properties, reported.into()) }
    })
}

unsafe extern "C" fn listen(device: c_int, handle: P, out: Out) -> Code {
    run("listen", || {
        let plugin = plugin()?;
        let address = plugin.device(device)?.address;
        if handle.is_null() || out.is_null() {
            return Err(Fail::Argument("the pointer for the handle or the listener is null".to_owned()));
        }
        let at = plugin.choose(device)?;
        let (id, description) = plugin.hub(at)?.listen(address)?;
        // SAFETY: NCCL has 128 bytes for the handle.
        unsafe {
            put(handle.cast(), description.emit())?;
            put(out, pointer(Token::new(Kind::Listen, at, id)))
        }
    })
}

unsafe extern "C" fn listen_v11(_ctx: P, device: c_int, handle: P, out: Out) -> Code {
    // SAFETY: guaranteed by NCCL.
    unsafe { listen(device, handle, out) }
}

unsafe extern "C" fn connect(device: c_int, handle: P, out: Out, _device_handle: Out) -> Code {
    run("connect", || {
        let plugin = plugin()?;
        plugin.device(device)?;
        // SAFETY: guaranteed by NCCL.
        unsafe { put(out, std::ptr::null_mut()) }?;
        if handle.is_null() {
            return Err(Fail::Argument("the handle is null".to_owned()));
        }
        let handle = handle.cast::<[u8; HANDLE_LEN]>();
        // SAFETY: NCCL's handles have 128 bytes.
        let parsed = Handle::parse(&unsafe { handle.read() });
        let parsed = parsed.ok_or_else(|| Fail::Argument("the handle is not from this plugin".to_owned()))?;
        let none = Handle { stage: (0, 0), ..parsed };
        if parsed.stage.0 == 0 {
            let at = plugin.choose(device)?;
            let (id, secret) = plugin.hub(at)?.connect(parsed.at)?;
            let stage = (Token::new(Kind::Connecting, at, id).number(), secret);
            // NCCL calls again with the same handle.
            // SAFETY: as above.
            return unsafe { put(handle, Handle { stage, ..parsed }.emit()) };
        }
        let unknown = || Fail::Argument("no connection is being set up with this handle".to_owned());
        let stage = Token::of(parsed.stage.0, &[Kind::Connecting]).ok_or_else(unknown)?;
        let mut hub = plugin.hub(stage.hub)?;
        hub.connecting.get(&stage.id).filter(|waiting| waiting.secret == parsed.stage.1).ok_or_else(unknown)?;
        let connected = hub.finish(stage.id, parsed.nonce);
        if !matches!(connected, Ok(None)) {
            // SAFETY: as above.
            unsafe { put(handle, none.emit()) }?;
        }
        if let Some(id) = connected? {
            // SAFETY: guaranteed by NCCL.
            unsafe { put(out, pointer(Token::new(Kind::Send, stage.hub, id))) }?;
        }
        Ok(())
    })
}

unsafe extern "C" fn connect_v10(device: c_int, _config: P, handle: P, out: Out, device_handle: Out) -> Code {
    // SAFETY: guaranteed by NCCL.
    unsafe { connect(device, handle, out, device_handle) }
}

unsafe extern "C" fn connect_v11(_ctx: P, device: c_int, handle: P, out: Out, device_handle: Out) -> Code {
    // SAFETY: guaranteed by NCCL.
    unsafe { connect(device, handle, out, device_handle) }
}

unsafe extern "C" fn accept(listener: P, out: Out, _device_handle: Out) -> Code {
    run("accept", || {
        // SAFETY: guaranteed by NCCL.
        unsafe { put(out, std::ptr::null_mut()) }?;
        let listener = token(listener, &[Kind::Listen])?;
        let accepted = plugin()?.hub(listener.hub)?.accept(listener.id)?;
        if let Some(id) = accepted {
            // SAFETY: guaranteed by NCCL.
            unsafe { put(out, pointer(Token::new(Kind::Receive, listener.hub, id))) }?;
        }
        Ok(())
    })
}

/// Only checks the arguments: data is copied, so memory need not be registered.
unsafe extern "C" fn reg_mr(comm: P, data: P, size: usize, kind: c_int, out: Out) -> Code {
    run("regMr", || {
        let comm = token(comm, &[Kind::Send, Kind::Receive])?;
        if kind != PTR_HOST {
            return Err(Fail::Argument(format!("memory type {kind} is not supported; only host memory (1) is")));
        }
        if data.is_null() && size > 0 {
            return Err(Fail::Argument("the memory is null".to_owned()));
        }
        // SAFETY: guaranteed by NCCL.
        unsafe { put(out, pointer(Token::new(Kind::Memory, comm.hub, comm.id))) }
    })
}

unsafe extern "C" fn dereg_mr(comm: P, memory: P) -> Code {
    run("deregMr", || {
        token(comm, &[Kind::Send, Kind::Receive])?;
        token(memory, &[Kind::Memory]).map(drop)
    })
}

unsafe extern "C" fn isend_int(comm: P, data: P, size: c_int, tag: c_int, memory: P, out: Out) -> Code {
    // A negative size becomes one that is refused.
    // SAFETY: guaranteed by NCCL.
    unsafe { isend(comm, data, usize::try_from(size).unwrap_or(usize::MAX), tag, memory, out) }
}

unsafe extern "C" fn isend(comm: P, data: P, size: usize, tag: c_int, _memory: P, out: Out) -> Code {
    run("isend", || {
        // SAFETY: guaranteed by NCCL.
        unsafe { put(out, std::ptr::null_mut()) }?;
        let comm = token(comm, &[Kind::Send])?;
        if data.is_null() && size > 0 {
            return Err(Fail::Argument("the data is null".to_owned()));
        }
        let mut hub = plugin()?.hub(comm.hub)?;
        let sender = |hub: &mut crate::hub::Hub| -> Result<Option<(u8, u16)>, Fail> {
            let known =
                hub.comms.get_mut(&comm.id).ok_or_else(|| Fail::Argument("the connection is closed".to_owned()))?;
            // SAFETY: NCCL does not change the data until the request is done.
            unsafe { known.send(data.cast_const().cast(), size as u64, tag) }
        };
        let mut begun = sender(&mut hub)?;
        if begun.is_none() {
            // Receives of the peer may have arrived.
            hub.poll()?;
            if let Some(known) = hub.comms.get_mut(&comm.id) {
                known.progress();
            }
            begun = sender(&mut hub)?;
        }
        request(comm, begun, out)
    })
}

unsafe extern "C" fn isend_v10(comm: P, data: P, size: usize, tag: c_int, memory: P, _profile: P, out: Out) -> Code {
    // SAFETY: guaranteed by NCCL.
    unsafe { isend(comm, data, size, tag, memory, out) }
}

unsafe extern "C" fn irecv_int(
    comm: P,
    count: c_int,
    data: Out,
    sizes: *mut c_int,
    tags: *mut c_int,
    _memory: Out,
    out: Out,
) -> Code {
    // SAFETY: guaranteed by NCCL.
    run("irecv", || unsafe { receive(comm, count, data, sizes, tags, out) })
}

unsafe extern "C" fn irecv(
    comm: P,
    count: c_int,
    data: Out,
    sizes: *mut usize,
    tags: *mut c_int,
    _memory: Out,
    out: Out,
) -> Code {
    // SAFETY: guaranteed by NCCL.
    run("irecv", || unsafe { receive(comm, count, data, sizes, tags, out) })
}

unsafe extern "C" fn irecv_v10(
    comm: P,
    count: c_int,
    data: Out,
    sizes: *mut usize,
    tags: *mut c_int,
    memory: Out,
    _profiles: Out,
    out: Out,
) -> Code {
    // SAFETY: guaranteed by NCCL.
    unsafe { irecv(comm, count, data, sizes, tags, memory, out) }
}

/// # Safety
/// The lists must have `count` values each, and the memory must not be used by others until the
/// request is done.
unsafe fn receive<S: Copy + TryInto<usize>>(
    comm: P,
    count: c_int,
    data: Out,
    sizes: *const S,
    tags: *const c_int,
    out: Out,
) -> Result<(), Fail> {
    // SAFETY: guaranteed by the caller.
    unsafe { put(out, std::ptr::null_mut()) }?;
    let comm = token(comm, &[Kind::Receive])?;
    let fits = usize::try_from(count).ok().filter(|count| (1..=GROUP_MAX).contains(count));
    let count =
        fits.ok_or_else(|| Fail::Argument(format!("{count} receives are not supported; use 1 to {GROUP_MAX}")))?;
    // SAFETY: guaranteed by the caller.
    let (data, sizes, tags) = unsafe { (list(data, count)?, list(sizes, count)?, list(tags, count)?) };
    // SAFETY: an empty target is never accessed.
    let mut targets = [unsafe { Target::new(std::ptr::null_mut(), 0) }; GROUP_MAX];
    for (target, (data, size)) in targets.iter_mut().zip(data.iter().zip(sizes)) {
        let size =
            (*size).try_into().ok().filter(|size: &usize| *size as u64 <= SIZE_MAX && (*size == 0 || !data.is_null()));
        let size = size
            .ok_or_else(|| Fail::Argument("the memory of a receive is null, or its size is out of range".to_owned()))?;
        // SAFETY: guaranteed by the caller.
        *target = unsafe { Target::new(data.cast(), size) };
    }
    let mut hub = plugin()?.hub(comm.hub)?;
    let known = hub.comms.get_mut(&comm.id).ok_or_else(|| Fail::Argument("the connection is closed".to_owned()))?;
    let begun = known.receive(&targets[..count], tags)?;
    request(comm, begun, out)
}

/// Returns a request to NCCL, if it was begun.
fn request(comm: Token, begun: Option<(u8, u16)>, out: Out) -> Result<(), Fail> {
    let Some((slot, generation)) = begun else { return Ok(()) };
    let named = Token { kind: Kind::Request, slot, generation, ..comm };
    // SAFETY: callers have already written to it.
    unsafe { put(out, pointer(named)) }
}

/// Host memory needs no flush.
unsafe extern "C" fn iflush(comm: P, _count: c_int, _data: Out, _sizes: *mut c_int, _memory: Out, out: Out) -> Code {
    run("iflush", || {
        // SAFETY: guaranteed by NCCL.
        unsafe { put(out, std::ptr::null_mut()) }?;
        token(comm, &[Kind::Receive]).map(drop)
    })
}

unsafe extern "C" fn test(request: P, done: *mut c_int, sizes: *mut c_int) -> Code {
    run("test", || {
        // SAFETY: guaranteed by NCCL.
        unsafe { put(done, 0) }?;
        let named = token(request, &[Kind::Request])?;
        let mut hub = plugin()?.hub(named.hub)?;
        let unknown = || Fail::Argument("unknown request".to_owned());
        let tested = match hub.comms.get_mut(&named.id).ok_or_else(unknown)?.test(named.slot, named.generation)? {
            Some(tested) => Some(tested),
            None => {
                hub.poll()?;
                let comm = hub.comms.get_mut(&named.id).ok_or_else(unknown)?;
                comm.progress();
                comm.test(named.slot, named.generation)?
            }
        };
        let Some((received, count)) = tested else { return Ok(()) };
        if !sizes.is_null() {
            for (at, size) in received.iter().take(count).enumerate() {
                // SAFETY: NCCL provides space for one size per receive of the group.
                unsafe { sizes.add(at).write(c_int::try_from(*size).unwrap_or(c_int::MAX)) };
            }
        }
        // SAFETY: guaranteed by NCCL.
        unsafe { put(done, 1) }
    })
}

unsafe extern "C" fn close_send(comm: P) -> Code {
    run("closeSend", || {
        let named = token(comm, &[Kind::Send])?;
        plugin()?.close(named.hub, named.id, true)
    })
}

unsafe extern "C" fn close_recv(comm: P) -> Code {
    run("closeRecv", || {
        let named = token(comm, &[Kind::Receive])?;
        plugin()?.close(named.hub, named.id, false)
    })
}

unsafe extern "C" fn close_listen(listener: P) -> Code {
    run("closeListen", || {
        let named = token(listener, &[Kind::Listen])?;
        let removed = plugin()?.hub(named.hub)?.listens.remove(&named.id);
        removed.map(drop).ok_or_else(|| Fail::Argument("unknown listener".to_owned()))
    })
}
