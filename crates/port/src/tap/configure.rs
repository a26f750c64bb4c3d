//! Addresses, MTU and routes of a new device, over netlink in the calling thread's namespace.
//!
//! By netlink and not by ioctls: those cannot set IPv6 addresses without duplicate detection, nor on-link routes.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use rtnetlink::packet_route::address::AddressHeaderFlags;
use rtnetlink::{Handle, LinkUnspec, RouteMessageBuilder};

use super::{TapConfig, TapError};

/// Configures the device and brings it up.
pub(crate) fn configure(config: &TapConfig) -> Result<(), TapError> {
    quiet_ipv6(config);
    over_netlink(&config.device, async |handle| apply(config, &handle).await)
}

/// Removes a device, although processes have its queues open.
pub(crate) fn delete(device: &str) -> Result<(), TapError> {
    over_netlink(device, async |handle| {
        let index = index(device).map_err(|e| ("find its index".to_string(), e))?;
        handle.link().del(index).execute().await.map_err(|e| ("remove it".to_string(), reason(e)))
    })
}

fn over_netlink(
    device: &str,
    work: impl AsyncFnOnce(Handle) -> Result<(), (String, io::Error)>,
) -> Result<(), TapError> {
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
    let link = LinkUnspec::new_with_index(index)
        .address(config.mac.to_vec())
        .mtu(u32::from(config.mtu))
        .txqueuelen(config.tx_queue_packets)
        .build();
    let result = handle.link().change(link).execute().await;
    result.map_err(|e| (format!("set MAC address and MTU {}", config.mtu), reason(e)))?;
    let up = handle.link().change(LinkUnspec::new_with_index(index).up().build()).execute().await;
    up.map_err(|e| ("bring it up".to_string(), reason(e)))?;
    for &(address, prefix) in &config.addresses {
        let mut request = handle.address().add(index, address, prefix);
        if address.is_ipv6() {
            // The control plane gives addresses out once; detection would only delay their use by a second.
            request.message_mut().header.flags |= AddressHeaderFlags::Nodad;
        }
        request.execute().await.map_err(|e| (format!("add address {address}/{prefix}"), reason(e)))?;
    }
    if let Some(gateway) = config.default_gateway {
        // On-link: a guest with a /32 reaches its gateway as well.
        let route = match gateway {
            IpAddr::V4(v4) => {
                RouteMessageBuilder::<Ipv4Addr>::new().gateway(v4).output_interface(index).onlink().build()
            }
            IpAddr::V6(v6) => {
                RouteMessageBuilder::<Ipv6Addr>::new().gateway(v6).output_interface(index).onlink().build()
            }
        };
        let result = handle.route().add(route).execute().await;
        result.map_err(|e| (format!("add default route via {gateway}"), reason(e)))?;
    }
    Ok(())
}

/// Keeps the guest's kernel from routing by advertisements, and from IPv6 at all when it has no IPv6 address: such
/// packets would only meet anti-spoofing. Best effort; a kernel without IPv6 has no such files.
fn quiet_ipv6(config: &TapConfig) {
    let directory = std::path::Path::new("/proc/sys/net/ipv6/conf").join(&config.device);
    let _ = std::fs::write(directory.join("accept_ra"), "0");
    if !config.addresses.iter().any(|(address, _)| address.is_ipv6()) {
        let _ = std::fs::write(directory.join("disable_ipv6"), "1");
    }
}

fn index(device: &str) -> io::Result<u32> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    Ok(rustix::net::netdevice::name_to_index(&socket, device)?)
}

fn reason(error: rtnetlink::Error) -> io::Error {
    match error {
        rtnetlink::Error::NetlinkError(message) => message.to_io(),
        other => io::Error::other(other),
    }
}
