//! Sending: `sendmmsg` directly from the payload's memory.

use std::io;
use std::mem::zeroed;
use std::os::fd::{AsRawFd, BorrowedFd};

use socket2::SockAddr;

use crate::control::{SEND_CONTROL_WORDS, write_control};

/// A message to be sent.
#[derive(Clone, Copy, Debug)]
pub struct Outgoing<'a> {
    /// Destination.
    pub to: &'a SockAddr,
    /// Segment size: the kernel splits the payload into datagrams of this length, bytes; `None`: one datagram.
    pub segment: Option<u16>,
    /// DSCP and ECN: IPv4's type of service, IPv6's traffic class. 0: what the socket has.
    pub traffic_class: u8,
}

/// Headers of one `sendmmsg` call.
#[derive(Default)]
pub struct SendHeaders {
    headers: Vec<libc::mmsghdr>,
    iovecs: Vec<libc::iovec>,
    controls: Vec<[u64; SEND_CONTROL_WORDS]>,
    /// For each header, its range of iovecs.
    ranges: Vec<(usize, usize)>,
}

// SAFETY: the raw pointers in `headers` and `iovecs` are written and used inside one `send` call and never read after
// it.
unsafe impl Send for SendHeaders {}

impl SendHeaders {
    /// Sends messages in one system call, and returns how many of them, from the first on, the kernel accepted.
    /// `messages` yields each message and the pieces of its payload; pieces that are adjacent in memory are merged.
    /// Does not block.
    ///
    /// # Errors
    /// The kernel's error for the first message; `WouldBlock` if the socket's buffer is full.
    pub fn send<'a, Pieces: Iterator<Item = &'a [u8]>>(
        &mut self,
        socket: BorrowedFd<'_>,
        messages: impl Iterator<Item = (Outgoing<'a>, Pieces)>,
    ) -> io::Result<usize> {
        self.headers.clear();
        self.iovecs.clear();
        self.controls.clear();
        self.ranges.clear();
        for (message, pieces) in messages {
            let start = self.iovecs.len();
            for piece in pieces {
                match self.iovecs[start..].last_mut() {
                    Some(last) if last.iov_base as usize + last.iov_len == piece.as_ptr() as usize => {
                        last.iov_len += piece.len();
                    }
                    _ => self
                        .iovecs
                        .push(libc::iovec { iov_base: piece.as_ptr().cast_mut().cast(), iov_len: piece.len() }),
                }
            }
            self.ranges.push((start, self.iovecs.len() - start));
            let mut control = [0; SEND_CONTROL_WORDS];
            let control_len = write_control(&mut control, message.to, message.segment, message.traffic_class);
            self.controls.push(control);
            // SAFETY: a C struct of integers and pointers, for which all zeros is a valid value.
            let mut header: libc::mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_name = message.to.as_ptr().cast_mut().cast();
            header.msg_hdr.msg_namelen = message.to.len();
            header.msg_hdr.msg_controllen = control_len as _;
            self.headers.push(header);
        }
        // Only now, because the vectors no longer move.
        for ((header, control), &(start, len)) in self.headers.iter_mut().zip(&mut self.controls).zip(&self.ranges) {
            header.msg_hdr.msg_iov = self.iovecs[start..].as_mut_ptr();
            header.msg_hdr.msg_iovlen = len as _;
            if header.msg_hdr.msg_controllen > 0 {
                header.msg_hdr.msg_control = control.as_mut_ptr().cast();
            }
        }
        // SAFETY: `headers` are initialised; names and payload pieces are borrowed for 'a, which outlives this call;
        // iovecs and controls are owned by self. The kernel only reads them.
        let sent = unsafe {
            libc::sendmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                self.headers.len() as libc::c_uint,
                (libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) as _,
            )
        };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }
}

impl std::fmt::Debug for SendHeaders {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SendHeaders({} messages)", self.headers.len())
    }
}
