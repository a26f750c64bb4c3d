//! Sends frames below a guest's IP stack: a packet socket (packet(7)) on its device.

use std::io::{self, IoSlice};
use std::os::fd::AsRawFd as _;

use anyhow::{Context, Result};
use rustix::net::netdevice::name_to_index;
use socket2::{Domain, SockAddr, Socket, Type};

/// Length of the offload header before each frame (`struct virtio_net_hdr`), bytes.
pub const OFFLOAD_LEN: usize = 10;

/// A packet socket that sends on one device. It receives nothing.
#[derive(Debug)]
pub struct PacketSocket(Socket);

impl PacketSocket {
    /// Opens a socket in the namespace of the calling thread.
    ///
    /// # Errors
    /// The device does not exist, or the privilege is missing.
    pub fn open(device: &str) -> Result<Self> {
        let probe = Socket::new(Domain::IPV4, Type::DGRAM, None).context("opening a socket")?;
        let index = name_to_index(&probe, device).with_context(|| format!("looking for device {device}"))?;
        // Protocol 0: the socket receives nothing.
        let socket = Socket::new(Domain::PACKET, Type::RAW, None).context("opening a packet socket")?;
        socket.bind(&address(index)?).with_context(|| format!("binding a packet socket to {device}"))?;
        let on: libc::c_int = 1;
        // SAFETY: the kernel reads the four bytes of `on`, which outlives the call.
        let result = unsafe {
            libc::setsockopt(
                socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_VNET_HDR,
                (&raw const on).cast(),
                size_of::<libc::c_int>() as libc::socklen_t,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error()).context("enabling offload headers");
        }
        Ok(Self(socket))
    }

    /// Sends a frame. `offload`: a `struct virtio_net_hdr` in native byte order, all zero for no offload.
    ///
    /// # Errors
    /// The kernel refuses the frame, or the device's queue is full.
    pub fn send(&self, offload: &[u8; OFFLOAD_LEN], frame: &[u8]) -> io::Result<()> {
        self.0.send_vectored(&[IoSlice::new(offload), IoSlice::new(frame)]).map(drop)
    }
}

/// The address of a device.
fn address(index: u32) -> Result<SockAddr> {
    // SAFETY: the storage is large enough for a `sockaddr_ll`, which is written completely, and its length is set.
    let ((), address) = unsafe {
        SockAddr::try_init(|storage, length| {
            storage.cast::<libc::sockaddr_ll>().write(libc::sockaddr_ll {
                sll_family: libc::AF_PACKET as u16,
                sll_protocol: 0,
                sll_ifindex: index as i32,
                sll_hatype: 0,
                sll_pkttype: 0,
                sll_halen: 6,
                sll_addr: [0; 8],
            });
            *length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            Ok(())
        })
    }
    .context("building an address")?;
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_sent_on_the_device_and_unknown_devices_are_refused() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let socket = PacketSocket::open("lo").unwrap();
        let frame = [[0; 12].as_slice(), &[0x88, 0xb5], &[7; 46]].concat();
        socket.send(&[0; OFFLOAD_LEN], &frame).unwrap();
        let unknown_gso_type = [0, 77, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(socket.send(&unknown_gso_type, &frame).is_err(), "the header is validated");
        assert!(PacketSocket::open("no-such-device").is_err());
    }
}
