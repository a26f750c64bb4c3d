//! Frames past a guest's IP stack: a packet socket (packet(7)) on its device.

use std::io::{self, IoSlice};
use std::os::fd::AsRawFd as _;

use anyhow::{Context, Result};
use rustix::net::netdevice::name_to_index;
use socket2::{Domain, SockAddr, Socket, Type};

/// Length of the header before each frame that says what is left to the device (`struct virtio_net_hdr`), bytes.
pub const OFFLOAD_LEN: usize = 10;

/// A packet socket that sends on one device. What comes in is not for it.
#[derive(Debug)]
pub struct PacketSocket(Socket);

impl PacketSocket {
    /// Opens one in the namespace that the calling thread is in.
    ///
    /// # Errors
    /// There is no such device, or no privilege.
    pub fn open(device: &str) -> Result<Self> {
        let probe = Socket::new(Domain::IPV4, Type::DGRAM, None).context("opening a socket")?;
        let index = name_to_index(&probe, device).with_context(|| format!("looking for device {device}"))?;
        // Protocol 0: it receives nothing.
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
            return Err(io::Error::last_os_error()).context("asking for offload headers");
        }
        Ok(Self(socket))
    }

    /// Sends a frame; `offload`: a `struct virtio_net_hdr` in the machine's byte order, all zero for none.
    ///
    /// # Errors
    /// The kernel refuses it, for a guest's kernel does not pass everything on; or the device's queue is full.
    pub fn send(&self, offload: &[u8; OFFLOAD_LEN], frame: &[u8]) -> io::Result<()> {
        self.0.send_vectored(&[IoSlice::new(offload), IoSlice::new(frame)]).map(drop)
    }
}

/// The address of a device.
fn address(index: u32) -> Result<SockAddr> {
    // SAFETY: the storage is large enough for a `sockaddr_ll`, which is written in full, with its length.
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
    .context("making an address")?;
    Ok(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_leave_on_the_device_and_no_other_device_is_found() {
        if !rustix::process::geteuid().is_root() {
            return;
        }
        let socket = PacketSocket::open("lo").unwrap();
        let frame = [[0; 12].as_slice(), &[0x88, 0xb5], &[7; 46]].concat();
        socket.send(&[0; OFFLOAD_LEN], &frame).unwrap();
        let unknown_gso_type = [0, 77, 0, 0, 0, 0, 0, 0, 0, 0];
        assert!(socket.send(&unknown_gso_type, &frame).is_err(), "the header is looked at");
        assert!(PacketSocket::open("no-such-device").is_err());
    }
}
