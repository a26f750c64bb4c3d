//! The two system calls of the underlay, `recvmmsg` and `sendmmsg`, behind buffers that own what the kernel is given.

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd};

use socket2::SockAddr;

/// Room for the control messages that a receive socket asks for (about 130 bytes), as words: the kernel wants them aligned.
const RECEIVE_CONTROL_WORDS: usize = 32;
/// Room for the ECN and the segment size of a message.
const SEND_CONTROL_WORDS: usize = 8;
/// Bytes of a receive buffer: more than a UDP payload, or a coalesced run of them, can be.
pub(crate) const RECEIVE_BUFFER_BYTES: usize = 65_536;

/// Buffers of one receive batch.
pub(crate) struct ReceiveBuffers {
    slab: Vec<u8>,
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<[u64; RECEIVE_CONTROL_WORDS]>,
    headers: Vec<libc::mmsghdr>,
    iovecs: Vec<libc::iovec>,
}

// SAFETY: the raw pointers in `headers` and `iovecs` are written and used inside one `receive` call and never read after it.
unsafe impl Send for ReceiveBuffers {}

impl ReceiveBuffers {
    pub(crate) fn new(messages: usize) -> Self {
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

    /// Messages that fit.
    pub(crate) fn capacity(&self) -> usize {
        self.headers.len()
    }

    /// Receives into the buffers from `from` on; returns how many messages came.
    pub(crate) fn receive(&mut self, socket: BorrowedFd<'_>, from: usize) -> io::Result<usize> {
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

    /// Payload of message `i`, cut to the buffer.
    pub(crate) fn payload(&self, i: usize) -> &[u8] {
        let len = (self.headers[i].msg_len as usize).min(RECEIVE_BUFFER_BYTES);
        &self.slab[i * RECEIVE_BUFFER_BYTES..][..len]
    }

    /// Bytes `start..start + len` of message `i`'s buffer.
    pub(crate) fn part(&self, i: usize, start: usize, len: usize) -> &[u8] {
        &self.slab[i * RECEIVE_BUFFER_BYTES + start..][..len]
    }

    /// Whether the message or its control messages did not fit.
    pub(crate) fn truncated(&self, i: usize) -> bool {
        self.headers[i].msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) != 0
    }

    /// Who sent message `i`.
    pub(crate) fn source(&self, i: usize) -> Option<SocketAddr> {
        let (name, len) = (&self.names[i], self.headers[i].msg_hdr.msg_namelen as usize);
        match i32::from(name.ss_family) {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
                // SAFETY: sockaddr_storage is larger than sockaddr_in, at least as aligned, initialised, and tagged as one.
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

    /// The control messages of message `i`: level, type, value. Malformed ones end the list.
    pub(crate) fn control(&self, i: usize) -> impl Iterator<Item = (i32, i32, &[u8])> {
        let len = self.headers[i].msg_hdr.msg_controllen;
        let words = &self.controls[i];
        // SAFETY: u64 words are initialised memory; as bytes they have no alignment or validity demands.
        let bytes = unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), size_of_val(words)) };
        control_messages(&bytes[..len.min(bytes.len())])
    }
}

/// A message to be sent.
pub(crate) struct Outgoing<'a> {
    pub(crate) to: &'a SockAddr,
    /// Cut into datagrams of this many bytes; `None`: one datagram.
    pub(crate) segment: Option<u16>,
    /// ECN codepoint.
    pub(crate) ecn: u8,
}

/// Headers of one `sendmmsg` call.
#[derive(Default)]
pub(crate) struct SendHeaders {
    headers: Vec<libc::mmsghdr>,
    iovecs: Vec<libc::iovec>,
    controls: Vec<[u64; SEND_CONTROL_WORDS]>,
    /// For each header, its range of iovecs.
    ranges: Vec<(usize, usize)>,
}

// SAFETY: the raw pointers in `headers` and `iovecs` are written and used inside one `send` call and never read after it.
unsafe impl Send for SendHeaders {}

impl SendHeaders {
    /// Sends messages in one system call, and returns how many the kernel took from the front. `messages` yields each
    /// message and the pieces of its payload; pieces that follow each other in memory become one.
    pub(crate) fn send<'a, Pieces: Iterator<Item = &'a [u8]>>(
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
            let control_len = write_control(&mut control, &message);
            self.controls.push(control);
            // SAFETY: a C struct of integers and pointers, for which all zeros is a valid value.
            let mut header: libc::mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_name = message.to.as_ptr().cast_mut().cast();
            header.msg_hdr.msg_namelen = message.to.len();
            header.msg_hdr.msg_controllen = control_len as _;
            self.headers.push(header);
        }
        // Only now, as the vectors no longer move.
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

/// Iterates over control messages as the kernel lays them out: length (a word, header included), level, type, value, padding.
fn control_messages(mut rest: &[u8]) -> impl Iterator<Item = (i32, i32, &[u8])> {
    const HEADER: usize = size_of::<libc::cmsghdr>();
    std::iter::from_fn(move || {
        let len = usize::from_ne_bytes(*rest.first_chunk()?);
        let header = rest.get(..HEADER)?;
        let level = i32::from_ne_bytes(*header[HEADER - 8..].first_chunk()?);
        let kind = i32::from_ne_bytes(*header[HEADER - 4..].first_chunk()?);
        let value = rest.get(HEADER..len)?;
        rest = rest.get(len.next_multiple_of(size_of::<usize>())..).unwrap_or(&[]);
        Some((level, kind, value))
    })
}

/// Writes the control messages of `message`; returns their length in bytes.
fn write_control(words: &mut [u64; SEND_CONTROL_WORDS], message: &Outgoing<'_>) -> usize {
    let mut at = 0;
    let mut put = |level: i32, kind: i32, value: u64, len: u64| {
        words[at] = size_of::<libc::cmsghdr>() as u64 + len;
        words[at + 1] = pair(level, kind);
        words[at + 2] = value;
        at += 3;
    };
    if message.ecn != 0 {
        let (level, kind) = if message.to.is_ipv4() {
            (libc::IPPROTO_IP, libc::IP_TOS)
        } else {
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)
        };
        put(level, kind, pair(i32::from(message.ecn & 3), 0), 4);
    }
    if let Some(segment) = message.segment {
        let [a, b] = segment.to_ne_bytes();
        put(libc::SOL_UDP, libc::UDP_SEGMENT, u64::from_ne_bytes([a, b, 0, 0, 0, 0, 0, 0]), 2);
    }
    at * size_of::<u64>()
}

/// Two ints next to each other in memory.
fn pair(first: i32, second: i32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

// The control messages above are laid out for machines whose words are 64 bits.
const _: () = assert!(size_of::<usize>() == 8 && size_of::<libc::cmsghdr>() == 16);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_messages_survive_truncation() {
        let to = SockAddr::from(SocketAddr::from(([127, 0, 0, 1], 1)));
        let mut words = [0; SEND_CONTROL_WORDS];
        let len = write_control(&mut words, &Outgoing { to: &to, segment: Some(1400), ecn: 1 });
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_ne_bytes()).collect();
        let all: Vec<_> = control_messages(&bytes[..len]).collect();
        assert_eq!(all.len(), 2);
        assert_eq!(all[0], (libc::IPPROTO_IP, libc::IP_TOS, &1i32.to_ne_bytes()[..]));
        assert_eq!(all[1], (libc::SOL_UDP, libc::UDP_SEGMENT, &1400u16.to_ne_bytes()[..]));
        for cut in 0..len {
            assert!(control_messages(&bytes[..cut]).count() <= 2);
        }
        assert_eq!(control_messages(&[0xff; 64]).count(), 0, "absurd length");
        assert_eq!(control_messages(&[0; 64]).count(), 0, "length below the header");
    }
}
