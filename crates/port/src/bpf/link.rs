//! Links, which attach XDP programs to devices.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use super::sys::{call, descriptor};

// linux/bpf.h.
const BPF_OBJ_GET_INFO_BY_FD: libc::c_long = 15;
const BPF_LINK_CREATE: libc::c_long = 28;
const BPF_LINK_UPDATE: libc::c_long = 29;
const BPF_LINK_DETACH: libc::c_long = 34;
const BPF_XDP: u32 = 37;
const BPF_LINK_TYPE_XDP: u32 = 6;
// linux/if_link.h.
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;

/// Where an XDP program runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum XdpMode {
    /// In the driver.
    Native,
    /// Generic: after the driver, on any device.
    Generic,
}

/// The part of `union bpf_attr` that attaches a program to a device.
#[repr(C)]
struct CreateLink {
    program: u32,
    device: u32,
    attach_type: u32,
    flags: u32,
}

/// The part that exchanges a link's program.
#[repr(C)]
struct UpdateLink {
    link: u32,
    program: u32,
    flags: u32,
    former_program: u32,
}

/// The part that asks for an object's description.
#[repr(C)]
struct GetInfo {
    object: u32,
    info_bytes: u32,
    info: u64,
}

/// The beginning of `struct bpf_link_info`, for a link of an XDP program.
#[repr(C)]
#[derive(Default)]
struct LinkInfo {
    link_type: u32,
    id: u32,
    program: u32,
    padding: u32,
    device: u32,
    padding_end: u32,
}

/// An XDP program attached to a device until this is dropped or the process ends, even if it is killed. A link that
/// several processes hold stays attached until one of them owns it and drops it, or all have ended.
#[derive(Debug)]
pub(crate) struct XdpLink {
    fd: OwnedFd,
    is_owner: AtomicBool,
}

/// Attaches an XDP program to a device, in the first of `modes` that the device supports. Linux 5.9 or later.
///
/// # Errors
/// The error of the last of `modes`.
pub(crate) fn attach_xdp(program: BorrowedFd<'_>, device: u32, modes: &[XdpMode]) -> io::Result<(XdpLink, XdpMode)> {
    let mut result = Err(io::ErrorKind::InvalidInput.into());
    for &mode in modes {
        result = attach_in(program, device, mode).map(|link| (link, mode));
        if result.is_ok() {
            break;
        }
    }
    result
}

fn attach_in(program: BorrowedFd<'_>, device: u32, mode: XdpMode) -> io::Result<XdpLink> {
    let flags = match mode {
        XdpMode::Native => XDP_FLAGS_DRV_MODE,
        XdpMode::Generic => XDP_FLAGS_SKB_MODE,
    };
    let attributes = CreateLink { program: program.as_raw_fd() as u32, device, attach_type: BPF_XDP, flags };
    // SAFETY: these attributes have no pointers.
    let fd = unsafe { descriptor(BPF_LINK_CREATE, &attributes) }?;
    Ok(XdpLink { fd, is_owner: AtomicBool::new(true) })
}

impl XdpLink {
    /// Takes a link of another process, which still owns it. Until [`own`](Self::own), dropping this does not detach
    /// the program.
    ///
    /// # Errors
    /// It is not a link of an XDP program on interface index `device`.
    pub(crate) fn adopt(fd: OwnedFd, device: u32) -> io::Result<XdpLink> {
        let mut info = LinkInfo::default();
        let attributes = GetInfo {
            object: fd.as_raw_fd() as u32,
            info_bytes: size_of::<LinkInfo>() as u32,
            info: &raw mut info as u64,
        };
        // SAFETY: the kernel writes at most `info_bytes` bytes to `info`, which lives through the call.
        unsafe { call(BPF_OBJ_GET_INFO_BY_FD, &attributes) }?;
        if (info.link_type, info.device) != (BPF_LINK_TYPE_XDP, device) {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a link of an XDP program on this device"));
        }
        Ok(XdpLink { fd, is_owner: AtomicBool::new(false) })
    }

    /// A duplicate of its descriptor, for [`adopt`](Self::adopt) in another process.
    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.fd.try_clone()
    }

    /// From now on, dropping this detaches the program.
    pub(crate) fn own(&self) {
        self.is_owner.store(true, Ordering::Relaxed);
    }

    /// Leaves the link to another process that holds it.
    pub(crate) fn leave(&self) {
        self.is_owner.store(false, Ordering::Relaxed);
    }

    /// Exchanges the program. Each frame meets either the former or the new one.
    pub(crate) fn replace(&self, program: BorrowedFd<'_>) -> io::Result<()> {
        let attributes = UpdateLink {
            link: self.fd.as_raw_fd() as u32,
            program: program.as_raw_fd() as u32,
            flags: 0,
            former_program: 0,
        };
        // SAFETY: these attributes have no pointers.
        unsafe { call(BPF_LINK_UPDATE, &attributes) }.map(drop)
    }
}

impl Drop for XdpLink {
    fn drop(&mut self) {
        if !*self.is_owner.get_mut() {
            return;
        }
        // Closing the descriptor is not enough: a child that another thread has forked and that has not called `execve`
        // yet holds a copy, which keeps the program attached. Detaching fails only if the device is gone, and the link
        // with it.
        let link = self.fd.as_raw_fd() as u32;
        // SAFETY: the attributes are the link's descriptor, without pointers.
        let _ = unsafe { call(BPF_LINK_DETACH, &link) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::bpf::{Assembler, ProgramKind, Register, create_socket_map, load_program, xdp};

    /// Device 1 of every network namespace is its loopback device.
    const LOOPBACK: u32 = 1;

    /// Runs work in a network namespace of its own.
    fn apart(work: impl FnOnce() + Send + 'static) {
        let inside = || {
            // SAFETY: no pointers; this thread alone changes its network namespace.
            assert_eq!(unsafe { libc::unshare(libc::CLONE_NEWNET) }, 0, "needs root");
            work();
        };
        std::thread::spawn(inside).join().expect("the test passed");
    }

    fn program() -> OwnedFd {
        let mut assembler = Assembler::default();
        assembler.set(Register(0), xdp::PASS);
        assembler.exit();
        load_program(ProgramKind::Xdp, &assembler.finish(), "test").expect("the verifier accepts it")
    }

    fn attach(program: &OwnedFd) -> io::Result<XdpLink> {
        attach_in(program.as_fd(), LOOPBACK, XdpMode::Generic)
    }

    fn is_attached() -> bool {
        attach(&program()).is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
    }

    #[test]
    fn a_program_is_detached_despite_a_duplicate_of_its_link() {
        apart(|| {
            let link = attach(&program()).expect("attached");
            assert!(is_attached());
            let _copy = link.duplicate().expect("a copy");
            drop(link);
            assert!(!is_attached());
        });
    }

    #[test]
    fn a_link_that_is_handed_over_stays_attached_whoever_ends_first() {
        apart(|| {
            let link = attach(&program()).expect("attached");
            let adopt = |link: &XdpLink| XdpLink::adopt(link.duplicate().expect("a copy"), LOOPBACK).expect("a link");
            drop(adopt(&link));
            assert!(is_attached(), "the other process has ended before it owned the link");
            let next = adopt(&link);
            next.own();
            link.leave();
            drop(link);
            assert!(is_attached(), "it belongs to the other process");
            next.replace(program().as_fd()).expect("another program");
            assert!(is_attached());
            drop(next);
            assert!(!is_attached());
        });
    }

    #[test]
    fn other_descriptors_are_not_links() {
        apart(|| {
            let link = attach(&program()).expect("attached");
            assert!(XdpLink::adopt(link.duplicate().expect("a copy"), 2).is_err(), "another device");
            assert!(XdpLink::adopt(program(), LOOPBACK).is_err());
            assert!(XdpLink::adopt(create_socket_map(1).expect("a map"), LOOPBACK).is_err());
            assert!(XdpLink::adopt(std::fs::File::open("/dev/null").expect("it exists").into(), LOOPBACK).is_err());
            assert!(is_attached());
        });
    }
}
