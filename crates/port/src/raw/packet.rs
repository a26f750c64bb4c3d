//! Frames over an AF_PACKET socket.

use std::io;
use std::mem::{size_of, zeroed};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::ptr::{from_mut, null_mut};

use super::{RAW_BATCH, RawConfig, RawCounters, RawError, open_error};
use crate::clock::RealtimeOffset;
use crate::udp::set_int;

// linux/if_packet.h.
const PACKET_AUXDATA: libc::c_int = 8;
const PACKET_QDISC_BYPASS: libc::c_int = 20;
const PACKET_IGNORE_OUTGOING: libc::c_int = 23;
const PACKET_STATISTICS: libc::c_int = 6;
const TP_STATUS_CSUMNOTREADY: u32 = 1 << 3;
const TP_STATUS_VLAN_VALID: u32 = 1 << 4;
const TP_STATUS_VLAN_TPID_VALID: u32 = 1 << 6;

/// Length of a VLAN tag, which the kernel removes from a frame and reports separately, and its offset in the frame.
const TAG: usize = 4;
const TAG_AT: usize = 12;
/// Room for one `tpacket_auxdata` and one `timespec`, in words: the kernel requires alignment.
const CONTROL_WORDS: usize = 10;

#[repr(C)]
#[derive(Clone, Copy)]
struct Auxdata {
    status: u32,
    len: u32,
    snaplen: u32,
    mac: u16,
    net: u16,
    tag: u16,
    tag_type: u16,
}

/// A device over AF_PACKET.
pub struct PacketDevice {
    fd: OwnedFd,
    longest: usize,
    /// Bytes of a buffer: room for a tag, and for a frame that is a byte too long.
    buffer: usize,
    rx: Box<[u8]>,
    /// Offset in `rx` of each frame of the batch, its length, and its arrival time.
    arrived: Vec<(usize, usize, u64)>,
    controls: Box<[[u64; CONTROL_WORDS]]>,
    tx: Box<[u8]>,
    /// Lengths of the frames queued for sending.
    waiting: Vec<usize>,
    counters: RawCounters,
}

impl std::fmt::Debug for PacketDevice {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PacketDevice").field("fd", &self.fd).field("counters", &self.counters).finish_non_exhaustive()
    }
}

impl PacketDevice {
    pub(super) fn open(config: &RawConfig, device: u32) -> Result<Self, RawError> {
        let fd = open(config, device).map_err(open_error(&config.device, "opening an AF_PACKET socket"))?;
        let buffer = TAG + config.longest + 1;
        Ok(PacketDevice {
            fd,
            longest: config.longest,
            buffer,
            rx: vec![0; buffer * RAW_BATCH].into(),
            arrived: Vec::with_capacity(RAW_BATCH),
            controls: vec![[0; CONTROL_WORDS]; RAW_BATCH].into(),
            tx: vec![0; config.longest * RAW_BATCH].into(),
            waiting: Vec::with_capacity(RAW_BATCH),
            counters: RawCounters::default(),
        })
    }

    pub(super) fn receive(&mut self) -> io::Result<usize> {
        self.arrived.clear();
        // SAFETY: C structs of integers and pointers, for which all zeros is a valid value.
        let mut headers: [libc::mmsghdr; RAW_BATCH] = unsafe { zeroed() };
        // SAFETY: as above.
        let mut pieces: [libc::iovec; RAW_BATCH] = unsafe { zeroed() };
        let buffers = self.rx.chunks_exact_mut(self.buffer).zip(self.controls.iter_mut());
        for ((header, piece), (buffer, control)) in headers.iter_mut().zip(pieces.iter_mut()).zip(buffers) {
            let frame = &mut buffer[TAG..];
            *piece = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: frame.len() };
            header.msg_hdr.msg_iov = from_mut(piece);
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_control = control.as_mut_ptr().cast();
            header.msg_hdr.msg_controllen = size_of::<[u64; CONTROL_WORDS]>() as _;
        }
        // SAFETY: each header has one piece and one control buffer, all of which live through the call and are borrowed
        // exclusively here.
        let count = unsafe {
            libc::recvmmsg(
                self.fd.as_raw_fd(),
                headers.as_mut_ptr(),
                RAW_BATCH as libc::c_uint,
                libc::MSG_DONTWAIT as _,
                null_mut(),
            )
        };
        let Ok(count) = usize::try_from(count) else {
            let error = io::Error::last_os_error();
            return match error.raw_os_error() {
                // A device that is down may come up again; until then it delivers no frames.
                Some(libc::EAGAIN | libc::EINTR | libc::ENETDOWN) => Ok(0),
                _ => Err(error),
            };
        };
        let clocks = RealtimeOffset::sample();
        for (index, header) in headers.iter().enumerate().take(count) {
            let at = index * self.buffer;
            let len = header.msg_len as usize;
            let (auxdata, time) = notes(&header.msg_hdr);
            if auxdata.is_some_and(|a| a.status & TP_STATUS_CSUMNOTREADY != 0) {
                self.counters.rx_open_checksum_frames += 1;
                continue;
            }
            let tag = auxdata.filter(|a| a.status & TP_STATUS_VLAN_VALID != 0);
            let whole = len + if tag.is_some() { TAG } else { 0 };
            if whole > self.longest {
                self.counters.rx_too_long_frames += 1;
                continue;
            }
            let mut start = at + TAG;
            if let Some(tag) = tag.filter(|_| len >= TAG_AT) {
                let kind = if tag.status & TP_STATUS_VLAN_TPID_VALID != 0 { tag.tag_type } else { 0x8100 };
                self.rx.copy_within(start..start + TAG_AT, at);
                let place = at + TAG_AT;
                self.rx[place..place + 2].copy_from_slice(&kind.to_be_bytes());
                self.rx[place + 2..place + 4].copy_from_slice(&tag.tag.to_be_bytes());
                start = at;
            }
            self.counters.rx_frames += 1;
            self.counters.rx_bytes += whole as u64;
            self.arrived.push((start, whole, clocks.to_monotonic(time)));
        }
        Ok(self.arrived.len())
    }

    pub(super) fn frame(&self, index: usize) -> &[u8] {
        self.arrived.get(index).map_or(&[], |&(start, len, _)| &self.rx[start..start + len])
    }

    pub(super) fn arrived_at(&self, index: usize) -> u64 {
        self.arrived.get(index).map_or(0, |&(.., at)| at)
    }

    pub(super) fn send(&mut self, parts: &[&[u8]]) {
        let len: usize = parts.iter().map(|part| part.len()).sum();
        if len > self.longest {
            self.counters.tx_too_long_frames += 1;
            return;
        }
        if self.waiting.len() == RAW_BATCH {
            self.flush();
        }
        let mut at = self.waiting.len() * self.longest;
        for part in parts {
            self.tx[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        self.waiting.push(len);
    }

    pub(super) fn flush(&mut self) {
        if self.waiting.is_empty() {
            return;
        }
        // SAFETY: C structs of integers and pointers, for which all zeros is a valid value.
        let mut headers: [libc::mmsghdr; RAW_BATCH] = unsafe { zeroed() };
        // SAFETY: as above.
        let mut pieces: [libc::iovec; RAW_BATCH] = unsafe { zeroed() };
        let frames = self.tx.chunks_exact_mut(self.longest).zip(&self.waiting);
        for ((header, piece), (frame, len)) in headers.iter_mut().zip(pieces.iter_mut()).zip(frames) {
            *piece = libc::iovec { iov_base: frame.as_mut_ptr().cast(), iov_len: *len };
            header.msg_hdr.msg_iov = from_mut(piece);
            header.msg_hdr.msg_iovlen = 1;
        }
        let mut done = 0;
        while done < self.waiting.len() {
            let rest = &mut headers[done..self.waiting.len()];
            // SAFETY: each header has one piece, of a frame that lives through the call; the kernel writes the lengths
            // that it sent.
            let sent = unsafe {
                let count = rest.len() as libc::c_uint;
                libc::sendmmsg(self.fd.as_raw_fd(), rest.as_mut_ptr(), count, libc::MSG_DONTWAIT as _)
            };
            match usize::try_from(sent) {
                Ok(sent) if sent > 0 => {
                    self.counters.tx_frames += sent as u64;
                    self.counters.tx_bytes += self.waiting[done..done + sent].iter().map(|l| *l as u64).sum::<u64>();
                    done += sent;
                }
                // Drop the frame that the kernel refused; the others may still be sent.
                _ => {
                    self.counters.tx_dropped_frames += 1;
                    done += 1;
                }
            }
        }
        self.waiting.clear();
    }

    pub(super) fn fds(&self) -> Vec<BorrowedFd<'_>> {
        vec![self.fd.as_fd()]
    }

    pub(super) fn counters(&mut self) -> RawCounters {
        // Packets and drops since the last call.
        let mut statistics = [0u32; 2];
        let mut len = size_of::<[u32; 2]>() as libc::socklen_t;
        // SAFETY: the kernel writes at most `len` bytes to `statistics`.
        let result = unsafe {
            libc::getsockopt(
                self.fd.as_raw_fd(),
                libc::SOL_PACKET,
                PACKET_STATISTICS,
                statistics.as_mut_ptr().cast(),
                &raw mut len,
            )
        };
        if result == 0 {
            self.counters.rx_dropped_frames += u64::from(statistics[1]);
        }
        self.counters
    }
}

fn open(config: &RawConfig, device: u32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers. Protocol 0: nothing is received before it is bound.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call just made this descriptor, and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    set_int(&fd, libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
    set_int(&fd, libc::SOL_PACKET, PACKET_AUXDATA, 1)?;
    set_int(&fd, libc::SOL_SOCKET, libc::SO_TIMESTAMPNS, 1)?;
    // Bypassing the queueing discipline, frames leave at once and in order; a kernel without this option uses the
    // device's.
    let _ = set_int(&fd, libc::SOL_PACKET, PACKET_QDISC_BYPASS, 1);
    // What the kernel accounts for a frame.
    let bytes = i32::try_from(config.frames as usize * (config.longest + 1024)).unwrap_or(i32::MAX);
    let _ = set_int(&fd, libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, bytes);
    let _ = set_int(&fd, libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, bytes);
    // SAFETY: C structs of integers, for which all zeros is a valid value.
    let (mut address, mut membership): (libc::sockaddr_ll, libc::packet_mreq) = unsafe { (zeroed(), zeroed()) };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = device as i32;
    let len = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
    // SAFETY: an address of that length, which lives through the call.
    if unsafe { libc::bind(fd.as_raw_fd(), (&raw const address).cast(), len) } != 0 {
        return Err(io::Error::last_os_error());
    }
    membership.mr_ifindex = device as i32;
    membership.mr_type = libc::PACKET_MR_PROMISC as u16;
    let len = size_of::<libc::packet_mreq>() as libc::socklen_t;
    // SAFETY: a value of that length, which lives through the call.
    let result = unsafe {
        libc::setsockopt(
            fd.as_raw_fd(),
            libc::SOL_PACKET,
            libc::PACKET_ADD_MEMBERSHIP,
            (&raw const membership).cast(),
            len,
        )
    };
    if result == 0 { Ok(fd) } else { Err(io::Error::last_os_error()) }
}

/// The kernel's auxiliary data of a frame, and its arrival time: CLOCK_REALTIME, ns; 0 if unknown.
fn notes(header: &libc::msghdr) -> (Option<Auxdata>, u64) {
    let (mut auxdata, mut time) = (None, 0);
    // SAFETY: the kernel filled the control buffer of this header, which still exists. Reads of a message stay inside
    // it, by its length.
    unsafe {
        let mut next = libc::CMSG_FIRSTHDR(header);
        while let Some(message) = next.as_ref() {
            let has = |bytes: usize| message.cmsg_len >= libc::CMSG_LEN(bytes as u32) as usize;
            match (message.cmsg_level, message.cmsg_type) {
                (libc::SOL_PACKET, PACKET_AUXDATA) if has(size_of::<Auxdata>()) => {
                    auxdata = Some(libc::CMSG_DATA(message).cast::<Auxdata>().read_unaligned());
                }
                (libc::SOL_SOCKET, libc::SCM_TIMESTAMPNS) if has(size_of::<libc::timespec>()) => {
                    let at = libc::CMSG_DATA(message).cast::<libc::timespec>().read_unaligned();
                    time = at.tv_sec as u64 * 1_000_000_000 + at.tv_nsec as u64;
                }
                _ => {}
            }
            next = libc::CMSG_NXTHDR(header, message);
        }
    }
    (auxdata, time)
}
