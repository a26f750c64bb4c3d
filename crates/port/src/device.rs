//! The devices that own the underlay addresses.

use std::io;
use std::net::IpAddr;

use futures_util::TryStreamExt;
use rtnetlink::Handle;
use rtnetlink::packet_route::address::AddressAttribute;
use rtnetlink::packet_route::link::LinkAttribute;

/// A network device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its interface index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its MAC address; zeros if it does not have 6 bytes.
    pub mac: [u8; 6],
    /// The largest IP packet, bytes.
    pub mtu: u32,
    /// Maximum number of receive queues; fewer may be in use. At least 1.
    pub queues: u32,
}

/// The devices that own the addresses `local` in this network namespace, each once; or the first address without a
/// device.
///
/// # Errors
/// The kernel does not answer over netlink.
pub fn find(local: &[IpAddr]) -> io::Result<Result<Vec<Device>, IpAddr>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build()?;
    // A separate thread in the same namespace: the caller may be inside a runtime.
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            runtime.block_on(async {
                let (connection, handle, _) = rtnetlink::new_connection()?;
                let connection = tokio::spawn(connection);
                let result = look(&handle, local).await.map_err(io::Error::other);
                connection.abort();
                result
            })
        });
        work.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

async fn look(handle: &Handle, local: &[IpAddr]) -> Result<Result<Vec<Device>, IpAddr>, rtnetlink::Error> {
    let mut owners: Vec<(IpAddr, u32)> = Vec::new();
    let mut addresses = std::pin::pin!(handle.address().get().execute());
    while let Some(message) = addresses.try_next().await? {
        for attribute in &message.attributes {
            if let AddressAttribute::Address(address) | AddressAttribute::Local(address) = attribute {
                owners.push((*address, message.header.index));
            }
        }
    }
    let mut devices: Vec<Device> = Vec::new();
    for address in local {
        let Some((_, index)) = owners.iter().find(|(owned, _)| owned == address) else { return Ok(Err(*address)) };
        if devices.iter().any(|d| d.index == *index) {
            continue;
        }
        let mut links = std::pin::pin!(handle.link().get().match_index(*index).execute());
        let Some(link) = links.try_next().await? else { return Ok(Err(*address)) };
        let mut device = Device { index: *index, name: String::new(), mac: [0; 6], mtu: 0, queues: 1 };
        for attribute in &link.attributes {
            match attribute {
                LinkAttribute::IfName(name) => device.name.clone_from(name),
                LinkAttribute::Address(bytes) => {
                    device.mac = bytes.as_slice().try_into().unwrap_or_default();
                }
                LinkAttribute::Mtu(mtu) => device.mtu = *mtu,
                LinkAttribute::NumRxQueues(queues) => device.queues = (*queues).max(1),
                _ => {}
            }
        }
        devices.push(device);
    }
    Ok(Ok(devices))
}
