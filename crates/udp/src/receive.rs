//! Receiving: `recvmmsg` into buffers that this process owns.

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::control::control_messages;
use crate::notes::Notes;

/// Space for the control messages that a receive socket enables (about 130 bytes), as words, because the kernel
/// requires alignment.
const RECEIVE_CONTROL_WORDS: usize = 32;
/// Bytes of a receive buffer: larger than any UDP payload or coalesced run of datagrams.
pub const RECEIVE_BUFFER_BYTES: usize = 65_536;

/// Buffers of one receive batch. Each message is one datagram, or several that the kernel has merged.
pub struct ReceiveBuffers {
    slab: Vec<u8>,
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<[u64; RECEIVE_CONTROL_WORDS]>,
    headers: Vec<libc::mmsghdr>,
    iovecs: Vec<libc::iovec>,
}

// SAFETY: the raw pointers in `headers` and `iovecs` are written and used inside one `receive` call and never read
// after it.
unsafe impl Send for ReceiveBuffers {}

impl ReceiveBuffers {
    /// Room for `messages` messages of 64 KiB, which use memory once touched.
    #[must_use]
    pub fn new(messages: usize) -> Self {
        // SAFETY: these are C structs of integers and pointers, for which all zeros is a valid value.
        let (name, header, iovec) = unsafe { (zeroed(), zeroed(), zeroed()) };
        Self {
            slab: vec![0; messages * RECEIVE_BUFFER_BYTES],
            names: vec![name; messages],
            controls: vec![[0; RECEIVE_CONTROL_WORDS]; messages],
            headers: vec![header; messages],
            iovecs: vec![iovec; messages],
        }
    }

    /// Maximum number of messages.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.headers.len()
    }

    /// Receives into the buffers from `from` on and returns the number of messages. Does not block.
    ///
    /// # Errors
    /// The kernel's error; `WouldBlock` if nothing has arrived.
    pub fn receive(&mut self, socket: BorrowedFd<'_>, from: usize) -> io::Result<usize> {
        let Some(count) = self.capacity().checked_sub(from).filter(|&n| n > 0) else { return Ok(0) };
        for i in from..self.capacity() {
            let payload = &mut self.slab[i * RECEIVE_BUFFER_BYTES..(i + 1) * RECEIVE_BUFFER_BYTES];
            self.iovecs[i] = libc::iovec { iov_base: payload.as_mut_ptr().cast(), iov_len: payload.len() };
            let header = &mut self.headers[i].msg_hdr;
            header.msg_name = std::ptr::from_mut(&mut self.names[i]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_iov = &mut self.iovecs[i];
            header.msg_iovlen = 1;
            header.msg_control = self.controls[i].as_mut_ptr().cast();
            header.msg_controllen = size_of::<[u64; RECEIVE_CONTROL_WORDS]>() as _;
            header.msg_flags = 0;
        }
        // SAFETY: `headers[from..]` are `count` initialised headers; each points at a name, one iovec with its own part
        // of the slab, and a control buffer, all of the stated sizes, owned by self and not otherwise used in the call.
        let received = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers[from..].as_mut_ptr(),
                count as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        usize::try_from(received).map_err(|_| io::Error::last_os_error())
    }

    /// Payload of message `i`, truncated to the buffer.
    #[must_use]
    #[inline]
    pub fn payload(&self, i: usize) -> &[u8] {
        let len = (self.headers[i].msg_len as usize).min(RECEIVE_BUFFER_BYTES);
        &self.slab[i * RECEIVE_BUFFER_BYTES..][..len]
    }

    /// Bytes `start..start + len` of message `i`'s buffer.
    ///
    /// # Panics
    /// If they end behind the slab.
    #[must_use]
    #[inline]
    pub fn part(&self, i: usize, start: usize, len: usize) -> &[u8] {
        &self.slab[i * RECEIVE_BUFFER_BYTES + start..][..len]
    }

    /// Whether the message or its control messages were truncated.
    #[must_use]
    #[inline]
    pub fn truncated(&self, i: usize) -> bool {
        self.headers[i].msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0
    }

    /// Sender of message `i`.
    #[must_use]
    #[inline]
    pub fn source(&self, i: usize) -> Option<SocketAddr> {
        let (name, len) = (&self.names[i], self.headers[i].msg_hdr.msg_namelen as usize);
        match i32::from(name.ss_family) {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
                // SAFETY: sockaddr_storage is larger than sockaddr_in, at least as aligned, initialised, and tagged as
                // one.
                let v4 = unsafe { &*std::ptr::from_ref(name).cast::<libc::sockaddr_in>() };
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::V4(SocketAddrV4::new(ip, u16::from_be(v4.sin_port))))
            }
            libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
                // SAFETY: as above, for sockaddr_in6.
                let v6 = unsafe { &*std::ptr::from_ref(name).cast::<libc::sockaddr_in6>() };
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some(SocketAddr::V6(SocketAddrV6::new(ip, u16::from_be(v6.sin6_port), 0, v6.sin6_scope_id)))
            }
            _ => None,
        }
    }

    /// The metadata of message `i`. A malformed control message ends the list.
    #[must_use]
    #[inline]
    pub fn notes(&self, i: usize) -> Notes {
        let len = self.headers[i].msg_hdr.msg_controllen;
        let words = &self.controls[i];
        // SAFETY: u64 words are initialised memory; as bytes they have no alignment or validity demands.
        let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), size_of_val(words)) };
        Notes::read(control_messages(&bytes[..len.min(bytes.len())]))
    }
}

impl std::fmt::Debug for ReceiveBuffers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReceiveBuffers({} messages)", self.capacity())
    }
}
