//! NCCL's interface for network plugins, versions 8 to 12, according to its public headers
//! (`net_v8.h` to `net_v12.h`, `net_device.h`, `nccl_common.h`). The bindings are original.

use std::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclResult_t`.
pub(crate) type Result = c_int;
pub(crate) const SUCCESS: Result = 0;
pub(crate) const SYSTEM_ERROR: Result = 2;
pub(crate) const INTERNAL_ERROR: Result = 3;
pub(crate) const INVALID_ARGUMENT: Result = 4;
pub(crate) const INVALID_USAGE: Result = 5;
pub(crate) const REMOTE_ERROR: Result = 6;

/// `NCCL_NET_HANDLE_MAXSIZE`, bytes.
pub(crate) const HANDLE_LEN: usize = 128;
/// `NCCL_PTR_HOST`.
pub(crate) const PTR_HOST: c_int = 1;
/// `NCCL_NET_DEVICE_HOST`.
const NET_DEVICE_HOST: c_int = 0;
/// `NCCL_NET_ID_UNDEF`.
const ID_UNDEFINED: i16 = -1;

/// `ncclDebugLogger_t`: level, subsystems, file, line, format.
pub(crate) type Logger =
    unsafe extern "C" fn(level: c_int, flags: c_ulong, file: *const c_char, line: c_int, format: *const c_char, ...);
/// `NCCL_LOG_WARN` and `NCCL_LOG_INFO`.
pub(crate) const LOG_WARN: c_int = 2;
pub(crate) const LOG_INFO: c_int = 3;
/// `NCCL_INIT | NCCL_NET`.
pub(crate) const LOG_FLAGS: c_ulong = 0x1 | 0x10;

/// Properties of a device, independent of the version's layout.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Properties {
    pub(crate) name: *mut c_char,
    pub(crate) pci_path: *mut c_char,
    pub(crate) guid: u64,
    pub(crate) speed_mbps: c_int,
    pub(crate) max_comms: c_int,
    pub(crate) max_recvs: c_int,
    pub(crate) max_bytes: usize,
    pub(crate) device: c_int,
}

/// `ncclNetProperties_v8_t`.
#[repr(C)]
pub(crate) struct PropertiesV8 {
    name: *mut c_char,
    pci_path: *mut c_char,
    guid: u64,
    ptr_support: c_int,
    reg_is_global: c_int,
    speed: c_int,
    port: c_int,
    latency: f32,
    max_comms: c_int,
    max_recvs: c_int,
    net_device_type: c_int,
    net_device_version: c_int,
}

/// The common first fields of versions 9 to 12.
#[repr(C)]
pub(crate) struct PropertiesV9Begin {
    name: *mut c_char,
    pci_path: *mut c_char,
    guid: u64,
    ptr_support: c_int,
    reg_is_global: c_int,
    force_flush: c_int,
    speed: c_int,
    port: c_int,
    latency: f32,
    max_comms: c_int,
    max_recvs: c_int,
    net_device_type: c_int,
    net_device_version: c_int,
    virtual_count: c_int,
}

/// `ncclNetProperties_v9_t` and `ncclNetProperties_v10_t`.
#[repr(C)]
pub(crate) struct PropertiesV9 {
    begin: PropertiesV9Begin,
    virtual_devices: [c_int; 4],
    max_p2p_bytes: usize,
    max_coll_bytes: usize,
}

/// `ncclNetProperties_v11_t`.
#[repr(C)]
pub(crate) struct PropertiesV11 {
    v9: PropertiesV9,
    max_multi_request_size: c_int,
}

/// `ncclNetProperties_v12_t`.
#[repr(C)]
pub(crate) struct PropertiesV12 {
    begin: PropertiesV9Begin,
    virtual_devices: [c_int; 8],
    max_p2p_bytes: usize,
    max_coll_bytes: usize,
    max_multi_request_size: c_int,
    rail_id: i16,
    plane_id: i16,
}

impl From<Properties> for PropertiesV8 {
    fn from(from: Properties) -> Self {
        Self {
            name: from.name,
            pci_path: from.pci_path,
            guid: from.guid,
            ptr_support: PTR_HOST,
            reg_is_global: 1,
            speed: from.speed_mbps,
            port: 1,
            latency: 0.0,
            max_comms: from.max_comms,
            max_recvs: from.max_recvs,
            net_device_type: NET_DEVICE_HOST,
            net_device_version: 0,
        }
    }
}

impl From<Properties> for PropertiesV9Begin {
    fn from(from: Properties) -> Self {
        Self {
            name: from.name,
            pci_path: from.pci_path,
            guid: from.guid,
            ptr_support: PTR_HOST,
            reg_is_global: 1,
            force_flush: 0,
            speed: from.speed_mbps,
            port: 1,
            latency: 0.0,
            max_comms: from.max_comms,
            max_recvs: from.max_recvs,
            net_device_type: NET_DEVICE_HOST,
            net_device_version: 0,
            virtual_count: 1,
        }
    }
}

impl From<Properties> for PropertiesV9 {
    fn from(from: Properties) -> Self {
        Self {
            begin: from.into(),
            virtual_devices: [from.device, 0, 0, 0],
            max_p2p_bytes: from.max_bytes,
            max_coll_bytes: from.max_bytes,
        }
    }
}

impl From<Properties> for PropertiesV11 {
    fn from(from: Properties) -> Self {
        Self { v9: from.into(), max_multi_request_size: 1 }
    }
}

impl From<Properties> for PropertiesV12 {
    fn from(from: Properties) -> Self {
        Self {
            begin: from.into(),
            virtual_devices: [from.device, 0, 0, 0, 0, 0, 0, 0],
            max_p2p_bytes: from.max_bytes,
            max_coll_bytes: from.max_bytes,
            max_multi_request_size: 1,
            rail_id: ID_UNDEFINED,
            plane_id: ID_UNDEFINED,
        }
    }
}

/// A pointer.
pub(crate) type P = *mut c_void;
/// Location of a returned pointer.
pub(crate) type Out = *mut P;
/// A function that this plugin does not implement.
pub(crate) type Without = Option<unsafe extern "C" fn()>;

/// Functions that have the same arguments in all versions, in the order of the tables.
macro_rules! table {
    (
        $(#[$doc:meta])* $name:ident, $properties:ty,
        init: $init:ty, listen: $listen:ty, connect: $connect:ty, isend: $isend:ty, irecv: $irecv:ty,
        then: { $($field:ident: $type:ty),* }
    ) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug)]
        pub struct $name {
            pub(crate) name: *const c_char,
            pub(crate) init: $init,
            pub(crate) devices: unsafe extern "C" fn(*mut c_int) -> Result,
            pub(crate) get_properties: unsafe extern "C" fn(c_int, *mut $properties) -> Result,
            pub(crate) listen: $listen,
            pub(crate) connect: $connect,
            pub(crate) accept: unsafe extern "C" fn(P, Out, Out) -> Result,
            pub(crate) reg_mr: unsafe extern "C" fn(P, P, usize, c_int, Out) -> Result,
            pub(crate) reg_mr_dma_buf: Without,
            pub(crate) dereg_mr: unsafe extern "C" fn(P, P) -> Result,
            pub(crate) isend: $isend,
            pub(crate) irecv: $irecv,
            pub(crate) iflush: unsafe extern "C" fn(P, c_int, Out, *mut c_int, Out, Out) -> Result,
            pub(crate) test: unsafe extern "C" fn(P, *mut c_int, *mut c_int) -> Result,
            pub(crate) close_send: unsafe extern "C" fn(P) -> Result,
            pub(crate) close_recv: unsafe extern "C" fn(P) -> Result,
            pub(crate) close_listen: unsafe extern "C" fn(P) -> Result,
            pub(crate) get_device_mr: Without,
            pub(crate) irecv_consumed: Without,
            $(pub(crate) $field: $type,)*
        }

        // SAFETY: it is never written, and its pointers refer to static strings.
        unsafe impl Sync for $name {}
    };
}

pub(crate) type Init = unsafe extern "C" fn(Option<Logger>) -> Result;
pub(crate) type InitV10 = unsafe extern "C" fn(Option<Logger>, P) -> Result;
pub(crate) type InitV11 = unsafe extern "C" fn(Out, u64, P, Option<Logger>, P) -> Result;
pub(crate) type Listen = unsafe extern "C" fn(c_int, P, Out) -> Result;
pub(crate) type ListenV11 = unsafe extern "C" fn(P, c_int, P, Out) -> Result;
pub(crate) type Connect = unsafe extern "C" fn(c_int, P, Out, Out) -> Result;
/// Version 10 has settings before the handle; version 11 has a context before the device.
pub(crate) type ConnectV10 = unsafe extern "C" fn(c_int, P, P, Out, Out) -> Result;
pub(crate) type ConnectV11 = unsafe extern "C" fn(P, c_int, P, Out, Out) -> Result;
pub(crate) type Isend = unsafe extern "C" fn(P, P, c_int, c_int, P, Out) -> Result;
pub(crate) type IsendV9 = unsafe extern "C" fn(P, P, usize, c_int, P, Out) -> Result;
pub(crate) type IsendV10 = unsafe extern "C" fn(P, P, usize, c_int, P, P, Out) -> Result;
pub(crate) type Irecv = unsafe extern "C" fn(P, c_int, Out, *mut c_int, *mut c_int, Out, Out) -> Result;
pub(crate) type IrecvV9 = unsafe extern "C" fn(P, c_int, Out, *mut usize, *mut c_int, Out, Out) -> Result;
pub(crate) type IrecvV10 = unsafe extern "C" fn(P, c_int, Out, *mut usize, *mut c_int, Out, Out, Out) -> Result;

table! {
    /// `ncclNet_v8_t`.
    NetV8, PropertiesV8,
    init: Init, listen: Listen, connect: Connect, isend: Isend, irecv: Irecv,
    then: {}
}
table! {
    /// `ncclNet_v9_t`.
    NetV9, PropertiesV9,
    init: Init, listen: Listen, connect: Connect, isend: IsendV9, irecv: IrecvV9,
    then: { make_v_device: Without }
}
table! {
    /// `ncclNet_v10_t`.
    NetV10, PropertiesV9,
    init: InitV10, listen: Listen, connect: ConnectV10, isend: IsendV10, irecv: IrecvV10,
    then: { make_v_device: Without }
}
table! {
    /// `ncclNet_v11_t`.
    NetV11, PropertiesV11,
    init: InitV11, listen: ListenV11, connect: ConnectV11, isend: IsendV10, irecv: IrecvV10,
    then: { make_v_device: Without, finalize: unsafe extern "C" fn(P) -> Result, set_net_attr: Without }
}
table! {
    /// `ncclNet_v12_t`.
    NetV12, PropertiesV12,
    init: InitV11, listen: ListenV11, connect: ConnectV11, isend: IsendV10, irecv: IrecvV10,
    then: { make_v_device: Without, finalize: unsafe extern "C" fn(P) -> Result, set_net_attr: Without }
}
