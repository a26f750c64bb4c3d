//! The system calls of the software NIC: `sendmmsg` and `recvmmsg` with segmentation, and socket options.

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, BorrowedFd};

use socket2::SockAddr;

/// Messages of one receive call; each may be several datagrams, merged.
const MESSAGES: usize = 16;
/// Bytes of one: the longest UDP payload.
const MESSAGE_BYTES: usize = 65_536;
/// Room for control messages, as words, which is how the kernel wants them aligned.
const CONTROL_WORDS: usize = 16;

/// Runs of datagrams that are to leave on one socket.
#[derive(Default)]
pub(crate) struct Outbound {
    runs: Vec<Run>,
    headers: Vec<libc::mmsghdr>,
}

/// Datagrams of one length, but for a last shorter one.
struct Run {
    to: SockAddr,
    start: usize,
    len: usize,
    segment: Option<u16>,
    iovec: libc::iovec,
    control: [u64; CONTROL_WORDS],
}

impl Outbound {
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
    }

    /// Adds `len` bytes from `start` on of the arena that [`Outbound::send`] gets, in datagrams of `segment` bytes.
    pub(crate) fn push(&mut self, to: SocketAddr, start: usize, len: usize, segment: Option<u16>) {
        let iovec = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        self.runs.push(Run { to: to.into(), start, len, segment, iovec, control: [0; CONTROL_WORDS] });
    }

    pub(crate) fn len(&self) -> usize {
        self.runs.len()
    }

    /// Sends runs from `from` on; how many the kernel took.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>, arena: &[u8], from: usize) -> io::Result<usize> {
        self.headers.clear();
        for run in self.runs.iter_mut().skip(from) {
            let bytes = &arena[run.start..run.start + run.len];
            run.iovec = libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() };
            // SAFETY: a C struct of integers and pointers, for which all zeros is a valid value.
            let mut header: libc::mmsghdr = unsafe { zeroed() };
            header.msg_hdr.msg_name = run.to.as_ptr().cast_mut().cast();
            header.msg_hdr.msg_namelen = run.to.len();
            header.msg_hdr.msg_iov = &mut run.iovec;
            header.msg_hdr.msg_iovlen = 1;
            if let Some(segment) = run.segment {
                run.control = segment_control(segment);
                header.msg_hdr.msg_control = run.control.as_mut_ptr().cast();
                header.msg_hdr.msg_controllen = SEGMENT_SPACE as _;
            }
            self.headers.push(header);
        }
        // SAFETY: each header points at the name, the iovec and the control words of one run, which self owns and which do
        // not move during the call; the iovec points into `arena`, which is borrowed. The kernel only reads them.
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

impl std::fmt::Debug for Outbound {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Outbound({} runs)", self.runs.len())
    }
}

/// Bytes of a control message with the segment's length: a header, two bytes, and what aligns the next one.
const SEGMENT_SPACE: usize = size_of::<libc::cmsghdr>() + 8;

/// A control message as words: length, level and type, segment.
fn segment_control(segment: u16) -> [u64; CONTROL_WORDS] {
    let mut words = [0u64; CONTROL_WORDS];
    let header = size_of::<libc::cmsghdr>();
    words[0] = (header + size_of::<u16>()) as u64;
    words[1] = two_halves(libc::SOL_UDP as u32, libc::UDP_SEGMENT as u32);
    words[header / 8] = u64::from_ne_bytes({
        let [a, b] = segment.to_ne_bytes();
        [a, b, 0, 0, 0, 0, 0, 0]
    });
    words
}

fn two_halves(first: u32, second: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (first.to_ne_bytes(), second.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// Buffers of received messages.
pub(crate) struct Received {
    bytes: Vec<u8>,
    names: Vec<libc::sockaddr_storage>,
    controls: Vec<[u64; CONTROL_WORDS]>,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    count: usize,
}

impl std::fmt::Debug for Received {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Received({} messages)", self.count)
    }
}

impl Received {
    pub(crate) fn new() -> Self {
        // SAFETY: these are C structs of integers and pointers, for which all zeros is a valid value.
        let (name, iovec, header) = unsafe { (zeroed(), zeroed(), zeroed()) };
        Self {
            bytes: vec![0; MESSAGES * MESSAGE_BYTES],
            names: vec![name; MESSAGES],
            controls: vec![[0; CONTROL_WORDS]; MESSAGES],
            iovecs: vec![iovec; MESSAGES],
            headers: vec![header; MESSAGES],
            count: 0,
        }
    }

    /// Receives what there is; `false`: nothing.
    pub(crate) fn fill(&mut self, socket: BorrowedFd<'_>) -> io::Result<bool> {
        self.count = 0;
        for (at, memory) in self.bytes.chunks_exact_mut(MESSAGE_BYTES).enumerate() {
            self.iovecs[at] = libc::iovec { iov_base: memory.as_mut_ptr().cast(), iov_len: memory.len() };
            let header = &mut self.headers[at].msg_hdr;
            header.msg_name = std::ptr::from_mut(&mut self.names[at]).cast();
            header.msg_namelen = size_of::<libc::sockaddr_storage>() as libc::socklen_t;
            header.msg_iov = &mut self.iovecs[at];
            header.msg_iovlen = 1;
            header.msg_control = self.controls[at].as_mut_ptr().cast();
            header.msg_controllen = size_of::<[u64; CONTROL_WORDS]>() as _;
            header.msg_flags = 0;
        }
        // SAFETY: MESSAGES headers, each with a name, an iovec with its own part of `bytes`, and control words, all of the
        // stated sizes, owned by self and not otherwise used in the call.
        let count = unsafe {
            libc::recvmmsg(
                socket.as_raw_fd(),
                self.headers.as_mut_ptr(),
                MESSAGES as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                std::ptr::null_mut(),
            )
        };
        match usize::try_from(count) {
            Ok(count) => {
                self.count = count;
                Ok(count > 0)
            }
            Err(_) => match io::Error::last_os_error() {
                error if error.kind() == io::ErrorKind::WouldBlock => Ok(false),
                // What an ICMP error about an earlier datagram leaves behind: peers come and go.
                error if error.kind() == io::ErrorKind::ConnectionRefused => Ok(false),
                error if error.kind() == io::ErrorKind::Interrupted => Ok(false),
                error => Err(error),
            },
        }
    }

    /// The datagrams, merged ones taken apart again, with their senders and the time at which the kernel got them
    /// (CLOCK_REALTIME, ns; 0: not known).
    pub(crate) fn datagrams(&self) -> impl Iterator<Item = (SocketAddr, u64, &[u8])> {
        (0..self.count).flat_map(|at| {
            let whole = self.headers[at].msg_hdr.msg_flags & (libc::MSG_TRUNC | libc::MSG_CTRUNC) == 0;
            let len = (self.headers[at].msg_len as usize).min(MESSAGE_BYTES);
            let bytes = &self.bytes[at * MESSAGE_BYTES..][..len];
            let (segment, time_ns) = self.notes(at);
            let segment = segment.unwrap_or(len).max(1);
            let from = self.source(at).filter(|_| whole);
            from.into_iter().flat_map(move |from| bytes.chunks(segment).map(move |datagram| (from, time_ns, datagram)))
        })
    }

    /// What the control messages say: the length of datagrams that were merged, and the time.
    fn notes(&self, at: usize) -> (Option<usize>, u64) {
        let header_words = size_of::<libc::cmsghdr>() / 8;
        let filled = (self.headers[at].msg_hdr.msg_controllen / 8).min(CONTROL_WORDS);
        let mut words = &self.controls[at][..filled];
        let (mut segment, mut time_ns) = (None, 0);
        while words.len() > header_words {
            let len = words[0] as usize;
            let value = &words[header_words..];
            if words[1] == two_halves(libc::SOL_UDP as u32, libc::UDP_GRO as u32) {
                let [a, b, c, d, ..] = value[0].to_ne_bytes();
                segment = usize::try_from(i32::from_ne_bytes([a, b, c, d])).ok().filter(|segment| *segment > 0);
            } else if words[1] == two_halves(libc::SOL_SOCKET as u32, libc::SCM_TIMESTAMPNS as u32)
                && let [seconds, nanos, ..] = value
            {
                time_ns = seconds.wrapping_mul(1_000_000_000).wrapping_add(*nanos);
            }
            // Each begins at a word; a length of nothing ends the list.
            match len.div_ceil(8) {
                0 => break,
                count => words = words.get(count..).unwrap_or_default(),
            }
        }
        (segment, time_ns)
    }

    fn source(&self, at: usize) -> Option<SocketAddr> {
        let (name, len) = (&self.names[at], self.headers[at].msg_hdr.msg_namelen as usize);
        match i32::from(name.ss_family) {
            libc::AF_INET if len >= size_of::<libc::sockaddr_in>() => {
                // SAFETY: sockaddr_storage is larger than sockaddr_in, at least as aligned, initialised, and tagged as one.
                let v4 = unsafe { &*std::ptr::from_ref(name).cast::<libc::sockaddr_in>() };
                let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
                Some(SocketAddr::new(IpAddr::V4(ip), u16::from_be(v4.sin_port)))
            }
            libc::AF_INET6 if len >= size_of::<libc::sockaddr_in6>() => {
                // SAFETY: as above, for sockaddr_in6.
                let v6 = unsafe { &*std::ptr::from_ref(name).cast::<libc::sockaddr_in6>() };
                let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
                Some(SocketAddr::new(IpAddr::V6(ip), u16::from_be(v6.sin6_port)))
            }
            _ => None,
        }
    }
}

/// Has the kernel merge datagrams of one sender and length.
pub(crate) fn merge_datagrams(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SOL_UDP, libc::UDP_GRO, 1)
}

/// Has the kernel say when a datagram came in.
pub(crate) fn timestamps(socket: BorrowedFd<'_>) -> io::Result<()> {
    set_option(socket, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)
}

/// Datagrams are never fragmented: an identification of 0 over IPv4, and no silent loss of half a packet.
pub(crate) fn do_not_fragment(socket: BorrowedFd<'_>, v6: bool) -> io::Result<()> {
    if v6 {
        set_option(socket, libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_PROBE)
    } else {
        set_option(socket, libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_PROBE)
    }
}

/// Asks for that much room in both directions, beyond the administrator's limit if this process may.
pub(crate) fn set_buffers(socket: BorrowedFd<'_>, bytes: usize) {
    for (force, polite) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
        let bytes = bytes as libc::c_int;
        if set_option(socket, libc::SOL_SOCKET, force, bytes).is_err() {
            // What there is by default does as well, at a lower rate.
            let _ = set_option(socket, libc::SOL_SOCKET, polite, bytes);
        }
    }
}

fn set_option(socket: BorrowedFd<'_>, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
    // SAFETY: the value is an int that lives through the call, and its size is given.
    let result = unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            std::ptr::from_ref(&value).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
