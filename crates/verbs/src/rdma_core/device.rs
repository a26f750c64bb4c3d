//! Finds the device and port that have an address.

use std::fmt::Write as _;
use std::fs;
use std::mem::size_of;
use std::net::{IpAddr, Ipv6Addr};

use super::OpenError;
use super::library::{Functions, errno, name};
use super::sys::{Context, DeviceAttr, GID_TYPE_ROCE_V2, Gid, GidEntry, PORT_ACTIVE, PortAttr};

/// Where the kernel lists devices with verbs.
const CLASS: &str = "/sys/class/infiniband_verbs";
/// Maximum number of addresses of a device that are checked.
const GIDS_MAX: usize = 1024;

/// An open device, one of whose ports has the requested address.
#[derive(Debug)]
pub(super) struct Port {
    functions: &'static Functions,
    pub(super) context: *mut Context,
    pub(super) name: String,
    pub(super) port: u8,
    pub(super) gid_index: u8,
    /// Maximum payload of a packet, bytes.
    pub(super) mtu: u16,
    pub(super) completions_max: u32,
}

/// Whether the kernel has a device with verbs.
pub(super) fn is_any() -> bool {
    fs::read_dir(CLASS).is_ok_and(|mut entries| {
        entries.any(|entry| entry.is_ok_and(|entry| entry.file_name().to_string_lossy().starts_with("uverbs")))
    })
}

/// The GID of an address.
pub(super) fn gid(address: IpAddr) -> Gid {
    Gid(match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    })
}

impl Port {
    /// Opens the device that has `address` for RoCE v2.
    pub(super) fn open(functions: &'static Functions, address: IpAddr) -> Result<Self, OpenError> {
        let mut count = 0;
        // SAFETY: `count` lives as long as the call.
        let list = unsafe { (functions.get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(OpenError::Call("ibv_get_device_list", errno()));
        }
        let mut failed = if count == 0 { Some(OpenError::NoDriver) } else { None };
        let mut found = None;
        let mut seen = String::new();
        for at in 0..count.max(0) as usize {
            // SAFETY: the library has put that many devices into the list.
            let device = unsafe { *list.add(at) };
            // SAFETY: the list is not freed before the end of the loop.
            let (name, context) = unsafe { (name(functions, device), (functions.open_device)(device)) };
            if context.is_null() {
                failed = Some(OpenError::Open(name, errno()));
                continue;
            }
            // Closes the device if it is not the right one.
            let port = Self { functions, context, name, port: 0, gid_index: 0, mtu: 0, completions_max: 0 };
            match port.find(address, &mut seen) {
                Ok(Some(port)) => {
                    found = Some(port);
                    break;
                }
                Ok(None) => {}
                Err(error) => failed = Some(error),
            }
        }
        // SAFETY: the list belongs to the library, and an open device does not need it.
        unsafe { (functions.free_device_list)(list) };
        found.ok_or_else(|| failed.unwrap_or(OpenError::NoAddress(address, seen)))
    }

    fn find(mut self, address: IpAddr, seen: &mut String) -> Result<Option<Self>, OpenError> {
        let mut entries = vec![GidEntry::default(); GIDS_MAX];
        let (at, size) = (entries.as_mut_ptr(), size_of::<GidEntry>());
        // SAFETY: the library writes at most as many entries of that size as there is room for.
        let count = unsafe { (self.functions.query_gid_table)(self.context, at, GIDS_MAX, 0, size) };
        let count = usize::try_from(count).map_err(|_| OpenError::Call("ibv_query_gid_table", -count as i32))?;
        entries.truncate(count);
        let wanted = gid(address);
        let Some(entry) = entries.iter().find(|e| e.gid == wanted && e.gid_type == GID_TYPE_ROCE_V2) else {
            for entry in entries.iter().filter(|entry| entry.gid_type == GID_TYPE_ROCE_V2) {
                let address = Ipv6Addr::from(entry.gid.0).to_canonical();
                let _ = write!(seen, "{}{} {address}", if seen.is_empty() { "" } else { ", " }, self.name);
            }
            return Ok(None);
        };
        self.port = u8::try_from(entry.port_num).map_err(|_| OpenError::Call("ibv_query_gid_table", libc::ERANGE))?;
        self.gid_index =
            u8::try_from(entry.gid_index).map_err(|_| OpenError::Call("ibv_query_gid_table", libc::ERANGE))?;
        let mut port = PortAttr::default();
        // SAFETY: the structure has more room than the library writes for programs of this interface version.
        match unsafe { (self.functions.query_port)(self.context, self.port, &raw mut port) } {
            0 => {}
            _ => return Err(OpenError::Call("ibv_query_port", errno())),
        }
        if port.state != PORT_ACTIVE {
            return Err(OpenError::Down(self.name.clone(), self.port));
        }
        self.mtu = 128u16.checked_shl(port.active_mtu).unwrap_or(0).clamp(256, 4096);
        // SAFETY: numbers, for which 0 is a value.
        let mut attributes: DeviceAttr = unsafe { std::mem::zeroed() };
        // SAFETY: the structure lives as long as the call.
        match unsafe { (self.functions.query_device)(self.context, &raw mut attributes) } {
            0 => {}
            _ => return Err(OpenError::Call("ibv_query_device", errno())),
        }
        self.completions_max = u32::try_from(attributes.max_cqe).unwrap_or(0);
        Ok(Some(self))
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        // SAFETY: it is open, and everything created on it is gone: it is dropped last.
        let _ = unsafe { (self.functions.close_device)(self.context) };
    }
}
