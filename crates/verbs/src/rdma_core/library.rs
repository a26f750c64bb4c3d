//! libibverbs, loaded when it is first needed, so that programs run if it is not installed.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::io;
use std::sync::OnceLock;

use libloading::Library;

use super::OpenError;
use super::sys::{
    Ah, AhAttr, AsyncEvent, CompChannel, Context, Cq, Device, DeviceAttr, GidEntry, Mr, Pd, PortAttr, Qp, QpAttr,
    QpInitAttr,
};

/// The library's name, with the version of its ABI.
const NAME: &str = "libibverbs.so.1";

/// Declares the functions used, and looks up each.
macro_rules! functions {
    ($($field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of libibverbs.
        pub(super) struct Functions {
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Functions {
            fn find(library: &Library) -> Result<Self, OpenError> {
                Ok(Self {
                    $($field: {
                        // SAFETY: the type is the one of verbs.h for this symbol of interface version 1.
                        let found = unsafe {
                            library.get::<unsafe extern "C" fn($($argument),*) $(-> $result)?>($symbol.to_bytes_with_nul())
                        };
                        *found.map_err(|_| OpenError::Symbol($symbol.to_str().unwrap_or_default()))?
                    },)*
                })
            }
        }
    };
}

functions! {
    get_device_list = c"ibv_get_device_list": fn(*mut c_int) -> *mut *mut Device;
    free_device_list = c"ibv_free_device_list": fn(*mut *mut Device);
    get_device_name = c"ibv_get_device_name": fn(*mut Device) -> *const c_char;
    open_device = c"ibv_open_device": fn(*mut Device) -> *mut Context;
    close_device = c"ibv_close_device": fn(*mut Context) -> c_int;
    query_device = c"ibv_query_device": fn(*mut Context, *mut DeviceAttr) -> c_int;
    query_port = c"ibv_query_port": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    query_gid_table = c"_ibv_query_gid_table": fn(*mut Context, *mut GidEntry, usize, u32, usize) -> isize;
    get_async_event = c"ibv_get_async_event": fn(*mut Context, *mut AsyncEvent) -> c_int;
    ack_async_event = c"ibv_ack_async_event": fn(*mut AsyncEvent);
    alloc_pd = c"ibv_alloc_pd": fn(*mut Context) -> *mut Pd;
    dealloc_pd = c"ibv_dealloc_pd": fn(*mut Pd) -> c_int;
    reg_mr = c"ibv_reg_mr_iova": fn(*mut Pd, *mut c_void, usize, u64, c_int) -> *mut Mr;
    dereg_mr = c"ibv_dereg_mr": fn(*mut Mr) -> c_int;
    create_comp_channel = c"ibv_create_comp_channel": fn(*mut Context) -> *mut CompChannel;
    destroy_comp_channel = c"ibv_destroy_comp_channel": fn(*mut CompChannel) -> c_int;
    get_cq_event = c"ibv_get_cq_event": fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ack_cq_events = c"ibv_ack_cq_events": fn(*mut Cq, c_uint);
    create_cq = c"ibv_create_cq": fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    resize_cq = c"ibv_resize_cq": fn(*mut Cq, c_int) -> c_int;
    destroy_cq = c"ibv_destroy_cq": fn(*mut Cq) -> c_int;
    create_qp = c"ibv_create_qp": fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    modify_qp = c"ibv_modify_qp": fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    destroy_qp = c"ibv_destroy_qp": fn(*mut Qp) -> c_int;
    create_ah = c"ibv_create_ah": fn(*mut Pd, *mut AhAttr) -> *mut Ah;
    destroy_ah = c"ibv_destroy_ah": fn(*mut Ah) -> c_int;
}

impl std::fmt::Debug for Functions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(NAME)
    }
}

/// The library of this process; a failed attempt is repeated.
pub(super) fn library() -> Result<&'static Functions, OpenError> {
    static LOADED: OnceLock<(Functions, Library)> = OnceLock::new();
    if let Some((functions, _)) = LOADED.get() {
        return Ok(functions);
    }
    // Stays loaded until the process ends: the library's drivers do not support unloading.
    let loaded = load(NAME)?;
    Ok(&LOADED.get_or_init(|| loaded).0)
}

fn load(name: &str) -> Result<(Functions, Library), OpenError> {
    // SAFETY: the initialisation of libibverbs has no preconditions. An attacker who can replace a system library
    // controls this process anyway.
    let library = unsafe { Library::new(name) }.map_err(|error| OpenError::Library(error.to_string()))?;
    Ok((Functions::find(&library)?, library))
}

/// The name of a device.
///
/// # Safety
/// `device` is in a list that is not freed.
pub(super) unsafe fn name(functions: &Functions, device: *mut Device) -> String {
    // SAFETY: the caller's word.
    let name = unsafe { (functions.get_device_name)(device) };
    if name.is_null() {
        return "?".to_owned();
    }
    // SAFETY: a string of the library, which ends with 0.
    unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
}

/// The error of a function that returns an error number.
pub(super) fn check(what: &'static str, result: c_int) -> Result<(), (&'static str, i32)> {
    match result {
        0 => Ok(()),
        // Some drivers return -1 and set errno.
        -1 => Err((what, errno())),
        number => Err((what, number.abs())),
    }
}

/// The error of the last function that returned a null pointer.
pub(super) fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_or_another_is_a_clear_error() {
        let error = load("libbifrost-no-such-library.so.1").map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("libibverbs1") && error.contains("cannot load"), "{error}");
        let error = load("libc.so.6").map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("ibv_get_device_list"), "{error}");
    }
}
