//! Addresses, MTU and routes of a new device, over netlink in the calling thread's namespace.
//!
//! Netlink, because ioctls can neither skip duplicate address detection for IPv6 nor set on-link routes.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use futures_util::TryStreamExt as _;
use rtnetlink::packet_core::Nla as _;
use rtnetlink::packet_route::address::AddressHeaderFlags;
use rtnetlink::packet_route::link::{InfoData, InfoKind, InfoTun, LinkAttribute, LinkInfo, LinkMessage};
use rtnetlink::packet_route::route::RouteMessage;
use rtnetlink::{AddressAddRequest, Handle, LinkUnspec, RouteMessageBuilder};

use super::{TapConfig, TapError};

/// Configures the device and brings it up.
pub(crate) fn configure(config: &TapConfig) -> Result<(), TapError> {
    quiet_ipv6(config);
    over_netlink(&config.device, async |handle| apply(config, &handle).await)
}

/// A TAP device as the kernel reports it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    pub(crate) name: String,
    /// Whether it is a multi-queue device.
    pub(crate) multi_queue: bool,
    /// Queues that processes have open; known for multi-queue devices only.
    pub(crate) queues: u32,
}

/// The TAP device with this index; `None` if it does not exist or is not a TAP device.
pub(crate) fn look(index: u32) -> Result<Option<Link>, TapError> {
    over_netlink(&format!("with index {index}"), async |handle| {
        match handle.link().get().match_index(index).execute().try_next().await {
            Ok(message) => Ok(message.and_then(|message| tap(&message))),
            Err(error) => match reason(error) {
                error if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
                error => Err(("ask for it".to_string(), error)),
            },
        }
    })
}

/// Applies the differences between `former` and `config` to a device created for `former`.
pub(crate) fn update(device: &str, former: &TapConfig, config: &TapConfig) -> Result<(), TapError> {
    let has_ipv6 = |config: &TapConfig| config.addresses.iter().any(|(address, _)| address.is_ipv6());
    let link = |config: &TapConfig| (config.mac, config.mtu, config.tx_queue_packets);
    let (links, addresses) = (link(former) != link(config), former.addresses != config.addresses);
    let gateways = former.default_gateway != config.default_gateway;
    if !links && !addresses && !gateways {
        return Ok(());
    }
    if has_ipv6(former) != has_ipv6(config) {
        let file = std::path::Path::new("/proc/sys/net/ipv6/conf").join(device).join("disable_ipv6");
        let _ = std::fs::write(file, if has_ipv6(config) { "0" } else { "1" });
    }
    over_netlink(device, async |handle| {
        let index = index(device).map_err(|e| ("find its index".to_string(), e))?;
        if links {
            set_link(config, &handle, index).await?;
        }
        if gateways && let Some(gateway) = former.default_gateway {
            let deleted = handle.route().del(default_route(gateway, index)).execute().await;
            tolerate(deleted, &[libc::ESRCH]).map_err(|e| (format!("remove default route via {gateway}"), e))?;
        }
        if addresses {
            // Removals first: with the first address of a subnet the kernel may remove the others.
            for (address, prefix) in former.addresses.iter().filter(|address| !config.addresses.contains(address)) {
                let message = add_address(&handle, index, *address, *prefix).message_mut().clone();
                let deleted = handle.address().del(message).execute().await;
                let deleted = tolerate(deleted, &[libc::EADDRNOTAVAIL]);
                deleted.map_err(|e| (format!("remove address {address}/{prefix}"), e))?;
            }
            for &(address, prefix) in &config.addresses {
                let added = add_address(&handle, index, address, prefix).execute().await;
                tolerate(added, &[libc::EEXIST]).map_err(|e| (format!("add address {address}/{prefix}"), e))?;
            }
        }
        // Routes may have been removed with addresses. A route with which the guest replaced this one stays.
        if let Some(gateway) = config.default_gateway {
            let added = handle.route().add(default_route(gateway, index)).execute().await;
            tolerate(added, &[libc::EEXIST]).map_err(|e| (format!("add default route via {gateway}"), e))?;
        }
        Ok(())
    })
}

/// Removes a device, even if processes have its queues open.
pub(crate) fn delete(device: &str) -> Result<(), TapError> {
    over_netlink(device, async |handle| {
        let index = index(device).map_err(|e| ("find its index".to_string(), e))?;
        handle.link().del(index).execute().await.map_err(|e| ("remove it".to_string(), reason(e)))
    })
}

fn over_netlink<T>(
    device: &str,
    work: impl AsyncFnOnce(Handle) -> Result<T, (String, io::Error)>,
) -> Result<T, TapError> {
    let failed =
        |step: &str, source: io::Error| TapError::Configure { device: device.into(), step: step.into(), source };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_io()
        .build()
        .map_err(|e| failed("open a netlink socket", e))?;
    runtime.block_on(async {
        let (connection, handle, _) = rtnetlink::new_connection().map_err(|e| failed("open a netlink socket", e))?;
        let connection = tokio::spawn(connection);
        let result = work(handle).await.map_err(|(step, source)| failed(&step, source));
        connection.abort();
        result
    })
}

async fn apply(config: &TapConfig, handle: &Handle) -> Result<(), (String, io::Error)> {
    let index = index(&config.device).map_err(|e| ("find its index".to_string(), e))?;
    set_link(config, handle, index).await?;
    let up = handle.link().change(LinkUnspec::new_with_index(index).up().build()).execute().await;
    up.map_err(|e| ("bring it up".to_string(), reason(e)))?;
    for &(address, prefix) in &config.addresses {
        let added = add_address(handle, index, address, prefix).execute().await;
        added.map_err(|e| (format!("add address {address}/{prefix}"), reason(e)))?;
    }
    if let Some(gateway) = config.default_gateway {
        let result = handle.route().add(default_route(gateway, index)).execute().await;
        result.map_err(|e| (format!("add default route via {gateway}"), reason(e)))?;
    }
    Ok(())
}

async fn set_link(config: &TapConfig, handle: &Handle, index: u32) -> Result<(), (String, io::Error)> {
    let link = LinkUnspec::new_with_index(index)
        .address(config.mac.to_vec())
        .mtu(u32::from(config.mtu))
        .txqueuelen(config.tx_queue_packets)
        .build();
    let result = handle.link().change(link).execute().await;
    result.map_err(|e| (format!("set MAC address and MTU {}", config.mtu), reason(e)))
}

fn add_address(handle: &Handle, index: u32, address: IpAddr, prefix: u8) -> AddressAddRequest {
    let mut request = handle.address().add(index, address, prefix);
    if address.is_ipv6() {
        // The control plane assigns addresses uniquely; detection would only delay their use by a second.
        request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
    }
    request
}

/// On-link, so that a guest with a /32 reaches its gateway, too.
fn default_route(gateway: IpAddr, index: u32) -> RouteMessage {
    match gateway {
        IpAddr::V4(v4) => RouteMessageBuilder::<Ipv4Addr>::new().gateway(v4).output_interface(index).onlink().build(),
        IpAddr::V6(v6) => RouteMessageBuilder::<Ipv6Addr>::new().gateway(v6).output_interface(index).onlink().build(),
    }
}

/// The kernel's attributes of a TAP device; `None` for other devices.
fn tap(message: &LinkMessage) -> Option<Link> {
    // linux/if_link.h, linux/if_tun.h
    const IFLA_TUN_TYPE: u16 = 3;
    const IFLA_TUN_MULTI_QUEUE: u16 = 7;
    const IFLA_TUN_NUM_QUEUES: u16 = 8;
    const IFLA_TUN_NUM_DISABLED_QUEUES: u16 = 9;
    let name = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::IfName(name) => Some(name.clone()),
        _ => None,
    })?;
    let info = message.attributes.iter().find_map(|attribute| match attribute {
        LinkAttribute::LinkInfo(info) => Some(info),
        _ => None,
    })?;
    if !info.iter().any(|info| matches!(info, LinkInfo::Kind(InfoKind::Tun))) {
        return None;
    }
    let data = info.iter().find_map(|info| match info {
        LinkInfo::Data(InfoData::Tun(data)) => Some(data),
        _ => None,
    })?;
    // One or four bytes of them; queue counts are below 256.
    let value = |kind: u16| {
        data.iter().find(|info| info.kind() == kind).map_or(0, |info: &InfoTun| {
            let mut bytes = vec![0; info.value_len()];
            info.emit_value(&mut bytes);
            let mut number = [0; 4];
            number.iter_mut().zip(&bytes).for_each(|(to, from)| *to = *from);
            u32::from_le_bytes(number)
        })
    };
    (value(IFLA_TUN_TYPE) == libc::IFF_TAP as u32).then(|| Link {
        name,
        multi_queue: value(IFLA_TUN_MULTI_QUEUE) != 0,
        queues: value(IFLA_TUN_NUM_QUEUES) + value(IFLA_TUN_NUM_DISABLED_QUEUES),
    })
}

/// Treats these errors as success: the change was already made.
fn tolerate(result: Result<(), rtnetlink::Error>, errors: &[libc::c_int]) -> Result<(), io::Error> {
    match result.map_err(reason) {
        Err(error) if error.raw_os_error().is_some_and(|number| errors.contains(&number)) => Ok(()),
        result => result,
    }
}

/// Keeps the guest's kernel from accepting router advertisements, and from using IPv6 at all without an IPv6 address:
/// anti-spoofing would drop such packets. Best effort; a kernel without IPv6 has no such files.
fn quiet_ipv6(config: &TapConfig) {
    let directory = std::path::Path::new("/proc/sys/net/ipv6/conf").join(&config.device);
    let _ = std::fs::write(directory.join("accept_ra"), "0");
    if !config.addresses.iter().any(|(address, _)| address.is_ipv6()) {
        let _ = std::fs::write(directory.join("disable_ipv6"), "1");
    }
}

pub(crate) fn index(device: &str) -> io::Result<u32> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    Ok(rustix::net::netdevice::name_to_index(&socket, device)?)
}

fn reason(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}
