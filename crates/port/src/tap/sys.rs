//! The TAP driver's ioctls.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

/// Path of the TAP driver.
pub(crate) const TUN_DEVICE: &str = "/dev/net/tun";

// linux/if_tun.h. Request numbers hold for x86-64 and arm64.
const TUNSETIFF: libc::c_ulong = 0x4004_54ca;
const TUNSETPERSIST: libc::c_ulong = 0x4004_54cb;
const TUNSETOFFLOAD: libc::c_ulong = 0x4004_54d0;
const TUNGETIFF: libc::c_ulong = 0x8004_54d2;
const TUNGETDEVNETNS: libc::c_ulong = 0x54e3;
const TUNSETVNETHDRSZ: libc::c_ulong = 0x4004_54d8;
const TUNSETVNETLE: libc::c_ulong = 0x4004_54dc;
const TUNSETSTEERINGEBPF: libc::c_ulong = 0x8004_54e0;
const TUN_F_CSUM: libc::c_ulong = 0x01;
const TUN_F_TSO4: libc::c_ulong = 0x02;
const TUN_F_TSO6: libc::c_ulong = 0x04;
const TUN_F_TSO_ECN: libc::c_ulong = 0x08;
const TUN_F_USO: libc::c_ulong = 0x20 | 0x40;
/// Since Linux 5.14.
const SO_NETNS_COOKIE: libc::c_int = 71;
/// Fail instead of joining an existing device.
const IFF_TUN_EXCL: libc::c_int = 0x8000;

/// Opens the TAP driver in the calling thread's network namespace.
pub(crate) fn open_tun() -> io::Result<OwnedFd> {
    let file =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC).open(TUN_DEVICE)?;
    Ok(file.into())
}

/// Makes `fd` the first queue of a new TAP device, or a further queue of it. The device disappears with its last queue.
/// `name` has at most 15 bytes.
pub(crate) fn attach(fd: BorrowedFd<'_>, name: &str, first: bool, multi_queue: bool) -> io::Result<()> {
    let mut flags = kind(multi_queue);
    flags |= if first { IFF_TUN_EXCL } else { 0 };
    // SAFETY: a C struct of bytes and integers, for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().take(libc::IFNAMSIZ - 1).zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETIFF as _, &mut request) })
}

/// The flags of our devices.
pub(crate) fn kind(multi_queue: bool) -> libc::c_int {
    libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | if multi_queue { libc::IFF_MULTI_QUEUE } else { 0 }
}

/// Name and flags of the device of which `fd` is an active queue, limited to the flags of [`kind`].
///
/// # Errors
/// `EBADFD`: the queue is detached, or its device is gone. `ENOTTY`: it is not a TAP queue.
pub(crate) fn attached(fd: BorrowedFd<'_>) -> io::Result<(String, libc::c_int)> {
    // SAFETY: a C struct of bytes and integers, for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // SAFETY: TUNGETIFF writes one ifreq.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNGETIFF as _, &mut request) })?;
    let name = request.ifr_name.iter().take_while(|c| **c != 0).map(|c| char::from(*c as u8)).collect();
    // SAFETY: TUNGETIFF has written this field.
    let flags = libc::c_int::from(unsafe { request.ifr_ifru.ifru_flags });
    Ok((name, flags & (kind(true) | libc::IFF_TUN)))
}

/// The network namespace of this queue's device.
pub(crate) fn network_namespace(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    // SAFETY: no argument.
    let namespace = unsafe { libc::ioctl(fd.as_raw_fd(), TUNGETDEVNETNS as _) };
    check(namespace)?;
    // SAFETY: the call just made this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(namespace) })
}

/// Whether the device of this queue persists when its last queue is closed.
pub(crate) fn set_persistent(fd: BorrowedFd<'_>, persistent: bool) -> io::Result<()> {
    // SAFETY: the argument is a number.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETPERSIST as _, libc::c_ulong::from(persistent)) })
}

/// The cookie of the calling thread's network namespace.
pub(crate) fn namespace_cookie() -> io::Result<u64> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    let (mut cookie, mut len) = (0u64, size_of::<u64>() as libc::socklen_t);
    let to = (&raw mut cookie).cast();
    // SAFETY: the kernel writes at most `len` bytes, which `cookie` has.
    check(unsafe { libc::getsockopt(socket.as_raw_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, to, &mut len) })?;
    Ok(cookie)
}

/// Sets the size of the virtio header and little-endian order.
pub(crate) fn set_virtio_header(fd: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let (size, one) = (bytes as libc::c_int, 1 as libc::c_int);
    // SAFETY: both read one int.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETVNETHDRSZ as _, &size) })?;
    // SAFETY: as above.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETVNETLE as _, &one) })
}

/// Lets the guest leave checksums and segmentation to us: TCP always, UDP where the kernel supports it (since Linux
/// 6.2).
pub(crate) fn set_offload(fd: BorrowedFd<'_>) -> io::Result<()> {
    let tcp = TUN_F_CSUM | TUN_F_TSO4 | TUN_F_TSO6 | TUN_F_TSO_ECN;
    // SAFETY: the argument is a number.
    if check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD as _, tcp | TUN_F_USO) }).is_ok() {
        return Ok(());
    }
    // SAFETY: as above.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD as _, tcp) })
}

/// Lets a program choose the queue of each packet from the guest.
pub(crate) fn set_steering(fd: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    let program = program.as_raw_fd();
    // SAFETY: TUNSETSTEERINGEBPF reads one int.
    check(unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETSTEERINGEBPF as _, &program) })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
