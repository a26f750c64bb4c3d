//! Network devices, one per address.

use std::ffi::CString;
use std::fs;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::IpAddr;

/// A device, as reported to NCCL.
#[derive(Clone, Debug)]
pub(crate) struct Device {
    pub(crate) address: IpAddr,
    pub(crate) name: CString,
    /// Its path in /sys, if it is a PCI device.
    pub(crate) pci_path: Option<CString>,
    pub(crate) guid: u64,
    pub(crate) speed_mbps: i32,
}

/// Assumed speed of a link that does not report it, Mbit/s.
const SPEED_UNKNOWN: i32 = 10_000;
/// Maximum number of devices.
const DEVICES_MAX: usize = 32;

/// The devices with the addresses in the list, which are separated by commas; without a list, one
/// device for each interface that is up, except loopback.
pub(crate) fn find(list: Option<&str>) -> Result<Vec<Device>, String> {
    let interfaces = if_addrs::get_if_addrs().map_err(|error| format!("cannot list the interfaces: {error}"))?;
    let interfaces: Vec<(String, IpAddr)> =
        interfaces.into_iter().map(|interface| (interface.name.clone(), interface.ip())).collect();
    let chosen = match list {
        Some(list) => named(list, &interfaces)?,
        None => one_of_each(&interfaces),
    };
    Ok(chosen.into_iter().take(DEVICES_MAX).map(|(name, address)| device(&name, address)).collect())
}

fn named(list: &str, interfaces: &[(String, IpAddr)]) -> Result<Vec<(String, IpAddr)>, String> {
    let mut chosen = vec![];
    for text in list.split(',').map(str::trim).filter(|text| !text.is_empty()) {
        let address: IpAddr =
            text.parse().map_err(|_| format!("BIFROST_NCCL_ADDRESSES: {text:?} is not an IPv4 or IPv6 address"))?;
        let found = interfaces.iter().find(|(_, other)| *other == address);
        let none = || format!("BIFROST_NCCL_ADDRESSES: no interface has the address {address}");
        chosen.push(found.cloned().ok_or_else(none)?);
    }
    Ok(chosen)
}

/// The best address of each interface: a globally reachable IPv6 address, or an IPv4 one.
fn one_of_each(interfaces: &[(String, IpAddr)]) -> Vec<(String, IpAddr)> {
    let rank = |address: &IpAddr| match address {
        IpAddr::V6(address) if address.is_loopback() || address.is_unicast_link_local() => None,
        IpAddr::V4(address) if address.is_loopback() || address.is_link_local() => None,
        IpAddr::V6(_) => Some(0),
        IpAddr::V4(_) => Some(1),
    };
    let mut usable: Vec<_> =
        { interfaces.iter() }.filter_map(|(name, address)| Some((name.clone(), rank(address)?, *address))).collect();
    usable.sort();
    usable.dedup_by(|later, first| later.0 == first.0);
    usable.into_iter().map(|(name, _, address)| (name, address)).collect()
}

fn device(name: &str, address: IpAddr) -> Device {
    let sys = format!("/sys/class/net/{name}");
    let speed = fs::read_to_string(format!("{sys}/speed")).ok();
    let speed = speed.and_then(|text| text.trim().parse().ok()).filter(|speed| *speed > 0);
    let path = fs::canonicalize(format!("{sys}/device")).ok();
    let path = path.and_then(|path| CString::new(path.into_os_string().into_encoded_bytes()).ok());
    let mut hasher = DefaultHasher::new();
    address.hash(&mut hasher);
    Device {
        address,
        name: CString::new(name).unwrap_or_default(),
        pci_path: path,
        guid: hasher.finish(),
        speed_mbps: speed.unwrap_or(SPEED_UNKNOWN),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interfaces() -> Vec<(String, IpAddr)> {
        let list = [
            ("lo", "::1"),
            ("lo", "127.0.0.1"),
            ("e0", "10.0.0.1"),
            ("e0", "fe80::1"),
            ("e0", "fd00::1"),
            ("e1", "169.254.0.1"),
            ("e2", "10.0.2.1"),
        ];
        list.map(|(name, address)| (name.to_owned(), address.parse().unwrap())).to_vec()
    }

    #[test]
    fn each_interface_is_a_device_by_its_best_address() {
        let chosen = one_of_each(&interfaces());
        let text: Vec<String> = chosen.iter().map(|(name, address)| format!("{name} {address}")).collect();
        assert_eq!(text, ["e0 fd00::1", "e2 10.0.2.1"]);
    }

    #[test]
    fn a_list_must_contain_existing_addresses() {
        let chosen = named(" ::1, 10.0.2.1,", &interfaces()).unwrap();
        assert_eq!(chosen.iter().map(|(name, _)| &name[..]).collect::<Vec<_>>(), ["lo", "e2"]);
        assert!(named("10.0.0.9", &interfaces()).unwrap_err().contains("no interface has the address 10.0.0.9"));
        assert!(named("eth0", &interfaces()).unwrap_err().contains("not an IPv4 or IPv6 address"));
        assert_eq!(device("lo", "::1".parse().unwrap()).speed_mbps, SPEED_UNKNOWN);
    }
}
