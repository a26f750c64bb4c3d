//! vhost-user messages: a header, a payload, and file descriptors (vhost-user, "Message Specification").
//!
//! Why not the `vhost` crate: see `docs/DECISIONS.md`.

use std::fs::File;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags,
    recvmsg, sendmsg,
};

use super::helper::{Foreign, Helper};

/// Maximum payload, bytes.
const MAX_PAYLOAD: usize = 4096;
/// Maximum descriptors per message: one for each memory region.
const MAX_FILES: usize = 64;
/// Maximum descriptors that the kernel passes at once (`SCM_MAX_FD`). With room for fewer it would close the others
/// itself, on this thread, which may block.
const MAX_PASSED: usize = 253;
const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;

/// A request of the front-end.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) request: u32,
    /// It waits for a reply even to requests that have none, if `REPLY_ACK` was negotiated.
    pub(super) needs_reply: bool,
    pub(super) payload: Vec<u8>,
    pub(super) files: Vec<Foreign>,
}

impl Message {
    /// The one descriptor of the message, if any.
    pub(super) fn file(&mut self) -> Result<Option<Foreign>, &'static str> {
        if self.files.len() > 1 { Err("it has more than one descriptor") } else { Ok(self.files.pop()) }
    }
}

/// Why a connection ends.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("it has closed the socket")]
    Closed,
    #[error("reading or writing failed: {0}")]
    Io(#[from] io::Error),
    #[error("message {request} is invalid: {problem}")]
    Message { request: u32, problem: &'static str },
}

/// Waits for the next message.
pub(super) fn receive(socket: &impl AsFd, helper: &Helper) -> Result<Message, Failure> {
    let mut header = [0; 12];
    let mut files = Vec::new();
    read_exact(socket, &mut header, &mut files, helper)?;
    let word = |at: usize| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
    let (request, flags, size) = (word(0), word(4), word(8) as usize);
    let wrong = |problem| Err(Failure::Message { request, problem });
    if flags & VERSION_MASK != VERSION || flags & REPLY != 0 {
        return wrong("its flags are not those of a request");
    }
    if size > MAX_PAYLOAD {
        return wrong("it is longer than 4096 bytes");
    }
    let mut payload = vec![0; size];
    read_exact(socket, &mut payload, &mut files, helper)?;
    Ok(Message { request, needs_reply: flags & NEED_REPLY != 0, payload, files })
}

/// Sends a reply.
pub(super) fn reply(socket: &impl AsFd, request: u32, payload: &[u8], file: Option<&File>) -> Result<(), Failure> {
    let mut bytes = Vec::with_capacity(12 + payload.len());
    for word in [request, VERSION | REPLY, payload.len() as u32] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend_from_slice(payload);
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = file.map(|f| [f.as_fd()]);
    if let Some(fds) = &fds {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    // Small enough to be sent whole, unless the front-end does not read.
    let sent = sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL).map_err(io::Error::from)?;
    if sent == bytes.len() { Ok(()) } else { Err(Failure::Io(io::ErrorKind::WriteZero.into())) }
}

fn read_exact(
    socket: &impl AsFd,
    mut buffer: &mut [u8],
    files: &mut Vec<Foreign>,
    helper: &Helper,
) -> Result<(), Failure> {
    while !buffer.is_empty() {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_PASSED))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let got = match recvmsg(socket, &mut [IoSliceMut::new(buffer)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(got) => got.bytes,
            Err(rustix::io::Errno::INTR) => continue,
            Err(rustix::io::Errno::CONNRESET) => return Err(Failure::Closed),
            Err(error) => return Err(Failure::Io(error.into())),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(fds) = message {
                files.extend(fds.map(|fd| Foreign::new(fd, helper)));
            }
        }
        if got == 0 {
            return Err(Failure::Closed);
        }
        if files.len() > MAX_FILES {
            return Err(Failure::Message { request: 0, problem: "it has more than 64 descriptors" });
        }
        buffer = &mut buffer[got..];
    }
    Ok(())
}

/// Reads consecutive fields of a payload; all are little-endian, as on all machines that share memory with a guest
/// here.
pub(super) struct Fields<'a>(pub(super) &'a [u8]);

impl Fields<'_> {
    pub(super) fn u16(&mut self) -> Result<u16, &'static str> {
        self.take().map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self) -> Result<u32, &'static str> {
        self.take().map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self) -> Result<u64, &'static str> {
        self.take().map(u64::from_le_bytes)
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N], &'static str> {
        let (first, rest) = self.0.split_first_chunk::<N>().ok_or("it is too short")?;
        self.0 = rest;
        Ok(*first)
    }
}
